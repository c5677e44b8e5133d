import { describe, expect, it } from "vitest";
import { readAddress, readBreak, writeAddress, writeBreak } from "../src/live/address";
import { rowsOf } from "../src/live/api";
import { breakWords, percent, quoted } from "../src/live/figures";

describe("the address of the live page", () => {
  it("says the whole state and is read back", () => {
    const hash = "#lesson?step=3&model=tower96_no_residual&text=The+bank&word=1&break=scale:3,4:mlp:0.25&other=A+desk&otherword=0&floor=12&theme=dark&tower.view=meaning";
    const state = readAddress(hash);
    expect(state.broken).toEqual({ kind: "scale", blocks: [3, 4], part: "mlp", factor: 0.25 });
    expect([state.view, state.step, state.word, state.cursor.floor]).toEqual(["lesson", 3, 1, 12]);
    expect(readAddress(writeAddress(state, "tower96"))).toEqual(state);
    expect(writeAddress(state, "tower96")).toBe(hash);
  });

  it("takes what is written wrongly as not said", () => {
    const state = readAddress("#<script>?break=burn:1:block&word=-4&model=../../etc&floor=x");
    expect([state.view, state.broken, state.word, state.cursor.floor]).toEqual(["explore", null, null, null]);
    expect(readBreak("skip:1:block:2:3")).toBeNull();
    expect(readAddress(`#explore?text=${"a".repeat(5000)}`).text).toHaveLength(2000);
  });

  it("takes names of models, and nothing else", () => {
    expect(readAddress("#explore?model=org/name-1.5").model).toBe("org/name-1.5");
    expect(readAddress("#explore?model=a%20b").model).toBe("");
  });

  it("writes a break as it reads it", () => {
    for (const text of ["skip:37:block", "noise:0:attn:1", "scale:5:block:-2"]) expect(writeBreak(readBreak(text)!)).toBe(text);
  });
});

describe("words of the live page", () => {
  it("shows tokens as text", () => {
    expect(quoted(" the")).toBe("“the”");
    expect(quoted("\n")).toBe("“⏎”");
    expect(quoted("<b>\u202e")).toBe("“<b><U+202E>”");
  });

  it("says a break and a share", () => {
    expect(breakWords({ kind: "skip", blocks: [37], part: "block" })).toBe("floor 37 taken out");
    expect(breakWords({ kind: "scale", blocks: [1, 2], part: "mlp", factor: 0.5 })).toBe("feed-forward of floors 1, 2 turned to 0.5 times its size");
    expect([percent(0.5), percent(0.014), percent(0.0001), percent(0), percent(null)]).toEqual(["50 %", "1.4 %", "< 0.1 %", "0 %", "–"]);
  });

  it("reads a grid row by row, NaN as nothing", () => {
    expect(rowsOf(new Float32Array([1, 2, NaN, 4]), [2, 2])).toEqual([[1, 2], [null, 4]]);
  });
});
