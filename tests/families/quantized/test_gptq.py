"""GPTQ checkpoints, written from the definition of the format: dequantized, packed, and damaged."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.quantized_checkpoints import (
    HIDDEN,
    INTERMEDIATE,
    LLAMA,
    VOCAB,
    WEIGHTS,
    QuantizedMatrix,
    check_checkpoints,
    edit_quantization_config,
    edit_tensors,
    offset_error,
    pack_rows,
    packed_formats,
    quantize_groups,
    save_checkpoints,
)
from torch import Tensor

import cutaway as ct
from cutaway.cpu_kernels.library import load_cpu_kernels
from cutaway.errors import CutawayError
from cutaway.families.load import load_config
from cutaway.quantization.quantized_tensor import QuantizedTensor

Q_PROJ = "model.layers.0.self_attn.q_proj"


def gptq(
    bits: int = 4,
    group_size: int = 128,
    *,
    sym: bool = True,
    desc_act: bool = False,
    same_order: bool = True,
    version: int = 1,
    scales_dtype: torch.dtype = torch.float16,
) -> Callable[[Tensor], QuantizedMatrix]:
    """`same_order`: whether matrices with the same number of columns have the same groups, as q, k and v do."""
    generator = torch.Generator()

    def quantize(weight: Tensor) -> QuantizedMatrix:
        columns = weight.shape[1]
        groups = torch.arange(columns) // (columns if group_size == -1 else group_size)
        if desc_act:
            groups = groups[torch.randperm(columns, generator=generator.manual_seed(1) if same_order else generator)]
        codes, scales, zeros = quantize_groups(weight, bits, groups, symmetric=sym)
        scales = scales.to(scales_dtype)
        restored = scales[:, groups] * (codes - zeros[:, groups]).to(scales_dtype)
        tensors = {
            "qweight": pack_rows(codes, bits).T,
            "qzeros": pack_rows((zeros - (2 - version)).T, bits),
            "scales": scales.T,
            "g_idx": groups.int(),
        }
        return QuantizedMatrix(tensors, restored, offset_error(scales, zeros))

    return quantize


def gptq_config(**values: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True} | values


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        ({}, {"INT4_G128"}),
        ({"sym": False}, {"INT4_G128"}),
        ({"version": 2}, {"INT4_G128"}),
        ({"group_size": 64}, {"Q4_0"}),
        ({"group_size": 32, "sym": False}, {"Q4_1"}),
        ({"group_size": 16}, set()),
        ({"bits": 8, "sym": False}, {"INT8_G32"}),
        ({"group_size": -1}, {"INT4_G128"}),
        ({"bits": 8}, {"Q8_0"}),
        ({"bits": 8, "group_size": 32}, {"Q8_0"}),
        ({"bits": 2, "sym": False}, {"INT4_G128"}),
        ({"bits": 3}, {"INT4_G128"}),
        ({"bits": 3, "sym": False, "group_size": 32, "version": 2}, {"Q4_1"}),
        ({"desc_act": True, "group_size": 32}, {"Q4_0"}),
        ({"desc_act": True, "group_size": 64, "same_order": False}, {"Q4_0"}),
        ({"desc_act": True, "group_size": 32, "sym": False, "version": 2}, {"Q4_1"}),
        ({"desc_act": True, "sym": False}, {"INT4_G128"}),
        ({"desc_act": True, "group_size": -1}, {"INT4_G128"}),
        ({"desc_act": True, "group_size": 16}, set()),
        ({"desc_act": True, "group_size": 64, "bits": 8}, {"Q8_0"}),
        ({"desc_act": True, "group_size": 64, "bits": 8, "sym": False}, {"INT8_G32"}),
    ],
)
def test_gptq(options: dict[str, Any], formats: set[str], tmp_path: Path) -> None:
    config = {key: value for key, value in options.items() if key not in ("version", "same_order")}
    if options.get("version") == 2:
        config["checkpoint_format"] = "gptq_v2"
    saved = save_checkpoints(tmp_path, gptq(**options), gptq_config(**config))
    check_checkpoints(saved, formats, tmp_path)


def test_bf16_scales(tmp_path: Path) -> None:
    saved = save_checkpoints(tmp_path, gptq(scales_dtype=torch.bfloat16), gptq_config(), dtype=torch.bfloat16)
    check_checkpoints(saved, {"INT4_G128"}, tmp_path)


def test_asymmetric_8_bits(tmp_path: Path) -> None:
    """Codes minus zero points of rows without negative weights are outside of int8."""

    def quantize(weight: Tensor) -> QuantizedMatrix:
        return gptq(8, 128, sym=False)(weight.abs())

    saved = save_checkpoints(tmp_path, quantize, gptq_config(bits=8, sym=False))
    check_checkpoints(saved, {"INT8_G32"}, tmp_path)
    report = str(ct.load(saved.quantized, dequantize=False).load_report)
    if load_cpu_kernels() is not None:
        assert "14 in INT8_G32" in report


def test_without_g_idx(tmp_path: Path) -> None:
    def quantize(weight: Tensor) -> QuantizedMatrix:
        matrix = gptq()(weight)
        del matrix.tensors["g_idx"]
        return matrix

    check_checkpoints(save_checkpoints(tmp_path, quantize, gptq_config()), {"INT4_G128"}, tmp_path)


def test_plain_layers_and_zero_biases(tmp_path: Path) -> None:
    """Layers that are not quantized are stored plain; AutoGPTQ stores biases of zeros."""

    def quantize(weight: Tensor) -> QuantizedMatrix:
        matrix = gptq()(weight)
        matrix.tensors["bias"] = torch.zeros(len(weight), dtype=torch.float16)
        return matrix

    saved = save_checkpoints(tmp_path, quantize, gptq_config(), plain_names=("o_proj",))
    check_checkpoints(saved, {"INT4_G128"}, tmp_path)
    report = ct.load(saved.quantized).load_report
    assert report is not None
    assert "zeros" in report.ignored_weights[f"{Q_PROJ}.bias"]
    edit_tensors(saved.quantized, lambda tensors: tensors[f"{Q_PROJ}.bias"].fill_(1))
    with pytest.raises(CutawayError, match=r"unexpected: .*q_proj.bias"):
        ct.load(saved.quantized)


@pytest.mark.parametrize("desc_act", [False, True])
def test_fused_projections_stay_packed(desc_act: bool, tmp_path: Path) -> None:
    config, options = transformers.Phi3Config(**LLAMA), {"group_size": 64, "desc_act": desc_act}
    saved = save_checkpoints(tmp_path, gptq(**options), gptq_config(**options), model_config=config)
    check_checkpoints(saved, {"Q4_0"}, tmp_path)


def test_static_groups_with_desc_act(tmp_path: Path) -> None:
    """Columns were quantized in another order, but their groups are adjacent."""
    saved = save_checkpoints(tmp_path, gptq(), gptq_config(desc_act=True, static_groups=True))
    check_checkpoints(saved, {"INT4_G128"}, tmp_path)


def test_layers_with_and_without_desc_act(tmp_path: Path) -> None:
    ordered, plain = (gptq(group_size=32, desc_act=desc_act) for desc_act in (True, False))

    def quantize(weight: Tensor) -> QuantizedMatrix:
        return (ordered if weight.shape[1] == HIDDEN else plain)(weight)

    saved = save_checkpoints(tmp_path, quantize, gptq_config(group_size=32, desc_act=True))
    check_checkpoints(saved, {"Q4_0"}, tmp_path)


def test_packed_columns_in_another_order_are_traced_copied_and_counted(tmp_path: Path) -> None:
    if load_cpu_kernels() is None:
        pytest.skip("there is no C compiler")
    saved = save_checkpoints(tmp_path, gptq(group_size=64, desc_act=True), gptq_config(group_size=64, desc_act=True))
    packed = ct.load(saved.quantized, dtype=torch.float32, dequantize=False)
    plain = ct.load(ct.save(packed, tmp_path / "from-packed"))
    tokens = torch.randint(3, VOCAB, (1, 9))
    sites = ("blocks.1.attn.q", "blocks.1.ffn.hidden", "blocks.1.ffn.out", "logits")
    with torch.no_grad():
        traces = []
        for each in (plain.model, packed.model):
            with ct.trace(each, *sites) as trace:
                each(tokens)
            traces.append(trace)
        for site in sites:
            expected = traces[0][site]
            assert torch.allclose(traces[1][site], expected, atol=1e-4 * float(expected.abs().max())), site
        clone = copy.deepcopy(packed.model)
        clone.load_state_dict(packed.model.state_dict(), assign=True)
        assert torch.equal(clone(tokens), packed.model(tokens))
        assert torch.allclose(clone.bfloat16()(tokens).float(), expected, atol=0.1 * float(expected.abs().max()))
    with_order = [weight for weight in packed.model.parameters() if isinstance(weight, QuantizedTensor)]
    assert all(weight.column_order is not None for weight in with_order)
    assert sum(weight.nbytes for weight in with_order) == sum(
        weight.numel() // 32 * 18 + 8 * weight.shape[1] for weight in with_order
    )


def test_biases_are_loaded(tmp_path: Path) -> None:
    saved = save_checkpoints(tmp_path, gptq(), gptq_config(), model_config=transformers.Qwen2Config(**LLAMA))
    check_checkpoints(saved, {"INT4_G128"}, tmp_path)


@pytest.mark.parametrize("desc_act", [False, True])
def test_experts_stay_packed(desc_act: bool, tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2)
    quantize = gptq(group_size=32, desc_act=desc_act, same_order=False)
    saved = save_checkpoints(tmp_path, quantize, gptq_config(group_size=32, desc_act=desc_act), model_config=config)
    restored: dict[str, Tensor] = {}

    def quantize_experts(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            matrix = quantize(tensors.pop(name))
            stem = name.removesuffix("weight")
            tensors.update({stem + suffix: tensor.contiguous() for suffix, tensor in matrix.tensors.items()})
            restored[name] = matrix.weight

    edit_tensors(saved.quantized, quantize_experts)
    assert restored
    edit_tensors(saved.plain, lambda tensors: tensors.update(restored))
    check_checkpoints(saved, {"Q4_0"}, tmp_path)
    if load_cpu_kernels() is not None:
        experts: Any = ct.load(saved.quantized, dequantize=False).model.get_submodule("decoder.blocks.0.ffn.f.experts")
        assert all(isinstance(each.weight, QuantizedTensor) for each in (experts.gate, experts.up, experts.down))


def test_packed_matrices_take_the_memory_of_the_file(tmp_path: Path) -> None:
    if load_cpu_kernels() is None:
        pytest.skip("there is no C compiler")
    saved = save_checkpoints(tmp_path, gptq(), gptq_config())
    packed, plain = ct.load(saved.quantized, dequantize=False).model, ct.load(saved.quantized).model
    sizes = [
        sum(each.nbytes for name, each in model.named_parameters() if ".blocks." in name) for model in (packed, plain)
    ]
    assert sizes[0] < 0.27 * sizes[1]  # 4.25 bits instead of 16


@pytest.mark.parametrize("with_g_idx", [True, False])
def test_overrides_of_modules(with_g_idx: bool, tmp_path: Path) -> None:
    """GPTQModel's `dynamic` has bits and group sizes of modules, by regular expressions; "-:" excludes a module."""

    def quantize(weight: Tensor) -> QuantizedMatrix:
        is_down = weight.shape[1] == INTERMEDIATE
        matrix = gptq(bits=8 if is_down else 4, group_size=32 if is_down else 64, desc_act=with_g_idx)(weight)
        if not with_g_idx:
            del matrix.tensors["g_idx"]
        return matrix

    rules = {"-:.*o_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 32}}
    config = gptq_config(group_size=64, dynamic=rules, desc_act=with_g_idx)
    saved = save_checkpoints(tmp_path, quantize, config, plain_names=("o_proj",))
    check_checkpoints(saved, {"Q4_0", "Q8_0"}, tmp_path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing scales": (
        lambda path: edit_tensors(path, lambda tensors: tensors.pop(f"{Q_PROJ}.scales")),
        r"'.*q_proj.scales' is missing",
    ),
    "missing zero points": (
        lambda path: edit_tensors(path, lambda tensors: tensors.pop(f"{Q_PROJ}.qzeros")),
        r"'.*q_proj.qzeros' is missing",
    ),
    "scales of another shape": (
        lambda path: edit_tensors(
            path, lambda tensors: tensors.update({f"{Q_PROJ}.scales": tensors[f"{Q_PROJ}.scales"][:, :8].clone()})
        ),
        r"shape \[1, 8\], but .* requires \[1, 128\]",
    ),
    "too many groups": (
        lambda path: edit_tensors(
            path, lambda tensors: tensors.update({f"{Q_PROJ}.scales": tensors[f"{Q_PROJ}.scales"].repeat(2, 1)})
        ),
        "has 2 groups",
    ),
    "integer scales": (
        lambda path: edit_tensors(
            path, lambda tensors: tensors.update({f"{Q_PROJ}.scales": tensors[f"{Q_PROJ}.scales"].int()})
        ),
        "dtype int32",
    ),
    "group out of range": (
        lambda path: edit_tensors(path, lambda tensors: tensors[f"{Q_PROJ}.g_idx"].fill_(7)),
        "group outside of the 1 groups",
    ),
    "negative group": (
        lambda path: edit_tensors(path, lambda tensors: tensors[f"{Q_PROJ}.g_idx"].fill_(-1)),
        "group outside of the 1 groups",
    ),
    "codes of another shape": (
        lambda path: edit_tensors(
            path, lambda tensors: tensors.update({f"{Q_PROJ}.qweight": tensors[f"{Q_PROJ}.qweight"][:8].clone()})
        ),
        "config.json and weights do not match",
    ),
    "empty codes": (
        lambda path: edit_tensors(
            path, lambda tensors: tensors.update({f"{Q_PROJ}.qweight": torch.zeros(0, HIDDEN, dtype=torch.int32)})
        ),
        "is empty",
    ),
    "groups of other columns": (
        lambda path: edit_tensors(
            path, lambda tensors: tensors.update({f"{Q_PROJ}.g_idx": tensors[f"{Q_PROJ}.g_idx"][:-1].clone()})
        ),
        r"q_proj.qweight' in 'model.safetensors' has shape \[16, 128\], which a matrix of 127 columns",
    ),
    "groups in two dimensions": (
        lambda path: edit_tensors(
            path, lambda tensors: tensors.update({f"{Q_PROJ}.g_idx": tensors[f"{Q_PROJ}.g_idx"][None]})
        ),
        r"q_proj.g_idx' in 'model.safetensors' has shape \[1, 128\], but .* requires 1 dimensions",
    ),
    "groups are not integers": (
        lambda path: edit_tensors(
            path, lambda tensors: tensors.update({f"{Q_PROJ}.g_idx": tensors[f"{Q_PROJ}.g_idx"].float()})
        ),
        r"q_proj.g_idx' in 'model.safetensors' has dtype float32, not int32 or int64",
    ),
    "desc_act without groups of columns": (
        lambda path: (
            edit_quantization_config(path, desc_act=True),
            edit_tensors(path, lambda tensors: tensors.pop("model.layers.1.mlp.down_proj.g_idx")),
        ),
        r"layers.1.mlp.down_proj.g_idx' is missing, although config.json has desc_act",
    ),
    "zero points of another shape": (
        lambda path: edit_tensors(
            path, lambda tensors: tensors.update({f"{Q_PROJ}.qzeros": tensors[f"{Q_PROJ}.qzeros"][:, :3].clone()})
        ),
        r"q_proj.qzeros' in 'model.safetensors' has shape \[1, 3\], but .* requires \[1, 16\]",
    ),
    "overrides and zero points of another shape": (
        lambda path: (
            edit_quantization_config(path, dynamic={"model": {"bits": 8}}),
            edit_tensors(
                path, lambda tensors: tensors.update({f"{Q_PROJ}.qzeros": tensors[f"{Q_PROJ}.qzeros"][:, :3].clone()})
            ),
        ),
        r"q_proj.qweight' in 'model.safetensors' has shape \[16, 128\], which a matrix of 128 columns of 0 bits",
    ),
    "truncated": (
        lambda path: (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-100]),
        "'model.safetensors' is not a complete safetensors file",
    ),
    "NaN in scales": (
        lambda path: edit_tensors(path, lambda tensors: tensors[f"{Q_PROJ}.scales"].fill_(float("nan"))),
        "NaN",
    ),
    "plain and quantized": (
        lambda path: edit_tensors(path, lambda tensors: tensors.update({f"{Q_PROJ}.weight": torch.zeros(128, 128)})),
        "stored plain and quantized",
    ),
    "5 bits": (lambda path: edit_quantization_config(path, bits=5), "bits 5; cutaway supports one of 2, 3, 4, 8"),
    "bits are missing": (lambda path: edit_quantization_config(path, bits=None), "bits None"),
    "8 bits": (lambda path: edit_quantization_config(path, bits=8), "config.json and weights do not match"),
    "group size 0": (lambda path: edit_quantization_config(path, group_size=0), "group_size 0"),
    "group size -2": (lambda path: edit_quantization_config(path, group_size=-2), "group_size -2"),
    "group size is a string": (lambda path: edit_quantization_config(path, group_size="128"), "group_size '128'"),
    "group size is another": (lambda path: edit_quantization_config(path, group_size=64), "2 groups, but 256 columns"),
    "marlin": (lambda path: edit_quantization_config(path, checkpoint_format="marlin"), "cutaway supports gptq"),
    "old marlin": (lambda path: edit_quantization_config(path, is_marlin_format=True), "is_marlin_format"),
}


@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints_are_refused(name: str, dequantize: bool, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    saved = save_checkpoints(tmp_path, gptq(), gptq_config())
    damage(saved.quantized)
    with pytest.raises(CutawayError, match=message):
        ct.load(saved.quantized, dequantize=dequantize)


def test_config_is_read_without_weights(tmp_path: Path) -> None:
    saved = save_checkpoints(tmp_path, gptq(), gptq_config())
    assert load_config(saved.quantized) == load_config(saved.plain)
    assert ct.size(ct.config(saved.quantized)).parameters.total == ct.size(ct.config(saved.plain)).parameters.total


def test_packed_formats_without_packing(tmp_path: Path) -> None:
    saved = save_checkpoints(tmp_path, gptq(), gptq_config())
    assert packed_formats(ct.load(saved.quantized).model) == set()
