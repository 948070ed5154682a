"""A pipeline and a directory's settings make a `Tokenizer`. Tokens enter in transformers' order, for equal ids."""

from collections.abc import Mapping

import tokenizers
from tokenizers import AddedToken, processors

from cutaway.errors import InputError
from cutaway.text.files import in_rust
from cutaway.text.recipes import Recipe
from cutaway.text.settings import Settings, str_of
from cutaway.text.tokenizer import Tokenizer
from cutaway.text.vocabulary import Vocabulary


def assemble(
    backend: tokenizers.Tokenizer,
    settings: Settings,
    *,
    recipe: Recipe | None = None,
    vocabulary: Vocabulary | None = None,
    defaults: Mapping[str, str] | None = None,
    whole: bool = False,
) -> Tokenizer:
    """`whole`: the vocabulary came with a tokenizer.json, which has the say about BOS and EOS."""
    named = settings.names(recipe.defaults if recipe else defaults or {})
    mask = named.get("mask_token")
    if recipe is not None and recipe.mask_takes_space and isinstance(mask, str):
        named["mask_token"] = AddedToken(mask, lstrip=True, special=True)
    extra = settings.extra if settings.extra is not None else (vocabulary.added if vocabulary else [])
    in_rust(settings.where, lambda: _add_tokens(backend, settings, named, extra))
    contents = {name: str_of(token) for name, token in named.items()}
    ids = {name: (token, n) for name, token in contents.items() if (n := backend.token_to_id(token)) is not None}
    if recipe is not None and recipe.post is not None:
        try:
            backend.post_processor = recipe.post(ids)
        except KeyError as error:
            raise InputError(
                f"{settings.where} sets {error.args[0]} to null, but each text needs it; name one"
            ) from None
    elif whole and (recipe is None or recipe.keeps_post):
        if recipe is not None and vocabulary is not None and vocabulary.post_processor is not None:
            backend.post_processor = vocabulary.post_processor
    else:
        bos, eos = (not whole and settings.flag(key, False) for key in ("add_bos_token", "add_eos_token"))
        backend.post_processor = begin_and_end(ids.get("bos_token"), ids.get("eos_token"), (bos, eos))
    side = settings.text("padding_side") or (recipe.padding_side if recipe else "right")
    if side not in ("left", "right"):
        raise InputError(f"{settings.where} sets padding_side to {side!r:.60}; it must be left or right")
    return Tokenizer(
        backend,
        named=contents,
        chat_template=settings.chat_template,
        model_max_length=settings.longest,
        padding_side="left" if side == "left" else "right",
        tidy=settings.flag("clean_up_tokenization_spaces", False),
        split_special=settings.flag("split_special_tokens", False),
    )


def begin_and_end(
    bos: tuple[str, int] | None, eos: tuple[str, int] | None, flags: tuple[bool, bool]
) -> processors.TemplateProcessing:
    """BOS before and EOS behind each text, where wanted and existing."""
    first, last = (token if flag else None for token, flag in zip((bos, eos), flags, strict=True))
    # In a template a special token may be named by anything; its own text may hold colons and spaces.
    begin, end = (["BOS:0"] if first else []), (["EOS:0"] if last else [])
    single = [*begin, "$A:0", *end]
    pair = [*single, *(part.replace(":0", ":1") for part in [*begin, "$B:0", *end])]
    used = [("BOS", first), ("EOS", last)]
    special = [{"id": name, "ids": [token[1]], "tokens": [token[0]]} for name, token in used if token]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _add_tokens(
    backend: tokenizers.Tokenizer,
    settings: Settings,
    named: Mapping[str, str | AddedToken],
    extra: list[str | AddedToken] | list[AddedToken],
) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    tokens: list[str | AddedToken] = [token for _, token in sorted(settings.added.items())]
    known |= {str_of(token) for token in tokens}
    for token in [*named.values(), *settings.more, *extra]:
        if str_of(token) not in known:
            tokens.append(token)
            known.add(str_of(token))
    special = {str_of(token) for token in [*named.values(), *settings.more]}
    backend.add_tokens(
        [_special(token) if isinstance(token, str) or token.content in special else token for token in tokens]
    )


def _special(token: str | AddedToken) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )
