"""The generator of dates: unambiguous formats, deterministic pairs, and a split without common dates."""

import json
import re
import runpy
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cutaway.tokenizer import byte_tokenizer
from cutaway.train.data.prepare import prepare_data
from cutaway.train.recipe.load import load_recipe

SCRIPT = Path(__file__).parents[2] / "examples" / "tiny-dates" / "generate_dates.py"
BYTES = byte_tokenizer()
dates: Any = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_date_formats_are_unambiguous() -> None:
    """In any language: names of months and the order of numbers never denote two dates."""
    days_by_text: dict[str, set[date]] = {}
    for date_format in dates.list_date_formats():
        # Without weekdays, which must not be needed
        without_weekday = date_format._replace(pattern=re.sub("EEEE|cccc", "", date_format.pattern))
        for month in range(1, 13):
            for day in (date(2021, month, 5), date(2021, month, 11)):
                text = dates.format_date(day, without_weekday).lower().strip()
                days_by_text.setdefault(text, set()).add(day)
    assert len(days_by_text) > 1500
    assert not {text: days for text, days in days_by_text.items() if len(days) > 1}


def test_date_pairs_are_deterministic_and_span_centuries() -> None:
    pairs = list(dates.generate_pairs(300, 8))
    assert pairs == list(dates.generate_pairs(300, 8))
    years = {int(iso[:4]) for _, iso in pairs}
    assert min(years) < 1300
    assert max(years) > 2700
    texts = dict(pairs)
    assert all(date.fromisoformat(iso).isoformat() == iso for iso in texts.values())
    scripts = "".join(texts)
    assert all(re.search(pattern, scripts) for pattern in ("[а-я]", "年", "[ا-ي]", "[α-ω]", "th"))


def test_a_date_is_in_one_split_in_all_languages(tmp_path: Path) -> None:
    path = tmp_path / "dates.jsonl"
    rows = [json.dumps({"text": text, "iso": iso}) for text, iso in dates.generate_pairs(200, 6)]
    path.write_text("\n".join(rows))
    [source] = load_recipe("tiny-dates", ["data.sources.0.path=" + str(path)]).data.sources
    prepared = prepare_data([source], BYTES, tmp_path / "data", validation_split=0.2, seed=0)
    dates_by_split = []
    for split in (prepared.train, prepared.validation):
        assert split.targets is not None
        edges = zip(split.targets, split.offsets[1:], strict=True)
        dates_by_split.append({BYTES.decode(split.tokens[a:b].tolist()) for a, b in edges})
    assert not dates_by_split[0] & dates_by_split[1]
    assert 20 < len(dates_by_split[1]) < 60
    assert prepared.validation.num_documents > 4 * len(dates_by_split[1])
