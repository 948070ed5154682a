// The results of the queries that compare two texts, and sentences about them.
import { formatNumber, formatPercent, showWhitespace } from "../../lib/format";
import type { ModelInput } from "../../lib/session.svelte";

export interface Token {
  token: number;
  text: string;
}

export interface TopToken extends Token {
  probability: number;
}

/** Metric of activation patching: the log-probability of the answer, or its logit minus that of the incorrect token. */
export interface Metric {
  answer: Token;
  incorrect: Token | null;
  /** Value in the clean and in the changed run. */
  clean: number;
  changed: number;
  /** Why patching is not measured; null if it is. */
  problem: string | null;
}

interface Run {
  top_tokens: TopToken[];
  /** Probabilities of the answer of the clean run and of that of the changed run. */
  answer_probabilities: [number, number];
  /** Logit of the answer of the clean run minus that of the changed run. */
  logit_difference: number;
}

export interface PatchMap {
  stack: "encoder" | "decoder";
  component: "resid" | "attn.out" | "cross.out" | "ffn.out" | "attn.z" | "cross.z";
}

/** Positions (in the clean text, in the changed text) that correspond to each other. */
export type PositionPair = [number, number];

export interface Comparison {
  token_pairs: PositionPair[];
  source_pairs: PositionPair[];
  changed_position: number;
  /** Absent if the model has no LM head. */
  clean?: Run;
  changed?: Run;
  answers?: [Token, Token];
  maps?: PatchMap[];
  is_patching_fast?: boolean;
}

export interface LensToken extends TopToken {
  metric: number;
}

/** Parameters that all queries about two texts have. */
export interface PairParams {
  input: ModelInput;
  changed: ModelInput;
  position: number;
}

/** Parameters of the queries that measure a metric. */
export interface MetricParams extends PairParams {
  answer_token: number;
  incorrect_token: number | null;
}

export interface TokenTexts {
  clean: string[];
  changed: string[];
}

export const quote = (text: string): string => `“${showWhitespace(text)}”`;

/** Such as "log-probability of “·very”" or "logit difference “·she” − “·he”". */
export const metricName = ({ answer, incorrect }: Metric): string => (incorrect ? `logit difference ${quote(answer.text)} − ${quote(incorrect.text)}` : `log-probability of ${quote(answer.text)}`);

/** Value of a metric with its unit: a log-probability is in nats, with the probability; a logit difference has no unit. */
export const formatMetric = ({ incorrect }: Metric, value: number): string => (incorrect ? formatNumber(value) : `${formatNumber(value)} nats (${formatPercent(Math.exp(value))})`);

/** Label of a pair of tokens: one text if they are equal, else both. */
export function pairLabel(pair: PositionPair | undefined, texts: TokenTexts): string {
  const [own, other] = pair ? [texts.clean[pair[0]] ?? "", texts.changed[pair[1]] ?? ""] : ["", ""];
  return own === other ? showWhitespace(own) : `${showWhitespace(own)}|${showWhitespace(other)}`;
}

/** The aligned tokens that differ, as "“·Tom” instead of “·Ben”"; undefined if there are none or many. */
export function describeChange(pairs: PositionPair[], texts: TokenTexts): string | undefined {
  if (texts.clean.length !== texts.changed.length) return undefined;
  const changes: { end: number; clean: string; changed: string }[] = []; // adjacent differing tokens are one change
  for (const [own, other] of pairs) {
    const [clean, changed] = [texts.clean[own] ?? "", texts.changed[other] ?? ""];
    const last = changes.at(-1);
    if (clean === changed) continue;
    if (last?.end === own) Object.assign(last, { end: own + 1, clean: last.clean + clean, changed: last.changed + changed });
    else changes.push({ end: own + 1, clean, changed });
  }
  if (!changes.length || changes.length > 3) return undefined;
  return changes.map(({ clean, changed }) => `${quote(changed)} instead of ${quote(clean)}`).join(" and ");
}

/** How the prediction changes from the clean to the changed text. */
export function answerSentence(data: Comparison, change: string | undefined, isEncoder: boolean): string {
  const { clean, changed, answers } = data;
  if (!clean || !changed || !answers) return "This model has no LM head, so it predicts no tokens; the differences of its activations are shown.";
  const lead = change ? `With ${change}` : "With the changed text";
  const [own, other] = answers;
  const subject = isEncoder ? "the predicted token" : "the next token";
  if (own.token === other.token) {
    return `${lead}, ${subject} stays ${quote(own.text)} (${formatPercent(clean.answer_probabilities[0])} for the clean text, ${formatPercent(changed.answer_probabilities[0])} for the changed text).`;
  }
  return `${lead}, ${subject} changes from ${quote(own.text)} (${formatPercent(clean.answer_probabilities[0])}) to ${quote(other.text)} (${formatPercent(changed.answer_probabilities[1])}); the logit difference ${quote(own.text)} − ${quote(other.text)} goes from ${formatNumber(clean.logit_difference)} to ${formatNumber(changed.logit_difference)}.`;
}

/** That the texts have different lengths or little in common, and what is compared then; undefined if they differ in few tokens. */
export function mismatchSentence(pairs: PositionPair[], texts: TokenTexts): string | undefined {
  const [numClean, numChanged] = [texts.clean.length, texts.changed.length];
  const advice = "To measure the effect of one word, copy the clean text and change this word.";
  if (!pairs.length) return `The texts have ${numClean} and ${numChanged} tokens, and no tokens are aligned. Their predictions are compared; residual streams and patches are compared for aligned tokens only. ${advice}`;
  if (numClean !== numChanged) return `The texts have ${numClean} and ${numChanged} tokens. Their predictions are compared; residual streams, attention and patches are compared for the ${pairs.length} aligned ${pairs.length === 1 ? "pair" : "pairs"} of tokens only. ${advice}`;
  const numDifferent = pairs.filter(([own, other]) => texts.clean[own] !== texts.changed[other]).length;
  return numDifferent > Math.max(3, numClean / 2) ? `${numDifferent} of ${numClean} tokens differ between the texts. Everything below is the effect of all these changes together. ${advice}` : undefined;
}
