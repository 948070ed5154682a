"""Training checkpoints and run directories: written atomically, with checksums."""
