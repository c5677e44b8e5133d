/** The page's state as the part of an address after `#`, so that a link opens the page at a floor. */

export type Theme = "auto" | "light" | "dark";

export interface State {
  /** The block pointed at; -1 is the state before block 0. */
  floor: number | null;
  /** Whether the floor stays when the pointer moves on. */
  pinned: boolean;
  token: number | null;
  figure: string | null;
  theme: Theme;
  /** What a chart's switches say, by `<chart>.<switch>`. */
  switches: Record<string, string>;
}

export const START: Readonly<State> = { floor: null, pinned: false, token: null, figure: null, theme: "auto", switches: {} };

const WORD = /^[\w.-]{1,80}$/;
const CHOICE = /^[\w.,:-]{1,120}$/;

function whole(text: string | null, least: number): number | null {
  if (text === null || !/^-?\d{1,6}$/.test(text)) return null;
  const value = Number(text);
  return value >= least ? value : null;
}

/** Return the state that a fragment says; what it does not say, or says wrongly, is as at the start. */
export function readFragment(hash: string): State {
  const text = hash.replace(/^#/, "");
  const at = text.indexOf("?");
  const figure = at < 0 ? text : text.slice(0, at);
  const query = new URLSearchParams(at < 0 ? "" : text.slice(at + 1));
  const theme = query.get("theme");
  const switches: Record<string, string> = {};
  for (const [key, value] of query) {
    if (key.includes(".") && WORD.test(key) && CHOICE.test(value)) switches[key] = value;
  }
  const floor = whole(query.get("floor"), -1);
  return {
    floor,
    pinned: floor !== null,
    token: whole(query.get("token"), 0),
    figure: WORD.test(figure) ? figure : null,
    theme: theme === "light" || theme === "dark" ? theme : "auto",
    switches,
  };
}

/** Return the fragment of a state, `""` for the start; a floor that is only hovered over is not in it. */
export function writeFragment(state: State): string {
  const query = new URLSearchParams();
  if (state.pinned && state.floor !== null) query.set("floor", String(state.floor));
  if (state.token !== null) query.set("token", String(state.token));
  if (state.theme !== "auto") query.set("theme", state.theme);
  for (const key of Object.keys(state.switches).sort()) query.set(key, state.switches[key] ?? "");
  const said = query.toString().replaceAll("%2C", ",").replaceAll("%3A", ":");
  if (!state.figure && !said) return "";
  return `#${state.figure ?? ""}${said ? `?${said}` : ""}`;
}
