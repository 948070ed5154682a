"""Request of /v1/responses, and its conversion to a request of /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cutaway.serve.errors import APIError
from cutaway.serve.limits import Limits
from cutaway.serve.openai.protocol import ChatCompletionRequest, FunctionDefinition, OpenAIBaseModel

Model = TypeVar("Model", bound=BaseModel)
LOGPROBS_INCLUDE = "message.output_text.logprobs"
"""Entry of `include` that adds log-probabilities to the output."""
STATE_FIELDS = {
    "background": "this server keeps no responses, so it cannot compute one in the background; send stream: true",
    "conversation": "this server keeps no conversations; send the earlier items in input",
    "previous_response_id": "this server keeps no responses; send the earlier items in input",
    "prompt": "this server has no stored prompts; send the text in instructions and input",
    "store": "this server keeps no responses; send store: false, and the earlier items in the next input",
}
"""Field that needs state on the server → what to do instead."""
CHAT_FIELDS = {
    "echo", "logprobs", "max_completion_tokens", "max_tokens", "messages", "n", "prompt_logprobs", "stream_options",
}  # fmt: skip
"""Fields of chat completions that this route has under other names, or not at all."""


class InputText(BaseModel):
    """Part of the content of an input message. Only text is supported."""

    model_config = ConfigDict(strict=True)
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(BaseModel):
    """Message of the input, or of the output of an earlier response."""

    model_config = ConfigDict(strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(max_length=Limits.max_messages, fail_fast=True)]


class ReasoningText(BaseModel):
    """Part of a reasoning item."""

    model_config = ConfigDict(strict=True)
    text: str


class ReasoningItem(BaseModel):
    """Reasoning of an earlier response. It belongs to the message of the assistant that follows."""

    model_config = ConfigDict(strict=True)
    content: Annotated[list[ReasoningText], Field(max_length=Limits.max_messages, fail_fast=True)] | None = None


class FunctionCallItem(BaseModel):
    """Call of a tool in an earlier response."""

    model_config = ConfigDict(strict=True)
    call_id: str
    name: str
    arguments: str = "{}"


class FunctionCallOutput(BaseModel):
    """Result of a tool call."""

    model_config = ConfigDict(strict=True)
    call_id: str
    output: str | Annotated[list[InputText], Field(max_length=Limits.max_messages, fail_fast=True)]


class FunctionTool(FunctionDefinition):
    """Tool that the model may call: a function, whose fields are not nested as in chat completions."""

    type: Literal["function"]


class FunctionChoice(BaseModel):
    """Value of `tool_choice` that names the function to call."""

    model_config = ConfigDict(strict=True)
    type: Literal["function"]
    name: str


class ReasoningOptions(BaseModel):
    """Field `reasoning`."""

    model_config = ConfigDict(strict=True)
    effort: str | None = None


class TextOptions(BaseModel):
    """Field `text`."""

    model_config = ConfigDict(strict=True)
    format: dict[str, Any] | None = None


class ResponsesRequest(OpenAIBaseModel):
    """Body of /v1/responses. Sampling parameters of chat completions are accepted too, such as `seed` and `top_k`."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=Limits.max_messages, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    """Returned as it is."""
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=Limits.max_tools, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def includes_logprobs(self) -> bool:
        return LOGPROBS_INCLUDE in (self.include or ())


def to_chat_request(request: ResponsesRequest) -> ChatCompletionRequest:
    """Return the request of /v1/chat/completions that has the same answer. Raise if there is none."""
    extra = request.model_extra or {}
    for name, advice in STATE_FIELDS.items():
        if getattr(request, name, None) or extra.get(name):
            raise APIError(400, f"{name}: {advice}", param=name, code="unsupported_parameter")
    if request.truncation == "auto":
        message = "truncation 'auto' is not supported by this server; send 'disabled', and leave out early items"
        raise APIError(400, message, param="truncation", code="unsupported_parameter")
    for name in CHAT_FIELDS & extra.keys():
        raise APIError(400, f"{name} is not a field of /v1/responses; leave it out", param=name)
    body = {
        **extra,
        "model": request.model,
        "messages": to_messages(request),
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": request.stream,
        "logprobs": request.includes_logprobs or None,
        "top_logprobs": (request.top_logprobs or 0) if request.includes_logprobs else None,
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "response_format": to_response_format(request.text),
        "tools": [to_chat_tool(tool) for tool in request.tools or ()] or None,
        "tool_choice": to_chat_tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
    }
    chat = _validate(ChatCompletionRequest, body, ())
    chat.check_unsupported_fields()
    return chat


def to_response_format(text: TextOptions | None) -> dict[str, Any] | None:
    """Return `text.format` as the `response_format` of chat completions, where a JSON schema is one level deeper."""
    if text is None or text.format is None or text.format.get("type") != "json_schema":
        return None if text is None else text.format
    schema = {name: value for name, value in text.format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def to_chat_tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}


def to_chat_tool_choice(choice: str | FunctionChoice | None) -> str | dict[str, Any] | None:
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def to_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return `instructions` and the items of `input` as chat messages."""
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    reasoning: str | None = None
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        path = ("input", index)
        if kind == "reasoning":
            content = _validate(ReasoningItem, item, path).content
            reasoning = "".join(part.text for part in content or ())
        elif kind == "message":
            message = _validate(InputMessage, item, path)
            content_text = message.content
            if not isinstance(content_text, str):
                content_text = "".join(part.text for part in content_text)
            messages.append({"role": message.role, "content": content_text})
            if reasoning and message.role == "assistant":
                messages[-1]["reasoning_content"] = reasoning
            reasoning = None
        elif kind == "function_call":
            call = _validate(FunctionCallItem, item, path)
            function = {"name": call.name, "arguments": call.arguments}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
                if reasoning:
                    messages[-1]["reasoning_content"] = reasoning
                reasoning = None
            messages[-1].setdefault("tool_calls", []).append(
                {"id": call.call_id, "type": "function", "function": function}
            )
        elif kind == "function_call_output":
            result = _validate(FunctionCallOutput, item, path)
            text = result.output if isinstance(result.output, str) else "".join(part.text for part in result.output)
            messages.append({"role": "tool", "tool_call_id": result.call_id, "content": text})
        else:
            advice = "send messages, reasoning and function calls; item references need a server that keeps responses"
            raise APIError(400, f"input.{index} is an item of type '{str(kind)[:40]}'; {advice}", param="input")
    if len(messages) == (request.instructions is not None):
        raise APIError(400, "input has no message; send at least one", param="input")
    return messages


def _validate(model: type[Model], value: Mapping[str, Any], path: Sequence[str | int]) -> Model:
    """Validate a part of the request, which is at `path`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([{**each, "loc": ("body", *path, *each["loc"])} for each in errors]) from None
