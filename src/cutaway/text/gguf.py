"""A tokenizer as GGUF's metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, under `tokenizer.ggml.*`.

The values are plain: strings, numbers, lists. Where GGUF leaves a rule open, llama.cpp's holds.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers
from tokenizers.models import BPE

from cutaway.errors import InputError
from cutaway.text import sentencepiece_model
from cutaway.text.assemble import begin_and_end
from cutaway.text.files import MOST_TOKENS, in_rust
from cutaway.text.recipes import RECIPES, spaced_decoder
from cutaway.text.sentencepiece_model import BPE_MODEL, BYTE, CONTROL, NORMAL, UNIGRAM, UNKNOWN, USER_DEFINED
from cutaway.text.settings import ChatTemplate, Settings
from cutaway.text.splits import ADDS_BOS, IGNORES_MERGES, NAMES, byte_level, patterns_named
from cutaway.text.tokenizer import Tokenizer
from cutaway.text.vocabulary import Vocabulary

KEY = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
# "seperator" is GGUF's spelling.
IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


class Fields:
    """The metadata, checked as it is asked for."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self.tokens: list[str] = self.listed("tokens", str) or []
        if not self.tokens or len(self.tokens) > MOST_TOKENS:
            raise InputError(f"the GGUF metadata has no list of tokens in {KEY}tokens; use a file that has a tokenizer")
        self.types = self.listed("token_type", int) or [NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise InputError(
                f"the GGUF metadata has {len(self.types)} token types for {len(self.tokens)} tokens; fix it"
            )

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._fields.get(KEY + name, default)
        value = value.item() if hasattr(value, "item") else value  # numpy's scalars are as good
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise InputError(f"the GGUF metadata has {KEY}{name} = {value!r:.40}, not of type {kind.__name__}; fix it")
        return value

    def listed(self, name: str, kind: type) -> Any:
        value = self._fields.get(KEY + name)
        if value is None:
            return None
        value = value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, tuple) else value
        kinds = (int, float) if kind is float else kind
        if not isinstance(value, list) or any(not isinstance(item, kinds) for item in value):
            raise InputError(f"the GGUF metadata has a {KEY}{name} that is no list of {kind.__name__}; fix the file")
        return value

    @property
    def named(self) -> dict[str, str]:
        named = {}
        for name, key in IDS.items():
            number = self.get(key, int)
            if number is not None:
                if not 0 <= number < len(self.tokens):
                    raise InputError(f"the GGUF metadata has {KEY}{key} = {number}, which is no token; fix the file")
                named[name] = self.tokens[number]
        return named

    @property
    def ids(self) -> dict[str, int]:
        """Of two tokens with one text the first counts: that is the one the text is read as."""
        return {token: number for number, token in reversed([*enumerate(self.tokens)])}

    def pieces(self) -> list[tuple[str, float, int]]:
        scores = self.listed("scores", float)
        if scores is None or len(scores) != len(self.tokens):
            raise InputError(f"the GGUF metadata has no score for each token in {KEY}scores; fix the file")
        return list(zip(self.tokens, scores, self.types, strict=True))


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes, given as plain values by their full keys."""
    checked = Fields(fields)
    model = checked.get("model", str)
    if model not in _MODELS:
        known = ", ".join(_MODELS)
        raise InputError(f"the GGUF metadata describes a tokenizer of type {model!r}; only {known} can be read")
    build, adds_bos, adds_eos = _MODELS[model]
    backend = in_rust("the GGUF metadata", lambda: build(checked))
    named, ids = checked.named, checked.ids
    marked = set(named.values())
    added = [
        AddedToken(token, normalized=False, special=kind in (CONTROL, UNKNOWN) or token in marked)
        for token, kind in zip(checked.tokens, checked.types, strict=True)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) or token in marked
    ]
    in_rust("the GGUF metadata", lambda: backend.add_tokens(added))
    adds_bos = checked.get("add_bos_token", bool, adds_bos or NAMES.get(checked.get("pre", str, "")) in ADDS_BOS)
    adds_eos = checked.get("add_eos_token", bool, adds_eos)
    first, last = named.get("bos_token"), named.get("eos_token")
    if model == "bert":
        first, last = named.get("cls_token", first), named.get("sep_token", last)
    ends = [(token, ids[token]) if token is not None else None for token in (first, last)]
    backend.post_processor = begin_and_end(ends[0], ends[1], (adds_bos, adds_eos))
    return Tokenizer(backend, named=named, chat_template=_templates(fields))


def _templates(fields: Mapping[str, Any]) -> ChatTemplate:
    """One, or several by name."""
    names = fields.get(f"{TEMPLATE}s") or []
    if not isinstance(names, list):
        raise InputError(f"the GGUF metadata's {TEMPLATE}s are no list of names; fix the file")
    keys = {"default": TEMPLATE} | {str(name): f"{TEMPLATE}.{name}" for name in names}
    found = {name: fields[key] for name, key in keys.items() if fields.get(key) is not None}
    if not all(isinstance(template, str) for template in found.values()):
        raise InputError(f"the GGUF metadata has a {TEMPLATE} that is no string; fix the file")
    return found if found.keys() - {"default"} else found.get("default")


def _gpt2(fields: Fields) -> tokenizers.Tokenizer:
    merges = []
    for merge in fields.listed("merges", str) or []:
        pair = merge.split(" ")
        if len(pair) != 2:
            raise InputError(f"the GGUF metadata has a merge {merge!r:.40} that is not two tokens; fix the file")
        merges.append((pair[0], pair[1]))
    pre = fields.get("pre", str, "default")
    whole = NAMES.get(pre) in IGNORES_MERGES
    backend = tokenizers.Tokenizer(BPE(vocab=fields.ids, merges=merges, ignore_merges=whole))
    backend.pre_tokenizer = byte_level(patterns_named(pre), prefix=fields.get("add_space_prefix", bool, False))
    backend.decoder = decoders.ByteLevel()
    return backend


def _llama(fields: Fields) -> tokenizers.Tokenizer:
    prefix = fields.get("add_space_prefix", bool, True)
    model = _model(fields, BPE_MODEL, prefix=False)
    backend = sentencepiece_model.pipeline(model, sentencepiece_model.vocabulary_of(model, None))
    if prefix:
        # A space comes before the text and before whatever follows a special token.
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(list(steps))
        backend.decoder = spaced_decoder(prefix=True)
    return backend


def _t5(fields: Fields) -> tokenizers.Tokenizer:
    model = _model(fields, UNIGRAM, prefix=fields.get("add_space_prefix", bool, True))
    charsmap = fields.listed("precompiled_charsmap", int)
    if charsmap:
        # GGUF writers disagree on whether bytes have a sign.
        model.charsmap = bytes(byte & 0xFF for byte in charsmap)
        sentencepiece_model.check_charsmap(model.charsmap)
    model.remove_extra_whitespaces = fields.get("remove_extra_whitespaces", bool, False)
    return sentencepiece_model.pipeline(model, sentencepiece_model.vocabulary_of(model, None))


def _model(fields: Fields, kind: int, *, prefix: bool) -> sentencepiece_model.SentencePieceModel:
    unk = fields.get("unknown_token_id", int, 0)
    pieces = fields.pieces()
    bytes_too = any(type_ == BYTE for _, _, type_ in pieces)
    model = sentencepiece_model.SentencePieceModel(pieces, kind, byte_fallback=bytes_too, unk_id=unk)
    model.add_dummy_prefix, model.remove_extra_whitespaces = prefix, False
    sentencepiece_model.check(model)
    return model


def _bert(fields: Fields) -> tokenizers.Tokenizer:
    """llama.cpp marks the beginnings of words with ▁, BERT their continuations with ##."""
    ids: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(fields.tokens, fields.types, strict=True)):
        plain = token if kind in (CONTROL, UNKNOWN) else token.removeprefix("▁") if "▁" in token[:1] else f"##{token}"
        ids.setdefault(plain, number)
    settings = Settings("the GGUF metadata", {"do_lower_case": fields.get("normalizer.lowercase", bool, True)})
    settings.named = {"unk_token": fields.named.get("unk_token", "[UNK]")}
    return RECIPES["BertTokenizer"].build(Vocabulary("WordPiece", ids=ids), settings)


_MODELS: dict[str, tuple[Callable[[Fields], tokenizers.Tokenizer], bool, bool]] = {
    "gpt2": (_gpt2, False, False),
    "llama": (_llama, True, False),
    "t5": (_t5, False, True),
    "bert": (_bert, True, True),
}
"""How to build it, and whether BOS and EOS are added where the file does not say."""
