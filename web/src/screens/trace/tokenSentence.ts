// Sentences about the tokens that a prediction depends on, and whether it is copied from the text. Each states effects measured by attention knockout.
import { continuesWord, formatPercent, showWhitespace } from "../../lib/format";
import { logChange, type Effect, type Interventions } from "./interventions";

/** Smallest change of the log-probability that is named, in nats. */
const MIN_EFFECT = 0.1;
/** Largest number of occurrences whose positions are listed. */
const MAX_LISTED = 4;

export interface InputTexts {
  tokenStrs: readonly string[];
  sourceTokenStrs: readonly string[];
  /** What the prediction can be copied from: the text up to the selected token, or all of it in an encoder, and the source. */
  visibleText: string;
  /** The token that the prediction follows; undefined in an encoder, whose prediction is at the position itself. */
  previous: string | undefined;
}

const quote = (text: string): string => `“${showWhitespace(text)}”`;

/** A quoted prediction. A part of a word is marked as such, because it would look like a typing error. */
function quotePrediction(text: string, previous: string | undefined): string {
  return previous !== undefined && continuesWord(text, previous) ? `${quote(text)} (a part of a word, which continues ${quote(previous)})` : quote(text);
}

interface Copy {
  effect: Effect;
  positions: number[];
  texts: readonly string[];
  isSource: boolean;
}

/** The probability falls to less than half, or another token is predicted. */
const isCopied = (effect: Effect, data: Interventions): boolean => effect.top !== data.predicted || effect.probability < data.probability / 2;

/** What remains of the prediction after a knockout. */
function describeEffect(effect: Effect, data: Interventions, previous: string | undefined): string {
  const probability = `${quote(data.text)} has ${formatPercent(effect.probability)}`;
  return effect.top === data.predicted ? probability : `the prediction is ${quotePrediction(effect.top_text, previous)} and ${probability}`;
}

function place({ positions, isSource }: Copy): string {
  const listed = positions.length > MAX_LISTED ? `${positions.length} tokens` : `token${positions.length === 1 ? "" : "s"} ${positions.join(", ")}`;
  return `${listed}${isSource ? " of the source" : ""}`;
}

function copySentence(copy: Copy, data: Interventions, previous: string | undefined): string {
  const [it, occurrence] = copy.positions.length === 1 ? ["it", "the same token"] : ["them", "the same tokens"];
  const text = copy.texts[copy.positions[0] ?? 0] ?? "";
  if (isCopied(copy.effect, data)) return `It is mostly copied from ${quote(text)} (${place(copy)}): without attention to ${it}, ${describeEffect(copy.effect, data, previous)}.`;
  return `It occurs in the ${copy.isSource ? "source" : "text"} (${place(copy)}), but is not copied by direct attention to ${occurrence}: without attention to ${it}, ${quote(data.text)} still has ${formatPercent(copy.effect.probability)}.`;
}

/** Whether the prediction is copied: from an occurrence in the text, or, for an encoder-decoder, in the source. */
function originSentence(copies: Copy[], data: Interventions, { visibleText, previous }: InputTexts): string {
  const copy = copies.find(({ effect }) => isCopied(effect, data)) ?? copies[0];
  if (data.is_special) return `${quote(data.text)} is a special token, so it is not copied.`;
  if (copy && (isCopied(copy.effect, data) || !data.is_own_token)) return copySentence(copy, data, previous);
  if (data.is_own_token) return "It is the selected token itself, whose residual stream starts with it; so knockout of attention does not show whether it is copied.";
  const input = data.source_tokens ? "text or the source" : "text";
  if (hasWord(visibleText, data.text.trim())) return `${quote(data.text)} occurs in the ${input} as other tokens, so knockout of one token does not show whether it is copied.`;
  return `${quote(data.text)} does not occur in the ${input}, so it is not copied${data.source_tokens ? "." : ": it comes from what the model has learned."}`;
}

/** Whether a word occurs in a text, not as a part of a longer word. */
function hasWord(text: string, word: string): boolean {
  const pattern = word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return word !== "" && new RegExp(`(?<![\\p{L}\\p{N}])${pattern}(?![\\p{L}\\p{N}])`, "iu").test(text);
}

/** What the prediction depends on most, and whether it is copied. */
export function tokenSentence(data: Interventions, texts: InputTexts): string | undefined {
  const { tokenStrs, sourceTokenStrs, previous } = texts;
  const candidates = [
    ...(data.tokens ?? []).map((effect, index) => ({ effect, positions: [index], texts: tokenStrs, isSource: false })),
    ...(data.source_tokens ?? []).map((effect, index) => ({ effect, positions: [index], texts: sourceTokenStrs, isSource: true })),
  ];
  const strongest = candidates.sort((a, b) => a.effect.probability - b.effect.probability)[0];
  if (!strongest) return undefined;
  const copies = [
    { ...data.occurrences, texts: tokenStrs, isSource: false },
    { ...data.source_occurrences, texts: sourceTokenStrs, isSource: true },
  ].filter((copy): copy is Copy => Boolean(copy.effect));
  const origin = originSentence(copies, data, texts);
  const isOccurrence = copies.some((copy) => copy.isSource === strongest.isSource && copy.positions.length === 1 && copy.positions[0] === strongest.positions[0] && isCopied(copy.effect, data));
  if (isOccurrence) return origin;
  const copiedFirst = copies.some(({ effect }) => isCopied(effect, data));
  const dependence = dependenceSentence(strongest, data, previous, copiedFirst);
  return copiedFirst ? `${origin} ${dependence}` : `${dependence} ${origin}`;
}

function dependenceSentence(strongest: Copy, data: Interventions, previous: string | undefined, copiedFirst: boolean): string {
  const { effect, positions, texts } = strongest;
  if (logChange(effect, data) > -MIN_EFFECT) return "No single token is needed: without attention to any one of them, the probability stays about the same.";
  const token = `${quote(texts[positions[0] ?? 0] ?? "")} (${place(strongest)})`;
  const lead = copiedFirst ? `The single token with the largest effect is ${token}: without attention to it` : `It depends most on ${token}: without attention to this token`;
  return `${lead}, ${describeEffect(effect, data, previous)}${effect.top === data.predicted ? "; no single token changes the prediction" : ""}.`;
}
