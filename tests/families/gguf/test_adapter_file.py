"""GGUF LoRA files: read back, applied to the base file's matrices, and held to the definitions of the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from support.cli_runner import CliRunner
from torch import Tensor

import cutaway as ct
from cutaway.errors import InputError, WeightError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.gguf.adapter_file import read_adapter_gguf, save_adapter_gguf
from cutaway.families.gguf.file_format import GGUFFile
from cutaway.families.gguf.load_save import save_gguf
from cutaway.model import Transformer

TOKENS = torch.arange(3, 23).view(2, 10)


def build_adapted(preset: str = "tiny-llama", **config: Any) -> Transformer:
    model = ct.build(preset, seed=0)
    model.add_adapter({"rank": 4, "alpha": 6.0} | config, seed=0)
    generator = torch.Generator().manual_seed(1)
    for key, parameter in model.named_parameters():
        if ".adapters." in key:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    ("preset", "config"),
    [
        ("tiny-llama", {}),
        ("tiny-llama", {"use_rslora": True, "rank_pattern": {"attn.v": 2}, "alpha_pattern": {"ffn.down": 3.0}}),
        ("tiny-gpt", {"targets": ["attn.q", "attn.v", "ffn.*"]}),
        ("tiny-gpt", {"targets": ["embed"]}),
    ],
    ids=["llama", "rslora-patterns", "fused-qkv", "embedding"],
)
def test_update_of_the_base_file_is_that_of_the_merged_file(
    preset: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """W + alpha/rank·B·A of each matrix of the base file equals the matrix in the file of the merged model."""
    model = build_adapted(preset, **config)
    with model.disable_adapters():
        save_gguf(Checkpoint(model, model.config), tmp_path / "base.gguf")
    save_adapter_gguf(Checkpoint(model, model.config), tmp_path / "lora.gguf")
    base, updates = GGUFFile(tmp_path / "base.gguf"), read_adapter_gguf(tmp_path / "lora.gguf")
    expected: dict[str, Tensor] = {}
    if config.get("targets") == ["embed"]:  # the head is tied, so there is no merged file
        layer: Any = model.get_submodule("decoder.embed.token")
        expected["token_embd.weight"] = layer.merged_weight()
    else:
        save_gguf(Checkpoint(model, model.config), tmp_path / "merged.gguf")
        merged = GGUFFile(tmp_path / "merged.gguf")
        expected = {key: merged.read_tensor(key) for key in merged.tensor_infos}
        assert expected.keys() == base.tensor_infos.keys()
    changed = 0
    for key, weight in expected.items():
        updated = base.read_tensor(key)
        if key in updates:
            lora_a, lora_b, scaling = updates[key]
            delta = scaling * lora_b @ lora_a
            updated = updated + (delta.mT if key.startswith("token_embd") else delta)
            changed += 1
        torch.testing.assert_close(updated, weight, atol=1e-6, rtol=1e-6)
    assert changed == len(updates) > 0


def test_metadata_and_shapes_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    """Keys of the gguf package, and for each matrix of the base file (in, out): A (in, rank) and B (rank, out)."""
    model = build_adapted()
    base = save_gguf(Checkpoint(model.merge_and_unload(), model.config), tmp_path / "base.gguf")
    path = save_adapter_gguf(Checkpoint(model, model.config), tmp_path / "lora.gguf")
    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert fields == {
        gguf.Keys.General.ARCHITECTURE: "llama",
        gguf.Keys.General.TYPE: gguf.GGUFType.ADAPTER,
        gguf.Keys.Adapter.TYPE: "lora",
        gguf.Keys.Adapter.LORA_ALPHA: 6.0,
    }
    shapes = {tensor.name: tensor.shape.tolist() for tensor in gguf.GGUFReader(base).tensors}
    found = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert found
    for key, shape in found.items():
        matrix, _, leaf = key.rpartition(".")
        expected = [shapes[matrix][0], 4] if leaf == "lora_a" else [4, shapes[matrix][1]]
        assert shape == expected, key


def test_command_line(tmp_path: Path, run_cli: CliRunner) -> None:
    model = build_adapted()
    with model.disable_adapters():
        base = ct.save(Checkpoint(model, model.config), tmp_path / "base")
    ct.save_adapter(model, tmp_path / "adapter", base=base)
    out = tmp_path / "lora.gguf"
    assert "LoRA of rank 4" in run_cli("convert", tmp_path / "adapter", out, "--to", "gguf", "--adapter-only")
    assert read_adapter_gguf(out).keys() >= {"blk.0.attn_q.weight", "blk.0.ffn_down.weight"}
    again = tmp_path / "again"
    run_cli("convert", base, again, "--adapter", tmp_path / "adapter", "--adapter-only")
    run_cli("convert", again, tmp_path / "copy", "--adapter-only")
    assert ct.load(tmp_path / "copy").model.adapters["default"].rank == 4
    for kind, name in (("gguf", "merged.gguf"), ("hf", "merged")):
        run_cli("convert", tmp_path / "adapter", tmp_path / name, "--to", kind)
        merged = ct.load(tmp_path / name)
        assert not merged.model.adapters
        with torch.no_grad():
            torch.testing.assert_close(merged.model(TOKENS), model(TOKENS), atol=1e-5, rtol=1e-5)
    message = run_cli("convert", base, out, "--to", "gguf", "--adapter-only", "--overwrite", code=2)
    assert "no adapter to write; pass one with --adapter DIR" in message


def test_dora_and_other_files_are_refused(tmp_path: Path) -> None:
    model = build_adapted(use_dora=True)
    with pytest.raises(InputError, match="magnitudes of DoRA; export the merged model"):
        save_adapter_gguf(Checkpoint(model, model.config), tmp_path / "lora.gguf")
    base = save_gguf(Checkpoint(model.merge_and_unload(), model.config), tmp_path / "base.gguf")
    with pytest.raises(WeightError, match="not a GGUF LoRA"):
        read_adapter_gguf(base)
    with pytest.raises(InputError, match="no active adapter"):
        save_adapter_gguf(Checkpoint(ct.build("tiny-llama"), model.config), tmp_path / "lora.gguf")
