"""Run directory: recipe, tokenizer, logs, checkpoints, snapshots and the exported model of a training run."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from cutaway.config.node import build_config_error
from cutaway.errors import ConfigError, InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.load import GENERATION_CONFIG_NAME
from cutaway.families.peft_format import save_adapter
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer, load_tokenizer
from cutaway.train.checkpoint.atomic_directory import (
    list_directory,
    remove_hidden_directory,
    rename_into_place,
    temporary_directory,
)
from cutaway.train.checkpoint.pretrained_checkpoint import BaseCheckpointInfo
from cutaway.train.checkpoint.run_lock import LOCK_FILE, RunLock, is_locked
from cutaway.train.logging.metrics_log import read_metrics_log
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import PretrainedModelConfig, Recipe

RUN_FILE, CHECKPOINTS = "run.json", "checkpoints"
RUN_FORMAT: Literal[1] = 1


class RunMetadata(BaseModel):
    """Contents of run.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: Literal[1] = RUN_FORMAT
    data_fingerprint: str
    recipe: dict[str, Any]
    base_checkpoint: BaseCheckpointInfo = BaseCheckpointInfo()


@dataclass(frozen=True)
class RunDirectory:
    """Directory of a training run, and the recipe stored in it."""

    directory: Path
    recipe: Recipe
    data_fingerprint: str
    base_info: BaseCheckpointInfo

    @classmethod
    def create(
        cls,
        directory: Path,
        recipe: Recipe,
        tokenizer: Tokenizer,
        data_fingerprint: str,
        base_info: BaseCheckpointInfo,
        lock: RunLock,
    ) -> "RunDirectory":
        """Create a run directory with the recipe and the tokenizer, and lock it. If it exists, it must be empty."""
        check_new_directory(directory)
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        check_new_directory(directory)  # another process may have created the same run before it had the lock
        tokenizer.save(directory / "tokenizer")
        (directory / CHECKPOINTS).mkdir(exist_ok=True)  # a run without this directory has lost its checkpoints
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
        data: Any = None
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(data, dict) and data.get("format") != RUN_FORMAT:
                raise InputError(
                    f"'{path}' does not have the supported format ('format': {RUN_FORMAT}); update cutaway"
                )
            metadata = RunMetadata.model_validate(data)
            recipe = load_recipe(metadata.recipe)
        except FileNotFoundError:
            runs = sorted(str(each.parent) for each in directory.parent.glob(f"*/{RUN_FILE}"))
            near = f": {', '.join(get_close_matches(str(directory), runs, n=3, cutoff=0) or runs[:3])}" if runs else ""
            raise InputError(
                f"'{directory}' has no {RUN_FILE}, so it is not a run directory; pass another{near}"
            ) from None
        except ValidationError as error:
            raise _damaged_error(path, build_config_error(error, data, num_tags=0)) from None
        except ConfigError as error:
            raise _damaged_error(path, f"recipe: {error}") from None
        except InputError:
            raise
        except RecursionError:
            raise _damaged_error(path, "its values are nested too deeply") from None
        except (OSError, ValueError) as error:
            raise _damaged_error(path, error) from None
        return cls(directory, recipe, metadata.data_fingerprint, metadata.base_checkpoint)

    @property
    def tokenizer(self) -> Tokenizer:
        path = self.directory / "tokenizer"
        tokenizer = load_tokenizer(path)
        if tokenizer is None:
            raise InputError(f"'{path}' has no tokenizer; restore it, or start a new run")
        return tokenizer

    def check_restart(self, log: Callable[[str], None]) -> None:
        """Check a run that has no checkpoint, before it starts at step 0 again.

        Raises InputError if it must have had one, because its logs and its model would be lost.
        """
        num_steps, interval = self._count_logged_steps(), self.recipe.checkpoint.interval
        # A process may be killed while it writes its first checkpoint, which takes at most until the second is due.
        num_unsaved = 2 * interval if self.checkpoint_directory.is_dir() else 0
        if num_steps >= num_unsaved + interval or self.model_directory.exists():
            raise InputError(
                f"'{self.checkpoint_directory}' has no checkpoint, but the run has logged {num_steps:,} steps and saves"
                f" one every {interval:,} steps: they were removed, or could not be written; restore them, or start a"
                " new run in another directory"
            )
        if num_steps:
            log(f"the run had no checkpoint yet; it starts at step 0 again, and {num_steps:,} logged steps are removed")

    def _count_logged_steps(self) -> int:
        """Number of the last step in the log. 0 if there is none, or if the log is damaged."""
        try:
            return max((int(row["step"]) for row in read_metrics_log(self.directory / "metrics.jsonl")), default=0)
        except (OSError, ValueError, TypeError, KeyError):
            return 0

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
        return self.directory / CHECKPOINTS

    @property
    def snapshot_directory(self) -> Path:
        return self.directory / "snapshots"

    @property
    def model_directory(self) -> Path:
        return self.directory / "model"

    def is_training(self) -> bool | None:
        """Whether a process trains this run. None if the file system has no locks."""
        return is_locked(self.directory)


def _damaged_error(path: Path, problem: object) -> InputError:
    return InputError(f"cannot read '{path}': {problem}; restore it, or start a new run")


def check_new_directory(directory: Path) -> None:
    """Raise InputError if the directory has files, except those of a run that was killed during start-up."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"'{directory}' is a file, but a run needs a directory; pass another path")
    startup_files = {"tokenizer", f".{RUN_FILE}", LOCK_FILE}
    if not list_directory(directory / CHECKPOINTS):
        startup_files.add(CHECKPOINTS)
    if {path.name for path in list_directory(directory)} - startup_files:
        raise InputError(f"'{directory}' is not empty; resume the run with --resume, or pass another directory")
