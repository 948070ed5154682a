"""Command line interface: presets, demo, help, errors, lazy imports."""

import json
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
from support.cli_runner import CliRunner

from cutaway import config as c
from cutaway.cli import VERBS

pytestmark = pytest.mark.unchecked


@pytest.fixture
def cutaway(run_cli: CliRunner) -> CliRunner:
    return run_cli


def test_presets_as_table_and_json(cutaway: CliRunner) -> None:
    assert "llama-3-8b" in cutaway("presets")
    rows = {row["name"]: row for row in json.loads(cutaway("presets", "--json"))}
    assert rows.keys() == set(c.presets())
    gpt2 = {"form": "decoder", "layers": 12, "d_model": 768, "heads": 12, "num_parameters": 124439808}
    assert gpt2.items() <= rows["gpt2"].items()
    encoders = json.loads(cutaway("presets", "--form", "encoder", "--json"))
    assert {row["form"] for row in encoders} == {"encoder"}


@pytest.mark.nightly
def test_printed_preset_loads_as_config(cutaway: CliRunner, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(cutaway("presets", "tiny-moe"))
    assert c.config(path) == c.config("tiny-moe")
    assert c.config(json.loads(cutaway("presets", "tiny-t5", "--json"))) == c.config("tiny-t5")
    assert "equation" in cutaway("demo", str(path))
    assert json.loads(cutaway("presets", "--schema"))["$defs"]["Rope"]


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-mla", "tiny-bert", "tiny-albert", "tiny-t5"])
def test_demo_journey_is_consistent(cutaway: CliRunner, name: str) -> None:
    journey = json.loads(cutaway("demo", name, "--json", "--text", "naïve"))
    sites = [stage["site"] for stage in journey["stages"]]
    is_encoder_decoder = c.config(name).form == "encoder-decoder"
    assert sites[0] == ("encoder.embed" if is_encoder_decoder else "embed")
    has_head = c.config(name).head.kind == "lm"
    assert sites[-1] == ("logits" if has_head else "final_norm")
    block = "decoder.blocks.0" if is_encoder_decoder else "blocks.0"
    assert {f"{block}.{suffix}" for suffix in ("attn.in", "attn.pattern", "attn.out", "resid_mid")} <= set(sites)
    assert len(journey["top_tokens"]) == (5 if has_head else 0)
    assert sum(row["probability"] for row in journey["top_tokens"]) <= 1
    for error in ("residual_sum_error", "pattern_row_error"):
        assert journey[error] is None or journey[error] < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["presets", "nope"], "cutaway: there is no preset or file named 'nope'"),
        (["demo", "lama-3-8b"], "did you mean llama-3-8b"),
        (["trace", "tiny-pyton", "import"], "did you mean tiny-python"),
        (["demo", "missing.toml"], "'missing.toml' does not exist"),
        (["demo", "--text", ""], "is empty"),
        (["presets", "--form", "middle"], "Invalid value for '--form'"),
        (["demo", "--text", "x" * 100], "positions 0 to 63 only"),
    ],
)
def test_errors_exit_with_code_two(cutaway: CliRunner, arguments: list[str], message: str) -> None:
    error = cutaway(*arguments, code=2)
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (
            ["generate", "The cat sat on the", "--max-new-tokens", "4"],
            'cutaway generate tiny-english "The cat sat on the"',
        ),
        (["trace", "The cat sat on the"], 'cutaway trace tiny-english "The cat sat on the"'),
        (["open", "It cost $5"], "cutaway open tiny-english 'It cost $5'"),
        (["serve", "The cat"], "as in cutaway serve tiny-english"),
        (["eval", "The cat", "--text", "text.txt"], "as in cutaway eval tiny-english"),
    ],
)
def test_text_in_place_of_the_model_prints_the_command(cutaway: CliRunner, arguments: list[str], command: str) -> None:
    error = cutaway(*arguments, code=2)
    assert f"'{arguments[1]}' does not exist; the first argument is the model" in error
    assert error.endswith(f"{command}\n")


def test_model_path_may_contain_spaces(cutaway: CliRunner, tmp_path: Path) -> None:
    path = tmp_path / "my models" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": "llama"}))
    assert "first argument" not in cutaway("generate", str(path.parent), "The cat", code=2)


def test_help_has_an_example(cutaway: CliRunner) -> None:
    for verb in ("demo", "presets"):
        assert "Example: cutaway" in cutaway(verb, "--help")


def test_help_lists_every_verb_with_its_summary(cutaway: CliRunner) -> None:
    help_text = " ".join(cutaway("--help").replace("│", " ").split())
    for verb, import_path in VERBS.items():
        summary = resolve_name(import_path).__doc__.split("\n")[0]
        assert f"{verb} {summary}" in help_text
    assert "Did you mean 'presets'" in cutaway("preset", code=2)


def imported_modules(*arguments: str) -> set[str]:
    """Return the modules that are imported after running a verb."""
    program = "import sys; from cutaway.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", program, *arguments]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stderr.split())


def test_verbs_import_only_what_they_need(tmp_path: Path) -> None:
    heavy = {"torch", "transformers", "numpy", "safetensors", "tokenizers", "huggingface_hub"}
    modules_of_preset = imported_modules("presets", "llama-3-8b", "--json")
    assert "cutaway.config.presets" in modules_of_preset
    assert not modules_of_preset & (
        heavy | {"rich", "tomllib", "cutaway.size", "cutaway.cli.verbs.demo", "cutaway.cli.verbs.convert"}
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    modules_of_file = imported_modules("presets", str(path), "--json")
    assert "cutaway.families.registry" in modules_of_file
    assert not modules_of_file & (heavy | {"rich", "tomllib", "cutaway.size", "cutaway.config.presets.tiny"})
    modules_of_help = imported_modules("--help")
    assert "cutaway.cli.verbs.convert" in modules_of_help
    assert not modules_of_help & (heavy | {"pydantic"})


def test_markup_long_text_and_version(cutaway: CliRunner) -> None:
    assert '"[/]"' in cutaway("demo", "--text", "[/]")
    assert "at most 2048" in cutaway("demo", "tiny-llama", "--text", "x" * 5000, code=2)
    assert "seed is -1" in cutaway("demo", "tiny-gpt", "--seed", "-1", code=2)
    assert cutaway("--version").startswith("cutaway ")


@pytest.mark.parametrize("columns", ["999999999", "²", "0"])
def test_columns_of_the_environment_are_bounded(cutaway: CliRunner, columns: str) -> None:
    lines = cutaway("--help", columns=columns).splitlines()
    assert any("Usage" in line for line in lines)
    assert max(map(len, lines)) <= 1000
