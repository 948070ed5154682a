"""Triton kernels of training, and compiled blocks."""
