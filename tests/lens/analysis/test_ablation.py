"""What is taken away is missed: in any model any part, in the shipped one its induction heads."""

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
def test_every_part_that_a_model_has_can_be_taken_away(name: str) -> None:
    model = ct.build(name, seed=0, dtype=torch.float64)
    source = TOKENS.flip(-1) if len(model.stacks) > 1 else None
    found = ablation(model, TOKENS, source=source)
    assert len(found.labels[0]) > 2
    assert found.select(edit="baseline", metric="KL").values == pytest.approx(0, abs=1e-6)
    assert float(found.select(edit="baseline", metric="top-5 overlap")) == 1
    assert (found.values[1:, 1] > 0).all()
    assert torch.isnan(found.values[:, 0]).all() == (name == "tiny-modernbert")


def test_a_row_is_the_edited_models_own_loss() -> None:
    model = ct.build("tiny-llama", seed=0)
    changes = {"no layer 2": {"blocks.2": "skip"}, "quiet": {"embed": {"do": "scale", "value": 0.5}}}
    found = ablation(model, TOKENS, changes)
    heads = head_ablation(model, TOKENS)
    with torch.no_grad():
        plain = F.cross_entropy(model(TOKENS)[0, :-1], TOKENS[0, 1:])
        for name, change in changes.items():
            with edit(model, change):
                loss = F.cross_entropy(model(TOKENS)[0, :-1], TOKENS[0, 1:])
            assert float(found.select(edit=name, metric="loss")) == pytest.approx(float(loss), abs=1e-6)
        with edit(model, {"blocks.1.attn.z": {"do": "zero", "heads": [2]}}):
            loss = F.cross_entropy(model(TOKENS)[0, :-1], TOKENS[0, 1:])
    assert float(heads[1, 2]) == pytest.approx(float(loss - plain), abs=1e-6)


def test_what_has_no_loss_says_so() -> None:
    with pytest.raises(InputError, match="no next token"):
        head_ablation(ct.build("tiny-bert", seed=0), TOKENS)
    with pytest.raises(InputError, match="nothing to compare"):
        ablation(ct.build("tiny-gpt", seed=0), TOKENS, {})


def gain_by_repetition(model: Transformer, heads: list[tuple[int, int]]) -> float:
    """How much better random tokens are told the second time, without these heads."""
    half = torch.randint(300, 2000, (16, 32), generator=torch.Generator().manual_seed(7))
    tokens = torch.cat((half, half), 1)
    layers = {layer for layer, _ in heads}
    changes = {
        f"blocks.{layer}.attn.z": {"do": "zero", "heads": [head for at, head in heads if at == layer]}
        for layer in layers
    }
    with torch.no_grad(), edit(model, changes or {"embed": {"do": "scale", "value": 1.0}}):
        losses = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    losses = losses.view(16, -1)
    return float(losses[:, :31].mean() - losses[:, 32:].mean())


def test_induction_heads_are_found_by_score_and_confirmed_by_ablation() -> None:
    checkpoint = ct.load("tiny-python", dtype=torch.float32)
    model = checkpoint.model.float()
    scores = head_scores(checkpoint).select(head_type="induction")
    ranked = [(int(layer), int(head)) for (layer, head), _ in scores.top(len(scores.values.flatten()))]
    best = ranked[:5]
    layers = {layer for layer, _ in best}
    others = [(layer, head) for layer, head in ranked[::-1] if layer in layers][:5]
    whole = gain_by_repetition(model, [])
    assert whole > 0.5
    assert gain_by_repetition(model, best) < whole / 3
    assert gain_by_repetition(model, others) > whole * 0.8
