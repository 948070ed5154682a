"""Dates as they are written in many languages, each with its ISO form: pairs made here, from Unicode's tables.

Only what determines a date is written: 3/4/2021 is March or April, so it is left out, as are years of two digits.
"""

import importlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from cutaway.errors import InputError
from cutaway.train.seeds import mixed

FORMAT = 1
"""To be raised whenever other pairs are made."""
LANGUAGES = (
    "en", "en_GB", "fr", "de", "es", "pt", "it", "nl", "sv", "da", "nb", "fi", "is", "pl", "cs", "sk", "hr", "bg", "ru",
    "uk", "lt", "lv", "et", "hu", "ro", "el", "tr", "id", "ms", "vi", "sw", "af", "ca", "eu", "cy", "ga", "ar", "he",
    "fa", "hi", "bn", "th", "ko", "ja", "zh", "ka", "hy",
)  # fmt: skip
STYLES = ("full", "long", "medium", "short")
BEFORE = {
    "en": "on", "en_GB": "on", "fr": "le", "de": "am", "es": "el", "pt": "em", "it": "il", "nl": "op", "sv": "den",
    "da": "den", "nb": "den", "ca": "el",
}  # fmt: skip
"""What may stand before a date within a sentence."""
DATES, EACH = 24_000, 8
"""How many dates, and in how many ways each is written."""
EVER, OFTEN = (date(1000, 1, 1), date(2999, 12, 31)), (date(1900, 1, 1), date(2099, 12, 31))
"""Where dates lie; every other one lies in the narrower time."""


class Way(NamedTuple):
    """One way to write a date."""

    language: str
    pattern: str


def file(directory: Path) -> Path:
    """All pairs as JSON lines with the fields text and iso; made where they are not there yet."""
    babel = unicode_tables()
    path = directory / f"dates-{FORMAT}-{babel.__version__}.jsonl"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=".half-", dir=directory)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        for text, iso in pairs():
            out.write(json.dumps({"text": text, "iso": iso}, ensure_ascii=False) + "\n")
    Path(draft).replace(path)
    return path


def pairs(dates: int = DATES, each: int = EACH) -> Iterator[tuple[str, str]]:
    """Texts and what they mean, the same ones every time."""
    every = ways()
    days = list(dict.fromkeys(drawn(number) for number in range(dates)))
    for number, day in enumerate(days):
        iso, found = day.isoformat(), {}
        for turn in range(each):
            draw = mixed(1, number, turn)
            way = every[draw % len(every)]
            found[dressed(write(day, way), way, mixed(draw))] = iso
        yield from found.items()


def drawn(number: int) -> date:
    first, last = OFTEN if number % 2 else EVER
    return first + timedelta(days=mixed(0, number) % ((last - first).days + 1))


def ways() -> list[Way]:
    """Each language's own patterns, and two with English ordinals, as far as they determine a date."""
    babel = unicode_tables()
    found = {}
    for language in LANGUAGES:
        formats = babel.Locale.parse(language).date_formats
        for pattern in (formats[style].pattern for style in STYLES):
            if determines(pattern):
                found[Way(language, pattern)] = True
    found |= {Way("en", pattern): True for pattern in ("MMMM {th}, y", "'the' {th} 'of' MMMM y")}
    return list(found)


def determines(pattern: str) -> bool:
    """A year in full, and a month by name or in a place that everyone agrees on: after the year, or between dots."""
    plain = re.sub(r"'[^']*'", "", pattern)
    if "yy" in plain:
        return False
    return "MMM" in plain or plain.index("y") < plain.index("M") or plain.count(".") >= 2


def write(day: date, way: Way) -> str:
    """Spaces are plain ones, as typed, and marks that only turn the direction of writing are left out."""
    style: Any = importlib.import_module("babel.dates")
    pattern = way.pattern.replace("{th}", f"'{ordinal(day.day)}'")
    text: str = style.format_date(day, pattern, way.language)
    return re.sub(r"[\u200e\u200f]", "", re.sub(r"\s", " ", text))


def dressed(text: str, way: Way, draw: int) -> str:
    """Now and then as within a sentence, or at the beginning of one."""
    if way.language in BEFORE and draw % 4 == 0:
        text = f"{BEFORE[way.language]} {text}"
    return text[0].upper() + text[1:] if draw // 4 % 8 == 0 else text


def ordinal(number: int) -> str:
    last = "th" if 10 < number < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"


def unicode_tables() -> Any:
    try:
        return importlib.import_module("babel")
    except ImportError:
        raise InputError(
            "dates are written with the package babel, which is not installed; pip install 'cutaway[dates]'"
        ) from None
