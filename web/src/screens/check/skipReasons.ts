// Why a check does not apply, in words. The library names the missing arguments of ct.check: "needs loss", "needs reload or build_module".

/** Arguments of ct.check in words. */
const ARGUMENTS: Record<string, string> = {
  accumulated_loss: "a loss function with gradient accumulation",
  attention: "an attention function",
  beam_search: "a beam search function",
  build_module: "a function that builds the model again",
  config_variants: "a function that builds the model with another config",
  generate: "a function that generates tokens",
  generate_padded: "a function that generates tokens for a padded batch",
  generate_speculative: "a function for speculative decoding",
  load_from_meta: "a function that loads the model from the meta device",
  logits: "a function for the logits",
  logits_by_kernel: "a choice of attention kernels",
  logits_with_cache: "a forward pass with KV cache",
  logits_with_documents: "a forward pass with packed documents",
  logits_with_filled_cache: "a forward pass with a filled KV cache",
  logits_with_mask: "a forward pass with a padding mask",
  logits_with_padded_cache: "a forward pass with padding and KV cache",
  logits_with_rolling_cache: "a forward pass with a rolling KV cache",
  logits_with_source: "a forward pass with source tokens",
  loss: "a loss function",
  module: "the nn.Module",
  reference_logits: "another implementation of the model",
  reload: "a function that saves and loads the model",
  reload_logits: "a function that saves and loads the model",
  sample: "a sampling function",
  set_activation_checkpointing: "a switch for activation checkpointing",
};

/** Other reasons that name an argument or a property. */
const REASONS: Record<string, string> = {
  "needs window or windows": "no layer has a sliding window",
  "needs a layer with a sliding window (the property window= or windows=)": "no layer has a sliding window",
  "needs an untrained model (the property trained=False)": "for untrained models only",
  "needs attention_scale: the scale of this model family is unknown": "the attention scale of this model family is unknown",
  "needs the RoPE parameters (the property rope=)": "the RoPE parameters were not given",
  "needs the eos token id (the property eos_token_id=)": "the id of the end-of-sequence token was not given",
  "needs a mixture of experts; no routing was recorded": "the model has no mixture of experts",
  "needs heads that share keys, and attention that can be traced": "no heads share keys, or the attention cannot be traced",
};

export function describeSkip(reason: string): string {
  const known = REASONS[reason];
  if (known) return known;
  const names = /^needs (\w+(?: or \w+)*)(?:; pass .*)?$/.exec(reason)?.[1]?.split(" or ").map((name) => ARGUMENTS[name]);
  if (!names || names.includes(undefined)) return reason;
  return `${[...new Set(names)].join(" or ")} was not given`;
}
