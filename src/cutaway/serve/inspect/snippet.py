"""The same values in Python, as a text to copy: what it prints is what the page shows."""

import json
from pprint import pformat
from typing import Any

from cutaway.lens.equations import position_of
from cutaway.model import EncoderDecoder, EncoderOnly
from cutaway.model.rope import Rope
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.look import Look

LINE = 100
LIKELIEST = 20
"""Of a vocabulary: all of it is more than is printed."""


def snippet(of: Inspector, look: Look, name: str, at: int) -> str:
    """A program for one stage of one token."""
    opened = (
        f"model = ct.build({of.name!r}, seed=0)"
        if of.words.fresh
        else f"model = ct.load({of.name!r}, dtype={of.model.dtype}).model"
    )
    call = calling(of, look)
    lines = ["import torch", "import cutaway as ct", "", opened, f"tokens = torch.tensor([{list(look.tokens)}])"]
    if look.source is not None:
        lines.append(f"source = torch.tensor([{list(look.source)}])")
    if name.endswith((".position", "embed.token")):
        said = plainly(of, name, at)
        return "\n".join([*lines, f"values = {said}", "print(values)", ""]) if said and not look.edits else ""
    site, index, after = reading(name, at)
    inside = [f"with torch.no_grad(), ct.trace(model, {site!r}) as t:", f"    {call}"]
    if look.edits:
        told = pformat(json.loads(json.dumps(look.edits)), width=LINE, sort_dicts=False)
        lines.append(f"edits = {told}")
        inside = [f"with ct.edit(model, edits), {inside[0].removeprefix('with ')}", inside[1]]
    likeliest = f".topk({min(LIKELIEST, of.model.config.vocab_size)})" if site == "logits" else ""
    return "\n".join([*lines, *inside, f"values = t[{site!r}]{index}{after}", f"print(values{likeliest})", ""])


def calling(of: Inspector, look: Look) -> str:
    if isinstance(of.model, EncoderDecoder):
        return "model(source, tokens)"
    return "model.encode(tokens)" if isinstance(of.model, EncoderOnly) and of.model.head is None else "model(tokens)"


def plainly(of: Inspector, name: str, at: int) -> str:
    """What is no site: rows of tables, and angles. Empty where there is no short way to it."""
    side = next(side for side in of.model.stacks if name.startswith(f"{side}.") or len(of.model.stacks) == 1)
    stack = of.model.stacks[side]
    if name.endswith("embed.token"):
        read = "source" if side == "encoder" and len(of.model.stacks) > 1 else "tokens"
        return f"model.{side}.embed.token({read})[0, {at}]"
    if "embed" in name:
        return f"model.{side}.embed.position(torch.tensor([[{at}]]))[0, 0]"
    layer = of.sites[f"{name.removesuffix('position')}q"].layer
    assert layer is not None
    rope: Any = position_of(stack, layer)
    if not isinstance(rope, Rope) or rope.switch_at is not None:
        return ""
    angles = f"{at} * model.{side}.positions[{stack.position_of[layer]!r}].frequency"
    return f"({angles} + torch.pi) % (2 * torch.pi) - torch.pi"


def reading(name: str, at: int) -> tuple[str, str, str]:
    """The site to trace, the place in it, and what is done with it then."""
    here: Any = f"[0, {at}]"
    if name == "softmax":
        return "logits", here, ".float().softmax(-1)"
    if name.endswith((".scores", ".pattern")):
        return name, f"[0, :, {at}]", ""
    if name.endswith(".mask"):
        return f"{name.removesuffix('mask')}scores", f"[0, :, {at}]", " == -torch.inf"
    if name.endswith(".router"):
        return name, f"[{at}]", ""
    return name, here, ""
