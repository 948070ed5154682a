"""`cutaway trace`: the activations of one token at every site of the forward pass, as a table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cutaway.cli.json_output import print_json
from cutaway.cli.options import (
    Adapter,
    Device,
    ModelSource,
    WeightDType,
    argument,
    check_output_path,
    json_flag,
    option,
)
from cutaway.errors import InputError
from cutaway.pretrained import DEFAULT_MODEL, example_text

if TYPE_CHECKING:  # torch is imported when it is needed
    from cutaway.cli.tokenized_input import TokenizedInput
    from cutaway.lens import Journey, Trace
    from cutaway.lens.sites import Site
    from cutaway.model import Transformer

NUM_END_BLOCKS = 2
"""Number of blocks shown at each end of a stack."""


def trace(
    source: ModelSource = DEFAULT_MODEL,
    text: Annotated[
        str | None, argument("Input text; - reads standard input; default an example.", metavar="TEXT")
    ] = None,
    position: Annotated[
        str | None,
        option(
            "Token to trace: its index, or a part of the text that ends with it; default the last token.",
            metavar="TOKEN",
        ),
    ] = None,
    target: Annotated[str | None, option("Decoder input of an encoder-decoder.", metavar="TEXT")] = None,
    sites: Annotated[
        list[str] | None, option("Sites to show, such as resid_post or 'blocks.0.*'; repeatable.", metavar="GLOB")
    ] = None,
    all_blocks: Annotated[bool, option("Show all blocks, not only the first and last ones.", "--all-blocks")] = False,
    save: Annotated[Path | None, option("Save the activations as .safetensors.", metavar="FILE")] = None,
    adapter: Adapter = None,
    device: Device = None,
    dtype: WeightDType = None,
    as_json: Annotated[bool, json_flag("Print all sites as one JSON object.")] = False,
) -> None:
    """Trace a token through a model: shape, norm, contribution and logit lens at each site.

    Example: cutaway trace tiny-english "The cat sat on the"

    Example: cutaway trace ./gpt2 "The cat sat on the" --position cat --sites attn.out --sites ffn.out --all-blocks

    Example: cutaway trace ./t5 "translate English to German: Hello" --target "Hal" --save hello.safetensors
    """
    if save is not None:
        check_output_file(save)
    from cutaway.cli.tokenized_input import load_tokenized_input

    tokenized = load_tokenized_input(
        source, example_text(source) if text is None else text, target, device, dtype, quiet=as_json, adapter=adapter
    )
    token_index = None if position is None else tokenized.resolve_position(position)
    from cutaway.cli.views import trace_table

    shown_sites = sites if sites or as_json else default_sites(tokenized.model, all_blocks=all_blocks)
    journey = trace_token(tokenized, token_index, shown_sites, sites, save)
    if as_json:
        data = {"source": source} | trace_table.journey_to_dict(journey, tokenized)
        print_json(data | ({} if save is None else {"saved": str(save)}))
        return
    trace_table.render_journey(journey, tokenized, source, hint="" if sites else ": --all-blocks shows them")
    if save is not None:
        trace_table.print_saved_path(save)


def trace_token(
    tokenized: "TokenizedInput",
    position: int | None = None,
    shown_sites: list[str] | None = None,
    saved_sites: list[str] | None = None,
    save_path: Path | None = None,
) -> "Journey":
    """Record the activations of the token at `position` at the sites `shown_sites`.

    With `save_path`, also save the activations of all tokens at `saved_sites`, in the same forward pass.
    """
    import torch

    from cutaway.lens import Trace, follow_token

    device = tokenized.model.device
    tokens = torch.tensor([tokenized.tokens], device=device)
    source = None if tokenized.source is None else torch.tensor([tokenized.source], device=device)
    traces_source = tokenized.source is not None and tokenized.traced_tokens is tokenized.source
    index = -1 if position is None else position

    options = {"position": -1 if traces_source else index, "source_position": index if traces_source else -1}
    if save_path is None:
        return follow_token(tokenized.model, tokens, source, **options, site_names=shown_sites)
    with Trace(tokenized.model, *(saved_sites or ["*"]), device="cpu") as t:
        journey = follow_token(tokenized.model, tokens, source, **options, site_names=shown_sites)
    _save_trace(t, save_path)
    return journey


def default_sites(model: "Transformer", *, all_blocks: bool = False) -> list[str]:
    """Return the sites outside blocks, and the sites of the first and last NUM_END_BLOCKS blocks of each stack.

    With `all_blocks`, return the sites of all blocks. Residual-stream sites with the same value as the site before them
    are left out.
    """
    from cutaway.lens import sites
    from cutaway.lens.sites import is_repeated_resid

    def is_shown(site: "Site") -> bool:
        if site.layer is None or site.stack is None:
            return True
        is_end = not NUM_END_BLOCKS <= site.layer < len(site.stack.blocks) - NUM_END_BLOCKS
        return (all_blocks or is_end) and not is_repeated_resid(site.name)

    return [name for name, site in sites(model).items() if is_shown(site)]


def check_output_file(path: Path, option: str = "--save", suffix: str = ".safetensors") -> None:
    """Raise if `path` has another suffix, exists, or cannot be written. Verbs call this before they load the model."""
    if path.suffix != suffix:
        raise InputError(f"{option} is '{path}', which does not end in {suffix}; rename it")
    if path.exists() or path.is_symlink():
        raise InputError(f"'{path}' exists and is not overwritten; pass another path")
    check_output_path(path)


def _save_trace(t: "Trace", path: Path) -> None:
    """Save the traced activations atomically: write the file to a temporary directory, then move it to `path`."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary:
        t.save(Path(temporary) / path.name)
        check_output_file(path)  # another process may have created it meanwhile
        (Path(temporary) / path.name).rename(path)
