"""Two ways to the same numbers, over randomly drawn configurations: fp32 to 1e-5 and fp64 to 1e-10."""

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
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    reference = compute_logits(model.use_kernel("explicit"), config, tokens, mask)
    assert torch.isfinite(reference).all()
    heads = [b.attention for s in config.stacks.values() for b in s.blocks] + [
        b.cross for s in config.stacks.values() for b in s.blocks if hasattr(b, "cross")
    ]
    if any(getattr(a, "softcap", None) or getattr(a, "sink", False) for a in heads):
        with pytest.raises(KernelError, match="does not support"):
            model.use_kernel("sdpa")
        model.use_kernel("auto")
    else:
        model.use_kernel("sdpa")
    assert (compute_logits(model, config, tokens, mask) - reference)[real].abs().max() <= tolerance(dtype, reference)


@given(
    config=configs(),
    dtype=DTYPES,
    seed=SEEDS,
    cuts=st.sets(st.integers(1, SEQ_LEN - 1)),
    side=st.sampled_from([None, "left", "right"]),
)
@torch.no_grad()
def test_cached_is_full(config: c.Config, dtype: torch.dtype, seed: int, cuts: set[int], side: str | None) -> None:
    """Whole, in chunks, token by token; with padding inside the chunks, which then shifts nothing."""
    model = build_randomized_model(config, dtype, seed)
    tokens = random_tokens(config, 3, SEQ_LEN, seed)
    mask = None if side is None else ragged_padding_mask(3, SEQ_LEN, side)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    full = compute_logits(model, config, tokens, mask)
    ways = (
        [[0, SEQ_LEN]]
        if config.form == "encoder"
        else [[0, SEQ_LEN], [0, *sorted(cuts), SEQ_LEN], list(range(SEQ_LEN + 1))]
    )
    for borders in ways:
        widest = max(b - a for a, b in pairwise(borders))
        for fixed, chunk in ((False, None), (True, None), (False, widest), (True, widest)):  # with a chunk: in rings
            cache = model.new_cache(3, SEQ_LEN + 3, chunk_size=chunk)
            cache.static_shapes = fixed
            pieces = [
                compute_logits(model, config, tokens[:, a:b], None if mask is None else mask[:, a:b], cache=cache)
                for a, b in pairwise(borders)
            ]
            assert (torch.cat(pieces, 1) - full)[real].abs().max() <= tolerance(dtype, full)


@given(config=configs(), dtype=DTYPES, seed=SEEDS, side=st.sampled_from(["left", "right"]))
@torch.no_grad()
def test_padded_is_alone(config: c.Config, dtype: torch.dtype, seed: int, side: str) -> None:
    model = build_randomized_model(config, dtype, seed)
    tokens = random_tokens(config, 4, SEQ_LEN, seed)
    mask = ragged_padding_mask(4, SEQ_LEN, side)
    source = random_tokens(config, 4, SEQ_LEN, seed + 1, "source")
    two = config.form == "encoder-decoder"
    padded = model(source, tokens, mask, mask) if two else model(tokens, mask)
    for row in range(4):
        here = mask[row]
        alone = (
            model(source[row : row + 1, here], tokens[row : row + 1, here])
            if two
            else model(tokens[row : row + 1, here])
        )
        assert (padded[row, here] - alone[0]).abs().max() <= tolerance(dtype, alone)


@given(
    config=configs(("decoder", "encoder")), dtype=DTYPES, seed=SEEDS, cut=st.integers(1, SEQ_LEN - 1), pad=st.booleans()
)
@torch.no_grad()
def test_packed_is_separate(config: c.Config, dtype: torch.dtype, seed: int, cut: int, pad: bool) -> None:
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
            alone = model(tokens[:, part])
            assert (packed[:, part] - alone).abs().max() <= tolerance(dtype, alone)


@given(config=configs(("decoder",)), seed=SEEDS, size=st.integers(0, SEQ_LEN))
@torch.no_grad()
def test_prefix_sees_itself_whole(config: c.Config, seed: int, size: int) -> None:
    """With no prefix it is the causal model; with one, tokens behind the prefix change nothing before them."""
    model = build_randomized_model(config, torch.float64, seed)
    tokens = random_tokens(config, 2, SEQ_LEN, seed)
    causal = model(tokens)
    lengths = torch.tensor([0, size])
    out = model(tokens, prefix_lengths=lengths)
    assert (out[0] - causal[0]).abs().max() <= tolerance(torch.float64, causal)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % config.vocab_size
    difference = (model(changed, prefix_lengths=lengths) - out).abs().amax(-1)
    unseen = SEQ_LEN - 1 if size < SEQ_LEN else 0
    assert difference[1, :unseen].sum() <= 1e-12


@given(config=configs(("decoder",), ("none",), ("none", "rope")), dtype=DTYPES, seed=SEEDS, shift=st.integers(1, 1000))
@torch.no_grad()
def test_rope_knows_distances_only(config: c.Config, dtype: torch.dtype, seed: int, shift: int) -> None:
    """All positions moved by the same amount: the logits stay, in every scaling (their lengths kept on one side)."""
    for block in config.decoder.blocks:
        if isinstance(getattr(block.attention.position, "scaling", None), c.DynamicNTK | c.LongRope):
            return
    model = build_randomized_model(config, dtype, seed)
    tokens = random_tokens(config, 2, SEQ_LEN, seed)
    positions = torch.arange(SEQ_LEN).expand(2, SEQ_LEN)
    here, there = (model(tokens, positions=positions + moved) for moved in (0, shift))
    # fp32 angles at position 1000 are exact to 6e-5
    limit = tolerance(dtype, here) if dtype == torch.float64 else 2e-2 * max(1.0, float(here.abs().max()))
    assert (here - there).abs().max() <= max(limit, 1e-9)


@given(
    config=configs(("encoder",), ("none",), ("none",)), dtype=DTYPES, seed=SEEDS, order=st.permutations(range(SEQ_LEN))
)
@torch.no_grad()
def test_without_positions_order_means_nothing(
    config: c.Config, dtype: torch.dtype, seed: int, order: list[int]
) -> None:
    if any(block.attention.window for block in config.encoder.blocks):
        return  # a window is a kind of position
    model = build_randomized_model(config, dtype, seed)
    tokens = random_tokens(config, 2, SEQ_LEN, seed)
    straight = model(tokens)
    assert (model(tokens[:, order]) - straight[:, order]).abs().max() <= tolerance(dtype, straight)


@given(config=configs(("decoder",), attention_positions=("rope", "alibi")), dtype=DTYPES, seed=SEEDS)
@torch.no_grad()
def test_gqa_is_mha_with_repeated_keys(config: c.Config, dtype: torch.dtype, seed: int) -> None:
    def widened(block: c.Block) -> c.Block:
        attention = block.attention
        grouped = isinstance(attention, c.MultiHead)
        return block.replace(attention=attention.replace(kv_heads=attention.heads)) if grouped else block

    stack = config.decoder
    pattern, lead = (tuple(map(widened, blocks)) for blocks in (stack.block, stack.leading_blocks))
    wide = build_randomized_model(
        config.replace(decoder=stack.replace(block=pattern, leading_blocks=lead)), dtype, seed
    )
    grouped = build_randomized_model(config, dtype, seed)
    weights, shapes = grouped.state_dict(), {name: tensor.shape for name, tensor in wide.state_dict().items()}
    for name, tensor in weights.items():
        if tensor.shape != shapes[name]:  # a key or value matrix, bias or norm: repeat each head for its group
            attention = wide.get_submodule(name[: name.index(".attn.f.") + 7])
            rest = () if "norm" in name else tensor.shape[1:]
            by_head = tensor.reshape(-1, attention.d_head, *rest)
            weights[name] = by_head.repeat_interleave(shapes[name].numel() // tensor.numel(), 0).reshape(shapes[name])
    wide.load_state_dict(weights)
    tokens = random_tokens(config, 2, SEQ_LEN, seed)
    full = grouped(tokens)
    assert (wide(tokens) - full).abs().max() <= tolerance(dtype, full)


@given(config=configs(), seed=SEEDS)
def test_checkpointing_changes_no_bit(config: c.Config, seed: int) -> None:
    model = build_randomized_model(config, torch.float32, seed).train()
    tokens = random_tokens(config, 2, SEQ_LEN, seed)
    seen = {}
    for mode in ("none", "selective", "full"):
        model.use_activation_checkpointing(mode).zero_grad()
        out = compute_logits(model, config, tokens)
        out.square().mean().backward()
        seen[mode] = (out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None])
    for mode in ("selective", "full"):
        assert torch.equal(seen[mode][0], seen["none"][0])
        assert all(torch.equal(a, b) for a, b in zip(seen[mode][1], seen["none"][1], strict=True))


@given(config=configs(), seed=SEEDS)
@torch.no_grad()
def test_embedding_and_additions_make_the_stream(config: c.Config, seed: int) -> None:
    """Pre-norm, sandwich, output and parallel: nothing else ever touches the stream."""
    model = build_randomized_model(config, torch.float64, seed)
    tokens = random_tokens(config, 2, SEQ_LEN, seed)
    sums: dict[str, torch.Tensor] = {}
    ends: dict[str, torch.Tensor] = {}
    hooks = []
    for name, stack in model.stacks.items():
        if isinstance(config.stacks[name].placement, c.PostNorm):
            continue
        add = lambda m, i, o, name=name: sums.__setitem__(name, sums.get(name, 0) + o)  # noqa: E731
        hooks.append(stack.embed.register_forward_hook(add))
        for branch in {
            b for block in stack.blocks for b in (block.attn, getattr(block, "cross", None), block.ffn) if b is not None
        }:
            hooks.append(branch.register_forward_hook(add))
        hooks.append(stack.final_norm.register_forward_pre_hook(lambda m, i, name=name: ends.__setitem__(name, i[0])))
    compute_logits(model, config, tokens)
    assert sums.keys() == ends.keys()
    for name in sums:
        assert (sums[name] - ends[name]).abs().max() <= tolerance(torch.float64, ends[name])
