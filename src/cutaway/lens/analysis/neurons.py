"""FFN neurons as memories: the key is what makes one fire, the value is what it then writes.

Geva et al. 2021, https://arxiv.org/abs/2012.14913
"""

from typing import Any

import torch
from torch import nn

from cutaway.errors import InputError
from cutaway.lens.analysis.attribution import apply_norm_gain
from cutaway.lens.analysis.inputs import (
    AnalysisInputs,
    TextOrTokens,
    eval_mode,
    inputs_without_text,
    prepare_inputs,
    upcast_float32,
)
from cutaway.lens.analysis.labeled_tensor import LabeledTensor
from cutaway.lens.sites import resolve_indices
from cutaway.lens.trace import trace


def neuron_activations(
    model: Any, tokens: TextOrTokens, layer: int, neuron: int, *, source: TextOrTokens | None = None
) -> LabeledTensor:
    """How strongly each token of a text makes one neuron fire; `.top()` names the strongest."""
    this = prepare_inputs(model, tokens, source)
    layer, neuron, _ = _resolve_neuron(this, layer, neuron)
    name = f"{this.site_prefix}blocks.{layer}.ffn.hidden"
    with eval_mode(this.model), trace(this.model, name) as t:
        this.run()
    return LabeledTensor(
        f"neuron {layer}.{neuron}",
        upcast_float32(t[name])[0, :, neuron],
        ("token",),
        (this.token_labels,),
        "activation",
    )


def neuron_logit_effects(model: Any, layer: int, neuron: int, *, top_k: int = 10) -> LabeledTensor:
    """The tokens whose logits a neuron raises most when it fires, and those it lowers most.

    What it writes is read by the head directly, with the gains of the norms on the way and without their scale, which
    depends on the text: the numbers are in proportion, not in logits.
    """
    this = inputs_without_text(model)
    layer, neuron, down = _resolve_neuron(this, layer, neuron)
    head, stack = this.require_head(), this.stack
    if head.transform is not None:
        raise InputError(
            "this model's head has a layer with an activation before the output matrix; none can be read through it"
        )
    matrix: Any = head.matrix.weight
    branch: Any = stack.blocks[layer].ffn
    with torch.no_grad():
        read = apply_norm_gain(branch.norm_out, apply_norm_gain(stack.final_norm, upcast_float32(matrix)))  # (V, d)
        raised = read @ upcast_float32(down.weight[:, neuron]) * head.scale * branch.scale
    size = len(raised)
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= size // 2:
        raise InputError(f"top_k is {top_k!r}; give 1 to {size // 2}, half the vocabulary")
    order = raised.argsort(descending=True, stable=True)
    ids = torch.cat((order[:top_k], order[-top_k:]))
    labels = this.decode_tokens(ids.tolist())
    return LabeledTensor(
        f"what neuron {layer}.{neuron} writes", raised[ids], ("token",), (labels,), "logit, in proportion"
    )


def _resolve_neuron(inputs: AnalysisInputs, layer: int, neuron: int) -> tuple[int, int, Any]:
    """The layer and unit meant, and the matrix that reads them."""
    blocks = inputs.stack.blocks
    layer = resolve_indices(layer, len(blocks), "layer", "the model's blocks")[0]
    branch: Any = blocks[layer].ffn
    down: nn.Module | None = getattr(branch.f, "down", None)
    if down is None:
        raise InputError(f"block {layer} has experts, each with neurons of its own; name a layer whose FFN is dense")
    weight: Any = down.weight
    return layer, resolve_indices(neuron, weight.shape[-1], "neuron", f"the neurons of block {layer}")[0], down
