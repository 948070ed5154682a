"""Run directory: recipe, tokenizer, logs, checkpoints and the exported model of a training run."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.model import Transformer, build
from cutaway.tokenizer import Tokenizer, load_tokenizer
from cutaway.train.checkpoint.manifest import LoadedCheckpoint, list_checkpoints, read_checkpoint
from cutaway.train.checkpoint.pretrained_checkpoint import BaseCheckpointInfo, resolve_model_config
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import Recipe

RUN_FILE = "run.json"
RUN_FORMAT = 1


@dataclass(frozen=True)
class RunDirectory:
    """Directory of a training run, and the recipe stored in it."""

    directory: Path
    recipe: Recipe
    data_fingerprint: str
    base_info: BaseCheckpointInfo

    @classmethod
    def create(
        cls, directory: Path, recipe: Recipe, tokenizer: Tokenizer, data_fingerprint: str, base_info: BaseCheckpointInfo
    ) -> "RunDirectory":
        """Create a run directory with the recipe and the tokenizer. If the directory exists, it must be empty."""
        check_new_directory(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(directory / "tokenizer")
        metadata = {
            "format": RUN_FORMAT,
            "data_fingerprint": data_fingerprint,
            "recipe": recipe.model_dump(mode="json", exclude_none=True),
        }
        metadata |= {} if base_info.config is None else {"base_checkpoint": asdict(base_info)}
        temporary = directory / f".{RUN_FILE}"
        temporary.write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        temporary.replace(directory / RUN_FILE)  # written last, so a directory with this file is complete
        return cls(directory, recipe, data_fingerprint, base_info)

    @classmethod
    def open(cls, directory: Path) -> "RunDirectory":
        """Read the recipe and the metadata of a run directory. Raises InputError if it is not a run directory."""
        path = directory / RUN_FILE
        try:
            metadata = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"'{directory}' has no {RUN_FILE}, so it is not a run directory; pass another") from None
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read '{path}': {error}; restore it, or start a new run") from None
        if not isinstance(metadata, dict) or metadata.get("format") != RUN_FORMAT:
            raise InputError(f"'{path}' does not have the supported format ('format': {RUN_FORMAT}); update cutaway")
        base_info = BaseCheckpointInfo(**metadata.get("base_checkpoint", {}))
        return cls(directory, load_recipe(metadata["recipe"]), str(metadata["data_fingerprint"]), base_info)

    @property
    def tokenizer(self) -> Tokenizer:
        path = self.directory / "tokenizer"
        tokenizer = load_tokenizer(path)
        if tokenizer is None:
            raise InputError(f"'{path}' has no tokenizer; restore it, or start a new run")
        return tokenizer

    def check_data(self, fingerprint: str) -> None:
        """Raise InputError if the data has changed since the run started, i.e. if the fingerprint differs."""
        if fingerprint != self.data_fingerprint:
            raise InputError(
                f"the data has changed since the run '{self.directory}' started, so the run cannot continue with it;"
                " restore the files, or start a new run"
            )

    def build_checkpoint(self, model: Transformer) -> Checkpoint:
        """Build a Checkpoint from a model of this run, with the run's tokenizer and the base checkpoint's family."""
        info = self.base_info
        return Checkpoint(
            model,
            model.config,
            info.family,
            hf_config=info.hf_config,
            generation_config=info.generation_config,
            tokenizer_loader=lambda: self.tokenizer,
        )

    @property
    def checkpoint_directory(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def model_directory(self) -> Path:
        return self.directory / "model"


def check_new_directory(directory: Path) -> None:
    """Raise InputError if the directory has files, except those of a run that was killed during start-up."""
    startup_files = {"tokenizer", f".{RUN_FILE}"}
    if directory.exists() and not directory.is_dir():
        raise InputError(f"'{directory}' is a file, but a run needs a directory; pass another path")
    if directory.exists() and {path.name for path in directory.iterdir()} - startup_files:
        raise InputError(f"'{directory}' is not empty; resume the run with --resume, or pass another directory")


def load_snapshot(directory: Path, *, device: str | None = None) -> tuple[Checkpoint, int]:
    """Load the model of the newest valid checkpoint in a run directory, and return it with its step.

    If the run has no checkpoint yet, the model has its initial weights and the step is 0. A fine-tuning run without a
    checkpoint raises InputError instead.
    """
    run_directory = RunDirectory.open(directory)
    recipe, base_info = run_directory.recipe, run_directory.base_info
    config = resolve_model_config(recipe.model, run_directory.tokenizer, base_info)
    model = build(config, device=device, seed=recipe.training.seed)
    # Unlike CheckpointManager.load_latest, this does not remove partial saves.
    loaded = map(read_checkpoint, list_checkpoints(run_directory.checkpoint_directory))
    latest = next((each for each in loaded if isinstance(each, LoadedCheckpoint)), None)
    if latest is None and base_info.config is not None:
        raise InputError(f"'{directory}' has no checkpoint yet; wait for the first, or open the base checkpoint")
    if latest is not None:
        model.load_state_dict(latest.tensor_groups["model"])
    return run_directory.build_checkpoint(model.eval()), 0 if latest is None else latest.state.step
