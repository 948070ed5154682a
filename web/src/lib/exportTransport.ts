// A page that is a file: the results lie in it, by their queries.
import { QueryError, type Transport } from "./queryClient";
import { RESULT } from "./protocol";

/** A query in one spelling: keys in order, without what was left out. */
export function resultKey(query: string, params: unknown): string {
  return `${query} ${JSON.stringify(dropNullish(params))}`;
}

function dropNullish(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(dropNullish);
  if (value === null || typeof value !== "object") return value;
  const kept = Object.entries(value).filter(([, inner]) => inner !== null && inner !== undefined);
  return Object.fromEntries(kept.sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, inner]) => [name, dropNullish(inner)]));
}

export function exportTransport(results: Record<string, string>, name: string): Transport {
  return async function* (query, params) {
    const found = results[resultKey(query, params)];
    if (found === undefined) {
      throw new QueryError(`this page is a file, and holds what was asked when it was made; \`cutaway open ${name}\` answers this too`);
    }
    const bytes = Uint8Array.from(atob(found), (letter) => letter.charCodeAt(0));
    const frame = new Uint8Array(bytes.length + 5);
    new DataView(frame.buffer).setUint32(0, bytes.length, true);
    frame[4] = RESULT;
    frame.set(bytes, 5);
    yield frame;
  };
}
