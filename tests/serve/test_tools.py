"""Tools through the OpenAI client: prompts, parsed and streamed calls, and calls constrained by their schemas."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
import torch
from support.chat_templates import QWEN_TOOL_ROLE, QWEN_TOOLS
from support.config_strategies import build_randomized_model
from support.generation import InMemoryCheckpoint, decoder_config
from support.scripted_model import scripted_checkpoint
from support.server import RunningServer, load_tiny_python, start_server

from cutaway.generate import generate
from cutaway.serve.openai.protocol import ChatCompletionRequest
from cutaway.serve.openai.tools import find_tool_use, tool_grammar
from cutaway.tokenizer import byte_tokenizer
from cutaway.tokenizer.chat.tool_calls import ParsedText, ToolCallParser

pytestmark = pytest.mark.unchecked
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Köln"]}, "when": {"$ref": "#/$defs/day"}},
    "required": ["city", "when"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 0, "maximum": 6}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "ping"}},
]
HERMES_TEMPLATE = (
    QWEN_TOOLS
    + "{%- for message in messages %}{%- if message.role == 'user' %}{{- message.content }}"
    + QWEN_TOOL_ROLE
    + "{%- elif message.tool_calls %}{%- for call in message.tool_calls %}<tool_call>{{ call.function.name }}"
    + "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}{%- endif %}{%- endfor %}"
)
TEMPLATES = {
    "hermes": HERMES_TEMPLATE,
    "llama3_json": "{{ tools | tojson }}{{ messages[0].content }}{# parameters <|python_tag|> #}",
    "mistral": "[AVAILABLE_TOOLS]{{ tools | tojson }}{{ messages[0].content }}{# [TOOL_CALLS] #}",
    "mistral args": "{{ tools | tojson }}{{ messages[0].content }}{# [TOOL_CALLS] [ARGS] #}",
    "json": "{{ tools | tojson }}{{ messages[0].content }}",
    "no tools": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
}
ROME = '{"city": "Rome", "when": 1}'
SCRIPT = [
    "Rome?",
    "I look.\n",
    "<tool_call>",
    '\n{"name": "get_weather", ',
    '"arguments": {"city": ',
    '"Rome", "when": 1}',
    "}\n",
    "</tool_call>",
]


def client(running: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def scripted() -> Iterator[RunningServer]:
    checkpoint = scripted_checkpoint([SCRIPT, ["<|im_end|>\n", "Sun!"]], chat_template=HERMES_TEMPLATE)
    with start_server(checkpoint, max_model_len=1024) as running:
        yield running


def test_a_call_is_parsed_and_streamed_and_its_result_is_used(scripted: RunningServer) -> None:
    chat: dict[str, Any] = {"model": "tiny", "temperature": 0, "tools": TOOLS}
    messages: list[Any] = [{"role": "user", "content": "Rome?"}]
    (choice,) = client(scripted).chat.completions.create(**chat, messages=messages).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", ROME)
    stream = client(scripted).chat.completions.create(**chat, messages=messages, stream=True)
    deltas = [chunk.choices[0] for chunk in stream]
    assert deltas[-1].finish_reason == "tool_calls"
    assert "".join(delta.delta.content or "" for delta in deltas) == "I look."
    parts = [part for delta in deltas for part in delta.delta.tool_calls or []]
    assert [part.function.name for part in parts if part.function and part.function.name] == ["get_weather"]
    assert "".join(part.function.arguments or "" for part in parts if part.function) == ROME
    assert [index for index, part in enumerate(parts) if part.id] == [0]
    assert (
        "tool_calls"
        not in client(scripted)
        .chat.completions.create(**{**chat, "tool_choice": "none"}, messages=messages)
        .choices[0]
        .message.to_dict()
    )


def test_responses_have_function_calls(scripted: RunningServer) -> None:
    tools: list[Any] = [{"type": "function", **tool["function"], "strict": None} for tool in TOOLS]
    request: dict[str, Any] = {"model": "tiny", "temperature": 0, "tools": tools, "store": False}
    response = client(scripted).responses.create(**request, input="Rome?")
    message, call = response.output
    assert (response.output_text, message.type) == ("I look.", "message")
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("get_weather", ROME, "completed")
    with client(scripted).responses.stream(**request, input="Rome?") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta") == ROME
    streamed = final.output[1]
    assert streamed.type == "function_call"
    assert (final.output_text, streamed.name, streamed.arguments) == ("I look.", call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items: list[Any] = [{"role": "user", "content": "Rome?"}, *(item.to_dict() for item in response.output), result]
    answer = client(scripted).responses.create(**request, input=items)
    assert answer.output_text == "Sun!"
    with pytest.raises(openai.BadRequestError, match="not in tools"):
        client(scripted).responses.create(**request, input="x", tool_choice={"type": "function", "name": "rm"})


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("markers_are_special", [False, True])
@pytest.mark.parametrize("choice", ["required", "named", "strict"])
def test_constrained_calls_match_their_schemas(name: str, markers_are_special: bool, choice: str) -> None:
    """A random model, which would never write a call by itself, writes calls that match, in every format."""
    markers = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")
    tokenizer = byte_tokenizer(special_tokens=("<|endoftext|>", *(markers if markers_are_special else ())))
    tokenizer.chat_template = TEMPLATES[name]
    tools = json.loads(json.dumps(TOOLS))
    tools[0]["function"]["strict"] = choice == "strict"
    named = {"type": "function", "function": {"name": "get_weather"}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": tools,
        "parallel_tool_calls": choice != "required",  # a random model would write as many as it may
        "tool_choice": {"named": named, "required": "required", "strict": "auto"}[choice],
    }
    request = ChatCompletionRequest.model_validate(body)
    tool_use = find_tool_use(request, tokenizer)
    assert tool_use is not None
    grammar = tool_grammar(request, tool_use)
    assert grammar is not None
    model = build_randomized_model(decoder_config(vocab_size=tokenizer.vocab_size), torch.float32)
    checkpoint = InMemoryCheckpoint(model, {"eos_token_id": tokenizer.eos_token_id}, tokenizer=tokenizer)
    bias = {tokenizer.token_to_id(char): 20.0 for char in "<["} if choice == "strict" else {}
    special = dict.fromkeys(tool_use.special_tokens, 40.0) if choice == "strict" else {}
    completions = generate(
        checkpoint, "x", grammar=grammar, max_new_tokens=300, temperature=1.0, seed=0, n=3, logit_bias=bias | special
    )
    num_calls = 0
    for completion in completions:
        if completion.finish_reason != "stop":
            continue
        texts = [
            tool_use.special_tokens.get(token) or tokenizer.decode([token]).replace("\ufffd", "")
            for token in completion.tokens
        ]
        text = "".join(texts) if markers_are_special else completion.text or ""
        parser = ToolCallParser(tool_use.call_format, tool_use.names)
        parsed: ParsedText = parser.feed(text) + parser.finish()
        calls: dict[int, list[str]] = {}
        for delta in parsed.tool_calls:
            calls.setdefault(delta.index, [delta.name or "", ""])[1] += delta.arguments
        assert calls or choice == "strict"
        assert choice != "named" or [call[0] for call in calls.values()] == ["get_weather"]
        for called, arguments in calls.values():
            if called == "get_weather" and "K" not in arguments:  # bytes of ö were dropped above
                jsonschema.validate(json.loads(arguments), PARAMETERS)
        num_calls += len(calls)
    assert num_calls or choice == "strict"


def test_strict_tools_leave_text_free() -> None:
    checkpoint = load_tiny_python()
    checkpoint.tokenizer.chat_template = HERMES_TEMPLATE
    body = {"messages": [{"role": "user", "content": "x"}], "tools": json.loads(json.dumps(TOOLS))}
    body["tools"][0]["function"]["strict"] = True
    request = ChatCompletionRequest.model_validate(body)
    tool_use = find_tool_use(request, checkpoint.tokenizer)
    assert tool_use is not None
    grammar = tool_grammar(request, tool_use)
    (free,), (strict,) = (
        generate(checkpoint, "def add(", max_new_tokens=40, **options) for options in ({}, {"grammar": grammar})
    )
    assert free.tokens == strict.tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [*TOOLS, TOOLS[1]]}, "two functions of the same name"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}}, "not in tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "exclude each other"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}],
             "tool_choice": "required"},
            "grammar cannot be used",
        ),
        ({"tools": TOOLS * 65}, "tools"),
    ],
)  # fmt: skip
def test_unusable_tools_are_bad_requests(scripted: RunningServer, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client(scripted).chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Rome?"}], extra_body=fields
        )


def test_arguments_that_are_not_json_are_refused(scripted: RunningServer) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "ping", "arguments": "{"}}
    messages: list[Any] = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(openai.BadRequestError, match="are not JSON"):
        client(scripted).chat.completions.create(model="tiny", messages=messages)


def test_tool_messages_reach_the_template(scripted: RunningServer) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": ROME}}
    messages: list[Any] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    tokenizer = scripted.serving.get_tokenizer()
    reference = [{**messages[1], "tool_calls": [{"function": {"name": "get_weather", "arguments": json.loads(ROME)}}]}]
    expected = tokenizer.render_chat([messages[0], *reference, messages[2]], tools=TOOLS)
    assert '<tool_call>get_weather{"city": "Rome", "when": 1}</tool_call>' in expected
    response = scripted.request(
        "POST", "/tokenize", json.dumps({"messages": messages}), {"Content-Type": "application/json"}
    )
    assert response[0] == 200
    assert torch.tensor(json.loads(response[2])["tokens"]).numel()
