// The queries about attention, and their results.
import { runQuery, QueryError } from "../../lib/queryClient";
import type { ModelInput } from "../../lib/session.svelte";
import type { Tensor } from "../../lib/protocol";

export interface AttentionLayer {
  name: string;
  stack: "encoder" | "decoder";
  is_cross_attention: boolean;
  layer: number;
  heads: number;
  kv_heads: number;
  window: number | null;
  is_causal: boolean;
  has_sink: boolean;
}

export interface LogitAttribution {
  token: number;
  text: string;
  probability: number;
  logit: number;
  attribution_sum: number;
  softcap: number | null;
  heads: Record<string, number[]>;
  components: { name: string; contribution: number }[];
}

export interface HeadTypes {
  head_types: string[];
  attention_names: string[];
  note: string;
  scores: Tensor;
}

export interface HeadThumbnails {
  shape: [number, number];
  thumbnails: Tensor;
  visible: Tensor;
  entropy: Tensor;
  first_token_weight: Tensor;
  sink_weight?: Tensor;
}

export interface HeadDetail {
  shape: [number, number];
  pattern: Tensor;
  visible: Tensor;
  entropy: Tensor;
  meanEntropy: number;
  firstTokenWeight: number;
  sinkWeight: number | null;
  sinkWeights?: Tensor;
}

/** One head, seen close. */
export async function fetchHead(modelInput: ModelInput, attention: string, head: number, signal: AbortSignal): Promise<HeadDetail> {
  const { data, tensors } = await runQuery<{ shape: [number, number]; mean_entropy: number; first_token_weight: number; sink_weight: number | null }>("attention_head", { input: modelInput, attention, head }, { signal });
  const { pattern, visible, entropy, sink_weight: sinkWeights } = tensors;
  if (!pattern || !visible || !entropy) throw new QueryError("the answer about this head is not whole");
  return { shape: data.shape, pattern, visible, entropy, meanEntropy: data.mean_entropy, firstTokenWeight: data.first_token_weight, sinkWeight: data.sink_weight, ...(sinkWeights ? { sinkWeights } : {}) };
}

/** Which of the attentions are shown together: encoders' own, decoders' own, and what decoders see of the source. */
export const attentionGroup = (each: AttentionLayer): string => (each.is_cross_attention ? "cross" : each.stack);
export const GROUP_LABELS: Record<string, string> = { encoder: "Source to source", decoder: "Text to text", cross: "Text to source" };

export const TYPE_LETTERS: Record<string, string> = { previous_token: "P", duplicate_token: "D", induction: "I", first_token: "F" };
export const TYPE_DESCRIPTIONS: Record<string, string> = {
  previous_token: "the token before",
  duplicate_token: "the same token, earlier",
  induction: "what came after the same token earlier",
  first_token: "the first token, where heads rest",
};
export const MIN_TYPE_SCORE = 0.4;

/** A head type as people read it. */
export const typeLabel = (type: string): string => type.replaceAll("_", " ");

/** A head's shares by each rule, if they are known. */
export function headTypeScores(types: HeadTypes | undefined, name: string, head: number): number[] | undefined {
  const layer = types?.attention_names.indexOf(name) ?? -1;
  if (!types || layer < 0) return undefined;
  const [, heads = 0, many = 0] = types.scores.shape;
  const from = (layer * heads + head) * many;
  const found = Array.from(types.scores.data.subarray(from, from + many));
  return found.some(Number.isNaN) ? undefined : found;
}

/** The rule that a head mostly goes by, if there is one. */
export function headType(types: HeadTypes | undefined, name: string, head: number): string | undefined {
  const found = headTypeScores(types, name, head);
  if (!found) return undefined;
  const best = found.indexOf(Math.max(...found));
  return (found[best] ?? 0) >= MIN_TYPE_SCORE ? types?.head_types[best] : undefined;
}
