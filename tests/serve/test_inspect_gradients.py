"""Gradients on the page are the library's; a run's curves are its files'."""

import json
from pathlib import Path

import pytest
import torch

import cutaway as ct
from cutaway.cli.verbs.open import load_inspector
from cutaway.errors import InputError
from cutaway.lens.analysis import gradient_by_depth, gradient_by_placement
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import ModelInput, TokenizerAdapter
from cutaway.serve.inspect.protocol import QueryCancelled, QueryJob
from cutaway.serve.inspect.queries.gradient_norms import GradientsByDepth, GradientsByPlacement, build_small_config
from cutaway.serve.inspect.queries.run_metrics import RunMetrics, downsample_curves

pytestmark = pytest.mark.unchecked


def inspector(name: str, run: Path | None = None) -> Inspector:
    model = ct.build(name, seed=0)
    return Inspector(model, TokenizerAdapter(model.config.vocab_size), name=name, run_directory=run)


@pytest.mark.parametrize("init", ["normal", "xavier"])
def test_placements_are_the_readings_own(init: str) -> None:
    found = GradientsByPlacement(depths=(2, 5), num_seeds=2, d_model=32, seq_len=8, init=init).run(
        inspector("tiny-gpt"), QueryJob()
    )
    said = gradient_by_placement(build_small_config(32, 2, init), depths=(2, 5), num_seeds=2, seq_len=8)
    for row, placement in enumerate(("pre", "post")):
        for column, depth in enumerate((2, 5)):
            mean = found.tensors[f"{placement}.{depth}"].log().mean(0).exp()
            torch.testing.assert_close(mean, said.values[row, :depth, column])
            assert found.data["first_to_last_ratio"][f"{placement}.{depth}"] == pytest.approx(float(mean[0]), rel=1e-5)


def test_stacks_that_nobody_waits_for_are_not_made() -> None:
    job = QueryJob()
    job.cancelled.set()
    with pytest.raises(QueryCancelled):
        GradientsByPlacement().run(inspector("tiny-gpt"), job)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-bert", "tiny-t5"])
def test_the_models_own_gradient(name: str) -> None:
    of, tokens = inspector(name), [3, 7, 9, 4]
    source = [5, 6] if name == "tiny-t5" else None
    look = ModelInput(tokens=tuple(tokens), source=None if source is None else tuple(source))
    found = GradientsByDepth(input=look).run(of, QueryJob())
    torch.testing.assert_close(found.tensors["grad_norms"], gradient_by_depth(of.model, tokens, source=source).values)
    edited = GradientsByDepth(input=look.model_copy(update={"edits": first_ffn_gone(of)})).run(of, QueryJob())
    assert not torch.equal(edited.tensors["grad_norms"], found.tensors["grad_norms"])


def first_ffn_gone(of: Inspector) -> dict[str, str]:
    return {next(name for name in of.sites if name.endswith("ffn.out") and not name.startswith("enc")): "zero"}


def test_a_text_too_long_for_a_gradient_is_refused() -> None:
    with pytest.raises(InputError, match="shorten"):
        GradientsByDepth(input=ModelInput(tokens=(1,) * 513)).run(inspector("tiny-gpt"), QueryJob())


def test_without_a_run_there_is_no_log() -> None:
    with pytest.raises(InputError, match="no run's"):
        RunMetrics().run(inspector("tiny-gpt"), QueryJob())


def test_a_long_log_is_told_in_means_between_bounds() -> None:
    rows = [{"step": step, "loss": float(step % 7), "grad_norm": 1.0, "lr": 0.1} for step in range(1, 2501)]
    found = downsample_curves(rows)
    assert len(found["loss"]) == 834
    assert found["loss"][0] == pytest.approx(2.0)
    assert [float(found["loss_min"][0]), float(found["loss_max"][0])] == [1.0, 3.0]
    assert found["step"][-1] == 2500


def test_a_run_is_told_while_it_trains_and_when_it_is_done(tmp_path: Path) -> None:
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
    of = load_inspector(str(run.directory), None, "cpu", None)
    assert of.run_directory == run.directory
    found = RunMetrics().run(of, QueryJob())
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert found.tensors["loss"].tolist() == pytest.approx(losses)
    assert [row["step"] for row in found.data["evals"]] == [3, 6]
    assert [row["eval_loss"] for row in found.data["evals"]] == [r["eval_loss"] for r in rows if "eval_loss" in r]
    assert found.data["samples"][-1]["sample"].startswith("to be")
    assert found.data["layer_stats"]["step"] == found.data["step"] == found.data["max_steps"] == 6
    assert not found.data["is_training"]
    assert RunMetrics(known_bytes=found.data["log_bytes"]).run(of, QueryJob()).data["unchanged"]

    (run.directory / "model").rename(tmp_path / "elsewhere")
    young = load_inspector(str(run.directory), None, "cpu", None)
    for name, weight in young.model.state_dict().items():
        torch.testing.assert_close(weight, of.model.state_dict()[name])
