"""`tokenizer_from_directory`: whichever of the usual files a model's directory holds."""

import os
from pathlib import Path
from typing import Any

from cutaway.errors import InputError
from cutaway.text import sentencepiece_model, tiktoken_model
from cutaway.text.assemble import assemble
from cutaway.text.classes import recipe_for
from cutaway.text.files import exists, in_rust, parse_object, read_bytes, read_object, read_text, vocabulary
from cutaway.text.marian import marian_from_directory
from cutaway.text.recipes import RECIPES, Recipe, sentinels
from cutaway.text.settings import Settings, settings_from_directory
from cutaway.text.splits import GPT4, QWEN2
from cutaway.text.tokenizer import Tokenizer
from cutaway.text.tokenizer_json import as_it_stands, check_growth, vocabulary_in
from cutaway.text.vocabulary import Vocabulary

SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")

MOST_RESERVED = 1 << 16
"""Special tokens that may follow a tiktoken file's ranks; Llama 3 has 256."""


def tokenizer_from_directory(path: str | os.PathLike[str]) -> Tokenizer | None:
    """The tokenizer beside a model, or None where there is none. Only data is read: `auto_map` and such are ignored."""
    directory = Path(path)
    if not directory.is_dir():
        raise InputError(f"{directory} is no directory; give the one with the model's files")
    config = read_object(directory / "config.json") if exists(directory / "config.json") else {}
    whole = directory / "tokenizer.json"
    if exists(whole):
        return _from_tokenizer_json(whole, config)
    settings = settings_from_directory(directory)
    recipe = recipe_for(settings, config, None)
    if exists(directory / "source.spm") and exists(directory / "vocab.json"):
        return marian_from_directory(directory, settings)
    names = [*SENTENCEPIECE, "tiktoken.model", *sorted(file.name for file in directory.glob("*.tiktoken"))]
    for file in (directory / name for name in names):
        if exists(file):
            data = read_bytes(file)
            if file.name not in SENTENCEPIECE or tiktoken_model.is_tiktoken(data):
                return _from_tiktoken(data, file, settings, config)
            return _from_sentencepiece(data, file, settings, recipe)
    if exists(directory / "vocab.json") and exists(directory / "merges.txt"):
        return _from_recipe(_vocab_and_merges(directory), settings, recipe, "GPT2Tokenizer")
    if exists(directory / "vocab.txt"):
        return _from_recipe(_vocab_txt(directory / "vocab.txt"), settings, recipe, "BertTokenizer")
    return None


def _from_tokenizer_json(path: Path, config: dict[str, Any]) -> Tokenizer:
    text = read_text(path)
    content = parse_object(text, path)
    settings = settings_from_directory(path.parent, content)
    recipe = recipe_for(settings, config, content)
    tokens = vocabulary_in(content, path)
    check_growth(content, path)
    if recipe is None:
        return assemble(as_it_stands(text, path), settings, whole=True)
    tokens.added = sentinels(recipe, settings)
    backend = in_rust(path, lambda: recipe.build(tokens, settings))
    return assemble(backend, settings, recipe=recipe, vocabulary=tokens, whole=True)


def _from_sentencepiece(data: bytes, path: Path, settings: Settings, recipe: Recipe | None) -> Tokenizer:
    try:
        model = sentencepiece_model.parse(data)
        if recipe is not None and recipe.kind == "WordPiece":
            recipe = None
        extra = sentinels(recipe, settings) if recipe is not None else []
        tokens = sentencepiece_model.vocabulary_of(model, recipe, extra)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if recipe is not None:
        backend = in_rust(path, lambda: recipe.build(tokens, settings))
        return assemble(backend, settings, recipe=recipe, vocabulary=tokens)
    backend = in_rust(path, lambda: sentencepiece_model.pipeline(model, tokens))
    return assemble(backend, settings, vocabulary=tokens, defaults=model.named)


def _from_tiktoken(data: bytes, path: Path, settings: Settings, config: dict[str, Any]) -> Tokenizer:
    """Special tokens stand beside the file: in added_tokens_decoder, with gaps filled, or after the last rank."""
    tokens = tiktoken_model.parse(data, path)
    pattern = QWEN2 if config.get("model_type") in ("qwen", "qwen2") else GPT4
    backend = in_rust(path, lambda: tiktoken_model.pipeline(tokens, [pattern]))
    last = max(settings.added, default=-1)
    first = max(tokens.ids.values()) + 1
    if last - first > MOST_RESERVED:
        raise InputError(f"{settings.where} adds token {last}, far beyond the last rank {first - 1}; fix the file")
    contents = {number: token.content for number, token in settings.added.items()}
    names = [contents.get(number, f"<|reserved_token_{number}|>") for number in range(first, last + 1)]
    in_rust(path, lambda: backend.add_special_tokens(names))
    return assemble(backend, settings)


def _from_recipe(tokens: Vocabulary, settings: Settings, recipe: Recipe | None, otherwise: str) -> Tokenizer:
    if recipe is None or recipe.kind != tokens.kind:
        recipe = RECIPES[otherwise]
    chosen = recipe
    backend = in_rust(settings.where, lambda: chosen.build(tokens, settings))
    return assemble(backend, settings, recipe=recipe, vocabulary=tokens)


def _vocab_and_merges(directory: Path) -> Vocabulary:
    ids = vocabulary(read_object(directory / "vocab.json"), directory / "vocab.json")
    merges = []
    for number, line in enumerate(read_text(directory / "merges.txt").split("\n"), 1):
        if line.startswith("#version") or not line.strip():
            continue
        parts = line.rstrip("\r").split(" ")
        if len(parts) != 2:
            raise InputError(f"{directory / 'merges.txt'} line {number} is not two tokens; get the file again")
        merges.append((parts[0], parts[1]))
    return Vocabulary("BPE", ids=ids, merges=merges)


def _vocab_txt(path: Path) -> Vocabulary:
    lines = read_text(path).removesuffix("\n").split("\n")
    return Vocabulary("WordPiece", ids=vocabulary({line.rstrip(): n for n, line in enumerate(lines)}, path))
