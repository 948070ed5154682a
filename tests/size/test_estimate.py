"""`ct.size` says what is so: bytes of real tensors, reference figures, none of the mistakes that calculators make."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support.config_strategies import configs

import cutaway as ct
from cutaway.config import Config, config, presets
from cutaway.errors import ConfigError, InputError
from cutaway.model import build
from cutaway.size import count_parameters
from cutaway.size.flops import count_flops
from cutaway.size.kv_cache import kv_cache_size
from cutaway.size.optimizer_state import optimizer_state_bytes
from cutaway.size.precision import get_precision
from cutaway.size.shape_pass import ExecutionConfig, inference_pass, training_pass
from cutaway.size.state_dict import checkpoint_size, list_tensors

FACTS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "config/data/published_models.json").read_text())[
    "models"
]
TINY = [name for name in presets() if name.startswith("tiny-")]
PUBLISHED = {"tiny-gpt": "gpt2", "tiny-llama": "llama", "tiny-moe": "mixtral", "tiny-bert": "bert", "tiny-t5": "t5"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def bytes_of(held: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def states_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of everything that an optimizer keeps, looking inside packed tensors."""
    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            inside = [getattr(value, name) for name in value.__tensor_flatten__()[0]] if is_packed(value) else [value]
            total += bytes_of(inside)
    return total


def is_packed(value: torch.Tensor) -> bool:
    return hasattr(value, "__tensor_flatten__")


# ---------------------------------------------------------------------------------------- equal to real tensors


@given(model=configs(), dtype=st.sampled_from(["fp32", "bf16"]))
def test_weights_and_gradients_are_the_bytes_of_real_ones(model: Config, dtype: str) -> None:
    real = build(model, device="meta", dtype=DTYPES[dtype])
    everything = {id(tensor): tensor for tensor in real.state_dict(keep_vars=True).values()}
    file = checkpoint_size(model, get_precision(dtype))
    assert file.total_bytes == bytes_of(everything.values())
    assert (
        file.num_elements - file.num_buffer_elements
        == count_parameters(model).total
        == sum(p.numel() for p in real.parameters())
    )
    assert file.num_tensors == len(everything)
    trained = [parameter for parameter in real.parameters() if parameter.requires_grad]
    width = DTYPES[dtype].itemsize
    pooler = sum(each.numel for each in list_tensors(model) if each.name.startswith("pooler"))  # reads no token's loss
    assert training_pass(model, 1, 3, ExecutionConfig(width, width)).grad_bytes + pooler * width == bytes_of(trained)


@given(model=configs())
def test_optimizer_state_is_the_bytes_of_real_state(model: Config) -> None:
    real = build(model, seed=0)
    trained = [parameter for parameter in real.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    held = list_tensors(model)
    for name, optimizer in (
        ("adamw", torch.optim.AdamW(trained)),
        ("sgd", torch.optim.SGD(trained, lr=0.1)),
        ("sgd-momentum", torch.optim.SGD(trained, lr=0.1, momentum=0.9)),
    ):
        optimizer.step()
        assert optimizer_state_bytes(name, held, 4) == states_of(optimizer)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt"])
def test_muon_and_eight_bits_too(name: str) -> None:
    from torchao.optim import AdamW8bit

    real = build(name, seed=0)
    matrices = [p for part, p in real.named_parameters() if p.ndim == 2 and "embed" not in part and "head" not in part]
    others = [p for p in real.parameters() if not any(p is each for each in matrices)]
    for parameter in real.parameters():
        parameter.grad = torch.zeros_like(parameter)
    held = list_tensors(config(name))
    muon, adamw, eight = torch.optim.Muon(matrices), torch.optim.AdamW(others), AdamW8bit(real.parameters())
    with torch.compiler.set_stance("force_eager"):
        for optimizer in (muon, adamw, eight):
            optimizer.step()
    assert optimizer_state_bytes("muon", held, 4) == states_of(muon) + states_of(adamw)
    assert optimizer_state_bytes("adamw-8bit", held, 4) == states_of(eight)


@given(model=configs(forms=("decoder", "encoder-decoder")), dtype=st.sampled_from(["fp32", "bf16"]))
def test_the_kv_cache_is_the_bytes_of_a_real_one(model: Config, dtype: str) -> None:
    real = build(model, seed=0, dtype=DTYPES[dtype])
    cache = real.new_cache(2, 9)
    tokens = torch.zeros(2, 9, dtype=torch.long)
    if model.form == "decoder":
        real(tokens, cache=cache)
    else:
        real(torch.zeros(2, 5, dtype=torch.long), tokens, cache=cache)
    held = [each for layer in (*cache.layers, *(cache.cross_layers or ())) for each in (layer.k, layer.v)]
    assert kv_cache_size(model, batch_size=2, context=9, source_len=5, dtype=dtype).unwindowed_bytes == bytes_of(held)


@pytest.mark.parametrize(("name", "family"), [*((name, "cutaway") for name in TINY), *PUBLISHED.items()])
def test_a_saved_file_holds_what_is_said(name: str, family: str, tmp_path: Path) -> None:
    ct.save(build(name, seed=0), tmp_path / "model", family=family)
    held = 0
    for path in (tmp_path / "model").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            held += bytes_of(file.get_tensor(key) for key in file.keys())  # noqa: SIM118
    assert checkpoint_size(config(name), get_precision("fp32")).total_bytes == held


# ---------------------------------------------------------------------------------------- equal to the reference


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["name"])
def test_flops_are_the_reference_flops(fact: dict[str, Any]) -> None:
    """The reference leaves a mixture's weighted sum of experts out; everything else is the same."""
    for length, theirs in fact["forward_flops_per_token"].items():
        tokens = int(length)
        ours = count_flops(inference_pass(config(fact["name"]), 1, tokens, ExecutionConfig()).counter, tokens).full
        products = ours.pop("scores") + ours.pop("values")
        assert products == tokens * theirs["attention_products"]
        assert sum(ours.values()) - ours.get("combine", 0) == tokens * theirs["weights"]


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["name"])
def test_the_kv_cache_is_the_reference_cache(fact: dict[str, Any]) -> None:
    model, theirs = config(fact["name"]), fact["kv_cache_bf16"] or {}
    for context, size in theirs.get("bytes_at", {}).items():
        ours = kv_cache_size(model, batch_size=1, context=int(context))
        assert ours.total_bytes == size
        assert ours.unwindowed_bytes == theirs.get("if_window_ignored", {}).get(context, size)
    if "expanded_bytes_per_token" in theirs:
        assert kv_cache_size(model, batch_size=1, context=1).expanded_bytes == theirs["expanded_bytes_per_token"]
    if not theirs:
        assert kv_cache_size(model, batch_size=1, context=1).total_bytes == 0


# ---------------------------------------------------------------------------------------- mistakes of calculators


def test_grouped_heads_and_the_third_matrix_are_counted() -> None:
    """12·L·d² + 2·V·d, and full key heads with two FFN matrices, both miss Llama-3-8B by far."""
    size = ct.size("llama-3-8b")
    assert size.num_parameters == 8_030_261_248
    layer = size.parameters.unique_layers[0]
    assert layer.attention == 4096 * (4096 + 1024 + 1024 + 4096)
    assert layer.ffn == 3 * 4096 * 14336
    assert size.num_parameters * 0.95 > 12 * 32 * 4096**2 + 2 * 128256 * 4096


def test_the_cache_holds_keys_and_values_of_key_heads() -> None:
    """2 (k and v) · 32 layers · 8 key heads · 128 · 2 bytes: neither half of it nor four times."""
    assert ct.size("llama-3-8b").kv_cache.bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131_072


def test_cost_grows_faster_than_length() -> None:
    short, long = (ct.size("llama-3-8b", context=context).forward_flops for context in (8192, 131072))
    assert long.total > 16 * short.total
    assert long.full["scores"] == 16**2 * short.full["scores"]
    assert long.full["ffn"] == 16 * short.full["ffn"]


def test_a_window_bounds_cache_and_pairs() -> None:
    """Mistral 7B looks 4,096 back: at 32k its cache is an eighth, and so, nearly, is what its queries see."""
    size = ct.size("mistral-7b-v0.1", context=32768)
    assert size.kv_cache.total_bytes * 8 == size.kv_cache.unwindowed_bytes
    seen = size.forward_flops.visible["scores"] / (2 * 32 * 32 * 128)
    assert seen == 4096 * 4097 // 2 + (32768 - 4096) * 4096


def test_a_tied_head_is_one_matrix_and_one_product() -> None:
    size = ct.size("gpt2")
    assert size.num_parameters == 124_439_808
    assert size.parameters.head == 0
    assert size.checkpoint.num_elements == size.num_parameters
    assert size.forward_flops.full["head"] == 2 * 1024 * 50257 * 768


def test_a_lookup_is_no_product() -> None:
    """Of an untied table nothing is multiplied, so that 2N is too much by it (and too little by attention)."""
    size = ct.size("llama-3-8b", context=1)
    weights = (
        size.num_parameters
        - size.parameters.embedding
        - sum(layer.norm for layer in size.parameters.unique_layers)
        - 4096
    )
    assert size.forward_flops.total == 2 * weights + 4 * 32 * 4096


def test_efficiency_is_a_range_below_one() -> None:
    for bound in (ct.size("llama-3-8b", hardware="h100").decode_time, ct.size("gpt2", hardware="4090").prefill_time):
        assert bound is not None
        assert bound.min_seconds < bound.expected_seconds_low < bound.expected_seconds_high < bound.eager_seconds_high
        assert 0 < bound.efficiency.low < bound.efficiency.high < 1


def test_a_mixture_holds_all_experts_and_uses_few() -> None:
    size = ct.size("mixtral-8x7b")
    assert size.num_parameters == 46_702_792_704
    assert size.parameters.active == 12_879_925_248
    assert size.forward_flops.full["ffn"] < 2 * 2048 * 8 * size.parameters.active


# ---------------------------------------------------------------------------------------- the mission's figures


def test_the_rules_of_thumb_are_shown_with_their_error() -> None:
    size = ct.size("llama-2-7b", context=1)
    assert size.forward_flops.per_token == pytest.approx(14e9, rel=0.1)
    assert size.to_dict()["flops"]["forward"]["rule_of_thumb"]["error"] == pytest.approx(0.02, abs=0.02)
    assert 2 * 175e9 * 100 == 35e12


def test_llama_3_on_fifteen_trillion_tokens() -> None:
    budget = ct.size("llama-3-8b", mode="train", train_tokens=15 * 10**12).training_budget
    assert budget.tokens_per_parameter == pytest.approx(1875, rel=0.01)
    assert budget.train_tokens / budget.chinchilla_tokens == pytest.approx(94, rel=0.01)


# ---------------------------------------------------------------------------------------- memory and time hang together


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-3-8b", "mixtral-8x7b", "gemma-2-9b", "bert-base", "t5-base", "deepseek-v3"]
)
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_the_answer_is_whole(name: str, mode: str) -> None:
    size = ct.size(name, mode=mode, hardware="h200", batch_size=2)
    answer = json.loads(json.dumps(size.to_dict(), allow_nan=False))
    assert answer["parameters"]["total"] == size.num_parameters
    memory = answer["memory"][mode]
    assert memory["total_bytes"] == sum(memory["peak_by_component"].values()) == size.memory.total_bytes
    assert memory["bytes_by_component"]["weights"] == memory["peak_by_component"]["weights"]
    assert size.time is not None
    assert size.time.min_seconds > 0


def test_checkpointing_trades_memory_for_products() -> None:
    sizes = [
        ct.size("llama-3.2-1b", mode="train", activation_checkpointing=way) for way in ("none", "selective", "full")
    ]
    assert [size.memory.bytes_by_component["activations"] for size in sizes] == sorted(
        (size.memory.bytes_by_component["activations"] for size in sizes), reverse=True
    )
    assert sizes[0].flops.total < sizes[2].flops.total < 4 / 3 * sizes[0].flops.total
    explicit = ct.size("llama-3.2-1b", mode="train", kernel="explicit")
    assert explicit.memory.total_bytes > sizes[0].memory.total_bytes + 16 * 32 * 8192**2 * 4


def test_the_choices_are_what_each_would_take() -> None:
    size = ct.size("llama-3.2-1b", mode="train", context=1024)
    told = size.to_dict()["memory"]["train"]["by_activation_checkpointing"]
    for mode in ("none", "selective", "full"):
        for kernel in ("auto", "explicit"):
            asked = ct.size("llama-3.2-1b", mode="train", context=1024, activation_checkpointing=mode, kernel=kernel)
            assert told[mode][kernel]["total_bytes"] == asked.memory.total_bytes


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3", "t5-base", "gpt2"])
def test_tensor_shares_add_up(name: str) -> None:
    """Two devices hold every matrix once; norms, routers, latents and biases after a split product are held twice."""
    whole, share = ct.size(name, dtype="bf16"), ct.size(name, dtype="bf16", world_size=2, parallel="tp")
    twice = 2 * share.memory.bytes_by_component["weights"]
    assert whole.memory.bytes_by_component["weights"] <= twice <= 1.06 * whole.memory.bytes_by_component["weights"]
    assert share.forward_flops == whole.forward_flops


def test_sharded_states_are_shared_and_activations_are_not() -> None:
    alone = ct.size("llama-3-8b", mode="train", batch_size=1, dtype="bf16")
    eight = ct.size("llama-3-8b", mode="train", batch_size=8, world_size=8, parallel="fsdp", dtype="bf16")
    parts = eight.memory.bytes_by_component
    assert eight.memory.total_bytes > parts["weights"] + parts["optimizer"] + parts["activations"]
    for part in ("weights", "gradients"):
        assert eight.memory.bytes_by_component[part] * 8 == alone.memory.bytes_by_component[part]
    assert eight.memory.bytes_by_component["optimizer"] == 2 * eight.memory.bytes_by_component["weights"] + 4 * 291
    assert eight.memory.bytes_by_component["activations"] == alone.memory.bytes_by_component["activations"]


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama", "tiny-moe", "tiny-bert", "tiny-t5"])
def test_a_shard_is_the_bytes_of_a_real_one(name: str) -> None:
    """Three devices that are only pretended: sharding talks to nobody."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        real, mesh = build(name, seed=0), init_device_mesh("cpu", (3,))
        for block in (block for stack in real.stacks.values() for block in stack.blocks):
            fully_shard(block, mesh=mesh)
        fully_shard(real, mesh=mesh)
        held = bytes_of(parameter.to_local() for parameter in real.parameters())  # type: ignore[attr-defined]
    finally:
        distributed.destroy_process_group()
    size = ct.size(
        name, mode="train", dtype="fp32", batch_size=3, world_size=3, parallel="fsdp", optimizer="sgd-momentum"
    )
    buffers = 4 * size.checkpoint.num_buffer_elements
    assert size.memory.bytes_by_component["weights"] - buffers <= held <= size.memory.bytes_by_component["weights"]
    assert size.memory.bytes_by_component["optimizer"] == held


@given(model=configs(), kernel=st.sampled_from(["auto", "explicit"]))
def test_a_loss_in_chunks_multiplies_as_much(model: Config, kernel: str) -> None:
    setting = ExecutionConfig(kernel=kernel)
    whole, chunked = (training_pass(model, 3, 700, setting, loss=loss) for loss in ("full", "chunked"))
    assert whole.counter.full_flops == chunked.counter.full_flops
    assert whole.grad_bytes == chunked.grad_bytes


def test_a_loss_in_chunks_never_holds_all_logits() -> None:
    asked: dict[str, Any] = {"mode": "train", "batch_size": 16, "context": 1024}
    whole, chunked = (ct.size("gpt2", loss=loss, **asked) for loss in ("full", "chunked"))
    assert chunked.memory.bytes_by_component["logits"] * 16 == whole.memory.bytes_by_component["logits"]
    assert chunked.memory.total_bytes < whole.memory.total_bytes


@pytest.mark.parametrize(
    ("asked", "devices"),
    [
        ({"world_size": 8}, (8, 1, 1)),
        ({"world_size": 8, "parallel": "fsdp"}, (1, 8, 1)),
        ({"world_size": 8, "parallel": "tp"}, (1, 1, 8)),
        ({"world_size": 8, "parallel": "fsdp", "tp": 4}, (1, 2, 4)),
        ({"world_size": 8, "dp_shard": 2, "tp": 2}, (2, 2, 2)),
        ({"world_size": 8, "dp_shard": 4}, (2, 4, 1)),
    ],
)
def test_devices_are_copies_times_shards_times_tensor(asked: dict[str, Any], devices: tuple[int, ...]) -> None:
    found = ct.size("llama-3-8b", mode="train", batch_size=8, context=128, **asked)
    assert (
        found.options.parallel_dims.dp_replicate,
        found.options.parallel_dims.dp_shard,
        found.options.parallel_dims.tp,
    ) == devices
    assert found.batch_size_per_device * devices[0] * devices[1] == 8
    alone = ct.size("llama-3-8b", mode="train", context=128).memory.bytes_by_component["weights"]
    assert found.memory.bytes_by_component["weights"] * devices[1] * devices[2] == pytest.approx(alone, rel=0.001)


def test_quantised_weights_are_smaller_by_what_they_say() -> None:
    sixteen, eight, four = (
        ct.size("llama-3-8b", dtype=dtype).checkpoint.total_bytes for dtype in ("bf16", "int8", "int4")
    )
    matrices = 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336)
    rows = 32 * (4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096)
    assert sixteen - eight == matrices - 2 * rows
    assert sixteen - four == matrices * 3 // 2 - 2 * matrices // 128


def test_latents_are_met_as_they_are_where_that_is_less() -> None:
    """MLA's decoding bound is of the absorbed form; the model itself expands, which is what is counted as full."""
    size = ct.size("deepseek-v3", context=32768)
    assert size.decode_flops is not None
    heads, rank, rope, layers = 128, 512, 64, 61
    assert size.decode_flops.visible["scores"] == 2 * layers * heads * (rank + rope) * 32768
    assert size.decode_flops.visible["values"] == 2 * layers * heads * rank * 32768
    assert size.decode_flops.total > 50 * size.decode_flops.total_visible
    reading = size.forward_flops
    assert reading.visible["projections"] == reading.full["projections"]


def test_a_longer_sequence_than_it_is_made_for_is_said() -> None:
    assert ct.size("gpt2", context=1024).options.context_warning == ""
    assert "1,024" in ct.size("gpt2", context=1025).options.context_warning
    assert "8,192" in ct.size("llama-3-8b", context=10_000).options.context_warning


def test_models_are_compared_alike() -> None:
    from cutaway.size.memory_fit import compare_models

    assert [size.options.context for size in compare_models(["llama-3-8b", "bert-base"])] == [512, 512]


def test_a_packed_checkpoint_has_a_size(tmp_path: Path) -> None:
    """How weights are packed is no part of what the model is."""
    facts = next(fact for fact in FACTS if fact["name"] == "llama-3-8b")
    (tmp_path / "config.json").write_text(
        json.dumps(facts["config"] | {"quantization_config": {"quant_method": "fp8"}})
    )
    assert ct.size(tmp_path).num_parameters == 8_030_261_248


def test_decoding_turns_at_the_batch_that_is_said() -> None:
    turn = ct.size("llama-3-8b", hardware="h100", context=128).compute_bound_batch_size
    assert turn is not None
    before, after = (ct.size("llama-3-8b", hardware="h100", context=128, batch_size=turn + each) for each in (-1, 0))
    assert before.decode_time is not None
    assert after.decode_time is not None
    assert before.decode_time.bottleneck == "bandwidth"
    assert ct.size("llama-3-8b", hardware="h100", context=8192).compute_bound_batch_size is None
    assert after.decode_time.bottleneck == "compute"


@pytest.mark.parametrize("name", ["gemma-2-2b", "flan-t5-base", "bart-base", "modernbert-base", "deepseek-v2-lite"])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_a_longer_context_never_takes_less(name: str, batch: int) -> None:
    lengths = [1, 511, 512, 513, 1024, 1025, 2730, 2731, 4096, 4097, 8192, 8193, 16384, 40000]
    totals = [ct.size(name, batch_size=batch, context=context).memory.total_bytes for context in lengths]
    assert totals == sorted(totals)


# ---------------------------------------------------------------------------------------- questions that have no answer


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hardware": "h900"}, "h900"),
        ({"dtype": "fp7"}, "fp32, bf16"),
        ({"mode": "dream"}, "infer, train"),
        ({"mode": "train", "optimizer": "adam-and-eve"}, "adamw"),
        ({"activation_checkpointing": "some"}, "selective"),
        ({"kernel": "magic"}, "sdpa"),
        ({"batch_size": 0}, "1 or more"),
        ({"batch_size": True}, "1 or more"),
        ({"context": 1.5}, "1 or more"),
        ({"world_size": 3, "batch_size": 4}, "multiple of 3"),
        ({"world_size": 3, "parallel": "tp"}, "key heads"),
        ({"parallel": "magic"}, "fsdp"),
        ({"world_size": 8, "batch_size": 8, "tp": 3}, "divisor of 8"),
        ({"world_size": 8, "batch_size": 8, "tp": 2, "dp_shard": 3}, "divisor of 4"),
        ({"loss": "none"}, "chunked"),
        ({"mode": "train", "dtype": "int4"}, "serving"),
        ({"kv_cache_dtype": "fp7"}, "int8"),
        ({"price_per_hour": -1}, "price"),
        ({"price_per_hour": float("nan")}, "price"),
    ],
)
def test_a_wrong_question_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ct.size("llama-3-8b", **options).to_dict()


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="llama-3-8b"):
        ct.size("llama-3-8bb")


def test_torch_is_never_imported() -> None:
    code = (
        "import sys, cutaway as ct; ct.size('deepseek-v3', hardware='h200', mode='train').to_dict();"
        "assert not {'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_tables_of_relative_biases_are_two() -> None:
    """Layers share a table only where their method is the same; other windows look into the same one."""
    model = config("tiny-t5")
    block = model.encoder.block[0]
    other = block.replace(attention=block.attention.replace(position=block.attention.position.replace(buckets=8)))
    narrow = block.replace(attention=block.attention.replace(window=4))
    mixed = model.replace(encoder=model.encoder.replace(block=(block, other, narrow), layers=6))
    assert sum(each.numel for each in list_tensors(mixed) if each.is_parameter) == count_parameters(mixed).total
    biases = [
        each for each in list_tensors(mixed) if each.name.startswith("encoder") and each.name.endswith("relative_bias")
    ]
    assert len(biases) == 2


def test_a_prompt_needs_its_last_logits_only() -> None:
    size = ct.size("gemma-3-270m", hardware="h100", context=2048)
    assert size.prefill_flops.full["head"] * 2048 == size.forward_flops.full["head"]
    encoder = ct.size("bert-base-mlm", hardware="h100")
    assert encoder.prefill_flops == encoder.forward_flops


def test_many_tokens_reach_many_experts() -> None:
    """The bound is of one token's experts; what is expected, and where decoding turns, of those reached on average."""
    one, many = (ct.size("mixtral-8x7b", hardware="h100", context=128, batch_size=batch) for batch in (1, 256))
    assert one.decode_workload(1).min_bytes == pytest.approx(one.decode_workload(1).expected_bytes, rel=1e-6)
    assert many.decode_workload(256).expected_bytes > 2 * many.decode_workload(256).min_bytes
    assert many.compute_bound_batch_size is not None
    dense = ct.size("llama-3-8b", hardware="h100", context=128).compute_bound_batch_size
    assert dense is not None
    assert many.compute_bound_batch_size > 2 * dense


def test_the_first_token_of_a_target_reads_no_source_again() -> None:
    first, second = (ct.size("t5-base", context=context, source_len=512).decode_flops for context in (1, 2))
    assert first is not None
    assert second is not None
    assert first.total < second.total


@pytest.mark.parametrize("figure", [0, -1, float("nan"), float("inf"), 1e-300, "1TB/s", None, True])
def test_a_device_has_figures_that_a_device_can_have(figure: Any) -> None:
    for figures in ({"bandwidth": figure, "flops": 1e12}, {"bandwidth": 1e12, "flops": figure}):
        with pytest.raises(InputError, match="no device has"):
            ct.size.custom_hardware(**figures)


def test_whole_numbers_of_other_libraries_are_whole_numbers() -> None:
    import numpy as np

    size = ct.size("gpt2", batch_size=np.int64(3), context=np.int32(100))
    assert json.loads(json.dumps(size.to_dict()))["options"]["infer"]["batch_size"] == 3


@pytest.mark.parametrize(
    "options", [{"hardware": 5}, {"batch_size": None}, {"dtype": ["bf16"]}, {"price_per_hour": 1.0}]
)
def test_a_wrong_kind_of_answer_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"give|choose|name"):
        ct.size("gpt2", **options)
