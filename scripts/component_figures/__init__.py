"""Figures of docs/components, a file for each group of components."""
