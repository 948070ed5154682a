"""Sampler: logits to next tokens for a batch with per-row sampling parameters, without host synchronization."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from cutaway.device import has_triton
from cutaway.generate.sampling.logits_processing import apply_logits_processors, inverse_cdf_sample, unnormalized_probs
from cutaway.generate.sampling.rng import uniform
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.generate.sampling.sampling_state import SamplingFeatures, SamplingState, required_features
from cutaway.generate.structured_output.constraint import bitmask_width

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1.2e-38, 1e38
"""Temperatures above 0 are clamped to this range, so that they are neither 0 nor infinite in float32."""


class SamplerOutput(NamedTuple):
    """Sampled tokens of one step, one per row.

    Log-probabilities are those of the model, before any logits processing; None if not requested."""

    tokens: Tensor  # (n,) int64
    invalid: Tensor  # (n,) bool: a logit was NaN or +inf, or all tokens were suppressed
    logprobs: Tensor | None = None  # (n,) float32
    top_tokens: Tensor | None = None  # (n, max requested) int64, most likely first
    top_logprobs: Tensor | None = None


class Sampler:
    """Samples next tokens; holds the sampling parameters and token histories of up to `max_num_seqs` requests."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size, self.device = vocab_size, torch.device(device)
        float_params = torch.zeros(max_num_seqs, 6, dtype=torch.float64, device=device)
        int_params = torch.zeros(max_num_seqs, 3, dtype=torch.int64, device=device)
        output_len = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.sampling_state = SamplingState(float_params, int_params, output_len)
        self.row_features = [SamplingFeatures()] * max_num_seqs
        self.combined_features: dict[tuple[int, int], SamplingFeatures] = {}
        float_params[:, [1, 3]], int_params[:, 1] = 1.0, vocab_size  # an unused row is greedy

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        prompt_tokens: Sequence[int],
        seed: int,
        *,
        eos_token_ids: Iterable[int] = (),
        output_tokens: Sequence[int] = (),
    ) -> None:
        """Set the sampling parameters and the token history of a row. `output_tokens`: completion tokens so far."""
        size, state = self.vocab_size, self.sampling_state
        stop_ids = params.all_stop_token_ids(eos_token_ids)
        features = required_features(params, size, stop_ids)
        temperature = params.temperature and min(max(params.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        float_params = (temperature, params.top_p or 1.0, params.min_p or 0.0, *penalties)
        int_params = (seed, min(params.top_k or size, size), params.min_new_tokens)
        state.float_params[row] = torch.tensor(float_params, dtype=torch.float64)
        state.int_params[row] = torch.tensor(int_params)
        state.output_len[row] = len(output_tokens)
        self._allocate_vocab_tensors(features)
        for tensor in (state.seen_mask, state.output_counts, state.logit_bias, state.stop_token_mask):
            if tensor is not None:
                tensor[row] = 0
        if features.repetition_penalty and state.seen_mask is not None:
            state.seen_mask[row, self._token_tensor([*prompt_tokens, *output_tokens])] = True
        if features.count_penalties and state.output_counts is not None:
            output_ids = self._token_tensor(output_tokens)
            state.output_counts[row].index_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))
        if features.logit_bias and state.logit_bias is not None:
            bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=self.device)
            state.logit_bias[row, self._token_tensor(params.logit_bias)] = bias
            state.logit_bias[row, self._token_tensor(params.suppress_tokens)] = -math.inf
        if features.min_new_tokens and state.stop_token_mask is not None:
            state.stop_token_mask[row, self._token_tensor(stop_ids)] = True
        self._set_features(row, features)

    def clear_row(self, row: int) -> None:
        """Release a row, so that the sampling features of its request are no longer computed."""
        self._set_features(row, SamplingFeatures())

    def swap_rows(self, a: int, b: int) -> None:
        """Exchange the sampling parameters and token histories of rows `a` and `b`."""
        for tensor in self.sampling_state.tensors():
            swap_tensor_rows(tensor, a, b)
        first, second = self.row_features[a], self.row_features[b]
        self._set_features(a, second)
        self._set_features(b, first)

    def features(self, stop: int, start: int = 0) -> SamplingFeatures:
        """Union of the sampling features that the requests in rows start … stop − 1 use."""
        if (start, stop) not in self.combined_features:
            combined = SamplingFeatures()
            for features in self.row_features[start:stop]:
                combined |= features
            self.combined_features[start, stop] = combined
        return self.combined_features[start, stop]

    def set_grammar_bitmask(self, bitmask: Int32[Tensor, "n W"], first_row: int = 0) -> None:
        """Set the tokens that the grammars of rows first_row, … allow in the next step. `bitmask` is on the CPU."""
        assert self.sampling_state.grammar_bitmask is not None
        rows = slice(first_row, first_row + len(bitmask))
        self.sampling_state.grammar_bitmask[rows].copy_(bitmask, non_blocking=True)

    def first_rows(self, num_rows: int) -> SamplingState:
        """View of the state of the first `num_rows` rows, for `apply_logits_processors` and `logits_to_probs`."""
        return self.sampling_state.view_rows(0, num_rows)

    def sample(
        self,
        logits: Float[Tensor, "n V"],
        features: SamplingFeatures,
        active_rows: Bool[Tensor, " n"] | None = None,
        *,
        first_row: int = 0,
    ) -> SamplerOutput:
        """Sample the next token of rows first_row, … and append it to the token history of the active rows.

        The default of `active_rows` is all of them."""
        state = self.sampling_state.view_rows(first_row, first_row + len(logits))
        x = apply_logits_processors(logits, state, features)
        max_logits, tokens = max_and_argmax(x, _num_argmax_splits(x))
        if features.sampled:
            tokens = _sample_tokens(x, max_logits, tokens, state, features)
        active_rows = torch.ones_like(tokens, dtype=torch.bool) if active_rows is None else active_rows
        state.append_tokens(tokens, active_rows, features)
        return SamplerOutput(tokens, ~max_logits.isfinite(), *gather_logprobs(logits, tokens, features))

    def _set_features(self, row: int, features: SamplingFeatures) -> None:
        self.row_features[row] = features
        self.combined_features.clear()

    def _token_tensor(self, tokens: Iterable[int]) -> Int64[Tensor, " t"]:
        return torch.tensor(list(tokens), dtype=torch.int64, device=self.device)

    def _allocate_vocab_tensors(self, features: SamplingFeatures) -> None:
        """Allocate (rows, vocab_size) tensors on first use. CUDA graphs hold their addresses, so they are kept."""
        state = self.sampling_state
        for name, needed, dtype in (
            ("seen_mask", features.repetition_penalty, torch.bool),
            ("output_counts", features.count_penalties, torch.int32),
            ("logit_bias", features.logit_bias, torch.float32),
            ("stop_token_mask", features.min_new_tokens, torch.bool),
            ("grammar_bitmask", features.grammar, torch.int32),
        ):
            if needed and getattr(state, name) is None:
                width = bitmask_width(self.vocab_size) if name == "grammar_bitmask" else self.vocab_size
                setattr(state, name, torch.zeros(len(self.row_features), width, dtype=dtype, device=self.device))


def swap_tensor_rows(tensor: Tensor, a: int, b: int) -> None:
    """Exchange two rows with single-row copies: an index list would need a host-to-device copy."""
    saved = tensor[a].clone()
    tensor[a] = tensor[b]
    tensor[b] = saved


def _sample_tokens(
    logits: Float[Tensor, "n V"],
    max_logits: Float[Tensor, " n"],
    greedy_tokens: Int64[Tensor, " n"],
    state: SamplingState,
    features: SamplingFeatures,
) -> Int64[Tensor, " n"]:
    """Sample a token per row. Rows with temperature 0 take the greedy token."""
    if logits.is_cuda and has_triton():
        from cutaway.generate.fast.sampling_kernels import triton_sample

        return triton_sample(logits, max_logits, greedy_tokens, state, features)
    weight = unnormalized_probs(logits, max_logits, state, features)
    sampled = inverse_cdf_sample(weight, uniform(state.int_params[:, 0], state.output_len))
    return torch.where(state.is_sampled, sampled, greedy_tokens)


def max_and_argmax(x: Float[Tensor, "n V"], num_splits: int = 1) -> tuple[Float[Tensor, " n"], Int64[Tensor, " n"]]:
    """Maximum of each row and its first index, reduced in `num_splits` parallel parts."""
    if num_splits == 1:
        maximum, argmax = x.max(-1)
        return maximum, argmax
    split_max, split_argmax = x.view(len(x), num_splits, -1).max(-1)
    maximum, split = split_max.max(-1)
    return maximum, split * (x.shape[-1] // num_splits) + split_argmax.gather(-1, split.unsqueeze(-1)).squeeze(-1)


@functools.cache
def largest_divisor_up_to_sqrt(size: int) -> int:
    """Largest divisor of `size` that is at most its square root."""
    return max(divisor for divisor in range(1, math.isqrt(size) + 1) if size % divisor == 0)


def _num_argmax_splits(x: Tensor) -> int:
    """Number of parallel parts of an argmax.

    With one part, a GPU reduces a row on one SM, which for a large vocabulary takes as long as a decoder layer."""
    return largest_divisor_up_to_sqrt(x.shape[-1]) if x.is_cuda and len(x) < 64 else 1


def gather_logprobs(
    logits: Float[Tensor, "n V"], tokens: Int64[Tensor, " n"], features: SamplingFeatures
) -> tuple[Tensor | None, ...]:
    """Return the sampled tokens' log-probabilities, the most likely tokens, and the log-probabilities of the latter.

    `features.num_logprobs` is the number of most likely tokens. An output that is not requested is None."""
    if features.num_logprobs < 0:
        return None, None, None
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if features.num_logprobs == 0:
        return chosen, None, None
    top = logprobs.topk(min(features.num_logprobs, logits.shape[-1]))
    return chosen, top.indices, top.values
