"""Request models of the OpenAI API, with strict types.

Unsupported fields that would change the result are rejected. Other unknown fields are ignored.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from cutaway.serve.errors import APIError
from cutaway.serve.limits import Limits

# Lists are bounded by the default limits.
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
TokenIds = Annotated[list[TokenId], Field(max_length=Limits.max_prompt_tokens)]
MAX_INPUTS = max(Limits.max_prompts, Limits.max_embedding_inputs)
PromptInput = (
    str
    | Annotated[list[str], Field(max_length=MAX_INPUTS)]
    | TokenIds
    | Annotated[list[TokenIds], Field(max_length=MAX_INPUTS)]
)


def _check_logit_bias_length(value: object) -> object:
    """Raise if there are too many entries. `max_length` alone is checked after the entries."""
    if isinstance(value, dict) and len(value) > Limits.max_logit_biases:
        raise ValueError(f"there are more than {Limits.max_logit_biases} tokens; send fewer")
    return value


LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=Limits.max_logit_biases),
    BeforeValidator(_check_logit_bias_length),
]
UNSUPPORTED_FIELDS = {
    "audio", "chat_template", "chat_template_kwargs", "dimensions", "documents", "echo", "function_call", "functions",
    "grammar", "guided_json", "guided_regex", "modalities", "reasoning_effort", "response_format", "suffix",
    "tool_choice", "tools", "verbosity", "web_search_options",
}  # fmt: skip
"""Unsupported fields that would change the result."""
NO_OP_VALUES: tuple[object, ...] = (None, False, [], {})
NO_OP_VALUES_BY_FIELD: dict[str, tuple[object, ...]] = {
    "function_call": ("none",),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
}
"""Unsupported field → values that are accepted, because they have no effect."""


def _set_fail_fast(schema: object) -> None:
    """Set `fail_fast` in all schemas of lists and tuples that are part of a schema."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple"):
            schema["fail_fast"] = True
        for part in schema.values():
            _set_fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _set_fail_fast(part)


class FailFastModel(BaseModel):
    """Base class of requests and their parts: the validation of a list stops at the first invalid item.

    Formatting an error for each of 100,000 items would take seconds.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _set_fail_fast(schema)
        return schema


class OpenAIBaseModel(FailFastModel):
    """Base class of all requests. Unknown fields are collected in `model_extra`, to be rejected or ignored."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    model: str | None = None

    def check_unsupported_fields(self) -> None:
        """Raise if an unsupported field would change the result."""
        extra = self.model_extra or {}
        for name in sorted(UNSUPPORTED_FIELDS & extra.keys()):
            if extra[name] not in (*NO_OP_VALUES, *NO_OP_VALUES_BY_FIELD.get(name, ())):
                message = f"{name} is not supported by this server; leave it out"
                raise APIError(400, message, param=name, code="unsupported_parameter")


class StreamOptions(FailFastModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class GenerationRequest(OpenAIBaseModel):
    """Sampling and stopping parameters shared by completions and chat completions."""

    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    stop: str | Annotated[list[str], Field(max_length=Limits.max_stop_strings)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    # These fields are not in the OpenAI API. They are named as in vLLM.
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=Limits.max_logit_biases)] | None = None
    ignore_eos: bool | None = None


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: PromptInput
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None


class ContentPartText(FailFastModel):
    """Content part of a message. Only text is supported."""

    model_config = ConfigDict(strict=True)
    type: Literal["text"]
    text: str


class ChatMessage(FailFastModel):
    """Message of a chat."""

    model_config = ConfigDict(strict=True, extra="ignore")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPartText], Field(max_length=Limits.max_content_parts)] | None = None
    name: str | None = None


def _check_num_parts(value: object) -> object:
    """Raise if the messages have too many content parts in total, before creating an object for each."""
    messages = value if isinstance(value, list) else []
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    if sum(len(content) for content in contents if isinstance(content, list)) > Limits.max_content_parts:
        raise ValueError(f"there are more than {Limits.max_content_parts} content parts; join them")
    return value


ChatMessages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=Limits.max_messages),
    BeforeValidator(_check_num_parts),
]


class ChatCompletionRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: ChatMessages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None


class EmbeddingRequest(OpenAIBaseModel):
    """Body of /v1/embeddings."""

    input: PromptInput
    encoding_format: Literal["float", "base64"] | None = None


class ClassificationRequest(OpenAIBaseModel):
    """Body of /classify."""

    input: PromptInput


class TokenizeRequest(OpenAIBaseModel):
    """Body of /tokenize."""

    prompt: str | None = None
    messages: ChatMessages | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(OpenAIBaseModel):
    """Body of /detokenize."""

    tokens: TokenIds
