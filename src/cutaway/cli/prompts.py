"""Where prompts come from: arguments, standard input, files, and bare token ids."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cutaway.errors import InputError

MAX_PROMPT_BYTES = 64 * 2**20
"""Of a file or of standard input: beyond this it is no prompt."""
PromptInput = str | list[int]


def collect_prompts(
    texts: Sequence[str], files: Sequence[Path], tokens: Sequence[str], *, split_lines: bool
) -> list[PromptInput]:
    """All prompts, in this order. Without any, standard input is one, if something is piped in."""
    piped = not (texts or files or tokens)
    if piped and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError("no prompt is given; write one behind SOURCE, pipe one in, or talk with --chat")
    if split_lines and not piped and not files and "-" not in texts:
        raise InputError("--lines splits a file or standard input; give --file, or - to read what is piped in")
    if texts.count("-") > 1:
        raise InputError("- stands for standard input, which can be read once; give it once")
    found: list[PromptInput] = []
    for text in ("-",) if piped else texts:
        found += split_prompts(read_stdin(), split_lines) if text == "-" else [text]
    for file in files:
        found += split_prompts(_read_text_file(file), split_lines)
    found += [parse_token_ids("--token-ids", listed) for listed in tokens]
    if not found:
        raise InputError("there is no prompt: what was read has only empty lines; write one a line")
    return found


def split_prompts(text: str, split_lines: bool) -> Iterator[str]:
    """One prompt, or one a line. The end of the last line belongs to no prompt: echo and editors add it."""
    if split_lines:
        # Not splitlines: that also splits at form feeds and at Unicode's separators, which stand within texts.
        yield from (line.removesuffix("\r") for line in text.split("\n") if line.strip())
    else:
        yield text.removesuffix("\n").removesuffix("\r")


def read_stdin() -> str:
    if sys.stdin is None:
        raise InputError("standard input is closed, so - has nothing to read; pipe a prompt in")
    return decode_utf8("standard input", sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1))


def _read_text_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return decode_utf8(f"'{path}'", file.read(MAX_PROMPT_BYTES + 1))
    except OSError as error:
        raise InputError(f"'{path}' cannot be read: {error.strerror}; name a text file") from None


def decode_utf8(name: str, data: bytes) -> str:
    if len(data) > MAX_PROMPT_BYTES:
        raise InputError(
            f"{name} is longer than {MAX_PROMPT_BYTES >> 20} MiB, too long for a prompt; give a part of it"
        )
    try:
        return data.decode("utf-8").removeprefix("\ufeff")  # a mark that some editors begin files with
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is no UTF-8 text at byte {error.start}; convert it first") from None


def parse_token_ids(option: str, text: str) -> list[int]:
    """Token ids between commas or spaces."""
    try:
        return [int(number) for number in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"{option} is '{text}'; give token ids between commas, as in 1,2,3") from None


def parse_logit_bias(entries: Sequence[str]) -> dict[int, float]:
    """What is added to the logits of tokens, each as ID=NUMBER."""
    found = {}
    for each in entries:
        token, _, bias = each.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            raise InputError(f"--logit-bias is '{each}'; give a token id and a number, as in 50256=-5") from None
    return found
