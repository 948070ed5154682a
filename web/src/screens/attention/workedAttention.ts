// Worked example of attention: the query, and sentences with the numbers of one head, query and key.
import { runQuery, QueryError } from "../../lib/queryClient";
import { formatNumber, formatPercent, formatSignificant, showWhitespace } from "../../lib/format";
import type { ModelInput } from "../../lib/session.svelte";
import type { NumericArray } from "../../lib/protocol";

export interface WeightShare {
  type: string;
  /** Mean weight over the queries that have a key of this type; null if none has one. */
  share: number | null;
  num_queries: number;
}

interface Facts {
  attention: string;
  head: number;
  kv_head: number;
  heads_per_kv_head: number;
  position: number;
  key: number;
  weight: number;
  sink_weight: number | null;
  sink_logit: number | null;
  has_edited_pattern: boolean;
  mask: { is_visible: boolean; masked_by: string[]; is_causal: boolean; is_cross: boolean; window: number | null; num_visible: number; num_keys: number };
  position_method: { kind: "rope" | "alibi" | "relative_bias" | "disentangled" | "none"; embedding: "learned" | "sinusoidal" | null; theta?: number; is_moved?: boolean; num_pairs?: number };
  formulas: Record<"scores" | "mask" | "pattern" | "position" | "z", string[]>;
  weight_shares: WeightShare[];
  d_head: number;
  dot: number;
  scale: number;
  is_default_scale: boolean;
  scaled: number;
  softcap: number | null;
  capped: number;
  bias: number | null;
  score: number;
  site_score: number | null;
  score_matches: boolean | null;
  z_matches: boolean;
  z_norm: number;
  added_norm: number;
  has_output_norm: boolean;
  resid_norm: number | null;
}

export interface Rope {
  qBefore: NumericArray;
  kBefore: NumericArray;
  frequency: NumericArray;
  qAngle: NumericArray;
  kAngle: NumericArray;
  /** Two dimensions per pair. */
  pairs: NumericArray;
}

export interface WorkedAttention extends Facts {
  q: NumericArray;
  k: NumericArray;
  v: NumericArray;
  z: NumericArray;
  /** Of all keys; 0 where masked. */
  scores: NumericArray;
  weights: NumericArray;
  visible: NumericArray;
  valueNorms: NumericArray;
  rope?: Rope;
}

export async function fetchWorkedAttention(modelInput: ModelInput, attention: string, head: number, position: number, key: number | undefined, signal: AbortSignal): Promise<WorkedAttention> {
  const { data, tensors } = await runQuery<Facts>("worked_attention", { input: modelInput, attention, head, position, key: key ?? null }, { signal });
  const read = (name: string): NumericArray => {
    const tensor = tensors[name];
    if (!tensor) throw new QueryError(`the result of worked_attention lacks ${name}; reload the page, which may be older than the server`);
    return tensor.data;
  };
  const worked = { ...data, q: read("q"), k: read("k"), v: read("v"), z: read("z"), scores: read("scores"), weights: read("weights"), visible: read("visible"), valueNorms: read("value_norms") };
  if (data.position_method.kind !== "rope") return worked;
  return { ...worked, rope: { qBefore: read("q_before"), kBefore: read("k_before"), frequency: read("frequency"), qAngle: read("q_angle"), kAngle: read("k_angle"), pairs: read("pairs") } };
}

/** Number in a product: negative numbers are in parentheses. */
export const formatFactor = (value: number): string => (value < 0 ? `(${formatSignificant(value)})` : formatSignificant(value));

/** Indices of the entries with the largest absolute value, largest first. */
export function largestEntries(values: ArrayLike<number>, count: number): number[] {
  return Array.from(values, (_, index) => index).sort((a, b) => Math.abs(values[b] ?? 0) - Math.abs(values[a] ?? 0)).slice(0, count);
}

/** The sum q·k: the terms with the largest absolute value, and the sum of the others. */
export function writeOutDotProduct(q: ArrayLike<number>, k: ArrayLike<number>, dot: number, numTerms = 4): string {
  const products = Array.from(q, (value, index) => value * (k[index] ?? 0));
  const shown = largestEntries(products, numTerms);
  const rest = dot - shown.reduce((sum, index) => sum + (products[index] ?? 0), 0);
  const terms = shown.map((index) => `${formatFactor(q[index] ?? 0)}·${formatFactor(k[index] ?? 0)}`);
  const numOthers = products.length - shown.length;
  const others = numOthers > 0 ? ` + … (${numOthers} more ${numOthers === 1 ? "term" : "terms"}, sum ${formatSignificant(rest)})` : "";
  return `${terms.join(" + ")}${others} = ${formatSignificant(dot)}`;
}

export const SHARE_LABELS: Record<string, string> = {
  first_token: "the first token",
  previous_token: "the previous token",
  query_token: "the query token itself",
  next_token: "the next token",
  earlier_occurrence: "earlier occurrences of the query token",
  after_earlier_occurrence: "tokens that follow an earlier occurrence of the query token",
  first_source_token: "the first source token",
  last_source_token: "the last source token",
  same_position: "the source token at the position of the query",
  same_text: "source tokens equal to the query token",
};
export const MIN_SHARE = 0.4;
/** Head types, which are scored on random tokens, by the position type that is measured on a text. */
export const HEAD_TYPE_OF_SHARE: Record<string, string> = { first_token: "first_token", previous_token: "previous_token", earlier_occurrence: "duplicate_token", after_earlier_occurrence: "induction" };

/** Sentence on where the weights of a head are on this text, from the shares of weight by type of key. `randomScore` is the score on random tokens. */
export function describeShares(worked: WorkedAttention, layer: number, randomScore: (type: string) => number | undefined): string {
  const name = `head ${worked.head} of block ${layer}`;
  const best = worked.weight_shares.filter((share) => share.share !== null).sort((a, b) => (b.share ?? 0) - (a.share ?? 0))[0];
  if (!best || best.share === null) return `The text is too short to measure where the weight of ${name} is.`;
  const type = SHARE_LABELS[best.type] ?? best.type;
  const queries = `mean over ${best.num_queries} query ${best.num_queries === 1 ? "token" : "tokens"}`;
  if (best.share < MIN_SHARE) return `On this text, ${name} has no position type above ${Math.round(100 * MIN_SHARE)} % of its weight; the largest is ${formatPercent(best.share)} on ${type} (${queries}).`;
  const score = randomScore(best.type);
  return `On this text, ${name} has ${formatPercent(best.share)} of its weight on ${type} (${queries})${score === undefined ? "" : `; on random tokens, ${formatPercent(score)}`}.`;
}

const nameToken = (tokenStrs: string[], index: number): string => `“${showWhitespace(tokenStrs[index] ?? "")}” (${index})`;

/** Sentence on whether the key is visible to the query, and why. */
export function describeMask({ mask, position, key }: WorkedAttention, queryTokenStrs: string[], keyTokenStrs: string[]): string {
  const [query, keyName] = [nameToken(queryTokenStrs, position), nameToken(keyTokenStrs, key)];
  const distance = Math.abs(position - key);
  const reasons: Record<string, string> = {
    causal: `it comes after the query and the mask is causal`,
    window: `it is ${distance} tokens from the query and the sliding window has ${mask.window ?? 0} tokens`,
    other: "the model hides it",
  };
  const count = `${query} sees ${mask.num_visible} of ${mask.num_keys} keys.`;
  if (!mask.is_visible) return `${keyName} is masked for ${query}: ${mask.masked_by.map((rule) => reasons[rule] ?? rule).join(", and ")}. Its score is −∞ and its weight is exactly 0. ${count}`;
  if (mask.is_cross) return `${keyName} is visible: in cross-attention every source token is visible to every query. ${count}`;
  const rules = [
    ...(mask.is_causal ? [`${key === position ? "a token sees itself" : "it comes before the query"} (a later token would have score −∞ and weight 0)`] : []),
    ...(mask.window === null ? [] : [`its distance ${distance} is less than the window of ${mask.window} tokens`]),
  ];
  return `${keyName} is visible to ${query}: ${rules.length ? rules.join(", and ") : "attention is bidirectional, so no key is masked"}. ${count}`;
}

/** Sentence on how positions enter this attention, if not by RoPE. */
export function describePositions({ position_method: method, bias, position, key, mask }: WorkedAttention): string {
  const distance = `the distance between query and key is ${Math.abs(position - key)}`;
  const embedding = method.embedding === "learned" ? "learned position embeddings" : method.embedding === "sinusoidal" ? "sinusoidal position embeddings" : "";
  if (method.kind === "alibi") return `This model has ALiBi: no rotation; a bias of −slope × distance is added to the score, with one slope per head. Here ${distance} and the bias is ${formatNumber(bias ?? 0)}.`;
  if (method.kind === "relative_bias") return `This model has a relative position bias (T5): no rotation; a learned number per head and distance bucket is added to the score. Here ${distance} and the bias is ${formatNumber(bias ?? 0)}.`;
  if (method.kind === "disentangled") return `This model has disentangled attention (DeBERTa): no rotation; the score also compares q and k with projections of a relative position embedding. Here ${distance} and these two scores add ${formatNumber(bias ?? 0)}.`;
  if (mask.is_cross) return `Cross-attention adds no position information to the scores.${embedding ? ` Positions enter only through the ${embedding} of the two texts.` : ""}`;
  if (embedding) return `This model adds ${embedding} to the token embeddings before block 0. Attention itself adds no position information: q and k are projections of vectors that already contain it.`;
  return "This attention has no position information of its own: no rotation, no bias and no position embedding. Only the mask depends on positions.";
}

export interface PairRotation {
  pair: number;
  dims: [number, number];
  qBefore: [number, number];
  qAfter: [number, number];
  kBefore: [number, number];
  kAfter: [number, number];
  qAngle: number;
  kAngle: number;
  frequency: number;
  /** Sum of the pair's two terms of q·k. */
  contribution: number;
}

/** The rotary pairs with the largest absolute contribution to q·k, and the pair with the highest frequency, by pair. */
export function selectPairs(worked: WorkedAttention, count = 2): PairRotation[] {
  const { rope, q, k } = worked;
  if (!rope) return [];
  const at = (values: ArrayLike<number>, [a, b]: [number, number]): [number, number] => [values[a] ?? 0, values[b] ?? 0];
  const all = Array.from(rope.frequency, (frequency, pair): PairRotation => {
    const dims: [number, number] = [rope.pairs[2 * pair] ?? 0, rope.pairs[2 * pair + 1] ?? 0];
    const [qAfter, kAfter] = [at(q, dims), at(k, dims)];
    return { pair, dims, qBefore: at(rope.qBefore, dims), qAfter, kBefore: at(rope.kBefore, dims), kAfter, qAngle: rope.qAngle[pair] ?? 0, kAngle: rope.kAngle[pair] ?? 0, frequency, contribution: qAfter[0] * kAfter[0] + qAfter[1] * kAfter[1] };
  });
  const fastest = all.reduce((best, pair) => (pair.frequency > best.frequency ? pair : best));
  const largest = [...all].sort((a, b) => Math.abs(b.contribution) - Math.abs(a.contribution)).slice(0, count);
  return [...new Set([fastest, ...largest])].sort((a, b) => a.pair - b.pair);
}
