"""Concurrent clients: nobody is lost or mixed up, who leaves takes nothing along; `bench/serve_load.py` does more."""

import asyncio
import importlib.util
import json
import threading
from pathlib import Path
from types import ModuleType

import pytest
from support.server import RunningServer, load_tiny_python, start_server

from cutaway.serve.limits import Limits

pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "serve_load.py"
    spec = importlib.util.spec_from_file_location("bench_serve", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def healthy(server: RunningServer, stop: threading.Event, found: list[int]) -> None:
    while not stop.wait(0.02):
        found.append(server.request("GET", "/health")[0])


def test_a_crowd_gets_what_each_would_get_alone(bench: ModuleType) -> None:
    with start_server(load_tiny_python(), max_num_seqs=8, limits=Limits(max_waiting_requests=24)) as server:
        asks = [ask | {"max_tokens": min(ask["max_tokens"], 12)} for ask in bench.build_requests()[:16]]
        expected = asyncio.run(bench.expected_responses(server.port, asks))
        stop, statuses = threading.Event(), list[int]()
        watching = threading.Thread(target=healthy, args=(server, stop, statuses))
        watching.start()
        tally = asyncio.run(bench.run_clients(server.port, 24, 3, asks, expected))
        stop.set()
        watching.join()
        assert set(tally.outcomes) <= {"right", "left", "refused"}, (tally.outcomes, tally.mismatches)
        assert tally.outcomes["right"] >= 10
        assert set(statuses) == {200}
        assert server.wait_until_idle()
        crowd = asyncio.run(bench.run_burst(server.port, 64, asks, expected))
        assert set(crowd.outcomes) == {"right", "refused"}, crowd.outcomes
        assert server.wait_until_idle()
        engine = server.serving.engine
        assert engine is not None
        assert not engine.scheduler.running
        assert not engine.waiting


def test_requests_come_in_one_by_one_and_all_of_them() -> None:
    with start_server(load_tiny_python(), max_num_seqs=2) as server:

        async def ask(number: int) -> int:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            body = json.dumps({"prompt": f"{number}"}).encode()
            head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            if number % 4 == 0:  # leaves while it stands in line
                writer.close()
                return 0
            said = await reader.read()
            writer.close()
            return int(said.split(b" ", 2)[1])

        async def all_at_once() -> list[int]:
            return await asyncio.gather(*(ask(number) for number in range(200)))

        found = asyncio.run(all_at_once())
        assert found.count(200) == 150
        assert found.count(0) == 50
