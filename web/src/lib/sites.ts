// The stages of a token's way by name: what each is called, and which belong together.

export interface SiteStep {
  /** A site, or what the server calls a stage without one. */
  site: string;
  label: string;
}

const SITE_LABELS: Record<string, string> = {
  token: "token’s row",
  position: "position",
  in: "norm",
  q: "query",
  k: "key",
  v: "value",
  scores: "scores",
  mask: "mask",
  pattern: "weights",
  z: "head values",
  out: "out",
  hidden: "hidden",
  router: "router",
  resid_mid: "add",
  resid_post: "add",
};

export const SUBLAYER_LABELS: Record<string, string> = { attn: "attention", cross: "cross-attention", ffn: "FFN" };

/** The block, the part and the end of a site's name: "decoder.blocks.3.attn.q" → 3, "attn", "q". */
export function parseSite(site: string): { side: string; block: number | undefined; part: string; end: string } {
  const found = /^(?:(encoder|decoder)\.)?(?:blocks\.(\d+)\.)?(.*)$/.exec(site);
  const [part = "", ...rest] = (found?.[3] ?? site).split(".");
  return {
    side: found?.[1] ?? "",
    block: found?.[2] === undefined ? undefined : Number(found[2]),
    part: rest.length ? part : "",
    end: rest.length ? rest.join(".") : part,
  };
}

/** The steps of the part that a site belongs to, in the order in which they are computed. */
export function sublayerSites(site: string, known: ReadonlySet<string>): SiteStep[] {
  const { side, block, part, end } = parseSite(site);
  const prefix = side ? `${side}.` : "";
  if (block === undefined) {
    if (end === "embed" || part === "embed") return listSites(`${prefix}embed`, ["token", "position"], "sum");
    return [
      { site: `${prefix}final_norm`, label: "final norm" },
      ...(known.has("logits") && side !== "encoder" ? [{ site: "logits", label: "logits" }, { site: "softmax", label: "softmax" }] : []),
    ];
  }
  const here = `${prefix}blocks.${block}`;
  const which = part && part !== "resid" ? part : end === "resid_post" ? "ffn" : known.has(`${here}.cross.q`) && end === "resid_mid" ? "cross" : "attn";
  const parallel = !known.has(`${here}.resid_mid`);
  if (which === "ffn") {
    const found = ["in", "router", "shared.hidden", "hidden", "out"].filter((name) => known.has(`${here}.ffn.${name}`));
    return [...found.map((name) => ({ site: `${here}.ffn.${name}`, label: siteLabel(name) })), { site: `${here}.resid_post`, label: "add" }];
  }
  const inner = ["in", "q", "k", "v", "position", "scores", "mask", "pattern", "z", "out"];
  const after = which === "attn" && known.has(`${here}.cross.resid_pre`) ? `${here}.cross.resid_pre` : parallel ? `${here}.resid_post` : `${here}.resid_mid`;
  return [
    ...inner.filter((name) => !(which === "cross" && name === "position")).map((name) => ({ site: `${here}.${which}.${name}`, label: siteLabel(name) })),
    { site: after, label: "add" },
  ];
}

function listSites(here: string, names: string[], said: string): SiteStep[] {
  return [...names.map((name) => ({ site: `${here}.${name}`, label: siteLabel(name) })), { site: here, label: said }];
}

const siteLabel = (name: string): string => SITE_LABELS[name] ?? name.replace("shared.", "shared ");

/** What a person calls a stage. */
export function siteTitle(site: string): string {
  const { side, block, part, end } = parseSite(site);
  const where = `${side ? `${side}, ` : ""}${block === undefined ? "" : `block ${block}`}`.replace(/, $/, "");
  const of = SUBLAYER_LABELS[part] ? `${SUBLAYER_LABELS[part]}: ` : "";
  const names: Record<string, string> = {
    embed: "embedding", final_norm: "final norm", logits: "logits", softmax: "softmax: the chances",
    resid_mid: "stream after attention", resid_post: "stream after the FFN", "cross.resid_pre": "stream after attention",
    q: "queries", k: "keys", v: "values", z: "what each head gathers", out: "what is added to the stream", pattern: "attention weights",
  }; // prettier-ignore
  const said = names[part === "cross" && end === "resid_pre" ? "cross.resid_pre" : end] ?? siteLabel(end);
  return `${of}${said}${where ? ` · ${where}` : ""}`;
}
