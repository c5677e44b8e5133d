/** What a report says, as `mainstem.report.figure` writes it (schema `mainstem.report/1`). */

export const SCHEMA = "mainstem.report/1";

/** A figure; null was not measured. Numbers that are not finite come as names and are numbers after `readReport`. */
export type Value = number | null;
export type ScaleKind = "linear" | "log";
export type Role = "stream" | "attention" | "feed_forward" | "broken" | "reference" | "other";

export interface Axis {
  label: string;
  scale: ScaleKind;
  domain: [number, number] | null;
  /** It counts blocks, or the states between them. */
  floors: boolean;
  /** It counts states: state k + 1 is what block k leaves. */
  states: boolean;
  names: string[] | null;
}

export interface Series {
  name: string;
  role: Role;
  x: number[];
  y: Value[];
  low: Value[] | null;
  high: Value[] | null;
  mark: "line" | "dots" | "dashed" | "dotted";
}

interface Panel {
  title: string;
  /** Whose it is where two models are beside each other. */
  subject: string;
}

export interface Lines extends Panel {
  form: "lines";
  x: Axis;
  y: Axis;
  series: Series[];
  references: [string, number][];
}

export interface Grid extends Panel {
  form: "grid";
  x: Axis;
  y: Axis;
  values: Value[][];
  colour: Axis;
  diverging: boolean;
  right: Lines | null;
  bottom: Lines | null;
  cells: string[][] | null;
}

export interface Bars extends Panel {
  form: "bars";
  x: Axis;
  labels: string[];
  values: Value[];
  roles: Role[];
  total: Value;
}

export interface Room {
  norm: Value;
  attention: Value;
  feed_forward: Value;
  attention_part: Value;
  feed_forward_part: Value;
  running: Value;
  broken: boolean;
}

export interface Tower extends Panel {
  form: "tower";
  token: string;
  position: number;
  start_norm: Value;
  rooms: Room[];
  start: Value;
  direction: string | null;
  end: Value;
  collar: "read" | "shaft";
  streams: number;
  /** The same token without the break, from state 0: drawn beside what the broken tower does. */
  whole?: { norm: Value[]; running: Value[] };
}

export type Chart = Lines | Grid | Bars | Tower;

export interface Figure {
  id: string;
  question: number;
  title: string;
  finding: string;
  charts: Chart[];
  honesty: string;
  refused: string | null;
}

export interface Report {
  schema: string;
  title: string;
  subjects: string[];
  figures: Figure[];
}

const NAMES: Readonly<Record<string, number>> = { nan: NaN, inf: Infinity, "-inf": -Infinity };

/** Return a number for what Python wrote in its place: a number, its name, or null. */
export function numberOf(value: unknown): Value {
  if (typeof value === "number") return value;
  return typeof value === "string" ? (NAMES[value] ?? null) : null;
}

function numbers(values: unknown): Value[] {
  return Array.isArray(values) ? values.map(numberOf) : [];
}

function linesOf(chart: Lines): Lines {
  for (const series of chart.series) {
    series.x = numbers(series.x).map((v) => v ?? NaN);
    series.y = numbers(series.y);
    series.low = series.low && numbers(series.low);
    series.high = series.high && numbers(series.high);
  }
  return chart;
}

function chartOf(chart: Chart): Chart {
  switch (chart.form) {
    case "lines":
      return linesOf(chart);
    case "grid":
      chart.values = chart.values.map(numbers);
      if (chart.right) linesOf(chart.right);
      if (chart.bottom) linesOf(chart.bottom);
      return chart;
    case "bars":
      chart.values = numbers(chart.values);
      chart.total = numberOf(chart.total);
      return chart;
    case "tower":
      chart.start_norm = numberOf(chart.start_norm);
      chart.start = numberOf(chart.start);
      chart.end = numberOf(chart.end);
      for (const room of chart.rooms) {
        room.norm = numberOf(room.norm);
        room.attention = numberOf(room.attention);
        room.feed_forward = numberOf(room.feed_forward);
        room.attention_part = numberOf(room.attention_part);
        room.feed_forward_part = numberOf(room.feed_forward_part);
        room.running = numberOf(room.running);
      }
      return chart;
  }
}

/** Return the report that a page carries; throw if it is of another schema. */
export function readReport(text: string): Report {
  const report = JSON.parse(text) as Report;
  if (report.schema !== SCHEMA) throw new Error(`a report of schema ${String(report.schema)}, not ${SCHEMA}`);
  for (const figure of report.figures) figure.charts = figure.charts.map(chartOf);
  return report;
}

/** Return how many blocks a report's models have: the longest axis of floors. */
export function depthOf(report: Report): number {
  let depth = 0;
  const see = (axis: Axis, last: number): void => {
    if (axis.floors) depth = Math.max(depth, axis.states ? last : last + 1);
  };
  for (const figure of report.figures) {
    for (const chart of figure.charts) {
      if (chart.form === "lines") for (const s of chart.series) see(chart.x, Math.max(-1, ...s.x.filter(Number.isFinite)));
      if (chart.form === "grid") {
        see(chart.y, chart.values.length - 1);
        see(chart.x, Math.max(0, ...chart.values.map((row) => row.length)) - 1);
      }
      if (chart.form === "tower") depth = Math.max(depth, chart.rooms.length);
    }
  }
  return depth;
}
