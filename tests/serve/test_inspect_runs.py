"""Queries about a training run equal its logs and the library, while it trains, after a stop and at its end."""

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inspector import run_query
from torch import Tensor

import cutaway as ct
from cutaway.cli.verbs.open import load_catalog, load_inspector
from cutaway.errors import InputError
from cutaway.lens.analysis import head_scores
from cutaway.serve.inspect.inspector import Inspector, build_inspector
from cutaway.serve.inspect.open_run import OpenRun
from cutaway.serve.inspect.queries.run_metrics import downsample_curves, find_state, select_evenly
from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.checkpoint.saved_models import list_saved_models, load_saved_model
from cutaway.train.logging.callbacks import Callback
from cutaway.train.logging.metrics_log import MetricsReader
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer

pytestmark = pytest.mark.unchecked
RECIPE: dict[str, Any] = {
    "model": {
        "form": "decoder", "vocab_size": 259, "d_model": 16, "context": 16,
        "decoder": {"layers": 2, "block": {"attention": {"heads": 2}}},
    },
    "training": {"max_steps": 6, "batch_size": 2, "preflight": False},
    "eval": {"interval": 3, "num_sequences": 2, "sample_prompt": "to be"},
    "checkpoint": {"interval": 2},
}  # fmt: skip


def build_recipe(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    data = {"seq_len": 16, "sources": [{"path": str(text)}], "validation_split": 0.2}
    return RECIPE | {"data": data} | overrides


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    directory = tmp_path_factory.mktemp("trained")
    return ct.train(build_recipe(directory), directory / "run")


@pytest.fixture
def run(trained_run: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A copy of the run, which a test may change."""
    return RunDirectory.open(Path(shutil.copytree(trained_run.directory, tmp_path / "run")))


def open_run(run: RunDirectory) -> Inspector:
    return load_catalog(str(run.directory), "to be or", "cpu", None, quiet=True).current


def read_rows(run: RunDirectory, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.directory / name).read_text().splitlines()]


@pytest.mark.parametrize("name", ["run_metrics", "run_checkpoints"])
def test_model_without_a_run_is_an_error(name: str) -> None:
    with pytest.raises(InputError, match="not from a run directory"):
        run_query(build_inspector(ct.build("tiny-gpt", seed=0)), name)


def test_long_log_is_downsampled_to_means_with_bounds() -> None:
    rows = [{"step": step, "loss": float(step % 7), "grad_norm": 1.0, "lr": 0.1} for step in range(1, 2501)]
    curves = downsample_curves(rows)
    assert len(curves["loss"]) == 834
    assert curves["loss"][0] == pytest.approx(2.0)
    assert [float(curves["loss_min"][0]), float(curves["loss_max"][0])] == [1.0, 3.0]
    assert curves["step"][-1] == 2500
    assert [row["step"] for row in select_evenly(rows, 3)] == [1, 1251, 2500]


def test_metrics_equal_the_logs(run: RunDirectory) -> None:
    inspector = open_run(run)
    data, tensors = run_query(inspector, "run_metrics")
    rows, timings = read_rows(run), read_rows(run, "timings.jsonl")
    steps = [row for row in rows if "loss" in row]
    for name in ("loss", "grad_norm", "lr"):
        assert tensors[name].tolist() == pytest.approx([row[name] for row in steps])
    assert tensors["tokens_per_second"].tolist() == pytest.approx([row["tokens_per_second"] for row in timings])
    assert [row["step"] for row in data["evals"]] == [3, 6]
    assert [row["eval_loss"] for row in data["evals"]] == [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert data["samples"][-1]["sample"].startswith("to be")
    assert (data["state"], data["step"], data["max_steps"]) == ("finished", 6, 6)
    stats = [row["layer_stats"]["update_ratio"] for row in rows if "layer_stats" in row]
    assert data["update_ratio_layers"] == list(stats[0])
    assert tensors["update_ratio_step"].tolist() == [3, 6]
    for row, layer in zip(tensors["update_ratio"], data["update_ratio_layers"], strict=True):
        assert row.tolist() == pytest.approx([each[layer] for each in stats])
    again, none = run_query(inspector, "run_metrics", known_rows=data["num_rows"])
    assert (again["unchanged"], again["state"], none) == (True, "finished", {})


def test_states() -> None:
    assert [find_state(step, 6, training) for step, training in ((6, False), (6, True), (3, True), (3, False))] == [
        "finished", "training", "training", "stopped",
    ]  # fmt: skip


def test_run_that_trains_and_stops(tmp_path: Path) -> None:
    trainer = prepare_trainer(load_recipe(build_recipe(tmp_path)), tmp_path / "run", device="cpu")
    trainer.lock.release()
    inspector = load_inspector(str(tmp_path / "run"), None, "cpu", None)  # before the first snapshot
    data, tensors = run_query(inspector, "run_metrics")
    assert (data["state"], data["step"], data["seconds_left"], tensors) == ("stopped", 0, None, {})
    assert run_query(inspector, "run_checkpoints")[0] == {
        "checkpoints": [], "open_step": 0, "next_step": 1, "can_open": False,
    }  # fmt: skip
    states = []

    def on_step_end(row: dict[str, Any], timing: dict[str, Any]) -> None:
        states.append(run_query(inspector, "run_metrics")[0])
        if row["step"] == 5:
            trainer.stop_requested.set()

    trainer.callback = trainer.run_logger.callback = Callback(on_step_end=on_step_end)
    trainer.train()
    assert [(each["state"], each["step"]) for each in states] == [("training", step) for step in range(1, 6)]
    assert all(each["seconds_left"] > 0 for each in states)
    data, _ = run_query(inspector, "run_metrics")
    assert (data["state"], data["step"]) == ("stopped", 5)
    checkpoints, _ = run_query(inspector, "run_checkpoints")
    assert [each["step"] for each in checkpoints["checkpoints"]] == [0, 1, 2, 3, 4, 5]
    assert checkpoints["next_step"] == 6
    assert load_inspector(str(tmp_path / "run"), None, "cpu", None).run_step == 5


def test_reader_parses_only_new_rows_and_notices_truncation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    reader = MetricsReader(path)
    assert reader.read() == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert reader.read() == [{"step": 1}, {"step": 2}]
    parsed: list[bytes] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: (parsed.append(text), loads(text))[1])
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert reader.read()[-1] == {"step": 3}
    assert parsed == [b'{"step": 3}\n']
    path.write_text('{"step": 1}\n{"step": 22}\n{"step": 33}\n{"step": 4}\n')  # truncated, then longer than before
    assert [row["step"] for row in reader.read()] == [1, 22, 33, 4]
    path.write_text('{"step": 1}\n')
    assert reader.read() == [{"step": 1}]


def test_checkpoint_activations_equal_the_library(run: RunDirectory) -> None:
    inspector = open_run(run)
    tokens = inspector.tokenizer.encode("to be or")
    losses = []
    for saved in list_saved_models(run):
        data, tensors = run_query(
            inspector, "checkpoint_activations", id=saved.id, input={"tokens": tokens}, position=len(tokens) - 1
        )
        checkpoint = load_saved_model(run, saved)
        ids = torch.tensor([tokens])
        with torch.no_grad(), ct.trace(checkpoint.model, "attn.pattern") as t:
            logits = checkpoint.model(ids)[0]
        assert data["loss"] == pytest.approx(float(F.cross_entropy(logits[:-1], ids[0, 1:])), rel=1e-5)
        probabilities, top = logits[-1].softmax(-1).topk(5)
        assert [each["token"] for each in data["top_tokens"]] == top.tolist()
        assert [each["probability"] for each in data["top_tokens"]] == pytest.approx(probabilities.tolist(), rel=1e-4)
        for layer in data["layers"]:
            torch.testing.assert_close(tensors[f"{layer['name']}.thumbnails"], t[f"{layer['name']}.pattern"][0])
        torch.testing.assert_close(tensors["scores"], head_scores(checkpoint, batch_size=4).values)
        assert data["step"] == saved.step
        losses.append(data["loss"])
    assert losses[-1] < losses[0]


def test_results_are_cached_and_the_model_is_released(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[weakref.ref[Any]] = []

    def load(*args: Any, **kwargs: Any) -> Any:
        checkpoint = load_saved_model(*args, **kwargs)
        loaded.append(weakref.ref(checkpoint.model))
        return checkpoint

    monkeypatch.setattr("cutaway.serve.inspect.open_run.load_saved_model", load)
    inspector = open_run(run)
    params = {"id": "snapshots/step-000000001", "input": {"tokens": [1, 2, 3]}, "position": 2}
    first, first_tensors = run_query(inspector, "checkpoint_activations", **params)
    second, second_tensors = run_query(inspector, "checkpoint_activations", **params)
    assert first == second
    assert all(torch.equal(first_tensors[name], second_tensors[name]) for name in first_tensors)
    gc.collect()
    assert [reference() for reference in loaded] == [None]


@pytest.mark.parametrize("model_id", ["snapshots/step-000000099", "../../etc/passwd", "", "model/../run"])
def test_only_listed_checkpoints_are_read(run: RunDirectory, model_id: str) -> None:
    inspector = open_run(run)
    with pytest.raises(InputError, match="not a checkpoint of this run; choose one from"):
        run_query(inspector, "checkpoint_activations", id=model_id, input={"tokens": [1, 2]}, position=1)
    with pytest.raises(InputError, match="not a model of the list"):
        run_query(inspector, "open_model", id=f"checkpoint:{model_id}")


def test_long_text_is_an_error(run: RunDirectory) -> None:
    with pytest.raises(InputError, match="limited to 256, so shorten it"):
        run_query(open_run(run), "checkpoint_activations", id="model", input={"tokens": [1] * 257}, position=1)


def test_checkpoint_is_opened_for_all_queries(run: RunDirectory) -> None:
    inspector = open_run(run)
    catalog = inspector.catalog
    assert catalog is not None
    checkpoint_id = "checkpoint:snapshots/step-000000002"
    listed = [each for each in run_query(inspector, "list_models")[0]["models"] if each["group"] == "checkpoint"]
    assert [each["name"] for each in listed] == [f"step {step}" for step in (0, 1, 2, 3, 4, 6)]
    run_query(inspector, "open_model", id=checkpoint_id)
    opened = catalog.current
    info, _ = run_query(opened, "model_info")
    assert (info["name"], info["is_run_directory"], info["default_text"]) == ("run at step 2", True, "to be or")
    assert run_query(opened, "run_checkpoints")[0]["open_step"] == opened.run_step == 2
    saved = next(each for each in list_saved_models(run) if each.step == 2)
    expected = load_saved_model(run, saved).model.state_dict()
    weights: dict[str, Tensor] = opened.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    shutil.rmtree(run.snapshot_directory)
    with pytest.raises(InputError, match="not a model of the list"):
        run_query(opened, "open_model", id=checkpoint_id)
    run_query(opened, "open_model", id="start")
    assert catalog.current.run_step == 6


def test_next_save_and_default_text(run: RunDirectory, tmp_path: Path) -> None:
    opened = OpenRun(run.directory)
    assert [opened.find_next_save(step, 1000) for step in (0, 1, 5)] == [1, 2, 6]
    assert [opened.find_next_save(step, 10**9) for step in (0, 2)] == [2, 4]
    assert opened.default_text is None
    python = build_recipe(tmp_path, eval={"sample_prompt": "def main():"})
    assert OpenRun(ct.train(python, tmp_path / "python").directory).default_text == "def main():"


@pytest.mark.parametrize("form", ["encoder", "encoder-decoder"])
def test_other_forms(form: str, tmp_path: Path) -> None:
    stack = {"layers": 1, "block": {"attention": {"heads": 2}}}
    model: dict[str, Any] = {"form": form, "d_model": 16, "context": 16, "encoder": stack}
    objective: dict[str, Any] = {"kind": "masked-lm"}
    overrides: dict[str, Any] = {"eval": {"interval": 3, "num_sequences": 2}}
    if form == "encoder-decoder":
        model["decoder"] = {"layers": 1, "block": {"attention": {"heads": 2}, "cross": {"heads": 2}}}
        objective = {"kind": "seq2seq"}
        lines = [json.dumps({"text": f"{n} {n + 1}", "target": str(n + 2)}) for n in range(40)]
        (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
        source = {"path": str(tmp_path / "pairs.jsonl"), "target_column": "target"}
        overrides["data"] = {"seq_len": 16, "sources": [source], "validation_split": 0.2}
    run = ct.train(build_recipe(tmp_path, model=model, objective=objective, **overrides), tmp_path / "run")
    inspector = open_run(run)
    model_input: dict[str, Any] = {"tokens": [5, 6, 7]}
    if form == "encoder-decoder":
        model_input["source"] = [8, 9]
    data, tensors = run_query(inspector, "checkpoint_activations", id="model", input=model_input, position=1)
    assert len(data["top_tokens"]) == 5
    if form == "encoder":
        assert data["loss"] is None
        assert "scores" in tensors
    else:
        assert data["loss"] > 0
        assert data["head_types"] == []
        assert "model with one stack" in data["score_note"]
        assert "decoder.blocks.0.cross.thumbnails" in tensors
