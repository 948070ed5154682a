"""`tokenizer_to_gguf`: the inverse of `tokenizer_from_gguf`, as far as GGUF has words for a pipeline."""

import base64
import json
from typing import Any

from cutaway.errors import InputError
from cutaway.text.gguf import IDS, KEY, TEMPLATE
from cutaway.text.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from cutaway.text.splits import PATTERNS
from cutaway.text.stream import is_byte
from cutaway.text.tokenizer import Tokenizer


def tokenizer_to_gguf(tokenizer: Tokenizer) -> dict[str, Any]:
    """Plain values by their full keys, for byte-level BPE and SentencePiece's two kinds."""
    pipeline = json.loads(tokenizer.backend.to_str())
    model, parts = pipeline["model"], _parts(pipeline)
    types_of_parts = {part["type"] for part in parts}
    values: dict[str, Any]
    if model["type"] == "BPE" and "ByteLevel" in types_of_parts:
        values = {"model": "gpt2", "pre": _pre(pipeline, parts), "merges": [" ".join(pair) for pair in model["merges"]]}
        values["add_space_prefix"] = any(part.get("add_prefix_space") for part in parts if part["type"] == "ByteLevel")
    elif model["type"] == "BPE" and model.get("byte_fallback"):
        values = {"model": "llama", "add_space_prefix": _prefix(parts)}
    elif model["type"] == "Unigram":
        values = {"model": "t5", "add_space_prefix": _prefix(parts)}
        squeezed = [part for part in parts if part["type"] == "Replace" and part["pattern"] == {"Regex": " {2,}"}]
        values["remove_extra_whitespaces"] = bool(squeezed) or "WhitespaceSplit" in types_of_parts
        for part in parts:
            if part["type"] == "Precompiled":
                values["precompiled_charsmap"] = list(base64.b64decode(part["precompiled_charsmap"]))
    else:
        raise InputError(f"GGUF has no form here for a tokenizer of type {model['type']}; save it as a directory")
    values |= _tokens(tokenizer, model)
    for name, key in IDS.items():
        if name in tokenizer.named and (number := tokenizer.id(tokenizer.named[name])) is not None:
            values[key] = number
    around = tokenizer.encode("")
    values["add_bos_token"] = tokenizer.bos_id is not None and around[:1] == [tokenizer.bos_id]
    values["add_eos_token"] = tokenizer.eos_id is not None and around[values["add_bos_token"] :] == [tokenizer.eos_id]
    fields = {KEY + name: value for name, value in values.items()}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        others = {name: text for name, text in template.items() if name != "default"}
        fields |= {f"{TEMPLATE}.{name}": text for name, text in others.items()} | {f"{TEMPLATE}s": list(others)}
        template = template.get("default")
    return fields if template is None else {**fields, TEMPLATE: template}


def _parts(pipeline: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps before the model, laid flat."""
    flat: list[dict[str, Any]] = []
    for step in (pipeline["normalizer"], pipeline["pre_tokenizer"]):
        if step is not None:
            flat += step.get("normalizers") or step.get("pretokenizers") or [step]
    return flat


def _pre(pipeline: dict[str, Any], parts: list[dict[str, Any]]) -> str:
    patterns: list[str] = []
    for part in parts:
        match part:
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(r"\p{N}")
            case {"type": "ByteLevel", "use_regex": True}:
                patterns += PATTERNS["gpt-2"]
            case {"type": "ByteLevel" | "NFC"}:
                pass
            case _:
                patterns.append(f"<{part['type']}>")
    for name, known in PATTERNS.items():
        if known == tuple(patterns) or (not patterns and not pipeline["model"]["merges"]):
            return name
    raise InputError(f"GGUF has no name here for the way this tokenizer cuts text ({' then '.join(patterns)}); keep it")


def _prefix(parts: list[dict[str, Any]]) -> bool:
    return any(
        part["type"] == "Prepend" or (part["type"] == "Metaspace" and part["prepend_scheme"] != "never")
        for part in parts
    )


def _tokens(tokenizer: Tokenizer, model: dict[str, Any]) -> dict[str, Any]:
    """Tokens by id, gaps filled; for SentencePiece's kinds also their scores."""
    vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values()) + 1
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [UNUSED] * size
    fallback = model.get("byte_fallback", False)
    for token, number in vocab.items():
        tokens[number], types[number] = token, BYTE if fallback and is_byte(token) else NORMAL
    for number, added in tokenizer.backend.get_added_tokens_decoder().items():
        types[number] = CONTROL if added.special else USER_DEFINED
    if model["type"] == "BPE" and not fallback:
        return {"tokens": tokens, "token_type": types}
    unk = tokenizer.unk_id
    if unk is not None:
        types[unk] = UNKNOWN
    # llama.cpp looks for user-defined pieces in the text itself, where spaces are spaces.
    tokens = [t.replace("▁", " ") if kind == USER_DEFINED else t for t, kind in zip(tokens, types, strict=True)]
    if model["type"] == "Unigram":
        scores = [score for _, score in model["vocab"]] + [0.0] * (size - len(model["vocab"]))
    else:
        scores = _scores(tokens, types, model["merges"])
    return {"tokens": tokens, "token_type": types, "scores": scores}


def _scores(tokens: list[str], types: list[int], merges: list[list[str]]) -> list[float]:
    """BPE merges what has the best score first, so the place of a token's first merge is its score, downwards."""
    first: dict[str, int] = {}
    for place, (left, right) in enumerate(merges):
        first.setdefault(left + right, place)
    last = len(merges)
    return [
        float(-first.get(token, last + number)) if kind in (NORMAL, USER_DEFINED) else 0.0
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
    ]
