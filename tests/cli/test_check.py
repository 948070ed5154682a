"""`cutaway check`: terminal report, JSON, JUnit, factories and errors."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as Tree

import pytest
from support.cli_runner import CliRunner

import cutaway as ct
from cutaway.check import CaseResult, Finding, Report, get_checks
from cutaway.check.model_sources import shrink_config
from cutaway.check.report.junit import format_junit
from cutaway.check.report.text_file import write_atomically
from cutaway.cli.verbs.check import MAX_PARAMETERS, parse_duration
from cutaway.cli.views.check_report import skipped_by_reason
from cutaway.errors import InputError
from cutaway.size import count_parameters

pytestmark = [pytest.mark.unchecked, pytest.mark.usefixtures("frozen_check_clock")]

MODULE = """
import support.seeded_bugs.causality
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import SEEDED_BUGS

print("output of the user's module")
instance = ReferenceGPT()


def correct():
    model = ReferenceGPT()
    return model, check_kwargs(model)


def leaks():
    return SEEDED_BUGS["causality/mask off by one"].build()


def logits_only():
    model = ReferenceGPT()
    return {"logits": lambda tokens: model(tokens)[0]}


def function():
    model = ReferenceGPT()
    return lambda tokens: model(tokens)[0]


def raises():
    raise RuntimeError("the weights\\nare not there")


def nothing():
    pass


def three():
    return 1, 2, 3


def empty():
    return {"num_layers": 3}


def unknown_key():
    return ReferenceGPT(), {"lojits": 3}


def requires_argument(size):
    return ReferenceGPT()
"""


@pytest.fixture(autouse=True)
def _user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write a user module to the working directory, and unload it afterwards."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for module in ("mine", "broken"):
        sys.modules.pop(module, None)


def run_json(run_cli: CliRunner, *arguments: object, code: int = 0) -> dict:
    return json.loads(run_cli("check", *arguments, "--json", code=code))


def test_failure_report_has_location_cause_and_fix(run_cli: CliRunner) -> None:
    output = run_cli("check", "mine:leaks", code=1, columns=120)
    for expected in (
        "✗ causality",
        "the logits at position 0 change with token 1, which comes later",
        "threshold",
        "blocks.0.attention",
        "the causal mask is missing",
        "mask key j for query i",
        "cutaway check --explain causality",
        "checks failed",
    ):
        assert expected in output


def test_correct_model_has_no_failures(run_cli: CliRunner) -> None:
    output = run_cli("check", "mine:correct")
    assert "no problems found" in output
    assert "✗" not in output
    assert "✓ passed" in output
    verbose_output = run_cli("check", "mine:correct", "--only", "causality*", "--verbose", columns=100)
    assert "no logit changes with a later token" in verbose_output
    assert "seconds" in verbose_output


def test_json_is_one_object_despite_output_of_user_code(run_cli: CliRunner) -> None:
    report = run_json(run_cli, "mine:leaks", "--only", "causality-tile-edges", "--seed", 3, code=1)
    assert report["source"] == "mine:leaks"
    assert report["ok"] is False
    assert report["seed"] == 3
    [finding] = report["findings"]
    assert finding["check"] == "causality-tile-edges"
    assert finding["measured"] > finding["threshold"]
    assert report["counts"] == {"fail": 1, "inconclusive": 0, "warn": 0, "pass": 0, "skip": 0}


@pytest.mark.parametrize("name", ["instance", "logits_only", "function"])
def test_factory_may_return_a_model_a_dict_or_a_function(run_cli: CliRunner, name: str) -> None:
    report = run_json(run_cli, f"mine:{name}", "--only", "causality*")
    verdicts = {finding["check"]: finding["verdict"] for finding in report["findings"]}
    assert verdicts["causality"] == "pass"
    assert (verdicts["causality-gradient"] == "pass") == (name == "instance")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine:raises"], "raised RuntimeError: the weights … are not there; it must return a model"),
        (["mine:nothing"], "returned None"),
        (["mine:three"], "returned a tuple of (int, int, int)"),
        (["mine:empty"], "returned a dict without a model"),
        (["mine:unknown_key"], "no argument 'lojits'; did you mean logits=?"),
        (["mine:requires_argument"], "was called without arguments and raised TypeError"),
        (["mine:absent"], "'mine' has no 'absent'"),
        (["missing_module:make"], "there is no module 'missing_module'"),
        (["mine.inner:make"], "there is no module 'mine.inner'"),
        (["broken:make"], "'broken' cannot be imported: it raised ModuleNotFoundError"),
        (["mine.py:correct"], "is not module.path:factory"),
        (["./mine.py:correct"], "is not module.path:factory"),
        (["mine:correct", "--dtype", "bfloat16"], "--dtype is for checkpoints"),
        (["mine:correct", "--library", "transformers"], "--library transformers is for checkpoints"),
        (["tiny-gpt", "--library", "transformers"], "is a preset; --library transformers"),
        (["tiny-gpd"], "did you mean tiny-gpt"),
        (["./nowhere"], "does not exist"),
        (["./nowhere", "--library", "transformers"], "does not exist"),
        (["tiny-gpt", "--only", "causalty"], "there is no check 'causalty'"),
        (["tiny-gpt", "--budget", "soon"], "--budget is 'soon'"),
        (["tiny-gpt", "--budget", "0"], "--budget is '0'"),
        (["tiny-gpt", "--junit", "nowhere/report.xml"], "'nowhere' is not a directory"),
        (["tiny-gpt", "--junit", "."], "is a directory"),
        (["mine:raises", "--sarif", "nowhere/report.sarif"], "'nowhere' is not a directory"),
        (["mine:raises", "--badge", "x", "--markdown", "./x"], "--markdown and --badge both name"),
        (["mine:raises", "--baseline", "absent.json"], "the baseline 'absent.json' does not exist; create it"),
        (["mine:raises", "--baseline", "nowhere/b.json"], "the baseline 'nowhere/b.json' does not exist; create it"),
        (["mine:raises", "--baseline", "mine.py"], "is not valid JSON"),
        (["mine:raises", "--baseline", "b.json", "--sarif", "b.json"], "--sarif and --baseline both name 'b.json'"),
        (["mine:raises", "--write-baseline"], "--write-baseline needs the file to write"),
        (["tiny-gpt", "--changed"], "--changed follows the imports of module.path:factory"),
        ([], "SOURCE is missing"),
        (["--explain", "causalty"], "did you mean 'causality'"),
    ],
)
def test_errors_have_one_message(run_cli: CliRunner, arguments: list[str], message: str) -> None:
    output = run_cli("check", *arguments, code=2)
    [line] = [line for line in output.splitlines() if line.startswith("cutaway: ")]
    assert message in line
    assert "Traceback" not in output


def test_list_and_explain(run_cli: CliRunner) -> None:
    output = run_cli("check", "--list", columns=100)
    assert [check["name"] for check in json.loads(run_cli("check", "--list", "--json"))] == list(get_checks())
    for name in get_checks():
        assert name in output
        page = run_cli("check", "--explain", name, columns=100)
        assert "How it works" in page
        assert "How to fix it" in page
    assert json.loads(run_cli("check", "--explain", "causality", "--json"))["page"].startswith("# causality\n")


def test_checkpoint_preset_and_transformers_library(run_cli: CliRunner) -> None:
    cutaway_report = run_json(run_cli, "tiny-python", "--only", "causality-tile-edges")
    assert cutaway_report["properties"]["dtype"] == "torch.bfloat16"
    assert not cutaway_report["notes"]
    options = ("--library", "transformers", "--dtype", "float32")
    transformers_report = run_json(run_cli, "tiny-python", "--only", "causality-tile-edges", *options)
    assert transformers_report["properties"]["dtype"] == "torch.float32"
    assert transformers_report["model_name"] == "LlamaForCausalLM"
    assert transformers_report["properties"]["num_layers"] == cutaway_report["properties"]["num_layers"]
    assert run_json(run_cli, "tiny-gpt", "--only", "causality")["notes"] == ["random weights"]


def test_large_preset_is_checked_with_a_reduced_config(run_cli: CliRunner) -> None:
    report = run_json(run_cli, "llama-3-70b", "--only", "causality-tile-edges")
    assert report["ok"]
    assert "2 layers of d_model 256: llama-3-70b itself has 70.55B parameters" in report["notes"][1]
    for name in ct.presets():
        config = ct.config(name)
        shrunk = shrink_config(config)
        assert count_parameters(shrunk).total < min(MAX_PARAMETERS, 1 + count_parameters(config).total)
        assert shrunk.form == config.form
        for stack, shrunk_stack in zip(config.stacks.values(), shrunk.stacks.values(), strict=True):
            kinds = {(type(block.attention), type(block.ffn), block.attention.window) for block in stack.blocks}
            assert kinds == {(type(b.attention), type(b.ffn), b.attention.window) for b in shrunk_stack.blocks}, name
            for block, shrunk_block in zip(stack.blocks, shrunk_stack.blocks, strict=False):
                if hasattr(block.attention, "num_kv_heads"):
                    uses_gqa = [
                        attention.num_kv_heads < attention.heads
                        for attention in (block.attention, shrunk_block.attention)
                    ]
                    assert uses_gqa[0] == uses_gqa[1]
                    assert block.attention.head_dim(config.d_model) == shrunk_block.attention.head_dim(shrunk.d_model)


def build_report() -> Report:
    cases = [CaseResult("fail", "the first"), CaseResult("fail", "the second")]
    return Report(
        "a <model> & \x1b[31mmore",
        [
            Finding("leak", "fail", 'says "x < y"\x00', 2.5, 1e-5, "blocks.0", "cause", "fix", "page", 0.25, cases),
            Finding("heads", "warn", "two heads are dead", float("inf"), 1.0),
            Finding("order", "pass", "held"),
            Finding("cache", "skip", "skipped: needs logits_with_cache"),
            Finding("steps", "skip", "skipped: needs logits_with_cache"),
            Finding("loss", "skip", "skipped: needs loss"),
        ],
        seed=7,
        seconds=1.5,
        properties={"kind": "decoder"},
        noise={"float32": 1e-7},
    )


def test_junit_xml() -> None:
    root = Tree.fromstring(format_junit(build_report()))
    assert root.tag == "testsuites"
    [suite] = root
    assert {
        "tests": "6",
        "failures": "1",
        "errors": "0",
        "skipped": "3",
        "time": "1.500",
    }.items() <= suite.attrib.items()
    assert suite.get("name") == "a <model> & \\x1b[31mmore"
    properties = {item.get("name"): item.get("value") for item in suite.find("properties") or []}
    assert properties == {"kind": "decoder", "seed": "7", "noise.float32": "1e-07"}
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    failure = cases["leak"].find("failure")
    assert failure is not None
    assert failure.get("message") == 'says "x < y"\\x00'
    assert "likely cause: cause" in (failure.text or "")
    assert cases["leak"].get("time") == "0.250"
    assert cases["leak"].get("classname", "").startswith("cutaway.")
    skipped = cases["cache"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "skipped: needs logits_with_cache"
    assert cases["order"].find("failure") is None
    assert "two heads are dead" in cases["heads"].findtext("system-out", "")


def test_files_are_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text("an older one")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".report")] == []
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(tmp_path / "absent" / "report.xml", "new")


def test_junit_is_written_if_a_check_fails(run_cli: CliRunner, tmp_path: Path) -> None:
    run_cli("check", "mine:leaks", "--only", "causality*", "--junit", tmp_path / "r.xml", code=1)
    cases = {case.get("name"): case for case in Tree.parse(tmp_path / "r.xml").getroot().iter("testcase")}
    assert cases["causality"].find("failure") is not None


def test_read_only_directory_is_refused_before_the_model_is_built(
    run_cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda _, mode: mode != os.W_OK)  # root may write everywhere
    assert "is read-only" in run_cli("check", "mine:raises", "--badge", "badge.svg", code=2)
    Path("b.json").write_text('{"version": 1, "accepted": []}')
    assert "is read-only" in run_cli("check", "mine:raises", "--baseline", "b.json", "--write-baseline", code=2)
    assert "the weights" in run_cli("check", "mine:raises", "--baseline", "b.json", code=2)  # the file is only read


def test_all_outputs_of_one_run(run_cli: CliRunner, tmp_path: Path) -> None:
    names = {"junit": "r.xml", "sarif": "r.sarif", "markdown": "r.md", "badge": "r.svg"}
    options = [part for name, file in names.items() for part in (f"--{name}", file)]
    run_cli("check", "mine:leaks", "--only", "causality", *options, code=1)
    [run] = json.loads((tmp_path / "r.sarif").read_text())["runs"]
    [location] = run["results"][0]["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "mine.py"
    line = location["physicalLocation"]["region"]["startLine"]
    assert MODULE.splitlines()[line - 1] == "def leaks():"  # the class is not in the working directory
    assert "1 failed" in (tmp_path / "r.svg").read_text()
    assert "| causality | fail |" in (tmp_path / "r.md").read_text()
    assert (tmp_path / "r.xml").is_file()


def test_baseline_accepts_the_findings_of_a_model(run_cli: CliRunner, tmp_path: Path) -> None:
    options = ("--only", "causality,packing", "--baseline", "b.json")
    output = run_cli("check", "mine:leaks", *options, "--write-baseline")
    assert "no new problems found" in output
    data = json.loads((tmp_path / "b.json").read_text())
    assert {entry["check"] for entry in data["accepted"]} == {"causality"}
    for entry in data["accepted"]:
        entry["reason"] = "a known leak"
    (tmp_path / "b.json").write_text(json.dumps(data))
    output = run_cli("check", "mine:leaks", *options, "--seed", 1, columns=160)
    assert "~ accepted" in output
    assert "(a known leak)" in " ".join(output.split())
    assert "~ accepted" in run_cli("check", "mine:leaks", *options, "--verbose", columns=160)
    run_cli("check", "mine:leaks", *options, "--write-baseline")
    assert json.loads((tmp_path / "b.json").read_text()) == data
    (tmp_path / "b.json").write_text((tmp_path / "b.json").read_text().replace("mine:leaks", "mine:correct"))
    report = run_json(run_cli, "mine:correct", *options)
    assert report["accepted"] == {}
    assert {entry["check"] for entry in report["fixed"]} == {"causality"}
    assert "✓ fixed" in run_cli("check", "mine:correct", *options)
    run_cli("check", "mine:leaks", *options, code=1)


def test_preflight_selects_the_quick_checks(run_cli: CliRunner) -> None:
    report = run_json(run_cli, "mine:correct", "--preflight", "--only", "causality*")
    names = [check.name for check in get_checks().values() if check.preflight and check.name.startswith("causality")]
    assert [finding["check"] for finding in report["findings"]] == names


def test_changed(run_cli: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    arguments = ("mine:leaks", "--only", "causality", "--changed", "--badge", "b.svg")
    output = run_cli("check", *arguments, code=1, columns=160)
    assert "the changed files are unknown, so the checks run: not a git repository" in output
    (tmp_path / "b.svg").unlink()
    for command in (
        ["init", "-q"],
        ["add", "mine.py"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"],
    ):
        subprocess.run(["git", *command], check=True)
    output = run_cli("check", *arguments)
    assert output == "mine:leaks: not checked, changed since HEAD: no file that the model imports\n"
    assert not (tmp_path / "b.svg").exists()
    assert run_json(run_cli, *arguments)["status"] == "unchanged"
    (tmp_path / "mine.py").write_text(f"{MODULE}# changed\n")
    assert "changed since HEAD: mine.py" in run_cli("check", *arguments, code=1)


def test_terminal_report(capsys: pytest.CaptureFixture[str]) -> None:
    from cutaway.cli.views.check_report import render_report

    assert skipped_by_reason(build_report()) == {"needs logits_with_cache": ["cache", "steps"], "needs loss": ["loss"]}
    render_report(build_report(), "a source", ["a note"])
    output = capsys.readouterr().out
    assert output.index("✗ leak") < output.index("! heads") < output.index("passed") < output.index("skipped")
    assert "needs logits_with_cache: cache, steps" in output
    assert "also          the first" in output
    assert "1 of 3 checks failed · 1 warning · 1 passed · 3 skipped · 1.5 s" in output
    assert "\x1b[31m" not in output
    render_report(build_report(), "a source", show_times=False, verbose=True)
    assert "1.5 s" not in capsys.readouterr().out
    empty_report = Report("x", [Finding("loss", "skip", "skipped: needs loss")], seed=0)
    render_report(empty_report, "x")
    assert "no check could be run" in capsys.readouterr().out


def test_parse_duration() -> None:
    assert [parse_duration(text) for text in ("30", "30s", "1.5 m", "2min", ".5s")] == [30, 30, 90, 120, 0.5]
