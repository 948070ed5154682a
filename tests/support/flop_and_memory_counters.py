"""What PyTorch itself says of a pass over a real model: FLOPs counted, tensors kept for the way back."""

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
    """Each row meets one expert's matrix."""
    return bmm_flop((1, x[0], weight[2]), (1, weight[2], weight[1]))


def grouped_weight_grad_flops(grad: Any, x: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return bmm_flop((1, grad[1], grad[0]), (1, grad[0], x[1]))


EXTRA_FLOP_FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
    torch.ops.cutaway.grouped_mm: grouped_flops,
    torch.ops.cutaway.grouped_mm_weight_grad: grouped_weight_grad_flops,
}
"""Products for which PyTorch's counter has no formula."""


def count_flops(work: Callable[[], Any]) -> tuple[Any, int]:
    with FlopCounterMode(display=False, custom_mapping=EXTRA_FLOP_FORMULAS) as counter:
        result = work()
    return result, counter.get_total_flops()


def build_model(
    config: Config, *, kernel: str, activation_checkpointing: str = "none", dtype: torch.dtype = torch.float32
) -> Transformer:
    model = build(config, dtype=dtype, seed=0).train()
    return model.use_kernel(kernel).use_activation_checkpointing(activation_checkpointing)  # type: ignore[arg-type]


def compute_loss(model: Transformer, batch: int, length: int, source: int) -> torch.Tensor:
    """Cross-entropy of every token; the stream itself where a model has no head."""
    config = model.config
    tokens = random_tokens(config, batch, length, 1)
    if config.form == "encoder-decoder":
        logits = model(random_tokens(config, batch, source, 2, "source"), tokens)
    elif getattr(model, "head", None) is None:
        return model.encode(tokens)  # type: ignore[operator]
    else:
        logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), tokens.clone().flatten())


class SavedTensor:
    """Wraps a tensor that autograd keeps, so that one can tell whether it still does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def count_saved_bytes(model: Transformer, batch: int, length: int, source: int, *, autocast: bool = False) -> int:
    """Bytes that wait for the way back after a forward pass, weights aside, each storage once."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    packed: list[weakref.ref[SavedTensor]] = []

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in own:
            return tensor
        box = SavedTensor(tensor)
        packed.append(weakref.ref(box))
        return box

    def unpack(box: Any) -> torch.Tensor:
        return box.tensor if isinstance(box, SavedTensor) else box

    stores: list[dict[Any, Any]] = []
    caching = checkpoint._CachingTorchDispatchMode  # type: ignore[attr-defined]

    class Watched(caching):  # type: ignore[misc]
        """Selective checkpointing keeps what it keeps outside autograd; this tells where."""

        def __init__(self, policy: Any, storage: Any, *rest: Any, **more: Any) -> None:
            super().__init__(policy, storage, *rest, **more)
            stores.append(storage)

    checkpoint._CachingTorchDispatchMode = Watched  # type: ignore[attr-defined]
    try:
        with saved_tensors_hooks(pack, unpack), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = compute_loss(model, batch, length, source)
    finally:
        checkpoint._CachingTorchDispatchMode = caching  # type: ignore[attr-defined]
    boxes = [box for reference in packed if (box := reference()) is not None]
    tensors = [box.tensor for box in boxes] + [tensor for store in stores for tensor in find_tensors(store)]
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
