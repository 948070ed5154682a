// In a notebook the kernel answers: queries go out as messages, frames come back as their buffers.
import type { Transport } from "./queryClient";

/** As much of a widget's model as is needed here. */
export interface WidgetModel {
  send(content: unknown): void;
  on(event: "msg:custom", heard: (content: { id?: number; end?: boolean }, buffers?: DataView[]) => void): void;
}

export function notebookTransport(model: WidgetModel): Transport {
  const waiting = new Map<number, (piece: Uint8Array | null) => void>();
  let last = 0;
  model.on("msg:custom", (content, buffers = []) => {
    const tell = content.id === undefined ? undefined : waiting.get(content.id);
    for (const each of buffers) tell?.(new Uint8Array(each.buffer, each.byteOffset, each.byteLength));
    if (content.end) tell?.(null);
  });
  return async function* (query, params, signal) {
    const id = ++last;
    const pieces: (Uint8Array | null)[] = [];
    let wake = (): void => undefined;
    const tell = (piece: Uint8Array | null): void => {
      pieces.push(piece);
      wake();
    };
    waiting.set(id, tell);
    const stop = (): void => tell(null);
    signal?.addEventListener("abort", stop);
    model.send({ id, query, params });
    try {
      for (;;) {
        if (!pieces.length) await new Promise<void>((resolve) => (wake = resolve));
        const piece = pieces.shift() ?? null;
        if (piece === null) break;
        yield piece;
      }
      signal?.throwIfAborted();
    } finally {
      waiting.delete(id);
      signal?.removeEventListener("abort", stop);
      model.send({ id, cancel: true });
    }
  };
}
