/** One chart on the page: its head with switches and exports, its picture, its legend that reads the cursor. */

import { bars } from "./charts/bars";
import type { Drawn, Form, Pointed, Reading, Switch } from "./charts/chart";
import { grid } from "./charts/grid";
import { lines } from "./charts/lines";
import { tower } from "./charts/tower";
import { html, say } from "./dom";
import { KINDS, save, type Kind } from "./export";
import type { State } from "./fragment";
import type { Chart, Figure } from "./schema";

const FORMS: { [F in Chart["form"]]: Form<Extract<Chart, { form: F }>> } = { lines, grid, bars, tower };
const LEAST_DRAG = 6;

function formOf(chart: Chart): Form<Chart> {
  return FORMS[chart.form] as unknown as Form<Chart>;
}

/** What a card tells the page. */
export interface Listener {
  state(): State;
  /** The pointer, a click or a key points somewhere; null leaves. */
  point(card: Card, at: Pointed | null, how: "hover" | "pin" | "key"): void;
  choose(card: Card, name: string, value: string): void;
  help(): void;
}

export class Card {
  readonly root: HTMLElement;
  readonly plot: HTMLElement;
  private readonly head = html("div", { class: "chart-head" });
  private readonly controls = html("div", { class: "controls" });
  private readonly foot = html("p", { class: "legend" });
  private readonly where = html("span", { class: "where" });
  private readonly values: HTMLElement[] = [];
  private readonly note = html("p", { class: "chart-note" });
  private drawn: Drawn | null = null;
  private width = 0;
  private drag: { x: number; y: number; box: HTMLElement } | null = null;
  isVisible = true;

  constructor(
    readonly id: string,
    readonly figure: Figure,
    readonly chart: Chart,
    private readonly depth: number,
    private readonly page: Listener,
  ) {
    const title = html("h3", { class: "chart-title", id: `${id}-title` });
    if (chart.subject) title.append(html("span", { class: "chart-subject" }, chart.subject), " ");
    title.append(html("span", {}, chart.title));
    this.head.append(title, this.controls);
    // A picture that is worked with arrow keys: a group with a name; what the cursor reads is announced by the page.
    this.plot = html("div", { class: "plot", tabindex: 0, role: "group", "aria-labelledby": `${id}-title`, "aria-describedby": "keys" });
    this.root = html("div", { class: `card ${chart.form}` }, this.head, this.plot, this.foot, this.note);
    this.listen();
    this.legendOnce();
  }

  private chosen = (name: string): string => this.page.state().switches[`${this.id}.${name}`] ?? "";

  /** Draw at the width that the page gives it now. */
  draw(): void {
    const width = Math.round(this.plot.clientWidth || this.root.clientWidth);
    if (width === 0) return;
    this.width = width;
    for (const old of this.root.querySelectorAll(".profile")) old.remove();
    this.plot.replaceChildren();
    this.drawn = formOf(this.chart).draw(this.chart, { id: this.id, plot: this.plot, width, chosen: this.chosen, depth: this.depth });
    say(this.note, this.plot.dataset["note"] ?? "");
    this.drawControls();
    this.point(this.page.state());
  }

  /** Draw again if the page has become wider or narrower. */
  resize(): void {
    if (Math.round(this.plot.clientWidth) !== this.width) this.draw();
  }

  /** Follow the cursor. */
  point(state: State): void {
    if (!this.drawn) return;
    this.drawn.point(state);
    const { where, readings } = this.drawn.read(state);
    say(this.where, where);
    readings.forEach((r, i) => {
      const value = this.values[i];
      if (value) say(value, r.value);
    });
  }

  /** What the cursor reads, as a sentence. */
  spoken(state: State): string {
    if (!this.drawn) return "";
    const { where, readings } = this.drawn.read(state);
    if (!where) return "";
    const said = readings.filter((r) => r.value).map((r) => `${r.name ? `${r.name} ` : ""}${r.value}`);
    return `${where}: ${said.join(", ")}`;
  }

  legend(): Reading[] {
    return this.drawn?.read(this.page.state()).readings ?? [];
  }

  rows(): (string | number | null)[][] {
    return formOf(this.chart).rows(this.chart);
  }

  private legendOnce(): void {
    const probe: Reading[] = this.chart.form === "lines"
      ? this.chart.series.map((s) => ({ name: s.name, role: s.role, sample: s.mark, value: "" }))
      : this.chart.form === "tower"
        ? [["attention", "attention"], ["feed-forward", "feed_forward"], ["stream", "stream"]].map(([name = "", role = ""]) => ({ name, role, sample: "dots" as const, value: "" }))
        : this.chart.form === "grid"
          ? [{ name: this.chart.colour.label, role: "none", sample: "none", value: "" }, { name: "", role: "none", sample: "none", value: "" }]
          : [];
    if (probe.length === 0) return;
    this.foot.append(this.where);
    for (const { name, role, sample } of probe) {
      const value = html("b", {});
      this.values.push(value);
      const sign = sample === "none" ? "" : html("i", { class: `sample r-${role} ${sample}`, "aria-hidden": "true" });
      this.foot.append(html("span", { class: "reading" }, sign, html("span", {}, name), value));
    }
  }

  private drawControls(): void {
    const focused = document.activeElement instanceof HTMLElement && this.controls.contains(document.activeElement) ? document.activeElement.dataset["key"] : undefined;
    const made: HTMLElement[] = formOf(this.chart).switches(this.chart, this.chosen).map((s) => this.toggle(s));
    if (this.chosen("zoom")) {
      const reset = html("button", { type: "button", "data-key": "zoom" }, "Whole");
      reset.addEventListener("click", () => this.page.choose(this, "zoom", ""));
      made.unshift(reset);
    }
    made.push(this.menu());
    this.controls.replaceChildren(...made);
    if (focused) this.controls.querySelector<HTMLElement>(`[data-key="${focused}"]`)?.focus();
  }

  private toggle(s: Switch): HTMLElement {
    const group = html("span", { class: "switch", role: "group", "aria-label": `${s.label}: ${this.chart.title}` });
    for (const [value, name] of s.options) {
      const button = html("button", { type: "button", "aria-pressed": String(value === s.value), "data-key": `${s.name}-${value}` }, name);
      button.addEventListener("click", () => this.page.choose(this, s.name, value));
      group.append(button);
    }
    return group;
  }

  private menu(): HTMLElement {
    const summary = html("summary", { "aria-label": `Save this chart: ${this.chart.title}` }, "Save");
    const list = html("div", { class: "menu-items" });
    const menu = html("details", { class: "menu" }, summary, list);
    for (const [kind, name] of KINDS) {
      const button = html("button", { type: "button", "data-save": kind }, name);
      button.addEventListener("click", () => {
        menu.open = false;
        summary.focus();
        void save(kind as Kind, this);
      });
      list.append(button);
    }
    return menu;
  }

  private listen(): void {
    const { plot, page } = this;
    const where = (event: PointerEvent): [number, number] => {
      const box = plot.getBoundingClientRect();
      const scale = this.width / box.width;
      return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    };
    plot.addEventListener("pointermove", (event) => {
      const [x, y] = where(event);
      if (this.drag) this.stretch(x, y);
      else page.point(this, this.drawn?.at(x, y) ?? null, "hover");
    });
    plot.addEventListener("pointerleave", () => {
      if (!this.drag) page.point(this, null, "hover");
    });
    plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      const [x, y] = where(event);
      if (this.drawn?.zoom && event.pointerType === "mouse") {
        this.drag = { x, y, box: html("div", { class: "brush" }) };
        plot.setPointerCapture(event.pointerId);
      }
    });
    plot.addEventListener("pointerup", (event) => {
      const [x, y] = where(event);
      const drag = this.drag;
      this.drag = null;
      drag?.box.remove();
      if (drag && Math.hypot(x - drag.x, y - drag.y) > LEAST_DRAG) {
        const zoom = this.drawn?.zoom?.(drag.x, drag.y, x, y);
        if (zoom) page.choose(this, "zoom", zoom);
      } else if (event.button === 0) page.point(this, this.drawn?.at(x, y) ?? null, "pin");
    });
    plot.addEventListener("pointercancel", () => {
      this.drag?.box.remove();
      this.drag = null;
    });
    plot.addEventListener("dblclick", () => page.choose(this, "zoom", ""));
    plot.addEventListener("keydown", (event) => this.key(event));
  }

  private stretch(x: number, y: number): void {
    const { drag, plot } = this;
    if (!drag || Math.hypot(x - drag.x, y - drag.y) <= LEAST_DRAG) return;
    const percent = (value: number): string => `${(100 * value) / this.width}%`;
    const height = plot.clientHeight * (this.width / plot.clientWidth);
    const up = (value: number): string => `${(100 * value) / height}%`;
    Object.assign(drag.box.style, { left: percent(Math.min(x, drag.x)), width: percent(Math.abs(x - drag.x)), top: up(Math.min(y, drag.y)), height: up(Math.abs(y - drag.y)) });
    if (!drag.box.isConnected) plot.append(drag.box);
  }

  private key(event: KeyboardEvent): void {
    if (event.altKey || event.ctrlKey || event.metaKey || !this.drawn) return;
    if ((event.key === "+" || event.key === "=") && this.drawn.zoom) return this.zoomBy(event);
    if (event.key === "0" || event.key === "-") {
      if (this.chosen("zoom")) this.page.choose(this, "zoom", "");
      return;
    }
    const to = this.drawn.step(event.key, this.page.state());
    if (!to) return;
    event.preventDefault();
    this.page.point(this, to, "key");
  }

  /** Zoom to a half of what is in view, around the cursor. */
  private zoomBy(event: KeyboardEvent): void {
    const lines = [...this.plot.querySelectorAll<HTMLElement>(".cursor:not([hidden])")];
    const [upright, level] = [lines.find((l) => l.classList.contains("upright")), lines.find((l) => l.classList.contains("level"))];
    const frame = this.plot.querySelector<HTMLElement>(".cells-frame");
    if (!frame || !this.drawn?.zoom) return;
    event.preventDefault();
    const scale = this.width / this.plot.clientWidth;
    const part = (value: number): number => value * scale;
    const [left, top, wide, tall] = [frame.offsetLeft, frame.offsetTop, frame.offsetWidth, frame.offsetHeight].map(part) as [number, number, number, number];
    const x = upright ? part(upright.offsetLeft) : left + wide / 2;
    const y = level ? part(level.offsetTop) : top + tall / 2;
    const x0 = Math.min(Math.max(x - wide / 4, left), left + wide / 2);
    const y0 = Math.min(Math.max(y - tall / 4, top), top + tall / 2);
    const zoom = this.drawn.zoom(x0, y0, x0 + wide / 2, y0 + tall / 2);
    if (zoom) this.page.choose(this, "zoom", zoom);
  }
}
