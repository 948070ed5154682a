// Points of the residual stream, each with the sublayer outputs added since the previous point, from the stages of a journey.
import { parseSite, SUBLAYER_LABELS } from "../../lib/sites";

export interface TokenProbability {
  token: number;
  text: string;
  probability: number;
}

export interface Stage {
  site: string;
  equation: string;
  axes: string;
  shape: number[];
  norm: number;
  relative_norm: number | null;
  cosine: number | null;
  top_tokens: TokenProbability[];
}

export interface SublayerOutput {
  site: string;
  sublayer: string;
  block: number | undefined;
  name: string;
  norm: number;
  relativeNorm: number | null;
  cosine: number | null;
}

export interface ResidualPoint {
  site: string;
  /** Label, and a short one for narrow screens. */
  name: string;
  short: string;
  norm: number;
  topToken: TokenProbability | undefined;
  added: SublayerOutput[];
  /** Sites computed since the previous point, including derived values. */
  sites: string[];
}

export function residualPoints(stages: readonly Stage[]): ResidualPoint[] {
  const points: ResidualPoint[] = [];
  let added: SublayerOutput[] = [];
  let sites: string[] = [];
  for (const stage of stages) {
    const { block, sublayer, name: siteName } = parseSite(stage.site);
    sites.push(stage.site, ...derivedSites(stage.site));
    if (siteName === "out" && block !== undefined) {
      added.push({ site: stage.site, sublayer, block, name: `${SUBLAYER_LABELS[sublayer] ?? sublayer} of block ${block}`, norm: stage.norm, relativeNorm: stage.relative_norm, cosine: stage.cosine });
    }
    const isResidual = /(embed|resid_mid|resid_post|cross\.resid_pre|final_norm)$/.test(stage.site);
    if (!isResidual) continue;
    const shortNames = added.map((output) => (output.sublayer === "ffn" ? "ffn" : output.sublayer === "cross" ? "crs" : "att"));
    const name = siteName === "embed" ? "embed" : siteName === "final_norm" ? "final" : `${block} ${added.map((output) => output.sublayer).join("+")}`;
    const short = siteName === "embed" ? "emb" : siteName === "final_norm" ? "fin" : `${block}${shortNames.join("")}`;
    if (siteName === "final_norm") sites.push("logits", "softmax");
    points.push({ site: stage.site, name, short, norm: stage.norm, topToken: stage.top_tokens[0], added, sites });
    added = [];
    sites = [];
  }
  return points;
}

/** Names of values that are not stages of a journey and are shown at the point of this site. */
function derivedSites(site: string): string[] {
  if (site.endsWith(".q")) return ["scores", "pattern", "mask", "position"].map((name) => site.replace(/q$/, name));
  return site.endsWith("embed") ? [`${site}.token`, `${site}.position`] : [];
}

/**
 * Index of the first point from which on the top-1 token of the logit lens is the model's prediction; -1 without a logit lens.
 * This is an observation, not a cause: it does not show which sublayer the prediction depends on.
 */
export function findFixedPoint(rows: readonly ResidualPoint[]): number {
  const prediction = rows.at(-1)?.topToken?.token;
  if (prediction === undefined) return -1;
  let first = rows.length - 1;
  while (first > 0 && rows[first - 1]?.topToken?.token === prediction) first--;
  return first;
}
