"""Which of a module's tensors a pass reads, seen from outside: by the memory that each operation is given."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

METADATA_FUNCTIONS = {
    "__get__", "__set__", "__repr__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement", "stride",
    "data_ptr", "untyped_storage", "storage_offset", "is_floating_point", "is_complex", "is_contiguous", "get_device",
    "element_size", "type", "requires_grad_", "register_hook", "is_shared", "storage",
}  # fmt: skip
"""What asks about a tensor and does not use its numbers."""


MATMUL_FUNCTIONS = {
    F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.addmm, torch.mm, Tensor.mm,
    torch.einsum, torch.baddbmm, torch.bmm, Tensor.bmm,
}  # fmt: skip


LOOKUP_FUNCTIONS = {F.embedding, torch.embedding, Tensor.__getitem__, torch.index_select, Tensor.index_select}


def _storage_ptr(tensor: Tensor) -> int:
    """Where a tensor's numbers begin; views share it with what they are views of."""
    return tensor.untyped_storage().data_ptr()


class ParameterTracer(TorchFunctionMode):
    """While it is on, it is written down which parameters are read, which is looked up by tokens, and which makes the
    logits."""

    def __init__(self, module: nn.Module, vocab_size: int | None = None) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.parameter_names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.parameter_names.setdefault(_storage_ptr(parameter), []).append(name)
        self.read_ptrs: set[int] = set()
        self.unregistered_shapes: list[tuple[int, ...]] = []
        """Shapes of parameters that are read within the module and are none of its own."""
        self.depth, self.hooks, self.module = 0, [], module  # type: ignore[var-annotated]
        self.embedding_ptrs: list[int] = []
        self.head_ptr: int | None = None

    def __enter__(self) -> "ParameterTracer":
        self.hooks = [
            self.module.register_forward_pre_hook(lambda *_: self.change_depth(1)),
            self.module.register_forward_hook(lambda *_: self.change_depth(-1), always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()

    def change_depth(self, delta: int) -> None:
        self.depth += delta

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") in METADATA_FUNCTIONS:
            return out
        leaves = tree_leaves((args, kwargs))
        found = [at for each in leaves if isinstance(each, Tensor) and (at := self.find_parameter(each))]
        if self.depth and not found:
            self.unregistered_shapes += [
                tuple(x.shape) for x in leaves if isinstance(x, nn.Parameter) and x.requires_grad
            ]
        self.read_ptrs.update(found)
        if found and func in LOOKUP_FUNCTIONS and any(_is_index_tensor(each) for each in leaves):
            self.embedding_ptrs += [at for at in found if at not in self.embedding_ptrs]
        if func in MATMUL_FUNCTIONS and isinstance(out, Tensor) and out.ndim and out.shape[-1] == self.vocab_size:
            self.head_ptr = found[0] if found else None
        return out

    def find_parameter(self, tensor: Tensor) -> int | None:
        if tensor.layout != torch.strided or tensor.is_meta:
            return None
        at = _storage_ptr(tensor)
        return at if at in self.parameter_names else None

    @property
    def unread_parameters(self) -> list[str]:
        """Names of parameters that no operation was given."""
        return [names[0] for at, names in self.parameter_names.items() if at not in self.read_ptrs]


def _is_index_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and value.ndim > 0
