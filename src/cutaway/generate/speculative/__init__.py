"""Speculative decoding: draft models, n-gram drafts (prompt lookup), rejection sampling."""
