"""GGUF LoRA files: the adapter of a model, in the format that llama.cpp applies to the base model (`--lora`).

Each adapted matrix NAME of the base file has the tensors NAME.lora_a, (rank, in), and NAME.lora_b, (out, rank). The
update is alpha / rank · B·A, with one alpha for the file. For the token embedding, A is stored transposed.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from cutaway.errors import InputError, WeightError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.family import Family
from cutaway.families.gguf.file_format import GGUFFile, write_gguf
from cutaway.families.gguf.load_save import check_output_file, find_architecture
from cutaway.families.peft_format import export_adapter
from cutaway.families.save import ExportedTensors, as_checkpoint

LORA_A, LORA_B = ".lora_a", ".lora_b"
EMBEDDING_KEY = "token_embd"


def save_adapter_gguf(
    checkpoint: Checkpoint, path: str | Path, name: str | None = None, *, overwrite: bool = False
) -> Path:
    """Write an adapter (default: the active one) as a GGUF LoRA for the GGUF file of the base model."""
    checkpoint = as_checkpoint(checkpoint)
    target = check_output_file(path, overwrite=overwrite)
    name = name or checkpoint.model.active_adapter
    if name is None:
        raise InputError("the model has no active adapter; load one with ct.load(base, adapters=…)")
    checkpoint.model.check_adapter(name)
    config = checkpoint.model.adapters[name]
    if config.use_dora:
        raise InputError("a GGUF LoRA cannot store the magnitudes of DoRA; export the merged model instead")
    family, _ = find_architecture(checkpoint.config, checkpoint.family)
    alpha = 2.0 * config.rank if config.alpha is None else config.alpha
    metadata = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": float(alpha)}
    write_gguf(
        target, family.name, metadata, _export_tensors(checkpoint, family, name, alpha), None, overwrite=overwrite
    )
    return target


def _export_tensors(checkpoint: Checkpoint, family: Family, name: str, alpha: float) -> Iterator[ExportedTensors]:
    for module, tensors, rank, scaling in export_adapter(checkpoint.model, family, name):
        if "lora_embedding_A" in tensors:
            lora_a, lora_b = tensors["lora_embedding_A"].mT.contiguous(), tensors["lora_embedding_B"]
        else:
            lora_a, lora_b = tensors["lora_A.weight"], tensors["lora_B.weight"]
        # One alpha for all matrices: other scalings (rsLoRA, rank_pattern, alpha_pattern) are part of B.
        lora_b = lora_b * (scaling * rank / alpha)
        yield (f"{module}.weight{LORA_A}", f"{module}.weight{LORA_B}"), partial(list, [lora_a, lora_b]), 0


def read_adapter_gguf(path: str | Path) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Read a GGUF LoRA: A, B and scaling of each matrix, by the name of the matrix in the base file."""
    file = GGUFFile(Path(path))
    if file.metadata.get("general.type") != "adapter" or file.metadata.get("adapter.type") != "lora":
        raise WeightError(f"'{path}' is not a GGUF LoRA: general.type is {file.metadata.get('general.type')!r}")
    alpha = float(file.metadata.get("adapter.lora.alpha", 0.0))
    adapters = {}
    for key in file.tensor_infos:
        if key.endswith(LORA_A):
            matrix = key.removesuffix(LORA_A)
            if matrix + LORA_B not in file.tensor_infos:
                raise WeightError(f"'{path}' has {key}, but not {matrix}{LORA_B}; write it again")
            lora_a, lora_b = file.read_tensor(key), file.read_tensor(matrix + LORA_B)
            lora_a = lora_a.mT if matrix.startswith(EMBEDDING_KEY) else lora_a
            adapters[matrix] = lora_a, lora_b, alpha / len(lora_a) if alpha else 1.0
    return adapters
