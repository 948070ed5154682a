"""How a pass is computed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """How a pass is computed. Widths are bytes of a number."""

    weights: int = 4
    compute: int = 4
    """Products take and give this; without `autocast` it is the weights' width."""
    autocast: bool = False
    grad: bool = True
    kernel: str = "auto"
    recompute: str = "none"
    device: str = "cuda"
    rows: int = 0
    """Sequences whose tokens see each other differently, as several documents do in one; 0 where all are alike."""
    gradient: int = 0
    """Bytes of a gradient's number that is kept, if they are not the weight's."""
    copies: int = 1
    sharers: int = 1
    """Devices that have weights, gradients and states in shares, and gather weights to use them;"""
    tensor: int = 1
    """and those that have heads, hidden units and vocabulary in shares, and add up what they come to."""

    narrow: bool = False
    """Whether autocast's products meet a stream that is as narrow as they are."""

    @property
    def stream(self) -> int:
        return self.compute if self.narrow else self.weights

    @property
    def gathers(self) -> bool:
        """Whether weights come and go. Copies of shares of matrices do it too: one way to train for all products."""
        return self.sharers > 1 or (self.copies > 1 and self.tensor > 1)
