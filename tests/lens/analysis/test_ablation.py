"""Ablation and head ablation for all forms, and induction heads of the pretrained model."""

import pytest
import torch
import torch.nn.functional as F

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens import edit
from cutaway.lens.analysis import ablation, head_ablation, head_scores
from cutaway.model import Transformer

TOKENS = torch.arange(3, 15)[None]
PRESETS = ["tiny-gpt", "tiny-llama", "tiny-mla", "tiny-moe", "tiny-modernbert", "tiny-t5", "tiny-bart"]


@pytest.mark.parametrize("name", PRESETS)
def test_default_ablations_of_every_form(name: str) -> None:
    model = ct.build(name, seed=0, dtype=torch.float64)
    source = TOKENS.flip(-1) if len(model.stacks) > 1 else None
    result = ablation(model, TOKENS, source=source)
    assert len(result.labels[0]) > 2
    assert result.select(edit="baseline", metric="KL").values == pytest.approx(0, abs=1e-6)
    assert float(result.select(edit="baseline", metric="top-5 overlap")) == 1
    assert (result.values[1:, 1] > 0).all()
    assert torch.isnan(result.values[:, 0]).all() == (name == "tiny-modernbert")


def test_losses_equal_those_of_the_edited_model() -> None:
    model = ct.build("tiny-llama", seed=0)
    edits = {"no layer 2": {"blocks.2": "skip"}, "half": {"embed": {"do": "scale", "value": 0.5}}}
    result = ablation(model, TOKENS, edits)
    heads = head_ablation(model, TOKENS)
    with torch.no_grad():
        plain = F.cross_entropy(model(TOKENS)[0, :-1], TOKENS[0, 1:])
        for name, spec in edits.items():
            with edit(model, spec):
                loss = F.cross_entropy(model(TOKENS)[0, :-1], TOKENS[0, 1:])
            assert float(result.select(edit=name, metric="loss")) == pytest.approx(float(loss), abs=1e-6)
        with edit(model, {"blocks.1.attn.z": {"do": "zero", "heads": [2]}}):
            loss = F.cross_entropy(model(TOKENS)[0, :-1], TOKENS[0, 1:])
    assert float(heads[1, 2]) == pytest.approx(float(loss - plain), abs=1e-6)


def test_missing_loss_and_empty_edits_are_errors() -> None:
    with pytest.raises(InputError, match="no next-token loss"):
        head_ablation(ct.build("tiny-bert", seed=0), TOKENS)
    with pytest.raises(InputError, match="nothing to compare"):
        ablation(ct.build("tiny-gpt", seed=0), TOKENS, {})


def gain_by_repetition(model: Transformer, heads: list[tuple[int, int]]) -> float:
    """Loss of random tokens minus the loss of their repetition, with these heads zero-ablated."""
    half = torch.randint(300, 2000, (16, 32), generator=torch.Generator().manual_seed(7))
    tokens = torch.cat((half, half), 1)
    layers = {layer for layer, _ in heads}
    edits = {
        f"blocks.{layer}.attn.z": {"do": "zero", "heads": [head for other, head in heads if other == layer]}
        for layer in layers
    }
    with torch.no_grad(), edit(model, edits or {"embed": {"do": "scale", "value": 1.0}}):
        losses = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    losses = losses.view(16, -1)
    return float(losses[:, :31].mean() - losses[:, 32:].mean())


def test_ablating_induction_heads_removes_the_gain_of_repetition() -> None:
    checkpoint = ct.load("tiny-python", dtype=torch.float32)
    model = checkpoint.model.float()
    scores = head_scores(checkpoint).select(head_type="induction")
    ranked = [(int(layer), int(head)) for (layer, head), _ in scores.top(len(scores.values.flatten()))]
    induction_heads = ranked[:5]
    layers = {layer for layer, _ in induction_heads}
    other_heads = [(layer, head) for layer, head in ranked[::-1] if layer in layers][:5]
    baseline = gain_by_repetition(model, [])
    assert baseline > 0.5
    assert gain_by_repetition(model, induction_heads) < baseline / 3
    assert gain_by_repetition(model, other_heads) > baseline * 0.8
