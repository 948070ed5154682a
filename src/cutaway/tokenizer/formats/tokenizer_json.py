"""tokenizer.json of the tokenizers library: the full pipeline, or only its vocabulary."""

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import processors
from tokenizers.models import BPE

from cutaway.errors import InputError
from cutaway.tokenizer.file_io import MAX_VOCAB_SIZE, JsonObject, wrap_tokenizers_errors
from cutaway.tokenizer.formats.sentencepiece import validate_charsmap
from cutaway.tokenizer.regex_ambiguity import is_slow
from cutaway.tokenizer.vocabulary import Vocabulary, validate_vocab

_MAX_TEXT_EXPANSION = 256
"""Maximum factor by which a pipeline may lengthen a text. Unicode normalization needs 18, byte-level mapping 2."""


def parse_tokenizer_json(text: str, path: Path) -> tokenizers.Tokenizer:
    """Parse tokenizer.json with the tokenizers library."""
    return wrap_tokenizers_errors(path, lambda: tokenizers.Tokenizer.from_str(text))


def check_text_expansion(content: Mapping[str, object], path: Path) -> None:
    """Raise if the pipeline of an untrusted file could multiply the length of a text by over _MAX_TEXT_EXPANSION."""
    factor = 1.0
    for step in flatten_steps([content.get("normalizer"), content.get("pre_tokenizer"), content.get("decoder")]):
        factor *= _expansion_factor(step)
    if not factor <= _MAX_TEXT_EXPANSION or _num_inserted_tokens(content.get("post_processor")) > _MAX_TEXT_EXPANSION:
        raise InputError(f"{path} could lengthen texts more than {_MAX_TEXT_EXPANSION} times; download the file again")


def check_regular_expressions(content: Mapping[str, object], path: Path) -> None:
    """Raise if a regular expression of an untrusted file takes too long on some texts."""
    for step in flatten_steps([content.get("normalizer"), content.get("pre_tokenizer"), content.get("decoder")]):
        match step:
            case {"pattern": {"Regex": str(pattern)}} if is_slow(pattern):
                raise InputError(
                    f"{path} has the regular expression {pattern!r:.80} in a step of type {step.get('type')!r:.40}, for"
                    " which some texts take exponential time; replace it by one without nested quantifiers"
                )


def flatten_steps(steps: list[object]) -> list[JsonObject]:
    """All pipeline steps of tokenizer.json, nested ones included, in order.

    Values that are not objects are skipped; the tokenizers library rejects them.
    """
    flat, pending = [], [*reversed(steps)]
    while pending:
        step = pending.pop()
        if isinstance(step, dict):
            flat.append(step)
            for name in ("normalizers", "pretokenizers", "decoders", "processors"):
                pending += reversed(_as_list(step.get(name)))
    return flat


def _expansion_factor(step: Mapping[str, object]) -> float:
    match step:
        case {"type": "Replace", "content": str(new), "pattern": {"String": str(old)}} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Replace", "content": str(new)}:
            return max(1.0, len(new))
        case {"type": "Prepend", "prepend": str(new)}:
            return max(1.0, len(new))
        case {"type": "ByteLevel"}:
            return 2.0
        case {"type": "Precompiled"}:
            return 18.0
    return 1.0


def _num_inserted_tokens(post_processor: object) -> int:
    """Number of special tokens that the templates of a post-processor add to a text."""
    total = 0
    for step in flatten_steps([post_processor]):
        special = step.get("special_tokens")
        for entry in [entry for side in ("single", "pair") for entry in _as_list(step.get(side))]:
            match entry, special:
                case {"SpecialToken": {"id": str(name)}}, dict() if isinstance(special.get(name), dict):
                    total += len(_as_list(special[name].get("ids")))
    return total


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def parse_vocabulary(content: Mapping[str, object], path: Path) -> Vocabulary:
    """Parse and validate the vocabulary of tokenizer.json; the tokenizers library validates the rest of the file."""
    model = content.get("model")
    if not isinstance(model, dict):
        raise InputError(f"{path} has no model; download the file again")
    tokens, merges = model.get("vocab"), model.get("merges") or []
    charsmap, post = _find_precompiled_charsmap(content.get("normalizer"), path), _parse_post_processor(content, path)
    if isinstance(tokens, list):
        scores, unk = [_parse_scored_piece(entry, path) for entry in tokens], model.get("unk_id")
        if len(scores) > MAX_VOCAB_SIZE or (
            unk is not None and (not isinstance(unk, int) or not 0 <= unk < len(scores))
        ):
            raise InputError(f"{path} has too many tokens or no token with its unk_id {unk!r}; download the file again")
        return Vocabulary("Unigram", scores=scores, unk_id=unk, precompiled_charsmap=charsmap, post_processor=post)
    ids = validate_vocab(tokens, path)
    if not isinstance(merges, list):
        raise InputError(f"{path} has merges that are not a list; download the file again")
    pairs = [_parse_merge(merge, path) for merge in merges]
    kind = "BPE" if model.get("type", "BPE" if pairs else "WordPiece") == "BPE" else "WordPiece"
    return Vocabulary("BPE" if kind == "BPE" else "WordPiece", ids=ids, merges=pairs, post_processor=post)


def _parse_scored_piece(entry: object, path: Path) -> tuple[str, float]:
    match entry:
        case [str(piece), int() | float() as score]:
            return piece, float(score)
    raise InputError(f"{path}: vocabulary entry {entry!r:.60} is not a piece and a score; download the file again")


def _parse_merge(merge: object, path: Path) -> tuple[str, str]:
    match merge.split(" ") if isinstance(merge, str) else merge:
        case [str(left), str(right)]:
            return left, right
    raise InputError(f"{path} has a merge {merge!r:.60} that is not two tokens; download the file again")


def _find_precompiled_charsmap(normalizer: object, path: Path) -> bytes | None:
    for step in flatten_steps([normalizer]):
        if step.get("type") == "Precompiled":
            try:
                charsmap = base64.b64decode(step.get("precompiled_charsmap"), validate=True)  # type: ignore[arg-type]
                validate_charsmap(charsmap)
                return charsmap
            except (TypeError, ValueError, binascii.Error) as error:
                raise InputError(f"{path} has a damaged normalization table; download the file again") from error
    return None


def _parse_post_processor(content: Mapping[str, object], path: Path) -> processors.PostProcessor | None:
    """Parse the post-processor. The library parses only whole tokenizers, so a minimal tokenizer is built around it."""
    if content.get("post_processor") is None:
        return None
    minimal = json.loads(tokenizers.Tokenizer(BPE()).to_str()) | {"post_processor": content["post_processor"]}
    return parse_tokenizer_json(json.dumps(minimal), path).post_processor
