"""FFN neurons as key-value memories: activations by token (key) and effects on the logits (value).

Geva et al. 2021, https://arxiv.org/abs/2012.14913
"""

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.adapters import ModelLike
from cutaway.lens.analysis.attribution import apply_norm_gain, unembedding
from cutaway.lens.analysis.inputs import (
    AnalysisInputs,
    TextOrTokens,
    inputs_without_text,
    prepare_inputs,
    upcast_float32,
)
from cutaway.lens.labeled_tensor import LabeledTensor
from cutaway.lens.sites import resolve_index
from cutaway.model.adapters.lora import effective_weight
from cutaway.model.ffn import MLP, GatedMLP


def neuron_activations(
    model: ModelLike, tokens: TextOrTokens, layer: int, neuron: int, *, source: TextOrTokens | None = None
) -> LabeledTensor:
    """Activation of one FFN neuron at each token of a text. `.top()` of the result returns the largest activations."""
    inputs = prepare_inputs(model, tokens, source)
    layer, neuron, _ = _resolve_neuron(inputs, layer, neuron)
    name = f"{inputs.site_prefix}blocks.{layer}.ffn.hidden"
    values = upcast_float32(inputs.trace(name)[name])[0, :, neuron]
    return LabeledTensor(f"neuron {layer}.{neuron}", values, ("token",), (inputs.token_labels,), "activation")


def neuron_logit_effects(model: ModelLike, layer: int, neuron: int, *, top_k: int = 10) -> LabeledTensor:
    """The `top_k` tokens whose logits a neuron raises most, and the `top_k` it lowers most.

    The neuron's output vector is multiplied directly by the head's matrix. The gains of the norms between the two are
    included, but not the norms' scale, which depends on the text. So the values are proportional to logits.
    """
    inputs = inputs_without_text(model)
    layer, neuron, output_weight = _resolve_neuron(inputs, layer, neuron)
    head, branch = inputs.require_linear_head("logit effects of a neuron"), inputs.blocks[layer].ffn
    with torch.no_grad():
        # (V, d): the unembedding with the gains of both norms.
        directions = apply_norm_gain(inputs.stack.final_norm, upcast_float32(unembedding(head)))
        directions = apply_norm_gain(branch.norm_out, directions)
        output = inputs.read_weight(output_weight, f"blocks.{layer}.ffn.out")
        effects = directions @ output * head.scale * branch.scale
    size = len(effects)
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= size // 2:
        raise InputError(f"top_k is {top_k!r}; pass an integer from 1 to {size // 2}, half the vocabulary size")
    order = effects.argsort(descending=True, stable=True)
    ids = torch.cat((order[:top_k], order[-top_k:]))
    title, labels = f"logit effects of neuron {layer}.{neuron}", (inputs.decode_tokens(ids.tolist()),)
    return LabeledTensor(title, effects[ids], ("token",), labels, "proportional to logits")


def _resolve_neuron(inputs: AnalysisInputs, layer: int, neuron: int) -> tuple[int, int, Tensor]:
    """Return the resolved layer and neuron index, and the neuron's output weights, (d,)."""
    layer = resolve_index(layer, len(inputs.blocks), "layer", "the model's blocks")
    f = inputs.blocks[layer].ffn.f
    if not isinstance(f, MLP | GatedMLP):
        raise InputError(f"block {layer} has experts, each with its own neurons; pass a layer with a dense FFN")
    weight = effective_weight(f.down)
    neuron = resolve_index(neuron, weight.shape[-1], "neuron", f"the neurons of block {layer}")
    return layer, neuron, weight[:, neuron]
