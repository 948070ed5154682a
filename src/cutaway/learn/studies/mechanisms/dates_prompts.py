"""Dates in several languages for tiny-dates, with the tokens of day, month and year."""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache

import torch
from torch import Tensor

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint
from cutaway.model import EncoderDecoder
from cutaway.tokenizer import Tokenizer

FIELDS = ("year", "month", "day")
FIRST_DATE, NUM_DAYS = date(1100, 1, 1), 1800 * 365
"""Range of the dates. About 3 % of its dates occur in the training data."""
FORMATS = {
    "en": "{month} {day}, {year}",
    "de": "{day}. {month} {year}",
    "fr": "{day} {month} {year}",
    "es": "{day} de {month} de {year}",
    "it": "{day} {month} {year}",
    "nl": "{day} {month} {year}",
    "da": "{day}. {month} {year}",
    "pl": "{day} {month} {year}",
    "ru": "{day} {month} {year} г.",
    "lt": "{year} m. {month} {day} d.",
    "hu": "{year}. {month} {day}.",
    "tr": "{day} {month} {year}",
}
"""Formats with the name of the month."""
NUMERIC_FORMATS = {
    "numeric-de": "{day:02}.{month:02}.{year}",
    "numeric-fi": "{day}.{month}.{year}",
    "numeric-cs": "{day}. {month}. {year}",
    "numeric-hu": "{year}. {month:02}. {day:02}.",
    "numeric-zh": "{year}年{month}月{day}日",
}
ISO_FORMAT = "{year}-{month:02}-{day:02}"
MONTHS = {
    language: tuple(names.split())
    for language, names in {
        "en": "January February March April May June July August September October November December",
        "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
        "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
        "es": "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
        "it": "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre",
        "nl": "januari februari maart april mei juni juli augustus september oktober november december",
        "da": "januar februar marts april maj juni juli august september oktober november december",
        "pl": "stycznia lutego marca kwietnia maja czerwca lipca sierpnia września października listopada grudnia",
        "ru": "января февраля марта апреля мая июня июля августа сентября октября ноября декабря",
        "lt": "sausio vasario kovo balandžio gegužės birželio liepos rugpjūčio rugsėjo spalio lapkričio gruodžio",
        "hu": "január február március április május június július augusztus szeptember október november december",
        "tr": "Ocak Şubat Mart Nisan Mayıs Haziran Temmuz Ağustos Eylül Ekim Kasım Aralık",
    }.items()
}
SELECTION_LANGUAGES = ("en", "fr", "it", "pl", "lt")
"""Languages of the prompts on which blocks and heads are selected."""
LANGUAGES = tuple(language for language in FORMATS if language not in SELECTION_LANGUAGES)
"""Languages of the prompts on which effects are measured."""


@dataclass(frozen=True)
class DateModel:
    """tiny-dates and the ids of its special tokens."""

    model: EncoderDecoder
    tokenizer: Tokenizer
    start: int
    pad: int


@cache
def load_date_model(device: str) -> DateModel:
    checkpoint: Checkpoint = ct.load("tiny-dates", dtype=torch.float32)
    model, tokenizer = checkpoint.model.to(device).eval(), checkpoint.tokenizer
    assert isinstance(model, EncoderDecoder)
    assert tokenizer is not None
    start, pad = (tokenizer.token_to_id(tokenizer.special_tokens_map[f"{name}_token"]) for name in ("bos", "pad"))
    assert start is not None
    assert pad is not None
    return DateModel(model, tokenizer, start, pad)


@dataclass(frozen=True)
class DateBatch:
    """Encoded prompts: S source tokens with padding, T target tokens without EOS."""

    texts: list[str]
    source: Tensor
    """(B, S)"""
    mask: Tensor
    """(B, S): True for tokens, False for padding."""
    decoder_input: Tensor
    """(B, T): the start token, and all tokens of the target but the last."""
    target: Tensor
    """(B, T)"""
    spans: dict[str, Tensor]
    """Field → (B, S): True for the source tokens of the field."""
    target_tokens: dict[str, list[int]]
    """Field → indices of its tokens in the target, which are the same in all prompts."""

    @property
    def between(self) -> Tensor:
        """(B, S): True for the source tokens outside of all fields: punctuation, spaces and other words."""
        return self.mask & ~torch.stack([*self.spans.values()]).any(0)


def sample_dates(count: int, seed: int) -> list[date]:
    """Dates in which day and month are different numbers."""
    generator = random.Random(seed)
    dates: list[date] = []
    while len(dates) < count:
        day = FIRST_DATE + timedelta(days=generator.randrange(NUM_DAYS))
        dates += [day] if day.day != day.month else []
    return dates


def sample_batch(count: int, languages: Sequence[str], seed: int, device: str) -> DateBatch:
    """Dates at random, each in a random one of these languages."""
    generator = random.Random(seed)
    return encode_dates(sample_dates(count, seed), [generator.choice(languages) for _ in range(count)], device)


def encode_dates(dates: Sequence[date], languages: Sequence[str], device: str) -> DateBatch:
    """Write each date in its language, or in a numeric format, and encode it."""
    loaded = load_date_model(device)
    texts, sources, targets, tokens = [], [], [], []
    for day, language in zip(dates, languages, strict=True):
        text, spans = _format_date(day, (FORMATS | NUMERIC_FORMATS)[language], MONTHS.get(language))
        texts.append(text)
        sources.append(loaded.tokenizer.encode(text))
        tokens.append({name: _tokens_of(loaded.tokenizer, sources[-1], span) for name, span in spans.items()})
        targets.append(loaded.tokenizer.encode(day.isoformat()))
    length = max(map(len, sources))
    source = torch.tensor([ids + [loaded.pad] * (length - len(ids)) for ids in sources], device=device)
    masks = {name: torch.zeros(source.shape, dtype=torch.bool, device=device) for name in FIELDS}
    for row, by_field in enumerate(tokens):
        for name, indices in by_field.items():
            masks[name][row, indices] = True
    target = torch.tensor(targets, device=device)
    start = torch.full((len(targets), 1), loaded.start, device=device)
    _, spans = _format_date(dates[0], ISO_FORMAT, None)
    return DateBatch(
        texts,
        source,
        torch.arange(length, device=device) < torch.tensor([[len(ids)] for ids in sources], device=device),
        torch.cat([start, target[:, :-1]], 1),
        target,
        masks,
        {name: _tokens_of(loaded.tokenizer, targets[0], span) for name, span in spans.items()},
    )


def _format_date(day: date, template: str, months: Sequence[str] | None) -> tuple[str, dict[str, tuple[int, int]]]:
    """Text of a date, and the first byte and the end of each field in its UTF-8 form."""
    values: dict[str, str | int] = {"year": day.year, "month": day.month, "day": day.day}
    if months is not None:
        values["month"] = months[day.month - 1]
    text, spans = "", {}
    for literal, name, spec, _ in string.Formatter().parse(template):
        text += literal
        if name is not None:
            first = len(text.encode())
            text += format(values[name], spec or "")
            spans[name] = (first, len(text.encode()))
    return text, spans


def _tokens_of(tokenizer: Tokenizer, ids: Sequence[int], span: tuple[int, int]) -> list[int]:
    """Indices of the tokens with bytes of the span."""
    tokens, position = [], 0
    for index, token in enumerate(ids):
        end = position + len(tokenizer.id_to_token(token) or "")  # byte-level BPE: one character per byte
        if position < span[1] and end > span[0]:
            tokens.append(index)
        position = end
    return tokens


def select_rows(batch: DateBatch, rows: Tensor) -> DateBatch:
    """The prompts with these indices."""
    return DateBatch(
        [batch.texts[row] for row in rows.tolist()],
        batch.source[rows],
        batch.mask[rows],
        batch.decoder_input[rows],
        batch.target[rows],
        {name: span[rows] for name, span in batch.spans.items()},
        batch.target_tokens,
    )
