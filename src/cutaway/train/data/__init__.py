"""Training data: documents, tokenization into memory-mapped files, datasets by (seed, position)."""
