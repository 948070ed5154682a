"""Chat templates, rendered in a sandbox that bounds their time and memory."""
