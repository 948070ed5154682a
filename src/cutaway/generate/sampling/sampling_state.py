"""Sampling state: per-row sampling parameters as tensors, and the features that a batch uses."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxtyping import Bool, Float32, Float64, Int, Int32, Int64
from torch import Tensor

from cutaway.generate.sampling.sampling_params import SamplingParams

_TOP_K_WINDOWS = (64, 256, 1024)
"""Numbers of largest logits that can be sorted for top-k and top-p. The first number that is at least top_k is used.

If all are below top_k, or if top-p is used without top-k, a radix select over the vocabulary replaces the sort."""


@dataclass(frozen=True)
class SamplingFeatures:
    """Which sampling features the rows of a batch use. A CUDA graph is captured for each combination of features."""

    sampled: bool = False
    top_k: bool = False
    top_p: bool = False
    top_k_window: int = 0
    """Number of largest logits that are sorted for top-k and top-p; 0 if neither is used."""
    min_p: bool = False
    repetition_penalty: bool = False
    count_penalties: bool = False
    logit_bias: bool = False
    min_new_tokens: bool = False
    grammar: bool = False
    """Whether the tokens are restricted by `SamplingState.grammar_bitmask`."""
    num_logprobs: int = -1
    """Number of top log-probabilities; 0 for only that of the sampled token, −1 for no log-probabilities."""

    def __or__(self, other: "SamplingFeatures") -> "SamplingFeatures":
        return SamplingFeatures(*map(max, vars(self).values(), vars(other).values()))

    @property
    def modifies_logits(self) -> bool:
        """Whether any sampling parameter changes the logits before they are divided by the temperature."""
        return self.repetition_penalty or self.count_penalties or self.logit_bias or self.min_new_tokens or self.grammar


def required_features(params: SamplingParams, vocab_size: int, stop_token_ids: Iterable[int]) -> SamplingFeatures:
    """Return the sampling features that a request with these sampling parameters uses."""
    sampled = params.temperature > 0
    top_k_size = min(params.top_k or vocab_size, vocab_size)
    top_k, top_p = sampled and top_k_size < vocab_size, sampled and (params.top_p or 1) < 1
    window = next((w for w in _TOP_K_WINDOWS if top_k_size <= w < vocab_size), vocab_size)
    return SamplingFeatures(
        sampled=sampled,
        top_k=top_k,
        top_p=top_p,
        top_k_window=window if top_k or top_p else 0,
        min_p=sampled and bool(params.min_p),
        repetition_penalty=params.repetition_penalty != 1,
        count_penalties=params.presence_penalty != 0 or params.frequency_penalty != 0,
        logit_bias=bool(params.logit_bias or params.suppress_tokens),
        min_new_tokens=params.min_new_tokens > 0 and bool(set(stop_token_ids)),
        grammar=params.constraint is not None,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
    )


@dataclass
class SamplingState:
    """Sampling parameters and token history of each row. (rows, vocab_size) tensors are None until they are needed."""

    float_params: Float64[Tensor, "n 6"]
    """Columns: temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty."""
    int_params: Int64[Tensor, "n 3"]
    """Columns: seed, top_k, min_new_tokens."""
    output_len: Int64[Tensor, " n"]
    """Number of completion tokens so far."""
    seen_mask: Bool[Tensor, "n V"] | None = None
    """True for tokens that occur in the prompt or the completion."""
    output_counts: Int[Tensor, "n V"] | None = None
    """Number of occurrences of each token in the completion."""
    logit_bias: Float32[Tensor, "n V"] | None = None
    stop_token_mask: Bool[Tensor, "n V"] | None = None
    """True for EOS and stop tokens."""
    grammar_bitmask: Int32[Tensor, "n W"] | None = None
    """One bit per token, 1 if the row's grammar allows the token next. Rows without a grammar allow all tokens."""

    @property
    def is_sampled(self) -> Bool[Tensor, " n"]:
        return self.float_params[:, 0] > 0

    def float_param(self, column: int) -> Float32[Tensor, "n 1"]:
        return self.float_params[:, column : column + 1].float()

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in vars(self).values() if tensor is not None]

    def view_rows(self, start: int, stop: int) -> "SamplingState":
        """Return a state whose tensors are views of rows start … stop − 1."""
        return SamplingState(**{name: tensor[start:stop] for name, tensor in vars(self).items() if tensor is not None})

    def copy(self) -> "SamplingState":
        """Copy with its own token history, for draft tokens that may be rejected; parameters are shared."""
        seen, counts = (None if t is None else t.clone() for t in (self.seen_mask, self.output_counts))
        return replace(self, output_len=self.output_len.clone(), seen_mask=seen, output_counts=counts)

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
