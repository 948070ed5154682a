"""Inspector: a model with an LRU cache of the activations of recent forward passes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.eval_mode import eval_mode
from cutaway.generate.generation_config import CheckpointLike, unpack_checkpoint
from cutaway.lens import edit, sites
from cutaway.lens.hooks import SiteHooks
from cutaway.lens.sites import is_resid_site, is_sublayer_output
from cutaway.model import DecoderOnly, EncoderDecoder, EncoderOnly, Transformer
from cutaway.model.head import LMHead
from cutaway.model.stack import Stack
from cutaway.serve.inspect.activation_cache import QUADRATIC_SITES, ActivationCache, estimate_bytes
from cutaway.serve.inspect.default_input import build_tokenizer_adapter
from cutaway.serve.inspect.model_input import ModelInput, TokenizerAdapter
from cutaway.serve.inspect.open_run import OpenRun
from cutaway.serve.inspect.protocol import QueryJob

if TYPE_CHECKING:
    from cutaway.serve.inspect.model_catalog import ModelCatalog

SiteCallback = Callable[[str, Tensor], None]
MAX_CACHED_BYTES = 1 << 30
"""Maximum size of the cached activations in bytes."""


class Inspector:
    """A model shared by all queries. `lock` allows one forward pass at a time, because edits modify the model."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: TokenizerAdapter,
        *,
        name: str = "",
        run: OpenRun | None = None,
        run_step: int | None = None,
        adapter_source: str | None = None,
        max_cached_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self.run, self.max_cached_bytes = run, max_cached_bytes
        self.adapter_source = adapter_source
        """Directory of the adapter that was added to the model, if it is not part of the source."""
        self.run_step = run_step
        """Step of the run after which the model has these weights. None if the model is not from a run."""
        self.sites = sites(model)
        self.lock = threading.RLock()
        self.catalog: ModelCatalog | None = None
        """The models that the page can open instead of this one. None if the model is fixed."""
        self.activation_caches: OrderedDict[str, ActivationCache] = OrderedDict()

    @property
    def config(self) -> Config:
        return self.model.config

    def get_activations(
        self, model_input: ModelInput, job: QueryJob, on_site: SiteCallback = lambda name, value: None
    ) -> ActivationCache:
        """Return the model's activations for an input.

        If they are not cached, run a forward pass, which calls `on_site(name, activation)` at each site.
        """
        self.validate_input(model_input)
        with self.lock:
            activations = self.activation_caches.get(model_input.cache_key)
            if activations is None:
                activations = ActivationCache(model_input)
                self._run_forward(activations, self._select_cached_sites(model_input), job, on_site)
                self.activation_caches[model_input.cache_key] = activations
                self._evict()
            self.activation_caches.move_to_end(model_input.cache_key)
            return activations

    def _evict(self) -> None:
        """Remove the least recently used activations while all of them exceed `max_cached_bytes`."""
        num_bytes = sum(cached.nbytes for cached in self.activation_caches.values())
        while len(self.activation_caches) > 1 and num_bytes > self.max_cached_bytes:
            num_bytes -= self.activation_caches.popitem(last=False)[1].nbytes

    def get_activations_at(self, model_input: ModelInput, site_names: list[str], job: QueryJob) -> ActivationCache:
        """Return the model's activations for an input, including the activations at `site_names`.

        A second forward pass computes the activations that `get_activations` leaves out to save memory.
        """
        activations = self.get_activations(model_input, job)
        missing = [name for name in site_names if name not in activations.values]
        if missing:
            for name in missing:
                self.check_site(name)
            with self.lock:
                self._run_forward(activations, missing, job)
                self._evict()
        return activations

    def check_site(self, name: str) -> None:
        if name not in self.sites:
            raise InputError(f"'{name}' is not a site of this model; use one of {', '.join(list(self.sites)[:4])} …")

    def check_token(self, token: int | None) -> None:
        """Raise if a token id is not in the vocabulary."""
        if token is not None and token >= self.config.vocab_size:
            raise InputError(f"token is {token}; use ids 0 to {self.config.vocab_size - 1}, the vocabulary")

    def _select_cached_sites(self, model_input: ModelInput) -> list[str]:
        """Return the names of the sites to cache.

        These are all sites except scores, patterns and logits, if their activations fit in half of `max_cached_bytes`.
        Otherwise these are only the residual stream, the sublayer outputs and the sites outside blocks.
        """
        selected = [site for site in self.sites.values() if site.kind not in QUADRATIC_SITES and site.name != "logits"]
        source_len = None if model_input.source is None else len(model_input.source)
        num_bytes = estimate_bytes(selected, len(model_input.tokens), source_len, self.model.dtype.itemsize)
        names = [site.name for site in selected]
        if num_bytes <= self.max_cached_bytes // 2:
            return names
        outside_blocks = {site.name for site in selected if site.layer is None}
        return [name for name in names if is_resid_site(name) or is_sublayer_output(name) or name in outside_blocks]

    def _run_forward(
        self,
        activations: ActivationCache,
        site_names: list[str],
        job: QueryJob,
        on_site: SiteCallback = lambda name, value: None,
    ) -> None:
        hooks, hook = SiteHooks(), activations.build_hook(job, on_site)
        with self.edited_model(activations.model_input):
            handles: list[RemovableHandle] = []
            try:
                handles.extend(activations.register_position_hooks(self.model))
                hooks.register((self.sites[name], hook, None) for name in site_names)
                self.last_hidden_state(activations.model_input)
            finally:
                hooks.remove()
                for handle in handles:
                    handle.remove()

    @contextmanager
    def edited_model(self, model_input: ModelInput) -> Iterator[None]:
        """Context manager: hold the lock, with the model in eval mode, no gradients, and the input's edits applied."""
        with self.lock, torch.no_grad(), eval_mode(self.model), ExitStack() as stack:
            if model_input.edits:
                stack.enter_context(edit(self.model, model_input.edits))
            yield

    def last_hidden_state(self, model_input: ModelInput) -> Tensor:
        """Run the model and return the input of the head, (1, T, d)."""
        tokens, source = self.to_tensors(model_input)
        if isinstance(self.model, EncoderDecoder):
            return self.model.hidden_states(source, tokens)
        if isinstance(self.model, EncoderOnly):
            return self.model.encode(tokens)
        assert isinstance(self.model, DecoderOnly)
        return self.model.hidden_states(tokens)

    def to_tensors(self, model_input: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Return the token ids (1, T), and the encoder token ids (1, S), which are None if the input has no source."""
        device = self.model.device
        source = None if model_input.source is None else torch.tensor([model_input.source], device=device)
        return torch.tensor([model_input.tokens], device=device), source

    @property
    def head(self) -> LMHead | None:
        """The LM head; None for a model without a head or with one for another task."""
        return self.model.lm_head if self.model.has_lm_head else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head to hidden states and return fp32 logits, without running hooks."""
        head = self.head
        if head is None:
            raise InputError("this model has no LM head, so it has no logits; inspect its activations instead")
        with torch.no_grad():
            return head.forward(hidden).float()

    def validate_input(self, model_input: ModelInput) -> None:
        """Raise if a source is missing, if the model takes no source, or if a token id is not in the vocabulary."""
        is_encoder_decoder = isinstance(self.model, EncoderDecoder)
        if is_encoder_decoder and model_input.source is None:
            raise InputError("source is missing; this model is an encoder-decoder, so pass a source")
        if not is_encoder_decoder and model_input.source is not None:
            raise InputError("source is set, but this model takes no source; leave source out")
        target_vocab_size = self.config.vocab_size
        for name, token_ids, vocab_size in (
            ("tokens", model_input.tokens, target_vocab_size),
            ("source", model_input.source or (), getattr(self.config, "source_vocab_size", None) or target_vocab_size),
        ):
            if invalid := next((token for token in token_ids if token >= vocab_size), None):
                raise InputError(f"{name} has token id {invalid}; use ids 0 to {vocab_size - 1}, the vocabulary")

    @property
    def output_stack(self) -> Stack:
        """The stack whose output is the input of the head."""
        return [*self.model.stacks.values()][-1]


def check_position(position: int, token_ids: Sequence[int]) -> int:
    if position >= len(token_ids):
        last = len(token_ids) - 1
        raise InputError(f"position is {position}; the text has {len(token_ids)} tokens, so use 0 to {last}")
    return position


def build_inspector(
    model_or_checkpoint: Transformer | CheckpointLike,
    text: str | None = None,
    *,
    name: str = "",
    run: OpenRun | None = None,
    run_step: int | None = None,
    adapter_source: str | None = None,
) -> Inspector:
    """Build an inspector of a checkpoint or a model. Without a tokenizer, each byte of a text is a token.

    `text` is the default input of the page (the source of an encoder-decoder). `run` is the training run that the
    model is from, and `run_step` the step of its weights.
    """
    model, tokenizer, generation_config = unpack_checkpoint(model_or_checkpoint)
    if model.device.type == "meta":
        raise InputError("the model is on the meta device, which has no values; build it on another device")
    adapter = build_tokenizer_adapter(
        model, tokenizer, None if model is model_or_checkpoint else generation_config, text, name
    )
    return Inspector(model, adapter, name=name, run=run, run_step=run_step, adapter_source=adapter_source)
