"""Regular expressions that take exponential time are found, and those of published tokenizers are not among them."""

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway.errors import InputError
from cutaway.tokenizer import load_tokenizer, train_bpe
from cutaway.tokenizer.regex_ambiguity import is_slow
from cutaway.tokenizer.split_patterns import SPLIT_PATTERNS

pytestmark = pytest.mark.unchecked
EXPONENTIAL = [
    "(x+x+)+y", "(x+)+y", "(x*)*y", "(?:x|x)+y", "(a|ab|b)*c", r"(\w+\s?)*$", r"(?:\p{L}+)*!", "(?=(x+x+)+y)z",
    "(x?){50}y", "(x{1,9}){1,9}y", "(?i:(a|A)+)b", "(?i)(a|A)+b", r"([a-z]+)*\d", "(.*)*x", "(?x) ( x + x + ) + y",
    "(x+){30}y", r"(?:\d|\p{N})+z", "((x+)y?)+z", "(?<n>x+)+y", r"(\p{L}|[a-z])*\.", "(x+x+)+(?!y)", r"(x+)+\b",
    "(([a][b][c])+([a][b][c])+)+!", "(?:x{1,3})+y", "([^y]*,)*[^y]*,z", "((a|a){7}){7}z", "(x+x+)+y|z", "z|(x+x+)+y",
    r"(?:[\p{L}&&[a-z]]+)+\.", "x*x*x*x*y", r"\s*\s+\s*\s*x", "(" * 200 + "x" + ")+" * 200 + "y",
]  # fmt: skip
HARMLESS = [
    "(x+)+", r"(?:\p{L}\p{M}*)+", r"(?:\s+\w+)*!", r"\w+(?:[-']\w+)*x", r"(?:\r?\n)+(?!\r?\n)", " {2,}", r"\s+$",
    r"https?://\S+", r"\d+(?:[.,]\d+)*%", r"(?:[A-Z]\.)+x", r"(.)\1{2,}", "(?:foo|bar|baz)+!", r"[a-z]+(?:_[a-z]+)*\(",
    r"(?:(?:\d{1,3}\.){3}\d{1,3})x", "(?:[0-9]{5})+x", "x*x*y", "x*x*x*x*x*", r"\w+\s+\w+\s+\w+\s+\w+\s+\w+!", "[]x]+y",
    r"[[:alpha:]]+\d", "(?#comment)x+y", "(?<=a)b+c", "x{,3}y", "x{a}", "", "(", "[", "\\", "(?", "x{", "(?i", "+x",
]  # fmt: skip
_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = {
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s",
    "nanochat": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+",
    "kimi": rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}*{_CASED[1]}+{_CONTRACTIONS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}+{_CASED[1]}*{_CONTRACTIONS}|\p{{N}}{{1,3}}{_SPACES}",
    "clip": r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "digits from the right": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    "SMILES": r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}"
    "|[0-9])",
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "sentencepiece": " {2,}",
    "edges": r"^\s+|\s+$",
    "special tokens": r"<\|[^|]+\|>",
    "words": r"\w+|[^\w\s]+",
}


@pytest.mark.parametrize("pattern", EXPONENTIAL)
def test_exponential_expressions_are_found(pattern: str) -> None:
    assert is_slow(pattern)


@pytest.mark.parametrize("pattern", HARMLESS)
def test_harmless_expressions_are_not_found(pattern: str) -> None:
    assert not is_slow(pattern)


@pytest.mark.parametrize("pattern", [*PUBLISHED.values(), *dict.fromkeys(itertools.chain(*SPLIT_PATTERNS.values()))])
def test_expressions_of_published_tokenizers_are_not_found(pattern: str) -> None:
    assert not is_slow(pattern)


def count_ways(parts: list[str], text: str) -> int:
    """Number of ways in which (part|part|…)+ matches the whole text, by dynamic programming."""
    ways = [1] + [0] * len(text)
    for end in range(1, len(text) + 1):
        for start in range(end):
            ways[end] += ways[start] * sum(re.fullmatch(part, text[start:end]) is not None for part in parts)
    return ways[-1]


WORDS = ["".join(characters) for length in range(1, 5) for characters in itertools.product("ab", repeat=length)]


@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3))
def test_ambiguity_is_that_of_the_number_of_ways(parts: list[str]) -> None:
    """A repeated choice of words is exponential if and only if a text is a concatenation of them in two ways."""
    is_ambiguous = any(count_ways(parts, word * 3) > 1 for word in WORDS)
    assert is_slow(f"(?:{'|'.join(parts)})+!") == is_ambiguous
    assert not is_slow(f"(?:{'|'.join(parts)})!")


@pytest.mark.parametrize("step", ["normalizer", "pre_tokenizer", "decoder"])
def test_tokenizer_with_an_exponential_expression_is_refused(step: str, tmp_path: Path) -> None:
    train_bpe(["the cat sat on the mat"] * 5, 300).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    replace = {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": "z"}
    content[step] = split if step == "pre_tokenizer" else replace
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"regular expression '\(x\+x\+\)\+y'.*exponential time"):
        load_tokenizer(tmp_path)
    content[step]["pattern"]["Regex"] = "x+y"
    path.write_text(json.dumps(content))
    assert load_tokenizer(tmp_path) is not None
