// Lanes of the other tokens beside the residual stream of the selected one: single tokens, and groups of the rest.

export interface Lane {
  first: number;
  last: number;
  x: number;
}

/** Width of a lane in pixels. */
const LANE_WIDTH = 11;

/**
 * Lanes of the tokens from `first` to `last`, between the coordinates `left` and `right`.
 * If not all tokens fit, those of the largest importance have lanes of their own, and runs of the others are grouped.
 */
export function layOutLanes(first: number, last: number, left: number, right: number, importance: (token: number) => number): Lane[] {
  const count = last - first + 1;
  if (count <= 0 || right - left < LANE_WIDTH) return [];
  const maxLanes = Math.max(1, Math.floor((right - left) / LANE_WIDTH));
  let spans: [number, number][];
  if (count <= maxLanes) spans = Array.from({ length: count }, (_, index) => [first + index, first + index]);
  else {
    const ranked = Array.from({ length: count }, (_, index) => first + index).sort((a, b) => importance(b) - importance(a));
    const single = new Set(ranked.slice(0, Math.floor((maxLanes - 1) / 2)));
    spans = [];
    for (let token = first; token <= last; token++) {
      const previous = spans.at(-1);
      if (!single.has(token) && previous && !single.has(previous[1])) previous[1] = token;
      else spans.push([token, token]);
    }
  }
  const width = Math.min(LANE_WIDTH * 2, (right - left) / spans.length);
  // Lanes are next to the selected token: on its left side they end at `right`, on its right side they start at `left`.
  return spans.map(([from, to], index) => ({ first: from, last: to, x: left + (index + 0.5) * width }));
}

/** Sum of the values of a lane's tokens. */
export function sumOver(lane: Lane, value: (token: number) => number): number {
  let sum = 0;
  for (let token = lane.first; token <= lane.last; token++) sum += value(token);
  return sum;
}
