"""Trainer: bit-exact resume after stops and kills, gradient accumulation, errors before training, export."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.nightly import nightly_except
from support.tiny_runs import TEXT, newest_checkpoint, run_digest, tiny_recipe, write_texts

import cutaway as ct
from cutaway.cli import main
from cutaway.errors import CutawayError
from cutaway.train.checkpoint.manifest import TrainerState, checkpoint_name
from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.logging.callbacks import Callback
from cutaway.train.recipe import list_recipes, load_recipe
from cutaway.train.recipe.schema import PretrainedModelConfig
from cutaway.train.trainer import eval_metrics
from cutaway.train.trainer.launch import prepare_trainer, resume, resume_trainer, train
from cutaway.train.trainer.resolve_recipe import resolve_precision
from cutaway.train.trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("skip_preflight")
RunForked = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(eval_metrics, "SAMPLE_TOKENS", 4)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts")


def sampling_recipe(texts: Path, **overrides: Any) -> dict[str, Any]:
    return tiny_recipe(texts, **overrides | {"eval": {"sample_prompt": "1 and"} | overrides.get("eval", {})})


def start_train_command(arguments: list[str], **environment: str) -> "subprocess.Popen[str]":
    code = "from cutaway.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "--device", "cpu", *arguments]
    return subprocess.Popen(
        command, env=os.environ | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_training_lowers_the_loss_and_exports_a_model(texts: Path, tmp_path: Path) -> None:
    run = train(sampling_recipe(texts, training={"max_steps": 60}), tmp_path / "run", device="cpu")
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    evals = [row for row in rows if "eval_loss" in row]
    assert len(losses) == 60
    assert losses[0] > 4.5
    assert losses[-1] < 0.6 * losses[0]
    assert [row["lr"] for row in rows if "lr" in row][:3] == pytest.approx([1e-3, 2e-3, 3e-3])  # warm-up
    assert evals[-1]["eval_loss"] < evals[0]["eval_loss"]
    assert evals[-1]["sample"].startswith("1 and")
    checkpoint = ct.load(run.directory)
    assert checkpoint.tokenizer is not None
    assert ct.generate(checkpoint, "1 and", max_new_tokens=8)[0].tokens


def test_model_without_a_family_is_exported_in_the_cutaway_format(texts: Path, tmp_path: Path) -> None:
    config = ct.config("tiny-gpt")
    post_norm = config.replace(decoder=config.decoder.replace(placement={"kind": "post"}))
    model = post_norm.model_dump(mode="json", exclude_none=True, exclude={"vocab_size"})
    recipe = sampling_recipe(texts, training={"max_steps": 2}) | {"model": model}
    run = train(recipe, tmp_path / "run", device="cpu")
    assert ct.load(run.directory).config.decoder.placement.kind == "post"


def test_training_is_deterministic(texts: Path, tmp_path: Path) -> None:
    one, two = (train(sampling_recipe(texts), tmp_path / name, device="cpu") for name in "ab")
    assert run_digest(one.directory) == run_digest(two.directory)
    other = train(sampling_recipe(texts, training={"seed": 1}), tmp_path / "c", device="cpu")
    assert run_digest(other.directory) != run_digest(one.directory)


def test_stopped_run_resumes_bit_exactly(texts: Path, tmp_path: Path) -> None:
    uninterrupted = train(sampling_recipe(texts), tmp_path / "uninterrupted", device="cpu")
    trainer = prepare_trainer(load_recipe(sampling_recipe(texts)), tmp_path / "run", device="cpu")
    train_step = trainer.train_step

    def train_step_with_stop(step: int) -> dict[str, Any]:
        if step == 6:
            trainer.stop_requested.set()  # as a signal handler does: finish the step, then save a checkpoint
        return train_step(step)

    trainer.train_step = train_step_with_stop  # type: ignore[method-assign]
    trainer.train()
    assert trainer.global_step == 7
    assert not trainer.run_directory.model_directory.exists()
    with pytest.raises(CutawayError, match="a training run without a saved model"):
        ct.load(trainer.run_directory.directory)
    resume(tmp_path / "run", device="cpu")
    assert run_digest(tmp_path / "run") == run_digest(uninterrupted.directory)


def test_resume_applies_overrides_of_parallel_and_rejects_others(texts: Path, tmp_path: Path) -> None:
    prepare_trainer(load_recipe(sampling_recipe(texts)), tmp_path / "run", device="cpu")
    for override in ("training.max_steps=2", "optimizer.lr=1", "parallels.tp=2"):
        with pytest.raises(CutawayError, match=rf"override '{override}' cannot be applied to a resumed run.*only"):
            resume_trainer(tmp_path / "run", overrides=[override], device="cpu")
    assert resume_trainer(tmp_path / "run", overrides=["parallel.dp_shard=all"], device="cpu").global_step == 0
    with pytest.raises(CutawayError, match=r"parallel\.tp: input should be greater than or equal to 1"):
        resume(tmp_path / "run", overrides=["parallel.tp=0"], device="cpu")


def test_ct_train_shows_its_signature() -> None:
    shown, promised = (inspect.signature(each).parameters.values() for each in (ct.train, train))
    assert [(each.name, each.kind, each.default) for each in shown] == [
        (each.name, each.kind, each.default) for each in promised
    ]
    assert inspect.getdoc(type(ct.train).__call__) == inspect.getdoc(train)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "failpoint",
    nightly_except(("after-step:7",), ["after-step:7", "before-snapshot-rename:4", "after-checkpoint:2"]),
)
def test_killed_run_resumes_bit_exactly(failpoint: str, texts: Path, tmp_path: Path, run_forked: RunForked) -> None:
    uninterrupted = train(sampling_recipe(texts), tmp_path / "uninterrupted", device="cpu")
    (tmp_path / "recipe.json").write_text(json.dumps(sampling_recipe(texts)))
    arguments = ["cutaway", "train", "--device", "cpu", str(tmp_path / "recipe.json"), "--out", str(tmp_path / "run")]
    code = f"""
import sys
from cutaway.cli import main
from cutaway.train.trainer import eval_metrics
eval_metrics.SAMPLE_TOKENS = {eval_metrics.SAMPLE_TOKENS}
sys.argv = {arguments}
main()
"""
    exit_code, output = run_forked(code, CUTAWAY_FAILPOINT=failpoint, CUTAWAY_CACHE=os.environ["CUTAWAY_CACHE"])
    assert exit_code == -signal.SIGKILL, output
    resume(tmp_path / "run", device="cpu")
    assert run_digest(tmp_path / "run") == run_digest(uninterrupted.directory)


@pytest.mark.nightly
@pytest.mark.unchecked
def test_sigterm_saves_a_checkpoint_and_exits_with_1(texts: Path, tmp_path: Path) -> None:
    """The output says how to resume."""
    (tmp_path / "recipe.json").write_text(
        json.dumps(sampling_recipe(texts, training={"max_steps": 5000}, checkpoint={"interval": 4000}))
    )
    process = start_train_command([str(tmp_path / "recipe.json"), "--out", str(tmp_path / "run")])
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 1, output
    assert "--resume" in output
    trainer = resume_trainer(tmp_path / "run", device="cpu")
    assert 0 < trainer.global_step < 5000


def test_closing_the_terminal_saves_a_checkpoint(texts: Path, tmp_path: Path) -> None:
    """SIGHUP stops the run after the step. If the process ignores SIGHUP (nohup), training continues."""
    recipe = tiny_recipe(texts, training={"max_steps": 6}, eval={"interval": 6, "num_sequences": 2})
    hang_up = Callback(on_step_end=lambda row, _: os.kill(os.getpid(), signal.SIGHUP) if row["step"] == 3 else None)
    previous_handler = signal.getsignal(signal.SIGHUP)
    stopped = train(recipe, tmp_path / "stopped", device="cpu", callback=hang_up).directory
    assert newest_checkpoint(stopped).name == checkpoint_name(3)
    assert signal.getsignal(signal.SIGHUP) == previous_handler
    resume(stopped, device="cpu")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        uninterrupted = train(recipe, tmp_path / "nohup", device="cpu", callback=hang_up).directory
    finally:
        signal.signal(signal.SIGHUP, previous_handler)
    assert run_digest(stopped) == run_digest(uninterrupted)


def first_step_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    gradients: dict[str, torch.Tensor] = {}

    def record_gradients(lr_factor: float, **kwargs: Any) -> None:
        gradients.update({name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None})

    trainer.optimizer.step = record_gradients  # type: ignore[method-assign]
    trainer.train_step(0)
    return gradients


def test_gradient_accumulation_computes_the_same_step(texts: Path, tmp_path: Path) -> None:
    """Documents end anywhere, so micro-batches have different numbers of targets."""
    expected = first_step_gradients(
        prepare_trainer(load_recipe(sampling_recipe(texts)), tmp_path / "expected", device="cpu")
    )
    for grad_accum_steps in (2, 4, 6):
        recipe = load_recipe(sampling_recipe(texts, training={"grad_accum_steps": grad_accum_steps}))
        gradients = first_step_gradients(prepare_trainer(recipe, tmp_path / f"{grad_accum_steps}", device="cpu"))
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.max_steps=0"], "training.max_steps"),
        (["training.max_stepz=3"], "did you mean 'max_steps'"),
        (["optimizer.kind=adam"], "unknown kind 'adam'"),
        (["model=tiny-bert"], "requires a model of form decoder, but model.form is encoder"),
        (["data.sources=[{path='/nowhere/at/all'}]"], "/nowhere/at/all"),
        (["training"], "is not key=value"),
        (["training.max_steps.more=1"], "is not a table"),
        (["data.seq_len=10000"], "use more text, or lower seq_len"),
    ],
)
def test_invalid_recipe_is_an_error_before_anything_is_written(
    overrides: list[str], message: str, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(CutawayError, match=message):
        prepare_trainer(load_recipe(sampling_recipe(texts), overrides), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_preset_recipes_have_valid_models() -> None:
    for name in list_recipes():
        recipe = load_recipe(name)
        assert isinstance(recipe.model, PretrainedModelConfig) or recipe.transformer_config


def test_resume_with_changed_data_is_an_error(texts: Path, tmp_path: Path) -> None:
    train(sampling_recipe(texts), tmp_path / "run", device="cpu")
    (texts / "000.txt").write_text("something else entirely\n" * 50)
    with pytest.raises(CutawayError, match="the data has changed"):
        resume(tmp_path / "run", device="cpu")


def test_one_text_file_is_split_into_documents(tmp_path: Path) -> None:
    """So that some of it is in the validation split."""
    (tmp_path / "only.txt").write_text(TEXT)
    run = train(sampling_recipe(tmp_path / "only.txt", training={"max_steps": 2}), tmp_path / "run", device="cpu")
    assert run.directory.exists()


@pytest.mark.parametrize("kind", ["muon", "adafactor", "sgd"])
def test_every_optimizer_resumes_bit_exactly(kind: str, texts: Path, tmp_path: Path) -> None:
    recipe = sampling_recipe(texts, optimizer={"kind": kind}, eval={"sample_prompt": None})
    uninterrupted = train(recipe, tmp_path / "uninterrupted", device="cpu")
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu")
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == 5 else None
    trainer.train()
    assert trainer.global_step == 5
    resume(tmp_path / "run", device="cpu")
    assert run_digest(tmp_path / "run") == run_digest(uninterrupted.directory)


def test_seq2seq_training_and_objective_of_another_form(tmp_path: Path) -> None:
    """An encoder-decoder is trained on pairs; an objective for another model form is an error."""
    rows = [json.dumps({"text": f"{a}+{b}", "target": f"{a + b}"}) for a in range(20) for b in range(10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    recipe = sampling_recipe(
        tmp_path / "sums.jsonl", model="tiny-t5", objective={"kind": "seq2seq", "label_smoothing": 0.1}
    )
    recipe["data"]["sources"][0]["target_column"] = "target"
    recipe["eval"]["sample_prompt"] = None
    run = train(recipe, tmp_path / "run", overrides=["training.max_steps=40"], device="cpu")
    losses = [row["loss"] for row in map(json.loads, (run.directory / "metrics.jsonl").open()) if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    assert ct.generate(ct.load(run.directory), "1+1", max_new_tokens=3)
    with pytest.raises(CutawayError, match=r"requires a model of form encoder, but model.form is decoder"):
        prepare_trainer(
            load_recipe(recipe, ["objective={kind='masked-lm'}", "model=tiny-gpt"]), tmp_path / "other", device="cpu"
        )


def test_damaged_checkpoint_is_reported_and_the_previous_one_used(texts: Path, tmp_path: Path) -> None:
    uninterrupted = train(sampling_recipe(texts), tmp_path / "uninterrupted", device="cpu")
    train(sampling_recipe(texts), tmp_path / "run", device="cpu")
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    for file in newest.glob("model*"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    messages: list[str] = []
    trainer = resume_trainer(tmp_path / "run", device="cpu", callback=Callback(on_message=messages.append))
    assert any(newest.name in message for message in messages)
    assert trainer.global_step < 12
    trainer.train()
    assert run_digest(tmp_path / "run") == run_digest(uninterrupted.directory)


FAILPOINTS = [
    f"{name}:{count}"
    for count in (1, 2, 3)
    for name in (
        "before-save", "after-file-write", "before-manifest", "before-rename", "after-rename", "before-remove",
        "after-prune", "after-step", "after-checkpoint",
    )
]  # fmt: skip


def assert_equal_after_kills(texts: Path, tmp_path: Path, seed: int, count: int) -> None:
    recipe = sampling_recipe(
        texts,
        eval={"sample_prompt": None},
        training={"max_steps": 90, "ema_decay": 0.9},
        checkpoint={"interval": 2},
        schedule={"warmup_steps": 9},
    )
    uninterrupted = train(recipe, tmp_path / "uninterrupted", device="cpu")
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    script = Path(__file__).parents[2] / "support" / "crash_runner.py"
    arguments = [str(tmp_path / "recipe.json"), str(tmp_path / "run"), str(seed), str(count), *FAILPOINTS]
    result = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= count
    assert run_digest(tmp_path / "run") == run_digest(uninterrupted.directory)


@pytest.mark.nightly
@pytest.mark.unchecked
def test_kills_do_not_change_the_result(texts: Path, tmp_path: Path) -> None:
    """At every failpoint, then at random times: weights, optimizer state, position and logs are the same."""
    assert_equal_after_kills(texts, tmp_path, seed=0, count=9)


@pytest.mark.nightly
@pytest.mark.unchecked
@pytest.mark.parametrize("seed", range(10))
def test_five_hundred_kills_do_not_change_the_result(seed: int, texts: Path, tmp_path: Path) -> None:
    assert_equal_after_kills(texts, tmp_path, seed=seed + 1, count=50)


def run_train_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cutaway", "train", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return int(exit_info.value.code or 0)


def test_train_command(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(sampling_recipe(texts)))
    run = str(tmp_path / "run")
    options = ("--out", run, "--device", "cpu", "--json")
    assert run_train_command(monkeypatch, str(tmp_path / "recipe.json"), *options, "--set", "training.max_steps=6") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 7))
    assert rows[-1] == {"run": run, "step": 6, "done": True, "model": str(tmp_path / "run" / "model")}
    assert run_train_command(monkeypatch, str(tmp_path / "recipe.json"), *options) == 2
    assert "is not empty; resume the run with --resume" in capsys.readouterr().err
    assert run_train_command(monkeypatch, "--resume", run, "--device", "cpu") == 0
    assert run_train_command(monkeypatch, "--schema") == 0
    assert json.loads(capsys.readouterr().out)["properties"]["training"]
    assert run_train_command(monkeypatch) == 2
    assert run_train_command(monkeypatch, "no-such-recipe") == 2
    assert "there is no recipe 'no-such-recipe'" in capsys.readouterr().err


def test_callers_random_state_is_restored(texts: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    train(sampling_recipe(texts, training={"max_steps": 2}), tmp_path / "run", device="cpu")
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


def test_model_larger_than_memory_is_an_error_before_it_is_built(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(CutawayError, match=r"GiB, but .* GiB are free; use a smaller model"):
        prepare_trainer(load_recipe(sampling_recipe(texts, model="llama-3.1-405b")), tmp_path / "run", device="cpu")
    messages: list[str] = []
    callback = Callback(on_message=messages.append)
    prepare_trainer(load_recipe(sampling_recipe(texts)), tmp_path / "run", device="cpu", callback=callback)
    assert messages[0].startswith("estimated memory per step: ")


def test_exported_model_opens_in_transformers(texts: Path, tmp_path: Path) -> None:
    run = train(sampling_recipe(texts), tmp_path / "run", device="cpu")
    reference = transformers.AutoModelForCausalLM.from_pretrained(run.model_directory).eval()
    tokens = torch.arange(20).unsqueeze(0) + 65
    model = ct.load(run.directory).model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=1e-5, atol=1e-5)


def test_run_killed_during_start_up_can_be_started_again(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)
    (tmp_path / "run" / ".run.json").write_text("{")
    assert train(
        sampling_recipe(texts, training={"max_steps": 1}), tmp_path / "run", device="cpu"
    ).model_directory.exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(CutawayError, match="is not empty"):
        train(sampling_recipe(texts), tmp_path / "other", device="cpu")


def test_nonfinite_gradient_is_an_error(texts: Path, tmp_path: Path) -> None:
    """The last checkpoint is unchanged."""
    recipe = sampling_recipe(
        texts, optimizer={"lr": 1e5}, training={"grad_clip": 1e9, "max_steps": 200}, eval={"sample_prompt": None}
    )
    with pytest.raises(CutawayError, match=r"is not finite.*start a run with a lower optimizer.lr"):
        train(recipe, tmp_path / "run", device="cpu")
    for _ in range(2):
        model = resume_trainer(tmp_path / "run", device="cpu").model
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    with pytest.raises(CutawayError, match="device 'nonsense' is not available"):
        resume_trainer(tmp_path / "run", device="nonsense")
    (tmp_path / "file").touch()
    with pytest.raises(CutawayError, match="is a file, but a run needs a directory"):
        train(recipe, tmp_path / "file", device="cpu")


def test_checkpoint_without_a_component_is_an_error(texts: Path, tmp_path: Path) -> None:
    trainer = prepare_trainer(load_recipe(sampling_recipe(texts)), tmp_path / "run", device="cpu")
    tensors = {name: group for name, group in trainer.state_tensors().items() if name != "step_policy"}
    state = TrainerState(step=1, data_fingerprint=trainer.run_directory.data_fingerprint)
    trainer.checkpoint_manager.save(tensors, state)
    trainer.lock.release()
    with pytest.raises(CutawayError, match="has no state for step_policy"):
        resume_trainer(tmp_path / "run", device="cpu")


def test_precision_auto_is_resolved_when_a_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(tiny_recipe(write_texts(tmp_path / "texts"), training={"precision": "auto", "max_steps": 1}))
    trainer = prepare_trainer(recipe, tmp_path / "run", device="cpu")
    assert trainer.recipe.training.precision == RunDirectory.open(tmp_path / "run").recipe.training.precision == "fp32"
    for is_supported, precision in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, result=is_supported: result)
        assert resolve_precision(recipe, torch.device("cuda")).training.precision == precision
