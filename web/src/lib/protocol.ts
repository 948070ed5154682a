// Results come in the layout of safetensors: data in the header, tensors behind it. Frames hold them one after another.
export type NumericArray = Float32Array | Int32Array | Uint8Array;

export interface Tensor {
  shape: number[];
  data: NumericArray;
}

export interface QueryResult<F = Record<string, unknown>> {
  data: F;
  tensors: Record<string, Tensor>;
}

const KINDS = { F32: Float32Array, I32: Int32Array, U8: Uint8Array } as const;

interface Entry {
  dtype: keyof typeof KINDS;
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
    const raw = bytes.slice(8 + length + from, 8 + length + to); // a copy stands at a multiple of four
    const kind = KINDS[entry.dtype];
    tensors[name] = { shape: entry.shape, data: new kind(raw.buffer, 0, raw.byteLength / kind.BYTES_PER_ELEMENT) };
  }
  return { data: JSON.parse(metadata.data) as F, tensors };
}

/** A row of a tensor of two axes. */
export function tensorRow(tensor: Tensor, at: number): NumericArray {
  const width = tensor.shape[1] ?? 1;
  return tensor.data.subarray(at * width, (at + 1) * width);
}

export const PROGRESS = 0;
export const RESULT = 1;
export const ERROR = 2;
export const PARTIAL = 3;

/** Whole frames out of pieces that are cut anywhere. */
export class FrameDecoder {
  #held = new Uint8Array(0);

  *push(piece: Uint8Array): Generator<{ kind: number; bytes: Uint8Array }> {
    const joined = new Uint8Array(this.#held.length + piece.length);
    joined.set(this.#held);
    joined.set(piece, this.#held.length);
    this.#held = joined;
    for (;;) {
      if (this.#held.length < 5) return;
      const size = new DataView(this.#held.buffer, this.#held.byteOffset).getUint32(0, true);
      if (this.#held.length < 5 + size) return;
      yield { kind: this.#held[4] ?? ERROR, bytes: this.#held.subarray(5, 5 + size) };
      this.#held = this.#held.subarray(5 + size);
    }
  }
}
