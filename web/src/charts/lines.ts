/** Lines, bands and dots over one axis, with lanes of their own for zeros and for what is not finite. */

import { median } from "d3-array";
import { area as areaShape, line as lineShape, symbol, symbolCircle, symbolTriangle } from "d3-shape";
import type { State } from "../fragment";
import { reading, unit } from "../format";
import { round, svg, words } from "../dom";
import { domainOf, floorAt, isPlaced, onAxis, place, type Place } from "../scales";
import type { Lines, Role, ScaleKind, Series, Value } from "../schema";
import type { Box, Drawn, Form, Pointed, Reading, Switch } from "./chart";
import { bottomAxis, CursorLine, leftAxis, named, picture, type Area } from "./frame";

const LANE = 15;
const SMOOTH_OVER = 7;

interface Layout {
  area: Area;
  x: Place;
  y: Place;
  kind: ScaleKind;
  /** Pixel of a figure, in its lane where it has no place on the axis. */
  at(value: number): number;
  size: readonly [number, number];
}

export const lines: Form<Lines> = {
  switches(chart: Lines, chosen): Switch[] {
    const canBeLog = chart.series.some((s) => s.y.some((v) => isPlaced(v, "log"))) && !chart.series.some((s) => s.y.some((v) => (v ?? 0) < 0));
    if (!canBeLog || (chart.y.scale === "linear" && chart.y.domain)) return [];
    const value = chosen("scale") === "" ? chart.y.scale : chosen("scale");
    return [{ name: "scale", label: "Scale", options: [["log", "log"], ["linear", "linear"]], value }];
  },

  draw(chart: Lines, box: Box): Drawn {
    return new DrawnLines(chart, box);
  },

  rows(chart: Lines) {
    const columns = chart.series.flatMap((s) =>
      s.low && s.high ? [column(s, s.y, ""), column(s, s.low, " low"), column(s, s.high, " high")] : [column(s, s.y, "")],
    );
    const places = [...new Set(chart.series.flatMap((s) => s.x))].sort((a, b) => a - b);
    const first = (x: number): string | number => chart.x.names?.[x] ?? x;
    return [[chart.x.label, ...columns.map((c) => c.name)], ...places.map((x) => [first(x), ...columns.map((c) => c.values.get(x) ?? null)])];
  },
};

function column(series: Series, values: Value[], suffix: string): { name: string; values: Map<number, Value> } {
  return { name: series.name + suffix, values: new Map(series.x.map((x, i) => [x, values[i] ?? null])) };
}

/** Return how high a picture of lines is at a width. */
export function heightOf(width: number): number {
  return Math.round(Math.min(290, Math.max(210, width * 0.58)));
}

function layout(chart: Lines, box: Box, height: number): Layout {
  const chosen = box.chosen("scale");
  const kind: ScaleKind = chosen === "log" || chosen === "linear" ? chosen : chart.y.scale;
  const values = chart.series.flatMap((s) => [...s.y, ...(s.low ?? []), ...(s.high ?? [])]);
  for (const [, level] of chart.references) values.push(level);
  const zeros = kind === "log" && chart.series.some((s) => s.y.some((v) => v !== null && v <= 0));
  const lost = chart.series.some((s) => s.y.some((v) => v !== null && !Number.isFinite(v)));
  const area: Area = { left: 50, right: box.width - 14, top: 20, bottom: height - 42 };
  const axis = { ...chart.y, scale: kind, domain: kind === chart.y.scale ? chart.y.domain : null };
  const domain = domainOf(axis, values, kind);
  const x = place(domainOf(chart.x, chart.series.flatMap((s) => s.x)), [area.left, area.right], "linear");
  const top = area.top + (lost ? LANE : 0);
  const bottom = area.bottom - (zeros ? LANE : 0);
  const y = place(domain, [bottom, top], kind);
  const at = (value: number): number => {
    if (!Number.isFinite(value)) return area.top + 4;
    return kind === "log" && value <= 0 ? area.bottom - 7 : y(value);
  };
  return { area, x, y, kind, at, size: [box.width, height] };
}

class DrawnLines implements Drawn {
  private readonly layout: Layout;
  private readonly cursor: CursorLine;
  private readonly dots: SVGPathElement[];
  private readonly places: number[];

  constructor(private readonly chart: Lines, box: Box) {
    const height = heightOf(box.width);
    this.layout = layout(chart, box, height);
    const root = picture(box.plot, box.width, height);
    drawFrame(root, chart, this.layout);
    for (const series of [...chart.series].reverse()) drawSeries(root, series, this.layout);
    drawReferences(root, chart, this.layout);
    this.dots = chart.series.map((s) => svg(root, "path", { class: `mark here r-${s.role}`, d: shape(s.role, 46), visibility: "hidden" }));
    this.cursor = new CursorLine(box.plot, "upright", this.layout.size, this.layout.area);
    this.places = [...new Set(chart.series.flatMap((s) => s.x))].sort((a, b) => a - b);
  }

  private here(state: State): number | null {
    const { x } = this.chart;
    if (x.floors) return onAxis(x, state.floor);
    return state.token !== null && x.names ? state.token : null;
  }

  point(state: State): void {
    const at = this.here(state);
    const inside = at !== null && at >= this.layout.x.low && at <= this.layout.x.high;
    this.cursor.move(inside ? this.layout.x(at) : null);
    this.chart.series.forEach((series, i) => {
      const value = at === null ? null : valueAt(series, at);
      const dot = this.dots[i] as SVGPathElement;
      if (value === null || at === null) dot.setAttribute("visibility", "hidden");
      else {
        dot.setAttribute("transform", `translate(${round(this.layout.x(at))} ${round(this.layout.at(value))})`);
        dot.setAttribute("visibility", "visible");
      }
    });
  }

  at(x: number, y: number): Pointed | null {
    const { area } = this.layout;
    if (x < area.left - 8 || x > area.right + 8 || y < area.top - 4 || y > area.bottom + 20) return null;
    const near = nearest(this.places, this.layout.x.invert(x));
    return near === null ? null : this.pointed(near);
  }

  private pointed(at: number): Pointed | null {
    if (this.chart.x.floors) return { floor: floorAt(this.chart.x, at) };
    return this.chart.x.names ? { token: at } : null;
  }

  step(key: string, state: State): Pointed | null {
    const at = this.here(state);
    const moves: Record<string, number> = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 12, PageDown: -12 };
    if (key === "Home") return this.pointed(this.places[0] ?? 0);
    if (key === "End") return this.pointed(this.places.at(-1) ?? 0);
    const by = moves[key];
    if (by === undefined) return null;
    if (at === null) return this.pointed((by > 0 ? this.places[0] : this.places.at(-1)) ?? 0);
    const index = this.places.indexOf(nearest(this.places, at) ?? 0);
    return this.pointed(this.places[Math.min(Math.max(index + by, 0), this.places.length - 1)] ?? 0);
  }

  read(state: State): { where: string; readings: Reading[] } {
    const at = this.here(state);
    const where = at === null ? "" : placeName(this.chart, at);
    const readings = this.chart.series.map((series) => ({
      name: series.name,
      role: series.role,
      sample: series.mark,
      value: at === null ? "" : reading(valueAt(series, at)),
    }));
    return { where, readings };
  }
}

function placeName(chart: Lines, at: number): string {
  if (chart.x.names) return named(chart.x, at, 24);
  return `${chart.x.states ? "state" : chart.x.floors ? unit.block : chart.x.label} ${at}`;
}

function valueAt(series: Series, at: number): Value {
  // Most series run without gaps, so the place is where it would be counted from the first.
  const guess = Math.round(at - (series.x[0] ?? 0));
  const index = series.x[guess] === at ? guess : series.x.indexOf(at);
  return index < 0 ? null : (series.y[index] ?? null);
}

function nearest(places: readonly number[], value: number): number | null {
  let best: number | null = null;
  for (const p of places) if (best === null || Math.abs(p - value) < Math.abs(best - value)) best = p;
  return best;
}

function drawFrame(root: SVGSVGElement, chart: Lines, l: Layout): void {
  leftAxis(root, { ...chart.y, scale: l.kind }, l.y, l.area);
  bottomAxis(root, chart.x, l.x, l.area);
  const all = chart.series.flatMap((s) => s.y);
  const zeros = l.kind === "log" ? all.filter((v) => v !== null && v <= 0).length : 0;
  const lost = all.filter((v) => v !== null && !Number.isFinite(v)).length;
  if (zeros) lane(root, l, l.area.bottom - 7, "0", `${zeros} at or below 0`);
  if (lost) lane(root, l, l.area.top + 4, "inf, NaN", `${lost} not finite`);
}

function lane(root: SVGSVGElement, l: Layout, at: number, name: string, says: string): void {
  svg(root, "path", { class: "lane", d: `M${l.area.left} ${at}H${l.area.right}` });
  words(root, l.area.left - 7, at + 3.5, name, { class: "t small", "text-anchor": "end" });
  words(root, l.area.right, at < l.area.top + 9 ? l.area.top - 5 : l.area.bottom - 12, says, { class: "t small halo", "text-anchor": "end" });
}

function drawReferences(root: SVGSVGElement, chart: Lines, l: Layout): void {
  for (const [says, level] of chart.references) {
    if (!isPlaced(level, l.kind)) continue;
    const at = l.y(level);
    svg(root, "path", { class: "ref", d: `M${l.area.left} ${round(at)}H${l.area.right}` });
    words(root, l.area.right - 2, at - 5, says, { class: "t small halo", "text-anchor": "end" });
  }
}

function drawSeries(root: SVGSVGElement, series: Series, l: Layout): void {
  const group = svg(root, "g", { class: `r-${series.role}` });
  const points = series.x.map((x, i) => ({ x, y: series.y[i] ?? null, low: series.low?.[i] ?? null, high: series.high?.[i] ?? null }));
  const left = (p: { x: number }): number => round(l.x(p.x));
  if (series.low && series.high) {
    const band = areaShape<(typeof points)[number]>(left, (p) => round(l.y(p.low ?? 0)), (p) => round(l.y(p.high ?? 0)));
    band.defined((p) => isPlaced(p.low, l.kind) && isPlaced(p.high, l.kind));
    svg(group, "path", { class: "band", d: band(points) ?? "" });
  }
  const path = lineShape<(typeof points)[number]>(left, (p) => round(l.y(p.y ?? 0))).defined((p) => isPlaced(p.y, l.kind));
  if (series.mark !== "dots") svg(group, "path", { class: `line ${series.mark}`, d: path(points) ?? "" });
  else if ((series.role === "attention" || series.role === "feed_forward") && points.length > 2 * SMOOTH_OVER) {
    svg(group, "path", { class: "line smooth", d: path(points.map((p, i) => ({ ...p, y: smooth(series.y, i) }))) ?? "" });
  }
  // what lies in a lane is a mark of its own: a line from there would say that the figure is near
  const alone = (i: number): boolean => !isPlaced(series.y[i - 1], l.kind) && !isPlaced(series.y[i + 1], l.kind);
  const marked = points.filter((p, i) => p.y !== null && (series.mark === "dots" || !isPlaced(p.y, l.kind) || alone(i)));
  const area = marked.length <= 64 ? 26 : 14;
  const d = marked.map((p) => moved(shape(series.role, area), left(p), round(l.at(p.y ?? 0)))).join("");
  if (d) svg(group, "path", { class: "mark", d });
}

function smooth(values: readonly Value[], at: number): Value {
  const half = (SMOOTH_OVER - 1) / 2;
  if (values[at] === null || !Number.isFinite(values[at])) return null;
  const near = values.slice(Math.max(0, at - half), at + half + 1).filter((v): v is number => v !== null && Number.isFinite(v));
  return median(near) ?? null;
}

/** Return the outline of a role's mark: triangles for feed-forward, circles for the others. */
export function shape(role: Role, area: number): string {
  return symbol(role === "feed_forward" ? symbolTriangle : symbolCircle, area)() ?? "";
}

function moved(d: string, x: number, y: number): string {
  // d3's symbols begin with an absolute M and go on with absolute L and A, so each pair is shifted.
  const parts = d.match(/[MLAZ][^MLAZ]*/g) ?? [];
  return parts
    .map((part) => {
      const kind = part.charAt(0);
      const n = part.slice(1).split(/[ ,]/).map(Number);
      if (kind === "Z") return "Z";
      if (kind !== "A") return `${kind}${round((n[0] ?? 0) + x)},${round((n[1] ?? 0) + y)}`;
      const end = `${round((n[5] ?? 0) + x)},${round((n[6] ?? 0) + y)}`;
      return `A${round(n[0] ?? 0)},${round(n[1] ?? 0)},0,${n[3]},${n[4]},${end}`;
    })
    .join("");
}
