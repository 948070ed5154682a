"""Trained variants: the models, their configs and losses, and the queries."""

import pytest
import torch
import torch.nn.functional as F
from support.inspector import open_inspector, run_query

import cutaway as ct
from cutaway.errors import InputError
from cutaway.pretrained import find_pretrained, list_pretrained, list_variants
from cutaway.serve.inspect.queries.trained_variants import VARIANTS, load_variant_results

MAX_BYTES = 3.2e6
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the sun. One day, she saw a big"
    " dog in the park. The dog was very friendly and wagged its tail. Lily was happy and gave the dog a hug."
)


def test_every_variant_ships_and_differs_from_the_base_in_its_component() -> None:
    assert sorted({f"variants/{variant.name}" for variant in VARIANTS}) == list_variants()
    assert not set(list_variants()) & set(list_pretrained())
    base = ct.config("variants/base").decoder
    assert base is not None
    for name in list_variants():
        directory = find_pretrained(name)
        assert directory is not None
        assert sum(file.stat().st_size for file in directory.iterdir()) <= MAX_BYTES
        stack = ct.config(name).decoder
        assert stack is not None
        differs = {
            "norm": stack.norm.kind != base.norm.kind,
            "placement": stack.placement.kind != base.placement.kind,
            "position": (stack.blocks[0].attention.position.kind, stack.embedding.position.kind)
            != (base.blocks[0].attention.position.kind, base.embedding.position.kind),
        }
        component = {"variants/layernorm": "norm", "variants/post-norm": "placement", "variants/base": None}
        expected = component.get(name, "position")
        assert [key for key, value in differs.items() if value] == ([] if expected is None else [expected]), name


@pytest.mark.parametrize("name", list_variants())
def test_the_variants_have_learned_to_write_stories(name: str) -> None:
    checkpoint = ct.load(name, dtype=torch.float32)
    assert checkpoint.tokenizer is not None
    tokens = torch.tensor([checkpoint.tokenizer.encode(STORY)])
    with torch.no_grad():
        loss = F.cross_entropy(checkpoint.model(tokens)[:, :-1].mT, tokens[:, 1:])
    mean_losses = load_variant_results()["variants"][name.removeprefix("variants/")]["loss"]
    assert abs(float(loss) - sum(mean_losses) / len(mean_losses)) < 1.0
    assert all(len(entry["loss"]) == 3 for entry in load_variant_results()["variants"].values())


def test_queries() -> None:
    inspector = open_inspector("tiny-english")
    data, _ = run_query(inspector, "trained_variants")
    by_label = {variant["label"]: variant for variant in data["variants"]}
    assert by_label["RoPE"]["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    # Findings that the page states: ALiBi keeps its loss beyond the training length, the base model does not.
    assert by_label["ALiBi"]["loss_beyond"]["high"] < by_label["ALiBi"]["loss"]["low"]
    assert by_label["learned"]["loss_beyond"]["low"] > by_label["RoPE"]["loss_beyond"]["high"]
    assert by_label["RoPE"]["loss_beyond"]["low"] > by_label["RoPE"]["loss"]["high"] + 1
    assert by_label["none"]["difference"]["low"] > 0.02
    assert len(data["positions"]) == len(by_label["RoPE"]["loss_by_position"])
    text = "The cat sat on the"
    for name in ("base", "alibi"):
        answer, _ = run_query(inspector, "variant_continuation", name=name, text=text)
        expected = ct.generate(ct.load(f"variants/{name}", dtype=torch.float32), text, max_new_tokens=24, temperature=0)
        assert answer["continuation"] == expected[0].text
    with pytest.raises(InputError, match="not a trained variant"):
        run_query(inspector, "variant_continuation", name="../tiny-english", text=text)
    with pytest.raises(InputError, match="empty"):
        run_query(inspector, "variant_continuation", name="base", text="")


def test_conclusions_on_the_shipped_models() -> None:
    data, _ = run_query(open_inspector("tiny-english"), "trained_variants")
    summaries = {variant["label"]: variant["summary"] for variant in data["variants"] if variant["name"] != "base"}
    assert summaries == {
        "LayerNorm": "slightly lower",
        "post-norm": "no difference beyond the seeds",
        "learned": "slightly higher",
        "sinusoidal": "higher",
        "ALiBi": "slightly higher",
        "none": "higher",
    }
