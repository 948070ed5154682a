"""KV cache: crop, ragged rows, dtypes, LongRoPE, failed calls."""

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
def test_crop_discards_tokens(model: Transformer) -> None:
    tokens = random_tokens(model.config, 2, 10, 0)
    full = model(tokens)
    cache = model.new_cache(2, 10)
    model(tokens[:, :6], cache=cache)
    model((tokens[:, 6:9] + 1) % 256, cache=cache)  # rejected draft tokens
    cache.crop(6)
    assert (model(tokens[:, 6:], cache=cache) - full[:, 6:]).abs().max() <= tolerance(torch.float64, full)


@torch.no_grad()
def test_crop_per_row_frees_slots(model: Transformer) -> None:
    """As in speculative decoding: each step adds four tokens and keeps two or three; only kept tokens need slots."""
    tokens = random_tokens(model.config, 2, 24, 1)
    full = model(tokens)
    cache = model.new_cache(2, 24)
    num_accepted = torch.tensor([0, 0])
    while int(num_accepted.max()) < 20:
        columns = num_accepted.unsqueeze(-1) + torch.arange(4)
        out = model(tokens.gather(1, columns), cache=cache)
        for row in range(2):
            expected = full[row, columns[row]]
            assert (out[row] - expected).abs().max() <= tolerance(torch.float64, full)
        num_accepted = num_accepted + torch.tensor([2, 3])
        cache.crop(num_accepted)


@torch.no_grad()
def test_ragged_chunks_use_every_slot(model: Transformer) -> None:
    tokens = random_tokens(model.config, 2, 9, 2)
    full = model(tokens)
    cache = model.new_cache(2, 9)
    mask = torch.tensor([[True, True, True], [True, False, True]])
    outputs = [[], []]
    offsets = [0, 0]
    while min(offsets) < 7 and max(offsets) <= 6:
        chunk = torch.zeros(2, 3, dtype=torch.long)
        for row in range(2):
            chunk[row, mask[row]] = tokens[row, offsets[row] : offsets[row] + int(mask[row].sum())]
        out = model(chunk, mask, cache=cache)
        for row in range(2):
            outputs[row].append(out[row, mask[row]])
            offsets[row] += int(mask[row].sum())
    for row in range(2):
        row_out = torch.cat(outputs[row])
        assert (row_out - full[row, : len(row_out)]).abs().max() <= tolerance(torch.float64, full)


@torch.no_grad()
def test_cache_dtype_may_differ(model: Transformer) -> None:
    tokens = random_tokens(model.config, 1, 8, 0)
    cache = model.new_cache(1, 8, dtype=torch.float32)
    out = torch.cat([model(tokens[:, :5], cache=cache), model(tokens[:, 5:], cache=cache)], 1)
    assert out.dtype == torch.float64
    assert (out - model(tokens)).abs().max() < 1e-4


def test_invalid_crop_is_an_error(model: Transformer) -> None:
    cache = model.new_cache(2, 4)
    with pytest.raises(InputError, match="max_length is -1"):
        cache.crop(-1)
    with pytest.raises(InputError, match=r"max_length has shape \(3,\)"):
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
def test_longrope_cache_cannot_grow_past_original_length() -> None:
    model = longrope_model()
    tokens = random_tokens(model.config, 2, 14, 0)
    for seq_len, prompt_len in ((8, 3), (14, 10)):
        full = model(tokens[:, :seq_len])
        cache = model.new_cache(2, 20)
        outputs = [model(tokens[:, :prompt_len], cache=cache)]
        outputs += [model(tokens[:, i : i + 1], cache=cache) for i in range(prompt_len, seq_len)]
        if seq_len == 8:
            assert (torch.cat(outputs, 1) - full).abs().max() <= tolerance(torch.float64, full)
            with pytest.raises(InputError, match="row 0 of the cache would grow past 8 tokens, where LongRoPE"):
                model(tokens[:, 8:9], cache=cache)
            assert cache.max_len == 8
        else:
            assert (torch.cat(outputs, 1) - full).abs().max() <= tolerance(torch.float64, full)


@torch.no_grad()
def test_longrope_padded_and_packed_rows_select_their_own_frequencies() -> None:
    model = longrope_model()
    tokens = random_tokens(model.config, 2, 14, 0)
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[1, :8] = False  # row 0 is beyond original_length, row 1 is not
    padded = model(tokens, mask)
    assert (padded[0] - model(tokens[:1])[0]).abs().max() <= 1e-10
    assert (padded[1, 8:] - model(tokens[1:, 8:])[0]).abs().max() <= 1e-10
    documents = torch.tensor([[0] * 10 + [1] * 4])
    packed = model(tokens[:1], document_ids=documents)
    assert (packed[:, :10] - model(tokens[:1, :10])).abs().max() <= 1e-10
    assert (packed[:, 10:] - model(tokens[:1, 10:])).abs().max() <= 1e-10


@torch.no_grad()
def test_failed_step_can_be_repeated(model: Transformer) -> None:
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
def test_invalid_target_leaves_the_cache_empty() -> None:
    seq2seq = build_randomized_model(c.config("tiny-t5"), torch.float64)
    source, target = random_tokens(seq2seq.config, 2, 5, 0), random_tokens(seq2seq.config, 2, 4, 1)
    cache = seq2seq.new_cache(2, 4)
    with pytest.raises(InputError, match="target holds"):
        seq2seq(source, target + 99999, cache=cache)
    full = seq2seq(source, target)
    assert (seq2seq(source, target, cache=cache) - full).abs().max() <= tolerance(torch.float64, full)


def test_cache_records_no_gradients(model: Transformer) -> None:
    tokens = random_tokens(model.config, 1, 4, 0)
    cache = model.new_cache(1, 4)
    for i in range(4):
        assert not model(tokens[:, i : i + 1], cache=cache).requires_grad
    assert not cache.layers[0].k.requires_grad
    assert not model.hidden_states(tokens, cache=model.new_cache(1, 4)).requires_grad
    assert model(tokens).requires_grad
