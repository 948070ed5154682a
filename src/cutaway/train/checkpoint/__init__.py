"""Checkpoints, which are written atomically and verified by checksums, and run directories."""
