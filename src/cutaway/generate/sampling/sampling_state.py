"""The sampling parameters of each row of a batch as tensors, and which features they need between them."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxtyping import Bool, Float32, Float64, Int, Int64
from torch import Tensor

from cutaway.generate.sampling.sampling_params import SamplingParams

TOP_K_WINDOWS = (64, 256, 1024)
"""How many of the largest logits are sought for top-k; beyond the last, all are searched."""


@dataclass(frozen=True)
class SamplingFeatures:
    """What the rows of a batch need between them: the key of a compiled or captured step."""

    sampled: bool = False
    top_k: bool = False
    top_p: bool = False
    top_k_window: int = 0
    """How many of the largest logits top-k and top-p look at; 0 where there is neither."""
    min_p: bool = False
    repetition_penalty: bool = False
    count_penalties: bool = False
    logit_bias: bool = False
    min_new_tokens: bool = False
    num_logprobs: int | None = None

    def __or__(self, other: "SamplingFeatures") -> "SamplingFeatures":
        told = [n for n in (self.num_logprobs, other.num_logprobs) if n is not None]
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
            max(told, default=None),
        )

    @property
    def modifies_logits(self) -> bool:
        """Whether any logit is changed before the choice."""
        return self.repetition_penalty or self.count_penalties or self.logit_bias or self.min_new_tokens


def required_features(
    sampling_params: SamplingParams, vocab_size: int, stop_token_ids: Iterable[int]
) -> SamplingFeatures:
    """What one request needs."""
    sampled = sampling_params.temperature > 0
    size = min(sampling_params.top_k or vocab_size, vocab_size)
    top_k, top_p = sampled and size < vocab_size, sampled and (sampling_params.top_p or 1) < 1
    return SamplingFeatures(
        sampled=sampled,
        top_k=top_k,
        top_p=top_p,
        top_k_window=next((w for w in TOP_K_WINDOWS if size <= w < vocab_size), vocab_size) if top_k or top_p else 0,
        min_p=sampled and bool(sampling_params.min_p),
        repetition_penalty=sampling_params.repetition_penalty != 1,
        count_penalties=sampling_params.presence_penalty != 0 or sampling_params.frequency_penalty != 0,
        logit_bias=bool(sampling_params.logit_bias or sampling_params.suppress_tokens),
        min_new_tokens=sampling_params.min_new_tokens > 0 and bool(set(stop_token_ids)),
        num_logprobs=sampling_params.logprobs,
    )


@dataclass
class SamplingState:
    """What each row asks for and what it has read, as tensors; those as wide as the vocabulary only where used."""

    float_params: Float64[Tensor, "n 6"]
    """temperature, top_p, min_p, repetition, presence, frequency."""
    int_params: Int64[Tensor, "n 3"]
    """seed, top_k, least length."""
    output_len: Int64[Tensor, " n"]
    """How many tokens the answer has."""
    seen_mask: Bool[Tensor, "n V"] | None = None
    """In the prompt or the answer."""
    output_counts: Int[Tensor, "n V"] | None = None
    """How often in the answer."""
    logit_bias: Float32[Tensor, "n V"] | None = None
    stop_token_mask: Bool[Tensor, "n V"] | None = None
    """What would end the text."""

    @property
    def is_sampled(self) -> Bool[Tensor, " n"]:
        return self.float_params[:, 0] > 0

    def float_param(self, column: int) -> Float32[Tensor, "n 1"]:
        return self.float_params[:, column : column + 1].float()

    def tensors(self) -> list[Tensor]:
        wide = (self.seen_mask, self.output_counts, self.logit_bias, self.stop_token_mask)
        return [self.float_params, self.int_params, self.output_len, *(tensor for tensor in wide if tensor is not None)]

    def first_rows(self, num_rows: int) -> "SamplingState":
        """A view of the first n rows."""
        wide = [
            None if t is None else t[:num_rows]
            for t in (self.seen_mask, self.output_counts, self.logit_bias, self.stop_token_mask)
        ]
        return SamplingState(
            self.float_params[:num_rows], self.int_params[:num_rows], self.output_len[:num_rows], *wide
        )

    def copy(self) -> "SamplingState":
        """The same rows, to be led ahead of the real ones and thrown away."""
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
        """Write down, in place, that each active row's answer grew by this token."""
        self.output_len += active_rows
        token, grows = tokens.unsqueeze(-1), active_rows.unsqueeze(-1)
        if features.repetition_penalty and self.seen_mask is not None:
            self.seen_mask.scatter_(-1, token, self.seen_mask.gather(-1, token) | grows)
        if features.count_penalties and self.output_counts is not None:
            self.output_counts.scatter_add_(-1, token, grows.to(self.output_counts.dtype))
