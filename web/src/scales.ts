/** Where figures lie along an axis; limits and labels as `mainstem.report._axes` has them. */

import { scaleLinear, scaleLog } from "d3-scale";
import type { Axis, ScaleKind, Value } from "./schema";

const MOST_TICKS = 6;
const FLOOR_STEPS = [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256];

/** An axis laid onto pixels. */
export interface Place {
  (value: number): number;
  kind: ScaleKind;
  low: number;
  high: number;
  invert(pixel: number): number;
}

/** Return whether a figure has a place on a scale of this kind. */
export function isPlaced(value: Value | undefined, kind: ScaleKind): value is number {
  return typeof value === "number" && Number.isFinite(value) && (kind === "linear" || value > 0);
}

/** Return the limits of an axis: its own, or those of the figures that can be placed on it. */
export function domainOf(axis: Axis, values: Iterable<Value>, kind: ScaleKind = axis.scale): [number, number] {
  if (axis.domain && isPlaced(axis.domain[0], kind)) return axis.domain;
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!isPlaced(value, kind)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return kind === "log" ? [0.1, 1] : [0, 1];
  if (kind === "log") return [low / 1.25, high * 1.25];
  if (axis.floors) return [low, Math.max(high, low + 1)];
  const margin = 0.06 * (high - low) || 0.5 * Math.abs(high) || 1;
  return [low >= 0 && low < margin ? 0 : low - margin, high + margin];
}

/** Return the place of figures between two pixels; beyond the ends it is that of the end. */
export function place(domain: [number, number], range: [number, number], kind: ScaleKind): Place {
  const scale = kind === "log" ? scaleLog(domain, range).clamp(true) : scaleLinear(domain, range).clamp(true);
  const at = (value: number): number => scale(value);
  return Object.assign(at, { kind, low: domain[0], high: domain[1], invert: (pixel: number) => scale.invert(pixel) });
}

/** Return the figures that get a label, at most about six. */
export function ticks(axis: Axis, scale: Place, most = MOST_TICKS): number[] {
  if (axis.floors) return floorTicks(scale.low, scale.high, most + 3);
  return scale.kind === "log" ? decades(scale.low, scale.high, most) : even(scale.low, scale.high, most);
}

/** Return floors to label: every first, second, 4th, 12th, 16th ... so that few enough are left. */
export function floorTicks(low: number, high: number, most = 9): number[] {
  const number = high - low;
  const step = FLOOR_STEPS.find((s) => number / s <= most) ?? Math.ceil(number / most);
  return range(Math.ceil(low / step) * step, high, step);
}

function range(first: number, last: number, step: number): number[] {
  const found: number[] = [];
  for (let n = 0; first + n * step <= last + step * 1e-9; n++) found.push(first + n * step);
  return found;
}

function even(low: number, high: number, most: number): number[] {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999) ?? 10 * power;
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  const found: number[] = [];
  for (let n = first; n <= last; n++) found.push(Number((n * step).toPrecision(12)));
  return found;
}

function decades(low: number, high: number, most: number): number[] {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const found: number[] = [];
  if (last - first >= 2) {
    const step = Math.ceil((last - first + 1) / most);
    for (let n = first; n <= last; n += step) found.push(10 ** n);
    return found;
  }
  for (let n = first - 1; n <= last; n++) {
    for (const m of [1, 2, 5]) {
      const value = Number(`${m}e${n}`);
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found.length >= 2 ? found : even(low, high, most);
}

/** Return the place on an axis of what block `floor` leaves; null where the axis does not have it. */
export function onAxis(axis: Axis, floor: number | null): number | null {
  if (floor === null || !axis.floors) return null;
  if (axis.states) return floor + 1;
  return floor < 0 ? null : floor;
}

/** Return the block that a place on an axis of floors belongs to; -1 is the state before block 0. */
export function floorAt(axis: Axis, place: number): number {
  return axis.states ? place - 1 : place;
}
