"""Figures of docs/components, one file per group of components."""
