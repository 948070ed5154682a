"""x-transformers: one decoder with many options. A cached forward pass takes all tokens and computes the last ones."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

NAME = "x-transformers"
HOMEPAGE = "https://github.com/lucidrains/x-transformers"
REQUIREMENTS = ("x-transformers==2.31.10", "torch-einops-utils==0.2.0", "einops==0.8.2", "einx==0.4.3")
LENGTH, VOCAB = 96, 64
Options = dict[str, Any]
SIZES: Options = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 16, "verbose": False}
ROTARY: Options = {"rotary_pos_emb": True, "rotary_emb_dim": 16}
ALIBI: Options = {"alibi_pos_bias": True, "disable_abs_pos_emb": True}
RELATIVE_BIAS: Options = {"rel_pos_bias": True, "rel_pos_num_buckets": 8, "rel_pos_max_distance": 32}
DYNAMIC_BIAS: Options = {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": True, "disable_abs_pos_emb": True}
FORGETTING: Options = {"attn_data_dependent_alibi": True, "disable_abs_pos_emb": True}
LATENT: Options = {
    **ROTARY,
    "attn_use_latent_q": True,
    "attn_dim_latent_q": 16,
    "attn_use_latent_kv": True,
    "attn_dim_latent_kv": 16,
    "attn_latent_rope_subheads": 1,
}
PROJECTED_BIAS: Options = {
    "attn_use_rel_proj_pos_bias": True,
    "attn_rel_proj_max_dist": 32,
    "disable_abs_pos_emb": True,
}
GROUPED: Options = {"attn_kv_heads": 2}
WINDOW: Options = {"attn_max_attend_past": 8}

DECODERS: dict[str, Options] = {
    "absolute positions": {},
    "absolute positions, memory keys and values, sandwich norm": {"attn_num_mem_kv": 3, "sandwich_norm": True},
    "rotary, grouped heads": {**ROTARY, **GROUPED},
    "rotary, one kv head, RMSNorm": {**ROTARY, "attn_one_kv_head": True, "use_rmsnorm": True},
    "rotary xpos, half of the head": {**ROTARY, "rotary_xpos": True, "rotary_emb_dim": 8},
    "rotary, window, memory keys and values": {**ROTARY, **WINDOW, "attn_num_mem_kv": 2},
    "rotary, scaled and interpolated": {
        **ROTARY,
        "rotary_interpolation_factor": 2.0,
        "rotary_base_rescale_factor": 4.0,
    },
    "ALiBi in half of the heads, grouped heads": {**ALIBI, **GROUPED, "alibi_num_heads": 2},
    "ALiBi, window": {**ALIBI, **WINDOW},
    "ALiBi, memory keys and values, zero key": {**ALIBI, "attn_num_mem_kv": 2, "attn_add_zero_kv": True},
    "T5 bias, memory keys and values": {**RELATIVE_BIAS, "attn_num_mem_kv": 2},
    "T5 bias, residual attention": {**RELATIVE_BIAS, "residual_attn": True},
    "dynamic position bias, grouped heads": {**DYNAMIC_BIAS, **GROUPED},
    "dynamic position bias with norm, memory keys and values": {
        **DYNAMIC_BIAS,
        "dynamic_pos_bias_norm": True,
        "attn_num_mem_kv": 2,
    },
    "CoPE, soft clamping": {
        "attn_use_cope": True,
        "attn_softclamp_logits": True,
        "attn_logit_softclamp_value": 2.0,
        "disable_abs_pos_emb": True,
    },
    "CoPE with talking heads": {"attn_use_cope": True, "attn_cope_talking_heads": True, "disable_abs_pos_emb": True},
    "data-dependent ALiBi": FORGETTING,
    "data-dependent ALiBi per row": {**FORGETTING, "attn_data_dependent_alibi_per_row": True},
    "projected distance bias": PROJECTED_BIAS,
    "projected distance bias, memory keys and values": {**PROJECTED_BIAS, "attn_num_mem_kv": 2},
    "polar": {"polar_pos_emb": True},
    "polar, grouped heads": {"polar_pos_emb": True, **GROUPED},
    "rotary, shifted tokens": {**ROTARY, "shift_tokens": 1},
    "rotary, selective attention": {**ROTARY, "attn_selective": True},
    "rotary, cosine similarity attention, head scale": {
        **ROTARY,
        "attn_qk_norm": True,
        "attn_qk_norm_groups": 2,
        "attn_head_scale": True,
    },
    "rotary, cosine similarity with learned scale, memory keys and values": {
        **ROTARY,
        "attn_qk_norm": True,
        "attn_qk_norm_dim_scale": True,
        "attn_num_mem_kv": 2,
    },
    "rotary, qk RMSNorm, grouped heads": {**ROTARY, "attn_qk_rmsnorm": True, **GROUPED},
    "rotary, value RMSNorm": {**ROTARY, "attn_value_rmsnorm": True},
    "rotary, value RMSNorm, grouped heads": {**ROTARY, "attn_value_rmsnorm": True, **GROUPED},
    "rotary, talking heads": {**ROTARY, "attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "rotary, learned sink, soft clamping": {**ROTARY, "attn_head_learned_sink": True, "attn_softclamp_logits": True},
    "rotary, sparse top-k": {**ROTARY, "attn_sparse_topk": 8},
    "rotary, sigmoid attention": {**ROTARY, "attn_sigmoid": True},
    "rotary, signed attention (Cog)": {**ROTARY, "attn_cog_signed": True},
    "rotary, L2 distance attention": {**ROTARY, "attn_l2_distance": True},
    "rotary, LASER": {**ROTARY, "attn_laser": True},
    "rotary, gated values, gated heads": {**ROTARY, "attn_gate_values": True, "attn_gate_value_heads": True},
    "rotary, attention on attention": {**ROTARY, "attn_on_attn": True},
    "rotary, value residual, grouped heads": {**ROTARY, "add_value_residual": True, **GROUPED},
    "rotary, latent attention": LATENT,
    "rotary, latent attention, value residual": {**LATENT, "add_value_residual": True},
    "rotary, hyper-connections": {**ROTARY, "num_residual_streams": 2},
    "rotary, hyper-connections with separate q, k and v": {
        **ROTARY,
        "num_residual_streams": 2,
        "qkv_receive_diff_residuals": True,
    },
    "rotary, gated multi-residual": {
        **ROTARY,
        "num_residual_streams": 2,
        "gated_multi_residual": True,
        "residual_fn_kwargs": {"read_gate_rank": 4},
    },
    "rotary, integrated layers": {**ROTARY, "integrate_layers": True},
    "rotary, attention over residuals": {
        **ROTARY,
        "attn_aggregated_residuals": True,
        "attn_aggregated_residual_kwargs": {"lora_rank": 8},
    },
    "rotary, gated residual": {**ROTARY, "gate_residual": True},
    "rotary, orthogonal residual": {**ROTARY, "orthog_residual": True},
    "rotary, orthogonal values": {**ROTARY, "attn_orthog_projected_values": True},
    "rotary, orthogonal values per head": {**ROTARY, "attn_orthog_projected_values_per_head": True},
    "rotary, mean-variance split residual": {**ROTARY, "mv_split_residual": True},
    "rotary, U-Net skips, reinjected input": {**ROTARY, "depth": 4, "unet_skips": True, "reinject_input": True},
    "rotary, tied layers": {**ROTARY, "weight_tie_layers": True},
    "rotary, sandwich order, post-norm": {**ROTARY, "depth": 3, "sandwich_coef": 1, "pre_norm": False},
    "rotary, macaron, GLU, layer scale": {
        **ROTARY,
        "macaron": True,
        "ff_glu": True,
        "ff_post_act_ln": True,
        "use_layerscale": True,
        "layerscale_init_value": 0.5,
    },
}
"""Name → options of the decoder."""
WRAPPERS: dict[str, tuple[Options, Options]] = {
    "scaled sinusoidal positions": ({}, {"scaled_sinu_pos_emb": True}),
    "rotary, memory tokens": (ROTARY, {"num_memory_tokens": 2}),
    "absolute positions, memory tokens": ({}, {"num_memory_tokens": 2}),
    "rotary, interspersed memory tokens": (ROTARY, {"num_memory_tokens": 2, "memory_tokens_interspersed_every": 4}),
    "rotary, tied embeddings": (ROTARY, {"tie_embedding": True}),
    "rotary, factorized embeddings, norm after embeddings": (ROTARY, {"emb_dim": 16, "post_emb_norm": True}),
    "rotary, normalized embeddings": (ROTARY, {"l2norm_embed": True}),
    "absolute positions, normalized embeddings": ({}, {"l2norm_embed": True}),
    "rotary, mixture of softmaxes": (ROTARY, {"mixture_of_softmax": True}),
    "rotary, sigsoftmax": (ROTARY, {"sigsoftmax_logits": True}),
    "rotary, deep embeddings": (ROTARY, {"ff_deep_embed": True}),
}
"""Name → options of the decoder, options of TransformerWrapper."""
WITHOUT_CACHED_TOKENS: dict[str, Options] = {
    "absolute positions": {},
    "rotary, window": {**ROTARY, **WINDOW},
    "ALiBi": ALIBI,
    "polar": {"polar_pos_emb": True},
}
MEMORIES: dict[str, Options] = {
    "rotary": ROTARY,
    "ALiBi": ALIBI,
    "T5 bias, grouped heads": {**RELATIVE_BIAS, **GROUPED},
}
ENCODERS: dict[str, tuple[Options, Options]] = {
    "encoder, absolute positions": ({}, {}),
    "encoder, rotary, grouped heads": ({**ROTARY, **GROUPED}, {}),
    "encoder, ALiBi, memory keys and values": ({**ALIBI, "attn_num_mem_kv": 2}, {}),
    "encoder, T5 bias": (RELATIVE_BIAS, {}),
    "encoder, dynamic position bias": (DYNAMIC_BIAS, {}),
    "encoder, data-dependent ALiBi": (FORGETTING, {}),
    "encoder, rotary, shifted tokens": ({**ROTARY, "shift_tokens": 1}, {}),
    "encoder, rotary, memory tokens": (ROTARY, {"num_memory_tokens": 2}),
    "encoder, rotary, orthogonal residual": ({**ROTARY, "orthog_residual": True}, {}),
    "encoder, rotary, orthogonal values": ({**ROTARY, "attn_orthog_projected_values": True}, {}),
    "encoder, rotary, mean-variance split residual": ({**ROTARY, "mv_split_residual": True}, {}),
    "encoder, rotary, hyper-connections": ({**ROTARY, "num_residual_streams": 2}, {}),
    "encoder, polar": ({"polar_pos_emb": True}, {}),
}
SEQUENCE_TO_SEQUENCE: dict[str, tuple[Options, Options]] = {
    "encoder-decoder, absolute positions": ({}, {}),
    "encoder-decoder, rotary, grouped heads": ({**ROTARY, **GROUPED}, {**ROTARY, **GROUPED}),
    "encoder-decoder, T5 bias, memory keys and values": (
        {**RELATIVE_BIAS, "attn_num_mem_kv": 2},
        {**RELATIVE_BIAS, "attn_num_mem_kv": 2},
    ),
    "encoder-decoder, rotary, window in the decoder": (ROTARY, {**ROTARY, **WINDOW}),
    "encoder-decoder, rotary, value residual": (ROTARY, {**ROTARY, "add_value_residual": True}),
}
"""Name → options of the encoder, options of the decoder."""
VARIANTS: dict[str, Options] = {
    "attn_max_attend_past": WINDOW,
    "attn_softclamp_logits": {"attn_softclamp_logits": True, "attn_logit_softclamp_value": 0.1},
    "attn_qk_norm": {"attn_qk_norm": True},
    "attn_qk_norm_groups": {"attn_qk_norm": True, "attn_qk_norm_groups": 2},
    "attn_qk_norm_scale": {"attn_qk_norm": True, "attn_qk_norm_scale": 5},
    "attn_sparse_topk": {"attn_sparse_topk": 2},
    "attn_add_zero_kv": {"attn_add_zero_kv": True},
    "attn_head_learned_sink": {"attn_head_learned_sink": True},
    "attn_sigmoid": {"attn_sigmoid": True},
    "attn_laser": {"attn_laser": True},
    "attn_pre_talking_heads": {"attn_pre_talking_heads": True},
    "alibi_pos_bias": {"alibi_pos_bias": True},
    "rotary_xpos": {"rotary_xpos": True},
    "rotary_xpos_scale_base": {"rotary_xpos": True, "rotary_xpos_scale_base": 64},
    "rotary_interpolation_factor": {"rotary_interpolation_factor": 2.0},
    "rotary_base_rescale_factor": {"rotary_base_rescale_factor": 4.0},
    "shift_tokens": {"shift_tokens": 1},
    "residual_attn": {"residual_attn": True},
    "softclamp_output": {"softclamp_output": True, "softclamp_output_value": 1.0},
    "scale_residual_constant": {"scale_residual_constant": 2.0},
    "depth_scale_residual": {"depth_scale_residual": 0.5},
    "pre_norm": {"pre_norm": False},
    "sandwich_norm": {"sandwich_norm": True},
    "use_scalenorm": {"use_scalenorm": True},
    "use_rmsnorm": {"use_rmsnorm": True},
    "ff_swish": {"ff_swish": True},
    "ff_relu_squared": {"ff_relu_squared": True},
    "ff_softclamp_value": {"ff_softclamp_value": 0.1},
    "ff_post_act_ln": {"ff_post_act_ln": True},
    "macaron": {"macaron": True},
}

NO_SHIFT_INVARIANCE = {"shift_tokens", "attn_cog_signed", "attn_hybrid_module", "num_memory_tokens"}
"""Options for which the first tokens, or the number of earlier tokens, matter."""
LOSSES = ({}, {"mixture_of_softmax": True}, {"tie_embedding": True})
"""Options of TransformerWrapper for which the loss is checked, in one configuration each."""


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, options in DECODERS.items():
        yield name, partial(make_decoder, options, {})
    for name, (options, wrapper_options) in WRAPPERS.items():
        yield name, partial(make_decoder, options, wrapper_options)
    for name, options in WITHOUT_CACHED_TOKENS.items():
        yield f"{name}, input without the cached tokens", partial(make_decoder, options, {}, only_new_tokens=True)
    for name, options in MEMORIES.items():
        yield f"{name}, Transformer-XL memories", partial(make_decoder, options, {"max_mem_len": LENGTH}, memories=True)
    for fold in (1, 4):
        yield f"rotary, hybrid with a GRU, every {fold} tokens", partial(make_hybrid, fold)
    yield "rotary, recycled", partial(make_recycled, ROTARY)
    yield "prefix decoder", partial(make_prefix, ROTARY)
    yield "options of a decoder", partial(make_variants, ROTARY)
    for name, (options, wrapper_options) in ENCODERS.items():
        yield name, partial(make_encoder, options, wrapper_options)
    for name, (encoder_options, decoder_options) in SEQUENCE_TO_SEQUENCE.items():
        yield name, partial(make_sequence_to_sequence, encoder_options, decoder_options)


def build_model(class_name: str, options: Options, wrapper_options: Options) -> nn.Module:
    import x_transformers

    layers = getattr(x_transformers, class_name)(**SIZES | options)
    sizes = {"num_tokens": VOCAB, "max_seq_len": LENGTH}
    return x_transformers.TransformerWrapper(**sizes, attn_layers=layers, **wrapper_options).eval()


def find_properties(options: Options, wrapper_options: Options) -> Options:
    window = options.get("attn_max_attend_past")
    has_bias = any(name in options for name in ("rotary_pos_emb", "alibi_pos_bias", "rel_pos_bias", "polar_pos_emb"))
    return {
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "window": None if window is None else window + 1,  # a token and the 8 before it
        "windows": () if window is None else (window + 1,),
        "tied_embeddings": wrapper_options.get("tie_embedding", False),
        "relative_positions": has_bias and not (NO_SHIFT_INVARIANCE & (options.keys() | wrapper_options.keys())),
        "trained": False,
    }


def pad_arguments(mask: Tensor) -> Options:
    """Left padding is passed as the position of the first token, and right padding as a mask."""
    left = (mask.cumsum(1) == 0).sum(1)
    return {"seq_start_pos": left} if left.any() else {"mask": mask}


def make_decoder(
    options: Options, wrapper_options: Options, only_new_tokens: bool = False, memories: bool = False
) -> tuple[nn.Module, Options]:
    from x_transformers import AutoregressiveWrapper

    build = partial(build_model, "Decoder", options, wrapper_options)
    model = build()
    wrapper = AutoregressiveWrapper(model)
    arguments = find_properties(options, wrapper_options) | {
        "build_module": build,
        "logits": lambda tokens: model(tokens),
        "logits_with_mask": lambda tokens, mask: model(tokens, **pad_arguments(mask)),
        "positions_skip_padding": True,
        "generate": partial(generate, wrapper),
        "generate_padded": partial(generate_padded, wrapper),
        "beam_search": partial(search_beams, wrapper),
    }
    if wrapper_options in LOSSES and (not options or wrapper_options):
        arguments["loss"] = partial(compute_loss, wrapper)
    if model.can_cache_kv:
        arguments["logits_with_cache"] = partial(logits_with_cache, model, only_new_tokens)
    if memories:
        arguments["logits_with_cache"] = partial(logits_with_memories, model)
    if ("rotary_pos_emb" in options or not options) and not wrapper_options:
        arguments["logits_with_positions"] = lambda tokens, positions: model(tokens, pos=positions)
    try:
        flash = build_model("Decoder", {**options, "attn_flash": True}, wrapper_options)
    except (AssertionError, TypeError):
        return model, arguments  # the option needs explicit attention scores

    def flash_logits(tokens: Tensor) -> Tensor:
        flash.load_state_dict(model.state_dict())
        return flash.to(next(model.parameters()).dtype)(tokens)

    arguments["logits_by_kernel"] = {"explicit": lambda tokens: model(tokens), "flash": flash_logits}
    return model, arguments


def make_hybrid(fold: int) -> tuple[nn.Module, Options]:
    """Attention beside a GRU over every n-th token."""
    module = nn.GRU(SIZES["dim"], SIZES["heads"] * SIZES["attn_dim_head"], batch_first=True)
    return make_decoder({**ROTARY, "attn_hybrid_module": module, "attn_hybrid_fold_axial_dim": fold}, {})


def logits_with_cache(model: nn.Module, only_new_tokens: bool, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    """`cache_age` is the number of new tokens at the end of the input."""
    seen, cache = (tokens[:, :0], None) if state is None else state
    full = torch.cat([seen, tokens], dim=1)
    options: Options = {"return_intermediates": True}
    if cache is not None:
        options |= {"cache": cache, "cache_age": tokens.shape[1]}
    if only_new_tokens:
        options["input_not_include_cache"] = True
    logits, cache = model(tokens if only_new_tokens else full, **options)
    return logits[:, -tokens.shape[1] :], (full, cache)


def logits_with_memories(model: nn.Module, tokens: Tensor, memories: Any) -> tuple[Tensor, Any]:
    return model(tokens, mems=memories, return_mems=True)


def generate(wrapper: nn.Module, tokens: Tensor, count: int) -> Tensor:
    wrapper.train(wrapper.net.training)
    return wrapper.generate(tokens, count, temperature=0.0)


def generate_padded(wrapper: nn.Module, tokens: Tensor, mask: Tensor, count: int) -> Tensor:
    rows = [row[real] for row, real in zip(tokens, mask, strict=True)]
    wrapper.train(wrapper.net.training)
    return wrapper.generate(rows, count, temperature=0.0)


def search_beams(wrapper: nn.Module, tokens: Tensor, count: int, beams: int) -> tuple[Tensor, Tensor]:
    wrapper.train(wrapper.net.training)
    found, scores = wrapper.beam_search(tokens, count, beams=beams, return_beams_and_scores=True)
    return found[:, 0], scores[:, 0]


def compute_loss(wrapper: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Tokens that are ignored as labels are also replaced in the input, so only padding can be ignored."""
    wrapper.train(wrapper.net.training)
    return wrapper(torch.where(labels == wrapper.ignore_index, labels, tokens))


def make_recycled(options: Options) -> tuple[nn.Module, Options]:
    model = build_model("Decoder", options, {"recycling": True})
    arguments = find_properties(options, {}) | {
        "logits": lambda tokens: model(tokens, recycle_steps=2),
        "logits_with_mask": lambda tokens, mask: model(tokens, recycle_steps=2, **pad_arguments(mask)),
        "positions_skip_padding": True,
    }
    return model, arguments


def make_prefix(options: Options) -> tuple[nn.Module, Options]:
    """A prefix of length 0: the causal part of the model."""
    model = build_model("PrefixDecoder", options, {})
    arguments = find_properties(options, {}) | {
        "logits": lambda tokens: model(tokens),
        "logits_with_mask": lambda tokens, mask: model(tokens, **pad_arguments(mask)),
        "positions_skip_padding": True,
    }
    return model, arguments


def make_variants(options: Options) -> tuple[nn.Module, Options]:
    """Each option of VARIANTS must change the logits."""
    model = build_model("Decoder", options, {})

    def build_variant(changes: Options) -> Callable[[Tensor], Tensor]:
        variant = build_model("Decoder", options | changes, {})
        weights = {name: value for name, value in model.state_dict().items() if name in variant.state_dict()}
        variant.load_state_dict(weights, strict=False)
        return lambda tokens: variant(tokens)

    def build_variants() -> dict[str, Callable[[], Callable[[Tensor], Tensor]]]:
        return {name: partial(build_variant, changes) for name, changes in VARIANTS.items()}

    return model, find_properties(options, {}) | {"config_variants": build_variants, "only": ["config-fields"]}


def make_encoder(options: Options, wrapper_options: Options) -> tuple[nn.Module, Options]:
    build = partial(build_model, "Encoder", options, wrapper_options)
    model = build()
    arguments = find_properties(options, wrapper_options) | {
        "kind": "encoder",
        "build_module": build,
        "logits": lambda tokens: model(tokens),
        "logits_with_mask": lambda tokens, mask: model(tokens, mask=mask),
        "positions_skip_padding": False,
    }
    return model, arguments


def make_sequence_to_sequence(encoder_options: Options, decoder_options: Options) -> tuple[nn.Module, Options]:
    from x_transformers import XTransformer

    sizes = {name: value for name, value in SIZES.items() if name != "dim"} | {
        "num_tokens": VOCAB,
        "max_seq_len": LENGTH,
    }

    def build() -> nn.Module:
        encoder = {f"enc_{name}": value for name, value in (sizes | encoder_options).items()}
        decoder = {f"dec_{name}": value for name, value in (sizes | decoder_options).items()}
        return XTransformer(dim=SIZES["dim"], **encoder, **decoder).eval()

    model = build()
    source = torch.randint(VOCAB, (1, 24), generator=torch.Generator().manual_seed(0))

    def encode(batch_size: int) -> Tensor:
        return model.encoder(source.expand(batch_size, -1), return_embeddings=True)

    def logits_with_source(source: Tensor, mask: Tensor | None, tokens: Tensor) -> Tensor:
        encoded = model.encoder(source, mask=mask, return_embeddings=True)
        return model.decoder.net(tokens, context=encoded, context_mask=mask)

    def cached_logits(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        seen, cache = (tokens[:, :0], None) if state is None else state
        full = torch.cat([seen, tokens], dim=1)
        options: Options = {} if cache is None else {"cache": cache, "cache_age": tokens.shape[1]}
        logits, cache = model.decoder.net(full, context=encode(len(tokens)), return_intermediates=True, **options)
        return logits[:, -tokens.shape[1] :], (full, cache)

    arguments = find_properties(decoder_options, {}) | {
        "kind": "encoder-decoder",
        "build_module": build,
        "window": None,
        "logits": lambda tokens: model.decoder.net(tokens, context=encode(len(tokens))),
        "logits_with_source": logits_with_source,
        "logits_with_cache": cached_logits,
        "generate": lambda tokens, count: model.generate(
            source.expand(len(tokens), -1), tokens, count, temperature=0.0
        ),
        "source_vocab_size": VOCAB,
    }
    return model, arguments
