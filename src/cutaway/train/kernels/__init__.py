"""Triton kernels for training, and compilation of blocks."""
