"""What the page says of a broken model is what the library says."""

from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.lens.analysis import ablation, resid_norms
from cutaway.pretrained import ABLATIONS_FILE
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import ModelInput, TokenizerAdapter
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.inspect.queries.ablation_results import AblationResults, load_ablation_results
from cutaway.serve.inspect.queries.edit_effect import EditEffect
from cutaway.train.ablate.confidence_interval import mean_confidence_interval
from cutaway.train.ablate.studies import FULL_MODEL, component_removal_study

pytestmark = pytest.mark.unchecked

EDITS: list[dict[str, Any]] = [
    {"blocks.0": "skip"},
    {"blocks.1": "swap", "final_norm": "drop"},
    {"blocks.*": "no_residual"},
    {"mask": "drop"},
    {"positions": "drop"},
    {"blocks.0.attn.z": {"do": "zero", "heads": [0]}, "blocks.1.ffn.out": {"do": "mean"}},
    {"blocks.1.attn.out": {"do": "scale", "value": 2.5}},
]


def inspector(name: str) -> Inspector:
    model = ct.build(name, seed=0)
    return Inspector(model, TokenizerAdapter(model.config.vocab_size), name=name)


@pytest.mark.parametrize("edits", EDITS)
def test_before_and_after_are_what_the_ablation_says(edits: dict[str, Any]) -> None:
    of, text = inspector("tiny-gpt"), [5, 9, 2, 44, 7, 7, 3] * 8
    found = EditEffect(input=ModelInput(tokens=tuple(text), edits=edits), position=4).run(of, QueryJob())
    said = ablation(of.model, text, {"it": edits}, progress=False).values
    assert [found.data["loss_before"], 0, 1] == pytest.approx(said[0].tolist(), abs=1e-5)
    mine = [found.data[name] for name in ("loss_after", "kl", "top5_overlap")]
    assert mine == pytest.approx(said[1].tolist(), rel=1e-4, abs=1e-5)
    with ct.edit(of.model, edits):
        lengths = resid_norms(of.model, text).values
        with torch.no_grad():
            shares = of.model(torch.tensor([text]))[0, 4].softmax(-1)
    torch.testing.assert_close(found.tensors["norms_after"], lengths)
    torch.testing.assert_close(found.tensors["norms_before"], resid_norms(of.model, text).values)
    best = shares.topk(5)
    after = sorted(
        (row for row in found.data["top_tokens"] if row["rank_after"] is not None), key=lambda r: r["rank_after"]
    )
    assert [row["token"] for row in after] == best.indices.tolist()
    assert [row["probability_after"] for row in after] == pytest.approx(best.values.tolist(), rel=1e-4)


def test_an_encoder_decoder_is_broken_on_both_sides() -> None:
    of, text, source = inspector("tiny-t5"), [0, 4, 9], [3, 8, 8, 1]
    edits: dict[str, Any] = {"encoder.blocks.0": "skip", "decoder.blocks.1.cross.z": {"do": "zero", "heads": [1]}}
    look = ModelInput(tokens=tuple(text), source=tuple(source), edits=edits)
    found = EditEffect(input=look, position=2).run(of, QueryJob())
    said = ablation(of.model, text, {"it": edits}, source=source, progress=False).values
    mine = [found.data[name] for name in ("loss_after", "kl", "top5_overlap")]
    assert mine == pytest.approx(said[1].tolist(), rel=1e-4, abs=1e-5)


def test_an_encoder_has_no_loss() -> None:
    of, text = inspector("tiny-bert"), [3, 8, 8, 1]
    edits: dict[str, Any] = {"blocks.1": "swap"}
    found = EditEffect(input=ModelInput(tokens=tuple(text), edits=edits), position=3).run(of, QueryJob())
    assert found.data["loss_after"] is None
    said = ablation(of.model, text, {"it": edits}, progress=False).values
    assert found.data["kl"] == pytest.approx(float(said[1, 1]), rel=1e-4)


def test_what_was_trained_so_is_of_the_study_as_it_is_now() -> None:
    shipped, study = load_ablation_results(), component_removal_study()
    assert ABLATIONS_FILE.stat().st_size < 50_000
    assert shipped["recipe"] == study.recipe
    assert [row["variant"] for row in shipped["variants"]] == [asked.name for asked in study.variants]
    assert len(shipped["seeds"]) >= 3


def test_surgery_and_training_are_told_apart_with_intervals_over_seeds() -> None:
    told = AblationResults().run(inspector("tiny-gpt"), QueryJob()).data
    rows = {row["edit"]: row for row in told["rows"]}
    by_seed = [run["losses"] for run in load_ablation_results()["runs"] if run["variant"] == "no final norm"]
    found = mean_confidence_interval([losses["baseline"] for losses in by_seed])
    assert rows["final_norm"]["retrained"]["mean"] == pytest.approx(found.mean, abs=1e-5)
    assert rows["final_norm"]["retrained"]["half_width"] == pytest.approx(found.half_width, abs=1e-4)
    whole = [run["losses"] for run in load_ablation_results()["runs"] if run["variant"] == FULL_MODEL]
    found = mean_confidence_interval([losses["without the final norm"] for losses in whole])
    assert rows["final_norm"]["ablated"]["mean"] == pytest.approx(found.mean, abs=1e-5)
    assert rows["no_residual"] == {
        "edit": "no_residual", "component": "no residual", "ablated": None, "retrained": None,
    }  # fmt: skip
    assert told["unmasked_loss"]["mean"] < told["baseline"]["mean"] < rows["mask"]["retrained"]["mean"]
