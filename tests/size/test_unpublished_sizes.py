"""Models without a published size: estimates are shown with their sources, and nothing is computed from them."""

import re
from pathlib import Path

import pytest
from support.cli_runner import CliRunner

import cutaway as ct
from cutaway.errors import MAX_MESSAGE_CHARS, InputError
from cutaway.size.unpublished_sizes import (
    UnpublishedSize,
    _normalize_name,
    check_size_is_published,
    find_unpublished_size,
    list_unpublished_sizes,
)

pytestmark = pytest.mark.unchecked
MODELS = {model.name: model for model in list_unpublished_sizes()}


@pytest.mark.parametrize(
    "arguments", [("gpt-4",), ("gpt-4", "--json"), ("llama-3-8b", "GPT 4"), ("gpt-4", "--fit", "80GB")]
)
def test_size_of_gpt_4_is_an_error_with_the_estimates(run_cli: CliRunner, arguments: tuple[str, ...]) -> None:
    message = run_cli("size", *arguments, code=2)
    assert "the size of GPT-4 is not published by OpenAI" in message
    assert "unconfirmed estimates: about 1.76T parameters, 8 experts" in message
    assert "about 1.8T parameters, 280B active, 120 layers, 16 experts" in message
    for estimate in MODELS["gpt-4"].estimates:
        assert estimate.url in message


@pytest.mark.parametrize("name", MODELS)
def test_size_raises_with_every_estimate(name: str) -> None:
    model = MODELS[name]
    for source in (name, model.title, model.title.upper(), *model.aliases):
        with pytest.raises(InputError, match=re.escape(model.title)) as error:
            ct.size(source)
        assert all(str(estimate) in str(error.value) for estimate in model.estimates)
        assert len(str(error.value)) < MAX_MESSAGE_CHARS


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_entries_are_complete(model: UnpublishedSize) -> None:
    assert re.fullmatch(r"20\d\d-[01]\d", model.released)
    assert re.fullmatch(r"20\d\d-[01]\d", model.checked)
    assert model.estimates
    for estimate in model.estimates:
        assert 1e9 <= estimate.parameters <= 1e13
        assert estimate.active is None or estimate.active < estimate.parameters
        assert model.released <= estimate.date <= model.checked
        assert estimate.url.startswith("https://")
        assert estimate.source
        assert estimate.basis in ("report", "press report", "throughput", "secondary")


def test_names_are_unique_and_not_names_of_presets() -> None:
    names = [{_normalize_name(name) for name in (model.name, model.title, *model.aliases)} for model in MODELS.values()]
    assert len(set().union(*names)) == sum(map(len, names))
    presets = {_normalize_name(name) for name in ct.presets()}
    assert not presets & set().union(*names)


def test_published_models_and_files_are_not_affected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (*ct.presets(), Path("gpt-4"), {"form": "decoder"}, ""):
        check_size_is_published(source)
    monkeypatch.chdir(tmp_path)
    Path("gpt-4").mkdir()
    Path("gpt-4/config.json").write_text(ct.config("tiny-gpt").model_dump_json(), encoding="utf-8")
    assert find_unpublished_size("gpt-4") is not None
    assert ct.size("gpt-4").num_parameters == ct.size("tiny-gpt").num_parameters
