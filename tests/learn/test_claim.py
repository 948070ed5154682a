"""`claim` returns a Claim if the measurement agrees with the prediction, else raises ClaimError."""

import pytest

from cutaway.learn import claim
from cutaway.learn.claim import ClaimError


def test_claim_holds_or_raises() -> None:
    assert str(claim("scores spread by √64", 7.97, predicted=8, rtol=0.05)).endswith("8 ± 5 %   measured 7.97")
    assert str(claim("tokens that differ", 0, predicted=0)).endswith("predicted 0   measured 0")
    with pytest.raises(ClaimError, match="predicted above 2, measured 1"):
        claim("a batch writes faster", 1, above=2)
    with pytest.raises(ClaimError, match="measured nan"):
        claim("a loss is a number", float("nan"), predicted=0)
    with pytest.raises(ValueError, match="has no prediction"):
        claim("anything", 1)
