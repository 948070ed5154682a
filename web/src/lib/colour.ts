// Colours for numbers, drawn on canvases: pale at 0, one hue for each sign, in both themes.
import { theme } from "./theme.svelte";

/** 256 colours from the page's own: below 0, 0, above 0. */
export function ramp(low: string, high: string): Uint8ClampedArray {
  const ground = theme.colour("sheet");
  const ends = [theme.colour(low), theme.colour(high)];
  const table = new Uint8ClampedArray(4 * 256);
  for (let at = 0; at < 256; at++) {
    const value = (at - 128) / 127;
    const end = value < 0 ? ends[0] : ends[1];
    const share = Math.min(1, Math.abs(value)) ** 0.8;
    for (let part = 0; part < 3; part++) table[4 * at + part] = (ground[part] ?? 0) * (1 - share) + (end?.[part] ?? 0) * share;
    table[4 * at + 3] = 255;
  }
  return table;
}
