"""API keys of several clients: authentication, limits, allowed models, errors in the file."""

import hashlib
import json
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server import RunningServer, byte_checkpoint, start_server, wait_until

from cutaway.errors import InputError
from cutaway.serve.api_keys import ApiKey, ApiKeys, read_api_keys
from cutaway.serve.middleware import AccessPolicy

pytestmark = pytest.mark.unchecked
COMPLETION = {"prompt": "ab", "max_tokens": 4, "temperature": 0}
SECRETS = {name: f"sk-{name}-0123456789" for name in ("alice", "bob", "carol", "dave")}


class Clock:
    """A clock that tests advance."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> Iterator[RunningServer]:
    keys = [
        ApiKey(name="alice", key=SECRETS["alice"], requests_per_minute=3),
        ApiKey(name="bob", sha256=hashlib.sha256(SECRETS["bob"].encode()).hexdigest(), tokens_per_minute=10),
        ApiKey(name="carol", key=SECRETS["carol"], max_concurrent_requests=1),
        ApiKey(name="dave", key=SECRETS["dave"], models=["other"]),
    ]
    policy = AccessPolicy(api_keys=ApiKeys(keys, clock), public_paths=frozenset({"/health"}))
    with start_server(byte_checkpoint("tiny-llama"), access_policy=policy) as running:
        yield running


def complete(server: RunningServer, client: str, **changes: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {SECRETS[client]}"}
    status, response_headers, body = server.request(
        "POST", "/v1/completions", json.dumps(COMPLETION | changes), headers
    )
    return status, response_headers, json.loads(body)


def test_requests_per_minute(server: RunningServer, clock: Clock) -> None:
    for remaining in (2, 1, 0):
        status, headers, _ = complete(server, "alice")
        assert status == 200
        assert headers["x-ratelimit-limit-requests"] == "3"
        assert headers["x-ratelimit-remaining-requests"] == str(remaining)
    assert headers["x-ratelimit-reset-requests"] == "1m0s"
    status, headers, body = complete(server, "alice")
    assert (status, headers["retry-after"], body["error"]["code"]) == (429, "20", "rate_limit_exceeded")
    assert body["error"]["type"] == "rate_limit_error"
    assert body["error"]["message"] == ("the API key 'alice' has a limit of 3 requests per minute; retry after 20 s")
    assert complete(server, "carol")[0] == 200  # the limits of other keys are their own
    clock.now += 20
    assert complete(server, "alice")[0] == 200
    assert complete(server, "alice")[0] == 429


def test_tokens_per_minute_delay_the_next_request(server: RunningServer, clock: Clock) -> None:
    """A request of 22 tokens is accepted with 10 available; the next one waits until the difference has refilled."""
    status, headers, body = complete(server, "bob", max_tokens=20)
    assert (status, headers["x-ratelimit-remaining-tokens"]) == (200, "0")
    used = body["usage"]["total_tokens"]
    assert used > 10
    status, headers, _ = complete(server, "bob")
    assert (status, headers["retry-after"]) == (429, str((used - 10 + 1) * 6))
    clock.now += (used - 10 + 1) * 6
    assert complete(server, "bob")[0] == 200


def test_concurrent_requests(server: RunningServer) -> None:
    with server.paused_engine():
        first = threading.Thread(target=complete, args=(server, "carol"))
        first.start()
        usage = server_usage(server, "carol")
        assert wait_until(lambda: usage.num_active == 1)
        status, headers, body = complete(server, "carol")
        assert (status, headers["retry-after"]) == (429, "1")
        assert "limit of 1 requests at once" in body["error"]["message"]
    first.join()
    assert complete(server, "carol")[0] == 200
    assert wait_until(lambda: usage.num_active == 0)  # a response ends before its request is counted as finished


def server_usage(server: RunningServer, name: str) -> Any:
    policy = server.access_policy
    assert policy is not None
    assert policy.api_keys is not None
    return policy.api_keys.usage[name]


def test_models_of_a_key(server: RunningServer) -> None:
    status, _, body = complete(server, "dave")
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
    assert "the API key allows none of its models" in body["error"]["message"]
    headers = {"Authorization": f"Bearer {SECRETS['dave']}"}
    assert json.loads(server.request("GET", "/v1/models", None, headers)[2])["data"] == []
    assert server.request("GET", "/v1/models/tiny", None, headers)[0] == 404


def test_only_the_health_check_needs_no_key(server: RunningServer) -> None:
    assert server.request("GET", "/health")[0] == 200
    for path in ("/metrics", "/v1/models", "/openapi.json", "/health/", "/?api_key=" + SECRETS["alice"]):
        assert server.request("GET", path)[0] == 401, path
    for value in ("wrong", SECRETS["alice"][:-1], SECRETS["alice"] + "x", "", "\xe9\xff"):
        assert server.request("GET", "/v1/models", None, {"Authorization": f"Bearer {value}"})[0] == 401
    digest = hashlib.sha256(SECRETS["bob"].encode()).hexdigest()
    assert server.request("GET", "/v1/models", None, {"Authorization": f"Bearer {digest}"})[0] == 401


def test_keys_are_replaced_while_limits_stay(clock: Clock) -> None:
    keys = ApiKeys([ApiKey(name="a", key="first-key", requests_per_minute=1)], clock)
    usage = keys.find("first-key")
    assert usage is not None
    usage.start_request()
    keys.replace([ApiKey(name="a", key="second-key", requests_per_minute=1), ApiKey(name="b", key="third-key")])
    assert keys.find("first-key") is None
    assert keys.find("second-key") is usage
    assert keys.find("third-key") is not None
    keys.replace([ApiKey(name="a", key="second-key", requests_per_minute=5)])
    changed = keys.find("second-key")
    assert changed is not None
    changed.start_request()  # the new limit applies


def write(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path


def test_read_keys(tmp_path: Path) -> None:
    text = """
        [[keys]]
        name = "alice"
        key = "sk-alice-secret"
        requests_per_minute = 60
        tokens_per_minute = 100_000
        max_concurrent_requests = 4
        models = ["tiny", "sql"]

        [[keys]]
        name = "prometheus"
        sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
        models = []
    """
    alice, prometheus = read_api_keys(write(tmp_path / "keys.toml", text))
    assert alice.digest == hashlib.sha256(b"sk-alice-secret").digest()
    assert alice.allows_model("sql")
    assert not alice.allows_model("other")
    assert prometheus.digest == hashlib.sha256(b"test").digest()
    assert "secret" not in repr(alice)
    assert "9f86" not in repr(prometheus)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "keys: Field required"),
        ("keys = [", "is not TOML"),
        ('[[keys]]\nname = "a"\nkey = "sk-secret"\nlimit = 5', "keys.0.limit: Extra inputs"),
        ('[[keys]]\nname = "a"\nkey = "sk secret"', "keys.0.key: String should match"),
        ('[[keys]]\nname = "a\\nb"\nkey = "sk-secret"', "keys.0.name: String should match"),
        ('[[keys]]\nname = "a"\nkey = "sk-secret"\nrequests_per_minute = 0', "greater than or equal to 1"),
        ('[[keys]]\nname = "a"\nkey = "sk-secret"\nrequests_per_minute = "5"', "valid integer"),
        ('[[keys]]\nname = "a"', "'a' needs either 'key' or 'sha256'"),
        ('[[keys]]\nname = "a"\nkey = "sk-secret"\n[[keys]]\nname = "a"\nkey = "sk-other-secret"', "has the name of"),
        ('[[keys]]\nname = "a"\nkey = "sk-secret"\n[[keys]]\nname = "b"\nkey = "sk-secret"', "has the key of"),
    ],
)  # fmt: skip
def test_invalid_files_are_refused_without_showing_keys(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        read_api_keys(write(tmp_path / "keys.toml", text))
    assert message in str(error.value)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)
