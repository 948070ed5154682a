"""The command line as a person and as a machine use it."""

import json
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from cutaway import config as c
from cutaway.cli import VERBS

COMMAND = [sys.executable, "-c", "from cutaway.cli import main; main()"]
pytestmark = pytest.mark.unchecked


def cutaway(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_presets_for_people_and_machines() -> None:
    assert "llama-3-8b" in cutaway("presets")
    rows = {row["name"]: row for row in json.loads(cutaway("presets", "--json"))}
    assert rows.keys() == set(c.presets())
    gpt2 = {"form": "decoder", "layers": 12, "d_model": 768, "heads": 12, "num_parameters": 124439808}
    assert gpt2.items() <= rows["gpt2"].items()
    encoders = json.loads(cutaway("presets", "--form", "encoder", "--json"))
    assert {row["form"] for row in encoders} == {"encoder"}


def test_a_preset_is_a_file_to_start_from(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(cutaway("presets", "tiny-moe"))
    assert c.config(path) == c.config("tiny-moe")
    assert c.config(json.loads(cutaway("presets", "tiny-t5", "--json"))) == c.config("tiny-t5")
    assert "stage" in cutaway("demo", str(path))
    assert json.loads(cutaway("presets", "--schema"))["$defs"]["Rope"]


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-mla", "tiny-bert", "tiny-albert", "tiny-t5"])
def test_the_journey_and_its_proof(name: str) -> None:
    journey = json.loads(cutaway("demo", name, "--json", "--text", "naïve"))
    sites = [stage["site"] for stage in journey["stages"]]
    two = c.config(name).form == "encoder-decoder"
    assert sites[0] == ("encoder.embed" if two else "embed")
    has_head = c.config(name).head.kind == "lm"
    assert sites[-1] == ("logits" if has_head else "final_norm")
    here = "decoder.blocks.0" if two else "blocks.0"
    assert {f"{here}.{end}" for end in ("attn.in", "attn.pattern", "attn.out", "resid_mid")} <= set(sites)
    assert len(journey["top_tokens"]) == (5 if has_head else 0)
    assert sum(row["probability"] for row in journey["top_tokens"]) <= 1
    for proof in ("residual_sum_error", "pattern_row_error"):
        assert journey[proof] is None or journey[proof] < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["presets", "nope"], "cutaway: there is no preset or file named 'nope'"),
        (["demo", "lama-3-8b"], "did you mean llama-3-8b"),
        (["trace", "tiny-pyton", "import"], "did you mean tiny-python"),
        (["demo", "missing.toml"], "'missing.toml' does not exist"),
        (["demo", "--text", ""], "is empty"),
        (["presets", "--form", "middle"], "is no form"),
        (["demo", "--text", "x" * 100], "positions 0 to 63 only"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_two(arguments: list[str], message: str) -> None:
    error = cutaway(*arguments, code=2)
    assert message in error
    assert "Traceback" not in error


def test_help_has_an_example() -> None:
    for verb in ("demo", "presets"):
        assert "Example: cutaway" in cutaway(verb, "--help")


def test_help_lists_every_verb_with_its_first_sentence() -> None:
    shown = " ".join(cutaway("--help").replace("│", " ").split())
    for verb, place in VERBS.items():
        sentence = resolve_name(place).__doc__.split("\n")[0]
        assert f"{verb} {sentence}" in shown
    assert "Did you mean 'presets'" in cutaway("preset", code=2)


def modules_of(*arguments: str) -> set[str]:
    """What is imported when a verb has done its work."""
    program = "import sys; from cutaway.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", program, *arguments]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stderr.split())


def test_a_verb_imports_only_what_it_needs(tmp_path: Path) -> None:
    heavy = {"torch", "transformers", "numpy", "safetensors", "tokenizers", "huggingface_hub"}
    named = modules_of("presets", "llama-3-8b", "--json")
    assert "cutaway.config.presets" in named
    assert not named & (
        heavy | {"rich", "tomllib", "cutaway.size", "cutaway.cli.verbs.demo", "cutaway.cli.verbs.convert"}
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    read = modules_of("presets", str(path), "--json")
    assert "cutaway.families.registry" in read
    assert not read & (heavy | {"rich", "tomllib", "cutaway.size", "cutaway.config.presets.tiny"})
    helped = modules_of("--help")
    assert "cutaway.cli.verbs.convert" in helped
    assert not helped & (heavy | {"pydantic"})


def test_odd_texts_are_shown_as_they_are() -> None:
    assert '"[/]"' in cutaway("demo", "--text", "[/]")
    assert "at most 2048" in cutaway("demo", "tiny-llama", "--text", "x" * 5000, code=2)
    assert "seed is -1" in cutaway("demo", "tiny-gpt", "--seed", "-1", code=2)
    assert cutaway("--version").startswith("cutaway ")
