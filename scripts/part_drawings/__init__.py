"""Drawings of parts, a file for each part of the house they come from."""
