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
