"""Grammars: compiled constraints, and the tokens that each of them allows next. The engine is llguidance.

llguidance walks the parser of the grammar and a trie of the vocabulary at the same time. It works on bytes, so any
tokenizer is supported whose tokens have bytes of their own (`cutaway.tokenizer.token_bytes`).
"""

import importlib
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int32
from torch import Tensor

from cutaway.errors import InputError
from cutaway.generate.structured_output.constraint import JSON_WHITESPACE, Constraint, bitmask_width
from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.token_bytes import token_bytes

_MAX_CACHED_GRAMMARS = 64
ALL_TOKENS = -1
"""Word of a bitmask that allows its 32 tokens."""


class Grammar:
    """Position of one completion in a compiled grammar. Positions count the sampled tokens of the completion."""

    def __init__(self, matcher: Any, end_id: int | None, bytes_of_token: Mapping[int, bytes]) -> None:
        """`end_id`: see `GrammarCompiler`."""
        self._matcher, self._end_id, self._bytes_of_token = matcher, end_id, bytes_of_token
        self.num_tokens = 0
        """Number of tokens accepted so far."""

    def copy(self) -> "Grammar":
        """Copy with its own position, for a beam or another completion."""
        copy = Grammar(self._matcher.deep_copy(), self._end_id, self._bytes_of_token)
        copy.num_tokens = self.num_tokens
        return copy

    def skip(self, prefix: Iterable[int]) -> None:
        """Advance by the first tokens of a completion that are given and not sampled. Special tokens have no text."""
        for token in prefix:
            if token in self._bytes_of_token and not self.is_finished:
                self._matcher.consume_token(token)

    def accept(self, token: int, position: int) -> None:
        """Advance by the token at `position` of the completion. Tokens before the current position were accepted."""
        if position < self.num_tokens:
            return
        assert position == self.num_tokens
        self.num_tokens += 1
        if not self.is_finished:
            self._matcher.consume_token(token)

    @property
    def is_finished(self) -> bool:
        """Whether the grammar is complete and allows no more text, or has failed (see `error`)."""
        return bool(self._matcher.is_stopped())

    @property
    def is_complete(self) -> bool:
        """Whether the completion so far matches the grammar. It may allow more text."""
        return bool(self._matcher.is_accepting())

    @property
    def error(self) -> str | None:
        """Why the grammar has failed: a token that is not allowed, or a limit of the engine. None if it has not."""
        return _reason(self._matcher.get_error()) if self._matcher.is_error() else None

    def fill_bitmask(self, row: Int32[Tensor, " W"]) -> None:
        """Write the tokens that may come next to a contiguous row of a CPU bitmask."""
        if self.is_finished:
            row.fill_(ALL_TOKENS)  # what is sampled is not used
        elif self._end_id is None:
            self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.nbytes)
        else:
            longer = torch.zeros(bitmask_width(self._end_id + 1), dtype=torch.int32)
            self._matcher.unsafe_compute_mask_ptr(longer.data_ptr(), longer.nbytes)
            longer.view(torch.uint8)[self._end_id // 8] &= 0xFF ^ (1 << self._end_id % 8)
            row.copy_(longer[: len(row)])

    def fill_draft_bitmasks(self, rows: Int32[Tensor, "T W"], draft_tokens: Sequence[int]) -> None:
        """Write the tokens allowed next, after the first draft token, after the second … to the rows of a bitmask.

        After a draft token that is not allowed, all tokens are: rejection sampling drops what follows it."""
        rows.fill_(ALL_TOKENS)
        num_consumed = 0
        for i, row in enumerate(rows):
            if self.is_finished:
                break
            self.fill_bitmask(row)
            if i == len(draft_tokens) or not self._matcher.try_consume_tokens([draft_tokens[i]]):
                break
            num_consumed += 1
        self._matcher.rollback(num_consumed)


class GrammarCompiler:
    """Compiles constraints for one tokenizer, and keeps the last compiled grammars."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`vocab_size`: number of logits, which may exceed the number of tokens."""
        llguidance = _import_llguidance()
        self.bytes_of_token = {i: text for i, text in token_bytes(tokenizer).items() if i < vocab_size}
        self.eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._end_id = None if self.eos_token_ids else vocab_size
        """Without an EOS token, this id after the vocabulary stands for the end. It is never sampled."""
        eos = sorted(self.eos_token_ids) or [vocab_size]
        special_token_ids = sorted({*(i for i in range(vocab_size) if i not in self.bytes_of_token), *eos})
        vocabulary = _Vocabulary(
            tokenizer, self.bytes_of_token, max(vocab_size, eos[-1] + 1), eos[0], special_token_ids
        )
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), eos_token=eos)
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._llguidance = llguidance
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint; raise an InputError if it is invalid, not supported or too large."""
        with self._lock:
            matcher = self._compiled.get(constraint)
            if matcher is not None:
                self._compiled.move_to_end(constraint)
        if matcher is None:
            matcher = self._build_matcher(constraint)
            with self._lock:
                self._compiled[constraint] = matcher
                if len(self._compiled) > _MAX_CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
        return Grammar(matcher.deep_copy(), self._end_id, self.bytes_of_token)

    def _build_matcher(self, constraint: Constraint) -> Any:
        kind, text = constraint
        matcher_class = self._llguidance.LLMatcher
        try:
            if kind == "schema":
                options = {"whitespace_pattern": JSON_WHITESPACE}
                schema = {"allOf": [json.loads(text)]} if text in ("true", "false") else text
                grammar = matcher_class.grammar_from_json_schema(schema, defaults=options)
            else:
                grammar = self._llguidance.grammar_from(kind, text)
        except ValueError as error:
            raise InputError(_cannot_compile(kind, str(error))) from None
        matcher = matcher_class(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InputError(_cannot_compile(kind, matcher.get_error()))
        if matcher.is_stopped():
            raise InputError(f"{kind} allows only the empty text; change it so that it allows at least one character")
        mask = torch.zeros(bitmask_width(self._tokenizer.vocab_size), dtype=torch.int32)
        matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        if matcher.is_error():
            raise InputError(_cannot_compile(kind, matcher.get_error()))
        return matcher


class _Vocabulary:
    """Vocabulary in the form that llguidance reads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        bytes_of_token: dict[int, bytes],
        size: int,
        eos_token_id: int,
        special_token_ids: Sequence[int],
    ) -> None:
        special = set(special_token_ids)
        self.tokens = [b"<special_%d>" % i if i in special else bytes_of_token[i] for i in range(size)]
        self.eos_token_id, self.bos_token_id = eos_token_id, None
        self.special_token_ids = list(special_token_ids)
        # A strong reference would keep the tokenizer, which is a key of `_compilers`, forever.
        self._tokenizer, self._bytes_of_token = weakref.ref(tokenizer), bytes_of_token
        self._token_of_bytes = {text: i for i, text in reversed(bytes_of_token.items()) if text}
        self._max_length = max(map(len, self._token_of_bytes), default=1)

    def __call__(self, data: bytes | str) -> list[int]:
        """Token ids of a text that the grammar requires next. Where all text is required, only these are allowed.

        They are those of the tokenizer if it changes nothing, such as a space at the beginning. Otherwise, each token
        is the longest that matches. A text that the vocabulary cannot write ends early."""
        data = data.encode() if isinstance(data, str) else data
        tokenizer = self._tokenizer()
        try:
            ids = [] if tokenizer is None else tokenizer.encode(data.decode(), add_special_tokens=False)
        except (UnicodeDecodeError, InputError):
            ids = []
        if b"".join(self._bytes_of_token.get(i, b"") for i in ids) == data:
            return ids
        ids, start = [], 0
        while start < len(data):
            ends = range(min(len(data), start + self._max_length), start, -1)
            end = next((end for end in ends if data[start:end] in self._token_of_bytes), None)
            if end is None:
                break
            ids.append(self._token_of_bytes[data[start:end]])
            start = end
        return ids


_compilers: "WeakKeyDictionary[Tokenizer, dict[tuple[int, frozenset[int]], GrammarCompiler]]" = WeakKeyDictionary()
_compilers_lock = threading.Lock()


def get_grammar_compiler(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> GrammarCompiler:
    """Compiler of a tokenizer, built at the first call: it holds a trie of the vocabulary."""
    with _compilers_lock:
        compilers = _compilers.setdefault(tokenizer, {})
        key = vocab_size, frozenset(eos_token_ids)
        if key not in compilers:
            compilers[key] = GrammarCompiler(tokenizer, *key)
        return compilers[key]


def _import_llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise InputError(
            "structured output needs the package llguidance, which is not installed; run: pip install"
            " 'cutaway[structured]'"
        ) from None


def _reason(message: str) -> str:
    """The line of an error message of llguidance that says what is wrong."""
    if message.startswith("NoExtension"):
        return "no token of the vocabulary can come next"
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["unknown error"]
    # The message of a regular expression shows it with a mark below the error, and names the error in the last line.
    detail = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return detail.rstrip(".")


def _cannot_compile(kind: str, message: str) -> str:
    """Error message for a constraint that llguidance refuses."""
    reason = _reason(message)
    too_large = any(word in reason for word in ("too large", "too big", "too complex", "limit", "fuel"))
    advice = "pass a smaller one" if too_large else "change it, or leave out the unsupported part"
    return f"{kind} cannot be used ({reason[:300]}); {advice}"


def fill_bitmasks(bitmask: Int32[Tensor, "n W"], grammars: Sequence[Grammar | None]) -> None:
    """Write the tokens that each row's grammar allows next; rows without a grammar allow all tokens."""
    for row, grammar in zip(bitmask, grammars, strict=True):
        if grammar is None:
            row.fill_(ALL_TOKENS)
        else:
            grammar.fill_bitmask(row)
