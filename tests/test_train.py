"""Training: a run that was killed ends in the same bits, pieces make the same step, and a step is the peer's."""

import hashlib
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

import cutaway as ct
from cutaway.cli import main
from cutaway.errors import CutawayError
from cutaway.train.audience import Watcher
from cutaway.train.loop import Loop
from cutaway.train.recipe import recipe, recipes
from cutaway.train.start import begin, go_on, resume, train

TEXT = "\n".join(f"{a} and {b} make {a + b}" for a in range(40) for b in range(12)) + "\n"
SMALL: dict[str, Any] = {
    "model": "tiny-gpt",
    "data": {"length": 32, "validation": 0.2},
    "optimiser": {"rate": 3e-3},
    "schedule": {"warmup": 3},
    "training": {"steps": 12, "batch": 6},
    "watching": {"every": 5, "sequences": 8, "sample": "1 and"},
    "saving": {"every": 4},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    directory = tmp_path / "texts"
    directory.mkdir()
    lines = TEXT.splitlines(keepends=True)
    for place in range(0, len(lines), 12):
        (directory / f"{place:03}.txt").write_text("".join(lines[place : place + 12]))
    return directory


def small(texts: Path, **changes: Any) -> dict[str, Any]:
    made = {key: dict(value) if isinstance(value, dict) else value for key, value in SMALL.items()}
    made["data"]["sources"] = [{"path": str(texts)}]
    for name, value in changes.items():
        made[name] = {**made.get(name, {}), **value} if isinstance(value, dict) else value
    return made


def fingerprint(run: Path) -> str:
    """Weights, optimiser, position and log rows of a run, as one hash."""
    whole = hashlib.sha256((run / "metrics.jsonl").read_bytes())
    newest = sorted((run / "checkpoints").iterdir())[-1]
    for file in sorted(newest.iterdir()):
        if file.name == "state.json":
            state = json.loads(file.read_text())
            whole.update(json.dumps({key: value for key, value in state.items() if key != "timings"}).encode())
        elif file.suffix == ".safetensors":
            whole.update(file.read_bytes())
    for file in sorted((run / "model").glob("*.safetensors")):
        whole.update(file.read_bytes())
    return whole.hexdigest()


def start(arguments: list[str], **environment: str) -> "subprocess.Popen[str]":
    code = "from cutaway.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "--device", "cpu", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=os.environ | environment, text=True, **pipes)  # type: ignore[call-overload]


def test_a_recipe_is_carried_out(texts: Path, tmp_path: Path) -> None:
    run = train(small(texts, training={"steps": 60}), tmp_path / "run", device="cpu")
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    looks = [row for row in rows if "validation" in row]
    assert len(losses) == 60
    assert losses[0] > 4.5
    assert losses[-1] < 0.6 * losses[0]
    assert looks[-1]["validation"] < looks[0]["validation"]
    assert looks[-1]["sample"].startswith("1 and")
    checkpoint = ct.load(run.directory)
    assert checkpoint.tokenizer is not None
    assert ct.generate(checkpoint, "1 and", max_new_tokens=8)[0].tokens


def test_a_model_that_no_other_library_has_is_exported_as_our_own(texts: Path, tmp_path: Path) -> None:
    config = ct.config("tiny-gpt")
    after = config.replace(decoder=config.decoder.replace(placement={"kind": "post"}))
    model = after.model_dump(mode="json", exclude_none=True)
    made = small(texts, training={"steps": 2}) | {"model": model}
    run = train(made, tmp_path / "run", device="cpu")
    assert ct.load(run.directory).config.decoder.placement.kind == "post"


def test_the_same_recipe_makes_the_same_bits(texts: Path, tmp_path: Path) -> None:
    one, two = (train(small(texts), tmp_path / name, device="cpu") for name in "ab")
    assert fingerprint(one.directory) == fingerprint(two.directory)
    other = train(small(texts, training={"seed": 1}), tmp_path / "c", device="cpu")
    assert fingerprint(other.directory) != fingerprint(one.directory)


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(texts: Path, tmp_path: Path) -> None:
    whole = train(small(texts), tmp_path / "whole", device="cpu")
    loop = begin(recipe(small(texts)), tmp_path / "run", device="cpu")
    plain = loop.step

    def step(number: int) -> dict[str, Any]:
        if number == 6:
            loop.stop.set()  # as a signal does: the step at hand is finished, and a checkpoint written
        return plain(number)

    loop.step = step  # type: ignore[method-assign]
    loop.go()
    assert loop.done == 7
    assert not loop.run.model.exists()
    with pytest.raises(CutawayError, match="a run without a model yet"):
        ct.load(loop.run.directory)
    resume(tmp_path / "run", device="cpu")
    assert fingerprint(tmp_path / "run") == fingerprint(whole.directory)


@pytest.mark.unchecked
@pytest.mark.parametrize("point", ["after step:7", pytest.param("after save:2", marks=pytest.mark.nightly)])
def test_a_run_that_was_killed_goes_on_to_the_same_bits(point: str, texts: Path, tmp_path: Path) -> None:
    whole = train(small(texts), tmp_path / "whole", device="cpu")
    (tmp_path / "recipe.json").write_text(json.dumps(small(texts)))
    first = start([str(tmp_path / "recipe.json"), "--out", str(tmp_path / "run")], CUTAWAY_FAILPOINT=point)
    said = first.communicate(timeout=120)[0]
    assert first.returncode == -signal.SIGKILL, said
    resume(tmp_path / "run", device="cpu")
    assert fingerprint(tmp_path / "run") == fingerprint(whole.directory)


@pytest.mark.unchecked
def test_sigterm_saves_and_ends(texts: Path, tmp_path: Path) -> None:
    """With exit code 1, and a word on how to go on."""
    (tmp_path / "recipe.json").write_text(json.dumps(small(texts, training={"steps": 5000}, saving={"every": 4000})))
    process = start([str(tmp_path / "recipe.json"), "--out", str(tmp_path / "run")])
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 1, said
    assert "--resume" in said
    loop = go_on(tmp_path / "run", device="cpu")
    assert 0 < loop.done < 5000


def gradients(loop: Loop) -> dict[str, torch.Tensor]:
    kept: dict[str, torch.Tensor] = {}

    def keep(factor: float, **how: Any) -> None:
        kept.update({name: p.grad.clone() for name, p in loop.model.named_parameters() if p.grad is not None})

    loop.optimiser.step = keep  # type: ignore[method-assign]
    loop.step(0)
    return kept


def test_a_batch_in_pieces_is_the_same_step(texts: Path, tmp_path: Path) -> None:
    """Documents end anywhere, so pieces have different numbers of targets."""
    whole = gradients(begin(recipe(small(texts)), tmp_path / "whole", device="cpu"))
    for pieces in (2, 4, 6):
        loop = begin(recipe(small(texts, training={"pieces": pieces})), tmp_path / f"{pieces}", device="cpu")
        parts = gradients(loop)
        assert parts.keys() == whole.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["training.steps=0"], "training.steps"),
        (["training.stepz=3"], "did you mean 'steps'"),
        (["optimiser.kind=adam"], "unknown kind 'adam'"),
        (["model=tiny-bert"], "form decoder, and this one's is encoder"),
        (["data.sources=[{path='/nowhere/at/all'}]"], "/nowhere/at/all"),
        (["training"], "changes nothing"),
        (["training.steps.more=1"], "is no table"),
        (["data.length=100000"], "give more text, or a smaller length"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    changes: list[str], said: str, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(CutawayError, match=said):
        begin(recipe(small(texts), changes), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_shipped_recipes_are_valid() -> None:
    for name in recipes():
        assert ct.config(recipe(name).model)


def test_changed_data_is_refused(texts: Path, tmp_path: Path) -> None:
    train(small(texts), tmp_path / "run", device="cpu")
    (texts / "000.txt").write_text("something else entirely\n" * 50)
    with pytest.raises(CutawayError, match="the data has changed"):
        resume(tmp_path / "run", device="cpu")


def test_one_file_of_text_is_enough(tmp_path: Path) -> None:
    """It is cut, so that some of it can be kept for looking at."""
    (tmp_path / "only.txt").write_text(TEXT)
    run = train(small(tmp_path / "only.txt", training={"steps": 2}), tmp_path / "run", device="cpu")
    assert run.directory.exists()


@pytest.mark.parametrize("kind", ["muon", "adafactor", "sgd"])
def test_every_optimiser_goes_on_to_the_same_bits(kind: str, texts: Path, tmp_path: Path) -> None:
    how = small(texts, optimiser={"kind": kind}, watching={"sample": None})
    whole = train(how, tmp_path / "whole", device="cpu")
    loop = begin(recipe(how), tmp_path / "run", device="cpu")
    loop.watcher.step = lambda row, timing: loop.stop.set() if row["step"] == 5 else None
    loop.go()
    assert loop.done == 5
    resume(tmp_path / "run", device="cpu")
    assert fingerprint(tmp_path / "run") == fingerprint(whole.directory)


def test_pairs_and_masks(tmp_path: Path) -> None:
    """An encoder-decoder learns answers; each objective is refused for a model of another form."""
    rows = [json.dumps({"text": f"{a}+{b}", "target": f"{a + b}"}) for a in range(20) for b in range(10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    how = small(tmp_path / "sums.jsonl", model="tiny-t5", objective={"kind": "seq2seq", "smoothing": 0.1})
    how["data"]["sources"][0]["target"] = "target"
    how["watching"]["sample"] = None
    run = train(how, tmp_path / "run", changes=["training.steps=40"], device="cpu")
    losses = [row["loss"] for row in map(json.loads, (run.directory / "metrics.jsonl").open()) if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    assert ct.generate(ct.load(run.directory), "1+1", max_new_tokens=3)
    with pytest.raises(CutawayError, match="is for a model of form encoder, and this one's is decoder"):
        begin(recipe(how, ["objective={kind='masked'}", "model=tiny-gpt"]), tmp_path / "other", device="cpu")


def test_damaged_checkpoints_are_named_and_the_one_before_is_taken(texts: Path, tmp_path: Path) -> None:
    whole = train(small(texts), tmp_path / "whole", device="cpu")
    train(small(texts), tmp_path / "run", device="cpu")
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    for file in newest.glob("weights*"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    said: list[str] = []
    loop = go_on(tmp_path / "run", device="cpu", watcher=Watcher(say=said.append))
    assert any(newest.name in each for each in said)
    assert loop.done < 12
    loop.go()
    assert fingerprint(tmp_path / "run") == fingerprint(whole.directory)


POINTS = [
    f"{name}:{time}"
    for time in (1, 2, 3)
    for name in (
        "before save", "after file", "before manifest", "before rename", "after rename", "before removing",
        "after prune", "after step", "after save",
    )
]  # fmt: skip


def killed(texts: Path, tmp_path: Path, seed: int, count: int) -> None:
    how = small(
        texts,
        watching={"sample": None},
        training={"steps": 90, "ema": 0.9},
        saving={"every": 2},
        schedule={"warmup": 9},
    )
    whole = train(how, tmp_path / "whole", device="cpu")
    (tmp_path / "recipe.json").write_text(json.dumps(how))
    script = Path(__file__).with_name("kill_runs.py")
    arguments = [str(tmp_path / "recipe.json"), str(tmp_path / "run"), str(seed), str(count), *POINTS]
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= count
    assert fingerprint(tmp_path / "run") == fingerprint(whole.directory)


@pytest.mark.unchecked
def test_many_kills_change_nothing(texts: Path, tmp_path: Path) -> None:
    """At every failpoint, then at random instants: weights, optimiser, position and rows are the same."""
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
    (tmp_path / "recipe.json").write_text(json.dumps(small(texts)))
    where = str(tmp_path / "run")
    options = ("--out", where, "--device", "cpu", "--json")
    assert cli(monkeypatch, str(tmp_path / "recipe.json"), *options, "--set", "training.steps=6") == 0
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
    train(small(texts, training={"steps": 2}), tmp_path / "run", device="cpu")
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


def test_what_cannot_fit_is_refused_before_it_is_built(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(CutawayError, match=r"GiB, and .* are free; use a smaller model"):
        begin(recipe(small(texts, model="llama-3.1-405b")), tmp_path / "run", device="cpu")
    said: list[str] = []
    begin(recipe(small(texts)), tmp_path / "run", device="cpu", watcher=Watcher(say=said.append))
    assert said[0].startswith("a step takes about")


def test_what_was_trained_opens_elsewhere(texts: Path, tmp_path: Path) -> None:
    run = train(small(texts), tmp_path / "run", device="cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run.model).eval()
    tokens = torch.arange(20).unsqueeze(0) + 65
    ours = ct.load(run.directory).model.eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_run_killed_before_it_had_begun_can_be_begun(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)
    (tmp_path / "run" / ".run.json").write_text("{")
    assert train(small(texts, training={"steps": 1}), tmp_path / "run", device="cpu").model.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(CutawayError, match="is not empty"):
        train(small(texts), tmp_path / "mine", device="cpu")


def test_a_gradient_that_is_no_number_ends_the_run(texts: Path, tmp_path: Path) -> None:
    """And its last checkpoint stays as it was."""
    how = small(texts, optimiser={"rate": 1e5}, training={"clip": 1e9, "steps": 200}, watching={"sample": None})
    with pytest.raises(CutawayError, match=r"is not finite; begin a run with a lower optimiser.rate"):
        train(how, tmp_path / "run", device="cpu")
    for _ in range(2):
        assert all(torch.isfinite(each).all() for each in go_on(tmp_path / "run", device="cpu").model.parameters())
    with pytest.raises(CutawayError, match="device is 'nonsense', which is not here"):
        go_on(tmp_path / "run", device="nonsense")
    (tmp_path / "file").touch()
    with pytest.raises(CutawayError, match="is a file, and a run needs a directory"):
        train(how, tmp_path / "file", device="cpu")


def test_a_checkpoint_that_lacks_a_part_is_named(texts: Path, tmp_path: Path) -> None:
    loop = begin(recipe(small(texts)), tmp_path / "run", device="cpu")
    parts = {name: part for name, part in loop.tensors().items() if name != "policy"}
    loop.store.save(1, parts, {"step": 1, "best": None, "rows": 0, "timings": 0, "data": loop.run.fingerprint})
    with pytest.raises(CutawayError, match="has no policy"):
        go_on(tmp_path / "run", device="cpu")
