"""Beam search: algorithm, logits processors, and its use in `generate`."""
