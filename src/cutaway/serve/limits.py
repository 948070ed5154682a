"""Limits of the HTTP servers: sizes, counts and timeouts. Sizes and counts are checked before processing a request."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits on requests and connections. Timeouts are in seconds."""

    max_body_bytes: int = 2 * 2**20
    """Maximum size of a request body."""
    body_timeout: float = 15.0
    """Maximum time for the request body to arrive."""
    header_timeout: float = 10.0
    """Maximum time for the request headers to arrive."""
    send_timeout: float = 30.0
    """Time after which a connection is closed if the client does not read the data sent to it."""
    keep_alive_timeout: int = 30
    """Time after which an idle connection is closed."""
    lingering_timeout: float = 1.0
    """Maximum time to read and discard the rest of a rejected request body, so that the client gets the error."""
    max_headers: int = 64
    """Maximum number of request headers."""
    max_header_bytes: int = 16 * 2**10
    """Maximum size of all headers and the request line."""
    max_url_bytes: int = 4096
    """Maximum length of the path and the query string."""
    max_json_depth: int = 32
    """Maximum nesting depth of arrays and objects in JSON."""
    max_json_values: int = 100_000
    """Maximum number of values in JSON, at all depths."""
    max_connections: int = 1024
    """Maximum number of open connections."""
    max_connections_per_address: int = 512
    """Maximum number of open connections of one client address, or of one IPv6 network of 64 bits.

    All clients behind a reverse proxy have the address of the proxy.
    """
    min_idle_time: float = 1.0
    """At the maximum number of connections, one that has waited this long for a request is closed for a new one."""
    max_concurrent_requests: int = 768
    """Maximum number of requests with a body that are in progress after their body has arrived."""
    max_prompt_characters: int = 1_000_000
    """Maximum number of characters in all prompts of a request."""
    max_characters_per_token: int = 64
    """A text with more characters than this × the maximum prompt length in tokens is rejected before tokenizing it."""
    max_prompt_tokens: int = 131_072
    """Maximum number of tokens of a prompt. The model's context may limit it further."""
    max_tokens: int = 32_768
    """Maximum number of tokens of a completion. The model's context may limit it further."""
    max_n: int = 16
    """Maximum number of completions per prompt (`n`)."""
    max_prompts: int = 64
    """Maximum number of prompts per request."""
    max_completions: int = 128
    """Maximum number of completions per request: prompts × n."""
    max_logprobs: int = 5
    """Maximum value of `logprobs` in /v1/completions, the number of alternatives per token."""
    max_top_logprobs: int = 20
    """Maximum value of `top_logprobs` in /v1/chat/completions, the number of alternatives per token."""
    max_prompt_logprobs: int = 1_000_000
    """Maximum number of log-probabilities of prompts in a response: tokens × (1 + alternatives) × n."""
    max_stop_strings: int = 16
    """Maximum number of stop strings."""
    max_stop_characters: int = 256
    """Maximum length of a stop string."""
    max_logit_biases: int = 1024
    """Maximum number of tokens in `logit_bias`, and of ids in `stop_token_ids`."""
    max_messages: int = 1024
    """Maximum number of messages in a chat."""
    max_content_parts: int = 4096
    """Maximum number of content parts in all messages of a chat."""
    max_embedding_inputs: int = 256
    """Maximum number of texts in an embeddings request."""
    max_embedding_tokens: int = 65_536
    """Maximum number of tokens in all texts of an embeddings request."""
    request_timeout: float = 300.0
    """Maximum time to compute and send a response, after the request was received."""
    tokenize_timeout: float = 10.0
    """Maximum time to tokenize the prompts of a request. Rendering a chat template has a separate, shorter limit."""
    max_waiting_requests: int = 256
    """Maximum number of completions in the waiting queue. Further requests get status 429."""
    max_preprocessing_requests: int = 256
    """Maximum number of requests that wait for tokenization or embedding."""
    retry_after_seconds: int = 1
    """Value of the Retry-After header of status 429."""
    shutdown_timeout: float = 5.0
    """Time that requests in progress have to finish at shutdown."""
