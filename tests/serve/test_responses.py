"""/v1/responses with the official client: the same text as chat completions, for whole and streamed responses."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.scripted_model import scripted_checkpoint
from support.server import CHAT_TEMPLATE, RunningServer, byte_checkpoint, start_server

pytestmark = pytest.mark.unchecked
THINKING_TEMPLATE = (
    "{% for m in messages %}{% if m.reasoning_content %}{{ m.reasoning_content }}</think>{% endif %}{{ m.content }};"
    "{% endfor %}{{ '<think>\n' }}"
)
PARTS = ["<think>\n", "Rea", "son\n", "</thi", "nk>", "\n\n", "fo", "ur"]
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server(byte_checkpoint("tiny-llama", chat_template=CHAT_TEMPLATE)) as running:
        yield running


@pytest.fixture(scope="module")
def thinking_server() -> Iterator[RunningServer]:
    with start_server(scripted_checkpoint([PARTS], chat_template=THINKING_TEMPLATE)) as running:
        yield running


def client(running: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=120)


def respond(running: RunningServer, **fields: Any) -> Any:
    return client(running).responses.create(**{"model": "tiny", "max_output_tokens": 8, "temperature": 0, **fields})


def chat(running: RunningServer, messages: Any, **fields: Any) -> Any:
    fields = {"model": "tiny", "max_completion_tokens": 8, "temperature": 0, **fields}
    return client(running).chat.completions.create(messages=messages, **fields)


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"input": "hi"}, HI),
        ({"input": "hi", "instructions": "S"}, [{"role": "system", "content": "S"}, *HI]),
        (
            {
                "input": [
                    {"type": "message", "role": "developer", "content": "S"},
                    {"role": "user",
                     "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]},
                    {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
                     "content": [{"type": "output_text", "text": "yes", "annotations": []}]},
                    {"role": "user", "content": "hi"},
                ]
            },
            [{"role": "system", "content": "S"}, *HI, {"role": "assistant", "content": "yes"}, *HI],
        ),
        ({"input": "hi", "temperature": 0.8, "top_p": 0.9, "extra_body": {"seed": 3, "top_k": 9}}, HI),
    ],
)  # fmt: skip
def test_text_equals_chat_completions(server: RunningServer, fields: dict[str, Any], messages: Any) -> None:
    sampling = {name: value for name, value in fields.items() if name not in ("input", "instructions")}
    expected = chat(server, messages, **sampling)
    response = respond(server, **fields)
    assert response.output_text == expected.choices[0].message.content
    assert response.usage.input_tokens == expected.usage.prompt_tokens
    assert response.usage.output_tokens == expected.usage.completion_tokens == 8
    assert response.usage.total_tokens == expected.usage.total_tokens
    assert (response.object, response.status) == ("response", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    events = list(respond(server, **fields, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response.output_text
    assert events[-1].response.output_text == response.output_text
    assert events[-1].response.usage == response.usage


def test_answers_are_inputs_of_the_next_turn(server: RunningServer) -> None:
    first = respond(server, input=HI)
    expected = chat(server, [*HI, {"role": "assistant", "content": first.output_text}, *HI])
    second = respond(server, input=[*HI, *(item.model_dump() for item in first.output), *HI])
    assert second.output_text == expected.choices[0].message.content


def test_events_have_the_order_of_the_api(thinking_server: RunningServer) -> None:
    events = list(respond(thinking_server, input="hi", stream=True))
    types = [event.type.removeprefix("response.") for event in events]
    assert [name for i, name in enumerate(types) if types[i - 1 : i] != [name]] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for kind, text in (("reasoning_text", "Reason"), ("output_text", "four")):
        deltas = [event for event in events if event.type == f"response.{kind}.delta"]
        [done] = [event for event in events if event.type == f"response.{kind}.done"]
        assert "".join(event.delta for event in deltas) == done.text == text
        assert {event.item_id for event in deltas} == {done.item_id}
    final = events[-1].response
    assert [event.item for event in events if event.type == "response.output_item.done"] == final.output
    assert {event.response.id for event in events if hasattr(event, "response")} == {final.id}
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []


def test_stream_helper_of_the_client_collects_the_response(thinking_server: RunningServer) -> None:
    """It checks the order of the events and builds the response from the deltas."""
    with client(thinking_server).responses.stream(model="tiny", input="hi", temperature=0) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == "four"
    assert final.output[0].type == "reasoning"


def test_reasoning_is_an_item_of_the_output(thinking_server: RunningServer) -> None:
    response = respond(thinking_server, input="hi")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "Reason"
    assert (response.output_text, response.status) == ("four", "completed")
    assert response.usage.output_tokens_details.reasoning_tokens == 4
    cut = respond(thinking_server, input="hi", max_output_tokens=1)
    assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")]
    # The template writes the reasoning of earlier turns: Rea, s, o, n, </thi, nk>.
    answered = respond(thinking_server, input=[*HI, *(item.model_dump() for item in response.output), *HI])
    plain = respond(thinking_server, input=[*HI, {"role": "assistant", "content": "four"}, *HI])
    assert answered.usage.input_tokens == plain.usage.input_tokens + 6


def test_variables_of_the_chat_template(server: RunningServer) -> None:
    plain, kwargs = respond(server, input="hi"), {"chat_template_kwargs": {"enable_thinking": False}}
    assert respond(server, input="hi", extra_body=kwargs).output_text == plain.output_text  # the template has none
    with pytest.raises(openai.BadRequestError, match="sets messages"):
        respond(server, input="hi", extra_body={"chat_template_kwargs": {"messages": []}})


def test_logprobs_equal_those_of_chat_completions(server: RunningServer) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    expected = chat(server, HI, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    response = respond(server, input="hi", **fields)
    actual = response.output[0].content[0].logprobs
    assert [row.token for row in actual] == [row.token for row in expected]
    assert [row.logprob for row in actual] == pytest.approx([row.logprob for row in expected], abs=1e-5)
    assert [len(row.top_logprobs) for row in actual] == [2] * 8
    events = list(respond(server, input="hi", **fields, stream=True))
    streamed = [row.token for event in events if event.type == "response.output_text.delta" for row in event.logprobs]
    assert streamed == [row.token for row in actual]
    assert respond(server, input="hi", top_logprobs=2).output[0].content[0].logprobs == []


def post(running: RunningServer, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    status, _, content = running.request("POST", "/v1/responses", json.dumps({"input": "hi", **body}), headers)
    return status, json.loads(content)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: this server keeps no responses"),
        ({"store": True}, "store: this server keeps no responses"),
        ({"background": True}, "send stream: true"),
        ({"truncation": "auto"}, "truncation 'auto' is not supported"),
        ({"n": 2}, "n is not a field of /v1/responses"),
        ({"text": {"format": {"type": "xml"}}}, "response_format"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"reasoning": {"effort": "high"}}, "does not read it"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input has no message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0 is an item of type 'item_reference'"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input.0.role"),
        ({"temperature": -1.0}, "temperature"),
        ({"metadata": {str(i): "a" for i in range(17)}}, "metadata"),
        ({"top_k": 0}, "top_k"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs is more than 20"),
    ],
)
def test_invalid_requests(server: RunningServer, body: dict[str, Any], message: str) -> None:
    status, response = post(server, body)
    assert status == 400
    assert message in response["error"]["message"]


def test_fields_without_effect_are_accepted(server: RunningServer) -> None:
    body = {"store": False, "truncation": "disabled", "tools": [], "metadata": {"a": "b"}, "max_output_tokens": 1}
    status, response = post(server, {**body, "text": {"format": {"type": "text"}}, "include": ["other"]})
    assert status == 200
    assert response["metadata"] == {"a": "b"}
    assert response["store"] is False
