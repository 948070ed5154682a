"""Ablations: variations, equal budgets, confidence intervals, resume after a kill, measurements and studies."""

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
from cutaway.evaluate.confidence_interval import (
    ConfidenceInterval,
    mean_confidence_interval,
    paired_difference,
    t_quantile,
)
from cutaway.train.ablate.ablation import Ablation, build_ablation
from cutaway.train.ablate.budget import training_cost
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


def small_recipe(texts: Path, **sections: Any) -> dict[str, Any]:
    recipe = {**SMALL, "data": {**SMALL["data"], "sources": [{"path": str(texts)}]}}
    return {**recipe, **sections}


# Plan


def test_several_keys_are_combined(tmp_path: Path) -> None:
    plan = build_ablation(
        SMALL, ["norm=layernorm,rmsnorm", "model.decoder.layers=1,2,3"], output_dir=tmp_path, num_seeds=2
    ).plan
    assert [variant.name for variant in plan.variants][:2] == ["norm=layernorm, layers=1", "norm=layernorm, layers=2"]
    assert len(plan.variants) == 6
    configs = [read_config(variant.recipe.model) for variant in plan.variants]
    assert [config.decoder.layers for config in configs] == [1, 2, 3, 1, 2, 3]
    assert {config.decoder.norm.kind for config in configs[:3]} == {"layernorm"}
    assert plan.seeds == (0, 1)
    assert "decoder.norm: rmsnorm (eps 1e-05) → layernorm" in plan.variants[0].changes
    assert not list(tmp_path.iterdir())  # a plan writes nothing


def test_overrides_do_not_change_the_callers_dict() -> None:
    recipe = {"training": {"max_steps": 4}}
    assert load_recipe(recipe, ["training.max_steps=9"]).training.max_steps == 9
    assert recipe == {"training": {"max_steps": 4}}


def test_commas_in_brackets_and_quotes_do_not_separate_values() -> None:
    assert parse_variation("a.b=[1, 2],{x = 'p,q'},z").values == ("[1, 2]", "{x = 'p,q'}", "z")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model.decoder.placement.kind", "post", {"final_norm": False}),
        ("model.decoder.block.ffn.kind", "mlp", {"hidden": 128}),
        ("schedule.kind", "linear", {"warmup_steps": 2}),
        ("optimizer.kind", "muon", {"lr": 3e-3}),
    ],
)
def test_node_of_another_kind_keeps_common_fields(key: str, value: str, expected: dict[str, Any]) -> None:
    recipe = apply_overrides(load_recipe(SMALL), [(key, value)])
    node: Any = recipe.model_dump() | {"model": read_config(recipe.model).model_dump()}
    for name in key.split(".")[:-1]:
        node = node[name]
        node = node[0] if isinstance(node, tuple) else node
    assert node["kind"] == value
    assert {name: node[name] for name in expected} == expected


def test_fields_of_omitted_nodes_can_be_varied() -> None:
    recipe = apply_overrides(
        load_recipe(SMALL), [("model.decoder.placement.final_norm", "false"), ("objective.z_loss_coef", "0.5")]
    )
    assert read_config(recipe.model).decoder.placement.final_norm is False
    assert recipe.objective.z_loss_coef == 0.5


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
        *(("position", method) for method in ("none", "learned", "sinusoidal", "rope", "alibi", "relative-bias")),
    ],
)
def test_every_shorthand_applies_to_every_form(preset: str, name: str, value: str) -> None:
    before = read_config(preset)
    after = apply_shorthand(before, name, value)
    ct.build(after, device="meta")
    assert apply_shorthand(after, name, value) == after  # idempotent


def test_activations_have_equal_parameter_counts() -> None:
    mlp, gated = (apply_shorthand(read_config("tiny-llama"), "activation", value) for value in ("relu", "swiglu"))
    assert ct.size(mlp).num_parameters == pytest.approx(ct.size(gated).num_parameters, rel=0.01)


@pytest.mark.parametrize(
    "vary", ["kv-heads=4,1", "depth=2,3,4", "position=rope,learned", "norm=rmsnorm,layernorm,none"]
)
def test_equal_parameters_are_within_one_percent(vary: str, tmp_path: Path) -> None:
    plan = build_ablation(SMALL, [vary], output_dir=tmp_path, match="parameters").plan
    counts = [ct.size(read_config(variant.recipe.model)).num_parameters for variant in plan.variants]
    assert counts == [variant.cost.parameters for variant in plan.variants]
    assert all(abs(count - counts[0]) <= 0.01 * counts[0] for count in counts)


def test_equal_flops_are_within_a_step(tmp_path: Path) -> None:
    overrides = ["training.max_steps=60"]
    plan = build_ablation(SMALL, ["depth=2,4,8"], output_dir=tmp_path, match="flops", overrides=overrides).plan
    costs = [variant.cost for variant in plan.variants]
    for cost in costs:
        assert abs(cost.flops - costs[0].flops) <= 0.5 * cost.flops / cost.steps
    assert [cost.steps for cost in costs] == sorted((cost.steps for cost in costs), reverse=True)
    assert training_cost(plan.variants[1].recipe) == plan.variants[1].cost


@pytest.mark.parametrize(
    ("vary", "options", "message"),
    [
        (["norm=layernorm"], {}, "only one variant"),
        (["norm"], {}, "is not KEY=VALUES"),
        (["norm=layernorm,layernorm"], {}, "has the same value twice"),
        (["norm=groupnorm,rmsnorm"], {}, "use one of layernorm, rmsnorm, none"),
        (["color=red,blue"], {}, "is neither a recipe key nor a shorthand"),
        (["heads=3,4"], {}, "heads=3: .* does not divide"),
        (["depth=2,many"], {}, "is not a positive integer"),
        (["training.seed=1,2"], {}, "--num-seeds"),
        (["ffn=64,128"], {"match": "parameters"}, "are identical at equal parameters"),
        (["depth=2,200"], {"match": "parameters"}, "no FFN width gives .* parameters of the first variant"),
        (["depth=2,3"], {"num_seeds": 0}, "num_seeds is 0"),
    ],
)
def test_invalid_ablations_are_errors_before_training(
    vary: list[str], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CutawayError, match=message):
        build_ablation(SMALL, vary, output_dir=tmp_path, **options)
    assert not list(tmp_path.iterdir())


# Confidence intervals


@pytest.mark.parametrize(
    ("df", "t"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227), (200, 1.97190)],
)
def test_t_quantiles(df: int, t: float) -> None:
    assert t_quantile(df) == pytest.approx(t, rel=2e-5)


def test_confidence_interval_and_paired_difference() -> None:
    interval = mean_confidence_interval([1.0, 2.0, 3.0])
    assert interval.mean == 2
    assert interval.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-5)
    assert mean_confidence_interval([1.0]).half_width is None
    difference = paired_difference({0: 5.0, 1: 9.0, 2: 7.0, 9: 1.0}, {0: 4.0, 1: 8.0, 2: 6.0})
    assert difference == ConfidenceInterval(1.0, 0.0, 3)  # seeds differ by much, variants by the same each time
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_sentences_claim_no_more_than_the_interval() -> None:
    loss = METRICS["loss"]
    assert (
        loss.describe_difference("post", "pre", ConfidenceInterval(0.31, 0.08, 3))
        == "post is worse than pre by 0.310 ± 0.080 nats per token"
    )
    assert loss.describe_difference("post", "pre", ConfidenceInterval(-0.31, 0.08, 3)).startswith(
        "post is better than pre by 0.310"
    )
    unclear = loss.describe_difference("post", "pre", ConfidenceInterval(0.02, 0.08, 3))
    assert "no difference in loss larger than 0.100 nats per token" in unclear
    assert "no interval" in loss.describe_difference("post", "pre", ConfidenceInterval(0.31, None, 1))
    step_seconds = METRICS["step_seconds"]
    sentence = step_seconds.describe_difference("a", "b", ConfidenceInterval(math.log(2), math.log(1.1), 3))
    assert sentence == "a: step time longer than that of b by a factor of 2.00 (1.82 to 2.20)"


# Runs


def read_outcomes(output_dir: Path) -> dict[str, Any]:
    """All outcomes, without times."""
    outcomes: dict[str, Any] = {}
    for path in sorted(output_dir.glob("runs/*/outcome.json")):
        data = json.loads(path.read_text())
        outcomes[path.parent.name] = {k: v for k, v in data.items() if k not in ("seconds", "step_seconds")}
    return outcomes


@pytest.mark.nightly
def test_ablation_end_to_end(texts: Path, tmp_path: Path) -> None:
    ablation = build_ablation(small_recipe(texts), ["norm=layernorm,rmsnorm"], output_dir=tmp_path / "a", num_seeds=2)
    steps: dict[str, int] = {}
    data = ablation.run(device="cpu", on_progress=lambda name, done: steps.update({name: done}))
    assert set(steps.values()) == {4}
    assert len(steps) == 4
    assert json.loads((tmp_path / "a" / "results.json").read_text()) == data
    first, second = data["variants"]
    losses = [[run["loss"] for run in data["runs"] if run["variant"] == row["variant"]] for row in (first, second)]
    differences = [b - a for a, b in zip(*losses, strict=True)]
    assert second["difference"]["mean"] == pytest.approx(sum(differences) / 2)
    assert first["peak_memory"] > 16 * first["parameters"]  # weights, gradients, two moments
    assert all(len(run["curve"]) == 4 for run in data["runs"])
    assert [path.name for path in sorted((tmp_path / "a").glob("*.svg"))] == ["curves.svg", "losses.svg"]
    assert "norm=rmsnorm" in data["findings"][0]
    for run in (tmp_path / "a" / "runs").iterdir():
        assert ct.load(run).config.decoder.norm.kind in run.name  # normal run directories, each with its model

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a" / "runs").rglob("*")}
    again = build_ablation(small_recipe(texts), ["norm=layernorm,rmsnorm"], output_dir=tmp_path / "a", num_seeds=2)
    assert again.run(device="cpu") == data
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a" / "runs").rglob("*")} == before
    longer = small_recipe(texts, training={"max_steps": 5, "batch_size": 4})
    other = build_ablation(longer, ["norm=layernorm,rmsnorm"], output_dir=tmp_path / "a", num_seeds=2)
    with pytest.raises(CutawayError, match="another recipe"):
        other.run(device="cpu")


@pytest.mark.unchecked
@pytest.mark.nightly
def test_killed_ablation_resumes_to_the_same_outcomes(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished runs are kept, others resume from their checkpoint; workers exit with their parent."""
    source, killed = tmp_path / "recipe.json", tmp_path / "killed"
    source.write_text(json.dumps(small_recipe(texts)))

    def run_ablation(output_dir: Path) -> None:
        ablation = build_ablation(str(source), ["placement=pre,post"], output_dir=output_dir, num_seeds=1)
        ablation.run(device="cpu", num_workers=1)

    run_ablation(tmp_path / "uninterrupted")
    with monkeypatch.context() as patch:
        patch.setenv("CUTAWAY_FAILPOINT", "after-step:3")
        with pytest.raises(CutawayError, match="died"):
            run_ablation(killed)
    assert not read_outcomes(killed)
    code = "from cutaway.cli import main; main()"
    command = [sys.executable, "-c", code, "ablate", str(source), "--vary", "placement=pre,post", "--num-seeds", "1"]
    process = subprocess.Popen([*command, "--jobs", "1", "--device", "cpu", "--out", str(killed)])
    while process.poll() is None and not read_outcomes(killed):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()

    run_ablation(killed)
    assert read_outcomes(killed) == read_outcomes(tmp_path / "uninterrupted")


@pytest.mark.nightly
def test_diverging_run_is_counted_as_failed(texts: Path, tmp_path: Path) -> None:
    recipe = small_recipe(texts, optimizer={"kind": "sgd"})
    ablation = build_ablation(recipe, ["optimizer.lr=0.01,1e25"], output_dir=tmp_path / "a", num_seeds=1)
    data = ablation.run(device="cpu")
    assert [row["failed"] for row in data["variants"]] == [0, 1]
    assert data["variants"][1]["loss"] is None
    assert "1 of 1 runs failed" in data["findings"][0]


@pytest.mark.nightly
@pytest.mark.unchecked
def test_ablate_command(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "recipe.json"
    source.write_text(json.dumps(small_recipe(texts)))
    arguments = ["cutaway", "ablate", str(source), "--vary", "heads=4,2", "--num-seeds", "2", "--device", "cpu"]
    arguments += ["--match", "parameters", "--out", str(tmp_path / "a")]
    for extra in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", arguments + extra)
        with pytest.raises(SystemExit) as exit_info:
            main()
        assert exit_info.value.code == 0
    output = capsys.readouterr().out
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [row["variant"] for row in rows if "parameters" in row] == ["heads=4", "heads=2"]
    assert any("finding" in row for row in rows)
    assert "nats per token" in output
    assert "heads=2" in output
    monkeypatch.setattr(sys, "argv", ["cutaway", "ablate", str(source), "--vary", "heads=4", "--match", "beauty"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2


# Measurements


def test_removed_component_equals_a_model_without_it() -> None:
    """Without its last block, positions or a head: a model built without them, with the same weights."""
    model = ct.build("tiny-llama", seed=0)
    tokens = torch.arange(24).view(2, 12)
    shallower = ct.build(apply_shorthand(model.config, "depth", "3"))
    shallower.load_state_dict({name: value for name, value in model.state_dict().items() if "blocks.3" not in name})
    with ct.edit(model, {"blocks.3": "skip"}):
        torch.testing.assert_close(model(tokens), shallower(tokens))
    without_positions = ct.build(apply_shorthand(model.config, "position", "none"))
    without_positions.load_state_dict(model.state_dict())
    with ct.edit(model, {"positions": "drop"}):
        torch.testing.assert_close(model(tokens), without_positions(tokens))
    without_head = ct.build("tiny-llama", seed=0)
    with torch.no_grad():
        without_head.decoder.blocks[1].attn.f.o.weight[:, 32:48] = 0
    with ct.edit(model, {"blocks.1.attn.z": {"do": "zero", "heads": [2]}}):
        torch.testing.assert_close(model(tokens), without_head(tokens))


def test_order_matters_only_through_positions_and_mask() -> None:
    tokens = torch.randint(0, 250, (3, 16), generator=torch.Generator().manual_seed(0))
    base = read_config("tiny-llama")
    for method in ("none", "sinusoidal", "learned", "rope", "alibi", "relative-bias"):
        model = ct.build(apply_shorthand(base, "position", method), seed=0)
        with ct.edit(model, {"mask": "drop"}):
            unmasked = permutation_sensitivity(model, tokens)
        assert (unmasked < 1e-5) == (method == "none"), method
        assert permutation_sensitivity(model, tokens) > 1e-2
        assert (shift_sensitivity(model, tokens) < 1e-4) == (method not in ("sinusoidal", "learned")), method
    assert token_losses(model, tokens).shape == (3, 15)


def build_small_study(name: str, texts: Path, output_dir: Path) -> Ablation:
    """A study on little text, for two steps."""
    study = STUDIES[name]()
    recipe = {**study.recipe, "data": {"seq_len": 8, "validation_split": 0.3, "sources": [{"path": str(texts)}]}}
    recipe |= {
        "training": {"max_steps": 2, "batch_size": 2},
        "eval": {"interval": 2, "num_sequences": 4},
        "checkpoint": {"interval": 2},
    }
    plan = build_plan(
        name,
        load_recipe(recipe),
        study.variants,
        output_dir,
        num_seeds=1,
        match=study.match,
        measurement=study.measurement,
    )
    return Ablation(plan, output_dir, study)


@pytest.mark.nightly
@pytest.mark.parametrize("name", STUDIES)
def test_studies_measure_what_they_compare(name: str, texts: Path, tmp_path: Path) -> None:
    ablation = build_small_study(name, texts, tmp_path / "a")
    data = ablation.run(device="cpu", num_workers=2)
    assert ablation.study is not None
    measured = {(row["condition"], row["metric"]) for row in data["measurements"]}
    if ablation.study.rows == "variants":
        assert set(ablation.study.columns) <= measured
    else:
        assert {metric for _, metric in ablation.study.columns} <= {metric for _, metric in measured}
    assert len(data["findings"]) >= len(data["variants"]) - 1
    assert all("one seed, no interval" in sentence for sentence in data["findings"])
    for variant in ablation.plan.variants:  # an exported model would not include edits
        run = ablation.plan.run_directory(ablation.output_dir, variant, 0)
        assert (run / "model").exists() == (not variant.edits)
