// Query client over any transport: HTTP server, notebook kernel, or exported file.
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

/** Yields the frames of a result in chunks. */
export type Transport = (query: string, params: unknown, signal?: AbortSignal) => AsyncIterable<Uint8Array>;

export class QueryError extends Error {}
/** The server could not be reached or closed the connection. */
export class ConnectionError extends QueryError {}

/** Results that need no transport: those of an exported page. */
export type LocalResults = (query: string, params: unknown) => { result: QueryResult<unknown>; partials: QueryResult<unknown>[] };

let transport: Transport = httpTransport;
/** Generation of the open model, sent with each query: the server rejects queries about a model that is no longer open. */
let modelGeneration: number | undefined;
let localResults: LocalResults | undefined;

export function setModelGeneration(generation: number | undefined): void {
  modelGeneration = generation;
}

export function setLocalResults(results: LocalResults): void {
  localResults = results;
}

export function setTransport(newTransport: Transport): void {
  transport = newTransport;
}

/** Whether the page is served by `cutaway open`; false in an exported file and in a notebook. */
export const isServed = (): boolean => transport === httpTransport && !localResults;

export async function runQuery<F>(query: string, params: unknown, options: QueryOptions = {}): Promise<QueryResult<F>> {
  if (localResults) {
    const { result, partials } = localResults(query, params);
    for (const partial of partials) options.onPartial?.(partial as QueryResult<never>);
    return result as QueryResult<F>;
  }
  const frames = new FrameDecoder();
  for await (const chunk of transport(query, params, options.signal)) {
    for (const { kind, bytes } of frames.push(chunk)) {
      if (kind === RESULT) return decodeResult<F>(bytes);
      if (kind === PARTIAL) options.onPartial?.(decodeResult(bytes));
      else if (kind === PROGRESS) options.onProgress?.(JSON.parse(decodeText(bytes)) as Progress);
      else if (kind === ERROR) throw new QueryError((JSON.parse(decodeText(bytes)) as { message: string }).message);
    }
  }
  throw new ConnectionError("the response is incomplete because the connection closed; check that the server is running");
}

async function* httpTransport(query: string, params: unknown, signal?: AbortSignal): AsyncIterable<Uint8Array> {
  const response = await fetch(`api/query/${query}`, {
    method: "POST",
    headers: { "content-type": "application/json", ...(modelGeneration === undefined ? {} : { "x-cutaway-model-generation": String(modelGeneration) }) },
    body: JSON.stringify(params),
    signal: signal ?? null,
  }).catch((error: unknown) => {
    if (signal?.aborted) throw error;
    throw new ConnectionError("the server cannot be reached; check that `cutaway open` is running");
  });
  if (!response.ok) {
    const body = (await response.json().catch(() => null)) as { error?: { message?: string } } | null;
    throw new QueryError(body?.error?.message ?? `the server returned HTTP status ${response.status}; see its log`);
  }
  if (!response.body) throw new QueryError("the server returned an empty response; see its log");
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    void reader.cancel().catch(() => undefined); // closes the connection, so that the server cancels the query
  }
}

const decodeText = (bytes: Uint8Array): string => new TextDecoder().decode(bytes);
