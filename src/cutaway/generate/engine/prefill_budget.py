"""Number of tokens of a prefill step, so that a step with prefill does not stall the requests that decode."""

from cutaway.generate.engine.config import EngineConfig

MAX_PADDED_PREFILL_TOKENS = 2048
"""On a GPU, default maximum number of tokens of a prefill step with padding."""
MAX_MIXED_PREFILL_TOKENS = 2048
"""On a GPU, default maximum number of tokens of a prefill step between decode steps."""
PREFILL_SECONDS = 0.1
"""On the CPU, a prefill step between decode steps takes about as long as a decode step, but at least this time."""
MAX_PREFILL_SECONDS = 1.0
"""On the CPU, maximum time of a prefill step between decode steps."""
MIN_PREFILL_TOKENS = 32
"""Minimum number of tokens of such a prefill step: with fewer, reading the weights takes most of the time."""


class PrefillBudget:
    """Maximum number of tokens of the next prefill step, with padding. On the CPU it follows from measured times."""

    def __init__(self, config: EngineConfig, *, has_padding: bool) -> None:
        self.is_cpu, self.has_padding = config.model.device.type == "cpu", has_padding
        self.is_default, self.chunk_size = config.prefill_chunk_size is None, config.resolved_prefill_chunk_size
        self.decode_seconds = self.prefill_seconds_per_token = 0.0
        """Moving averages of the time of a decode step and of a prefill step per token."""

    def record_decode(self, seconds: float) -> None:
        self.decode_seconds = _moving_average(self.decode_seconds, seconds)

    def record_prefill(self, seconds: float, num_tokens: int) -> None:
        self.prefill_seconds_per_token = _moving_average(self.prefill_seconds_per_token, seconds / num_tokens)

    def max_tokens(self, num_decoding: int, num_before_decode: int) -> int:
        """Return the budget. `num_decoding`: number of API requests that decode after this prefill step.
        `num_before_decode`: number of those that wait for their first token.

        A chunk of the maximum size takes many times as long as a decode step. While requests decode, the chunk is
        limited: on the CPU to about the time of a decode step, or longer if more API requests wait for their first
        token than decode; on a GPU to MAX_MIXED_PREFILL_TOKENS."""
        chunk_size, seconds = self.chunk_size, self.prefill_seconds_per_token
        if not self.is_cpu:
            if self.is_default and num_decoding:
                chunk_size = min(chunk_size, MAX_MIXED_PREFILL_TOKENS)
            if self.is_default and self.has_padding:
                chunk_size = min(chunk_size, MAX_PADDED_PREFILL_TOKENS)
            return chunk_size
        if not num_decoding or not seconds:
            return chunk_size
        share = max(1.0, num_before_decode / num_decoding)
        num_tokens = int(min(MAX_PREFILL_SECONDS, max(PREFILL_SECONDS, self.decode_seconds) * share) / seconds)
        return min(chunk_size, max(MIN_PREFILL_TOKENS, num_tokens))


def _moving_average(average: float, value: float) -> float:
    return 0.7 * average + 0.3 * value if average else value
