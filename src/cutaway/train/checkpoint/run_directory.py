"""A run's directory, which describes itself: the recipe, the tokenizer, the logs, the checkpoints, the model."""

import json
from pathlib import Path
from typing import Any

from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.model import build
from cutaway.tokenizer import Tokenizer, load_tokenizer
from cutaway.train.checkpoint.atomic_directory import list_directory
from cutaway.train.checkpoint.base_checkpoint import BaseCheckpointInfo, resolve_model_config
from cutaway.train.checkpoint.manifest import LoadedCheckpoint, read_checkpoint
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import Recipe

RUN_FILE = "run.json"
RUN_FORMAT = 1


class RunDirectory:
    """Where a run keeps what it makes."""

    def __init__(self, directory: Path, recipe: Recipe, data_fingerprint: str, base_info: BaseCheckpointInfo) -> None:
        self.directory, self.recipe = directory, recipe
        self.data_fingerprint, self.base_info = data_fingerprint, base_info

    @classmethod
    def create(
        cls, directory: Path, recipe: Recipe, tokenizer: Tokenizer, data_fingerprint: str, base_info: BaseCheckpointInfo
    ) -> "RunDirectory":
        """A new directory; one that exists must be empty."""
        check_new_directory(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(directory / "tokenizer")
        about = {
            "format": RUN_FORMAT,
            "data_fingerprint": data_fingerprint,
            "recipe": recipe.model_dump(mode="json", exclude_none=True),
        }
        about |= {"base_checkpoint": base_info.to_dict()} if base_info.config is not None else {}
        draft = directory / f".{RUN_FILE}"
        draft.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        draft.replace(directory / RUN_FILE)  # what has it is whole
        return cls(directory, recipe, data_fingerprint, base_info)

    @classmethod
    def open(cls, directory: Path) -> "RunDirectory":
        try:
            about: Any = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(
                f"'{directory}' has no {RUN_FILE}, so it is no run; give a directory that train made"
            ) from None
        except (OSError, ValueError) as error:
            raise InputError(f"'{directory / RUN_FILE}' cannot be read: {error}; restore it, or begin anew") from None
        if not isinstance(about, dict) or about.get("format") != RUN_FORMAT:
            raise InputError(f"'{directory / RUN_FILE}' is of another format than {RUN_FORMAT}; update cutaway")
        base_info = BaseCheckpointInfo(**about.get("base_checkpoint", {}))
        return cls(directory, load_recipe(about["recipe"]), str(about["data_fingerprint"]), base_info)

    @property
    def tokenizer(self) -> Tokenizer:
        found = load_tokenizer(self.directory / "tokenizer")
        if found is None:
            raise InputError(f"'{self.directory / 'tokenizer'}' holds no tokenizer; restore it, or begin anew")
        return found

    @property
    def checkpoint_directory(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def model_directory(self) -> Path:
        return self.directory / "model"


def check_new_directory(directory: Path) -> None:
    """Nothing is ever written over, but what a run left that was killed before it had begun."""
    begun = {"tokenizer", f".{RUN_FILE}"}
    if directory.exists() and not directory.is_dir():
        raise InputError(f"'{directory}' is a file, and a run needs a directory; name another")
    if directory.exists() and {each.name for each in directory.iterdir()} - begun:
        raise InputError(f"'{directory}' is not empty; resume what is there with --resume, or name another")


def load_snapshot(directory: Path, *, device: str | None = None) -> tuple[Checkpoint, int]:
    """The model of the newest checkpoint that is whole, and its step; fresh weights and 0 before the first."""
    run = RunDirectory.open(directory)
    tokenizer = run.tokenizer
    model = build(
        resolve_model_config(run.recipe, tokenizer, run.base_info), device=device, seed=run.recipe.training.seed
    )
    found = _read_latest_checkpoint(run.checkpoint_directory)
    if found is None and run.base_info.config is not None:
        raise InputError(
            f"'{directory}' has no checkpoint of its own yet; wait for its first, or open what it began with"
        )
    if found is not None:
        model.load_state_dict(found.tensor_groups["model"])
    checkpoint = Checkpoint(
        model.eval(),
        model.config,
        run.base_info.family,
        hf_config=run.base_info.hf_config,
        generation_config=run.base_info.generation_config,
        tokenizer_loader=lambda: tokenizer,
    )
    return checkpoint, 0 if found is None else found.step


def _read_latest_checkpoint(directory: Path) -> LoadedCheckpoint | None:
    """Unlike a run that goes on, this clears nothing up: another process may be writing there."""
    names = [path.name for path in list_directory(directory) if path.name.startswith("step-")]
    for name in sorted(names, reverse=True):  # all as wide, so letters go as numbers do
        found = read_checkpoint(directory / name)
        if isinstance(found, LoadedCheckpoint):
            return found
    return None
