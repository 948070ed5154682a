"""`cutaway demo`: train a small model, and trace a token through a model."""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from cutaway.cli.json_output import print_json
from cutaway.cli.options import JsonFlag, argument, option
from cutaway.errors import InputError
from cutaway.pretrained import DEFAULT_MODEL, example_text

if TYPE_CHECKING:
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.train.logging.callbacks import Callback
    from cutaway.train.trainer.trainer import Trainer


def demo(
    source: Annotated[str | None, argument("Preset name, or .toml or .json config, to trace a token through.")] = None,
    text: Annotated[str | None, option("Input text of the traced model, tokenized to bytes.")] = None,
    seed: Annotated[int, option("Random seed of the weights.")] = 0,
    steps: Annotated[int | None, option("Number of training steps; default as many as run in a minute.", min=1)] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a small model for about a minute, evaluate it, and trace a token through a trained model.

    With SOURCE or --text, build a model with random weights and show shape and norm of the last token at each site.

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
        raise InputError("--text is empty; pass at least one character")
    from cutaway.cli.tokenized_input import tokenize_bytes
    from cutaway.cli.verbs.trace import default_sites, trace_token
    from cutaway.cli.views import trace_table
    from cutaway.model import build

    tokenized = tokenize_bytes(build(model_config, seed=seed), text, None)
    journey = trace_token(tokenized, shown_sites=None if as_json else default_sites(tokenized.model))
    if as_json:
        print_json(trace_table.journey_to_dict(journey, tokenized))
    else:
        trace_table.render_journey(journey, tokenized, source)
        _print_next_steps()


def _print_next_steps() -> None:
    """Print commands to try next."""
    from rich.console import Console  # --json and --help do not need rich

    console = Console(highlight=False)
    command = "cutaway" if shutil.which("cutaway") else sys.argv[0]
    commands = {
        "open": "the same trace in the browser",
        "presets": "list the presets",
        "trace tiny-english 'Lily had a red' --all-blocks": "trace any text, model and token",
        "demo tiny-mla": "trace an untrained model: latent attention and experts",
        "train python-stdlib": "part 1 of this demo, with more steps",
        "generate tiny-english 'Once upon a time' -t 0.8": "generate a story",
        "generate tiny-english-encoder": "predict a masked word with an encoder",
        "generate tiny-dates '3. März 2021'": "convert a date with an encoder-decoder",
        "learn": "exercises, notebooks and a quiz",
    }
    console.print("\n[bold]try next[/bold]")
    for arguments, description in commands.items():
        console.print(f"  {command} {arguments:{max(map(len, commands))}}  {description}", soft_wrap=True)


PYTHON_MODEL, PROMPT, STORY_PROMPT = "tiny-python", "def ", "Once upon a time"
EVAL_FILES = ("cli/verbs/demo.py", "pretrained/__init__.py", "errors.py")
"""Files of cutaway's own source, used as evaluation text because they are in neither model's training data."""
TRAIN_SECONDS, NUM_TRIAL_STEPS, MIN_STEPS, MAX_STEPS = 60.0, 5, 20, 120
"""Training time, number of steps for the speed estimate, and minimum and maximum number of training steps."""


def _run_guided_demo(*, steps: int | None, seed: int, as_json: bool) -> None:
    """Train a model, compare it with a pretrained model, generate text with another, and trace a token through it."""
    import torch
    from rich.console import Console
    from rich.text import Text

    from cutaway.cli.tokenized_input import tokenize_for_checkpoint
    from cutaway.cli.verbs.trace import default_sites, trace_token
    from cutaway.cli.views import trace_table
    from cutaway.cli.views.terminal import escape_control_characters, indent
    from cutaway.families.load import load

    console = Console(highlight=False, quiet=as_json)
    console.print("[bold]1  Train a Transformer from scratch on Python's standard library[/bold]")
    with TemporaryDirectory(prefix="cutaway-demo-") as directory:
        steps = _estimate_steps(Path(directory) / "trial", seed) if steps is None else steps
        bits_per_byte, trained = _train_model(Path(directory) / "run", steps, seed, as_json=as_json)
        pretrained = load(PYTHON_MODEL, dtype=torch.float32)  # bfloat16 is slow on many CPUs
        data: dict[str, Any] = {"steps": steps, "validation_bits_per_byte": bits_per_byte}
        console.print("\n[bold]2  Evaluate[/bold]  [dim]your model, and one trained for a minute on a GPU[/dim]")
        for name, checkpoint in (("yours", trained), (PYTHON_MODEL, pretrained)):
            data[name] = _evaluate_model(checkpoint, seed)
            score = f"{data[name]['bits_per_byte']:.2f} bits per byte on cutaway's own source"
            console.print(f"\n[bold]{name}[/bold]  d_model {checkpoint.model.config.d_model}, {score}; sample:")
            console.print(indent(Text(escape_control_characters(data[name]["sample"]), "cyan")))
    english = load(DEFAULT_MODEL, dtype=torch.float32)
    data[DEFAULT_MODEL] = {"sample": _sample(english, STORY_PROMPT, seed)}
    console.print(f"\n[bold]3  Generate text[/bold]  [dim]with {DEFAULT_MODEL}, trained on children's stories[/dim]\n")
    console.print(indent(Text(escape_control_characters(data[DEFAULT_MODEL]["sample"]), "cyan")))
    tokenized = tokenize_for_checkpoint(english, example_text(DEFAULT_MODEL), None)
    journey = trace_token(tokenized, shown_sites=None if as_json else default_sites(tokenized.model))
    if as_json:
        data["journey"] = trace_table.journey_to_dict(journey, tokenized)
        print_json(data)
        return
    console.print("\n[bold]4  Trace a token[/bold]\n")
    trace_table.render_journey(journey, tokenized, DEFAULT_MODEL)
    _print_next_steps()


def _estimate_steps(directory: Path, seed: int) -> int:
    """Return the number of training steps that take about a minute on this machine, estimated from a few steps."""
    import time

    from cutaway.train.logging.callbacks import Callback

    trainer = _build_trainer(directory, NUM_TRIAL_STEPS, seed, Callback(), num_eval_sequences=1, preflight=False)
    start = time.perf_counter()
    trainer.train()
    return max(MIN_STEPS, min(MAX_STEPS, int(TRAIN_SECONDS * NUM_TRIAL_STEPS / (time.perf_counter() - start))))


def _train_model(directory: Path, steps: int, seed: int, *, as_json: bool) -> "tuple[float, Checkpoint]":
    """Train the recipe python-stdlib for `steps` steps. Return the validation bits per byte and the trained model."""
    from contextlib import nullcontext

    from cutaway.cli.views.training_progress import TrainingProgress
    from cutaway.families.load import load
    from cutaway.train.logging.callbacks import Callback

    progress = TrainingProgress(as_json=False)
    trainer = _build_trainer(directory, steps, seed, Callback() if as_json else progress.build_callback())
    with nullcontext() if as_json else progress.track(trainer):
        trainer.train()
    bits_per_byte = [row["bits_per_byte"] for row in trainer.metrics_log if "bits_per_byte" in row][-1]
    return bits_per_byte, load(directory)


def _build_trainer(
    directory: Path,
    steps: int,
    seed: int,
    callback: "Callback",
    *,
    num_eval_sequences: int = 32,
    preflight: bool = True,
) -> "Trainer":
    """Build a trainer for the recipe python-stdlib that evaluates and saves only at the last step."""
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
    recipe = load_recipe("python-stdlib", [f"{key}={value}" for key, value in overrides.items()])
    return prepare_trainer(recipe, directory, callback=callback)


def _evaluate_model(checkpoint: "Checkpoint", seed: int) -> dict[str, Any]:
    """Return the model's bits per byte on text that is not in its training data, and a text sample of the model."""
    from cutaway.evaluate import evaluate_causal_lm

    package_dir = Path(__file__).parents[2]
    result = evaluate_causal_lm(checkpoint, [(package_dir / name).read_text(encoding="utf-8") for name in EVAL_FILES])
    return {"bits_per_byte": result.bits_per_byte, "sample": _sample(checkpoint, PROMPT, seed)}


def _sample(checkpoint: "Checkpoint", prompt: str, seed: int) -> str:
    from cutaway.generate.api import generate

    [completion] = generate(checkpoint, prompt, max_new_tokens=120, temperature=0.7, top_k=40, seed=seed)
    return prompt + (completion.text or "").rstrip()
