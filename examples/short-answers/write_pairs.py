"""Write pairs of answers of which the short one is preferred, to train and to test a chat model.

    python examples/short-answers/write_pairs.py data/short-answers

Both answers of a pair are correct. The chosen one is a sentence; the rejected one has the same sentence between an
introduction, general remarks and an offer of more help. Subjects and questions of the held-out pairs do not occur in
the training data.
"""

import json
import random
import sys
from pathlib import Path

SUBJECTS: dict[str, dict[str, str]] = {
    "train": {
        "a violin": "a small string instrument that is played with a bow",
        "a compass": "an instrument whose needle points to the magnetic north",
        "a glacier": "a large mass of ice that moves slowly downhill",
        "yeast": "a fungus that turns sugar into carbon dioxide and alcohol",
        "a lighthouse": "a tower with a bright light that guides ships",
        "a volcano": "an opening in the earth's crust through which lava escapes",
        "a thermometer": "an instrument that measures temperature",
        "an eclipse": "an event in which one celestial body hides another",
        "a dictionary": "a book that lists words with their meanings",
        "a pension": "a regular payment to a person who has retired",
        "a canal": "an artificial waterway for boats or irrigation",
        "a haiku": "a poem of three lines with five, seven and five syllables",
        "rust": "the reddish iron oxide that forms on iron in moist air",
        "a mortgage": "a loan for which a house or land is the security",
        "a vaccine": "a substance that trains the immune system against a disease",
        "a satellite": "an object that orbits a planet",
        "a barometer": "an instrument that measures air pressure",
        "an oasis": "a place in a desert where water makes plants grow",
        "a referendum": "a vote of all citizens on one question",
        "a fossil": "the preserved remains or trace of an ancient organism",
        "a metronome": "a device that produces a steady beat for musicians",
        "inflation": "a general rise of prices over time",
        "a tide": "the regular rise and fall of the sea caused by the moon and the sun",
        "a catalyst": "a substance that speeds up a reaction without being used up",
        "a hedgehog": "a small mammal whose back is covered with spines",
        "a quarantine": "a period of isolation that prevents a disease from spreading",
        "a microscope": "an instrument that makes very small objects visible",
        "an archive": "a collection of historical documents",
        "a delta": "the land that a river forms with its sediment at its mouth",
        "an antenna": "a device that sends or receives radio waves",
    },
    "held-out": {
        "a telescope": "an instrument that makes distant objects look nearer",
        "a library": "a place that keeps books which people can borrow",
        "an earthquake": "a sudden shaking of the ground caused by moving rock",
        "a piano": "a keyboard instrument whose strings are struck by hammers",
        "a desert": "a region with very little rain",
        "a tax": "a payment that people and companies must make to the state",
        "a rainbow": "an arc of colors that sunlight makes in drops of water",
        "a bridge": "a structure that carries a road or a path over an obstacle",
        "a penguin": "a seabird of the southern hemisphere that swims but cannot fly",
        "a novel": "a long story in prose about invented events",
        "gravity": "the force by which masses attract each other",
        "a passport": "a document that proves who a traveler is",
        "a battery": "a device that stores energy and delivers it as electric current",
        "a volunteer": "a person who works for a cause without pay",
        "an island": "a piece of land surrounded by water",
        "cheese": "a food made from the curd of milk",
    },
}
QUESTIONS = {
    "train": (
        "What is {subject}?",
        "Can you explain what {subject} is?",
        "Tell me about {subject}.",
        "Define {subject}.",
    ),
    "held-out": ("I would like to know what {subject} is.", "Please describe {subject}."),
}
OPENINGS = (
    "That is a great question! I would be happy to help you with that.",
    "Thank you for asking! There is a lot to say about this fascinating topic.",
    "Sure, let me explain this to you in detail.",
)
REMARKS = (
    "It is important to note that there are many different aspects to consider here.",
    "Over the course of history, people all over the world have thought about it in many ways.",
    "It plays an important role in our lives and can be found in many different contexts.",
    "There are several types, and each of them has its own characteristics and its own purposes.",
)
CLOSINGS = (
    "I hope this helps! If you have any other questions, please feel free to ask.",
    "In conclusion, it is a very interesting topic, and there is always more to learn about it.",
)
COUNTS = {"train": 120, "held-out": 32}


def write_pair(subject: str, definition: str, question: str, rng: random.Random) -> dict[str, object]:
    """A prompt with a short and a long answer."""
    sentence = f"{subject[0].upper()}{subject[1:]} is {definition}."
    long = [rng.choice(OPENINGS), sentence, *rng.sample(REMARKS, 2), rng.choice(CLOSINGS)]
    return {
        "prompt": [{"role": "user", "content": question.format(subject=subject)}],
        "chosen": [{"role": "assistant", "content": sentence}],
        "rejected": [{"role": "assistant", "content": " ".join(long)}],
    }


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "data/short-answers")
    directory.mkdir(parents=True, exist_ok=True)
    for split, count in COUNTS.items():
        rng = random.Random(f"pairs {split}")
        cases = [(*item, question) for item in SUBJECTS[split].items() for question in QUESTIONS[split]]
        rows = [write_pair(*case, rng) for case in rng.sample(cases, count)]
        path = directory / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        sys.stdout.write(f"{path}: {count} pairs\n")


if __name__ == "__main__":
    main()
