"""Tokenizer to and from GGUF metadata (`tokenizer.ggml.*`).

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Values are strings, numbers and lists. Where GGUF does not
specify a rule, the rule of llama.cpp is used.
"""

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, normalizers
from tokenizers.models import BPE

from cutaway.errors import InputError
from cutaway.tokenizer import split_patterns as splits
from cutaway.tokenizer.decode_stream import is_byte_token
from cutaway.tokenizer.file_io import MAX_VOCAB_SIZE, JsonObject, wrap_tokenizers_errors
from cutaway.tokenizer.formats import sentencepiece as spm
from cutaway.tokenizer.formats.tokenizer_json import flatten_steps
from cutaway.tokenizer.pipelines import PIPELINES, bos_eos_processor, build_metaspace_decoder
from cutaway.tokenizer.tokenizer import Tokenizer
from cutaway.tokenizer.tokenizer_config import ChatTemplate, TokenizerConfig
from cutaway.tokenizer.vocabulary import Vocabulary

T = TypeVar("T")
Step = dict[str, Any]
"""A step of a pipeline, as the tokenizers library writes it in tokenizer.json."""
_GGML_KEY_PREFIX = "tokenizer.ggml."
_CHAT_TEMPLATE_KEY = "tokenizer.chat_template"
# "seperator" is the spelling in GGUF.
_GGUF_NAMES = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
_TOKEN_ID_KEYS = {
    f"{name}_token": f"{_GGUF_NAMES.get(name, name)}_token_id"
    for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
}


class _GGUFTokenizerMetadata:
    """Reads the tokenizer metadata of a GGUF file and validates types and lengths."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self.get_list("tokens", str) or []
        if not self.tokens or len(self.tokens) > MAX_VOCAB_SIZE:
            raise InputError(
                f"the GGUF metadata has no list {_GGML_KEY_PREFIX}tokens, or one that is too long; use a file with a"
                " tokenizer"
            )
        self.token_types = self.get_list("token_type", int) or [spm.NORMAL] * len(self.tokens)
        if len(self.token_types) != len(self.tokens):
            counts = f"{len(self.token_types)} token types for {len(self.tokens)} tokens"
            raise InputError(f"the GGUF metadata has {counts}; fix the file")

    def get(self, name: str, value_type: type[T]) -> T | None:
        value = self._metadata.get(_GGML_KEY_PREFIX + name)
        value = value.item() if isinstance(value, np.generic) else value
        if value is None or (isinstance(value, value_type) and (value_type is not int or not isinstance(value, bool))):
            return value
        key = f"{_GGML_KEY_PREFIX}{name}"
        raise InputError(f"the GGUF metadata has {key} = {value!r:.40}, not a {value_type.__name__}; fix the file")

    def get_or(self, name: str, default: T) -> T:
        value = self.get(name, type(default))
        return default if value is None else value

    def get_list(self, name: str, item_type: type[T]) -> list[T] | None:
        value = self._metadata.get(_GGML_KEY_PREFIX + name)
        item_types = (int, float) if item_type is float else item_type
        if value is None or (isinstance(value, list) and all(isinstance(item, item_types) for item in value)):
            return value
        key = f"{_GGML_KEY_PREFIX}{name}"
        raise InputError(f"the GGUF metadata has a {key} that is not a list of {item_type.__name__}; fix the file")

    @property
    def special_tokens_map(self) -> dict[str, str]:
        tokens = {}
        for name, key in _TOKEN_ID_KEYS.items():
            token_id = self.get(key, int)
            if token_id is not None:
                if not 0 <= token_id < len(self.tokens):
                    raise InputError(f"the GGUF metadata has {key} = {token_id}, which is not a token id; fix it")
                tokens[name] = self.tokens[token_id]
        return tokens

    @property
    def token_ids(self) -> dict[str, int]:
        """Token → id. A token that occurs several times has its first id, because text is encoded as that id."""
        return {token: token_id for token_id, token in reversed([*enumerate(self.tokens)])}

    def pieces(self) -> list[tuple[str, float, int]]:
        """Return (piece, score, type) of each token of a SentencePiece tokenizer."""
        scores = self.get_list("scores", float)
        if scores is None or len(scores) != len(self.tokens):
            raise InputError(
                f"the GGUF metadata has no {_GGML_KEY_PREFIX}scores with one score per token; fix the file"
            )
        return list(zip(self.tokens, scores, self.token_types, strict=True))


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Build a tokenizer from the metadata of a GGUF file: a dict from full key (`tokenizer.ggml.…`) to value."""
    reader = _GGUFTokenizerMetadata(metadata)
    model = reader.get("model", str)
    if model is None or model not in _PIPELINE_BUILDERS:
        known = ", ".join(_PIPELINE_BUILDERS)
        raise InputError(f"the GGUF metadata has a tokenizer of type {model!r}; cutaway supports {known}")
    build, add_bos, add_eos = _PIPELINE_BUILDERS[model]
    backend = wrap_tokenizers_errors("the GGUF metadata", lambda: build(reader))
    special_tokens, ids = reader.special_tokens_map, reader.token_ids
    special_contents = set(special_tokens.values())
    added = []
    for token, token_type in zip(reader.tokens, reader.token_types, strict=True):
        special = token_type in (spm.CONTROL, spm.UNKNOWN) or token in special_contents
        if special or token_type == spm.USER_DEFINED:
            added.append(AddedToken(token, normalized=False, special=special))
    wrap_tokenizers_errors("the GGUF metadata", lambda: backend.add_tokens(added))
    add_bos = add_bos or splits.PRE_TOKENIZER_NAMES.get(reader.get_or("pre", "")) in splits.ADD_BOS_BY_DEFAULT
    add_bos_eos = reader.get_or("add_bos_token", add_bos), reader.get_or("add_eos_token", add_eos)
    first, last = special_tokens.get("bos_token"), special_tokens.get("eos_token")
    if model == "bert":
        first, last = special_tokens.get("cls_token", first), special_tokens.get("sep_token", last)
    bos, eos = ((token, ids[token]) if token is not None else None for token in (first, last))
    backend.post_processor = bos_eos_processor(bos, eos, add_bos_eos)
    return Tokenizer(backend, special_tokens_map=special_tokens, chat_template=_read_chat_templates(metadata))


def _read_chat_templates(metadata: Mapping[str, object]) -> ChatTemplate:
    """The chat template, a dict of templates by name if there are several, or None if there is none."""
    names = metadata.get(f"{_CHAT_TEMPLATE_KEY}s") or []
    if not isinstance(names, list):
        raise InputError(f"the GGUF metadata has {_CHAT_TEMPLATE_KEY}s that are not a list of names; fix the file")
    keys = {"default": _CHAT_TEMPLATE_KEY} | {str(name): f"{_CHAT_TEMPLATE_KEY}.{name}" for name in names}
    templates = {}
    for name, key in keys.items():
        template = metadata.get(key)
        if isinstance(template, str):
            templates[name] = template
        elif template is not None:
            raise InputError(f"the GGUF metadata has a {_CHAT_TEMPLATE_KEY} that is not a string; fix the file")
    return templates if templates.keys() - {"default"} else templates.get("default")


def _build_gpt2(metadata: _GGUFTokenizerMetadata) -> tokenizers.Tokenizer:
    merges = []
    for merge in metadata.get_list("merges", str) or []:
        pair = merge.split(" ")
        if len(pair) != 2:
            raise InputError(f"the GGUF metadata has a merge {merge!r:.40} that is not two tokens; fix the file")
        merges.append((pair[0], pair[1]))
    pre = metadata.get_or("pre", "default")
    ignore_merges = splits.PRE_TOKENIZER_NAMES.get(pre) in splits.IGNORE_MERGES
    backend = tokenizers.Tokenizer(BPE(vocab=metadata.token_ids, merges=merges, ignore_merges=ignore_merges))
    prefix = metadata.get_or("add_space_prefix", False)
    patterns = splits.get_split_patterns(pre)
    backend.pre_tokenizer = splits.build_byte_level_pre_tokenizer(patterns, add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    return backend


def _build_llama(metadata: _GGUFTokenizerMetadata) -> tokenizers.Tokenizer:
    prefix = metadata.get_or("add_space_prefix", True)
    model = _sentencepiece_model(metadata, spm.BPE_MODEL, add_dummy_prefix=False)
    backend = spm.build_sentencepiece_pipeline(model, spm.build_vocabulary(model, None))
    if prefix:
        # A space is added before the text and before text that follows a special token.
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(list(steps))
        backend.decoder = build_metaspace_decoder(add_prefix_space=True)
    return backend


def _build_t5(metadata: _GGUFTokenizerMetadata) -> tokenizers.Tokenizer:
    prefix = metadata.get_or("add_space_prefix", True)
    model = _sentencepiece_model(metadata, spm.UNIGRAM_MODEL, add_dummy_prefix=prefix)
    charsmap = metadata.get_list("precompiled_charsmap", int)
    if charsmap:
        # Some GGUF writers store signed bytes, others unsigned.
        model.precompiled_charsmap = bytes(byte & 0xFF for byte in charsmap)
        spm.validate_charsmap(model.precompiled_charsmap)
    model.remove_extra_whitespaces = metadata.get_or("remove_extra_whitespaces", False)
    return spm.build_sentencepiece_pipeline(model, spm.build_vocabulary(model, None))


def _sentencepiece_model(
    metadata: _GGUFTokenizerMetadata, model_type: int, *, add_dummy_prefix: bool
) -> spm.SentencePieceModel:
    model = spm.SentencePieceModel(metadata.pieces(), model_type, unk_id=metadata.get_or("unknown_token_id", 0))
    model.byte_fallback = any(type_ == spm.BYTE for _, _, type_ in model.pieces)
    model.add_dummy_prefix, model.remove_extra_whitespaces = add_dummy_prefix, False
    spm.validate_sentencepiece_model(model)
    return model


def _build_bert(metadata: _GGUFTokenizerMetadata) -> tokenizers.Tokenizer:
    """Build a WordPiece tokenizer. llama.cpp marks the starts of words with ▁; BERT marks continuations with ##."""
    ids: dict[str, int] = {}
    for token_id, (token, token_type) in enumerate(zip(metadata.tokens, metadata.token_types, strict=True)):
        if token_type not in (spm.CONTROL, spm.UNKNOWN):
            token = token[1:] if token.startswith("▁") else f"##{token}"
        ids.setdefault(token, token_id)
    options: JsonObject = {"do_lower_case": metadata.get_or("normalizer.lowercase", True)}
    unk = metadata.special_tokens_map.get("unk_token", "[UNK]")
    cfg = TokenizerConfig("the GGUF metadata", options, {"unk_token": unk})
    return PIPELINES["BertTokenizer"].build(Vocabulary("WordPiece", ids=ids), cfg)


_PIPELINE_BUILDERS: dict[str, tuple[Callable[[_GGUFTokenizerMetadata], tokenizers.Tokenizer], bool, bool]] = {
    "gpt2": (_build_gpt2, False, False),
    "llama": (_build_llama, True, False),
    "t5": (_build_t5, False, True),
    "bert": (_build_bert, True, True),
}
"""Tokenizer type → (builder, default of add_bos_token, default of add_eos_token)."""


def tokenizer_to_gguf(tokenizer: Tokenizer) -> dict[str, object]:
    """GGUF metadata of a tokenizer, by full key. Supports byte-level BPE, SentencePiece BPE and Unigram."""
    pipeline = json.loads(tokenizer.backend.to_str())
    model, steps = pipeline["model"], flatten_steps([pipeline["normalizer"], pipeline["pre_tokenizer"]])
    step_types = {step["type"] for step in steps}
    values: dict[str, object]
    if model["type"] == "BPE" and "ByteLevel" in step_types:
        merges = [" ".join(pair) for pair in model["merges"]]
        values = {"model": "gpt2", "pre": _pre_tokenizer_name(steps, has_merges=bool(merges)), "merges": merges}
        values["add_space_prefix"] = any(step.get("add_prefix_space") for step in steps if step["type"] == "ByteLevel")
    elif model["type"] == "BPE" and model.get("byte_fallback"):
        values = {"model": "llama", "add_space_prefix": _adds_space_prefix(steps)}
    elif model["type"] == "Unigram":
        values = {"model": "t5", "add_space_prefix": _adds_space_prefix(steps)}
        values["remove_extra_whitespaces"] = "WhitespaceSplit" in step_types
        for step in steps:
            match step:
                case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
                    values["precompiled_charsmap"] = list(base64.b64decode(charsmap))
                case {"type": "Replace", "pattern": {"Regex": " {2,}"}}:
                    values["remove_extra_whitespaces"] = True
    else:
        raise InputError(f"a tokenizer of type {model['type']} cannot be written as GGUF; save it as a directory")
    values |= _token_metadata(tokenizer, model)
    for name, token in tokenizer.special_tokens_map.items():
        if (token_id := tokenizer.token_to_id(token)) is not None:
            values[_TOKEN_ID_KEYS[name]] = token_id
    special_ids, bos, eos = tokenizer.encode(""), tokenizer.bos_token_id, tokenizer.eos_token_id
    add_bos = bos is not None and special_ids[:1] == [bos]
    values["add_bos_token"] = add_bos
    values["add_eos_token"] = eos is not None and special_ids[add_bos:] == [eos]
    fields = {_GGML_KEY_PREFIX + name: value for name, value in values.items()}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        named_templates = {name: text for name, text in template.items() if name != "default"}
        fields |= {f"{_CHAT_TEMPLATE_KEY}.{name}": text for name, text in named_templates.items()}
        fields[f"{_CHAT_TEMPLATE_KEY}s"] = list(named_templates)
        template = template.get("default")
    return fields if template is None else {**fields, _CHAT_TEMPLATE_KEY: template}


def _pre_tokenizer_name(steps: list[Step], *, has_merges: bool) -> str:
    patterns: list[str] = []
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(r"\p{N}")
            case {"type": "ByteLevel", "use_regex": True}:
                patterns += splits.SPLIT_PATTERNS["gpt-2"]
            case {"type": "Sequence" | "ByteLevel" | "NFC"}:
                pass
            case _:
                patterns.append(f"<{step['type']}>")
    for name, known in splits.SPLIT_PATTERNS.items():
        if known == tuple(patterns) or not (patterns or has_merges):
            return name
    raise InputError(f"GGUF has no name for this pre-tokenizer ({' then '.join(patterns)}); save it as a directory")


def _adds_space_prefix(steps: list[Step]) -> bool:
    return any(step["type"] == "Prepend" or step.get("prepend_scheme", "never") != "never" for step in steps)


def _token_metadata(tokenizer: Tokenizer, model: Step) -> dict[str, object]:
    """Metadata lists by token id: tokens, token types and, for SentencePiece, scores. Unused ids get placeholders."""
    vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values()) + 1
    tokens = [f"[PAD{token_id}]" for token_id in range(size)]
    types = [spm.UNUSED] * size
    fallback = model.get("byte_fallback", False)
    for token, token_id in vocab.items():
        tokens[token_id], types[token_id] = token, spm.BYTE if fallback and is_byte_token(token) else spm.NORMAL
    for token_id, added in tokenizer.backend.get_added_tokens_decoder().items():
        types[token_id] = spm.CONTROL if added.special else spm.USER_DEFINED
    if model["type"] == "BPE" and not fallback:
        return {"tokens": tokens, "token_type": types}
    unk = tokenizer.unk_token_id
    if unk is not None:
        types[unk] = spm.UNKNOWN
    # llama.cpp matches user-defined pieces in the raw text, before spaces become ▁.
    for token_id, token_type in enumerate(types):
        if token_type == spm.USER_DEFINED:
            tokens[token_id] = tokens[token_id].replace("▁", " ")
    if model["type"] == "Unigram":
        scores = [score for _, score in model["vocab"]] + [0.0] * (size - len(model["vocab"]))
    else:
        scores = _bpe_scores(tokens, types, model["merges"])
    return {"tokens": tokens, "token_type": types, "scores": scores}


def _bpe_scores(tokens: list[str], types: list[int], merges: list[list[str]]) -> list[float]:
    """Score of each token: minus the index of the first merge that creates it. The highest score is merged first."""
    first_merge: dict[str, int] = {}
    for i, (left, right) in enumerate(merges):
        first_merge.setdefault(left + right, i)
    scores = [float(-first_merge.get(token, len(merges) + token_id)) for token_id, token in enumerate(tokens)]
    return [s if type_ in (spm.NORMAL, spm.USER_DEFINED) else 0.0 for s, type_ in zip(scores, types, strict=True)]
