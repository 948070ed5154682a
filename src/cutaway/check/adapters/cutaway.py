"""What a model of cutaway offers."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.adapters.config_variants import (
    iter_config_changes,
    random_state_dict,
    validate_same_shapes,
)
from cutaway.check.checked_model import CheckedModel, LogitsFunction, ReloadedModel
from cutaway.check.module_state import MAX_PERTURBED_PARAMS
from cutaway.config import Config, to_dict
from cutaway.config import config as read_config
from cutaway.errors import ConfigError, KernelError
from cutaway.families.load import load
from cutaway.families.save import save
from cutaway.families.weight_loader import set_module_tensor
from cutaway.generate import Engine, EngineConfig, SamplingParams
from cutaway.generate.engine.model_runner import eval_mode
from cutaway.generate.sampling.sampler import Sampler
from cutaway.generate.search.beam_search import beam_search
from cutaway.generate.speculative.ngram_draft import NgramConfig
from cutaway.generate.speculative.speculative_decoder import SpeculativeDecoder
from cutaway.lens.adapters import unwrap_model
from cutaway.model import Cache, EncoderDecoder, EncoderOnly, Transformer, build
from cutaway.model.layers import ConstantBuffers


def _add_state_functions(checked: CheckedModel, model: Transformer, seed: int) -> None:
    """Add to a target what concerns its state."""
    checked.reload = lambda: _save_and_reload(model)
    checked.load_from_meta = lambda: _load_from_meta(model)
    checked.config_variants = lambda: _build_config_variants(model, seed)


def _save_and_reload(model: Transformer) -> ReloadedModel:
    """Saved for the first family that can describe it (or as cutaway's own), and loaded."""
    with tempfile.TemporaryDirectory(prefix="cutaway-check-") as directory:
        path = Path(directory) / "model"
        try:
            save(model, path)
        except ConfigError:  # no published family has this model
            save(model, path, family="cutaway")
        back = load(path, device=model.device, dtype=model.dtype)
        for each in back.model.parameters():  # the files they are mapped from go
            each.data = each.data.clone()
    assert back.load_report is not None
    return ReloadedModel(back.model, back.load_report.missing_keys, back.load_report.unexpected_keys)


def _load_from_meta(model: Transformer) -> nn.Module:
    """Made on the meta device, given memory, and filled."""
    made = build(model.config, device="meta", dtype=model.dtype)
    made.to_empty(device=model.device)
    made.load_weights({name: tensor.detach() for name, tensor in model.state_dict().items()})
    return made.eval()


def _build_config_variants(model: Transformer, seed: int) -> Mapping[str, Callable[[], LogitsFunction]]:
    """For each setting that is known to act: the model with another value. Small models have weights that keep every
    part alive, whatever their own are."""
    small = sum(each.numel() for each in model.parameters()) <= MAX_PERTURBED_PARAMS
    state = (
        random_state_dict(model, seed) if small else {name: each.detach() for name, each in model.state_dict().items()}
    )
    plain = to_dict(model.config)
    written = model.config.model_dump(mode="json")
    made: dict[str, Callable[[], LogitsFunction]] = {"": partial(_logits_with_config, model, plain, state, seed)}
    for path, value in iter_config_changes(written, (), model.config.d_model):
        data = deepcopy(written)
        inside: Any = data
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value
        made[".".join(map(str, path))] = partial(_logits_with_config, model, data, state, seed)
    return made


def _logits_with_config(
    model: Transformer, config: dict[str, Any], state_dict: Mapping[str, Tensor], seed: int
) -> LogitsFunction:
    """The logits of a model with these settings and weights."""
    other = build(read_config(config), device="meta", dtype=model.dtype)
    validate_same_shapes(other, state_dict)
    for name, tensor in state_dict.items():
        set_module_tensor(other, name, tensor)
    for part in other.modules():
        if isinstance(part, ConstantBuffers):
            part.register_constants(model.device)
    logits = adapt_cutaway_model(other.eval(), seed).logits
    assert logits is not None
    return logits


def _add_activation_checkpointing(checked: CheckedModel, model: Transformer) -> None:
    """Recomputation is the model's own. A loss is not: training has it, and offers it when it asks."""
    before = {name: stack.activation_checkpointing for name, stack in model.stacks.items()}

    def recomputed(on: bool) -> None:
        for name, stack in model.stacks.items():
            stack.activation_checkpointing = "full" if on else before[name]

    checked.set_activation_checkpointing = recomputed


NUM_UNUSED_SLOTS = 5
"""Slots of a cache that stay unused."""


CachedForward = Callable[[Tensor, Cache], Tensor]


def _add_generation_functions(
    checked: CheckedModel, model: Transformer, forward: CachedForward, source: Tensor | None = None
) -> None:
    """All that is offered beside logits; an encoder-decoder writes behind a fixed source."""
    read = None if source is None else source[0].tolist()

    def written(rows: list[list[int]], n: int, draft: Any = None) -> Tensor:
        return torch.tensor([_generate_one(model, row, n, read, draft) for row in rows], device=model.device)

    def beams(tokens: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
        row = tokens[0].tolist()
        prompt, start = (row, None) if read is None else (read, row[0])
        with eval_mode(model):
            (ended,) = beam_search(
                model, [prompt], num_beams=k, max_new_tokens=n, n=k, length_penalty=0.0, decoder_start_token_id=start
            )
        return torch.tensor([beam.tokens for beam in ended]), torch.tensor([beam.score for beam in ended])

    def speculate(tokens: Tensor, n: int) -> Tensor:
        """Rows in turn with guesses from the text before, and from the model itself: these all are kept."""
        return torch.cat(
            [written([row], n, model if number % 2 else NgramConfig()) for number, row in enumerate(tokens.tolist())]
        )

    checked.generate = lambda tokens, n: written(tokens.tolist(), n)
    if read is None:
        checked.generate_padded = lambda tokens, mask, n: _generate_batch(
            model, [row[real].tolist() for row, real in zip(tokens, mask, strict=True)], n
        )
    checked.beam_search, checked.generate_speculative, checked.sample = beams, speculate, _sample_tokens
    checked.logits_with_filled_cache = lambda tokens, value: _logits_with_filled_cache(model, forward, tokens, value)
    if checked.windows:
        checked.logits_with_rolling_cache = lambda tokens, piece: _forward_in_chunks(
            forward, tokens, model.new_cache(len(tokens), tokens.shape[1], chunk_size=piece), piece
        )


def _greedy_params(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)


def _generate_one(
    model: Transformer, prompt: list[int], max_new_tokens: int, source: list[int] | None, draft_model: Any
) -> list[int]:
    """What is written behind one text; with an encoder, the text is the beginning of the answer."""
    both = isinstance(model, EncoderDecoder)
    config = EngineConfig(
        model,
        max_num_seqs=1,
        max_model_len=len(prompt) + max_new_tokens,
        max_source_len=len(source or [0]),
        compile=False,
        decoder_start_token_id=prompt[0] if both else None,
    )
    engine = Engine(config) if draft_model is None else SpeculativeDecoder(config, draft_model=draft_model)
    begun = prompt[1:] if both else []
    request = engine.submit(source or prompt, _greedy_params(max_new_tokens + len(begun)), seed=0, output_prefix=begun)
    _run_engine(engine, model)
    return request.result().tokens[len(begun) :]


def _generate_batch(model: Transformer, prompts: list[list[int]], max_new_tokens: int) -> Tensor:
    """What is written behind texts of different lengths in one batch."""
    engine = Engine(
        EngineConfig(
            model, max_num_seqs=len(prompts), max_model_len=max(map(len, prompts)) + max_new_tokens, compile=False
        )
    )
    requests = [engine.submit(row, _greedy_params(max_new_tokens), seed=0) for row in prompts]
    _run_engine(engine, model)
    return torch.tensor([request.result().tokens for request in requests], device=model.device)


def _run_engine(engine: Any, model: Transformer) -> None:
    try:
        with eval_mode(model):
            while engine.step():
                continue
    finally:
        engine.model_runner.release_compiled()


def _sample_tokens(
    logits: Tensor, num_samples: int, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """One draw by each of n seeds."""
    sampler = Sampler(num_samples, len(logits), logits.device)
    asked = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    sampler.set_row(0, asked, [], seed=0)
    for tensor in sampler.sampling_state.tensors():
        tensor[1:] = tensor[0].clone()
    sampler.sampling_state.int_params[:, 0] = torch.arange(num_samples)  # the seeds
    return sampler.sample(logits.expand(num_samples, -1), sampler.features(1)).tokens


def _forward_in_chunks(forward: CachedForward, tokens: Tensor, cache: Cache, chunk_size: int) -> Tensor:
    """A text read in pieces of one size."""
    return torch.cat(
        [forward(tokens[:, start : start + chunk_size], cache) for start in range(0, tokens.shape[1], chunk_size)], 1
    )


def _logits_with_filled_cache(model: Transformer, forward: CachedForward, tokens: Tensor, fill_value: float) -> Tensor:
    """A text read in pieces in a cache that held something before. All slots are looked at, unless it is NaN: what has
    no weight is multiplied by 0, as an engine does that wipes slots before it gives them away."""
    cache = model.new_cache(len(tokens), tokens.shape[1] + NUM_UNUSED_SLOTS)
    for layer in cache.layers:
        layer.k.fill_(fill_value)
        layer.v.fill_(fill_value)
    cache.static_shapes = math.isfinite(fill_value)
    return _forward_in_chunks(forward, tokens, cache, 7)


def adapt_cutaway_model(model: Any, seed: int) -> CheckedModel:
    """A target for one of the three forms."""
    inner = unwrap_model(model)
    assert isinstance(inner, Transformer)
    config = inner.config
    found = CheckedModel(name=f"cutaway {config.form}", kind=config.form, module=inner, vocab_size=config.vocab_size)
    found.device, found.dtype = inner.device, inner.dtype
    _set_config_properties(found, config)
    found.positions_skip_padding = True
    found.source_vocab_size = getattr(config, "source_vocab_size", None)
    if isinstance(inner, EncoderDecoder):
        _adapt_encoder_decoder(found, inner, seed)
    elif isinstance(inner, EncoderOnly):
        call = inner if inner.head is not None else inner.encode
        found.logits = lambda tokens: call(tokens)
        found.logits_with_mask = lambda tokens, mask: call(tokens, mask)
        found.logits_with_positions = lambda tokens, positions: call(tokens, positions=positions)
        found.logits_with_documents = lambda tokens, documents: call(tokens, document_ids=documents)
    else:
        found.logits = lambda tokens: model(tokens)
        found.logits_with_mask = lambda tokens, mask: inner(tokens, mask)
        found.logits_with_positions = lambda tokens, positions: inner(tokens, positions=positions)
        found.logits_with_documents = lambda tokens, documents: inner(tokens, document_ids=documents)
        found.logits_with_cache = _build_cached_forward(inner, lambda tokens, cache: inner(tokens, cache=cache))
        _add_generation_functions(found, inner, lambda tokens, cache: inner(tokens, cache=cache))
    found.logits_by_kernel = _build_kernel_logits(inner, found.logits)
    _add_state_functions(found, inner, seed)
    _add_activation_checkpointing(found, inner)
    return found


def _set_config_properties(checked: CheckedModel, config: Config) -> None:
    """What the configuration says."""
    stack = config.stacks.get("decoder") or config.stacks["encoder"]
    checked.num_layers = len(stack.blocks)
    windows = {getattr(block.attention, "window", None) for block in stack.blocks}
    checked.windows = tuple(sorted(window for window in windows if window is not None))
    checked.window = windows.pop() if len(windows) == 1 else None
    lengths = [getattr(each.embedding.position, "length", None) for each in config.stacks.values()]
    lengths += [_rope_switch_length(block.attention) for block in stack.blocks]
    known = [length for length in lengths if length is not None]
    checked.max_seq_len = min(known) if known else None
    added = stack.embedding.position.kind != "none"
    inside = {block.attention.position.kind for block in stack.blocks} - {"none"}
    checked.has_positions = added or bool(inside)
    checked.relative_positions = bool(inside) and not added
    tied = getattr(config.head, "tied", None)
    checked.tied_embeddings = tied


def _rope_switch_length(attention: Any) -> int | None:
    """The length from which on a scaling turns all tokens by other angles."""
    scaling = getattr(getattr(attention, "position", None), "scaling", None)
    if scaling is not None and scaling.kind in ("dynamic", "longrope"):
        return int(scaling.original_length)
    return None


def _adapt_encoder_decoder(checked: CheckedModel, model: EncoderDecoder, seed: int) -> None:
    """An encoder-decoder: a fixed source for questions about the target's tokens."""
    size = model.config.source_vocab_size or model.config.vocab_size  # type: ignore[union-attr]
    draw = torch.randint(size, (1, 9), generator=torch.Generator().manual_seed(seed + 1)).to(model.device)
    rows: Callable[[Tensor], Tensor] = lambda tokens: draw.expand(len(tokens), -1)  # noqa: E731
    checked.logits = lambda tokens: model(rows(tokens), tokens)
    checked.logits_with_mask = lambda tokens, mask: model(rows(tokens), tokens, None, mask)
    checked.logits_with_source = lambda source, mask, tokens: model(source, tokens, mask)

    def step(tokens: Tensor, cache: Cache) -> Tensor:
        return model(rows(tokens) if cache.memory_positions is None else None, tokens, cache=cache)

    checked.logits_with_cache = _build_cached_forward(model, step)
    _add_generation_functions(checked, model, step, draw)


def _build_cached_forward(
    model: Transformer, forward: Callable[..., Tensor]
) -> Callable[[Tensor, Any], tuple[Tensor, Any]]:
    """Steps with a cache that is made at the first."""

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        state = model.new_cache(len(tokens), 512) if state is None else state
        return forward(tokens, state), state

    return step


def _build_kernel_logits(model: Transformer, logits: Any) -> dict[str, Any]:
    """Each kernel that can compute this model; flex is left out, for it compiles."""

    @contextmanager
    def switched(name: str) -> Iterator[None]:
        before = [(module, module.kernel) for module in model.modules() if hasattr(module, "build_kernel")]
        try:
            model.use_kernel(name)
            yield
        finally:
            for module, kernel in before:
                module.kernel = kernel

    def able(name: str) -> bool:
        try:
            with switched(name):
                return True
        except KernelError:
            return False

    def by(name: str) -> Callable[[Tensor], Tensor]:
        def run(tokens: Tensor) -> Tensor:
            with switched(name):
                return logits(tokens)

        return run

    return {name: by(name) for name in ("explicit", "sdpa") if able(name)}
