/** The cells of a grid: which are in view, several drawn as one where there are too many, and their colours. */

import { max, median } from "d3-array";
import { cividis, diverging, NOT_FINITE, type Colour } from "../colours";
import { domainOf, place } from "../scales";
import type { Grid, ScaleKind, Value } from "../schema";

/** Half-open ranges of columns and rows. */
export interface Window {
  x0: number;
  x1: number;
  y0: number;
  y1: number;
}

export type Summary = "max" | "median";

/** Return how many columns and rows a grid has. */
export function sizeOf(grid: Grid): [columns: number, rows: number] {
  let columns = 0;
  for (const row of grid.values) columns = Math.max(columns, row.length);
  return [columns, grid.values.length];
}

/** Return what a zoom says, `x0:x1:y0:y1`; the whole grid where it says nothing that the grid has. */
export function windowOf(grid: Grid, zoom: string): Window {
  const [columns, rows] = sizeOf(grid);
  const whole = { x0: 0, x1: columns, y0: 0, y1: rows };
  if (!/^\d{1,6}(:\d{1,6}){3}$/.test(zoom)) return whole;
  const [x0 = 0, x1 = 0, y0 = 0, y1 = 0] = zoom.split(":").map(Number);
  return x0 < x1 && x1 <= columns && y0 < y1 && y1 <= rows ? { x0, x1, y0, y1 } : whole;
}

/** Return how a zoom is written. */
export function zoomText({ x0, x1, y0, y1 }: Window): string {
  return [x0, x1, y0, y1].join(":");
}

/** Return how many neighbours become one so that each drawn cell has at least two pixels. */
export function together(number: number, pixels: number): number {
  return Math.max(1, Math.ceil((2 * number) / Math.max(pixels, 2)));
}

/** Return the cells in view, rows from the lowest, each the largest or median of `across` x `up` cells. */
export function cellsOf(grid: Grid, view: Window, across: number, up: number, summary: Summary): Value[][] {
  const found: Value[][] = [];
  for (let y = view.y0; y < view.y1; y += up) {
    const row: Value[] = [];
    for (let x = view.x0; x < view.x1; x += across) {
      row.push(across * up === 1 ? (grid.values[y]?.[x] ?? null) : together1(grid, x, y, view, across, up, summary));
    }
    found.push(row);
  }
  return found;
}

function together1(grid: Grid, x: number, y: number, view: Window, across: number, up: number, summary: Summary): Value {
  const values: number[] = [];
  for (let b = y; b < Math.min(y + up, view.y1); b++) {
    const row = grid.values[b] ?? [];
    for (let a = x; a < Math.min(x + across, view.x1); a++) {
      const value = row[a] ?? null;
      if (value === null) continue;
      if (!Number.isFinite(value)) return value; // one that is not finite must not drown among its neighbours
      values.push(value);
    }
  }
  if (values.length === 0) return null;
  if (summary === "median") return median(values) ?? null;
  return grid.diverging ? (values.sort((a, b) => Math.abs(b) - Math.abs(a))[0] ?? null) : (max(values) ?? null);
}

/** Colours of a grid's figures, with their printed limits. */
export interface Shades {
  domain: [number, number];
  kind: ScaleKind;
  colour(value: number): Colour;
}

/** Return the colours of a grid on a scale. */
export function shadesOf(grid: Grid, kind: ScaleKind): Shades {
  function* values(): Generator<Value> {
    for (const row of grid.values) yield* row;
  }
  const axis = { ...grid.colour, floors: false, domain: kind === grid.colour.scale ? grid.colour.domain : null };
  let domain = domainOf(axis, values(), kind);
  if (grid.diverging) {
    const most = Math.max(Math.abs(domain[0]), Math.abs(domain[1]));
    domain = [-most, most];
  }
  const share = place(domain, [0, 1], kind);
  const scheme = grid.diverging ? diverging : cividis;
  const colour = (value: number): Colour => {
    if (!Number.isFinite(value)) return NOT_FINITE;
    return scheme(kind === "log" && value <= 0 ? 0 : share(value));
  };
  return { domain, kind, colour };
}

/** Return a canvas with one pixel a cell, row 0 at the bottom; what has no figure is left clear. */
export function paint(cells: readonly Value[][], shades: Shades): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.height = cells.length;
  canvas.width = cells[0]?.length ?? 0;
  const context = canvas.getContext("2d");
  if (!context || canvas.width === 0) return canvas;
  const image = context.createImageData(canvas.width, canvas.height);
  cells.forEach((row, y) => {
    row.forEach((value, x) => {
      if (value === null) return;
      const at = 4 * ((cells.length - 1 - y) * canvas.width + x);
      const [red, green, blue] = shades.colour(value);
      image.data.set([red, green, blue, 255], at);
    });
  });
  context.putImageData(image, 0, 0);
  return canvas;
}
