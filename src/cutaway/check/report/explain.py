"""Documentation page of a check in Markdown: the bug, the method, the cause, the fix and a known bug."""

import tomllib
from functools import cache
from importlib.resources import files

from cutaway.check.registry import ALL_KINDS, Check, get_check


@cache
def load_known_bugs() -> dict[str, dict[str, str]]:
    """Check name → a published case of the bug that the check finds, with title, url and summary."""
    return tomllib.loads(files("cutaway.check.report").joinpath("known_bugs.toml").read_text(encoding="utf-8"))


def explain_check(name: str, *, image: str | None = None) -> str:
    """Return the documentation page of a check in Markdown; `image` is the path of a screenshot of a failure."""
    check = get_check(name)
    parts = [f"# {name}", f"**Catches** {check.catches}.", "## How it works", check.description]
    parts.append(_describe_applicability(check))
    if image is not None:
        parts += ["## What a failure looks like", f"![Report on a model with this bug]({image})"]
    parts += ["## Usual cause", _to_sentence(check.cause), "## How to fix it", _to_sentence(check.fix)]
    bug = load_known_bugs().get(name)
    if bug is not None:
        parts += ["## Known bug", f"[{bug['title']}]({bug['url']})", bug["summary"]]
    command = f"```console\n$ cutaway check SOURCE --only {name} --verbose\n```"
    return "\n\n".join([*parts, "## Run only this check", command]) + "\n"


def _describe_applicability(check: Check) -> str:
    """Sentences on the model kinds and functions that a check needs, its dtype, and whether training runs it."""
    needs = ", ".join(" or ".join(f"`{name}`" for name in need.split("|")) for need in check.needs)
    kinds = "all Transformers" if check.kinds == ALL_KINDS else " and ".join(f"{kind}s" for kind in check.kinds)
    sentences = [f"Applies to {kinds}; requires {needs or 'nothing else'}."]
    sentences += ["Runs in the model's own dtype."] if check.native_dtype else []
    sentences += ["Training runs it before the first step."] if check.preflight else []
    return " ".join(sentences)


def _to_sentence(text: str) -> str:
    """Capitalize the first letter and end with a period."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '?', '!')) else '.'}"
