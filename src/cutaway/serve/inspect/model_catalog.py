"""Models that the web page can open: pretrained models, trained variants, presets, checkpoints, the start model."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from cutaway.config.presets import build_preset, presets
from cutaway.device import free_memory
from cutaway.errors import InputError
from cutaway.families.load import load
from cutaway.generate.fast.cpu_linear import should_upcast_on_cpu
from cutaway.model import build
from cutaway.pretrained import PRETRAINED_DIR, list_pretrained, list_variants
from cutaway.serve.inspect.inspector import Inspector, build_inspector
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.size.parameters import count_parameters

MAX_PRESET_PARAMETERS = 200_000_000
"""Larger presets are not offered, because initialization and forward pass would take too long on a CPU."""

CHECKPOINT_PREFIX = "checkpoint:"


@dataclass(frozen=True)
class ModelEntry:
    """A model that can be opened. `id` is unique; two entries may have the same name."""

    id: str
    name: str
    group: Literal["start", "checkpoint", "pretrained", "variant", "preset"]
    form: str | None = None
    num_parameters: int | None = None


class ModelCatalog:
    """The models that can be opened, and the inspector of the open model.

    A query keeps the inspector with which it started, so `open` does not affect running queries. `generation` is the
    number of models opened so far; the page sends it, so that a query of another model is not answered by this one.
    """

    def __init__(
        self, inspector: Inspector, reload_start_model: Callable[[], Inspector], text: str | None = None
    ) -> None:
        """`text` is the default text of the checkpoints of the run that the start model is from."""
        self.current, self.generation = inspector, 0
        self.run, self.text = inspector.run, text
        self.reload_start_model = reload_start_model
        self.device = inspector.model.device
        config, entries = inspector.config, [*list_pretrained_entries(), *list_preset_entries()]
        self.start_id = self.current_id = find_listed_id(inspector.name) or "start"
        if self.start_id == "start":
            num_parameters = count_parameters(config).total
            entries.insert(0, ModelEntry("start", _short_name(inspector.name), "start", config.form, num_parameters))
        self.fixed_entries = {entry.id: entry for entry in entries}
        self._load_lock = threading.Lock()
        inspector.catalog = self

    @property
    def entries(self) -> dict[str, ModelEntry]:
        """Models that can be opened, by id. The checkpoints of a run that trains change."""
        saved_models = [] if self.run is None else self.run.list_saved_models()
        checkpoints = [
            ModelEntry(f"{CHECKPOINT_PREFIX}{saved.id}", f"step {saved.step:,}", "checkpoint") for saved in saved_models
        ]
        return self.fixed_entries | {entry.id: entry for entry in checkpoints}

    def open(self, model_id: str, job: QueryJob) -> Inspector:
        """Load a listed model and make it the open one. Raise an InputError for others, and during another load."""
        entry = self.entries.get(model_id)
        if entry is None:
            raise InputError(f"'{model_id[:40]}' is not a model of the list; choose one from the list of the page")
        if not self._load_lock.acquire(blocking=False):
            raise InputError(
                "another model is being loaded, and only one is loaded at a time; try again when it is open"
            )
        try:
            inspector = self._load(entry)
            job.check_cancelled()
            inspector.catalog = self
            self.current, self.current_id = inspector, model_id
            self.generation += 1
            return inspector
        finally:
            self._load_lock.release()

    def _load(self, entry: ModelEntry) -> Inspector:
        # The names are not given to a function that accepts paths: a directory could have the same name.
        if entry.id == self.start_id:
            return self.reload_start_model()
        if entry.group == "checkpoint":
            assert self.run is not None
            with self.run.load_model(entry.id.removeprefix(CHECKPOINT_PREFIX), self.device) as (checkpoint, saved):
                name = f"{self.run.name} at {entry.name}"
                text = self.run.default_text if self.text is None else self.text
                return build_inspector(checkpoint, text, name=name, run=self.run, run_step=saved.step)
        if entry.group in ("pretrained", "variant"):
            checkpoint = load(PRETRAINED_DIR / entry.name, device=self.device)
            if should_upcast_on_cpu(checkpoint.model):
                checkpoint.model.float()
            return build_inspector(checkpoint, name=entry.name)
        required_bytes = (entry.num_parameters or 0) * torch.float32.itemsize
        free_bytes = free_memory(self.device)
        if free_bytes is not None and required_bytes > free_bytes:
            raise InputError(
                f"'{entry.name}' needs {required_bytes / 1e9:.3g} GB for its weights, but {free_bytes / 1e9:.3g} GB are"
                " free; choose a smaller model"
            )
        return build_inspector(build(build_preset(entry.name), device=self.device, seed=0), name=entry.name)


@cache
def list_pretrained_entries() -> tuple[ModelEntry, ...]:
    models = [ModelEntry(f"pretrained:{name}", name, "pretrained") for name in list_pretrained()]
    variants = [ModelEntry(f"pretrained:{name}", name, "variant") for name in list_variants()]
    return (*models, *variants)


@cache
def list_preset_entries() -> tuple[ModelEntry, ...]:
    """Presets up to MAX_PRESET_PARAMETERS, smallest first."""
    counts = {name: count_parameters(build_preset(name)).total for name in presets()}
    names = sorted((name for name in counts if counts[name] <= MAX_PRESET_PARAMETERS), key=counts.__getitem__)
    return tuple(ModelEntry(f"preset:{name}", name, "preset", build_preset(name).form, counts[name]) for name in names)


def find_listed_id(source: str) -> str | None:
    """Id of the pretrained model or preset that this name means. None for a path, a Hub id or another preset."""
    if Path(source).exists():
        return None
    entries = [*list_pretrained_entries(), *list_preset_entries()]
    return next((entry.id for entry in entries if entry.name == source), None)


def _short_name(source: str) -> str:
    return source.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1] or source
