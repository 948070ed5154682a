"""Prompts for tiny-english. Each mechanism has prompts that select heads, and other words and templates that measure.

Consecutive prompts form pairs that differ in one word, and the answer of one prompt is the incorrect token of the
other, so that the mean score of a pair does not depend on the frequencies of the two answers.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint
from cutaway.tokenizer import Tokenizer

NUM_SELECTION, NUM_HELD_OUT, MAX_DRAWS = 12, 32, 1000
"""Pairs of prompts, or prompts without a pair, that select heads, and that measure the effect; limit of draws."""
NUM_LISTS, REPEAT_LEN, MIN_WORD_LEN = 32, 24, 4
"""Lists of random words, the words of a list, and the minimum number of letters of a word."""

GIRLS = (
    "Lily", "Sue", "Anna", "Jane", "Amy", "Ella", "Lisa", "Bella", "Mia", "Sara", "Lucy", "Mary", "Jill", "Emma",
    "Sally", "Rose",
)  # fmt: skip
BOYS = (
    "Tom", "Ben", "Jack", "Bob", "Billy", "Timmy", "Mark", "Tim", "Max", "Sam", "John", "Leo", "Joe", "Fred",
)  # fmt: skip
NOUNS = (
    "cat", "bird", "car", "flower", "ball", "duck", "kid", "dog", "friend", "toy", "tree", "bear", "cow", "animal",
    "rabbit", "star",
)  # fmt: skip
PEOPLE = (
    ("boy", "girl"), ("king", "queen"), ("prince", "princess"),
    ("man", "woman"), ("dad", "mom"), ("grandpa", "grandma"), ("father", "mother"), ("brother", "sister"),
)  # fmt: skip
ADJECTIVES = (
    "big", "red", "little", "happy", "pretty", "soft", "shiny", "green", "small", "blue", "new", "sad", "tall", "loud",
    "funny", "yellow",
)  # fmt: skip
THINGS = (
    "dog", "ball", "tree", "doll", "hat", "cake", "flower", "bear", "cat", "car", "bird", "book", "box", "boat",
    "frog", "duck",
)  # fmt: skip
CLOSING = ('."', '!"', '?"', ',"', '."\n', '!"\n', '?"\n')
NOT_CLOSING = (".", "!", "?", ",", ".\n", "!\n", "?\n")

INDUCTION_TEMPLATES = (
    ("Once upon a time, there was a {} {}", " and a {} {}", ". They were best friends. One day, the {}"),
    ("Tom saw a {} {}", " and a {} {}", " in the park. He was very happy. He ran to the {}"),
    ("In the house, there was a {} {}", ". Next to it was a {} {}", ". Sue looked at the {}"),
    ("Lily had a {} {}", " and a {} {}", ". She loved them very much. One day, Lily lost the {}"),
    ("A {} {}", " met a {} {}", " near the river. They started to play. Then the {}"),
    ("Ben wanted a {} {}", ", but his mom gave him a {} {}", ". Ben was not sad. He liked the {}"),
)
NAME_TEMPLATES = (
    ("Once upon a time, there was a {kind} named {first}. {Pronoun} had a friend named {name}",
     ". They liked to play with a ball. One day, {first} and"),
    ("One day, a {kind} named {first} went to the park. There {pronoun} met {name}",
     ". They were best friends. They went to the big tree. Then {first} and"),
    ("{first} was a little {kind}. {Pronoun} lived near {name}",
     ". It was a sunny day. The birds were singing and the sky was blue. After lunch, {first} and"),
    ("Once there was a {kind} called {first}. {Pronoun} liked to play with {name}",
     ". One day, it was very cold and there was snow on the ground. Mom made hot soup. {first} and"),
    ("{first} had a big cake for {possessive} birthday. {Pronoun} gave a piece to {name}",
     ". The cake was sweet and very good. Everyone was happy. When the cake was all gone, {first} and"),
)  # fmt: skip
QUOTE_TEMPLATES = (
    '{} said, "', '{} smiled and said, "', 'It was a sunny day. {} said, "',
    'One day, {} went to the park. {} saw a dog and said, "', '{} was happy. "Look!" {} said. "',
    '{} looked at the sky and asked, "',
)  # fmt: skip
SPEECHES = (
    "You can play with the ball", "They like the big tree", "We want to go to the park", "It is time to go home",
    "This is my new red car", "Mom is in the kitchen",
    "The dog is very happy", "The cat likes to eat fish", "You have to clean your room", "We can share the cake",
    "The bird has a nest in the tree", "He is my best friend", "She wants to help the little boy",
    "There is a big box in the house",
)  # fmt: skip
AGREEMENT_TEMPLATES = (
    "The {} near the tree", "The {} in the park", "One day, the {} on the hill", "The {} with the red hat",
    "The {} in the garden", "The {} at the farm", "Tom saw that the {} under the bed", "The {} from the zoo",
    "In the morning, the {} next to the big house", "The {} behind the door",
)  # fmt: skip
PRONOUN_TEMPLATES = (
    "The {} was sad because", "The {} had a big ball and", "One day, the {} was so happy that",
    "Once there was a {} who lived in a small house. Every day", "The {} looked at the sky and",
    "There was a {} in the forest. When it was dark,",
    "The {} went to the park because", "The {} was very tired. At night", "The {} saw a dog in the garden and",
    "Tom met a {} near the river. It was cold, and", "The {} could not find the red hat. Then",
    "One day, a {} found a shiny rock. When", "The {} ate the cake because", "In the morning, the {} was hungry, so",
)  # fmt: skip


@cache
def load_model(device: str = "cpu") -> Checkpoint:
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    checkpoint.model.to(device)
    return checkpoint


def get_tokenizer() -> Tokenizer:
    tokenizer = load_model().tokenizer
    assert tokenizer is not None
    return tokenizer


@dataclass(frozen=True)
class Prompt:
    """A text in pieces. The last token of each piece but the last is a marked token; `key` is the relevant one."""

    pieces: tuple[str, ...]
    answers: tuple[str, ...]
    incorrect: tuple[str, ...]
    key: int = 0


@dataclass(frozen=True)
class PromptSet:
    """Prompts as token ids, padded at the right, which has no effect on earlier tokens."""

    group_size: int
    """Number of consecutive prompts whose scores are averaged: 2 for pairs."""
    ids: Tensor
    """(B, T)"""
    last: Tensor
    """(B,): position of the last token of a prompt, at which the answer is predicted."""
    key: Tensor
    """(B,): position of the token on which the answer depends."""
    other: Tensor
    """(B,): position of another token: the other marked one, or one between key and last."""
    answers: Tensor
    """(B, A): tokens of which any is right."""
    incorrect: Tensor
    """(B, A)"""

    @property
    def rows(self) -> Tensor:
        return torch.arange(len(self.ids), device=self.ids.device)

    @property
    def partner(self) -> Tensor:
        """(B,): row of the other prompt of the pair."""
        return self.rows ^ 1  # rows 0 and 1, 2 and 3, …


def encode_prompts(prompts: Sequence[Prompt], group_size: int, device: str) -> PromptSet:
    encode = get_tokenizer().encode
    rows, marks = [], []
    for prompt in prompts:
        pieces = [encode(piece) for piece in prompt.pieces]
        rows.append([token for piece in pieces for token in piece])
        marks.append([sum(map(len, pieces[: end + 1])) - 1 for end in range(len(pieces) - 1)])
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    last = torch.tensor([len(row) - 1 for row in rows])
    key = torch.tensor([mark[prompt.key] for mark, prompt in zip(marks, prompts, strict=True)])
    other = (key + last + 1) // 2
    if len(marks[0]) == 2:
        other = torch.tensor([mark[1 - prompt.key] for mark, prompt in zip(marks, prompts, strict=True)])
    answers, incorrect = (
        torch.tensor([[_token(text) for text in getattr(prompt, field)] for prompt in prompts])
        for field in ("answers", "incorrect")
    )
    tensors = {
        "ids": ids, "last": last, "key": key, "other": other, "answers": answers, "incorrect": incorrect,
    }  # fmt: skip
    return PromptSet(group_size, **{name: tensor.to(device) for name, tensor in tensors.items()})


def _token(text: str) -> int:
    (token,) = get_tokenizer().encode(text)
    return token


def _words(words: Sequence[str]) -> list[str]:
    """Words that are one token with a leading space."""
    return [word for word in words if len(get_tokenizer().encode(f" {word}")) == 1]


@cache
def repeated_words(held_out: bool, device: str) -> Tensor:
    """(B, 2·REPEAT_LEN + 1): lists of random words, each written twice, on two lines.

    The first word of a line has no leading space. All words are one token, and some are the beginning of a longer word.
    """
    texts = [get_tokenizer().decode([token]) for token in range(get_tokenizer().vocab_size)]
    is_word = [text[:1] == " " and text[1:].isalpha() and text.islower() and len(text) > MIN_WORD_LEN for text in texts]
    words = torch.tensor([token for token, word in enumerate(is_word) if word])
    stripped = {texts[token].strip() for token in words.tolist()}
    starts = torch.tensor([token for token, text in enumerate(texts) if text in stripped])
    generator = torch.Generator().manual_seed(int(held_out))
    starts, words = (
        each[torch.randint(len(each), (NUM_LISTS, count), generator=generator)]
        for each, count in ((starts, 1), (words, REPEAT_LEN - 1))
    )
    newline = torch.full((NUM_LISTS, 1), get_tokenizer().encode("\n", add_special_tokens=False)[0])
    line = torch.cat((starts, words), 1)
    return torch.cat((line, newline, line), 1).to(device)


def _half(items: Sequence[str], held_out: bool) -> list[str]:
    words = _words(items)
    return words[len(words) // 2 :] if held_out else words[: len(words) // 2]


Sampler = Callable[[random.Random, bool], list[Prompt]]
"""Makes a pair of prompts, or one prompt; the flag says whether it is held out for the measurement."""


def _induction_pair(rng: random.Random, held_out: bool) -> list[Prompt]:
    """`a big dog and a red ball … the big` → `dog`; the other prompt ends with `the red`."""
    template = rng.choice(INDUCTION_TEMPLATES[3:] if held_out else INDUCTION_TEMPLATES[:3])
    adjectives, nouns = rng.sample(_half(ADJECTIVES, held_out), 2), rng.sample(_half(THINGS, held_out), 2)
    start = tuple(piece.format(*words) for piece, *words in zip(template, adjectives, nouns, strict=False))
    tokens = [f" {noun}" for noun in nouns]
    return [
        Prompt((*start, template[2].format(adjectives[key])), (tokens[key],), (tokens[1 - key],), key) for key in (0, 1)
    ]


def _name_pair(rng: random.Random, held_out: bool) -> list[Prompt]:
    """`named Sue … a friend named Ben … Sue and` → `Ben`; the other prompt has another name of the same gender."""
    before, after = rng.choice(NAME_TEMPLATES[2:] if held_out else NAME_TEMPLATES[:2])
    is_girl = rng.random() < 0.5
    fields = dict(
        zip(("kind", "pronoun", "possessive"), ("girl", "she", "her") if is_girl else ("boy", "he", "his"), strict=True)
    )
    girls, boys = _half(GIRLS, held_out), _half(BOYS, held_out)
    fields |= {"Pronoun": fields["pronoun"].capitalize(), "first": rng.choice(girls if is_girl else boys)}
    names = rng.sample(boys if is_girl else girls, 2)
    return [
        Prompt((before.format(name=name, **fields), after.format(**fields)), (f" {name}",), (f" {other}",))
        for name, other in (names, names[::-1])
    ]


def _quote_prompt(rng: random.Random, held_out: bool) -> list[Prompt]:
    """An opening quotation mark and a sentence: a closing mark, or punctuation without one."""
    before = rng.choice(QUOTE_TEMPLATES[3:] if held_out else QUOTE_TEMPLATES[:3])
    name = rng.choice(_half(GIRLS, held_out) + _half(BOYS, held_out))
    speech = rng.choice(SPEECHES[6:] if held_out else SPEECHES[:6])
    return [Prompt((before.format(name, name), speech), CLOSING, NOT_CLOSING)]


def _agreement_pair(rng: random.Random, held_out: bool) -> list[Prompt]:
    """`The cat near the tree` → `was`, `The cats near the tree` → `were`."""
    template = rng.choice(AGREEMENT_TEMPLATES[4:] if held_out else AGREEMENT_TEMPLATES[:4])
    nouns = [noun for noun in _words(NOUNS) if _words([f"{noun}s"])]
    noun = rng.choice(nouns[len(nouns) // 2 :] if held_out else nouns[: len(nouns) // 2])
    return _subject_pair(template, (noun, f"{noun}s"), (" was", " were"))


def _pronoun_pair(rng: random.Random, held_out: bool) -> list[Prompt]:
    """`The boy was sad because` → `he`, `The girl was sad because` → `she`."""
    template = rng.choice(PRONOUN_TEMPLATES[6:] if held_out else PRONOUN_TEMPLATES[:6])
    people = [pair for pair in PEOPLE if len(_words(pair)) == 2]
    return _subject_pair(template, rng.choice(people[3:] if held_out else people[:3]), (" he", " she"))


def _subject_pair(template: str, words: tuple[str, str], answers: tuple[str, str]) -> list[Prompt]:
    before, after = template.split("{}")
    return [Prompt((before + word, after), (answers[i],), (answers[1 - i],)) for i, word in enumerate(words)]


SAMPLERS: dict[str, Sampler] = {
    "induction": _induction_pair,
    "name-memory": _name_pair,
    "quotes": _quote_prompt,
    "agreement": _agreement_pair,
    "pronoun": _pronoun_pair,
}


@cache
def load_prompts(mechanism: str, held_out: bool, device: str) -> PromptSet:
    """Distinct prompts of a mechanism, for the measurement or for the selection of heads."""
    sampler, rng = SAMPLERS[mechanism], random.Random(int(held_out))
    groups: dict[tuple[Prompt, ...], None] = {}
    for _ in range(MAX_DRAWS):
        groups[tuple(sampler(rng, held_out))] = None
        if len(groups) == (NUM_HELD_OUT if held_out else NUM_SELECTION):
            break
    prompts = [prompt for group in groups for prompt in group]
    return encode_prompts(prompts, len(prompts) // len(groups), device)
