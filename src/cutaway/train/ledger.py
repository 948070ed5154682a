"""What operations hold and send, counted as they are done: bytes alive at once, and collectives by kind."""

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"
COLLECTIVES = {
    "c10d._allgather_base_": GATHER,
    "c10d.allgather_": GATHER,
    "c10d._reduce_scatter_base_": SCATTER,
    "c10d.allreduce_": REDUCE,
    "_c10d_functional.all_gather_into_tensor": GATHER,
    "_c10d_functional.reduce_scatter_tensor": SCATTER,
    "_c10d_functional.all_reduce": REDUCE,
    "_c10d_functional.all_reduce_": REDUCE,
}
"""PyTorch's names for them. What they are given in parts, an engine may send whole, so bytes are those of the whole."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every storage that an operation gives is counted once, from then on until nothing refers to it.

    A tensor that is spread over ranks is counted by what this rank has of it. What a kernel takes for itself and gives
    back before it ends is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.sizes: Any = WeakIdKeyDictionary()
        self.sent: Counter[str] = Counter()
        """Collectives by kind,"""
        self.bytes: Counter[str] = Counter()
        """and what they give or take, whichever is more."""
        self.patches = ExitStack()

    def __enter__(self) -> "Ledger":
        resize: Callable[..., Any] = torch.UntypedStorage.resize_
        ledger = self

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            ledger.note(storage)
            return result

        # Sharded weights come and go in storages that stay: no operation tells of it.
        self.patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self.patches.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count a storage for as much as it is now."""
        size = storage.nbytes()
        if storage in self.sizes:
            box = self.sizes[storage]
        else:
            box = self.sizes[storage] = [0]
            weakref.finalize(storage, self.gone, box)
        self.live += size - box[0]
        box[0] = size
        self.peak = max(self.peak, self.live)

    def gone(self, box: list[int]) -> None:
        self.live -= box[0]
        box[0] = 0

    def forget(self) -> None:
        """Begin anew with peak and collectives; what is alive stays counted."""
        self.peak = self.live
        self.sent.clear()
        self.bytes.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it is taken apart first, into what this rank does
        kind = COLLECTIVES.get(str(func.overloadpacket))
        result = self.carry_out(func, args, kwargs or {})
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        for each in tensors:
            self.note(each.untyped_storage())
        if kind is not None:
            given = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            self.sent[kind] += 1
            self.bytes[kind] += max(each.nbytes for each in given + tensors)
        return result

    def carry_out(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)
