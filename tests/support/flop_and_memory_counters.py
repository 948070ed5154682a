"""FLOPs and saved-for-backward bytes of a model, measured with PyTorch."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from support.config_strategies import random_tokens
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode, bmm_flop, sdpa_backward_flop_count, sdpa_flop_count

from cutaway.config import Config
from cutaway.model import Transformer, build

aten = torch.ops.aten


def attention_flops(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


def grouped_flops(x: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """FLOPs of a grouped matmul, in which each row is multiplied by one expert's matrix."""
    return bmm_flop((1, x[0], weight[2]), (1, weight[2], weight[1]))


def grouped_weight_grad_flops(grad: Any, x: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return bmm_flop((1, grad[1], grad[0]), (1, grad[0], x[1]))


EXTRA_FLOP_FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
    torch.ops.cutaway.grouped_mm: grouped_flops,
    torch.ops.cutaway.grouped_mm_weight_grad: grouped_weight_grad_flops,
}
"""Operators for which PyTorch's FlopCounterMode has no formula."""


def count_flops(function: Callable[[], Any]) -> tuple[Any, int]:
    with FlopCounterMode(display=False, custom_mapping=EXTRA_FLOP_FORMULAS) as counter:
        result = function()
    return result, counter.get_total_flops()


def build_model(
    config: Config, *, kernel: str, activation_checkpointing: str = "none", dtype: torch.dtype = torch.float32
) -> Transformer:
    model = build(config, dtype=dtype, seed=0).train()
    return model.use_kernel(kernel).use_activation_checkpointing(activation_checkpointing)  # type: ignore[arg-type]


def compute_loss(model: Transformer, batch: int, length: int, source: int) -> torch.Tensor:
    """Return the cross-entropy of all outputs; hidden states, scores or embeddings if they are not classes."""
    config = model.config
    tokens = random_tokens(config, batch, length, 1)
    if config.form == "encoder-decoder":
        logits = model(random_tokens(config, batch, source, 2, "source"), tokens)
    elif getattr(model, "head", None) is None:
        return model.encode(tokens)  # type: ignore[operator]
    elif config.head.kind == "multiple-choice":
        return model(tokens[:, None])
    else:
        logits = model(tokens)
    if config.head.kind == "embedding":
        return logits
    num_targets, num_classes = logits[..., 0].numel(), logits.shape[-1]
    return F.cross_entropy(logits.flatten(0, -2), tokens.flatten()[:num_targets].clone() % num_classes)


class SavedTensor:
    """Wraps a tensor that autograd saves; a weak reference to it shows whether it is still saved."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def count_saved_bytes(model: Transformer, batch: int, length: int, source: int, *, autocast: bool = False) -> int:
    """Number of bytes that a forward pass saves for backward, without weights. Each storage counts once."""
    model_storages = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    references: list[weakref.ref[SavedTensor]] = []

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in model_storages:
            return tensor
        saved = SavedTensor(tensor)
        references.append(weakref.ref(saved))
        return saved

    def unpack(saved: Any) -> torch.Tensor:
        return saved.tensor if isinstance(saved, SavedTensor) else saved

    selective_storages: list[dict[Any, Any]] = []
    caching_mode = checkpoint._CachingTorchDispatchMode  # type: ignore[attr-defined]

    class RecordingMode(caching_mode):  # type: ignore[misc]
        """Records the storage in which selective checkpointing keeps tensors outside autograd."""

        def __init__(self, policy: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(policy, storage, *args, **kwargs)
            selective_storages.append(storage)

    checkpoint._CachingTorchDispatchMode = RecordingMode  # type: ignore[attr-defined]
    try:
        with saved_tensors_hooks(pack, unpack), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = compute_loss(model, batch, length, source)
    finally:
        checkpoint._CachingTorchDispatchMode = caching_mode  # type: ignore[attr-defined]
    live = [saved for reference in references if (saved := reference()) is not None]
    tensors = [saved.tensor for saved in live] + [
        tensor for cache in selective_storages for tensor in find_tensors(cache)
    ]
    del loss
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def find_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in find_tensors(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in find_tensors(item)]
    return find_tensors(value.val) if hasattr(value, "val") else []
