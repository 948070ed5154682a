"""From logits to the next token, for a whole batch at once and without waiting for the device."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from cutaway.generate.sampling.logits_processing import (
    apply_logits_processors,
    inverse_cdf_sample,
    unnormalized_probs,
)
from cutaway.generate.sampling.rng import uniform
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.generate.sampling.sampling_state import SamplingFeatures, SamplingState, required_features
from cutaway.model.device import has_triton

MIN_TEMPERATURE, MAX_TEMPERATURE = 1.2e-38, 1e38
"""Temperatures that float32 tells from 0 and from infinity."""


class SamplerOutput(NamedTuple):
    """One step's tokens; log-probabilities are the model's own, before any processing, and only there if asked for."""

    tokens: Tensor  # (n,) int64
    invalid: Tensor  # (n,) bool: a logit was NaN or +inf, or nothing was left to choose
    logprobs: Tensor | None = None  # (n,) float32
    top_tokens: Tensor | None = None  # (n, most asked for) int64, the most likely first
    top_logprobs: Tensor | None = None


class Sampler:
    """The sampling parameters and the memory of up to `max_num_seqs` requests on a device, each in its row."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size, self.device = vocab_size, torch.device(device)
        numbers = torch.zeros(max_num_seqs, 6, dtype=torch.float64, device=device)
        whole = torch.zeros(max_num_seqs, 3, dtype=torch.int64, device=device)
        self.sampling_state = SamplingState(numbers, whole, torch.zeros(max_num_seqs, dtype=torch.int64, device=device))
        self.row_features = [SamplingFeatures()] * max_num_seqs
        self.combined_features: dict[int, SamplingFeatures] = {}
        numbers[:, [1, 3]], whole[:, 1] = 1.0, vocab_size  # a row without a request chooses the most likely

    def set_row(
        self,
        row: int,
        sampling_params: SamplingParams,
        prompt_tokens: Sequence[int],
        seed: int,
        *,
        eos_token_ids: Iterable[int] = (),
        output_tokens: Sequence[int] = (),
    ) -> None:
        """Give a row to a request with this prompt; `output_tokens`: what it said already, if it was interrupted."""
        size, rows = self.vocab_size, self.sampling_state
        stops = {*sampling_params.stop_token_ids, *(() if sampling_params.ignore_eos else eos_token_ids)}
        needs = required_features(sampling_params, size, stops)
        temperature = sampling_params.temperature and min(
            max(sampling_params.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE
        )
        penalties = (
            sampling_params.repetition_penalty,
            sampling_params.presence_penalty,
            sampling_params.frequency_penalty,
        )
        numbers = (temperature, sampling_params.top_p or 1.0, sampling_params.min_p or 0.0, *penalties)
        whole = (seed, min(sampling_params.top_k or size, size), sampling_params.min_new_tokens)
        rows.float_params[row] = torch.tensor(numbers, dtype=torch.float64)
        rows.int_params[row] = torch.tensor(whole)
        rows.output_len[row] = len(output_tokens)
        self._allocate_vocab_tensors(needs)
        for wide in (rows.seen_mask, rows.output_counts, rows.logit_bias, rows.stop_token_mask):
            if wide is not None:
                wide[row] = 0
        if needs.repetition_penalty and rows.seen_mask is not None:
            rows.seen_mask[row, self._token_tensor([*prompt_tokens, *output_tokens])] = True
        if needs.count_penalties and rows.output_counts is not None:
            said = self._token_tensor(output_tokens)
            rows.output_counts[row].index_add_(0, said, torch.ones_like(said, dtype=torch.int32))
        if needs.logit_bias and rows.logit_bias is not None:
            bias = torch.tensor(list(sampling_params.logit_bias.values()), dtype=torch.float32, device=self.device)
            rows.logit_bias[row, self._token_tensor(sampling_params.logit_bias)] = bias
            rows.logit_bias[row, self._token_tensor(sampling_params.suppress_tokens)] = -math.inf
        if needs.min_new_tokens and rows.stop_token_mask is not None:
            rows.stop_token_mask[row, self._token_tensor(stops)] = True
        self._set_features(row, needs)

    def clear_row(self, row: int) -> None:
        """The row's request is over, and what it needed is needed no more."""
        self._set_features(row, SamplingFeatures())

    def move_row(self, source_row: int, target_row: int) -> None:
        """The request of one row takes the place of another's."""
        for tensor in self.sampling_state.tensors():
            tensor[target_row] = tensor[source_row]
        self._set_features(target_row, self.row_features[source_row])

    def swap_rows(self, a: int, b: int) -> None:
        """Two requests change places."""
        for tensor in self.sampling_state.tensors():
            kept = tensor[a].clone()
            tensor[a] = tensor[b]
            tensor[b] = kept
        first, second = self.row_features[a], self.row_features[b]
        self._set_features(a, second)
        self._set_features(b, first)

    def features(self, num_rows: int) -> SamplingFeatures:
        """What the rows 0 … num_rows − 1 need between them."""
        if num_rows not in self.combined_features:
            result = SamplingFeatures()
            for needs in self.row_features[:num_rows]:
                result |= needs
            self.combined_features[num_rows] = result
        return self.combined_features[num_rows]

    def first_rows(self, num_rows: int) -> SamplingState:
        """The first rows, for `apply_logits_processors` and `logits_to_probs`."""
        return self.sampling_state.first_rows(num_rows)

    def sample(
        self, logits: Float[Tensor, "n V"], features: SamplingFeatures, active_rows: Bool[Tensor, " n"] | None = None
    ) -> SamplerOutput:
        """The next token of each row, which the active rows remember."""
        rows = self.sampling_state.first_rows(len(logits))
        x = apply_logits_processors(logits, rows, features)
        best, tokens = max_and_argmax(x, _num_argmax_splits(x))
        if features.sampled:
            tokens = _sample_tokens(x, best, tokens, rows, features)
        rows.append_tokens(
            tokens, torch.ones_like(tokens, dtype=torch.bool) if active_rows is None else active_rows, features
        )
        return SamplerOutput(tokens, ~best.isfinite(), *gather_logprobs(logits, tokens, features))

    def _set_features(self, row: int, features: SamplingFeatures) -> None:
        self.row_features[row] = features
        self.combined_features.clear()

    def _token_tensor(self, tokens: Iterable[int]) -> Int64[Tensor, " t"]:
        return torch.tensor(list(tokens), dtype=torch.int64, device=self.device)

    def _allocate_vocab_tensors(self, features: SamplingFeatures) -> None:
        """Make what is as wide as the vocabulary when first used; it stays in place, as captured graphs point to it."""
        rows, shape = self.sampling_state, (len(self.row_features), self.vocab_size)
        if features.repetition_penalty and rows.seen_mask is None:
            rows.seen_mask = torch.zeros(shape, dtype=torch.bool, device=self.device)
        if features.count_penalties and rows.output_counts is None:
            rows.output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        if features.logit_bias and rows.logit_bias is None:
            rows.logit_bias = torch.zeros(shape, dtype=torch.float32, device=self.device)
        if features.min_new_tokens and rows.stop_token_mask is None:
            rows.stop_token_mask = torch.zeros(shape, dtype=torch.bool, device=self.device)


def _sample_tokens(
    logits: Float[Tensor, "n V"],
    max_logits: Float[Tensor, " n"],
    greedy_tokens: Int64[Tensor, " n"],
    state: SamplingState,
    features: SamplingFeatures,
) -> Int64[Tensor, " n"]:
    """A token drawn for each row, or its best where the temperature is 0."""
    if logits.is_cuda and has_triton():
        from cutaway.generate.fast.sampling_kernels import triton_sample

        return triton_sample(logits, max_logits, greedy_tokens, state, features)
    chosen = inverse_cdf_sample(
        unnormalized_probs(logits, max_logits, state, features), uniform(state.int_params[:, 0], state.output_len)
    )
    return torch.where(state.is_sampled, chosen, greedy_tokens)


def max_and_argmax(x: Float[Tensor, "n V"], num_splits: int = 1) -> tuple[Float[Tensor, " n"], Int64[Tensor, " n"]]:
    """The largest of each row and its place, the first if there are several; in `num_splits` parts at once."""
    if num_splits == 1:
        best, place = x.max(-1)
        return best, place
    each, inner = x.view(len(x), num_splits, -1).max(-1)
    best, part = each.max(-1)
    return best, part * (x.shape[-1] // num_splits) + inner.gather(-1, part.unsqueeze(-1)).squeeze(-1)


@functools.cache
def largest_divisor_up_to_sqrt(size: int) -> int:
    """The divisor of a vocabulary's size that is nearest to its root."""
    return max(part for part in range(1, math.isqrt(size) + 1) if size % part == 0)


def _num_argmax_splits(x: Tensor) -> int:
    """A GPU gives a row to one of its processors, which for a wide row takes as long as a layer."""
    return largest_divisor_up_to_sqrt(x.shape[-1]) if x.is_cuda and len(x) < 64 else 1


def gather_logprobs(
    logits: Float[Tensor, "n V"], tokens: Int64[Tensor, " n"], features: SamplingFeatures
) -> tuple[Tensor | None, ...]:
    """The chosen tokens' log-probabilities, and the most likely tokens with theirs, as far as any row asks."""
    if features.num_logprobs is None:
        return None, None, None
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if features.num_logprobs == 0:
        return chosen, None, None
    top = logprobs.topk(min(features.num_logprobs, logits.shape[-1]))
    return chosen, top.indices, top.values
