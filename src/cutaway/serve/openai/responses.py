"""Route /v1/responses: the Responses API of OpenAI for text and reasoning. The server keeps no state."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from secrets import token_hex
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from cutaway.errors import InputError
from cutaway.generate import CompletionChunk, EngineError
from cutaway.serve.openai import request_mapping
from cutaway.serve.openai.completion_stream import CompletionStream
from cutaway.serve.openai.response_builder import ResponseBuilder
from cutaway.serve.openai.responses_protocol import ResponsesRequest, to_chat_request
from cutaway.serve.openai.served_models import ServedModels
from cutaway.serve.openai.serving_engine import to_api_error
from cutaway.serve.openai.sse import SSEResponse, with_cancellation
from cutaway.tokenizer.chat.tool_calls import ToolCallDelta

Data = dict[str, Any]


def add_responses_route(router: APIRouter, models: ServedModels) -> None:
    """Add the route /v1/responses."""

    @router.post("/v1/responses", responses={200: {"content": {"application/json": {}, "text/event-stream": {}}}})
    async def responses(request: ResponsesRequest, raw_request: Request) -> Response:
        """Generate a response to a text or to a list of items, with the checkpoint's chat template."""
        serving = models.find(request.model)
        chat_request = to_chat_request(request)
        encode_prompts, params, tool_use = request_mapping.map_chat_request(chat_request, serving)
        stream = await serving.submit(
            encode_prompts, params, serving.adapter_of(request.model), priority=chat_request.priority or 0
        )
        model = request.model or serving.served_model_name
        chat_builder = ResponseBuilder(serving, model, is_chat=True, num_logprobs=params.logprobs, tool_use=tool_use)
        events = ResponseEvents(request, chat_builder)
        if request.stream:
            return SSEResponse(stream, events.stream(stream), serving.limits)
        try:
            await with_cancellation(raw_request, stream.wait_results(), serving.limits)
            response = await events.last_response(stream)
        except (EngineError, InputError) as error:
            raise to_api_error(error) from None
        finally:
            stream.abort()
        return JSONResponse(response)


@dataclass
class OutputItem:
    """Item of the output that is being generated: reasoning, a message, or a function call."""

    type: str
    """'reasoning', 'message' or 'function_call'."""
    index: int
    text: str = ""
    logprobs: list[Data] = field(default_factory=list)
    id: str = field(default_factory=lambda: token_hex(24))
    call_id: str = ""
    name: str = ""

    def part(self) -> Data:
        """The content of the item, which has one part."""
        if self.type == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def to_dict(self, status: str) -> Data:
        if self.type == "function_call":
            fields = {"call_id": self.call_id, "name": self.name, "arguments": self.text, "status": status}
            return {"type": "function_call", "id": f"fc_{self.id}", **fields}
        content = [] if status == "in_progress" else [self.part()]
        if self.type == "reasoning":
            return {"type": "reasoning", "id": f"rs_{self.id}", "summary": [], "content": content, "status": status}
        return {"type": "message", "id": f"msg_{self.id}", "role": "assistant", "content": content, "status": status}


class ResponseEvents:
    """Builds the events of a response. The last one has the whole response."""

    def __init__(self, request: ResponsesRequest, chat_builder: ResponseBuilder) -> None:
        self.request, self.builder = request, chat_builder
        self.id, self.created = f"resp_{token_hex(24)}", int(time.time())
        self.sequence_numbers = count()
        self.output: list[Data] = []
        """Completed items."""
        self.item: OutputItem | None = None
        """Item that is being generated."""
        self.num_reasoning_tokens = 0

    async def stream(self, stream: CompletionStream) -> AsyncIterator[Data]:
        """Yield the events of the response."""
        for event_type in ("response.created", "response.in_progress"):
            yield self.event(event_type, response=self.response("in_progress", stream))
        parser = self.builder.build_parser(stream.requests[0])
        pending_logprobs: list[Data] = []
        num_tokens = 0
        output = stream.requests[0].output
        async for _, chunks, _ in stream.stream_chunks():
            for chunk in chunks:
                num_tokens += len(chunk.tokens)
                is_reasoning = parser.is_in_reasoning
                reasoning, content, calls = parser.feed_chunk(chunk)
                is_reasoning |= bool(reasoning)
                self.num_reasoning_tokens += len(chunk.tokens) if is_reasoning else 0
                is_stop_token = isinstance(output.stop_reason, int) and num_tokens == len(output.tokens)
                if not is_reasoning:
                    pending_logprobs += self.logprobs(chunk, drop_last=is_stop_token and bool(chunk.tokens))
                for event in self.delta("reasoning", reasoning, []):
                    yield event
                for event in self.delta("message", content, pending_logprobs):
                    yield event
                if content:
                    pending_logprobs = []
                for event in self.call_deltas(calls):
                    yield event
        reasoning, content, calls = parser.finish()
        has_message = bool(content) or not (reasoning or calls or self.item or self.output)
        for event in self.delta("reasoning", reasoning, []):
            yield event
        for event in self.delta("message", content, pending_logprobs, always=has_message):
            yield event
        for event in self.call_deltas(calls):
            yield event
        status = "incomplete" if output.finish_reason == "length" else "completed"
        for event in self.close_item(status):
            yield event
        yield self.event(f"response.{status}", response=self.response(status, stream))

    async def last_response(self, stream: CompletionStream) -> Data:
        """The whole response, when all events are built."""
        event: Data = {}
        async for each in self.stream(stream):
            event = each
        response: Data = event["response"]
        return response

    def delta(self, item_type: str, text: str, logprobs: list[Data], *, always: bool = False) -> Iterator[Data]:
        """Events of new text. They start a new item if the text does not belong to the current one."""
        if not text and not always:
            return
        if self.item is None or self.item.type != item_type:
            yield from self.close_item("completed")
            self.item = OutputItem(item_type, len(self.output))
            yield self.event(
                "response.output_item.added", output_index=self.item.index, item=self.item.to_dict("in_progress")
            )
            yield self.part_event("response.content_part.added", part=self.item.part())
        if not text:
            return
        self.item.text += text
        self.item.logprobs += logprobs
        if item_type == "reasoning":
            yield self.part_event("response.reasoning_text.delta", delta=text)
        else:
            yield self.part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def call_deltas(self, deltas: Sequence[ToolCallDelta]) -> Iterator[Data]:
        """Events of new text of tool calls. The first one of a call starts an item."""
        for delta in deltas:
            if delta.name is not None:
                assert self.builder.tool_use is not None
                yield from self.close_item("completed")
                call_id = self.builder.tool_use.new_call_id()
                self.item = OutputItem("function_call", len(self.output), call_id=call_id, name=delta.name)
                yield self.event(
                    "response.output_item.added", output_index=self.item.index, item=self.item.to_dict("in_progress")
                )
            if delta.arguments and self.item is not None:
                self.item.text += delta.arguments
                yield self.item_event("response.function_call_arguments.delta", delta=delta.arguments)

    def close_item(self, status: str) -> Iterator[Data]:
        """Events of the end of the current item."""
        item = self.item
        if item is None:
            return
        if item.type == "function_call":
            yield self.item_event("response.function_call_arguments.done", name=item.name, arguments=item.text)
        elif item.type == "reasoning":
            yield self.part_event("response.reasoning_text.done", text=item.text)
        else:
            yield self.part_event("response.output_text.done", text=item.text, logprobs=item.logprobs)
        if item.type != "function_call":
            yield self.part_event("response.content_part.done", part=item.part())
        self.output.append(item.to_dict(status))
        yield self.event("response.output_item.done", output_index=item.index, item=self.output[-1])
        self.item = None

    def event(self, event_type: str, **fields: Any) -> Data:
        return {"type": event_type, "sequence_number": next(self.sequence_numbers), **fields}

    def item_event(self, event_type: str, **fields: Any) -> Data:
        assert self.item is not None
        item_id = self.item.to_dict("in_progress")["id"]
        return self.event(event_type, item_id=item_id, output_index=self.item.index, **fields)

    def part_event(self, event_type: str, **fields: Any) -> Data:
        return self.item_event(event_type, content_index=0, **fields)

    def logprobs(self, chunk: CompletionChunk, *, drop_last: bool) -> list[Data]:
        entries = self.builder.build_logprobs([chunk], 0, drop_last=drop_last)
        return [] if entries is None else entries["content"]  # type: ignore[return-value]

    def response(self, status: str, stream: CompletionStream) -> Data:
        """The response object, with the items that are completed."""
        request, is_done = self.request, status != "in_progress"
        effort = None if request.reasoning is None else request.reasoning.effort
        text_format = None if request.text is None else request.text.format
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if is_done else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.builder.model,
            "output": list(self.output),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": text_format or {"type": "text"}},
            "tool_choice": _to_json(request.tool_choice) or "auto",
            "tools": [_to_json(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": self.usage(stream) if is_done else None,
        }

    def usage(self, stream: CompletionStream) -> Data:
        num_input, num_output = stream.num_prompt_tokens, stream.num_generated_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": num_input + num_output,
        }


def _to_json(value: object) -> object:
    """A part of the request as it was sent."""
    return value.model_dump() if isinstance(value, BaseModel) else value
