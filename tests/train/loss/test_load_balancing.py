"""A mixture of experts that is made to use them alike: the plain formula's gradient, and the outcome."""

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

WEIGHT = 0.3


@pytest.fixture
def how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return tiny_recipe(tmp_path / "text.txt", model="tiny-moe", eval={"sample_prompt": None})


def asked(weight: float) -> Recipe:
    return load_recipe({"objective": {"aux_loss_coef": weight}})


def task_for(model: Any) -> Objective:
    return causal_lm(torch.randint(0, model.config.vocab_size, (3, 17)))


def gradients(model: Any, total: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(total, list(named.values()), materialize_grads=True), strict=True))


def plainly(model: Any, task: Objective) -> Tensor:
    """Cross-entropy and the formula, token by token and expert by expert, from logits."""
    every: list[Tensor] = []

    def note(router: Any, given: Any, made: Any) -> None:
        logits = given[0] @ router.weight.T + (0 if router.bias is None else router.bias)
        scores = logits.softmax(-1) if router.use_softmax else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        tokens, experts = logits.shape
        total = torch.zeros(())
        for expert in range(experts):
            hits = sum(int(expert in row) for row in made[1].tolist())
            total = total + experts * (hits / (tokens * router.top_k)) * (scores[:, expert].sum() / tokens)
        every.append(total)

    hooks = [each.register_forward_hook(note) for each in model.modules() if isinstance(each, Router)]
    logits = model(*task.inputs)
    for hook in hooks:
        hook.remove()
    entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), task.targets.flatten(), reduction="sum")
    return entropy + WEIGHT * task.targets.numel() * sum(every) / len(every)


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-mla"])
def test_its_gradient_is_the_plain_formulas(name: str) -> None:
    """Of softmax and of sigmoid routers."""
    model: Any = ct.build(name, seed=0)
    routers = [each for each in model.modules() if isinstance(each, Router)]
    assert routers
    task = task_for(model)
    loss = TrainingModule(model, asked(WEIGHT))(task)
    plain = plainly(model, task)
    torch.testing.assert_close(loss.loss, plain, rtol=1e-5, atol=1e-5)
    expected = gradients(model, plain)
    for key, gradient in gradients(model, loss.loss).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-4)
    without = TrainingModule(model, asked(0.0))(task)
    assert torch.equal(without.cross_entropy, loss.cross_entropy)
    assert loss.loss > without.loss
    assert not any(each._forward_hooks for each in routers)
    with torch.no_grad():
        assert torch.equal(TrainingModule(model, asked(WEIGHT))(task).loss, without.loss)


def test_even_use_is_one_and_the_worst_is_the_number_of_experts() -> None:
    router: Any = Router(ct.config("tiny-moe").decoder.blocks[0].ffn.router, 4, 4)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4) * 50)
    even = torch.eye(4) + torch.eye(4).roll(1, 0)  # two experts a token, each as often as any other
    found = [(router, x, router(x)[1]) for x in (even, even[:1].expand(8, -1))]
    assert load_balancing_loss(found[:1]).item() == pytest.approx(1.0)
    assert load_balancing_loss(found[1:]).item() == pytest.approx(2.0)  # two of four get all, half each


def test_blocks_that_are_computed_again_give_the_same_gradient() -> None:
    model: Any = ct.build("tiny-moe", seed=0).train()
    task = task_for(model)
    kept = gradients(model, TrainingModule(model, asked(WEIGHT))(task).loss)
    for mode in ("selective", "full"):
        model.use_activation_checkpointing(mode)
        again = gradients(model, TrainingModule(model, asked(WEIGHT))(task).loss)
        assert all(torch.equal(again[name], gradient) for name, gradient in kept.items())


def unevenness(how: dict[str, Any], directory: Path, *changes: str) -> tuple[float, float]:
    """The balance on text that was not learned from, after some steps from a router that likes one expert; the loss."""
    trainer = prepare_trainer(load_recipe(how, changes), directory, device="cpu")
    with torch.no_grad():
        for router in (each for each in trainer.model.modules() if isinstance(each, Router)):
            router.weight[1:] *= 0.1
    trainer.train()
    task = trainer.objective_fn(trainer.data.validation.get_batch(0, 8), 0)
    with torch.no_grad(), record_routing(trainer.model) as seen:
        loss = task.loss(trainer.model.eval())
        return float(load_balancing_loss(seen)), float(loss.cross_entropy / loss.weight)


def test_it_spreads_the_load(how: dict[str, Any], tmp_path: Path) -> None:
    how["training"]["max_steps"] = 12
    uneven, loss = unevenness(how, tmp_path / "without")
    even, other = unevenness(how, tmp_path / "with", "objective.aux_loss_coef=0.3")
    assert uneven > 1.1
    assert even < 1 + 0.5 * (uneven - 1)
    assert other < 1.1 * loss


def test_a_model_without_experts_is_refused(how: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CutawayError, match="has no experts to use alike"):
        prepare_trainer(
            load_recipe(how, ["model=tiny-gpt", "objective.aux_loss_coef=0.01"]), tmp_path / "run", device="cpu"
        )
    with pytest.raises(CutawayError, match="which compiled blocks hide"):
        prepare_trainer(
            load_recipe(how, ["objective.aux_loss_coef=0.01", "training.compile=true"]), tmp_path / "run", device="cpu"
        )
    assert not (tmp_path / "run").exists()
