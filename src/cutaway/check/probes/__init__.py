"""Probes that record forward passes: attention calls, scales, activations, and the first difference of two runs."""
