"""Replace the head of a checkpoint by a new one, for training on another task."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import cutaway.config as cfg
from cutaway.argument_checks import check_seed
from cutaway.errors import ConfigError, InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.family import Family
from cutaway.families.registry import families, find_family
from cutaway.families.save import as_checkpoint
from cutaway.families.weight_loader import set_module_tensor
from cutaway.model import Transformer, build
from cutaway.model.init_weights import init_weights_with_seed
from cutaway.model.layers import ConstantBuffers

_TRANSFORM = "head.transform."
_LABEL_KEYS = ("id2label", "label2id", "num_labels", "problem_type")


def replace_head(
    checkpoint: Checkpoint | Transformer,
    head: str | cfg.OutputHead,
    *,
    labels: Sequence[str] = (),
    num_labels: int | None = None,
    seed: int | None = None,
    **fields: Any,
) -> Checkpoint:
    """Return a checkpoint with the same body and a new head, which is initialized from `seed`.

    `head` is the kind of the head ('sequence-classification', 'token-classification', 'multiple-choice', 'embedding'),
    which then has the shape that is published for the model's family, or a configuration. `labels` are the names of
    the labels; without names, `num_labels` is their number. `fields` are more fields of the head. The weights of the
    body are shared with the given checkpoint, not copied. So are those of layers before the classifier that the
    family's checkpoints store under the same name, as transformers does: BERT's pooler, ModernBERT's dense layer.
    """
    checkpoint = as_checkpoint(checkpoint)
    check_seed(seed)
    old = checkpoint.model
    if old.adapters:
        raise InputError("the model has adapters; replace the head first, then add an adapter")
    family = _find_family(checkpoint)
    if isinstance(head, str):
        head = _default_head(checkpoint, family, head)
    if labels:
        fields |= {"labels": tuple(labels), "num_labels": len(labels)}
    elif num_labels is not None:
        fields |= {"labels": (), "num_labels": num_labels}
    if fields.get("num_labels") == 1 and head.kind == "sequence-classification":
        fields = {"problem_type": "regression"} | fields
    if isinstance(head, cfg.SequenceClassificationHead) and old.config.form == "decoder" and head.pad_token_id is None:
        fields = {"pad_token_id": _pad_token_id(checkpoint)} | fields
    config = _with_head(old.config, head.model_dump() | fields)
    kept = _kept_modules(old.config, config, family)
    if isinstance(config, cfg.Encoder) and "pooler.dense" in kept:
        config = config.replace(pooler=False)
    model = build(config, device="meta", dtype=old.dtype)
    _share_weights(model, old, kept)
    _init_head(model, old.device, seed)
    return replace(checkpoint, model=model.train(old.training), config=config)


def _default_head(checkpoint: Checkpoint, family: Family | None, kind: str) -> cfg.OutputHead:
    """The head of a kind that is published for a family, with its default dropout."""
    config = checkpoint.config
    if kind in ("lm", "none"):
        raise InputError(
            f"replace_head adds a head for a task, not '{kind}'; use 'sequence-classification', 'token-classification',"
            " 'multiple-choice' or 'embedding'"
        )
    head_class = family.head_class_for(kind) if family is not None else None
    if family is not None and head_class is not None:
        hf_config = checkpoint.hf_config or family.config_to_hf(config)
        hf_config = {key: value for key, value in hf_config.items() if key not in _LABEL_KEYS}
        return family.config_from_hf(hf_config | {"architectures": [head_class.architecture]})[0].head
    data: dict[str, object] = {"kind": kind}
    if kind == "embedding":
        data["pooling"] = "last" if config.form == "decoder" else "mean"
    elif kind == "sequence-classification" and config.form != "encoder":
        data["pooling"] = "last"
    return _with_head(config, data).head


def _with_head(config: cfg.Config, head: dict[str, object]) -> cfg.Config:
    """The configuration with another head."""
    return cfg.config(cfg.to_dict(config) | {"head": head})


def _pad_token_id(checkpoint: Checkpoint) -> int | None:
    """Id of the padding token of the tokenizer, or else of EOS, by which transformers finds the last token."""
    tokenizer = checkpoint.tokenizer
    ids = [] if tokenizer is None else [tokenizer.pad_token_id, tokenizer.eos_token_id]
    return next((each for each in ids if each is not None and each < checkpoint.config.vocab_size), None)


def _find_family(checkpoint: Checkpoint) -> Family | None:
    if checkpoint.family is not None:
        return families()[checkpoint.family]
    try:
        return find_family(checkpoint.config)[0]
    except ConfigError:
        return None


def _kept_modules(old: cfg.Config, new: cfg.Config, family: Family | None) -> dict[str, str]:
    """{old name: new name} of modules before the classifier that checkpoints with either head store under one key."""
    if family is None or getattr(new.head, "transform", None) is None:
        return {}
    stored = {row.checkpoint_key: row.model_keys[0] for row in family.weight_mappings_for(old)}
    rows = family.weight_mappings_for(new)
    new_modules = {row.checkpoint_key: row.model_keys[0] for row in rows if row.model_keys[0].startswith(_TRANSFORM)}
    return {stored[key]: module for key, module in new_modules.items() if key in stored}


def _share_weights(model: Transformer, old: Transformer, kept: dict[str, str]) -> None:
    """Assign the tensors of the old model, except those of its head that are not among the kept modules."""
    state = model.state_dict(keep_vars=True)
    for old_name, tensor in old.state_dict(keep_vars=True).items():
        path, _, leaf = old_name.rpartition(".")
        name = f"{kept[path]}.{leaf}" if path in kept else old_name
        is_shared = path in kept or not old_name.startswith("head.")
        if is_shared and name in state and state[name].shape == tensor.shape:
            set_module_tensor(model, name, tensor)
    for module in model.modules():
        if isinstance(module, ConstantBuffers):
            module.register_constants(old.device)
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta and not name.startswith("head.")]
    if missing:
        raise InputError(
            f"the model has no plain tensor '{missing[0]}', because its layers are quantized; replace the head of the"
            " model before you quantize it"
        )


def _init_head(model: Transformer, device: torch.device, seed: int | None) -> None:
    """Initialize the parameters of the head that are not from the old model."""
    if model.head is None:
        return
    names = [name for name, parameter in model.head.named_parameters() if parameter.is_meta]
    for name in names:
        set_module_tensor(model.head, name, torch.empty_like(model.head.get_parameter(name), device=device))
    if names:
        parameters = [(name, model.head.get_parameter(name)) for name in names]
        init_weights_with_seed(model.head, model.config, seed, parameters)
