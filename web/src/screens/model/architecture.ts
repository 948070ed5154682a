// Result of the query `architecture`.

export interface Matrix {
  name: string;
  /** (output, input), or (experts, output, input). */
  shape: number[];
  parameters: number;
}

export interface Sublayer {
  parameters: number;
  matrices: Matrix[];
  /** Number of parameters of the norm; null if there is no norm. */
  norm_in: number | null;
  norm_out: number | null;
  norm_after: number | null;
}

export interface AttentionSizes {
  kind: "multi-head" | "cross" | "latent";
  heads: number;
  kv_heads: number;
  d_head: number;
  d_value: number;
  q_rank: number | null;
  kv_rank: number | null;
  window: number | null;
  position: string;
  rotary_dim: number | null;
  buckets: number | null;
  softcap: number | null;
  has_qk_norm: boolean;
  has_sink: boolean;
}

export interface FfnSizes {
  kind: "mlp" | "gated" | "clamped-swiglu" | "moe";
  expert_kind: string;
  hidden: number;
  activation: string;
  experts: number | null;
  top_k: number | null;
  shared_hidden: number | null;
}

export type SublayerName = "attn" | "cross" | "ffn";

export interface BlockKind {
  label: string;
  count: number;
  attn: AttentionSizes;
  cross: AttentionSizes | null;
  ffn: FfnSizes;
  formulas: Record<string, string[]>;
}

export interface StackArchitecture {
  prefix: string;
  is_causal: boolean;
  vocab_size: number;
  embedding: {
    token_parameters: number;
    other_parameters: number;
    is_shared: boolean;
    table_dim: number;
    scale: number;
    position: "none" | "learned" | "sinusoidal";
    max_positions: number | null;
    token_types: number;
    norm: string;
    formulas: string[];
  };
  norm: "layernorm" | "rmsnorm" | "none";
  placement: "pre" | "post" | "sandwich" | "output" | "parallel";
  skip_scale: number;
  residual_scale: number;
  block_kinds: BlockKind[];
  blocks: { kind: number; norm: number | null; shared_with: number | null; sublayers: Partial<Record<SublayerName, Sublayer>> }[];
  final_norm: number | null;
  final_norm_formulas: string[];
}

export interface Architecture {
  form: "decoder" | "encoder" | "encoder-decoder";
  d_model: number;
  vocab_size: number;
  context: number | null;
  stacks: Record<string, StackArchitecture>;
  head: { parameters: number; is_tied: boolean; has_transform: boolean; has_bias: boolean; softcap: number | null; formulas: string[] } | null;
  pooler: number | null;
  num_parameters: number;
}

/** Number of parameters in each kind of component. */
export function countByComponent({ stacks, head, pooler }: Architecture): { name: string; label: string; count: number }[] {
  const all = Object.values(stacks);
  const blocks = all.flatMap((stack) => stack.blocks);
  const sum = (values: (number | null | undefined)[]): number => values.reduce<number>((total, value) => total + (value ?? 0), 0);
  const sublayers = blocks.flatMap((block) => Object.values(block.sublayers));
  return [
    { name: "embedding", label: "embedding", count: sum(all.flatMap(({ embedding }) => [embedding.token_parameters, embedding.other_parameters])) },
    { name: "attention", label: "attention", count: sum(blocks.flatMap(({ sublayers: { attn, cross } }) => [attn?.parameters, cross?.parameters])) },
    { name: "ffn", label: "FFN", count: sum(blocks.map(({ sublayers: { ffn } }) => ffn?.parameters)) },
    { name: "norms", label: "norms", count: sum([...all.map((stack) => stack.final_norm), ...blocks.map((block) => block.norm), ...sublayers.flatMap((sublayer) => [sublayer.norm_in, sublayer.norm_out, sublayer.norm_after])]) },
    { name: "head", label: pooler === null ? "head" : "head and pooler", count: sum([head?.parameters, pooler]) },
  ];
}
