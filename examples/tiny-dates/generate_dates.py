"""Write dates in many languages and their ISO form to a JSON Lines file, as data for the recipe `tiny-dates`.

    python examples/tiny-dates/generate_dates.py data/dates.jsonl

The date formats are those of Unicode's CLDR tables (Babel). Only unambiguous formats are used: formats like 3/4/2021,
which may be March or April, and formats with two-digit years are excluded.
"""

import json
import re
import sys
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import NamedTuple

import babel
import babel.dates

from cutaway.train.seeds import derive_seed

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
"""Word that may precede a date within a sentence."""
ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth",
    "twentieth", "twenty-first", "twenty-second", "twenty-third", "twenty-fourth", "twenty-fifth", "twenty-sixth",
    "twenty-seventh", "twenty-eighth", "twenty-ninth", "thirtieth", "thirty-first",
)  # fmt: skip
"""The days of a month in words."""
NUM_DATES, VARIANTS_PER_DATE = 24_000, 8
"""Number of dates, and number of formats per date."""
FULL_RANGE, COMMON_RANGE = (date(1000, 1, 1), date(2999, 12, 31)), (date(1900, 1, 1), date(2099, 12, 31))
"""Ranges from which dates are drawn alternately, so that half of the dates are drawn from COMMON_RANGE."""


class _DateFormat(NamedTuple):
    """A date format of a locale, as a CLDR pattern."""

    locale: str
    pattern: str


def generate_pairs(num_dates: int = NUM_DATES, variants_per_date: int = VARIANTS_PER_DATE) -> Iterator[tuple[str, str]]:
    """Iterate over (text, ISO date). Every call generates the same pairs."""
    date_formats = list_date_formats()
    days = list(dict.fromkeys(_sample_date(number) for number in range(num_dates)))
    for number, day in enumerate(days):
        iso, pairs = day.isoformat(), {}
        for variant in range(variants_per_date):
            draw = derive_seed(1, number, variant)
            date_format = date_formats[draw % len(date_formats)]
            pairs[_vary_context(format_date(day, date_format), date_format, derive_seed(draw))] = iso
        yield from pairs.items()


def _sample_date(index: int) -> date:
    first, last = COMMON_RANGE if index % 2 else FULL_RANGE
    return first + timedelta(days=derive_seed(0, index) % ((last - first).days + 1))


def list_date_formats() -> list[_DateFormat]:
    """All unambiguous formats of each locale, and formats with English ordinals: 3rd and third."""
    date_formats = {}
    for locale in LOCALES:
        formats = babel.Locale.parse(locale).date_formats
        for pattern in (formats[style].pattern for style in FORMAT_STYLES):
            if _is_unambiguous(pattern):
                date_formats[_DateFormat(locale, pattern)] = True
    english = ("MMMM {th}, y", "'the' {th} 'of' MMMM y", "MMMM {ordinal}, y", "'the' {ordinal} 'of' MMMM y")
    date_formats |= {_DateFormat("en", pattern): True for pattern in english}
    return list(date_formats)


def _is_unambiguous(pattern: str) -> bool:
    """Whether a pattern has a full year and an unambiguous month.

    A month is unambiguous if it is a name, if it follows the year, or if day, month and year are separated by dots.
    """
    unquoted = re.sub(r"'[^']*'", "", pattern)
    if "yy" in unquoted:
        return False
    return "MMM" in unquoted or unquoted.index("y") < unquoted.index("M") or unquoted.count(".") >= 2


def format_date(day: date, date_format: _DateFormat) -> str:
    """Format a date. Special spaces become plain spaces, and marks of writing direction are removed."""
    pattern = date_format.pattern.replace("{th}", f"'{_format_ordinal(day.day)}'")
    pattern = pattern.replace("{ordinal}", f"'{ORDINALS[day.day - 1]}'")
    text = babel.dates.format_date(day, pattern, date_format.locale)
    return re.sub(r"[\u200e\u200f]", "", re.sub(r"\s", " ", text))


def _vary_context(text: str, date_format: _DateFormat, seed: int) -> str:
    """Add a preposition to some texts, as within a sentence, and capitalize some, as at the start of a sentence."""
    if date_format.locale in PREPOSITIONS and seed % 4 == 0:
        text = f"{PREPOSITIONS[date_format.locale]} {text}"
    return text[0].upper() + text[1:] if seed // 4 % 8 == 0 else text


def _format_ordinal(number: int) -> str:
    suffix = "th" if 10 < number < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


if __name__ == "__main__":
    rows = [json.dumps({"text": text, "iso": iso}, ensure_ascii=False) for text, iso in generate_pairs()]
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
