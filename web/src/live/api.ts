/** Asks the server; what it refuses is an error with its own sentence. */

import type { Value } from "../schema";
import type { About, Break, Comparison, Damage, GridPlace, Job, JobKind, Look, Seen, TowerAnswer } from "./types";

const KEPT = 24;
const GRIDS = ["norm", "cosine_first", "cosine_before", "lens_probability", "lens_top"] as const;

export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

export interface Ask {
  model: string;
  text: string;
  position: number | null;
  broken: Break | null;
}

async function asked(url: string, body?: unknown): Promise<Response> {
  const options: RequestInit = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let response: Response;
  try {
    response = await fetch(url, options);
  } catch {
    throw new ApiError("The server does not answer. Is `mainstem serve` still running?", 0);
  }
  if (response.ok) return response;
  const said = (await response.json().catch(() => ({}))) as { error?: unknown };
  throw new ApiError(typeof said.error === "string" ? said.error : `The server answered ${response.status}.`, response.status);
}

async function json<T>(url: string, body?: unknown): Promise<T> {
  return (await asked(url, body)).json() as Promise<T>;
}

/** Return a grid of two axes as rows of figures; what is not a number is null. */
export async function gridRows(place: GridPlace): Promise<Value[][]> {
  const buffer = await (await asked(place.url)).arrayBuffer();
  const flat = place.dtype === "int32" ? new Int32Array(buffer) : place.dtype === "uint8" ? new Uint8Array(buffer) : new Float32Array(buffer);
  return rowsOf(flat, place.shape);
}

/** Return the rows of a flat grid. */
export function rowsOf(flat: ArrayLike<number>, shape: readonly number[]): Value[][] {
  const [rows = 0, columns = 0] = shape;
  const found: Value[][] = [];
  for (let r = 0; r < rows; r++) {
    const row: Value[] = [];
    for (let c = 0; c < columns; c++) {
      const value = flat[r * columns + c];
      row.push(value === undefined || Number.isNaN(value) ? null : value);
    }
    found.push(row);
  }
  return found;
}

/** Answers by question, the oldest forgotten. */
class Kept<T> {
  private readonly found = new Map<string, Promise<T>>();

  get(key: string, ask: () => Promise<T>): Promise<T> {
    const before = this.found.get(key);
    if (before) return before;
    const made = ask();
    this.found.set(key, made);
    made.catch(() => this.found.delete(key));
    const oldest = this.found.keys().next().value;
    if (this.found.size > KEPT && oldest !== undefined) this.found.delete(oldest);
    return made;
  }
}

export class Api {
  private readonly looks = new Kept<Seen>();
  private readonly grids = new Kept<Record<string, Value[][]>>();
  private readonly towers = new Kept<TowerAnswer>();
  private readonly damages = new Kept<Damage>();
  private readonly comparisons = new Kept<Comparison>();

  about(): Promise<About> {
    return json<About>("/api/about");
  }

  look(ask: Ask): Promise<Seen> {
    return this.looks.get(JSON.stringify(ask), async () => {
      const { model, text, position, broken } = ask;
      const key = JSON.stringify([model, text, broken]);
      const body = { model, text, position: position ?? -1, break: broken };
      let first: Look | null = null;
      // The grids are of the whole sentence: they are fetched once, whichever word is looked at.
      const rows = await this.grids.get(key, async () => {
        first = await json<Look>("/api/look", { ...body, grids: GRIDS });
        const entries = Object.entries(first.grids).map(async ([name, place]) => [name, await gridRows(place)] as const);
        return Object.fromEntries(await Promise.all(entries));
      });
      const look = first ?? (await json<Look>("/api/look", { ...body, grids: [] }));
      if (!("vocabulary" in look)) throw new ApiError("The server's answer is of another version.", 500);
      const words = { ...look.vocabulary };
      return { ...look, vocabulary: await this.wordsOf(key, words), rows };
    });
  }

  private readonly vocabularies = new Map<string, Record<string, string>>();

  /** A look without grids names no words: those of the first look of the sentence hold. */
  private async wordsOf(key: string, words: Record<string, string>): Promise<Record<string, string>> {
    const before = this.vocabularies.get(key);
    if (before && Object.keys(words).length === 0) return before;
    this.vocabularies.set(key, words);
    const oldest = this.vocabularies.keys().next().value;
    if (this.vocabularies.size > KEPT && oldest !== undefined) this.vocabularies.delete(oldest);
    return words;
  }

  tower(ask: Ask): Promise<TowerAnswer> {
    const { model, text, position, broken } = ask;
    const body = { model, text, position: position ?? -1, token: null, against: null, break: broken };
    return this.towers.get(JSON.stringify(ask), () => json<TowerAnswer>("/api/tower", body));
  }

  damage(ask: Ask): Promise<Damage> {
    const { model, text, position, broken } = ask;
    return this.damages.get(JSON.stringify(ask), () => json<Damage>("/api/damage", { model, text, position: position ?? -1, break: broken }));
  }

  compare(model: string, texts: [string, string], places: { positions: [number, number] | null; words: [string, string] | null }): Promise<Comparison> {
    const body = { model, texts, ...places, break: null };
    return this.comparisons.get(JSON.stringify(body), () => json<Comparison>("/api/compare", body));
  }

  startJob(kind: JobKind, model: string, text: string, broken: Omit<Break, "blocks"> | null = null): Promise<Job> {
    return json<Job>("/api/jobs", { kind, model, text, ...(broken ? { break: broken } : {}) });
  }

  job<R>(id: string): Promise<Job<R>> {
    return json<Job<R>>(`/api/jobs/${encodeURIComponent(id)}`);
  }

  cancel(id: string): Promise<Job> {
    return json<Job>(`/api/jobs/${encodeURIComponent(id)}/cancel`, {});
  }

  /** Run a job to its end and return its result; `tell` hears how far it is, `stop` cancels it. */
  async run<R>(started: Job, tell: (job: Job) => void, stop: AbortSignal): Promise<Job<R>> {
    const { id } = started;
    const cancel = (): void => void this.cancel(id).catch(() => undefined);
    stop.addEventListener("abort", cancel, { once: true });
    if (stop.aborted) cancel();
    try {
      await new Promise<void>((resolve, reject) => {
        const source = new EventSource(`/api/jobs/${encodeURIComponent(id)}/events`);
        const end = (): void => {
          source.close();
          resolve();
        };
        const heard = (event: MessageEvent<string>): Partial<Job> => JSON.parse(event.data || "{}") as Partial<Job>;
        source.addEventListener("queued", (e) => tell({ ...started, state: "queued", ...heard(e) }));
        source.addEventListener("progress", (e) => tell({ ...started, state: "running", ...heard(e) }));
        for (const name of ["done", "failed", "cancelled"]) source.addEventListener(name, end);
        source.addEventListener("error", () => {
          if (source.readyState !== EventSource.CLOSED) return;
          reject(new ApiError("The connection to the server was lost.", 0));
        });
      });
    } finally {
      stop.removeEventListener("abort", cancel);
    }
    return this.job<R>(id);
  }
}
