/** What the server says, as `mainstem.server` writes it. Probabilities 0 to 1; losses and KL in nats; null was not measured. */

import type { Value } from "../schema";

export interface Model {
  name: string;
  title: string;
  num_blocks: number;
  num_writes: number;
  num_streams: number;
  width: number;
  vocab_size: number;
  num_parameters: number;
  kind: "causal" | "masked" | "encoder";
  dtype: string;
  residual: boolean;
  twin: string | null;
  weights_sha256: string;
  parts: string[];
  can_break: boolean;
  max_tokens: number;
  notes: string[];
  /** Where the norm sits; on the arm that reads, if the server does not say. */
  collar?: "read" | "shaft";
}

export interface Pair {
  title: string;
  texts: [string, string];
  words: [string, string];
}

export interface About {
  version: string;
  default_model: string;
  models: Model[];
  examples: { title: string; text: string }[];
  pairs: Pair[];
  limits: { chars: number; tokens: number };
  allow_models: boolean;
}

export type BreakKind = "skip" | "zero" | "scale" | "noise";

export interface Break {
  kind: BreakKind;
  blocks: number[];
  part: string;
  factor?: number;
  size?: number;
  seed?: number;
}

export interface Token {
  index: number;
  id: number;
  text: string;
}

export interface Write {
  index: number;
  block: number;
  kind: string;
  label: string;
}

export interface Prediction {
  id: number;
  text: string;
  probability: number;
  logit?: number;
}

export interface Spread {
  median: Value;
  low: Value;
  high: Value;
  first: Value;
}

export interface Honesty {
  model: string;
  weights_sha256: string;
  dtype: string;
  tokens: number;
  additivity: Value;
  continuity: Value;
  tolerance: Value;
  hook_points: string[];
  versions: Record<string, string>;
  seed: number | null;
  date: string;
}

export interface GridPlace {
  url: string;
  shape: number[];
  dtype: "float32" | "int32" | "uint8";
}

export interface Lens {
  state: number;
  top: Prediction[];
  probability: Value;
  kl: Value;
  rank: Value;
}

export interface Look {
  model: string;
  text: string;
  break: Break | null;
  num_blocks: number;
  tokens: Token[];
  writes: Write[];
  position: number;
  predictions: Prediction[];
  lens: Lens[];
  loss: Value;
  loss_by_token: Value[];
  summary: {
    norm: Spread[];
    write_size: Spread[];
    write_cosine: Spread[];
    token_cosine: Value[];
    cosine_first: Value[];
    cosine_before: Value[];
  };
  vocabulary: Record<string, string>;
  grids: Record<string, GridPlace>;
  honesty: Honesty;
}

export interface MeaningPart {
  label: string;
  block: number | null;
  kind: string | null;
  write: number | null;
  logit: number;
  running: number;
}

export interface TowerAnswer {
  position: number;
  token: Prediction | { id: number; text: string };
  tokens: Token[];
  writes: Write[];
  size: { norm: Value[]; write_norm: Value[]; write_size: Value[]; write_cosine: Value[]; mid_norm: Value[] };
  meaning: { parts: MeaningPart[]; logit: number; sum: number; error: number } | null;
  why_no_meaning: string | null;
}

export interface Change {
  state: number;
  mean: Value;
  first: Value;
  rest: Value;
  cosine: Value;
}

export interface Damage {
  model: string;
  tokens: Token[];
  position: number;
  break: Break;
  first_changed: number;
  change: Change[];
  top: { kl: Value; top1: Value; loss: Value; loss_broken: Value; loss_change: Value };
  kl_at_position: Value;
  predictions: Prediction[];
  predictions_broken: Prediction[];
  honesty: Honesty;
}

export interface Side {
  text: string;
  tokens: Token[];
  position: number;
  norm: Value[];
  predictions: Prediction[];
}

export interface Comparison {
  sides: [Side, Side];
  cosine: Value[];
  distance: Value[];
  lens: [Prediction[][], Prediction[][]];
  same_from_below: number | null;
  honesty: Honesty;
}

export type JobKind = "matrix" | "gradients" | "report";
export type JobState = "queued" | "running" | "done" | "failed" | "cancelled";

export interface Job<R = unknown> {
  id: string;
  kind: JobKind;
  state: JobState;
  ahead?: number;
  done?: number;
  total?: number;
  says?: string;
  seconds_left?: number | null;
  error?: string | null;
  result?: R | null;
}

export interface MatrixResult {
  num_blocks: number;
  grids: { change: GridPlace };
  kl: Value[];
  top1: Value[];
  loss_change: Value[];
  finished: boolean;
  incoming: Value[];
  honesty: Honesty;
}

export interface GradientResult {
  norm: { state: number; mean: Value; first: Value; rest: Value }[];
  bottom_to_top: Value;
  loss: Value;
  loss_tokens: number;
  honesty: Honesty;
}

export interface ReportResult {
  url: string;
  filename: string;
  bytes: number;
}

/** A look with its grids as rows of figures; null where there is none. */
export interface Seen extends Look {
  rows: Record<string, Value[][]>;
}
