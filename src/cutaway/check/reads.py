"""Which of a module's tensors a pass reads, seen from outside: by the memory that each operation is given."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from cutaway.check.exam import CannotError

TALK = {
    "__get__", "__set__", "__repr__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement", "stride",
    "data_ptr", "untyped_storage", "storage_offset", "is_floating_point", "is_complex", "is_contiguous", "get_device",
    "element_size", "type", "requires_grad_", "register_hook", "is_shared", "storage",
}  # fmt: skip
"""What asks about a tensor and does not use its numbers."""
PRODUCTS = {
    F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.addmm, torch.mm, Tensor.mm,
    torch.einsum, torch.baddbmm, torch.bmm, Tensor.bmm,
}  # fmt: skip
LOOKUPS = {F.embedding, torch.embedding, Tensor.__getitem__, torch.index_select, Tensor.index_select}


def place(tensor: Tensor) -> int:
    """Where a tensor's numbers begin; views share it with what they are views of."""
    return tensor.untyped_storage().data_ptr()


class Reads(TorchFunctionMode):
    """While it is on, it is written down which parameters are read, which is looked up by tokens, and which makes the
    logits."""

    def __init__(self, module: nn.Module, vocab: int | None = None) -> None:
        super().__init__()
        self.vocab = vocab
        self.names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.names.setdefault(place(parameter), []).append(name)
        self.places: set[int] = set()
        self.strange: list[tuple[int, ...]] = []
        """Shapes of parameters that are read within the module and are none of its own."""
        self.depth, self.hooks, self.module = 0, [], module  # type: ignore[var-annotated]
        self.tables: list[int] = []
        self.head: int | None = None

    def __enter__(self) -> "Reads":
        self.hooks = [
            self.module.register_forward_pre_hook(lambda *_: self.step(1)),
            self.module.register_forward_hook(lambda *_: self.step(-1), always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()

    def step(self, by: int) -> None:
        self.depth += by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") in TALK:
            return out
        leaves = tree_leaves((args, kwargs))
        found = [at for each in leaves if isinstance(each, Tensor) and (at := self.known(each))]
        if self.depth and not found:
            self.strange += [tuple(x.shape) for x in leaves if isinstance(x, nn.Parameter) and x.requires_grad]
        self.places.update(found)
        if found and func in LOOKUPS and any(looks_up(each) for each in leaves):
            self.tables += [at for at in found if at not in self.tables]
        if func in PRODUCTS and isinstance(out, Tensor) and out.ndim and out.shape[-1] == self.vocab:
            self.head = found[0] if found else None
        return out

    def known(self, tensor: Tensor) -> int | None:
        if tensor.layout != torch.strided or tensor.is_meta:
            return None
        at = place(tensor)
        return at if at in self.names else None

    @property
    def unread(self) -> list[str]:
        """Names of parameters that no operation was given."""
        return [names[0] for at, names in self.names.items() if at not in self.places]


def looks_up(given: Any) -> bool:
    return isinstance(given, Tensor) and given.dtype in (torch.int64, torch.int32) and given.ndim > 0


def refuse_compiled(module: nn.Module) -> None:
    """Compiled code runs without a word: nothing that is seen there tells what it does."""
    for part in module.modules():
        compiled = getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod")
        if compiled or isinstance(part, torch.jit.ScriptModule):
            raise CannotError("needs code that is not compiled")
