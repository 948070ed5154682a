"""When it pays to make steps fast: packing, recording or compiling takes time before the first fast step.

What it took here is kept beside `cutaway bench`'s measurements, and decides the next time.
"""

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cutaway.model import Transformer
from cutaway.size.measured_hardware import user_cache_dir

DEFAULT_COSTS = {"cuda": (6.0, 0.3), "cpu": (math.inf, 1.0)}
"""Seconds to get ready, and what a fast step takes of a plain one, before anything was measured. Compiling on a CPU
takes most of a minute, which nobody waits for unasked: it is chosen once it was asked for, and so measured."""
MAX_ENTRIES = 200


@dataclass(frozen=True)
class WarmupCost:
    """Seconds: of getting ready, of a plain step, of a fast step."""

    warmup_seconds: float
    eager_step_seconds: float
    fast_step_seconds: float

    def pays_off(self, num_steps: int) -> bool:
        """Whether so many steps are done sooner if they are made fast first."""
        return self.warmup_seconds < num_steps * (self.eager_step_seconds - self.fast_step_seconds)


class WarmupCostStore:
    """What getting ready cost for this model on this machine, if it was ever done."""

    def __init__(self, model: Transformer, max_num_seqs: int, weight_bits: int | None) -> None:
        device = model.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {torch.get_num_threads()}"
        told = (name, model.config.model_dump_json(), str(model.dtype), max_num_seqs, weight_bits, torch.__version__)
        self.key = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
        self.device_type = device.type
        self.measured = self._load().get(self.key)

    def estimate(self, eager_step_seconds: float) -> WarmupCost:
        """As measured before, or a guess from a plain step of this run."""
        if self.measured is not None:
            return WarmupCost(
                self.measured.warmup_seconds,
                eager_step_seconds,
                min(eager_step_seconds, self.measured.fast_step_seconds),
            )
        ready, share = DEFAULT_COSTS[self.device_type]
        return WarmupCost(ready, eager_step_seconds, eager_step_seconds * share)

    def save(self, cost: WarmupCost) -> None:
        """For the next run. Where nothing can be kept, nothing is."""
        kept = self._load()
        kept.pop(self.key, None)
        kept[self.key] = cost
        newest = dict(list(kept.items())[-MAX_ENTRIES:])
        path = user_cache_dir() / "warmup_costs.json"
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({key: asdict(value) for key, value in newest.items()}), encoding="utf-8")
            draft.replace(path)
        except OSError:
            self.measured = cost
        self.measured = cost

    def _load(self) -> dict[str, WarmupCost]:
        try:
            data: dict[str, Any] = json.loads((user_cache_dir() / "warmup_costs.json").read_text(encoding="utf-8"))
            costs = {key: WarmupCost(**value) for key, value in data.items()}
            sound = all(isinstance(x, float) and 0 <= x < 1e6 for cost in costs.values() for x in asdict(cost).values())
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}
        return costs if sound else {}


class WarmupPolicy:
    """Watches plain steps, says when fast ones would pay, and keeps what they cost."""

    def __init__(self, cost_store: WarmupCostStore) -> None:
        self.cost_store = cost_store
        self.eager_times: list[float] = []
        self.fast_times: list[float] = []
        self.warmed_up = False
        self.warmup_seconds = 0.0

    def record_warmup(self, seconds: float) -> None:
        """Steps are fast from the first, which took so long to get ready for."""
        self.warmed_up, self.warmup_seconds = True, seconds

    def should_warm_up(self, steps_left: int) -> bool:
        """After a few plain steps: whether so many more are worth getting ready for. True once."""
        if self.warmed_up or len(self.eager_times) < 3:
            return False
        self.warmed_up = self.cost_store.estimate(min(self.eager_times)).pays_off(steps_left)
        return self.warmed_up

    def record_step(self, seconds: float) -> bool:
        """Note a step; True when there is nothing more to watch."""
        if not self.warmed_up:
            self.eager_times = [*self.eager_times[-7:], seconds]
            return False
        self.fast_times.append(seconds)
        if len(self.fast_times) < 5:
            return False
        fast = min(self.fast_times[1:])
        ready = self.warmup_seconds + max(0.0, self.fast_times[0] - fast)
        self.cost_store.save(WarmupCost(ready, min(self.eager_times, default=fast), fast))
        return True
