"""`cutaway serve` under load: many clients at once, some of whom leave in the middle of their answers.

    python bench/serve_load.py --clients 200 --seconds 60

Every answer is compared with what the same request gets alone: none may be lost or mixed up, and `/health` is quick.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPTS = [
    "def add(",
    "import os\n",
    "class Node:\n    def ",
    "for i in range(",
    "x = [",
    "with open(",
    "return ",
    "if not ",
]


@dataclass
class LoadResult:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """Seconds of each answer that was waited for."""
    num_tokens: int = 0


def build_requests() -> list[dict[str, Any]]:
    """A few dozen different ones: greedy and drawn, short and long, whole and streamed, one answer and several."""
    rng = random.Random(0)
    asks = []
    for number in range(32):
        ask = {
            "prompt": f"# {number}\n{rng.choice(PROMPTS)}",
            "max_tokens": rng.choice([4, 16, 48]),
            "stream": number % 3 > 0,
        }
        ask |= {"temperature": 0} if number % 2 else {"temperature": 0.8, "top_p": 0.95, "seed": number}
        ask |= {"n": 2} if number % 8 == 0 else {}
        ask |= {"stop": ["\n\n"]} if number % 5 == 0 else {}
        ask |= {"logprobs": 2} if number % 7 == 0 else {}
        asks.append(ask)
    return asks


async def send_request(
    port: int, body: dict[str, Any], disconnect_after: int | None = None
) -> tuple[int, bytes, bytes]:
    """Status, head and body of an answer; one who leaves does so after so many bytes of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        said = await reader.readuntil(b"\r\n\r\n")
        if disconnect_after is not None:
            await reader.read(disconnect_after)
            return 0, said, b""
        rest = await reader.read()
        return int(said.split(b" ", 2)[1]), said, decode_chunked(rest) if b"chunked" in said.lower() else rest
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def decode_chunked(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            break
        parts.append(data[:length])
        data = data[length + 2 :]
    return b"".join(parts)


def parse_completions(body: bytes, stream: bool) -> tuple[Any, int]:
    """The answers and how they ended, by number; and how many tokens if that is said."""
    if not stream:
        told = json.loads(body)
        return {one["index"]: (one["text"], one["finish_reason"]) for one in told["choices"]}, told["usage"][
            "completion_tokens"
        ]
    events = body.decode().split("\n\n")
    assert events[-2] == "data: [DONE]", events[-2:]
    found: dict[int, list[Any]] = {}
    for event in events[:-2]:
        for one in json.loads(event.removeprefix("data: "))["choices"]:
            text = found.setdefault(one["index"], ["", None])
            text[0] += one["text"]
            text[1] = one["finish_reason"] or text[1]
    return {place: tuple(one) for place, one in found.items()}, len(events)


async def expected_responses(port: int, requests: list[dict[str, Any]]) -> list[Any]:
    """What each request gets with nobody else there."""
    expected = []
    for each in requests:
        status, _, body = await send_request(port, each)
        assert status == 200, body
        expected.append(parse_completions(body, each["stream"])[0])
    return expected


async def run_client(
    port: int, requests: list[dict[str, Any]], expected: list[Any], deadline: float, seed: int, result: LoadResult
) -> None:
    """One client: request after request until the time is over; one in ten is left in the middle."""
    rng = random.Random(seed)
    while time.monotonic() < deadline:
        number = rng.randrange(len(requests))
        leave = rng.randrange(1, 600) if rng.random() < 0.1 else None
        began = time.monotonic()
        try:
            status, head, body = await send_request(port, requests[number] | ({"stream": True} if leave else {}), leave)
        except (OSError, asyncio.IncompleteReadError) as error:
            result.outcomes[f"lost ({type(error).__name__})"] += 1
            continue
        if leave is not None:
            result.outcomes["left"] += 1
        elif status == 429:
            result.outcomes["refused" if b"retry-after: " in head.lower() else "refused without saying until when"] += 1
            await asyncio.sleep(0.2)
        elif status != 200:
            result.outcomes[f"status {status}"] += 1
        else:
            found, tokens = parse_completions(body, requests[number]["stream"])
            result.outcomes["right" if found == expected[number] else "wrong"] += 1
            result.num_tokens += tokens
            result.latencies.append(time.monotonic() - began)
            if found != expected[number] and len(result.mismatches) < 3:
                result.mismatches.append(f"{requests[number]}: {found} instead of {expected[number]}")


async def run_clients(
    port: int, num_clients: int, seconds: float, requests: list[dict[str, Any]], expected: list[Any]
) -> LoadResult:
    result, deadline = LoadResult(), time.monotonic() + seconds
    await asyncio.gather(*(run_client(port, requests, expected, deadline, seed, result) for seed in range(num_clients)))
    return result


async def run_burst(port: int, count: int, requests: list[dict[str, Any]], expected: list[Any]) -> LoadResult:
    """So many at the same moment, each once: more than may wait."""
    result = LoadResult()

    async def once(number: int) -> None:
        place = number % len(requests)
        status, head, body = await send_request(port, requests[place])
        if status == 429 and b"retry-after: " in head.lower():
            result.outcomes["refused"] += 1
        else:
            right = status == 200 and parse_completions(body, requests[place]["stream"])[0] == expected[place]
            result.outcomes["right" if right else f"wrong or {status}"] += 1

    await asyncio.gather(*(once(number) for number in range(count)))
    return result


def cpu_wait_seconds(pid: int) -> float:
    """Seconds that a process's first thread was ready and had no core, since others had them."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def probe_health(port: int, server_pid: int, stop: Any, results: Any) -> None:
    """`/health` every 50 ms in a process of its own, as a watchdog would ask: the seconds that each answer took, and
    those of them in which the server or this process waited for a core."""
    import http.client

    took = []
    own = os.getpid()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    while not stop.is_set():
        began, waited = time.perf_counter(), cpu_wait_seconds(server_pid) + cpu_wait_seconds(own)
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        seconds = time.perf_counter() - began
        took.append((seconds, cpu_wait_seconds(server_pid) + cpu_wait_seconds(own) - waited))
        time.sleep(0.05)
    results.put(took)


def resident_memory_mib(pid: int) -> float:
    """MiB that a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def run_clients_with_memory_log(
    port: int, pid: int, num_clients: int, seconds: float, requests: Any, expected: Any
) -> tuple[LoadResult, list[float]]:
    """The load, and the server's memory every few seconds while it lasts."""
    sizes: list[float] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(max(0.5, seconds / 12))
            sizes.append(resident_memory_mib(pid))

    watching = asyncio.ensure_future(watch())
    result = await run_clients(port, num_clients, seconds, requests, expected)
    watching.cancel()
    return result, sizes


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("--source", default="tiny-python")
    given.add_argument("--clients", type=int, default=200)
    given.add_argument("--seconds", type=float, default=60)
    given.add_argument("--max-num-seqs", type=int, default=32)
    chosen = given.parse_args()
    how = ["--port", "0", "--dtype", "float32", "--json", "--max-num-seqs", str(chosen.max_num_seqs)]
    server = subprocess.Popen([sys.executable, "-m", "cutaway", "serve", chosen.source, *how], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        port = int(json.loads(server.stdout.readline())["url"].rsplit(":", 1)[1])
        asks = build_requests()
        expected = asyncio.run(expected_responses(port, asks))
        stop, found = multiprocessing.Event(), multiprocessing.Queue()
        prober = multiprocessing.Process(target=probe_health, args=(port, server.pid, stop, found), daemon=True)
        prober.start()
        result, sizes = asyncio.run(
            run_clients_with_memory_log(port, server.pid, chosen.clients, chosen.seconds, asks, expected)
        )
        stop.set()
        asked = sorted(found.get(timeout=30))
        health = [seconds for seconds, _ in asked]
        crowd = asyncio.run(run_burst(port, 600, asks, expected))
        server.send_signal(signal.SIGTERM)
        code = server.wait(30)
    finally:
        server.kill()
    waited = sorted(result.latencies)
    print(f"{chosen.clients} clients for {chosen.seconds:g} s: {dict(result.outcomes)}")
    print(f"answers: median {waited[len(waited) // 2]:.2f} s, longest {waited[-1]:.2f} s")
    share = f"99 % within {health[int(len(health) * 0.99)] * 1e3:.1f}, longest {health[-1] * 1e3:.1f} ms"
    print(f"/health: {len(health)} times, median {health[len(health) // 2] * 1e3:.1f} ms, {share}")
    worst = [f"{seconds * 1e3:.0f} ({waited * 1e3:.0f})" for seconds, waited in asked[-5:]]
    print(f"the slowest of /health in ms (and of those, waiting for a core): {', '.join(worst)}")
    print(f"memory of the server in MiB: {[round(size) for size in sizes]}")
    print(f"600 at one moment: {dict(crowd.outcomes)}; ended with code {code}")
    for line in result.mismatches:
        print(line)
    fine = set(result.outcomes) <= {"right", "left", "refused"} and set(crowd.outcomes) == {"right", "refused"}
    flat = sizes[-1] - sizes[len(sizes) // 3] < 16
    quick = health[-1] < 0.1
    print(f"load of this machine, {os.cpu_count()} cores: {os.getloadavg()[0]:.1f}")
    print(f"none lost or mixed up: {fine}; /health < 100 ms throughout: {quick}; memory flat: {flat}; end: {code}")
    return 0 if fine and flat and quick and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
