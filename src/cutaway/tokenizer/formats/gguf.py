"""A tokenizer as GGUF's metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, under `tokenizer.ggml.*`.

The values are plain: strings, numbers, lists. Where GGUF leaves a rule open, llama.cpp's holds.
"""

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers
from tokenizers.models import BPE

from cutaway.errors import InputError
from cutaway.tokenizer.decode_stream import is_byte_token
from cutaway.tokenizer.file_io import MAX_VOCAB_SIZE, wrap_tokenizers_errors
from cutaway.tokenizer.formats.sentencepiece import (
    BPE_MODEL,
    BYTE,
    CONTROL,
    NORMAL,
    UNIGRAM_MODEL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
    build_sentencepiece_pipeline,
    build_vocabulary,
    validate_charsmap,
    validate_sentencepiece_model,
)
from cutaway.tokenizer.pipelines import PIPELINES, bos_eos_processor, build_metaspace_decoder
from cutaway.tokenizer.split_patterns import (
    ADD_BOS_BY_DEFAULT,
    IGNORE_MERGES,
    PRE_TOKENIZER_NAMES,
    SPLIT_PATTERNS,
    build_byte_level_pre_tokenizer,
    get_split_patterns,
)
from cutaway.tokenizer.tokenizer import Tokenizer
from cutaway.tokenizer.tokenizer_config import ChatTemplate, TokenizerConfig
from cutaway.tokenizer.vocabulary import Vocabulary

GGML_KEY_PREFIX = "tokenizer.ggml."
CHAT_TEMPLATE_KEY = "tokenizer.chat_template"
# "seperator" is GGUF's spelling.
TOKEN_ID_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


class GGUFTokenizerMetadata:
    """The metadata, checked as it is asked for."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self.get_list("tokens", str) or []
        if not self.tokens or len(self.tokens) > MAX_VOCAB_SIZE:
            raise InputError(
                f"the GGUF metadata has no list of tokens in {GGML_KEY_PREFIX}tokens; use a file that has a tokenizer"
            )
        self.token_types = self.get_list("token_type", int) or [NORMAL] * len(self.tokens)
        if len(self.token_types) != len(self.tokens):
            raise InputError(
                f"the GGUF metadata has {len(self.token_types)} token types for {len(self.tokens)} tokens; fix it"
            )

    def get(self, name: str, value_type: type, default: Any = None) -> Any:
        value = self._metadata.get(GGML_KEY_PREFIX + name, default)
        value = value.item() if hasattr(value, "item") else value  # numpy's scalars are as good
        if value is not default and (
            not isinstance(value, value_type) or (value_type is int and isinstance(value, bool))
        ):
            raise InputError(
                f"the GGUF metadata has {GGML_KEY_PREFIX}{name} = {value!r:.40}, not of type {value_type.__name__};"
                " fix it"
            )
        return value

    def get_list(self, name: str, item_type: type) -> Any:
        value = self._metadata.get(GGML_KEY_PREFIX + name)
        if value is None:
            return None
        value = value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, tuple) else value
        kinds = (int, float) if item_type is float else item_type
        if not isinstance(value, list) or any(not isinstance(item, kinds) for item in value):
            raise InputError(
                f"the GGUF metadata has a {GGML_KEY_PREFIX}{name} that is no list of {item_type.__name__}; fix the file"
            )
        return value

    @property
    def special_tokens_map(self) -> dict[str, str]:
        named = {}
        for name, key in TOKEN_ID_KEYS.items():
            number = self.get(key, int)
            if number is not None:
                if not 0 <= number < len(self.tokens):
                    raise InputError(
                        f"the GGUF metadata has {GGML_KEY_PREFIX}{key} = {number}, which is no token; fix the file"
                    )
                named[name] = self.tokens[number]
        return named

    @property
    def token_ids(self) -> dict[str, int]:
        """Of two tokens with one text the first counts: that is the one the text is read as."""
        return {token: number for number, token in reversed([*enumerate(self.tokens)])}

    def pieces(self) -> list[tuple[str, float, int]]:
        scores = self.get_list("scores", float)
        if scores is None or len(scores) != len(self.tokens):
            raise InputError(f"the GGUF metadata has no score for each token in {GGML_KEY_PREFIX}scores; fix the file")
        return list(zip(self.tokens, scores, self.token_types, strict=True))


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes, given as plain values by their full keys."""
    checked = GGUFTokenizerMetadata(metadata)
    model = checked.get("model", str)
    if model not in _PIPELINE_BUILDERS:
        known = ", ".join(_PIPELINE_BUILDERS)
        raise InputError(f"the GGUF metadata describes a tokenizer of type {model!r}; only {known} can be read")
    build, adds_bos, adds_eos = _PIPELINE_BUILDERS[model]
    backend = wrap_tokenizers_errors("the GGUF metadata", lambda: build(checked))
    named, ids = checked.special_tokens_map, checked.token_ids
    marked = set(named.values())
    added = [
        AddedToken(token, normalized=False, special=kind in (CONTROL, UNKNOWN) or token in marked)
        for token, kind in zip(checked.tokens, checked.token_types, strict=True)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) or token in marked
    ]
    wrap_tokenizers_errors("the GGUF metadata", lambda: backend.add_tokens(added))
    adds_bos = checked.get(
        "add_bos_token", bool, adds_bos or PRE_TOKENIZER_NAMES.get(checked.get("pre", str, "")) in ADD_BOS_BY_DEFAULT
    )
    adds_eos = checked.get("add_eos_token", bool, adds_eos)
    first, last = named.get("bos_token"), named.get("eos_token")
    if model == "bert":
        first, last = named.get("cls_token", first), named.get("sep_token", last)
    ends = [(token, ids[token]) if token is not None else None for token in (first, last)]
    backend.post_processor = bos_eos_processor(ends[0], ends[1], (adds_bos, adds_eos))
    return Tokenizer(backend, special_tokens_map=named, chat_template=_read_chat_templates(metadata))


def _read_chat_templates(metadata: Mapping[str, Any]) -> ChatTemplate:
    """One, or several by name."""
    names = metadata.get(f"{CHAT_TEMPLATE_KEY}s") or []
    if not isinstance(names, list):
        raise InputError(f"the GGUF metadata's {CHAT_TEMPLATE_KEY}s are no list of names; fix the file")
    keys = {"default": CHAT_TEMPLATE_KEY} | {str(name): f"{CHAT_TEMPLATE_KEY}.{name}" for name in names}
    found = {name: metadata[key] for name, key in keys.items() if metadata.get(key) is not None}
    if not all(isinstance(template, str) for template in found.values()):
        raise InputError(f"the GGUF metadata has a {CHAT_TEMPLATE_KEY} that is no string; fix the file")
    return found if found.keys() - {"default"} else found.get("default")


def _build_gpt2(metadata: GGUFTokenizerMetadata) -> tokenizers.Tokenizer:
    merges = []
    for merge in metadata.get_list("merges", str) or []:
        pair = merge.split(" ")
        if len(pair) != 2:
            raise InputError(f"the GGUF metadata has a merge {merge!r:.40} that is not two tokens; fix the file")
        merges.append((pair[0], pair[1]))
    pre = metadata.get("pre", str, "default")
    whole = PRE_TOKENIZER_NAMES.get(pre) in IGNORE_MERGES
    backend = tokenizers.Tokenizer(BPE(vocab=metadata.token_ids, merges=merges, ignore_merges=whole))
    backend.pre_tokenizer = build_byte_level_pre_tokenizer(
        get_split_patterns(pre), add_prefix_space=metadata.get("add_space_prefix", bool, False)
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _build_llama(metadata: GGUFTokenizerMetadata) -> tokenizers.Tokenizer:
    prefix = metadata.get("add_space_prefix", bool, True)
    model = _sentencepiece_model(metadata, BPE_MODEL, add_dummy_prefix=False)
    backend = build_sentencepiece_pipeline(model, build_vocabulary(model, None))
    if prefix:
        # A space comes before the text and before whatever follows a special token.
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(list(steps))
        backend.decoder = build_metaspace_decoder(add_prefix_space=True)
    return backend


def _build_t5(metadata: GGUFTokenizerMetadata) -> tokenizers.Tokenizer:
    model = _sentencepiece_model(metadata, UNIGRAM_MODEL, add_dummy_prefix=metadata.get("add_space_prefix", bool, True))
    charsmap = metadata.get_list("precompiled_charsmap", int)
    if charsmap:
        # GGUF writers disagree on whether bytes have a sign.
        model.precompiled_charsmap = bytes(byte & 0xFF for byte in charsmap)
        validate_charsmap(model.precompiled_charsmap)
    model.remove_extra_whitespaces = metadata.get("remove_extra_whitespaces", bool, False)
    return build_sentencepiece_pipeline(model, build_vocabulary(model, None))


def _sentencepiece_model(
    metadata: GGUFTokenizerMetadata, model_type: int, *, add_dummy_prefix: bool
) -> SentencePieceModel:
    unk = metadata.get("unknown_token_id", int, 0)
    pieces = metadata.pieces()
    bytes_too = any(type_ == BYTE for _, _, type_ in pieces)
    model = SentencePieceModel(pieces, model_type, byte_fallback=bytes_too, unk_id=unk)
    model.add_dummy_prefix, model.remove_extra_whitespaces = add_dummy_prefix, False
    validate_sentencepiece_model(model)
    return model


def _build_bert(metadata: GGUFTokenizerMetadata) -> tokenizers.Tokenizer:
    """llama.cpp marks the beginnings of words with ▁, BERT their continuations with ##."""
    ids: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(metadata.tokens, metadata.token_types, strict=True)):
        plain = token if kind in (CONTROL, UNKNOWN) else token.removeprefix("▁") if "▁" in token[:1] else f"##{token}"
        ids.setdefault(plain, number)
    settings = TokenizerConfig("the GGUF metadata", {"do_lower_case": metadata.get("normalizer.lowercase", bool, True)})
    settings.special_tokens = {"unk_token": metadata.special_tokens_map.get("unk_token", "[UNK]")}
    return PIPELINES["BertTokenizer"].build(Vocabulary("WordPiece", ids=ids), settings)


_PIPELINE_BUILDERS: dict[str, tuple[Callable[[GGUFTokenizerMetadata], tokenizers.Tokenizer], bool, bool]] = {
    "gpt2": (_build_gpt2, False, False),
    "llama": (_build_llama, True, False),
    "t5": (_build_t5, False, True),
    "bert": (_build_bert, True, True),
}
"""How to build it, and whether BOS and EOS are added where the file does not say."""


def tokenizer_to_gguf(tokenizer: Tokenizer) -> dict[str, Any]:
    """Plain values by their full keys, for byte-level BPE and SentencePiece's two kinds."""
    pipeline = json.loads(tokenizer.backend.to_str())
    model, parts = pipeline["model"], _flatten_steps(pipeline)
    types_of_parts = {part["type"] for part in parts}
    values: dict[str, Any]
    if model["type"] == "BPE" and "ByteLevel" in types_of_parts:
        values = {
            "model": "gpt2",
            "pre": _pre_tokenizer_name(pipeline, parts),
            "merges": [" ".join(pair) for pair in model["merges"]],
        }
        values["add_space_prefix"] = any(part.get("add_prefix_space") for part in parts if part["type"] == "ByteLevel")
    elif model["type"] == "BPE" and model.get("byte_fallback"):
        values = {"model": "llama", "add_space_prefix": _adds_space_prefix(parts)}
    elif model["type"] == "Unigram":
        values = {"model": "t5", "add_space_prefix": _adds_space_prefix(parts)}
        squeezed = [part for part in parts if part["type"] == "Replace" and part["pattern"] == {"Regex": " {2,}"}]
        values["remove_extra_whitespaces"] = bool(squeezed) or "WhitespaceSplit" in types_of_parts
        for part in parts:
            if part["type"] == "Precompiled":
                values["precompiled_charsmap"] = list(base64.b64decode(part["precompiled_charsmap"]))
    else:
        raise InputError(f"GGUF has no form here for a tokenizer of type {model['type']}; save it as a directory")
    values |= _token_metadata(tokenizer, model)
    for name, key in TOKEN_ID_KEYS.items():
        if (
            name in tokenizer.special_tokens_map
            and (number := tokenizer.token_to_id(tokenizer.special_tokens_map[name])) is not None
        ):
            values[key] = number
    around = tokenizer.encode("")
    values["add_bos_token"] = tokenizer.bos_token_id is not None and around[:1] == [tokenizer.bos_token_id]
    values["add_eos_token"] = tokenizer.eos_token_id is not None and around[values["add_bos_token"] :] == [
        tokenizer.eos_token_id
    ]
    fields = {GGML_KEY_PREFIX + name: value for name, value in values.items()}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        others = {name: text for name, text in template.items() if name != "default"}
        fields |= {f"{CHAT_TEMPLATE_KEY}.{name}": text for name, text in others.items()} | {
            f"{CHAT_TEMPLATE_KEY}s": list(others)
        }
        template = template.get("default")
    return fields if template is None else {**fields, CHAT_TEMPLATE_KEY: template}


def _flatten_steps(pipeline: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps before the model, laid flat."""
    flat: list[dict[str, Any]] = []
    for step in (pipeline["normalizer"], pipeline["pre_tokenizer"]):
        if step is not None:
            flat += step.get("normalizers") or step.get("pretokenizers") or [step]
    return flat


def _pre_tokenizer_name(pipeline: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    patterns: list[str] = []
    for part in steps:
        match part:
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(r"\p{N}")
            case {"type": "ByteLevel", "use_regex": True}:
                patterns += SPLIT_PATTERNS["gpt-2"]
            case {"type": "ByteLevel" | "NFC"}:
                pass
            case _:
                patterns.append(f"<{part['type']}>")
    for name, known in SPLIT_PATTERNS.items():
        if known == tuple(patterns) or (not patterns and not pipeline["model"]["merges"]):
            return name
    raise InputError(f"GGUF has no name here for the way this tokenizer cuts text ({' then '.join(patterns)}); keep it")


def _adds_space_prefix(steps: list[dict[str, Any]]) -> bool:
    return any(
        part["type"] == "Prepend" or (part["type"] == "Metaspace" and part["prepend_scheme"] != "never")
        for part in steps
    )


def _token_metadata(tokenizer: Tokenizer, model: dict[str, Any]) -> dict[str, Any]:
    """Tokens by id, gaps filled; for SentencePiece's kinds also their scores."""
    vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values()) + 1
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [UNUSED] * size
    fallback = model.get("byte_fallback", False)
    for token, number in vocab.items():
        tokens[number], types[number] = token, BYTE if fallback and is_byte_token(token) else NORMAL
    for number, added in tokenizer.backend.get_added_tokens_decoder().items():
        types[number] = CONTROL if added.special else USER_DEFINED
    if model["type"] == "BPE" and not fallback:
        return {"tokens": tokens, "token_type": types}
    unk = tokenizer.unk_token_id
    if unk is not None:
        types[unk] = UNKNOWN
    # llama.cpp looks for user-defined pieces in the text itself, where spaces are spaces.
    tokens = [t.replace("▁", " ") if kind == USER_DEFINED else t for t, kind in zip(tokens, types, strict=True)]
    if model["type"] == "Unigram":
        scores = [score for _, score in model["vocab"]] + [0.0] * (size - len(model["vocab"]))
    else:
        scores = _bpe_scores(tokens, types, model["merges"])
    return {"tokens": tokens, "token_type": types, "scores": scores}


def _bpe_scores(tokens: list[str], types: list[int], merges: list[list[str]]) -> list[float]:
    """BPE merges what has the best score first, so the place of a token's first merge is its score, downwards."""
    first: dict[str, int] = {}
    for place, (left, right) in enumerate(merges):
        first.setdefault(left + right, place)
    last = len(merges)
    return [
        float(-first.get(token, last + number)) if kind in (NORMAL, USER_DEFINED) else 0.0
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
    ]
