/** Signed bars of named things, in the order given. */

import { round, svg, words } from "../dom";
import { label, short, signed } from "../format";
import { domainOf, place } from "../scales";
import type { Bars } from "../schema";
import type { Drawn, Form } from "./chart";
import { picture } from "./frame";

const STEP = 19;

export const bars: Form<Bars> = {
  switches: () => [],

  draw(chart, box): Drawn {
    const left = Math.min(150, Math.round(box.width * 0.36));
    const top = 6;
    const floor = top + STEP * chart.labels.length;
    const root = picture(box.plot, box.width, floor + 28);
    const [low, high] = domainOf(chart.x, [...chart.values, 0], "linear");
    const x = place([Math.min(low, 0), Math.max(high, 0)], [left, box.width - 52], "linear");
    chart.labels.forEach((name, i) => {
      const at = top + STEP * i;
      words(root, left - 8, at + 13, short(name, Math.floor(left / 6.2)), { "text-anchor": "end" });
      const value = chart.values[i] ?? null;
      if (value === null || !Number.isFinite(value)) {
        words(root, x(0) + 4, at + 13, "not finite", { class: "t small" });
        return;
      }
      const group = svg(root, "g", { class: `r-${chart.roles[i] ?? "other"}` });
      svg(group, "path", { class: "mark", d: `M${round(x(0))} ${at + 3}H${round(x(value))}v${STEP - 6}H${round(x(0))}z` });
      words(root, Math.max(x(0), x(value)) + 5, at + 13, signed(Number(value.toPrecision(3))));
    });
    svg(root, "path", { class: "ref solid", d: `M${round(x(0))} ${top}V${floor}` });
    const total = chart.total === null ? "" : `, together ${label(Number(chart.total.toPrecision(4)))}`;
    words(root, (left + box.width - 52) / 2, floor + 20, chart.x.label + total, { "text-anchor": "middle" });
    return { point: () => undefined, at: () => null, step: () => null, read: () => ({ where: "", readings: [] }) };
  },

  rows(chart) {
    const total = chart.total === null ? [] : [["together, as the model has it", chart.total]];
    return [["part", chart.x.label], ...chart.labels.map((name, i) => [name, chart.values[i] ?? null]), ...total];
  },
};
