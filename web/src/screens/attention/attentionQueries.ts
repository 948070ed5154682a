// Queries for attention patterns and head types, and the types of their results.
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

/** Fetch the attention pattern and statistics of one head. */
export async function fetchHead(modelInput: ModelInput, attention: string, head: number, signal: AbortSignal): Promise<HeadDetail> {
  const { data, tensors } = await runQuery<{ shape: [number, number]; mean_entropy: number; first_token_weight: number; sink_weight: number | null }>("attention_head", { input: modelInput, attention, head }, { signal });
  const { pattern, visible, entropy, sink_weight: sinkWeights } = tensors;
  if (!pattern || !visible || !entropy) throw new QueryError("the result for this head lacks a tensor; reload the page, which may be older than the server");
  return { shape: data.shape, pattern, visible, entropy, meanEntropy: data.mean_entropy, firstTokenWeight: data.first_token_weight, sinkWeight: data.sink_weight, ...(sinkWeights ? { sinkWeights } : {}) };
}

/** Group of a layer: encoder self-attention, decoder self-attention, or cross-attention. */
export const attentionGroup = (layer: AttentionLayer): string => (layer.is_cross_attention ? "cross" : layer.stack);
export const GROUP_LABELS: Record<string, string> = { encoder: "Encoder self-attention", decoder: "Decoder self-attention", cross: "Cross-attention" };

export const TYPE_LETTERS: Record<string, string> = { previous_token: "P", duplicate_token: "D", induction: "I", first_token: "F" };
export const TYPE_DESCRIPTIONS: Record<string, string> = {
  previous_token: "attends to the previous token",
  duplicate_token: "attends to earlier occurrences of the same token",
  induction: "attends to the token after an earlier occurrence of the same token",
  first_token: "attends to the first token",
};
/** Minimum score, as a fraction of the attention weight, at which a head is assigned a type. */
export const MIN_TYPE_SCORE = 0.4;

/** Display name of a head type. */
export const typeLabel = (type: string): string => type.replaceAll("_", " ");

/** Scores of a head by head type; undefined if it was not scored. */
export function headTypeScores(types: HeadTypes | undefined, name: string, head: number): number[] | undefined {
  const layer = types?.attention_names.indexOf(name) ?? -1;
  if (!types || layer < 0) return undefined;
  const [, heads = 0, numTypes = 0] = types.scores.shape;
  const offset = (layer * heads + head) * numTypes;
  const scores = Array.from(types.scores.data.subarray(offset, offset + numTypes));
  return scores.some(Number.isNaN) ? undefined : scores;
}

/** Type with the highest score and this score, if it is at least MIN_TYPE_SCORE. */
export function headType(types: HeadTypes | undefined, name: string, head: number): { type: string; score: number } | undefined {
  const scores = headTypeScores(types, name, head);
  if (!scores) return undefined;
  const score = Math.max(...scores);
  const type = types?.head_types[scores.indexOf(score)];
  return type !== undefined && score >= MIN_TYPE_SCORE ? { type, score } : undefined;
}

export interface TypedHead {
  attention: string;
  layer: number;
  head: number;
  score: number;
}

/** Heads of each type, with the highest score first; types without heads are left out. */
export function headsByType(types: HeadTypes, layers: readonly AttentionLayer[]): { type: string; heads: TypedHead[] }[] {
  const all = layers.flatMap(({ name, layer, heads }) =>
    Array.from({ length: heads }, (_, head) => ({ attention: name, layer, head, ...headType(types, name, head) })).filter((typed) => typed.type !== undefined),
  );
  return types.head_types
    .map((type) => ({ type, heads: all.flatMap(({ type: own, score = 0, ...typed }) => (own === type ? [{ ...typed, score }] : [])).sort((a, b) => b.score - a.score) }))
    .filter(({ heads }) => heads.length > 0);
}
