// Site names of activations: parsing, labels, and the sites of a sublayer in order of computation.

export interface SiteStep {
  /** Site name, or the name of a value that the server derives without a site of its own (such as `mask`). */
  site: string;
  label: string;
}

const SITE_LABELS: Record<string, string> = {
  token: "token embedding",
  position: "position",
  in: "norm",
  q: "query",
  k: "key",
  v: "value",
  scores: "scores",
  mask: "mask",
  pattern: "pattern",
  z: "head outputs",
  out: "out",
  hidden: "hidden",
  router: "router",
  resid_mid: "add",
  resid_post: "add",
};

export const SUBLAYER_LABELS: Record<string, string> = { attn: "attention", cross: "cross-attention", ffn: "FFN" };

/** Split a site name: "decoder.blocks.3.attn.q" → stack "decoder", block 3, sublayer "attn", name "q". */
export function parseSite(site: string): { stack: string; block: number | undefined; sublayer: string; name: string } {
  const match = /^(?:(encoder|decoder)\.)?(?:blocks\.(\d+)\.)?(.*)$/.exec(site);
  const [first = "", ...rest] = (match?.[3] ?? site).split(".");
  return {
    stack: match?.[1] ?? "",
    block: match?.[2] === undefined ? undefined : Number(match[2]),
    sublayer: rest.length ? first : "",
    name: rest.length ? rest.join(".") : first,
  };
}

/** Sites of the sublayer that a site belongs to, in order of computation. */
export function sublayerSites(site: string, known: ReadonlySet<string>): SiteStep[] {
  const { stack, block, sublayer, name: siteName } = parseSite(site);
  const prefix = stack ? `${stack}.` : "";
  if (block === undefined) {
    if (siteName === "embed" || sublayer === "embed") return listSites(`${prefix}embed`, known.has(`${prefix}embed.position`) ? ["token", "position"] : ["token"], "sum");
    return [
      { site: `${prefix}final_norm`, label: "final norm" },
      ...(known.has("logits") && stack !== "encoder" ? [{ site: "logits", label: "logits" }, { site: "softmax", label: "softmax" }] : []),
    ];
  }
  const blockPrefix = `${prefix}blocks.${block}`;
  const target = sublayer && sublayer !== "resid" ? sublayer : siteName === "resid_post" ? "ffn" : known.has(`${blockPrefix}.cross.q`) && siteName === "resid_mid" ? "cross" : "attn";
  const isParallel = !known.has(`${blockPrefix}.resid_mid`);
  if (target === "ffn") {
    const ffnNames = ["in", "router", "shared.hidden", "hidden", "out"].filter((name) => known.has(`${blockPrefix}.ffn.${name}`));
    return [...ffnNames.map((name) => ({ site: `${blockPrefix}.ffn.${name}`, label: siteLabel(name) })), { site: `${blockPrefix}.resid_post`, label: "add" }];
  }
  const attentionNames = ["in", "q", "k", "v", "position", "scores", "mask", "pattern", "z", "out"];
  const residualSite = target === "attn" && known.has(`${blockPrefix}.cross.resid_pre`) ? `${blockPrefix}.cross.resid_pre` : isParallel ? `${blockPrefix}.resid_post` : `${blockPrefix}.resid_mid`;
  return [
    ...attentionNames.filter((name) => name !== "position" || known.has(`${blockPrefix}.${target}.position`)).map((name) => ({ site: `${blockPrefix}.${target}.${name}`, label: siteLabel(name) })),
    { site: residualSite, label: "add" },
  ];
}

function listSites(blockPrefix: string, names: string[], lastLabel: string): SiteStep[] {
  return [...names.map((name) => ({ site: `${blockPrefix}.${name}`, label: siteLabel(name) })), { site: blockPrefix, label: lastLabel }];
}

const siteLabel = (name: string): string => SITE_LABELS[name] ?? name.replace("shared.", "shared ");

/** Title of a site. */
export function siteTitle(site: string): string {
  const { stack, block, sublayer, name } = parseSite(site);
  const location = `${stack ? `${stack}, ` : ""}${block === undefined ? "" : `block ${block}`}`.replace(/, $/, "");
  const sublayerLabel = SUBLAYER_LABELS[sublayer] ? `${SUBLAYER_LABELS[sublayer]}: ` : "";
  const titles: Record<string, string> = {
    embed: "embedding", final_norm: "final norm", logits: "logits", softmax: "softmax: probabilities",
    resid_mid: "residual stream after attention", resid_post: "residual stream after the FFN", "cross.resid_pre": "residual stream after attention",
    q: "queries", k: "keys", v: "values", z: "head outputs (weighted values)", out: "output, added to the residual stream", pattern: "attention pattern",
  }; // prettier-ignore
  const title = titles[sublayer === "cross" && name === "resid_pre" ? "cross.resid_pre" : name] ?? siteLabel(name);
  return `${sublayerLabel}${title}${location ? ` · ${location}` : ""}`;
}
