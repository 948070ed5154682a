"""Concurrent clients: all get their own response, and disconnects free resources; see also `bench/serve_load.py`."""

import asyncio
import json
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
from support.benchmarks import import_benchmark
from support.server import RunningServer, load_tiny_python, start_server

from cutaway.serve.limits import Limits

pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with import_benchmark("serve_load") as module:
        yield module


def poll_health(server: RunningServer, stop: threading.Event, statuses: list[int]) -> None:
    while not stop.wait(0.02):
        statuses.append(server.request("GET", "/health")[0])


def test_concurrent_responses_equal_single_responses(bench: ModuleType) -> None:
    with start_server(load_tiny_python(), max_num_seqs=8, limits=Limits(max_waiting_requests=24)) as server:
        requests = [request | {"max_tokens": min(request["max_tokens"], 8)} for request in bench.build_requests()[:12]]
        expected = asyncio.run(bench.expected_responses(server.port, requests))
        stop, statuses = threading.Event(), list[int]()
        health_thread = threading.Thread(target=poll_health, args=(server, stop, statuses))
        health_thread.start()
        result = asyncio.run(bench.run_clients(server.port, 16, 2, requests, expected))
        stop.set()
        health_thread.join()
        assert set(result.outcomes) <= {"correct", "disconnected", "rejected"}, (result.outcomes, result.mismatches)
        assert result.outcomes["correct"] >= 10
        assert set(statuses) == {200}
        assert server.wait_until_idle()
        burst = asyncio.run(bench.run_burst(server.port, 48, requests, expected))
        assert set(burst.outcomes) == {"correct", "rejected"}, burst.outcomes
        assert server.wait_until_idle()
        engine = server.serving.engine
        assert engine is not None
        assert not engine.scheduler.running
        assert not engine.waiting


def test_throttled_requests_are_all_handled() -> None:
    with start_server(load_tiny_python(), max_num_seqs=2) as server:

        async def request(number: int) -> int:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            body = json.dumps({"prompt": f"{number}"}).encode()
            head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            if number % 4 == 0:  # disconnects while waiting in the throttle
                writer.close()
                return 0
            response = await reader.read()
            writer.close()
            return int(response.split(b" ", 2)[1])

        async def send_all() -> list[int]:
            return await asyncio.gather(*(request(number) for number in range(200)))

        statuses = asyncio.run(send_all())
        assert statuses.count(200) == 150
        assert statuses.count(0) == 50
