"""GGUF: a file format that keeps settings and tensors together, read and written by tables like any other's."""
