"""Map OpenAI requests to token-id prompts and SamplingParams. Limits are checked before tokenizing."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from cutaway.errors import InputError
from cutaway.generate import SamplingParams
from cutaway.generate.structured_output.constraint import JSON_OBJECT_SCHEMA
from cutaway.serve.errors import APIError
from cutaway.serve.limits import Limits
from cutaway.serve.openai.fill_in_the_middle import build_fim_encoder, fim_stop_token_ids
from cutaway.serve.openai.prompt_output import PromptOutput
from cutaway.serve.openai.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
    PromptInput,
    StructuredOutputs,
    ToolCall,
)
from cutaway.serve.openai.reasoning import chat_template_kwargs, without_thinking
from cutaway.serve.openai.serving_engine import ServingEngine
from cutaway.serve.openai.tools import ToolUse, find_tool_use, template_arguments, tool_grammar

DEFAULT_COMPLETION_TOKENS = 16
"""Default max_tokens of /v1/completions, as in the OpenAI API."""
SAMPLING_FIELDS = (
    "n", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids",
    "ignore_eos",
)  # fmt: skip
"""Request fields that are also fields of `SamplingParams`, with the same meaning and default."""
TOKEN_ID_PATTERN = re.compile(r"[0-9]{1,10}")


def check_limit(name: str, value: int | None, limit: int, unit: str = "") -> None:
    if value is not None and value > limit:
        raise APIError(400, f"{name} is more than {limit}{unit}; reduce it", param=name)


def _to_sampling_params(
    request: GenerationRequest,
    limits: Limits,
    *,
    logprobs: int | None,
    max_new_tokens: int | None = None,
    echo: bool = False,
) -> SamplingParams:
    """Build SamplingParams with the defaults of the OpenAI API, which differ from the defaults of `generate`."""
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    check_limit("n", request.n, limits.max_n)
    check_limit("max_tokens", request.max_tokens, limits.max_tokens)
    check_limit("min_tokens", request.min_tokens, limits.max_tokens)
    check_limit("prompt_logprobs", request.prompt_logprobs, limits.max_top_logprobs)
    if request.prompt_logprobs is not None and request.stream:
        message = "prompt_logprobs is not in the events of a stream; send stream: false"
        raise APIError(400, message, param="prompt_logprobs")
    counts = [count for count in (request.prompt_logprobs, logprobs if echo else None) if count is not None]
    check_limit("stop", len(stop), limits.max_stop_strings, " strings")
    check_limit("stop", max(map(len, stop), default=0), limits.max_stop_characters, " characters long")
    check_limit("stop_token_ids", len(request.stop_token_ids or ()), limits.max_logit_biases, " ids")
    check_limit("logit_bias", len(request.logit_bias or {}), limits.max_logit_biases, " tokens")
    if any(TOKEN_ID_PATTERN.fullmatch(key) is None for key in request.logit_bias or {}):
        message = "logit_bias has a key that is not a token id; use ids as keys, such as {'50256': -100}"
        raise APIError(400, message, param="logit_bias")
    params = {name: getattr(request, name) for name in SAMPLING_FIELDS} | {
        "max_new_tokens": max_new_tokens or request.max_tokens,
        "min_new_tokens": request.min_tokens,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": None if request.top_p == 1 else request.top_p,
        "logit_bias": {int(key): bias for key, bias in (request.logit_bias or {}).items()},
        "stop": stop,
        "seed": None if request.seed is None else request.seed % 2**63,
        "logprobs": logprobs,
        "prompt_logprobs": max(counts, default=None),
    }
    params |= _constraint_params(request)
    try:
        return SamplingParams(**{name: value for name, value in params.items() if value is not None})
    except InputError as error:
        name = str(error).split(maxsplit=1)[0]
        raise APIError(400, str(error), param=name if name in params else None) from None


def _constraint_params(request: GenerationRequest) -> dict[str, object]:
    """Fields of `SamplingParams` for the response format and for the fields of vLLM. Raise if there are several."""
    response_format, structured = request.response_format, request.structured_outputs or StructuredOutputs()
    given: list[tuple[str, str, object]] = [
        ("guided_json", "schema", request.guided_json),
        ("guided_regex", "regex", request.guided_regex),
        ("guided_choice", "choice", request.guided_choice),
        ("guided_grammar", "grammar", request.guided_grammar),
        ("structured_outputs", "schema", structured.json_),
        ("structured_outputs", "schema", JSON_OBJECT_SCHEMA if structured.json_object else None),
        ("structured_outputs", "regex", structured.regex),
        ("structured_outputs", "choice", structured.choice),
        ("structured_outputs", "grammar", structured.grammar),
    ]
    if response_format is not None and response_format.type == "json_object":
        given.append(("response_format", "schema", JSON_OBJECT_SCHEMA))
    elif response_format is not None and response_format.type == "json_schema":
        schema = response_format.json_schema and response_format.json_schema.schema_
        if schema is None:
            message = "response_format has no json_schema.schema; add the JSON schema of the answer"
            raise APIError(400, message, param="response_format")
        given.append(("response_format", "schema", schema))
    given = [entry for entry in given if entry[2] is not None]
    if len(given) > 1:
        names = " and ".join(dict.fromkeys(name for name, *_ in given))
        raise APIError(400, f"{names} set more than one format of the completion; set one", param=given[1][0])
    return {field: value for _, field, value in given}


def map_completion_request(
    request: CompletionRequest, serving: ServingEngine
) -> tuple[Callable[[], list[list[int]]], SamplingParams]:
    """Return a function that tokenizes the prompts (to be run in a thread), and the sampling parameters."""
    limits = serving.limits
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise APIError(400, "best_of other than n is not supported by this server; leave it out", param="best_of")
    check_limit("logprobs", request.logprobs, limits.max_logprobs)
    check_echo(request, serving)
    max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else max(1, request.max_tokens)
    params = _to_sampling_params(
        request, limits, logprobs=request.logprobs, max_new_tokens=max_tokens, echo=bool(request.echo)
    )
    prompts = as_prompt_list(request.prompt, "prompt", limits.max_prompts)
    check_limit("prompt", len(prompts) * params.n, limits.max_completions, " completions (prompts × n)")
    if not request.suffix:
        encode_prompts = build_prompt_encoder(prompts, serving, "prompt")
        return limit_prompt_logprobs(encode_prompts, params, limits), params
    if request.echo:
        raise APIError(400, "echo and suffix are both set; leave one of them out", param="suffix")
    encode_prompts = build_fim_encoder(prompts, request.suffix, serving)
    stop_token_ids = [*params.stop_token_ids, *fim_stop_token_ids(serving.get_tokenizer())]
    return limit_prompt_logprobs(encode_prompts, params, limits), replace(params, stop_token_ids=stop_token_ids)


def check_echo(request: CompletionRequest, serving: ServingEngine) -> None:
    """Raise if the request asks for its prompt in a form that the model does not have."""
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        message = "max_tokens is 0, so that the response is empty; set echo or prompt_logprobs, or at least 1 token"
        raise APIError(400, message, param="max_tokens")
    if request.echo and serving.is_encoder_decoder:
        message = (
            "echo is not possible: the prompt is the source of an encoder, not the start of the text; leave it out"
        )
        raise APIError(400, message, param="echo")


def build_prompt_output(
    request: GenerationRequest, params: SamplingParams, serving: ServingEngine
) -> PromptOutput | None:
    """Return what the response has of its prompts: the text (echo), log-probabilities; None if neither is asked for."""
    prompts: list[str | list[int]] = [""]
    echo = False
    if isinstance(request, CompletionRequest):
        prompts = as_prompt_list(request.prompt, "prompt", serving.limits.max_prompts)
        echo = bool(request.echo)
    if not echo and request.prompt_logprobs is None:
        return None
    return PromptOutput(
        prompts=prompts,
        n=params.n,
        tokenizer=serving.tokenizer,
        token_decoder=serving.token_decoder,
        echo=echo,
        num_logprobs=params.logprobs,
        num_prompt_logprobs=request.prompt_logprobs,
        without_completion=request.max_tokens == 0,
    )


def map_chat_request(
    request: ChatCompletionRequest, serving: ServingEngine
) -> tuple[Callable[[], list[list[int]]], SamplingParams, ToolUse | None]:
    """Return a function that tokenizes the chat (to be run in a thread), the sampling parameters and the tools."""
    limits = serving.limits
    if request.top_logprobs is not None and not request.logprobs:
        raise APIError(400, "top_logprobs requires logprobs: true; set it, or leave both out", param="top_logprobs")
    check_limit("top_logprobs", request.top_logprobs, limits.max_top_logprobs)
    check_limit("max_completion_tokens", request.max_completion_tokens, limits.max_tokens)
    if request.max_completion_tokens is not None and request.max_tokens not in (None, request.max_completion_tokens):
        raise APIError(400, "max_tokens and max_completion_tokens differ; pass one of them", param="max_tokens")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    params = _to_sampling_params(request, limits, logprobs=logprobs, max_new_tokens=request.max_completion_tokens)
    template_kwargs = chat_template_kwargs(request, serving.tokenizer)
    tool_use = find_tool_use(request, serving.tokenizer)
    grammar = None if tool_use is None else tool_grammar(request, tool_use)
    if grammar is not None:
        if params.constraint is not None:
            message = "tool_choice, or a strict tool, and a format of the completion exclude each other; set one"
            raise APIError(400, message, param="tool_choice")
        params = replace(params, grammar=grammar)
    if params.constraint is not None:
        template_kwargs = without_thinking(template_kwargs, serving.tokenizer)
    encode_prompts = build_chat_encoder(request.messages, serving, template_kwargs, tool_use)
    return limit_prompt_logprobs(encode_prompts, params, limits), params, tool_use


def limit_prompt_logprobs(
    encode_prompts: Callable[[], list[list[int]]], params: SamplingParams, limits: Limits
) -> Callable[[], list[list[int]]]:
    """Return `encode_prompts`, which raises if the log-probabilities of the prompts take too much memory."""
    if params.prompt_logprobs is None:
        return encode_prompts
    values_per_token = (1 + params.prompt_logprobs) * params.n

    def encode_and_check() -> list[list[int]]:
        rows = encode_prompts()
        if sum(map(len, rows)) * values_per_token > limits.max_prompt_logprobs:
            limit = limits.max_prompt_logprobs
            message = (
                f"the prompts have more than {limit} log-probabilities (tokens × (1 + alternatives) × n); send fewer"
                " prompts at a time, or ask for fewer alternatives"
            )
            raise APIError(400, message, param="prompt")
        return rows

    return encode_and_check


def as_prompt_list(prompts: PromptInput, param: str, limit: int) -> list[str | list[int]]:
    """Normalize a text, a list of texts, token ids or lists of token ids to a list of prompts.

    Raise if the list is empty or has more than `limit` prompts.
    """
    is_single = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
    prompt_list = cast("list[str | list[int]]", [prompts] if is_single else prompts)  # mypy cannot split the union
    if not prompt_list:
        raise APIError(400, f"{param} is empty; pass at least one text", param=param)
    check_limit(param, len(prompt_list), limit, " texts")
    return prompt_list


def build_prompt_encoder(
    prompts: list[str | list[int]], serving: ServingEngine, param: str
) -> Callable[[], list[list[int]]]:
    """Return a function that tokenizes the prompts. Lengths are checked before tokenizing."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    serving.check_text_length(texts, param)
    for prompt in prompts:
        if not isinstance(prompt, str):
            serving.check_prompt_length(len(prompt))
    if texts:
        serving.get_tokenizer()  # raise before the request waits for a thread

    def encode(prompt: str | list[int]) -> list[int]:
        return serving.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt

    return lambda: [encode(prompt) for prompt in prompts]


def build_chat_encoder(
    messages: list[ChatMessage],
    serving: ServingEngine,
    template_kwargs: Mapping[str, Any] | None = None,
    tool_use: ToolUse | None = None,
) -> Callable[[], list[list[int]]]:
    """Return a function that applies the chat template and tokenizes the result."""
    tokenizer = serving.get_tokenizer()
    if tokenizer.chat_template is None:
        message = "this model has no chat template, so it has no chat format; use /v1/completions"
        raise APIError(400, message, code="no_chat_template")
    check_limit("messages", len(messages), serving.limits.max_messages)
    template_messages = [_to_template_message(message) for message in messages]
    template_messages, tool_kwargs = template_arguments(template_messages, tool_use, tokenizer)
    length_text = [str(value) for message in template_messages for value in message.values()]
    serving.check_text_length(["".join([*length_text, str(tool_kwargs or "")])], "messages")
    options = {**(template_kwargs or {}), **tool_kwargs}
    return lambda: [tokenizer.encode_chat(template_messages, **options)]


def _to_template_message(message: ChatMessage) -> dict[str, Any]:
    """Convert a message for chat templates: text parts are joined, and the role `developer` becomes `system`."""
    content = message.content
    text = content if content is None or isinstance(content, str) else "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    if text is None and role != "assistant":
        raise APIError(400, f"a message of role {message.role} has no content; add content", param="messages")
    name_field = {} if message.name is None else {"name": message.name}
    reasoning = message.reasoning_content or message.reasoning
    reasoning_field = {} if reasoning is None else {"reasoning_content": reasoning}
    tool_fields: dict[str, Any] = {} if message.tool_call_id is None else {"tool_call_id": message.tool_call_id}
    if message.tool_calls:
        tool_fields["tool_calls"] = [_to_template_call(call) for call in message.tool_calls]
    return {"role": role, "content": text or "", **name_field, **reasoning_field, **tool_fields}


def _to_template_call(call: ToolCall) -> dict[str, Any]:
    """Convert a tool call for chat templates, which expect the arguments as an object and not as JSON text."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        message = f"the arguments of a call of '{call.function.name}' are not JSON; send them as JSON text"
        raise APIError(400, message, param="messages") from None
    id_field = {} if call.id is None else {"id": call.id}
    return {**id_field, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
