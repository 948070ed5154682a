"""Gradient norms of the residual stream by depth: of one model, and of untrained models by norm placement."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.config import Config, EncoderDecoder, NoNorm, PostNorm, PreNorm, SandwichNorm, Stack
from cutaway.config import config as read_config
from cutaway.errors import InputError
from cutaway.eval_mode import eval_mode
from cutaway.lens.adapters import ModelLike, sites, unwrap_model
from cutaway.lens.adapters.described_model import DescribedModel
from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, prepare_inputs, upcast_float32
from cutaway.lens.edit import edit
from cutaway.lens.hooks import HookContext, SiteHooks
from cutaway.lens.labeled_tensor import LabeledTensor
from cutaway.lens.trace import trace
from cutaway.model import Transformer, build

PlacementName = Literal["pre", "post", "sandwich", "none"]
InitName = Literal["xavier", "normal", "gpt2"]
_PLACEMENTS = {"pre": PreNorm(), "post": PostNorm(), "sandwich": SandwichNorm(), "none": PreNorm()}
_INITS = {
    "xavier": {"kind": "xavier"},
    "normal": {"kind": "normal", "depth_scaled": False},
    "gpt2": {"kind": "normal", "depth_scaled": True},
}


def set_placement(stack: Stack, name: PlacementName) -> Stack:
    """Return the stack with another norm placement; `none` removes the norms."""
    if name == "none":
        return stack.replace(placement=_PLACEMENTS[name], norm=NoNorm())
    return stack.replace(placement=_PLACEMENTS[name])


def placement_config(
    placement: PlacementName,
    layers: int,
    *,
    form: Literal["decoder", "encoder"] = "decoder",
    activation: Literal["relu", "gelu"] = "gelu",
    init: InitName = "xavier",
    d_model: int = 64,
    vocab_size: int = 259,
) -> Config:
    """Return the config of a small model for comparisons of norm placements: LayerNorm, 4 heads, FFN of 4·d_model.

    `xavier` is the initialization of the 2017 Transformer, with embeddings scaled by √d_model; `normal` is N(0, 0.02);
    `gpt2` is N(0, 0.02) with output projections divided by √(2·layers). There are no position encodings.
    """
    stack = {
        "layers": layers,
        "norm": {"kind": "layernorm"},
        "embedding": {"scale": "sqrt_d_model"} if init == "xavier" else {},
        "block": {"attention": {"heads": 4}, "ffn": {"kind": "mlp", "activation": activation}},
    }
    config = read_config(
        {"form": form, "vocab_size": vocab_size, "d_model": d_model, "init": _INITS[init], form: stack}
    )
    return config.replace(**{form: set_placement(config.stacks[form], placement)})


def gradient_by_depth(model: ModelLike, tokens: TextOrTokens, *, source: TextOrTokens | None = None) -> LabeledTensor:
    """Norm of ∂loss/∂residual stream after the embedding and after each block, over all tokens.

    The loss is the cross-entropy of the next token, or of the token itself for an encoder. The parameters' `.grad` is
    not changed.
    """
    inputs = prepare_inputs(model, tokens, source)
    labels, (embed, *names) = tuple(inputs.resid_sites), inputs.resid_sites.values()
    gradients = _resid_gradients(inputs.model, embed, names, lambda: _text_loss(inputs))
    norms = torch.stack([upcast_float32(gradient).norm() for gradient in gradients])
    return LabeledTensor("gradient norm by depth", norms, ("layer",), (labels,), "norm")


def _resid_gradients(
    model: Transformer | DescribedModel, embed: str, names: Sequence[str], compute_loss: Callable[[], Tensor]
) -> list[Tensor]:
    """Gradients of a loss with respect to the embedding output (the site `embed`) and to the sites `names`."""
    leaves: list[Tensor] = []

    def make_leaf(context: HookContext) -> Tensor:
        """Start the autograd graph at the embedding output, whether or not parameters require gradients."""
        leaves.append(context.value.detach().requires_grad_())
        return leaves[-1]

    hooks = SiteHooks(modifies=True)
    try:
        hooks.register([(sites(model)[embed], make_leaf, None)])
        with torch.enable_grad(), eval_mode(unwrap_model(model)), trace(model, *names, gradients=True) as t:
            embed_grad = torch.autograd.grad(compute_loss(), leaves)[0]
    finally:
        hooks.remove()
    return [embed_grad, *(t.gradient(name) for name in names)]


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
    placements: Sequence[PlacementName] = ("pre", "post", "sandwich", "none"),
    depths: Sequence[int] = (6, 12, 24),
    num_seeds: int = 3,
    num_texts: int = 2,
    seq_len: int = 32,
    residual: bool = True,
) -> LabeledTensor:
    """Gradient norm by depth of untrained models, for several norm placements and depths.

    Values are relative to the gradient norm after the last block and are the geometric mean over seeds and texts of
    random tokens. A value of 1 at all layers means that the gradient neither vanishes nor explodes. `residual=False`
    removes the residual connections. The result depends on the mask, the activation and the initialization:
    `cutaway learn study norm-placement` has the values for each.
    """
    config = read_config(source)
    if isinstance(config, EncoderDecoder):
        raise InputError("gradient_by_placement needs a config with one stack; pass a decoder or an encoder")
    if not depths or not placements or num_seeds < 1 or num_texts < 1:
        raise InputError(
            "depths or placements is empty, or num_seeds or num_texts is below 1; pass depths such as (6, 12, 24),"
            " placements such as ('pre', 'post'), num_seeds ≥ 1 and num_texts ≥ 1"
        )
    (stack_name, stack), layers = next(iter(config.stacks.items())), max(depths)
    values = torch.full((len(placements), layers, len(depths)), float("nan"))
    for row, placement in enumerate(placements):
        for column, depth in enumerate(depths):
            deep = config.replace(**{stack_name: set_placement(stack.replace(layers=depth), placement)})
            ratios = [
                relative_gradient_norms(build(deep, seed=seed), seq_len, seed, num_texts=num_texts, residual=residual)
                for seed in range(num_seeds)
            ]
            values[row, :depth, column] = torch.stack(ratios).log().mean(0).exp()  # geometric mean of ratios
    labels = (tuple(placements), tuple(map(str, range(layers))), tuple(f"{depth} blocks" for depth in depths))
    title = "gradient norm at initialization, by norm placement"
    return LabeledTensor(title, values, ("placement", "layer", "depth"), labels, "relative to the last block")


def relative_gradient_norms(
    model: Transformer, seq_len: int, seed: int, *, num_texts: int = 2, residual: bool = True
) -> Tensor:
    """Return the gradient norm after each block divided by the norm after the last block.

    It is the geometric mean over `num_texts` texts of random tokens, which depend on `seed`. The targets are the next
    tokens of a decoder. Those of an encoder are other random tokens, as in masked language modeling: the gradient for
    the input token itself is nearly parallel to its embedding, a direction that the Jacobian of a norm removes.
    """
    rng = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(model.config.vocab_size, (2, num_texts, seq_len), generator=rng)
    (stack,) = (getattr(model, name) for name in model.config.stacks)
    names = [f"blocks.{layer}.resid_post" for layer in range(len(stack.blocks))]

    def compute_loss() -> Tensor:
        logits = model(tokens)
        if stack.causal:
            loss = F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
        else:
            loss = F.cross_entropy(logits.mT, targets, reduction="none")
        return loss.mean(1).sum()  # texts are independent

    with nullcontext() if residual else edit(model, {"blocks.*": "no_residual"}):
        _, *gradients = _resid_gradients(model, "embed", names, compute_loss)
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients])  # (layers, texts)
    return (norms / norms[-1]).log().mean(1).exp()
