"""One pass of a model over a text, kept: every value but what grows with the square of the text.

Scores and patterns are made again from the q and k that were kept, for the heads that are asked for.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from cutaway.lens import attention_pattern
from cutaway.lens.hooks import HookContext
from cutaway.lens.sites import Site
from cutaway.model import Transformer
from cutaway.serve.inspect.model_input import ModelInput
from cutaway.serve.inspect.protocol import QueryJob

QUADRATIC_SITES = ("scores", "pattern")


class ActivationCache:
    """Values by site, and what each attention was given."""

    def __init__(self, model_input: ModelInput) -> None:
        self.model_input = model_input
        self.values: dict[str, Tensor] = {}
        self.attention_calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        """By the name of an attention: its kernel, and what it was given."""
        self.position_outputs: dict[str, Any] = {}
        """What says where tokens stand: `embed.position`, and rotations by layer."""
        self.derived_results: dict[str, Any] = {}
        """What else was worked out for this input, by a name; small."""

    def build_hook(self, job: QueryJob, on_site: Callable[[str, Tensor], None]) -> Any:
        """Writes down what passes, and tells of it; a pass that nobody waits for ends at its next value."""

        def look(passing: HookContext) -> None:
            job.check_cancelled()
            site = passing.site
            self.values[site.name] = passing.value.detach()
            on_site(site.name, self[site.name])
            if site.name.endswith(".q"):
                self.attention_calls[site.name.removesuffix(".q")] = (site.module, passing.module_args)

        return look

    def register_position_hooks(self, model: Transformer) -> Iterator[RemovableHandle]:
        """Hooks for what has no site of its own: what says where tokens stand."""
        for side, stack in model.stacks.items():
            prefix = f"{side}." if len(model.stacks) > 1 else ""
            parts = {"embed.position": stack.embed.position, **stack.positions}
            for name, module in parts.items():
                if module is not None:
                    yield module.register_forward_hook(self._save_output(f"{prefix}{name}"))

    def _save_output(self, name: str) -> Any:
        def look(module: Any, args: Any, out: Any) -> None:
            self.position_outputs[name] = out

        return look

    def __getitem__(self, name: str) -> Tensor:
        """Of the one row, without its axis."""
        return self.values[name][0]

    def recompute_attention(self, attention: str, heads: list[int] | None = None) -> attention_pattern.AttentionScores:
        """Scores and pattern (1, H, T, S) of an attention's heads."""
        kernel, args = self.attention_calls[attention]
        return attention_pattern.compute_scores(kernel, args, heads, attention_pattern.build_dense_mask(args))

    @property
    def nbytes(self) -> int:
        storages = [value.untyped_storage() for value in self.values.values()]
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def estimate_bytes(sites: Iterable[Site], seq_len: int, source_len: int | None, itemsize: int) -> int:
    """Bytes that these sites will take."""
    total = 0
    for site in sites:
        size = itemsize
        for extent in site.shape(1, seq_len, source_len):
            size *= extent
        total += size
    return total
