"""Model loading for CLI verbs. SOURCE is a checkpoint, a preset (random weights) or a config file (random weights)."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.cli.options import DType
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when it is needed
    import torch

    from cutaway.families.checkpoint import Checkpoint
    from cutaway.families.load import AdapterSources
    from cutaway.model import Transformer


def default_device(device: str | None) -> "torch.device":
    """Return the device of this name. For None, return cuda if it is available, else cpu."""
    import torch

    from cutaway.argument_checks import resolve_device

    return resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def to_torch_dtype(dtype: DType | None) -> "torch.dtype | None":
    import torch

    return None if dtype is None else getattr(torch, dtype)


def load_checkpoint(
    source: str,
    device: str | None,
    dtype: DType | None,
    *,
    quiet: bool,
    keep_dtype: bool = False,
    adapters: "AdapterSources | None" = None,
    device_map: str | None = None,
    tensor_parallel_size: int = 1,
    dequantize: bool = True,
) -> "Checkpoint":
    """Load a checkpoint in eval mode. For `adapters` and the arguments after it, see `ct.load`.

    On a CPU without native bfloat16, the 16-bit weights of models with up to 2³⁰ parameters are converted to float32,
    unless `dtype` or `keep_dtype` is set.
    """
    from cutaway.cli.views.terminal import progress_bar
    from cutaway.device import has_native_bf16
    from cutaway.families.load import load
    from cutaway.generate.fast.cpu_linear import should_upcast_on_cpu

    with progress_bar("loading", quiet=quiet) as progress:
        checkpoint = load(
            source,
            adapters=adapters,
            device=default_device(device) if device_map is None else device,
            dtype=to_torch_dtype(dtype),
            device_map=device_map,
            tensor_parallel_size=tensor_parallel_size,
            dequantize=dequantize,
            progress=progress,
        )
    if dtype is None and not keep_dtype and should_upcast_on_cpu(checkpoint.model) and not has_native_bf16():
        checkpoint.model.float()
        if not quiet:
            sys.stderr.write(
                "this CPU has no native bfloat16, so weights are converted to float32; --dtype bfloat16 prevents it\n"
            )
    if checkpoint.load_report is not None and checkpoint.load_report.offload_summary and not quiet:
        sys.stderr.write(f"{checkpoint.load_report.offload_summary}\n")
    checkpoint.model.eval()
    return checkpoint


def is_config_source(source: str) -> bool:
    """Whether a source is a preset name or a config file. An unknown name without a slash counts as a preset name."""
    from cutaway.config import presets
    from cutaway.pretrained import find_pretrained

    is_file = source.endswith((".toml", ".json"))
    if (Path(source).exists() and not is_file) or find_pretrained(source) is not None:
        return False
    return is_file or source in presets() or "/" not in source.partition("@")[0]


def check_no_adapter(source: str, adapter: str | None) -> None:
    """Raise if there is an adapter for a model with random weights."""
    if adapter is not None:
        raise InputError(
            f"'{source}' has random weights, but an adapter needs the base model it was trained on; pass a model"
            " directory, a .gguf file or a Hub id"
        )


def build_untrained_model(
    source: str, device: str | None, dtype: DType | None, adapter: str | None = None
) -> "Transformer | None":
    """Build the model of a preset or config file with random weights. Return None if the source is a checkpoint."""
    from cutaway.config import config

    if not is_config_source(source):
        return None
    check_no_adapter(source, adapter)
    model_config = config(source)  # an unknown name raises an error that suggests a preset
    import torch

    from cutaway.device import free_memory
    from cutaway.model import build
    from cutaway.size.parameters import count_parameters

    target_device = default_device(device)
    torch_dtype = to_torch_dtype(dtype) or torch.float32
    free_bytes, required_bytes = free_memory(target_device), count_parameters(model_config).total * torch_dtype.itemsize
    if free_bytes is not None and required_bytes > free_bytes:
        raise InputError(
            f"'{source}' needs {required_bytes / 1e9:.3g} GB for its weights, but {free_bytes / 1e9:.3g} GB are free; "
            "choose a smaller model, such as tiny-llama"
        )
    return build(model_config, device=target_device, dtype=torch_dtype, seed=0)
