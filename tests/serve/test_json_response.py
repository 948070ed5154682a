"""JSON responses: large ones are built in a thread, with the same body as small ones."""

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.server import byte_checkpoint, start_server

from cutaway.serve import json_response as module
from cutaway.serve.json_response import encode_json, json_response

pytestmark = pytest.mark.unchecked
ITEMS = st.integers() | st.text() | st.dictionaries(st.text(), st.integers()) | st.floats(allow_nan=False, width=32)
FINITE = ITEMS.filter(lambda value: not isinstance(value, float) or abs(value) < 1e30)


@given(st.dictionaries(st.text(), st.lists(FINITE, max_size=5) | FINITE | st.none(), max_size=4), st.integers(1, 3))
def test_encoding_in_parts_equals_encoding_at_once(data: dict[str, Any], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ITEMS_PER_PART", size)
        assert encode_json(data).decode() == json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def test_nan_is_not_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_json({"data": [float("nan")]})


@pytest.mark.parametrize("num_values", [module.MAX_INLINE_VALUES, module.MAX_INLINE_VALUES + 1])
def test_large_responses_are_built_in_a_thread(num_values: int) -> None:
    threads = []

    def build() -> dict[str, object]:
        threads.append(threading.current_thread())
        return {"data": [1, "é"], "object": "list"}

    response = asyncio.run(json_response(build, num_values))
    assert response.body == '{"data":[1,"é"],"object":"list"}'.encode()
    assert response.headers["content-type"] == "application/json"
    assert (threads[0] is threading.current_thread()) == (num_values <= module.MAX_INLINE_VALUES)


def test_responses_of_a_server_do_not_depend_on_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = {
        "/v1/completions": {"prompt": ["ab", "c"], "max_tokens": 5, "temperature": 0, "logprobs": 3},
        "/v1/embeddings": {"input": "ab"},
        "/tokenize": {"prompt": "abé"},
    }
    answers: dict[str, list[Any]] = {path: [] for path in requests}
    with start_server(byte_checkpoint("tiny-llama")) as server:
        for limit in (0, 10**9):
            monkeypatch.setattr(module, "MAX_INLINE_VALUES", limit)
            for path, request in requests.items():
                headers = {"Content-Type": "application/json"}
                status, _, body = server.request("POST", path, json.dumps(request), headers)
                assert status == 200
                answer = json.loads(body)
                for choice in answer.get("choices", ()):  # log-probabilities depend on the batch by rounding
                    choice["logprobs"] = choice["logprobs"]["tokens"]
                answers[path].append({key: value for key, value in answer.items() if key not in ("id", "created")})
    for first, second in answers.values():
        assert first == second
