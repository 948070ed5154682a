"""File formats of tokenizers: tokenizer.json, SentencePiece, tiktoken, Marian and GGUF."""
