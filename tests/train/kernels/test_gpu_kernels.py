"""Training on a GPU: the fused loss is the plain one, a fast step is a plain step, and nothing is left behind."""

from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.model import Transformer
from cutaway.train.kernels.compile import compile_for_training
from cutaway.train.loss.chunked_cross_entropy import chunked_cross_entropy_selected, select_targets
from cutaway.train.objectives import Objective, causal_lm
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume_trainer
from cutaway.train.trainer.training_module import TrainingModule

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("skip_preflight")]


@pytest.mark.parametrize(("label_smoothing", "z_loss_coef"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-3), (0.1, 1e-3)])
@pytest.mark.parametrize(("vocab", "rows"), [(257, 100), (50257, 640), (4096, 3000)])
def test_the_fused_loss_is_the_plain_one(vocab: int, rows: int, label_smoothing: float, z_loss_coef: float) -> None:
    torch.manual_seed(0)
    config = ct.config("tiny-gpt").replace(vocab_size=vocab)
    head = ct.build(config, device="cuda", seed=0).head
    assert isinstance(head, torch.nn.Module)
    x = torch.randn(rows, config.d_model, device="cuda") * 3
    weights = torch.rand(rows) * (torch.rand(rows) > 0.2)
    selected = select_targets(torch.randint(vocab, (rows,)), weights).to("cuda")

    def gone_back(dtype: torch.dtype | None) -> tuple[float, float, torch.Tensor, torch.Tensor]:
        here = x.clone().requires_grad_()
        head.zero_grad()
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = chunked_cross_entropy_selected(
                head, here, selected, label_smoothing=label_smoothing, z_loss_coef=z_loss_coef, chunk_size=64
            )
        (loss.loss / loss.weight).backward()
        assert here.grad is not None
        return float(loss.loss), float(loss.cross_entropy), here.grad, head.matrix.weight.grad.clone()  # type: ignore[union-attr, operator]

    exact, fused = gone_back(None), gone_back(torch.bfloat16)
    assert fused[0] == pytest.approx(exact[0], rel=2e-3)
    assert fused[1] == pytest.approx(exact[1], rel=2e-3)
    for near, true in zip(fused[2:], exact[2:], strict=True):
        assert (near - true).norm() < 1e-2 * true.norm()


def tasks(vocab: int, documents: bool) -> Objective:
    torch.manual_seed(1)
    tokens = torch.randint(vocab, (4, 49))
    borders = (torch.rand(4, 49) < 0.03).cumsum(1) if documents else None
    return causal_lm(tokens, borders).to("cuda")


def gradients(model: Transformer, task: Objective, fast: bool, precision: str) -> dict[str, torch.Tensor]:
    training_module = TrainingModule(model, load_recipe({"training": {"precision": precision}}))
    model.zero_grad()
    with compile_for_training(model, fast)():
        loss = training_module(task)
        (loss.loss / loss.weight).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama", "tiny-gemma"])
@pytest.mark.parametrize("documents", [False, True])
def test_a_fast_step_is_a_plain_step(name: str, documents: bool) -> None:
    model = ct.build(name, device="cuda", seed=0).train()
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0  # type: ignore[assignment]
    task = tasks(model.config.vocab_size, documents)
    before = [set(vars(module)) for module in model.modules()]
    exact = gradients(model, task, False, "fp32")
    plain, fast = (gradients(model, task, way, "bf16") for way in (False, True))
    assert fast.keys() == exact.keys()

    def wrong(found: dict[str, torch.Tensor]) -> float:
        parts = [((found[key] - exact[key]).square().sum(), exact[key].square().sum()) for key in exact]
        return float((sum(a for a, _ in parts) / sum(b for _, b in parts)) ** 0.5)  # type: ignore[operator, arg-type]

    assert wrong(fast) < 1.5 * wrong(plain) + 1e-4
    assert wrong(plain) < 0.05
    assert [set(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(7, 40), (300, 513), (4096, 1024)])
def test_the_wide_gelu_is_the_plain_one(rows: int, columns: int, biased: bool, tanh: bool) -> None:
    from cutaway.train.kernels.activations import LinearGELU

    torch.manual_seed(0)
    made = [torch.randn(*shape, device="cuda", requires_grad=True) for shape in ((rows, 24), (columns, 24), (columns,))]
    x, weight, bias = made[0], made[1], made[2] if biased else None
    slope = torch.randn(rows, columns, device="cuda")

    def gone_back(result: torch.Tensor) -> list[torch.Tensor]:
        asked = [each for each in (x, weight, bias) if each is not None]
        return [result.detach(), *torch.autograd.grad(result, asked, slope)]

    ours = gone_back(LinearGELU.apply(x, weight, bias, tanh))  # type: ignore[no-untyped-call]
    plain = torch.nn.functional.linear(x, weight, bias)
    theirs = gone_back(torch.nn.functional.gelu(plain, approximate="tanh" if tanh else "none"))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-3)


def test_blocks_are_compiled_in_pieces_or_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ct.config("tiny-gpt").model_dump(mode="json", exclude_none=True)
    settings["decoder"]["layers"] = 5
    model = ct.build(ct.config(settings), device="cuda", seed=0).train()
    task = tasks(model.config.vocab_size, False)
    plain = gradients(model, task, False, "fp32")
    for piece, mode in ((2, "none"), (16, "none"), (16, "full")):
        model.use_activation_checkpointing(mode)  # type: ignore[arg-type]
        monkeypatch.setattr("cutaway.train.kernels.compile.BLOCKS_PER_GRAPH", piece)
        found = gradients(model, task, True, "fp32")
        for key, value in plain.items():
            torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("\n".join(f"{a} and {b} make {a + b}" for a in range(60) for b in range(60)))
    how: dict[str, Any] = {
        "data": {"sources": [{"path": str(tmp_path / "text.txt")}], "seq_len": 64, "validation_split": 0.2},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_steps": 3},
        "training": {"max_steps": 20, "batch_size": 8, "precision": "bf16"},
        "eval": {"interval": 10, "sample_prompt": "1 and"},
        "checkpoint": {"interval": 5},
    }
    trainer = prepare_trainer(load_recipe(how), tmp_path / "run", device="cuda")
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == 7 else None
    trainer.train()
    assert 7 <= trainer.global_step <= 9  # a step or two were on their way
    trainer = resume_trainer(tmp_path / "run", device="cuda")
    trainer.train()
    losses = [row["loss"] for row in trainer.metrics_log if "loss" in row]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
