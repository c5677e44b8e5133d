/** Elements made by hand: text goes in as text, never as markup. */

import { visible } from "./format";

const SVG = "http://www.w3.org/2000/svg";

export type Attributes = Readonly<Record<string, string | number>>;

/** Return an HTML element with attributes and children; a string child is text. */
export function html<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children.map((c) => (typeof c === "string" ? visible(c) : c)));
  return element;
}

/** Return an SVG element with attributes, inside a parent. */
export function svg<K extends keyof SVGElementTagNameMap>(
  parent: Element | null,
  tag: K,
  attributes: Attributes = {},
): SVGElementTagNameMap[K] {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  parent?.append(element);
  return element;
}

/** Return SVG text at a place. */
export function words(parent: Element, x: number, y: number, says: string, attributes: Attributes = {}): SVGTextElement {
  const element = svg(parent, "text", { x: round(x), y: round(y), class: "t", ...attributes });
  element.textContent = visible(says);
  return element;
}

/** Return a place with a tenth of a pixel. */
export function round(value: number): number {
  return Math.round(value * 10) / 10;
}

/** Set the text of an element where it differs, so that nothing is laid out anew for nothing. */
export function say(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}
