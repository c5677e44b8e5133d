import { describe, expect, it } from "vitest";
import { readFragment, START, writeFragment, type State } from "../src/fragment";

describe("the fragment", () => {
  const states: State[] = [
    { ...START },
    { ...START, figure: "growth" },
    { ...START, floor: 37, pinned: true },
    { ...START, floor: -1, pinned: true, figure: "signals", theme: "dark" },
    { floor: 12, pinned: true, token: 3, figure: "damage", theme: "light", switches: { "damage-0.zoom": "0:10:4:20", "growth-0.scale": "linear" } },
  ];
  it.each(states)("comes back as it went: %j", (state) => {
    expect(readFragment(writeFragment(state))).toEqual(state);
  });

  it("is empty at the start and leaves out what is only hovered over", () => {
    expect(writeFragment(START)).toBe("");
    expect(writeFragment({ ...START, floor: 5 })).toBe("");
  });

  it("can be read", () => {
    expect(writeFragment(states[4] as State)).toBe("#damage?floor=12&token=3&theme=light&damage-0.zoom=0:10:4:20&growth-0.scale=linear");
  });

  it.each(["#<img src=x>", "#?floor=1e9", "#?floor=-2", "#?floor=abc&token=-1&theme=pink", "#?a.b=<script>", "#a b"])(
    "ignores what is wrong: %s",
    (hash) => expect(readFragment(hash)).toEqual(START),
  );
});
