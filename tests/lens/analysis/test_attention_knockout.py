"""Attention knockout: equal to masking the token for one query, and without effect on tokens that are masked anyway."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.config_strategies import SEEDS, build_randomized_model, configs, random_tokens, tolerance

import cutaway as ct
import cutaway.config as c
from cutaway.errors import InputError
from cutaway.lens.analysis import attention_knockout
from cutaway.lens.analysis.attention_knockout import knocked_out_logits
from cutaway.lens.analysis.inputs import prepare_inputs


@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-llama", "tiny-bert"])
@torch.no_grad()
def test_knockout_equals_a_score_of_minus_infinity(preset: str) -> None:
    """Zero weights with renormalization equal a mask of one query and key before the softmax, in all blocks."""
    config = ct.config(preset)
    model, tokens, position = build_randomized_model(config, torch.float64), random_tokens(config, 1, 7, 0), 4
    logits = knocked_out_logits(prepare_inputs(model, tokens, None), position, to_source=False, progress=False)
    for key in range(7):

        def mask(scores: torch.Tensor, key: int = key) -> torch.Tensor:
            scores[:, :, position, key] = -torch.inf
            return scores

        with ct.edit(model, {"blocks.*.attn.scores": mask}):
            expected = model(tokens)[0, position]
        assert (logits[key] - expected).abs().max() < 1e-5
        is_masked_anyway = config.form == "decoder" and key > position
        assert ((expected - model(tokens)[0, position]).abs().max() < 1e-5) == is_masked_anyway


@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-llama", "tiny-bert"])
@torch.no_grad()
def test_joint_knockout_equals_scores_of_minus_infinity(preset: str) -> None:
    """A set of keys is knocked out in one forward pass; a set without a visible key has no effect."""
    config = ct.config(preset)
    model, tokens, position = build_randomized_model(config, torch.float64), random_tokens(config, 1, 7, 0), 4
    inputs, key_sets = prepare_inputs(model, tokens, None), [[1, 3], [5, 6], [0, 2, 6], [], [4]]
    logits = knocked_out_logits(inputs, position, to_source=False, progress=False, key_sets=key_sets)
    assert logits.shape == (len(key_sets), config.vocab_size)
    for row, keys in zip(logits, key_sets, strict=True):

        def mask(scores: torch.Tensor, keys: list[int] = keys) -> torch.Tensor:
            scores[:, :, position, keys] = -torch.inf
            return scores

        with ct.edit(model, {"blocks.*.attn.scores": mask}):
            expected = model(tokens)[0, position]
        assert (row - expected).abs().max() < 1e-5
    single = knocked_out_logits(inputs, position, to_source=False, progress=False)
    assert (logits[4] - single[4]).abs().max() < 1e-5


@given(config=configs(forms=("decoder", "encoder-decoder")), seed=SEEDS, position=st.integers(0, 6))
def test_knockout_with_a_cache_equals_that_of_the_whole_text(config: c.Config, seed: int, position: int) -> None:
    model, tokens = build_randomized_model(config, torch.float64, seed), random_tokens(config, 1, 7, seed)
    source = random_tokens(config, 1, 5, seed, "source") if config.form == "encoder-decoder" else None
    inputs = prepare_inputs(model, tokens, source)
    for to_source in (False, True)[: 1 if source is None else 2]:
        logits = knocked_out_logits(inputs, position, to_source=to_source, progress=False)
        expected = knocked_out_logits(inputs, position, to_source=to_source, progress=False, use_cache=False)
        assert (logits - expected).abs().max() < tolerance(torch.float64, expected)
        options: Any = {"to_source": to_source, "progress": False, "key_sets": [[0, 2], [1, 3, 4]]}
        logits = knocked_out_logits(inputs, position, **options)
        expected = knocked_out_logits(inputs, position, **options, use_cache=False)
        assert (logits - expected).abs().max() < tolerance(torch.float64, expected)


def test_name_is_copied_from_its_first_occurrence() -> None:
    """In tiny-english, the second name of a story depends on the attention to its first occurrence."""
    story = "Once upon a time, there was a girl named Sue. She had a friend named Ben. One day, Sue and"
    result = attention_knockout(ct.load("tiny-english", dtype=torch.float32), story, " Ben", progress=False)
    effect = result.select(metric="log probability")
    (token, change), *_ = sorted(zip(result.labels[0], effect.values.tolist(), strict=True), key=lambda row: row[1])
    assert "Ben" in token
    assert change < -2
    assert float(result.select(metric="top-1 changes").values[result.labels[0].index(token)]) == 1


def test_cross_attention_knockout_of_the_month_changes_the_month() -> None:
    checkpoint = ct.load("tiny-dates", dtype=torch.float32)
    target = [checkpoint.tokenizer.bos_token_id, *checkpoint.tokenizer.encode("1832-", add_special_tokens=False)]
    result = attention_knockout(checkpoint, target, source="12 Nisan 1832", to_source=True, progress=False)
    changes = dict(zip(result.labels[0], result.select(metric="log probability").values.tolist(), strict=True))
    assert "Nisan" in min(changes, key=lambda token: changes[token])
    with pytest.raises(InputError, match="to_source is set, but the model has no cross-attention"):
        attention_knockout(ct.load("tiny-english"), "The cat", to_source=True)
