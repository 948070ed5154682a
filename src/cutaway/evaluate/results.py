"""Results of an evaluation: summed losses, with loss, perplexity, bits per byte and accuracy as properties."""

import math
from dataclasses import dataclass

from cutaway.evaluate.calibration import Calibration
from cutaway.evaluate.information import bits_per_byte


@dataclass(frozen=True)
class EvalResult:
    """Loss and calibration of a model on scored tokens."""

    total_nll: float
    """−Σ log p(token) in nats, over all scored tokens."""
    num_tokens: int
    calibration: Calibration
    """Calibration of the most likely token at each position."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.total_nll / self.num_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 709 else math.inf


@dataclass(frozen=True)
class CausalLMResult(EvalResult):
    """Result of a decoder on texts."""

    num_bytes: int
    """UTF-8 bytes of the scored text, without a first token that has no context."""
    num_documents: int
    """Texts with a token to score; shorter ones are skipped."""
    context: int
    """Maximum input tokens of a window."""
    stride: int

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits per UTF-8 byte; unlike loss and perplexity, comparable between tokenizers."""
        return bits_per_byte(self.total_nll, self.num_bytes)


@dataclass(frozen=True)
class MaskedLMResult(EvalResult):
    """Result of an encoder on masked tokens."""

    num_correct: int
    """Masked tokens that were the most likely prediction."""
    num_documents: int
    context: int

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.num_tokens


@dataclass(frozen=True)
class Seq2SeqResult(EvalResult):
    """Result of an encoder-decoder on pairs; the scored tokens are those of the targets."""

    num_exact_matches: int
    """Pairs whose greedily decoded text equals the target."""
    num_pairs: int

    @property
    def accuracy(self) -> float:
        return self.num_exact_matches / self.num_pairs
