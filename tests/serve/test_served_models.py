"""Several models behind one server: requests go to the named model, with the results of a server of its own."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from support.server import RunningServer, byte_checkpoint, serve_in_thread, start_server

import cutaway as ct
from cutaway.cli.server_models import assign_adapters, resolve_model_names
from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.model.adapters.adapter_methods import BASE_ADAPTER
from cutaway.serve.api_keys import ApiKey, ApiKeys
from cutaway.serve.limits import Limits
from cutaway.serve.metrics import ServerMetrics
from cutaway.serve.middleware import AccessPolicy
from cutaway.serve.openai.api_server import build_models_app
from cutaway.serve.openai.serving_engine import ServingEngine
from cutaway.serve.server import bind_socket

pytestmark = pytest.mark.unchecked
COMPLETION = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0}
KEYS = [ApiKey(name="all", key="sk-for-all"), ApiKey(name="one", key="sk-for-one", models=["gpt", "sql"])]
ADAPTER_OF = {"llama": BASE_ADAPTER, "sql": "sql", "gpt": BASE_ADAPTER}


@pytest.fixture(scope="module")
def checkpoints() -> dict[str, Checkpoint]:
    checkpoints = {name: byte_checkpoint(f"tiny-{name}") for name in ("llama", "gpt", "t5", "bert")}
    model = checkpoints["llama"].model
    model.add_adapter({"rank": 4}, "sql", seed=0)
    generator = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        if ".adapters.sql.lora" in key:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.set_adapter(None).requires_grad_(False)
    return checkpoints


@pytest.fixture(scope="module")
def server(checkpoints: dict[str, Checkpoint]) -> Iterator[RunningServer]:
    metrics, limits = ServerMetrics(), Limits()
    engines = [
        ServingEngine(
            checkpoint, name, limits, max_num_seqs=4, adapters=["sql"] if name == "llama" else [], metrics=metrics
        )
        for name, checkpoint in checkpoints.items()
    ]
    app = build_models_app(engines, metrics, access_policy=AccessPolicy(api_keys=ApiKeys(KEYS)), limits=limits)
    with serve_in_thread(app, bind_socket("127.0.0.1", 0), limits) as url:
        yield RunningServer(url, engines[0], checkpoints["llama"])


def request(server: RunningServer, path: str, body: Any = None, key: str = "sk-for-all") -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
    status, _, content = server.request(method, path, data, headers)
    return status, json.loads(content)


def test_models_are_listed(server: RunningServer) -> None:
    cards = request(server, "/v1/models")[1]["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [
        ("llama", None), ("sql", "llama"), ("gpt", None), ("t5", None), ("bert", None),
    ]  # fmt: skip
    assert [card["id"] for card in request(server, "/v1/models", key="sk-for-one")[1]["data"]] == ["sql", "gpt"]
    assert request(server, "/v1/models/sql")[1] == cards[1]


def test_completions_equal_those_of_single_model_servers(
    server: RunningServer, checkpoints: dict[str, Checkpoint]
) -> None:
    """Twenty-four requests at once to three decoders, one of them an adapter, and an encoder-decoder."""
    expected = {}
    for name in ("llama", "gpt", "t5"):
        with start_server(checkpoints[name]) as single:
            expected[name] = request(single, "/v1/completions", COMPLETION)[1]["choices"]
    with start_server(checkpoints["llama"], adapters=["sql"]) as single:
        expected["sql"] = request(single, "/v1/completions", COMPLETION | {"model": "sql"})[1]["choices"]
    assert len({choices[0]["text"] for choices in expected.values()}) == 4
    names = list(expected) * 6
    with ThreadPoolExecutor(len(names)) as pool:
        results = pool.map(lambda name: request(server, "/v1/completions", COMPLETION | {"model": name}), names)
        for name, (status, body) in zip(names, results, strict=True):
            assert (status, body["model"], body["choices"]) == (200, name, expected[name])
    assert request(server, "/v1/completions", COMPLETION)[1]["choices"] == expected["llama"]  # the first is the default


def test_embeddings_and_tokens_of_another_model(server: RunningServer, checkpoints: dict[str, Checkpoint]) -> None:
    body = {"model": "bert", "input": "Once upon"}
    with start_server(checkpoints["bert"]) as single:
        expected = request(single, "/v1/embeddings", body | {"model": "tiny"})[1]["data"]
    assert request(server, "/v1/embeddings", body)[1]["data"] == expected
    assert request(server, "/tokenize", {"model": "gpt", "prompt": "ab"})[1]["count"] == 2
    status, error = request(server, "/v1/completions", COMPLETION | {"model": "bert"})
    assert (status, "which does not generate text" in error["error"]["message"]) == (400, True)


def test_unknown_and_forbidden_models(server: RunningServer) -> None:
    for path, body in (
        ("/v1/completions", COMPLETION), ("/v1/embeddings", {"input": "a"}), ("/classify", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}),
    ):  # fmt: skip
        status, answer = request(server, path, body | {"model": "other"})
        assert (status, answer["error"]) == (404, {
            "message": "the model does not exist on this server; use llama or sql or gpt or t5 or bert",
            "type": "not_found_error", "param": "model", "code": "model_not_found",
        })  # fmt: skip
        for forbidden in ({"model": "t5"}, {}):  # without a name, the first model, which this key may not use
            status, answer = request(server, path, body | forbidden, key="sk-for-one")
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            assert answer["error"]["message"].endswith("use sql or gpt")
    assert request(server, "/v1/completions", COMPLETION | {"model": "sql"}, key="sk-for-one")[0] == 200


def test_metrics_have_the_name_of_the_model(server: RunningServer) -> None:
    before = read_metrics(server)
    request(server, "/v1/completions", COMPLETION | {"model": "gpt"})
    request(server, "/v1/completions", COMPLETION | {"model": "sql"})
    after = read_metrics(server)
    name = "cutaway_generation_tokens_total"
    difference = {model: after[name, model] - before[name, model] for model in ("llama", "gpt", "t5")}
    assert difference == {"llama": 12, "gpt": 12, "t5": 0}  # an adapter counts for its base model
    assert after["cutaway_num_requests_waiting", "t5"] == 0


def read_metrics(server: RunningServer) -> dict[tuple[str, str], float]:
    text = server.request("GET", "/metrics", None, {"Authorization": "Bearer sk-for-all"})[2].decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, sample.labels.get("model_name", "")): sample.value for sample in samples}


def test_one_failed_engine_makes_the_server_unhealthy() -> None:
    metrics, limits = ServerMetrics(), Limits()
    engines = [ServingEngine(byte_checkpoint("tiny-gpt"), name, limits, metrics=metrics) for name in ("a", "b")]
    app = build_models_app(engines, metrics)
    with serve_in_thread(app, bind_socket("127.0.0.1", 0)) as url:
        running = RunningServer(url, engines[0], byte_checkpoint("tiny-gpt"))
        assert running.request("GET", "/health")[0] == 200
        assert engines[1].engine is not None
        engines[1].engine.close()
        assert running.request("GET", "/health")[0] == 503
        status, body = request(running, "/v1/completions", COMPLETION | {"model": "a"})
        assert (status, body["model"]) == (200, "a")
    with pytest.raises(InputError, match="the same name 'a'"):
        build_models_app([engines[0], engines[0]], metrics)


def test_names() -> None:
    assert resolve_model_names(["tiny-gpt", "owner/name@main"], [], {}) == ["tiny-gpt", "owner/name"]
    assert resolve_model_names(["x", "y"], ["a", "b"], {"c": "z"}) == ["a", "b"]
    for sources, names, message in (
        (["x", "x"], [], "two models have the name 'x'"),
        (["x", "y"], ["a"], "set 1 times for 2 models"),
        (["x", "y"], ["a", "c"], "the model and an adapter have the same name 'c'"),
    ):
        with pytest.raises(InputError, match=message):
            resolve_model_names(sources, names, {"c": "z"})


def test_adapters_belong_to_the_model_that_their_config_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        ct.save(byte_checkpoint("tiny-llama"), tmp_path / name)
        checkpoint = ct.load(tmp_path / name)
        checkpoint.model.add_adapter({"rank": 2})
        ct.save_adapter(checkpoint, tmp_path / f"{name}-adapter", base=tmp_path / name)
    adapters = {"a": "second-adapter", "b": "first-adapter"}
    assert assign_adapters(adapters, ["first", "second"]) == [{"b": "first-adapter"}, {"a": "second-adapter"}]
    assert assign_adapters(adapters, ["first"]) == [adapters]
    with pytest.raises(InputError, match=r"--adapter a=second-adapter: .* not one of the served models \(first, tiny"):
        assign_adapters({"a": "second-adapter"}, ["first", "tiny-english"])
