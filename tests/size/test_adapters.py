"""Estimates of adapter training against PyTorch: adapted layers, saved bytes, FLOPs, weights, gradients, states."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.config_strategies import configs
from support.flop_and_memory_counters import build_model, compute_loss, count_flops, count_saved_bytes

import cutaway as ct
from cutaway.config import Config, LoRA, config, presets
from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.model.adapters.adapter_methods import adaptable_layers
from cutaway.model.adapters.quantized_linear import NF4_BLOCK_SIZE, QuantizedLinear, quantize_linears
from cutaway.size.adapters import build_frozen_base, frozen_bytes, list_adapter_tensors
from cutaway.size.precision import get_adapter_precision
from cutaway.size.shape_pass import ExecutionConfig, training_pass

BATCH_SIZE, SEQ_LEN, SOURCE_LEN = 2, 11, 7
TINY = [name for name in presets() if name.startswith("tiny-")]
MODES = ("none", "selective", "full")


@st.composite
def adapters(draw: Any) -> LoRA:
    use_dora = draw(st.booleans())
    patterns = ["all-linear", "attn.*", "attn.v", "ffn.*", "blocks.1.*", "cross.*", "experts.*", "o", "down"]
    targets = draw(st.lists(st.sampled_from(patterns), min_size=1, max_size=2, unique=True))
    if use_dora:
        targets = ["attn.*", "ffn.up", "ffn.down"]
    elif draw(st.booleans()):
        targets.append("embed")
    return LoRA(
        rank=draw(st.integers(1, 2)),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.1])),
        targets=tuple(targets),
        use_dora=use_dora,
    )


def add_adapter(module: Transformer, adapter: LoRA, quantization: str = "none") -> Transformer:
    if quantization != "none":
        quantize_linears(module, quantization)  # type: ignore[arg-type]
    module.add_adapter(adapter, seed=0)
    return module.train()


def with_matching_targets(module: Transformer, adapter: LoRA) -> LoRA:
    """The adapter without the targets that match no layer, unless there are no others."""
    sites = adaptable_layers(module)
    matching = [each for each in adapter.targets if any(LoRA(targets=(each,)).matches(site) for site in sites)]
    return adapter.replace(targets=tuple(matching or adapter.targets))


def is_adaptable(module: Transformer, adapter: LoRA) -> bool:
    """Whether the targets match layers, these are large enough for the rank and, for DoRA, linear layers."""
    layers = [layer for site, layer in adaptable_layers(module).items() if adapter.matches(site)]
    weights: list[Any] = [layer.weight for layer in layers]
    is_large = all(min(weight.shape[-2:]) >= adapter.rank for weight in weights)
    return bool(layers) and is_large and not (adapter.use_dora and any(weight.ndim != 2 for weight in weights))


def execution(
    model: Config,
    adapter: LoRA,
    *,
    kernel: str = "auto",
    mode: str = "none",
    itemsize: int = 4,
    autocast: bool = False,
    quantization: str = "none",
) -> ExecutionConfig:
    return ExecutionConfig(
        itemsize,
        2 if autocast else itemsize,
        autocast,
        kernel=kernel,
        activation_checkpointing=mode,
        device="cpu",
        base=build_frozen_base(model, adapter, quantization),
    )


@given(model=configs(), adapter=adapters())
def test_adapted_layers_equal_those_of_the_model(model: Config, adapter: LoRA) -> None:
    module = build_model(model, kernel="auto")
    adapter = with_matching_targets(module, adapter)
    if not is_adaptable(module, adapter):
        return
    add_adapter(module, adapter)
    base = build_frozen_base(model, adapter, "none")
    assert base is not None
    trained = sorted(tuple(p.shape) for p in module.parameters() if p.requires_grad)
    assert sorted(tensor.shape for tensor in list_adapter_tensors(model, base)) == trained


@pytest.mark.nightly
@given(model=configs(), adapter=adapters(), kernel=st.sampled_from(["auto", "explicit"]), mode=st.sampled_from(MODES))
def test_flops_match_flop_counter(model: Config, adapter: LoRA, kernel: str, mode: str) -> None:
    module = build_model(model, kernel=kernel, activation_checkpointing=mode)
    adapter = with_matching_targets(module, adapter)
    if not is_adaptable(module, adapter):
        return
    add_adapter(module, adapter)
    loss, forward_flops = count_flops(lambda: compute_loss(module, BATCH_SIZE, SEQ_LEN, SOURCE_LEN))
    _, backward_flops = count_flops(lambda: loss.sum().backward())
    run = execution(model, adapter, kernel=kernel, mode=mode)
    full = training_pass(model, BATCH_SIZE, SEQ_LEN, run, source_len=SOURCE_LEN).counter.full_flops
    assert sum(flops for (phase, _), flops in full.items() if phase == "forward") == forward_flops
    assert sum(flops for (phase, _), flops in full.items() if phase != "forward") == backward_flops


@given(
    model=configs(),
    adapter=adapters(),
    kernel=st.sampled_from(["auto", "explicit"]),
    mode=st.sampled_from(MODES),
    precision=st.sampled_from([(torch.float32, False), (torch.bfloat16, True)]),
    quantization=st.sampled_from(["none", "int8"]),
)
def test_saved_bytes_match_autograd(
    model: Config, adapter: LoRA, kernel: str, mode: str, precision: tuple[torch.dtype, bool], quantization: str
) -> None:
    dtype, autocast = precision
    module = build_model(model, kernel=kernel, activation_checkpointing=mode, dtype=dtype)
    adapter = with_matching_targets(module, adapter)
    if not is_adaptable(module, adapter):
        return
    add_adapter(module, adapter, quantization)
    saved_bytes = count_saved_bytes(module, BATCH_SIZE, SEQ_LEN, SOURCE_LEN, autocast=autocast)
    run = execution(
        model,
        adapter,
        kernel=kernel,
        mode=mode,
        itemsize=dtype.itemsize,
        autocast=autocast,
        quantization=quantization,
    )
    estimate = training_pass(model, BATCH_SIZE, SEQ_LEN, run, source_len=SOURCE_LEN)
    assert estimate.saved_bytes == pytest.approx(saved_bytes, rel=0.02)


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
@pytest.mark.parametrize("name", TINY)
def test_bytes_of_weights_gradients_and_states_are_exact(name: str, quantization: str) -> None:
    adapter = LoRA(rank=2, targets=("all-linear", "embed"))
    module = ct.build(config(name), seed=0, dtype=torch.bfloat16)
    if quantization == "nf4" and any(
        layer.weight.numel() % NF4_BLOCK_SIZE for layer in module.modules() if isinstance(layer, torch.nn.Linear)
    ):
        with pytest.raises(InputError, match="use int8"):
            build_frozen_base(config(name), adapter, quantization)
        return
    add_adapter(module, adapter, quantization)
    base = build_frozen_base(config(name), adapter, quantization)
    assert base is not None
    tensors = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}
    for layer in module.modules():  # dequantized weights are not stored
        assert not isinstance(layer, QuantizedLinear) or "weight" not in dict(layer.named_parameters(recurse=False))
    trained = [tensor for tensor in tensors.values() if tensor.requires_grad]
    frozen = sum(tensor.nbytes for tensor in tensors.values()) - sum(tensor.nbytes for tensor in trained)
    assert frozen_bytes(config(name), base, get_adapter_precision("mixed")) == frozen
    size = ct.size(name, mode="train", context=8, adapter=adapter, quantization=quantization)
    sizes = size.memory.bytes_by_component
    assert sizes["frozen weights"] == frozen
    assert sizes["adapters"] == sum(tensor.nbytes for tensor in trained)
    assert sizes["gradients"] == sum(tensor.nbytes for tensor in trained)
    assert sizes["optimizer"] == sum(2 * tensor.nbytes + 4 for tensor in trained)
