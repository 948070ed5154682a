"""Training objectives: causal, masked, prefix and sequence-to-sequence language modeling."""

from cutaway.train.loss.cross_entropy import CrossEntropyOptions
from cutaway.train.objectives.masked_lm import masked_lm
from cutaway.train.objectives.objective import Objective, causal_lm, prefix_lm, seq2seq

__all__ = ["CrossEntropyOptions", "Objective", "causal_lm", "masked_lm", "prefix_lm", "seq2seq"]
