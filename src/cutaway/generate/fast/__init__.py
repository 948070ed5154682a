"""Fast decode steps: packed and quantized weights, Triton kernels, CUDA graphs, CPU kernels."""
