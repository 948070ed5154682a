"""Compiled steps on a CPU: gradients equal eager ones for any group size, and the model is unchanged afterwards."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.model import Transformer
from cutaway.train.kernels.compile import compile_for_training
from cutaway.train.objectives import causal_lm
from cutaway.train.trainer.training_module import TrainingModule

pytestmark = pytest.mark.unchecked


def build_model(name: str, layers: int) -> Transformer:
    config: Any = ct.config(name).model_dump(mode="json", exclude_none=True)
    config["decoder"]["layers"] = layers
    return ct.build(ct.config(config), seed=0).train()


def gradients(
    model: Transformer, *, compile_blocks: bool | None, single_process: bool = True
) -> dict[str, torch.Tensor]:
    tokens = torch.randint(model.config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    with compile_for_training(model, compile_blocks, single_process=single_process)():
        loss = TrainingModule(model)(causal_lm(tokens))
        (loss.loss / loss.weight).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama"])
def test_eager_steps_on_a_cpu_fuse_qkv_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton kernels, also on a machine with a GPU, and without copies of frozen weights for adapters."""
    monkeypatch.setattr("cutaway.train.kernels.compile.has_triton", lambda: True)
    model = build_model(name, 2)
    attention: Any = model.stacks["decoder"].blocks[0].attn.f
    with compile_for_training(model, None)():
        replaced = {
            module: set(vars(module)) & {"forward", "project_gate_up", "project_qkv"} for module in model.modules()
        }
    assert {type(module) for module, names in replaced.items() if names} == {type(attention)}
    expected, fused = (gradients(model, compile_blocks=each) for each in (False, None))
    for key, value in expected.items():
        torch.testing.assert_close(fused[key], value, rtol=1e-4, atol=1e-6)
    model.requires_grad_(False)
    model.add_adapter({"rank": 2}, seed=0)
    pointers = {key: each.data_ptr() for key, each in model.named_parameters()}
    with compile_for_training(model, None)():
        assert {key: each.data_ptr() for key, each in model.named_parameters()} == pointers


@pytest.mark.parametrize(
    ("name", "blocks_per_graph", "activation_checkpointing", "single_process"),
    [
        pytest.param("tiny-gpt", 1, ("none",), True, marks=pytest.mark.nightly),
        pytest.param("tiny-llama", 16, ("none",), True, marks=pytest.mark.nightly),
        pytest.param("tiny-llama", 16, ("full",), True, marks=pytest.mark.nightly),
        pytest.param("tiny-llama", 16, ("selective", 1), True, marks=pytest.mark.nightly),
        pytest.param("tiny-gpt", 16, ("none",), False, marks=pytest.mark.nightly),
        pytest.param("tiny-gpt", 16, ("full",), False, marks=pytest.mark.nightly),
        ("tiny-gpt", 16, ("full", 1), True),
    ],
)
def test_compiled_equals_eager(
    name: str,
    blocks_per_graph: int,
    activation_checkpointing: Any,
    single_process: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr("cutaway.train.kernels.compile.BLOCKS_PER_GRAPH", blocks_per_graph)
    model = build_model(name, 2).use_activation_checkpointing(*activation_checkpointing)
    before = [set(vars(module)) for module in model.modules()]
    eager = gradients(model, compile_blocks=False)
    compiled = gradients(model, compile_blocks=True, single_process=single_process)
    assert eager.keys() == compiled.keys()
    for key, value in eager.items():
        torch.testing.assert_close(compiled[key], value, rtol=1e-4, atol=1e-6)
    assert [set(vars(module)) for module in model.modules()] == before


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_compiled_lora_stores_what_its_mode_says(mode: Any) -> None:
    """Compiled blocks with adapters: equal gradients, and with mode 'full' only the inputs of blocks are stored."""
    torch._dynamo.reset()
    model = build_model("tiny-llama", 2).use_activation_checkpointing(mode)
    model.add_adapter({"rank": 6}, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.constant_(parameter, 0.03)
    eager, compiled = (gradients(model, compile_blocks=compile_blocks) for compile_blocks in (False, True))
    for key, value in eager.items():
        torch.testing.assert_close(compiled[key], value, rtol=1e-4, atol=1e-6)
    stored: dict[int, int] = {}
    tokens = torch.zeros(2, 64, dtype=torch.long)

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    fixed = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    context = compile_for_training(model, True)
    with context(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        fixed |= {
            matrix.untyped_storage().data_ptr()
            for module in model.modules()
            if hasattr(module, "fused_lora")
            for matrix in module.fused_lora.matrices
        }
        model.hidden_states(tokens)
    nbytes = sum(value for key, value in stored.items() if key not in fixed)
    inputs = 2 * tokens.numel() * model.config.d_model * 4  # fp32
    assert nbytes < 1.5 * inputs if mode == "full" else nbytes > 5 * inputs


@pytest.mark.nightly
def test_compiled_lora_with_other_lengths() -> None:
    """Batches of different lengths, as of conversations without packing, use dynamic shapes."""
    torch._dynamo.reset()
    model = build_model("tiny-llama", 2)
    model.add_adapter({"rank": 6}, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.constant_(parameter, 0.03)
    context = compile_for_training(model, True)
    for rows, length in ((2, 17), (2, 9), (3, 30), (1, 25)):
        tokens = torch.randint(model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(length))
        results = []
        for use_context in (context, nullcontext):
            model.zero_grad()
            with use_context():
                loss = TrainingModule(model)(causal_lm(tokens))
                (loss.loss / loss.weight).backward()
            results.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
        for compiled, eager in zip(*results, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-6)
