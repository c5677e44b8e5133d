/** The live page's charts and sentences, from what the server measured. */

import { reading, short, visible } from "../format";
import type { Axis, Figure, Grid, Lines, Room, Series, Tower, Value } from "../schema";
import type { Break, Comparison, Damage, GradientResult, Honesty, MatrixResult, Model, Seen, Spread, TowerAnswer } from "./types";

/** What is on the page: the tower that is looked at, the same without its break, and the other of the twins. */
export interface Scene {
  model: Model;
  seen: Seen;
  tower: TowerAnswer;
  whole: { seen: Seen; tower: TowerAnswer } | null;
  twin: { model: Model; seen: Seen } | null;
  damage: Damage | null;
}

type Mark = Series["mark"];

const STATES: Axis = { label: "floor (state after it)", scale: "linear", domain: null, floors: true, states: true, names: null };
const FLOORS: Axis = { ...STATES, label: "floor", states: false };

export function axis(label: string, scale: Axis["scale"] = "linear", domain: Axis["domain"] = null): Axis {
  return { label, scale, domain, floors: false, states: false, names: null };
}

export function line(name: string, role: Series["role"], y: readonly Value[], mark: Mark = "line", x?: number[]): Series {
  return { name, role, x: x ?? y.map((_, i) => i), y: [...y], low: null, high: null, mark };
}

export function lines(title: string, y: Axis, series: Series[], x: Axis = STATES, references: [string, number][] = []): Lines {
  return { form: "lines", title, subject: "", x, y, series, references };
}

export function figure(id: string, title: string, finding: string, charts: Figure["charts"], honesty: string): Figure {
  return { id, question: 0, title, finding, charts, honesty, refused: null };
}

/** Return a token as a reader sees it in a sentence: in quotes, its blanks kept out. */
export function quoted(token: string, most = 24): string {
  const trimmed = token.trim();
  return `“${trimmed ? short(trimmed, most) : visible(token.replaceAll(" ", "␣").replaceAll("\n", "⏎"))}”`;
}

export function percent(share: Value): string {
  if (share === null || !Number.isFinite(share)) return "–";
  const value = 100 * share;
  return `${value >= 10 ? value.toFixed(0) : value >= 0.1 ? value.toFixed(1) : value === 0 ? "0" : "< 0.1"} %`;
}

/** Return a figure with three digits. */
export function few(value: Value | undefined): string {
  return value === null || value === undefined || !Number.isFinite(value) ? reading(value) : reading(Number(value.toPrecision(3)));
}

export function schemeName(model: Model): string {
  return model.residual ? "with residuals" : "without residuals";
}

/** Return a break in words: `floor 37 taken out`. */
export function breakWords({ kind, blocks, part, factor, size }: Break): string {
  const where = `${part === "block" ? "" : part === "attn" ? "attention of " : part === "mlp" ? "feed-forward of " : `${part} of `}floor${blocks.length > 1 ? "s" : ""} ${blocks.join(", ")}`;
  if (kind === "scale") return `${where} turned to ${few(factor ?? 1)} times its size`;
  if (kind === "noise") return `${where} replaced by noise${size === 1 ? "" : ` ${few(size)} times as large`}`;
  return `${where} taken out`;
}

export function honestyLine(h: Honesty): string {
  const books = h.additivity === null ? "" : ` · books balance to ${few(h.additivity)}`;
  const hash = h.weights_sha256 ? ` (weights ${h.weights_sha256.slice(0, 8)})` : "";
  return `${h.model}${hash} · ${h.tokens} tokens · ${h.dtype}${h.seed === null ? "" : ` · seed ${h.seed}`}${books} · ${h.date}`;
}

function spread(name: string, all: readonly Spread[], role: Series["role"] = "stream"): Series {
  const pick = (key: keyof Spread): Value[] => all.map((s) => s[key]);
  return { ...line(name, role, pick("median")), low: pick("low"), high: pick("high") };
}

function column(rows: Value[][] | undefined, at: number): Value[] {
  return (rows ?? []).map((row) => row[at] ?? null);
}

function word({ seen }: Scene): string {
  return seen.tokens[seen.position]?.text ?? "";
}

/** What the other twin, or the tower before its break, adds to a chart. */
function beside(scene: Scene, of: (seen: Seen) => readonly Value[]): Series[] {
  if (scene.whole) return [line("without the break", "other", of(scene.whole.seen), "dotted")];
  if (!scene.twin) return [];
  return [line(schemeName(scene.twin.model), scene.twin.model.residual ? "stream" : "broken", of(scene.twin.seen), "dashed")];
}

function main(scene: Scene): { name: string; role: Series["role"] } {
  if (scene.whole) return { name: "with the break", role: "broken" };
  return { name: scene.twin ? schemeName(scene.model) : "middle word", role: scene.model.residual ? "stream" : "broken" };
}

// ---- the tower -----------------------------------------------------------------------------------------------------

function roomsOf(answer: TowerAnswer, blocks: number, broken: readonly number[]): Room[] {
  const rooms: Room[] = Array.from({ length: blocks }, (_, k) => ({
    norm: answer.size.norm[k + 1] ?? null, attention: null, feed_forward: null, attention_part: null, feed_forward_part: null, running: null,
    broken: broken.includes(k),
  }));
  const plus = (a: Value, b: Value): Value => (a === null ? b : b === null ? a : a + b);
  for (const write of answer.writes) {
    const room = rooms[write.block];
    if (!room) continue;
    const name = write.kind === "mlp" ? "feed_forward" : "attention";
    room[name] = plus(room[name], answer.size.write_norm[write.index] ?? null);
  }
  for (const part of answer.meaning?.parts ?? []) {
    const room = part.block === null ? undefined : rooms[part.block];
    if (!room) continue;
    const name = part.kind === "mlp" ? "feed_forward_part" : "attention_part";
    room[name] = plus(room[name], part.logit);
    room.running = part.running;
  }
  // A floor that wrote nothing leaves the sum as it was.
  let last = startOf(answer);
  for (const room of rooms) {
    if (answer.meaning && room.running === null) room.running = last;
    last = room.running;
  }
  return rooms;
}

function startOf({ meaning }: TowerAnswer): Value {
  if (!meaning) return null;
  const first = meaning.parts.findIndex((p) => p.block !== null);
  return (first < 0 ? meaning.parts : meaning.parts.slice(0, first)).at(-1)?.running ?? 0;
}

export function towerFigure(scene: Scene): Figure {
  const { model, tower: answer, seen } = scene;
  const broken = seen.break?.blocks ?? [];
  const chart: Tower = {
    form: "tower", title: `The tower of ${quoted(word(scene))}`, subject: "", token: word(scene).trim(), position: answer.position,
    start_norm: answer.size.norm[0] ?? null, rooms: roomsOf(answer, seen.num_blocks, broken), start: startOf(answer),
    direction: answer.meaning ? `the logit of ${quoted(answer.token.text)}` : null, end: answer.meaning?.sum ?? null,
    collar: model.collar ?? "read", streams: model.num_streams,
  };
  if (scene.whole) {
    const whole = scene.whole.tower;
    const rooms = roomsOf(whole, seen.num_blocks, []);
    chart.whole = { norm: whole.size.norm, running: whole.token.id === answer.token.id ? [startOf(whole), ...rooms.map((r) => r.running)] : [] };
  }
  return figure("tower", "The tower", towerFinding(scene), [chart], honestyLine(seen.honesty));
}

function towerFinding({ tower: answer, model, seen }: Scene): string {
  const norms = answer.size.norm;
  const [low, high] = [norms[0] ?? null, norms.at(-1) ?? null];
  const grown = low && high && low > 0 ? `Its stream is ${few(high / low)} times as large at the top as at the bottom.` : "";
  const parts = answer.meaning?.parts.filter((p) => p.block !== null) ?? [];
  const most = parts.reduce<(typeof parts)[number] | null>((a, b) => (a && Math.abs(a.logit) >= Math.abs(b.logit) ? a : b), null);
  const spoke = most && model.residual ? ` For ${quoted(answer.token.text)}, the ${most.kind === "mlp" ? "feed-forward" : "attention"} of floor ${most.block} spoke loudest (${most.logit > 0 ? "+" : ""}${few(most.logit)}).` : "";
  return (grown + spoke + (seen.break ? ` The dotted line is the tower without the break.` : "")).trim();
}

// ---- the lines that share the floor --------------------------------------------------------------------------------

export function sizeFigure(scene: Scene): Figure {
  const { seen } = scene;
  const { name, role } = main(scene);
  const of = (s: Seen): Value[] => s.summary.norm.map((n) => n.median);
  const series = [
    spread(name, seen.summary.norm, role), ...beside(scene, of),
    line(`this word, ${quoted(word(scene), 12)}`, "other", column(seen.rows["norm"], seen.position)),
    line("first word", "other", seen.summary.norm.map((n) => n.first), "dotted"),
  ];
  const medians = of(seen);
  const [low, high] = [medians[0] ?? null, medians.at(-1) ?? null];
  const finding = low && high ? `The stream of a middle word goes from ${few(low)} at the bottom to ${few(high)} at the top${high > 1.5 * low ? ": every floor adds a little" : ""}.` : "";
  return figure("size", "How large is the stream?", finding, [lines("Size of the stream (norm)", axis("norm", "log"), series)], honestyLine(seen.honesty));
}

export function writesFigure(scene: Scene): Figure {
  const { seen } = scene;
  const of = (kind: string, what: Spread[]): Series => {
    const own = seen.writes.filter((w) => (w.kind === "mlp") === (kind === "mlp"));
    return line(kind === "mlp" ? "feed-forward" : "attention", kind === "mlp" ? "feed_forward" : "attention", own.map((w) => what[w.index]?.median ?? null), "dots", own.map((w) => w.block));
  };
  const shares = seen.summary.write_size;
  const has = shares.some((s) => s.median !== null);
  if (!has) return figure("writes", "How much does each floor write?", "Without residuals nothing is carried: every floor replaces what came before, so there is nothing to compare its write with.", [], honestyLine(seen.honesty));
  const found = shares.map((s, i) => ({ v: s.median, w: seen.writes[i] })).filter((s): s is { v: number; w: NonNullable<typeof s.w> } => s.v !== null && s.w !== undefined);
  const largest = found.reduce((a, b) => (b.v > a.v ? b : a));
  const middle = [...found].sort((a, b) => a.v - b.v)[Math.floor(found.length / 2)];
  const finding = `A typical write is ${percent(middle?.v ?? null)} as large as the stream it joins; the largest is the ${largest.w.kind === "mlp" ? "feed-forward" : "attention"} of floor ${largest.w.block}, ${percent(largest.v)}.`;
  return figure("writes", "How much does each floor write?", finding, [
    lines("Size of a write beside the stream", axis("write / stream", "log"), [of("attn", shares), of("mlp", shares)], FLOORS),
    lines("Direction of a write against the stream", axis("cosine: −1 erases, 0 new, 1 amplifies", "linear", [-1, 1]), [of("attn", seen.summary.write_cosine), of("mlp", seen.summary.write_cosine)], FLOORS, [["new", 0]]),
  ], honestyLine(seen.honesty));
}

export function wordFigure(scene: Scene): Figure {
  const { seen } = scene;
  const { name, role } = main(scene);
  const first = column(seen.rows["cosine_first"], seen.position);
  const before = column(seen.rows["cosine_before"], seen.position);
  const series = [
    line(name, role, seen.summary.cosine_first), ...beside(scene, (s) => s.summary.cosine_first),
    line(`this word, ${quoted(word(scene), 12)}`, "other", first), line("this word, to the floor below", "other", before, "dotted"),
  ];
  const top = first.at(-1) ?? null;
  const below = first.findIndex((v) => v !== null && v < 0.5);
  const finding = `At the top, ${quoted(word(scene))} has a cosine of ${few(top)} to the word that entered${below > 0 ? `; it falls below a half after floor ${below - 1}` : ""}. It falls also because much was added: the word may still be in the sum.`;
  return figure("word", "Is the word still there?", finding, [lines("Likeness to the word that entered", axis("cosine, 1 is the same direction", "linear"), series)], honestyLine(seen.honesty));
}

export function alikeFigure(scene: Scene): Figure {
  const { seen } = scene;
  const { name, role } = main(scene);
  const own = seen.summary.token_cosine;
  const series = [line(name, role, own), ...beside(scene, (s) => s.summary.token_cosine)];
  const same = own.findIndex((v) => v !== null && v > 0.99);
  const finding = same >= 0
    ? `After floor ${same - 1} all words have become the same vector (cosine above 0.99): nothing tells them apart any more.`
    : `Different words keep apart: at the top their mean cosine is ${few(own.at(-1) ?? null)}.`;
  return figure("alike", "Do the words stay different?", finding, [lines("Likeness of different words", axis("mean cosine, 1 is all the same", "linear"), series)], honestyLine(seen.honesty));
}

export function lensFigure(scene: Scene): Figure {
  const { seen } = scene;
  const tops = seen.rows["lens_top"] ?? [];
  const chart: Grid = {
    form: "grid", title: "What each floor would answer", subject: "",
    x: { ...axis("word"), names: seen.tokens.map((t) => t.text) }, y: STATES, values: seen.rows["lens_probability"] ?? [],
    colour: axis("probability of the final answer", "linear", [0, 1]), diverging: false, right: null, bottom: null,
    cells: tops.map((row) => row.map((id) => (id === null ? "" : quoted(seen.vocabulary[String(id)] ?? `token ${id}`)))),
  };
  const best = seen.predictions[0];
  // The first state from which on the final answer stays on top.
  let from = seen.lens.length;
  while (from > 0 && seen.lens[from - 1]?.rank === 0) from--;
  const finding = best ? `After ${quoted(word(scene))} the answer ${quoted(best.text)} is on top from ${from === 0 ? "the start" : `floor ${from - 1}`} on. A readout: what the way out makes of each floor, not what the model thinks.` : "";
  return figure("lens", "When does the answer form?", finding, chart.values.length && seen.predictions.length ? [chart] : [], honestyLine(seen.honesty));
}

// ---- breaks, gradients, comparisons --------------------------------------------------------------------------------

export function damageFigure(damage: Damage): Figure {
  const of = (pick: (c: Damage["change"][number]) => Value): Value[] => damage.change.map(pick);
  const first = damage.change[damage.first_changed]?.mean ?? null;
  const last = damage.change.at(-1)?.mean ?? null;
  const finding = `With ${breakWords(damage.break)} the stream is off by ${percent(first)} just above the break and by ${percent(last)} at the top; ${percent(damage.top.top1)} of the words keep their best guess, and the loss goes from ${few(damage.top.loss)} to ${few(damage.top.loss_broken)}.`;
  return figure("damage", "How far does the damage travel?", finding, [
    lines("Change of the stream, beside its size", axis("|change| / |stream|", "log"), [line("all words", "broken", of((c) => c.mean), "dashed"), line("all but the first", "other", of((c) => c.rest), "dotted")]),
  ], honestyLine(damage.honesty));
}

export function gradientFigure(own: { model: Model; result: GradientResult }, twin: { model: Model; result: GradientResult } | null): Figure {
  const of = ({ result }: { result: GradientResult }): Value[] => result.norm.map((n) => n.mean);
  const series = [line(twin ? schemeName(own.model) : "all words", own.model.residual ? "stream" : "broken", of(own), own.model.residual ? "line" : "dashed")];
  if (twin) series.push(line(schemeName(twin.model), twin.model.residual ? "stream" : "broken", of(twin), twin.model.residual ? "line" : "dashed"));
  const said = ({ model, result }: { model: Model; result: GradientResult }): string => `${schemeName(model)} the signal at the bottom is ${few(result.bottom_to_top)} times that at the top`;
  const finding = twin ? `${capital(said(own))}; ${said(twin)}.` : `The signal at the bottom is ${few(own.result.bottom_to_top)} times that at the top.`;
  return figure("gradients", "Do learning signals get down?", finding, [lines("Size of the learning signal (gradient of the loss)", axis("gradient norm", "log"), series)], honestyLine(own.result.honesty));
}

export function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

export function matrixFigure(result: MatrixResult, values: Value[][]): Figure {
  const ranked = result.kl.map((v, k) => [v ?? -1, k] as const).filter(([v]) => v >= 0).sort((a, b) => b[0] - a[0]);
  const [worst, least] = [ranked[0], ranked.at(-1)];
  const chart: Grid = {
    form: "grid", title: "Take out each floor in turn", subject: "", x: { ...STATES, label: "measured after floor" }, y: { ...FLOORS, label: "floor taken out" },
    values, colour: axis("|change| / |stream|", "log"), diverging: false,
    right: lines("", axis("damage at the top (KL)", "log"), [line("", "broken", result.kl)], FLOORS), bottom: lines("", axis("worst damage that arrives", "log"), [line("", "other", result.incoming)]), cells: null,
  };
  const part = result.finished ? "" : ` Stopped early: ${ranked.length} of ${result.num_blocks} floors are done.`;
  const finding = worst && least ? `Floor ${worst[1]} is missed most (KL ${few(worst[0])}); floor ${least[1]} least (KL ${few(least[0])}).${part}` : `Nothing is measured yet.${part}`;
  return figure("matrix", "Which floors matter?", finding, [chart], honestyLine(result.honesty));
}

export function compareFigure(c: Comparison): Figure {
  const [a, b] = c.sides;
  const name = (side: typeof a): string => quoted(side.tokens[side.position]?.text ?? "");
  const least = c.cosine.reduce<{ v: number; at: number }>((m, v, at) => (v !== null && v < m.v ? { v, at } : m), { v: Infinity, at: 0 });
  const finding = c.same_from_below === null
    ? `${name(a)} is the same in both sentences all the way up.`
    : `${name(a)} and ${name(b)} enter ${c.same_from_below > 0 ? "as one vector" : "already apart"}; they part ${c.same_from_below > 0 ? `on floor ${c.same_from_below - 1}` : "at once"} and are furthest apart after floor ${least.at - 1} (cosine ${few(least.v)}).`;
  return figure("compare", "One word, two sentences", finding, [
    lines("Likeness of the two words", axis("cosine, 1 is the same direction", "linear"), [line("cosine", "stream", c.cosine)]),
    lines("Distance, beside their size", axis("|a − b| / mean size", "linear"), [line("distance", "attention", c.distance)]),
  ], honestyLine(c.honesty));
}
