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
from cutaway.size.calibration import where

GUESS = {"cuda": (6.0, 0.3), "cpu": (math.inf, 1.0)}
"""Seconds to get ready, and what a fast step takes of a plain one, before anything was measured. Compiling on a CPU
takes most of a minute, which nobody waits for unasked: it is chosen once it was asked for, and so measured."""
MOST_KEPT = 200


@dataclass(frozen=True)
class Cost:
    """Seconds: of getting ready, of a plain step, of a fast step."""

    ready: float
    plain: float
    fast: float

    def pays(self, steps: int) -> bool:
        """Whether so many steps are done sooner if they are made fast first."""
        return self.ready < steps * (self.plain - self.fast)


class Ledger:
    """What getting ready cost for this model on this machine, if it was ever done."""

    def __init__(self, model: Transformer, rows: int, bits: int | None) -> None:
        device = model.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {torch.get_num_threads()}"
        told = (name, model.config.model_dump_json(), str(model.dtype), rows, bits, torch.__version__)
        self.key = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
        self.kind = device.type
        self.known = self._read().get(self.key)

    def cost(self, plain: float) -> Cost:
        """As measured before, or a guess from a plain step of this run."""
        if self.known is not None:
            return Cost(self.known.ready, plain, min(plain, self.known.fast))
        ready, share = GUESS[self.kind]
        return Cost(ready, plain, plain * share)

    def keep(self, cost: Cost) -> None:
        """For the next run. Where nothing can be kept, nothing is."""
        kept = self._read()
        kept.pop(self.key, None)
        kept[self.key] = cost
        newest = dict(list(kept.items())[-MOST_KEPT:])
        path = where().with_name("steps.json")
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({key: asdict(value) for key, value in newest.items()}), encoding="utf-8")
            draft.replace(path)
        except OSError:
            self.known = cost
        self.known = cost

    def _read(self) -> dict[str, Cost]:
        try:
            data: dict[str, Any] = json.loads(where().with_name("steps.json").read_text(encoding="utf-8"))
            costs = {key: Cost(**value) for key, value in data.items()}
            sound = all(isinstance(x, float) and 0 <= x < 1e6 for cost in costs.values() for x in asdict(cost).values())
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}
        return costs if sound else {}


class Pace:
    """Watches plain steps, says when fast ones would pay, and keeps what they cost."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.plain: list[float] = []
        self.fast: list[float] = []
        self.hastened = False
        self.spent = 0.0

    def begin(self, seconds: float) -> None:
        """Steps are fast from the first, which took so long to get ready for."""
        self.hastened, self.spent = True, seconds

    def pays(self, ahead: int) -> bool:
        """After a few plain steps: whether so many more are worth getting ready for. True once."""
        if self.hastened or len(self.plain) < 3:
            return False
        self.hastened = self.ledger.cost(min(self.plain)).pays(ahead)
        return self.hastened

    def took(self, seconds: float) -> bool:
        """Note a step; True when there is nothing more to watch."""
        if not self.hastened:
            self.plain = [*self.plain[-7:], seconds]
            return False
        self.fast.append(seconds)
        if len(self.fast) < 5:
            return False
        fast = min(self.fast[1:])
        ready = self.spent + max(0.0, self.fast[0] - fast)
        self.ledger.keep(Cost(ready, min(self.plain, default=fast), fast))
        return True
