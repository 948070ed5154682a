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
from cutaway.train.seeds import derive_seed

FORMAT_VERSION = 1
"""To be raised whenever other pairs are made."""
LOCALES = (
    "en", "en_GB", "fr", "de", "es", "pt", "it", "nl", "sv", "da", "nb", "fi", "is", "pl", "cs", "sk", "hr", "bg", "ru",
    "uk", "lt", "lv", "et", "hu", "ro", "el", "tr", "id", "ms", "vi", "sw", "af", "ca", "eu", "cy", "ga", "ar", "he",
    "fa", "hi", "bn", "th", "ko", "ja", "zh", "ka", "hy",
)  # fmt: skip
FORMAT_STYLES = ("full", "long", "medium", "short")
PREPOSITIONS = {
    "en": "on", "en_GB": "on", "fr": "le", "de": "am", "es": "el", "pt": "em", "it": "il", "nl": "op", "sv": "den",
    "da": "den", "nb": "den", "ca": "el",
}  # fmt: skip
"""What may stand before a date within a sentence."""
NUM_DATES, VARIANTS_PER_DATE = 24_000, 8
"""How many dates, and in how many ways each is written."""
FULL_RANGE, COMMON_RANGE = (date(1000, 1, 1), date(2999, 12, 31)), (date(1900, 1, 1), date(2099, 12, 31))
"""Where dates lie; every other one lies in the narrower time."""


class DateFormat(NamedTuple):
    """One way to write a date."""

    locale: str
    pattern: str


def ensure_dates_file(directory: Path) -> Path:
    """All pairs as JSON lines with the fields text and iso; made where they are not there yet."""
    babel = _import_babel()
    path = directory / f"dates-{FORMAT_VERSION}-{babel.__version__}.jsonl"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=".tmp-", dir=directory)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        for text, iso in generate_pairs():
            out.write(json.dumps({"text": text, "iso": iso}, ensure_ascii=False) + "\n")
    Path(draft).replace(path)
    return path


def generate_pairs(num_dates: int = NUM_DATES, variants_per_date: int = VARIANTS_PER_DATE) -> Iterator[tuple[str, str]]:
    """Texts and what they mean, the same ones every time."""
    every = list_date_formats()
    days = list(dict.fromkeys(_sample_date(number) for number in range(num_dates)))
    for number, day in enumerate(days):
        iso, found = day.isoformat(), {}
        for turn in range(variants_per_date):
            draw = derive_seed(1, number, turn)
            way = every[draw % len(every)]
            found[_vary_context(format_date(day, way), way, derive_seed(draw))] = iso
        yield from found.items()


def _sample_date(index: int) -> date:
    first, last = COMMON_RANGE if index % 2 else FULL_RANGE
    return first + timedelta(days=derive_seed(0, index) % ((last - first).days + 1))


def list_date_formats() -> list[DateFormat]:
    """Each language's own patterns, and two with English ordinals, as far as they determine a date."""
    babel = _import_babel()
    found = {}
    for language in LOCALES:
        formats = babel.Locale.parse(language).date_formats
        for pattern in (formats[style].pattern for style in FORMAT_STYLES):
            if _is_unambiguous(pattern):
                found[DateFormat(language, pattern)] = True
    found |= {DateFormat("en", pattern): True for pattern in ("MMMM {th}, y", "'the' {th} 'of' MMMM y")}
    return list(found)


def _is_unambiguous(pattern: str) -> bool:
    """A year in full, and a month by name or in a place that everyone agrees on: after the year, or between dots."""
    plain = re.sub(r"'[^']*'", "", pattern)
    if "yy" in plain:
        return False
    return "MMM" in plain or plain.index("y") < plain.index("M") or plain.count(".") >= 2


def format_date(day: date, date_format: DateFormat) -> str:
    """Spaces are plain ones, as typed, and marks that only turn the direction of writing are left out."""
    style: Any = importlib.import_module("babel.dates")
    pattern = date_format.pattern.replace("{th}", f"'{_format_ordinal(day.day)}'")
    text: str = style.format_date(day, pattern, date_format.locale)
    return re.sub(r"[\u200e\u200f]", "", re.sub(r"\s", " ", text))


def _vary_context(text: str, date_format: DateFormat, seed: int) -> str:
    """Now and then as within a sentence, or at the beginning of one."""
    if date_format.locale in PREPOSITIONS and seed % 4 == 0:
        text = f"{PREPOSITIONS[date_format.locale]} {text}"
    return text[0].upper() + text[1:] if seed // 4 % 8 == 0 else text


def _format_ordinal(number: int) -> str:
    last = "th" if 10 < number < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"


def _import_babel() -> Any:
    try:
        return importlib.import_module("babel")
    except ImportError:
        raise InputError(
            "dates are written with the package babel, which is not installed; pip install 'cutaway[dates]'"
        ) from None
