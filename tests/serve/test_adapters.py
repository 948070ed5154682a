"""Adapters in the server: listed, selected by the field `model`, in one batch, also for embeddings."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runner import CliRunner
from support.server import RunningServer, byte_checkpoint, start_server

import cutaway as ct
from cutaway.cli.options import parse_adapters
from cutaway.errors import InputError
from cutaway.model.adapters.adapter_methods import BASE_ADAPTER

pytestmark = pytest.mark.unchecked
NAMES = {"tiny": BASE_ADAPTER, "sql": "sql", "chat-2": "chat-2"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    checkpoint = byte_checkpoint("tiny-llama")
    generator = torch.Generator().manual_seed(0)
    for name in ("sql", "chat-2"):
        checkpoint.model.add_adapter({"rank": 4}, name, seed=0)
        for key, parameter in checkpoint.model.named_parameters():
            if f".adapters.{name}.lora" in key:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    checkpoint.model.set_adapter(None).requires_grad_(False)
    with start_server(checkpoint, adapters=("sql", "chat-2")) as running:
        yield running


def post(server: RunningServer, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    status, _, data = server.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return status, json.loads(data)


def test_models_route_lists_the_adapters(server: RunningServer) -> None:
    status, _, data = server.request("GET", "/v1/models")
    cards = json.loads(data)["data"]
    assert status == 200
    assert [card["id"] for card in cards] == list(NAMES)
    assert [card.get("parent") for card in cards] == [None, "tiny", "tiny"]
    status, _, data = server.request("GET", "/v1/models/sql")
    assert (status, json.loads(data)["id"]) == (200, "sql")


def test_requests_of_different_adapters_equal_generate(server: RunningServer) -> None:
    """Twelve requests at once: each has the completion of its adapter, and the name of the request."""
    names = list(NAMES) * 4
    expected = {
        name: ct.generate(server.checkpoint, "Once upon", adapter=adapter, max_new_tokens=12, temperature=0.0)[0].text
        for name, adapter in NAMES.items()
    }
    assert len(set(expected.values())) == 3
    body = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0}
    with ThreadPoolExecutor(len(names)) as pool:
        results = list(pool.map(lambda name: post(server, "/v1/completions", body | {"model": name}), names))
    for name, (status, data) in zip(names, results, strict=True):
        assert (status, data["model"], data["choices"][0]["text"]) == (200, name, expected[name])


def test_embeddings_of_an_adapter(server: RunningServer) -> None:
    vectors = {}
    for name in NAMES:
        status, data = post(server, "/v1/embeddings", {"model": name, "input": "Once upon"})
        assert (status, data["model"]) == (200, name)
        vectors[name] = torch.tensor(data["data"][0]["embedding"])
    model = server.checkpoint.model
    tokens = torch.tensor([server.serving.get_tokenizer().encode("Once upon")])
    for name, adapter in NAMES.items():
        with torch.no_grad(), model.use_adapters([None if adapter == BASE_ADAPTER else adapter]):
            expected = torch.nn.functional.normalize(model.hidden_states(tokens).mean(1), dim=-1)[0]  # type: ignore[operator]
        torch.testing.assert_close(vectors[name], expected, atol=1e-5, rtol=1e-4)
    assert float((vectors["sql"] - vectors["tiny"]).abs().max()) > 1e-3


def test_unknown_adapter_is_refused(server: RunningServer) -> None:
    status, data = post(server, "/v1/completions", {"model": "other", "prompt": "x"})
    assert status == 404
    assert data["error"]["message"] == "the model does not exist on this server; use tiny or sql or chat-2"


def test_options() -> None:
    assert parse_adapters(["sql=runs/sql", "chat=a=b"]) == {"sql": "runs/sql", "chat": "a=b"}
    for values, message in ((["runs/sql"], "not NAME=DIR; write it as"), (["a=b", "a=c"], "'a' twice; pass another")):
        with pytest.raises(InputError, match=message):
            parse_adapters(values)
    with (
        pytest.raises(InputError, match="the same name 'tiny'; rename"),
        start_server(byte_checkpoint("tiny-llama"), adapters=("tiny",)),
    ):
        pass


def test_serve_refuses_a_missing_adapter(tmp_path: Path, run_cli: CliRunner) -> None:
    message = run_cli("serve", "tiny-english", "--adapter", f"sql={tmp_path}", "--port", 0, code=2)
    assert "has no adapter_config.json; pass a directory that PEFT or cutaway wrote" in message
