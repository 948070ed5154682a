"""How much one request may ask for. Everything here is refused before memory or time is spent on it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Every number that a stranger's request meets."""

    body: int = 2 * 2**20
    """Bytes of a body."""
    body_seconds: float = 15.0
    """For a body to arrive in."""
    header_seconds: float = 10.0
    """For a request's headers to arrive in."""
    write_seconds: float = 30.0
    """That a client may leave what it is sent unread."""
    idle_seconds: int = 30
    """That a connection without a request is kept."""
    linger_seconds: float = 1.0
    """For which the rest of a refused body is read and dropped, so that the refusal arrives."""
    headers: int = 64
    """Headers of a request."""
    header_bytes: int = 16 * 2**10
    """Of all of them together, with the request's first line."""
    target: int = 4096
    """Bytes of a path and its query."""
    depth: int = 32
    """Of lists and objects in JSON."""
    elements: int = 100_000
    """Values in JSON, however deep."""
    connections: int = 1024
    """At once."""
    requests: int = 768
    """At work at once, whatever they ask for."""
    characters: int = 1_000_000
    """Of all prompts of a request."""
    characters_per_token: int = 64
    """Of a text, for each token of the context: what is longer is not read to find that it is."""
    prompt_tokens: int = 131_072
    """Of one prompt; the model's context may be less."""
    max_tokens: int = 32_768
    """Of one answer; the model's context may be less."""
    n: int = 16
    """Answers to a prompt."""
    prompts: int = 64
    """In one request."""
    answers: int = 128
    """Prompts × n of one request."""
    logprobs: int = 5
    """Alternatives beside each token of a completion."""
    top_logprobs: int = 20
    """Alternatives beside each token of a chat's answer."""
    stops: int = 16
    """Stop strings."""
    stop_characters: int = 256
    """Of one stop string."""
    biases: int = 1024
    """Tokens in logit_bias."""
    messages: int = 1024
    """Of a chat."""
    inputs: int = 256
    """Texts to embed in one request."""
    input_tokens: int = 65_536
    """Of all texts to embed in one request."""
    seconds: float = 300.0
    """For a whole request."""
    reading_seconds: float = 10.0
    """For prompts to become tokens, once it is their turn; a chat template bounds itself more tightly still."""
    waiting: int = 256
    """Answers that wait for a row; more are refused, to be asked for again."""
    encoding: int = 256
    """Requests whose texts wait to become tokens or vectors."""
    retry_after: int = 1
    """Seconds after which one who was refused because others wait may ask again."""
    grace_seconds: float = 5.0
    """For what is running when the server is told to stop."""
