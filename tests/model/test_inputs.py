"""Error messages for invalid model inputs, with the argument, its value and the limit."""

import pytest
import torch

from cutaway import config as c
from cutaway.errors import InputError, KernelError
from cutaway.model import build

pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def gpt() -> torch.nn.Module:
    return build(c.config("tiny-gpt"), seed=0)


@pytest.fixture(scope="module")
def seq2seq() -> torch.nn.Module:
    return build(c.config("tiny-t5"), seed=0)


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.long)


def test_invalid_tokens_are_errors(gpt: torch.nn.Module) -> None:
    vocab = gpt.config.vocab_size
    for bad, message in [
        (torch.tensor([[0, vocab]]), f"tokens holds {vocab}; the vocabulary has {vocab} ids, so pass 0 to {vocab - 1}"),
        (torch.tensor([[0, -1]]), "tokens holds -1"),
        (ids(3), r"tokens has shape \(3,\); it must be \(batch, length\); add the batch with tokens\[None\]"),
        (ids(1, 2, 3), r"tokens has shape \(1, 2, 3\)"),
        (ids(1, 0), "at least one token"),
        (ids(0, 4), "at least one row"),
        (torch.zeros(1, 4), "tokens has dtype torch.float32; token ids are integers"),
    ]:
        with pytest.raises(InputError, match=message):
            gpt(bad)


def test_other_integer_dtypes_are_accepted(gpt: torch.nn.Module) -> None:
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(gpt(tokens.to(torch.int32)), gpt(tokens))
        assert torch.equal(gpt(tokens.to(torch.uint8)), gpt(tokens))


def test_invalid_masks_are_errors(gpt: torch.nn.Module) -> None:
    for bad, message in [
        (torch.ones(1, 5, dtype=torch.bool), r"mask has shape \(1, 5\); it must be the tokens' shape, \(1, 4\)"),
        (torch.ones(1, 4), r"mask has dtype torch.float32; it must be bool, False for padding: pass mask.bool\(\)"),
    ]:
        with pytest.raises(InputError, match=message):
            gpt(ids(1, 4), bad)


def test_errors_name_the_argument(seq2seq: torch.nn.Module) -> None:
    with pytest.raises(InputError, match="source_mask has shape"):
        seq2seq(ids(1, 4), ids(1, 2), torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(InputError, match="target_mask has dtype"):
        seq2seq(ids(1, 4), ids(1, 2), None, ids(1, 2))
    with pytest.raises(InputError, match="source holds 99999"):
        seq2seq(ids(1, 4) + 99999, ids(1, 2))
    with pytest.raises(InputError, match="source has 1 rows and target 2"):
        seq2seq(ids(1, 4), ids(2, 2))
    with pytest.raises(InputError, match="source is None"):
        seq2seq(None, ids(1, 2))


def test_sequence_longer_than_learned_positions_is_an_error(gpt: torch.nn.Module) -> None:
    limit = gpt.config.decoder.embedding.position.length
    with pytest.raises(InputError, match=f"needs position {limit}, but the model has positions 0 to {limit - 1} only"):
        gpt(ids(1, limit + 1))
    mask = torch.ones(1, limit + 1, dtype=torch.bool)
    mask[:, 0] = False
    with torch.no_grad():
        assert torch.isfinite(gpt(ids(1, limit + 1), mask)).all()


def test_sequence_longer_than_the_cache_is_an_error(gpt: torch.nn.Module) -> None:
    cache = gpt.new_cache(1, 4)
    with torch.no_grad():
        gpt(ids(1, 3), cache=cache)
        with pytest.raises(InputError, match="the cache has 4 slots, 3 of them used: 2 more tokens do not fit"):
            gpt(ids(1, 2), cache=cache)
        gpt(ids(1, 1), cache=cache)
        with pytest.raises(InputError, match="tokens has 2 rows, but the cache has 1"):
            gpt(ids(2, 1), cache=cache)


def test_failed_call_leaves_the_cache_unchanged(gpt: torch.nn.Module) -> None:
    """The cache does not count tokens that exceed the learned positions."""
    limit = gpt.config.decoder.embedding.position.length
    cache = gpt.new_cache(1, limit + 8)
    with torch.no_grad():
        gpt(ids(1, limit - 1), cache=cache)
        with pytest.raises(InputError, match="but the model has positions 0 to"):
            gpt(ids(1, 2), cache=cache)
        assert cache.max_len == limit - 1
        assert int(cache.seq_lens) == limit - 1
        gpt(ids(1, 1), cache=cache)


def test_encoder_decoder_cache_holds_one_source(seq2seq: torch.nn.Module) -> None:
    cache = seq2seq.new_cache(1, 4)
    with torch.no_grad():
        seq2seq(ids(1, 4), ids(1, 2), cache=cache)
        with pytest.raises(InputError, match="already holds a source"):
            seq2seq(ids(1, 4), ids(1, 1), cache=cache)
        seq2seq(None, ids(1, 1), cache=cache)


def test_encoder_has_no_logits_without_head_and_no_continuation() -> None:
    bert = build(
        c.config("bert-base").replace(encoder=c.config("tiny-bert").encoder, d_model=c.config("tiny-bert").d_model),
        seed=0,
    )
    with pytest.raises(InputError, match="no LM head"):
        bert(ids(1, 4))
    cache = bert.new_cache(1, 8)
    with torch.no_grad():
        bert.encode(ids(1, 4), cache=cache)
        with pytest.raises(InputError, match="cannot continue a sequence"):
            bert.encode(ids(1, 1), cache=cache)


def test_invalid_token_types_are_errors(gpt: torch.nn.Module) -> None:
    with pytest.raises(InputError, match="no token types"):
        gpt(ids(1, 4), token_types=ids(1, 4))
    bert = build(c.config("tiny-bert"), seed=0)
    with pytest.raises(InputError, match="token_types holds 7"):
        bert.encode(ids(1, 4), token_types=ids(1, 4) + 7)


def test_unknown_kernel_and_mode_are_errors(gpt: torch.nn.Module) -> None:
    with pytest.raises(KernelError, match="unknown kernel 'flash'; use one of auto, sdpa, explicit, flex"):
        gpt.use_kernel("flash")
    with pytest.raises(
        InputError, match="unknown activation checkpointing mode 'half'; use one of none, selective, full"
    ):
        gpt.use_activation_checkpointing("half")


@torch.no_grad()
def test_positions_must_increase() -> None:
    """The causal mask compares positions, so they must increase."""
    llama = build(c.config("tiny-llama"), seed=0)
    for bad in ([[0, 1, 2, 0, 1, 2]], [[3, 3, 3, 3, 3, 3]], [[5, 4, 3, 2, 1, 0]]):
        with pytest.raises(InputError, match="positions do not increase"):
            llama(ids(1, 6), positions=torch.tensor(bad))
    with pytest.raises(InputError, match="positions holds -1"):
        llama(ids(1, 3), positions=torch.tensor([[-1, 0, 1]]))
    llama(ids(1, 6), positions=torch.tensor([[0, 1, 2, 0, 1, 2]]), document_ids=torch.tensor([[4, 4, 4, 7, 7, 7]]))
    mask = torch.tensor([[False, True, True]])
    llama(ids(1, 3), mask, positions=torch.tensor([[9, 0, 1]]))
    llama(ids(1, 3), positions=torch.tensor([[4, 90, 1000]]))


def test_meta_models_return_shapes() -> None:
    for name in ("tiny-moe", "tiny-mla", "tiny-gpt"):
        model = build(name, device="meta")
        out = model(torch.zeros(2, 5, dtype=torch.long, device="meta"))
        assert out.shape == (2, 5, model.config.vocab_size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": "a"}, "seed is 'a'"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"dtype": torch.int8}, "dtype is torch.int8; use one of torch.float32"),
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"device": "nope"}, "device 'nope' is not available"),
    ],
)
def test_invalid_build_arguments_are_errors(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build("tiny-gpt", **arguments)


def test_invalid_prefix_lengths_are_errors(gpt: torch.nn.Module) -> None:
    for bad in (3, [1, 2], torch.tensor([1.0, 2.0]), torch.tensor([1]), torch.tensor([[1], [2]])):
        with pytest.raises(InputError, match=r"prefix_lengths (must be a tensor of shape|has dtype)"):
            gpt(ids(2, 4), prefix_lengths=bad)
    for bad in ([-1, 0], [0, 5]):
        with pytest.raises(InputError, match="prefix_lengths holds"):
            gpt(ids(2, 4), prefix_lengths=torch.tensor(bad))


def test_invalid_caches_are_errors(gpt: torch.nn.Module) -> None:
    with pytest.raises(InputError, match="cache is a str"):
        gpt(ids(1, 4), cache="x")
    with pytest.raises(InputError, match="allocated for another model"):
        gpt(ids(1, 4), cache=build("tiny-llama", seed=0).new_cache(1, 8))
    for batch, length in ((0, 5), (2, -1), ("2", 5), (2.0, 5), (True, 5)):
        with pytest.raises(InputError, match="pass an integer of at least 1"):
            gpt.new_cache(batch, length)
    with pytest.raises(InputError, match=r"dtype is torch\.int8"):
        gpt.new_cache(1, 4, dtype=torch.int8)


def test_arguments_of_the_wrong_type_are_errors(gpt: torch.nn.Module, seq2seq: torch.nn.Module) -> None:
    for call in (
        lambda: gpt([[1, 2]]),
        lambda: gpt(None),
        lambda: seq2seq(5, ids(1, 2)),
        lambda: seq2seq(ids(1, 2), None),
    ):
        with pytest.raises(InputError, match="pass a tensor of token ids"):
            call()
    with pytest.raises(InputError, match="mask is a list"):
        gpt(ids(1, 2), [[True, True]])
    with pytest.raises(KernelError, match=r"unknown kernel \['sdpa'\]"):
        gpt.use_kernel(["sdpa"])
