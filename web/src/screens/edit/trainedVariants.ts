// Types of the query trained_variants.
import type { Interval } from "../../lib/interval";

export interface Variant {
  component: string;
  label: string;
  name: string;
  explanation: string;
  loss: Interval;
  loss_beyond: Interval;
  difference: Interval;
  loss_by_position: number[];
}

export interface VariantResults {
  variants: Variant[];
  positions: number[];
  num_seeds: number;
  seq_len: number;
  num_sequences: number;
  max_steps: number;
  tokens: number;
}

export const BASE = "base";
export const BASE_LABEL = "RMSNorm, pre-norm, RoPE";
/** Id of the heading, the target of the link at the top of the screen. */
export const VARIANTS_HEADING = "trained-variants-heading";
