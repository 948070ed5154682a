"""`cutaway trace`: the forward pass as a table."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.model_loading import DType
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.cli.tokenized_input import TokenizedInput
    from cutaway.lens import Journey
    from cutaway.model import Transformer

NUM_END_BLOCKS = 2
"""Blocks shown at each end of a deep stack."""


def trace(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A model's or run's directory, .gguf file, hub id, or a preset's name."),
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What it reads; - is standard input.")],
    position: Annotated[
        str | None,
        typer.Option(
            "--position", metavar="TOKEN", help="Which token to follow: its number, or some of its text; the last."
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="TEXT", help="What an encoder-decoder has written so far.")
    ] = None,
    sites: Annotated[
        list[str] | None,
        typer.Option("--sites", metavar="GLOB", help="Only these, as in resid_post or 'blocks.0.*'; repeatable."),
    ] = None,
    all_blocks: Annotated[
        bool, typer.Option("--all-blocks", help="All blocks of a deep model, not only those at its ends.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the whole values as .safetensors.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda; the GPU if there is one.")] = None,
    dtype: Annotated[DType | None, typer.Option("--dtype", help="Of the weights; as stored, unless given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: everything, one JSON object.")] = False,
) -> None:
    """Follow a token through a model: each stage, its shape and norm, what it adds, and what it would say by then.

    Example: cutaway trace tiny-python "for name in sorted(os."

    Example: cutaway trace ./gpt2 "The cat sat on the" --position cat --sites attn.out --sites ffn.out --all-blocks

    Example: cutaway trace ./t5 "translate English to German: Hello" --target "Hal" --save hello.safetensors
    """
    if save is not None:
        check_output_file(save)
    from cutaway.cli.tokenized_input import load_tokenized_input

    reading = load_tokenized_input(source, text, target, device, dtype, quiet=as_json)
    place = None if position is None else reading.resolve_position(position)
    from cutaway.cli.views import trace_table

    shown = (
        _resolve_sites(reading.model, sites)
        if sites or as_json
        else default_sites(reading.model, all_blocks=all_blocks)
    )
    journey = trace_token(reading, place, shown, sites, save)
    if as_json:
        from cutaway.cli.views.terminal import json_safe

        told = {"source": source} | trace_table.journey_to_dict(journey, reading)
        told |= {} if save is None else {"saved": str(save)}
        sys.stdout.write(json.dumps(json_safe(told), indent=2, allow_nan=False) + "\n")
        return
    trace_table.render_journey(journey, reading, source, hint="" if sites else ": --all-blocks shows them")
    if save is not None:
        trace_table.print_saved_path(save)


def trace_token(
    tokenized: "TokenizedInput",
    position: int | None = None,
    shown_sites: list[str] | None = None,
    saved_sites: list[str] | None = None,
    save_path: Path | None = None,
) -> "Journey":
    """A token's journey; with `save_path`, the values of `saved_sites` are written whole, from the same pass."""
    import torch

    from cutaway.lens import Trace, follow_token

    where = tokenized.model.device
    tokens = torch.tensor([tokenized.tokens], device=where)
    source = None if tokenized.source is None else torch.tensor([tokenized.source], device=where)
    traces_source = tokenized.source is not None and tokenized.traced_tokens is tokenized.source
    name = "source_position" if traces_source else "position"
    how: Any = {"site_names": shown_sites} | ({} if position is None else {name: position})
    if save_path is None:
        return follow_token(tokenized.model, tokens, source, **how)
    with Trace(tokenized.model, *(saved_sites or ["*"]), device="cpu") as t:
        journey = follow_token(tokenized.model, tokens, source, **how)
    _save_trace(t, save_path)
    return journey


def _resolve_sites(model: "Transformer", patterns: list[str] | None) -> list[str]:
    """The sites asked for; all, if none are."""
    from cutaway.lens import sites
    from cutaway.lens.sites import select_sites

    known = sites(model)
    return [site.name for site in select_sites(known, patterns)] if patterns else list(known)


def default_sites(model: "Transformer", *, all_blocks: bool = False) -> list[str]:
    """The sites outside blocks, and in the first and last blocks of each stack: all that differ from the one above."""
    from cutaway.lens import sites
    from cutaway.lens.sites import is_repeated_resid

    return [
        name
        for name, site in sites(model).items()
        if site.layer is None
        or site.stack is None
        or (
            (all_blocks or not NUM_END_BLOCKS <= site.layer < len(site.stack.blocks) - NUM_END_BLOCKS)
            and not is_repeated_resid(name)
        )
    ]


def check_output_file(path: Path, option: str = "--save", suffix: str = ".safetensors") -> None:
    """What can be told before anything is read."""
    if path.suffix != suffix:
        raise InputError(f"{option} is '{path}'; it should end in {suffix}")
    if path.exists() or path.is_symlink():
        raise InputError(f"'{path}' exists already, and nothing is replaced unasked; name another file")
    if not path.parent.is_dir():
        raise InputError(f"'{path.parent}' is no directory, so nothing can be written there; make it, or name another")


def _save_trace(t: Any, path: Path) -> None:
    """Aside first: a file of that name is whole, or is not there."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as work:
        t.save(Path(work) / path.name)
        check_output_file(path)  # another program may have been faster
        (Path(work) / path.name).rename(path)
