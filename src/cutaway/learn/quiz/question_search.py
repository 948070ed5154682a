"""Find quiz sections and topics by a name or by any word of their title. This module does not import torch."""

import difflib
import re
from collections.abc import Iterable, Mapping

TOPIC_TITLES = {
    "benchmarks": "benchmarks and speed comparisons",
    "cache": "KV cache",
    "checking": "checking a model",
    "checkpointing": "activation checkpointing",
    "command-line": "command line",
    "embedding": "embeddings and the tied head",
    "encoder": "encoder and bidirectional attention",
    "experts": "mixture of experts (MoE)",
    "ffn": "FFN, the feed-forward network",
    "flops": "FLOPs and compute",
    "heads": "attention heads, induction heads",
    "kl": "KL divergence",
    "leaks": "information leaks and causality",
    "norms": "LayerNorm and RMSNorm, normalization",
    "placement": "norm placement: pre-norm and post-norm",
    "positions": "position encodings, ALiBi",
    "residual-stream": "residual stream, residual connections",
    "rope": "RoPE, rotary position embedding",
    "scaling": "scaling laws, Chinchilla",
    "speculation": "speculative decoding",
    "speed": "speed, bandwidth and throughput",
    "teacher-forcing": "teacher forcing and exposure bias",
}
"""Topic → title. The title of any other topic is its name."""


def topic_title(topic: str) -> str:
    return TOPIC_TITLES.get(topic, topic.replace("-", " "))


def match_names(query: str, titles: Mapping[str, str]) -> set[str]:
    """Return the names that equal the query, or else all names whose title or name has every word of the query.

    `titles` are titles by name. Case, hyphens and plural endings are ignored, and a word may be shortened to four
    letters or more.
    """
    exact = {name for name in titles if _words(name) == _words(query)}
    return exact or {name for name, title in titles.items() if _has_words(query, f"{name} {title}")}


def suggest_names(query: str, names: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the most similar name, or an empty string."""
    near = difflib.get_close_matches(query.lower(), list(names), n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def _has_words(query: str, title: str) -> bool:
    title_words, query_words = _words(title), _words(query)
    return bool(query_words) and all(
        any(word == other or (len(word) >= 4 and other.startswith(word)) for other in title_words)
        for word in query_words
    )


def _words(text: str) -> list[str]:
    return [word.removesuffix("s") for word in re.findall(r"[a-z0-9]+", text.lower())]
