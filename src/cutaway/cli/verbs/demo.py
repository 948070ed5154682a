"""`cutaway demo`: a token's journey through a small model."""

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.errors import InputError

if TYPE_CHECKING:
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.train.logging.callbacks import Callback
    from cutaway.train.trainer.trainer import Trainer


def demo(
    source: Annotated[
        str | None,
        typer.Argument(help="A preset's name, or a .toml or .json configuration: follow a token through it."),
    ] = None,
    text: Annotated[str | None, typer.Option(help="What that model reads, byte by byte.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the fresh weights.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="How long the model of the tour learns; else for about a minute.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Train a small model for about a minute, look at what it learned, and follow a token through a trained one.

    With a model's name or a text: build that model, run it, and follow the last token: each stage, its shape and norm.

    Example: cutaway demo

    Example: cutaway demo tiny-moe --text "Attention is all you"
    """
    if source is None and text is None:
        _run_guided_demo(steps=steps, seed=seed, as_json=as_json)
        return
    from cutaway.config import config

    source, text = source or "tiny-gpt", "The cat sat on the" if text is None else text
    model_config = config(source)
    if not text:
        raise InputError("--text is empty; give at least one character")
    from cutaway.cli.tokenized_input import MAX_TRACED_TOKENS, tokenize_bytes
    from cutaway.cli.verbs.trace import default_sites, trace_token
    from cutaway.cli.views import trace_table
    from cutaway.model import build

    reading = tokenize_bytes(build(model_config, seed=seed), text, None)
    if len(reading.tokens) > MAX_TRACED_TOKENS:
        raise InputError(
            f"--text has {len(reading.tokens)} bytes; every score is drawn, so give at most {MAX_TRACED_TOKENS}"
        )
    journey = trace_token(reading, shown_sites=None if as_json else default_sites(reading.model))
    if as_json:
        from cutaway.cli.views.terminal import json_safe

        sys.stdout.write(
            json.dumps(json_safe(trace_table.journey_to_dict(journey, reading)), indent=2, allow_nan=False) + "\n"
        )
    else:
        trace_table.render_journey(journey, reading, source)
        _print_next_steps()


def _print_next_steps() -> None:
    """Where to go from here."""
    from rich.console import Console  # --json and --help draw nothing

    console = Console(highlight=False)
    command = "cutaway" if shutil.which("cutaway") else sys.argv[0]
    tries = {
        "open": "the same way as a picture in the browser",
        "presets": "the models that have a name",
        "trace tiny-python 'import o' --all-blocks": "any text, any model, any token",
        "demo tiny-mla": "a fresh one's journey: latent attention and experts",
        "train python-stdlib": "the first part of the tour, for longer",
        "generate tiny-python 'import '": "more of what it writes",
    }
    console.print("\n[bold]try next[/bold]")
    for verb, why in tries.items():
        console.print(f"  {command} {verb:36} {why}", soft_wrap=True)


PRETRAINED_MODEL = "tiny-python"
PROMPT = "def "
EVAL_FILES = ("cli/verbs/demo.py", "pretrained/__init__.py", "errors.py")
"""Text that neither model has read: this program's own."""
TRAIN_SECONDS, NUM_TRIAL_STEPS, MIN_STEPS, MAX_STEPS = 60.0, 5, 20, 120
"""Seconds to learn for, steps to try beforehand, and how many are taken whatever they cost."""


def _run_guided_demo(*, steps: int | None, seed: int, as_json: bool) -> None:
    """Train, sample, measure; then the same with a model that has learned for longer, and a token's way through it."""
    import torch

    from cutaway.cli.tokenized_input import tokenize_for_checkpoint
    from cutaway.cli.verbs.trace import default_sites, trace_token
    from cutaway.cli.views import trace_table
    from cutaway.families.load import load

    say = _discard_text if as_json else _print_text
    say("[bold]1  A Transformer that has read nothing learns from Python's standard library[/bold]")
    with TemporaryDirectory(prefix="cutaway-demo-") as directory:
        steps = _estimate_steps(Path(directory) / "trial", seed) if steps is None else steps
        bits, fresh = _train_model(Path(directory) / "run", steps, seed, as_json=as_json)
        shipped = load(PRETRAINED_MODEL, dtype=torch.float32)  # 16 bits are slow on many CPUs
        told: dict[str, Any] = {"steps": steps, "validation_bits_per_byte": bits}
        say("\n[bold]2  What each has learned[/bold]  [dim]in a minute here, and in a minute on one GPU[/dim]")
        for name, checkpoint in (("yours", fresh), (PRETRAINED_MODEL, shipped)):
            told[name] = _evaluate_model(checkpoint, seed)
            score = f"{told[name]['bits_per_byte']:.2f} bits a byte on cutaway's own source"
            say(f"\n[bold]{name}[/bold]  {checkpoint.model.config.d_model} wide, {score}; it writes:")
            say(told[name]["sample"], is_sample=True)
    reading = tokenize_for_checkpoint(shipped, "for name in sorted(os.", None)
    journey = trace_token(reading, shown_sites=None if as_json else default_sites(reading.model))
    if as_json:
        told["journey"] = trace_table.journey_to_dict(journey, reading)
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return
    say("\n[bold]3  A token's way through it[/bold]\n")
    trace_table.render_journey(journey, reading, PRETRAINED_MODEL)
    _print_next_steps()


def _estimate_steps(directory: Path, seed: int) -> int:
    """How many steps take about a minute on this machine as busy as it is: a few are tried."""
    import time

    from cutaway.train.logging.callbacks import Callback

    loop = _build_trainer(directory, NUM_TRIAL_STEPS, seed, Callback(), num_eval_sequences=1, preflight=False)
    start = time.perf_counter()
    loop.train()
    return max(MIN_STEPS, min(MAX_STEPS, int(TRAIN_SECONDS * NUM_TRIAL_STEPS / (time.perf_counter() - start))))


def _train_model(directory: Path, steps: int, seed: int, *, as_json: bool) -> "tuple[float, Checkpoint]":
    """The shipped recipe, for fewer steps; the model is in memory when its directory goes."""
    from contextlib import nullcontext

    from cutaway.cli.views.training_progress import TrainingProgress
    from cutaway.families.load import load
    from cutaway.train.logging.callbacks import Callback

    bar = TrainingProgress(as_json=False)
    loop = _build_trainer(directory, steps, seed, Callback() if as_json else bar.build_callback())
    with nullcontext() if as_json else bar.track(loop):
        loop.train()
    last = [row["bits_per_byte"] for row in loop.metrics_log if "bits_per_byte" in row][-1]
    return last, load(directory)


def _build_trainer(
    directory: Path,
    steps: int,
    seed: int,
    callback: "Callback",
    *,
    num_eval_sequences: int = 32,
    preflight: bool = True,
) -> "Trainer":
    """The shipped recipe, looked at and saved at its end only."""
    from cutaway.train.recipe.load import load_recipe
    from cutaway.train.trainer.launch import prepare_trainer

    overrides = {
        "training.max_steps": steps,
        "eval.interval": steps,
        "checkpoint.interval": steps,
        "eval.num_sequences": num_eval_sequences,
        "training.seed": seed,
        "schedule.warmup_steps": min(10, steps),
        "training.preflight": str(preflight).lower(),
    }
    return prepare_trainer(
        load_recipe("python-stdlib", [f"{key}={value}" for key, value in overrides.items()]),
        directory,
        callback=callback,
    )


def _evaluate_model(checkpoint: "Checkpoint", seed: int) -> dict[str, Any]:
    """How it goes on, and how well it tells what it has not read."""
    from cutaway.evaluate import evaluate_causal_lm
    from cutaway.generate.api import generate

    here = Path(__file__).parents[2]
    score = evaluate_causal_lm(checkpoint, [(here / name).read_text(encoding="utf-8") for name in EVAL_FILES])
    [answer] = generate(checkpoint, PROMPT, max_new_tokens=120, temperature=0.7, top_k=40, seed=seed)
    return {"bits_per_byte": score.bits_per_byte, "sample": PROMPT + (answer.text or "").rstrip()}


def _print_text(text: str, *, is_sample: bool = False) -> None:
    from rich.console import Console

    from cutaway.cli.views.terminal import escape_control_characters

    console = Console(highlight=False)
    if is_sample:
        console.print(
            "\n".join(f"    {line}" for line in escape_control_characters(text).splitlines()),
            markup=False,
            style="cyan",
        )
    else:
        console.print(text)


def _discard_text(text: str, *, is_sample: bool = False) -> None:
    """For machines, the end is enough."""
