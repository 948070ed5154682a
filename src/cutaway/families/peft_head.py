"""Head of a task in an adapter directory: the fully trained modules of PEFT's `modules_to_save`.

PEFT's files have the weights of the head, but neither its configuration nor the names of the labels. They are in one
more file, which PEFT does not read.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from cutaway.bounded_files import read_json_object
from cutaway.config.head import OutputHead, TaskHead
from cutaway.errors import ConfigError, WeightError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.load_plan import TensorConversion
from cutaway.families.replace_head import replace_head
from cutaway.families.sentence_transformers import read_modules
from cutaway.families.weight_loader import set_module_tensor
from cutaway.model import Transformer

HEAD_CONFIG_NAME = "head_config.json"
TASK_TYPES = {
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "embedding": "FEATURE_EXTRACTION",
}
"""Kind of a head → task_type of PEFT."""
CLASSIFIER_MODULES = ("classifier", "score")
"""Modules that PEFT always saves with a classification model, if it has them, and lists in modules_to_save."""
_HEAD_ADAPTER: TypeAdapter[OutputHead] = TypeAdapter(OutputHead)


def export_head(
    model: Transformer, conversions: Iterable[TensorConversion], directory: Path
) -> tuple[list[str], dict[str, Tensor]]:
    """Write the configuration of the head of a task. Return its modules and weights by their names in transformers.

    Both are empty for a model with an LM head or without head.
    """
    if not isinstance(model.config.head, TaskHead):
        (directory / HEAD_CONFIG_NAME).unlink(missing_ok=True)  # of another adapter that was saved there
        return [], {}
    text = json.dumps(model.config.head.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    (directory / HEAD_CONFIG_NAME).write_text(text, encoding="utf-8")
    state = model.state_dict()
    weights: dict[str, Tensor] = {}
    for conversion in conversions:
        if all(key.startswith("head.") for key in conversion.model_keys):
            tensors = [state[key].detach() for key in conversion.model_keys]
            converted = conversion.op.to_checkpoint(tensors, conversion.d_head)
            weights |= dict(zip(conversion.checkpoint_keys, converted, strict=True))
    modules = dict.fromkeys(_saved_module(key.rpartition(".")[0]) for key in weights)
    return list(modules), {key: tensor.cpu().contiguous() for key, tensor in weights.items()}


def _saved_module(module: str) -> str:
    """Name of a module in modules_to_save: PEFT saves `classifier` as a whole, with the layers inside of it."""
    return next((name for name in CLASSIFIER_MODULES if module.startswith(f"{name}.")), module)


def add_saved_head(
    checkpoint: Checkpoint, directory: Path, peft_config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> Checkpoint:
    """Give the checkpoint the head of an adapter directory, still without its weights. The body is shared."""
    head = _read_head(directory, peft_config, weights)
    task_type = peft_config.get("task_type")
    if head is None and task_type in ("SEQ_CLS", "TOKEN_CLS") and not isinstance(checkpoint.config.head, TaskHead):
        raise WeightError(
            f"the adapter is for classification (task_type {task_type}), but neither it nor the base model has the"
            " weights of a classifier; load it with the base model it was trained on"
        )
    if head is None or head == checkpoint.config.head:
        return checkpoint
    if not isinstance(head, str):
        return replace_head(checkpoint, head, seed=0)
    # Written by PEFT, without names of labels
    own, num_labels = checkpoint.config.head, _count_outputs(peft_config, weights)
    if own.kind == head and getattr(own, "num_labels", None) == num_labels:
        return checkpoint
    return replace_head(checkpoint, head, num_labels=num_labels, seed=0)


def load_head_weights(
    model: Transformer, base: Transformer, conversions: Iterable[TensorConversion], weights: dict[str, Tensor]
) -> None:
    """Assign the weights of the head from an adapter file, and remove them from `weights`.

    `base` is the model before it got the head. Raise WeightError if a weight is neither in it nor in the file.
    """
    state = model.state_dict(keep_vars=True)
    in_base = {tensor.data_ptr() for tensor in base.state_dict().values()}
    for conversion in conversions:
        if not all(key.startswith("head.") for key in conversion.model_keys):
            continue
        if not set(conversion.checkpoint_keys) <= weights.keys():
            if all(state[key].data_ptr() in in_base for key in conversion.model_keys):
                continue
            raise WeightError(
                f"neither the adapter nor the base model has '{conversion.checkpoint_keys[0]}', a weight of the head;"
                " pass the base model with the head it was trained with, or train again with this module in PEFT's"
                " modules_to_save"
            )
        sources = [weights.pop(key) for key in conversion.checkpoint_keys]
        targets = [state[key] for key in conversion.model_keys]
        converted = conversion.op.to_model(sources, [tuple(each.shape) for each in targets], conversion.d_head)
        for key, target, source in zip(conversion.model_keys, targets, converted, strict=True):
            if target.shape != source.shape:
                raise WeightError(
                    f"{key} has shape {list(source.shape)}, but the head needs {list(target.shape)}; load the adapter"
                    " with the base model it was trained on"
                )
            # A new tensor: the target may be shared with the base model, such as a pooler.
            set_module_tensor(model, key, source.to(target.device, target.dtype, copy=True))


def _read_head(directory: Path, peft_config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TaskHead | str | None:
    """Head in the directory, or its kind if PEFT has written it. None if the adapter has no head."""
    path = directory / HEAD_CONFIG_NAME
    if path.is_file():
        try:
            head = _HEAD_ADAPTER.validate_python(read_json_object(path, ConfigError))
        except ValidationError as error:
            raise ConfigError(f"'{path}' is not the configuration of a head ({error}); restore the file") from None
        return head if isinstance(head, TaskHead) else None
    if (modules := read_modules(directory)) is not None:  # written by sentence-transformers
        embedding_head, _, dense = modules
        if dense is not None:
            raise ConfigError(f"'{directory}' has an adapter and a module Dense, which is not supported; merge it")
        return embedding_head
    kinds = {task_type: kind for kind, task_type in TASK_TYPES.items() if kind != "embedding"}
    has_head = _count_outputs(peft_config, weights) is not None
    return kinds.get(str(peft_config.get("task_type"))) if has_head else None


def _count_outputs(peft_config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int | None:
    """Number of outputs of the classifier among the saved modules. None if there is none."""
    modules = peft_config.get("modules_to_save") or ()
    ends = ("classifier.weight", "score.weight", "classifier.out_proj.weight")
    found = [len(tensor) for key, tensor in weights.items() if key.endswith(ends)] if modules else []
    return found[0] if found else None
