"""Runs that take a second: a recipe, texts for it, and what a run comes to as one hash."""

import hashlib
import json
from pathlib import Path
from typing import Any

RECIPE: dict[str, Any] = {
    "model": "tiny-gpt",
    "data": {"length": 32, "validation": 0.2},
    "optimiser": {"rate": 3e-3},
    "schedule": {"warmup": 3},
    "training": {"steps": 12, "batch": 6},
    "watching": {"every": 5, "sequences": 8},
    "saving": {"every": 4},
}


def small(where: Path, **changes: Any) -> dict[str, Any]:
    """A recipe over texts that are written there; a table is changed key by key."""
    texts = where / "texts"
    if not texts.exists():
        texts.mkdir()
        for a in range(40):
            (texts / f"{a:03}.txt").write_text("".join(f"{a} and {b} make {a + b}\n" for b in range(12)))
    made = {key: dict(value) if isinstance(value, dict) else value for key, value in RECIPE.items()}
    made["data"]["sources"] = [{"path": str(texts)}]
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(made.get(name), dict)
        made[name] = {**made[name], **value} if both else value
    return made


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def state_of(run: Path) -> str:
    """Every tensor of the newest checkpoint, and the log, as one hash."""
    whole = hashlib.sha256((run / "metrics.jsonl").read_bytes())
    for file in sorted(sorted((run / "checkpoints").iterdir())[-1].glob("*.safetensors")):
        whole.update(file.name.encode() + file.read_bytes())
    return whole.hexdigest()


def weights_of(run: Path) -> bytes:
    return (sorted((run / "checkpoints").iterdir())[-1] / "weights.safetensors").read_bytes()
