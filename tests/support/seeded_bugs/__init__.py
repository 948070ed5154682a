"""Seeded bugs: at least one per check, each caught by its check."""
