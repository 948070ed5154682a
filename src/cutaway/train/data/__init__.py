"""From documents to batches: read, tokenised once into memory maps, picked by a function of (seed, position)."""
