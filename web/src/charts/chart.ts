/** What every chart offers to the page that holds it. */

import type { State } from "../fragment";
import type { Chart } from "../schema";

/** Where something points: a block, a token, and a place of the chart's own axes. */
export interface Pointed {
  floor?: number | null;
  token?: number | null;
  /** Places on the chart's own axes that are shared with no other chart. */
  own?: readonly [number, number];
}

/** One reading beneath a chart: a sample of the mark, a name, a figure. */
export interface Reading {
  name: string;
  role: string;
  sample: "line" | "dots" | "dashed" | "dotted" | "none";
  value: string;
}

/** A choice of two or more ways to draw a chart. */
export interface Switch {
  name: string;
  label: string;
  options: readonly (readonly [value: string, label: string])[];
  value: string;
}

/** A drawn chart. */
export interface Drawn {
  /** Move the cursor; cheap, for it runs at every move of the pointer. */
  point(state: State): void;
  /** What lies at a pixel of the plot, null outside. */
  at(x: number, y: number): Pointed | null;
  /** Where a key leads from here; null for a key that means nothing to this chart. */
  step(key: string, state: State): Pointed | null;
  /** What the cursor reads; `where` names the place. */
  read(state: State): { where: string; readings: Reading[] };
  /** A rectangle dragged over the plot; null where nothing can be zoomed. */
  zoom?(x0: number, y0: number, x1: number, y1: number): string | null;
}

/** What a chart is drawn into. */
export interface Box {
  id: string;
  /** Holds the picture; emptied before each drawing. */
  plot: HTMLElement;
  width: number;
  /** The value of one of the chart's switches, `""` as it comes. */
  chosen(name: string): string;
  /** Depth of the report: blocks of its deepest model. */
  depth: number;
}

/** One form of chart. */
export interface Form<C extends Chart> {
  switches(chart: C, chosen: (name: string) => string): Switch[];
  draw(chart: C, box: Box): Drawn;
  /** The chart's figures as rows, the first of them the names. */
  rows(chart: C): (string | number | null)[][];
}
