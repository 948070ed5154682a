"""Throughput and time to first token of OpenAI-compatible servers, side by side, with 1 and 16 clients.

Start the servers on the same machine with the same weights, then name them. They are measured in alternating rounds.

    cutaway serve MODEL --port 8001          # or another server
    python bench/serve_throughput.py cutaway=http://127.0.0.1:8001/v1 llama.cpp=http://127.0.0.1:8002/v1
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

PROMPT = "Write a story about a girl, a dog and a long journey over the sea. "


async def complete(client: AsyncOpenAI, model: str, index: int, args: argparse.Namespace) -> tuple[float, float, int]:
    """Time to first token, time of the whole answer, and number of tokens of one streamed completion."""
    start = time.perf_counter()
    first, count = 0.0, 0
    stream = await client.completions.create(
        model=model,
        prompt=f"{index}. " + PROMPT * args.prompt_repeats,  # different beginnings, so that no prefix is cached
        max_tokens=args.max_tokens,
        temperature=0,
        stream=True,
        extra_body={} if args.may_stop else {"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices and (chunk.choices[0].text or count):
            first = first or time.perf_counter() - start
            count += 1
    return first, time.perf_counter() - start, count


async def measure(url: str, num_clients: int, args: argparse.Namespace) -> dict[str, float]:
    async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=1200) as client:
        models = (await client.models.list()).data
        model = models[0].id if models else args.model
        start = time.perf_counter()
        seed = int(start * 1000) % 1_000_000
        results = await asyncio.gather(*(complete(client, model, seed + i, args) for i in range(num_clients)))
        seconds = time.perf_counter() - start
    return {
        "tokens_per_second": sum(count for _, _, count in results) / seconds,
        "time_to_first_token": statistics.median(first for first, _, _ in results),
        "chunks": sum(count for _, _, count in results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--model", default="", help="name of the model for servers that list none")
    parser.add_argument("--may-stop", action="store_true", help="for servers without the parameter ignore_eos")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-repeats", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    servers = dict(server.split("=", 1) for server in args.servers)
    results: dict[str, Any] = {}
    for num_clients in args.clients:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for _ in range(args.rounds):
            for name, url in servers.items():
                rounds[name].append(asyncio.run(measure(url, num_clients, args)))
        for name, values in rounds.items():
            medians = {key: statistics.median(value[key] for value in values) for key in values[0]}
            results[f"{name}, {num_clients} clients"] = medians
            print(
                f"{name:12} {num_clients:3} clients: {medians['tokens_per_second']:8.1f} tokens/s,"
                f" first token after {medians['time_to_first_token']:6.2f} s"
            )
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
