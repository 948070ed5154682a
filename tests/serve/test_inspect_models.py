"""The page can open another model of the list; running queries keep their model."""

import gc
import json
import threading
import weakref
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.inspector import run_query
from support.server import serve_in_thread

from cutaway.cli.verbs.open import load_catalog
from cutaway.errors import CutawayError, InputError
from cutaway.serve.app import build_app
from cutaway.serve.inspect import routes
from cutaway.serve.inspect.model_catalog import MAX_PRESET_PARAMETERS, ModelCatalog
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.server import bind_socket, build_access_policy

pytestmark = pytest.mark.unchecked


def open_catalog(source: str = "tiny-gpt", text: str | None = None) -> ModelCatalog:
    return load_catalog(source, text, "cpu", None, quiet=True)


def test_list_has_pretrained_models_and_small_presets() -> None:
    data, _ = run_query(open_catalog().current, "list_models")
    ids = [model["id"] for model in data["models"]]
    assert ids[:4] == [
        f"pretrained:{name}" for name in ("tiny-dates", "tiny-english", "tiny-english-encoder", "tiny-python")
    ]
    assert {"preset:gpt2", "preset:pythia-70m", "preset:t5-small", "preset:tiny-gemma"} <= set(ids)
    assert "preset:gpt2-xl" not in ids
    assert data["current"] == "preset:tiny-gpt"
    assert all(
        model["num_parameters"] <= MAX_PRESET_PARAMETERS for model in data["models"] if model["group"] == "preset"
    )


@pytest.mark.parametrize(
    ("model_id", "form", "is_untrained"),
    [
        ("pretrained:tiny-english-encoder", "encoder", False),
        ("pretrained:tiny-dates", "encoder-decoder", False),
        ("preset:tiny-gemma", "decoder", True),
        ("preset:tiny-t5", "encoder-decoder", True),
    ],
)
def test_open_model(model_id: str, form: str, is_untrained: bool) -> None:
    catalog = open_catalog()
    before = catalog.current
    data, _ = run_query(before, "open_model", id=model_id)
    assert data == {"id": model_id, "name": model_id.split(":")[1], "generation": 1}
    info, _ = run_query(catalog.current, "model_info")
    assert (info["form"], info["is_untrained"], info["generation"]) == (form, is_untrained, 1)
    assert info["default_text"] or info["default_source"]
    assert run_query(catalog.current, "list_models")[0]["current"] == model_id
    assert before.model is not catalog.current.model  # a query that runs on `before` is not affected


def test_previous_model_is_released() -> None:
    executor = routes.QueryExecutor(open_catalog().current)
    before = weakref.ref(executor.inspector.model)
    run_query(executor.inspector, "open_model", id="preset:tiny-gemma")
    gc.collect()
    assert before() is None
    executor.close()


def test_start_model_is_listed_and_reopened_with_its_text(tmp_path: Path) -> None:
    import cutaway as ct

    ct.save(ct.build("tiny-gpt", seed=3), tmp_path / "mine")
    catalog = open_catalog(str(tmp_path / "mine"), "abc")
    data, _ = run_query(catalog.current, "list_models")
    assert (data["models"][0]["id"], data["models"][0]["name"], data["current"]) == ("start", "mine", "start")
    run_query(catalog.current, "open_model", id="pretrained:tiny-dates")
    run_query(catalog.current, "open_model", id="start")
    assert run_query(catalog.current, "model_info")[0]["default_text"] == "abc"


def test_a_directory_named_like_a_preset_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = open_catalog()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-gemma").mkdir()
    (tmp_path / "tiny-dates").mkdir()
    run_query(catalog.current, "open_model", id="preset:tiny-gemma")
    run_query(catalog.current, "open_model", id="pretrained:tiny-dates")
    assert catalog.current.config.form == "encoder-decoder"


@pytest.mark.parametrize(
    "model_id", ["start", "gpt2", "preset:gpt2-xl", "preset:../x", "/etc/passwd", "openai-community/gpt2", ""]
)
def test_only_listed_models_are_opened(model_id: str) -> None:
    catalog = open_catalog()
    before = catalog.current
    with pytest.raises(InputError, match="not a model of the list; choose one from"):
        run_query(before, "open_model", id=model_id)
    assert catalog.current is before


def test_one_load_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = open_catalog()
    started, finish = threading.Event(), threading.Event()
    load = catalog._load

    def slow_load(entry: Any) -> Any:
        started.set()
        finish.wait(30)
        return load(entry)

    monkeypatch.setattr(catalog, "_load", slow_load)
    thread = threading.Thread(target=catalog.open, args=("preset:tiny-gemma", QueryJob()))
    thread.start()
    assert started.wait(30)
    with pytest.raises(InputError, match="another model is being loaded"):
        catalog.open("preset:tiny-llama", QueryJob())
    finish.set()
    thread.join(30)
    assert catalog.current_id == "preset:tiny-gemma"


def test_failed_load_keeps_the_open_model(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = open_catalog()
    before = catalog.current
    monkeypatch.setattr("cutaway.serve.inspect.model_catalog.free_memory", lambda device: 1000)
    with pytest.raises(CutawayError, match="GB are free; choose a smaller model"):
        catalog.open("preset:gpt2", QueryJob())
    assert (catalog.current, catalog.generation) == (before, 0)
    monkeypatch.undo()
    catalog.open("preset:tiny-gemma", QueryJob())  # the lock was released


def post(url: str, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"} | (headers or {}))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_query_of_a_page_with_another_model_is_rejected() -> None:
    executor = routes.QueryExecutor(open_catalog().current)
    app = build_app(
        [routes.build_router(executor)],
        access_policy=build_access_policy("127.0.0.1", None),
        on_shutdown=[executor.close],
    )
    with serve_in_thread(app, bind_socket("127.0.0.1", 0)) as url:
        header = {routes.GENERATION_HEADER: "0"}
        assert post(url, "/api/query/architecture", {}, header)[0] == 200
        assert post(url, "/api/query/open_model", {"id": "pretrained:tiny-dates"}, header)[0] == 200
        status, body = post(url, "/api/query/architecture", {}, header)
        assert status == 409
        assert b"reload the page" in body
        assert post(url, "/api/query/architecture", {}, {routes.GENERATION_HEADER: "1"})[0] == 200
        assert post(url, "/api/query/model_info", {})[0] == 200
