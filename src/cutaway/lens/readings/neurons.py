"""FFN neurons as memories: the key is what makes one fire, the value is what it then writes.

Geva et al. 2021, https://arxiv.org/abs/2012.14913
"""

from typing import Any

import torch
from torch import nn

from cutaway.errors import InputError
from cutaway.lens.choice import numbers
from cutaway.lens.readings.frozen import through_gain
from cutaway.lens.readings.reading import Reading
from cutaway.lens.readings.subject import Subject, Text, alone, resting, subject, wide
from cutaway.lens.trace import trace


def neuron_keys(model: Any, tokens: Text, layer: int, unit: int, *, source: Text | None = None) -> Reading:
    """How strongly each token of a text makes one neuron fire; `.top()` names the strongest."""
    this = subject(model, tokens, source)
    layer, unit, _ = dense(this, layer, unit)
    name = f"{this.prefix}blocks.{layer}.ffn.hidden"
    with resting(this.model), trace(this.model, name) as t:
        this.run()
    return Reading(f"neuron {layer}.{unit}", wide(t[name])[0, :, unit], ("token",), (this.words,), "activation")


def neuron_values(model: Any, layer: int, unit: int, *, count: int = 10) -> Reading:
    """The tokens whose logits a neuron raises most when it fires, and those it lowers most.

    What it writes is read by the head directly, with the gains of the norms on the way and without their scale, which
    depends on the text: the numbers are in proportion, not in logits.
    """
    this = alone(model)
    layer, unit, down = dense(this, layer, unit)
    head, stack = this.need_head(), this.stack
    if head.transform is not None:
        raise InputError(
            "this model's head has a layer with an activation before the output matrix; none can be read through it"
        )
    matrix: Any = head.matrix.weight
    branch: Any = stack.blocks[layer].ffn
    with torch.no_grad():
        read = through_gain(branch.norm_out, through_gain(stack.final_norm, wide(matrix)))  # (V, d)
        raised = read @ wide(down.weight[:, unit]) * head.scale * branch.scale
    size = len(raised)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= size // 2:
        raise InputError(f"count is {count!r}; give 1 to {size // 2}, half the vocabulary")
    order = raised.argsort(descending=True, stable=True)
    ids = torch.cat((order[:count], order[-count:]))
    labels = this.texts(ids.tolist())
    return Reading(f"what neuron {layer}.{unit} writes", raised[ids], ("promoted",), (labels,), "logit, in proportion")


def dense(this: Subject, layer: int, unit: int) -> tuple[int, int, Any]:
    """The layer and unit meant, and the matrix that reads them."""
    blocks = this.stack.blocks
    layer = numbers(layer, len(blocks), "layer", "the model's blocks")[0]
    branch: Any = blocks[layer].ffn
    down: nn.Module | None = getattr(branch.f, "down", None)
    if down is None:
        raise InputError(f"block {layer} has experts, each with neurons of its own; name a layer whose FFN is dense")
    weight: Any = down.weight
    return layer, numbers(unit, weight.shape[-1], "unit", f"the neurons of block {layer}")[0], down
