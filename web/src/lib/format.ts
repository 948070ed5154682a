/** Token text with visible whitespace: · for leading and trailing spaces, ↵ for line feeds. */
export function showWhitespace(tokenStr: string): string {
  const text = tokenStr.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍");
  if (text.trim() === "") return text.replace(/ /g, "·") || "∅";
  return text.replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
}

const WHITESPACE_SIGNS: [sign: string, pattern: RegExp, meaning: string][] = [
  ["·", /^ | $/, "a space"],
  ["↵", /\n/, "a line break"],
  ["⇥", /\t/, "a tab"],
  ["␍", /\r/, "a carriage return"],
  ["∅", /^$/, "an empty string"],
];

/** Explanation of the signs that `showWhitespace` uses for these tokens, such as "· is a space, ↵ a line break"; empty without signs. */
export function explainWhitespace(tokenStrs: readonly string[]): string {
  const used = WHITESPACE_SIGNS.filter(([, pattern]) => tokenStrs.some((tokenStr) => pattern.test(tokenStr)));
  return used.map(([sign, , meaning], index) => `${sign} ${index ? "" : "is "}${meaning}`).join(", ");
}

/** Whether a token continues the word of the token before it, as “y” after “·happ”. */
export const continuesWord = (tokenStr: string, previous: string): boolean => /^\p{L}/u.test(tokenStr) && /\p{L}$/u.test(previous);

/** Format a number with about three significant digits. */
export function formatNumber(value: number): string {
  if (!Number.isFinite(value)) return value > 0 ? "∞" : value < 0 ? "−∞" : "–";
  const magnitude = Math.abs(value);
  const text = magnitude !== 0 && (magnitude < 1e-3 || magnitude >= 1e6) ? value.toExponential(1) : magnitude >= 100 ? value.toFixed(0) : magnitude >= 10 ? value.toFixed(1) : value.toFixed(3);
  return text.replaceAll("-", "−");
}

/** Format a value of an axis, without trailing zeros. */
export const formatTick = (value: number): string => (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) ? formatNumber(value) : String(Number(value.toPrecision(6))).replaceAll("-", "−"));

/** Format a number with a fixed number of significant digits, so that a reader can recompute a result from its factors. */
export function formatSignificant(value: number, digits = 4): string {
  if (value === 0 || !Number.isFinite(value)) return formatNumber(value).replace(/\.0+$/, "");
  const magnitude = Math.abs(value);
  const text = magnitude < 1e-4 || magnitude >= 1e6 ? value.toExponential(digits - 1) : value.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(magnitude))));
  return text.replaceAll("-", "−");
}

export const formatPercent = (fraction: number): string => (fraction > 0 && fraction < 0.001 ? "<0.1 %" : `${(100 * fraction).toFixed(1)} %`);
