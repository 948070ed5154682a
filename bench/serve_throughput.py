"""Throughput and time to first token of OpenAI-compatible servers, side by side, with 1 and 16 clients.

Start the servers on the same machine with the same weights, then name them. They are measured in alternating rounds.

    cutaway serve MODEL --port 8001          # or another server
    python bench/serve_throughput.py cutaway=http://127.0.0.1:8001/v1 llama.cpp=http://127.0.0.1:8002/v1
"""

import argparse
import asyncio
import statistics
import time
from typing import Any

from report import Row, add_json_option, print_row, save_rows

PROMPT = "Write a story about a girl, a dog and a long journey over the sea. "


async def complete(client: Any, model: str, index: int, args: argparse.Namespace) -> tuple[float, float, int]:
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
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=1200) as client:
        models = (await client.models.list()).data
        model = models[0].id if models else args.model
        start = time.perf_counter()
        seed = int(start * 1000) % 1_000_000
        results = await asyncio.gather(*(complete(client, model, seed + i, args) for i in range(num_clients)))
        seconds = time.perf_counter() - start
    return {
        "tokens_per_second": sum(count for _, _, count in results) / seconds,
        "first_token_seconds": statistics.median(first for first, _, _ in results),
        "num_chunks": sum(count for _, _, count in results),
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--model", default="", help="name of the model for servers that list none")
    parser.add_argument("--may-stop", action="store_true", help="for servers without the parameter ignore_eos")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-repeats", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    servers = dict(server.split("=", 1) for server in args.servers)
    results: list[Row] = []
    for num_clients in args.clients:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for _ in range(args.rounds):
            for name, url in servers.items():
                rounds[name].append(asyncio.run(measure(url, num_clients, args)))
        for name, values in rounds.items():
            medians = {key: statistics.median(value[key] for value in values) for key in values[0]}
            results.append(print_row({"implementation": name, "num_clients": num_clients, **medians}))
    save_rows(args.json, results)


if __name__ == "__main__":
    main()
