"""`cutaway trace`: the forward pass as a table."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.convert import DType
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.cli.reading import Reading
    from cutaway.lens import Journey
    from cutaway.model import Transformer

ENDS = 2
"""Blocks shown at each end of a deep stack."""


def trace(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A model's or run's directory, .gguf file, hub id, or a preset's name."),
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What it reads; - is standard input.")],
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TOKEN", help="Which token to follow: its number, or some of its text; the last."),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="TEXT", help="What an encoder-decoder has written so far.")
    ] = None,
    sites: Annotated[
        list[str] | None,
        typer.Option("--sites", metavar="GLOB", help="Only these, as in resid_post or 'blocks.0.*'; repeatable."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All blocks of a deep model, not only those at its ends.")
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

    Example: cutaway trace ./gpt2 "The cat sat on the" --at cat --sites attn.out --sites ffn.out --all

    Example: cutaway trace ./t5 "translate English to German: Hello" --target "Hal" --save hello.safetensors
    """
    if save is not None:
        check_file(save)
    from cutaway.cli.reading import opened

    reading = opened(source, text, target, device, dtype, quiet=as_json)
    place = None if at is None else reading.place(at)
    from cutaway.cli import trace_view

    shown = named(reading.model, sites) if sites or as_json else for_people(reading.model, every=every)
    journey = followed(reading, place, shown, sites, save)
    if as_json:
        from cutaway.cli.convert import plain

        told = {"source": source} | trace_view.to_data(journey, reading)
        told |= {} if save is None else {"saved": str(save)}
        sys.stdout.write(json.dumps(plain(told), indent=2, allow_nan=False) + "\n")
        return
    trace_view.show(journey, reading, source, hint="" if sites else ": --all shows them")
    if save is not None:
        trace_view.saved(save)


def followed(
    reading: "Reading",
    at: int | None = None,
    shown: list[str] | None = None,
    kept: list[str] | None = None,
    save: Path | None = None,
) -> "Journey":
    """A token's journey; with `save`, the values of the sites `kept` are written whole, from the same pass."""
    import torch

    from cutaway.lens import Trace, follow

    where = reading.model.device
    tokens = torch.tensor([reading.tokens], device=where)
    source = None if reading.source is None else torch.tensor([reading.source], device=where)
    name = "source_at" if reading.source is not None and reading.followed_text is reading.source else "at"
    how: Any = {"only": shown} | ({} if at is None else {name: at})
    if save is None:
        return follow(reading.model, tokens, source, **how)
    with Trace(reading.model, *(kept or ["*"]), device="cpu") as t:
        journey = follow(reading.model, tokens, source, **how)
    write(t, save)
    return journey


def named(model: "Transformer", asked: list[str] | None) -> list[str]:
    """The sites asked for; all, if none are."""
    from cutaway.lens import sites
    from cutaway.lens.choice import chosen

    known = sites(model)
    return [site.name for site in chosen(known, asked)] if asked else list(known)


def for_people(model: "Transformer", *, every: bool = False) -> list[str]:
    """The sites outside blocks, and in the first and last blocks of each stack: all that differ from the one above."""
    from cutaway.lens import sites
    from cutaway.lens.equations import same_as_before

    return [
        name
        for name, site in sites(model).items()
        if site.layer is None
        or site.stack is None
        or ((every or not ENDS <= site.layer < len(site.stack.blocks) - ENDS) and not same_as_before(name))
    ]


def check_file(path: Path, option: str = "--save", suffix: str = ".safetensors") -> None:
    """What can be told before anything is read."""
    if path.suffix != suffix:
        raise InputError(f"{option} is '{path}'; it should end in {suffix}")
    if path.exists() or path.is_symlink():
        raise InputError(f"'{path}' exists already, and nothing is replaced unasked; name another file")
    if not path.parent.is_dir():
        raise InputError(f"'{path.parent}' is no directory, so nothing can be written there; make it, or name another")


def write(t: Any, path: Path) -> None:
    """Aside first: a file of that name is whole, or is not there."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as work:
        t.save(Path(work) / path.name)
        check_file(path)  # another program may have been faster
        (Path(work) / path.name).rename(path)
