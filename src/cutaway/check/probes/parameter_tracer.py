"""`ParameterTracer` records which parameters a forward pass reads, by the storage of each op's arguments."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cutaway.check.numerics import Args, Kwargs, TorchFunction
from cutaway.check.probes.op_tracer import OpTracer, torch_functions

_METADATA_FUNCTIONS = {
    "__get__", "__set__", "__repr__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement", "stride",
    "data_ptr", "untyped_storage", "storage_offset", "is_floating_point", "is_complex", "is_contiguous", "get_device",
    "element_size", "type", "requires_grad_", "register_hook", "is_shared", "storage",
}  # fmt: skip
"""Functions that use a tensor's metadata, not its values."""


_MATMUL_FUNCTIONS = torch_functions("linear matmul __matmul__ __rmatmul__ addmm mm einsum baddbmm bmm")
_LOOKUP_FUNCTIONS = torch_functions("embedding index_select") | {Tensor.__getitem__}


def _storage_ptr(tensor: Tensor) -> int:
    """Address of a tensor's storage; views share it with their base."""
    return tensor.untyped_storage().data_ptr()


class ParameterTracer(OpTracer):
    """Function mode that records the parameters that are read, the embedding tables that tokens index, and the
    parameter of the output head."""

    def __init__(self, module: nn.Module, vocab_size: int | None = None) -> None:
        super().__init__(module)
        self.vocab_size = vocab_size
        self.parameter_names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.parameter_names.setdefault(_storage_ptr(parameter), []).append(name)
        self.read_ptrs: set[int] = set()
        self.unregistered_shapes: list[tuple[int, ...]] = []
        """Shapes of parameters that the module reads but does not register."""
        self.embedding_ptrs: list[int] = []
        self.head_ptr: int | None = None

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = super().__torch_function__(func, types, args, kwargs)
        if getattr(func, "__name__", "") in _METADATA_FUNCTIONS:
            return out
        leaves = tree_leaves((args, kwargs))
        ptrs = [ptr for leaf in leaves if isinstance(leaf, Tensor) and (ptr := self._find_parameter(leaf))]
        if len(self.module_stack) > 1 and not ptrs:  # while the module's forward runs
            parameters = [x for x in leaves if isinstance(x, nn.Parameter) and x.requires_grad]
            self.unregistered_shapes += [tuple(x.shape) for x in parameters]
        self.read_ptrs.update(ptrs)
        if ptrs and func in _LOOKUP_FUNCTIONS and any(_is_index_tensor(leaf) for leaf in leaves):
            self.embedding_ptrs += [ptr for ptr in ptrs if ptr not in self.embedding_ptrs]
        if func in _MATMUL_FUNCTIONS and isinstance(out, Tensor) and out.ndim and out.shape[-1] == self.vocab_size:
            self.head_ptr = ptrs[0] if ptrs else None
        return out

    def _find_parameter(self, tensor: Tensor) -> int | None:
        """Storage address of a tensor that is a parameter of the module or a view of one; otherwise None."""
        if tensor.layout != torch.strided or tensor.is_meta:
            return None
        ptr = _storage_ptr(tensor)
        return ptr if ptr in self.parameter_names else None

    @property
    def unread_parameters(self) -> list[str]:
        """Names of parameters that no op reads."""
        return [names[0] for ptr, names in self.parameter_names.items() if ptr not in self.read_ptrs]


def _is_index_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and value.ndim > 0
