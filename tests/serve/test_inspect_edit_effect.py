"""Edit-effect and ablation-result queries equal the library and the shipped results."""

from typing import Any

import pytest
import torch
from support.inspector import open_inspector

import cutaway as ct
from cutaway.errors import InputError
from cutaway.evaluate.confidence_interval import mean_confidence_interval
from cutaway.lens.analysis import ablation, resid_norms
from cutaway.pretrained import ABLATIONS_FILE
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import ModelInput, TokenizerAdapter
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.inspect.queries import edit_experiment
from cutaway.serve.inspect.queries.ablation_results import AblationResults, load_ablation_results
from cutaway.serve.inspect.queries.edit_effect import EditEffect
from cutaway.serve.inspect.queries.edit_experiment import EditExperiment, sample_texts
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


def build_inspector(name: str) -> Inspector:
    model = ct.build(name, seed=0)
    return Inspector(model, TokenizerAdapter(model.config.vocab_size), name=name)


@pytest.mark.parametrize("edits", EDITS)
def test_edit_effect_equals_ablation(edits: dict[str, Any]) -> None:
    inspector, tokens = build_inspector("tiny-gpt"), [5, 9, 2, 44, 7, 7, 3] * 8
    result = EditEffect(input=ModelInput(tokens=tuple(tokens), edits=edits), position=4).run(inspector, QueryJob())
    expected = ablation(inspector.model, tokens, {"it": edits}, progress=False).values
    assert [result.data["loss_before"], 0, 1] == pytest.approx(expected[0].tolist(), abs=1e-5)
    actual = [result.data[name] for name in ("loss_after", "kl", "top5_overlap")]
    assert actual == pytest.approx(expected[1].tolist(), rel=1e-4, abs=1e-5)
    with ct.edit(inspector.model, edits):
        norms = resid_norms(inspector.model, tokens).values
        with torch.no_grad():
            probabilities = inspector.model(torch.tensor([tokens]))[0, 4].softmax(-1)
    torch.testing.assert_close(result.tensors["norms_after"], norms)
    torch.testing.assert_close(result.tensors["norms_before"], resid_norms(inspector.model, tokens).values)
    top = probabilities.topk(5)
    after = sorted(
        (row for row in result.data["top_tokens"] if row["rank_after"] is not None), key=lambda r: r["rank_after"]
    )
    assert [row["token"] for row in after] == top.indices.tolist()
    assert [row["probability_after"] for row in after] == pytest.approx(top.values.tolist(), rel=1e-4)


def test_edit_effect_of_an_encoder_decoder_equals_ablation() -> None:
    inspector, tokens, source = build_inspector("tiny-t5"), [0, 4, 9], [3, 8, 8, 1]
    edits: dict[str, Any] = {"encoder.blocks.0": "skip", "decoder.blocks.1.cross.z": {"do": "zero", "heads": [1]}}
    model_input = ModelInput(tokens=tuple(tokens), source=tuple(source), edits=edits)
    result = EditEffect(input=model_input, position=2).run(inspector, QueryJob())
    expected = ablation(inspector.model, tokens, {"it": edits}, source=source, progress=False).values
    actual = [result.data[name] for name in ("loss_after", "kl", "top5_overlap")]
    assert actual == pytest.approx(expected[1].tolist(), rel=1e-4, abs=1e-5)


def test_encoder_has_no_loss() -> None:
    inspector, tokens = build_inspector("tiny-bert"), [3, 8, 8, 1]
    edits: dict[str, Any] = {"blocks.1": "swap"}
    result = EditEffect(input=ModelInput(tokens=tuple(tokens), edits=edits), position=3).run(inspector, QueryJob())
    assert result.data["loss_after"] is None
    expected = ablation(inspector.model, tokens, {"it": edits}, progress=False).values
    assert result.data["kl"] == pytest.approx(float(expected[1, 1]), rel=1e-4)


def test_shipped_results_are_of_the_current_study() -> None:
    shipped, study = load_ablation_results(), component_removal_study()
    assert ABLATIONS_FILE.stat().st_size < 50_000
    assert shipped["recipe"] == study.recipe
    assert [row["variant"] for row in shipped["variants"]] == [variant.name for variant in study.variants]
    assert len(shipped["seeds"]) >= 3


def test_ablated_and_retrained_losses_have_intervals_over_seeds() -> None:
    data = AblationResults().run(build_inspector("tiny-gpt"), QueryJob()).data
    rows = {row["edit"]: row for row in data["rows"]}
    losses_by_seed = [run["losses"] for run in load_ablation_results()["runs"] if run["variant"] == "no final norm"]
    interval = mean_confidence_interval([losses["baseline"] for losses in losses_by_seed])
    assert rows["final_norm"]["retrained"]["mean"] == pytest.approx(interval.mean, abs=1e-5)
    assert rows["final_norm"]["retrained"]["half_width"] == pytest.approx(interval.half_width, abs=1e-4)
    full_model_losses = [run["losses"] for run in load_ablation_results()["runs"] if run["variant"] == FULL_MODEL]
    interval = mean_confidence_interval([losses["without the final norm"] for losses in full_model_losses])
    assert rows["final_norm"]["ablated"]["mean"] == pytest.approx(interval.mean, abs=1e-5)
    assert rows["no_residual"] == {
        "edit": "no_residual", "component": "no residual", "ablated": None, "retrained": None,
    }  # fmt: skip
    assert data["unmasked_loss"]["mean"] < data["baseline"]["mean"] < rows["mask"]["retrained"]["mean"]


@torch.no_grad()
def test_edit_experiment_equals_forward_passes_on_sampled_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_experiment, "TEXT_LEN", 16)
    inspector = open_inspector("tiny-english")
    tokens = tuple(inspector.tokenizer.encode("The cat sat on the"))
    edits = {"blocks.3": "skip"}
    data = EditExperiment(input=ModelInput(tokens=tokens, edits=edits)).run(inspector, QueryJob()).data
    texts = sample_texts(inspector)
    assert texts.shape == (16, 16)

    def losses() -> list[float]:
        logits = inspector.model(texts)[:, :-1]
        return torch.nn.functional.cross_entropy(logits.mT, texts[:, 1:], reduction="none").mean(1).tolist()

    before = losses()
    with ct.edit(inspector.model, edits):
        after = losses()
        ids = torch.tensor([tokens])
        for text in data["continuations"][1]:
            ids = torch.cat((ids, inspector.model(ids)[:, -1].argmax(-1, keepdim=True)), 1)
            assert inspector.tokenizer.decode_token(int(ids[0, -1])) == text
    assert data["loss_before"]["mean"] == pytest.approx(sum(before) / 16, abs=1e-5)
    assert data["loss_after"]["mean"] == pytest.approx(sum(after) / 16, abs=1e-5)
    assert data["difference"]["low"] > 0.2  # a block is needed
    assert data["continuations"][0][0] == " floor"


@pytest.mark.nightly
def test_removing_the_mask_raises_the_loss_on_sampled_texts() -> None:
    """On one short text the loss may fall, because the target is visible; over sampled texts it rises."""
    inspector = open_inspector("tiny-english")
    tokens = tuple(inspector.tokenizer.encode("The cat sat on the"))
    data = EditExperiment(input=ModelInput(tokens=tokens, edits={"mask": "drop"})).run(inspector, QueryJob())
    assert data.data["difference"]["low"] > 0


def test_edit_experiment_needs_a_decoder() -> None:
    with pytest.raises(InputError, match="need a decoder"):
        EditExperiment(input=ModelInput(tokens=(1, 2))).run(build_inspector("tiny-bert"), QueryJob())
