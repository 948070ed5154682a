"""CUDA C kernels for NVIDIA GPUs, compiled on first use."""
