/** The bar above the charts: the strip of blocks, the colours, the help. */

import { html, say, svg } from "./dom";
import type { State, Theme } from "./fragment";
import { isPlaced, place } from "./scales";
import type { Report, Value } from "./schema";

const THEMES: readonly (readonly [Theme, string])[] = [["auto", "Auto"], ["light", "Light"], ["dark", "Dark"]];

export interface Bar {
  root: HTMLElement;
  show(state: State): void;
}

export interface BarActions {
  floor(floor: number): void;
  theme(theme: Theme): void;
  unpin(): void;
  help(): void;
}

/** Return the bar: a strip to choose a block from, the state of the cursor, the theme and the help. */
export function bar(report: Report, depth: number, act: BarActions): Bar {
  const where = html("output", { class: "bar-where" });
  const strip = html("div", { class: "strip" });
  const range = html("input", { type: "range", min: 0, max: Math.max(depth - 1, 0), step: 1, value: 0, "aria-label": "Block" });
  const pin = html("div", { class: "strip-pin", hidden: "" });
  strip.append(profile(report, depth), pin, range);
  range.addEventListener("input", () => act.floor(Number(range.value)));
  const release = html("button", { type: "button", hidden: "", title: "Release the block (Esc)" }, "Release");
  release.addEventListener("click", act.unpin);
  const themes = html("span", { class: "switch themes", role: "group", "aria-label": "Colours" });
  const buttons = THEMES.map(([theme, name]) => {
    const button = html("button", { type: "button" }, name);
    button.addEventListener("click", () => act.theme(theme));
    themes.append(button);
    return [theme, button] as const;
  });
  const help = html("button", { type: "button", "aria-label": "Keys and help", title: "Keys and help (?)" }, "?");
  help.addEventListener("click", act.help);
  const cursor = depth > 0 ? [html("span", { class: "bar-cursor" }, where, strip, release)] : [];
  const root = html("div", { class: "bar", role: "region", "aria-label": "Cursor and colours" }, ...cursor, themes, help);

  return {
    root,
    show(state): void {
      const { floor } = state;
      say(where, floor === null ? `${depth} blocks` : floor < 0 ? "before block 0" : `block ${floor} of ${depth}`);
      if (release.hidden === state.pinned) release.hidden = !state.pinned;
      root.classList.toggle("pinned", state.pinned);
      const at = Math.max(floor ?? 0, 0);
      if (range.valueAsNumber !== at) range.value = String(at);
      range.setAttribute("aria-valuetext", floor === null ? "no block chosen" : `block ${at}`);
      if (pin.hidden !== (floor === null)) pin.hidden = floor === null;
      pin.style.left = `${(100 * (at + 0.5)) / Math.max(depth, 1)}%`;
      for (const [theme, button] of buttons) button.setAttribute("aria-pressed", String(theme === state.theme));
    },
  };
}

/** A bar a block: the size of the stream, where the report has it, so that the strip shows what it leads to. */
function profile(report: Report, depth: number): SVGSVGElement {
  const sizes: Value[] = new Array<Value>(depth).fill(null);
  const growth = report.figures.find((f) => f.id === "growth")?.charts[0];
  if (growth?.form === "lines") {
    const series = growth.series.find((s) => s.role === "stream");
    series?.x.forEach((x, i) => {
      const floor = growth.x.states ? x - 1 : x;
      if (floor >= 0 && floor < depth) sizes[floor] = series.y[i] ?? null;
    });
  }
  const found = sizes.filter((v): v is number => isPlaced(v, "log"));
  const height = place(found.length ? [Math.min(...found) / 2, Math.max(...found) * 1.01] : [0.1, 1], [2, 20], "log");
  const root = svg(null, "svg", { viewBox: `0 0 ${Math.max(depth, 1)} 22`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const d = sizes.map((v, i) => `M${i + 0.1} 22V${22 - (isPlaced(v, "log") ? height(v) : 4)}h.8V22z`).join("");
  svg(root, "path", { class: "strip-bars", d });
  return root;
}

/** Return the dialog that says which keys do what. */
export function helpDialog(hasTokens: boolean): HTMLDialogElement {
  const keys: [string, string][] = [
    ["↑ ↓", "one block up or down, in a chart that has the focus"],
    ["← →", hasTokens ? "one token, or one place along the chart" : "one place along the chart"],
    ["PgUp PgDn", "twelve blocks"],
    ["Home End", "first and last"],
    ["click", "pin the block; again, or Esc, releases it"],
    ["drag, +", "zoom into a grid; 0 or a double click shows the whole"],
    ["?", "this help"],
    ["Esc", "close, or release the block"],
  ];
  const list = html("dl", {});
  for (const [key, does] of keys) list.append(html("dt", {}, html("kbd", {}, key)), html("dd", {}, does));
  const close = html("button", { type: "button", autofocus: "" }, "Close");
  const dialog = html("dialog", { "aria-labelledby": "help-title", class: "help" }, html("h2", { id: "help-title" }, "Keys"), list);
  dialog.append(html("p", { id: "keys" }, "All charts share one cursor. The address keeps what you pinned: copy it to show others the same."), close);
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  return dialog;
}
