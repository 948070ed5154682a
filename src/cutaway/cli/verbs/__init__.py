"""CLI verbs, one file per verb. Importing them imports neither torch nor rich."""
