// What the questions about attention answer.
import { ask, Refused } from "../../lib/ask";
import type { Look } from "../../lib/session.svelte";
import type { Tensor } from "../../lib/wire";

export interface Attention {
  name: string;
  stack: "encoder" | "decoder";
  cross: boolean;
  layer: number;
  heads: number;
  kv_heads: number;
  window: number | null;
  causal: boolean;
  sink: boolean;
}

export interface Credit {
  token: number;
  text: string;
  share: number;
  logit: number;
  sum: number;
  cap: number | null;
  heads: Record<string, number[]>;
  others: { name: string; amount: number }[];
}

export interface Kinds {
  kinds: string[];
  names: string[];
  note: string;
  scores: Tensor;
}

export interface Thumbs {
  size: [number, number];
  thumbs: Tensor;
  visible: Tensor;
  entropy: Tensor;
  first: Tensor;
  sink?: Tensor;
}

export interface Close {
  size: [number, number];
  pattern: Tensor;
  visible: Tensor;
  entropy: Tensor;
  mean: number;
  first: number;
  sink: number | null;
  sinks?: Tensor;
}

/** One head, seen close. */
export async function closeUp(look: Look, attention: string, head: number, signal: AbortSignal): Promise<Close> {
  const { facts, arrays } = await ask<{ size: [number, number]; entropy: number; first: number; sink: number | null }>("head", { look, attention, head }, { signal });
  const { pattern, visible, entropy, sink } = arrays;
  if (!pattern || !visible || !entropy) throw new Refused("the answer about this head is not whole");
  return { size: facts.size, pattern, visible, entropy, mean: facts.entropy, first: facts.first, sink: facts.sink, ...(sink ? { sinks: sink } : {}) };
}

/** Which of the attentions are shown together: encoders' own, decoders' own, and what decoders see of the source. */
export const family = (each: Attention): string => (each.cross ? "cross" : each.stack);
export const FAMILIES: Record<string, string> = { encoder: "Source to source", decoder: "Text to text", cross: "Text to source" };

export const SHORT: Record<string, string> = { previous: "P", duplicate: "D", induction: "I", first: "F" };
export const RULES: Record<string, string> = {
  previous: "the token before",
  duplicate: "the same token, earlier",
  induction: "what came after the same token earlier",
  first: "the first token, where heads rest",
};
export const CLEAR = 0.4;

/** A head's shares by each rule, if they are known. */
export function kindsOf(kinds: Kinds | undefined, name: string, head: number): number[] | undefined {
  const layer = kinds?.names.indexOf(name) ?? -1;
  if (!kinds || layer < 0) return undefined;
  const [, heads = 0, many = 0] = kinds.scores.shape;
  const from = (layer * heads + head) * many;
  const found = Array.from(kinds.scores.data.subarray(from, from + many));
  return found.some(Number.isNaN) ? undefined : found;
}

/** The rule that a head mostly goes by, if there is one. */
export function kindOf(kinds: Kinds | undefined, name: string, head: number): string | undefined {
  const found = kindsOf(kinds, name, head);
  if (!found) return undefined;
  const best = found.indexOf(Math.max(...found));
  return (found[best] ?? 0) >= CLEAR ? kinds?.kinds[best] : undefined;
}
