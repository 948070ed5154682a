"""Prompts from arguments, standard input, files and token ids."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cutaway.errors import InputError

MAX_PROMPT_BYTES = 64 * 2**20
"""Maximum size of a file or of standard input."""
PromptInput = str | list[int]


def collect_prompts(
    texts: Sequence[str], files: Sequence[Path], tokens: Sequence[str], *, split_lines: bool, default: str | None = None
) -> list[PromptInput]:
    """Collect the prompts: texts, then files, then token ids. Without any, read standard input if it is a pipe.

    If it is a terminal, the prompt is `default`.
    """
    from_stdin = not (texts or files or tokens)
    if from_stdin and (sys.stdin is None or sys.stdin.isatty()):
        if default is not None:
            return [default]
        raise InputError("there is no prompt; pass one after SOURCE, pipe one in, or use --chat")
    if split_lines and not from_stdin and not files and "-" not in texts:
        raise InputError("--lines splits a file or standard input; pass --file, or - for standard input")
    if texts.count("-") > 1:
        raise InputError("- is standard input, which can be read only once; pass it once")
    prompts: list[PromptInput] = []
    for text in ("-",) if from_stdin else texts:
        prompts += split_prompts(read_stdin(), split_lines) if text == "-" else [text]
    for file in files:
        prompts += split_prompts(read_text_file(file), split_lines)
    prompts += [parse_token_ids("--token-ids", token_list) for token_list in tokens]
    if not prompts:
        raise InputError("there is no prompt: the input has only empty lines; write one prompt per line")
    return prompts


def split_prompts(text: str, split_lines: bool) -> Iterator[str]:
    """Yield the text as one prompt, without the final newline, which echo and editors add.

    With `split_lines`, yield each line that is not empty as a prompt.
    """
    if split_lines:
        # splitlines is not used, because it also splits at form feeds and Unicode separators.
        yield from (line.removesuffix("\r") for line in text.split("\n") if line.strip())
    else:
        yield text.removesuffix("\n").removesuffix("\r")


def read_stdin() -> str:
    if sys.stdin is None:
        raise InputError("standard input is closed, so - cannot be read; pipe a prompt in")
    return decode_utf8("standard input", sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1))


def read_text_file(path: Path) -> str:
    """Text of a file; raise an InputError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return decode_utf8(f"'{path}'", file.read(MAX_PROMPT_BYTES + 1))
    except OSError as error:
        raise InputError(f"'{path}' cannot be read: {error.strerror}; name a text file") from None


def decode_utf8(name: str, data: bytes) -> str:
    if len(data) > MAX_PROMPT_BYTES:
        raise InputError(f"{name} is longer than {MAX_PROMPT_BYTES >> 20} MiB, the maximum for a prompt; shorten it")
    try:
        return data.decode("utf-8").removeprefix("\ufeff")  # byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text at byte {error.start}; convert it first") from None


def parse_token_ids(option: str, text: str) -> list[int]:
    """Parse token ids separated by commas or spaces."""
    try:
        return [int(number) for number in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"{option} is '{text}'; use token ids separated by commas, such as 1,2,3") from None


def parse_logit_bias(entries: Sequence[str]) -> dict[int, float]:
    """Parse logit biases written as ID=BIAS."""
    biases = {}
    for entry in entries:
        token, _, bias = entry.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise InputError(f"--logit-bias is '{entry}'; use a token id and a number, such as 50256=-5") from None
    return biases
