"""What is measured of a model once it is trained: a list of readings, each of one thing, in numbers."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.edit import edit
from cutaway.lens.structure import can
from cutaway.model import Transformer, build
from cutaway.train.ablate import surgery
from cutaway.train.ablate.validation import spread
from cutaway.train.data.batches import Packed
from cutaway.train.loop import Loop
from cutaway.train.objectives import Task

Reading = dict[str, Any]
"""`what` it is of, and numbers by their names (in `metrics.py`)."""
ROWS = 64
"""Sequences of validation data that are read."""
FAR = 4
"""Times the trained length, up to which models are read."""
SHIFT = 7
"""Positions that a text is moved by: any number would do, a model either notices or not."""


# Gradients by depth


def gradients(loop: Loop) -> list[Reading]:
    """The length of each block's gradient, first to last, when the weights were fresh and now."""
    seed = loop.recipe.training.seed
    fresh = build(loop.model.config, device=loop.model.device, seed=seed)
    readings = []
    for what, model in (("fresh", fresh), ("trained", loop.model)):
        for layer, length in enumerate(lengths := gradient_by_block(model, loop)):
            readings.append({"what": f"{what}, block {layer}", "gradient": length})
        readings.append({"what": what, "first_to_last": lengths[0] / max(lengths[-1], 1e-30)})
    return readings


def gradient_by_block(model: Transformer, loop: Loop) -> list[float]:
    """On one batch of validation data."""
    model.train().zero_grad(set_to_none=True)
    task = spread(loop, loop.recipe.training.batch)
    torch.autograd.backward(task.loss(model).total / task.weights.sum())
    found = []
    for block in surgery.blocks_of(model):
        squares = sum(float(each.grad.double().square().sum()) for each in block.parameters() if each.grad is not None)
        found.append(squares**0.5)
    model.zero_grad(set_to_none=True)
    model.eval()
    return found


# Parts taken away


def taken_away(loop: Loop) -> list[Reading]:
    """Loss, top five and the final stream with each part taken out of the trained model, one at a time."""
    model = loop.model.eval()
    layers, heads = len(surgery.blocks_of(model)), surgery.blocks_of(model)[0].attn.f.heads
    middle = layers // 2
    look = partial(looked_at, model, spread(loop, ROWS))
    whole = look(nullcontext())

    def without(part: str) -> AbstractContextManager[Any]:
        return edit(model, {part: "drop"}) if can(model, part, "drop") else nullcontext()

    away: dict[str, AbstractContextManager[Any]] = {
        "without the first block": edit(model, {"blocks.0": "skip"}),
        "without a middle block": edit(model, {f"blocks.{middle}": "skip"}),
        "without the last block": edit(model, {f"blocks.{layers - 1}": "skip"}),
        "without the final norm": without("final_norm"),
        "FFN first": surgery.for_a_while(model, surgery.ffn_first),
        "without positions": without("positions"),
        "without mask": surgery.for_a_while(model, surgery.without_mask),
        "with the mask": surgery.for_a_while(model, surgery.with_mask),
    }
    readings = [reading("as it is", whole, whole)]
    readings += [reading(what, look(change), whole) for what, change in away.items()]
    heads_away = [{f"blocks.{middle}.attn.z": {"do": "zero", "heads": [head]}} for head in range(heads)]
    each = [look(edit(model, change)) for change in heads_away]
    each.sort(key=lambda found: found[0])
    readings.append(reading("without a middle block's least head", each[0], whole))
    readings.append(reading("without a middle block's greatest head", each[-1], whole))
    return readings


Looked = tuple[float, float, Tensor]
"""Loss, share of targets among the five likeliest, and the final stream at the targets."""


@torch.no_grad()
def looked_at(model: Transformer, task: Task, change: AbstractContextManager[Any]) -> Looked:
    with change:
        x = task.hidden(model).flatten(0, 1)[task.weights.flatten() > 0]
        logits = torch.as_tensor(model.head(x))  # type: ignore[operator]
    targets = task.targets.flatten()[task.weights.flatten() > 0].to(x.device)
    loss = torch.nn.functional.cross_entropy(logits.double(), targets)
    best = logits.topk(min(5, logits.shape[-1])).indices
    return float(loss), float((best == targets.unsqueeze(-1)).any(-1).double().mean()), x


def reading(what: str, found: Looked, whole: Looked) -> Reading:
    moved = (found[2] - whole[2]).norm(dim=-1) / whole[2].norm(dim=-1).clamp(min=1e-30)
    return {"what": what, "loss": found[0], "top5": found[1], "moved": float(moved.mean())}


# Positions


def positions(loop: Loop) -> list[Reading]:
    """Whether order and place matter to the model, and how it does beyond the length it was trained on."""
    model, length = loop.model.eval(), loop.recipe.data.length
    tokens = unbroken(loop, FAR * length)
    short = tokens[:, :length]
    with surgery.for_a_while(model, surgery.without_mask):
        free = shuffled_change(model, short)
    readings: list[Reading] = [
        {"what": "shuffled, no mask", "noticed": free},
        {"what": "shuffled, causal mask", "noticed": shuffled_change(model, short)},
        {"what": f"moved by {SHIFT} positions", "noticed": moved_change(model, short)},
    ]
    far = losses(model, tokens)
    near = torch.cat([losses(model, piece) for piece in pieces(tokens, length)], -1)
    for times in range(1, FAR + 1):
        if times not in (1, 2, FAR):
            continue
        band = slice((times - 1) * length, times * length)
        at_once = float(far[:, band].mean())
        alone = float(near[:, band].mean())
        readings.append({"what": f"×{times} the length", "loss": at_once, "by_context": at_once - alone})
    return readings


def pieces(tokens: Tensor, length: int) -> list[Tensor]:
    """Cut where one piece's last target is the next one's first token, so that every target is told once."""
    return [tokens[:, begin : begin + length + 1] for begin in range(0, tokens.shape[1] - 1, length)]


def unbroken(loop: Loop, length: int) -> Tensor:
    """Stretches of validation text, each from one document."""
    held = loop.reading.validation
    if not isinstance(held, Packed):
        raise InputError("positions are measured on one source of plain text; give the recipe one")
    packed = Packed(held.split, length, held.seed, shuffle=False)
    batch = packed.batch(0, packed.sequences)
    whole = (batch.documents == batch.documents[:, :1]).all(-1)
    if not bool(whole.any()):
        raise InputError(f"no validation text is {length + 1} tokens long; give longer texts, or a smaller data.length")
    found = batch.tokens[whole]
    return found[:: -(-len(found) // (ROWS // 2))].to(loop.model.device)  # from all over


@torch.no_grad()
def losses(model: Transformer, tokens: Tensor) -> Tensor:
    """−log p of every token but the first."""
    logits = model(tokens[:, :-1]).double()
    told = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return told.view(len(tokens), -1)


@torch.no_grad()
def shuffled_change(model: Transformer, tokens: Tensor) -> float:
    """How far f(P·x) is from P·f(x), beside how far tokens' vectors lie apart: 0 if order means nothing."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(tokens.shape[1], generator=generator).to(tokens.device)
    plain, other = hidden(model, tokens)[:, order], hidden(model, tokens[:, order])
    return float((plain - other).norm() / (plain - plain.mean((0, 1))).norm())


@torch.no_grad()
def moved_change(model: Transformer, tokens: Tensor) -> float:
    """How far vectors move when every token stands some positions later: 0 if only distances count."""
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    plain, other = hidden(model, tokens), hidden(model, tokens, positions=places + SHIFT)
    return float((plain - other).norm() / (plain - plain.mean((0, 1))).norm())


def hidden(model: Transformer, tokens: Tensor, **how: Any) -> Tensor:
    run: Any = model.hidden
    return run(tokens, **how).double()


MEASURES: dict[str, Callable[[Loop], list[Reading]]] = {
    "gradients": gradients,
    "taken away": taken_away,
    "positions": positions,
}
