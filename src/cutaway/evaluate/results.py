"""Results of an evaluation. They store summed losses; loss, perplexity, bits per byte and accuracy are properties."""

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
        """Mean loss in nats per scored token."""
        return self.total_nll / self.num_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 709 else math.inf


@dataclass(frozen=True)
class CausalLMResult(EvalResult):
    """Loss, bits per byte and calibration of a decoder on texts."""

    num_bytes: int
    """Number of UTF-8 bytes of the scored tokens. A first token without context is not scored."""
    num_documents: int
    """Number of texts with at least one token to score. Shorter texts are skipped."""
    context: int
    """Maximum number of input tokens of a window."""
    stride: int

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits per UTF-8 byte. Unlike loss and perplexity, it can be compared between tokenizers."""
        return bits_per_byte(self.total_nll, self.num_bytes)


@dataclass(frozen=True)
class MaskedLMResult(EvalResult):
    """Loss, accuracy and calibration of an encoder on masked tokens, which are the scored tokens."""

    num_correct: int
    """Number of masked tokens that were the most likely prediction."""
    num_documents: int
    context: int

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.num_tokens


@dataclass(frozen=True)
class Seq2SeqResult(EvalResult):
    """Loss, accuracy and calibration of an encoder-decoder on (source, target) pairs.

    The scored tokens are those of the targets. The accuracy is the fraction of exact matches."""

    num_exact_matches: int
    """Number of pairs whose greedily decoded text equals the target."""
    num_pairs: int

    @property
    def accuracy(self) -> float:
        return self.num_exact_matches / self.num_pairs
