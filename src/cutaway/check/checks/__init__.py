"""The checks, a file for each part of a Transformer that they ask about."""
