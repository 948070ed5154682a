"""Readings of a model that learns: they are what the equations say, and change nothing."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import model_bytes, read_metrics, tiny_recipe_in

import cutaway as ct
from cutaway.model import Transformer
from cutaway.train.objectives.masking import masked_lm
from cutaway.train.objectives.objective import Objective, causal_lm, seq2seq
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer import layer_stats
from cutaway.train.trainer.launch import prepare_trainer, train
from cutaway.train.trainer.layer_stats import (
    UpdateStats,
    attention_entropy,
    compute_layer_stats,
    layer_warnings,
    record_activations,
)
from cutaway.train.trainer.trainer import Trainer
from cutaway.train.trainer.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("skip_preflight")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def with_dropout() -> dict[str, Any]:
    config = ct.config("tiny-gpt")
    return config.replace(decoder=config.decoder.replace(dropout=0.1)).model_dump(mode="json")


def test_readings_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout too draws the same."""
    how = tiny_recipe_in(tmp_path, model=with_dropout())
    train(how, tmp_path / "seen", device="cpu")
    assert sum("layer_stats" in row for row in read_metrics(tmp_path / "seen")) == 3
    monkeypatch.setattr(Trainer, "evaluate", lambda self: None)
    monkeypatch.setattr(Trainer, "should_evaluate", lambda self, step: False)
    train(how, tmp_path / "unseen", device="cpu")
    assert model_bytes(tmp_path / "seen") == model_bytes(tmp_path / "unseen")


def test_readings_in_bf16(tmp_path: Path) -> None:
    how = tiny_recipe_in(tmp_path, training={"precision": "bf16", "max_steps": 2})
    last = read_metrics(train(how, tmp_path / "run", device="cpu").directory)[-1]["layer_stats"]
    assert all(0 < each < 5.1 for bits in last["attn_entropy"].values() for each in bits)
    assert all(each > 0 for what in ("grad_norm", "update_ratio", "resid_norm") for each in last[what].values())
    assert last["warnings"] == []


def test_a_step_is_measured_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = prepare_trainer(load_recipe(tiny_recipe_in(tmp_path)), tmp_path / "run", device="cpu")
    trainer.train_step(0)
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    row = trainer.train_step(4)  # the fifth is followed by a look
    changes = trainer.train_step_runner.update_stats
    assert changes is not None
    lengths, shares = changes.grad_norms(), changes.update_ratios()
    assert list(lengths) == ["embed", "blocks.0", "blocks.1", "final_norm"]
    assert math.hypot(*lengths.values()) == pytest.approx(float(row["grad_norm"]), rel=1e-5)
    mine = {name: each for name, each in trainer.model.named_parameters() if "blocks.1." in name}
    moved = math.hypot(*(float((each.detach() - before[name]).norm()) for name, each in mine.items()))
    whole = math.hypot(*(float(before[name].norm()) for name in mine))
    assert shares["blocks.1"] == pytest.approx(moved / whole, rel=1e-4)
    monkeypatch.setattr(layer_stats, "SAMPLE_SIZE", 100)  # of large tensors some values stand for all
    again = UpdateStats(trainer.optimizer.parameters)
    for each in trainer.model.parameters():
        each.data.mul_(1.01)
    assert again.update_ratios()["blocks.1"] == pytest.approx(0.01, rel=1e-3)
    trainer.train_step(5)
    assert trainer.train_step_runner.update_stats is None


def task_for(model: Transformer) -> Objective:
    tokens = torch.randint(0, 200, (2, 12))
    match model.config.form:
        case "decoder":
            return causal_lm(tokens)
        case "encoder":
            return masked_lm(tokens, mask_id=3, vocab_size=200, mlm_probability=0.5, seed=0, positions=[0, 1])
    return seq2seq(tokens, None, tokens[:, :9], None)


FORMS = ["tiny-gpt", "tiny-gemma", "tiny-moe", "tiny-mla", "tiny-bert", "tiny-albert", "tiny-t5", "tiny-bart"]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read_and_left_as_it_was(name: str) -> None:
    model = ct.build(ct.config(name), seed=0).eval()
    task = task_for(model)
    with torch.no_grad():
        before = task.hidden_states(model)
    kernels = [module.kernel for module in model.modules() if hasattr(module, "build_kernel")]
    found = compute_layer_stats(TrainingModule(model, load_recipe({})), task, None)
    assert [module.kernel for module in model.modules() if hasattr(module, "build_kernel")] == kernels
    assert not any(module._forward_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(task.hidden_states(model), before)
    two = len(model.stacks) > 1
    layers = [
        f"{stack}.blocks.{layer}" if two else f"blocks.{layer}"
        for stack, each in model.stacks.items()
        for layer in range(len(each.blocks))
    ]
    assert list(found["resid_norm"]) == layers
    assert [layer for layer in found["attn_entropy"] if not layer.endswith("cross")] == layers
    assert sum(layer.endswith("cross") for layer in found["attn_entropy"]) == (
        len(model.stacks["decoder"].blocks) if two else 0
    )
    for bits in found["attn_entropy"].values():
        assert all(0 < each <= math.log2(12) + 1e-3 for each in bits)
    assert layer_warnings(found, model.config.d_model) == []


def test_the_stream_and_the_patterns_are_the_models_own() -> None:
    model = ct.build(ct.config("tiny-gpt"), seed=0).eval()
    for block in model.stacks["decoder"].blocks:
        block.attn.f.q.weight.data.zero_()  # every query sees all that it may alike
        block.attn.f.q.bias.data.zero_()
    tokens = torch.randint(0, 200, (1, 9))
    found = compute_layer_stats(TrainingModule(model, load_recipe({})), causal_lm(tokens), None)
    alike = sum(math.log2(count) for count in range(2, 9)) / 7
    for bits in found["attn_entropy"].values():
        assert bits == pytest.approx([alike] * len(bits), rel=1e-3)
    for block in model.stacks["decoder"].blocks:  # with nothing added, the stream is the embedding all the way
        for part in (block.attn.f.o, block.ffn.f.down):
            part.weight.data.zero_()
            part.bias.data.zero_()
    stack = model.stacks["decoder"]
    kept: list[torch.Tensor] = []
    handle = stack.embed.register_forward_hook(lambda module, given, out: kept.append(out))
    found = compute_layer_stats(TrainingModule(model, load_recipe({})), causal_lm(tokens), None)
    handle.remove()
    length = float(kept[0].norm(dim=-1).mean())
    assert list(found["resid_norm"].values()) == pytest.approx([length] * 2, rel=1e-3)


def test_hooks_go_even_when_a_pass_fails() -> None:
    model = ct.build(ct.config("tiny-gpt"), seed=0)
    kernels = [block.attn.f.kernel for block in model.stacks["decoder"].blocks]
    with pytest.raises(ZeroDivisionError), record_activations(model):
        raise ZeroDivisionError
    assert [block.attn.f.kernel for block in model.stacks["decoder"].blocks] == kernels
    assert not any(module._forward_hooks for module in model.modules())


def test_entropy_counts_queries_that_can_choose() -> None:
    scores = torch.tensor([[[[0.0, -math.inf], [0.0, 0.0]]]])
    assert attention_entropy(scores, scores.softmax(-1)).tolist() == pytest.approx([1.0])  # type: ignore[union-attr]
    sunk = 0.5 * scores.softmax(-1)  # a sink takes a half
    assert attention_entropy(scores, sunk).tolist() == pytest.approx([1.5])  # type: ignore[union-attr]
    assert attention_entropy(scores[..., :1, :], scores[..., :1, :].softmax(-1)) is None


def test_what_is_wrong_is_said_in_words() -> None:
    found = {
        "grad_norm": {"embed": 0.1, "blocks.0": 0.0, "blocks.1": math.inf},
        "update_ratio": {"embed": 0.001, "blocks.0": 0.9},
        "resid_norm": {"blocks.0": 4.0, "blocks.1": 1e6},
        "attn_entropy": {"blocks.0": [0.001, 2.0, 0.0], "blocks.1": [1.0, 0.0, 3.0]},
    }
    assert layer_warnings(found, 64) == [
        "blocks.0 learns nothing: its gradient is 0",
        "the gradient of blocks.1 is not finite",
        "blocks.0 changed by 90% in one step; lower optimizer.lr",
        "the stream explodes at blocks.1: a token's length there is 1e+06",
        "blocks.0: heads 0, 2 collapsed, seeing one token only",
        "blocks.1: head 1 collapsed, seeing one token only",
    ]
