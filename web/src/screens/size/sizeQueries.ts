// Result types of the size queries, and formatting of counts and bytes.
export interface Shape {
  layers: number;
  d_model: number;
  heads: number;
  kv_heads: number | null;
  hidden: number;
  vocab_size: number;
  context: number | null;
}

export interface Bound {
  name: "prefill" | "decode" | "train";
  min_seconds: number;
  bottleneck: "compute" | "bandwidth";
  arithmetic_intensity: number;
  ridge_point: number;
  mfu: number;
  max_tokens_per_second: number;
  expected_tokens_per_second: [number, number];
}

export interface MemorySize {
  total_bytes: number;
  peak_by_component: Record<string, number>;
  /** Bytes of the parts of each component of peak_by_component. */
  peak_details: Record<string, Record<string, number>>;
  peak_phase: string;
}

export interface ModelSize {
  base: string;
  error?: undefined;
  base_shape: Shape;
  shape: Shape;
  context: number;
  dtype: string;
  context_warning: string | null;
  num_parameters: number;
  num_active_parameters: number;
  parameters_by_component: Record<string, number>;
  flops: { total: number; per_token: number; visible_by_component: Record<string, number> };
  memory: MemorySize;
  fits: boolean | null;
  bounds: Bound[];
}

export interface SizeError {
  base: string;
  error: string;
}

export interface Device {
  name: string;
  title: string;
  kind: string;
  memory: number | null;
  bandwidth: number;
}

export interface SizeCatalog {
  loaded_model: string;
  presets: string[];
  devices: Device[];
  dtypes: string[];
}

export interface MemoryFit {
  has_memory_size: boolean;
  max_context: number | null;
  max_batch_size: number | null;
  unbounded_context?: boolean;
  unbounded_batch_size?: boolean;
  config_context?: number | null;
  max_position_embeddings?: number | null;
}

const SI_PREFIXES: [number, string][] = [[1e24, "Y"], [1e21, "Z"], [1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** Format a number with an SI prefix: 1.24e8 → 124 M. */
export function formatSi(value: number, unit = ""): string {
  for (const [step, name] of SI_PREFIXES) if (value >= step) return `${Number((value / step).toPrecision(3))} ${name}${unit}`;
  return `${Number(value.toPrecision(3))}${unit ? ` ${unit}` : ""}`;
}

/** Bytes with binary prefixes (powers of 1024). */
export function formatBytes(value: number): string {
  for (const [power, name] of [[40, "TiB"], [30, "GiB"], [20, "MiB"], [10, "KiB"]] as const)
    if (value >= 2 ** power) return `${Number((value / 2 ** power).toPrecision(3))} ${name}`;
  return `${value} B`;
}

export const formatInteger = (value: number): string => value.toLocaleString("en");

/** Counts of parameters: B (billion) instead of the SI prefix G. */
export const formatCount = (value: number): string => formatSi(value).replace("G", "B");
