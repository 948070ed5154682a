// Types of the query trained_variants, and the place of its section on the screen.
import type { Interval } from "../../lib/interval";

export type Outcome = "lower" | "similar" | "higher";

export interface Variant {
  component: string;
  label: string;
  name: string;
  explanation: string;
  loss: Interval;
  loss_beyond: Interval;
  conclusion_beyond: string;
  /** Difference of the loss to the base model, and what follows from its interval. */
  difference: Interval;
  outcome: Outcome;
  summary: string;
  conclusion: string;
  loss_by_position: number[];
}

export interface VariantResults {
  variants: Variant[];
  positions: number[];
  /** Differences below this many nats count as about the same. */
  small_difference: number;
  num_seeds: number;
  seq_len: number;
  num_sequences: number;
  max_steps: number;
  tokens: number;
}

export const BASE = "base";
export const BASE_LABEL = "RMSNorm, pre-norm, RoPE";
/** Id of the heading, the target of links. */
export const VARIANTS_HEADING = "trained-variants-heading";
/** Value of the parameter `edit_section` of the URL that opens the screen at the trained variants. */
export const VARIANTS_SECTION = "variants";

export function scrollToVariants(): void {
  const heading = document.getElementById(VARIANTS_HEADING);
  heading?.scrollIntoView({ block: "start" });
  heading?.focus({ preventScroll: true });
}
