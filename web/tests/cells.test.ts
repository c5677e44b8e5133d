import { describe, expect, it } from "vitest";
import { cividis, diverging, NOT_FINITE } from "../src/colours";
import { cellsOf, shadesOf, sizeOf, together, windowOf, zoomText } from "../src/charts/cells";
import type { Axis, Grid, Value } from "../src/schema";

const axis = (more: Partial<Axis> = {}): Axis => ({ label: "", scale: "linear", domain: null, floors: true, states: false, names: null, ...more });
const grid = (values: Value[][], more: Partial<Grid> = {}): Grid => ({
  form: "grid", title: "", subject: "", x: axis(), y: axis(), values, colour: axis({ floors: false }), diverging: false, right: null, bottom: null, cells: null, ...more,
});

describe("cells drawn as one", () => {
  const four = grid([[1, 2, 3, 4], [5, 6, 7, 8], [9, null, NaN, 12], [null, null, 15, 16]]);
  const whole = windowOf(four, "");

  it("are the largest or the median, and none is left out", () => {
    expect(cellsOf(four, { ...whole, y1: 2 }, 2, 2, "max")).toEqual([[6, 8]]);
    expect(cellsOf(four, { ...whole, y1: 2 }, 2, 2, "median")).toEqual([[3.5, 5.5]]);
  });
  it("keep what is not finite, and are missing only where all are", () => {
    expect(cellsOf(four, whole, 2, 2, "max")).toEqual([[6, 8], [9, NaN]]);
    expect(cellsOf(grid([[null, null]]), { x0: 0, x1: 2, y0: 0, y1: 1 }, 2, 1, "max")).toEqual([[null]]);
  });
  it("keep the sign of the largest in size where signs matter", () => {
    expect(cellsOf(grid([[-5, 2]], { diverging: true }), { x0: 0, x1: 2, y0: 0, y1: 1 }, 2, 1, "max")).toEqual([[-5]]);
  });
  it("count an uneven rest", () => {
    expect(cellsOf(four, { ...whole, y1: 1 }, 3, 1, "max")).toEqual([[3, 4]]);
  });
  it("are as few as leave two pixels a cell", () => {
    expect([together(96, 400), together(192, 400), together(512, 400), together(200, 400), together(201, 400)]).toEqual([1, 1, 3, 1, 2]);
  });
});

describe("a window", () => {
  const wide = grid([[1, 2, 3], [4, 5]]);
  it("is the whole grid unless the zoom lies inside it", () => {
    const whole = { x0: 0, x1: 3, y0: 0, y1: 2 };
    expect(sizeOf(wide)).toEqual([3, 2]);
    for (const wrong of ["", "0:4:0:2", "2:1:0:2", "a:b:c:d", "0:3:0"]) expect(windowOf(wide, wrong)).toEqual(whole);
    const part = { x0: 1, x1: 3, y0: 0, y1: 1 };
    expect(windowOf(wide, zoomText(part))).toEqual(part);
  });
});

describe("colours", () => {
  it("are those of Python", () => {
    expect([cividis(0), cividis(1), cividis(2), diverging(0.5)]).toEqual([[0, 34, 78], [254, 232, 56], [254, 232, 56], [247, 246, 246]]);
  });
  it("have white in the middle for signed figures, and violet for what is not finite", () => {
    const shades = shadesOf(grid([[-1, 4]], { diverging: true }), "linear");
    expect(shades.domain[0]).toBe(-shades.domain[1]);
    expect(shades.colour(0)).toEqual([247, 246, 246]);
    expect(shades.colour(Infinity)).toEqual(NOT_FINITE);
  });
  it("take the lowest for zero on a log scale", () => {
    expect(shadesOf(grid([[0, 1, 10]]), "log").colour(0)).toEqual(cividis(0));
  });
});
