/** Makes a report's page answer: where it cannot, the static page stays as it is. */

import "./mainstem.css";
import { Page } from "./page";
import { readReport } from "./schema";

/** Return the report's JSON: as it is, or base64 of it compressed where it is long. */
async function reportText(data: HTMLElement): Promise<string> {
  const text = data.textContent;
  if (data.dataset["encoding"] !== "gzip") return text;
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function start(): Promise<void> {
  const data = document.getElementById("report-data");
  if (!data) return;
  new Page(readReport(await reportText(data))).start();
  document.documentElement.dataset["ready"] = performance.now().toFixed(0);
}

start().catch((error: unknown) => console.error(error));
