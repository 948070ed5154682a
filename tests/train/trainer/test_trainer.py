"""Training: a run that was killed ends in the same bits, pieces make the same step, and a step is the peer's."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny_runs import TEXT, run_digest, tiny_recipe, write_texts

import cutaway as ct
from cutaway.cli import main
from cutaway.errors import CutawayError
from cutaway.train.logging.callbacks import Callback
from cutaway.train.recipe.load import list_recipes, load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume, resume_trainer, train
from cutaway.train.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("skip_preflight")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts")


def sampling_recipe(texts: Path, **overrides: Any) -> dict[str, Any]:
    return tiny_recipe(texts, **overrides | {"eval": {"sample_prompt": "1 and"} | overrides.get("eval", {})})


def start(arguments: list[str], **environment: str) -> "subprocess.Popen[str]":
    code = "from cutaway.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "--device", "cpu", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=os.environ | environment, text=True, **pipes)  # type: ignore[call-overload]


def test_a_recipe_is_carried_out(texts: Path, tmp_path: Path) -> None:
    run = train(sampling_recipe(texts, training={"max_steps": 60}), tmp_path / "run", device="cpu")
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    evals = [row for row in rows if "eval_loss" in row]
    assert len(losses) == 60
    assert losses[0] > 4.5
    assert losses[-1] < 0.6 * losses[0]
    assert [row["lr"] for row in rows if "lr" in row][:3] == pytest.approx([1e-3, 2e-3, 3e-3])  # while it warms up
    assert evals[-1]["eval_loss"] < evals[0]["eval_loss"]
    assert evals[-1]["sample"].startswith("1 and")
    checkpoint = ct.load(run.directory)
    assert checkpoint.tokenizer is not None
    assert ct.generate(checkpoint, "1 and", max_new_tokens=8)[0].tokens


def test_a_model_that_no_other_library_has_is_exported_as_our_own(texts: Path, tmp_path: Path) -> None:
    config = ct.config("tiny-gpt")
    after = config.replace(decoder=config.decoder.replace(placement={"kind": "post"}))
    model = after.model_dump(mode="json", exclude_none=True)
    made = sampling_recipe(texts, training={"max_steps": 2}) | {"model": model}
    run = train(made, tmp_path / "run", device="cpu")
    assert ct.load(run.directory).config.decoder.placement.kind == "post"


def test_the_same_recipe_makes_the_same_bits(texts: Path, tmp_path: Path) -> None:
    one, two = (train(sampling_recipe(texts), tmp_path / name, device="cpu") for name in "ab")
    assert run_digest(one.directory) == run_digest(two.directory)
    other = train(sampling_recipe(texts, training={"seed": 1}), tmp_path / "c", device="cpu")
    assert run_digest(other.directory) != run_digest(one.directory)


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(texts: Path, tmp_path: Path) -> None:
    whole = train(sampling_recipe(texts), tmp_path / "whole", device="cpu")
    trainer = prepare_trainer(load_recipe(sampling_recipe(texts)), tmp_path / "run", device="cpu")
    plain = trainer.train_step

    def step(number: int) -> dict[str, Any]:
        if number == 6:
            trainer.stop_requested.set()  # as a signal does: the step at hand is finished, and a checkpoint written
        return plain(number)

    trainer.train_step = step  # type: ignore[method-assign]
    trainer.train()
    assert trainer.global_step == 7
    assert not trainer.run_directory.model_directory.exists()
    with pytest.raises(CutawayError, match="a run without a model yet"):
        ct.load(trainer.run_directory.directory)
    resume(tmp_path / "run", device="cpu")
    assert run_digest(tmp_path / "run") == run_digest(whole.directory)


@pytest.mark.unchecked
@pytest.mark.parametrize("point", ["after-step:7", pytest.param("after-checkpoint:2", marks=pytest.mark.nightly)])
def test_a_run_that_was_killed_goes_on_to_the_same_bits(point: str, texts: Path, tmp_path: Path) -> None:
    whole = train(sampling_recipe(texts), tmp_path / "whole", device="cpu")
    (tmp_path / "recipe.json").write_text(json.dumps(sampling_recipe(texts)))
    first = start([str(tmp_path / "recipe.json"), "--out", str(tmp_path / "run")], CUTAWAY_FAILPOINT=point)
    said = first.communicate(timeout=120)[0]
    assert first.returncode == -signal.SIGKILL, said
    resume(tmp_path / "run", device="cpu")
    assert run_digest(tmp_path / "run") == run_digest(whole.directory)


@pytest.mark.unchecked
def test_sigterm_saves_and_ends(texts: Path, tmp_path: Path) -> None:
    """With exit code 1, and a word on how to go on."""
    (tmp_path / "recipe.json").write_text(
        json.dumps(sampling_recipe(texts, training={"max_steps": 5000}, checkpoint={"interval": 4000}))
    )
    process = start([str(tmp_path / "recipe.json"), "--out", str(tmp_path / "run")])
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 1, said
    assert "--resume" in said
    trainer = resume_trainer(tmp_path / "run", device="cpu")
    assert 0 < trainer.global_step < 5000


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    kept: dict[str, torch.Tensor] = {}

    def keep(lr_factor: float, **kwargs: Any) -> None:
        kept.update({name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None})

    trainer.optimizer.step = keep  # type: ignore[method-assign]
    trainer.train_step(0)
    return kept


def test_a_batch_in_pieces_is_the_same_step(texts: Path, tmp_path: Path) -> None:
    """Documents end anywhere, so pieces have different numbers of targets."""
    whole = gradients(prepare_trainer(load_recipe(sampling_recipe(texts)), tmp_path / "whole", device="cpu"))
    for pieces in (2, 4, 6):
        trainer = prepare_trainer(
            load_recipe(sampling_recipe(texts, training={"grad_accum_steps": pieces})),
            tmp_path / f"{pieces}",
            device="cpu",
        )
        parts = gradients(trainer)
        assert parts.keys() == whole.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["training.max_steps=0"], "training.max_steps"),
        (["training.max_stepz=3"], "did you mean 'max_steps'"),
        (["optimizer.kind=adam"], "unknown kind 'adam'"),
        (["model=tiny-bert"], "form decoder, and this one's is encoder"),
        (["data.sources=[{path='/nowhere/at/all'}]"], "/nowhere/at/all"),
        (["training"], "changes nothing"),
        (["training.max_steps.more=1"], "is no table"),
        (["data.seq_len=100000"], "give more text, or a smaller seq_len"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    changes: list[str], said: str, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(CutawayError, match=said):
        prepare_trainer(load_recipe(sampling_recipe(texts), changes), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_shipped_recipes_are_valid() -> None:
    for name in list_recipes():
        assert ct.config(load_recipe(name).model)


def test_changed_data_is_refused(texts: Path, tmp_path: Path) -> None:
    train(sampling_recipe(texts), tmp_path / "run", device="cpu")
    (texts / "000.txt").write_text("something else entirely\n" * 50)
    with pytest.raises(CutawayError, match="the data has changed"):
        resume(tmp_path / "run", device="cpu")


def test_one_file_of_text_is_enough(tmp_path: Path) -> None:
    """It is cut, so that some of it can be kept for looking at."""
    (tmp_path / "only.txt").write_text(TEXT)
    run = train(sampling_recipe(tmp_path / "only.txt", training={"max_steps": 2}), tmp_path / "run", device="cpu")
    assert run.directory.exists()


@pytest.mark.parametrize("kind", ["muon", "adafactor", "sgd"])
def test_every_optimiser_goes_on_to_the_same_bits(kind: str, texts: Path, tmp_path: Path) -> None:
    how = sampling_recipe(texts, optimizer={"kind": kind}, eval={"sample_prompt": None})
    whole = train(how, tmp_path / "whole", device="cpu")
    trainer = prepare_trainer(load_recipe(how), tmp_path / "run", device="cpu")
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == 5 else None
    trainer.train()
    assert trainer.global_step == 5
    resume(tmp_path / "run", device="cpu")
    assert run_digest(tmp_path / "run") == run_digest(whole.directory)


def test_pairs_and_masks(tmp_path: Path) -> None:
    """An encoder-decoder learns answers; each objective is refused for a model of another form."""
    rows = [json.dumps({"text": f"{a}+{b}", "target": f"{a + b}"}) for a in range(20) for b in range(10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    how = sampling_recipe(
        tmp_path / "sums.jsonl", model="tiny-t5", objective={"kind": "seq2seq", "label_smoothing": 0.1}
    )
    how["data"]["sources"][0]["target_column"] = "target"
    how["eval"]["sample_prompt"] = None
    run = train(how, tmp_path / "run", overrides=["training.max_steps=40"], device="cpu")
    losses = [row["loss"] for row in map(json.loads, (run.directory / "metrics.jsonl").open()) if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    assert ct.generate(ct.load(run.directory), "1+1", max_new_tokens=3)
    with pytest.raises(CutawayError, match="is for a model of form encoder, and this one's is decoder"):
        prepare_trainer(
            load_recipe(how, ["objective={kind='masked-lm'}", "model=tiny-gpt"]), tmp_path / "other", device="cpu"
        )


def test_damaged_checkpoints_are_named_and_the_one_before_is_taken(texts: Path, tmp_path: Path) -> None:
    whole = train(sampling_recipe(texts), tmp_path / "whole", device="cpu")
    train(sampling_recipe(texts), tmp_path / "run", device="cpu")
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    for file in newest.glob("model*"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    said: list[str] = []
    trainer = resume_trainer(tmp_path / "run", device="cpu", callback=Callback(on_message=said.append))
    assert any(newest.name in each for each in said)
    assert trainer.global_step < 12
    trainer.train()
    assert run_digest(tmp_path / "run") == run_digest(whole.directory)


POINTS = [
    f"{name}:{time}"
    for time in (1, 2, 3)
    for name in (
        "before-save", "after-file-write", "before-manifest", "before-rename", "after-rename", "before-remove",
        "after-prune", "after-step", "after-checkpoint",
    )
]  # fmt: skip


def killed(texts: Path, tmp_path: Path, seed: int, count: int) -> None:
    how = sampling_recipe(
        texts,
        eval={"sample_prompt": None},
        training={"max_steps": 90, "ema_decay": 0.9},
        checkpoint={"interval": 2},
        schedule={"warmup_steps": 9},
    )
    whole = train(how, tmp_path / "whole", device="cpu")
    (tmp_path / "recipe.json").write_text(json.dumps(how))
    script = Path(__file__).parents[2] / "support" / "crash_runner.py"
    arguments = [str(tmp_path / "recipe.json"), str(tmp_path / "run"), str(seed), str(count), *POINTS]
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= count
    assert run_digest(tmp_path / "run") == run_digest(whole.directory)


@pytest.mark.unchecked
def test_many_kills_change_nothing(texts: Path, tmp_path: Path) -> None:
    """At every failpoint, then at random instants: weights, optimizer, position and rows are the same."""
    killed(texts, tmp_path, seed=0, count=9)


@pytest.mark.nightly
@pytest.mark.unchecked
@pytest.mark.parametrize("seed", range(10))
def test_five_hundred_kills_change_nothing(seed: int, texts: Path, tmp_path: Path) -> None:
    killed(texts, tmp_path, seed=seed + 1, count=50)


def cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cutaway", "train", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_on_the_command_line(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(sampling_recipe(texts)))
    where = str(tmp_path / "run")
    options = ("--out", where, "--device", "cpu", "--json")
    assert cli(monkeypatch, str(tmp_path / "recipe.json"), *options, "--set", "training.max_steps=6") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 7))
    assert rows[-1] == {"run": where, "step": 6, "done": True, "model": str(tmp_path / "run" / "model")}
    assert cli(monkeypatch, str(tmp_path / "recipe.json"), *options) == 2
    assert "is not empty; resume what is there" in capsys.readouterr().err
    assert cli(monkeypatch, "--resume", where, "--device", "cpu") == 0
    assert cli(monkeypatch, "--schema") == 0
    assert json.loads(capsys.readouterr().out)["properties"]["training"]
    assert cli(monkeypatch) == 2
    assert cli(monkeypatch, "no-such-recipe") == 2
    assert "there is no recipe 'no-such-recipe'" in capsys.readouterr().err


def test_the_callers_random_numbers_are_their_own(texts: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    train(sampling_recipe(texts, training={"max_steps": 2}), tmp_path / "run", device="cpu")
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


def test_what_cannot_fit_is_refused_before_it_is_built(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(CutawayError, match=r"GiB, and .* are free; use a smaller model"):
        prepare_trainer(load_recipe(sampling_recipe(texts, model="llama-3.1-405b")), tmp_path / "run", device="cpu")
    said: list[str] = []
    prepare_trainer(
        load_recipe(sampling_recipe(texts)), tmp_path / "run", device="cpu", callback=Callback(on_message=said.append)
    )
    assert said[0].startswith("a step takes about")


def test_what_was_trained_opens_elsewhere(texts: Path, tmp_path: Path) -> None:
    run = train(sampling_recipe(texts), tmp_path / "run", device="cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run.model_directory).eval()
    tokens = torch.arange(20).unsqueeze(0) + 65
    ours = ct.load(run.directory).model.eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_run_killed_before_it_had_begun_can_be_begun(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)
    (tmp_path / "run" / ".run.json").write_text("{")
    assert train(
        sampling_recipe(texts, training={"max_steps": 1}), tmp_path / "run", device="cpu"
    ).model_directory.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(CutawayError, match="is not empty"):
        train(sampling_recipe(texts), tmp_path / "mine", device="cpu")


def test_a_gradient_that_is_no_number_ends_the_run(texts: Path, tmp_path: Path) -> None:
    """And its last checkpoint stays as it was."""
    how = sampling_recipe(
        texts, optimizer={"lr": 1e5}, training={"grad_clip": 1e9, "max_steps": 200}, eval={"sample_prompt": None}
    )
    with pytest.raises(CutawayError, match=r"is not finite; begin a run with a lower optimizer.lr"):
        train(how, tmp_path / "run", device="cpu")
    for _ in range(2):
        assert all(
            torch.isfinite(each).all() for each in resume_trainer(tmp_path / "run", device="cpu").model.parameters()
        )
    with pytest.raises(CutawayError, match="device 'nonsense' is not available"):
        resume_trainer(tmp_path / "run", device="nonsense")
    (tmp_path / "file").touch()
    with pytest.raises(CutawayError, match="is a file, and a run needs a directory"):
        train(how, tmp_path / "file", device="cpu")


def test_a_checkpoint_that_lacks_a_part_is_named(texts: Path, tmp_path: Path) -> None:
    trainer = prepare_trainer(load_recipe(sampling_recipe(texts)), tmp_path / "run", device="cpu")
    parts = {name: part for name, part in trainer.state_tensors().items() if name != "step_policy"}
    trainer.checkpoint_manager.save(
        1,
        parts,
        {
            "step": 1,
            "best_eval_loss": None,
            "metrics_bytes": 0,
            "timings_bytes": 0,
            "data_fingerprint": trainer.run_directory.data_fingerprint,
        },
    )
    with pytest.raises(CutawayError, match="has no step_policy"):
        resume_trainer(tmp_path / "run", device="cpu")
