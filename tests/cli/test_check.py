"""`cutaway check` as a person, a machine and a CI system use it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as Tree

import pytest
from support.cli_runner import CliRunner

import cutaway as ct
from cutaway.check import CaseResult, Finding, Report, get_checks
from cutaway.check.model_sources import shrink_config
from cutaway.check.report.junit import write_junit
from cutaway.cli.verbs.check import MAX_PARAMETERS, parse_duration
from cutaway.cli.views.check_report import skipped_by_reason
from cutaway.errors import InputError
from cutaway.size import count_parameters

pytestmark = pytest.mark.unchecked

MODULE = """
import support.seeded_bugs.causality
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import SEEDED_BUGS

print("this is printed by someone's module")
instance = ReferenceGPT()


def right():
    model = ReferenceGPT()
    return model, check_kwargs(model)


def leaks():
    return SEEDED_BUGS["causality/mask off by one"].build()


def bare():
    model = ReferenceGPT()
    return {"logits": lambda tokens: model(tokens)[0]}


def function():
    model = ReferenceGPT()
    return lambda tokens: model(tokens)[0]


def breaks():
    raise RuntimeError("the weights\\nare not there")


def nothing():
    pass


def three():
    return 1, 2, 3


def empty():
    return {"num_layers": 3}


def strange():
    return ReferenceGPT(), {"lojits": 3}


def asks(size):
    return ReferenceGPT()
"""


@pytest.fixture(autouse=True)
def _mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory with a module of the user's own, which is forgotten afterwards."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for module in ("mine", "broken"):
        sys.modules.pop(module, None)


def told(run_cli: CliRunner, *arguments: object, code: int = 0) -> dict:
    return json.loads(run_cli("check", *arguments, "--json", code=code))


def test_a_leak_is_told_with_all_that_a_person_needs(run_cli: CliRunner) -> None:
    said = run_cli("check", "mine:leaks", code=1, columns=120)
    for words in (
        "✗ causality",
        "the logits at position 0 change with token 1, which comes later",
        "threshold",
        "blocks.0.attention",
        "the causal mask is missing",
        "hide key j from query i",
        "cutaway check --explain causality",
        "checks failed",
    ):
        assert words in said


def test_a_right_model_has_no_problem(run_cli: CliRunner) -> None:
    said = run_cli("check", "mine:right")
    assert "nothing wrong was found" in said
    assert "✗" not in said
    assert "✓ passed" in said
    whole = run_cli("check", "mine:right", "--only", "causality*", "--verbose", columns=100)
    assert "no logit changes with a later token" in whole
    assert "seconds" in whole


def test_machines_get_one_object_whatever_someones_code_prints(run_cli: CliRunner) -> None:
    report = told(run_cli, "mine:leaks", "--only", "causality-tile-edges", "--seed", 3, code=1)
    assert report["source"] == "mine:leaks"
    assert report["ok"] is False
    assert report["seed"] == 3
    [finding] = report["findings"]
    assert finding["check"] == "causality-tile-edges"
    assert finding["measured"] > finding["threshold"]
    assert report["counts"] == {"fail": 1, "warn": 0, "pass": 0, "skip": 0}


@pytest.mark.parametrize("name", ["instance", "bare", "function"])
def test_a_factory_may_give_a_model_a_dict_or_a_function(run_cli: CliRunner, name: str) -> None:
    report = told(run_cli, f"mine:{name}", "--only", "causality*")
    verdicts = {finding["check"]: finding["verdict"] for finding in report["findings"]}
    assert verdicts["causality"] == "pass"
    assert (verdicts["causality-gradient"] == "pass") == (name == "instance")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine:breaks"], "raised RuntimeError: the weights; it should return a model"),
        (["mine:nothing"], "gave nothing back"),
        (["mine:three"], "gave a tuple of (int, int, int)"),
        (["mine:empty"], "a dict without a model to ask"),
        (["mine:strange"], "'lojits' is nothing a target can offer"),
        (["mine:asks"], "was called without arguments and raised TypeError"),
        (["mine:absent"], "'mine' has no 'absent'"),
        (["missing_module:make"], "there is no module 'missing_module'"),
        (["mine.inner:make"], "there is no module 'mine.inner'"),
        (["broken:make"], "'broken' cannot be imported: it raised ModuleNotFoundError"),
        (["mine.py:right"], "is no module.path:factory"),
        (["./mine.py:right"], "is no module.path:factory"),
        (["mine:right", "--dtype", "bfloat16"], "--dtype is for checkpoints"),
        (["mine:right", "--library", "transformers"], "--library transformers is for checkpoints"),
        (["tiny-gpt", "--library", "transformers"], "is a preset of cutaway's"),
        (["tiny-gpd"], "did you mean tiny-gpt"),
        (["./nowhere"], "does not exist"),
        (["./nowhere", "--library", "transformers"], "does not exist"),
        (["tiny-gpt", "--only", "causalty"], "there is no check 'causalty'"),
        (["tiny-gpt", "--budget", "soon"], "--budget is 'soon'"),
        (["tiny-gpt", "--budget", "0"], "--budget is '0'"),
        (["tiny-gpt", "--junit", "nowhere/report.xml"], "'nowhere' is no directory"),
        (["tiny-gpt", "--junit", "."], "is a directory"),
        ([], "there is nothing to check"),
        (["--explain", "causalty"], "did you mean causality"),
    ],
)
def test_mistakes_get_one_sentence(run_cli: CliRunner, arguments: list[str], message: str) -> None:
    said = run_cli("check", *arguments, code=2)
    [line] = [line for line in said.splitlines() if line.startswith("cutaway: ")]
    assert message in line
    assert "Traceback" not in said


def test_names_and_pages(run_cli: CliRunner) -> None:
    listed = run_cli("check", "--list", columns=100)
    assert [each["name"] for each in json.loads(run_cli("check", "--list", "--json"))] == list(get_checks())
    for name in get_checks():
        assert name in listed
        shown = run_cli("check", "--explain", name, columns=100)
        assert "How it works" in shown
        assert "How to fix it" in shown
    assert json.loads(run_cli("check", "--explain", "causality", "--json"))["page"].startswith("# causality\n")


def test_checkpoints_presets_and_another_library(run_cli: CliRunner) -> None:
    shipped = told(run_cli, "tiny-python", "--only", "causality-tile-edges")
    assert shipped["properties"]["dtype"] == "torch.bfloat16"
    assert not shipped["notes"]
    options = ("--library", "transformers", "--dtype", "float32")
    other = told(run_cli, "tiny-python", "--only", "causality-tile-edges", *options)
    assert other["properties"]["dtype"] == "torch.float32"
    assert other["model_name"] == "LlamaForCausalLM"
    assert other["properties"]["num_layers"] == shipped["properties"]["num_layers"]
    assert told(run_cli, "tiny-gpt", "--only", "causality")["notes"] == ["its weights are random"]


def test_a_preset_that_is_too_large_is_checked_in_small(run_cli: CliRunner) -> None:
    report = told(run_cli, "llama-3-70b", "--only", "causality-tile-edges")
    assert report["ok"]
    assert "2 layers of width 256: llama-3-70b itself has 70.55B parameters" in report["notes"][1]
    for name in ct.presets():
        config = ct.config(name)
        small = shrink_config(config)
        assert count_parameters(small).total < min(MAX_PARAMETERS, 1 + count_parameters(config).total)
        assert small.form == config.form
        for stack, other in zip(config.stacks.values(), small.stacks.values(), strict=True):
            kinds = {(type(block.attention), type(block.ffn), block.attention.window) for block in stack.blocks}
            assert kinds == {(type(b.attention), type(b.ffn), b.attention.window) for b in other.blocks}, name
            for block, less in zip(stack.blocks, other.blocks, strict=False):
                if hasattr(block.attention, "num_kv_heads"):
                    shared = [each.num_kv_heads < each.heads for each in (block.attention, less.attention)]
                    assert shared[0] == shared[1]
                    assert block.attention.head_dim(config.d_model) == less.attention.head_dim(small.d_model)


def made_report() -> Report:
    parts = [CaseResult("fail", "the first"), CaseResult("fail", "the second")]
    return Report(
        "a <model> & \x1b[31mmore",
        [
            Finding("leak", "fail", 'says "x < y"\x00', 2.5, 1e-5, "blocks.0", "cause", "fix", "page", 0.25, parts),
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


def test_junit_is_what_ci_systems_read(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text("an older one")
    write_junit(made_report(), path)
    root = Tree.parse(path).getroot()
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
    known = {each.get("name"): each.get("value") for each in suite.find("properties") or []}
    assert known == {"kind": "decoder", "seed": "7", "noise.float32": "1e-07"}
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    failure = cases["leak"].find("failure")
    assert failure is not None
    assert failure.get("message") == 'says "x < y"\\x00'
    assert "likely cause: cause" in (failure.text or "")
    assert cases["leak"].get("time") == "0.250"
    assert cases["leak"].get("classname", "").startswith("cutaway.")
    reason = cases["cache"].find("skipped")
    assert reason is not None
    assert reason.get("message") == "skipped: needs logits_with_cache"
    assert cases["order"].find("failure") is None
    assert "two heads are dead" in cases["heads"].findtext("system-out", "")
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".report")] == []
    with pytest.raises(InputError, match="cannot be written"):
        write_junit(made_report(), tmp_path / "absent" / "report.xml")


def test_the_verb_writes_it_where_a_check_fails_too(run_cli: CliRunner, tmp_path: Path) -> None:
    run_cli("check", "mine:leaks", "--only", "causality*", "--junit", tmp_path / "r.xml", code=1)
    cases = {case.get("name"): case for case in Tree.parse(tmp_path / "r.xml").getroot().iter("testcase")}
    assert cases["causality"].find("failure") is not None


def test_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from cutaway.cli.views.check_report import render_report

    assert skipped_by_reason(made_report()) == {"needs logits_with_cache": ["cache", "steps"], "needs loss": ["loss"]}
    render_report(made_report(), "a source", ["a note"])
    said = capsys.readouterr().out
    assert said.index("✗ leak") < said.index("! heads") < said.index("passed") < said.index("skipped")
    assert "needs logits_with_cache: cache, steps" in said
    assert "also          the first" in said
    assert "1 of 3 checks failed · 1 warning · 1 passed · 3 skipped · 1.5 s" in said
    assert "\x1b[31m" not in said
    render_report(made_report(), "a source", show_times=False, verbose=True)
    assert "1.5 s" not in capsys.readouterr().out
    nothing = Report("x", [Finding("loss", "skip", "skipped: needs loss")], seed=0)
    render_report(nothing, "x")
    assert "nothing could be tried" in capsys.readouterr().out


def test_times() -> None:
    assert [parse_duration(each) for each in ("30", "30s", "1.5 m", "2min", ".5s")] == [30, 30, 90, 120, 0.5]
