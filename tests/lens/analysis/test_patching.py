"""Activation patching and path patching equal single edits, and locate a fact that a model was trained on."""

from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens import edit, trace
from cutaway.lens.analysis import activation_patching, path_patching
from cutaway.model import Transformer

CLEAN, CORRUPTED = torch.arange(3, 11)[None], torch.tensor([[3, 4, 90, 6, 7, 8, 9, 10]])


@pytest.fixture(scope="module")
def model() -> Transformer:
    return ct.build("tiny-llama", seed=0, dtype=torch.float64)


def recovered_fraction(model: Transformer, answer: int, edits: Any) -> float:
    with torch.no_grad():
        clean, corrupted = (float(model(tokens)[0, -1, answer]) for tokens in (CLEAN, CORRUPTED))
        with edit(model, edits):
            return (float(model(CORRUPTED)[0, -1, answer]) - corrupted) / (clean - corrupted)


@pytest.mark.parametrize(("site", "heads"), [("resid_post", False), ("attn.out", False), ("attn.z", True)])
def test_each_cell_equals_a_single_edit(model: Transformer, site: str, heads: bool) -> None:
    result = activation_patching(model, CLEAN, CORRUPTED, 5, site=site, by_head=heads)
    with torch.no_grad(), trace(model, site) as t:
        model(CLEAN)
    for layer, index in ((0, 2), (3, 0), (1, 3)):
        name = f"blocks.{layer}.{site}"
        selection: Any = {"heads" if heads else "positions": [index]}
        value = t[name].select(2 if heads else 1, index).unsqueeze(2 if heads else 1)
        expected = recovered_fraction(model, 5, {name: {"do": "replace", "value": value, **selection}})
        assert float(result[layer, index]) == pytest.approx(expected, abs=1e-9)


def test_equal_tokens_score_0_and_the_last_resid_post_scores_1(model: Transformer) -> None:
    result = activation_patching(model, CLEAN, CORRUPTED, 5, incorrect_token=6).values
    assert result[:, :2].abs().max() < 1e-9
    assert float(result[-1, -1]) == pytest.approx(1, abs=1e-9)
    assert result[-1, :-1].abs().max() < 1e-9


def test_path_of_the_last_ffn_is_its_total_effect(model: Transformer) -> None:
    """Only the logits read the last FFN, so its direct path is its total effect."""
    result = path_patching(model, CLEAN, CORRUPTED, 5, "blocks.3.ffn.out")
    assert result.labels == (("logits",),)
    with torch.no_grad(), trace(model, "blocks.3.ffn.out") as t:
        model(CLEAN)
    total = recovered_fraction(model, 5, {"blocks.3.ffn.out": t["blocks.3.ffn.out"]})
    assert float(result.values[0]) == pytest.approx(total, abs=1e-9)


def test_path_from_all_heads_equals_path_from_attn_out(model: Transformer) -> None:
    """The path from all heads of a layer equals the path from the layer."""
    layer = path_patching(model, CLEAN, CORRUPTED, 5, "blocks.1.attn.out", receivers=["logits"])
    heads = path_patching(model, CLEAN, CORRUPTED, 5, "blocks.1.attn.z", receivers=["logits"], heads=range(4))
    assert float(heads.values[0]) == pytest.approx(float(layer.values[0]), abs=1e-9)


def test_invalid_experiments_are_errors(model: Transformer) -> None:
    with pytest.raises(InputError, match="texts of equal length"):
        activation_patching(model, CLEAN, CORRUPTED[:, :5], 5)
    with pytest.raises(InputError, match="same metric"):
        activation_patching(model, CLEAN, CLEAN, 5)
    with pytest.raises(InputError, match="no head axis"):
        activation_patching(model, CLEAN, CORRUPTED, 5, by_head=True)
    with pytest.raises(InputError, match="not one site that writes"):
        path_patching(model, CLEAN, CORRUPTED, 5, "attn.out")
    with pytest.raises(InputError, match="pass a receiver after the sender"):
        path_patching(model, CLEAN, CORRUPTED, 5, "blocks.3.ffn.out", receivers=["attn.out"])
    with pytest.raises(InputError, match="post-norm"):
        path_patching(ct.build("tiny-bert", seed=0), CLEAN, CORRUPTED, 5, "blocks.0.attn.out")


def train_on_one_fact() -> Transformer:
    """Train a model to predict, after the last token, the token that is mapped to the third one."""
    torch.manual_seed(0)
    model = ct.build("tiny-llama", seed=0).train()
    value_of_key = torch.randperm(20) + 30
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        tokens = torch.randint(60, 90, (64, 8))
        key = torch.randint(20, (64,))
        tokens[:, 2] = key
        loss = torch.nn.functional.cross_entropy(model(tokens)[:, -1], value_of_key[key])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    return model.eval()


@pytest.mark.nightly
def test_trained_fact_is_located() -> None:
    """In late layers the fact is at the last token, moved there by attention; ablating that layer removes it."""
    model = train_on_one_fact()
    clean, corrupted = torch.full((1, 8), 70), torch.full((1, 8), 70)
    clean[0, 2], corrupted[0, 2] = 4, 11
    with torch.no_grad():
        answer, other = (int(model(tokens)[0, -1].argmax()) for tokens in (clean, corrupted))
    assert answer != other
    resid_scores = activation_patching(model, clean, corrupted, answer, incorrect_token=other)
    assert resid_scores.values[0, 2] + resid_scores.values[0, -1] > 0.5
    assert float(resid_scores.values[-1, -1]) == pytest.approx(1, abs=1e-4)
    assert resid_scores.values[:, [0, 1]].abs().max() < 1e-4
    attn_scores = activation_patching(model, clean, corrupted, answer, incorrect_token=other, site="attn.out")
    moving_layer = int(attn_scores.values[:, -1].argmax())
    assert attn_scores.values[moving_layer, -1] > 0.3
    with torch.no_grad(), edit(model, {f"blocks.{moving_layer}.attn.pattern": "zero"}):
        ablated = model(clean)[0, -1]
    with torch.no_grad():
        baseline = model(clean)[0, -1]
    assert baseline[answer] - baseline[other] > 2 * abs(ablated[answer] - ablated[other])
