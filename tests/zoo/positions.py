"""Bugs of positions."""
