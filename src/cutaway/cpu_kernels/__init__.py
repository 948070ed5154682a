"""C kernels for the CPU: products with packed weights, and Transformer blocks of decode steps."""
