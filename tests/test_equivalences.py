"""Two ways to the same numbers, over randomly drawn configurations: fp32 to 1e-5 and fp64 to 1e-10."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, LENGTH, SEEDS, bound, configs, lively, logits, ragged, tokens_for

from cutaway import config as c
from cutaway.errors import KernelError


@given(config=configs(), dtype=DTYPES, seed=SEEDS, side=st.sampled_from([None, "left", "right"]))
@torch.no_grad()
def test_kernels_agree(config: c.Config, dtype: torch.dtype, seed: int, side: str | None) -> None:
    model = lively(config, dtype, seed)
    tokens = tokens_for(config, 3, LENGTH, seed)
    mask = None if side is None else ragged(3, LENGTH, side)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    reference = logits(model.use_kernel("explicit"), config, tokens, mask)
    assert torch.isfinite(reference).all()
    heads = [b.attention for s in config.stacks.values() for b in s.blocks] + [
        b.cross for s in config.stacks.values() for b in s.blocks if hasattr(b, "cross")
    ]
    if any(getattr(a, "softcap", None) or getattr(a, "sink", False) for a in heads):
        with pytest.raises(KernelError, match="cannot compute"):
            model.use_kernel("sdpa")
        model.use_kernel("auto")
    else:
        model.use_kernel("sdpa")
    assert (logits(model, config, tokens, mask) - reference)[real].abs().max() <= bound(dtype, reference)


@given(
    config=configs(),
    dtype=DTYPES,
    seed=SEEDS,
    cuts=st.sets(st.integers(1, LENGTH - 1)),
    side=st.sampled_from([None, "left", "right"]),
)
@torch.no_grad()
def test_cached_is_full(config: c.Config, dtype: torch.dtype, seed: int, cuts: set[int], side: str | None) -> None:
    """Whole, in chunks, token by token; with padding inside the chunks, which then shifts nothing."""
    model = lively(config, dtype, seed)
    tokens = tokens_for(config, 3, LENGTH, seed)
    mask = None if side is None else ragged(3, LENGTH, side)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    full = logits(model, config, tokens, mask)
    ways = (
        [[0, LENGTH]]
        if config.form == "encoder"
        else [[0, LENGTH], [0, *sorted(cuts), LENGTH], list(range(LENGTH + 1))]
    )
    for borders in ways:
        widest = max(b - a for a, b in pairwise(borders))
        for fixed, chunk in ((False, None), (True, None), (False, widest), (True, widest)):  # with a chunk: in rings
            cache = model.new_cache(3, LENGTH + 3, chunk=chunk)
            cache.fixed = fixed
            pieces = [
                logits(model, config, tokens[:, a:b], None if mask is None else mask[:, a:b], cache=cache)
                for a, b in pairwise(borders)
            ]
            assert (torch.cat(pieces, 1) - full)[real].abs().max() <= bound(dtype, full)


@given(config=configs(), dtype=DTYPES, seed=SEEDS, side=st.sampled_from(["left", "right"]))
@torch.no_grad()
def test_padded_is_alone(config: c.Config, dtype: torch.dtype, seed: int, side: str) -> None:
    model = lively(config, dtype, seed)
    tokens = tokens_for(config, 4, LENGTH, seed)
    mask = ragged(4, LENGTH, side)
    source = tokens_for(config, 4, LENGTH, seed + 1, "source")
    two = config.form == "encoder-decoder"
    padded = model(source, tokens, mask, mask) if two else model(tokens, mask)
    for row in range(4):
        here = mask[row]
        alone = (
            model(source[row : row + 1, here], tokens[row : row + 1, here])
            if two
            else model(tokens[row : row + 1, here])
        )
        assert (padded[row, here] - alone[0]).abs().max() <= bound(dtype, alone)


@given(
    config=configs(("decoder", "encoder")), dtype=DTYPES, seed=SEEDS, cut=st.integers(1, LENGTH - 1), pad=st.booleans()
)
@torch.no_grad()
def test_packed_is_separate(config: c.Config, dtype: torch.dtype, seed: int, cut: int, pad: bool) -> None:
    model = lively(config, dtype, seed)
    tokens = tokens_for(config, 1, LENGTH, seed)
    documents = (torch.arange(LENGTH) >= cut).long().unsqueeze(0) * 5 + 2
    mask = None
    if pad:
        mask = torch.ones(1, LENGTH, dtype=torch.bool)
        mask[:, -1] = False
    packed = model(tokens, mask, documents=documents)
    for part in (slice(0, cut), slice(cut, LENGTH - pad)):
        if part.stop > part.start:
            alone = model(tokens[:, part])
            assert (packed[:, part] - alone).abs().max() <= bound(dtype, alone)


@given(config=configs(("decoder",)), seed=SEEDS, size=st.integers(0, LENGTH))
@torch.no_grad()
def test_prefix_sees_itself_whole(config: c.Config, seed: int, size: int) -> None:
    """With no prefix it is the causal model; with one, tokens behind the prefix change nothing before them."""
    model = lively(config, torch.float64, seed)
    tokens = tokens_for(config, 2, LENGTH, seed)
    causal = model(tokens)
    lengths = torch.tensor([0, size])
    out = model(tokens, prefix=lengths)
    assert (out[0] - causal[0]).abs().max() <= bound(torch.float64, causal)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % config.vocab_size
    difference = (model(changed, prefix=lengths) - out).abs().amax(-1)
    unseen = LENGTH - 1 if size < LENGTH else 0
    assert difference[1, :unseen].sum() <= 1e-12


@given(config=configs(("decoder",), ("none",), ("none", "rope")), dtype=DTYPES, seed=SEEDS, shift=st.integers(1, 1000))
@torch.no_grad()
def test_rope_knows_distances_only(config: c.Config, dtype: torch.dtype, seed: int, shift: int) -> None:
    """All positions moved by the same amount: the logits stay, in every scaling (their lengths kept on one side)."""
    for block in config.decoder.blocks:
        if isinstance(getattr(block.attention.position, "scaling", None), c.DynamicNTK | c.LongRope):
            return
    model = lively(config, dtype, seed)
    tokens = tokens_for(config, 2, LENGTH, seed)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    here, there = (model(tokens, positions=positions + moved) for moved in (0, shift))
    # fp32 angles at position 1000 are exact to 6e-5
    limit = bound(dtype, here) if dtype == torch.float64 else 2e-2 * max(1.0, float(here.abs().max()))
    assert (here - there).abs().max() <= max(limit, 1e-9)


@given(
    config=configs(("encoder",), ("none",), ("none",)), dtype=DTYPES, seed=SEEDS, order=st.permutations(range(LENGTH))
)
@torch.no_grad()
def test_without_positions_order_means_nothing(
    config: c.Config, dtype: torch.dtype, seed: int, order: list[int]
) -> None:
    if any(block.attention.window for block in config.encoder.blocks):
        return  # a window is a kind of position
    model = lively(config, dtype, seed)
    tokens = tokens_for(config, 2, LENGTH, seed)
    straight = model(tokens)
    assert (model(tokens[:, order]) - straight[:, order]).abs().max() <= bound(dtype, straight)


@given(config=configs(("decoder",), inside=("rope", "alibi")), dtype=DTYPES, seed=SEEDS)
@torch.no_grad()
def test_gqa_is_mha_with_repeated_keys(config: c.Config, dtype: torch.dtype, seed: int) -> None:
    def widened(block: c.Block) -> c.Block:
        attention = block.attention
        grouped = isinstance(attention, c.MultiHead)
        return block.replace(attention=attention.replace(kv_heads=attention.heads)) if grouped else block

    stack = config.decoder
    pattern, lead = (tuple(map(widened, blocks)) for blocks in (stack.block, stack.lead))
    wide = lively(config.replace(decoder=stack.replace(block=pattern, lead=lead)), dtype, seed)
    grouped = lively(config, dtype, seed)
    weights, shapes = grouped.state_dict(), {name: tensor.shape for name, tensor in wide.state_dict().items()}
    for name, tensor in weights.items():
        if tensor.shape != shapes[name]:  # a key or value matrix, bias or norm: repeat each head for its group
            attention = wide.get_submodule(name[: name.index(".attn.f.") + 7])
            rest = () if "norm" in name else tensor.shape[1:]
            by_head = tensor.reshape(-1, attention.d_head, *rest)
            weights[name] = by_head.repeat_interleave(shapes[name].numel() // tensor.numel(), 0).reshape(shapes[name])
    wide.load_state_dict(weights)
    tokens = tokens_for(config, 2, LENGTH, seed)
    full = grouped(tokens)
    assert (wide(tokens) - full).abs().max() <= bound(dtype, full)


@given(config=configs(), seed=SEEDS)
def test_checkpointing_changes_no_bit(config: c.Config, seed: int) -> None:
    model = lively(config, torch.float32, seed).train()
    tokens = tokens_for(config, 2, LENGTH, seed)
    seen = {}
    for mode in ("none", "selective", "full"):
        model.use_recompute(mode).zero_grad()
        out = logits(model, config, tokens)
        out.square().mean().backward()
        seen[mode] = (out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None])
    for mode in ("selective", "full"):
        assert torch.equal(seen[mode][0], seen["none"][0])
        assert all(torch.equal(a, b) for a, b in zip(seen[mode][1], seen["none"][1], strict=True))


@given(config=configs(), seed=SEEDS)
@torch.no_grad()
def test_embedding_and_additions_make_the_stream(config: c.Config, seed: int) -> None:
    """Pre-norm, sandwich, output and parallel: nothing else ever touches the stream."""
    model = lively(config, torch.float64, seed)
    tokens = tokens_for(config, 2, LENGTH, seed)
    sums: dict[str, torch.Tensor] = {}
    ends: dict[str, torch.Tensor] = {}
    hooks = []
    for name, stack in model.stacks.items():
        if isinstance(config.stacks[name].placement, c.Post):
            continue
        add = lambda m, i, o, name=name: sums.__setitem__(name, sums.get(name, 0) + o)  # noqa: E731
        hooks.append(stack.embed.register_forward_hook(add))
        for branch in {
            b for block in stack.blocks for b in (block.attn, getattr(block, "cross", None), block.ffn) if b is not None
        }:
            hooks.append(branch.register_forward_hook(add))
        hooks.append(stack.final_norm.register_forward_pre_hook(lambda m, i, name=name: ends.__setitem__(name, i[0])))
    logits(model, config, tokens)
    assert sums.keys() == ends.keys()
    for name in sums:
        assert (sums[name] - ends[name]).abs().max() <= bound(torch.float64, ends[name])
