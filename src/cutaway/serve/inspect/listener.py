"""A sampler that is listened to: what each choice was made from, and the cache it was made with."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutaway.generate.cache import Rows as CacheRows
from cutaway.generate.distribution import Needs, probabilities
from cutaway.generate.runner import Runner
from cutaway.generate.sampling import Drawn, Sampler
from cutaway.measure import equations
from cutaway.model.cache import Cache
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.look import Look

TOP = 5
PROMISED = {torch.float32: 1e-5, torch.float64: 1e-10}
"""By how much cached and full passes may differ, as a share of the largest logit; of 16 bits nothing is promised."""
TOGETHER = 64
"""Rows of logits that are compared at once: a vocabulary is wide."""


@dataclass(frozen=True)
class Choice:
    """One step: the model's logits, what was drawn from, and the cache at that moment."""

    logits: Tensor  # (V,), fp32
    drawn: Tensor  # (V,): the chances by the settings
    cache: dict[str, Any]

    def of(self, token: int) -> dict[str, Any]:
        """A token's share by the model and by the settings, its rank from 1, and how open the choice was, in bits."""
        return {
            "share": float(self.logits.softmax(-1)[token]),
            "chance": float(self.drawn[token]),
            "rank": int((self.logits > self.logits[token]).sum()) + 1,
            "entropy": float(equations.entropy(self.logits.double().softmax(-1))) / equations.UNITS["bits"],
            "left": int((self.drawn > 0).sum()),
        }

    @property
    def top(self) -> list[dict[str, Any]]:
        shares = self.logits.softmax(-1)
        best = shares.topk(min(TOP, len(shares)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [{"token": token, "share": share, "chance": float(self.drawn[token])} for token, share in pairs]


class Listener(Sampler):
    """Draws as any sampler does, and writes down what it was given."""

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        super().__init__(runner.cache.batch, vocab_size, runner.model.device)
        self.cache: CacheRows = runner.cache
        self.heard: deque[Choice] = deque()

    def sample(self, logits: Tensor, needs: Needs, active: Tensor | None = None) -> Drawn:
        chances = probabilities(logits, self.rows(1), needs)[0]
        self.heard.append(Choice(logits[0].detach().float().clone(), chances, self.state()))
        return super().sample(logits, needs, active)

    def state(self) -> dict[str, Any]:
        """What the cache holds now: tokens read, slots and bytes by layer; of rings that have wrapped, by their size,
        the position that stands in each slot (elsewhere a token's slot is its position)."""
        length = int(self.cache.length[0])
        filled = [min(length, layer.slots) for layer in self.cache.paged]
        own = [count * bytes_of_slot(layer) for count, layer in zip(filled, self.cache.paged, strict=True)]
        slots = [layer.slots for layer in self.cache.paged]
        source = sum(each.numel() * each.element_size() for each in self.cache.sources())
        held = {str(ring): positions(self.cache, ring) for ring in sorted(set(slots)) if ring < length}
        return {"length": length, "slots": slots, "filled": filled, "bytes": own, "source": source, "held": held}


def bytes_of_slot(layer: Any) -> int:
    return sum(
        tensor[0, 0].numel() * tensor.element_size()
        for store in (layer.keys, layer.values)
        for tensor in store.tensors()
    )


def positions(cache: Cache, slots: int) -> list[int]:
    """The position of the token in each slot that is filled: the last one that fell there."""
    length = int(cache.length[0])
    return [length - 1 - (length - 1 - slot) % slots for slot in range(min(length, slots))]


def compared(of: Inspector, look: Look, heard: list[Choice]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same positions in one pass: the largest difference of any logit, and each token's shares both ways."""
    hidden = of.hidden(look)[0, -len(heard) :]
    highest = 0.0
    apart = torch.zeros(len(heard))
    for first in range(0, len(heard), TOGETHER):
        whole = of.logits(hidden[first : first + TOGETHER])
        single = torch.stack([choice.logits for choice in heard[first : first + TOGETHER]])
        apart[first : first + TOGETHER] = (whole - single).abs().amax(-1).cpu()
        highest = max(highest, float(whole.abs().max()))
    largest, at = float(apart.max()), int(apart.argmax())
    told = {"largest": largest, "at": at, "of": highest, "compared": len(heard), "promised": promised(of, highest)}
    return told, {"apart": apart}


def promised(of: Inspector, size: float) -> float | None:
    share = PROMISED.get(of.model.dtype)
    return None if share is None else share * max(1.0, size)
