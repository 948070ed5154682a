"""Ablation studies: variants of a recipe, trained on the same data and budget with several seeds, and compared."""
