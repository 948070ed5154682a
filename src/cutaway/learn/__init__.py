"""What is taught: claims that are measured, exercises that check themselves, questions with explained answers."""

from cutaway.learn.claim import Claim, claim

__all__ = ["Claim", "claim"]
