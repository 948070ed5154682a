"""Logits of a run in which activations are replaced by those of another run, with several patches per forward pass.

The forward pass restarts at the first block with a patch, from the cached residual stream, because the activations
before this block do not change.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cutaway.lens.adapters import sites
from cutaway.lens.analysis.inputs import AnalysisInputs, upcast_float32
from cutaway.lens.edit import TensorFn, edit
from cutaway.lens.sites import Site
from cutaway.model import EncoderDecoder
from cutaway.model.masks import cross_attention_mask, number_tokens
from cutaway.model.stack import Stack

_MAX_BATCH_SIZE, _MAX_BATCH_TOKENS = 32, 4096

PositionPairs = tuple[tuple[int, int], ...]
"""Positions that correspond to each other: (position in the donor run, position in the receiver run)."""


@dataclass(frozen=True)
class Patch:
    """Activations at one site that are copied from the donor run into the receiver run.

    `positions` are the copied tokens. `head` restricts the copy to one head of a site with a head axis.
    """

    site: str
    positions: PositionPairs
    head: int | None = None


def patched_logits(
    receiver: AnalysisInputs,
    receiver_values: Mapping[str, Tensor],
    donor_values: Mapping[str, Tensor],
    patch_sets: Sequence[Sequence[Patch]],
    position: int,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return the logits of the receiver run at `position` with each set of patches in turn, (patch sets, V).

    `donor_values` has the activations of the donor run at the sites of the patches, by site name. `receiver_values` has
    those of the receiver run at `resid_pre` of all blocks, and the encoder output of an encoder-decoder.
    `check_cancelled` is called before each forward pass.
    """
    all_sites = sites(receiver.model)
    num_tokens = max(receiver.tokens.shape[1], 0 if receiver.source is None else receiver.source.shape[1])
    size = max(1, min(_MAX_BATCH_SIZE, _MAX_BATCH_TOKENS // num_tokens))
    logits = []
    for start in range(0, len(patch_sets), size):
        check_cancelled()
        batch = patch_sets[start : start + size]
        names = dict.fromkeys(patch.site for patches in batch for patch in patches)
        edits = {name: _copy_rows(name, batch, donor_values[name]) for name in names}
        with receiver.eval_mode():
            if not edits:
                logits.append(receiver.logits_at(position).expand(len(batch), -1))
                continue
            with edit(receiver.model, edits):
                logits.append(_run_patched(receiver, receiver_values, map(all_sites.get, names), len(batch), position))
    return torch.cat(logits)


def _copy_rows(site: str, batch: Sequence[Sequence[Patch]], donor: Tensor) -> TensorFn:
    """Return an edit that applies the patches `batch[r]` at this site to batch row r."""

    def copy(value: Tensor) -> Tensor:
        for row, patches in enumerate(batch):
            for patch in patches:
                if patch.site != site or not patch.positions:
                    continue
                source, target = (
                    torch.tensor(side, device=value.device) for side in zip(*patch.positions, strict=True)
                )
                if patch.head is None:
                    value[row, target] = donor[0, source].to(value.dtype)
                else:  # (T, H, E)
                    value[row, target, patch.head] = donor[0, source, patch.head].to(value.dtype)
        return value

    return copy


def _run_patched(
    receiver: AnalysisInputs,
    values: Mapping[str, Tensor],
    patched_sites: Iterable[Site | None],
    batch_size: int,
    position: int,
) -> Tensor:
    """Run the model from the first patched block on, with the active edits. Return the logits at `position`."""
    model = receiver.cutaway_model
    if model is None or any(len(set(stack.blocks)) < len(stack.blocks) for stack in model.stacks.values()):
        # Models of other libraries run as a whole. Hooks of blocks that layers share count the calls of a whole pass.
        source = None if receiver.source is None else receiver.source.expand(batch_size, -1)
        return replace(receiver, tokens=receiver.tokens.expand(batch_size, -1), source=source).logits_at(position)
    first: dict[Stack, int] = {}
    for site in patched_sites:
        assert site is not None
        assert site.stack is not None
        assert site.layer is not None
        first[site.stack] = min(site.layer, first.get(site.stack, site.layer))
    prefix, start, memory = receiver.site_prefix, first.get(receiver.stack, 0), None
    if isinstance(model, EncoderDecoder):
        memory = values["encoder.final_norm"].expand(batch_size, -1, -1)
        if model.encoder in first:
            start, encoder_start = 0, first[model.encoder]
            x = values[f"encoder.blocks.{encoder_start}.resid_pre"].expand(batch_size, -1, -1)
            memory = _run_blocks(model.encoder, x, encoder_start)
    x = values[f"{prefix}blocks.{start}.resid_pre"].expand(batch_size, -1, -1)
    hidden = _run_blocks(receiver.stack, x, start, memory)
    return upcast_float32(receiver.require_head()(hidden[:, position]))


def _run_blocks(stack: Stack, x: Tensor, start: int, memory: Tensor | None = None) -> Tensor:
    """Apply the blocks from `start` on and the final norm. `memory` is the encoder output of an encoder-decoder."""
    token_positions = number_tokens(x.shape[0], x.shape[1], x.device)
    contexts = stack.build_layer_contexts(token_positions, x.dtype, None, {})
    if memory is not None:
        memory_positions = number_tokens(memory.shape[0], memory.shape[1], memory.device)
        mask_spec = cross_attention_mask(token_positions, memory_positions)
        stack.add_cross_attention_context(contexts, memory, mask_spec, x.dtype, None)
    for block, context in list(zip(stack.blocks, contexts, strict=True))[start:]:
        x = block(x, context)
    return stack.final_norm(x)
