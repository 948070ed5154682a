"""Run directory: recipe, tokenizer, logs, checkpoints, snapshots and the exported model of a training run."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path

from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.load import GENERATION_CONFIG_NAME
from cutaway.families.peft_format import save_adapter
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer, load_tokenizer
from cutaway.train.checkpoint.atomic_directory import (
    remove_hidden_directory,
    rename_into_place,
    temporary_directory,
)
from cutaway.train.checkpoint.pretrained_checkpoint import BaseCheckpointInfo
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import PretrainedModelConfig, Recipe

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
            runs = sorted(str(each.parent) for each in directory.parent.glob(f"*/{RUN_FILE}"))
            near = f": {', '.join(get_close_matches(str(directory), runs, n=3, cutoff=0) or runs[:3])}" if runs else ""
            raise InputError(
                f"'{directory}' has no {RUN_FILE}, so it is not a run directory; pass another{near}"
            ) from None
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
            sentence_transformers_config=info.sentence_transformers_config,
        )

    def export_adapter(self, checkpoint: Checkpoint) -> Path:
        """Write the adapter of the run in PEFT's format, with the tokenizer, to the model directory."""
        source = self.recipe.model
        assert isinstance(source, PretrainedModelConfig)
        base = Path(source.checkpoint).expanduser()
        with temporary_directory(self.model_directory) as temporary:
            save_adapter(checkpoint, temporary, base=base.resolve() if base.exists() else source.checkpoint)
            if checkpoint.generation_config:
                text = json.dumps(checkpoint.generation_config, indent=2) + "\n"
                (temporary / GENERATION_CONFIG_NAME).write_text(text, encoding="utf-8")
            self.tokenizer.save(temporary)
            replaced = rename_into_place(temporary, self.model_directory)
        if replaced is not None:
            remove_hidden_directory(replaced)
        return self.model_directory

    @property
    def checkpoint_directory(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def snapshot_directory(self) -> Path:
        return self.directory / "snapshots"

    @property
    def model_directory(self) -> Path:
        return self.directory / "model"

    @contextmanager
    def training_lock(self) -> Iterator[None]:
        """Context in which `is_training` is true for other processes. A killed process releases the lock."""
        with (self.directory / RUN_FILE).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH)
            except OSError:  # the file system has no locks
                yield
                return
            yield

    def is_training(self) -> bool | None:
        """Whether a process trains this run. None if the file system has no locks."""
        with (self.directory / RUN_FILE).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                return None
            return False


def check_new_directory(directory: Path) -> None:
    """Raise InputError if the directory has files, except those of a run that was killed during start-up."""
    startup_files = {"tokenizer", f".{RUN_FILE}"}
    if directory.exists() and not directory.is_dir():
        raise InputError(f"'{directory}' is a file, but a run needs a directory; pass another path")
    if directory.exists() and {path.name for path in directory.iterdir()} - startup_files:
        raise InputError(f"'{directory}' is not empty; resume the run with --resume, or pass another directory")
