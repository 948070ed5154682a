"""Write prompts that ask for the first or the last of three words, to train and to test a model with rewards.

    python examples/grpo-words/write_prompts.py data/words

A prompt is "A hat, a boat, a car. The last one is the", and its answer is "car". No held-out prompt has the same three
words in the same order as a training prompt.
"""

import itertools
import json
import random
import sys
from pathlib import Path

WORDS = ("ball", "bird", "boat", "book", "box", "cake", "car", "cat", "cup", "dog", "doll", "fish", "hat", "kite")
COUNTS = {"train": 1000, "held-out": 200}


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "data/words")
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random("words")
    triples = list(itertools.permutations(WORDS, 3))
    rng.shuffle(triples)
    for name, count in COUNTS.items():
        chosen, triples = triples[:count], triples[count:]
        rows = []
        for words in chosen:
            question, answer = rng.choice([("first", words[0]), ("last", words[2])])
            things = ", ".join(f"a {word}" for word in words)
            rows.append({"prompt": f"{things.capitalize()}. The {question} one is the", "answer": answer})
        path = directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        sys.stdout.write(f"{path}: {count} prompts\n")


if __name__ == "__main__":
    main()
