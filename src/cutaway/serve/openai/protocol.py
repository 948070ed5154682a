"""Request models of the OpenAI API, with strict types.

Unsupported fields that would change the result are rejected. Other unknown fields are ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cutaway.serve.errors import APIError

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
PromptInput = str | list[str] | list[TokenId] | list[list[TokenId]]
UNSUPPORTED_FIELDS = {
    "audio", "chat_template", "chat_template_kwargs", "dimensions", "documents", "echo", "function_call", "functions",
    "grammar", "guided_json", "guided_regex", "modalities", "reasoning_effort", "response_format", "suffix",
    "tool_choice", "tools", "verbosity", "web_search_options",
}  # fmt: skip
"""Fields that would change the result. Requests of routes that do not have them are rejected."""
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


class OpenAIBaseModel(BaseModel):
    """Base class of all requests. Unknown fields are collected in `model_extra`, to be rejected or ignored."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    model: str | None = None

    def check_unsupported_fields(self) -> None:
        """Raise if an unsupported field would change the result."""
        for name, value in (self.model_extra or {}).items():
            no_op_values = (*NO_OP_VALUES, *NO_OP_VALUES_BY_FIELD.get(name, ()))
            if name in UNSUPPORTED_FIELDS and value not in no_op_values:
                message = f"{name} is not supported by this server; leave it out"
                raise APIError(400, message, param=name, code="unsupported_parameter")


class StreamOptions(BaseModel):
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
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    # These fields are not in the OpenAI API. They are named as in vLLM.
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: PromptInput
    suffix: str | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None


class ContentPartText(BaseModel):
    """Content part of a message. Only text is supported."""

    model_config = ConfigDict(strict=True)
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """Message of a chat."""

    model_config = ConfigDict(strict=True, extra="ignore")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPartText] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatCompletionRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


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
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(OpenAIBaseModel):
    """Body of /detokenize."""

    tokens: list[TokenId]
