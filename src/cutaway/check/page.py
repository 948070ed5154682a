"""A check explained on one page: what it catches, how it asks, where it happened, and what to do."""

import tomllib
from functools import cache
from importlib.resources import files

from cutaway.check.registry import ANY, Check, checks
from cutaway.errors import InputError


@cache
def cases() -> dict[str, dict[str, str]]:
    """Of each check: a public case of its bug, with title, address and facts."""
    return tomllib.loads(files("cutaway.check").joinpath("cases.toml").read_text(encoding="utf-8"))


def page(name: str, *, picture: str | None = None) -> str:
    """The page in Markdown, with a picture where one is given."""
    known = checks()
    if name not in known:
        import difflib

        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? --list" if near else "cutaway check --list"
        raise InputError(f"there is no check '{name}'; {hint} shows all")
    check = known[name]
    parts = [f"# {name}", f"**Catches** {check.catches}.", "## How it is asked", flat(check.asks), asked_of(check)]
    if picture is not None:
        parts += ["## What a failure looks like", f"![The report of a model with this bug]({picture})"]
    parts += ["## What is usually wrong", sentence(check.cause), "## How to fix it", sentence(check.fix)]
    case = cases().get(name)
    if case is not None:
        parts += ["## Where it happened", f"[{case['title']}]({case['url']})", case["facts"]]
    again = f"```console\n$ cutaway check SOURCE --only {name} --verbose\n```"
    return "\n\n".join([*parts, "## Ask it alone", again]) + "\n"


def asked_of(check: Check) -> str:
    """Whom it is asked, and when."""
    needs = ", ".join(" or ".join(f"`{each}`" for each in need.split("|")) for need in check.needs)
    whom = "any Transformer" if check.kinds == ANY else " and ".join(f"{kind}s" for kind in check.kinds)
    said = [f"It is asked of {whom}, and needs {needs or 'nothing more'}."]
    said += ["It is asked in the model's own precision."] if check.own else []
    said += ["Training asks it before the first step."] if check.quick else []
    return " ".join(said)


def flat(text: str) -> str:
    """One line of what was broken for the source's margin."""
    return " ".join(text.split())


def sentence(text: str) -> str:
    """With a capital letter and a stop."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '?', '!')) else '.'}"
