"""A run's directory in a few lines: what it is, how far it came, and where its files are."""

from pathlib import Path
from typing import Any

from cutaway.cli.progress import clock
from cutaway.train.rows import written
from cutaway.train.run import Run

FILES = {
    "metrics.jsonl": "a row for each step and each look",
    "timings.jsonl": "how long each step took",
    "loss.svg": "the losses as a drawing",
    "tensorboard": "the same figures for TensorBoard",
    "checkpoints": "what a run goes on from",
    "model": "what was made: cutaway generate RUN TEXT",
}


def told(directory: Path) -> dict[str, Any]:
    """The run as plain data."""
    run = Run.open(directory)
    logs = [directory / name for name in ("metrics.jsonl", "timings.jsonl")]
    rows, timings = (list(written(path)) if path.exists() else [] for path in logs)
    steps = [row for row in rows if "loss" in row]
    looks = [row for row in rows if row.get("validation") is not None]
    return {
        "run": str(directory),
        "recipe": run.recipe.model_dump(mode="json", exclude_none=True),
        "step": steps[-1]["step"] if steps else 0,
        "steps": run.recipe.training.steps,
        "loss": steps[-1]["loss"] if steps else None,
        "looks": looks,
        "best": min((row["validation"] for row in looks), default=None),
        "skipped": sum("skipped" in row for row in steps),
        "seconds": sum(row["seconds"] for row in timings),
        "files": {name: str(directory / name) for name in FILES if (directory / name).exists()},
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The same for people."""
    recipe = found["recipe"]
    model = (
        recipe["model"] if isinstance(recipe["model"], str) else f"a model of its own ({recipe['model'].get('form')})"
    )
    said = [
        f"{found['run']}: {model}, {recipe['objective']['kind']}, {recipe['optimiser']['kind']}",
        f"step {found['step']:,} of {found['steps']:,}, {clock(found['seconds'])} of steps"
        + (f", {found['skipped']} skipped" if found["skipped"] else ""),
    ]
    if found["loss"] is not None:
        said.append(f"training loss {found['loss']:.3f} nats a token")
    if found["looks"]:
        last = found["looks"][-1]
        said.append(
            f"validation {last['validation']:.3f} at step {last['step']:,}, {found['best']:.3f} at best"
            + (f"; {last['bits_per_byte']:.3f} bits a byte" if last.get("bits_per_byte") is not None else "")
        )
    width = max(map(len, found["files"]), default=0)
    said += [f"  {name:<{width}}  {FILES[name]}" for name in found["files"]]
    if found["step"] < found["steps"]:
        said.append(f"go on with: cutaway train --resume {found['run']}")
    return said
