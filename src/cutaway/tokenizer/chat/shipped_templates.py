"""Chat templates shipped with cutaway, for models that have none."""

from importlib.resources import files
from pathlib import Path

from cutaway.errors import InputError
from cutaway.tokenizer.tokenizer import Tokenizer

_DIRECTORY = files("cutaway.tokenizer.chat") / "templates"
SHIPPED_TEMPLATES: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama-3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "plain": (),
    "alpaca": (),
    "zephyr": (),
}
"""Tokens that each template needs. The others end a turn with EOS."""


def load_chat_template(value: str, tokenizer: Tokenizer) -> str:
    """Return the chat template for `value`: a name of SHIPPED_TEMPLATES, the path of a file, or a template itself.

    Raises InputError if the tokenizer lacks a token that a shipped template needs.
    """
    if value in SHIPPED_TEMPLATES:
        missing = _missing_tokens(value, tokenizer)
        if missing:
            usable = [name for name in SHIPPED_TEMPLATES if not _missing_tokens(name, tokenizer)]
            advice = f"use {' or '.join(usable)}" if usable else "use another tokenizer"
            raise InputError(
                f"chat template '{value}' needs {', '.join(missing)}, but the tokenizer has none; {advice}"
            )
        return (_DIRECTORY / f"{value}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    if "{%" in value or "{{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(
            f"'{value}' is not a chat template: it is neither a shipped one ({', '.join(SHIPPED_TEMPLATES)}), nor a"
            f" readable file ({error}); pass one of them, or a Jinja template"
        ) from None


def default_chat_template(tokenizer: Tokenizer) -> str:
    """Name of the first shipped template of which the tokenizer has all tokens."""
    for name in SHIPPED_TEMPLATES:
        if not _missing_tokens(name, tokenizer):
            return name
    raise InputError(
        "the model has no chat template, and its tokenizer has no token that could end a turn; set data.chat_template"
        " to a template, or use a tokenizer with an EOS token"
    )


def _missing_tokens(name: str, tokenizer: Tokenizer) -> list[str]:
    added = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}
    needed = SHIPPED_TEMPLATES[name]
    if not needed:
        return [] if tokenizer.eos_token_id is not None else ["an EOS token"]
    return [token for token in needed if token not in added]
