// One client for every transport: a server, a notebook's kernel, or a file that holds the results.
import { RESULT, ERROR, FrameDecoder, PARTIAL, PROGRESS, decodeResult, type QueryResult } from "./protocol";

export interface Progress {
  completed: number;
  total: number;
  description: string;
}

export interface QueryOptions {
  signal?: AbortSignal;
  onProgress?: (progress: Progress) => void;
  onPartial?: (result: QueryResult<never>) => void;
}

/** Hands over the frames of a result, piece by piece. */
export type Transport = (query: string, params: unknown, signal?: AbortSignal) => AsyncIterable<Uint8Array>;

export class QueryError extends Error {}
/** Nobody was there to answer. */
export class ConnectionError extends QueryError {}

let transport: Transport = httpTransport;

export function setTransport(other: Transport): void {
  transport = other;
}

export async function runQuery<F>(query: string, params: unknown, options: QueryOptions = {}): Promise<QueryResult<F>> {
  const frames = new FrameDecoder();
  for await (const piece of transport(query, params, options.signal)) {
    for (const { kind, bytes } of frames.push(piece)) {
      if (kind === RESULT) return decodeResult<F>(bytes);
      if (kind === PARTIAL) options.onPartial?.(decodeResult(bytes));
      else if (kind === PROGRESS) options.onProgress?.(JSON.parse(text(bytes)) as Progress);
      else if (kind === ERROR) throw new QueryError((JSON.parse(text(bytes)) as { message: string }).message);
    }
  }
  throw new ConnectionError("the answer ended before it was whole; is the server still running?");
}

async function* httpTransport(query: string, params: unknown, signal?: AbortSignal): AsyncIterable<Uint8Array> {
  const response = await fetch(`api/query/${query}`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(params),
    signal: signal ?? null,
  }).catch((error: unknown) => {
    if (signal?.aborted) throw error;
    throw new ConnectionError("the server does not answer; is `cutaway open` still running?");
  });
  if (!response.ok) {
    const told = (await response.json().catch(() => null)) as { error?: { message?: string } } | null;
    throw new QueryError(told?.error?.message ?? `the server answered ${response.status}`);
  }
  if (!response.body) throw new QueryError("the server's answer is empty");
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    void reader.cancel().catch(() => undefined); // given up: the server notices, and stops working
  }
}

const text = (bytes: Uint8Array): string => new TextDecoder().decode(bytes);
