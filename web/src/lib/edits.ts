// Changes of a model as they stand in the address, and as the server takes them: site → what is done there.
export type EditOp = "zero" | "mean" | "scale";
export interface Edit {
  do: string;
  value?: number;
  heads?: number[];
}
export type Edits = Record<string, Edit>;

/** blocks.3:swap,blocks.2.attn.z:zero@1.3,positions:shift=7 */
export function formatEdits(edits: Edits): string | null {
  const parts = Object.entries(edits).map(([site, { do: how, value, heads }]) => {
    const given = value === undefined ? "" : `=${value}`;
    return `${site}:${how}${given}${heads?.length ? `@${heads.join(".")}` : ""}`;
  });
  return parts.length ? parts.join(",") : null;
}

export function parseEdits(text: string | undefined): Edits {
  const found: Edits = {};
  for (const part of (text ?? "").split(",")) {
    const match = /^([\w.*]+):(\w+)(?:=(-?[\d.]+))?(?:@([\d.]+))?$/.exec(part);
    if (!match?.[1] || !match[2]) continue;
    const change: Edit = { do: match[2] };
    if (match[3] !== undefined) change.value = Number(match[3]);
    if (match[4]) change.heads = match[4].split(".").filter(Boolean).map(Number);
    found[match[1]] = change;
  }
  return found;
}

/** The same switch pressed again is let go. */
export function toggleEdit(edits: Edits, site: string, change: Edit): Edits {
  const next = { ...edits };
  if (next[site]?.do === change.do && next[site]?.value === change.value) delete next[site];
  else next[site] = change;
  if (site.includes("*") && next[site]) {
    const pattern = new RegExp(`^${site.replaceAll(".", "\\.").replace("*", "\\d+")}$`);
    for (const other of Object.keys(next)) if (pattern.test(other)) delete next[other];
  }
  return next;
}

/** One head of a site more or fewer. */
export function toggleHead(edits: Edits, site: string, head: number, how: EditOp, value?: number): Edits {
  const now = edits[site];
  const same = now?.do === how && now.value === value;
  const heads = new Set(same ? now?.heads : []);
  if (heads.has(head)) heads.delete(head);
  else heads.add(head);
  const next = { ...edits };
  if (!heads.size) delete next[site];
  else next[site] = { do: how, ...(value === undefined ? {} : { value }), heads: [...heads].sort((a, b) => a - b) };
  return next;
}

/** What the change says, in a few letters. */
export function editSymbol(change: Edit | undefined): string {
  if (!change) return "";
  return change.do === "zero" ? "0" : change.do === "mean" ? "x̄" : change.do === "scale" ? `×${change.value ?? 1}` : "✓";
}

const DONE: Record<string, string> = { skip: "skipped", swap: "FFN before attention", no_residual: "no residual" };
const VALUES: Record<string, string> = { zero: "nothing", mean: "its mean for every token" };

/** The change in words. */
export function describeEdit(site: string, change: Edit): string {
  const match = /^(encoder\.|decoder\.)?(?:blocks\.(\d+|\*)(?:\.(attn|cross|ffn)\.(\w+))?|(final_norm|mask|positions))$/.exec(site);
  if (!match) return `${site}: ${change.do}`;
  const [, side = "", layer, part, , whole] = match;
  const where = side ? `${side.slice(0, -1)} ` : "";
  if (whole === "positions" && change.do !== "drop") return `${where}positions ${change.do === "shift" ? `${change.value ?? 0} later` : "in another order"}`;
  if (whole) return `${where}no ${whole.replace("_", " ")}`;
  const block = layer === "*" ? `every ${where}block` : `${where}block ${layer}`;
  if (!part) return `${block}: ${DONE[change.do] ?? change.do}`;
  const what = part === "ffn" ? "FFN" : part === "cross" ? "cross-attention" : "attention";
  const of = change.heads ? `head${change.heads.length > 1 ? "s" : ""} ${change.heads.join(", ")} of ${what}` : what;
  return `${block}: ${of} ${change.do === "scale" ? `times ${change.value ?? 1}` : `${(change.heads?.length ?? 0) > 1 ? "add" : "adds"} ${VALUES[change.do] ?? change.do}`}`;
}
