"""A model that is looked into: passes over texts, the latest of them kept within a limit of memory."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.generate.generation_config import unpack_checkpoint
from cutaway.lens import edit, sites
from cutaway.lens.analysis.inputs import eval_mode
from cutaway.lens.hooks import SiteHooks
from cutaway.lens.sites import is_resid_site, is_sublayer_output
from cutaway.model import DecoderOnly, EncoderDecoder, EncoderOnly, Transformer
from cutaway.model.stack import Stack
from cutaway.serve.inspect.activation_cache import QUADRATIC_SITES, ActivationCache, estimate_bytes
from cutaway.serve.inspect.model_input import DEFAULT_CODE, DEFAULT_TEXT, ModelInput, TokenizerAdapter
from cutaway.serve.inspect.protocol import QueryJob

SiteCallback = Callable[[str, Tensor], None]
MAX_CACHED_BYTES = 1 << 30
"""Bytes of passes that are kept."""


class Inspector:
    """One model for all questions. A pass has it alone: an edit changes it for as long as it runs."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: TokenizerAdapter,
        *,
        name: str = "",
        run_directory: Path | None = None,
        max_cached_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        self.model, self.tokenizer, self.name, self.run_directory, self.max_cached_bytes = (
            model.eval(),
            tokenizer,
            name,
            run_directory,
            max_cached_bytes,
        )
        self.sites = sites(model)
        self.lock = threading.RLock()
        self.activation_caches: OrderedDict[str, ActivationCache] = OrderedDict()

    @property
    def config(self) -> Config:
        return self.model.config

    def get_activations(
        self, model_input: ModelInput, job: QueryJob, on_site: SiteCallback = lambda name, value: None
    ) -> ActivationCache:
        """The pass over a text: one that was kept, or a new one, of which `on_site` is told site by site."""
        self.validate_input(model_input)
        with self.lock:
            found = self.activation_caches.get(model_input.cache_key)
            if found is None:
                found = ActivationCache(model_input)
                self._run_forward(found, self._select_cached_sites(model_input), job, on_site)
                self.activation_caches[model_input.cache_key] = found
            self.activation_caches.move_to_end(model_input.cache_key)
            while (
                len(self.activation_caches) > 1
                and sum(each.nbytes for each in self.activation_caches.values()) > self.max_cached_bytes
            ):
                self.activation_caches.popitem(last=False)
            return found

    def get_activations_at(self, model_input: ModelInput, site_names: list[str], job: QueryJob) -> ActivationCache:
        """The same, with the values of these sites even where keeping all of them was too much."""
        kept = self.get_activations(model_input, job)
        missing = [name for name in site_names if name not in kept.values]
        if missing:
            if wrong := next((name for name in missing if name not in self.sites), None):
                raise InputError(f"'{wrong}' is no place in this model; there is {', '.join(list(self.sites)[:4])} …")
            with self.lock:
                self._run_forward(kept, missing, job)
        return kept

    def _select_cached_sites(self, model_input: ModelInput) -> list[str]:
        """All but what is quadratic, if half of the limit holds it; else the stream and what is added to it."""
        found = [each for each in self.sites.values() if each.kind not in QUADRATIC_SITES and each.name != "logits"]
        source = None if model_input.source is None else len(model_input.source)
        if (
            estimate_bytes(found, len(model_input.tokens), source, self.model.dtype.itemsize)
            > self.max_cached_bytes // 2
        ):
            found = [
                each
                for each in found
                if is_resid_site(each.name) or is_sublayer_output(each.name) or each.layer is None
            ]
        return [each.name for each in found]

    def _run_forward(
        self,
        activations: ActivationCache,
        site_names: list[str],
        job: QueryJob,
        on_site: SiteCallback = lambda name, value: None,
    ) -> None:
        taps, note = SiteHooks(), activations.build_hook(job, on_site)
        with self.edited_model(activations.model_input):
            watching: list[RemovableHandle] = []
            try:
                watching.extend(activations.register_position_hooks(self.model))
                taps.register((self.sites[name], note, None) for name in site_names)
                self.last_hidden_state(activations.model_input)
            finally:
                taps.remove()
                for handle in watching:
                    handle.remove()

    @contextmanager
    def edited_model(self, model_input: ModelInput) -> Iterator[None]:
        """The model alone, at rest, with the input's edits."""
        with self.lock, ExitStack() as stack:
            stack.enter_context(eval_mode(self.model))
            if model_input.edits:
                stack.enter_context(edit(self.model, model_input.edits))
            yield

    def last_hidden_state(self, model_input: ModelInput) -> Tensor:
        """The stream that the head reads, (1, T, d)."""
        tokens = torch.tensor([model_input.tokens], device=self.model.device)
        if isinstance(self.model, EncoderDecoder):
            return self.model.hidden_states(torch.tensor([model_input.source], device=self.model.device), tokens)
        if isinstance(self.model, EncoderOnly):
            return self.model.encode(tokens)
        assert isinstance(self.model, DecoderOnly)
        return self.model.hidden_states(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """What the head says of vectors, in fp32; hooks are passed by."""
        head: Any = getattr(self.model, "head", None)
        if head is None:
            raise InputError("this model has no head, so it says no tokens; look at its vectors instead")
        with torch.no_grad():
            return head.forward(hidden).float()

    def validate_input(self, model_input: ModelInput) -> None:
        """What this model cannot read, before anything is made of it."""
        two = isinstance(self.model, EncoderDecoder)
        if two != (model_input.source is not None):
            raise InputError("this model reads a source beside the text" if two else "this model reads no source")
        size = self.config.vocab_size
        for name, text, most in (
            ("tokens", model_input.tokens, size),
            ("source", model_input.source or (), getattr(self.config, "source_vocab_size", None) or size),
        ):
            if outside := next((token for token in text if token >= most), None):
                raise InputError(f"{name} has {outside}, and the vocabulary ends at {most - 1}")

    @property
    def output_stack(self) -> Stack:
        """The stack that the head reads."""
        return [*self.model.stacks.values()][-1]

    def check_position(self, model_input: ModelInput, position: int) -> int:
        if position >= len(model_input.tokens):
            raise InputError(
                f"the text has {len(model_input.tokens)} tokens, 0 to {len(model_input.tokens) - 1}, and {position} is"
                " none"
            )
        return position

    def format_top_tokens(self, token_probabilities: Iterable[tuple[int, float]]) -> list[dict[str, Any]]:
        """Tokens with their shares, as the page is told of them."""
        return [
            {"token": token, "text": self.tokenizer.decode_token(token), "probability": probability}
            for token, probability in token_probabilities
        ]


def build_inspector(
    model_or_checkpoint: Any, text: str | None = None, *, name: str = "", run_directory: Path | None = None
) -> Inspector:
    """A checkpoint with its tokenizer, or a bare model, which reads bytes."""
    model, tokenizer, begin = (
        (model_or_checkpoint, None, None)
        if isinstance(model_or_checkpoint, Transformer)
        else unpack_checkpoint(model_or_checkpoint)
    )
    if not isinstance(model, Transformer):
        raise InputError(f"a {type(model).__name__} is no cutaway model; give one of ct.load(…) or ct.build(…)")
    if model.device.type == "meta":
        raise InputError("the model is on the meta device, where it has shapes and no values; build it on another")
    usual = DEFAULT_CODE if name == "tiny-python" else DEFAULT_TEXT
    two = len(model.stacks) > 1
    words = TokenizerAdapter(
        model.config.vocab_size,
        tokenizer,
        decoder_start_token_id=((begin.decoder_start_token_id if begin else None) or 0) if two else None,
        default_text="" if two else text or usual,
        default_source=(text or usual) if two else None,
        generation_config=begin,
    )
    return Inspector(model, words, name=name, run_directory=run_directory)
