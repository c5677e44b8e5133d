/** A figure on the live page: its heading, what it finds, its charts, its figures as a table, where they come from. */

import { Card, type Listener } from "../card";
import { html, say } from "../dom";
import { reading } from "../format";
import type { State } from "../fragment";
import type { Figure } from "../schema";

const MOST_ROWS = 400;

export class Panel {
  readonly root: HTMLElement;
  readonly actions = html("div", { class: "panel-actions" });
  cards: Card[] = [];
  private readonly heading: HTMLElement;
  private readonly finding = html("figcaption", { class: "finding" });
  private readonly charts = html("div", { class: "panel-charts" });
  private readonly table = html("details", { class: "figures" });
  private readonly honesty = html("p", { class: "honesty" });
  private shown = "";

  constructor(
    readonly id: string,
    title: string,
    private readonly page: Listener,
    level: "h2" | "h3" = "h2",
  ) {
    this.heading = html(level, { id: `${id}-heading`, tabindex: -1 }, title);
    const figure = html("figure", { "aria-labelledby": `${id}-heading` }, this.finding, this.charts, this.table, this.honesty);
    this.root = html("section", { class: `panel panel-${id}`, id }, html("div", { class: "panel-head" }, this.heading, this.actions), figure);
    this.table.addEventListener("toggle", () => this.fillTable());
  }

  /** Show a figure; nothing is drawn anew where it is the one shown. */
  show(figure: Figure, depth: number): void {
    const key = JSON.stringify([figure, depth]);
    if (key === this.shown) return;
    this.shown = key;
    const focused = this.cards.findIndex((c) => c.plot === document.activeElement);
    say(this.heading, figure.title);
    say(this.finding, figure.refused ?? figure.finding);
    say(this.honesty, figure.honesty);
    this.cards = figure.charts.map((chart, i) => new Card(figure.charts.length > 1 ? `${figure.id}-${i}` : figure.id, figure, chart, depth, this.page));
    this.charts.replaceChildren(...this.cards.map((c) => c.root));
    for (const card of this.cards) card.draw();
    this.table.hidden = this.cards.length === 0;
    this.table.open = false;
    this.table.replaceChildren(html("summary", {}, "Figures as a table"));
    this.root.classList.remove("is-empty");
    if (focused >= 0) this.cards[focused]?.plot.focus({ preventScroll: true });
  }

  /** Say why there is no figure. */
  empty(says: string): void {
    this.shown = "";
    this.cards = [];
    this.charts.replaceChildren();
    this.table.hidden = true;
    say(this.finding, says);
    say(this.honesty, "");
    this.root.classList.add("is-empty");
  }

  point(state: State): void {
    for (const card of this.cards) card.point(state);
  }

  resize(): void {
    for (const card of this.cards) card.resize();
  }

  private fillTable(): void {
    if (!this.table.open || this.table.childElementCount > 1) return;
    for (const card of this.cards) {
      const [head = [], ...rows] = card.rows();
      const top = html("tr", {}, ...head.map((cell) => html("th", { scope: "col" }, String(cell ?? ""))));
      const body = rows.slice(0, MOST_ROWS).map((row) =>
        html("tr", {}, ...row.map((cell, i) => html(i === 0 ? "th" : "td", i === 0 ? { scope: "row" } : {}, typeof cell === "number" ? (i === 0 ? String(cell) : reading(cell)) : (cell ?? "–")))),
      );
      const table = html("table", {}, html("caption", {}, card.chart.title), html("thead", {}, top), html("tbody", {}, ...body));
      this.table.append(html("div", { class: "table", tabindex: 0, role: "region", "aria-label": `Table: ${card.chart.title}` }, table));
    }
  }
}
