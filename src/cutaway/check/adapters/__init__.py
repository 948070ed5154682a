"""Adapters from cutaway models, transformers models, other modules and functions to `CheckedModel`."""
