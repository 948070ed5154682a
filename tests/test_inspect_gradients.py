"""Gradients on the page are the library's; a run's curves are its files'."""

import json
from pathlib import Path

import pytest
import torch

import cutaway as ct
from cutaway.cli.open import inspector as opened
from cutaway.errors import InputError
from cutaway.lens.readings import gradient_by_depth, gradient_by_placement
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import GivenUp, Job
from cutaway.serve.inspect.look import Look
from cutaway.serve.inspect.questions.gradients import Placements, Slope, small
from cutaway.serve.inspect.questions.runs import RunLog, curves
from cutaway.serve.inspect.words import Words

pytestmark = pytest.mark.unchecked


def inspector(name: str, run: Path | None = None) -> Inspector:
    model = ct.build(name, seed=0)
    return Inspector(model, Words(model.config.vocab_size), name=name, run=run)


@pytest.mark.parametrize("init", ["normal", "xavier"])
def test_placements_are_the_readings_own(init: str) -> None:
    found = Placements(depths=(2, 5), seeds=2, d_model=32, length=8, init=init).answer(inspector("tiny-gpt"), Job())
    said = gradient_by_placement(small(32, 2, init), depths=(2, 5), seeds=2, length=8)
    for row, placement in enumerate(("pre", "post")):
        for column, depth in enumerate((2, 5)):
            mean = found.arrays[f"{placement}.{depth}"].log().mean(0).exp()
            torch.testing.assert_close(mean, said.values[row, :depth, column])
            assert found.facts["first"][f"{placement}.{depth}"] == pytest.approx(float(mean[0]), rel=1e-5)


def test_stacks_that_nobody_waits_for_are_not_made() -> None:
    job = Job()
    job.stop.set()
    with pytest.raises(GivenUp):
        Placements().answer(inspector("tiny-gpt"), job)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-bert", "tiny-t5"])
def test_the_models_own_gradient(name: str) -> None:
    of, tokens = inspector(name), [3, 7, 9, 4]
    source = [5, 6] if name == "tiny-t5" else None
    look = Look(tokens=tuple(tokens), source=None if source is None else tuple(source))
    found = Slope(look=look).answer(of, Job())
    torch.testing.assert_close(found.arrays["lengths"], gradient_by_depth(of.model, tokens, source=source).values)
    edited = Slope(look=look.model_copy(update={"edits": first_ffn_gone(of)})).answer(of, Job())
    assert not torch.equal(edited.arrays["lengths"], found.arrays["lengths"])


def first_ffn_gone(of: Inspector) -> dict[str, str]:
    return {next(name for name in of.sites if name.endswith("ffn.out") and not name.startswith("enc")): "zero"}


def test_a_text_too_long_for_a_gradient_is_refused() -> None:
    with pytest.raises(InputError, match="shorten"):
        Slope(look=Look(tokens=(1,) * 513)).answer(inspector("tiny-gpt"), Job())


def test_without_a_run_there_is_no_log() -> None:
    with pytest.raises(InputError, match="no run's"):
        RunLog().answer(inspector("tiny-gpt"), Job())


def test_a_long_log_is_told_in_means_between_bounds() -> None:
    rows = [{"step": step, "loss": float(step % 7), "gradient": 1.0, "rate": 0.1} for step in range(1, 2501)]
    found = curves(rows)
    assert len(found["loss"]) == 834
    assert found["loss"][0] == pytest.approx(2.0)
    assert [float(found["least"][0]), float(found["most"][0])] == [1.0, 3.0]
    assert found["step"][-1] == 2500


def test_a_run_is_told_while_it_trains_and_when_it_is_done(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    recipe = {
        "model": {
            "form": "decoder", "vocab_size": 259, "d_model": 16, "context": 16,
            "decoder": {"layers": 2, "block": {"attention": {"heads": 2}}},
        },
        "data": {"length": 16, "sources": [{"path": str(text)}], "validation": 0.2},
        "training": {"steps": 6, "batch": 2},
        "watching": {"every": 3, "sequences": 2, "sample": "to be"},
        "saving": {"every": 2},
    }  # fmt: skip
    run = ct.train(recipe, tmp_path / "run")
    of = opened(str(run.directory), None, "cpu", None)
    assert of.run == run.directory
    found = RunLog().answer(of, Job())
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert found.arrays["loss"].tolist() == pytest.approx(losses)
    assert [row["step"] for row in found.facts["looks"]] == [3, 6]
    assert [row["validation"] for row in found.facts["looks"]] == [r["validation"] for r in rows if "validation" in r]
    assert found.facts["samples"][-1]["sample"].startswith("to be")
    assert found.facts["health"]["step"] == found.facts["done"] == found.facts["of_steps"] == 6
    assert not found.facts["training"]
    assert RunLog(seen=found.facts["size"]).answer(of, Job()).facts["same"]

    (run.directory / "model").rename(tmp_path / "elsewhere")
    young = opened(str(run.directory), None, "cpu", None)
    for name, weight in young.model.state_dict().items():
        torch.testing.assert_close(weight, of.model.state_dict()[name])
