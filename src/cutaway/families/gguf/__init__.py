"""GGUF: load and save, with one table of config fields and weight mappings per architecture."""
