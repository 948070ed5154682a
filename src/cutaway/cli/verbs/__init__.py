"""One file a verb: its arguments, and what it calls. Nothing here imports torch or rich at import."""
