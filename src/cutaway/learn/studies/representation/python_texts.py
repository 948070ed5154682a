"""Texts for tiny-python: prompts with one next token, and modules of the standard library with properties of tokens."""

import importlib
import inspect
import io
import keyword
import tokenize
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint

PROMPTS = (
    "try:\n    value = int(text)\nexcept ValueError as error:\n    raise TypeError(",
    "for name in sorted(os.",
    "import os\nimport",
    "class Server:\n    def __init__(self, host, port):\n        self.host =",
    "def read(path):\n    with open(path) as file:\n        return file.",
    "if __name__ ==",
    "def count(items):\n    total = 0\n    for item in",
    "    def __repr__(self):\n        return",
    "while True:\n    try:\n        line = next(lines)\n    except StopIteration:\n       ",
    "from collections import",
)
MODULES = (
    "argparse", "ast", "calendar", "configparser", "csv", "fractions", "logging", "mailbox", "pdb", "pickle", "random",
    "shutil", "statistics", "subprocess", "tarfile", "tempfile", "textwrap", "inspect", "zipfile", "smtplib",
)  # fmt: skip
"""Modules of the standard library, on which tiny-python was trained."""
WINDOW = 256
TOKEN_CLASSES = ("keyword", "identifier", "operator", "number", "string", "comment", "whitespace")
MAX_INDENT = 4
"""Deeper indentation counts as this depth."""
PUNCTUATION = frozenset("()[]{},.:;=\"'#@")


@cache
def load_model(device: str = "cpu") -> Checkpoint:
    checkpoint = ct.load("tiny-python", dtype=torch.float32)
    checkpoint.model.to(device)
    return checkpoint


@dataclass(frozen=True)
class TokenizedText:
    """Token ids of windows of a text and the properties of the tokens, each (windows, WINDOW)."""

    ids: Tensor
    token_class: Tensor
    """Index into TOKEN_CLASSES, by the first character of the token that is not a space."""
    indent: Tensor
    """Number of enclosing indented blocks, at most MAX_INDENT."""
    in_string: Tensor
    """1 inside a string literal, else 0."""


@cache
def load_module_text(name: str, max_windows: int = 8) -> TokenizedText:
    """Windows of the source code of a module, as tokens of tiny-python with their properties."""
    source = inspect.getsource(importlib.import_module(name))
    # A token may be a part of a character that is not ASCII.
    return tokenize_source(source.encode("ascii", "replace").decode(), max_windows)


def tokenize_source(source: str, max_windows: int = 8) -> TokenizedText:
    """Windows of Python source code at equal distances, with properties of the tokens from Python's own tokenizer."""
    tokenizer = load_model().tokenizer
    assert tokenizer is not None
    decode = cache(lambda token: tokenizer.decode([token]))
    classes, indents = _character_properties(source)
    rows, start = [], 0
    for token in tokenizer.encode(source):
        text = decode(token)
        first = min(start + len(text) - len(text.lstrip(" ")), start + len(text) - 1)
        rows.append((token, classes[first], indents[first]))
        start += len(text)
    num_windows = len(rows) // WINDOW
    chosen = torch.linspace(0, num_windows - 1, min(max_windows, num_windows)).long()
    ids, token_class, indent = torch.tensor(rows[: num_windows * WINDOW]).T.reshape(3, num_windows, WINDOW)[:, chosen]
    in_string = (token_class == TOKEN_CLASSES.index("string")).long()
    return TokenizedText(ids, token_class, indent, in_string)


def _character_properties(source: str) -> tuple[list[int], list[int]]:
    """Class and indentation depth of every character."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    classes = [TOKEN_CLASSES.index("whitespace")] * len(source)
    indents, depth, last = [0] * len(source), 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        depth += {tokenize.INDENT: 1, tokenize.DEDENT: -1}.get(token.type, 0)
        first, end = (starts[line - 1] + column for line, column in (token.start, token.end))
        name = _token_class(token)
        if name is not None:
            classes[first:end] = [TOKEN_CLASSES.index(name)] * (end - first)
        indents[last:end] = [min(depth, MAX_INDENT)] * (end - last)
        last = max(last, end)
    return classes, indents


def _token_class(token: tokenize.TokenInfo) -> str | None:
    """Name of the class of a token of Python's tokenizer; None for line ends and indentation."""
    if token.type == tokenize.NAME:
        return "keyword" if keyword.iskeyword(token.string) else "identifier"
    names = {tokenize.OP: "operator", tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.COMMENT: "comment"}
    if token.type in names:
        return names[token.type]
    return "string" if tokenize.tok_name[token.type].startswith("FSTRING") else None


def is_punctuation(device: str = "cpu") -> Tensor:
    """(vocabulary,): whether a token consists of punctuation and white space, with at least one punctuation mark."""
    tokenizer = load_model().tokenizer
    assert tokenizer is not None
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    flags = [bool(text.strip()) and all(char in PUNCTUATION for char in text if not char.isspace()) for text in texts]
    return torch.tensor(flags, device=device)
