// A token's way as points on the stream, each with what was added on the way to it.
import { parse, PARTS } from "../../lib/stages";

export interface Likely {
  token: number;
  text: string;
  share: number;
}

export interface Stage {
  site: string;
  equation: string;
  axes: string;
  shape: number[];
  norm: number;
  share: number | null;
  cosine: number | null;
  top: Likely[];
}

export interface Added {
  site: string;
  part: string;
  block: number | undefined;
  name: string;
  norm: number;
  share: number | null;
  cosine: number | null;
}

export interface Point {
  site: string;
  /** In full, and in few letters. */
  name: string;
  short: string;
  norm: number;
  top: Likely | undefined;
  added: Added[];
  /** All stages that lead here, by their beginnings too. */
  sites: string[];
}

export function points(stages: readonly Stage[]): Point[] {
  const found: Point[] = [];
  let added: Added[] = [];
  let sites: string[] = [];
  for (const stage of stages) {
    const { block, part, end } = parse(stage.site);
    sites.push(stage.site, ...extra(stage.site));
    if (end === "out" && block !== undefined) {
      added.push({ site: stage.site, part, block, name: `${PARTS[part] ?? part} of block ${block}`, norm: stage.norm, share: stage.share, cosine: stage.cosine });
    }
    const onStream = /(embed|resid_mid|resid_post|cross\.resid_pre|final_norm)$/.test(stage.site);
    if (!onStream) continue;
    const by = added.map((each) => (each.part === "ffn" ? "ffn" : each.part === "cross" ? "crs" : "att"));
    const name = end === "embed" ? "embed" : end === "final_norm" ? "final" : `${block} ${added.map((each) => each.part).join("+")}`;
    const short = end === "embed" ? "emb" : end === "final_norm" ? "fin" : `${block}${by.join("")}`;
    if (end === "final_norm") sites.push("logits", "softmax");
    found.push({ site: stage.site, name, short, norm: stage.norm, top: stage.top[0], added, sites });
    added = [];
    sites = [];
  }
  return found;
}

/** Stages without a site of their own belong to those beside them. */
function extra(site: string): string[] {
  if (site.endsWith(".q")) return ["scores", "pattern", "mask", "position"].map((name) => site.replace(/q$/, name));
  return site.endsWith("embed") ? [`${site}.token`, `${site}.position`] : [];
}

/** The first point from which on the last one's likeliest token is the likeliest; -1 where nothing is said. */
export function decided(rows: readonly Point[]): number {
  const answer = rows.at(-1)?.top?.token;
  if (answer === undefined) return -1;
  let first = rows.length - 1;
  while (first > 0 && rows[first - 1]?.top?.token === answer) first--;
  return first;
}
