// What the server says of a configuration's cost, and how it is written.
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
  seconds: number;
  binds: "compute" | "bandwidth";
  intensity: number;
  ridge: number;
  share_of_peak: number;
  tokens_per_second: number;
  expected: [number, number];
}

export interface Cost {
  base: string;
  error?: undefined;
  start: Shape;
  shape: Shape;
  context: number;
  dtype: string;
  beyond: string | null;
  params: number;
  active: number;
  parts: Record<string, number>;
  flops: { total: number; per_token: number; parts: Record<string, number> };
  memory: { total: number; parts: Record<string, number>; fullest: string };
  fits: boolean | null;
  bounds: Bound[];
}

export interface Refusal {
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

export interface Choices {
  own: string;
  presets: string[];
  devices: Device[];
  dtypes: string[];
}

export interface Fits {
  known: boolean;
  longest_context: number | null;
  largest_batch: number | null;
  unbounded_context?: boolean;
  unbounded_batch?: boolean;
  made_for?: number | null;
  position_limit?: number | null;
}

const STEPS: [number, string][] = [[1e24, "Y"], [1e21, "Z"], [1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** 1.24e8 → 124 M */
export function si(value: number, unit = ""): string {
  for (const [step, name] of STEPS) if (value >= step) return `${Number((value / step).toPrecision(3))} ${name}${unit}`;
  return `${Number(value.toPrecision(3))}${unit ? ` ${unit}` : ""}`;
}

/** As memory is sold: in powers of 1,024. */
export function bytes(value: number): string {
  for (const [power, name] of [[40, "TiB"], [30, "GiB"], [20, "MiB"], [10, "KiB"]] as const)
    if (value >= 2 ** power) return `${Number((value / 2 ** power).toPrecision(3))} ${name}`;
  return `${value} B`;
}

export const whole = (value: number): string => value.toLocaleString("en");

/** Parameters: thousand millions are billions, as everybody says. */
export const count = (value: number): string => si(value).replace("G", "B");
