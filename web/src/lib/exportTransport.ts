// Transport of an exported page: results are stored in the file, keyed by query.
import { QueryError, type Transport } from "./queryClient";
import { RESULT } from "./protocol";

/** Element with the stored results of an exported page; null in other pages. */
export function exportedResults(): HTMLElement | null {
  return document.getElementById("cutaway-results");
}

/** Canonical key of a query: sorted parameter names, without null and undefined. */
export function resultKey(query: string, params: unknown): string {
  return `${query} ${JSON.stringify(dropNullish(params))}`;
}

function dropNullish(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(dropNullish);
  if (value === null || typeof value !== "object") return value;
  const entries = Object.entries(value).filter(([, inner]) => inner !== null && inner !== undefined);
  return Object.fromEntries(entries.sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, inner]) => [name, dropNullish(inner)]));
}

export function exportTransport(results: Record<string, string>, name: string): Transport {
  return async function* (query, params) {
    const encoded = results[resultKey(query, params)];
    if (encoded === undefined) {
      throw new QueryError(`this exported page contains only the results computed at export; run \`cutaway open ${name}\` to compute others`);
    }
    const bytes = Uint8Array.from(atob(encoded), (char) => char.charCodeAt(0));
    const frame = new Uint8Array(bytes.length + 5);
    new DataView(frame.buffer).setUint32(0, bytes.length, true);
    frame[4] = RESULT;
    frame.set(bytes, 5);
    yield frame;
  };
}
