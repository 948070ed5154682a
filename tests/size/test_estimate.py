"""`ct.size` against real tensors, reference figures and known errors of size calculators."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support.config_strategies import HEADS, configs

import cutaway as ct
from cutaway.config import Config, config, presets
from cutaway.errors import ConfigError, InputError
from cutaway.model import build
from cutaway.size import count_parameters
from cutaway.size.adapters import build_frozen_base, read_adapter
from cutaway.size.flops import count_flops
from cutaway.size.hardware import get_hardware
from cutaway.size.kv_cache import kv_cache_size
from cutaway.size.optimizer_state import optimizer_state_bytes
from cutaway.size.precision import get_precision
from cutaway.size.shape_pass import ExecutionConfig, inference_pass, training_pass
from cutaway.size.shape_pass import loss as loss_shapes
from cutaway.size.state_dict_shapes import checkpoint_size, list_tensors
from cutaway.train.loss import linear_cross_entropy
from cutaway.train.loss.chunked_cross_entropy import chunked_cross_entropy, select_targets
from cutaway.train.loss.cross_entropy import CrossEntropyOptions
from cutaway.train.optim.adamw_8bit import AdamW8bit
from cutaway.train.trainer.training_module import LOSS_CHUNK_SIZE

REFERENCES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "config/data/published_models.json").read_text()
)["models"]
TINY = [name for name in presets() if name.startswith("tiny-")]
PUBLISHED = {"tiny-gpt": "gpt2", "tiny-llama": "llama", "tiny-moe": "mixtral", "tiny-bert": "bert", "tiny-t5": "t5"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def total_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer state, including the components of tensor subclasses."""
    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            tensors = (
                [getattr(value, name) for name in value.__tensor_flatten__()[0]]
                if is_tensor_subclass(value)
                else [value]
            )
            total += total_bytes(tensors)
    return total


def is_tensor_subclass(value: torch.Tensor) -> bool:
    return hasattr(value, "__tensor_flatten__")


# ---------------------------------------------------------------------------------------- equal to real tensors


@given(model=configs(heads=HEADS), dtype=st.sampled_from(["fp32", "bf16"]))
def test_weight_and_gradient_bytes_match_built_model(model: Config, dtype: str) -> None:
    module = build(model, device="meta", dtype=DTYPES[dtype])
    tensors = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}
    checkpoint = checkpoint_size(model, get_precision(dtype))
    assert checkpoint.total_bytes == total_bytes(tensors.values())
    assert (
        checkpoint.num_elements - checkpoint.num_buffer_elements
        == count_parameters(model).total
        == sum(p.numel() for p in module.parameters())
    )
    assert checkpoint.num_tensors == len(tensors)
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    itemsize = DTYPES[dtype].itemsize
    pooler = sum(spec.numel for spec in list_tensors(model) if spec.name.startswith("pooler"))  # not in the loss
    assert training_pass(
        model, 1, 3, ExecutionConfig(itemsize, itemsize)
    ).grad_bytes + pooler * itemsize == total_bytes(trainable)


@given(model=configs(heads=HEADS))
def test_optimizer_state_bytes_match_torch(model: Config) -> None:
    module = build(model, seed=0)
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    specs = list_tensors(model)
    for name, optimizer in (
        ("adamw", torch.optim.AdamW(trainable)),
        ("sgd", torch.optim.SGD(trainable, lr=0.1)),
        ("sgd-momentum", torch.optim.SGD(trainable, lr=0.1, momentum=0.9)),
    ):
        optimizer.step()
        assert optimizer_state_bytes(name, specs, 4) == state_bytes(optimizer)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt"])
def test_muon_and_8bit_state_bytes_match_torch(name: str) -> None:
    module = build(name, seed=0)
    matrices = [
        p for path, p in module.named_parameters() if p.ndim == 2 and "embed" not in path and "head" not in path
    ]
    others = [p for p in module.parameters() if not any(p is matrix for matrix in matrices)]
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    specs = list_tensors(config(name))
    muon, adamw, adamw_8bit = torch.optim.Muon(matrices), torch.optim.AdamW(others), AdamW8bit(module.parameters())
    for optimizer in (muon, adamw, adamw_8bit):
        optimizer.step()
    assert optimizer_state_bytes("muon", specs, 4) == state_bytes(muon) + state_bytes(adamw)
    assert optimizer_state_bytes("adamw-8bit", specs, 4) == state_bytes(adamw_8bit)


@given(model=configs(forms=("decoder", "encoder-decoder")), dtype=st.sampled_from(["fp32", "bf16"]))
def test_kv_cache_bytes_match_built_cache(model: Config, dtype: str) -> None:
    module = build(model, seed=0, dtype=DTYPES[dtype])
    cache = module.new_cache(2, 9)
    tokens = torch.zeros(2, 9, dtype=torch.long)
    if model.form == "decoder":
        module(tokens, cache=cache)
    else:
        module(torch.zeros(2, 5, dtype=torch.long), tokens, cache=cache)
    tensors = [tensor for layer in (*cache.layers, *(cache.cross_layers or ())) for tensor in (layer.k, layer.v)]
    assert kv_cache_size(model, batch_size=2, context=9, source_len=5, dtype=dtype).unwindowed_bytes == total_bytes(
        tensors
    )


@pytest.mark.parametrize(("name", "family"), [*((name, "cutaway") for name in TINY), *PUBLISHED.items()])
def test_checkpoint_bytes_match_saved_file(name: str, family: str, tmp_path: Path) -> None:
    ct.save(build(name, seed=0), tmp_path / "model", family=family)
    stored_bytes = 0
    for path in (tmp_path / "model").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            stored_bytes += total_bytes(file.get_tensor(key) for key in file.keys())  # noqa: SIM118
    assert checkpoint_size(config(name), get_precision("fp32")).total_bytes == stored_bytes


# ---------------------------------------------------------------------------------------- equal to the reference


@pytest.mark.parametrize("fact", REFERENCES, ids=lambda fact: fact["name"])
def test_flops_match_reference(fact: dict[str, Any]) -> None:
    """The reference does not count the weighted sum of MoE experts."""
    for length, reference in fact["forward_flops_per_token"].items():
        num_tokens = int(length)
        flops = count_flops(
            inference_pass(config(fact["name"]), 1, num_tokens, ExecutionConfig()).counter, num_tokens
        ).full
        attention = flops.pop("scores") + flops.pop("values")
        assert attention == num_tokens * reference["attention_products"]
        assert sum(flops.values()) - flops.get("combine", 0) == num_tokens * reference["weights"]


@pytest.mark.parametrize("fact", REFERENCES, ids=lambda fact: fact["name"])
def test_kv_cache_matches_reference(fact: dict[str, Any]) -> None:
    model, reference = config(fact["name"]), fact["kv_cache_bf16"] or {}
    for context, nbytes in reference.get("bytes_at", {}).items():
        cache = kv_cache_size(model, batch_size=1, context=int(context))
        assert cache.total_bytes == nbytes
        assert cache.unwindowed_bytes == reference.get("if_window_ignored", {}).get(context, nbytes)
    if "expanded_bytes_per_token" in reference:
        assert kv_cache_size(model, batch_size=1, context=1).expanded_bytes == reference["expanded_bytes_per_token"]
    if not reference:
        assert kv_cache_size(model, batch_size=1, context=1).total_bytes == 0


# ---------------------------------------------------------------------------------------- calculator errors


def test_gqa_and_gated_ffn_are_counted() -> None:
    """12·L·d² + 2·V·d assumes MHA and two FFN matrices, and is wrong for Llama-3-8B."""
    size = ct.size("llama-3-8b")
    assert size.num_parameters == 8_030_261_248
    layer = size.parameters.unique_layers[0]
    assert layer.attention == 4096 * (4096 + 1024 + 1024 + 4096)
    assert layer.ffn == 3 * 4096 * 14336
    assert size.num_parameters * 0.95 > 12 * 32 * 4096**2 + 2 * 128256 * 4096


def test_kv_cache_has_kv_heads_only() -> None:
    """2 (k and v) · 32 layers · 8 key-value heads · 128 · 2 bytes."""
    assert ct.size("llama-3-8b").kv_cache.bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131_072


def test_flops_grow_superlinearly_with_context() -> None:
    short, long = (ct.size("llama-3-8b", context=context).forward_flops for context in (8192, 131072))
    assert long.total > 16 * short.total
    assert long.full["scores"] == 16**2 * short.full["scores"]
    assert long.full["ffn"] == 16 * short.full["ffn"]


def test_sliding_window_bounds_cache_and_visible_pairs() -> None:
    """Mistral 7B has a window of 4,096: at 32k the cache and, nearly, the visible pairs are 1/8."""
    size = ct.size("mistral-7b-v0.1", context=32768)
    assert size.kv_cache.total_bytes * 8 == size.kv_cache.unwindowed_bytes
    num_pairs = size.forward_flops.visible["scores"] / (2 * 32 * 32 * 128)
    assert num_pairs == 4096 * 4097 // 2 + (32768 - 4096) * 4096


def test_tied_head_counts_once_in_parameters_and_in_flops() -> None:
    size = ct.size("gpt2")
    assert size.num_parameters == 124_439_808
    assert size.parameters.head == 0
    assert size.checkpoint.num_elements == size.num_parameters
    assert size.forward_flops.full["head"] == 2 * 1024 * 50257 * 768


def test_embedding_lookup_has_no_flops() -> None:
    """An untied embedding table is not in a matmul, so 2N overcounts it (and omits attention)."""
    size = ct.size("llama-3-8b", context=1)
    weights = (
        size.num_parameters
        - size.parameters.embedding
        - sum(layer.norm for layer in size.parameters.unique_layers)
        - 4096
    )
    assert size.forward_flops.total == 2 * weights + 4 * 32 * 4096


def test_efficiency_range_is_below_one() -> None:
    for bound in (ct.size("llama-3-8b", hardware="h100").decode_time, ct.size("gpt2", hardware="4090").prefill_time):
        assert bound is not None
        assert bound.min_seconds < bound.expected_seconds_low < bound.expected_seconds_high < bound.eager_seconds_high
        assert 0 < bound.efficiency.low < bound.efficiency.high < 1


def test_moe_total_and_active_parameters() -> None:
    size = ct.size("mixtral-8x7b")
    assert size.num_parameters == 46_702_792_704
    assert size.parameters.active == 12_879_925_248
    assert size.forward_flops.full["ffn"] < 2 * 2048 * 8 * size.parameters.active


# ---------------------------------------------------------------------------------------- published figures


def test_rules_of_thumb_have_an_error() -> None:
    size = ct.size("llama-2-7b", context=1)
    assert size.forward_flops.per_token == pytest.approx(14e9, rel=0.1)
    assert size.to_dict()["flops"]["forward"]["rule_of_thumb"]["error"] == pytest.approx(0.02, abs=0.02)
    assert 2 * 175e9 * 100 == 35e12


def test_training_budget_of_llama_3_on_15_trillion_tokens() -> None:
    budget = ct.size("llama-3-8b", mode="train", train_tokens=15 * 10**12).training_budget
    assert budget.tokens_per_parameter == pytest.approx(1875, rel=0.01)
    assert budget.train_tokens / budget.chinchilla_tokens == pytest.approx(94, rel=0.01)


# ---------------------------------------------------------------------------------------- memory and time


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "name", ["gpt2", "llama-3-8b", "mixtral-8x7b", "gemma-2-9b", "bert-base", "t5-base", "deepseek-v3"]
)
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_to_dict_is_consistent(name: str, mode: str) -> None:
    size = ct.size(name, mode=mode, hardware="h200", batch_size=2)
    data = json.loads(json.dumps(size.to_dict(), allow_nan=False))
    assert data["parameters"]["total"] == size.num_parameters
    memory = data["memory"][mode]
    assert memory["total_bytes"] == sum(memory["peak_by_component"].values()) == size.memory.total_bytes
    assert memory["bytes_by_component"]["weights"] == memory["peak_by_component"]["weights"]
    assert size.time is not None
    assert size.time.min_seconds > 0


def test_activation_checkpointing_trades_memory_for_flops() -> None:
    sizes = [
        ct.size("llama-3.2-1b", mode="train", activation_checkpointing=mode) for mode in ("none", "selective", "full")
    ]
    assert [size.memory.bytes_by_component["activations"] for size in sizes] == sorted(
        (size.memory.bytes_by_component["activations"] for size in sizes), reverse=True
    )
    assert sizes[0].flops.total < sizes[2].flops.total < 4 / 3 * sizes[0].flops.total
    explicit = ct.size("llama-3.2-1b", mode="train", kernel="explicit")
    assert explicit.memory.total_bytes > sizes[0].memory.total_bytes + 16 * 32 * 8192**2 * 4


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-2-9b"])
def test_auto_kernel_of_soft_cap_and_sinks(name: str) -> None:
    """In inference on a GPU the scores are not materialized; on a CPU and in training they are."""
    options: dict[str, Any] = {"context": 32768}
    auto, flex, explicit = (ct.size(name, kernel=kernel, **options).memory for kernel in ("auto", "flex", "explicit"))
    assert auto == flex
    assert auto.total_bytes < explicit.total_bytes / 2
    on_cpu = [ct.size(name, kernel=k, hardware="epyc-9654", **options).memory for k in ("auto", "explicit")]
    assert on_cpu[0] == on_cpu[1]
    training = [ct.size(name, mode="train", kernel=k, context=1024).memory for k in ("auto", "explicit")]
    assert training[0] == training[1]


def test_memory_by_activation_checkpointing_equals_separate_estimates() -> None:
    size = ct.size("llama-3.2-1b", mode="train", context=1024)
    by_mode = size.to_dict()["memory"]["train"]["by_activation_checkpointing"]
    for mode in ("none", "selective", "full"):
        for kernel in ("auto", "explicit"):
            separate = ct.size("llama-3.2-1b", mode="train", context=1024, activation_checkpointing=mode, kernel=kernel)
            assert by_mode[mode][kernel]["total_bytes"] == separate.memory.total_bytes


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3", "t5-base", "gpt2"])
def test_tensor_parallel_weights_sum_to_the_model(name: str) -> None:
    """Two ranks hold every matrix once; norms, routers, latents and row-parallel biases are replicated."""
    unsharded, sharded = ct.size(name, dtype="bf16"), ct.size(name, dtype="bf16", world_size=2, parallel="tp")
    both_ranks = 2 * sharded.memory.bytes_by_component["weights"]
    assert (
        unsharded.memory.bytes_by_component["weights"]
        <= both_ranks
        <= 1.06 * unsharded.memory.bytes_by_component["weights"]
    )
    assert sharded.forward_flops == unsharded.forward_flops


def test_fsdp_shards_states_and_not_activations() -> None:
    unsharded = ct.size("llama-3-8b", mode="train", batch_size=1, dtype="bf16")
    sharded = ct.size("llama-3-8b", mode="train", batch_size=8, world_size=8, parallel="fsdp", dtype="bf16")
    sizes = sharded.memory.bytes_by_component
    assert sharded.memory.total_bytes > sizes["weights"] + sizes["optimizer"] + sizes["activations"]
    for component in ("weights", "gradients"):
        assert sharded.memory.bytes_by_component[component] * 8 == unsharded.memory.bytes_by_component[component]
    assert sharded.memory.bytes_by_component["optimizer"] == 2 * sharded.memory.bytes_by_component["weights"] + 4 * 291
    assert sharded.memory.bytes_by_component["activations"] == unsharded.memory.bytes_by_component["activations"]


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama", "tiny-moe", "tiny-bert", "tiny-t5"])
def test_fsdp_shard_bytes_match_torch(name: str) -> None:
    """Uses a fake process group of three ranks."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        module, mesh = build(name, seed=0), init_device_mesh("cpu", (3,))
        for block in (block for stack in module.stacks.values() for block in stack.blocks):
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        local_bytes = total_bytes(parameter.to_local() for parameter in module.parameters())  # type: ignore[attr-defined]
    finally:
        distributed.destroy_process_group()
    size = ct.size(
        name, mode="train", dtype="fp32", batch_size=3, world_size=3, parallel="fsdp", optimizer="sgd-momentum"
    )
    buffers = 4 * size.checkpoint.num_buffer_elements
    assert (
        size.memory.bytes_by_component["weights"] - buffers <= local_bytes <= size.memory.bytes_by_component["weights"]
    )
    assert size.memory.bytes_by_component["optimizer"] == local_bytes


@given(model=configs(heads=HEADS), kernel=st.sampled_from(["auto", "explicit"]))
def test_chunked_loss_has_equal_flops(model: Config, kernel: str) -> None:
    execution = ExecutionConfig(kernel=kernel)
    full, chunked = (training_pass(model, 3, 700, execution, loss=loss) for loss in ("full", "chunked"))
    assert full.counter.full_flops == chunked.counter.full_flops
    assert full.grad_bytes == chunked.grad_bytes


def test_chunked_loss_allocates_one_chunk_of_logits() -> None:
    options: dict[str, Any] = {"mode": "train", "batch_size": 16, "context": 1024}
    # With a softcap, a chunk has 1,024 targets. A plain head of GPT-2 has chunks of up to 2³⁰ logits.
    for source, num_chunks in (("gemma-2-2b", 16), ("gpt2", 1)):
        full, chunked = (ct.size(source, loss=loss, **options) for loss in ("full", "chunked"))
        ratio = full.memory.bytes_by_component["logits"] / chunked.memory.bytes_by_component["logits"]
        assert ratio == pytest.approx(num_chunks, rel=2e-3)  # the vocabulary is padded
        assert chunked.memory.total_bytes < full.memory.total_bytes
    frozen = ct.size("gpt2", adapter={"rank": 4}, **options).memory.bytes_by_component["logits"]
    assert 2**25 < frozen <= 2 * loss_shapes.MAX_CHUNK_LOGITS_FROZEN


@pytest.mark.parametrize("is_trained", [True, False])
def test_logits_of_the_chunked_loss_equal_the_buffers_of_a_step(
    is_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (loss_shapes, linear_cross_entropy):
        monkeypatch.setattr(module, "MIN_CPU_LOGITS", 0)
        monkeypatch.setitem(module.MAX_CHUNK_LOGITS, "cpu", 2**16)
        monkeypatch.setattr(module, "MAX_CHUNK_LOGITS_FROZEN", 2**15)
    model = ct.build("tiny-gpt", seed=0).requires_grad_(is_trained)
    x = torch.randn(700, model.config.d_model, requires_grad=True)
    buffers: dict[str, torch.Tensor] = {}
    targets = select_targets(torch.zeros(700, dtype=torch.long), torch.ones(700))
    chunked_cross_entropy(model.head, x, targets, CrossEntropyOptions(buffers=buffers))  # type: ignore[arg-type]
    lora = None if is_trained else read_adapter({"rank": 2})
    execution = ExecutionConfig(device="cpu", base=build_frozen_base(model.config, lora, "none"))
    cost = training_pass(model.config, 1, 700, execution, loss="chunked")
    assert [buffers[name].nbytes for name in ("logits", "logits_grad")] == [cost.logits_bytes] * 2


def test_limits_of_the_chunked_loss_equal_those_of_training() -> None:
    for name in ("MAX_CHUNK_LOGITS", "MAX_CHUNK_LOGITS_FROZEN", "MIN_CPU_LOGITS", "VOCAB_TILE"):
        assert getattr(loss_shapes, name) == getattr(linear_cross_entropy, name)
    assert loss_shapes.CHUNK_TOKENS == LOSS_CHUNK_SIZE


@pytest.mark.parametrize("kind", ["none", "adapter"])
def test_checkpointing_of_some_layers(kind: str) -> None:
    """Memory and FLOPs lie between those of no layer and of all layers, in equal steps."""
    options: dict[str, Any] = {"mode": "train", "context": 512, "compiled": True}
    options |= {"adapter": {"rank": 4}} if kind == "adapter" else {}
    full: dict[str, Any] = options | {"activation_checkpointing": "full"}
    estimates = [
        ct.size("llama-3.2-1b", **options),
        *(ct.size("llama-3.2-1b", activation_checkpointing_layers=n, **full) for n in range(1, 17)),
    ]
    saved = [each.memory.bytes_by_component["activations"] for each in estimates]
    flops = [each.flops.total for each in estimates]
    assert saved[-1] == ct.size("llama-3.2-1b", **full).memory.bytes_by_component["activations"]
    assert len({a - b for a, b in pairwise(saved[1:])}) == 1
    assert len({b - a for a, b in pairwise(flops)}) == 1
    assert saved[0] > 2 * saved[-1]


@pytest.mark.parametrize(
    ("options", "dims"),
    [
        ({"world_size": 8}, (8, 1, 1)),
        ({"world_size": 8, "parallel": "fsdp"}, (1, 8, 1)),
        ({"world_size": 8, "parallel": "tp"}, (1, 1, 8)),
        ({"world_size": 8, "parallel": "fsdp", "tp": 4}, (1, 2, 4)),
        ({"world_size": 8, "dp_shard": 2, "tp": 2}, (2, 2, 2)),
        ({"world_size": 8, "dp_shard": 4}, (2, 4, 1)),
    ],
)
def test_parallel_dims(options: dict[str, Any], dims: tuple[int, ...]) -> None:
    size = ct.size("llama-3-8b", mode="train", batch_size=8, context=128, **options)
    assert (
        size.options.parallel_dims.dp_replicate,
        size.options.parallel_dims.dp_shard,
        size.options.parallel_dims.tp,
    ) == dims
    assert size.batch_size_per_device * dims[0] * dims[1] == 8
    unsharded = ct.size("llama-3-8b", mode="train", context=128).memory.bytes_by_component["weights"]
    assert size.memory.bytes_by_component["weights"] * dims[1] * dims[2] == pytest.approx(unsharded, rel=0.001)


def test_quantized_checkpoint_bytes() -> None:
    bf16, int8, int4 = (ct.size("llama-3-8b", dtype=dtype).checkpoint.total_bytes for dtype in ("bf16", "int8", "int4"))
    matrices = 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336)
    rows = 32 * (4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096)
    assert bf16 - int8 == matrices - 2 * rows
    assert bf16 - int4 == matrices * 3 // 2 - 2 * matrices // 128


def test_absorbed_mla_is_counted_where_it_has_fewer_flops() -> None:
    """`visible` counts the absorbed form of MLA; `full` counts the up-projection, as the model computes it."""
    size = ct.size("deepseek-v3", context=32768)
    assert size.decode_flops is not None
    heads, rank, rope, layers = 128, 512, 64, 61
    assert size.decode_flops.visible["scores"] == 2 * layers * heads * (rank + rope) * 32768
    assert size.decode_flops.visible["values"] == 2 * layers * heads * rank * 32768
    assert size.decode_flops.total > 50 * size.decode_flops.total_visible
    prefill = size.forward_flops
    assert prefill.visible["projections"] == prefill.full["projections"]


def test_context_warning() -> None:
    assert ct.size("gpt2", context=1024).options.context_warning == ""
    assert "1,024" in ct.size("gpt2", context=1025).options.context_warning
    assert "8,192" in ct.size("llama-3-8b", context=10_000).options.context_warning


def test_compare_models_uses_the_smallest_context() -> None:
    from cutaway.size.memory_fit import compare_models

    assert [size.options.context for size in compare_models(["llama-3-8b", "bert-base"])] == [512, 512]


def test_quantized_checkpoint_directory_has_a_size(tmp_path: Path) -> None:
    """`quantization_config` does not affect the size estimate."""
    reference = next(fact for fact in REFERENCES if fact["name"] == "llama-3-8b")
    (tmp_path / "config.json").write_text(
        json.dumps(reference["config"] | {"quantization_config": {"quant_method": "fp8"}})
    )
    assert ct.size(tmp_path).num_parameters == 8_030_261_248


def test_compute_bound_batch_size() -> None:
    crossover = ct.size("llama-3-8b", hardware="h100", context=128).compute_bound_batch_size
    assert crossover is not None
    before, after = (
        ct.size("llama-3-8b", hardware="h100", context=128, batch_size=crossover + offset) for offset in (-1, 0)
    )
    assert before.decode_time is not None
    assert after.decode_time is not None
    assert before.decode_time.bottleneck == "bandwidth"
    assert ct.size("llama-3-8b", hardware="h100", context=8192).compute_bound_batch_size is None
    assert after.decode_time.bottleneck == "compute"


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ["gemma-2-2b", "flan-t5-base", "bart-base", "modernbert-base", "deepseek-v2-lite"])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_memory_does_not_decrease_with_context(name: str, batch: int) -> None:
    lengths = [1, 511, 512, 513, 1024, 1025, 2730, 2731, 4096, 4097, 8192, 8193, 16384, 40000]
    totals = [ct.size(name, batch_size=batch, context=context).memory.total_bytes for context in lengths]
    assert totals == sorted(totals)


# ---------------------------------------------------------------------------------------- invalid options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hardware": "h900"}, "h900"),
        ({"dtype": "fp7"}, "fp32, bf16"),
        ({"mode": "both"}, "infer, train"),
        ({"mode": "train", "optimizer": "adam"}, "adamw"),
        ({"activation_checkpointing": "some"}, "selective"),
        ({"kernel": "fast"}, "sdpa"),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": True}, "at least 1"),
        ({"context": 1.5}, "at least 1"),
        ({"world_size": 3, "batch_size": 4}, "multiple of 3"),
        ({"world_size": 3, "parallel": "tp"}, "cannot be split over 3 devices"),
        ({"parallel": "pipeline"}, "fsdp"),
        ({"world_size": 8, "batch_size": 8, "tp": 3}, "divisor of 8"),
        ({"world_size": 8, "batch_size": 8, "tp": 2, "dp_shard": 3}, "divisor of 4"),
        ({"loss": "none"}, "chunked"),
        ({"mode": "train", "dtype": "int4"}, "inference only"),
        ({"kv_cache_dtype": "fp7"}, "int8"),
        ({"price_per_hour": -1}, "price"),
        ({"price_per_hour": float("nan")}, "price"),
    ],
)
def test_invalid_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ct.size("llama-3-8b", **options).to_dict()


def test_unknown_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="llama-3-8b"):
        ct.size("llama-3-8bb")


def test_size_imports_no_torch() -> None:
    code = (
        "import sys, cutaway as ct; ct.size('deepseek-v3', hardware='h200', mode='train').to_dict();"
        "assert not {'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_relative_bias_tables_are_shared_where_equal() -> None:
    """Layers share a table if their positions are equal, regardless of the window."""
    model = config("tiny-t5")
    block = model.encoder.block[0]
    other_buckets = block.replace(
        attention=block.attention.replace(position=block.attention.position.replace(buckets=8))
    )
    windowed = block.replace(attention=block.attention.replace(window=4))
    mixed = model.replace(encoder=model.encoder.replace(block=(block, other_buckets, windowed), layers=6))
    assert sum(spec.numel for spec in list_tensors(mixed) if spec.is_parameter) == count_parameters(mixed).total
    biases = [
        spec for spec in list_tensors(mixed) if spec.name.startswith("encoder") and spec.name.endswith("relative_bias")
    ]
    assert len(biases) == 2


def test_prefill_computes_the_last_logits_only() -> None:
    size = ct.size("gemma-3-270m", hardware="h100", context=2048)
    assert size.prefill_flops.full["head"] * 2048 == size.forward_flops.full["head"]
    encoder = ct.size("bert-base-mlm", hardware="h100")
    assert encoder.prefill_flops == encoder.forward_flops


def test_expected_bytes_count_distinct_experts() -> None:
    """`min_bytes` counts one token's experts; `expected_bytes` and the crossover count expected distinct ones."""
    one, many = (ct.size("mixtral-8x7b", hardware="h100", context=128, batch_size=batch) for batch in (1, 256))
    assert one.decode_workload(1).min_bytes == pytest.approx(one.decode_workload(1).expected_bytes, rel=1e-6)
    assert many.decode_workload(256).expected_bytes > 2 * many.decode_workload(256).min_bytes
    assert many.compute_bound_batch_size is not None
    dense = ct.size("llama-3-8b", hardware="h100", context=128).compute_bound_batch_size
    assert dense is not None
    assert many.compute_bound_batch_size > 2 * dense


def test_first_decode_step_does_not_run_the_encoder() -> None:
    first, second = (ct.size("t5-base", context=context, source_len=512).decode_flops for context in (1, 2))
    assert first is not None
    assert second is not None
    assert first.total < second.total


@pytest.mark.parametrize("figure", [0, -1, float("nan"), float("inf"), 1e-300, "1TB/s", None, True])
def test_invalid_device_figures_are_errors(figure: Any) -> None:
    for figures in ({"bandwidth": figure, "flops": 1e12}, {"bandwidth": 1e12, "flops": figure}):
        with pytest.raises(InputError, match="not a valid figure"):
            ct.size.custom_hardware(**figures)


def test_numpy_integers_are_accepted() -> None:
    import numpy as np

    size = ct.size("gpt2", batch_size=np.int64(3), context=np.int32(100))
    assert json.loads(json.dumps(size.to_dict()))["options"]["infer"]["batch_size"] == 3


@pytest.mark.parametrize(
    "options", [{"hardware": 5}, {"batch_size": None}, {"dtype": ["bf16"]}, {"price_per_hour": 1.0}]
)
def test_options_of_the_wrong_type_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"pass|use"):
        ct.size("gpt2", **options)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_float8_counts_the_linear_layers_of_blocks(checkpointing: str) -> None:
    """FLOPs in fp8 are those of projections and FFNs; the time is that of both parts at their peak rates."""
    options: dict[str, Any] = {"mode": "train", "hardware": "h100", "activation_checkpointing": checkpointing}
    mixed, float8 = (ct.size("llama-3.2-1b", dtype=dtype, context=2048, **options) for dtype in ("mixed", "float8"))
    assert mixed.flops.visible == float8.flops.visible
    assert mixed.flops.float8 == 0
    assert float8.flops.float8 == float8.flops.visible["projections"] + float8.flops.visible["ffn"]
    assert mixed.train_time is not None
    assert float8.train_time is not None
    others = float8.flops.total_visible - float8.flops.float8
    seconds = others / get_hardware("h100").flops["bf16"] + float8.flops.float8 / get_hardware("h100").flops["fp8"]
    assert float8.train_time.compute_seconds == pytest.approx(seconds)
    assert mixed.train_time.compute_seconds / 2 < seconds < mixed.train_time.compute_seconds
    assert float8.memory.bytes_by_component["weights"] == mixed.memory.bytes_by_component["weights"]
    if checkpointing == "none":  # otherwise the peak is at the gradient of the embedding
        assert float8.memory.total_bytes < mixed.memory.total_bytes  # no copies of the weights in bf16


def test_float8_leaves_out_experts_and_routers() -> None:
    flops = ct.size("mixtral-8x7b", mode="train", dtype="float8", context=128).flops
    assert flops.float8 == flops.visible["projections"]


def test_float8_needs_fp8_matmuls() -> None:
    estimate = ct.size("gpt2", mode="train", dtype="float8", hardware="a100")
    assert estimate.memory.total_bytes > 0
    with pytest.raises(InputError, match="has no peak rate; use dtype mixed"):
        _ = estimate.train_time
