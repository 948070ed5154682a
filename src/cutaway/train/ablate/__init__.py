"""Ablation studies: train variants of a recipe on the same data and budget, with several seeds, and compare them."""
