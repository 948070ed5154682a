"""Training data: documents, tokenization into memory-mapped files, and datasets indexed by position."""
