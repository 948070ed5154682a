"""Errors meant for users. Every message says what is wrong, why, and what to do."""

MAX_MESSAGE_CHARS = 900
"""Number of characters above which an error message is shortened."""
_MAX_LINE_CHARS = 400
"""Number of characters of a line of another library's error that are shown."""


class CutawayError(ValueError):
    """Base class of all errors meant for users. The message is a single printable line; a long message is shortened."""

    def __init__(self, message: object = "") -> None:
        text = str(message)
        if len(text) > MAX_MESSAGE_CHARS:  # names and values from files can have any length
            text = f"{text[: MAX_MESSAGE_CHARS * 3 // 4]} … {text[-MAX_MESSAGE_CHARS // 5 :]}"
        super().__init__("".join(char if char.isprintable() else repr(char)[1:-1] for char in text))


class ConfigError(CutawayError):
    """An invalid configuration."""


class InputError(CutawayError):
    """An invalid argument."""


class KernelError(CutawayError):
    """An attention kernel does not support the requested operation."""


class WeightError(CutawayError):
    """Weights that are not finite or do not match the model."""


def format_error(error: BaseException) -> str:
    """First line of an error message, at most 200 characters; the class name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def format_raised(error: BaseException) -> str:
    """The class name and the message of an error: 'raised ValueError: …'.

    Of a message with several lines, the first and the last are used; the first is left out if it is a single word.
    """
    name, lines = type(error).__name__, [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and len(lines[0].split()) == 1:
        lines = lines[1:]
    message = " … ".join(line[:_MAX_LINE_CHARS] for line in dict.fromkeys(lines[:1] + lines[-1:]))
    return f"raised {name}: {message}" if message else f"raised {name}"
