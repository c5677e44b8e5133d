import { describe, expect, it } from "vitest";
import { depthOf, readReport } from "../src/schema";

const lines = (x: number[], y: unknown[], states: boolean) => ({
  form: "lines", title: "t", subject: "", references: [],
  x: { label: "x", scale: "linear", domain: null, floors: true, states, names: null },
  y: { label: "y", scale: "log", domain: null, floors: false, states: false, names: null },
  series: [{ name: "nan", role: "stream", x, y, low: null, high: null, mark: "line" }],
});
const report = (...charts: unknown[]): string =>
  JSON.stringify({ schema: "mainstem.report/1", title: "nan", subjects: ["inf"], figures: [{ id: "a", question: 1, title: "", finding: "", honesty: "", refused: null, charts }] });

describe("a report", () => {
  it("has numbers for the names of what is not finite, and only where figures are", () => {
    const read = readReport(report(lines([0, 1, 2, 3], [1, null, "nan", "-inf"], false)));
    const chart = read.figures[0]?.charts[0];
    expect(chart?.form === "lines" && chart.series[0]?.y).toEqual([1, null, NaN, -Infinity]);
    expect([read.title, read.subjects, chart?.form === "lines" && chart.series[0]?.name]).toEqual(["nan", ["inf"], "nan"]);
  });
  it("is as deep as its deepest chart: four blocks have five states", () => {
    expect(depthOf(readReport(report(lines([0, 1, 2, 3], [1, 1, 1, 1], false))))).toBe(4);
    expect(depthOf(readReport(report(lines([0, 1, 2, 3, 4], [1, 1, 1, 1, 1], true))))).toBe(4);
    expect(depthOf(readReport(report()))).toBe(0);
  });
  it("of another schema is refused", () => {
    expect(() => readReport('{"schema": "mainstem.report/9"}')).toThrow("mainstem.report/9");
  });
});
