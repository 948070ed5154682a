"""OpenRun: a run directory shown on the page, with its metrics and saved models. The run may be training."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.generate.fast.cpu_linear import should_upcast_on_cpu
from cutaway.pretrained import EXAMPLE_TEXTS
from cutaway.serve.inspect.protocol import QueryResult
from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.checkpoint.saved_models import SavedModel, list_saved_models, load_saved_model
from cutaway.train.checkpoint.snapshots import resolve_num_snapshots, snapshot_steps
from cutaway.train.logging.metrics_log import MetricsReader

METRICS_FILE, TIMINGS_FILE = "metrics.jsonl", "timings.jsonl"
IDLE_SECONDS = 120.0
"""On a file system without locks, a run counts as stopped if its log has had no new row for this many seconds."""
MIN_PROMPT_CHARACTERS = 8
"""A shorter sample prompt is not the default text, because its attention patterns have too few tokens."""
MAX_CACHED_BYTES = 1 << 26
"""Maximum size of the cached results of queries about checkpoints in bytes."""


class OpenRun:
    """A run directory. Inspectors of the checkpoints of a run share this object."""

    def __init__(self, directory: Path) -> None:
        self.directory = RunDirectory.open(directory)
        self.metrics = MetricsReader(directory / METRICS_FILE)
        self.timings = MetricsReader(directory / TIMINGS_FILE)
        self.lock = threading.Lock()
        """Held while the logs are read."""
        self._load_lock = threading.Lock()
        self._results: OrderedDict[tuple[object, ...], QueryResult] = OrderedDict()

    @property
    def name(self) -> str:
        return self.directory.directory.resolve().name

    @property
    def max_steps(self) -> int:
        return self.directory.recipe.training.max_steps

    @property
    def is_exported(self) -> bool:
        """Whether the run has exported its model, after the last step or after early stopping."""
        return self.directory.model_directory.is_dir()

    @property
    def default_text(self) -> str | None:
        """The first sample prompt of the recipe, an example for Python code, or None."""
        recipe = self.directory.recipe
        for prompt in recipe.eval.sample_prompts[:1]:
            if len(prompt) >= MIN_PROMPT_CHARACTERS:
                return prompt
        is_python = any(source.path == "python-stdlib" for source in recipe.data.sources)
        return EXAMPLE_TEXTS["tiny-python"] if is_python else None

    def is_training(self) -> bool:
        """Whether a process trains the run."""
        is_locked = self.directory.is_training()
        if is_locked is not None:
            return is_locked
        path = self.metrics.path
        return path.exists() and abs(time.time() - path.stat().st_mtime) < IDLE_SECONDS  # the clock may be reset

    def list_saved_models(self) -> list[SavedModel]:
        return list_saved_models(self.directory)

    def find_next_save(self, step: int, num_parameters: int) -> int:
        """The first step after `step` at which a snapshot or a checkpoint is written."""
        recipe = self.directory.recipe
        is_sharded = (recipe.parallel.dp_shard, recipe.parallel.tp) != (1, 1)
        num_snapshots = 0 if is_sharded else resolve_num_snapshots(recipe.checkpoint.num_snapshots, num_parameters)
        interval = recipe.checkpoint.interval
        checkpoint_step = (step // interval + 1) * interval
        later = [each for each in snapshot_steps(num_snapshots, self.max_steps) if each > step]
        return min([checkpoint_step, self.max_steps, *later])

    def find_saved_model(self, model_id: str) -> SavedModel:
        saved = next((each for each in self.list_saved_models() if each.id == model_id), None)
        if saved is None:
            raise InputError(f"'{model_id[:40]}' is not a checkpoint of this run; choose one from the list of the page")
        return saved

    @contextmanager
    def load_model(self, model_id: str, device: torch.device) -> Iterator[tuple[Checkpoint, SavedModel]]:
        """Context with a loaded checkpoint. There is one at a time, so that at most two models are in memory."""
        with self._load_lock:
            saved = self.find_saved_model(model_id)
            checkpoint = load_saved_model(self.directory, saved, device=str(device))
            if should_upcast_on_cpu(checkpoint.model):
                checkpoint.model.float()
            yield checkpoint, saved

    def get_result(self, key: tuple[object, ...]) -> QueryResult | None:
        """The cached result of a query about a checkpoint."""
        return self._results.get(key)

    def cache_result(self, key: tuple[object, ...], result: QueryResult) -> None:
        """Cache a result, and remove the oldest ones while all of them exceed MAX_CACHED_BYTES."""
        self._results[key] = result
        sizes = [sum(tensor.nbytes for tensor in each.tensors.values()) for each in self._results.values()]
        while len(self._results) > 1 and sum(sizes) > MAX_CACHED_BYTES:
            self._results.popitem(last=False)
            sizes.pop(0)
