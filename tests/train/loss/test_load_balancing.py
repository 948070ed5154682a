"""Load-balancing loss: gradient equal to the formula, activation checkpointing, effect on training, errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import TEXT, tiny_recipe
from torch import Tensor

import cutaway as ct
from cutaway.errors import CutawayError
from cutaway.model.moe import Router
from cutaway.train.loss.load_balancing import load_balancing_loss, record_routing
from cutaway.train.objectives import Objective, causal_lm
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import Recipe
from cutaway.train.trainer.launch import prepare_trainer
from cutaway.train.trainer.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("skip_preflight")

AUX_LOSS_COEF = 0.3


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return tiny_recipe(tmp_path / "text.txt", model="tiny-moe", eval={"sample_prompt": None})


def recipe_with_aux_loss(coef: float) -> Recipe:
    return load_recipe({"objective": {"aux_loss_coef": coef}})


def build_objective(model: Any) -> Objective:
    return causal_lm(torch.randint(0, model.config.vocab_size, (3, 17)))


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()), materialize_grads=True), strict=True))


def reference_loss(model: Any, objective: Objective) -> Tensor:
    """Cross-entropy and the formula, token by token and expert by expert, from logits."""
    losses: list[Tensor] = []

    def record(router: Any, args: Any, output: Any) -> None:
        logits = args[0] @ router.weight.T + (0 if router.bias is None else router.bias)
        scores = logits.softmax(-1) if router.use_softmax else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        num_tokens, num_experts = logits.shape
        total = torch.zeros(())
        for expert in range(num_experts):
            count = sum(int(expert in row) for row in output[1].tolist())
            fraction = count / (num_tokens * router.top_k)
            total = total + num_experts * fraction * (scores[:, expert].sum() / num_tokens)
        losses.append(total)

    hooks = [module.register_forward_hook(record) for module in model.modules() if isinstance(module, Router)]
    logits = model(*objective.inputs)
    for hook in hooks:
        hook.remove()
    cross_entropy = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), objective.targets.flatten(), reduction="sum"
    )
    return cross_entropy + AUX_LOSS_COEF * objective.targets.numel() * sum(losses) / len(losses)


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-mla"])
def test_gradient_equals_the_formula(name: str) -> None:
    """For softmax and sigmoid routers."""
    model: Any = ct.build(name, seed=0)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    assert routers
    objective = build_objective(model)
    loss = TrainingModule(model, recipe_with_aux_loss(AUX_LOSS_COEF).objective)(objective)
    reference = reference_loss(model, objective)
    torch.testing.assert_close(loss.loss, reference, rtol=1e-5, atol=1e-5)
    expected = gradients(model, reference)
    for key, gradient in gradients(model, loss.loss).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-4)
    without = TrainingModule(model, recipe_with_aux_loss(0.0).objective)(objective)
    assert torch.equal(without.cross_entropy, loss.cross_entropy)
    assert loss.loss > without.loss
    assert not any(router._forward_hooks for router in routers)
    with torch.no_grad():
        loss = TrainingModule(model, recipe_with_aux_loss(AUX_LOSS_COEF).objective)(objective)
        assert torch.equal(loss.loss, without.loss)


def test_loss_is_1_for_uniform_use_and_grows_with_imbalance() -> None:
    router: Any = Router(ct.config("tiny-moe").decoder.blocks[0].ffn.router, 4, 4)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4) * 50)
    uniform = torch.eye(4) + torch.eye(4).roll(1, 0)  # two experts per token, all equally often
    records = [(router, x, router(x)[1]) for x in (uniform, uniform[:1].expand(8, -1))]
    assert load_balancing_loss(records[:1]).item() == pytest.approx(1.0)
    assert load_balancing_loss(records[1:]).item() == pytest.approx(2.0)  # two of four experts get half each


def test_activation_checkpointing_has_the_same_gradient() -> None:
    model: Any = ct.build("tiny-moe", seed=0).train()
    objective = build_objective(model)
    training_module = TrainingModule(model, recipe_with_aux_loss(AUX_LOSS_COEF).objective)
    expected = gradients(model, training_module(objective).loss)
    for mode in ("selective", "full"):
        model.use_activation_checkpointing(mode)
        recomputed = gradients(model, training_module(objective).loss)
        assert all(torch.equal(recomputed[name], gradient) for name, gradient in expected.items())


def train_with_biased_router(recipe: dict[str, Any], directory: Path, *overrides: str) -> tuple[float, float]:
    """Train with a router biased to one expert; return load-balancing loss and loss on validation data."""
    trainer = prepare_trainer(load_recipe(recipe, overrides), directory, device="cpu")
    with torch.no_grad():
        for router in (module for module in trainer.model.modules() if isinstance(module, Router)):
            router.weight[1:] *= 0.1
    trainer.train()
    objective = trainer.objective_fn(trainer.data.validation.get_batch(0, 8), 0)
    with torch.no_grad(), record_routing(trainer.model) as records:
        loss = objective.loss(trainer.model.eval())
        return float(load_balancing_loss(records)), float(loss.cross_entropy / loss.weight)


def test_aux_loss_balances_the_experts(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["training"]["max_steps"] = 12
    unbalanced, loss = train_with_biased_router(recipe, tmp_path / "without")
    balanced, aux_loss_run = train_with_biased_router(recipe, tmp_path / "with", "objective.aux_loss_coef=0.3")
    assert unbalanced > 1.1
    assert balanced < 1 + 0.5 * (unbalanced - 1)
    assert aux_loss_run < 1.1 * loss


def test_aux_loss_without_experts_or_with_compile_is_an_error(recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CutawayError, match="the model has no experts"):
        prepare_trainer(
            load_recipe(recipe, ["model=tiny-gpt", "objective.aux_loss_coef=0.01"]), tmp_path / "run", device="cpu"
        )
    overrides = ["objective.aux_loss_coef=0.01", "training.compile=true"]
    with pytest.raises(CutawayError, match="which compiled blocks do not call"):
        prepare_trainer(load_recipe(recipe, overrides), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
