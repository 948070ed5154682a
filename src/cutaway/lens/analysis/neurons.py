"""FFN neurons as key-value memories: activations by token (key) and effects on the logits (value).

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
    """Activation of one FFN neuron at each token of a text; `.top()` returns the largest."""
    inputs = prepare_inputs(model, tokens, source)
    layer, neuron, _ = _resolve_neuron(inputs, layer, neuron)
    name = f"{inputs.site_prefix}blocks.{layer}.ffn.hidden"
    with eval_mode(inputs.model), trace(inputs.model, name) as t:
        inputs.run()
    return LabeledTensor(
        f"neuron {layer}.{neuron}",
        upcast_float32(t[name])[0, :, neuron],
        ("token",),
        (inputs.token_labels,),
        "activation",
    )


def neuron_logit_effects(model: Any, layer: int, neuron: int, *, top_k: int = 10) -> LabeledTensor:
    """The `top_k` tokens whose logits a neuron raises most, and the `top_k` it lowers most.

    The neuron's output vector is multiplied by the head's matrix directly, with the gains of the norms between them but
    without their scale, which depends on the text: the values are proportional to logits.
    """
    inputs = inputs_without_text(model)
    layer, neuron, down = _resolve_neuron(inputs, layer, neuron)
    head, stack = inputs.require_head(), inputs.stack
    if head.transform is not None:
        raise InputError(
            "this model's head has a layer with an activation before the output matrix, so a neuron's effect on logits "
            "is not linear; pass a model with a linear head"
        )
    matrix: Any = head.matrix.weight
    branch: Any = stack.blocks[layer].ffn
    with torch.no_grad():
        # (V, d): the unembedding with the gains of both norms.
        unembedding = apply_norm_gain(branch.norm_out, apply_norm_gain(stack.final_norm, upcast_float32(matrix)))
        effects = unembedding @ upcast_float32(down.weight[:, neuron]) * head.scale * branch.scale
    size = len(effects)
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= size // 2:
        raise InputError(f"top_k is {top_k!r}; pass 1 to {size // 2}, half the vocabulary")
    order = effects.argsort(descending=True, stable=True)
    ids = torch.cat((order[:top_k], order[-top_k:]))
    labels = inputs.decode_tokens(ids.tolist())
    return LabeledTensor(
        f"logit effects of neuron {layer}.{neuron}", effects[ids], ("token",), (labels,), "proportional to logits"
    )


def _resolve_neuron(inputs: AnalysisInputs, layer: int, neuron: int) -> tuple[int, int, Any]:
    """Return the resolved layer and neuron index, and the FFN's down projection."""
    blocks = inputs.stack.blocks
    layer = resolve_indices(layer, len(blocks), "layer", "the model's blocks")[0]
    branch: Any = blocks[layer].ffn
    down: nn.Module | None = getattr(branch.f, "down", None)
    if down is None:
        raise InputError(
            f"block {layer} is a mixture of experts, and each expert has its own neurons; pass a layer with a dense FFN"
        )
    weight: Any = down.weight
    return layer, resolve_indices(neuron, weight.shape[-1], "neuron", f"the neurons of block {layer}")[0], down
