// Results of an exported page: one compressed stream, written by src/cutaway/serve/inspect/export_bundle.py.
import type { NumericArray, QueryResult, Tensor } from "./protocol";

const BASE85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%.()*+-;,=>?@^_`{|}~";
const SHARED_TEXT = "\u0001";
const POSITION = "\u0002";
const POSITION_VALUE = /("(?:source_)?position":)(\d+)/;

type Entry = [base: number, changes: Record<string, unknown>, tensors: Record<string, number>, partials?: Entry[]];
type Dtype = "F16" | "F32" | "I32" | "U8";

/** Results at consecutive positions: values by field, and tensors that are views at equal distances. */
interface Rows {
  first: number;
  base: number;
  columns: Record<string, unknown[]>;
  tensors: Record<string, { dtype: Dtype; offset: number; step: number; shape: number[]; strides: number[] | null; present: number[] | null }>;
}

interface Header {
  shared_text: string;
  results: Record<string, Entry>;
  /** By key with a placeholder for the position. */
  rows: Record<string, Rows>;
  bases: Record<string, unknown>[];
  /** Dtype, shape, offset in the section of the dtype, and the strides of a view. */
  tensors: [Dtype, number[], number, number[]?][];
  sizes: Record<Dtype, number>;
}

export class ExportBundle {
  readonly #header: Header;
  readonly #high: Uint8Array;
  readonly #low: Uint8Array;
  readonly #sections: { F32: Float32Array; I32: Int32Array; U8: Uint8Array };

  private constructor(bytes: Uint8Array) {
    const headerSize = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
    this.#header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + headerSize))) as Header;
    const { F16, F32, I32, U8 } = this.#header.sizes;
    let offset = 4 + headerSize;
    const next = (size: number): Uint8Array => bytes.slice(offset, (offset += size)); // a copy, because typed arrays need aligned offsets
    [this.#high, this.#low] = [next(F16), next(F16)];
    this.#sections = { F32: new Float32Array(next(4 * F32).buffer), I32: new Int32Array(next(4 * I32).buffer), U8: next(U8) };
  }

  /** Decode the text of a bundle of this many bytes. */
  static async decode(text: string, numBytes: number): Promise<ExportBundle> {
    const stream = new Blob([decodeBase85(text).subarray(0, numBytes)]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new ExportBundle(new Uint8Array(await new Response(stream).arrayBuffer()));
  }

  has(key: string): boolean {
    return this.#header.results[key] !== undefined || this.#findRow(key) !== undefined;
  }

  #findRow(key: string): { rows: Rows; row: number; position: string } | undefined {
    const position = POSITION_VALUE.exec(key)?.[2] ?? "";
    const rows = this.#header.rows[key.replace(POSITION_VALUE, `$1${POSITION}`)];
    const row = Number(position) - (rows?.first ?? 0);
    return rows && row >= 0 && row < (Object.values(rows.columns)[0]?.length ?? 0) ? { rows, row, position } : undefined;
  }

  /** Result of a query, with its partial results. */
  get(key: string): { result: QueryResult<unknown>; partials: QueryResult<unknown>[] } | undefined {
    const found = this.#findRow(key);
    if (found) return { result: this.#decodeRow(found.rows, found.row, found.position), partials: [] };
    const entry = this.#header.results[key];
    const position = POSITION_VALUE.exec(key)?.[2] ?? "";
    return entry && { result: this.#decodeEntry(entry, position), partials: (entry[3] ?? []).map((partial) => this.#decodeEntry(partial, position)) };
  }

  #decodeEntry([base, changes, tensors]: Entry, position: string): QueryResult<unknown> {
    const decode = (index: number): Tensor => this.#decodeTensor(...(this.#header.tensors[index] ?? (["U8", [0], 0] satisfies Header["tensors"][number])));
    return { data: this.#decodeFields(base, changes, position), tensors: Object.fromEntries(Object.entries(tensors).map(([name, index]) => [name, decode(index)])) };
  }

  #decodeRow({ base, columns, tensors }: Rows, row: number, position: string): QueryResult<unknown> {
    const fields = Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[row]]));
    const present = Object.entries(tensors).filter(([, tensor]) => tensor.present?.[row] !== 0);
    const decoded = present.map(([name, { dtype, shape, offset, step, strides }]) => [name, this.#decodeTensor(dtype, shape, offset + row * step, strides ?? undefined)] as const);
    return { data: this.#decodeFields(base, fields, position), tensors: Object.fromEntries(decoded) };
  }

  #decodeFields(base: number, changes: Record<string, unknown>, position: string): Record<string, unknown> {
    const fields = Object.entries({ ...this.#header.bases[base], ...changes });
    return Object.fromEntries(fields.map(([name, value]) => [name, name === "python_code" && typeof value === "string" ? value.replaceAll(SHARED_TEXT, this.#header.shared_text).replaceAll(POSITION, position) : value]));
  }

  #decodeTensor(dtype: Dtype, shape: number[], offset: number, strides?: number[]): Tensor {
    const size = shape.reduce((product, extent) => product * extent, 1);
    if (dtype !== "F16") return { shape, data: this.#sections[dtype].slice(offset, offset + size) as NumericArray };
    const data = new Float32Array(size);
    const [columns = 1, stride = 0] = [shape.at(-1), strides?.[0]];
    for (let element = 0; element < size; element++) {
      const at = strides ? offset + Math.floor(element / columns) * stride + (element % columns) : offset + element;
      data[element] = decodeFloat16(((this.#high[at] ?? 0) << 8) | (this.#low[at] ?? 0));
    }
    return { shape, data };
  }
}

function decodeFloat16(bits: number): number {
  const [exponent, mantissa] = [(bits >> 10) & 31, bits & 1023];
  const magnitude = exponent === 0 ? mantissa * 2 ** -24 : (1 + mantissa / 1024) * 2 ** (exponent - 15);
  return bits & 0x8000 ? -magnitude : magnitude;
}

/** Four bytes of five digits. */
function decodeBase85(text: string): Uint8Array<ArrayBuffer> {
  const values = new Uint8Array(128);
  for (let digit = 0; digit < 85; digit++) values[BASE85.charCodeAt(digit)] = digit;
  const bytes = new DataView(new ArrayBuffer((text.length / 5) * 4));
  for (let index = 0, at = 0; index < text.length; index += 5, at += 4) {
    let word = 0;
    for (let digit = 0; digit < 5; digit++) word = word * 85 + (values[text.charCodeAt(index + digit)] ?? 0);
    bytes.setUint32(at, word);
  }
  return new Uint8Array(bytes.buffer);
}
