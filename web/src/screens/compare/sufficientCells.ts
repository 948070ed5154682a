// One sentence about a patching map: the tokens or heads that are enough alone, with the layers in which they are.
import { tensorRow, type Tensor } from "../../lib/protocol";

/** Share of the change of the metric from which on a patch is enough alone. */
const SUFFICIENT = 0.9;
const MAX_RANGES = 5;

interface Range {
  column: number;
  first: number;
  last: number;
  low: number;
  high: number;
}

/** Adjacent layers of a column (token or head) whose shares are all at least SUFFICIENT, from the first layer on. */
function findRanges(shares: Tensor): Range[] {
  const ranges: Range[] = [];
  for (let row = 0; row < (shares.shape[0] ?? 0); row++) {
    tensorRow(shares, row).forEach((share, column) => {
      if (!(share >= SUFFICIENT)) return; // also for NaN: not measured
      const range = ranges.find((other) => other.column === column && other.last === row - 1);
      if (range) Object.assign(range, { last: row, low: Math.min(range.low, share), high: Math.max(range.high, share) });
      else ranges.push({ column, first: row, last: row, low: share, high: share });
    });
  }
  return ranges;
}

/** Share as a whole number of percent, without the unit. */
export const formatRounded = (share: number): string => (Math.abs(share) < 0.005 ? "0" : (100 * share).toFixed(0).replace("-", "−"));

/** Such as "Enough alone (at least 90 % of the change of the logit difference): ·girl, embedding to after block 2 (100 to 102 %)."; empty if no cell is. */
export function sufficientCells(shares: Tensor, rowLabels: readonly string[], columnLabels: readonly string[], metric: string): string {
  const ranges = findRanges(shares);
  if (!ranges.length) return "";
  const terms = ranges.slice(0, MAX_RANGES).map(({ column, first, last, low, high }) => {
    const layers = first === last ? rowLabels[first] : `${rowLabels[first]} to ${rowLabels[last]}`;
    const [from, to] = [formatRounded(low), formatRounded(high)];
    return `${columnLabels[column]}, ${layers} (${from === to ? from : `${from} to ${to}`} %)`;
  });
  if (ranges.length > MAX_RANGES) terms.push(`and ${ranges.length - MAX_RANGES} more`);
  return `Enough alone (at least ${100 * SUFFICIENT} % of the change of the ${metric}): ${terms.join("; ")}.`;
}
