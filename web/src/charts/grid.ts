/** A grid of colours on a canvas, with crosshair, marginals, zoom by dragging, and the pinned row as a line. */

import { inkOn } from "../colours";
import { html, round, svg, words } from "../dom";
import type { State } from "../fragment";
import { label, reading, short } from "../format";
import { domainOf, floorAt, isPlaced, onAxis, place, type Place } from "../scales";
import type { Axis, Grid, Lines, ScaleKind, Value } from "../schema";
import { cellsOf, paint, shadesOf, sizeOf, together, windowOf, zoomText, type Shades, type Summary, type Window } from "./cells";
import type { Box, Drawn, Form, Pointed, Reading, Switch } from "./chart";
import { bottomAxis, CursorLine, leftAxis, named, picture, rightAxis, type Area } from "./frame";
import { lines } from "./lines";

const MANY = 150;
const TEXT_FROM = 40;
const MARGINAL = 54;

/** Whether an axis counts blocks or states, and not something that has names. */
function isFloors(axis: Axis): boolean {
  return axis.floors && !axis.names;
}

/** Whether an axis counts tokens. */
function isTokens(axis: Axis): boolean {
  return axis.names !== null && !axis.floors;
}

export const grid: Form<Grid> = {
  switches(chart, chosen): Switch[] {
    const found: Switch[] = [];
    if (!chart.diverging && chart.values.some((row) => row.some((v) => isPlaced(v, "log")))) {
      const value = chosen("scale") === "" ? chart.colour.scale : chosen("scale");
      found.push({ name: "scale", label: "Colour", options: [["log", "log"], ["linear", "linear"]], value });
    }
    if (Math.max(...sizeOf(chart)) > MANY) {
      const value = chosen("of") === "median" ? "median" : "max";
      found.push({ name: "of", label: "Cells drawn as one", options: [["max", "largest"], ["median", "median"]], value });
    }
    return found;
  },

  draw(chart, box) {
    return new DrawnGrid(chart, box);
  },

  rows(chart) {
    const name = (axis: Axis, at: number): string | number => axis.names?.[at] ?? at;
    const [columns] = sizeOf(chart);
    const head = [`${chart.y.label} \\ ${chart.x.label}`, ...Array.from({ length: columns }, (_, x) => name(chart.x, x))];
    return [head, ...chart.values.map((row, y) => [name(chart.y, y), ...Array.from({ length: columns }, (_, x) => row[x] ?? null)])];
  },
};

class DrawnGrid implements Drawn {
  private readonly area: Area;
  private readonly view: Window;
  private readonly x: Place;
  private readonly y: Place;
  private readonly shades: Shades;
  private readonly size: readonly [number, number];
  private readonly upright: CursorLine;
  private readonly level: CursorLine;
  private readonly profile: HTMLElement;
  private profiled = -1;
  private own: [column: number | null, row: number | null] = [null, null];

  constructor(private readonly chart: Grid, private readonly box: Box) {
    const kind: ScaleKind = box.chosen("scale") === "log" ? "log" : box.chosen("scale") === "linear" ? "linear" : chart.colour.scale;
    this.view = windowOf(chart, box.chosen("zoom"));
    this.shades = shadesOf(chart, kind);
    const { area, height } = this.measure();
    this.area = area;
    this.size = [box.width, height];
    this.x = place([this.view.x0 - 0.5, this.view.x1 - 0.5], [area.left, area.right], "linear");
    this.y = place([this.view.y0 - 0.5, this.view.y1 - 0.5], [area.bottom, area.top], "linear");
    const root = picture(box.plot, box.width, height);
    this.drawCells(root);
    leftAxis(root, chart.y, this.y, area, { rules: false });
    bottomAxis(root, chart.x, this.x, area, !chart.bottom);
    this.drawBar(root);
    if (chart.right) marginal(root, chart.right, this.y, area, "right");
    if (chart.bottom) marginal(root, chart.bottom, this.x, area, "bottom");
    this.drawTexts(root);
    this.upright = new CursorLine(box.plot, "upright", this.size, area);
    this.level = new CursorLine(box.plot, "level", this.size, area);
    this.profile = html("div", { class: "profile" });
    box.plot.after(this.profile);
  }

  private measure(): { area: Area; height: number } {
    const { chart, box } = this;
    const left = 50;
    const beside = 66 + (chart.right ? MARGINAL : 0);
    const wide = box.width - left - beside;
    const isSquare = isFloors(chart.x);
    const rows = this.view.y1 - this.view.y0;
    const tall = isSquare ? Math.min(wide, 400) : Math.min(Math.max(4 * rows, 220), 420);
    const area = { left, right: left + (isSquare ? tall : wide), top: 20, bottom: 20 + tall };
    return { area, height: area.bottom + 42 + (chart.bottom ? MARGINAL : 0) };
  }

  private drawCells(root: SVGSVGElement): void {
    const { area, view, box, chart } = this;
    const pattern = svg(svg(root, "defs"), "pattern", {
      id: `${box.id}-none`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)",
    });
    svg(pattern, "path", { class: "rule", d: "M0 0V6" });
    const [wide, tall] = [area.right - area.left, area.bottom - area.top];
    svg(root, "rect", { x: area.left, y: area.top, width: wide, height: tall, fill: `url(#${box.id}-none)` });
    const across = together(view.x1 - view.x0, wide);
    const up = together(view.y1 - view.y0, tall);
    const summary: Summary = box.chosen("of") === "median" ? "median" : "max";
    const canvas = paint(cellsOf(chart, view, across, up, summary), this.shades);
    canvas.className = "cells";
    // The last cells of an uneven number stand for fewer: they reach beyond the area, which cuts them.
    const exact = [(canvas.width * across) / (view.x1 - view.x0), (canvas.height * up) / (view.y1 - view.y0)] as const;
    const frame = html("div", { class: "cells-frame" });
    place4(frame, area.left / box.width, area.top / this.size[1], wide / box.width, tall / this.size[1]);
    canvas.style.width = `${100 * exact[0]}%`;
    canvas.style.height = `${100 * exact[1]}%`;
    canvas.dataset["area"] = [area.left, area.bottom - tall * exact[1], wide * exact[0], tall * exact[1]].map(round).join(" ");
    frame.append(canvas);
    box.plot.append(frame);
    if (across * up > 1) {
      const what = summary === "median" ? "median" : chart.diverging ? "largest in size" : "largest";
      const says = `each cell drawn is the ${what} of ${across} x ${up}; drag over the picture to see each`;
      box.plot.dataset["note"] = says;
    } else delete box.plot.dataset["note"];
  }

  private drawBar(root: SVGSVGElement): void {
    const { area, chart, shades } = this;
    const at = area.right + (chart.right ? MARGINAL : 0) + 14;
    const scale = place(shades.domain, [area.bottom, area.top], shades.kind);
    const steps = 48;
    for (let n = 0; n < steps; n++) {
      const top = area.top + ((area.bottom - area.top) * n) / steps;
      const value = scale.invert(top + (area.bottom - area.top) / steps / 2);
      const fill = `rgb(${shades.colour(value).join(",")})`;
      svg(root, "rect", { x: at, y: round(top), width: 11, height: round((area.bottom - area.top) / steps + 0.6), fill });
    }
    rightAxis(root, { ...chart.colour, floors: false, scale: shades.kind }, scale, at + 11);
    words(root, this.box.width - 1, 11, short(chart.colour.label + (shades.kind === "log" ? " (log)" : ""), 34), {
      class: "t small", "text-anchor": "end",
    });
  }

  /** Words in the cells, where they have room. */
  private drawTexts(root: SVGSVGElement): void {
    const { chart, view, area } = this;
    const wide = (area.right - area.left) / (view.x1 - view.x0);
    const tall = (area.bottom - area.top) / (view.y1 - view.y0);
    if (wide < TEXT_FROM || tall < 14) return;
    const over = svg(null, "svg", { viewBox: `0 0 ${this.size[0]} ${this.size[1]}`, class: "over", "aria-hidden": "true" });
    for (let y = view.y0; y < view.y1; y++) {
      for (let x = view.x0; x < view.x1; x++) {
        const value = chart.values[y]?.[x];
        if (value === undefined || value === null) continue;
        const says = chart.cells?.[y]?.[x] ?? label(Number(value.toPrecision(3)));
        const written = words(over, this.x(x), this.y(y) + 3.5, short(says, Math.floor(wide / 6.4)), { "text-anchor": "middle" });
        written.style.fill = inkOn(this.shades.colour(value)); // not as an attribute, which the live page's policy refuses
      }
    }
    root.parentElement?.append(over);
  }

  private here(state: State): [column: number | null, row: number | null] {
    const { x, y } = this.chart;
    const row = isFloors(y) ? onAxis(y, state.floor) : isTokens(y) ? state.token : this.own[1];
    if (isTokens(x)) return [state.token, row];
    if (isFloors(x) && !isFloors(y)) return [onAxis(x, state.floor), row];
    return [this.own[0], row];
  }

  private pointed(column: number, row: number): Pointed {
    const { x, y } = this.chart;
    this.own = [column, row];
    const floors = isFloors(y) ? floorAt(y, row) : isFloors(x) ? floorAt(x, column) : undefined;
    const token = isTokens(x) ? column : isTokens(y) ? row : undefined;
    return { ...(floors === undefined ? {} : { floor: floors }), ...(token === undefined ? {} : { token }) };
  }

  at(x: number, y: number): Pointed | null {
    const { area, view } = this;
    if (x < area.left || x > area.right || y < area.top || y > area.bottom) return null;
    const within = (value: number, low: number, high: number): number => Math.min(Math.max(Math.round(value), low), high - 1);
    return this.pointed(within(this.x.invert(x), view.x0, view.x1), within(this.y.invert(y), view.y0, view.y1));
  }

  step(key: string, state: State): Pointed | null {
    const { view } = this;
    const moves: Record<string, readonly [number, number]> = {
      ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1], PageUp: [0, 12], PageDown: [0, -12],
      Home: [-1e6, 0], End: [1e6, 0],
    };
    const by = moves[key];
    if (!by) return null;
    const [column, row] = this.here(state);
    const to = (value: number | null, move: number, low: number, high: number): number =>
      value === null ? low : Math.min(Math.max(value + move, low), high - 1);
    return this.pointed(to(column, by[0], view.x0, view.x1), to(row, by[1], view.y0, view.y1));
  }

  point(state: State): void {
    const [column, row] = this.here(state);
    const { view } = this;
    this.upright.move(column !== null && column >= view.x0 && column < view.x1 ? this.x(column) : null);
    this.level.move(row !== null && row >= view.y0 && row < view.y1 ? this.y(row) : null);
    this.drawProfile(state.pinned && row !== null && row < this.chart.values.length ? row : -1);
  }

  /** The pinned row as a line. */
  private drawProfile(row: number): void {
    if (row === this.profiled) return;
    this.profiled = row;
    this.profile.replaceChildren();
    const values = this.chart.values[row];
    if (row < 0 || !values?.some((v) => v !== null)) return;
    const { chart } = this;
    const one: Lines = {
      form: "lines", title: "", subject: "", references: [], x: chart.x,
      y: { ...chart.colour, domain: this.shades.domain, scale: this.shades.kind },
      series: [{ name: "", role: isFloors(chart.y) && isFloors(chart.x) ? "broken" : "stream", x: values.map((_, i) => i), y: values, low: null, high: null, mark: "line" }],
    };
    const plot = html("div", { class: "plot" });
    this.profile.append(html("p", { class: "profile-title" }, `Along the row: ${chart.y.label} ${named(chart.y, row, 40)}`), plot);
    lines.draw(one, { ...this.box, plot, chosen: () => "", id: `${this.box.id}-row` });
  }

  read(state: State): { where: string; readings: Reading[] } {
    const [column, row] = this.here(state);
    const { chart } = this;
    const value: Value | undefined = row === null || column === null ? undefined : (chart.values[row]?.[column] ?? null);
    const parts: string[] = [];
    if (row !== null) parts.push(`${chart.y.label} ${named(chart.y, row, 30)}`);
    if (column !== null) parts.push(`${chart.x.label} ${named(chart.x, column, 30)}`);
    const cell = row !== null && column !== null ? chart.cells?.[row]?.[column] : undefined;
    const readings: Reading[] = [{ name: chart.colour.label, role: "none", sample: "none", value: value === undefined ? "" : reading(value) }];
    if (cell) readings.push({ name: "", role: "none", sample: "none", value: short(cell, 90) });
    return { where: parts.join(", "), readings };
  }

  zoom(x0: number, y0: number, x1: number, y1: number): string | null {
    const { view } = this;
    const clamp = (value: number, low: number, high: number): number => Math.min(Math.max(value, low), high);
    const [a, b] = [this.x.invert(Math.min(x0, x1)), this.x.invert(Math.max(x0, x1))];
    const [c, d] = [this.y.invert(Math.max(y0, y1)), this.y.invert(Math.min(y0, y1))];
    const next: Window = {
      x0: clamp(Math.round(a), view.x0, view.x1 - 1), x1: clamp(Math.round(b) + 1, view.x0 + 1, view.x1),
      y0: clamp(Math.round(c), view.y0, view.y1 - 1), y1: clamp(Math.round(d) + 1, view.y0 + 1, view.y1),
    };
    return next.x1 - next.x0 < 2 && next.y1 - next.y0 < 2 ? null : zoomText(next);
  }
}

function place4(element: HTMLElement, left: number, top: number, width: number, height: number): void {
  Object.assign(element.style, { left: `${100 * left}%`, top: `${100 * top}%`, width: `${100 * width}%`, height: `${100 * height}%` });
}

/** One series along the rows or columns, in the margin. */
function marginal(root: SVGSVGElement, chart: Lines, along: Place, area: Area, side: "right" | "bottom"): void {
  const values = chart.series.flatMap((s) => s.y);
  const domain = domainOf({ ...chart.y, floors: false }, values, chart.y.scale);
  const start = side === "right" ? area.right + 8 : area.bottom + 24;
  const across = place(domain, [start, start + MARGINAL - 16], chart.y.scale);
  for (const series of chart.series) {
    let d = "";
    series.x.forEach((x, i) => {
      const value = series.y[i];
      if (!isPlaced(value, chart.y.scale) || x < along.low || x > along.high) return;
      const [a, b] = side === "right" ? [across(value), along(x)] : [along(x), across(value)];
      d += `${d ? "L" : "M"}${round(a)},${round(b)}`;
    });
    svg(svg(root, "g", { class: `r-${series.role}` }), "path", { class: "line thin", d });
  }
  const says = `${short(chart.y.label, 20)}: ${label(Number(domain[0].toPrecision(2)))} to ${label(Number(domain[1].toPrecision(2)))}`;
  if (side === "bottom") words(root, area.left, start + MARGINAL - 2, says, { class: "t small" });
  else words(root, start + MARGINAL - 16, area.bottom + 16, says, { class: "t small", "text-anchor": "end" });
}
