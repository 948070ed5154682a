"""Equivalent computations over random configurations, to 1e-5 in fp32 and 1e-10 in fp64."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.config_strategies import (
    DTYPES,
    SEEDS,
    SEQ_LEN,
    build_randomized_model,
    compute_logits,
    configs,
    has_additive_residual,
    ragged_padding_mask,
    random_tokens,
    tolerance,
)

from cutaway import config as c
from cutaway.errors import KernelError


@given(config=configs(), dtype=DTYPES, seed=SEEDS, side=st.sampled_from([None, "left", "right"]))
@torch.no_grad()
def test_kernels_agree(config: c.Config, dtype: torch.dtype, seed: int, side: str | None) -> None:
    model = build_randomized_model(config, dtype, seed)
    tokens = random_tokens(config, 3, SEQ_LEN, seed)
    mask = None if side is None else ragged_padding_mask(3, SEQ_LEN, side)
    is_real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    reference = compute_logits(model.use_kernel("explicit"), config, tokens, mask)
    assert torch.isfinite(reference).all()
    attentions = [b.attention for s in config.stacks.values() for b in s.blocks] + [
        b.cross for s in config.stacks.values() for b in s.blocks if hasattr(b, "cross")
    ]
    if any(getattr(a, "softcap", None) or getattr(a, "sink", False) for a in attentions):
        with pytest.raises(KernelError, match="does not support"):
            model.use_kernel("sdpa")
        model.use_kernel("auto")
    else:
        model.use_kernel("sdpa")
    assert (compute_logits(model, config, tokens, mask) - reference)[is_real].abs().max() <= tolerance(dtype, reference)


@given(
    config=configs(),
    dtype=DTYPES,
    seed=SEEDS,
    cuts=st.sets(st.integers(1, SEQ_LEN - 1)),
    side=st.sampled_from([None, "left", "right"]),
    static_shapes=st.booleans(),
)
@torch.no_grad()
def test_cached_equals_uncached(
    config: c.Config, dtype: torch.dtype, seed: int, cuts: set[int], side: str | None, static_shapes: bool
) -> None:
    """In one call, in chunks and token by token; with padding inside the chunks."""
    model = build_randomized_model(config, dtype, seed)
    tokens = random_tokens(config, 3, SEQ_LEN, seed)
    mask = None if side is None else ragged_padding_mask(3, SEQ_LEN, side)
    is_real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    full = compute_logits(model, config, tokens, mask)
    splits = (
        [[0, SEQ_LEN]]
        if config.form == "encoder"
        else [[0, SEQ_LEN], [0, *sorted(cuts), SEQ_LEN], list(range(SEQ_LEN + 1))]
    )
    for boundaries in splits:
        max_chunk = max(b - a for a, b in pairwise(boundaries))
        for chunk_size in (None, max_chunk):  # chunk_size uses ring buffers
            cache = model.new_cache(3, SEQ_LEN + 3, chunk_size=chunk_size)
            cache.static_shapes = static_shapes
            outputs = [
                compute_logits(model, config, tokens[:, a:b], None if mask is None else mask[:, a:b], cache=cache)
                for a, b in pairwise(boundaries)
            ]
            assert (torch.cat(outputs, 1) - full)[is_real].abs().max() <= tolerance(dtype, full)


@given(config=configs(), dtype=DTYPES, seed=SEEDS, side=st.sampled_from(["left", "right"]))
@torch.no_grad()
def test_padded_equals_unpadded(config: c.Config, dtype: torch.dtype, seed: int, side: str) -> None:
    model = build_randomized_model(config, dtype, seed)
    tokens = random_tokens(config, 4, SEQ_LEN, seed)
    mask = ragged_padding_mask(4, SEQ_LEN, side)
    source = random_tokens(config, 4, SEQ_LEN, seed + 1, "source")
    is_encoder_decoder = config.form == "encoder-decoder"
    padded = model(source, tokens, mask, mask) if is_encoder_decoder else model(tokens, mask)
    for row in range(4):
        row_mask = mask[row]
        unpadded = (
            model(source[row : row + 1, row_mask], tokens[row : row + 1, row_mask])
            if is_encoder_decoder
            else model(tokens[row : row + 1, row_mask])
        )
        assert (padded[row, row_mask] - unpadded[0]).abs().max() <= tolerance(dtype, unpadded)


@given(
    config=configs(("decoder", "encoder")), dtype=DTYPES, seed=SEEDS, cut=st.integers(1, SEQ_LEN - 1), pad=st.booleans()
)
@torch.no_grad()
def test_packed_equals_separate(config: c.Config, dtype: torch.dtype, seed: int, cut: int, pad: bool) -> None:
    model = build_randomized_model(config, dtype, seed)
    tokens = random_tokens(config, 1, SEQ_LEN, seed)
    documents = (torch.arange(SEQ_LEN) >= cut).long().unsqueeze(0) * 5 + 2
    mask = None
    if pad:
        mask = torch.ones(1, SEQ_LEN, dtype=torch.bool)
        mask[:, -1] = False
    packed = model(tokens, mask, document_ids=documents)
    for part in (slice(0, cut), slice(cut, SEQ_LEN - pad)):
        if part.stop > part.start:
            separate = model(tokens[:, part])
            assert (packed[:, part] - separate).abs().max() <= tolerance(dtype, separate)


@given(config=configs(("decoder",)), seed=SEEDS, size=st.integers(0, SEQ_LEN))
@torch.no_grad()
def test_prefix_lm_mask(config: c.Config, seed: int, size: int) -> None:
    """Without a prefix the model is causal; tokens after the prefix do not change earlier logits."""
    model = build_randomized_model(config, torch.float64, seed)
    tokens = random_tokens(config, 2, SEQ_LEN, seed)
    causal = model(tokens)
    lengths = torch.tensor([0, size])
    out = model(tokens, prefix_lengths=lengths)
    assert (out[0] - causal[0]).abs().max() <= tolerance(torch.float64, causal)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % config.vocab_size
    difference = (model(changed, prefix_lengths=lengths) - out).abs().amax(-1)
    num_unaffected = SEQ_LEN - 1 if size < SEQ_LEN else 0
    assert difference[1, :num_unaffected].sum() <= 1e-12


@given(config=configs(("decoder",), ("none",), ("none", "rope")), dtype=DTYPES, seed=SEEDS, shift=st.integers(1, 1000))
@torch.no_grad()
def test_rope_depends_on_distances_only(config: c.Config, dtype: torch.dtype, seed: int, shift: int) -> None:
    """Shifting all positions leaves the logits unchanged, except with scalings that depend on the length."""
    for block in config.decoder.blocks:
        if isinstance(getattr(block.attention.position, "scaling", None), c.DynamicNTK | c.LongRope):
            return
    model = build_randomized_model(config, dtype, seed)
    tokens = random_tokens(config, 2, SEQ_LEN, seed)
    positions = torch.arange(SEQ_LEN).expand(2, SEQ_LEN)
    out, shifted = (model(tokens, positions=positions + offset) for offset in (0, shift))
    # fp32 angles at position 1000 are exact to 6e-5
    limit = tolerance(dtype, out) if dtype == torch.float64 else 2e-2 * max(1.0, float(out.abs().max()))
    assert (out - shifted).abs().max() <= max(limit, 1e-9)


@given(
    config=configs(("encoder",), ("none",), ("none",)), dtype=DTYPES, seed=SEEDS, order=st.permutations(range(SEQ_LEN))
)
@torch.no_grad()
def test_encoder_without_positions_is_permutation_equivariant(
    config: c.Config, dtype: torch.dtype, seed: int, order: list[int]
) -> None:
    if any(block.attention.window for block in config.encoder.blocks):
        return  # a sliding window depends on the order
    model = build_randomized_model(config, dtype, seed)
    tokens = random_tokens(config, 2, SEQ_LEN, seed)
    out = model(tokens)
    assert (model(tokens[:, order]) - out[:, order]).abs().max() <= tolerance(dtype, out)


@given(config=configs(("decoder",), attention_positions=("rope", "alibi")), dtype=DTYPES, seed=SEEDS)
@torch.no_grad()
def test_gqa_equals_mha_with_repeated_kv_heads(config: c.Config, dtype: torch.dtype, seed: int) -> None:
    def to_mha(block: c.Block) -> c.Block:
        attention = block.attention
        grouped = isinstance(attention, c.MultiHead)
        return block.replace(attention=attention.replace(kv_heads=attention.heads)) if grouped else block

    stack = config.decoder
    pattern, leading = (tuple(map(to_mha, blocks)) for blocks in (stack.block, stack.leading_blocks))
    mha = build_randomized_model(
        config.replace(decoder=stack.replace(block=pattern, leading_blocks=leading)), dtype, seed
    )
    grouped = build_randomized_model(config, dtype, seed)
    weights, shapes = grouped.state_dict(), {name: tensor.shape for name, tensor in mha.state_dict().items()}
    for name, tensor in weights.items():
        if tensor.shape != shapes[name]:  # a key or value matrix, bias or norm: repeat each head for its group
            attention = mha.get_submodule(name[: name.index(".attn.f.") + 7])
            trailing = () if "norm" in name else tensor.shape[1:]
            by_head = tensor.reshape(-1, attention.d_head, *trailing)
            weights[name] = by_head.repeat_interleave(shapes[name].numel() // tensor.numel(), 0).reshape(shapes[name])
    mha.load_state_dict(weights)
    tokens = random_tokens(config, 2, SEQ_LEN, seed)
    full = grouped(tokens)
    assert (mha(tokens) - full).abs().max() <= tolerance(dtype, full)


@given(config=configs(), seed=SEEDS)
def test_activation_checkpointing_is_bit_exact(config: c.Config, seed: int) -> None:
    model = build_randomized_model(config, torch.float32, seed).train()
    tokens = random_tokens(config, 2, SEQ_LEN, seed)
    results = {}
    modes = [("none", None), ("selective", None), ("full", None), ("full", 1)]
    for mode in modes:
        model.use_activation_checkpointing(*mode).zero_grad()
        out = compute_logits(model, config, tokens)
        out.square().mean().backward()
        results[mode] = (out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None])
    expected = results[modes[0]]
    for mode in modes[1:]:
        assert torch.equal(results[mode][0], expected[0])
        assert all(torch.equal(a, b) for a, b in zip(results[mode][1], expected[1], strict=True))


@given(config=configs(), seed=SEEDS)
@torch.no_grad()
def test_residual_stream_is_the_sum_of_embedding_and_branches(config: c.Config, seed: int) -> None:
    """Holds for pre, sandwich, output and parallel placement; post-norm normalizes the residual stream itself."""
    model = build_randomized_model(config, torch.float64, seed)
    tokens = random_tokens(config, 2, SEQ_LEN, seed)
    sums: dict[str, torch.Tensor] = {}
    final: dict[str, torch.Tensor] = {}
    hooks = []
    for name, stack in model.stacks.items():
        if not has_additive_residual(config.stacks[name]):
            continue
        add = lambda m, i, o, name=name: sums.__setitem__(name, sums.get(name, 0) + o)  # noqa: E731
        hooks.append(stack.embed.register_forward_hook(add))
        for branch in {
            b for block in stack.blocks for b in (block.attn, getattr(block, "cross", None), block.ffn) if b is not None
        }:
            hooks.append(branch.register_forward_hook(add))
        hooks.append(stack.final_norm.register_forward_pre_hook(lambda m, i, name=name: final.__setitem__(name, i[0])))
    compute_logits(model, config, tokens)
    assert sums.keys() == final.keys()
    for name in sums:
        assert (sums[name] - final[name]).abs().max() <= tolerance(torch.float64, final[name])
