"""What a measurement finds: sums, and the means that follow from them."""

import math
from dataclasses import dataclass

from cutaway.measure.information import bits_per_byte
from cutaway.measure.reliability import Calibration


@dataclass(frozen=True)
class Told:
    """Tokens that a model had to tell, and how surprised it was by them."""

    nats: float
    """−Σ log p(token), over all of them."""
    tokens: int
    calibration: Calibration
    """Of the likeliest token, each time."""

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 709 else math.inf


@dataclass(frozen=True)
class Score(Told):
    """Of a decoder on texts."""

    bytes: int
    """UTF-8 bytes of what was told: a first token that nothing stands before is not among it."""
    documents: int
    """Texts with a token to tell; shorter ones are passed over."""
    context: int
    """Tokens that were read at once, at most."""
    stride: int

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers, as loss and perplexity are not."""
        return bits_per_byte(self.nats, self.bytes)


@dataclass(frozen=True)
class MaskScore(Told):
    """Of an encoder on masked tokens."""

    right: int
    """Tokens that were found the likeliest."""
    documents: int
    context: int

    @property
    def accuracy(self) -> float:
        return self.right / self.tokens


@dataclass(frozen=True)
class PairScore(Told):
    """Of an encoder-decoder on pairs; the tokens are the targets'."""

    exact: int
    """Pairs whose greedy answer is the target."""
    pairs: int

    @property
    def accuracy(self) -> float:
        return self.exact / self.pairs
