"""Prompts with a mask token for tiny-english-encoder: pronouns, left and right context, copied nouns, word categories.

The first part of each list is for the selection of heads, and the second for measurements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

import cutaway as ct
from cutaway.model import EncoderOnly
from cutaway.tokenizer import Tokenizer

GIRLS = (
    ("Lily", "Lucy", "Mia", "Sara", "Anna", "Amy", "Sue", "Emma"),
    ("Jane", "Mary", "Lisa", "Ella", "Rose", "Daisy", "Bella", "Sally"),
)
BOYS = (
    ("Tom", "Tim", "Ben", "Max", "Sam", "Jack", "John", "Bob"),
    ("Timmy", "Leo", "Joe", "Billy", "Tommy", "Fred", "Bobby", "Andy"),
)
PRONOUN_TEMPLATES = (
    (
        ("One day, {name} went to the park. [MASK] was very happy.", "She", "He"),
        ("Then {name} saw a big tree. [MASK] wanted to climb it.", "She", "He"),
        ("One day, {name} wanted to play. [MASK] mom said yes.", "Her", "His"),
        ("One day, {name} played with [MASK] toys all day.", "her", "his"),
    ),
    (
        ("Once, {name} found a ball in the grass. [MASK] picked it up and ran home.", "She", "He"),
        ("At night, {name} heard a loud noise. [MASK] felt scared.", "She", "He"),
        ("The next day, {name} was very sad. [MASK] dad gave a big hug.", "Her", "His"),
        ("In the morning, {name} showed the rock to [MASK] mom.", "her", "his"),
        ("Then {name} sat down because [MASK] was tired.", "she", "he"),
    ),
)
"""Text, and the pronouns for a girl's and for a boy's name."""
VERB_OBJECTS = {
    "kicked": "ball",
    "read": "book",
    "drove": "car",
    "drank": "milk",
    "rode": "bike",
    "wore": "hat",
    "ate": "cake",
    "climbed": "tree",
    "sang": "song",
    "flew": "kite",
    "opened": "door",
    "heard": "noise",
}
"""Verbs, and an object that fits no other of these verbs as well."""
CONTEXT_TEMPLATES = {
    "right": (
        "One day, he took the [MASK] and {verb} it.",
        "She found the [MASK] and {verb} it with her mom.",
        "Then the boy saw the [MASK] and {verb} it.",
        "It was the [MASK] that he {verb} in the morning.",
        "The girl got a [MASK] and {verb} it all day.",
    ),
    "left": (
        "One day, he {verb} the [MASK] and was happy.",
        "She {verb} the [MASK] with her mom.",
        "Then the boy {verb} the [MASK] in the morning.",
        "In the morning he {verb} the big [MASK] with a friend.",
        "The girl {verb} a [MASK] and smiled all day.",
    ),
}
"""Side of the verb → texts."""
COPY_TEMPLATES = (
    (
        "Tim had a {noun}. One day, the [MASK] was gone.",
        "Once, there was a big {noun}. The [MASK] was very old.",
        "Sara saw a {noun} in the garden. She showed the [MASK] to her mom.",
    ),
    (
        "Ben got a new {noun} for his birthday. He put the [MASK] on the bed.",
        "Mom gave Lily a {noun}. Lily loved the [MASK] very much.",
        "They looked at the {noun}. Then Tom touched the [MASK] with his hand.",
    ),
)
COPY_NOUNS = (
    (
        "frog", "rabbit", "fox", "tiger", "turtle", "mouse", "cow", "sheep", "bird", "owl", "doll", "kite", "boat",
        "cake", "apple", "robot", "balloon", "box", "stick", "coin",
    ),
    (
        "duck", "bear", "lion", "monkey", "squirrel", "pig", "horse", "fish", "bee", "elephant", "ball", "truck", "hat",
        "cookie", "flower", "drum", "book", "rock", "shell", "key",
    ),
)  # fmt: skip
CATEGORIES = {
    "animal": "dog cat bird fish frog duck rabbit bear fox lion monkey turtle mouse pig cow horse",
    "food": "cake apple cookie bread soup pizza candy cheese milk juice carrot banana sandwich egg",
    "person": "mom dad grandma grandpa sister brother girl boy man woman friend teacher baby lady",
    "clothes": "hat coat dress shirt shoes boots socks scarf",
    "place": "park house garden forest beach school store kitchen room zoo farm castle",
    "body": "hand head eye nose mouth foot arm leg face ear hair finger",
    "toy": "ball doll kite puzzle robot blocks balloon drum",
    "vehicle": "car truck train boat bike plane bus ship",
}
CATEGORY_TEMPLATES = (
    "They talked about the {word} all day.",
    "One day, he thought of the {word} again.",
    "She did not see the {word} at first.",
)


@dataclass(frozen=True)
class EncoderModel:
    """tiny-english-encoder and the ids of its special tokens."""

    model: EncoderOnly
    tokenizer: Tokenizer
    mask_id: int
    pad: int


@cache
def load_encoder(device: str) -> EncoderModel:
    checkpoint = ct.load("tiny-english-encoder", dtype=torch.float32)
    model, tokenizer = checkpoint.model.to(device).eval(), checkpoint.tokenizer
    assert isinstance(model, EncoderOnly)
    assert tokenizer is not None
    mask_id, pad = tokenizer.mask_token_id, tokenizer.token_to_id(tokenizer.special_tokens_map["pad_token"])
    assert mask_id is not None
    assert pad is not None
    return EncoderModel(model, tokenizer, mask_id, pad)


@dataclass(frozen=True)
class MaskBatch:
    """Encoded prompts with at most one mask each, padded on the right."""

    texts: list[str]
    ids: Tensor
    """(B, T)"""
    visible: Tensor
    """(B, T): True for tokens, False for padding."""
    at: Tensor
    """(B,): index of the mask, or of the word if there is no mask."""
    answers: Tensor
    """(B,): token that fits the mask."""
    foils: Tensor
    """(B,): token that does not fit."""
    words: Tensor
    """(B,): index of the first occurrence of the word that determines the answer."""


Prompt = tuple[str, str, str, str]
"""Text, word that determines the answer, answer, foil."""


def token_id(word: str, device: str) -> int | None:
    """Id of a word preceded by a space; None if it is not one token."""
    ids = load_encoder(device).tokenizer.encode(f" {word}", add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


def _single_tokens(words: Sequence[str], device: str) -> list[str]:
    return [word for word in words if token_id(word, device) is not None]


def encode_prompts(prompts: Sequence[Prompt], device: str) -> MaskBatch:
    """Encode prompts, of which all words are single tokens."""
    loaded = load_encoder(device)
    rows = loaded.tokenizer.encode_batch([text for text, *_ in prompts])
    length, pad = max(map(len, rows)), loaded.pad
    words, answers, foils = ([_require_token(prompt[index], device) for prompt in prompts] for index in (1, 2, 3))
    word_indices = [row.index(word) for row, word in zip(rows, words, strict=True)]

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=device)

    return MaskBatch(
        [text for text, *_ in prompts],
        torch.tensor([row + [pad] * (length - len(row)) for row in rows], device=device),
        torch.arange(length, device=device) < column([*map(len, rows)])[:, None],
        column(
            [
                row.index(loaded.mask_id) if loaded.mask_id in row else index
                for row, index in zip(rows, word_indices, strict=True)
            ]
        ),
        column(answers),
        column(foils),
        column(word_indices),
    )


def _require_token(word: str, device: str) -> int:
    token = token_id(word, device)
    assert token is not None, word
    return token


def pronoun_prompts(part: int, device: str) -> MaskBatch:
    """Prompts in pairs: each with a girl's name is followed by the same with a boy's name."""
    girls, boys = (_single_tokens(names[part], device) for names in (GIRLS, BOYS))
    prompts = [
        (text.format(name=name), name, answer, foil)
        for text, feminine, masculine in PRONOUN_TEMPLATES[part]
        for girl, boy in zip(girls, boys, strict=False)
        for name, answer, foil in ((girl, feminine, masculine), (boy, masculine, feminine))
    ]
    return encode_prompts(prompts, device)


def context_prompts(side: str, device: str) -> MaskBatch:
    """Prompts with a verb on one side of the mask."""
    verbs = [verb for verb, noun in VERB_OBJECTS.items() if len(_single_tokens([verb, noun], device)) == 2]
    prompts = [
        (text.format(verb=verb), verb, VERB_OBJECTS[verb], VERB_OBJECTS[verb])
        for text in CONTEXT_TEMPLATES[side]
        for verb in verbs
    ]
    return encode_prompts(prompts, device)


def copy_prompts(part: int, device: str) -> MaskBatch:
    """Prompts with an earlier noun, which is the answer. The foil is the noun of the next prompt with this template."""
    nouns = _single_tokens(COPY_NOUNS[part], device)
    prompts = [
        (text.format(noun=noun), noun, noun, other)
        for text in COPY_TEMPLATES[part]
        for noun, other in zip(nouns, nouns[1:] + nouns[:1], strict=True)
    ]
    return encode_prompts(prompts, device)


def category_prompts(device: str) -> tuple[list[MaskBatch], list[str]]:
    """For each template, texts without a mask for all words; and the category of each word."""
    pairs = [
        (word, category) for category, words in CATEGORIES.items() for word in _single_tokens(words.split(), device)
    ]
    batches = [
        encode_prompts([(text.format(word=word), word, word, word) for word, _ in pairs], device)
        for text in CATEGORY_TEMPLATES
    ]
    return batches, [category for _, category in pairs]
