"""Tokenizer file formats: tokenizer.json, SentencePiece, tiktoken, Marian and GGUF."""
