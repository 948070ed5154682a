"""float8 training (emulated on the CPU): which products are in fp8, gradients, losses, checkpoints, compilation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_runs import TEXT, run_digest, tiny_recipe
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8.float8_linear import Float8Linear as TorchAOFloat8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

import cutaway as ct
from cutaway.errors import CutawayError, InputError
from cutaway.model import Transformer
from cutaway.model.head import LMHead
from cutaway.model.moe import Router
from cutaway.train.kernels.compile import compile_for_training
from cutaway.train.objectives import causal_lm
from cutaway.train.optim import float8
from cutaway.train.optim.float8 import check_float8, convert_linear_layers, convert_to_float8
from cutaway.train.optim.float8_linear import Float8Linear
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import Float8Config
from cutaway.train.trainer.launch import prepare_trainer, resume, train
from cutaway.train.trainer.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("skip_preflight")

EMULATED = Float8Config(emulate=True)
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
"""Products of linear layers. Those of attention are aten.bmm."""
E4M3_EPS, E5M2_EPS = 2.0**-4, 2.0**-3
"""Largest relative rounding error: half of the distance 2^-3 (3 mantissa bits) or 2^-2 (2 bits) between values."""


class ProductCounter(TorchDispatchMode):
    """Counts products of linear layers, in fp8 and others. The products that emulate an fp8 product are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_fp8 = self.num_others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            is_fp8 = [isinstance(each, Float8TrainingTensor) for each in args[-2:]]
            assert is_fp8[0] == is_fp8[1]
            self.num_fp8 += is_fp8[0]
            self.num_others += not is_fp8[0]
        return func(*args, **(kwargs or {}))


def build_model(config: Any, options: Float8Config | None = EMULATED) -> Transformer:
    model = ct.build(ct.config(config), seed=0).train()
    if options is not None:
        convert_to_float8(model, options)
    return model


def gradients(model: Transformer, *, compile_blocks: bool = False, length: int = 17) -> dict[str, torch.Tensor]:
    tokens = torch.randint(model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    training_module = TrainingModule(model, precision="bf16")
    model.zero_grad()
    with compile_for_training(model, compile_blocks)():
        loss = training_module(causal_lm(tokens))
        (loss.loss / loss.weight).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def rel_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


# Which products are in fp8


@pytest.mark.parametrize(
    "name", ["tiny-gpt", "tiny-llama", "tiny-bert", "tiny-t5-gated", "tiny-mla", "tiny-moe", "tiny-albert"]
)
def test_all_linear_layers_of_blocks_compute_in_fp8(name: str) -> None:
    """Each layer has three products. Others: the head, routers, and layers whose sizes are no multiples of 16."""
    model = build_model(name)
    calls: list[torch.nn.Module] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | Router | LMHead):
            module.register_forward_hook(lambda module, args, y: calls.append(module))
    tokens = torch.randint(3, model.config.vocab_size, (2, 16))
    inputs = (tokens, tokens) if len(model.stacks) == 2 else (tokens,)
    with ProductCounter() as counter, TrainingModule(model, precision="bf16").autocast():
        outputs = model.encode(*inputs) if model.head is None else model(*inputs)
        outputs.float().square().mean().backward()
    in_fp8 = [call for call in calls if isinstance(call, Float8Linear)]
    others = [call for call in calls if not isinstance(call, Float8Linear)]
    assert counter.num_fp8 == 3 * len(in_fp8) > 0
    assert counter.num_others == 3 * len(others)
    for stack in model.stacks.values():
        for layer in stack.blocks.modules():
            if isinstance(layer, torch.nn.Linear) and layer.in_features % 16 == layer.out_features % 16 == 0:
                assert isinstance(layer, Float8Linear)
                assert any(layer is call for call in in_fp8)


def test_only_training_under_autocast_is_in_fp8() -> None:
    """Evaluations, and preflight checks in fp32, compute like the model without float8 layers."""
    tokens = torch.randint(256, (2, 16))
    plain, model = build_model("tiny-gpt", None), build_model("tiny-gpt")
    for mode in (True, False):
        plain.train(mode), model.train(mode)
        with ProductCounter() as counter:
            assert torch.equal(model(tokens), plain(tokens))
        assert counter.num_fp8 == 0
    with TrainingModule(plain, precision="bf16").autocast():
        expected = plain(tokens)
    with ProductCounter() as counter, TrainingModule(model, precision="float8").autocast():
        assert torch.equal(model(tokens), expected)
        model.train()
        assert not torch.equal(model(tokens), expected)
    assert counter.num_fp8 == 12


def test_conversion_keeps_parameters_and_mode() -> None:
    model = build_model("tiny-gpt", None).eval()
    before, modules = dict(model.named_parameters()), len(list(model.modules()))
    convert_to_float8(model, EMULATED)
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert list(model.state_dict()) == list(build_model("tiny-gpt", None).state_dict())
    assert not any(module.training for module in model.modules())
    assert len(list(model.modules())) == modules


# Numerics


@pytest.mark.parametrize("recipe_name", ["tensorwise", "rowwise"])
def test_rounding_error_of_a_layer(recipe_name: Any) -> None:
    """The error of each product is that of fp8 rounding of its operands: neither larger, nor that of bf16."""
    torch.manual_seed(0)
    x, grad, weight = torch.randn(3, 15, 64), torch.randn(3, 15, 48), torch.randn(48, 64)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        layers = torch.nn.ModuleList([torch.nn.Linear(64, 48, bias=False)])
        assert convert_linear_layers(layers, Float8Config(recipe_name=recipe_name, emulate=True)) == 1
        [layer] = layers
        layer.weight.data.copy_(weight)
        inputs = x.to(dtype, copy=True).requires_grad_()
        y = layer(inputs)  # in fp8 if the inputs are in bf16
        y.backward(grad.to(dtype))
        results.append((y.detach(), inputs.grad, layer.weight.grad))
    grad_eps = E5M2_EPS if recipe_name == "tensorwise" else E4M3_EPS
    for reference, value, eps in zip(*results, (E4M3_EPS, grad_eps, grad_eps), strict=True):
        assert 0.01 < rel_error(value, reference) < E4M3_EPS + eps


@pytest.mark.parametrize("num_rows", [1, 15, 16, 33])
def test_number_of_rows_is_padded_without_effect(num_rows: int) -> None:
    """fp8 products need multiples of 16. Outputs and gradients equal those of torchao's layer without padding."""
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, 64).bfloat16(), torch.randn(48, 64)
    results = []
    for class_ in (Float8Linear, TorchAOFloat8Linear):
        layers = torch.nn.ModuleList([torch.nn.Linear(64, 48)])
        convert_linear_layers(layers, EMULATED)
        layers[0].__class__ = class_
        torch.nn.init.ones_(layers[0].bias)
        layers[0].weight.data.copy_(weight)
        inputs = x.clone().requires_grad_()
        y = layers[0](inputs)
        y.square().sum().backward()
        results.append((y, inputs.grad, layers[0].weight.grad, layers[0].bias.grad))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama"])
def test_gradients_are_close_to_bf16(name: str) -> None:
    """Relative error of the gradient of each parameter.

    Rounding to e4m3 has a relative error of 0.026 (root mean square: spacing / √12, averaged over the mantissa), and to
    e5m2 of 0.053. A weight gradient is a product of x in e4m3 with ∂y in e5m2 (tensorwise) or e4m3 (rowwise): 0.059 or
    0.037. Here x and ∂y have gone through up to 8 layers, whose errors add in quadrature, mostly on a residual stream
    that they only change in part: within 3 such errors.
    """
    reference = gradients(build_model(name, None))
    errors = {}
    for recipe_name, bound in (("tensorwise", 3 * 0.059), ("rowwise", 3 * 0.037)):
        values = gradients(build_model(name, Float8Config(recipe_name=recipe_name, emulate=True)))
        assert reference.keys() == values.keys()
        errors[recipe_name] = [
            rel_error(values[key], reference[key])
            for key in reference
            if not key.endswith("k.bias")  # 0 in exact arithmetic: softmax does not change if a query's scores shift
        ]
        assert max(errors[recipe_name]) < bound
    assert sum(errors["rowwise"]) < 0.9 * sum(errors["tensorwise"])


@pytest.mark.parametrize("recipe_name", ["tensorwise", "rowwise"])
def test_emulation_equals_scaled_products(recipe_name: Any) -> None:
    """torch._scaled_mm, which computes the products on a GPU, exists on a CPU too. Only the order of sums differs."""
    emulated, scaled = (
        gradients(build_model("tiny-llama", Float8Config(recipe_name=recipe_name, emulate=emulate)))
        for emulate in (True, False)
    )
    assert all(rel_error(scaled[key], emulated[key]) < 2e-3 for key in emulated)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_nothing(mode: Any) -> None:
    model = build_model("tiny-llama")
    stored = gradients(model)
    recomputed = gradients(model.use_activation_checkpointing(mode))
    assert all(torch.equal(stored[key], recomputed[key]) for key in stored)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("backend", "mode"), [("aot_eager", "selective"), ("inductor", "none"), ("inductor", "selective")]
)
def test_compiled_equals_eager(backend: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled blocks round to bf16 in fewer places, which changes roundings to fp8, but not how large their error is.

    A change of 2^-9 moves about 3 % of the values to the next fp8 value.
    """
    torch._dynamo.reset()
    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_function(function, backend=backend))
    config = ct.config("tiny-llama").replace({"decoder.layers": 1})
    reference = gradients(build_model(config, None))
    model = build_model(config).use_activation_checkpointing(mode)
    eager, compiled = gradients(model), gradients(model, compile_blocks=True)
    for key in eager:
        error = rel_error(eager[key], reference[key])
        assert rel_error(compiled[key], reference[key]) < 1.5 * error, key
        assert rel_error(compiled[key], eager[key]) < (0.5 if backend == "aot_eager" else 1.5) * error, key


# Runs


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    training = {"precision": "float8", "float8": {"emulate": True}, "max_steps": 20}
    return tiny_recipe(tmp_path / "text.txt", training=training)


def read_values(run: Path, name: str) -> list[float]:
    return [row[name] for row in map(json.loads, (run / "metrics.jsonl").open()) if name in row]


def test_run_trains_like_bf16_and_exports_the_weights(recipe: dict[str, Any], tmp_path: Path) -> None:
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "float8", device="cpu")
    trainer.train()
    bf16_recipe = recipe | {"training": {**recipe["training"], "precision": "bf16", "float8": None}}
    reference = train(bf16_recipe, tmp_path / "bf16", device="cpu")
    values, expected = (read_values(tmp_path / name, "loss") for name in ("float8", "bf16"))
    assert values != expected
    assert values == pytest.approx(expected, rel=0.02)
    assert values[-1] < 0.75 * values[0]
    # The exported model is that of the run, in the same format as that of a bf16 run.
    exported, state_dict = ct.load(tmp_path / "float8").model, trainer.model.state_dict()
    assert list(exported.state_dict()) == list(ct.load(reference.directory).model.state_dict()) == list(state_dict)
    assert all(torch.equal(tensor, state_dict[name]) for name, tensor in exported.state_dict().items())
    assert all(tensor.dtype == torch.float32 for tensor in state_dict.values())
    # The loss of evaluations is that of the exported model, in bf16.
    trainer.training_module.model = exported.eval()
    trainer.training_module.precision = "bf16"
    assert trainer.validate()["eval_loss"] == read_values(tmp_path / "float8", "eval_loss")[-1]


def test_resume_is_bit_exact(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["training"]["max_steps"] = 8
    uninterrupted = train(recipe, tmp_path / "uninterrupted", device="cpu")
    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "stopped", device="cpu")
    trainer.callback.on_step_end = lambda row, timing: trainer.stop_requested.set() if row["step"] == 5 else None
    trainer.train()
    resume(tmp_path / "stopped", device="cpu")
    assert run_digest(tmp_path / "stopped") == run_digest(uninterrupted.directory)


def test_checkpoint_is_fine_tuned(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["training"]["max_steps"] = 2
    base = train(recipe, tmp_path / "base", device="cpu").directory / "model"
    trainer = prepare_trainer(load_recipe(recipe, base=base), tmp_path / "tuned", device="cpu")
    weights = ct.load(base).model.state_dict()
    assert all(torch.equal(each, weights[name]) for name, each in trainer.model.state_dict().items())
    assert any(isinstance(module, Float8Linear) for module in trainer.model.modules())
    trainer.lock.release()


# Errors


def test_errors_name_the_reason_and_the_remedy(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(overrides: list[str], base: str | None = None) -> str:
        with pytest.raises(CutawayError) as raised:
            prepare_trainer(load_recipe(recipe, overrides, base=base), tmp_path / "run", device="cpu")
        assert not (tmp_path / "run").exists()
        return str(raised.value)

    small = "{ form = 'decoder', d_model = 24, decoder = { layers = 1, block = { attention = { heads = 2 } } } }"
    message = error(["training.float8.emulate=false"])
    assert "the device 'cpu' does not have" in message
    assert "training.float8.emulate = true" in message
    assert "float8 is set, but precision is 'bf16'" in error(["training.precision=bf16"])
    assert "cannot be used with model.adapter" in error(["model.adapter={ rank = 4 }"], base="x")
    assert "cannot be used with objective dpo" in error(["objective.kind=dpo"], base="x")
    assert "parallel.dp_shard" in error(["parallel.tp=2"])
    assert "multiples of 16" in error([f"model={small}"])
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    assert "pip install 'cutaway[float8]'" in error([])


@pytest.mark.parametrize(
    ("hip", "capability", "expected"),
    [(None, (8, 0), False), (None, (8, 9), True), (None, (9, 0), True), ("6.2", (9, 0), False), ("6.2", (9, 4), True)],
)
def test_gpus_with_fp8_products(hip: Any, capability: Any, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    if expected:
        check_float8(Float8Config(), torch.device("cuda"))
    else:
        with pytest.raises(InputError, match="which a GPU does not have"):
            check_float8(Float8Config(), torch.device("cuda"))
    check_float8(EMULATED, torch.device("cuda"))
