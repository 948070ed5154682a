"""Training kernels on a GPU: fused loss, compiled step and fused GELU equal the plain ones; resume."""

from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.model import Transformer
from cutaway.model.adapters.quantized_linear import quantize_linears
from cutaway.train.kernels.compile import compile_for_training
from cutaway.train.loss.chunked_cross_entropy import chunked_cross_entropy, select_targets
from cutaway.train.loss.cross_entropy import CrossEntropyOptions
from cutaway.train.objectives import Objective, causal_lm
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume_trainer
from cutaway.train.trainer.training_module import TrainingModule

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("skip_preflight")]


@pytest.mark.parametrize(("label_smoothing", "z_loss_coef"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-3), (0.1, 1e-3)])
@pytest.mark.parametrize(("vocab", "rows"), [(257, 100), (50257, 640), (4096, 3000)])
@pytest.mark.parametrize("frozen", [False, True])
def test_fused_loss_equals_fp32(
    vocab: int, rows: int, label_smoothing: float, z_loss_coef: float, frozen: bool
) -> None:
    torch.manual_seed(0)
    config = ct.config("tiny-gpt").replace(vocab_size=vocab)
    head = ct.build(config, device="cuda", seed=0).head
    assert isinstance(head, torch.nn.Module)
    head.requires_grad_(not frozen)
    x = torch.randn(rows, config.d_model, device="cuda") * 3
    weights = torch.rand(rows) * (torch.rand(rows) > 0.2)
    selected = select_targets(torch.randint(vocab, (rows,)), weights).to("cuda")

    def loss_and_gradients(dtype: torch.dtype | None) -> tuple[float, float, list[torch.Tensor]]:
        inputs = x.clone().requires_grad_()
        head.zero_grad()
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = chunked_cross_entropy(
                head, inputs, selected, CrossEntropyOptions(label_smoothing, z_loss_coef, chunk_size=64)
            )
        (loss.loss / loss.weight).backward()
        tensors = [inputs] if frozen else [inputs, head.matrix.weight]
        return float(loss.loss), float(loss.cross_entropy), [each.grad.clone() for each in tensors]  # type: ignore[union-attr, operator]

    exact, fused = loss_and_gradients(None), loss_and_gradients(torch.bfloat16)
    assert fused[0] == pytest.approx(exact[0], rel=2e-3)
    assert fused[1] == pytest.approx(exact[1], rel=2e-3)
    for gradient, expected in zip(fused[2], exact[2], strict=True):
        assert (gradient - expected).norm() < 1e-2 * expected.norm()


def build_objective(vocab: int, several_documents: bool) -> Objective:
    torch.manual_seed(1)
    tokens = torch.randint(vocab, (4, 49))
    document_ids = (torch.rand(4, 49) < 0.03).cumsum(1) if several_documents else None
    return causal_lm(tokens, document_ids).to("cuda")


def gradients(model: Transformer, objective: Objective, compiled: bool, precision: str) -> dict[str, torch.Tensor]:
    training_module = TrainingModule(model, precision=precision)
    model.zero_grad()
    with compile_for_training(model, compiled)():
        loss = training_module(objective)
        (loss.loss / loss.weight).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama", "tiny-gemma"])
@pytest.mark.parametrize("several_documents", [False, True])
def test_compiled_step_equals_eager(name: str, several_documents: bool) -> None:
    model = ct.build(name, device="cuda", seed=0).train()
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0  # type: ignore[assignment]
    objective = build_objective(model.config.vocab_size, several_documents)
    before = [set(vars(module)) for module in model.modules()]
    exact = gradients(model, objective, False, "fp32")
    eager, compiled = (gradients(model, objective, compiled, "bf16") for compiled in (False, True))
    assert compiled.keys() == exact.keys()

    def relative_error(values: dict[str, torch.Tensor]) -> float:
        squares = [((values[key] - exact[key]).square().sum(), exact[key].square().sum()) for key in exact]
        return float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)  # type: ignore[operator, arg-type]

    assert relative_error(compiled) < 1.5 * relative_error(eager) + 1e-4
    assert relative_error(eager) < 0.05
    assert [set(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize(
    ("quantization", "checkpointing", "config"),
    [
        ("none", "none", {}),
        ("none", "full", {}),
        ("none", "selective", {}),
        ("none", "none", {"use_dora": True}),
        ("nf4", "none", {}),
        ("nf4", "full", {}),
        ("int8", "full", {}),
    ],
)
def test_compiled_lora_step_equals_eager(quantization: Any, checkpointing: Any, config: dict[str, Any]) -> None:
    model = ct.build("tiny-llama", device="cuda", seed=0).train()
    if quantization != "none":
        quantize_linears(model, quantization)
    model.add_adapter({"rank": 6, **config}, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.05)
    model.use_activation_checkpointing(checkpointing)
    objective = build_objective(model.config.vocab_size, False)
    exact = gradients(model, objective, False, "fp32")
    assert exact
    for precision, bound in (("fp32", 2e-3), ("bf16", 0.05)):  # fp32 matrix products of both use TF32 at most
        compiled = gradients(model, objective, True, precision)
        assert compiled.keys() == exact.keys()
        squares = [((compiled[key] - exact[key]).square().sum(), exact[key].square().sum()) for key in exact]
        assert (sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5 < bound  # type: ignore[operator]


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(7, 40), (300, 513), (4096, 1024)])
def test_linear_gelu_equals_torch(rows: int, columns: int, has_bias: bool, tanh: bool) -> None:
    from cutaway.train.kernels.activations import LinearGELU

    torch.manual_seed(0)
    shapes = ((rows, 24), (columns, 24), (columns,))
    tensors = [torch.randn(*shape, device="cuda", requires_grad=True) for shape in shapes]
    x, weight, bias = tensors[0], tensors[1], tensors[2] if has_bias else None
    grad_output = torch.randn(rows, columns, device="cuda")

    def output_and_gradients(output: torch.Tensor) -> list[torch.Tensor]:
        inputs = [each for each in (x, weight, bias) if each is not None]
        return [output.detach(), *torch.autograd.grad(output, inputs, grad_output)]

    fused = output_and_gradients(LinearGELU.apply(x, weight, bias, tanh))  # type: ignore[no-untyped-call]
    pre_act = torch.nn.functional.linear(x, weight, bias)
    expected = output_and_gradients(torch.nn.functional.gelu(pre_act, approximate="tanh" if tanh else "none"))
    for value, expected_value in zip(fused, expected, strict=True):
        torch.testing.assert_close(value, expected_value, rtol=1e-4, atol=1e-3)


def test_blocks_compiled_in_groups_equal_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ct.config("tiny-gpt").model_dump(mode="json", exclude_none=True)
    config["decoder"]["layers"] = 5
    model = ct.build(ct.config(config), device="cuda", seed=0).train()
    objective = build_objective(model.config.vocab_size, False)
    eager = gradients(model, objective, False, "fp32")
    for blocks_per_graph, mode in ((2, "none"), (16, "none"), (16, "full")):
        model.use_activation_checkpointing(mode)  # type: ignore[arg-type]
        monkeypatch.setattr("cutaway.train.kernels.compile.BLOCKS_PER_GRAPH", blocks_per_graph)
        compiled = gradients(model, objective, True, "fp32")
        for key, value in eager.items():
            torch.testing.assert_close(compiled[key], value, rtol=1e-3, atol=1e-4)


def test_stopped_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("\n".join(f"{a} and {b} make {a + b}" for a in range(60) for b in range(60)))
    recipe: dict[str, Any] = {
        "data": {"sources": [{"path": str(tmp_path / "text.txt")}], "seq_len": 64, "validation_split": 0.2},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_steps": 3},
        "training": {"max_steps": 20, "batch_size": 8, "precision": "bf16"},
        "eval": {"interval": 10, "sample_prompt": "1 and"},
        "checkpoint": {"interval": 5},
    }
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cuda")
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == 7 else None
    trainer.train()
    assert 7 <= trainer.global_step <= 9  # one or two steps were already launched
    trainer = resume_trainer(tmp_path / "run", device="cuda")
    trainer.train()
    losses = [row["loss"] for row in trainer.metrics_log if "loss" in row]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
