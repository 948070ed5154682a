"""Requests of different clients take turns, and a large request does not starve a small one."""

import json
import threading
from typing import Any

import pytest
from support.server import RunningServer, load_tiny_python, start_server, wait_until

from cutaway.serve.limits import Limits

pytestmark = pytest.mark.unchecked


def complete(server: RunningServer, **fields: Any) -> tuple[int, Any]:
    body = json.dumps({"temperature": 0, "ignore_eos": True, **fields})
    status, _, answer = server.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return status, json.loads(answer)


@pytest.mark.nightly
def test_small_request_is_finished_before_a_large_one() -> None:
    """As many completions as fit in the queue, of one client; the small request has the same client."""
    with start_server(load_tiny_python(), max_num_seqs=8, limits=Limits(max_waiting_requests=160)) as server:
        expected = complete(server, prompt="def add(", max_tokens=4)
        answers: list[tuple[int, Any]] = []
        prompts = [f"x = {i}\n" for i in range(24)]
        large = threading.Thread(
            target=lambda: answers.append(complete(server, prompt=prompts, n=2, max_tokens=100, seed=1))
        )
        large.start()
        assert wait_until(lambda: len(server.engine.scheduler.running) == 6)  # three quarters of the rows
        assert complete(server, prompt="def add(", max_tokens=4)[1]["choices"] == expected[1]["choices"]
        assert not answers
        assert len(server.engine.waiting) > 24
        large.join()
        assert answers[0][0] == 200
        texts = [choice["text"] for choice in answers[0][1]["choices"]]
        assert texts[10] == complete(server, prompt=prompts[5], n=2, max_tokens=100, seed=1)[1]["choices"][0]["text"]


def test_priority_needs_the_scheduling_policy() -> None:
    with start_server(load_tiny_python(), max_num_seqs=2) as server:
        status, answer = complete(server, prompt="x", max_tokens=1, priority=-1)
        assert status == 400
        assert "scheduling_policy is 'round-robin'" in answer["error"]["message"]
        assert complete(server, prompt="x", max_tokens=1, priority=0)[0] == 200


def test_prefix_cache_metrics() -> None:
    with start_server(load_tiny_python(), max_num_seqs=2) as server:
        prompt = list(range(1, 201))
        for _ in range(2):
            assert complete(server, prompt=prompt, max_tokens=2)[0] == 200
        assert server.metric("prefix_cache_queries_total") == 400
        assert server.metric("prefix_cache_hits_total") == 192  # three pages of 64 tokens
        assert server.metric("num_preemptions_total") == 0
        assert server.metric("kv_cache_usage_ratio") == 0
