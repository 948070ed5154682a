"""Write sums of two-digit numbers, to train and to test a model with rewards.

    python examples/grpo-sums/write_sums.py data/sums

The sums a+b with a and b from 10 to 49 are divided at random: 800 sums with their results for a warm start, 600 sums
for GRPO, whose results are read by the reward function only, and 200 held-out sums. No sum is in two of the files.
"""

import json
import random
import sys
from pathlib import Path

NUMBERS = range(10, 50)
COUNTS = {"warm-start": 800, "prompts": 600, "held-out": 200}
RESULT_KEYS = {"warm-start": "completion", "prompts": "answer", "held-out": "completion"}


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "data/sums")
    directory.mkdir(parents=True, exist_ok=True)
    sums = [(a, b) for a in NUMBERS for b in NUMBERS]
    random.Random("sums").shuffle(sums)
    for name, count in COUNTS.items():
        chosen, sums = sums[:count], sums[count:]
        rows = [{"prompt": f"{a}+{b}=", RESULT_KEYS[name]: str(a + b)} for a, b in chosen]
        path = directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        sys.stdout.write(f"{path}: {count} sums\n")


if __name__ == "__main__":
    main()
