"""SentencePiece's `.model` files: https://github.com/google/sentencepiece, read without its library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from cutaway.errors import InputError
from cutaway.text.files import MOST_TOKENS
from cutaway.text.recipes import RECIPES, Recipe, spaced_decoder
from cutaway.text.vocabulary import LONGEST_PIECE, Vocabulary, merges_of
from cutaway.text.wire import as_bytes, as_float, as_int, as_text, fields

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE_MODEL = 1, 2


@dataclass
class SentencePieceModel:
    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    """(piece, score, type); the id is the place in the list."""
    kind: int = UNIGRAM
    byte_fallback: bool = False
    space_behind: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True

    @property
    def named(self) -> dict[str, str]:
        ids = {"unk_token": self.unk_id, "bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        return {name: self.pieces[number][0] for name, number in ids.items() if 0 <= number < len(self.pieces)}

    @property
    def added(self) -> list[AddedToken]:
        """Control pieces are special and never arise from text; those of the user are matched in it."""
        return [
            AddedToken(piece, normalized=False, special=kind == CONTROL)
            for piece, _, kind in self.pieces
            if kind in (CONTROL, USER_DEFINED)
        ]


def parse(data: bytes) -> SentencePieceModel:
    model = SentencePieceModel()
    for number, _, value in fields(memoryview(data)):
        if number == 1:
            model.pieces.append(_piece(memoryview(as_bytes(value))))
            if len(model.pieces) > MOST_TOKENS:
                raise InputError(f"the SentencePiece model has more than {MOST_TOKENS:,} pieces; get it again")
        elif number == 2:
            _trainer(model, memoryview(as_bytes(value)))
        elif number == 3:
            _normalizer(model, memoryview(as_bytes(value)))
    check(model)
    return model


def _piece(data: memoryview) -> tuple[str, float, int]:
    piece, score, kind = "", 0.0, NORMAL
    for number, _, value in fields(data):
        if number == 1:
            piece = as_text(value)
        elif number == 2:
            score = as_float(value)
        elif number == 3:
            kind = as_int(value)
    return piece, score, kind


_TRAINER = {3: "kind", 24: "space_behind", 35: "byte_fallback", 40: "unk_id", 41: "bos_id", 42: "eos_id", 43: "pad_id"}
_NORMALIZER = {3: "add_dummy_prefix", 4: "remove_extra_whitespaces"}


def _trainer(model: SentencePieceModel, data: memoryview) -> None:
    for number, _, value in fields(data):
        if number in _TRAINER:
            # Ids are 32-bit; a negative one may come in either width.
            whole = as_int(value)
            whole = whole - (1 << 32) if 1 << 31 <= whole < 1 << 32 else whole
            setattr(model, _TRAINER[number], type(getattr(model, _TRAINER[number]))(whole))


def _normalizer(model: SentencePieceModel, data: memoryview) -> None:
    for number, _, value in fields(data):
        if number == 2:
            model.charsmap = as_bytes(value)
        elif number in _NORMALIZER:
            setattr(model, _NORMALIZER[number], bool(as_int(value)))


def check(model: SentencePieceModel) -> None:
    if not model.pieces:
        raise InputError("the SentencePiece model has no pieces; get it again")
    if model.kind not in (UNIGRAM, BPE_MODEL):
        raise InputError(f"the SentencePiece model is of type {model.kind}; only Unigram and BPE can be read")
    if model.space_behind:
        raise InputError("the SentencePiece model sets spaces behind words, which cannot be read; use another model")
    names = {piece for piece, _, _ in model.pieces}
    if len(names) != len(model.pieces) or "" in names or any(len(name) > LONGEST_PIECE for name in names):
        raise InputError("the SentencePiece model has a piece that is empty, doubled or endless; get it again")
    if any(not math.isfinite(score) or not NORMAL <= kind <= BYTE for _, score, kind in model.pieces):
        raise InputError("the SentencePiece model has a piece without a proper score and type; get it again")
    if not 0 <= model.unk_id < len(model.pieces):
        raise InputError(f"the SentencePiece model has no piece {model.unk_id} for unknown text; get it again")
    if model.charsmap:
        check_charsmap(model.charsmap)


def check_charsmap(charsmap: bytes) -> None:
    """Four bytes of size, a trie of that size in whole 32-bit units, and the replacement texts, none of them long."""
    size = int.from_bytes(charsmap[:4], "little")
    whole = len(charsmap) >= 8 and not size % 4 and 0 < size <= len(charsmap) - 4
    if not whole or max(map(len, charsmap[4 + size :].split(b"\0"))) > 256:
        raise InputError("the SentencePiece model's table of normalisations is damaged; get it again")


def unmatched(model: SentencePieceModel) -> SentencePieceModel:
    """The same, with control pieces that no text can match: SentencePiece itself never reads them from text."""
    pieces = [(f"\0{piece}" if kind == CONTROL else piece, score, kind) for piece, score, kind in model.pieces]
    return replace(model, pieces=pieces)


def vocabulary_of(model: SentencePieceModel, recipe: Recipe | None, extra: Sequence[AddedToken] = ()) -> Vocabulary:
    """`extra`: T5's sentinels, which follow the pieces, the last one first."""
    kind = recipe.kind if recipe is not None else ("BPE" if model.kind == BPE_MODEL else "Unigram")
    scores = [(piece, score) for piece, score, _ in model.pieces]
    unk_id = model.unk_id
    charsmap = model.charsmap or None
    added = model.added
    if kind == "BPE":
        ids = {piece: number for number, (piece, _) in enumerate(scores)}
        # The best score is merged first. Control and byte pieces are never merged into.
        skip = {piece for piece, _, type_ in model.pieces if type_ not in (NORMAL, USER_DEFINED)}
        order = sorted(range(len(scores)), key=lambda number: -scores[number][1])
        merges = merges_of({scores[number][0]: rank for rank, number in enumerate(order)}, skip)
        return Vocabulary("BPE", ids=ids, merges=merges, unk_id=unk_id, charsmap=charsmap, added=added)
    if recipe is RECIPES["XLMRobertaTokenizer"]:
        # fairseq numbered its own four tokens first and a mask last.
        scores = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scores[3:], ("<mask>", 0.0)]
        unk_id = 3
    known = {piece for piece, _ in scores}
    scores += [(token.content, 0.0) for token in reversed(extra) if token.content not in known]
    return Vocabulary("Unigram", scores=scores, unk_id=unk_id, charsmap=charsmap, added=[*added, *extra])


def pipeline(model: SentencePieceModel, vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece's own rules, where no class says otherwise."""
    unk = model.pieces[model.unk_id][0]
    if vocabulary.kind == "BPE":
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
    if vocabulary.charsmap is not None:
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
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
    tokenizer.decoder = spaced_decoder(prefix=model.add_dummy_prefix)
    return tokenizer
