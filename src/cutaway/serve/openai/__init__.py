"""OpenAI-compatible API server for one checkpoint."""
