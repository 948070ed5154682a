"""Chat templates, rendered in a sandbox with time and memory limits."""
