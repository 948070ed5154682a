"""SentencePiece model files: protocol buffer parser, vocabulary and pipeline.

https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
https://protobuf.dev/programming-guides/encoding
"""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from cutaway.errors import InputError
from cutaway.tokenizer.file_io import MAX_VOCAB_SIZE
from cutaway.tokenizer.pipelines import PIPELINES, PipelineSpec, build_metaspace_decoder
from cutaway.tokenizer.vocabulary import MAX_PIECE_LENGTH, Vocabulary, generate_merges

WIRE_VARINT, WIRE_I64, WIRE_LEN, WIRE_I32 = 0, 1, 2, 5


def _iter_proto_fields(data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yield (field number, wire type, value) of a protocol buffer: an int for WIRE_VARINT, else the bytes."""
    offset = 0
    while offset < len(data):
        key, offset = _read_varint(data, offset)
        number, wire_type = key >> 3, key & 7
        if number == 0:
            raise InputError("the file is not a SentencePiece model (a field has number 0); download it again")
        if wire_type == WIRE_VARINT:
            value, offset = _read_varint(data, offset)
            yield number, wire_type, value
            continue
        if wire_type == WIRE_LEN:
            size, offset = _read_varint(data, offset)
        elif wire_type in (WIRE_I64, WIRE_I32):
            size = 8 if wire_type == WIRE_I64 else 4
        else:
            raise InputError(f"the file is not a SentencePiece model (wire type {wire_type}); download it again")
        if size > len(data) - offset:
            raise InputError(
                "the file is not a complete SentencePiece model (it is truncated within a field); download it again"
            )
        yield number, wire_type, data[offset : offset + size]
        offset += size


def _read_varint(data: memoryview, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if offset >= len(data):
            raise InputError(
                "the file is not a complete SentencePiece model (it is truncated within a number); download it again"
            )
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise InputError("the file is not a SentencePiece model (a number has more than ten bytes); download it again")


def _proto_float(value: int | memoryview) -> float:
    if isinstance(value, int) or len(value) != 4:
        raise InputError("the file is not a SentencePiece model (a score is not a 32-bit float); download it again")
    return float(struct.unpack("<f", value)[0])


def _proto_string(value: int | memoryview) -> str:
    try:
        return _proto_bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError("the file is not a SentencePiece model (a piece is not UTF-8); download it again") from error


def _proto_bytes(value: int | memoryview) -> bytes:
    if isinstance(value, int):
        raise InputError("the file is not a SentencePiece model (a number instead of text); download it again")
    return bytes(value)


def _proto_int(value: int | memoryview) -> int:
    """Signed integer of a varint: negative numbers are 64-bit two's complement."""
    if not isinstance(value, int):
        raise InputError("the file is not a SentencePiece model (text instead of a number); download it again")
    return value - (1 << 64) if value >= 1 << 63 else value


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


UNIGRAM_MODEL, BPE_MODEL = 1, 2


@dataclass
class SentencePieceModel:
    """Contents of a SentencePiece model file."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    """(piece, score, type); the id is the index."""
    model_type: int = UNIGRAM_MODEL
    byte_fallback: bool = False
    treat_whitespace_as_suffix: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    precompiled_charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True

    @property
    def special_tokens_map(self) -> dict[str, str]:
        ids = {"unk_token": self.unk_id, "bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        return {name: self.pieces[number][0] for name, number in ids.items() if 0 <= number < len(self.pieces)}

    @property
    def added_tokens(self) -> list[AddedToken]:
        """Control pieces (special) and user-defined pieces, which are matched in the text."""
        return [
            AddedToken(piece, normalized=False, special=kind == CONTROL)
            for piece, _, kind in self.pieces
            if kind in (CONTROL, USER_DEFINED)
        ]


def parse_sentencepiece_model(data: bytes) -> SentencePieceModel:
    """Parse and validate a SentencePiece model file."""
    model = SentencePieceModel()
    for number, _, value in _iter_proto_fields(memoryview(data)):
        if number == 1:
            model.pieces.append(_parse_piece(memoryview(_proto_bytes(value))))
            if len(model.pieces) > MAX_VOCAB_SIZE:
                raise InputError(f"the SentencePiece model has more than {MAX_VOCAB_SIZE:,} pieces; download it again")
        elif number == 2:
            _parse_trainer_spec(model, memoryview(_proto_bytes(value)))
        elif number == 3:
            _parse_normalizer_spec(model, memoryview(_proto_bytes(value)))
    validate_sentencepiece_model(model)
    return model


def _parse_piece(data: memoryview) -> tuple[str, float, int]:
    piece, score, kind = "", 0.0, NORMAL
    for number, _, value in _iter_proto_fields(data):
        if number == 1:
            piece = _proto_string(value)
        elif number == 2:
            score = _proto_float(value)
        elif number == 3:
            kind = _proto_int(value)
    return piece, score, kind


_TRAINER_SPEC_FIELDS = {
    3: "model_type",
    24: "treat_whitespace_as_suffix",
    35: "byte_fallback",
    40: "unk_id",
    41: "bos_id",
    42: "eos_id",
    43: "pad_id",
}
_NORMALIZER_SPEC_FIELDS = {3: "add_dummy_prefix", 4: "remove_extra_whitespaces"}


def _parse_trainer_spec(model: SentencePieceModel, data: memoryview) -> None:
    for number, _, value in _iter_proto_fields(data):
        if number in _TRAINER_SPEC_FIELDS:
            # Ids are 32-bit; a negative one may be encoded in 32 or 64 bits.
            field_value = _proto_int(value)
            field_value = field_value - (1 << 32) if 1 << 31 <= field_value < 1 << 32 else field_value
            setattr(
                model, _TRAINER_SPEC_FIELDS[number], type(getattr(model, _TRAINER_SPEC_FIELDS[number]))(field_value)
            )


def _parse_normalizer_spec(model: SentencePieceModel, data: memoryview) -> None:
    for number, _, value in _iter_proto_fields(data):
        if number == 2:
            model.precompiled_charsmap = _proto_bytes(value)
        elif number in _NORMALIZER_SPEC_FIELDS:
            setattr(model, _NORMALIZER_SPEC_FIELDS[number], bool(_proto_int(value)))


def validate_sentencepiece_model(model: SentencePieceModel) -> None:
    """Raise InputError if the model is invalid or not supported."""
    if not model.pieces:
        raise InputError("the SentencePiece model has no pieces; download it again")
    if model.model_type not in (UNIGRAM_MODEL, BPE_MODEL):
        raise InputError(
            f"the SentencePiece model has type {model.model_type}; cutaway supports Unigram (1) and BPE (2)"
        )
    if model.treat_whitespace_as_suffix:
        raise InputError(
            "the SentencePiece model sets treat_whitespace_as_suffix, which is not supported; use another model"
        )
    names = {piece for piece, _, _ in model.pieces}
    if len(names) != len(model.pieces) or "" in names or any(len(name) > MAX_PIECE_LENGTH for name in names):
        raise InputError("the SentencePiece model has a piece that is empty, duplicated or too long; download it again")
    if any(not math.isfinite(score) or not NORMAL <= kind <= BYTE for _, score, kind in model.pieces):
        raise InputError("the SentencePiece model has a piece with an invalid score or type; download it again")
    if not 0 <= model.unk_id < len(model.pieces):
        raise InputError(f"the SentencePiece model has no piece {model.unk_id}, its unk_id; download it again")
    if model.precompiled_charsmap:
        validate_charsmap(model.precompiled_charsmap)


def validate_charsmap(precompiled_charsmap: bytes) -> None:
    """Check the layout: 4 bytes of size, a trie of that size in 32-bit units, and replacement texts that are short."""
    size = int.from_bytes(precompiled_charsmap[:4], "little")
    is_valid = len(precompiled_charsmap) >= 8 and not size % 4 and 0 < size <= len(precompiled_charsmap) - 4
    if not is_valid or max(map(len, precompiled_charsmap[4 + size :].split(b"\0"))) > 256:
        raise InputError("the normalization table of the SentencePiece model is damaged; download it again")


def escape_control_pieces(model: SentencePieceModel) -> SentencePieceModel:
    """Copy of a model with control pieces that no text matches, since SentencePiece does not match them in text."""
    pieces = [(f"\0{piece}" if kind == CONTROL else piece, score, kind) for piece, score, kind in model.pieces]
    return replace(model, pieces=pieces)


def build_vocabulary(
    model: SentencePieceModel, pipeline: PipelineSpec | None, extra_tokens: Sequence[AddedToken] = ()
) -> Vocabulary:
    """Vocabulary of a model. `extra_tokens`: sentinel tokens of T5, after the pieces in reverse order."""
    kind = pipeline.model_type if pipeline is not None else ("BPE" if model.model_type == BPE_MODEL else "Unigram")
    scores = [(piece, score) for piece, score, _ in model.pieces]
    unk_id = model.unk_id
    charsmap = model.precompiled_charsmap or None
    added = model.added_tokens
    if kind == "BPE":
        ids = {piece: number for number, (piece, _) in enumerate(scores)}
        # The best score is merged first. Control and byte pieces are never the result of a merge.
        skip = {piece for piece, _, type_ in model.pieces if type_ not in (NORMAL, USER_DEFINED)}
        order = sorted(range(len(scores)), key=lambda number: -scores[number][1])
        merges = generate_merges({scores[number][0]: rank for rank, number in enumerate(order)}, skip)
        return Vocabulary(
            "BPE", ids=ids, merges=merges, unk_id=unk_id, precompiled_charsmap=charsmap, added_tokens=added
        )
    if pipeline is PIPELINES["XLMRobertaTokenizer"]:
        # fairseq vocabularies have four special tokens first and a mask token last.
        scores = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scores[3:], ("<mask>", 0.0)]
        unk_id = 3
    known = {piece for piece, _ in scores}
    scores += [(token.content, 0.0) for token in reversed(extra_tokens) if token.content not in known]
    return Vocabulary(
        "Unigram", scores=scores, unk_id=unk_id, precompiled_charsmap=charsmap, added_tokens=[*added, *extra_tokens]
    )


def build_sentencepiece_pipeline(model: SentencePieceModel, vocabulary: Vocabulary) -> Tokenizer:
    """Build a tokenizer with the rules of the model itself, if no class has a pipeline."""
    unk = model.pieces[model.unk_id][0]
    if vocabulary.model_type == "BPE":
        tokenizer = Tokenizer(
            BPE(
                vocab=vocabulary.ids,
                merges=vocabulary.merges,
                unk_token=unk,
                fuse_unk=True,
                byte_fallback=model.byte_fallback,
            )
        )
    else:
        tokenizer = Tokenizer(Unigram(vocabulary.scores, unk_id=vocabulary.unk_id, byte_fallback=model.byte_fallback))
    steps: list[normalizers.Normalizer] = []
    if vocabulary.precompiled_charsmap is not None:
        steps.append(normalizers.Precompiled(vocabulary.precompiled_charsmap))
    if model.remove_extra_whitespaces:
        # With add_dummy_prefix, a leading space is kept: it serves as the prefix space.
        ends = r"[ ▁]+\z" if model.add_dummy_prefix else r"\A |[ ▁]+\z"
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(ends), "")]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    if model.add_dummy_prefix:
        spaces = [pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)]
        if not model.remove_extra_whitespaces:
            # Metaspace("▁") adds no prefix to text that starts with ▁. All spaces are ▁ at this point, so a first
            # Metaspace(" ") always adds a prefix space, at the start of the text only, and the second maps it to ▁.
            spaces.insert(0, pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first", split=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(spaces))
    tokenizer.decoder = build_metaspace_decoder(add_prefix_space=model.add_dummy_prefix)
    return tokenizer
