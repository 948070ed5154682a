// Binary protocol: a result is a safetensors blob (JSON data in the header, then tensors); frames carry results, progress and errors.
export type NumericArray = Float32Array | Int32Array | Uint8Array;

export interface Tensor {
  shape: number[];
  data: NumericArray;
}

export interface QueryResult<F = Record<string, unknown>> {
  data: F;
  tensors: Record<string, Tensor>;
}

const DTYPES = { F32: Float32Array, I32: Int32Array, U8: Uint8Array } as const;

interface Entry {
  dtype: keyof typeof DTYPES;
  shape: number[];
  data_offsets: [number, number];
}

export function decodeResult<F>(bytes: Uint8Array): QueryResult<F> {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const length = Number(view.getBigUint64(0, true));
  const header: unknown = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
  const { __metadata__: metadata, ...entries } = header as { __metadata__: { data: string } };
  const tensors: Record<string, Tensor> = {};
  for (const [name, entry] of Object.entries(entries as Record<string, Entry>)) {
    const [from, to] = entry.data_offsets;
    const raw = bytes.slice(8 + length + from, 8 + length + to); // a copy, because typed arrays need aligned offsets
    const kind = DTYPES[entry.dtype];
    tensors[name] = { shape: entry.shape, data: new kind(raw.buffer, 0, raw.byteLength / kind.BYTES_PER_ELEMENT) };
  }
  return { data: JSON.parse(metadata.data) as F, tensors };
}

/** Row of a matrix. */
export function tensorRow(tensor: Tensor, index: number): NumericArray {
  const width = tensor.shape[1] ?? 1;
  return tensor.data.subarray(index * width, (index + 1) * width);
}

export const PROGRESS = 0;
export const RESULT = 1;
export const ERROR = 2;
export const PARTIAL = 3;

/** Assembles frames from chunks split at any byte. A frame is a uint32 size, a kind byte and the payload. */
export class FrameDecoder {
  #buffered = new Uint8Array(0);

  *push(chunk: Uint8Array): Generator<{ kind: number; bytes: Uint8Array }> {
    const joined = new Uint8Array(this.#buffered.length + chunk.length);
    joined.set(this.#buffered);
    joined.set(chunk, this.#buffered.length);
    this.#buffered = joined;
    for (;;) {
      if (this.#buffered.length < 5) return;
      const size = new DataView(this.#buffered.buffer, this.#buffered.byteOffset).getUint32(0, true);
      if (this.#buffered.length < 5 + size) return;
      yield { kind: this.#buffered[4] ?? ERROR, bytes: this.#buffered.subarray(5, 5 + size) };
      this.#buffered = this.#buffered.subarray(5 + size);
    }
  }
}
