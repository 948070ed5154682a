"""Readings of a model that learns: they are what the equations say, and change nothing."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import rows_of, small, weights_of

import cutaway as ct
from cutaway.model import Transformer
from cutaway.train import health
from cutaway.train.health import Changes, entropy, read, troubles, watched
from cutaway.train.learner import Learner
from cutaway.train.loop import Loop
from cutaway.train.objectives import Task, masked, next_token, seq2seq
from cutaway.train.recipe import recipe
from cutaway.train.start import begin, train


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def with_dropout() -> dict[str, Any]:
    config = ct.config("tiny-gpt")
    return config.replace(decoder=config.decoder.replace(dropout=0.1)).model_dump(mode="json")


def test_readings_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout too draws the same."""
    how = small(tmp_path, model=with_dropout())
    train(how, tmp_path / "seen", device="cpu")
    assert sum("health" in row for row in rows_of(tmp_path / "seen")) == 3
    monkeypatch.setattr(Loop, "look", lambda self: None)
    monkeypatch.setattr(Loop, "looks", lambda self, done: False)
    train(how, tmp_path / "unseen", device="cpu")
    assert weights_of(tmp_path / "seen") == weights_of(tmp_path / "unseen")


def test_readings_in_bf16(tmp_path: Path) -> None:
    how = small(tmp_path, training={"precision": "bf16", "steps": 2})
    last = rows_of(train(how, tmp_path / "run", device="cpu").directory)[-1]["health"]
    assert all(0 < each < 5.1 for bits in last["entropy"].values() for each in bits)
    assert all(each > 0 for what in ("gradient", "update", "stream") for each in last[what].values())
    assert last["troubles"] == []


def test_a_step_is_measured_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = begin(recipe(small(tmp_path)), tmp_path / "run", device="cpu")
    loop.step(0)
    before = {name: each.detach().clone() for name, each in loop.model.named_parameters()}
    row = loop.step(4)  # the fifth is followed by a look
    changes = loop.stepper.changes
    assert changes is not None
    lengths, shares = changes.gradient(), changes.update()
    assert list(lengths) == ["embed", "blocks.0", "blocks.1", "final_norm"]
    assert math.hypot(*lengths.values()) == pytest.approx(float(row["gradient"]), rel=1e-5)
    mine = {name: each for name, each in loop.model.named_parameters() if "blocks.1." in name}
    moved = math.hypot(*(float((each.detach() - before[name]).norm()) for name, each in mine.items()))
    whole = math.hypot(*(float(before[name].norm()) for name in mine))
    assert shares["blocks.1"] == pytest.approx(moved / whole, rel=1e-4)
    monkeypatch.setattr(health, "SAMPLE", 100)  # of large tensors some values stand for all
    again = Changes(loop.optimiser.parameters)
    for each in loop.model.parameters():
        each.data.mul_(1.01)
    assert again.update()["blocks.1"] == pytest.approx(0.01, rel=1e-3)
    loop.step(5)
    assert loop.stepper.changes is None


def task_for(model: Transformer) -> Task:
    tokens = torch.randint(0, 200, (2, 12))
    match model.config.form:
        case "decoder":
            return next_token(tokens)
        case "encoder":
            return masked(tokens, mask_id=3, vocab_size=200, rate=0.5, seed=0, positions=[0, 1])
    return seq2seq(tokens, None, tokens[:, :9], None)


FORMS = ["tiny-gpt", "tiny-gemma", "tiny-moe", "tiny-mla", "tiny-bert", "tiny-albert", "tiny-t5", "tiny-bart"]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read_and_left_as_it_was(name: str) -> None:
    model = ct.build(ct.config(name), seed=0).eval()
    task = task_for(model)
    with torch.no_grad():
        before = task.hidden(model)
    kernels = [module.kernel for module in model.modules() if hasattr(module, "make_kernel")]
    found = read(Learner(model, recipe({})), task, None)
    assert [module.kernel for module in model.modules() if hasattr(module, "make_kernel")] == kernels
    assert not any(module._forward_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(task.hidden(model), before)
    two = len(model.stacks) > 1
    layers = [
        f"{stack}.blocks.{layer}" if two else f"blocks.{layer}"
        for stack, each in model.stacks.items()
        for layer in range(len(each.blocks))
    ]
    assert list(found["stream"]) == layers
    assert [layer for layer in found["entropy"] if not layer.endswith("cross")] == layers
    assert sum(layer.endswith("cross") for layer in found["entropy"]) == (
        len(model.stacks["decoder"].blocks) if two else 0
    )
    for bits in found["entropy"].values():
        assert all(0 < each <= math.log2(12) + 1e-3 for each in bits)
    assert troubles(found, model.config.d_model) == []


def test_the_stream_and_the_patterns_are_the_models_own() -> None:
    model = ct.build(ct.config("tiny-gpt"), seed=0).eval()
    for block in model.stacks["decoder"].blocks:
        block.attn.f.q.weight.data.zero_()  # every query sees all that it may alike
        block.attn.f.q.bias.data.zero_()
    tokens = torch.randint(0, 200, (1, 9))
    found = read(Learner(model, recipe({})), next_token(tokens), None)
    alike = sum(math.log2(count) for count in range(2, 9)) / 7
    for bits in found["entropy"].values():
        assert bits == pytest.approx([alike] * len(bits), rel=1e-3)
    for block in model.stacks["decoder"].blocks:  # with nothing added, the stream is the embedding all the way
        for part in (block.attn.f.o, block.ffn.f.down):
            part.weight.data.zero_()
            part.bias.data.zero_()
    stack = model.stacks["decoder"]
    kept: list[torch.Tensor] = []
    handle = stack.embed.register_forward_hook(lambda module, given, out: kept.append(out))
    found = read(Learner(model, recipe({})), next_token(tokens), None)
    handle.remove()
    length = float(kept[0].norm(dim=-1).mean())
    assert list(found["stream"].values()) == pytest.approx([length] * 2, rel=1e-3)


def test_hooks_go_even_when_a_pass_fails() -> None:
    model = ct.build(ct.config("tiny-gpt"), seed=0)
    kernels = [block.attn.f.kernel for block in model.stacks["decoder"].blocks]
    with pytest.raises(ZeroDivisionError), watched(model):
        raise ZeroDivisionError
    assert [block.attn.f.kernel for block in model.stacks["decoder"].blocks] == kernels
    assert not any(module._forward_hooks for module in model.modules())


def test_entropy_counts_queries_that_can_choose() -> None:
    scores = torch.tensor([[[[0.0, -math.inf], [0.0, 0.0]]]])
    assert entropy(scores, scores.softmax(-1)).tolist() == pytest.approx([1.0])  # type: ignore[union-attr]
    sunk = 0.5 * scores.softmax(-1)  # a sink takes a half
    assert entropy(scores, sunk).tolist() == pytest.approx([1.5])  # type: ignore[union-attr]
    assert entropy(scores[..., :1, :], scores[..., :1, :].softmax(-1)) is None


def test_what_is_wrong_is_said_in_words() -> None:
    found = {
        "gradient": {"embed": 0.1, "blocks.0": 0.0, "blocks.1": math.inf},
        "update": {"embed": 0.001, "blocks.0": 0.9},
        "stream": {"blocks.0": 4.0, "blocks.1": 1e6},
        "entropy": {"blocks.0": [0.001, 2.0, 0.0], "blocks.1": [1.0, 0.0, 3.0]},
    }
    assert troubles(found, 64) == [
        "blocks.0 learns nothing: its gradient is 0",
        "the gradient of blocks.1 is not finite",
        "blocks.0 changed by 90% in one step; lower optimiser.rate",
        "the stream explodes at blocks.1: a token's length there is 1e+06",
        "blocks.0: heads 0, 2 collapsed, seeing one token only",
        "blocks.1: head 1 collapsed, seeing one token only",
    ]
