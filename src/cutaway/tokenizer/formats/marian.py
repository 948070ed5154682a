"""Marian tokenizer: SentencePiece segmentation, with ids from vocab.json."""

import re
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from cutaway.errors import InputError
from cutaway.tokenizer.file_io import read_bytes, read_json_object, wrap_tokenizers_errors
from cutaway.tokenizer.formats import sentencepiece as spm
from cutaway.tokenizer.tokenizer import Tokenizer, serialize_config
from cutaway.tokenizer.tokenizer_config import TokenizerConfig, token_content
from cutaway.tokenizer.vocabulary import validate_vocab

DEFAULT_SPECIAL_TOKENS = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
_MARIAN_FILES = ("source.spm", "target.spm", "vocab.json")


class MarianTokenizer(Tokenizer):
    """Encodes the source language and decodes the target language; one vocabulary has the pieces of both."""

    def __init__(
        self, backend: tokenizers.Tokenizer, ids: Mapping[str, int], cfg: TokenizerConfig, files: dict[str, bytes]
    ) -> None:
        self._ids = dict(ids)
        self._tokens = {token_id: token for token, token_id in ids.items()}
        tokens = cfg.resolve_special_tokens(DEFAULT_SPECIAL_TOKENS)
        special_tokens = {name: token_content(token) for name, token in tokens.items()}
        if special_tokens.get("unk_token") not in ids or special_tokens.get("eos_token") not in ids:
            raise InputError(f"vocab.json beside {cfg.source} lacks unk_token or eos_token; fix it")
        self._source_files = files
        self._special_tokens = {token for token in special_tokens.values() if token in ids}
        longest_first = sorted(self._special_tokens, key=len, reverse=True)
        self._special_token_regex = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        super().__init__(
            backend,
            special_tokens_map=special_tokens,
            chat_template=cfg.chat_template,
            model_max_length=cfg.model_max_length or 512,
        )
        self.decode_skip_ids = self.all_special_ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        # re.split with a group: parts with an odd index are special tokens.
        for i, part in enumerate(self._special_token_regex.split(text)):
            ids += [self._ids[part]] if i % 2 else self._encode_text(part)
        return [*ids, self._ids[self.special_tokens_map["eos_token"]]] if add_special_tokens else ids

    def _encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return [self._encode(text, add_special_tokens) for text in texts]

    def _encode_text(self, text: str) -> list[int]:
        tokens = []
        # `>>fra<<` before the text selects the target language.
        if text.startswith(">>") and (end := text.find("<<")) != -1:
            tokens, text = [text[: end + 2]], text[end + 2 :]
        unk = self._ids[self.special_tokens_map["unk_token"]]
        tokens += self.backend.encode(text, add_special_tokens=False).tokens
        return [self._ids.get(token, unk) for token in tokens]

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        text, pieces = "", ""
        for token in (self._tokens[token_id] for token_id in ids if token_id in self._tokens):
            if token not in self._special_tokens:
                pieces += token
            elif not skip_special_tokens:
                text, pieces = text + _join_pieces(pieces) + token + " ", ""
        return (text + _join_pieces(pieces)).strip()

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def id_to_token(self, token_id: int) -> str | None:
        return self._tokens.get(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _serialize_files(self) -> dict[str, bytes]:
        """Return the original files: tokenizer.json cannot represent separate vocabularies for segmentation and ids."""
        config = {"tokenizer_class": "MarianTokenizer", "model_max_length": self.model_max_length}
        return {**self._source_files, **serialize_config(self, {**config, **self.special_tokens_map})}


def _join_pieces(pieces: str) -> str:
    return pieces.replace("▁", " ").removeprefix(" ")


def load_marian_tokenizer(directory: Path, cfg: TokenizerConfig) -> MarianTokenizer:
    """Load a Marian tokenizer from source.spm and vocab.json."""
    files = {name: read_bytes(directory / name) for name in _MARIAN_FILES if (directory / name).is_file()}
    try:
        model = spm.escape_control_pieces(spm.parse_sentencepiece_model(files["source.spm"]))
    except InputError as error:
        raise InputError(f"{directory / 'source.spm'}: {error}") from error
    vocabulary = spm.build_vocabulary(model, None)
    backend = wrap_tokenizers_errors(directory, lambda: spm.build_sentencepiece_pipeline(model, vocabulary))
    ids = validate_vocab(read_json_object(directory / "vocab.json"), directory / "vocab.json")
    return MarianTokenizer(backend, ids, cfg, files)
