/** Colours of a grid, the same as `mainstem.report._colours`: cividis for sizes, blue to red for signed figures. */

export type Colour = readonly [number, number, number];

const CIVIDIS: readonly Colour[] = [
  [0, 34, 78], [0, 46, 106], [26, 56, 111], [50, 67, 109], [67, 78, 108], [83, 90, 109], [97, 101, 111], [111, 112, 115],
  [125, 124, 120], [140, 136, 120], [155, 148, 118], [171, 160, 114], [188, 174, 108], [205, 187, 99], [222, 201, 88],
  [240, 216, 70], [254, 232, 56],
];
const DIVERGING: readonly Colour[] = [
  [5, 48, 97], [42, 113, 178], [107, 172, 209], [194, 221, 236], [247, 246, 246], [251, 204, 180], [228, 128, 102],
  [186, 40, 50], [103, 0, 31],
];

/** Violet for figures that are not finite, which no colour scale has. */
export const NOT_FINITE: Colour = [136, 0, 238];

/** Return the colour at a share of the range: dark for 0, light for 1. */
export function cividis(share: number): Colour {
  return between(CIVIDIS, share);
}

/** Return blue for 0, white for a half, red for 1. */
export function diverging(share: number): Colour {
  return between(DIVERGING, share);
}

function between(stops: readonly Colour[], share: number): Colour {
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.trunc(place), stops.length - 2);
  const a = stops[low] as Colour;
  const b = stops[low + 1] as Colour;
  const mix = (i: 0 | 1 | 2): number => Math.round(a[i] + (b[i] - a[i]) * (place - low));
  return [mix(0), mix(1), mix(2)];
}

/** Return black or white, whichever reads better on a colour. */
export function inkOn([red, green, blue]: Colour): string {
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#000000" : "#ffffff";
}
