/** A token's text with its blanks and line ends to be seen. */
export function showWhitespace(word: string): string {
  const text = word.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍");
  if (text.trim() === "") return text.replace(/ /g, "·") || "∅";
  return text.replace(/^ +| +$/g, (blanks) => "·".repeat(blanks.length));
}

/** A number in few letters. */
export function formatNumber(value: number): string {
  if (!Number.isFinite(value)) return value > 0 ? "∞" : value < 0 ? "−∞" : "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(1) : size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(3);
  return text.replace("-", "−");
}

export const formatPercent = (share: number): string => (share > 0 && share < 0.001 ? "<0.1 %" : `${(100 * share).toFixed(1)} %`);
