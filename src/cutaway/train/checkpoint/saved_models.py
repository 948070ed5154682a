"""Saved models of a run: snapshots, checkpoints and the exported model, listed and loaded while the run may train.

Files may appear and disappear at any time. Files of other formats than safetensors are never read.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.load import load
from cutaway.model import build
from cutaway.model.adapters.adapter_methods import ADAPTER_KEY
from cutaway.train.checkpoint.checkpoint_manager import load_weights
from cutaway.train.checkpoint.manifest import (
    STATE_FILE,
    Manifest,
    TrainerState,
    list_checkpoints,
    read_checkpoint,
    read_manifest,
)
from cutaway.train.checkpoint.pretrained_checkpoint import reload_base_checkpoint, resolve_model_config
from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.checkpoint.snapshots import list_snapshots, read_snapshot
from cutaway.train.recipe.schema import PretrainedModelConfig


@dataclass(frozen=True)
class SavedModel:
    """Weights of a run at a step. `id` is the path in the run directory, without the suffix of a file."""

    id: str
    kind: Literal["snapshot", "checkpoint", "model"]
    step: int
    path: Path
    num_bytes: int
    """Size of the weights on disk."""
    modified_time: float


def list_saved_models(run: RunDirectory) -> list[SavedModel]:
    """Saved models of a run by step, one per step. Partial, damaged and vanished ones are left out."""
    by_step: dict[int, SavedModel] = {}
    for path in list_checkpoints(run.checkpoint_directory):
        manifest = read_manifest(path)
        if isinstance(manifest, Manifest):
            num_bytes = sum(entry.size for entry in manifest.files.values() if entry.group == "model")
            _add(by_step, f"checkpoints/{path.name}", "checkpoint", manifest.step, path, num_bytes)
    for step, path in list_snapshots(run.snapshot_directory).items():
        _add(by_step, f"snapshots/{path.stem}", "snapshot", step, path, None)
    exported_step = find_exported_step(run)
    if exported_step is not None:
        _add(by_step, "model", "model", exported_step, run.model_directory, None)
    return [by_step[step] for step in sorted(by_step)]


def find_exported_step(run: RunDirectory) -> int | None:
    """Step of the exported model of a run, which a run with early stopping reaches earlier. None: not exported yet."""
    if not run.model_directory.is_dir():  # it has the final name when it is complete
        return None
    for path in list_checkpoints(run.checkpoint_directory):
        try:
            state = TrainerState.model_validate_json((path / STATE_FILE).read_bytes())
        except (OSError, ValueError):  # damaged or removed: an earlier checkpoint has the state of an earlier step
            break
        is_best = run.recipe.checkpoint.export == "best" and state.best_step is not None
        return state.best_step if is_best else state.step
    return run.recipe.training.max_steps


def _add(
    by_step: dict[int, SavedModel],
    model_id: str,
    kind: Literal["snapshot", "checkpoint", "model"],
    step: int,
    path: Path,
    num_bytes: int | None,
) -> None:
    try:
        files = list(path.glob("*.safetensors")) if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files) if num_bytes is None else num_bytes
        by_step[step] = SavedModel(model_id, kind, step, path, size, path.stat().st_mtime)
    except FileNotFoundError:  # removed since it was listed
        return


def load_saved_model(run: RunDirectory, saved: SavedModel, *, device: str | None = None) -> Checkpoint:
    """Load a saved model of a run. Raises InputError if it has been removed or is damaged."""
    if saved.kind == "model":
        return load(run.model_directory, device=device)
    weights = _read_weights(saved)
    if isinstance(weights, str):
        reason = weights if saved.path.exists() else "the run has removed it, because it keeps only the newest ones"
        raise InputError(f"cannot load {saved.id} of '{run.directory}': {reason}; choose another checkpoint")
    return _build_checkpoint(run, weights, device)


def load_newest_model(run: RunDirectory, *, device: str | None = None) -> tuple[Checkpoint, int]:
    """Load the newest valid checkpoint or snapshot of a run, and return it with its step.

    If there is none yet, the model has its initial weights, or those of the base checkpoint, and the step is 0. Raises
    InputError if the base checkpoint is missing.
    """
    for saved in reversed(list_saved_models(run)):
        weights = _read_weights(saved) if saved.kind != "model" else ""
        if not isinstance(weights, str):
            return _build_checkpoint(run, weights, device), saved.step
    if run.base_info.config is None:
        return _build_checkpoint(run, None, device), 0
    training = run.recipe.training
    base_checkpoint = reload_base_checkpoint(run.recipe.model, run.base_info, training.precision, seed=training.seed)
    if base_checkpoint is None:
        raise InputError(
            f"'{run.directory}' has no checkpoint yet, and the base checkpoint it fine-tunes is missing or has changed;"
            " wait for the first checkpoint"
        )
    return _build_checkpoint(run, base_checkpoint.model.state_dict(), device), 0


def _read_weights(saved: SavedModel) -> dict[str, Tensor] | str:
    """Weights of a snapshot or checkpoint, or a description of the problem as a string."""
    if saved.kind == "snapshot":
        return read_snapshot(saved.path)
    loaded = read_checkpoint(saved.path, groups={"model"})
    return loaded if isinstance(loaded, str) else loaded.tensor_groups["model"]


def _build_checkpoint(run: RunDirectory, weights: dict[str, Tensor] | None, device: str | None) -> Checkpoint:
    source = run.recipe.model
    if isinstance(source, PretrainedModelConfig) and source.adapter is not None:
        return _build_adapter_checkpoint(run, source, weights, device)
    config = resolve_model_config(source, run.tokenizer, run.base_info)
    model = build(config, device=device, seed=run.recipe.training.seed)
    if weights is not None:
        model.load_state_dict(weights)
    return run.build_checkpoint(model.eval())


def _build_adapter_checkpoint(
    run: RunDirectory, source: PretrainedModelConfig, weights: dict[str, Tensor] | None, device: str | None
) -> Checkpoint:
    """The base model with the adapter of the run. `weights` are those of the adapter, or of the base (at step 0)."""
    training = run.recipe.training
    base_checkpoint = reload_base_checkpoint(source, run.base_info, training.precision, seed=training.seed)
    if base_checkpoint is None or source.adapter is None:
        raise InputError(
            f"the base checkpoint '{source.checkpoint}' of '{run.directory}' is missing or has changed, and a run with"
            " an adapter stores the adapter only; restore the base checkpoint"
        )
    model = base_checkpoint.model.add_adapter(source.adapter, seed=run.recipe.training.seed)
    if weights is not None and any(ADAPTER_KEY in name for name in weights):
        load_weights(model, weights)
    return run.build_checkpoint(model.to(device or "cpu").eval())
