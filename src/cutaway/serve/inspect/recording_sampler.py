"""Sampler that records each decode step, and the comparison of the recorded logits with a full forward pass."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutaway.evaluate import functional
from cutaway.generate.engine.kv_cache import BatchKVCache
from cutaway.generate.engine.model_runner import ModelRunner
from cutaway.generate.sampling.logits_processing import logits_to_probs, mask_by_grammar
from cutaway.generate.sampling.sampler import Sampler, SamplerOutput
from cutaway.generate.sampling.sampling_state import SamplingFeatures
from cutaway.model.cache import Cache
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import ModelInput, TokenizerAdapter

NUM_TOP_TOKENS = 5
CACHE_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Allowed difference between cached and full forward passes, relative to the largest logit. 16-bit dtypes have none."""
LOGIT_CHUNK_SIZE = 64
"""Number of positions whose logits are compared at once. This limits memory for large vocabularies."""


@dataclass(frozen=True)
class SamplingStep:
    """One decode step: the model's logits, the sampling distribution, the KV cache state and the allowed tokens."""

    logits: Tensor  # (V,), fp32
    sampling_probs: Tensor  # (V,), after temperature, top-k, top-p
    cache_state: dict[str, object]
    is_allowed: Tensor | None = None  # (V,) bool: tokens that the grammar allows; None without a grammar

    def token_stats(self, token: int) -> dict[str, float]:
        """Return the probability, sampling probability and rank of a token, and statistics of this step.

        Rank 1 is the most likely token. The entropy, in bits, is that of the model's distribution. `num_candidates` is
        the number of tokens with a sampling probability above 0.
        """
        return {
            "probability": float(self.logits.softmax(-1)[token]),
            "sampling_probability": float(self.sampling_probs[token]),
            "rank": int((self.logits > self.logits[token]).sum()) + 1,
            "entropy": float(functional.entropy(self.logits.double().softmax(-1))) / functional.NATS_PER_UNIT["bits"],
            "num_candidates": int((self.sampling_probs > 0).sum()),
        }

    def top_tokens(self, tokenizer: TokenizerAdapter) -> list[dict[str, Any]]:
        """Return the most likely tokens, most likely first, with model probability and sampling probability."""
        probabilities = self.logits.softmax(-1)
        return self._describe(probabilities.topk(min(NUM_TOP_TOKENS, len(probabilities))).indices, tokenizer)

    def grammar_stats(self, tokenizer: TokenizerAdapter) -> dict[str, object] | None:
        """Return the number of tokens that the grammar allows, their total model probability, and the most likely ones.

        None without a grammar."""
        if self.is_allowed is None:
            return None
        probabilities = self.logits.softmax(-1)
        num_allowed = int(self.is_allowed.sum())
        allowed = probabilities.masked_fill(~self.is_allowed, -1)
        return {
            "num_allowed": num_allowed,
            "vocab_size": len(probabilities),
            "probability": float(probabilities[self.is_allowed].sum()),
            "top_tokens": self._describe(allowed.topk(min(NUM_TOP_TOKENS, num_allowed)).indices, tokenizer),
        }

    def _describe(self, tokens: Tensor, tokenizer: TokenizerAdapter) -> list[dict[str, Any]]:
        columns = tokens, self.logits.softmax(-1)[tokens], self.sampling_probs[tokens]
        is_allowed = torch.ones_like(tokens, dtype=torch.bool) if self.is_allowed is None else self.is_allowed[tokens]
        return [
            {"token": t, "text": tokenizer.decode_token(t), "probability": p, "sampling_probability": q, "allowed": ok}
            for t, p, q, ok in zip(*(column.tolist() for column in (*columns, is_allowed)), strict=True)
        ]


class RecordingSampler(Sampler):
    """Sampler that records each decode step of the first batch row."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        super().__init__(runner.cache.batch_size, vocab_size, runner.model.device)
        self.cache: BatchKVCache = runner.cache
        self.recorded_steps: deque[SamplingStep] = deque()

    def sample(
        self,
        logits: Tensor,
        features: SamplingFeatures,
        active_rows: Tensor | None = None,
        *,
        first_row: int = 0,
    ) -> SamplerOutput:
        sampling_probs = logits_to_probs(logits, self.first_rows(1), features)[0]
        bitmask, is_allowed = self.sampling_state.grammar_bitmask, None
        if features.grammar and bitmask is not None:
            is_allowed = mask_by_grammar(torch.zeros_like(sampling_probs), bitmask[0]) == 0
        step = SamplingStep(logits[0].detach().float().clone(), sampling_probs, self.cache_state(), is_allowed)
        self.recorded_steps.append(step)
        return super().sample(logits, features, active_rows, first_row=first_row)

    def cache_state(self) -> dict[str, object]:
        """Return the number of cached tokens, and the number of slots, filled slots and bytes of each layer.

        `slot_positions` has the token position in each slot of the ring buffers (sliding-window layers) that have
        wrapped around, by size of the ring buffer. In all other layers, the slot of a token is its position.
        """
        length, layers = int(self.cache.seq_lens[0]), self.cache.paged_layers
        num_slots = [layer.num_slots for layer in layers]
        num_filled = [min(length, count) for count in num_slots]
        tensors_by_layer = [[*layer.keys.tensors(), *layer.values.tensors()] for layer in layers]
        bytes_per_slot = [sum(tensor[0, 0].nbytes for tensor in tensors) for tensors in tensors_by_layer]
        ring_sizes = [size for size in sorted(set(num_slots)) if size < length]
        return {
            "length": length,
            "slots": num_slots,
            "num_filled": num_filled,
            "bytes": [count * size for count, size in zip(num_filled, bytes_per_slot, strict=True)],
            "source_bytes": sum(tensor.nbytes for tensor in self.cache.cross_tensors()),
            "slot_positions": {str(size): slot_positions(self.cache, size) for size in ring_sizes},
        }


def slot_positions(cache: Cache, num_slots: int) -> list[int]:
    """Return the position of the token in each filled slot of a ring buffer: the last token written to the slot."""
    length = int(cache.seq_lens[0])
    return [length - 1 - (length - 1 - slot) % num_slots for slot in range(min(length, num_slots))]


def compare_with_full_pass(
    inspector: Inspector, model_input: ModelInput, steps: list[SamplingStep]
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Compare the logits of cached decode steps with those of one full forward pass.

    Return the maximum absolute difference with its tolerance, and the maximum absolute difference of each step.
    """
    hidden = inspector.last_hidden_state(model_input)[0, -len(steps) :]
    max_abs_logit = 0.0
    differences = torch.zeros(len(steps))  # maximum absolute difference per step
    for start in range(0, len(steps), LOGIT_CHUNK_SIZE):
        chunk = slice(start, start + LOGIT_CHUNK_SIZE)
        full_logits = inspector.logits(hidden[chunk])
        cached_logits = torch.stack([step.logits for step in steps[chunk]])
        differences[chunk] = (full_logits - cached_logits).abs().amax(-1).cpu()
        max_abs_logit = max(max_abs_logit, float(full_logits.abs().max()))
    tolerance = CACHE_TOLERANCE.get(inspector.model.dtype)
    data: dict[str, object] = {
        "max_abs_diff": float(differences.max()),
        "step_index": int(differences.argmax()),
        "max_abs_logit": max_abs_logit,
        "num_compared": len(steps),
        "tolerance": None if tolerance is None else tolerance * max(1.0, max_abs_logit),
    }
    return data, {"max_abs_diff": differences}
