"""Checkpoints and run directories: written atomically, verified by checksums."""
