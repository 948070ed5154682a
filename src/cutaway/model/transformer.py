"""What the three forms have in common: kernels, recomputation, caches, weights, and the road into a stack."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from cutaway.config import Config
from cutaway.errors import InputError, WeightError
from cutaway.model import inputs
from cutaway.model.cache import Cache
from cutaway.model.masks import Places, places
from cutaway.model.recompute import MODES, Recompute
from cutaway.model.stack import Stack


class Transformer(nn.Module):
    """What the three forms have in common. `build` makes the one that a configuration describes."""

    config: Config

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks by name: `encoder`, `decoder` or both."""
        return {name: stack for name, stack in self.named_children() if isinstance(stack, Stack)}

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def use_kernel(self, name: str) -> "Transformer":
        """Compute attention by 'sdpa', 'explicit' or 'flex', or 'auto': the first of sdpa and explicit that can."""
        if not isinstance(name, str):
            raise InputError(f"the kernel's name is {name!r}; use 'auto', 'sdpa', 'explicit' or 'flex'")
        attentions = [module for module in self.modules() if hasattr(module, "make_kernel")]
        kernels: list[Any] = [module.make_kernel(name) for module in attentions]  # type: ignore[operator]
        for module, kernel in zip(attentions, kernels, strict=True):
            module.kernel = kernel.train(self.training)
        return self

    def use_recompute(self, mode: Recompute) -> "Transformer":
        """In training, store everything ('none'), only costly results ('selective') or only block inputs ('full')."""
        if mode not in MODES:
            raise InputError(f"recompute mode '{mode}' is unknown; use one of {', '.join(MODES)}")
        for stack in self.stacks.values():
            stack.recompute = mode
        return self

    def new_cache(
        self, batch: int, length: int, *, dtype: torch.dtype | None = None, chunk: int | None = None
    ) -> Cache:
        """An empty cache for `batch` rows of up to `length` tokens. Calls with a cache compute no gradients.

        With a `chunk`, sliding windows are kept in rings, and no call may bring more than `chunk` tokens.
        """
        for name, value in (("batch", batch), ("length", length), ("chunk", 1 if chunk is None else chunk)):
            inputs.check_size(name, value)
        inputs.check_dtype(dtype)
        stack = self.stacks.get("decoder") or self.stacks["encoder"]
        cross = len(self.stacks) == 2
        return Cache(
            stack.cache_widths,
            batch,
            length,
            windows=stack.windows,
            cross=cross,
            device=self.device,
            dtype=dtype or self.dtype,
            chunk=chunk,
        )

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take these weights, named as in `state_dict()`; refuse what is missing, foreign, misshapen or not finite."""
        mine = self.state_dict()
        if not isinstance(weights, Mapping) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
            raise WeightError("weights must be a dict of tensors by name, as state_dict() gives it")
        for what, names in (
            ("missing", mine.keys() - weights.keys()),
            ("not this model's", weights.keys() - mine.keys()),
        ):
            if names:
                count = "1 weight is" if len(names) == 1 else f"{len(names)} weights are"
                shown = ", ".join(sorted(names)[:5]) + (" …" if len(names) > 5 else "")
                raise WeightError(f"{count} {what}: {shown}; load the weights of a model with this configuration")
        for name, tensor in weights.items():
            if tensor.shape != mine[name].shape:
                raise WeightError(
                    f"weight '{name}' has shape {tuple(tensor.shape)}; this model's is {tuple(mine[name].shape)}"
                )
            bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
            if bad:
                values = "1 value that is" if bad == 1 else f"{bad} values that are"
                raise WeightError(f"weight '{name}' holds {values} NaN or infinite; the file it came from is damaged")
        first: dict[int, str] = {}
        for name, tensor in mine.items():
            twin = first.setdefault(tensor.data_ptr(), name)
            if twin != name and not tensor.is_meta and not torch.equal(weights[name], weights[twin]):
                raise WeightError(
                    f"weights '{name}' and '{twin}' are one tensor in this model, but have different values"
                )
        self.load_state_dict(dict(weights))

    def __repr__(self) -> str:
        shape = ", ".join(f"{name}: {len(stack.blocks)} blocks" for name, stack in self.stacks.items())
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"{type(self).__name__}({shape}, d_model={self.config.d_model}, {count:,} parameters)"

    def run_stack(
        self,
        stack: Stack,
        name: str,
        tokens: Int[Tensor, "B T"],
        mask: Bool[Tensor, "B T"] | None,
        *,
        vocab_size: int,
        types: Int[Tensor, "B T"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
        prefix: Int[Tensor, " B"] | None = None,
        cache: Cache | None = None,
        **memory: Any,
    ) -> tuple[Float[Tensor, "B T d"], Places]:
        """Check what came in, number the tokens, and run the stack."""
        tokens = inputs.check_tokens(name, tokens, vocab_size)
        mask = inputs.check_beside("mask" if name == "tokens" else f"{name}_mask", mask, tokens, torch.bool)
        types = inputs.check_beside("types", types, tokens, torch.long)
        positions = inputs.check_beside("positions", positions, tokens, torch.long)
        documents = inputs.check_beside("documents", documents, tokens, torch.long)
        if positions is not None:
            inputs.check_positions(positions, mask, documents, rising=stack.causal)
        batch, length = tokens.shape
        if types is not None:
            if stack.embed.types is None:
                raise InputError("types were given, but this model has no token types; leave them out")
            inputs.check_range("types", types, stack.embed.types.num_embeddings, "that is no token type of this model")
        prefix = None if prefix is None else inputs.check_prefix(prefix, tokens)
        limit = getattr(stack.embed.position, "length", None)
        if cache is None:
            where = places(batch, length, tokens.device, mask, documents, prefix, positions)
            if limit is not None:
                inputs.check_length(where.position, limit, name)
            return stack(tokens, where, types, **memory), where
        if documents is not None or positions is not None or prefix is not None:
            raise InputError("a cache numbers the tokens itself; leave out documents, positions and prefix")
        inputs.check_cache(cache, stack.cache_widths, name, batch)
        if not stack.causal and cache.used:
            raise InputError("an encoder's tokens all see each other, so a text cannot be continued; pass it whole")
        where, steps = cache.place(length, mask)
        for turn in stack.turns:
            inputs.check_turn(cache, length, where.position, turn)
        if limit is not None:
            inputs.check_length(where.position, limit, name)
        with gradients_without(cache):
            x = stack(tokens, where, types, cache=cache, steps=steps, **memory)
        cache.commit(where, padded=mask is not None)
        return x, where


def gradients_without(cache: Cache | None) -> torch.set_grad_enabled:
    """A cache is for reading on, not for training: it must not keep every step's graph alive."""
    return torch.set_grad_enabled(torch.is_grad_enabled() and cache is None)
