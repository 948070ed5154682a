"""`collect_activations`: run a model on a corpus and write the activations at some sites to disk."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from cutaway.argument_checks import check_dtype, check_positive_int
from cutaway.errors import InputError
from cutaway.eval_mode import eval_mode
from cutaway.lens.activations.batches import Corpus, TokenBatch, iterate_batches
from cutaway.lens.activations.dataset import ActivationDataset
from cutaway.lens.activations.index import INDEX_FILE, Index, SiteInfo, describe_model, read_index
from cutaway.lens.activations.writer import RecordedBatch, ShardWriter
from cutaway.lens.adapters import ModelLike, unwrap_model
from cutaway.lens.context_hooks import LAST, ContextHooks
from cutaway.lens.sites import Site
from cutaway.lens.trace import Trace
from cutaway.model import EncoderDecoder, Transformer

_STORED_DTYPES = {"tokens": torch.int32, "positions": torch.int32, "sequences": torch.int64}


def collect_activations(
    model: ModelLike,
    corpus: Corpus,
    *sites: str,
    directory: str | Path,
    seq_len: int = 256,
    batch_size: int = 16,
    packing: bool = False,
    dtype: torch.dtype | None = None,
    tokens_per_shard: int = 32768,
    max_tokens: int | None = None,
    progress: bool = True,
) -> ActivationDataset:
    """Write the activations of a corpus at `sites` to `directory`, and return them as an `ActivationDataset`.

    The directory has safetensors shards and index.json. A run that was interrupted at any moment is continued if this
    function is called again with the same arguments; the result is equal bit for bit to that of one run. After a
    complete run, the same call compares the tokens of the corpus and returns the dataset. The memory does not depend on
    the length of the corpus. Blocks after the last site are not computed.

    Args:
        model: a cutaway model or checkpoint, a transformers model, or another module that takes token ids.
        corpus: texts (needs a tokenizer), token id sequences, or a UTF-8 text file with blank lines between texts.
        sites: names or patterns of sites with one value per token, such as "blocks.2.resid_post".
        directory: where to write. It must be empty or have an interrupted run with the same arguments.
        seq_len: maximum number of tokens in a row. A longer sequence is divided.
        packing: put several sequences into a row; they do not attend to each other. It needs a cutaway model.
        dtype: dtype of the stored activations. The default is the model's dtype.
        tokens_per_shard: minimum number of tokens in each shard.
        max_tokens: stop after the batch that reaches this number of tokens.
    """
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size), ("tokens_per_shard", tokens_per_shard)):
        check_positive_int(name, value)
    check_positive_int("max_tokens", 1 if max_tokens is None else max_tokens)
    check_dtype(dtype)
    module, tokenizer, directory = unwrap_model(model), getattr(model, "tokenizer", None), Path(directory)
    _check_model(module, packing=packing)
    trace = Trace(module, *sites, dtype=dtype)
    infos = {site.name: SiteInfo(_token_axes(site), ()) for site in trace.sites}
    dtype = dtype or next(module.parameters()).dtype
    dtype_name = str(dtype).removeprefix("torch.")
    description = describe_model(module)
    index = Index(description, infos, dtype_name, seq_len, batch_size, packing, tokens_per_shard, max_tokens)
    index = _open_directory(directory, index)
    batches = iterate_batches(corpus, tokenizer, seq_len=seq_len, batch_size=batch_size, packing=packing)
    batches = _skip_written(_limit_tokens(batches, max_tokens), index, directory)
    if index.complete:
        if next(batches, None) is not None:
            problem = f"'{directory}' has all activations of a shorter corpus"
            raise InputError(f"{problem}; pass another directory, or open it with ActivationDataset")
        return ActivationDataset(directory)
    with ShardWriter(directory, index) as writer:
        for batch in _record_batches(trace, _track_tokens(batches, max_tokens, progress)):
            writer.put(batch)
    if not index.shards:
        (directory / INDEX_FILE).unlink()
        raise InputError("the corpus has no tokens; pass at least one text or token id sequence")
    return ActivationDataset(directory)


def _record_batches(trace: Trace, batches: Iterator[TokenBatch]) -> Iterator[RecordedBatch]:
    """Run the traced model on each batch, up to the last site, and yield the activations."""
    first = next(batches, None)
    if first is None:  # a trace without a call would raise
        return
    with torch.no_grad(), eval_mode(trace.model), trace, _stop_after_last_site(trace):
        for batch in chain([first], batches):
            trace.clear()
            _run_until_last_site(trace.model, batch)
            real = batch.real.flatten().nonzero()[:, 0]
            token_data = {key: getattr(batch, key).flatten()[real].to(dtype) for key, dtype in _STORED_DTYPES.items()}
            values = {site.name: _flatten_tokens(site, trace.calls(site.name)[-1], batch) for site in trace.sites}
            yield RecordedBatch(values, token_data, real)


def _check_model(model: nn.Module, *, packing: bool) -> None:
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if isinstance(model, EncoderDecoder) or is_encoder_decoder is True:
        raise InputError("the model is an encoder-decoder, which needs a source for each text; use ct.trace in a loop")
    if packing and not isinstance(model, Transformer):
        problem = f"packing needs a mask between documents, which a {type(model).__name__} does not take"
        raise InputError(f"{problem}; pass packing=False, or load the model with ct.load")


def _token_axes(site: Site) -> str:
    """Return the axes of the activation of one token. Raise if the site has not one value per token."""
    if site.is_recomputed or not (site.axes[:2] in ("BT", "BS") or site.axes[:1] in ("N", "")):
        raise InputError(
            f"{site.name} has no fixed size per token; pass sites such as resid_post, attn.z or ffn.hidden"
        )
    return site.axes[1:] if site.axes[:1] == "N" else site.axes[2:]


def _flatten_tokens(site: Site, value: Tensor, batch: TokenBatch) -> Tensor:
    """Return the activations of a batch as (B·T, …)."""
    if site.axes[:1] == "N":
        return value
    if value.shape[:2] != batch.tokens.shape:
        problem = f"{site.name} has shape {tuple(value.shape)} for tokens of shape {tuple(batch.tokens.shape)}"
        raise InputError(f"{problem}; pass a site whose first two axes are batch and token")
    return value.flatten(0, 1)


def _open_directory(directory: Path, index: Index) -> Index:
    """Return the index of an interrupted run in the directory, or `index` if the directory is empty."""
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / INDEX_FILE).exists():
        existing = read_index(directory)
        existing.check_same_settings(index, directory)
        return existing
    if any(path.suffix not in (".tmp", ".safetensors") for path in directory.iterdir()):
        raise InputError(f"directory '{directory}' has other files; pass an empty or new directory")
    index.write(directory)
    return index


def _limit_tokens(batches: Iterable[TokenBatch], max_tokens: int | None) -> Iterator[TokenBatch]:
    total = 0
    for batch in batches:
        yield batch
        total += int(batch.real.sum())
        if max_tokens is not None and total >= max_tokens:
            return


def _skip_written(batches: Iterator[TokenBatch], index: Index, directory: Path) -> Iterator[TokenBatch]:
    """Skip the batches of the shards that exist. Raise if the corpus has other tokens than they."""
    for shard in index.shards:
        skipped = [batch.tokens[batch.real] for batch in islice(batches, shard.num_batches)]
        with safe_open(directory / shard.file, "pt") as file:
            stored = file.get_tensor("tokens").long()
        if not skipped or not torch.equal(torch.cat(skipped), stored):
            problem = f"the tokens of {shard.file} in '{directory}' are not those of the corpus"
            raise InputError(f"{problem}, so it cannot be resumed; pass the same corpus, or another directory")
    return batches


class _LastSiteReached(Exception):  # noqa: N818  # not an error
    """Raised in the forward pass after the last traced site."""


@contextmanager
def _stop_after_last_site(trace: Trace) -> Iterator[None]:
    """Context manager: end each forward pass with `_LastSiteReached` as soon as all traced sites are recorded."""

    def stop(*_: object) -> None:
        if all(trace.calls(site.name) for site in trace.sites):
            raise _LastSiteReached

    hooks = ContextHooks()  # forward passes of other threads are not stopped
    for module, is_input in {(site.module, site.kind == "in") for site in trace.sites}:
        add_hook = hooks.add_pre_hook if is_input else hooks.add_output_hook
        add_hook(module, stop, LAST)
    hooks.activate()
    try:
        yield
    finally:
        hooks.deactivate()


def _run_until_last_site(model: nn.Module, batch: TokenBatch) -> None:
    device = next(model.parameters()).device
    tokens = batch.tokens.to(device)
    mask = None if bool(batch.real.all()) else batch.real.to(device)
    try:
        if isinstance(model, Transformer):
            documents = None if batch.document_ids is None else batch.document_ids.to(device)
            model.per_token_output(tokens, mask, document_ids=documents)
        elif mask is None:
            model(tokens)
        else:
            model(tokens, attention_mask=mask.long())
    except _LastSiteReached:
        return


def _track_tokens(batches: Iterator[TokenBatch], max_tokens: int | None, progress: bool) -> Iterator[TokenBatch]:
    """Yield the batches, with a progress bar of tokens on an interactive terminal."""
    if not progress or not sys.stderr.isatty():
        yield from batches
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("activations (tokens)", total=max_tokens)
        for batch in batches:
            yield batch
            bar.advance(task, int(batch.real.sum()))
