"""Marian's translation models: SentencePiece cuts the text, and a vocab.json of their own numbers the pieces."""

import re
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from cutaway.errors import InputError
from cutaway.text import sentencepiece_model
from cutaway.text.files import in_rust, read_bytes, read_object, vocabulary
from cutaway.text.saving import config_files
from cutaway.text.settings import Settings, str_of
from cutaway.text.tokenizer import Tokenizer

DEFAULTS = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
FILES = ("source.spm", "target.spm", "vocab.json")


class MarianTokenizer(Tokenizer):
    """Reads the source language and writes the target's: pieces of both are in one vocabulary."""

    def __init__(
        self, backend: tokenizers.Tokenizer, ids: Mapping[str, int], settings: Settings, files: dict[str, bytes]
    ) -> None:
        self._ids = dict(ids)
        self._tokens = {number: token for token, number in ids.items()}
        named = {name: str_of(token) for name, token in settings.names(DEFAULTS).items()}
        if named.get("unk_token") not in ids or named.get("eos_token") not in ids:
            raise InputError(f"{settings.where}'s vocab.json lacks the unknown or the end token; get the files again")
        self._own_files = files
        self._whole = {token for token in named.values() if token in ids}
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(self._whole, key=len, reverse=True))) + ")")
        longest = settings.longest or 512
        super().__init__(backend, named=named, chat_template=settings.chat_template, model_max_length=longest)
        self.skipped_ids = self.special_ids

    def _encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = []
        # Parts in odd places are the named special tokens.
        for place, part in enumerate(self._split.split(text)):
            ids += [self._ids[part]] if place % 2 else self._cut(part)
        return [*ids, self._ids[self.named["eos_token"]]] if special else ids

    def _encode_batch(self, texts: list[str], special: bool) -> list[list[int]]:
        return [self._encode(text, special) for text in texts]

    def _cut(self, text: str) -> list[int]:
        tokens = []
        # `>>fra<<` before the text says which language is wanted.
        if text.startswith(">>") and (end := text.find("<<")) != -1:
            tokens, text = [text[: end + 2]], text[end + 2 :]
        unk = self._ids[self.named["unk_token"]]
        tokens += self.backend.encode(text, add_special_tokens=False).tokens
        return [self._ids.get(token, unk) for token in tokens]

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        text, piece = "", ""
        for token in (self._tokens[number] for number in ids if number in self._tokens):
            if token not in self._whole:
                piece += token
            elif not skip_special:
                text, piece = text + _spaced(piece) + token + " ", ""
        return (text + _spaced(piece)).strip()

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def token(self, number: int) -> str | None:
        return self._tokens.get(number)

    def id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _files(self) -> dict[str, bytes]:
        """The files it came from: no tokenizer.json can say that one vocabulary cuts and another numbers."""
        config: dict[str, object] = {
            "tokenizer_class": "MarianTokenizer",
            "model_max_length": self.model_max_length,
            **self.named,
        }
        return {**self._own_files, **config_files(self, config)}


def _spaced(pieces: str) -> str:
    return pieces.replace("▁", " ").removeprefix(" ")


def marian_from_directory(directory: Path, settings: Settings) -> MarianTokenizer:
    files = {name: read_bytes(directory / name) for name in FILES if (directory / name).is_file()}
    try:
        model = sentencepiece_model.unmatched(sentencepiece_model.parse(files["source.spm"]))
    except InputError as error:
        raise InputError(f"{directory / 'source.spm'}: {error}") from error
    tokens = sentencepiece_model.vocabulary_of(model, None)
    backend = in_rust(directory, lambda: sentencepiece_model.pipeline(model, tokens))
    ids = vocabulary(read_object(directory / "vocab.json"), directory / "vocab.json")
    return MarianTokenizer(backend, ids, settings, files)
