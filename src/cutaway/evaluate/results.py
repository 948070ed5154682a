"""What an evaluation finds: sums, and the means that follow from them."""

import math
from dataclasses import dataclass

from cutaway.evaluate.calibration import Calibration
from cutaway.evaluate.information import bits_per_byte


@dataclass(frozen=True)
class EvalResult:
    """Tokens that a model had to tell, and how surprised it was by them."""

    total_nll: float
    """−Σ log p(token), over all of them."""
    num_tokens: int
    calibration: Calibration
    """Of the likeliest token, each time."""

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.total_nll / self.num_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 709 else math.inf


@dataclass(frozen=True)
class CausalLMResult(EvalResult):
    """Of a decoder on texts."""

    num_bytes: int
    """UTF-8 bytes of what was told: a first token that nothing stands before is not among it."""
    num_documents: int
    """Texts with a token to tell; shorter ones are passed over."""
    context: int
    """Tokens that were read at once, at most."""
    stride: int

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers, as loss and perplexity are not."""
        return bits_per_byte(self.total_nll, self.num_bytes)


@dataclass(frozen=True)
class MaskedLMResult(EvalResult):
    """Of an encoder on masked tokens."""

    num_correct: int
    """Tokens that were found the likeliest."""
    num_documents: int
    context: int

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.num_tokens


@dataclass(frozen=True)
class Seq2SeqResult(EvalResult):
    """Of an encoder-decoder on pairs; the tokens are the targets'."""

    num_exact_matches: int
    """Pairs whose greedy answer is the target."""
    num_pairs: int

    @property
    def accuracy(self) -> float:
        return self.num_exact_matches / self.num_pairs
