"""`cutaway check` as a person, a machine and a CI system use it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as Tree

import pytest
from verbs import Run

import cutaway as ct
from cutaway.check import Finding, Part, Report, checks
from cutaway.check.junit import write_junit
from cutaway.check.shrunk import shrunk
from cutaway.cli.check import LARGEST, seconds
from cutaway.cli.check_view import skipped
from cutaway.errors import InputError
from cutaway.size import count

pytestmark = pytest.mark.unchecked

MODULE = """
import zoo.causality
from zoo.bug import ZOO
from zoo.home import Home, offers

print("this is printed by someone's module")
instance = Home()


def right():
    model = Home()
    return model, offers(model)


def leaks():
    return ZOO["causality/mask off by one"].make()


def bare():
    model = Home()
    return {"logits": lambda tokens: model(tokens)[0]}


def function():
    model = Home()
    return lambda tokens: model(tokens)[0]


def breaks():
    raise RuntimeError("the weights\\nare not there")


def nothing():
    pass


def three():
    return 1, 2, 3


def empty():
    return {"layers": 3}


def strange():
    return Home(), {"lojits": 3}


def asks(size):
    return Home()
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


def told(verb: Run, *arguments: object, code: int = 0) -> dict:
    return json.loads(verb("check", *arguments, "--json", code=code))


def test_a_leak_is_told_with_all_that_a_person_needs(verb: Run) -> None:
    said = verb("check", "mine:leaks", code=1, columns=120)
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


def test_a_right_model_has_no_problem(verb: Run) -> None:
    said = verb("check", "mine:right")
    assert "nothing wrong was found" in said
    assert "✗" not in said
    assert "✓ passed" in said
    whole = verb("check", "mine:right", "--only", "causality*", "--verbose", columns=100)
    assert "no logit changes with a later token" in whole
    assert "seconds" in whole


def test_machines_get_one_object_whatever_someones_code_prints(verb: Run) -> None:
    report = told(verb, "mine:leaks", "--only", "causality-edges", "--seed", 3, code=1)
    assert report["source"] == "mine:leaks"
    assert report["ok"] is False
    assert report["seed"] == 3
    [finding] = report["findings"]
    assert finding["check"] == "causality-edges"
    assert finding["measured"] > finding["threshold"]
    assert report["counts"] == {"fail": 1, "warn": 0, "pass": 0, "skip": 0}


@pytest.mark.parametrize("name", ["instance", "bare", "function"])
def test_a_factory_may_give_a_model_a_dict_or_a_function(verb: Run, name: str) -> None:
    report = told(verb, f"mine:{name}", "--only", "causality*")
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
def test_mistakes_get_one_sentence(verb: Run, arguments: list[str], message: str) -> None:
    said = verb("check", *arguments, code=2)
    [line] = [line for line in said.splitlines() if line.startswith("cutaway: ")]
    assert message in line
    assert "Traceback" not in said


def test_names_and_pages(verb: Run) -> None:
    listed = verb("check", "--list", columns=100)
    assert [each["name"] for each in json.loads(verb("check", "--list", "--json"))] == list(checks())
    for name in checks():
        assert name in listed
        shown = verb("check", "--explain", name, columns=100)
        assert "How it is asked" in shown
        assert "How to fix it" in shown
    assert json.loads(verb("check", "--explain", "causality", "--json"))["page"].startswith("# causality\n")


def test_checkpoints_presets_and_another_library(verb: Run) -> None:
    shipped = told(verb, "tiny-python", "--only", "causality-edges")
    assert shipped["facts"]["dtype"] == "torch.bfloat16"
    assert not shipped["notes"]
    other = told(verb, "tiny-python", "--only", "causality-edges", "--library", "transformers", "--dtype", "float32")
    assert other["facts"]["dtype"] == "torch.float32"
    assert other["target"] == "LlamaForCausalLM"
    assert other["facts"]["layers"] == shipped["facts"]["layers"]
    assert told(verb, "tiny-gpt", "--only", "causality")["notes"] == ["its weights are random"]


def test_a_preset_that_is_too_large_is_checked_in_small(verb: Run) -> None:
    report = told(verb, "llama-3-70b", "--only", "causality-edges")
    assert report["ok"]
    assert "2 layers of width 256: llama-3-70b itself has 70.55B parameters" in report["notes"][1]
    for name in ct.presets():
        config = ct.config(name)
        small = shrunk(config)
        assert count(small).total < min(LARGEST, 1 + count(config).total)
        assert small.form == config.form
        for stack, other in zip(config.stacks.values(), small.stacks.values(), strict=True):
            kinds = {(type(block.attention), type(block.ffn), block.attention.window) for block in stack.blocks}
            assert kinds == {(type(b.attention), type(b.ffn), b.attention.window) for b in other.blocks}, name
            for block, less in zip(stack.blocks, other.blocks, strict=False):
                if hasattr(block.attention, "n_kv_heads"):
                    shared = [each.n_kv_heads < each.heads for each in (block.attention, less.attention)]
                    assert shared[0] == shared[1]
                    assert block.attention.head_width(config.d_model) == less.attention.head_width(small.d_model)


def made_report() -> Report:
    parts = [Part("fail", "the first"), Part("fail", "the second")]
    return Report(
        "a <model> & \x1b[31mmore",
        [
            Finding("leak", "fail", 'says "x < y"\x00', 2.5, 1e-5, "blocks.0", "cause", "fix", "page", 0.25, parts),
            Finding("heads", "warn", "two heads are dead", float("inf"), 1.0),
            Finding("order", "pass", "held"),
            Finding("cache", "skip", "skipped: needs cached"),
            Finding("steps", "skip", "skipped: needs cached"),
            Finding("loss", "skip", "skipped: needs loss"),
        ],
        seed=7,
        seconds=1.5,
        facts={"kind": "decoder"},
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
    assert reason.get("message") == "skipped: needs cached"
    assert cases["order"].find("failure") is None
    assert "two heads are dead" in cases["heads"].findtext("system-out", "")
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".report")] == []
    with pytest.raises(InputError, match="cannot be written"):
        write_junit(made_report(), tmp_path / "absent" / "report.xml")


def test_the_verb_writes_it_where_a_check_fails_too(verb: Run, tmp_path: Path) -> None:
    verb("check", "mine:leaks", "--only", "causality*", "--junit", tmp_path / "r.xml", code=1)
    cases = {case.get("name"): case for case in Tree.parse(tmp_path / "r.xml").getroot().iter("testcase")}
    assert cases["causality"].find("failure") is not None


def test_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from cutaway.cli.check_view import show

    assert skipped(made_report()) == {"needs cached": ["cache", "steps"], "needs loss": ["loss"]}
    show(made_report(), "a source", ["a note"])
    said = capsys.readouterr().out
    assert said.index("✗ leak") < said.index("! heads") < said.index("passed") < said.index("skipped")
    assert "needs cached: cache, steps" in said
    assert "also          the first" in said
    assert "1 of 3 checks failed · 1 to look at · 1 passed · 3 skipped · 1.5 s" in said
    assert "\x1b[31m" not in said
    show(made_report(), "a source", timed=False, verbose=True)
    assert "1.5 s" not in capsys.readouterr().out
    nothing = Report("x", [Finding("loss", "skip", "skipped: needs loss")], seed=0)
    show(nothing, "x")
    assert "nothing could be tried" in capsys.readouterr().out


def test_times() -> None:
    assert [seconds(each) for each in ("30", "30s", "1.5 m", "2min", ".5s")] == [30, 30, 90, 120, 0.5]
