"""A mixture of experts that is made to use them alike: the plain formula's gradient, and the outcome."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import TEXT, small
from torch import Tensor

import cutaway as ct
from cutaway.errors import CutawayError
from cutaway.model.moe import Router
from cutaway.train import objectives
from cutaway.train.balance import balance, watched
from cutaway.train.learner import Learner
from cutaway.train.objectives import Task
from cutaway.train.recipe import Recipe, recipe
from cutaway.train.start import begin

WEIGHT = 0.3


@pytest.fixture
def how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return small(tmp_path / "text.txt", model="tiny-moe", watching={"sample": None})


def asked(weight: float) -> Recipe:
    return recipe({"objective": {"balance": weight}})


def task_for(model: Any) -> Task:
    return objectives.next_token(torch.randint(0, model.config.vocab_size, (3, 17)))


def gradients(model: Any, total: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(total, list(named.values()), materialize_grads=True), strict=True))


def plainly(model: Any, task: Task) -> Tensor:
    """Cross-entropy and the formula, token by token and expert by expert, from logits."""
    every: list[Tensor] = []

    def note(router: Any, given: Any, made: Any) -> None:
        logits = given[0] @ router.weight.T + (0 if router.bias is None else router.bias)
        scores = logits.softmax(-1) if router.softmax else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        tokens, experts = logits.shape
        total = torch.zeros(())
        for expert in range(experts):
            hits = sum(int(expert in row) for row in made[1].tolist())
            total = total + experts * (hits / (tokens * router.top_k)) * (scores[:, expert].sum() / tokens)
        every.append(total)

    hooks = [each.register_forward_hook(note) for each in model.modules() if isinstance(each, Router)]
    logits = model(*task.reads)
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
    loss = Learner(model, asked(WEIGHT))(task)
    plain = plainly(model, task)
    torch.testing.assert_close(loss.total, plain, rtol=1e-5, atol=1e-5)
    expected = gradients(model, plain)
    for key, gradient in gradients(model, loss.total).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-4)
    without = Learner(model, asked(0.0))(task)
    assert torch.equal(without.entropy_total, loss.entropy_total)
    assert loss.total > without.total
    assert not any(each._forward_hooks for each in routers)
    with torch.no_grad():
        assert torch.equal(Learner(model, asked(WEIGHT))(task).total, without.total)


def test_even_use_is_one_and_the_worst_is_the_number_of_experts() -> None:
    router: Any = Router(ct.config("tiny-moe").decoder.blocks[0].ffn.router, 4, 4)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4) * 50)
    even = torch.eye(4) + torch.eye(4).roll(1, 0)  # two experts a token, each as often as any other
    found = [(router, x, router(x)[1]) for x in (even, even[:1].expand(8, -1))]
    assert balance(found[:1]).item() == pytest.approx(1.0)
    assert balance(found[1:]).item() == pytest.approx(2.0)  # two of four get all, half each


def test_blocks_that_are_computed_again_give_the_same_gradient() -> None:
    model: Any = ct.build("tiny-moe", seed=0).train()
    task = task_for(model)
    kept = gradients(model, Learner(model, asked(WEIGHT))(task).total)
    for mode in ("selective", "full"):
        model.use_recompute(mode)
        again = gradients(model, Learner(model, asked(WEIGHT))(task).total)
        assert all(torch.equal(again[name], gradient) for name, gradient in kept.items())


def unevenness(how: dict[str, Any], directory: Path, *changes: str) -> tuple[float, float]:
    """The balance on text that was not learned from, after some steps from a router that likes one expert; the loss."""
    loop = begin(recipe(how, changes), directory, device="cpu")
    with torch.no_grad():
        for router in (each for each in loop.model.modules() if isinstance(each, Router)):
            router.weight[1:] *= 0.1
    loop.go()
    task = loop.task(loop.reading.validation.batch(0, 8), 0)
    with torch.no_grad(), watched(loop.model) as seen:
        loss = task.loss(loop.model.eval())
        return float(balance(seen)), float(loss.entropy_total / loss.weight)


def test_it_spreads_the_load(how: dict[str, Any], tmp_path: Path) -> None:
    how["training"]["steps"] = 12
    uneven, loss = unevenness(how, tmp_path / "without")
    even, other = unevenness(how, tmp_path / "with", "objective.balance=0.3")
    assert uneven > 1.1
    assert even < 1 + 0.5 * (uneven - 1)
    assert other < 1.1 * loss


def test_a_model_without_experts_is_refused(how: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CutawayError, match="has no experts to use alike"):
        begin(recipe(how, ["model=tiny-gpt", "objective.balance=0.01"]), tmp_path / "run", device="cpu")
    with pytest.raises(CutawayError, match="which compiled blocks hide"):
        begin(recipe(how, ["objective.balance=0.01", "training.compile=true"]), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
