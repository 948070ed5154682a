// Exported page: the results of its queries are stored in the file. What has no stored result is not offered.
import type { ExportBundle } from "./exportBundle";
import { QueryError, type LocalResults } from "./queryClient";

export interface ExportedPage {
  name: string;
  /** Tokens of the text whose results are in the file. */
  positions: number[];
  /** Token of the results of the edits. */
  edit_position: number;
  edits: Record<string, unknown>[];
  bundle: string;
  bundle_bytes: number;
}

let page: ExportedPage | null | undefined;
let storedResults: ExportBundle | undefined;

/** Content of an exported page; null in other pages. */
export function exportedPage(): ExportedPage | null {
  if (page === undefined) {
    const content = document.getElementById("cutaway-results")?.textContent;
    page = content ? (JSON.parse(content) as ExportedPage) : null;
  }
  return page;
}

/** Whether the results of these edits are available: all edits on a server, the stored ones in an exported page. */
export function hasEdits(edits: unknown): boolean {
  const exported = exportedPage();
  return !exported || exported.edits.some((stored) => canonical(stored) === canonical(edits));
}

/** Whether the result of a query is available: all results on a server, the stored ones in an exported page. */
export const hasResult = (query: string, params: unknown): boolean => !storedResults || storedResults.has(resultKey(query, params));

const canonical = (value: unknown): string => JSON.stringify(clean(value));

/** Canonical key of a query: sorted parameter names, without null, undefined and the token ids, as result_key in export_bundle.py. */
export function resultKey(query: string, params: unknown): string {
  return `${query} ${canonical(query === "activation" ? withoutOtherPosition(params as ActivationParams) : params)}`;
}

interface ActivationParams {
  site: string;
  position?: number;
  source_position?: number;
}

/** An activation depends on the position in one of the texts of an encoder-decoder. */
function withoutOtherPosition(params: ActivationParams): unknown {
  const readsSource = params.site.startsWith("encoder.") || (params.site.includes(".cross.") && /\.[kv]$/.test(params.site));
  return readsSource ? { ...params, position: undefined } : { ...params, source_position: undefined };
}

function clean(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(clean);
  if (value === null || typeof value !== "object") return value;
  const entries = Object.entries(value).filter(([name, inner]) => inner !== null && inner !== undefined && name !== "tokens");
  return Object.fromEntries(entries.sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, inner]) => [name, clean(inner)]));
}

export function exportedResults(bundle: ExportBundle, name: string): LocalResults {
  storedResults = bundle;
  return (query, params) => {
    const stored = bundle.get(resultKey(query, params));
    if (!stored) throw new QueryError(`this exported page contains only the results computed at export; run \`cutaway open ${name}\` to compute others`);
    return stored;
  };
}
