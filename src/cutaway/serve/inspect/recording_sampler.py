"""A sampler that is listened to: what each choice was made from, and the cache it was made with."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutaway.evaluate import functional
from cutaway.generate.engine.kv_cache import BatchKVCache
from cutaway.generate.engine.model_runner import ModelRunner
from cutaway.generate.sampling.logits_processing import logits_to_probs
from cutaway.generate.sampling.sampler import Sampler, SamplerOutput
from cutaway.generate.sampling.sampling_state import SamplingFeatures
from cutaway.model.cache import Cache
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import ModelInput

NUM_TOP_TOKENS = 5
CACHE_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""By how much cached and full passes may differ, as a share of the largest logit; of 16 bits nothing is promised."""
LOGIT_CHUNK_SIZE = 64
"""Rows of logits that are compared at once: a vocabulary is wide."""


@dataclass(frozen=True)
class SamplingStep:
    """One step: the model's logits, what was drawn from, and the cache at that moment."""

    logits: Tensor  # (V,), fp32
    sampling_probs: Tensor  # (V,): the chances by the settings
    cache_state: dict[str, Any]

    def token_stats(self, token: int) -> dict[str, Any]:
        """A token's share by the model and by the settings, its rank from 1, and how open the choice was, in bits."""
        return {
            "probability": float(self.logits.softmax(-1)[token]),
            "sampling_probability": float(self.sampling_probs[token]),
            "rank": int((self.logits > self.logits[token]).sum()) + 1,
            "entropy": float(functional.entropy(self.logits.double().softmax(-1))) / functional.NATS_PER_UNIT["bits"],
            "num_candidates": int((self.sampling_probs > 0).sum()),
        }

    @property
    def top_tokens(self) -> list[dict[str, Any]]:
        shares = self.logits.softmax(-1)
        best = shares.topk(min(NUM_TOP_TOKENS, len(shares)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [
            {"token": token, "probability": share, "sampling_probability": float(self.sampling_probs[token])}
            for token, share in pairs
        ]


class RecordingSampler(Sampler):
    """Draws as any sampler does, and writes down what it was given."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        super().__init__(runner.cache.batch_size, vocab_size, runner.model.device)
        self.cache: BatchKVCache = runner.cache
        self.recorded_steps: deque[SamplingStep] = deque()

    def sample(self, logits: Tensor, features: SamplingFeatures, active_rows: Tensor | None = None) -> SamplerOutput:
        chances = logits_to_probs(logits, self.first_rows(1), features)[0]
        self.recorded_steps.append(SamplingStep(logits[0].detach().float().clone(), chances, self.cache_state()))
        return super().sample(logits, features, active_rows)

    def cache_state(self) -> dict[str, Any]:
        """What the cache holds now: tokens read, slots and bytes by layer; of rings that have wrapped, by their size,
        the position that stands in each slot (elsewhere a token's slot is its position)."""
        length = int(self.cache.seq_lens[0])
        filled = [min(length, layer.num_slots) for layer in self.cache.paged_layers]
        own = [count * _bytes_per_slot(layer) for count, layer in zip(filled, self.cache.paged_layers, strict=True)]
        slots = [layer.num_slots for layer in self.cache.paged_layers]
        source = sum(each.numel() * each.element_size() for each in self.cache.cross_tensors())
        held = {str(ring): slot_positions(self.cache, ring) for ring in sorted(set(slots)) if ring < length}
        return {
            "length": length,
            "slots": slots,
            "num_filled": filled,
            "bytes": own,
            "source_bytes": source,
            "slot_positions": held,
        }


def _bytes_per_slot(layer: Any) -> int:
    return sum(
        tensor[0, 0].numel() * tensor.element_size()
        for store in (layer.keys, layer.values)
        for tensor in store.tensors()
    )


def slot_positions(cache: Cache, num_slots: int) -> list[int]:
    """The position of the token in each slot that is filled: the last one that fell there."""
    length = int(cache.seq_lens[0])
    return [length - 1 - (length - 1 - slot) % num_slots for slot in range(min(length, num_slots))]


def compare_with_full_pass(
    inspector: Inspector, model_input: ModelInput, steps: list[SamplingStep]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same positions in one pass: the largest difference of any logit, and each token's shares both ways."""
    hidden = inspector.last_hidden_state(model_input)[0, -len(steps) :]
    highest = 0.0
    apart = torch.zeros(len(steps))
    for first in range(0, len(steps), LOGIT_CHUNK_SIZE):
        whole = inspector.logits(hidden[first : first + LOGIT_CHUNK_SIZE])
        single = torch.stack([choice.logits for choice in steps[first : first + LOGIT_CHUNK_SIZE]])
        apart[first : first + LOGIT_CHUNK_SIZE] = (whole - single).abs().amax(-1).cpu()
        highest = max(highest, float(whole.abs().max()))
    largest, at = float(apart.max()), int(apart.argmax())
    told = {
        "max_abs_diff": largest,
        "step_index": at,
        "max_abs_logit": highest,
        "num_compared": len(steps),
        "tolerance": _logit_tolerance(inspector, highest),
    }
    return told, {"max_abs_diff": apart}


def _logit_tolerance(inspector: Inspector, max_abs_logit: float) -> float | None:
    share = CACHE_TOLERANCE.get(inspector.model.dtype)
    return None if share is None else share * max(1.0, max_abs_logit)
