"""How the loss's gradient reaches down through a model."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.config import EncoderDecoder, PostNorm, PreNorm
from cutaway.config import config as read_config
from cutaway.errors import InputError
from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, eval_mode, prepare_inputs, upcast_float32
from cutaway.lens.analysis.labeled_tensor import LabeledTensor
from cutaway.lens.trace import trace
from cutaway.model import Transformer, build

PLACEMENTS = {"pre": PreNorm(), "post": PostNorm()}


def gradient_by_depth(model: Any, tokens: TextOrTokens, *, source: TextOrTokens | None = None) -> LabeledTensor:
    """Length of the loss's gradient at the stream after the embedding and after each block, all tokens together.

    The loss is the next token's, or for an encoder the token's own. The weights' gradients are not touched.
    """
    this = prepare_inputs(model, tokens, source)
    names = [f"{this.site_prefix}blocks.{layer}.resid_post" for layer in range(len(this.stack.blocks))]
    leaves: list[Tensor] = []

    def begin(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        """The graph begins here, whether or not the weights are to be trained."""
        leaves.append(out.detach().requires_grad_())
        return leaves[-1]

    handle = this.stack.embed.register_forward_hook(begin)
    try:
        with eval_mode(this.model, enable_grad=True), trace(this.model, *names, gradients=True) as t:
            slope = torch.autograd.grad(_text_loss(this), leaves)[0]
    finally:
        handle.remove()
    lengths = torch.stack([upcast_float32(slope).norm(), *(upcast_float32(t.gradient(name)).norm() for name in names)])
    labels = ("embed", *(str(layer) for layer in range(len(names))))
    return LabeledTensor("gradient of the loss by depth", lengths, ("layer",), (labels,), "norm")


def _text_loss(inputs: AnalysisInputs) -> Tensor:
    """Cross-entropy of one text, averaged over its tokens."""
    inputs.require_head()
    logits, tokens = inputs.run()[0], inputs.tokens[0]
    if inputs.stack.causal:
        if len(tokens) < 2:
            raise InputError("the text has one token, and the loss needs a next one; give at least two")
        logits, tokens = logits[:-1], tokens[1:]
    return F.cross_entropy(upcast_float32(logits), tokens)


def gradient_by_placement(
    source: Any, *, depths: Sequence[int] = (4, 8, 16), num_seeds: int = 3, seq_len: int = 32
) -> LabeledTensor:
    """The same for fresh models with norms before the sublayers and behind them, at several depths, over seeds.

    Each is told as a share of the gradient after the last block: 1 throughout is a gradient that arrives as it left.
    """
    config = read_config(source)
    if isinstance(config, EncoderDecoder):
        raise InputError("placements are compared in one stack, and this model has two; take a decoder or an encoder")
    if not depths or num_seeds < 1:
        raise InputError("nothing was asked for; give depths such as (4, 8, 16) and at least one seed")
    (side, stack), layers = next(iter(config.stacks.items())), max(depths)
    values = torch.full((len(PLACEMENTS), layers, len(depths)), float("nan"))
    for row, placement in enumerate(PLACEMENTS.values()):
        for column, depth in enumerate(depths):
            deep = config.replace(**{side: stack.replace(layers=depth, placement=placement)})
            found = [relative_gradient_norms(build(deep, seed=seed), seq_len, seed) for seed in range(num_seeds)]
            values[row, :depth, column] = torch.stack(found).log().mean(0).exp()  # ratios are averaged as ratios
    labels = (tuple(PLACEMENTS), tuple(map(str, range(layers))), tuple(f"{depth} blocks" for depth in depths))
    title = "gradient of the loss at the start of training"
    return LabeledTensor(title, values, ("placement", "layer", "depth"), labels, "share of the last block's")


def relative_gradient_norms(model: Transformer, seq_len: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (1, seq_len), generator=draw)
    lengths = gradient_by_depth(model, tokens).values[
        1:
    ]  # the embedding has a size of its own, which says nothing here
    return lengths / lengths[-1]
