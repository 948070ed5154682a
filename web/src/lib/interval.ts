import { formatNumber } from "./format";

/** A mean and the bounds of its 95 % confidence interval. */
export interface Interval {
  mean: number;
  low: number;
  high: number;
}

export const formatInterval = ({ mean, low, high }: Interval): string => `${formatNumber(mean)} (${formatNumber(low)} to ${formatNumber(high)})`;
