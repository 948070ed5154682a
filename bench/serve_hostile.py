"""Latency of honest clients of `cutaway serve` while others send hostile requests.

    python bench/serve_hostile.py --seconds 10 [--json FILE]

For each attack, 4 clients send it in a loop, and an honest client measures 4-token completions and /health. The
attacks come from 127.0.0.2, the honest requests from 127.0.0.1. Median latencies are compared with those measured
directly before the attack. The ratio must be at most 2 for bodies that are rejected. The attacks after "no attack",
which shows the cost of as many ordinary requests, are for information: they cost the work of the requests or of new
connections. At the end, SIGTERM is sent while completions are in progress.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from report import add_json_option, print_row, save_rows

NUM_ATTACKERS = 4
HOST_HEADER = "Host: localhost\r\n"
FLOATS = [1.5] * 99_000
CONTROL = "no attack: GET /health"
MESSAGE = {"role": "user", "content": "a"}


def http_request(path: str, body: bytes, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\n{HOST_HEADER}Content-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def json_request(path: str, body: object) -> bytes:
    return http_request(path, json.dumps(body).encode())


def one_byte_chunks(size: int) -> bytes:
    head = (
        f"POST /tokenize HTTP/1.1\r\n{HOST_HEADER}Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return head.encode() + b"1\r\n \r\n" * size + b"0\r\n\r\n"


def build_attacks() -> dict[str, bytes]:
    """Requests by name."""
    completion = {"prompt": "a", "max_tokens": 1}
    many_headers = "".join(f"a{i}:\r\n" for i in range(2000))
    return {
        "99,000 floats as prompt": json_request("/v1/completions", {"prompt": FLOATS}),
        "99,000 floats to embed": json_request("/v1/embeddings", {"input": FLOATS}),
        "99,000 stop strings": json_request("/v1/completions", completion | {"stop": [1] * 99_000}),
        "49,000 logit biases": json_request(
            "/v1/completions", completion | {"logit_bias": {str(i): 1000 for i in range(49_000)}}
        ),
        "33,000 messages": json_request("/v1/chat/completions", {"messages": [MESSAGE] * 33_000}),
        "99,000 tokens to detokenize": json_request("/detokenize", {"tokens": ["a"] * 99_000}),
        "64 × 1,500 token ids": json_request("/v1/completions", completion | {"prompt": [[1] * 1500] * 64}),
        "2 MB of ]": http_request("/v1/completions", b"]" * 2_000_000),
        "2 MB of empty strings": http_request("/v1/completions", b'""' * 1_000_000),
        "2 MB of spaces": http_request("/v1/completions", b" " * 2_000_000),
        "2 MB of text": json_request("/tokenize", {"prompt": "a " * 950_000}),
        "80,000 floats of 23 digits": http_request(
            "/v1/completions", b'{"prompt": [' + b",".join([b"1.234567890123456e-300"] * 80_000) + b"]}"
        ),
        "1,000 empty objects, nested": http_request("/v1/completions", b'{"a":' * 1000),
        CONTROL: f"GET /health HTTP/1.1\r\n{HOST_HEADER}\r\n".encode(),
        "2,000 headers": f"GET /health HTTP/1.1\r\n{HOST_HEADER}{many_headers}\r\n".encode(),
        "200,000 chunks of 1 byte": one_byte_chunks(200_000),
        "100 pipelined requests": http_request("/tokenize", b'{"prompt": "a"}') * 100,
        "256 embeddings": json_request("/v1/embeddings", {"input": ["a"] * 256}),
        "30,000 characters to tokenize": json_request("/tokenize", {"prompt": "a b" * 10_000}),
    }


async def send(port: int, data: bytes, host: str, count: int = 1) -> int:
    """Send a request on a new connection, and return the status of the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
    try:
        writer.write(data)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await reader.readexactly(int(line.split(b":")[1]))
        for _ in range(count - 1):
            await reader.readuntil(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1])
    finally:
        writer.transport.abort()


async def attack_forever(port: int, data: bytes, outcomes: Counter[str]) -> None:
    while True:
        try:
            outcomes[str(await send(port, data, "127.0.0.2"))] += 1
        except (OSError, asyncio.IncompleteReadError):
            outcomes["closed"] += 1
            await asyncio.sleep(0.01)


async def hold_connections(port: int, count: int, data: bytes, outcomes: Counter[str]) -> None:
    """Keep `count` connections open that send nothing, or an incomplete request."""

    async def hold() -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
                outcomes["opened"] += 1
                writer.write(data)
                await reader.read()
                writer.transport.abort()
            await asyncio.sleep(0.2)

    await asyncio.gather(*(hold() for _ in range(count)))


def run_attackers(start: Callable[[Counter[str]], list[Coroutine[Any, Any, None]]], stop: Any, results: Any) -> None:
    """Run attackers in this process until `stop` is set."""

    async def run() -> None:
        outcomes: Counter[str] = Counter()
        tasks = [asyncio.ensure_future(work) for work in start(outcomes)]
        while not stop.is_set():
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        results.put(dict(outcomes))

    asyncio.run(run())


async def measure(port: int, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds per completion and per /health, measured one after the other."""
    completion = json_request("/v1/completions", {"prompt": "def add(", "max_tokens": 4, "temperature": 0})
    health = f"GET /health HTTP/1.1\r\n{HOST_HEADER}\r\n".encode()
    completions: list[float] = []
    healths: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(completions) < 3:
        for data, latencies in ((completion, completions), (health, healths)):
            start = time.perf_counter()
            status = await send(port, data, "127.0.0.1")
            if status != 200:
                raise RuntimeError(f"an honest request got status {status}")
            latencies.append(time.perf_counter() - start)
        await asyncio.sleep(0.02)
    return completions, healths


def measure_under_attack(
    port: int, seconds: float, start: Callable[[Counter[str]], list[Coroutine[Any, Any, None]]]
) -> tuple[dict[str, int], list[float], list[float]]:
    context = multiprocessing.get_context("fork")
    stop, results = context.Event(), context.Queue()
    process = context.Process(target=run_attackers, args=(start, stop, results), daemon=True)
    process.start()
    time.sleep(1.5)  # until the attack has its full effect
    try:
        completions, healths = asyncio.run(measure(port, seconds))
    finally:
        stop.set()
    outcomes = results.get(timeout=60)
    process.join()
    return outcomes, completions, healths


def measure_shutdown(process: "subprocess.Popen[bytes]", port: int) -> str:
    """Send SIGTERM during a streamed and a whole completion, and describe how they end."""
    body = {"prompt": "a", "max_tokens": 480, "n": 16, "ignore_eos": True}
    requests = [json_request("/v1/completions", body | {"stream": stream}) for stream in (True, False)]

    async def read_all(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        response = await reader.read()
        writer.close()
        return response

    async def run() -> list[bytes]:
        tasks = [asyncio.ensure_future(read_all(data)) for data in requests]
        await asyncio.sleep(1)
        process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks)

    start = time.perf_counter()
    stream, whole = asyncio.run(run())
    code = process.wait(60)
    ending = "error event and [DONE]" if b'"shutting_down"' in stream and b"data: [DONE]" in stream else "cut"
    status = whole.split(b" ", 2)[1].decode()
    is_json = b'"code":"shutting_down"' in whole
    seconds = time.perf_counter() - start - 1
    return (
        f"stream: {ending}; other: {status} {'JSON' if is_json else 'not JSON'}; exit code {code} after {seconds:.1f} s"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", default="tiny-python")
    parser.add_argument("--seconds", type=float, default=5, help="duration of each measurement")
    parser.add_argument("--only", default="", help="run only the attacks whose name contains one of these words")
    add_json_option(parser)
    return parser


def main() -> int:
    args = build_parser().parse_args()
    command = [sys.executable, "-m", "cutaway", "serve", args.source, "--port", "0", "--dtype", "float32", "--json"]
    server = subprocess.Popen([*command, "--shutdown-timeout", "1"], stdout=subprocess.PIPE)
    ratios: dict[str, float] = {}
    rows = []
    try:
        assert server.stdout is not None
        port = int(json.loads(server.stdout.readline())["url"].rsplit(":", 1)[1])
        asyncio.run(measure(port, 2))  # warm-up
        attacks: dict[str, Callable[[Counter[str]], list[Coroutine[Any, Any, None]]]] = {
            name: lambda outcomes, data=data: [attack_forever(port, data, outcomes) for _ in range(NUM_ATTACKERS)]  # type: ignore[misc]
            for name, data in build_attacks().items()
        }
        partial = http_request("/tokenize", b"{" * 20)[:-19]
        attacks["780 slow bodies"] = lambda outcomes: [hold_connections(port, 780, partial, outcomes)]
        attacks["1,100 silent connections"] = lambda outcomes: [hold_connections(port, 1100, b"", outcomes)]
        for name, start in attacks.items():
            if not any(word in name for word in args.only.split(",")):
                continue
            alone, _ = asyncio.run(measure(port, args.seconds / 2))
            outcomes, attacked, healths = measure_under_attack(port, args.seconds, start)
            before, after = statistics.median(alone), statistics.median(attacked)
            ratios[name] = after / before
            health = sorted(healths)[int(len(healths) * 0.99)]
            row = {"case": name, "alone_ms": before * 1e3, "attacked_ms": after * 1e3, "ratio": after / before}
            rows.append(print_row(row | {"health_p99_ms": health * 1e3, "responses_to_attackers": outcomes}))
        shutdown = measure_shutdown(server, port)
        rows.append(print_row({"case": "SIGTERM beyond --shutdown-timeout", "responses": shutdown}))
    finally:
        server.kill()
    rejected = [ratio for name, ratio in ratios.items() if name in list(attacks)[: list(attacks).index(CONTROL)]]
    largest = max(rejected, default=0.0)
    row = {"case": "rejected bodies", "largest_ratio": largest, "load_average": os.getloadavg()[0]}
    rows.append(print_row(row))
    save_rows(args.json, rows)
    return 0 if largest <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
