"""Logits of a run in which activations are replaced by those of another run, with several patches per forward pass.

Only what a patch can change is computed: the blocks from the first patched block on, from the cached residual stream,
and in a causal decoder the tokens from the first patched token on, with the KV cache of the tokens before it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from cutaway.lens.adapters import sites
from cutaway.lens.analysis.inputs import AnalysisInputs, upcast_float32
from cutaway.lens.context_hooks import in_hook_context
from cutaway.lens.edit import TensorFn, edit
from cutaway.lens.sites import Site
from cutaway.model import EncoderDecoder, EncoderOnly
from cutaway.model.cache import Cache, SlotMapping
from cutaway.model.masks import cross_attention_mask, number_tokens
from cutaway.model.rope import Rope
from cutaway.model.stack import Stack

_MAX_BATCH_SIZE, _MAX_BATCH_LOGITS = 32, 2**26
_BATCH_TOKENS = {"cpu": 256}
"""Device type → number of tokens of a batch. A larger batch would not be faster, and has to start earlier."""
_GPU_BATCH_TOKENS = 4096
_MIN_STATED_SECONDS = 2.0
"""The cost of a sweep that takes less time is not printed."""

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


@dataclass(frozen=True)
class _Batch:
    """Patch sets that are run together: from `first_blocks` on, and for the tokens from `first_token` on."""

    patch_sets: Sequence[Sequence[Patch]]
    first_blocks: Mapping[Stack, int]
    first_token: int


class PatchSweep:
    """Forward passes of the receiver text, each with a set of patches.

    `donor_values` has the activations of the donor run at the sites of the patches, by site name. `receiver_values` has
    those of the receiver run at `resid_pre` of all blocks, and the encoder output of an encoder-decoder. It may be
    empty for a model of another library, which runs as a whole. `position` is the token whose logits are computed; None
    for all tokens.
    """

    def __init__(
        self,
        receiver: AnalysisInputs,
        receiver_values: Mapping[str, Tensor],
        donor_values: Mapping[str, Tensor],
        patch_sets: Sequence[Sequence[Patch]],
        position: int | None,
    ) -> None:
        self.receiver, self.receiver_values, self.donor_values = receiver, receiver_values, donor_values
        self.position, self.all_sites = position, sites(receiver.model)
        model = receiver.cutaway_model
        # Hooks of blocks that layers share count the calls of a whole pass.
        self.resumes_at_block = model is not None and all(
            len(set(stack.blocks)) == len(stack.blocks) for stack in model.stacks.values()
        )
        self.resumes_at_token = self.resumes_at_block and can_resume_at_token(receiver)
        self.batches = self._plan_batches(patch_sets)

    @property
    def num_forward_passes(self) -> float:
        """The computation of the sweep in forward passes of the whole text."""
        num_tokens, num_blocks = self.receiver.tokens.shape[1], len(self.receiver.stack.blocks)
        total = 0.0
        for batch in self.batches:
            first_block = batch.first_blocks.get(self.receiver.stack, 0) if self.resumes_at_block else 0
            share = (1 - first_block / num_blocks) * (1 - batch.first_token / num_tokens)
            total += len(batch.patch_sets) * share
        return total

    def state_cost(self, name: str, seconds_per_forward: float) -> None:
        """Print to stderr what the sweep computes, if it takes more than a moment."""
        seconds = self.num_forward_passes * seconds_per_forward
        if seconds >= _MIN_STATED_SECONDS:
            num_sets = sum(len(batch.patch_sets) for batch in self.batches)
            cost = f"the computation of {self.num_forward_passes:.0f} forward passes, at most about {seconds:.0f} s"
            sys.stderr.write(f"{name}: {num_sets} patches; {cost}\n")

    def logits(self, batch: _Batch) -> Tensor:
        """Logits of each patch set of the batch: (sets, V) at `position`, or (sets, T, V) of all tokens."""
        names = dict.fromkeys(patch.site for patches in batch.patch_sets for patch in patches)
        edits = {name: self._copy_rows(self.all_sites[name], batch) for name in names}
        with self.receiver.eval_mode():
            if not edits:
                return torch.cat([self._run_whole(1)] * len(batch.patch_sets))
            cache = self._copy_cache(batch) if batch.first_token else None  # filled without the edits
            with edit(self.receiver.model, edits):
                if not self.resumes_at_block:
                    return self._run_whole(len(batch.patch_sets))
                return self._run_partial(batch, cache)

    def _plan_batches(self, patch_sets: Sequence[Sequence[Patch]]) -> list[_Batch]:
        """Divide the patch sets into batches of consecutive sets with the same first blocks."""
        num_tokens = self.receiver.tokens.shape[1]
        longest = max(num_tokens, 0 if self.receiver.source is None else self.receiver.source.shape[1])
        max_tokens = _BATCH_TOKENS.get(self.receiver.device.type, _GPU_BATCH_TOKENS)
        max_size = _MAX_BATCH_SIZE
        if self.position is None:
            max_size = min(max_size, _MAX_BATCH_LOGITS // (num_tokens * self.receiver.structure.config.vocab_size))
        batches = []
        for _, group in groupby(patch_sets, key=lambda patches: tuple(self._first_blocks([patches]).items())):
            rest = list(group)
            while rest:
                first_token = self._first_token(rest[:1])
                tokens_per_row = num_tokens - first_token if self.resumes_at_token else longest
                size = max(1, min(max_size, -(-max_tokens // tokens_per_row)))
                batch, rest = rest[:size], rest[size:]
                batches.append(_Batch(batch, self._first_blocks(batch), self._first_token(batch)))
        return batches

    def _first_blocks(self, patch_sets: Sequence[Sequence[Patch]]) -> dict[Stack, int]:
        """The first patched block of each stack that has a patch."""
        first: dict[Stack, int] = {}
        for patch in (patch for patches in patch_sets for patch in patches):
            site = self.all_sites[patch.site]
            if site.stack is not None and site.layer is not None:
                first[site.stack] = min(site.layer, first.get(site.stack, site.layer))
        return first

    def _first_token(self, patch_sets: Sequence[Sequence[Patch]]) -> int:
        """The first token that has to be computed: the first one with a patch, if the KV cache has those before it."""
        stacks = self._first_blocks(patch_sets).keys()
        if not self.resumes_at_token or self.position is None or stacks - {self.receiver.stack}:
            return 0
        positions = [pair[1] for patches in patch_sets for patch in patches for pair in patch.positions]
        return min([*positions, self.position])

    def _copy_rows(self, site: Site, batch: _Batch) -> TensorFn:
        """Return an edit that applies the patches `batch.patch_sets[r]` at this site to batch row r."""
        donor = self.donor_values[site.name][0]
        token_axis, head_axis = site.axes.index("T") - 1, (site.head_axis or 0) - 1

        def select(row: Tensor, head: int | None) -> Tensor:
            """View of a row with the tokens as first axis, of one head if it is given."""
            row = row.movedim(token_axis, 0)
            return row if head is None else row.select(head_axis + (head_axis < token_axis), head)

        def copy(value: Tensor) -> Tensor:
            for row, patches in enumerate(batch.patch_sets):
                for patch in patches:
                    if patch.site == site.name and patch.positions:
                        source, target = (
                            torch.tensor(side, device=value.device) for side in zip(*patch.positions, strict=True)
                        )
                        copied = select(donor, patch.head)[source].to(value.dtype)
                        select(value[row], patch.head)[target - batch.first_token] = copied
            return value

        return copy

    def _run_whole(self, batch_size: int) -> Tensor:
        """Run the model as a whole, with the active edits."""
        source = None if self.receiver.source is None else self.receiver.source.expand(batch_size, -1)
        inputs = replace(self.receiver, tokens=self.receiver.tokens.expand(batch_size, -1), source=source)
        return upcast_float32(inputs.run()) if self.position is None else inputs.logits_at(self.position)

    @cached_property
    def _cache(self) -> Cache:
        """KV cache of the whole receiver text."""
        model, tokens = self.receiver.cutaway_model, self.receiver.tokens
        assert model is not None
        cache = model.new_cache(1, tokens.shape[1])
        self.receiver.logits_at(-1, cache)
        return cache

    def _copy_cache(self, batch: _Batch) -> Cache:
        """KV cache of the tokens before the first patched one, in each row of a batch."""
        cache = deepcopy(self._cache)
        cache.crop(batch.first_token)
        cache.select_rows(torch.zeros(len(batch.patch_sets), dtype=torch.long, device=self.receiver.device))
        return cache

    def _run_partial(self, batch: _Batch, cache: Cache | None) -> Tensor:
        """Run the model from the first patched block and token on, with the active edits."""
        model, stack, batch_size = self.receiver.cutaway_model, self.receiver.stack, len(batch.patch_sets)
        assert model is not None
        start, memory = batch.first_blocks.get(stack, 0), None
        if isinstance(model, EncoderDecoder):
            memory = self.receiver_values["encoder.final_norm"].expand(batch_size, -1, -1)
            if model.encoder in batch.first_blocks:
                start, encoder_start = 0, batch.first_blocks[model.encoder]
                x = self.receiver_values[f"encoder.blocks.{encoder_start}.resid_pre"].expand(batch_size, -1, -1)
                memory = _run_blocks(model.encoder, x, encoder_start)
        x = self.receiver_values[f"{self.receiver.site_prefix}blocks.{start}.resid_pre"][:, batch.first_token :]
        hidden = _run_blocks(stack, x.expand(batch_size, -1, -1), start, memory, cache)
        if self.position is not None:
            hidden = hidden[:, self.position - batch.first_token]
        return upcast_float32(self.receiver.require_head()(hidden))


def can_resume_at_token(inputs: AnalysisInputs) -> bool:
    """Whether tokens can be computed from the KV cache of the tokens before them.

    That needs a causal decoder of cutaway. A RoPE whose angles depend on the length of the text is an exception, and so
    are active edits: their positions count from the start of the text.
    """
    ropes = [rope for rope in inputs.stack.positions.values() if isinstance(rope, Rope)]
    depends_on_length = any(rope.switch_length is not None for rope in ropes)
    is_decoder = inputs.cutaway_model is not None and not isinstance(inputs.cutaway_model, EncoderOnly)
    return is_decoder and not depends_on_length and not in_hook_context()


def resumed_sites(inputs: AnalysisInputs) -> list[str]:
    """Sites of the receiver run that a partial forward pass starts from; none for a model that runs as a whole."""
    if inputs.cutaway_model is None:
        return []
    stacks = inputs.cutaway_model.stacks
    prefixes = {name: f"{name}." if len(stacks) > 1 else "" for name in stacks}
    names = [f"{prefixes[name]}blocks.{n}.resid_pre" for name in stacks for n in range(len(stacks[name].blocks))]
    return names + (["encoder.final_norm"] if isinstance(inputs.cutaway_model, EncoderDecoder) else [])


def patched_logits(
    receiver: AnalysisInputs,
    receiver_values: Mapping[str, Tensor],
    donor_values: Mapping[str, Tensor],
    patch_sets: Sequence[Sequence[Patch]],
    position: int,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return the logits of the receiver run at `position` with each set of patches in turn, (patch sets, V).

    `check_cancelled` is called before each forward pass. See `PatchSweep` for the other arguments.
    """
    sweep = PatchSweep(receiver, receiver_values, donor_values, patch_sets, position)

    def rows() -> Iterator[Tensor]:
        for batch in sweep.batches:
            check_cancelled()
            yield sweep.logits(batch)

    return torch.cat(list(rows()))


def _run_blocks(
    stack: Stack, x: Tensor, start: int, memory: Tensor | None = None, cache: Cache | None = None
) -> Tensor:
    """Apply the blocks from `start` on and the final norm. `memory` is the encoder output of an encoder-decoder."""
    token_positions, slot_mappings = number_tokens(x.shape[0], x.shape[1], x.device), dict[int, SlotMapping]()
    if cache is not None:
        token_positions, slot_mappings = cache.assign_slots(x.shape[1], None)
    contexts = stack.build_layer_contexts(token_positions, x.dtype, cache, slot_mappings)
    if memory is not None:
        memory_positions = number_tokens(memory.shape[0], memory.shape[1], memory.device)
        mask_spec = cross_attention_mask(token_positions, memory_positions)
        stack.add_cross_attention_context(contexts, memory, mask_spec, x.dtype, None)
    for block, context in list(zip(stack.blocks, contexts, strict=True))[start:]:
        x = block(x, context)
    return stack.final_norm(x)
