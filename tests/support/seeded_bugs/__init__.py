"""Seeded bugs: at least one for each check, each caught by its check."""
