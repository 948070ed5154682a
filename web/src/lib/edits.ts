// Edits of a model (site → operation): conversion to and from the URL fragment, toggling, and descriptions.
export type EditOp = "zero" | "mean" | "scale";
export interface Edit {
  do: string;
  value?: number;
  heads?: number[];
}
export type Edits = Record<string, Edit>;

/** Format edits for the URL fragment, such as blocks.3:swap,blocks.2.attn.z:zero@1.3,positions:shift=7; null if there are none. */
export function formatEdits(edits: Edits): string | null {
  const terms = Object.entries(edits).map(([site, { do: op, value, heads }]) => {
    const argument = value === undefined ? "" : `=${value}`;
    return `${site}:${op}${argument}${heads?.length ? `@${heads.join(".")}` : ""}`;
  });
  return terms.length ? terms.join(",") : null;
}

export function parseEdits(text: string | undefined): Edits {
  const edits: Edits = {};
  for (const term of (text ?? "").split(",")) {
    const match = /^([\w.*]+):(\w+)(?:=(-?[\d.]+))?(?:@([\d.]+))?$/.exec(term);
    if (!match?.[1] || !match[2]) continue;
    const edit: Edit = { do: match[2] };
    if (match[3] !== undefined) edit.value = Number(match[3]);
    if (match[4]) edit.heads = match[4].split(".").filter(Boolean).map(Number);
    edits[match[1]] = edit;
  }
  return edits;
}

/** Add an edit, or remove it if it is already set. An edit of all blocks replaces those of single blocks. */
export function toggleEdit(edits: Edits, site: string, edit: Edit): Edits {
  const next = { ...edits };
  if (next[site]?.do === edit.do && next[site]?.value === edit.value) delete next[site];
  else next[site] = edit;
  if (site.includes("*") && next[site]) {
    const pattern = new RegExp(`^${site.replaceAll(".", "\\.").replace("*", "\\d+")}$`);
    for (const other of Object.keys(next)) if (pattern.test(other)) delete next[other];
  }
  return next;
}

/** Add or remove a head in the edit of a site. */
export function toggleHead(edits: Edits, site: string, head: number, op: EditOp, value?: number): Edits {
  const current = edits[site];
  const isSameOp = current?.do === op && current.value === value;
  const heads = new Set(isSameOp ? current?.heads : []);
  if (heads.has(head)) heads.delete(head);
  else heads.add(head);
  const next = { ...edits };
  if (!heads.size) delete next[site];
  else next[site] = { do: op, ...(value === undefined ? {} : { value }), heads: [...heads].sort((a, b) => a - b) };
  return next;
}

/** Short symbol of an edit. */
export function editSymbol(edit: Edit | undefined): string {
  if (!edit) return "";
  return edit.do === "zero" ? "0" : edit.do === "mean" ? "x̄" : edit.do === "scale" ? `×${edit.value ?? 1}` : "✓";
}

const BLOCK_EDITS: Record<string, string> = { skip: "skipped", swap: "FFN before attention", no_residual: "no residual" };
const VALUE_EDITS: Record<string, string> = { zero: "set to zero", mean: "replaced by the mean over tokens" };

/** Description of an edit in words. */
export function describeEdit(site: string, edit: Edit): string {
  const match = /^(encoder\.|decoder\.)?(?:blocks\.(\d+|\*)(?:\.(attn|cross|ffn)\.(\w+))?|(final_norm|mask|positions))$/.exec(site);
  if (!match) return `${site}: ${edit.do}`;
  const [, stackPrefix = "", layer, sublayer, , modelPart] = match;
  const stack = stackPrefix ? `${stackPrefix.slice(0, -1)} ` : "";
  if (modelPart === "positions" && edit.do !== "drop") return `${stack}positions ${edit.do === "shift" ? `shifted by ${edit.value ?? 0}` : "shuffled"}`;
  if (modelPart) return `${stack}no ${modelPart.replace("_", " ")}`;
  const block = layer === "*" ? `all ${stack}blocks` : `${stack}block ${layer}`;
  if (!sublayer) return `${block}: ${BLOCK_EDITS[edit.do] ?? edit.do}`;
  const label = sublayer === "ffn" ? "FFN" : sublayer === "cross" ? "cross-attention" : "attention";
  const target = edit.heads ? `${label} head${edit.heads.length > 1 ? "s" : ""} ${edit.heads.join(", ")}` : `${label} output`;
  return `${block}: ${target} ${edit.do === "scale" ? `times ${edit.value ?? 1}` : (VALUE_EDITS[edit.do] ?? edit.do)}`;
}
