"""`cutaway demo` without a model's name: train one for a minute, and go on with the one that comes with cutaway."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.train.audience import Watcher
    from cutaway.train.loop import Loop

SHIPPED = "tiny-python"
BEGINNING = "def "
OWN = ("cli/tour.py", "cli/demo.py", "shipped/__init__.py", "errors.py")
"""Text that neither model has read: this program's own."""
MINUTE, TRIED, FEWEST, MOST = 60.0, 5, 20, 120
"""Seconds to learn for, steps to try beforehand, and how many are taken whatever they cost."""


def tour(*, steps: int | None, seed: int, as_json: bool) -> None:
    """Train, sample, measure; then the same with a model that has learned for longer, and a token's way through it."""
    import torch

    from cutaway.cli import trace_view
    from cutaway.cli.demo import try_next
    from cutaway.cli.reading import as_tokens
    from cutaway.cli.trace import followed, for_people
    from cutaway.families.load import load

    say = silent if as_json else speak
    say("[bold]1  A Transformer that has read nothing learns from Python's standard library[/bold]")
    with TemporaryDirectory(prefix="cutaway-demo-") as directory:
        steps = affordable(Path(directory) / "trial", seed) if steps is None else steps
        bits, fresh = trained(Path(directory) / "run", steps, seed, as_json=as_json)
        shipped = load(SHIPPED, dtype=torch.float32)  # 16 bits are slow on many CPUs
        told: dict[str, Any] = {"steps": steps, "validation_bits_per_byte": bits}
        say("\n[bold]2  What each has learned[/bold]  [dim]in a minute here, and in a minute on one GPU[/dim]")
        for name, checkpoint in (("yours", fresh), (SHIPPED, shipped)):
            told[name] = measured(checkpoint, seed)
            score = f"{told[name]['bits_per_byte']:.2f} bits a byte on cutaway's own source"
            say(f"\n[bold]{name}[/bold]  {checkpoint.model.config.d_model} wide, {score}; it writes:")
            say(told[name]["sample"], plain=True)
    reading = as_tokens(shipped, "for name in sorted(os.", None)
    journey = followed(reading, shown=None if as_json else for_people(reading.model))
    if as_json:
        told["journey"] = trace_view.to_data(journey, reading)
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return
    say("\n[bold]3  A token's way through it[/bold]\n")
    trace_view.show(journey, reading, SHIPPED)
    try_next()


def affordable(directory: Path, seed: int) -> int:
    """How many steps take about a minute on this machine as busy as it is: a few are tried."""
    import time

    from cutaway.train.audience import Watcher

    loop = beginning(directory, TRIED, seed, Watcher(), sequences=1, checked=False)
    start = time.perf_counter()
    loop.go()
    return max(FEWEST, min(MOST, int(MINUTE * TRIED / (time.perf_counter() - start))))


def trained(directory: Path, steps: int, seed: int, *, as_json: bool) -> "tuple[float, Checkpoint]":
    """The shipped recipe, for fewer steps; the model is in memory when its directory goes."""
    from contextlib import nullcontext

    from cutaway.cli.progress import Bar
    from cutaway.families.load import load
    from cutaway.train.audience import Watcher

    bar = Bar(as_json=False)
    loop = beginning(directory, steps, seed, Watcher() if as_json else bar.watcher())
    with nullcontext() if as_json else bar.over(loop):
        loop.go()
    last = [row["bits_per_byte"] for row in loop.rows if "bits_per_byte" in row][-1]
    return last, load(directory)


def beginning(
    directory: Path, steps: int, seed: int, watcher: "Watcher", *, sequences: int = 32, checked: bool = True
) -> "Loop":
    """The shipped recipe, looked at and saved at its end only."""
    from cutaway.train.recipe import recipe
    from cutaway.train.start import begin

    often = {"training.steps": steps, "watching.every": steps, "saving.every": steps, "watching.sequences": sequences}
    whole = {**often, "training.seed": seed, "schedule.warmup": min(10, steps), "training.check": str(checked).lower()}
    return begin(
        recipe("python-stdlib", [f"{key}={value}" for key, value in whole.items()]), directory, watcher=watcher
    )


def measured(checkpoint: "Checkpoint", seed: int) -> dict[str, Any]:
    """How it goes on, and how well it tells what it has not read."""
    from cutaway.generate.texts import generate
    from cutaway.measure import measure

    here = Path(__file__).parent.parent
    score = measure(checkpoint, [(here / name).read_text(encoding="utf-8") for name in OWN])
    how: Any = {"max_new_tokens": 120, "temperature": 0.7, "top_k": 40, "seed": seed}
    [answer] = generate(checkpoint, BEGINNING, **how)
    return {"bits_per_byte": score.bits_per_byte, "sample": BEGINNING + (answer.text or "").rstrip()}


def speak(text: str, *, plain: bool = False) -> None:
    from rich.console import Console

    from cutaway.cli.screen import visible

    console = Console(highlight=False)
    if plain:
        console.print("\n".join(f"    {line}" for line in visible(text).splitlines()), markup=False, style="cyan")
    else:
        console.print(text)


def silent(text: str, *, plain: bool = False) -> None:
    """For machines, the end is enough."""
