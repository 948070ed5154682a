// Patches of the screen Compare: conversion to and from the URL fragment, labels, and the sentence about their effect.
import { formatPercent } from "../../lib/format";
import { parseSite, SUBLAYER_LABELS } from "../../lib/sites";
import { metricName, quote, type Comparison, type Metric, type PatchMap, type TopToken } from "./comparison";

export interface Patch {
  site: string;
  /** Token of the clean text; absent: all aligned tokens. */
  position?: number;
  head?: number;
}

export interface PatchEffect {
  top_tokens: TopToken[];
  /** Value of the metric. */
  metric: number;
  share: number;
  python_code: string;
}

/** Format patches for the URL fragment, such as blocks.4.resid_pre@3,blocks.5.attn.z@*.0; null if there are none. */
export function formatPatches(patches: readonly Patch[]): string | null {
  return patches.map(patchKey).join(",") || null;
}

export const patchKey = ({ site, position, head }: Patch): string => `${site}@${position ?? "*"}${head === undefined ? "" : `.${head}`}`;

export function parsePatches(text: string | undefined, sites: ReadonlySet<string>): Patch[] {
  return (text ?? "").split(",").flatMap((term) => {
    const match = /^([\w.]+)@(\*|\d+)(?:\.(\d+))?$/.exec(term);
    if (!match?.[1] || !sites.has(match[1])) return [];
    return [{ site: match[1], ...(match[2] === "*" ? {} : { position: Number(match[2]) }), ...(match[3] === undefined ? {} : { head: Number(match[3]) }) }];
  });
}

/** Whether the token of a patch, or any token if it has none, is aligned. The selected token is, with that of the changed text. */
export function isAligned({ site, position }: Patch, { token_pairs, source_pairs }: Comparison, selected: number): boolean {
  const isSource = site.startsWith("encoder.");
  const pairs = isSource ? source_pairs : token_pairs;
  if (position === undefined) return pairs.length > 0;
  return (!isSource && position === selected) || pairs.some(([own]) => own === position);
}

/** Why patches are not applied, in one sentence. */
export function unalignedSentence(patches: readonly Patch[]): string {
  const names = patches.map(({ site, position }) => `${site} at ${position === undefined ? "all aligned tokens" : `token ${position}`}`);
  return `${patches.length === 1 ? "A patch of the URL is" : `${patches.length} patches of the URL are`} not applied, because no token of the changed text is aligned with ${patches.length === 1 ? "its token" : "their tokens"}: ${names.join(", ")}.`;
}

/** Replace the patches by one, or combine it with them. A patch that is chosen again is removed. */
export function choosePatch(patches: readonly Patch[], patch: Patch, combine: boolean): Patch[] {
  const rest = patches.filter((other) => patchKey(other) !== patchKey(patch));
  if (!combine) return patches.length === 1 && !rest.length ? [] : [patch];
  return rest.length < patches.length ? rest : [...rest, patch];
}

const COMPONENT_TITLES: Record<PatchMap["component"], string> = {
  resid: "Residual stream",
  "attn.out": "Attention output",
  "cross.out": "Cross-attention output",
  "ffn.out": "FFN output",
  "attn.z": "Attention heads",
  "cross.z": "Cross-attention heads",
};

export const mapTitle = (map: PatchMap, hasTwoStacks: boolean): string => (hasTwoStacks ? `${map.stack === "encoder" ? "Encoder" : "Decoder"}: ${COMPONENT_TITLES[map.component].toLowerCase().replace("ffn", "FFN")}` : COMPONENT_TITLES[map.component]);

/** Row label of a site in a map, such as "after block 3". */
export function rowLabel(site: string): string {
  const { block = 0, name } = parseSite(site);
  if (name === "resid_post") return `after block ${block}`;
  if (name === "resid_pre") return block ? `after block ${block - 1}` : "embedding";
  return `block ${block}`;
}

/** A patch in words, such as "the residual stream of “·Ben” after block 3". */
export function describePatch({ site, position, head }: Patch, tokenStrs: readonly string[]): string {
  const { stack, block, sublayer, name } = parseSite(site);
  const place = stack ? ` of the ${stack}` : "";
  const token = position === undefined ? "all aligned tokens" : `${quote(tokenStrs[position] ?? "")} (token ${position})`;
  if (!sublayer || name.startsWith("resid")) return `the residual stream${place} of ${token} ${rowLabel(site) === "embedding" ? "after the embedding" : rowLabel(site)}`;
  const label = `${SUBLAYER_LABELS[sublayer] ?? sublayer} of block ${block}${place}`;
  return head === undefined ? `the output of the ${label} at ${token}` : `the output of head ${head} of the ${label} at ${token}`;
}

export const formatShare = (share: number): string => (Math.abs(share) < 5e-4 ? "0.0 %" : `${(100 * share).toFixed(1).replace("-", "−")} %`);

/** What a restored share means for the metric. */
function interpretShare(share: number, { answer, incorrect }: Metric, subject: string): string {
  const isOne = subject === "this activation";
  const carry = isOne ? "carries" : "carry";
  const what = incorrect ? `decides between ${quote(answer.text)} and ${quote(incorrect.text)} here` : `changes the probability of ${quote(answer.text)} here`;
  if (share >= 0.8) return `${subject} ${carry} the information that ${what}${share > 1.05 ? "; more than 100 % means that the patched run goes beyond the donor run" : ""}`;
  if (share >= 0.2) return `${subject} ${carry} part of the information that ${what}`;
  if (share > -0.1) return `${subject} alone ${carry} little of the information that ${what}`;
  return `the patched run differs from the donor run more than before, so other activations compensate for ${isOne ? "it" : "them"}`;
}

/** The effect of patches in one sentence. */
export function effectSentence(patches: readonly Patch[], effect: PatchEffect, metric: Metric, tokenStrs: (patch: Patch) => readonly string[], reverse: boolean): string {
  const [first] = patches;
  const what = patches.length === 1 && first ? describePatch(first, tokenStrs(first)) : `these ${patches.length} activations`;
  const [donor, receiver] = reverse ? ["changed", "clean"] : ["clean", "changed"];
  const subject = patches.length === 1 ? "this activation" : "these activations";
  const name = metricName(metric);
  const result = reverse ? `moves the ${name} by ${formatShare(effect.share)} of the distance to that of the changed run` : `restores ${formatShare(effect.share)} of the ${metric.incorrect ? name : `change of the ${name}`}`;
  return `Copying ${what} from the ${donor} run into the ${receiver} run ${result}: ${interpretShare(effect.share, metric, subject)}. The top token is then ${quote(effect.top_tokens[0]?.text ?? "")} (${formatPercent(effect.top_tokens[0]?.probability ?? 0)}).`;
}
