/**
 * One token on its way up, block 0 at the bottom.
 *
 * Size: a shaft as wide as the logarithm of the stream's norm, attention's writes to the left, feed-forward's to the
 * right. Meaning: the signed part that each write has of a direction, which add up, and beside them their running sum,
 * which ends at the model's own figure. Not a Sankey diagram: norms of vectors do not add.
 */

import { html, round, svg, words } from "../dom";
import type { State } from "../fragment";
import { label, reading, short, signed, unit } from "../format";
import { domainOf, floorTicks, isPlaced, place, type Place } from "../scales";
import type { Axis, ScaleKind, Tower, Value } from "../schema";
import type { Box, Drawn, Form, Pointed, Reading, Switch } from "./chart";
import { CursorLine, picture } from "./frame";

const LABELLED = 8;
const LEFT = 34;
const TOP = 24;

function hasParts(chart: Tower): boolean {
  return chart.direction !== null && chart.rooms.some((room) => room.running !== null);
}

export const tower: Form<Tower> = {
  switches(chart, chosen): Switch[] {
    const value = chosen("view") === "meaning" && hasParts(chart) ? "meaning" : "size";
    const scale = chosen("scale") === "linear" ? "linear" : "log";
    const found: Switch[] = [];
    if (hasParts(chart)) found.push({ name: "view", label: "Show", options: [["size", "size"], ["meaning", "meaning"]], value });
    if (value === "size") found.push({ name: "scale", label: "Scale", options: [["log", "log"], ["linear", "linear"]], value: scale });
    return found;
  },

  draw(chart, box) {
    return new DrawnTower(chart, box);
  },

  rows(chart) {
    const head = ["block", "norm of the stream after it", "attention", "feed-forward", "part of attention", "part of feed-forward", "running"];
    return [
      head,
      ["before", chart.start_norm, null, null, null, null, chart.start],
      ...chart.rooms.map((r, i) => [i, r.norm, r.attention, r.feed_forward, r.attention_part, r.feed_forward_part, r.running]),
    ];
  },
};

class DrawnTower implements Drawn {
  private readonly step0: number;
  private readonly bottom: number;
  private readonly cursor: CursorLine;
  private readonly isMeaning: boolean;

  constructor(private readonly chart: Tower, private readonly box: Box) {
    const rooms = chart.rooms.length;
    this.step0 = Math.min(16, Math.max(3, Math.round(620 / Math.max(rooms, 1))));
    this.bottom = TOP + this.step0 * rooms;
    this.isMeaning = box.chosen("view") === "meaning" && hasParts(chart);
    const height = this.bottom + 40;
    const root = picture(box.plot, box.width, height);
    this.drawFloors(root);
    if (this.isMeaning) this.drawMeaning(root);
    else this.drawSize(root);
    this.drawBroken(root);
    const area = { left: LEFT, right: box.width, top: TOP, bottom: this.bottom };
    this.cursor = new CursorLine(box.plot, "level", [box.width, height], area);
    box.plot.append(html("span", { class: "tower-token", "aria-hidden": "true" }, short(chart.token, 24)));
  }

  /** Middle of a block's room. */
  private level(floor: number): number {
    return this.bottom - this.step0 * (floor + 0.5);
  }

  private drawFloors(root: SVGSVGElement): void {
    const group = svg(root, "g", { class: "axis" });
    for (const floor of floorTicks(0, this.chart.rooms.length - 1)) {
      words(group, LEFT - 8, this.level(floor) + 3.5, String(floor), { "text-anchor": "end" });
      svg(group, "path", { class: "rule", d: `M${LEFT - 4} ${round(this.level(floor))}H${this.box.width}` });
    }
    words(root, 1, 11, unit.block, { class: "t small" });
  }

  private drawSize(root: SVGSVGElement): void {
    const { chart, box } = this;
    const kind: ScaleKind = box.chosen("scale") === "linear" ? "linear" : "log";
    const norms = chart.rooms.flatMap((r) => [r.attention, r.feed_forward]);
    const middle = LEFT + (box.width - LEFT) / 2;
    const reach = (box.width - LEFT) / 2 - 44;
    const length = place(lengths(norms, kind), [0, reach], kind);
    const shaft = place(lengths([chart.start_norm, ...chart.rooms.map((r) => r.norm), ...(chart.whole?.norm ?? [])], "log"), [7, 34], "log");
    this.drawShaft(root, middle, shaft);
    if (chart.whole) this.drawWhole(root, middle, shaft, chart.whole.norm);
    chart.rooms.forEach((room, floor) => {
      const top = this.level(floor) - this.step0 / 2 + 0.5;
      const tall = Math.max(1.5, this.step0 - 1.2);
      for (const [value, role, sign] of [[room.attention, "attention", -1], [room.feed_forward, "feed_forward", 1]] as const) {
        if (!isPlaced(value, kind)) {
          if (value !== null && !Number.isFinite(value)) words(root, middle + sign * 48, top + tall, "∞", { class: "t small" });
          continue;
        }
        const from = middle + sign * 39;
        const to = from + sign * length(value);
        svg(svg(root, "g", { class: `r-${role}` }), "path", { class: "mark", d: `M${round(from)} ${round(top)}H${round(to)}v${round(tall)}H${round(from)}z` });
        if (chart.collar === "read" && this.step0 >= 5) {
          svg(root, "path", { class: "collar", d: `M${round(from - sign * 2.2)} ${round(top)}v${round(tall)}` });
        }
      }
    });
    const ends = `${label(Number(length.low.toPrecision(2)))} to ${label(Number(length.high.toPrecision(2)))}`;
    words(root, middle - 44, this.bottom + 16, "◀ attention writes", { "text-anchor": "end", class: "t r-attention ink" });
    words(root, middle, this.bottom + 16, "stream", { "text-anchor": "middle" });
    words(root, middle + 44, this.bottom + 16, "feed-forward writes ▶", { class: "t r-feed_forward ink" });
    const collar = chart.collar === "read" ? "norm on the read arm, the shaft untouched" : "norm on the shaft itself";
    words(root, middle, this.bottom + 32, `norms, ${kind === "log" ? "log, " : ""}${ends}; ${collar}`, { "text-anchor": "middle", class: "t small" });
  }

  /** As many shafts as there are streams, each a part of the width. */
  private drawShaft(root: SVGSVGElement, middle: number, width: Place): void {
    const { chart } = this;
    const sizes = [chart.start_norm, ...chart.rooms.map((r) => r.norm)].map((v) => (isPlaced(v, "log") ? width(v) : 2));
    const streams = Math.max(1, Math.min(8, chart.streams));
    const group = svg(root, "g", { class: "r-stream" });
    for (let n = 0; n < streams; n++) {
      const edge = (i: number, side: number): string => {
        const half = sizes[i] ?? 2;
        const share = (n + (side > 0 ? 1 : 0)) / streams;
        const gap = streams > 1 ? (side > 0 ? -0.8 : 0.8) : 0;
        return `${round(middle - half + 2 * half * share + gap)},${round(this.bottom - this.step0 * i)}`;
      };
      const up = sizes.map((_, i) => edge(i, -1));
      const down = sizes.map((_, i) => edge(i, 1)).reverse();
      svg(group, "path", { class: "shaft", d: `M${[...up, ...down].join("L")}Z` });
    }
    if (chart.collar !== "shaft") return;
    const d = sizes.slice(1).map((half, i) => `M${round(middle - half - 3)} ${round(this.bottom - this.step0 * (i + 1))}h${round(2 * half + 6)}`);
    svg(root, "path", { class: "collar", d: d.join("") });
  }

  /** The outline of the shaft as it is without the break. */
  private drawWhole(root: SVGSVGElement, middle: number, width: Place, norms: readonly Value[]): void {
    for (const side of [-1, 1]) {
      const edge = norms.map((v, i) => `${round(middle + side * (isPlaced(v, "log") ? width(v) : 2))},${round(this.bottom - this.step0 * i)}`);
      svg(root, "path", { class: "whole-line", d: `M${edge.join("L")}` });
    }
  }

  private drawMeaning(root: SVGSVGElement): void {
    const { chart, box } = this;
    const split = Math.round(LEFT + (box.width - LEFT) * 0.62);
    const parts = chart.rooms.flatMap((r) => [r.attention_part, r.feed_forward_part]);
    const domain = domainOf(plainAxis(), [...parts, 0], "linear");
    const x = place(domain, [LEFT + 8, split - 12], "linear");
    const found: { floor: number; value: number; name: string }[] = [];
    chart.rooms.forEach((room, floor) => {
      const tall = Math.max(1.2, this.step0 / 2 - 0.6);
      for (const [value, role, row] of [[room.attention_part, "attention", 1], [room.feed_forward_part, "feed_forward", 0]] as const) {
        if (!isPlaced(value, "linear")) continue;
        const top = this.level(floor) - (row === 0 ? tall + 0.2 : -0.2);
        const d = `M${round(x(0))} ${round(top)}H${round(x(value))}v${round(tall)}H${round(x(0))}z`;
        svg(svg(root, "g", { class: `r-${role}` }), "path", { class: "mark", d });
        found.push({ floor, value, name: `${role === "attention" ? "attention" : "feed-forward"} ${floor}` });
      }
    });
    svg(root, "path", { class: "ref solid", d: `M${round(x(0))} ${TOP}V${this.bottom}` });
    this.labelLargest(root, found, x, split);
    words(root, (LEFT + split) / 2, this.bottom + 16, short(`part of ${chart.direction ?? ""}`, Math.floor(split / 6.4)), { "text-anchor": "middle" });
    this.drawLift(root, split);
    words(root, LEFT, this.bottom + 33, "The final norm's scale is held as it is at the top, so that the parts add up.", { class: "t small" });
  }

  private labelLargest(root: SVGSVGElement, found: { floor: number; value: number; name: string }[], x: Place, split: number): void {
    const taken: number[] = [];
    for (const { floor, value, name } of found.sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, LABELLED)) {
      const at = this.level(floor) + 3.5;
      if (taken.some((t) => Math.abs(t - at) < 11)) continue;
      taken.push(at);
      const says = `${name} ${signed(Number(value.toPrecision(2)))}`;
      const isRight = value > 0 === x(value) + 6.2 * says.length < split;
      words(root, isRight ? Math.max(x(value), x(0)) + 5 : Math.min(x(value), x(0)) - 5, at, says, {
        class: "t small halo", "text-anchor": isRight ? "start" : "end",
      });
    }
  }

  /** The running sum as the lift's place, which ends at the model's own figure. */
  private drawLift(root: SVGSVGElement, split: number): void {
    const { chart, box } = this;
    const running: Value[] = [chart.start, ...chart.rooms.map((r) => r.running)];
    const x = place(domainOf(plainAxis(), [...running, ...(chart.whole?.running ?? []), chart.end, 0], "linear"), [split + 10, box.width - 12], "linear");
    let d = "";
    running.forEach((value, i) => {
      if (isPlaced(value, "linear")) d += `${d ? "L" : "M"}${round(x(value))},${round(this.bottom - this.step0 * i)}`;
    });
    svg(root, "path", { class: "rule", d: `M${round(x(0))} ${TOP}V${this.bottom}` });
    if (chart.whole) {
      const at = (value: Value, i: number): string => (isPlaced(value, "linear") ? `${round(x(value))},${round(this.bottom - this.step0 * i)}` : "");
      const ghost = chart.whole.running.map(at).filter(Boolean);
      svg(root, "path", { class: "whole-line", d: ghost.length ? `M${ghost.join("L")}` : "" });
    }
    svg(svg(root, "g", { class: "r-stream" }), "path", { class: "line", d });
    words(root, (split + box.width) / 2, this.bottom + 16, "sum so far", { "text-anchor": "middle" });
    if (!isPlaced(chart.end, "linear")) return;
    svg(root, "path", { class: "ref", d: `M${round(x(chart.end))} ${TOP - 4}V${this.bottom}` });
    words(root, Math.min(x(chart.end), box.width - 40), TOP - 9, `model: ${reading(chart.end)}`, { class: "t small", "text-anchor": "middle" });
  }

  private drawBroken(root: SVGSVGElement): void {
    this.chart.rooms.forEach((room, floor) => {
      if (!room.broken) return;
      const top = round(this.level(floor) - this.step0 / 2);
      svg(root, "rect", { class: "broken-room", x: LEFT, y: top, width: this.box.width - LEFT - 2, height: this.step0 });
    });
  }

  point(state: State): void {
    const inside = state.floor !== null && state.floor >= 0 && state.floor < this.chart.rooms.length;
    this.cursor.move(inside ? this.level(state.floor ?? 0) : null);
  }

  at(x: number, y: number): Pointed | null {
    if (x < 0 || x > this.box.width || y < TOP - 4 || y > this.bottom + 4) return null;
    const floor = Math.floor((this.bottom - y) / this.step0);
    return { floor: Math.min(Math.max(floor, 0), this.chart.rooms.length - 1) };
  }

  step(key: string, state: State): Pointed | null {
    const last = this.chart.rooms.length - 1;
    const by: Record<string, number> = { ArrowUp: 1, ArrowDown: -1, PageUp: 12, PageDown: -12, Home: -1e6, End: 1e6 };
    const move = by[key];
    if (move === undefined) return null;
    return { floor: Math.min(Math.max((state.floor ?? (move > 0 ? -1 : last + 1)) + move, 0), last) };
  }

  read(state: State): { where: string; readings: Reading[] } {
    const room = state.floor === null ? undefined : this.chart.rooms[state.floor];
    const one = (name: string, role: string, value: Value | undefined): Reading => ({
      name, role, sample: role === "stream" ? "line" : "dots", value: room === undefined ? "" : reading(value),
    });
    const where = room === undefined ? "" : `${unit.block} ${state.floor}${room.broken ? ", broken" : ""}`;
    const readings = this.isMeaning
      ? [one("attention", "attention", room?.attention_part), one("feed-forward", "feed_forward", room?.feed_forward_part), one("sum so far", "stream", room?.running)]
      : [one("attention", "attention", room?.attention), one("feed-forward", "feed_forward", room?.feed_forward), one("stream", "stream", room?.norm)];
    return { where, readings };
  }
}

function plainAxis(): Axis {
  return { label: "", scale: "linear", domain: null, floors: false, states: false, names: null };
}

/** Limits of what is drawn as a length: from zero, or on a log scale from below the smallest. */
function lengths(values: readonly Value[], kind: ScaleKind): [number, number] {
  const [low, high] = domainOf({ ...plainAxis(), scale: kind }, values, kind);
  return kind === "log" ? [low / 1.6, high] : [0, high];
}
