"""How long the page waits: GPT-2's shape, 512 tokens, two CPU cores. A picture within 2 s, an activation within 150 ms.

python bench/inspect_latency.py
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

import cutaway as ct
from cutaway.serve.inspect.inspector import Inspector, build_inspector
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.inspect.queries import QUERIES


def time_query(of: Inspector, name: str, heard: Callable[[bytes], None] = lambda frame: None, **given: object) -> float:
    start = time.perf_counter()
    QUERIES[name](**given).run(of, QueryJob(heard)).to_safetensors()
    return time.perf_counter() - start


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="gpt2")
    options.add_argument("--tokens", type=int, default=512)
    options.add_argument("--repeats", type=int, default=5)
    chosen = options.parse_args()
    model = ct.build(chosen.model, seed=0)
    of = build_inspector(model, name=chosen.model)
    layers = len(of.output_stack.blocks)
    looks = [
        {"tokens": torch.randint(model.config.vocab_size, (chosen.tokens,)).tolist()} for _ in range(chosen.repeats + 1)
    ]
    time_query(of, "residual_norms", input=looks.pop())  # once, for what is made once
    first, whole, rest = [], [], {}
    for look in looks:
        begins: list[float] = []
        start = time.perf_counter()
        time_query(of, "residual_norms", lambda frame, begins=begins: begins.append(time.perf_counter()), input=look)
        time_query(of, "journey", input=look, position=chosen.tokens - 1)
        whole.append(time.perf_counter() - start)
        first.append(begins[1] - start)  # the embedding and one block
        for name, given in {
            "another token": ("journey", {"position": 100}),
            "attention by layer": ("attention_by_layer", {"position": 100}),
            "next token": ("next_token", {"position": 100}),
            "activation q": ("activation", {"site": f"blocks.{layers // 2}.attn.q", "position": 100}),
            "activation pattern": ("activation", {"site": f"blocks.{layers // 2}.attn.pattern", "position": 100}),
            "activation hidden": ("activation", {"site": f"blocks.{layers - 1}.ffn.hidden", "position": 100}),
            "activation logits": ("activation", {"site": "logits", "position": 100}),
            "thumbnails": ("attention_thumbnails", {"attention": f"blocks.{layers // 2}.attn"}),
            "a head": ("attention_head", {"attention": f"blocks.{layers // 2}.attn", "head": 0}),
        }.items():
            rest.setdefault(name, []).append(time_query(of, given[0], input=look, **given[1]))
    forward = []
    with torch.no_grad():
        for look in looks:
            start = time.perf_counter()
            model.hidden_states(torch.tensor([look["tokens"]]))
            forward.append(time.perf_counter() - start)
    print(f"{chosen.model}, {chosen.tokens} tokens, {torch.get_num_threads()} threads")
    print(f"{'the pass alone':18}{1e3 * median(forward):8.0f} ms")
    print(f"{'first block drawn':18}{1e3 * median(first):8.0f} ms")
    print(f"{'all of it':18}{1e3 * median(whole):8.0f} ms   (limit 2000)")
    for name, times in rest.items():
        limit = "   (limit 150)" if name.startswith("activation") else ""
        print(f"{name:18}{1e3 * median(times):8.0f} ms{limit}")


main()
