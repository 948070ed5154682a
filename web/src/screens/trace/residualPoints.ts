// A token's way as points on the stream, each with what was added on the way to it.
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
  part: string;
  block: number | undefined;
  name: string;
  norm: number;
  relativeNorm: number | null;
  cosine: number | null;
}

export interface ResidualPoint {
  site: string;
  /** In full, and in few letters. */
  name: string;
  short: string;
  norm: number;
  topToken: TokenProbability | undefined;
  added: SublayerOutput[];
  /** All stages that lead here, by their beginnings too. */
  sites: string[];
}

export function residualPoints(stages: readonly Stage[]): ResidualPoint[] {
  const found: ResidualPoint[] = [];
  let added: SublayerOutput[] = [];
  let sites: string[] = [];
  for (const stage of stages) {
    const { block, part, end } = parseSite(stage.site);
    sites.push(stage.site, ...derivedSites(stage.site));
    if (end === "out" && block !== undefined) {
      added.push({ site: stage.site, part, block, name: `${SUBLAYER_LABELS[part] ?? part} of block ${block}`, norm: stage.norm, relativeNorm: stage.relative_norm, cosine: stage.cosine });
    }
    const onStream = /(embed|resid_mid|resid_post|cross\.resid_pre|final_norm)$/.test(stage.site);
    if (!onStream) continue;
    const by = added.map((each) => (each.part === "ffn" ? "ffn" : each.part === "cross" ? "crs" : "att"));
    const name = end === "embed" ? "embed" : end === "final_norm" ? "final" : `${block} ${added.map((each) => each.part).join("+")}`;
    const short = end === "embed" ? "emb" : end === "final_norm" ? "fin" : `${block}${by.join("")}`;
    if (end === "final_norm") sites.push("logits", "softmax");
    found.push({ site: stage.site, name, short, norm: stage.norm, topToken: stage.top_tokens[0], added, sites });
    added = [];
    sites = [];
  }
  return found;
}

/** Stages without a site of their own belong to those beside them. */
function derivedSites(site: string): string[] {
  if (site.endsWith(".q")) return ["scores", "pattern", "mask", "position"].map((name) => site.replace(/q$/, name));
  return site.endsWith("embed") ? [`${site}.token`, `${site}.position`] : [];
}

/** The first point from which on the last one's likeliest token is the likeliest; -1 where nothing is said. */
export function decisionPoint(rows: readonly ResidualPoint[]): number {
  const answer = rows.at(-1)?.topToken?.token;
  if (answer === undefined) return -1;
  let first = rows.length - 1;
  while (first > 0 && rows[first - 1]?.topToken?.token === answer) first--;
  return first;
}
