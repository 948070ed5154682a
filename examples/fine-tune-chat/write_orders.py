"""Write conversations that turn an order in words into JSON, to train and to test a chat model.

    python examples/fine-tune-chat/write_orders.py data/orders

The held-out orders have names, products and sentences that do not occur in the training data. So a model that answers
them correctly reads the order instead of repeating what it was trained on.
"""

import json
import random
import sys
from pathlib import Path

INSTRUCTION = "Write this order as JSON with the keys product, quantity, customer and date."
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "first": ("Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kim", "Liam"),
        "last": ("Weber", "Olsen", "Rossi", "Khan", "Novak", "Silva", "Meyer", "Dubois", "Tanaka", "Brown", "Costa"),
        "product": (
            "green tea", "olive oil", "printer paper", "blue pens", "coffee beans", "desk lamps", "rye bread",
            "garden chairs", "wool socks", "apple juice", "brown rice", "candles", "notebooks", "hand soap",
        ),
        "sentence": (
            "Please send {number} packs of {product} to {name} on {month} {day}.",
            "{name} would like {number} packs of {product}, delivered on {day} {month}.",
            "We need {number} packs of {product} for {name} by {month} {day}.",
            "Order for {name}: {product}, {number} packs, to arrive on {day} {month}.",
            "Could you ship {number} packs of {product} on {month} {day}? They are for {name}.",
        ),
    },
    "held-out": {
        "first": ("Maria", "Noah", "Olga", "Pablo", "Quinn", "Rosa", "Samir", "Tara"),
        "last": ("Schmidt", "Larsen", "Bianchi", "Singh", "Horak", "Pereira", "Fischer", "Moreau"),
        "product": ("black tea", "sunflower oil", "sticky notes", "red markers", "oat milk", "floor lamps", "honey"),
        "sentence": (
            "On {month} {day}, {name} wants to receive {number} packs of {product}.",
            "Reserve {number} packs of {product} in the name of {name} for {day} {month}.",
        ),
    },
}  # fmt: skip
COUNTS = {"train": 200, "held-out": 60}


def write_order(rng: random.Random, parts: dict[str, tuple[str, ...]]) -> dict[str, object]:
    """One conversation: an order in words, and its JSON form."""
    name = f"{rng.choice(parts['first'])} {rng.choice(parts['last'])}"
    quantity, month, day = rng.randrange(2, 13), rng.randrange(12), rng.randrange(1, 29)
    product = rng.choice(parts["product"])
    number = NUMBERS[quantity - 2] if rng.random() < 0.5 else str(quantity)
    sentence = rng.choice(parts["sentence"])
    order = sentence.format(number=number, product=product, name=name, month=MONTHS[month], day=day)
    answer = {"product": product, "quantity": quantity, "customer": name, "date": f"{month + 1:02}-{day:02}"}
    return {
        "messages": [
            {"role": "user", "content": f"{INSTRUCTION} {order}"},
            {"role": "assistant", "content": json.dumps(answer)},
        ]
    }


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "data/orders")
    directory.mkdir(parents=True, exist_ok=True)
    for split, count in COUNTS.items():
        rng = random.Random(f"orders {split}")
        rows = [write_order(rng, PARTS[split]) for _ in range(count)]
        path = directory / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        sys.stdout.write(f"{path}: {count} conversations\n")


if __name__ == "__main__":
    main()
