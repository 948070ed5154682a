"""The checks, one file per component of a Transformer."""
