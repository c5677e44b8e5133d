/** A chart as a file: SVG and PNG as on paper, CSV and JSON of its figures. */

import { html, round, svg, words } from "./dom";
import { visible } from "./format";
import type { Card } from "./card";

const PAINTED = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "paint-order", "font-size", "font-weight", "opacity", "visibility"];
const FONT = "system-ui, 'Liberation Sans', 'DejaVu Sans', sans-serif";
const PNG_SCALE = 2;

export type Kind = "svg" | "png" | "csv" | "json";
export const KINDS: readonly (readonly [Kind, string])[] = [["svg", "SVG"], ["png", "PNG"], ["csv", "CSV"], ["json", "JSON"]];

/** Let the browser save a chart under the name of its place in the report. */
export async function save(kind: Kind, card: Card): Promise<void> {
  const name = `${card.id}.${kind}`;
  if (kind === "csv") return download(name, new Blob([csv(card.rows())], { type: "text/csv;charset=utf-8" }));
  if (kind === "json") {
    const { honesty, finding, title } = card.figure;
    const text = JSON.stringify({ figure: title, finding, honesty, chart: card.chart }, replaceNumbers, 1);
    return download(name, new Blob([text], { type: "application/json" }));
  }
  const picture = standalone(card);
  const text = `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(picture)}`;
  if (kind === "svg") return download(name, new Blob([text], { type: "image/svg+xml" }));
  download(name, await png(text, Number(picture.getAttribute("width")), Number(picture.getAttribute("height"))));
}

/** JSON has no word for a number that is not finite; Python's names are kept. */
function replaceNumbers(_key: string, value: unknown): unknown {
  if (typeof value !== "number" || Number.isFinite(value)) return value;
  return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

/** Return rows as CSV (RFC 4180); a text that a spreadsheet would take for a formula begins with an apostrophe. */
export function csv(rows: readonly (readonly (string | number | null)[])[]): string {
  const cell = (value: string | number | null): string => {
    if (value === null) return "";
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

function download(name: string, blob: Blob): void {
  const link = html("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Return a chart with title, legend and provenance as one picture in the colours of paper. */
export function standalone(card: Card): SVGSVGElement {
  const source = card.plot.querySelector("svg");
  if (!source) throw new Error("a chart without a picture");
  const [, , width = 0, height = 0] = (source.getAttribute("viewBox") ?? "").split(" ").map(Number);
  const host = html("div", { class: "paper", "aria-hidden": "true" });
  document.body.append(host);
  const root = svg(host, "svg", { xmlns: "http://www.w3.org/2000/svg", "font-family": FONT });
  svg(root, "rect", { width: "100%", height: "100%", fill: "#ffffff" });
  let top = 20;
  const heading = card.chart.subject ? `${card.chart.subject}: ${card.chart.title}` : card.chart.title;
  for (const row of wrapped(heading, Math.floor(width / 7.2))) top = line(root, row, top, "t title", 17);
  top = legend(root, card, top + 2, width);
  const picture = source.cloneNode(true) as SVGSVGElement;
  for (const mark of picture.querySelectorAll(".here")) mark.remove();
  Object.entries({ x: 0, y: top - 8, width, height }).forEach(([k, v]) => picture.setAttribute(k, String(v)));
  root.append(picture);
  for (const canvas of card.plot.querySelectorAll("canvas")) embed(picture, canvas);
  const over = card.plot.querySelector("svg.over");
  if (over) picture.append(...[...over.cloneNode(true).childNodes]);
  top += height + 8;
  for (const row of wrapped(card.figure.honesty, Math.floor(width / 5.2))) top = line(root, row, top, "t small", 13);
  for (const [name, value] of Object.entries({ width, height: round(top), viewBox: `0 0 ${width} ${round(top)}` })) {
    root.setAttribute(name, String(value));
  }
  for (const element of root.querySelectorAll("*")) inline(element);
  host.remove();
  return root;
}

function line(root: SVGSVGElement, says: string, top: number, css: string, height: number): number {
  words(root, 4, top, says, { class: css });
  return top + height;
}

function legend(root: SVGSVGElement, card: Card, top: number, width: number): number {
  let at = 4;
  let row = top;
  for (const { name, role, sample } of card.legend()) {
    if (sample === "none" || !name) continue;
    const long = 28 + 6.3 * name.length;
    if (at > 4 && at + long > width) [at, row] = [4, row + 16];
    const group = svg(root, "g", { class: `r-${role}` });
    if (sample === "dots") svg(group, "circle", { class: "mark", cx: at + 8, cy: row - 4, r: 3 });
    else svg(group, "path", { class: `line ${sample}`, d: `M${at} ${row - 4}h16` });
    words(root, at + 21, row, name);
    at += long;
  }
  return at > 4 ? row + 14 : row;
}

function embed(picture: SVGSVGElement, canvas: HTMLCanvasElement): void {
  const [x = "0", y = "0", width = "0", height = "0"] = (canvas.dataset["area"] ?? "").split(" ");
  const image = svg(null, "image", { href: canvas.toDataURL(), x, y, width, height, preserveAspectRatio: "none" });
  image.style.imageRendering = "pixelated"; // not as an attribute, which the live page's policy refuses
  // The hatch of what has no figure lies below, axes above.
  const first = picture.querySelector("rect");
  if (first) first.after(image);
  else picture.prepend(image);
}

/** Write what the page's style sheet says of an element onto it, for readers of SVG that have no such sheet. */
function inline(element: Element): void {
  if (!(element instanceof SVGElement) || element.tagName === "image" || element.closest("defs,clipPath")?.tagName === "clipPath") return;
  const style = getComputedStyle(element);
  for (const name of PAINTED) {
    const value = style.getPropertyValue(name);
    const isText = element.tagName === "text" || element.tagName === "tspan";
    if (!value || (name.startsWith("font") && !isText)) continue;
    if (name === "fill" && element.getAttribute("fill")?.startsWith("url(")) continue;
    element.setAttribute(name, value);
  }
  element.removeAttribute("class");
  element.removeAttribute("style");
}

function wrapped(text: string, most: number): string[] {
  const rows: string[] = [];
  for (const word of visible(text).split(/\s+/)) {
    const last = rows.at(-1);
    if (last !== undefined && last.length + word.length < most) rows[rows.length - 1] = `${last} ${word}`;
    else rows.push(word);
  }
  return rows;
}

function png(text: string, width: number, height: number): Promise<Blob> {
  const canvas = html("canvas", { width: Math.round(width * PNG_SCALE), height: Math.round(height * PNG_SCALE) });
  const image = new Image();
  return new Promise((resolve, reject) => {
    image.addEventListener("error", () => reject(new Error("the picture could not be drawn")));
    image.addEventListener("load", () => {
      canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("the picture is too large"))));
    });
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  });
}
