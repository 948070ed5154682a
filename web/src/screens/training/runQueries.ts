// Results of the queries about a training run.
import type { Tensor } from "../../lib/protocol";
import type { AttentionLayer } from "../attention/attentionQueries";

export interface RunStatus {
  unchanged: boolean;
  num_rows: number;
  state: "training" | "stopped" | "finished";
  step: number;
  max_steps: number;
  seconds_left: number | null;
}

export interface Eval {
  step: number;
  eval_loss: number;
  bits_per_byte?: number;
  accuracy?: number;
  exact_match?: number;
  /** Mean reward on validation prompts, in reinforcement learning. */
  eval_reward?: number;
}

export interface LayerStats {
  grad_norm?: Record<string, number>;
  update_ratio?: Record<string, number>;
  resid_norm: Record<string, number>;
  attn_entropy: Record<string, number[]>;
  warnings: string[];
}

export interface RunMetrics extends RunStatus {
  name: string;
  directory: string;
  sample_prompt: string | null;
  samples: { step: number; sample: string }[];
  evals: Eval[];
  layer_stats: { step: number; layer_stats: LayerStats } | null;
  warnings: { step: number; message: string }[];
  update_ratio_layers: string[];
}

export interface Checkpoint {
  id: string;
  /** Id for `open_model`. */
  model_id: string;
  kind: "snapshot" | "checkpoint" | "model";
  step: number;
  num_bytes: number;
}

export interface RunCheckpoints {
  checkpoints: Checkpoint[];
  /** Step whose weights the open model has. */
  open_step: number | null;
  /** Step of the next checkpoint; null at the end of the run. */
  next_step: number | null;
  can_open: boolean;
}

export interface CheckpointActivations {
  step: number;
  layers: AttentionLayer[];
  /** Empty if the scores do not apply to this model; `score_note` says why. */
  head_types: string[];
  attention_names?: string[];
  score_note: string;
  top_tokens: { token: number; text: string; probability: number }[];
  /** Mean cross-entropy of the next tokens in nats; null for an encoder. */
  loss: number | null;
}

export interface CheckpointResult {
  data: CheckpointActivations;
  tensors: Record<string, Tensor>;
}

/** Duration in words, such as "2 min". */
export function formatDuration(seconds: number): string {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export const formatBytes = (count: number): string => (count >= 1e9 ? `${(count / 1e9).toFixed(1)} GB` : count >= 1e6 ? `${(count / 1e6).toFixed(1)} MB` : `${Math.round(count / 1e3)} kB`);
export const formatStep = (step: number): string => step.toLocaleString("en");
