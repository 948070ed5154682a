"""API keys of several clients, each with limits, from a TOML file (`--api-keys`)."""

import hashlib
import hmac
import math
import re
import time
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cutaway.bounded_files import read_text_file
from cutaway.errors import InputError
from cutaway.serve.errors import APIError

KEY_PATTERN = "[!-~]{8,512}"
"""Regular expression of an API key: it is sent in a header."""
MAX_KEYS = 10_000
Clock = Callable[[], float]


class ApiKey(BaseModel):
    """One `[[keys]]` table of the file: the key of a client, or its SHA-256 digest, and the client's limits."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
    """Name of the client in logs."""
    key: str | None = Field(None, pattern=f"^{KEY_PATTERN}$", repr=False)
    sha256: str | None = Field(None, pattern="^[0-9a-fA-F]{64}$", repr=False)
    """SHA-256 digest of the key in hexadecimal. Keys are random, so a fast hash without salt is enough."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of prompt and generated tokens per minute."""
    max_concurrent_requests: Annotated[int, Field(ge=1)] | None = None
    models: list[str] | None = None
    """Names of the models and adapters that the client may use. Default: all."""

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256) if self.sha256 is not None else key_digest(self.key or "")

    def allows_model(self, name: str) -> bool:
        return self.models is None or name in self.models


class _KeyFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)
    keys: Annotated[list[ApiKey], Field(min_length=1, max_length=MAX_KEYS)]


def key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_api_keys(path: Path) -> list[ApiKey]:
    """Read a file of API keys. Error messages contain names of fields, and no values."""
    hint = "a [[keys]] table per client, with 'name' and either 'key' or 'sha256'"
    try:
        keys = _KeyFile.model_validate(tomllib.loads(read_text_file(path, InputError))).keys
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line \d+", str(error))
        where = f" ({place[0]})" if place else ""
        raise InputError(f"'{path}' is not TOML{where}; write {hint}") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(f"'{path}': {field}: {first['msg']}; write {hint}") from None
    names, digests = set[str](), set[bytes]()
    for each in keys:
        if (each.key is None) == (each.sha256 is None):
            raise InputError(f"'{path}': '{each.name}' needs either 'key' or 'sha256'; write one of them")
        if each.name in names or each.digest in digests:
            what = "name" if each.name in names else "key"
            raise InputError(f"'{path}': '{each.name}' has the {what} of another entry; each needs its own")
        names.add(each.name)
        digests.add(each.digest)
    return keys


class TokenBucket:
    """Rate limit per minute that refills continuously: an idle client can use the amount of a minute at once."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.capacity, self.clock, self.level, self.last_refill = per_minute, clock, float(per_minute), clock()

    def available(self) -> float:
        """Amount that can be used now. It is negative if a request used more than was available."""
        now = self.clock()
        self.level = min(self.capacity, self.level + (now - self.last_refill) * self.capacity / 60)
        self.last_refill = now
        return self.level

    def take(self, amount: int) -> None:
        self.level = self.available() - amount

    def seconds_until(self, amount: float) -> float:
        """Time until `amount` is available."""
        return max(0.0, amount - self.available()) * 60 / self.capacity


class KeyUsage:
    """Use of one API key against its limits. All methods run on the event loop."""

    def __init__(self, key: ApiKey, clock: Clock = time.monotonic) -> None:
        self.key, self.clock, self.num_active = key, clock, 0
        self.requests = None if key.requests_per_minute is None else TokenBucket(key.requests_per_minute, clock)
        self.tokens = None if key.tokens_per_minute is None else TokenBucket(key.tokens_per_minute, clock)

    def start_request(self) -> None:
        """Count a request. Raise an error with status 429 and Retry-After if a limit is reached.

        The number of tokens of a request is known at its end, so a request is accepted while at least one token is
        available, and the tokens beyond the limit delay the next one.
        """
        limit = self.key.max_concurrent_requests
        if limit is not None and self.num_active >= limit:
            raise self._limit_error(f"{limit} requests at once", 1.0)
        for bucket, unit in ((self.requests, "requests"), (self.tokens, "tokens")):
            if bucket is not None and (seconds := bucket.seconds_until(1)) > 0:
                raise self._limit_error(f"{bucket.capacity} {unit} per minute", seconds)
        if self.requests is not None:
            self.requests.take(1)
        self.num_active += 1

    def end_request(self) -> None:
        self.num_active -= 1

    def add_tokens(self, count: int) -> None:
        if self.tokens is not None:
            self.tokens.take(count)

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-*` headers, as in the OpenAI API."""
        headers: dict[str, str] = {}
        for bucket, unit in ((self.requests, "requests"), (self.tokens, "tokens")):
            if bucket is not None:
                headers |= {
                    f"x-ratelimit-limit-{unit}": str(bucket.capacity),
                    f"x-ratelimit-remaining-{unit}": str(max(0, math.floor(bucket.available()))),
                    f"x-ratelimit-reset-{unit}": _format_duration(bucket.seconds_until(bucket.capacity)),
                }
        return headers

    def _limit_error(self, limit: str, seconds: float) -> APIError:
        retry_after = str(math.ceil(seconds))
        message = f"the API key '{self.key.name}' has a limit of {limit}; retry after {retry_after} s"
        headers = {"retry-after": retry_after} | self.headers()
        return APIError(429, message, code="rate_limit_exceeded", headers=headers)


def _format_duration(seconds: float) -> str:
    """A duration as in OpenAI's headers, such as 6m0s, 1.5s or 20ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


class ApiKeys:
    """The API keys of a server and their use. `replace` changes the keys of a running server."""

    def __init__(self, keys: Iterable[ApiKey], clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.usage: dict[str, KeyUsage] = {}
        """Use of each key, by the name of the key."""
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Replace all keys. The use of a key whose name and limits have not changed is kept."""
        usage = {}
        for key in keys:
            previous, limits = self.usage.get(key.name), _limits_of(key)
            usage[key.name] = KeyUsage(key, self.clock)
            if previous is not None and _limits_of(previous.key) == limits:
                previous.key, usage[key.name] = key, previous
        self.usage = usage

    def find(self, key: str) -> KeyUsage | None:
        """Return the use of a key that a client sent, or None if it is unknown.

        The digest is compared with every known one in constant time.
        """
        digest, found = key_digest(key), None
        for usage in self.usage.values():
            if hmac.compare_digest(digest, usage.key.digest):
                found = usage
        return found


def _limits_of(key: ApiKey) -> tuple[int | None, ...]:
    return key.requests_per_minute, key.tokens_per_minute, key.max_concurrent_requests
