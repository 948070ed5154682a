"""Teaching material: measured claims, automatically graded exercises, lessons on the forward pass, and a quiz."""

from cutaway.learn.claim import Claim, claim

__all__ = ["Claim", "claim"]
