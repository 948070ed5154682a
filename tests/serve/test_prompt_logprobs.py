"""`echo` with `logprobs`, and `prompt_logprobs`: equal to the forward pass, in-process scoring and transformers."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from support.nightly import nightly_except
from support.server import CHAT_TEMPLATE, RunningServer, byte_checkpoint, load_tiny_python, start_server
from transformers import AutoModelForCausalLM

import cutaway as ct
from cutaway.evaluate.loglikelihood import LoglikelihoodRequest, compute_loglikelihoods
from cutaway.model import DecoderOnly
from cutaway.serve.limits import Limits
from cutaway.serve.openai.prompt_output import PromptOutput, logprobs_by_text
from cutaway.serve.openai.token_decoder import TokenDecoder
from cutaway.tokenizer import byte_tokenizer

pytestmark = pytest.mark.unchecked
TEXTS = ["def add(a, b):\n    return", "import numpy as np", "x"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server(load_tiny_python()) as running:
        yield running


@pytest.fixture(scope="module")
def byte_server() -> Iterator[RunningServer]:
    with start_server(byte_checkpoint("tiny-llama", chat_template=CHAT_TEMPLATE)) as running:
        yield running


def complete(running: RunningServer, **fields: Any) -> Any:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=120)
    return client.completions.create(**{"model": "tiny", "temperature": 0, **fields})


def post(running: RunningServer, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    status, _, content = running.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return status, json.loads(content)


def expected_logprobs(running: RunningServer, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return running.checkpoint.model(torch.tensor([tokens]))[0].log_softmax(-1)


@pytest.mark.parametrize(
    ("max_tokens", "with_ids"),
    nightly_except([(0, False), (1, True), (5, False)], itertools.product([0, 1, 5], [False, True])),
)
def test_echo_has_the_logprobs_of_the_forward_pass(server: RunningServer, max_tokens: int, with_ids: bool) -> None:
    tokenizer = server.checkpoint.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.encode(text) for text in TEXTS]
    prompt = ids if with_ids else TEXTS
    response = complete(server, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens)
    completions = ct.generate(server.checkpoint, TEXTS, max_new_tokens=max(1, max_tokens))
    assert response.usage.completion_tokens == max_tokens * len(TEXTS)
    for choice, text, prompt_ids, completion in zip(response.choices, TEXTS, ids, completions, strict=True):
        tokens = prompt_ids + completion.tokens[:max_tokens]
        logprobs = choice.logprobs
        assert choice.text == text + (completion.text or "" if max_tokens else "")
        assert choice.finish_reason == "length"
        assert "".join(logprobs.tokens) == choice.text
        assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(len(tokens))]
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        for i, row in enumerate(expected_logprobs(server, tokens)[:-1], 1):
            assert logprobs.token_logprobs[i] == pytest.approx(float(row[tokens[i]]), abs=1e-4)
            best = max(logprobs.top_logprobs[i].values())
            assert best == pytest.approx(float(row.max()), abs=1e-4)
            # Clients compare the two for equality to find out whether a token is the most likely one.
            assert (best == logprobs.token_logprobs[i]) == (int(row.argmax()) == tokens[i])


def test_scores_equal_the_evaluation_in_process(server: RunningServer) -> None:
    tokenizer, model = server.checkpoint.tokenizer, server.checkpoint.model
    assert tokenizer is not None
    assert isinstance(model, DecoderOnly)
    requests = [LoglikelihoodRequest(ids[:2], ids[2:]) for ids in map(tokenizer.encode, TEXTS[:2])]
    prompts = [[*request.context, *request.continuation] for request in requests]
    response = complete(server, prompt=prompts, echo=True, logprobs=1, max_tokens=1)
    for choice, expected in zip(response.choices, compute_loglikelihoods(model, requests, max_length=64), strict=True):
        assert sum(choice.logprobs.token_logprobs[2:-1]) == pytest.approx(-expected.nll, abs=1e-4)


def test_logprobs_equal_transformers(byte_server: RunningServer, tmp_path: Path) -> None:
    ct.save(byte_server.checkpoint, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = list(b"a prompt of bytes")
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
    response = complete(byte_server, prompt=ids, echo=True, logprobs=0, max_tokens=0)
    wanted = [float(row[token]) for row, token in zip(expected, ids[1:], strict=False)]
    assert response.choices[0].logprobs.token_logprobs[1:] == pytest.approx(wanted, abs=1e-4)
    assert response.choices[0].logprobs.top_logprobs is None


@pytest.mark.parametrize("fields", [{"max_tokens": 4, "logprobs": 1}, {"max_tokens": 0, "logprobs": 1}, {"n": 2}])
def test_streamed_echo_equals_the_whole_response(server: RunningServer, fields: dict[str, Any]) -> None:
    request = {"prompt": TEXTS, "echo": True, "max_tokens": 3, **fields}
    whole = complete(server, **request)
    texts = [""] * len(whole.choices)
    tokens: list[list[Any]] = [[] for _ in whole.choices]
    for chunk in complete(server, stream=True, stream_options={"include_usage": True}, **request):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs:
                tokens[choice.index] += zip(
                    choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.text_offset, strict=True
                )
        usage = chunk.usage
    assert texts == [choice.text for choice in whole.choices]
    assert usage == whole.usage
    if "logprobs" in fields:
        for choice, actual in zip(whole.choices, tokens, strict=True):
            logprobs = choice.logprobs
            wanted = list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset, strict=True))
            assert [row[::2] for row in actual] == [row[::2] for row in wanted]
            assert [row[1] for row in actual[1:]] == pytest.approx([row[1] for row in wanted[1:]], abs=1e-5)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_have_the_form_of_vllm(byte_server: RunningServer, path: str) -> None:
    text = "u:hi\na:"
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": text}
    status, response = post(byte_server, path, {**prompt, "max_tokens": 1, "prompt_logprobs": 2})
    assert status == 200
    logprobs = (response if "chat" in path else response["choices"][0])["prompt_logprobs"]
    expected = expected_logprobs(byte_server, list(text.encode()))
    assert logprobs[0] is None
    assert len(logprobs) == len(text)
    for token, row, entries in zip(text.encode()[1:], expected, logprobs[1:], strict=False):
        order = row.argsort(descending=True).tolist()
        assert set(entries) == {str(token), *map(str, order[:2])}
        for other, entry in entries.items():
            assert entry["logprob"] == pytest.approx(float(row[int(other)]), abs=1e-4)
            assert entry["rank"] == 1 + order.index(int(other))
        assert entries[str(token)]["decoded_token"] == chr(token)


def output_for(prompt: str | list[int]) -> PromptOutput:
    tokenizer = byte_tokenizer(special_tokens=("<s>",))
    return PromptOutput([prompt], 1, tokenizer, TokenDecoder(tokenizer), True, 1, None, False)


def test_offsets_count_characters_of_the_text() -> None:
    """A token inside a character has the offset of the character, and a BOS that is not in the text the next one."""
    text = "a€b"
    output = output_for(text)
    assert output.tokenizer is not None
    ids = [*output.tokenizer.encode("<s>"), *output.tokenizer.encode(text)]
    assert output._text_offsets(ids, text) == [0, 0, 1, 1, 1, 2]
    assert output._text_offsets(ids, "<s>" + text) == [0, 3, 4, 4, 4, 5]


def test_tokens_with_the_same_text_keep_their_logprobs() -> None:
    assert logprobs_by_text(lambda token: "a", {7: -0.1, 8: -2.0}, 8, -2.0) == {"a": -2.0, "token_id:7": -0.1}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": 0}, "set echo"),
        ({"echo": True, "logprobs": 9}, "logprobs is more than 5"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is more than 20"),
        ({"prompt_logprobs": 1, "stream": True}, "stream: false"),
    ],
)
def test_invalid_requests(server: RunningServer, body: dict[str, Any], message: str) -> None:
    status, response = post(server, "/v1/completions", {"prompt": "a", **body})
    assert status == 400
    assert message in response["error"]["message"]


def test_number_of_log_probabilities_is_limited() -> None:
    with start_server(byte_checkpoint("tiny-llama"), limits=Limits(max_prompt_logprobs=60)) as running:
        body = {"prompt": ["x" * 10, "y" * 10], "max_tokens": 1, "echo": True}
        for fields, expected in (
            ({"logprobs": 2}, 200),
            ({"logprobs": 3}, 400),
            ({"logprobs": 2, "n": 2}, 400),
            ({}, 200),
        ):
            status, response = post(running, "/v1/completions", body | fields)
            assert status == expected
            assert status == 200 or "more than 60 log-probabilities" in response["error"]["message"]


def test_encoder_decoders_echo_no_prompt() -> None:
    with start_server(byte_checkpoint("tiny-t5")) as running:
        for body, name in (({"echo": True}, "echo"), ({"prompt_logprobs": 0}, "prompt_logprobs")):
            status, response = post(running, "/v1/completions", {"prompt": "a", **body})
            assert status == 400
            assert name in response["error"]["message"]
            assert "encoder" in response["error"]["message"]
