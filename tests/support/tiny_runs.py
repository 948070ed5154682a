"""Training runs that take a second: recipe, texts, and digests of a run's results."""

import hashlib
import json
from pathlib import Path
from typing import Any

from cutaway.train.recipe.schema import SourceConfig

TEXT = "\n".join(f"{a} and {b} make {a + b}" for a in range(40) for b in range(12)) + "\n"
RECIPE: dict[str, Any] = {
    "model": "tiny-gpt",
    "data": {"seq_len": 32, "validation_split": 0.2},
    "optimizer": {"lr": 3e-3},
    "schedule": {"warmup_steps": 3},
    "training": {"max_steps": 12, "batch_size": 6},
    "eval": {"interval": 5, "num_sequences": 8},
    "checkpoint": {"interval": 4},
}


def text_source(path: Path, text_column: str = "text", target_column: str | None = None) -> SourceConfig:
    return SourceConfig(path=str(path), text_column=text_column, target_column=target_column)


def write_texts(directory: Path) -> Path:
    """Write 40 files of 12 lines each to a new directory."""
    directory.mkdir()
    lines = TEXT.splitlines(keepends=True)
    for start in range(0, len(lines), 12):
        (directory / f"{start:03}.txt").write_text("".join(lines[start : start + 12]))
    return directory


def tiny_recipe(source: Path, **overrides: Any) -> dict[str, Any]:
    """A recipe on a text file or directory; a dict in `overrides` updates the section's keys."""
    recipe = {key: dict(value) if isinstance(value, dict) else value for key, value in RECIPE.items()}
    recipe["data"]["sources"] = [{"path": str(source)}]
    for name, value in overrides.items():
        is_section = isinstance(value, dict) and isinstance(recipe.get(name), dict)
        recipe[name] = {**recipe[name], **value} if is_section else value
    return recipe


def tiny_recipe_in(directory: Path, **overrides: Any) -> dict[str, Any]:
    """`tiny_recipe` on texts in `directory`/texts, which are written if they do not exist."""
    texts = directory / "texts"
    return tiny_recipe(texts if texts.exists() else write_texts(texts), **overrides)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def newest_checkpoint(run: Path) -> Path:
    return sorted((run / "checkpoints").iterdir())[-1]


def state_digest(run: Path) -> str:
    """Hash of every tensor of the newest checkpoint and of the metrics log."""
    digest = hashlib.sha256((run / "metrics.jsonl").read_bytes())
    for file in sorted(newest_checkpoint(run).glob("*.safetensors")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def run_digest(run: Path) -> str:
    """Hash of the newest checkpoint (without timings), the metrics log and the exported model of a run."""
    digest = hashlib.sha256((run / "metrics.jsonl").read_bytes())
    for file in sorted(newest_checkpoint(run).iterdir()):
        if file.name == "state.json":
            state = json.loads(file.read_text())
            digest.update(json.dumps({key: value for key, value in state.items() if key != "timings_bytes"}).encode())
        elif file.suffix == ".safetensors":
            digest.update(file.read_bytes())
    for file in sorted((run / "model").glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def model_bytes(run: Path) -> bytes:
    return (newest_checkpoint(run) / "model.safetensors").read_bytes()
