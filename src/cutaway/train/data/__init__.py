"""From documents to batches: read, tokenized once into memory maps, picked by a function of (seed, position)."""
