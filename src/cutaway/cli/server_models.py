"""The models and adapters of `cutaway serve`: their names, and which adapter belongs to which model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.cli.options import DType
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch and fastapi are imported when they are needed
    from cutaway.generate.engine.config import SchedulingPolicy
    from cutaway.serve.limits import Limits
    from cutaway.serve.metrics import ServerMetrics
    from cutaway.serve.openai.serving_engine import ServingEngine


def default_model_name(source: str) -> str:
    """Return the default name of the served model.

    It is the hub id without revision, the name of the directory, or the name of the file without suffix.
    """
    if Path(source).exists():
        path = Path(source).resolve()
        return path.stem if path.is_file() else path.name
    return source.partition("@")[0]


def resolve_model_names(sources: Sequence[str], names: Sequence[str], adapters: Mapping[str, str]) -> list[str]:
    """Return the served name of each model: `names` if there are any, else the default names."""
    if names and len(names) != len(sources):
        raise InputError(
            f"--served-model-name is set {len(names)} times for {len(sources)} models; pass it once for each model, in"
            " the same order"
        )
    resolved = [*names] or [default_model_name(source) for source in sources]
    for name in resolved:
        if resolved.count(name) > 1:
            raise InputError(f"two models have the name '{name}'; pass --served-model-name once for each model")
        if name in adapters:
            raise InputError(f"the model and an adapter have the same name '{name}'; rename one of them")
    return resolved


def assign_adapters(adapters: Mapping[str, str], sources: Sequence[str]) -> list[dict[str, str]]:
    """Return the adapters of each model. With several models, an adapter belongs to the one its config names."""
    if len(sources) == 1:
        return [dict(adapters)]
    from cutaway.families.load import read_adapter_base

    assigned: list[dict[str, str]] = [{} for _ in sources]
    for name, directory in adapters.items():
        base = read_adapter_base(directory)
        matches = [index for index, source in enumerate(sources) if base is not None and _is_same_model(base, source)]
        if len(matches) != 1:
            raise InputError(
                f"--adapter {name}={directory}: its adapter_config.json names the base model '{base}', which is not one"
                f" of the served models ({', '.join(sources)}); serve this base model too, or correct"
                " base_model_name_or_path"
            )
        assigned[matches[0]][name] = directory
    return assigned


def _is_same_model(first: str, second: str) -> bool:
    from cutaway.families.load import resolve_checkpoint_path
    from cutaway.pretrained import find_pretrained

    def is_local(source: str) -> bool:
        return Path(source).expanduser().exists() or find_pretrained(source) is not None

    if first == second or not (is_local(first) and is_local(second)):
        return first == second
    return resolve_checkpoint_path(first).resolve() == resolve_checkpoint_path(second).resolve()


def load_engines(
    sources: Sequence[str],
    names: Sequence[str],
    adapters: Sequence[Mapping[str, str]],
    *,
    device: str | None,
    dtype: DType | None,
    device_map: str | None,
    tensor_parallel_size: int,
    limits: "Limits",
    metrics: "ServerMetrics",
    max_num_seqs: int | None,
    max_model_len: int | None,
    memory_utilization: float | None,
    scheduling_policy: "SchedulingPolicy",
    weight_bits: int | None,
    quiet: bool,
) -> list["ServingEngine"]:
    """Load the models with their adapters, then start an engine for each. The adapters of a model share its weights.

    All weights are loaded before the first KV cache is allocated, so that the caches fit in the memory that is left.
    """
    from cutaway.cli.model_loading import load_checkpoint
    from cutaway.families.load import add_adapters, resolve_checkpoint_path
    from cutaway.serve.openai.embeddings import read_pooling_mode
    from cutaway.serve.openai.serving_engine import ServingEngine

    checkpoints = []
    for source, model_adapters in zip(sources, adapters, strict=True):
        checkpoint = load_checkpoint(
            source,
            device,
            dtype,
            quiet=quiet,
            device_map=device_map,
            tensor_parallel_size=tensor_parallel_size,
            dequantize=weight_bits is not None,
        )
        active = checkpoint.model.active_adapter
        checkpoint = add_adapters(checkpoint, model_adapters)
        checkpoint.model.set_adapter(active).requires_grad_(False)
        checkpoints.append(checkpoint)
    return [
        ServingEngine(
            checkpoint,
            name,
            limits,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            memory_utilization=memory_utilization,
            scheduling_policy=scheduling_policy,
            pooling=read_pooling_mode(resolve_checkpoint_path(source)),
            weight_bits=weight_bits,
            adapters=tuple(model_adapters),
            metrics=metrics,
        )
        for checkpoint, source, name, model_adapters in zip(checkpoints, sources, names, adapters, strict=True)
    ]
