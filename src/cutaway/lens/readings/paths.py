"""Path patching: what goes from one writer straight to one reader, and no other way."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.choice import Numbers, chosen, settled, some_heads
from cutaway.lens.edit import edit
from cutaway.lens.equations import stream_before
from cutaway.lens.readings.patching import Pair, shown_as_bar
from cutaway.lens.readings.reading import Reading
from cutaway.lens.readings.subject import Text, Token, resting
from cutaway.lens.sites import Site
from cutaway.lens.taps import index
from cutaway.lens.trace import trace
from cutaway.model.block import Block


def path_patching(
    model: Any,
    clean: Text,
    corrupt: Text,
    of: Token,
    sender: str,
    *,
    receivers: Sequence[str] = ("attn.out", "ffn.out", "logits"),
    heads: Numbers | None = None,
    against: Token | None = None,
    position: int = -1,
    source: tuple[Text, Text] | None = None,
    progress: bool = True,
) -> Reading:
    """What of the answer goes from one writer straight to each later reader: all else it does is held as it was.

    `sender` is a site that writes (`blocks.2.attn.out`), or `blocks.2.attn.z` with `heads`. What it writes when clean
    is shown to one receiver alone, and what that makes of it goes on through the model; `logits` gets it as it is.
    """
    heads = settled(heads, "heads")
    pair = Pair(model, clean, corrupt, of, against, position, source)
    pair.clean.need_sum("a path straight through it")
    [begin] = chosen(pair.known, [sender])[:1]
    writer = pair.known.get(begin.name.rsplit(".", 1)[0] + ".out")
    if writer is None or writer.stack is not pair.clean.stack or len(chosen(pair.known, [sender])) > 1:
        raise InputError(f"'{sender}' is not one site that writes to the stream; name one such as blocks.0.attn.out")
    order = list(pair.known)
    beside = not isinstance(pair.clean.stack.blocks[writer.layer or 0], Block)  # its FFN reads what attention reads
    later = [
        each
        for each in chosen(pair.known, receivers)
        if order.index(each.name) > order.index(writer.name) and not (beside and each.layer == writer.layer)
    ]
    if not later:
        raise InputError(f"none of {', '.join(receivers)} reads what {sender} writes; name one that comes later")
    delta = difference(pair, begin, writer, heads)
    scores = [along(pair, each, delta) for each in shown_as_bar(later, progress, f"from {sender}")]
    some = "" if heads is None else f", heads {', '.join(map(str, some_heads(begin, settled(heads, 'heads'))))}"
    title = f"what of {pair.title} goes straight from the clean {sender}{some}"
    return Reading(title, torch.cat(scores), ("receiver",), (tuple(each.name for each in later),), note=pair.note)


def difference(pair: Pair, begin: Site, writer: Site, heads: Numbers | None) -> Tensor:
    """What the writer adds when what it is made of is clean, less what it adds when that is corrupt."""
    model = pair.clean.model
    clean, plain = pair.values(pair.clean, [begin])[begin.name], pair.values(pair.corrupt, [writer])[writer.name]
    change: dict[str, Any] = {"do": "replace", "value": clean}
    if heads is not None:
        if "H" not in begin.axes:
            raise InputError(f"{begin.name} has no heads; name attn.z to send from some of them")
        found = some_heads(begin, heads)
        change |= {"value": clean.index_select(begin.axes.index("H"), index(found, clean)), "heads": found}
    with resting(model), edit(model, {begin.name: change}), trace(model, writer.name) as t:
        pair.corrupt.run()
    return t[writer.name].as_subclass(Tensor) - plain


def along(pair: Pair, receiver: Site, delta: Tensor) -> Tensor:
    """How far the answer moves when this receiver alone is shown the difference."""
    model, prefix = pair.clean.model, pair.clean.prefix
    if receiver.layer is None:
        last = f"{prefix}blocks.{len(pair.clean.stack.blocks) - 1}.resid_post"
        return pair.share({last: lambda value: value + delta})
    with (
        resting(model),
        edit(model, {stream_before(receiver): lambda value: value + delta}),
        trace(model, receiver.name) as t,
    ):
        pair.corrupt.run()
    return pair.share({receiver.name: t[receiver.name].as_subclass(Tensor)})
