"""Ablations: budgets are equal, intervals are Student's, a killed one ends as if it had not been, studies measure."""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.cli import main
from cutaway.config import config as read_config
from cutaway.errors import CutawayError
from cutaway.train.ablate import model_surgery
from cutaway.train.ablate.ablation import Ablation, build_ablation
from cutaway.train.ablate.budget import training_cost
from cutaway.train.ablate.confidence_interval import (
    ConfidenceInterval,
    mean_confidence_interval,
    paired_difference,
    t_quantile,
)
from cutaway.train.ablate.measurements import permutation_sensitivity, shift_sensitivity, token_losses
from cutaway.train.ablate.metrics import METRICS
from cutaway.train.ablate.plan import build_plan
from cutaway.train.ablate.shorthands import apply_shorthand
from cutaway.train.ablate.studies import STUDIES
from cutaway.train.ablate.vary import apply_overrides, parse_variation
from cutaway.train.recipe.load import load_recipe

SMALL: dict[str, Any] = {
    "model": "tiny-llama",
    "data": {"seq_len": 16, "validation_split": 0.2},
    "optimizer": {"lr": 3e-3},
    "schedule": {"warmup_steps": 2},
    "training": {"max_steps": 4, "batch_size": 4},
    "eval": {"interval": 2, "num_sequences": 8},
    "checkpoint": {"interval": 2},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    directory = tmp_path / "texts"
    directory.mkdir()
    for a in range(20):
        (directory / f"{a:03}.txt").write_text("".join(f"{a} and {b} make {a + b}\n" for b in range(12)))
    return directory


def small(texts: Path, **changes: Any) -> dict[str, Any]:
    made = {**SMALL, "data": {**SMALL["data"], "sources": [{"path": str(texts)}]}}
    return {**made, **changes}


# What is planned


def test_several_keys_give_every_combination(tmp_path: Path) -> None:
    plan = build_ablation(
        SMALL, ["norm=layernorm,rmsnorm", "model.decoder.layers=1,2,3"], output_dir=tmp_path, num_seeds=2
    ).plan
    assert [variant.name for variant in plan.variants][:2] == ["norm=layernorm, layers=1", "norm=layernorm, layers=2"]
    assert len(plan.variants) == 6
    configs = [read_config(variant.recipe.model) for variant in plan.variants]
    assert [each.decoder.layers for each in configs] == [1, 2, 3, 1, 2, 3]
    assert {each.decoder.norm.kind for each in configs[:3]} == {"layernorm"}
    assert plan.seeds == (0, 1)
    assert "decoder.norm: rmsnorm (eps 1e-05) → layernorm" in plan.variants[0].changes
    assert not list(tmp_path.iterdir())  # a plan writes nothing


def test_changes_leave_what_was_given_as_it_was() -> None:
    given = {"training": {"max_steps": 4}}
    assert load_recipe(given, ["training.max_steps=9"]).training.max_steps == 9
    assert given == {"training": {"max_steps": 4}}


def test_commas_in_tables_and_quotes_part_nothing() -> None:
    assert parse_variation("a.b=[1, 2],{x = 'p,q'},z").values == ("[1, 2]", "{x = 'p,q'}", "z")


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        ("model.decoder.placement.kind", "post", {"final_norm": False}),
        ("model.decoder.block.ffn.kind", "mlp", {"hidden": 128}),
        ("schedule.kind", "linear", {"warmup_steps": 2}),
        ("optimizer.kind", "muon", {"lr": 3e-3}),
    ],
)
def test_a_part_of_another_kind_keeps_what_it_knows_of_what_was_set(key: str, value: str, kept: dict[str, Any]) -> None:
    made = apply_overrides(load_recipe(SMALL), [(key, value)])
    here: Any = made.model_dump() | {"model": read_config(made.model).model_dump()}
    for name in key.split(".")[:-1]:
        here = here[name]
        here = here[0] if isinstance(here, tuple) else here
    assert here["kind"] == value
    assert {name: here[name] for name in kept} == kept


def test_a_part_that_was_left_out_can_be_varied_by_its_fields() -> None:
    made = apply_overrides(
        load_recipe(SMALL), [("model.decoder.placement.final_norm", "false"), ("objective.z_loss_coef", "0.5")]
    )
    assert read_config(made.model).decoder.placement.final_norm is False
    assert made.objective.z_loss_coef == 0.5


@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-llama", "tiny-gemma", "tiny-moe", "tiny-bert", "tiny-t5"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("activation", "relu"),
        ("activation", "swiglu"),
        ("depth", "5"),
        ("ffn", "40"),
        ("heads", "2"),
        ("kv-heads", "1"),
        ("norm", "layernorm"),
        ("placement", "post"),
        *(("position", each) for each in ("none", "learned", "sinusoidal", "rope", "alibi", "relative-bias")),
    ],
)
def test_every_short_name_edits_every_form(preset: str, name: str, value: str) -> None:
    before = read_config(preset)
    after = apply_shorthand(before, name, value)
    ct.build(after, device="meta")
    assert apply_shorthand(after, name, value) == after  # what is so already stays as it is


def test_activations_weigh_the_same() -> None:
    two, three = (apply_shorthand(read_config("tiny-llama"), "activation", each) for each in ("relu", "swiglu"))
    assert ct.size(two).num_parameters == pytest.approx(ct.size(three).num_parameters, rel=0.01)


@pytest.mark.parametrize(
    "vary", ["kv-heads=4,1", "depth=2,3,4", "position=rope,learned", "norm=rmsnorm,layernorm,none"]
)
def test_equal_parameters_are_within_a_hundredth(vary: str, tmp_path: Path) -> None:
    plan = build_ablation(SMALL, [vary], output_dir=tmp_path, match="parameters").plan
    counts = [ct.size(read_config(each.recipe.model)).num_parameters for each in plan.variants]
    assert counts == [each.cost.parameters for each in plan.variants]
    assert all(abs(each - counts[0]) <= 0.01 * counts[0] for each in counts)


def test_equal_flops_are_within_a_step(tmp_path: Path) -> None:
    changes = ["training.max_steps=60"]
    plan = build_ablation(SMALL, ["depth=2,4,8"], output_dir=tmp_path, match="flops", overrides=changes).plan
    first = plan.variants[0].cost.flops
    for each in plan.variants:
        assert abs(each.cost.flops - first) <= 0.5 * each.cost.flops / each.cost.steps
    assert [each.cost.steps for each in plan.variants] == sorted(
        (each.cost.steps for each in plan.variants), reverse=True
    )
    assert training_cost(plan.variants[1].recipe) == plan.variants[1].cost


@pytest.mark.parametrize(
    ("vary", "how", "says"),
    [
        (["norm=layernorm"], {}, "one variant alone"),
        (["norm"], {}, "varies nothing"),
        (["norm=layernorm,layernorm"], {}, "names a value twice"),
        (["norm=groupnorm,rmsnorm"], {}, "give some of layernorm, rmsnorm, none"),
        (["color=red,blue"], {}, "no key of a recipe and no short name"),
        (["heads=3,4"], {}, "heads=3: .* does not divide"),
        (["depth=2,many"], {}, "no count"),
        (["training.seed=1,2"], {}, "--num-seeds"),
        (["ffn=64,128"], {"match": "parameters"}, "come out the same at equal parameters"),
        (["depth=2,200"], {"match": "parameters"}, "cannot have .* parameters by its FFN's width alone"),
        (["depth=2,3"], {"num_seeds": 0}, "0 seeds"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_trained(
    vary: list[str], how: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(CutawayError, match=says):
        build_ablation(SMALL, vary, output_dir=tmp_path, **how)
    assert not list(tmp_path.iterdir())


# What intervals say


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227), (200, 1.97190)],
)
def test_quantiles_are_students(freedom: int, t: float) -> None:
    assert t_quantile(freedom) == pytest.approx(t, rel=2e-5)


def test_intervals_and_pairs() -> None:
    found = mean_confidence_interval([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-5)
    assert mean_confidence_interval([1.0]).half_width is None
    near = paired_difference({0: 5.0, 1: 9.0, 2: 7.0, 9: 1.0}, {0: 4.0, 1: 8.0, 2: 6.0})
    assert near == ConfidenceInterval(1.0, 0.0, 3)  # seeds differ by much, variants by the same each time
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_sentences_say_what_the_interval_allows() -> None:
    loss = METRICS["loss"]
    assert (
        loss.describe_difference("post", "pre", ConfidenceInterval(0.31, 0.08, 3))
        == "post is worse than pre by 0.310 ± 0.080 nats a token"
    )
    assert loss.describe_difference("post", "pre", ConfidenceInterval(-0.31, 0.08, 3)).startswith(
        "post is better than pre by 0.310"
    )
    unclear = loss.describe_difference("post", "pre", ConfidenceInterval(0.02, 0.08, 3))
    assert "no difference in loss larger than 0.100 nats a token" in unclear
    assert "no interval" in loss.describe_difference("post", "pre", ConfidenceInterval(0.31, None, 1))
    step = METRICS["step_seconds"]
    said = step.describe_difference("a", "b", ConfidenceInterval(math.log(2), math.log(1.1), 3))
    assert said == "a: time of a step longer than that of b by a factor of 2.00 (1.82 to 2.20)"


# What is carried out


def outcomes(out: Path) -> dict[str, Any]:
    """Everything but the times."""
    found: dict[str, Any] = {}
    for path in sorted(out.glob("runs/*/outcome.json")):
        data = json.loads(path.read_text())
        found[path.parent.name] = {k: v for k, v in data.items() if k not in ("seconds", "step_seconds")}
    return found


def test_an_ablation_from_beginning_to_end(texts: Path, tmp_path: Path) -> None:
    asked = build_ablation(small(texts), ["norm=layernorm,rmsnorm"], output_dir=tmp_path / "a", num_seeds=2)
    steps: dict[str, int] = {}
    data = asked.run(device="cpu", on_progress=lambda name, done: steps.update({name: done}))
    assert set(steps.values()) == {4}
    assert len(steps) == 4
    assert json.loads((tmp_path / "a" / "results.json").read_text()) == data
    first, second = data["variants"]
    losses_by_hand = [
        [run["loss"] for run in data["runs"] if run["variant"] == row["variant"]] for row in (first, second)
    ]
    differences = [b - a for a, b in zip(*losses_by_hand, strict=True)]
    assert second["difference"]["mean"] == pytest.approx(sum(differences) / 2)
    assert first["peak_memory"] > 16 * first["parameters"]  # weights, gradients, two averages
    assert all(len(run["curve"]) == 4 for run in data["runs"])
    assert [path.name for path in sorted((tmp_path / "a").glob("*.svg"))] == ["curves.svg", "losses.svg"]
    assert "norm=rmsnorm" in data["findings"][0]
    for run in (tmp_path / "a" / "runs").iterdir():
        assert ct.load(run).config.decoder.norm.kind in run.name  # normal runs, each with its model

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a" / "runs").rglob("*")}
    again = build_ablation(small(texts), ["norm=layernorm,rmsnorm"], output_dir=tmp_path / "a", num_seeds=2).run(
        device="cpu"
    )
    assert again == data
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a" / "runs").rglob("*")} == before
    longer = small(texts, training={"max_steps": 5, "batch_size": 4})
    other = build_ablation(longer, ["norm=layernorm,rmsnorm"], output_dir=tmp_path / "a", num_seeds=2)
    with pytest.raises(CutawayError, match="another recipe"):
        other.run(device="cpu")


@pytest.mark.unchecked
@pytest.mark.nightly
def test_a_killed_ablation_goes_on_to_the_same(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that were finished stay, one that was not goes on from its checkpoint; processes die with their parent."""
    source, killed = tmp_path / "recipe.json", tmp_path / "killed"
    source.write_text(json.dumps(small(texts)))
    how: dict[str, Any] = {"vary": ["placement=pre,post"], "num_seeds": 1}
    build_ablation(str(source), output_dir=tmp_path / "whole", **how).run(device="cpu", num_workers=1)

    with monkeypatch.context() as soon:
        soon.setenv("CUTAWAY_FAILPOINT", "after-step:3")
        with pytest.raises(CutawayError, match="ended by itself"):
            build_ablation(str(source), output_dir=killed, **how).run(device="cpu", num_workers=1)
    assert not outcomes(killed)
    code = "from cutaway.cli import main; main()"
    command = [sys.executable, "-c", code, "ablate", str(source), "--vary", "placement=pre,post", "--num-seeds", "1"]
    process = subprocess.Popen([*command, "--jobs", "1", "--device", "cpu", "--out", str(killed)])
    while process.poll() is None and not outcomes(killed):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()

    build_ablation(str(source), output_dir=killed, **how).run(device="cpu", num_workers=1)
    assert outcomes(killed) == outcomes(tmp_path / "whole")


def test_a_run_that_diverges_is_counted_and_the_others_go_on(texts: Path, tmp_path: Path) -> None:
    wild = small(texts, optimizer={"kind": "sgd"})
    data = build_ablation(wild, ["optimizer.lr=0.01,1e25"], output_dir=tmp_path / "a", num_seeds=1).run(device="cpu")
    assert [row["failed"] for row in data["variants"]] == [0, 1]
    assert data["variants"][1]["loss"] is None
    assert "1 of 1 runs came to no end" in data["findings"][0]


@pytest.mark.unchecked
def test_the_command_says_what_was_found(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "recipe.json"
    source.write_text(json.dumps(small(texts)))
    arguments = ["cutaway", "ablate", str(source), "--vary", "heads=4,2", "--num-seeds", "2", "--device", "cpu"]
    arguments += ["--match", "parameters", "--out", str(tmp_path / "a")]
    for extra in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", arguments + extra)
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
    said = capsys.readouterr().out
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [row["variant"] for row in rows if "parameters" in row] == ["heads=4", "heads=2"]
    assert any("finding" in row for row in rows)
    assert "nats a token" in said
    assert "heads=2" in said
    monkeypatch.setattr(sys, "argv", ["cutaway", "ablate", str(source), "--vary", "heads=4", "--match", "beauty"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2


# What is measured


def test_surgery_leaves_no_trace() -> None:
    model = ct.build("tiny-llama", seed=0)
    tokens = torch.arange(24).view(2, 12)
    before, names = model(tokens), list(model.state_dict())
    ways = [
        model_surgery.temporary_surgery(model, model_surgery.remove_causal_mask),
        model_surgery.temporary_surgery(model, model_surgery.swap_attention_and_ffn),
    ]
    for way in ways:
        with way:
            assert not torch.equal(model(tokens), before)
            assert list(model.state_dict()) == names
        assert torch.equal(model(tokens), before)


def test_taken_away_is_what_a_smaller_model_would_be() -> None:
    """Without its last block and without positions: a model built without them, with the same weights."""
    model = ct.build("tiny-llama", seed=0)
    tokens = torch.arange(24).view(2, 12)
    lower = ct.build(apply_shorthand(model.config, "depth", "3"))
    lower.load_state_dict({name: value for name, value in model.state_dict().items() if "blocks.3" not in name})
    with ct.edit(model, {"blocks.3": "skip"}):
        torch.testing.assert_close(model(tokens), lower(tokens))
    bare = ct.build(apply_shorthand(model.config, "position", "none"))
    bare.load_state_dict(model.state_dict())
    with ct.edit(model, {"positions": "drop"}):
        torch.testing.assert_close(model(tokens), bare(tokens))
    head = ct.build("tiny-llama", seed=0)
    with torch.no_grad():
        head.decoder.blocks[1].attn.f.o.weight[:, 32:48] = 0
    with ct.edit(model, {"blocks.1.attn.z": {"do": "zero", "heads": [2]}}):
        torch.testing.assert_close(model(tokens), head(tokens))


def test_only_positions_and_the_mask_tell_order() -> None:
    tokens = torch.randint(0, 250, (3, 16), generator=torch.Generator().manual_seed(0))
    base = read_config("tiny-llama")
    for method in ("none", "sinusoidal", "learned", "rope", "alibi", "relative-bias"):
        model = ct.build(apply_shorthand(base, "position", method), seed=0)
        with model_surgery.temporary_surgery(model, model_surgery.remove_causal_mask):
            free = permutation_sensitivity(model, tokens)
        assert (free < 1e-5) == (method == "none"), method
        assert permutation_sensitivity(model, tokens) > 1e-2
        assert (shift_sensitivity(model, tokens) < 1e-4) == (method not in ("sinusoidal", "learned")), method
    assert token_losses(model, tokens).shape == (3, 15)


def toy(name: str, texts: Path, out: Path) -> Ablation:
    """A study with its last variants left out, on little text, for a few steps."""
    study = STUDIES[name]()
    source = {**study.recipe, "data": {"seq_len": 8, "validation_split": 0.3, "sources": [{"path": str(texts)}]}}
    source |= {
        "training": {"max_steps": 2, "batch_size": 2},
        "eval": {"interval": 2, "num_sequences": 4},
        "checkpoint": {"interval": 2},
    }
    plan = build_plan(
        name, load_recipe(source), study.variants, out, num_seeds=1, match=study.match, measurement=study.measurement
    )
    return Ablation(plan, out, study)


@pytest.mark.nightly
@pytest.mark.parametrize("name", STUDIES)
def test_studies_measure_what_they_compare(name: str, texts: Path, tmp_path: Path) -> None:
    asked = toy(name, texts, tmp_path / "a")
    data = asked.run(device="cpu", num_workers=2)
    assert asked.study is not None
    found = {(row["condition"], row["metric"]) for row in data["measurements"]}
    if asked.study.rows == "variants":
        assert set(asked.study.columns) <= found
    else:
        assert {metric for _, metric in asked.study.columns} <= {metric for _, metric in found}
    assert len(data["findings"]) >= len(data["variants"]) - 1
    assert all("one seed: no interval" in sentence for sentence in data["findings"])
    for variant in asked.plan.variants:  # what no configuration says, no exported model would say either
        run = asked.plan.run_directory(asked.output_dir, variant, 0)
        assert (run / "model").exists() == (variant.surgery is None)
