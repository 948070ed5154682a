"""Sampling: parameters, logits processing, top-k, top-p and min-p filters, random numbers, sampler."""
