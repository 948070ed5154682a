"""Cache of the activations of one forward pass.

Attention scores and patterns are not cached, because their size is quadratic in the sequence length. They are
recomputed from the cached q and k, for the requested heads.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cutaway.lens import attention_pattern
from cutaway.lens.hooks import HookContext
from cutaway.lens.sites import Site
from cutaway.model import Transformer
from cutaway.model.kernels import Kernel
from cutaway.serve.inspect.model_input import ModelInput
from cutaway.serve.inspect.protocol import QueryJob

QUADRATIC_SITES = ("scores", "pattern")


class ActivationCache:
    """Activations of one forward pass by site name, and the arguments that each attention kernel was called with."""

    def __init__(self, model_input: ModelInput) -> None:
        self.model_input = model_input
        self.values: dict[str, Tensor] = {}
        self.attention_calls: dict[str, tuple[Kernel, tuple[Any, ...]]] = {}
        """Attention name (`blocks.0.attn`) → the kernel and the arguments it was called with."""
        self.position_outputs: dict[str, Any] = {}
        """Name of a position module (`embed.position`, or a key of `Stack.positions`) → its output.

        In an encoder-decoder, the name has the prefix `encoder.` or `decoder.`.
        """

    def build_hook(self, job: QueryJob, on_site: Callable[[str, Tensor], None]) -> Callable[[HookContext], None]:
        """Return a forward hook that stores a site's activation and calls `on_site(name, activation)`.

        The hook raises if the job is canceled.
        """

        def hook(context: HookContext) -> None:
            job.check_cancelled()
            site = context.site
            self.values[site.name] = context.value.detach()
            on_site(site.name, self[site.name])
            if site.name.endswith(".q"):
                kernel = cast("Kernel", site.module)  # q is an argument of the attention kernel
                self.attention_calls[site.name.removesuffix(".q")] = (kernel, context.module_args)

        return hook

    def register_position_hooks(self, model: Transformer) -> Iterator[RemovableHandle]:
        """Register hooks that store the outputs of position modules, which have no site. Yield their handles."""
        for side, stack in model.stacks.items():
            prefix = f"{side}." if len(model.stacks) > 1 else ""
            modules = {"embed.position": stack.embed.position, **stack.positions}
            for name, module in modules.items():
                if module is not None:
                    yield module.register_forward_hook(self._save_output(f"{prefix}{name}"))

    def _save_output(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, args: object, out: object) -> None:
            self.position_outputs[name] = out

        return hook

    def __getitem__(self, name: str) -> Tensor:
        """Return the activation at the site `name`, without the batch dimension (the batch size is 1)."""
        return self.values[name][0]

    def recompute_attention(self, attention: str, heads: list[int] | None = None) -> attention_pattern.AttentionScores:
        """Recompute the scores and the pattern, both (1, H, T, S), of an attention module such as `blocks.0.attn`.

        `heads` are the indices of the query heads to compute. The default is all heads.
        """
        kernel, args = self.attention_calls[attention]
        return attention_pattern.compute_scores(kernel, args, heads, attention_pattern.build_dense_mask(args))

    @property
    def nbytes(self) -> int:
        storages = [value.untyped_storage() for value in self.values.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def estimate_bytes(sites: Iterable[Site], seq_len: int, source_len: int | None, itemsize: int) -> int:
    """Estimate the size in bytes of the activations at these sites, for batch size 1."""
    return itemsize * sum(math.prod(site.shape(1, seq_len, source_len)) for site in sites)
