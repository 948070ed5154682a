"""Warm-up policy: decides when packing, CUDA graph capture or compilation saves time in the remaining decode steps.

Measured costs are stored beside the measurements of `cutaway bench` and used by later runs.
"""

import hashlib
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter

from cutaway.model import Transformer
from cutaway.user_files import user_cache_dir, write_text_atomically

_DEFAULT_COSTS = {"cuda": (6.0, 0.3), "cpu": (math.inf, 1.0)}
"""(warm-up seconds, time of a fast step / time of an eager step), used before any measurement. Compiling on a CPU takes
most of a minute, so without a measurement it is never chosen."""
_MAX_ENTRIES = 200


_Seconds = Annotated[float, Field(ge=0, lt=1e6)]


@dataclass(frozen=True)
class WarmupCost:
    """Seconds of the warm-up of fast decode steps, of one eager decode step and of one fast decode step."""

    warmup_seconds: _Seconds
    eager_step_seconds: _Seconds
    fast_step_seconds: _Seconds

    def pays_off(self, num_steps: int) -> bool:
        """Whether warm-up and `num_steps` fast decode steps take less time than `num_steps` eager ones."""
        return self.warmup_seconds < num_steps * (self.eager_step_seconds - self.fast_step_seconds)


_COSTS = TypeAdapter(dict[str, WarmupCost])


class WarmupCostStore:
    """Measured warm-up cost of a model on this machine, in a JSON file."""

    def __init__(self, model: Transformer, max_num_seqs: int, weight_bits: int | None) -> None:
        device = model.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {torch.get_num_threads()}"
        config = model.config.model_dump_json()
        identity = (name, config, str(model.dtype), max_num_seqs, weight_bits, torch.__version__)
        self.key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
        self.device_type = device.type
        self.measured = self._load().get(self.key)

    def estimate(self, eager_step_seconds: float) -> WarmupCost:
        """Return the cost from the measured warm-up and fast step if stored, else from default values.

        `eager_step_seconds`: time of an eager decode step in this run."""
        if self.measured is not None:
            fast_step_seconds = min(eager_step_seconds, self.measured.fast_step_seconds)
            return WarmupCost(self.measured.warmup_seconds, eager_step_seconds, fast_step_seconds)
        warmup_seconds, step_ratio = _DEFAULT_COSTS[self.device_type]
        return WarmupCost(warmup_seconds, eager_step_seconds, eager_step_seconds * step_ratio)

    def save(self, cost: WarmupCost) -> None:
        """Write the cost for later runs; do nothing if the directory is not writable."""
        costs = self._load()
        costs.pop(self.key, None)
        costs[self.key] = cost
        newest = dict(list(costs.items())[-_MAX_ENTRIES:])
        with suppress(OSError):
            write_text_atomically(self._path(), _COSTS.dump_json(newest).decode())
        self.measured = cost

    def _load(self) -> dict[str, WarmupCost]:
        try:
            return _COSTS.validate_json(self._path().read_bytes(), strict=True)
        except (OSError, ValueError):
            return {}

    def _path(self) -> Path:
        return user_cache_dir() / "warmup_costs.json"


class WarmupPolicy:
    """Records the times of decode steps, decides when to warm up fast ones, and stores the measured warm-up cost."""

    def __init__(self, cost_store: WarmupCostStore) -> None:
        self.cost_store = cost_store
        self.eager_times: list[float] = []
        self.fast_times: list[float] = []
        self.warmed_up = False
        self.warmup_seconds = 0.0

    def record_warmup(self, seconds: float) -> None:
        """Record the time of a warm-up that was done before the first decode step."""
        self.warmed_up, self.warmup_seconds = True, seconds

    def should_warm_up(self, steps_left: int) -> bool:
        """After three eager steps: whether a warm-up pays off for `steps_left` steps. Returns True at most once."""
        if self.warmed_up or len(self.eager_times) < 3:
            return False
        self.warmed_up = self.cost_store.estimate(min(self.eager_times)).pays_off(steps_left)
        return self.warmed_up

    def record_step(self, seconds: float) -> bool:
        """Record the time of a decode step. Return True when the fifth fast step stores the warm-up cost."""
        if not self.warmed_up:
            self.eager_times = [*self.eager_times[-7:], seconds]
            return False
        self.fast_times.append(seconds)
        if len(self.fast_times) < 5:
            return False
        fast_step = min(self.fast_times[1:])
        # The first fast step may compile; the excess counts as warm-up.
        warmup_seconds = self.warmup_seconds + max(0.0, self.fast_times[0] - fast_step)
        self.cost_store.save(WarmupCost(warmup_seconds, min(self.eager_times, default=fast_step), fast_step))
        return True
