"""The cache's own promises: steps taken back, rows of any length, dtypes, and where it must refuse."""

import pytest
import torch
from support.config_strategies import build_randomized_model, random_tokens, tolerance

from cutaway import config as c
from cutaway.errors import InputError
from cutaway.model import Transformer


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build_randomized_model(c.config("tiny-llama"), torch.float64)


@torch.no_grad()
def test_rewinding_forgets(model: Transformer) -> None:
    tokens = random_tokens(model.config, 2, 10, 0)
    full = model(tokens)
    cache = model.new_cache(2, 10)
    model(tokens[:, :6], cache=cache)
    model((tokens[:, 6:9] + 1) % 256, cache=cache)  # a wrong guess
    cache.crop(6)
    assert (model(tokens[:, 6:], cache=cache) - full[:, 6:]).abs().max() <= tolerance(torch.float64, full)


@torch.no_grad()
def test_rewinding_row_by_row_for_longer_than_the_guesses(model: Transformer) -> None:
    """Speculation: each round reads four guesses and keeps some; the slots must last for the kept tokens alone."""
    tokens = random_tokens(model.config, 2, 24, 1)
    full = model(tokens)
    cache = model.new_cache(2, 24)
    kept = torch.tensor([0, 0])
    while int(kept.max()) < 20:
        columns = kept.unsqueeze(-1) + torch.arange(4)
        out = model(tokens.gather(1, columns), cache=cache)
        for row in range(2):
            expected = full[row, columns[row]]
            assert (out[row] - expected).abs().max() <= tolerance(torch.float64, full)
        kept = kept + torch.tensor([2, 3])
        cache.crop(kept)


@torch.no_grad()
def test_ragged_chunks_fill_every_slot(model: Transformer) -> None:
    tokens = random_tokens(model.config, 2, 9, 2)
    full = model(tokens)
    cache = model.new_cache(2, 9)
    mask = torch.tensor([[True, True, True], [True, False, True]])
    seen = [[], []]
    at = [0, 0]
    while min(at) < 7 and max(at) <= 6:
        piece = torch.zeros(2, 3, dtype=torch.long)
        for row in range(2):
            piece[row, mask[row]] = tokens[row, at[row] : at[row] + int(mask[row].sum())]
        out = model(piece, mask, cache=cache)
        for row in range(2):
            seen[row].append(out[row, mask[row]])
            at[row] += int(mask[row].sum())
    for row in range(2):
        got = torch.cat(seen[row])
        assert (got - full[row, : len(got)]).abs().max() <= tolerance(torch.float64, full)


@torch.no_grad()
def test_a_cache_of_another_dtype_serves(model: Transformer) -> None:
    tokens = random_tokens(model.config, 1, 8, 0)
    cache = model.new_cache(1, 8, dtype=torch.float32)
    out = torch.cat([model(tokens[:, :5], cache=cache), model(tokens[:, 5:], cache=cache)], 1)
    assert out.dtype == torch.float64
    assert (out - model(tokens)).abs().max() < 1e-4


def test_what_rewind_refuses(model: Transformer) -> None:
    cache = model.new_cache(2, 4)
    with pytest.raises(InputError, match="max_length is -1"):
        cache.crop(-1)
    with pytest.raises(InputError, match=r"length has shape \(3,\)"):
        cache.crop(torch.tensor([1, 2, 3]))


def longrope_model() -> Transformer:
    factors = {"short_factors": [1.0] * 4, "long_factors": [3.0, 4.0, 5.0, 6.0], "original_length": 8}
    position = {"kind": "rope", "scaling": {"kind": "longrope", **factors}}
    block = {"attention": {"heads": 2, "position": position}}
    stack = {"layers": 2, "block": block}
    return build_randomized_model(
        c.config({"form": "decoder", "vocab_size": 31, "d_model": 16, "decoder": stack}), torch.float64
    )


@torch.no_grad()
def test_longrope_is_right_on_either_side_of_its_switch_and_refuses_to_cross() -> None:
    model = longrope_model()
    tokens = random_tokens(model.config, 2, 14, 0)
    for whole, start in ((8, 3), (14, 10)):
        full = model(tokens[:, :whole])
        cache = model.new_cache(2, 20)
        pieces = [model(tokens[:, :start], cache=cache)]
        pieces += [model(tokens[:, i : i + 1], cache=cache) for i in range(start, whole)]
        if whole == 8:
            assert (torch.cat(pieces, 1) - full).abs().max() <= tolerance(torch.float64, full)
            with pytest.raises(InputError, match="row 0 of the cache would grow past 8 tokens, where LongRoPE"):
                model(tokens[:, 8:9], cache=cache)
            assert cache.max_len == 8
        else:
            assert (torch.cat(pieces, 1) - full).abs().max() <= tolerance(torch.float64, full)


@torch.no_grad()
def test_length_dependent_rope_is_padded_alone_and_packed_separate_beyond_the_original_length() -> None:
    model = longrope_model()
    tokens = random_tokens(model.config, 2, 14, 0)
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[1, :8] = False  # row 0 is long, row 1 short
    padded = model(tokens, mask)
    assert (padded[0] - model(tokens[:1])[0]).abs().max() <= 1e-10
    assert (padded[1, 8:] - model(tokens[1:, 8:])[0]).abs().max() <= 1e-10
    documents = torch.tensor([[0] * 10 + [1] * 4])
    packed = model(tokens[:1], document_ids=documents)
    assert (packed[:, :10] - model(tokens[:1, :10])).abs().max() <= 1e-10
    assert (packed[:, 10:] - model(tokens[:1, 10:])).abs().max() <= 1e-10


@torch.no_grad()
def test_a_step_that_fails_can_be_taken_again(model: Transformer) -> None:
    tokens = random_tokens(model.config, 2, 6, 0)
    full = model(tokens)
    cache = model.new_cache(2, 6)
    model(tokens[:, :4], cache=cache)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.decoder.blocks[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(tokens[:, 4:], cache=cache)
    hook.remove()
    assert (model(tokens[:, 4:], cache=cache) - full[:, 4:]).abs().max() <= tolerance(torch.float64, full)


@torch.no_grad()
def test_a_refused_target_leaves_the_source_unread() -> None:
    seq2seq = build_randomized_model(c.config("tiny-t5"), torch.float64)
    source, target = random_tokens(seq2seq.config, 2, 5, 0), random_tokens(seq2seq.config, 2, 4, 1)
    cache = seq2seq.new_cache(2, 4)
    with pytest.raises(InputError, match="target holds the id"):
        seq2seq(source, target + 99999, cache=cache)
    full = seq2seq(source, target)
    assert (seq2seq(source, target, cache=cache) - full).abs().max() <= tolerance(torch.float64, full)


def test_a_cache_keeps_no_graph(model: Transformer) -> None:
    tokens = random_tokens(model.config, 1, 4, 0)
    cache = model.new_cache(1, 4)
    for i in range(4):
        assert not model(tokens[:, i : i + 1], cache=cache).requires_grad
    assert not cache.layers[0].k.requires_grad
    assert not model.hidden_states(tokens, cache=model.new_cache(1, 4)).requires_grad
    assert model(tokens).requires_grad
