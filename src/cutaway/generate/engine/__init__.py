"""The engine: continuous batching of requests over one model, its KV cache and its scheduler."""
