// A page that is a file: the answers lie in it, by their questions.
import { Refused, type Transport } from "./ask";
import { ANSWER } from "./wire";

/** A question in one spelling: keys in order, without what was left out. */
export function spelled(question: string, given: unknown): string {
  return `${question} ${JSON.stringify(plain(given))}`;
}

function plain(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(plain);
  if (value === null || typeof value !== "object") return value;
  const kept = Object.entries(value).filter(([, inner]) => inner !== null && inner !== undefined);
  return Object.fromEntries(kept.sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, inner]) => [name, plain(inner)]));
}

export function fromFile(held: Record<string, string>, name: string): Transport {
  return async function* (question, given) {
    const found = held[spelled(question, given)];
    if (found === undefined) {
      throw new Refused(`this page is a file, and holds what was asked when it was made; \`cutaway open ${name}\` answers this too`);
    }
    const bytes = Uint8Array.from(atob(found), (letter) => letter.charCodeAt(0));
    const frame = new Uint8Array(bytes.length + 5);
    new DataView(frame.buffer).setUint32(0, bytes.length, true);
    frame[4] = ANSWER;
    frame.set(bytes, 5);
    yield frame;
  };
}
