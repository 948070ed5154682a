"""Sample stories from the teacher, as training text.

    python examples/tiny-english/sample_stories.py data/stories15M data/stories

Stories that do not end within the context of the teacher are left out.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

import cutaway as ct
from cutaway.model import Transformer
from cutaway.model.kernels import shape_agnostic_sdpa

OPENING_TOKENS, OPENING_MIN_P = 32, 0.002
"""In the first tokens of a story, rarer tokens are kept, so that names and subjects vary."""


@torch.no_grad()
def sample_batch(model: Transformer, count: int, bos: int, min_p: float, generator: torch.Generator) -> list[list[int]]:
    """Sample `count` stories in one batch. Only those that end within the context of the model are returned.

    All rows start together and have the same length, so the batch needs no scheduling, and a step is a few kernels on
    all rows.
    """
    cache = model.new_cache(count, model.config.context)
    tokens = torch.full((count, 1), bos, device=model.device)
    columns, ended = [], torch.zeros(count, dtype=torch.bool, device=model.device)
    with shape_agnostic_sdpa():
        for step in range(model.config.context):
            logits = model(tokens, cache=cache)[:, -1].float()
            # Gumbel-max sampling: argmax(logits + Gumbel noise) is a sample of the softmax distribution.
            gumbel = -torch.empty_like(logits).exponential_(generator=generator).log_()
            cut = OPENING_MIN_P if step < OPENING_TOKENS else min_p
            too_small = logits < logits.amax(-1, keepdim=True) + math.log(cut)
            tokens = (logits + gumbel).masked_fill_(too_small, -torch.inf).argmax(-1, keepdim=True)
            columns.append(tokens)
            ended |= tokens.squeeze(-1) == bos
            if step % 16 == 0 and bool(ended.all()):
                break
    rows = torch.cat(columns, 1)[ended].tolist()
    return [row[: row.index(bos)] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("teacher", help="checkpoint directory")
    parser.add_argument("directory", type=Path, help="directory of the JSON Lines file")
    parser.add_argument("--num-stories", type=int, default=320_000, help="number of stories to sample")
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--min-p", type=float, default=0.02, help="cut tokens below this fraction of the largest")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = ct.load(args.teacher, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    assert tokenizer.bos_token_id is not None
    args.directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    num_written, start = 0, time.perf_counter()
    with (args.directory / "stories.jsonl").open("w", encoding="utf-8") as file:
        for first in range(0, args.num_stories, args.batch_size):
            count = min(args.batch_size, args.num_stories - first)
            rows = sample_batch(checkpoint.model, count, tokenizer.bos_token_id, args.min_p, generator)
            texts = [text.strip() for text in tokenizer.backend.decode_batch(rows)]
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts if text)
            num_written += len(texts)
            rate = num_written / (time.perf_counter() - start)
            print(f"{num_written:,} stories of {first + count:,} ended, {rate:,.0f} stories/s", flush=True)


if __name__ == "__main__":
    main()
