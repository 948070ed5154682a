"""Teaching material: notebooks with measured claims, graded exercises, lessons, a quiz and interview questions."""

from cutaway.learn.claim import Claim, claim

__all__ = ["Claim", "claim"]
