"""Probes that record a forward pass: attention calls, scales, parameters read, activations, divergence of two runs."""
