"""Gradient-norm and run-metrics queries equal the library and the run's files."""

import json
from pathlib import Path

import pytest
import torch

import cutaway as ct
from cutaway.cli.verbs.open import load_inspector
from cutaway.errors import InputError
from cutaway.learn.studies import load_results
from cutaway.lens.analysis import gradient_by_depth, gradient_by_placement
from cutaway.lens.analysis.gradients import InitName, placement_config
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import ModelInput, TokenizerAdapter
from cutaway.serve.inspect.protocol import QueryCancelled, QueryJob
from cutaway.serve.inspect.queries.gradient_norms import GradientsByDepth, GradientsByPlacement
from cutaway.serve.inspect.queries.run_metrics import RunMetrics, downsample_curves

pytestmark = pytest.mark.unchecked


def build_inspector(name: str, run: Path | None = None) -> Inspector:
    model = ct.build(name, seed=0)
    return Inspector(model, TokenizerAdapter(model.config.vocab_size), name=name, run_directory=run)


def test_gradients_by_placement_equal_the_study() -> None:
    """The measurement of the page with ten seeds is the stored result of the study, which the page also quotes."""
    query = GradientsByPlacement(depths=(6,), num_seeds=10, form="encoder", activation="relu", init="xavier")
    result = query.run(build_inspector("tiny-gpt"), QueryJob())
    for placement, sentence in zip(result.data["placements"], result.data["study"], strict=True):
        stored = load_results("norm-placement").get(f"gradient/{placement}/encoder/relu/xavier/6")
        assert result.data["first_to_last_ratio"][f"{placement}.6"] == pytest.approx(stored.mean, rel=1e-3)
        assert str(stored) in sentence


@pytest.mark.parametrize("init", ["normal", "gpt2"])
def test_gradients_by_placement_equal_the_analysis(init: InitName) -> None:
    result = GradientsByPlacement(depths=(6,), num_seeds=2, init=init).run(build_inspector("tiny-gpt"), QueryJob())
    config = placement_config("pre", 6, activation="relu", init=init)
    placements = ("pre", "post", "sandwich")
    expected = gradient_by_placement(config, placements=placements, depths=(6,), num_seeds=2, num_texts=3)
    for row, placement in enumerate(placements):
        mean = result.tensors[f"{placement}.6"].log().mean(0).exp()
        torch.testing.assert_close(mean, expected.values[row, :, 0])


def test_cancelled_query_raises() -> None:
    job = QueryJob()
    job.cancelled.set()
    with pytest.raises(QueryCancelled):
        GradientsByPlacement().run(build_inspector("tiny-gpt"), job)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-bert", "tiny-t5"])
def test_gradients_by_depth_equal_the_analysis(name: str) -> None:
    inspector, tokens = build_inspector(name), [3, 7, 9, 4]
    source = [5, 6] if name == "tiny-t5" else None
    model_input = ModelInput(tokens=tuple(tokens), source=None if source is None else tuple(source))
    result = GradientsByDepth(input=model_input).run(inspector, QueryJob())
    torch.testing.assert_close(
        result.tensors["grad_norms"], gradient_by_depth(inspector.model, tokens, source=source).values
    )
    edited = GradientsByDepth(input=model_input.model_copy(update={"edits": zero_first_ffn(inspector)})).run(
        inspector, QueryJob()
    )
    assert not torch.equal(edited.tensors["grad_norms"], result.tensors["grad_norms"])


def zero_first_ffn(inspector: Inspector) -> dict[str, str]:
    return {next(name for name in inspector.sites if name.endswith("ffn.out") and not name.startswith("enc")): "zero"}


def test_too_long_text_is_an_error() -> None:
    with pytest.raises(InputError, match="shorten"):
        GradientsByDepth(input=ModelInput(tokens=(1,) * 513)).run(build_inspector("tiny-gpt"), QueryJob())


def test_run_metrics_without_a_run_is_an_error() -> None:
    with pytest.raises(InputError, match="not from a run directory"):
        RunMetrics().run(build_inspector("tiny-gpt"), QueryJob())


def test_long_log_is_downsampled_to_means_with_bounds() -> None:
    rows = [{"step": step, "loss": float(step % 7), "grad_norm": 1.0, "lr": 0.1} for step in range(1, 2501)]
    curves = downsample_curves(rows)
    assert len(curves["loss"]) == 834
    assert curves["loss"][0] == pytest.approx(2.0)
    assert [float(curves["loss_min"][0]), float(curves["loss_max"][0])] == [1.0, 3.0]
    assert curves["step"][-1] == 2500


def test_run_metrics_of_a_finished_and_of_an_unfinished_run(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    recipe = {
        "model": {
            "form": "decoder", "vocab_size": 259, "d_model": 16, "context": 16,
            "decoder": {"layers": 2, "block": {"attention": {"heads": 2}}},
        },
        "data": {"seq_len": 16, "sources": [{"path": str(text)}], "validation_split": 0.2},
        "training": {"max_steps": 6, "batch_size": 2},
        "eval": {"interval": 3, "num_sequences": 2, "sample_prompt": "to be"},
        "checkpoint": {"interval": 2},
    }  # fmt: skip
    run = ct.train(recipe, tmp_path / "run")
    inspector = load_inspector(str(run.directory), None, "cpu", None)
    assert inspector.run_directory == run.directory
    result = RunMetrics().run(inspector, QueryJob())
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert result.tensors["loss"].tolist() == pytest.approx(losses)
    assert [row["step"] for row in result.data["evals"]] == [3, 6]
    assert [row["eval_loss"] for row in result.data["evals"]] == [r["eval_loss"] for r in rows if "eval_loss" in r]
    assert result.data["samples"][-1]["sample"].startswith("to be")
    assert result.data["layer_stats"]["step"] == result.data["step"] == result.data["max_steps"] == 6
    assert not result.data["is_training"]
    assert RunMetrics(known_bytes=result.data["log_bytes"]).run(inspector, QueryJob()).data["unchanged"]

    (run.directory / "model").rename(tmp_path / "elsewhere")
    snapshot_inspector = load_inspector(str(run.directory), None, "cpu", None)
    for name, weight in snapshot_inspector.model.state_dict().items():
        torch.testing.assert_close(weight, inspector.model.state_dict()[name])
