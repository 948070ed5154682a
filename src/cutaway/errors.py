"""What a user of cutaway can get wrong, as `ValueError`s that say what, why and what to do."""

LONGEST = 900
"""Characters of a message, at most."""


class CutawayError(ValueError):
    """The root of every error meant for a user: one line that a terminal can show, of bounded length."""

    def __init__(self, message: object = "") -> None:
        text = str(message)
        if len(text) > LONGEST:  # names and values come from files, and may be of any size
            text = f"{text[: LONGEST * 3 // 4]} … {text[-LONGEST // 5 :]}"
        super().__init__("".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text))


class ConfigError(CutawayError):
    """A configuration that does not describe a Transformer."""


class InputError(CutawayError):
    """An argument that this model cannot take."""


class KernelError(CutawayError):
    """An attention kernel was asked for something it cannot compute."""


class WeightError(CutawayError):
    """Weights that are not numbers, or not this model's."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line of bounded length; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def raised(error: BaseException) -> str:
    """An error's kind, and what it says where it says something."""
    kind, said = type(error).__name__, first_line(error)
    return f"raised {kind}" if said == kind else f"raised {kind}: {said}"
