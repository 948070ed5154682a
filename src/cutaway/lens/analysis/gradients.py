"""Gradient norms of the residual stream by depth: of one model, and of pre-norm compared with post-norm models."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.config import Config, EncoderDecoder, PostNorm, PreNorm
from cutaway.config import config as read_config
from cutaway.errors import InputError
from cutaway.eval_mode import eval_mode
from cutaway.lens.adapters import ModelLike
from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, prepare_inputs, upcast_float32
from cutaway.lens.labeled_tensor import LabeledTensor
from cutaway.lens.trace import trace
from cutaway.model import Transformer, build

PLACEMENTS = {"pre": PreNorm(), "post": PostNorm()}


def gradient_by_depth(model: ModelLike, tokens: TextOrTokens, *, source: TextOrTokens | None = None) -> LabeledTensor:
    """Norm of ∂loss/∂residual stream after the embedding and after each block, over all tokens.

    The loss is the cross-entropy of the next token, or of the token itself for an encoder. The parameters' `.grad` is
    not changed.
    """
    inputs = prepare_inputs(model, tokens, source)
    labels, (_, *names) = tuple(inputs.resid_sites), inputs.resid_sites.values()
    leaves: list[Tensor] = []

    def make_leaf(module: nn.Module, args: object, out: Tensor) -> Tensor:
        """Start the autograd graph at the embedding output, whether or not parameters require gradients."""
        leaves.append(out.detach().requires_grad_())
        return leaves[-1]

    handle = inputs.stack.embed.register_forward_hook(make_leaf)
    try:
        with torch.enable_grad(), eval_mode(inputs.model), trace(inputs.model, *names, gradients=True) as t:
            embed_grad = torch.autograd.grad(_text_loss(inputs), leaves)[0]
    finally:
        handle.remove()
    gradients = [embed_grad, *(t.gradient(name) for name in names)]
    norms = torch.stack([upcast_float32(gradient).norm() for gradient in gradients])
    return LabeledTensor("gradient norm by depth", norms, ("layer",), (labels,), "norm")


def _text_loss(inputs: AnalysisInputs) -> Tensor:
    """Mean cross-entropy of the text: of each next token if the model is causal, else of each token itself."""
    inputs.require_head()
    logits, tokens = inputs.forward()[0], inputs.tokens[0]
    if inputs.stack.causal:
        if len(tokens) < 2:
            raise InputError("the text has one token, so it has no next-token loss; pass at least two tokens")
        logits, tokens = logits[:-1], tokens[1:]
    return F.cross_entropy(upcast_float32(logits), tokens)


def gradient_by_placement(
    source: Config | Mapping[str, object] | str | Path,
    *,
    depths: Sequence[int] = (4, 8, 16),
    num_seeds: int = 3,
    seq_len: int = 32,
) -> LabeledTensor:
    """Gradient norm by depth of newly initialized models with pre-norm and post-norm, at several depths.

    Values are relative to the gradient norm after the last block and are the geometric mean over seeds. A value of 1 at
    all layers means that the gradient neither vanishes nor explodes.
    """
    config = read_config(source)
    if isinstance(config, EncoderDecoder):
        raise InputError("gradient_by_placement needs a config with one stack; pass a decoder or an encoder")
    if not depths or num_seeds < 1:
        raise InputError("depths is empty or num_seeds is below 1; pass depths such as (4, 8, 16) and num_seeds ≥ 1")
    (stack_name, stack), layers = next(iter(config.stacks.items())), max(depths)
    values = torch.full((len(PLACEMENTS), layers, len(depths)), float("nan"))
    for row, placement in enumerate(PLACEMENTS.values()):
        for column, depth in enumerate(depths):
            deep = config.replace(**{stack_name: stack.replace(layers=depth, placement=placement)})
            ratios = [relative_gradient_norms(build(deep, seed=seed), seq_len, seed) for seed in range(num_seeds)]
            values[row, :depth, column] = torch.stack(ratios).log().mean(0).exp()  # geometric mean of ratios
    labels = (tuple(PLACEMENTS), tuple(map(str, range(layers))), tuple(f"{depth} blocks" for depth in depths))
    title = "gradient norm at initialization, by norm placement"
    return LabeledTensor(title, values, ("placement", "layer", "depth"), labels, "relative to the last block")


def relative_gradient_norms(model: Transformer, seq_len: int, seed: int) -> Tensor:
    """Return the gradient norm after each block on random tokens, divided by the norm after the last block."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (1, seq_len), generator=rng)
    norms = gradient_by_depth(model, tokens).values[1:]  # without the embedding, whose scale is not comparable
    return norms / norms[-1]
