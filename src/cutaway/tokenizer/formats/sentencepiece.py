"""SentencePiece's model files: the protocol buffer they are, and the vocabulary and pipeline they describe.

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
    """(field number, wire type, value): a whole number for WIRE_VARINT, the bytes for the others."""
    place = 0
    while place < len(data):
        key, place = _read_varint(data, place)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise InputError("the file is no SentencePiece model (a field has number 0); get it again")
        if wire == WIRE_VARINT:
            value, place = _read_varint(data, place)
            yield number, wire, value
            continue
        if wire == WIRE_LEN:
            size, place = _read_varint(data, place)
        elif wire in (WIRE_I64, WIRE_I32):
            size = 8 if wire == WIRE_I64 else 4
        else:
            raise InputError(f"the file is no SentencePiece model (wire type {wire}); get it again")
        if size > len(data) - place:
            raise InputError("the file is no whole SentencePiece model (it ends within a field); get it again")
        yield number, wire, data[place : place + size]
        place += size


def _read_varint(data: memoryview, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if offset >= len(data):
            raise InputError("the file is no whole SentencePiece model (it ends within a number); get it again")
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise InputError("the file is no SentencePiece model (a number has more than ten bytes); get it again")


def _proto_float(value: int | memoryview) -> float:
    if isinstance(value, int) or len(value) != 4:
        raise InputError("the file is no SentencePiece model (a score is no 32-bit number); get it again")
    return float(struct.unpack("<f", value)[0])


def _proto_string(value: int | memoryview) -> str:
    try:
        return _proto_bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError("the file is no SentencePiece model (a piece is not UTF-8); get it again") from error


def _proto_bytes(value: int | memoryview) -> bytes:
    if isinstance(value, int):
        raise InputError("the file is no SentencePiece model (a number stands for text); get it again")
    return bytes(value)


def _proto_int(value: int | memoryview) -> int:
    """Negative numbers are written as 64-bit two's complement."""
    if not isinstance(value, int):
        raise InputError("the file is no SentencePiece model (text stands for a number); get it again")
    return value - (1 << 64) if value >= 1 << 63 else value


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


UNIGRAM_MODEL, BPE_MODEL = 1, 2


@dataclass
class SentencePieceModel:
    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    """(piece, score, type); the id is the place in the list."""
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
        """Control pieces are special and never arise from text; those of the user are matched in it."""
        return [
            AddedToken(piece, normalized=False, special=kind == CONTROL)
            for piece, _, kind in self.pieces
            if kind in (CONTROL, USER_DEFINED)
        ]


def parse_sentencepiece_model(data: bytes) -> SentencePieceModel:
    model = SentencePieceModel()
    for number, _, value in _iter_proto_fields(memoryview(data)):
        if number == 1:
            model.pieces.append(_parse_piece(memoryview(_proto_bytes(value))))
            if len(model.pieces) > MAX_VOCAB_SIZE:
                raise InputError(f"the SentencePiece model has more than {MAX_VOCAB_SIZE:,} pieces; get it again")
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
            # Ids are 32-bit; a negative one may come in either width.
            whole = _proto_int(value)
            whole = whole - (1 << 32) if 1 << 31 <= whole < 1 << 32 else whole
            setattr(model, _TRAINER_SPEC_FIELDS[number], type(getattr(model, _TRAINER_SPEC_FIELDS[number]))(whole))


def _parse_normalizer_spec(model: SentencePieceModel, data: memoryview) -> None:
    for number, _, value in _iter_proto_fields(data):
        if number == 2:
            model.precompiled_charsmap = _proto_bytes(value)
        elif number in _NORMALIZER_SPEC_FIELDS:
            setattr(model, _NORMALIZER_SPEC_FIELDS[number], bool(_proto_int(value)))


def validate_sentencepiece_model(model: SentencePieceModel) -> None:
    if not model.pieces:
        raise InputError("the SentencePiece model has no pieces; get it again")
    if model.model_type not in (UNIGRAM_MODEL, BPE_MODEL):
        raise InputError(f"the SentencePiece model is of type {model.model_type}; only Unigram and BPE can be read")
    if model.treat_whitespace_as_suffix:
        raise InputError("the SentencePiece model sets spaces behind words, which cannot be read; use another model")
    names = {piece for piece, _, _ in model.pieces}
    if len(names) != len(model.pieces) or "" in names or any(len(name) > MAX_PIECE_LENGTH for name in names):
        raise InputError("the SentencePiece model has a piece that is empty, doubled or endless; get it again")
    if any(not math.isfinite(score) or not NORMAL <= kind <= BYTE for _, score, kind in model.pieces):
        raise InputError("the SentencePiece model has a piece without a proper score and type; get it again")
    if not 0 <= model.unk_id < len(model.pieces):
        raise InputError(f"the SentencePiece model has no piece {model.unk_id} for unknown text; get it again")
    if model.precompiled_charsmap:
        validate_charsmap(model.precompiled_charsmap)


def validate_charsmap(precompiled_charsmap: bytes) -> None:
    """Four bytes of size, a trie of that size in whole 32-bit units, and the replacement texts, none of them long."""
    size = int.from_bytes(precompiled_charsmap[:4], "little")
    whole = len(precompiled_charsmap) >= 8 and not size % 4 and 0 < size <= len(precompiled_charsmap) - 4
    if not whole or max(map(len, precompiled_charsmap[4 + size :].split(b"\0"))) > 256:
        raise InputError("the SentencePiece model's table of normalizations is damaged; get it again")


def escape_control_pieces(model: SentencePieceModel) -> SentencePieceModel:
    """The same, with control pieces that no text can match: SentencePiece itself never reads them from text."""
    pieces = [(f"\0{piece}" if kind == CONTROL else piece, score, kind) for piece, score, kind in model.pieces]
    return replace(model, pieces=pieces)


def build_vocabulary(
    model: SentencePieceModel, pipeline: PipelineSpec | None, extra_tokens: Sequence[AddedToken] = ()
) -> Vocabulary:
    """`extra_tokens`: T5's sentinels, which follow the pieces, the last one first."""
    kind = pipeline.model_type if pipeline is not None else ("BPE" if model.model_type == BPE_MODEL else "Unigram")
    scores = [(piece, score) for piece, score, _ in model.pieces]
    unk_id = model.unk_id
    charsmap = model.precompiled_charsmap or None
    added = model.added_tokens
    if kind == "BPE":
        ids = {piece: number for number, (piece, _) in enumerate(scores)}
        # The best score is merged first. Control and byte pieces are never merged into.
        skip = {piece for piece, _, type_ in model.pieces if type_ not in (NORMAL, USER_DEFINED)}
        order = sorted(range(len(scores)), key=lambda number: -scores[number][1])
        merges = generate_merges({scores[number][0]: rank for rank, number in enumerate(order)}, skip)
        return Vocabulary(
            "BPE", ids=ids, merges=merges, unk_id=unk_id, precompiled_charsmap=charsmap, added_tokens=added
        )
    if pipeline is PIPELINES["XLMRobertaTokenizer"]:
        # fairseq numbered its own four tokens first and a mask last.
        scores = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scores[3:], ("<mask>", 0.0)]
        unk_id = 3
    known = {piece for piece, _ in scores}
    scores += [(token.content, 0.0) for token in reversed(extra_tokens) if token.content not in known]
    return Vocabulary(
        "Unigram", scores=scores, unk_id=unk_id, precompiled_charsmap=charsmap, added_tokens=[*added, *extra_tokens]
    )


def build_sentencepiece_pipeline(model: SentencePieceModel, vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece's own rules, where no class says otherwise."""
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
        # A space that begins the text serves as the one that would be set before it.
        ends = r"[ ▁]+\z" if model.add_dummy_prefix else r"\A |[ ▁]+\z"
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(ends), "")]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    if model.add_dummy_prefix:
        spaces = [pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)]
        if not model.remove_extra_whitespaces:
            # The step above sets no space before text that begins with one. No space is left here, so this one always
            # does, before the beginning of the text only, and the other then writes it as ▁.
            spaces.insert(0, pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first", split=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(spaces))
    tokenizer.decoder = build_metaspace_decoder(add_prefix_space=model.add_dummy_prefix)
    return tokenizer
