"""Share of right answers on held-out prompts, greedily decoded and sampled, with 95 % confidence intervals.

python examples/grpo-words/measure.py data/words/held-out.jsonl tiny-english runs/words-0 runs/words-1
"""

import json
import sys
from pathlib import Path

from rewards import correct_word

import cutaway as ct
from cutaway.evaluate.confidence_interval import proportion_confidence_interval


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    for source in sys.argv[2:]:
        checkpoint, parts = ct.load(source), []
        for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
            completions = ct.generate(
                checkpoint, [row["prompt"] for row in rows], max_new_tokens=2, temperature=temperature, seed=0
            )
            texts = [completion.text or "" for completion in completions]
            num_right = int(sum(correct_word(texts, [row["answer"] for row in rows])))
            low, high = proportion_confidence_interval(num_right, len(rows))
            parts.append(f"{name} {num_right / len(rows):.1%} ({low:.1%} to {high:.1%})")
        sys.stdout.write(f"{source}: {', '.join(parts)} of {len(rows)} answers right\n")


if __name__ == "__main__":
    main()
