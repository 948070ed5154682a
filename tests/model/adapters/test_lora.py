"""LoRA adapters of a model: merge and unmerge, several adapters, all kinds of layers, quantized base."""

import copy

import pytest
import torch
from torch import Tensor, nn

import cutaway as ct
from cutaway.errors import ConfigError, InputError
from cutaway.model import Transformer
from cutaway.model.adapters.adapter_methods import adaptable_layers, adapted_layers
from cutaway.model.adapters.quantized_linear import (
    NF4_BLOCK_SIZE,
    NF4_VALUES,
    QuantizedLinear,
    dequantize_nf4,
    quantize_linears,
    quantize_nf4,
)
from cutaway.size.shape_pass.adapters import quantized_bytes

TOKENS = torch.arange(1, 21).view(2, 10)
PRESETS = ["tiny-llama", "tiny-gpt", "tiny-moe", "tiny-mla", "tiny-bert", "tiny-albert", "tiny-t5", "tiny-bart"]


def logits(model: Transformer) -> Tensor:
    with torch.no_grad():
        if len(model.stacks) == 2:
            result: Tensor = model(TOKENS, TOKENS)
        else:
            result = model(TOKENS) if model.head is not None else model.encode(TOKENS)
    return result


def build_adapted(preset: str = "tiny-llama", seed: int = 0, **config: object) -> Transformer:
    """A model with an adapter whose B is random."""
    model = ct.build(preset, seed=seed).double()
    model.add_adapter({"rank": 2, **config}, seed=seed)
    randomize(model, "default")
    return model


def randomize(model: Transformer, name: str, seed: int = 0, std: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if f".adapters.{name}.lora" in key:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)


@pytest.mark.parametrize("preset", PRESETS)
def test_new_adapter_changes_nothing_and_only_it_is_trainable(preset: str) -> None:
    model = ct.build(preset, seed=0)
    before, keys = logits(model), set(model.state_dict())
    model.add_adapter({"rank": 2})
    assert torch.equal(logits(model), before)
    assert keys < set(model.state_dict())
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable
    assert all(".adapters.default." in name for name in trainable)


@pytest.mark.sample(8)
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_merged_equals_adapter(preset: str, use_dora: bool) -> None:
    if use_dora and any(layer.weight.ndim != 2 for layer in adaptable_layers(ct.build(preset)).values()):  # type: ignore[union-attr, operator]
        targets = ["attn.*"]
    else:
        targets = ["all-linear"]
    model = build_adapted(preset, use_dora=use_dora, targets=targets)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = logits(model)
    with model.disable_adapters():
        assert float((logits(model) - adapted).abs().max()) > 1e-3
    merged = model.merge_and_unload()
    assert not merged.adapters
    assert set(merged.state_dict()) == {name for name in base if ".adapters." not in name}
    torch.testing.assert_close(logits(merged), adapted, atol=1e-12, rtol=1e-12)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), adapted, atol=1e-12, rtol=1e-12)
    model.unmerge_adapter()
    assert all(torch.equal(tensor, base[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(logits(model), adapted)


@pytest.mark.parametrize("use_dora", [False, True])
def test_models_made_while_an_adapter_is_merged(use_dora: bool) -> None:
    """An unloaded model does not change when the weights are unmerged. New adapters adapt the base weights."""
    model = build_adapted(use_dora=use_dora)
    adapted = logits(model)
    unloaded = model.merge_adapter().merge_and_unload()
    model.unmerge_adapter()
    torch.testing.assert_close(logits(unloaded), adapted, atol=1e-12, rtol=1e-12)
    model.merge_adapter().add_adapter({"rank": 2, "use_dora": use_dora}, "second")
    with model.disable_adapters():
        base = logits(model)
    torch.testing.assert_close(logits(model), base, atol=1e-12, rtol=1e-12)


def test_merged_equals_adapter_in_fp32() -> None:
    model = ct.build("tiny-llama", seed=0)
    base = logits(model)
    model.add_adapter({"rank": 4}, seed=0)
    randomize(model, "default", std=0.05)
    adapted, merged = logits(model), logits(model.merge_and_unload())
    assert float((adapted - base).abs().max()) > 1e-3
    assert float((merged - adapted).abs().max()) <= 1e-6


def test_adapters_are_switched_per_call() -> None:
    model = build_adapted()
    first = logits(model)
    model.add_adapter({"rank": 3, "targets": ["attn.q", "ffn.down"]}, "second")
    randomize(model, "second", seed=5)
    second = logits(model)
    assert float((first - second).abs().max()) > 1e-3
    with model.use_adapter("default"):
        assert torch.equal(logits(model), first)
    assert torch.equal(logits(model), second)
    assert model.active_adapter == "second"
    model.set_adapter("default")
    assert {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad} == {"default"}
    model.delete_adapter("second")
    assert torch.equal(logits(model), first)
    assert list(model.adapters) == ["default"]
    model.set_adapter(None)
    torch.testing.assert_close(logits(model), logits(ct.build("tiny-llama", seed=0).double()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("targets", "sites"),
    [
        (["attn.q"], {"attn.q"}),
        (["attn.[qv]", "ffn.down"], {"attn.q", "attn.v", "ffn.down"}),
        (["blocks.0.*"], {"attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.down"}),
        (["embed"], {"embed"}),
    ],
)
def test_targets_are_patterns_of_sites(targets: list[str], sites: set[str]) -> None:
    model = build_adapted(targets=targets)
    found = {site for site, layer in adaptable_layers(model).items() if layer in adapted_layers(model).values()}
    assert {site.split(".", 2)[2] if site.startswith("blocks") else site for site in found} == sites


def test_gradients_are_those_of_the_merged_weight() -> None:
    """dL/dA and dL/dB from the gradient G of the merged weight: s·Bᵀ·G and s·G·Aᵀ."""
    model = build_adapted(targets=["attn.q", "ffn.down"], alpha=3.0)
    merged = copy.deepcopy(model).merge_and_unload().requires_grad_(True)
    model(TOKENS).square().mean().backward()
    merged(TOKENS).square().mean().backward()
    for name, layer in adapted_layers(model).items():
        grad = merged.get_submodule(name).weight.grad
        adapter = layer.adapters["default"]
        assert isinstance(grad, Tensor)
        torch.testing.assert_close(adapter.lora_a.grad, 1.5 * adapter.lora_b.T @ grad)  # type: ignore[union-attr, operator]
        torch.testing.assert_close(adapter.lora_b.grad, 1.5 * grad @ adapter.lora_a.T)  # type: ignore[union-attr, operator]
        assert layer.weight.grad is None


def test_gradients_of_expert_adapters() -> None:
    model = build_adapted("tiny-moe")
    experts = [layer for layer in adapted_layers(model).values() if layer.weight.ndim == 3]
    assert experts
    merged = copy.deepcopy(model).merge_and_unload().requires_grad_(True)
    model(TOKENS).square().mean().backward()
    merged(TOKENS).square().mean().backward()
    scaling = model.adapters["default"].scaling_of("")
    for name, layer in adapted_layers(model).items():
        grad, adapter = merged.get_submodule(name).weight.grad, layer.adapters["default"]
        assert isinstance(grad, Tensor)
        torch.testing.assert_close(adapter.lora_b.grad, scaling * grad @ adapter.lora_a.mT)  # type: ignore[union-attr, operator]
        torch.testing.assert_close(adapter.lora_a.grad, scaling * adapter.lora_b.mT @ grad)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"targets": ["attn.query"]}, r"\(attn.query in transformers is attn.q here\)"),
        (
            {"targets": ["attn.q", "v_proj"]},
            r"'v_proj' matches no layer of this model",
        ),
        (
            {"targets": ["attn.q", "lm_head"]},
            "it is the output matrix, which has no adapters: leave it out, or train all",
        ),
        ({"targets": ["model.score"]}, "it is the head of a task, which is trained fully"),
        ({"targets": ["router"]}, "adapt the experts with 'experts"),
        ({"targets": []}, "targets"),
        ({"rank": 100_000}, "smaller dimension"),
        ({"rank": 0}, "rank"),
        ({"r": 8}, "unknown key 'r'"),
        ({"targets": ["embed"], "use_dora": True}, "use_dora is for linear layers"),
    ],
)
def test_invalid_configs_are_refused(config: dict[str, object], message: str) -> None:
    model = ct.build("tiny-llama", seed=0)
    with pytest.raises((ConfigError, InputError), match=message):
        model.add_adapter({"rank": 2, **config})
    assert not model.adapters
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_names_of_adapters_are_checked() -> None:
    model = build_adapted()
    for call in (lambda: model.add_adapter({"rank": 2}), lambda: model.add_adapter({"rank": 2}, "a.b")):
        with pytest.raises(InputError, match="adapter"):
            call()
    with pytest.raises(InputError, match="use one of: default"):
        model.set_adapter("other")


@pytest.mark.unchecked
def test_arguments_of_other_types_are_refused() -> None:
    model = build_adapted()
    with pytest.raises(InputError, match=r"the adapter is \['default'\]; pass the name of an adapter"):
        model.set_adapter(["default"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the configuration of an adapter is a str; pass a dict"):
        model.add_adapter("all-linear", "second")  # type: ignore[arg-type]


def test_tied_embedding_is_not_merged() -> None:
    model = build_adapted("tiny-gpt", targets=["embed"])
    if model.config.head.tied:  # type: ignore[union-attr]
        with pytest.raises(InputError, match="tied"):
            model.merge_and_unload()


def test_nf4_rounds_to_the_nearest_value() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * 0.02
    packed = quantize_nf4(weight)
    restored = dequantize_nf4(*packed, torch.float32).view_as(weight)
    scale = weight.view(-1, NF4_BLOCK_SIZE).abs().amax(-1, keepdim=True)
    normalized, values = weight.view(-1, NF4_BLOCK_SIZE) / scale, torch.tensor(NF4_VALUES)
    nearest = values[(normalized.unsqueeze(-1) - values).abs().argmin(-1)] * scale
    # The scales are rounded to 8 bits, which changes values by less than 1 %.
    assert float((restored.view_as(nearest) - nearest).abs().max()) < 0.2 * float(scale.max())
    assert float((restored - weight).abs().mean()) < 1.02 * float((nearest.view_as(weight) - weight).abs().mean())
    assert sum(t.numel() * t.itemsize for t in packed) == quantized_bytes(weight.numel(), 64, "nf4")


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_adapter_on_a_quantized_base_equals_one_on_the_dequantized_base(kind: str) -> None:
    model = ct.build("tiny-llama", seed=0)
    count = quantize_linears(model, kind)  # type: ignore[arg-type]
    quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert count == len(quantized) > 0
    model.add_adapter({"rank": 4}, seed=1)
    randomize(model, "default", std=0.05)
    dense = model.merge_and_unload()
    assert all(isinstance(module, nn.Linear) for name, module in dense.named_modules() if name.endswith(".attn.f.q"))
    torch.testing.assert_close(logits(dense), logits(model), atol=1e-5, rtol=1e-5)
    model(TOKENS).square().mean().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None and float(grad.abs().sum()) > 0 for grad in grads.values())
    with pytest.raises(InputError, match="merge_and_unload"):
        model.merge_adapter()
