/** The live page's whole state as the part of an address after `#`, so that a link shows others the same. */

import { readFragment, type State } from "../fragment";
import type { Break, BreakKind } from "./types";

export type View = "explore" | "lesson" | "quiz";

export interface LiveState {
  view: View;
  /** Step of the lesson, from 0. */
  step: number;
  /** `""` is the server's default. */
  model: string;
  text: string;
  /** Place of the chosen word; null is the last. */
  word: number | null;
  broken: Break | null;
  /** The sentence beside this one, and the place of its word. */
  other: { text: string; word: number | null } | null;
  /** What the charts share: floor, token, theme, switches. */
  cursor: State;
}

export const VIEWS: readonly View[] = ["explore", "lesson", "quiz"];
const KINDS: readonly BreakKind[] = ["skip", "zero", "scale", "noise"];
const LONGEST = 2000;

function whole(text: string | null): number | null {
  return text !== null && /^\d{1,5}$/.test(text) ? Number(text) : null;
}

/** Return a break as it is written, `skip:37:block` or `scale:3,4:mlp:0.5`; null for one that is written wrongly. */
export function readBreak(text: string | null): Break | null {
  const [, kind = "", blocks = "", part = "", size] = /^(\w+):(\d{1,4}(?:,\d{1,4}){0,63}):(\w{1,20})(?::(-?\d{1,3}(?:\.\d{1,4})?))?$/.exec(text ?? "") ?? [];
  const found = KINDS.find((k) => k === kind);
  if (!found) return null;
  const broken: Break = { kind: found, blocks: blocks.split(",").map(Number), part };
  if (found === "scale") broken.factor = size === undefined ? 0.5 : Number(size);
  if (found === "noise") Object.assign(broken, { size: size === undefined ? 1 : Math.abs(Number(size)), seed: 0 });
  return broken;
}

export function writeBreak(broken: Break): string {
  const size = broken.kind === "scale" ? broken.factor : broken.kind === "noise" ? broken.size : undefined;
  return [broken.kind, broken.blocks.join(","), broken.part, ...(size === undefined ? [] : [Number(size.toFixed(4))])].join(":");
}

/** Return the state that a fragment says; what it does not say, or says wrongly, is as at the start. */
export function readAddress(hash: string): LiveState {
  const text = hash.replace(/^#/, "");
  const at = text.indexOf("?");
  const name = at < 0 ? text : text.slice(0, at);
  const query = new URLSearchParams(at < 0 ? "" : text.slice(at + 1));
  const other = query.get("other");
  const model = query.get("model") ?? "";
  return {
    view: VIEWS.find((v) => v === name) ?? "explore",
    step: whole(query.get("step")) ?? 0,
    model: /^[\w./-]{1,120}$/.test(model) ? model : "",
    text: (query.get("text") ?? "").slice(0, LONGEST),
    word: whole(query.get("word")),
    broken: readBreak(query.get("break")),
    other: other ? { text: other.slice(0, LONGEST), word: whole(query.get("otherword")) } : null,
    cursor: { ...readFragment(hash), figure: null, token: null },
  };
}

/** Return the fragment of a state; the quiz has no state of its own in it, for it would give answers away. */
export function writeAddress(state: LiveState, defaultModel: string): string {
  const query = new URLSearchParams();
  if (state.view === "lesson") query.set("step", String(state.step));
  if (state.model && state.model !== defaultModel) query.set("model", state.model);
  if (state.text) query.set("text", state.text);
  if (state.word !== null) query.set("word", String(state.word));
  if (state.broken) query.set("break", writeBreak(state.broken));
  if (state.other) query.set("other", state.other.text);
  if (state.other && state.other.word !== null) query.set("otherword", String(state.other.word));
  const { cursor } = state;
  if (cursor.pinned && cursor.floor !== null) query.set("floor", String(cursor.floor));
  if (cursor.theme !== "auto") query.set("theme", cursor.theme);
  for (const key of Object.keys(cursor.switches).sort()) query.set(key, cursor.switches[key] ?? "");
  const said = query.toString().replaceAll("%2C", ",").replaceAll("%3A", ":");
  return `#${state.view}${said ? `?${said}` : ""}`;
}
