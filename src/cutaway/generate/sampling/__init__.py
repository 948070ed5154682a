"""Sampling: its parameters, the processing of logits, and drawing the next token."""
