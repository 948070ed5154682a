"""Load test of `cutaway serve`: many concurrent clients, some of which disconnect during a response.

    python bench/serve_load.py --clients 200 --seconds 60

Every response is compared with the response to the same request without load; `/health` must stay fast.
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
    """Outcomes of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """Seconds per completed response."""
    num_tokens: int = 0


def build_requests() -> list[dict[str, Any]]:
    """Different requests: greedy and sampled, short and long, streamed and not, one and several completions."""
    rng = random.Random(0)
    requests = []
    for index in range(32):
        request = {
            "prompt": f"# {index}\n{rng.choice(PROMPTS)}",
            "max_tokens": rng.choice([4, 16, 48]),
            "stream": index % 3 > 0,
        }
        request |= {"temperature": 0} if index % 2 else {"temperature": 0.8, "top_p": 0.95, "seed": index}
        request |= {"n": 2} if index % 8 == 0 else {}
        request |= {"stop": ["\n\n"]} if index % 5 == 0 else {}
        request |= {"logprobs": 2} if index % 7 == 0 else {}
        requests.append(request)
    return requests


async def send_request(
    port: int, body: dict[str, Any], disconnect_after: int | None = None
) -> tuple[int, bytes, bytes]:
    """Return status, head and body of a response; with `disconnect_after`, disconnect after that many bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        response_head = await reader.readuntil(b"\r\n\r\n")
        if disconnect_after is not None:
            await reader.read(disconnect_after)
            return 0, response_head, b""
        response_body = await reader.read()
        return (
            int(response_head.split(b" ", 2)[1]),
            response_head,
            decode_chunked(response_body) if b"chunked" in response_head.lower() else response_body,
        )
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
    """Return {index: (text, finish reason)} and the number of tokens (for a stream, of events)."""
    if not stream:
        response = json.loads(body)
        return {choice["index"]: (choice["text"], choice["finish_reason"]) for choice in response["choices"]}, response[
            "usage"
        ]["completion_tokens"]
    events = body.decode().split("\n\n")
    assert events[-2] == "data: [DONE]", events[-2:]
    completions: dict[int, list[Any]] = {}
    for event in events[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            text = completions.setdefault(choice["index"], ["", None])
            text[0] += choice["text"]
            text[1] = choice["finish_reason"] or text[1]
    return {index: tuple(choice) for index, choice in completions.items()}, len(events)


async def expected_responses(port: int, requests: list[dict[str, Any]]) -> list[Any]:
    """The response to each request without load."""
    expected = []
    for request in requests:
        status, _, body = await send_request(port, request)
        assert status == 200, body
        expected.append(parse_completions(body, request["stream"])[0])
    return expected


async def run_client(
    port: int, requests: list[dict[str, Any]], expected: list[Any], deadline: float, seed: int, result: LoadResult
) -> None:
    """Run one client, which sends requests until the deadline and disconnects during one request in ten."""
    rng = random.Random(seed)
    while time.monotonic() < deadline:
        index = rng.randrange(len(requests))
        disconnect_after = rng.randrange(1, 600) if rng.random() < 0.1 else None
        start = time.monotonic()
        try:
            status, head, body = await send_request(
                port, requests[index] | ({"stream": True} if disconnect_after else {}), disconnect_after
            )
        except (OSError, asyncio.IncompleteReadError) as error:
            result.outcomes[f"lost ({type(error).__name__})"] += 1
            continue
        if disconnect_after is not None:
            result.outcomes["disconnected"] += 1
        elif status == 429:
            result.outcomes["rejected" if b"retry-after: " in head.lower() else "rejected without retry-after"] += 1
            await asyncio.sleep(0.2)
        elif status != 200:
            result.outcomes[f"status {status}"] += 1
        else:
            completions, num_tokens = parse_completions(body, requests[index]["stream"])
            result.outcomes["correct" if completions == expected[index] else "wrong"] += 1
            result.num_tokens += num_tokens
            result.latencies.append(time.monotonic() - start)
            if completions != expected[index] and len(result.mismatches) < 3:
                result.mismatches.append(f"{requests[index]}: {completions} instead of {expected[index]}")


async def run_clients(
    port: int, num_clients: int, seconds: float, requests: list[dict[str, Any]], expected: list[Any]
) -> LoadResult:
    result, deadline = LoadResult(), time.monotonic() + seconds
    await asyncio.gather(*(run_client(port, requests, expected, deadline, seed, result) for seed in range(num_clients)))
    return result


async def run_burst(port: int, count: int, requests: list[dict[str, Any]], expected: list[Any]) -> LoadResult:
    """Send `count` requests at once, more than the queue accepts."""
    result = LoadResult()

    async def send_once(index: int) -> None:
        request_index = index % len(requests)
        status, head, body = await send_request(port, requests[request_index])
        if status == 429 and b"retry-after: " in head.lower():
            result.outcomes["rejected"] += 1
        else:
            is_correct = (
                status == 200
                and parse_completions(body, requests[request_index]["stream"])[0] == expected[request_index]
            )
            result.outcomes["correct" if is_correct else f"wrong or {status}"] += 1

    await asyncio.gather(*(send_once(index) for index in range(count)))
    return result


def cpu_wait_seconds(pid: int) -> float:
    """Seconds that the main thread of a process was runnable but had no CPU."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def probe_health(port: int, server_pid: int, stop: Any, results: Any) -> None:
    """Request `/health` every 50 ms from a separate process.

    Report the latency of each response, and the seconds that the server and this process waited for a CPU.
    """
    import http.client

    latencies = []
    own_pid = os.getpid()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    while not stop.is_set():
        start, cpu_wait = time.perf_counter(), cpu_wait_seconds(server_pid) + cpu_wait_seconds(own_pid)
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        seconds = time.perf_counter() - start
        latencies.append((seconds, cpu_wait_seconds(server_pid) + cpu_wait_seconds(own_pid) - cpu_wait))
        time.sleep(0.05)
    results.put(latencies)


def resident_memory_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def run_clients_with_memory_log(
    port: int, pid: int, num_clients: int, seconds: float, requests: Any, expected: Any
) -> tuple[LoadResult, list[float]]:
    """Run the clients and record the server's memory every few seconds."""
    memory_mib: list[float] = []

    async def log_memory() -> None:
        while True:
            await asyncio.sleep(max(0.5, seconds / 12))
            memory_mib.append(resident_memory_mib(pid))

    log_task = asyncio.ensure_future(log_memory())
    result = await run_clients(port, num_clients, seconds, requests, expected)
    log_task.cancel()
    return result, memory_mib


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default="tiny-python")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    args = parser.parse_args()
    serve_args = ["--port", "0", "--dtype", "float32", "--json", "--max-num-seqs", str(args.max_num_seqs)]
    serve_args += ["--max-connections-per-address", "1024"]
    server = subprocess.Popen(
        [sys.executable, "-m", "cutaway", "serve", args.source, *serve_args], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        port = int(json.loads(server.stdout.readline())["url"].rsplit(":", 1)[1])
        requests = build_requests()
        expected = asyncio.run(expected_responses(port, requests))
        stop = multiprocessing.Event()
        health_results: Any = multiprocessing.Queue()
        prober = multiprocessing.Process(
            target=probe_health, args=(port, server.pid, stop, health_results), daemon=True
        )
        prober.start()
        result, memory_mib = asyncio.run(
            run_clients_with_memory_log(port, server.pid, args.clients, args.seconds, requests, expected)
        )
        stop.set()
        health_samples = sorted(health_results.get(timeout=30))
        health = [seconds for seconds, _ in health_samples]
        burst = asyncio.run(run_burst(port, 600, requests, expected))
        server.send_signal(signal.SIGTERM)
        code = server.wait(30)
    finally:
        server.kill()
    latencies = sorted(result.latencies)
    print(f"{args.clients} clients for {args.seconds:g} s: {dict(result.outcomes)}")
    print(f"responses: median {latencies[len(latencies) // 2]:.2f} s, maximum {latencies[-1]:.2f} s")
    tail = f"99 % within {health[int(len(health) * 0.99)] * 1e3:.1f}, maximum {health[-1] * 1e3:.1f} ms"
    print(f"/health: {len(health)} requests, median {health[len(health) // 2] * 1e3:.1f} ms, {tail}")
    slowest = [f"{seconds * 1e3:.0f} ({latencies * 1e3:.0f})" for seconds, latencies in health_samples[-5:]]
    print(f"slowest /health in ms (of these, waiting for a CPU): {', '.join(slowest)}")
    print(f"server memory in MiB: {[round(size) for size in memory_mib]}")
    print(f"burst of 600: {dict(burst.outcomes)}; exit code {code}")
    for line in result.mismatches:
        print(line)
    no_errors = set(result.outcomes) <= {"correct", "disconnected", "rejected"} and set(burst.outcomes) == {
        "correct",
        "rejected",
    }
    memory_is_flat = memory_mib[-1] - memory_mib[len(memory_mib) // 3] < 16
    health_is_fast = health[-1] < 0.1
    print(f"load average, {os.cpu_count()} cores: {os.getloadavg()[0]:.1f}")
    print(
        f"no errors: {no_errors}; /health < 100 ms: {health_is_fast}; memory flat: {memory_is_flat}; exit code: {code}"
    )
    return 0 if no_errors and memory_is_flat and health_is_fast and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
