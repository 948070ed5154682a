// The result of the query interventions, and sentences about what the prediction depends on. Each sentence states a measured effect.
import { formatPercent, showWhitespace } from "../../lib/format";
import { SUBLAYER_LABELS } from "../../lib/sites";

/** The prediction after one intervention: the probability of the token, and the new top-1 token. */
export interface Effect {
  probability: number;
  top: number;
  top_text: string;
}

export interface Interventions {
  /** The token whose probability is measured, and the predicted one, which is the same by default. */
  token: number;
  predicted: number;
  text: string;
  probability: number;
  /** Positions of the predicted token in the text. */
  in_text: number[];
  /** Without attention from the selected position to each token, in all blocks. */
  tokens?: Effect[];
  /** Without cross-attention to each token of the source. */
  source_tokens?: Effect[];
  /** Without each sublayer, as "3.attn": by zero ablation and by mean ablation. */
  zero?: Record<string, Effect>;
  mean?: Record<string, Effect>;
  /** Without each head, as "3.attn.5", by zero ablation. */
  heads?: Record<string, Effect>;
}

/** Smallest change of the log-probability that is named, in nats. */
const MIN_EFFECT = 0.1;
const MAX_NAMED = 3;

/** Change of the log-probability of the token, in nats. */
export function logChange(effect: Effect, data: Interventions): number {
  return Math.log(Math.max(effect.probability, 1e-12) / Math.max(data.probability, 1e-12));
}

/** "3.attn.5" → "head 5 of the attention of block 3". */
export function componentLabel(name: string): string {
  const [block, sublayer = "", head] = name.split(".");
  const label = `${SUBLAYER_LABELS[sublayer] ?? sublayer} of block ${block}`;
  return head === undefined ? label : `head ${head} of the ${label}`;
}

const quote = (text: string): string => `“${showWhitespace(text)}”`;

/** The token on which the prediction depends most, by attention knockout. */
export function tokenSentence(data: Interventions, tokenStrs: readonly string[], sourceTokenStrs: readonly string[]): string | undefined {
  const candidates = [
    ...(data.tokens ?? []).map((effect, index) => ({ effect, index, text: tokenStrs[index] ?? "", isSource: false })),
    ...(data.source_tokens ?? []).map((effect, index) => ({ effect, index, text: sourceTokenStrs[index] ?? "", isSource: true })),
  ];
  const strongest = candidates.sort((a, b) => a.effect.probability - b.effect.probability)[0];
  if (!strongest) return undefined;
  const { effect, index, text, isSource } = strongest;
  const isNew = !data.in_text.length && !data.source_tokens && data.token === data.predicted;
  const origin = isNew ? ` ${quote(data.text)} does not occur in the text, so it is not copied: it comes from what the model has learned.` : "";
  if (logChange(effect, data) > -MIN_EFFECT) return `No single token is needed: without attention to any one of them, the probability stays about the same.${origin}`;
  const token = `${quote(text)} (token ${index}${isSource ? " of the source" : ""})`;
  const probability = `${quote(data.text)} has ${formatPercent(effect.probability)}`;
  const changes = effect.top !== data.predicted;
  const isCopied = !isSource && data.in_text.includes(index) && changes;
  const lead = isCopied ? `It is copied from ${token}: without attention to this token` : `It depends most on ${token}: without attention to this token`;
  return changes ? `${lead}, the prediction is ${quote(effect.top_text)} and ${probability}.${origin}` : `${lead}, ${probability}; no single token changes the prediction.${origin}`;
}

/** Sublayers whose ablation alone changes the prediction, with both methods. */
export function necessarySublayers(data: Interventions): string[] {
  const { zero, mean } = data;
  return zero ? Object.keys(zero).filter((name) => zero[name]?.top !== data.predicted && (!mean || mean[name]?.top !== data.predicted)) : [];
}

/** How many sublayers the prediction depends on, by ablation of one at a time. */
export function sublayerSentence(data: Interventions): string | undefined {
  const { zero, mean } = data;
  if (!zero) return undefined;
  const names = Object.keys(zero);
  const methods = mean ? "its output set to zero, or to its mean over the text" : "its output set to zero";
  const size = (name: string): number => Math.min(...[zero[name], mean?.[name]].map((effect) => (effect ? -logChange(effect, data) : Infinity)));
  const necessary = necessarySublayers(data).sort((a, b) => size(b) - size(a));
  if (!necessary.length) return `No sublayer alone is necessary: without any one of the ${names.length} (${methods}), the prediction stays the same${mean ? " with at least one of the two" : ""}.`;
  const named = necessary.slice(0, MAX_NAMED).map(componentLabel).join(", ");
  const rest = necessary.length > MAX_NAMED ? ` and ${necessary.length - MAX_NAMED} more` : "";
  return `${necessary.length} of ${names.length} sublayers ${necessary.length === 1 ? "is" : "are"} necessary on this text, i.e. the prediction changes without ${necessary.length === 1 ? "it" : "one of them"} (${methods}): ${named}${rest}.`;
}
