"""Shutdown: requests that are not finished in time end with an error in the API's format."""

import json
import threading
import time
from typing import Any

import pytest
from support.server import CHAT_TEMPLATE, byte_checkpoint, start_server, wait_until

from cutaway.serve.limits import Limits

pytestmark = pytest.mark.unchecked
HEADERS = {"Content-Type": "application/json"}
LONG = {"max_tokens": 100, "ignore_eos": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "a", **LONG}),
    "streamed completion": ("/v1/completions", {"prompt": "a", "stream": True, **LONG}),
    "streamed chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True, **LONG}),
    "embedding": ("/v1/embeddings", {"input": "a"}),
}


def test_requests_that_outlast_the_shutdown_timeout_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    responses: dict[str, tuple[int, dict[str, str], bytes]] = {}
    release = threading.Event()
    with start_server(
        byte_checkpoint("tiny-llama", chat_template=CHAT_TEMPLATE), limits=Limits(shutdown_timeout=0)
    ) as server:
        step = server.engine.step

        def step_slowly() -> bool:
            time.sleep(0.05)
            return step()

        monkeypatch.setattr(server.engine, "step", step_slowly)
        monkeypatch.setattr("cutaway.serve.openai.api_server.compute_embeddings", lambda *_: release.wait(60))

        def send(name: str) -> None:
            path, body = REQUESTS[name]
            responses[name] = server.request("POST", path, json.dumps(body), HEADERS)

        threads = [threading.Thread(target=send, args=(name,)) for name in REQUESTS]
        for thread in threads:
            thread.start()
        assert wait_until(lambda: len(server.engine.scheduler.running) == 3 and server.serving.num_preprocessing == 1)
        assert wait_until(lambda: all(len(request.output.tokens) > 2 for request in server.engine.scheduler.running))
    release.set()
    for thread in threads:
        thread.join()
    for name, (status, headers, body) in responses.items():
        if not name.startswith("streamed"):
            assert status == 503
            assert headers["retry-after"] == "1"
            assert headers["connection"] == "close"
            error = json.loads(body)["error"]
        else:
            *chunks, last, done = body.removesuffix(b"\n\n").split(b"\n\n")
            assert status == 200
            assert chunks
            assert done == b"data: [DONE]"
            error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["code"] == "shutting_down"
        assert error["type"] == "server_error"
        assert "send it again" in error["message"]
    assert responses.keys() == REQUESTS.keys()
