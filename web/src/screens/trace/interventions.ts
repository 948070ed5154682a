// The result of the query interventions, and a sentence about the sublayers that the prediction depends on. It states measured effects.
import { SUBLAYER_LABELS } from "../../lib/sites";

/** The prediction after one intervention: the probability of the token, and the new top-1 token. */
export interface Effect {
  probability: number;
  top: number;
  top_text: string;
}

interface Occurrences {
  positions: number[];
  /** null without occurrences */
  effect: Effect | null;
}

export interface Interventions {
  /** The token whose probability is measured, and the predicted one, which is the same by default. */
  token: number;
  predicted: number;
  text: string;
  probability: number;
  /** Whether it is a special token, such as the one that ends a text. */
  is_special: boolean;
  /** Whether the selected token has the same text. */
  is_own_token: boolean;
  /** Other tokens with the same text that the selected position attends to, knocked out jointly. */
  occurrences?: Occurrences;
  /** Tokens of the source with the same text. */
  source_occurrences?: Occurrences;
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

/** Minimum number of tokens of mean ablation, as in the query. */
export const MIN_MEAN_TOKENS = 4;
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

/** Sublayers whose ablation alone changes the prediction: with both methods, or with one of them only. */
function countedSublayers({ zero = {}, mean, predicted }: Interventions): { both: string[]; one: string[] } {
  const changes = (name: string): boolean[] => [zero[name], ...(mean ? [mean[name]] : [])].map((effect) => effect?.top !== predicted);
  const names = Object.keys(zero);
  return { both: names.filter((name) => changes(name).every(Boolean)), one: names.filter((name) => changes(name).some(Boolean) && !changes(name).every(Boolean)) };
}

/** How many sublayers the prediction depends on, by ablation of one at a time. The table of the components has the same counts. */
export function sublayerSentence(data: Interventions): string | undefined {
  const { zero, mean } = data;
  if (!zero || (!mean && (data.tokens?.length ?? 0) >= MIN_MEAN_TOKENS)) return undefined; // the mean ablation is still being measured
  const { both, one } = countedSublayers(data);
  const count = Object.keys(zero).length;
  const size = (name: string): number => Math.min(...[zero[name], mean?.[name]].map((effect) => (effect ? -logChange(effect, data) : Infinity)));
  if (!both.length && one.length) return `No sublayer alone is necessary: ${one.length} of ${count} ${one.length === 1 ? "changes" : "change"} the prediction with zero or with mean ablation, but none with both.`;
  if (!both.length) return `No sublayer alone is necessary: without any one of the ${count}, the prediction stays the same, with zero ${mean ? "and with mean " : ""}ablation.`;
  const named = both.sort((a, b) => size(b) - size(a)).slice(0, MAX_NAMED).map(componentLabel).join(", ");
  const rest = both.length > MAX_NAMED ? ` and ${both.length - MAX_NAMED} more` : "";
  const others = one.length ? ` ${one.length === 1 ? "One other changes" : `${one.length} others change`} it with one of the two only.` : "";
  const [are, them] = both.length === 1 ? ["is", "it"] : ["are", "any one of them"];
  return `${both.length} of ${count} sublayers ${are} necessary on this text (${named}${rest}): without ${them}, the prediction changes${mean ? ", both with zero and with mean ablation" : " (zero ablation)"}.${others}`;
}
