"""Layer statistics equal their definitions and do not change the run."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import model_bytes, read_metrics, tiny_recipe_in

import cutaway as ct
from cutaway.model import Transformer
from cutaway.train.objectives.masked_lm import masked_lm
from cutaway.train.objectives.objective import Objective, causal_lm, seq2seq
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import NUM_BYTE_TOKENS
from cutaway.train.trainer import layer_stats
from cutaway.train.trainer.launch import prepare_trainer, train
from cutaway.train.trainer.layer_stats import (
    UpdateStats,
    attention_entropy,
    compute_layer_stats,
    layer_warnings,
)
from cutaway.train.trainer.trainer import Trainer
from cutaway.train.trainer.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("skip_preflight")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def config_with_dropout() -> dict[str, Any]:
    config = ct.config("tiny-gpt")
    table = config.replace(decoder=config.decoder.replace(dropout=0.1)).model_dump(mode="json")
    return table | {"vocab_size": NUM_BYTE_TOKENS}


def test_layer_stats_do_not_change_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout masks are the same too."""
    recipe = tiny_recipe_in(tmp_path, model=config_with_dropout())
    train(recipe, tmp_path / "with", device="cpu")
    assert sum("layer_stats" in row for row in read_metrics(tmp_path / "with")) == 3
    monkeypatch.setattr(Trainer, "evaluate", lambda self: None)
    monkeypatch.setattr(Trainer, "should_evaluate", lambda self, step: False)
    train(recipe, tmp_path / "without", device="cpu")
    assert model_bytes(tmp_path / "with") == model_bytes(tmp_path / "without")


def test_layer_stats_in_bf16(tmp_path: Path) -> None:
    recipe = tiny_recipe_in(tmp_path, training={"precision": "bf16", "max_steps": 2})
    stats = read_metrics(train(recipe, tmp_path / "run", device="cpu").directory)[-1]["layer_stats"]
    assert all(0 < entropy < 5.1 for bits in stats["attn_entropy"].values() for entropy in bits)
    assert all(value > 0 for name in ("grad_norm", "update_ratio", "resid_norm") for value in stats[name].values())
    assert stats["warnings"] == []


def test_gradient_norms_in_fp16_have_no_loss_scale(tmp_path: Path) -> None:
    recipe = tiny_recipe_in(tmp_path, training={"precision": "fp16", "max_steps": 2})
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu")
    metrics = trainer.train_step(1)  # an evaluation follows the last step
    assert float(metrics["loss_scale"]) > 1
    update_stats = trainer.train_step_runner.update_stats
    assert update_stats is not None
    norms = update_stats.grad_norms()
    assert math.hypot(*norms.values()) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)


def test_update_stats_equal_their_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = prepare_trainer(load_recipe(tiny_recipe_in(tmp_path)), tmp_path / "run", device="cpu")
    trainer.train_step(0)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    metrics = trainer.train_step(4)  # an evaluation follows the fifth step
    update_stats = trainer.train_step_runner.update_stats
    assert update_stats is not None
    grad_norms, update_ratios = update_stats.grad_norms(), update_stats.update_ratios()
    assert list(grad_norms) == ["embed", "blocks.0", "blocks.1", "final_norm"]
    assert math.hypot(*grad_norms.values()) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
    block = {name: parameter for name, parameter in trainer.model.named_parameters() if "blocks.1." in name}
    change = math.hypot(*(float((parameter.detach() - before[name]).norm()) for name, parameter in block.items()))
    norm = math.hypot(*(float(before[name].norm()) for name in block))
    assert update_ratios["blocks.1"] == pytest.approx(change / norm, rel=1e-4)
    monkeypatch.setattr(layer_stats, "SAMPLE_SIZE", 100)  # large tensors are sampled
    sampled = UpdateStats(trainer.optimizer.parameters)
    for parameter in trainer.model.parameters():
        parameter.data.mul_(1.01)
    assert sampled.update_ratios()["blocks.1"] == pytest.approx(0.01, rel=1e-3)
    trainer.train_step(5)
    assert trainer.train_step_runner.update_stats is None


def objective_for(model: Transformer) -> Objective:
    tokens = torch.randint(0, 200, (2, 12))
    match model.config.form:
        case "decoder":
            return causal_lm(tokens)
        case "encoder":
            return masked_lm(tokens, mask_id=3, vocab_size=200, mlm_probability=0.5, seed=0, positions=[0, 1])
    return seq2seq(tokens, None, tokens[:, :9], None)


PRESETS = ["tiny-gpt", "tiny-gemma", "tiny-moe", "tiny-mla", "tiny-bert", "tiny-albert", "tiny-t5", "tiny-bart"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_form_is_analyzed_and_not_changed(name: str) -> None:
    model = ct.build(ct.config(name), seed=0).eval()
    objective = objective_for(model)
    with torch.no_grad():
        before = objective.hidden_states(model)
    kernels = [module.kernel for module in model.modules() if hasattr(module, "build_kernel")]
    stats = compute_layer_stats(TrainingModule(model), objective, None)
    assert [module.kernel for module in model.modules() if hasattr(module, "build_kernel")] == kernels
    assert not any(module._forward_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(objective.hidden_states(model), before)
    has_two_stacks = len(model.stacks) > 1
    layers = [
        f"{name}.blocks.{layer}" if has_two_stacks else f"blocks.{layer}"
        for name, stack in model.stacks.items()
        for layer in range(len(stack.blocks))
    ]
    assert list(stats["resid_norm"]) == layers
    assert [layer for layer in stats["attn_entropy"] if not layer.endswith("cross")] == layers
    assert sum(layer.endswith("cross") for layer in stats["attn_entropy"]) == (
        len(model.stacks["decoder"].blocks) if has_two_stacks else 0
    )
    for bits in stats["attn_entropy"].values():
        assert all(0 < entropy <= math.log2(12) + 1e-3 for entropy in bits)
    assert layer_warnings(stats, model.config.d_model) == []


def test_entropy_and_residual_norm_equal_known_values() -> None:
    model = ct.build(ct.config("tiny-gpt"), seed=0).eval()
    for block in model.stacks["decoder"].blocks:
        block.attn.f.q.weight.data.zero_()  # uniform attention over visible tokens
        block.attn.f.q.bias.data.zero_()
    tokens = torch.randint(0, 200, (1, 9))
    stats = compute_layer_stats(TrainingModule(model), causal_lm(tokens), None)
    uniform_entropy = sum(math.log2(count) for count in range(2, 9)) / 7
    for bits in stats["attn_entropy"].values():
        assert bits == pytest.approx([uniform_entropy] * len(bits), rel=1e-3)
    for block in model.stacks["decoder"].blocks:  # with zero sublayer outputs the residual stream is the embedding
        for projection in (block.attn.f.o, block.ffn.f.down):
            projection.weight.data.zero_()
            projection.bias.data.zero_()
    stack = model.stacks["decoder"]
    embeddings: list[torch.Tensor] = []
    handle = stack.embed.register_forward_hook(lambda module, args, output: embeddings.append(output))
    stats = compute_layer_stats(TrainingModule(model), causal_lm(tokens), None)
    handle.remove()
    norm = float(embeddings[0].norm(dim=-1).mean())
    assert list(stats["resid_norm"].values()) == pytest.approx([norm] * 2, rel=1e-3)


def test_hooks_are_removed_after_an_error() -> None:
    model = ct.build(ct.config("tiny-gpt"), seed=0)
    model.stacks["decoder"].blocks[1].ffn.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compute_layer_stats(TrainingModule(model), causal_lm(torch.randint(0, 200, (1, 9))), None)
    assert not any(module._forward_hooks for module in model.modules())


def test_entropy_is_averaged_over_queries_with_more_than_one_visible_key() -> None:
    scores = torch.tensor([[[[0.0, -math.inf], [0.0, 0.0]]]])
    num_visible = torch.tensor([[[1, 2]]])
    assert attention_entropy(num_visible, scores.softmax(-1)).tolist() == pytest.approx([1.0])  # type: ignore[union-attr]
    with_sink = 0.5 * scores.softmax(-1)  # the sink has probability 0.5
    assert attention_entropy(num_visible, with_sink).tolist() == pytest.approx([1.5])  # type: ignore[union-attr]
    assert attention_entropy(num_visible[..., :1], scores[..., :1, :].softmax(-1)) is None


def test_layer_warnings() -> None:
    stats = {
        "grad_norm": {"embed": 0.1, "blocks.0": 0.0, "blocks.1": math.inf},
        "update_ratio": {"embed": 0.001, "blocks.0": 0.9},
        "resid_norm": {"blocks.0": 4.0, "blocks.1": 1e6},
        "attn_entropy": {"blocks.0": [0.001, 2.0, 0.0], "blocks.1": [1.0, 0.0, 3.0]},
    }
    assert layer_warnings(stats, 64) == [
        "blocks.0 does not train: its gradient is 0",
        "blocks.1: the gradient is not finite",
        "blocks.0 changed by 90% in one step; lower optimizer.lr",
        "the residual stream explodes at blocks.1: its mean norm is 1e+06",
        "blocks.0: heads 0, 2 collapsed to one token",
        "blocks.1: head 1 collapsed to one token",
    ]
