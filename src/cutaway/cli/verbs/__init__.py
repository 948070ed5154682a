"""CLI verbs, one file per verb. Importing these files imports neither torch nor rich."""
