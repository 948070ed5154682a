"""Patching finds where an answer is carried: what is put there brings it back, and a planted fact is found."""

from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens import edit, trace
from cutaway.lens.analysis import activation_patching, path_patching
from cutaway.model import Transformer

CLEAN, CORRUPT = torch.arange(3, 11)[None], torch.tensor([[3, 4, 90, 6, 7, 8, 9, 10]])


@pytest.fixture(scope="module")
def model() -> Transformer:
    return ct.build("tiny-llama", seed=0, dtype=torch.float64)


def shares(model: Transformer, answer: int, changes: Any) -> float:
    with torch.no_grad():
        high, low = (float(model(tokens)[0, -1, answer]) for tokens in (CLEAN, CORRUPT))
        with edit(model, changes):
            return (float(model(CORRUPT)[0, -1, answer]) - low) / (high - low)


@pytest.mark.parametrize(("site", "heads"), [("resid_post", False), ("attn.out", False), ("attn.z", True)])
def test_each_cell_is_one_value_put_in(model: Transformer, site: str, heads: bool) -> None:
    found = activation_patching(model, CLEAN, CORRUPT, 5, site=site, by_head=heads)
    with torch.no_grad(), trace(model, site) as t:
        model(CLEAN)
    for layer, place in ((0, 2), (3, 0), (1, 3)):
        name = f"blocks.{layer}.{site}"
        where: Any = {"heads" if heads else "positions": [place]}
        part = t[name].select(2 if heads else 1, place).unsqueeze(2 if heads else 1)
        one = shares(model, 5, {name: {"do": "replace", "value": part, **where}})
        assert float(found[layer, place]) == pytest.approx(one, abs=1e-9)


def test_what_is_the_same_carries_nothing_and_the_end_carries_all(model: Transformer) -> None:
    found = activation_patching(model, CLEAN, CORRUPT, 5, incorrect_token=6).values
    assert found[:, :2].abs().max() < 1e-9
    assert float(found[-1, -1]) == pytest.approx(1, abs=1e-9)
    assert found[-1, :-1].abs().max() < 1e-9


def test_paths_of_the_last_writer_are_all_it_does(model: Transformer) -> None:
    """The last FFN is read by the logits alone, so its straight path is all of its effect."""
    found = path_patching(model, CLEAN, CORRUPT, 5, "blocks.3.ffn.out")
    assert found.labels == (("logits",),)
    with torch.no_grad(), trace(model, "blocks.3.ffn.out") as t:
        model(CLEAN)
    whole = shares(model, 5, {"blocks.3.ffn.out": t["blocks.3.ffn.out"]})
    assert float(found.values[0]) == pytest.approx(whole, abs=1e-9)


def test_a_path_from_heads_is_their_part(model: Transformer) -> None:
    """Straight to the logits the heads of a layer add up, up to the final norm's bend; all of them are the layer."""
    every = path_patching(model, CLEAN, CORRUPT, 5, "blocks.1.attn.out", receivers=["logits"])
    heads = path_patching(model, CLEAN, CORRUPT, 5, "blocks.1.attn.z", receivers=["logits"], heads=range(4))
    assert float(heads.values[0]) == pytest.approx(float(every.values[0]), abs=1e-9)


def test_what_cannot_be_compared_is_said(model: Transformer) -> None:
    with pytest.raises(InputError, match="texts of one length"):
        activation_patching(model, CLEAN, CORRUPT[:, :5], 5)
    with pytest.raises(InputError, match="same answer"):
        activation_patching(model, CLEAN, CLEAN, 5)
    with pytest.raises(InputError, match="no axis for heads"):
        activation_patching(model, CLEAN, CORRUPT, 5, by_head=True)
    with pytest.raises(InputError, match="not one site that writes"):
        path_patching(model, CLEAN, CORRUPT, 5, "attn.out")
    with pytest.raises(InputError, match="comes later"):
        path_patching(model, CLEAN, CORRUPT, 5, "blocks.3.ffn.out", receivers=["attn.out"])
    with pytest.raises(InputError, match="post-norm"):
        path_patching(ct.build("tiny-bert", seed=0), CLEAN, CORRUPT, 5, "blocks.0.attn.out")


def planted() -> Transformer:
    """A model that has learned one thing: the last token is followed by what belongs to the third."""
    torch.manual_seed(0)
    model = ct.build("tiny-llama", seed=0).train()
    belongs = torch.randperm(20) + 30
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        tokens = torch.randint(60, 90, (64, 8))
        key = torch.randint(20, (64,))
        tokens[:, 2] = key
        loss = torch.nn.functional.cross_entropy(model(tokens)[:, -1], belongs[key])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.1
    return model.eval()


def test_a_planted_fact_is_found() -> None:
    """Late it is at the last token, where attention must have brought it; without the layer that did, it is gone."""
    model = planted()
    clean, corrupt = torch.full((1, 8), 70), torch.full((1, 8), 70)
    clean[0, 2], corrupt[0, 2] = 4, 11
    with torch.no_grad():
        answer, other = (int(model(tokens)[0, -1].argmax()) for tokens in (clean, corrupt))
    assert answer != other
    carried = activation_patching(model, clean, corrupt, answer, incorrect_token=other)
    assert carried.values[0, 2] + carried.values[0, -1] > 0.5
    assert float(carried.values[-1, -1]) == pytest.approx(1, abs=1e-4)
    assert carried.values[:, [0, 1]].abs().max() < 1e-4
    brought = activation_patching(model, clean, corrupt, answer, incorrect_token=other, site="attn.out")
    mover = int(brought.values[:, -1].argmax())
    assert brought.values[mover, -1] > 0.3
    with torch.no_grad(), edit(model, {f"blocks.{mover}.attn.pattern": "zero"}):
        without = model(clean)[0, -1]
    with torch.no_grad():
        known = model(clean)[0, -1]
    assert known[answer] - known[other] > 2 * abs(without[answer] - without[other])
