"""How long the page waits: GPT-2's shape, 512 tokens, two CPU cores. A picture within 2 s, a stage within 150 ms.

python bench/page.py
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

import cutaway as ct
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.opening import looked_into
from cutaway.serve.inspect.questions import QUESTIONS


def asked(of: Inspector, name: str, heard: Callable[[bytes], None] = lambda frame: None, **given: object) -> float:
    start = time.perf_counter()
    QUESTIONS[name](**given).answer(of, Job(heard)).packed()
    return time.perf_counter() - start


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="gpt2")
    options.add_argument("--tokens", type=int, default=512)
    options.add_argument("--repeats", type=int, default=5)
    chosen = options.parse_args()
    model = ct.build(chosen.model, seed=0)
    of = looked_into(model, name=chosen.model)
    layers = len(of.writer.blocks)
    looks = [
        {"tokens": torch.randint(model.config.vocab_size, (chosen.tokens,)).tolist()} for _ in range(chosen.repeats + 1)
    ]
    asked(of, "stream", look=looks.pop())  # once, for what is made once
    first, whole, rest = [], [], {}
    for look in looks:
        begins: list[float] = []
        start = time.perf_counter()
        asked(of, "stream", lambda frame, begins=begins: begins.append(time.perf_counter()), look=look)
        asked(of, "lane", look=look, at=chosen.tokens - 1)
        whole.append(time.perf_counter() - start)
        first.append(begins[1] - start)  # the embedding and one block
        for name, given in {
            "another token": ("lane", {"at": 100}),
            "glance": ("glance", {"at": 100}),
            "next": ("next", {"at": 100}),
            "stage q": ("stage", {"site": f"blocks.{layers // 2}.attn.q", "at": 100}),
            "stage pattern": ("stage", {"site": f"blocks.{layers // 2}.attn.pattern", "at": 100}),
            "stage hidden": ("stage", {"site": f"blocks.{layers - 1}.ffn.hidden", "at": 100}),
            "stage logits": ("stage", {"site": "logits", "at": 100}),
            "wall of a layer": ("wall", {"attention": f"blocks.{layers // 2}.attn"}),
            "a head": ("head", {"attention": f"blocks.{layers // 2}.attn", "head": 0}),
        }.items():
            rest.setdefault(name, []).append(asked(of, given[0], look=look, **given[1]))
    forward = []
    with torch.no_grad():
        for look in looks:
            start = time.perf_counter()
            model.hidden(torch.tensor([look["tokens"]]))
            forward.append(time.perf_counter() - start)
    print(f"{chosen.model}, {chosen.tokens} tokens, {torch.get_num_threads()} threads")
    print(f"{'the pass alone':18}{1e3 * median(forward):8.0f} ms")
    print(f"{'first block drawn':18}{1e3 * median(first):8.0f} ms")
    print(f"{'all of it':18}{1e3 * median(whole):8.0f} ms   (limit 2000)")
    for name, times in rest.items():
        limit = "   (limit 150)" if name.startswith("stage") else ""
        print(f"{name:18}{1e3 * median(times):8.0f} ms{limit}")


main()
