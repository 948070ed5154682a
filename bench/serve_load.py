"""Load tests of `cutaway serve`, each in a server process of its own.

    python bench/serve_load.py
    python bench/serve_load.py memory n small --preset smollm2-135m --json result.json
    python bench/serve_load.py load --minutes 30 --share 0.8

- memory: resident memory of the server after the start and after a request.
- n: time and memory of one request with n=3, against three requests.
- small: latency of a request of 4 tokens, alone and beside one of 64 prompts × n=2 × 480 tokens.
- mixed: resident memory over N different requests, of which some are disconnected.
- load: open-loop load at a share of the measured capacity: latency, time to first token, `/health`.
- clients: closed-loop load by many clients, and a burst of requests that exceeds the queue.

In `mixed`, `load` and `clients`, every response is compared with the response to the same request without load.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import add_json_option, print_row, save_rows

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
    port: int,
    requests: list[dict[str, Any]],
    expected: list[Any],
    is_done: Callable[[], bool],
    seed: int,
    result: LoadResult,
) -> None:
    """Run one client, which sends requests until `is_done()` and disconnects during one request in ten."""
    rng = random.Random(seed)
    while not is_done():
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
    clients = (
        run_client(port, requests, expected, lambda: time.monotonic() >= deadline, seed, result)
        for seed in range(num_clients)
    )
    await asyncio.gather(*clients)
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
            result.outcomes["correct" if is_correct else "wrong" if status == 200 else f"status {status}"] += 1

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


@dataclass
class ServerProcess:
    """A running `cutaway serve`."""

    process: "subprocess.Popen[bytes]"
    port: int

    @property
    def rss(self) -> float:
        return resident_memory_mib(self.process.pid)


@contextmanager
def running_server(source: str, *options: str) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "cutaway", "serve", source, "--port", "0", "--dtype", "float32", "--json"]
    command += ["--max-connections-per-address", "1024"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        info = json.loads(process.stdout.readline())
        yield ServerProcess(process, int(info["url"].rsplit(":", 1)[1]))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


@contextmanager
def random_checkpoint(preset: str) -> Iterator[str]:
    """Directory with a model that has the shape of a preset and random weights, and no tokenizer."""
    with tempfile.TemporaryDirectory() as directory:
        program = "import sys, cutaway as ct; ct.save(ct.build(sys.argv[1], seed=0), sys.argv[2], overwrite=True)"
        subprocess.run([sys.executable, "-c", program, preset, directory], check=True)
        yield directory


@dataclass
class TimedResponse:
    """Status, completions and times of one response."""

    status: int
    completions: Any
    num_tokens: int
    seconds: float
    first_token_seconds: float
    """Time to the first event of a stream, or to the whole response."""


async def timed_request(port: int, body: dict[str, Any]) -> TimedResponse:
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        response_head = await reader.readuntil(b"\r\n\r\n")
        first = await reader.read(1)
        first_seconds = time.perf_counter() - start
        content = first + await reader.read()
        seconds = time.perf_counter() - start
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    status = int(response_head.split(b" ", 2)[1])
    content = decode_chunked(content) if b"chunked" in response_head.lower() else content
    is_stream = bool(body.get("stream"))
    completions, num_tokens = parse_completions(content, is_stream) if status == 200 else (content[:300], 0)
    return TimedResponse(status, completions, num_tokens, seconds, first_seconds if is_stream else seconds)


def token_request(rng: random.Random, length: int, **fields: Any) -> dict[str, Any]:
    """Request with a random prompt of token ids, so that no prefix is cached."""
    return {"prompt": [rng.randrange(3, 250) for _ in range(length)], "ignore_eos": True, "temperature": 1, **fields}


def percentiles(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {
        "count": len(values),
        "p50": values[len(values) // 2],
        "p99": values[min(len(values) - 1, int(len(values) * 0.99))],
        "max": values[-1],
    }


def field_name(kind: str) -> str:
    return kind.replace("=", "_").replace(" ", "_")


def measure_memory(source: str, args: argparse.Namespace) -> dict[str, Any]:
    """Resident memory in MiB after the start, and after a request of 64 tokens."""
    with running_server(source) as server:
        start = server.rss
        asyncio.run(timed_request(server.port, token_request(random.Random(0), 32, max_tokens=32)))
        return {"start_mib": start, "after_request_mib": server.rss}


def measure_n(source: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time and added memory of one request with n=3, of three requests at once and of three in sequence."""
    rng, fields = random.Random(0), {"max_tokens": args.n_tokens, "seed": 1}

    async def run(port: int, kind: str) -> float:
        body, start = token_request(rng, args.n_prompt, **fields), time.perf_counter()
        if kind == "n=3":
            responses = [await timed_request(port, body | {"n": 3})]
        elif kind == "three at once":
            others = (token_request(rng, args.n_prompt, **fields) for _ in range(3))
            responses = await asyncio.gather(*(timed_request(port, other) for other in others))
        else:
            responses = [await timed_request(port, token_request(rng, args.n_prompt, **fields)) for _ in range(3)]
        assert all(response.status == 200 for response in responses), responses
        return time.perf_counter() - start

    kinds = ("n=3", "three at once", "three in sequence")
    result: dict[str, Any] = {}
    for kind in kinds[:2]:
        with running_server(source) as server:
            asyncio.run(timed_request(server.port, token_request(rng, 4, max_tokens=2)))  # memory of the first pass
            before = server.rss
            asyncio.run(run(server.port, kind))
            result[f"{field_name(kind)}_added_mib"] = server.rss - before
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    with running_server(source) as server:
        for _ in range(args.repeats):
            for kind in kinds:  # alternating, since other programs slow the machine down at times
                times[kind].append(asyncio.run(run(server.port, kind)))
    result |= {f"{field_name(kind)}_seconds": statistics.median(times[kind]) for kind in kinds}
    for kind in kinds[1:]:
        ratios = [a / b for a, b in zip(times["n=3"], times[kind], strict=True)]
        result[f"n_3_over_{field_name(kind)}"] = statistics.median(ratios)
    return result


def measure_small(source: str, args: argparse.Namespace) -> dict[str, Any]:
    """Latency of a small request, alone and beside a large request."""
    rng, alone, beside = random.Random(0), list[float](), list[float]()

    async def small(port: int) -> float:
        response = await timed_request(port, token_request(rng, 8, max_tokens=4))
        assert response.status == 200, response
        return response.seconds

    async def run(port: int) -> None:
        await small(port)
        alone.extend([await small(port) for _ in range(args.repeats)])
        prompts = [token_request(rng, 8)["prompt"] for _ in range(64)]
        large = asyncio.ensure_future(
            timed_request(port, {"prompt": prompts, "n": 2, "max_tokens": 480, "ignore_eos": True})
        )
        await asyncio.sleep(args.delay)
        for _ in range(3 * args.repeats):
            if large.done():
                break
            beside.append(await small(port))
            await asyncio.sleep(random.random() * 0.5)
        large.cancel()
        with suppress(asyncio.CancelledError):
            await large

    with running_server(source) as server:
        asyncio.run(run(server.port))
    first, ratio = beside[0] / statistics.median(alone), statistics.median(beside) / statistics.median(alone)
    return {
        "alone_seconds": percentiles(alone),
        "beside_seconds": percentiles(beside),
        "first_ratio": first,
        "median_ratio": ratio,
    }


def measure_mixed(source: str, args: argparse.Namespace) -> dict[str, Any]:
    """Resident memory during N requests by 32 clients."""
    requests, result = build_requests(), LoadResult()
    rss: dict[str, float] = {}

    async def run(server: ServerProcess) -> None:
        expected = await expected_responses(server.port, requests)
        rss["start"] = server.rss

        def is_done() -> bool:
            done = sum(result.outcomes.values())
            for name, share in (("10 %", 0.1), ("50 %", 0.5)):
                if done >= share * args.requests:
                    rss.setdefault(name, server.rss)
            return done >= args.requests

        clients = (run_client(server.port, requests, expected, is_done, seed, result) for seed in range(32))
        await asyncio.gather(*clients)
        rss["end"] = server.rss

    with running_server(source) as server:
        asyncio.run(run(server))
    return {"outcomes": dict(result.outcomes), "rss_mib": rss, "mismatches": result.mismatches}


def measure_load(source: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the capacity with 16 clients, then send requests at random times at a share of it."""
    requests, rng = build_requests(), random.Random(1)
    outcomes: Counter[str] = Counter()
    latencies: list[float] = []
    first_tokens: list[float] = []

    async def send(port: int, index: int, expected: list[Any]) -> None:
        try:
            response = await timed_request(port, requests[index])
        except (OSError, asyncio.IncompleteReadError) as error:
            outcomes[f"lost ({type(error).__name__})"] += 1
            return
        is_correct = response.status == 200 and response.completions == expected[index]
        outcomes["correct" if is_correct else "wrong" if response.status == 200 else f"status {response.status}"] += 1
        latencies.append(response.seconds)
        if requests[index]["stream"]:
            first_tokens.append(response.first_token_seconds)

    async def run(port: int, expected: list[Any], rate: float) -> None:
        tasks, end = set(), time.monotonic() + 60 * args.minutes
        next_time = time.monotonic()
        while next_time < end:
            await asyncio.sleep(max(0.0, next_time - time.monotonic()))
            task = asyncio.ensure_future(send(port, rng.randrange(len(requests)), expected))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            next_time += rng.expovariate(rate)
        await asyncio.gather(*tasks)

    with running_server(source) as server:
        expected = asyncio.run(expected_responses(server.port, requests))
        closed = asyncio.run(run_clients(server.port, 16, args.capacity_seconds, requests, expected))
        capacity = len(closed.latencies) / args.capacity_seconds
        before = server.rss
        with health_probe(server) as health:
            asyncio.run(run(server.port, expected, args.share * capacity))
        return {
            "capacity_requests_per_second": capacity,
            "share": args.share,
            "outcomes": dict(outcomes),
            "latency_seconds": percentiles(latencies),
            "first_token_seconds": percentiles(first_tokens),
            "health_seconds": percentiles([seconds for seconds, _ in health]),
            "health_without_cpu_wait_seconds": percentiles([max(0.0, seconds - wait) for seconds, wait in health]),
            "rss_mib": {"start": before, "end": server.rss},
        }


@contextmanager
def health_probe(server: ServerProcess) -> Iterator[list[tuple[float, float]]]:
    """Run `probe_health` in a process; the list is filled with its samples at the end of the context."""
    stop = multiprocessing.Event()
    results: Any = multiprocessing.Queue()
    prober = multiprocessing.Process(target=probe_health, args=(server.port, server.process.pid, stop, results))
    prober.start()
    samples: list[tuple[float, float]] = []
    try:
        yield samples
        stop.set()
        samples.extend(sorted(results.get(timeout=60)))
        prober.join(60)
    finally:
        prober.kill()


def measure_clients(source: str, args: argparse.Namespace) -> dict[str, Any]:
    """Closed-loop load by many clients, some of which disconnect; then a burst of 600 requests at once."""
    requests = build_requests()
    with running_server(source) as server:
        expected = asyncio.run(expected_responses(server.port, requests))
        before = server.rss
        with health_probe(server) as health:
            result = asyncio.run(run_clients(server.port, args.clients, args.seconds, requests, expected))
        burst = asyncio.run(run_burst(server.port, 600, requests, expected))
        return {
            "outcomes": dict(result.outcomes),
            "mismatches": result.mismatches,
            "latency_seconds": percentiles(result.latencies),
            "health_seconds": percentiles([seconds for seconds, _ in health]),
            "rss_mib": {"start": before, "end": server.rss},
            "burst": dict(burst.outcomes),
        }


MEASUREMENTS: dict[str, Callable[[str, argparse.Namespace], dict[str, Any]]] = {
    "memory": measure_memory,
    "n": measure_n,
    "small": measure_small,
    "mixed": measure_mixed,
    "load": measure_load,
    "clients": measure_clients,
}
ALLOWED_OUTCOMES = {"correct", "disconnected", "rejected"}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measurements", nargs="*", choices=[*MEASUREMENTS, []], help="default: all")
    parser.add_argument("--source", default="tiny-python")
    parser.add_argument("--preset", help="memory, n, small: use random weights in the shape of this preset")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--n-prompt", type=int, default=200)
    parser.add_argument("--n-tokens", type=int, default=32)
    parser.add_argument("--delay", type=float, default=2.0, help="small: seconds after the start of the large request")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--capacity-seconds", type=float, default=15)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    add_json_option(parser)
    return parser


def main() -> int:
    args = build_parser().parse_args()
    rows = []
    for name in args.measurements or MEASUREMENTS:
        measure = MEASUREMENTS[name]
        if args.preset is not None and name in ("memory", "n", "small"):
            with random_checkpoint(args.preset) as source:
                result = measure(source, args)
        else:
            result = measure(args.source, args)
        rows.append(print_row({"case": name, **result, "load_average": os.getloadavg()[0]}))
    save_rows(args.json, rows)
    outcomes = {key for row in rows for key in row.get("outcomes", ())}
    return 0 if outcomes <= ALLOWED_OUTCOMES else 1


if __name__ == "__main__":
    sys.exit(main())
