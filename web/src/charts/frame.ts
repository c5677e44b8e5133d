/** The frame of a plot: axes with ticks and labels, rules, and the cursor's line. */

import { axisBottom, axisLeft, axisRight, type AxisScale } from "d3-axis";
import { scaleLinear, scaleLog } from "d3-scale";
import { select } from "d3-selection";
import { html, round, svg, words } from "../dom";
import { label, short } from "../format";
import type { Axis } from "../schema";
import { ticks, type Place } from "../scales";

/** Pixels of a plot inside its picture. */
export interface Area {
  left: number;
  right: number;
  top: number;
  bottom: number;
}

/** Return what an axis says at a tick: its name for the place, or the figure. */
export function named(axis: Axis, value: number, most = 12): string {
  if (axis.names && Number.isInteger(value) && axis.names[value] !== undefined) return short(axis.names[value], most);
  return label(value);
}

/** Return a picture of a size, which grows with the page but keeps its shape. */
export function picture(plot: HTMLElement, width: number, height: number): SVGSVGElement {
  plot.style.setProperty("aspect-ratio", `${width} / ${height}`);
  return svg(plot, "svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", focusable: "false" });
}

function d3Scale(at: Place, range: [number, number]): AxisScale<number> {
  return (at.kind === "log" ? scaleLog([at.low, at.high], range) : scaleLinear([at.low, at.high], range)) as AxisScale<number>;
}

/** Draw the x axis below an area. */
export function bottomAxis(parent: SVGSVGElement, axis: Axis, at: Place, area: Area, withLabel = true): void {
  const most = Math.max(2, Math.min(6, Math.floor((area.right - area.left) / 55)));
  const values = tickValues(axis, at, most);
  const made = axisBottom<number>(d3Scale(at, [area.left, area.right]))
    .tickValues(values)
    .tickFormat((v) => named(axis, v))
    .tickSizeOuter(0)
    .tickSize(4)
    .tickPadding(4);
  select(svg(parent, "g", { class: "axis", transform: `translate(0 ${area.bottom})` })).call(made);
  if (axis.floors && (area.right - area.left) / (at.high - at.low) >= 6) {
    let minor = "";
    for (let v = Math.ceil(at.low); v <= at.high; v++) minor += `M${round(at(v))} ${area.bottom}v2`;
    svg(parent, "path", { class: "tick-minor", d: minor });
  }
  if (withLabel) words(parent, (area.left + area.right) / 2, area.bottom + 34, axis.label, { "text-anchor": "middle" });
}

/** Draw the y axis left of an area, its label above it, and a rule at every tick. */
export function leftAxis(parent: SVGSVGElement, axis: Axis, at: Place, area: Area, options: { rules?: boolean } = {}): void {
  const values = tickValues(axis, at, Math.max(2, Math.min(6, Math.floor((area.bottom - area.top) / 28))));
  if (options.rules !== false) {
    const d = values.map((v) => `M${area.left} ${round(at(v))}H${area.right}`).join("");
    svg(parent, "path", { class: "rule", d });
  }
  const made = axisLeft<number>(d3Scale(at, [at(at.low), at(at.high)]))
    .tickValues(values)
    .tickFormat((v) => named(axis, v, 8))
    .tickSizeOuter(0)
    .tickSize(0)
    .tickPadding(7);
  const group = select(svg(parent, "g", { class: "axis left", transform: `translate(${area.left} 0)` }));
  group.call(made);
  group.select(".domain").remove();
  words(parent, 1, 11, short(axis.label + (at.kind === "log" ? " (log)" : ""), Math.floor(area.right / 6.2)), { class: "t small" });
}

/** Draw the axis of a colour bar, right of it. */
export function rightAxis(parent: SVGSVGElement, axis: Axis, at: Place, x: number): void {
  const made = axisRight<number>(d3Scale(at, [at(at.low), at(at.high)]))
    .tickValues(ticks(axis, at))
    .tickFormat((v) => label(v))
    .tickSizeOuter(0)
    .tickSize(3)
    .tickPadding(3);
  const group = select(svg(parent, "g", { class: "axis", transform: `translate(${x} 0)` }));
  group.call(made);
  group.select(".domain").remove();
}

function tickValues(axis: Axis, at: Place, most: number): number[] {
  if (!axis.names) return ticks(axis, at, most);
  const first = Math.max(0, Math.ceil(at.low));
  const last = Math.min(axis.names.length - 1, Math.floor(at.high));
  const step = Math.max(1, Math.ceil((last - first + 1) / most));
  const found: number[] = [];
  for (let n = first; n <= last; n += step) found.push(n);
  return found;
}

/** A line that follows the cursor, moved by the compositor alone. */
export class CursorLine {
  private readonly element: HTMLElement;

  constructor(
    plot: HTMLElement,
    private readonly kind: "upright" | "level",
    private readonly size: readonly [number, number],
    area: Area,
  ) {
    this.element = html("div", { class: `cursor ${kind}` });
    const percent = (value: number, whole: number): string => `${(100 * value) / whole}%`;
    const [width, height] = size;
    if (kind === "upright") {
      this.element.style.top = percent(area.top, height);
      this.element.style.height = percent(area.bottom - area.top, height);
    } else {
      this.element.style.left = percent(area.left, width);
      this.element.style.width = percent(area.right - area.left, width);
    }
    this.element.hidden = true;
    plot.append(this.element);
  }

  /** Put the line at a pixel of the picture, or hide it. */
  move(at: number | null): void {
    const isShown = at !== null && Number.isFinite(at);
    if (this.element.hidden === isShown) this.element.hidden = !isShown;
    if (!isShown) return;
    const side = this.kind === "upright" ? "left" : "top";
    const whole = this.kind === "upright" ? this.size[0] : this.size[1];
    this.element.style[side] = `${(100 * at) / whole}%`;
  }
}
