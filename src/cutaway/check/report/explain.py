"""A check explained on one page: what it catches, how it asks, where it happened, and what to do."""

import tomllib
from functools import cache
from importlib.resources import files

from cutaway.check.registry import ALL_KINDS, Check, get_checks
from cutaway.errors import InputError


@cache
def load_known_bugs() -> dict[str, dict[str, str]]:
    """Of each check: a public case of its bug, with title, address and summary."""
    return tomllib.loads(files("cutaway.check.report").joinpath("known_bugs.toml").read_text(encoding="utf-8"))


def explain_check(name: str, *, image: str | None = None) -> str:
    """The page in Markdown, with a picture where one is given."""
    known = get_checks()
    if name not in known:
        import difflib

        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? --list" if near else "cutaway check --list"
        raise InputError(f"there is no check '{name}'; {hint} shows all")
    check = known[name]
    parts = [
        f"# {name}",
        f"**Catches** {check.catches}.",
        "## How it works",
        _join_lines(check.description),
        _describe_applicability(check),
    ]
    if image is not None:
        parts += ["## What a failure looks like", f"![The report of a model with this bug]({image})"]
    parts += ["## What is usually wrong", _to_sentence(check.cause), "## How to fix it", _to_sentence(check.fix)]
    case = load_known_bugs().get(name)
    if case is not None:
        parts += ["## Known bug", f"[{case['title']}]({case['url']})", case["summary"]]
    again = f"```console\n$ cutaway check SOURCE --only {name} --verbose\n```"
    return "\n\n".join([*parts, "## Run only this check", again]) + "\n"


def _describe_applicability(check: Check) -> str:
    """Whom it is asked, and when."""
    needs = ", ".join(" or ".join(f"`{each}`" for each in need.split("|")) for need in check.needs)
    whom = "any Transformer" if check.kinds == ALL_KINDS else " and ".join(f"{kind}s" for kind in check.kinds)
    said = [f"It is asked of {whom}, and needs {needs or 'nothing more'}."]
    said += ["It is asked in the model's own precision."] if check.native_dtype else []
    said += ["Training asks it before the first step."] if check.preflight else []
    return " ".join(said)


def _join_lines(text: str) -> str:
    """One line of what was broken for the source's margin."""
    return " ".join(text.split())


def _to_sentence(text: str) -> str:
    """With a capital letter and a stop."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '?', '!')) else '.'}"
