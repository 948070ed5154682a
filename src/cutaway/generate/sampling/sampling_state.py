"""Sampling state: per-row sampling parameters as tensors, and the features that a batch uses."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxtyping import Bool, Float32, Float64, Int, Int64
from torch import Tensor

from cutaway.generate.sampling.sampling_params import SamplingParams

TOP_K_WINDOWS = (64, 256, 1024)
"""Sizes of the top-k operation for top-k and top-p; above the last, a radix select over the vocabulary is used."""


@dataclass(frozen=True)
class SamplingFeatures:
    """Features that the rows of a batch use; the key of a compiled or captured step."""

    sampled: bool = False
    top_k: bool = False
    top_p: bool = False
    top_k_window: int = 0
    """Number of largest logits that top-k and top-p sort; 0 without either."""
    min_p: bool = False
    repetition_penalty: bool = False
    count_penalties: bool = False
    logit_bias: bool = False
    min_new_tokens: bool = False
    num_logprobs: int | None = None

    def __or__(self, other: "SamplingFeatures") -> "SamplingFeatures":
        num_logprobs = [n for n in (self.num_logprobs, other.num_logprobs) if n is not None]
        return SamplingFeatures(
            self.sampled or other.sampled,
            self.top_k or other.top_k,
            self.top_p or other.top_p,
            max(self.top_k_window, other.top_k_window),
            self.min_p or other.min_p,
            self.repetition_penalty or other.repetition_penalty,
            self.count_penalties or other.count_penalties,
            self.logit_bias or other.logit_bias,
            self.min_new_tokens or other.min_new_tokens,
            max(num_logprobs, default=None),
        )

    @property
    def modifies_logits(self) -> bool:
        """Whether any feature changes the logits before temperature."""
        return self.repetition_penalty or self.count_penalties or self.logit_bias or self.min_new_tokens


def required_features(
    sampling_params: SamplingParams, vocab_size: int, stop_token_ids: Iterable[int]
) -> SamplingFeatures:
    """Features that one request uses."""
    sampled = sampling_params.temperature > 0
    top_k_size = min(sampling_params.top_k or vocab_size, vocab_size)
    top_k, top_p = sampled and top_k_size < vocab_size, sampled and (sampling_params.top_p or 1) < 1
    return SamplingFeatures(
        sampled=sampled,
        top_k=top_k,
        top_p=top_p,
        top_k_window=next((w for w in TOP_K_WINDOWS if top_k_size <= w < vocab_size), vocab_size)
        if top_k or top_p
        else 0,
        min_p=sampled and bool(sampling_params.min_p),
        repetition_penalty=sampling_params.repetition_penalty != 1,
        count_penalties=sampling_params.presence_penalty != 0 or sampling_params.frequency_penalty != 0,
        logit_bias=bool(sampling_params.logit_bias or sampling_params.suppress_tokens),
        min_new_tokens=sampling_params.min_new_tokens > 0 and bool(set(stop_token_ids)),
        num_logprobs=sampling_params.logprobs,
    )


@dataclass
class SamplingState:
    """Sampling parameters and token history of each row; (rows, vocab_size) tensors exist only if used."""

    float_params: Float64[Tensor, "n 6"]
    """temperature, top_p, min_p, repetition, presence, frequency."""
    int_params: Int64[Tensor, "n 3"]
    """seed, top_k, min_new_tokens."""
    output_len: Int64[Tensor, " n"]
    """Tokens of the completion so far."""
    seen_mask: Bool[Tensor, "n V"] | None = None
    """Tokens in the prompt or the completion."""
    output_counts: Int[Tensor, "n V"] | None = None
    """Occurrences in the completion."""
    logit_bias: Float32[Tensor, "n V"] | None = None
    stop_token_mask: Bool[Tensor, "n V"] | None = None
    """EOS and stop tokens."""

    @property
    def is_sampled(self) -> Bool[Tensor, " n"]:
        return self.float_params[:, 0] > 0

    def float_param(self, column: int) -> Float32[Tensor, "n 1"]:
        return self.float_params[:, column : column + 1].float()

    def tensors(self) -> list[Tensor]:
        vocab_tensors = (self.seen_mask, self.output_counts, self.logit_bias, self.stop_token_mask)
        return [
            self.float_params,
            self.int_params,
            self.output_len,
            *(tensor for tensor in vocab_tensors if tensor is not None),
        ]

    def first_rows(self, num_rows: int) -> "SamplingState":
        """View of the first `num_rows` rows."""
        vocab_tensors = [
            None if t is None else t[:num_rows]
            for t in (self.seen_mask, self.output_counts, self.logit_bias, self.stop_token_mask)
        ]
        return SamplingState(
            self.float_params[:num_rows], self.int_params[:num_rows], self.output_len[:num_rows], *vocab_tensors
        )

    def copy(self) -> "SamplingState":
        """Copy with its own token history, for draft tokens that may be rejected; parameters are shared."""
        seen, counts = (None if t is None else t.clone() for t in (self.seen_mask, self.output_counts))
        return SamplingState(
            self.float_params,
            self.int_params,
            self.output_len.clone(),
            seen,
            counts,
            self.logit_bias,
            self.stop_token_mask,
        )

    def append_tokens(
        self, tokens: Int64[Tensor, " n"], active_rows: Bool[Tensor, " n"], features: SamplingFeatures
    ) -> None:
        """Append one token to the history of each active row, in place."""
        self.output_len += active_rows
        token, active = tokens.unsqueeze(-1), active_rows.unsqueeze(-1)
        if features.repetition_penalty and self.seen_mask is not None:
            self.seen_mask.scatter_(-1, token, self.seen_mask.gather(-1, token) | active)
        if features.count_penalties and self.output_counts is not None:
            self.output_counts.scatter_add_(-1, token, active.to(self.output_counts.dtype))
