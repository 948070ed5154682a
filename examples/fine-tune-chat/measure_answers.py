"""Measure a chat model on the held-out orders: share of answers that are valid JSON, and that are correct.

    python examples/fine-tune-chat/measure_answers.py SOURCE data/orders/held-out.jsonl

An answer is correct if it is JSON with exactly the expected keys and values.
"""

import json
import sys
from pathlib import Path

import cutaway as ct


def parse_answer(text: str) -> object:
    """The JSON value of an answer, or None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def main() -> None:
    source, path = sys.argv[1:3]
    chats = [json.loads(line)["messages"] for line in Path(path).read_text(encoding="utf-8").splitlines()]
    completions = ct.generate(ct.load(source), [chat[:-1] for chat in chats], max_new_tokens=60, temperature=0.0)
    answers = [completion.text or "" for completion in completions]
    parsed = [parse_answer(answer) for answer in answers]
    expected = [json.loads(chat[-1]["content"]) for chat in chats]
    num_keys = sum(len(order) for order in expected)
    num_right = sum(
        isinstance(answer, dict) and answer.get(key) == value
        for answer, order in zip(parsed, expected, strict=True)
        for key, value in order.items()
    )
    num_correct = sum(answer == order for answer, order in zip(parsed, expected, strict=True))
    for chat, answer in list(zip(chats, answers, strict=True))[:2]:
        sys.stdout.write(f"{chat[0]['content']}\n→ {answer}\n")
    sys.stdout.write(
        f"{len(chats)} orders: {sum(isinstance(answer, dict) for answer in parsed) / len(chats):.0%} JSON objects,"
        f" {num_right / num_keys:.0%} of the values correct, {num_correct / len(chats):.0%} of the orders correct\n"
    )


if __name__ == "__main__":
    main()
