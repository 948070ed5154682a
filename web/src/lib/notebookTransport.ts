// Transport of a notebook widget: queries are sent to the kernel as messages; frames return as message buffers.
import type { Transport } from "./queryClient";

/** The part of the anywidget model interface that is used. */
export interface WidgetModel {
  send(content: unknown): void;
  on(event: "msg:custom", callback: (content: { id?: number; end?: boolean }, buffers?: DataView[]) => void): void;
}

export function notebookTransport(model: WidgetModel): Transport {
  const pending = new Map<number, (chunk: Uint8Array | null) => void>();
  let lastId = 0;
  model.on("msg:custom", (content, buffers = []) => {
    const enqueue = content.id === undefined ? undefined : pending.get(content.id);
    for (const buffer of buffers) enqueue?.(new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength));
    if (content.end) enqueue?.(null);
  });
  return async function* (query, params, signal) {
    const id = ++lastId;
    const chunks: (Uint8Array | null)[] = [];
    let notify = (): void => undefined;
    const enqueue = (chunk: Uint8Array | null): void => {
      chunks.push(chunk);
      notify();
    };
    pending.set(id, enqueue);
    const abort = (): void => enqueue(null);
    signal?.addEventListener("abort", abort);
    model.send({ id, query, params });
    try {
      for (;;) {
        if (!chunks.length) await new Promise<void>((resolve) => (notify = resolve));
        const chunk = chunks.shift() ?? null;
        if (chunk === null) break;
        yield chunk;
      }
      signal?.throwIfAborted();
    } finally {
      pending.delete(id);
      signal?.removeEventListener("abort", abort);
      model.send({ id, cancel: true });
    }
  };
}
