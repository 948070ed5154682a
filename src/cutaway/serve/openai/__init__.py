"""The API that OpenAI's clients speak, on one checkpoint."""
