/** Figures and words as a reader sees them; `label` writes what `mainstem.report._axes.label` writes. */

const RAISED: Readonly<Record<string, string>> = {
  "-": "⁻", "0": "⁰", "1": "¹", "2": "²", "3": "³", "4": "⁴", "5": "⁵", "6": "⁶", "7": "⁷", "8": "⁸", "9": "⁹",
};

/** What a block is called: the live page says floor. */
export const unit = { block: "block" };

function power(exponent: number): string {
  return "10" + [...String(exponent)].map((c) => RAISED[c] ?? c).join("");
}

function grouped(digits: string): string {
  return digits.replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

/** Return a figure as an axis has it: `0`, `0.001`, `10⁻⁵`, `2,000`. */
export function label(value: number): string {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e5) return size < 1000 ? String(Number(value.toPrecision(6))) : grouped(value.toFixed(0));
  const [digits = "", exponent = "0"] = value.toExponential(1).split("e");
  return (digits === "1.0" ? "" : digits.replace(/\.0$/, "") + "·") + power(Number(exponent));
}

/** Return a figure as a reading has it: four digits, or why there is none. */
export function reading(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "infinite" : "−infinite";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    const [digits = "", exponent = "0"] = value.toExponential(2).split("e");
    return `${minus(digits)}·${power(Number(exponent))}`;
  }
  if (size >= 1000) return minus(grouped(value.toFixed(size < 1e4 ? 1 : 0)));
  return minus(String(Number(value.toPrecision(4))));
}

function minus(digits: string): string {
  return digits.replace(/^-/, "−");
}

/** Return a signed figure with its sign. */
export function signed(value: number | null): string {
  return value !== null && value > 0 ? "+" + reading(value) : reading(value);
}

// Python's `visible` writes the same kinds of characters out: control, format, surrogate, private, unassigned, separators.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;

/** Return text with what cannot be seen written out, such as `<U+202E>`; joiners inside emoji stay. */
export function visible(text: string): string {
  return text.replace(HIDDEN, (c) =>
    c === "\u200d" ? c : `<U+${(c.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0")}>`,
  );
}

/** Return text that fits: at most so many characters, the last an ellipsis. */
export function short(text: string, most: number): string {
  const characters = [...visible(text)];
  return characters.length <= most ? characters.join("") : characters.slice(0, most - 1).join("") + "…";
}
