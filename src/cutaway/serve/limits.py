"""How much one request may ask for. Everything here is refused before memory or time is spent on it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Every number that a stranger's request meets."""

    max_body_bytes: int = 2 * 2**20
    """Bytes of a body."""
    body_timeout: float = 15.0
    """For a body to arrive in."""
    header_timeout: float = 10.0
    """For a request's headers to arrive in."""
    send_timeout: float = 30.0
    """That a client may leave what it is sent unread."""
    keep_alive_timeout: int = 30
    """That a connection without a request is kept."""
    lingering_timeout: float = 1.0
    """For which the rest of a refused body is read and dropped, so that the refusal arrives."""
    max_headers: int = 64
    """Headers of a request."""
    max_header_bytes: int = 16 * 2**10
    """Of all of them together, with the request's first line."""
    max_url_bytes: int = 4096
    """Bytes of a path and its query."""
    max_json_depth: int = 32
    """Of lists and objects in JSON."""
    max_json_values: int = 100_000
    """Values in JSON, however deep."""
    max_connections: int = 1024
    """At once."""
    max_concurrent_requests: int = 768
    """At work at once, whatever they ask for."""
    max_prompt_characters: int = 1_000_000
    """Of all prompts of a request."""
    max_characters_per_token: int = 64
    """Of a text, for each token of the context: what is longer is not read to find that it is."""
    max_prompt_tokens: int = 131_072
    """Of one prompt; the model's context may be less."""
    max_tokens: int = 32_768
    """Of one answer; the model's context may be less."""
    max_n: int = 16
    """Answers to a prompt."""
    max_prompts: int = 64
    """In one request."""
    max_completions: int = 128
    """Prompts × n of one request."""
    max_logprobs: int = 5
    """Alternatives beside each token of a completion."""
    max_top_logprobs: int = 20
    """Alternatives beside each token of a chat's answer."""
    max_stop_strings: int = 16
    """Stop strings."""
    max_stop_characters: int = 256
    """Of one stop string."""
    max_logit_biases: int = 1024
    """Tokens in logit_bias."""
    max_messages: int = 1024
    """Of a chat."""
    max_embedding_inputs: int = 256
    """Texts to embed in one request."""
    max_embedding_tokens: int = 65_536
    """Of all texts to embed in one request."""
    request_timeout: float = 300.0
    """For a whole request."""
    tokenize_timeout: float = 10.0
    """For prompts to become tokens, once it is their turn; a chat template bounds itself more tightly still."""
    max_waiting_requests: int = 256
    """Answers that wait for a row; more are refused, to be asked for again."""
    max_preprocessing_requests: int = 256
    """Requests whose texts wait to become tokens or vectors."""
    retry_after_seconds: int = 1
    """Seconds after which one who was refused because others wait may ask again."""
    shutdown_timeout: float = 5.0
    """For what is running when the server is told to stop."""
