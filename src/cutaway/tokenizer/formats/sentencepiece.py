"""SentencePiece model files: vocabulary and pipeline.

https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto. The sentencepiece package (an extra)
parses the file; the tokenizers library encodes, as for every other format.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from cutaway.errors import InputError
from cutaway.tokenizer.file_io import MAX_VOCAB_SIZE
from cutaway.tokenizer.pipelines import PIPELINES, PipelineSpec, build_metaspace_decoder
from cutaway.tokenizer.vocabulary import MAX_PIECE_LENGTH, Vocabulary, generate_merges

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM_MODEL, BPE_MODEL = 1, 2
_TRAINER_FIELDS = ["model_type", "byte_fallback", "treat_whitespace_as_suffix", "unk_id", "bos_id", "eos_id", "pad_id"]
_NORMALIZER_FIELDS = ["precompiled_charsmap", "add_dummy_prefix", "remove_extra_whitespaces"]
"""Fields of SentencePieceModel that the file stores in its trainer_spec and in its normalizer_spec."""


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
        """Pieces that are matched in the text before it is split: control (special tokens) and user-defined pieces."""
        matched = [(piece, kind) for piece, _, kind in self.pieces if kind in (CONTROL, USER_DEFINED)]
        return [AddedToken(piece, normalized=False, special=kind == CONTROL) for piece, kind in matched]


def parse_sentencepiece_model(data: bytes) -> SentencePieceModel:
    """Parse and validate a SentencePiece model file."""
    try:
        schema = import_module("sentencepiece.sentencepiece_model_pb2")
        decode_error = import_module("google.protobuf.message").DecodeError
    except ImportError:
        hint = 'pip install "cutaway[sentencepiece]"'
        raise InputError(f"a SentencePiece model requires the sentencepiece package; {hint}") from None
    proto = schema.ModelProto()
    try:
        proto.ParseFromString(data)
    except decode_error as error:
        raise InputError(f"the file is not a complete SentencePiece model ({error}); download it again") from error
    if len(proto.pieces) > MAX_VOCAB_SIZE or not all(isinstance(piece.piece, str) for piece in proto.pieces):
        raise InputError("the SentencePiece model has too many pieces, or one that is not UTF-8; download it again")
    model = SentencePieceModel([(piece.piece, piece.score, piece.type) for piece in proto.pieces])
    for spec, names in ((proto.trainer_spec, _TRAINER_FIELDS), (proto.normalizer_spec, _NORMALIZER_FIELDS)):
        for name in names:
            setattr(model, name, getattr(spec, name))
    validate_sentencepiece_model(model)
    # protobuf skips fields of the wrong type and unknown piece types. Raise, because the parsed model is incomplete.
    # The trainer_spec is not checked, because new trainer options do not change how text is encoded.
    proto.ClearField("trainer_spec")
    size = proto.ByteSize()
    proto.DiscardUnknownFields()
    if proto.ByteSize() != size:
        raise InputError("the SentencePiece model has unknown fields or piece types; download it again")
    return model


def validate_sentencepiece_model(model: SentencePieceModel) -> None:
    """Raise InputError if the model is invalid or not supported."""
    if not model.pieces:
        raise InputError("the SentencePiece model has no pieces; download it again")
    if model.model_type not in (UNIGRAM_MODEL, BPE_MODEL):
        raise InputError(f"the SentencePiece model has type {model.model_type}; supported are Unigram (1) and BPE (2)")
    if model.treat_whitespace_as_suffix:
        raise InputError("the SentencePiece model sets treat_whitespace_as_suffix, which cutaway does not support")
    names = {piece for piece, _, _ in model.pieces}
    if len(names) != len(model.pieces) or "" in names or any(len(name) > MAX_PIECE_LENGTH for name in names):
        raise InputError("the SentencePiece model has a piece that is empty, duplicated or too long; download it again")
    if any(not math.isfinite(score) or not NORMAL <= kind <= BYTE for _, score, kind in model.pieces):
        raise InputError("the SentencePiece model has a piece with an invalid score or type; download it again")
    if not 0 <= model.unk_id < len(model.pieces):
        raise InputError(f"the SentencePiece model has no piece with its unk_id {model.unk_id}; download it again")
    if model.precompiled_charsmap:
        validate_charsmap(model.precompiled_charsmap)


def validate_charsmap(precompiled_charsmap: bytes) -> None:
    """Raise unless a normalization table has a trie size, a trie of 32-bit units and replacements of ≤ 256 bytes."""
    size = int.from_bytes(precompiled_charsmap[:4], "little")
    is_valid = len(precompiled_charsmap) >= 8 and not size % 4 and 0 < size <= len(precompiled_charsmap) - 4
    if not is_valid or max(map(len, precompiled_charsmap[4 + size :].split(b"\0"))) > 256:
        raise InputError("the normalization table of the SentencePiece model is damaged; download it again")


def escape_control_pieces(model: SentencePieceModel) -> SentencePieceModel:
    """Copy of a model with control pieces renamed so that no text matches them, as in SentencePiece."""
    pieces = [(f"\0{piece}" if kind == CONTROL else piece, score, kind) for piece, score, kind in model.pieces]
    return replace(model, pieces=pieces)


def build_vocabulary(
    model: SentencePieceModel, pipeline: PipelineSpec | None, extra_tokens: Sequence[AddedToken] = ()
) -> Vocabulary:
    """Vocabulary of a SentencePiece model. `extra_tokens` are T5's sentinels: they follow the pieces in reverse."""
    kind = pipeline.model_type if pipeline is not None else ("BPE" if model.model_type == BPE_MODEL else "Unigram")
    scores = [(piece, score) for piece, score, _ in model.pieces]
    vocabulary = Vocabulary(kind, unk_id=model.unk_id, precompiled_charsmap=model.precompiled_charsmap or None)
    vocabulary.added_tokens = model.added_tokens
    if kind == "BPE":
        vocabulary.ids = {piece: number for number, (piece, _) in enumerate(scores)}
        # The best score is merged first. Control and byte pieces are never the result of a merge.
        skip = {piece for piece, _, type_ in model.pieces if type_ not in (NORMAL, USER_DEFINED)}
        ranked = sorted(scores, key=lambda entry: -entry[1])
        vocabulary.merges = generate_merges({piece: rank for rank, (piece, _) in enumerate(ranked)}, skip)
        return vocabulary
    if pipeline is PIPELINES["XLMRobertaTokenizer"]:
        # fairseq vocabularies have four special tokens first and a mask token last.
        scores = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scores[3:], ("<mask>", 0.0)]
        vocabulary.unk_id = 3
    known = {piece for piece, _ in scores}
    extra_scores = [(token.content, 0.0) for token in reversed(extra_tokens) if token.content not in known]
    vocabulary.scores = scores + extra_scores
    vocabulary.added_tokens += extra_tokens
    return vocabulary


def build_sentencepiece_pipeline(model: SentencePieceModel, vocabulary: Vocabulary) -> Tokenizer:
    """Build a tokenizer with the normalization, prefix space and byte fallback that the model file specifies."""
    unk = model.pieces[model.unk_id][0]
    fallback = model.byte_fallback
    if vocabulary.model_type == "BPE":
        bpe = BPE(vocabulary.ids, vocabulary.merges, unk_token=unk, fuse_unk=True, byte_fallback=fallback)
        tokenizer = Tokenizer(bpe)
    else:
        tokenizer = Tokenizer(Unigram(vocabulary.scores, unk_id=vocabulary.unk_id, byte_fallback=fallback))
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
