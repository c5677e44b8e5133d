import { describe, expect, it } from "vitest";
import { csv } from "../src/export";
import { label, reading, short, signed, visible } from "../src/format";

describe("label", () => {
  // the cases of tests/report/test_report_html.py
  it.each([
    [0, "0"], [0.001, "0.001"], [1e-5, "10⁻⁵"], [2.5e6, "2.5·10⁶"], [2000, "2,000"], [0.30000000000000004, "0.3"],
    [-0.5, "-0.5"], [99_999, "99,999"], [100_000, "10⁵"], [999.5, "999.5"],
  ])("%d is %s", (value, shown) => expect(label(value)).toBe(shown));
});

describe("reading", () => {
  it.each([
    [null, "–"], [NaN, "NaN"], [Infinity, "infinite"], [-Infinity, "−infinite"], [0, "0"], [-0.25, "−0.25"], [12.34567, "12.35"],
    [0.00012345, "1.23·10⁻⁴"], [1234.56, "1,234.6"], [25_805, "25,805"], [-3e9, "−3.00·10⁹"],
  ])("%d is %s", (value, shown) => expect(reading(value)).toBe(shown));

  it("has a sign where it is asked for", () => {
    expect([signed(2), signed(-2), signed(0)]).toEqual(["+2", "−2", "0"]);
  });
});

describe("visible", () => {
  // the cases of tests/report/test_report_html.py
  it.each([
    ["a\u202eb", "a<U+202E>b"], ["\u0000", "<U+0000>"], ["é 😀 👩\u200d🚀", "é 😀 👩\u200d🚀"], ["\u2028", "<U+2028>"], ["\ud800", "<U+D800>"],
  ])("%j is %s", (text, shown) => expect(visible(text)).toBe(shown));

  it("cuts by characters and not by halves of them", () => {
    expect(short("😀😀😀😀", 3)).toBe("😀😀…");
    expect(short("four", 4)).toBe("four");
  });
});

describe("csv", () => {
  it("quotes what would end a cell and disarms formulas", () => {
    const rows = [["a", 'say "x"', "1,2", "=cmd()"], ["line\nbreak", null, -2.5, NaN]];
    expect(csv(rows)).toBe('a,"say ""x""","1,2",\'=cmd()\r\n"line\nbreak",,-2.5,NaN\r\n');
  });
});
