/** The report's page: its charts, the cursor they share, the bar above them, the keys, and the address. */

import { Card, type Listener } from "./card";
import type { Pointed } from "./charts/chart";
import { bar, helpDialog, type Bar } from "./controls";
import { html, say } from "./dom";
import { readFragment, writeFragment, type State, type Theme } from "./fragment";
import { depthOf, type Report } from "./schema";

const ADDRESS_AFTER_MS = 150;
const SPEAK_AFTER_MS = 120;

export class Page implements Listener {
  private current: State;
  private readonly cards: Card[] = [];
  private readonly depth: number;
  private readonly voice = html("div", { class: "voice", "aria-live": "polite", role: "status" });
  private readonly bar: Bar;
  private readonly dialog: HTMLDialogElement;
  private active: Card | null = null;
  private isDue = false;
  private addressTimer = 0;
  private speakTimer = 0;

  constructor(private readonly report: Report) {
    this.current = readFragment(location.hash);
    this.depth = depthOf(report);
    this.dialog = helpDialog(this.hasTokens());
    this.bar = bar(report, this.depth, {
      floor: (floor) => this.move({ floor }, "key"),
      theme: (theme) => this.setTheme(theme),
      unpin: () => this.unpin(),
      help: () => this.help(),
    });
  }

  state(): State {
    return this.current;
  }

  /** Put the charts in the place of the static ones. */
  start(): void {
    document.documentElement.classList.add("live");
    this.setTheme(this.current.theme);
    document.body.prepend(this.bar.root);
    document.body.append(this.voice, this.dialog);
    const see = new IntersectionObserver((entries) => this.saw(entries), { rootMargin: "200px" });
    for (const figure of this.report.figures) {
      const places = [...(document.getElementById(figure.id)?.querySelectorAll<HTMLElement>(".chart") ?? [])];
      figure.charts.forEach((chart, i) => {
        const place = places[i];
        if (!place) return;
        const card = new Card(`${figure.id}-${i}`, figure, chart, this.depth, this);
        const before = [...place.childNodes];
        place.replaceChildren(card.root);
        try {
          card.draw();
        } catch (error) {
          place.replaceChildren(...before); // the static picture says the same
          console.error(error);
          return;
        }
        this.cards.push(card);
        see.observe(card.root);
      });
    }
    this.listen();
    this.show();
    if (this.current.figure) document.getElementById(this.current.figure)?.scrollIntoView();
  }

  private saw(entries: IntersectionObserverEntry[]): void {
    for (const entry of entries) {
      const card = this.cards.find((c) => c.root === entry.target);
      if (!card) continue;
      card.isVisible = entry.isIntersecting;
      if (card.isVisible) card.point(this.current);
    }
  }

  private listen(): void {
    const resized = new ResizeObserver(() => requestAnimationFrame(() => this.cards.forEach((card) => card.resize())));
    const main = document.querySelector("main");
    if (main) resized.observe(main);
    addEventListener("hashchange", () => this.readAddress());
    document.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("click", (event) => this.closeMenus(event.target));
    for (const link of document.querySelectorAll<HTMLAnchorElement>('nav a[href^="#"]')) {
      link.addEventListener("click", (event) => {
        event.preventDefault();
        this.goTo((link.getAttribute("href") ?? "#").slice(1));
      });
    }
  }

  private goTo(id: string): void {
    this.current.figure = id;
    history.pushState(null, "", writeFragment(this.current));
    const section = document.getElementById(id);
    section?.scrollIntoView();
    section?.querySelector<HTMLElement>("h2")?.focus({ preventScroll: true });
  }

  private readAddress(): void {
    const before = this.current;
    this.current = readFragment(location.hash);
    this.setTheme(this.current.theme);
    for (const card of this.cards) {
      const changed = (s: State): string => Object.entries(s.switches).filter(([k]) => k.startsWith(`${card.id}.`)).join();
      if (changed(before) !== changed(this.current)) card.draw();
    }
    this.show();
    if (this.current.figure) document.getElementById(this.current.figure)?.scrollIntoView();
  }

  private key(event: KeyboardEvent): void {
    const target = event.target as HTMLElement;
    if (event.altKey || event.ctrlKey || event.metaKey || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) && event.key !== "Escape") return;
    if (event.key === "?") {
      event.preventDefault();
      this.help();
    } else if (event.key === "Escape" && !this.dialog.open) {
      if (!this.closeMenus(null)) this.unpin();
    }
  }

  private closeMenus(target: EventTarget | null): boolean {
    let closed = false;
    for (const menu of document.querySelectorAll<HTMLDetailsElement>("details.menu[open]")) {
      if (target instanceof Node && menu.contains(target)) continue;
      menu.open = false;
      closed = true;
      if (target === null) menu.querySelector("summary")?.focus();
    }
    return closed;
  }

  help(): void {
    if (!this.dialog.open) this.dialog.showModal();
  }

  private hasTokens(): boolean {
    return this.report.figures.some((f) => f.charts.some((c) => c.form === "grid" && c.x.names !== null && !c.x.floors));
  }

  private unpin(): void {
    this.current.pinned = false;
    this.move({ floor: null, token: null }, "hover");
    this.address();
  }

  point(card: Card, at: Pointed | null, how: "hover" | "pin" | "key"): void {
    if (how === "hover") {
      if (this.current.pinned) return;
      this.move(at ?? { floor: null }, how);
      return;
    }
    if (!at) return;
    this.active = card;
    this.current.figure = card.figure.id;
    const isSame = how === "pin" && this.current.pinned && at.floor === this.current.floor && (at.token ?? null) === this.current.token;
    if (isSame) this.unpin();
    else this.move(at, how);
  }

  private move(at: Pointed, how: "hover" | "pin" | "key"): void {
    const { current } = this;
    if (at.floor !== undefined) current.floor = at.floor === null ? null : Math.min(Math.max(at.floor, -1), this.depth - 1);
    if (at.token !== undefined) current.token = at.token;
    if (how !== "hover") {
      current.pinned = current.floor !== null || current.token !== null;
      this.address();
      this.speak();
    }
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => this.show());
  }

  /** Bring all that can be seen to the state; what cannot be seen follows when it comes into view. */
  private show(): void {
    this.isDue = false;
    this.bar.show(this.current);
    for (const card of this.cards) if (card.isVisible) card.point(this.current);
  }

  choose(card: Card, name: string, value: string): void {
    const key = `${card.id}.${name}`;
    if (value) this.current.switches[key] = value;
    else if (key in this.current.switches) delete this.current.switches[key];
    else return;
    card.draw();
    this.address();
  }

  private setTheme(theme: Theme): void {
    const { dataset } = document.documentElement;
    if (theme === "auto") delete dataset["theme"];
    else dataset["theme"] = theme;
    this.current.theme = theme;
    this.bar.show(this.current);
    this.address();
  }

  private address(): void {
    clearTimeout(this.addressTimer);
    this.addressTimer = setTimeout(() => {
      const said = writeFragment(this.current);
      if (said !== location.hash) history.replaceState(null, "", said || location.pathname + location.search);
    }, ADDRESS_AFTER_MS);
  }

  private speak(): void {
    clearTimeout(this.speakTimer);
    this.speakTimer = setTimeout(() => {
      const { floor } = this.current;
      const said = this.active?.spoken(this.current) ?? "";
      say(this.voice, said || (floor === null ? "" : floor < 0 ? "before block 0" : `block ${floor}`));
    }, SPEAK_AFTER_MS);
  }
}
