"""Structured output: completions that match a JSON schema, a regular expression, a list of choices or a grammar."""
