"""Measure a chat model on the held-out pairs: which answers it prefers, and how long its own answers are.

    python examples/short-answers/measure_answers.py BASE data/short-answers/held-out.jsonl [RUN]

Without RUN, the base itself is measured. The reward of an answer is its log-probability under the trained model minus
that under the base; the reward accuracy is the share of pairs in which the chosen answer has the larger reward.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

import cutaway as ct
from cutaway.tokenizer.chat.assistant_mask import AssistantMaskEncoder

MAX_NEW_TOKENS = 100


@torch.no_grad()
def answer_log_probs(checkpoint: Any, pairs: list[dict[str, Any]]) -> list[tuple[float, float, float, float]]:
    """Log-probability of chosen and rejected answer, and their log-probability per token."""
    encoder, results = AssistantMaskEncoder(checkpoint.tokenizer), []
    for pair in pairs:
        sums, means = [], []
        for key in ("chosen", "rejected"):
            messages = pair["prompt"] + pair[key]
            ids, is_target = encoder.encode_chat(messages, train_on=[False] * len(pair["prompt"]) + [True])
            tokens, targets = torch.tensor([ids]), torch.tensor(is_target[1:])
            log_probs = checkpoint.model(tokens)[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None]).squeeze(-1)
            sums.append(float(log_probs[targets].sum()))
            means.append(float(log_probs[targets].mean()))
        results.append((*sums, *means))
    return results


def main() -> None:
    base_source, path, *runs = sys.argv[1:]
    pairs = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    base = ct.load(base_source)
    checkpoint = ct.load(runs[0]) if runs else base
    lines = []
    before, after = answer_log_probs(base, pairs), answer_log_probs(checkpoint, pairs)
    if runs:
        margins = [(a[0] - b[0]) - (a[1] - b[1]) for a, b in zip(after, before, strict=True)]
        accuracy = sum(margin > 0 for margin in margins) / len(pairs)
        lines.append(
            f"reward accuracy {accuracy:.0%}, mean margin of the log ratios {sum(margins) / len(pairs):.1f} nats"
        )
    num_likelier = sum(row[2] > row[3] for row in after)
    chosen, rejected = (sum(row[i] for row in after) / len(pairs) for i in (0, 1))
    lines.append(f"chosen answer likelier per token: {num_likelier / len(pairs):.0%} of the pairs")
    lines.append(f"log-probability of the answers: chosen {chosen:.1f}, rejected {rejected:.1f} nats")
    completions = ct.generate(
        checkpoint, [pair["prompt"] for pair in pairs], max_new_tokens=MAX_NEW_TOKENS, temperature=0.0
    )
    answers = [completion.text or "" for completion in completions]
    words = sorted(len(answer.split()) for answer in answers)
    num_single = sum(len(re.findall(r"[.!?](?:\s|$)", answer)) == 1 for answer in answers)
    lines.append(
        f"generated answers: {words[len(words) // 2]} words (median), {num_single / len(pairs):.0%} are one sentence"
    )
    for pair, answer in list(zip(pairs, answers, strict=True))[:3]:
        lines.append(f"{pair['prompt'][0]['content']}\n→ {answer}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
