"""The backward pass of a Transformer by hand: the gradient of every parameter, in plain torch without autograd.

Each function has the gradient of the loss with respect to an output as its first argument, and the input of the forward
pass as its second. It recomputes the activations that it needs from that input, as full activation checkpointing does.
Functions of a module return the gradient of the input, and the gradients of the module's parameters by name.

`model_backward` covers decoder-only and encoder-only models with an LM head: MHA, GQA and MQA; RoPE, ALiBi, learned and
sinusoidal positions; MLP and gated FFNs with any activation; LayerNorm and RMSNorm in any placement; tied and untied
heads. Modules outside this list raise InputError.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.model.activations import ACTIVATIONS
from cutaway.model.attention import LayerContext, MultiHead
from cutaway.model.block import Block, Branch, ParallelBlock
from cutaway.model.embedding import Embedding
from cutaway.model.ffn import MLP, ClampedSwiGLUMLP, GatedMLP
from cutaway.model.head import LMHead
from cutaway.model.kernels import DenseMask, SdpaMask
from cutaway.model.masks import TokenPositions, number_tokens
from cutaway.model.norms import LayerNorm, RMSNorm
from cutaway.model.positions import Disentangled, LearnedPosition, RelativeBias
from cutaway.model.rope import Rotation
from cutaway.model.stack import Stack
from cutaway.model.transformer import DecoderOnly, EncoderOnly, Transformer

Gradients = dict[str, Tensor]
"""Name of a parameter → gradient of the loss with respect to it."""

# ---------------------------------------------------------------------------------------- operations on tensors


@torch.no_grad()
def softmax_backward(grad: Float[Tensor, "*rows n"], probabilities: Float[Tensor, "*rows n"]) -> Tensor:
    """Gradient of the scores, given the softmax of the scores: (diag(p) − p·pᵀ)·grad for each row p."""
    return probabilities * (grad - (grad * probabilities).sum(-1, keepdim=True))


@torch.no_grad()
def linear_backward(
    grad: Float[Tensor, "*tokens d_out"], x: Float[Tensor, "*tokens d_in"], weight: Float[Tensor, "d_out d_in"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias of y = x·Wᵀ + b. Those of weight and bias are sums over all tokens."""
    grad_rows, x_rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    return grad @ weight, grad_rows.T @ x_rows, grad_rows.sum(0)


@torch.no_grad()
def rmsnorm_backward(
    grad: Float[Tensor, "*tokens d"], x: Float[Tensor, "*tokens d"], gain: Float[Tensor, " d"], eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the gain γ of RMSNorm. That of γ is the sum of grad · x̂ over all tokens, x̂ = x / rms(x)."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x_hat, grad_hat = x * scale, grad * gain
    grad_x = scale * (grad_hat - x_hat * (grad_hat * x_hat).mean(-1, keepdim=True))
    return grad_x, _sum_tokens(grad * x_hat)


@torch.no_grad()
def layernorm_backward(
    grad: Float[Tensor, "*tokens d"], x: Float[Tensor, "*tokens d"], gain: Float[Tensor, " d"], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the gain γ and of the bias β of LayerNorm. Those of γ and β are sums over all tokens."""
    centered = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    x_hat, grad_hat = centered * scale, grad * gain
    mean, projection = grad_hat.mean(-1, keepdim=True), (grad_hat * x_hat).mean(-1, keepdim=True)
    return scale * (grad_hat - mean - x_hat * projection), _sum_tokens(grad * x_hat), _sum_tokens(grad)


@torch.no_grad()
def embedding_backward(
    grad: Float[Tensor, "*tokens d"], tokens: Int[Tensor, "*tokens"], vocab_size: int
) -> Float[Tensor, "V d"]:
    """Gradient of an embedding table: row i is the sum of the gradients at the positions of token i (scatter-add)."""
    table = grad.new_zeros(vocab_size, grad.shape[-1])
    return table.index_add_(0, tokens.flatten(), grad.reshape(-1, grad.shape[-1]))


@torch.no_grad()
def cross_entropy_backward(logits: Float[Tensor, "*tokens V"], targets: Int[Tensor, "*tokens"]) -> Tensor:
    """Gradient of the logits for the mean cross-entropy of N targets: (p − y) / N, with y the one-hot target."""
    return (logits.softmax(-1) - F.one_hot(targets, logits.shape[-1])) / targets.numel()


@torch.no_grad()
def rotation_backward(grad: Float[Tensor, "B T H D"], rotate: Rotation) -> Float[Tensor, "B T H D"]:
    """Gradient of queries or keys before RoPE: the transposed rotation, which has the negative angle."""
    return Rotation(rotate.cos, -rotate.sin, rotate.interleaved)(grad)


@torch.no_grad()
def scaled_dot_product_attention_backward(
    grad: Float[Tensor, "B T H D"],
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B S G D"],
    v: Float[Tensor, "B S G D"],
    pattern: Float[Tensor, "B H T S"],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of z = pattern·v, pattern = softmax(q·kᵀ·scale). With GQA, k and v have G < H heads.

    A key or value head is used by all H / G query heads of its group, so its gradient is the sum over these heads.
    """
    group_size = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group_size, 2) for x in (k, v))  # (B, S, H, D)
    grad_pattern = torch.einsum("bthd,bshd->bhts", grad, v)
    grad_scores = softmax_backward(grad_pattern, pattern) * scale
    grad_q = torch.einsum("bhts,bshd->bthd", grad_scores, k)
    grad_k = torch.einsum("bhts,bthd->bshd", grad_scores, q)
    grad_v = torch.einsum("bhts,bthd->bshd", pattern, grad)
    # (B, S, H, D) → (B, S, G, H / G, D) → (B, S, G, D)
    grad_k, grad_v = (x.view(*x.shape[:2], -1, group_size, x.shape[-1]).sum(3) for x in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


def _sum_tokens(x: Float[Tensor, "*tokens d"]) -> Float[Tensor, " d"]:
    return x.reshape(-1, x.shape[-1]).sum(0)


# ---------------------------------------------------------------------------------------- slopes of activations


def _gelu_slope(x: Tensor) -> Tensor:
    """Φ(x) + x·φ(x)."""
    normal_cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return normal_cdf + x * torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    inner_slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x.square())
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh.square()) * inner_slope


def _swish_slope(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Slope of x·sigmoid(alpha·x): SiLU with alpha = 1."""
    sigmoid = torch.sigmoid(alpha * x)
    return sigmoid * (1 + alpha * x * (1 - sigmoid))


def _mish_slope(x: Tensor) -> Tensor:
    tanh = torch.tanh(F.softplus(x))
    return tanh + x * torch.sigmoid(x) * (1 - tanh.square())


def _laplace_slope(x: Tensor) -> Tensor:
    """Density of the normal distribution with mean 0.707107 and standard deviation 0.282095."""
    return torch.exp(-((x - 0.707107) / 0.282095).square() / 2) / (0.282095 * math.sqrt(2 * math.pi))


def _sqrt_softplus_slope(x: Tensor) -> Tensor:
    softplus_slope = torch.sigmoid(x).where(x <= 20, 1.0)  # torch's softplus is x above 20
    return softplus_slope / (2 * F.softplus(x).sqrt())


ACTIVATION_SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: (x > 0).to(x.dtype),
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
    "gelu_quick": lambda x: _swish_slope(x, 1.702),
    "gelu_clipped": lambda x: _gelu_slope(x) * (F.gelu(x) <= 10),
    "silu": _swish_slope,
    "relu2": lambda x: 2 * F.relu(x),
    "relu6": lambda x: ((x > 0) & (x < 6)).to(x.dtype),
    "leaky_relu": lambda x: torch.ones_like(x).where(x > 0, 0.01),
    "hardswish": lambda x: ((x + 1.5) / 3).where(x.abs() < 3, (x > 0).to(x.dtype)),
    "mish": _mish_slope,
    "laplace": _laplace_slope,
    "sqrt_softplus": _sqrt_softplus_slope,
    "sigmoid": lambda x: torch.sigmoid(x) * (1 - torch.sigmoid(x)),
    "tanh": lambda x: 1 - torch.tanh(x).square(),
    "identity": torch.ones_like,
}
"""Name of an activation → its derivative. At a kink, such as 0 of ReLU, the value is that of PyTorch."""


def activation_slope(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Derivative at x of an activation function of `cutaway.model.activations.ACTIVATIONS`."""
    name = next(name for name, function in ACTIVATIONS.items() if function is activation)
    return ACTIVATION_SLOPES[name](x)


# ---------------------------------------------------------------------------------------- modules


@torch.no_grad()
def attention_backward(
    grad: Float[Tensor, "B T d"], x: Float[Tensor, "B T d"], attention: MultiHead, context: LayerContext
) -> tuple[Tensor, Gradients]:
    """Gradients of self-attention: of its input x, and of W_q, W_k, W_v, W_o and their biases."""
    _check_supported(attention)
    q, k, v = attention.project_qkv(x)  # (B, T, H, D), (B, T, G, D)
    rotate = context.rotate
    if rotate is not None:
        q, k = rotate(q), rotate(k)
    pattern = attention_pattern(q, k, attention.kernel.scale, context.prepared_mask)
    z = torch.einsum("bhts,bshd->bthd", pattern, v.repeat_interleave(q.shape[2] // k.shape[2], 2))
    grad_z, grads = _layer_backward("o", grad, z.flatten(-2), attention.o)
    grad_q, grad_k, grad_v = scaled_dot_product_attention_backward(
        grad_z.view_as(z), q, k, v, pattern, attention.kernel.scale
    )
    if rotate is not None:
        grad_q, grad_k = rotation_backward(grad_q, rotate), rotation_backward(grad_k, rotate)
    grad_x = torch.zeros_like(x)
    for name, grad_head in (("q", grad_q), ("k", grad_k), ("v", grad_v)):
        path, layer_grads = _layer_backward(name, grad_head.flatten(-2), x, attention.get_submodule(name))
        grad_x, grads = grad_x + path, grads | layer_grads
    return grad_x, grads


@torch.no_grad()
def attention_pattern(
    q: Float[Tensor, "B T H D"], k: Float[Tensor, "B S G D"], scale: float, mask: DenseMask | SdpaMask
) -> Float[Tensor, "B H T S"]:
    """softmax(q·kᵀ·scale + mask), for the prepared mask of the kernel `explicit` or `sdpa`."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    if isinstance(mask, DenseMask):
        visible, bias = mask.visible, mask.bias
    elif mask.mask is None:
        full = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        visible, bias = full.tril() if mask.is_causal else full, None
    else:
        is_bool = mask.mask.dtype == torch.bool
        visible, bias = (mask.mask, None) if is_bool else (mask.mask > -math.inf, mask.mask)
    scores = scores if bias is None else scores + bias
    pattern = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return pattern if mask.fully_masked is None else pattern.masked_fill(mask.fully_masked, 0.0)


@torch.no_grad()
def ffn_backward(grad: Float[Tensor, "*tokens d"], x: Float[Tensor, "*tokens d"], ffn: MLP) -> tuple[Tensor, Gradients]:
    """Gradients of an MLP down(act(up(x))): of its input x, and of W_up (W_1), W_down (W_2) and their biases."""
    pre_activation = ffn.up(x)
    grad_hidden, down = _layer_backward("down", grad, ffn.act(pre_activation), ffn.down)
    grad_x, up = _layer_backward("up", grad_hidden * activation_slope(ffn.act, pre_activation), x, ffn.up)
    return grad_x, up | down


@torch.no_grad()
def gated_ffn_backward(
    grad: Float[Tensor, "*tokens d"], x: Float[Tensor, "*tokens d"], ffn: GatedMLP
) -> tuple[Tensor, Gradients]:
    """Gradients of a gated FFN down(act(gate(x)) · up(x)): of its input x, and of W_gate, W_up, W_down and biases."""
    _check_supported(ffn)
    gate, up = ffn.project_gate_up(x)
    grad_hidden, down_grads = _layer_backward("down", grad, ffn.act(gate) * up, ffn.down)
    grad_gate, grad_up = grad_hidden * up * activation_slope(ffn.act, gate), grad_hidden * ffn.act(gate)
    gate_path, gate_grads = _layer_backward("gate", grad_gate, x, ffn.gate)
    up_path, up_grads = _layer_backward("up", grad_up, x, ffn.up)
    return gate_path + up_path, gate_grads | up_grads | down_grads


@torch.no_grad()
def norm_backward(
    grad: Float[Tensor, "*tokens d"], x: Float[Tensor, "*tokens d"], norm: nn.Module
) -> tuple[Tensor, Gradients]:
    """Gradients of a LayerNorm, an RMSNorm or no norm (nn.Identity): of its input x, and of γ and β."""
    if isinstance(norm, RMSNorm):
        gain = 1 + norm.weight if norm.unit_offset else norm.weight
        grad_x, grad_gain = rmsnorm_backward(grad, x, gain, norm.eps)
        return grad_x, {"weight": grad_gain}
    if isinstance(norm, LayerNorm):
        weight = x.new_ones(x.shape[-1]) if norm.weight is None else norm.weight
        grad_x, grad_gain, grad_bias = layernorm_backward(grad, x, weight, norm.eps)
        candidates = {"weight": (norm.weight, grad_gain), "bias": (norm.bias, grad_bias)}
        return grad_x, {name: grad for name, (parameter, grad) in candidates.items() if parameter is not None}
    return grad, {}


@torch.no_grad()
def branch_backward(
    grad: Float[Tensor, "B T d"], x: Float[Tensor, "B T d"], branch: Branch, *args: LayerContext
) -> tuple[Tensor, Gradients]:
    """Gradients of a sublayer with its norms, without the identity path: of its input x, and of its parameters."""
    f, h = branch.f, branch.norm_in(x)
    grad_f, norm_out = norm_backward(grad * branch.scale, f(h, *args), branch.norm_out)
    if isinstance(f, MultiHead):
        grad_h, sublayer = attention_backward(grad_f, h, f, *args)
    elif isinstance(f, MLP):
        grad_h, sublayer = ffn_backward(grad_f, h, f)
    elif isinstance(f, GatedMLP):
        grad_h, sublayer = gated_ffn_backward(grad_f, h, f)
    else:
        raise _not_supported(type(f).__name__)
    path, norm_in = norm_backward(grad_h, x, branch.norm_in)
    return path, _add_prefix("norm_in", norm_in) | _add_prefix("f", sublayer) | _add_prefix("norm_out", norm_out)


@torch.no_grad()
def block_backward(
    grad: Float[Tensor, "B T d"], x: Float[Tensor, "B T d"], block: Block | ParallelBlock, context: LayerContext
) -> tuple[Tensor, Gradients]:
    """Gradients of a block: of the residual stream x at its input, and of all its parameters.

    Each addition to the residual stream adds a path: the gradient of x is that of the sum plus that of the sublayer.
    """
    _check_supported(block)
    if isinstance(block, ParallelBlock):
        return _parallel_block_backward(grad, x, block, context)
    attn_sum = block.skip_connection(x, block.attn) + block.attn(x, context)
    resid_mid = block.norm_after_attn(attn_sum)
    ffn_sum = block.skip_connection(resid_mid, block.ffn) + block.ffn(resid_mid)

    grad, norm_after_ffn = norm_backward(grad, ffn_sum, block.norm_after_ffn)
    path, ffn = branch_backward(grad, resid_mid, block.ffn)
    grad = grad * block.skip_scale + path
    grad, norm_after_attn = norm_backward(grad, attn_sum, block.norm_after_attn)
    path, attn = branch_backward(grad, x, block.attn, context)
    grad = grad * block.skip_scale + path

    grads = _add_prefix("attn", attn) | _add_prefix("norm_after_attn", norm_after_attn)
    return grad, grads | _add_prefix("ffn", ffn) | _add_prefix("norm_after_ffn", norm_after_ffn)


def _parallel_block_backward(
    grad: Tensor, x: Tensor, block: ParallelBlock, context: LayerContext
) -> tuple[Tensor, Gradients]:
    h = block.norm(x)
    attn_path, attn = branch_backward(grad, h, block.attn, context)
    ffn_path, ffn = branch_backward(grad, h, block.ffn)
    path, norm = norm_backward(attn_path + ffn_path, x, block.norm)
    return grad + path, _add_prefix("norm", norm) | _add_prefix("attn", attn) | _add_prefix("ffn", ffn)


# ---------------------------------------------------------------------------------------- whole model


@torch.no_grad()
def model_backward(model: Transformer, tokens: Int[Tensor, "B T"], targets: Int[Tensor, "B T"]) -> Gradients:
    """Gradients of the mean cross-entropy of `targets`, of all parameters of a decoder-only or encoder-only model.

    A parameter that is used several times has the sum of its gradients: a tied embedding, or blocks that share weights.
    """
    if not isinstance(model, DecoderOnly | EncoderOnly) or not isinstance(model.head, LMHead):
        raise _not_supported("a model that is not decoder-only or encoder-only with an LM head")
    _check_supported(model)
    [(stack_name, stack)] = model.stacks.items()
    contexts = build_layer_contexts(stack, tokens)
    resid = [stack.embed(tokens, _number_tokens(tokens))]  # the input of each block, then the output of the last
    for block, context in zip(stack.blocks, contexts, strict=True):
        resid.append(block(resid[-1], context))
    normalized = stack.final_norm(resid[-1])
    totals: dict[Tensor, Tensor] = {}

    def accumulate(module_name: str, grads: Gradients) -> None:
        for name, grad in grads.items():
            parameter = model.get_parameter(f"{module_name}.{name}")
            totals[parameter] = totals.get(parameter, 0) + grad

    grad = cross_entropy_backward(model.head(normalized), targets)
    grad, grads = head_backward(grad, normalized, model.head)
    accumulate("head", grads)
    grad, grads = norm_backward(grad, resid[-1], stack.final_norm)
    accumulate(f"{stack_name}.final_norm", grads)
    for layer in reversed(range(len(stack.blocks))):
        block = stack.blocks[layer]
        grad, grads = block_backward(grad, resid[layer], block, contexts[layer])  # type: ignore[arg-type]
        accumulate(f"{stack_name}.blocks.{layer}", grads)
    accumulate(f"{stack_name}.embed", input_embedding_backward(grad, tokens, stack.embed))
    return {name: totals[parameter] for name, parameter in model.named_parameters() if parameter.requires_grad}


def build_layer_contexts(stack: Stack, tokens: Int[Tensor, "B T"]) -> list[LayerContext]:
    """Build each block's context (mask and RoPE angles) for tokens without padding."""
    return stack.build_layer_contexts(_number_tokens(tokens), stack.embed.token.weight.dtype, None, {})


@torch.no_grad()
def head_backward(
    grad: Float[Tensor, "B T V"], x: Float[Tensor, "B T d"], head: LMHead
) -> tuple[Float[Tensor, "B T d"], Gradients]:
    """Gradients of the LM head: of its input x, of its matrix (the token embedding if tied) and of its bias."""
    grad_x, grad_matrix, grad_bias = linear_backward(grad * head.scale, x, head.matrix.get_parameter("weight"))
    return grad_x, {"matrix.weight": grad_matrix} | ({"bias": grad_bias} if "bias" in head._parameters else {})


@torch.no_grad()
def input_embedding_backward(
    grad: Float[Tensor, "B T d"], tokens: Int[Tensor, "B T"], embedding: Embedding
) -> Gradients:
    """Gradients of the tables of token embeddings and learned position embeddings."""
    grads = {"token.weight": embedding_backward(grad * embedding.scale, tokens, embedding.token.num_embeddings)}
    if isinstance(position := embedding.position, LearnedPosition):
        rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens) + position.offset
        grads["position.table.weight"] = embedding_backward(grad, rows, position.table.num_embeddings)
    return grads


# ---------------------------------------------------------------------------------------- helpers


def _number_tokens(tokens: Int[Tensor, "B T"]) -> TokenPositions:
    return number_tokens(tokens.shape[0], tokens.shape[1], tokens.device)


def _layer_backward(name: str, grad: Tensor, x: Tensor, layer: nn.Module) -> tuple[Tensor, Gradients]:
    """Gradients of a linear layer: of its input x, and of `name.weight` and `name.bias` if it has a bias."""
    grad_x, grad_weight, grad_bias = linear_backward(grad, x, layer.get_parameter("weight"))
    grads = {"weight": grad_weight} | ({"bias": grad_bias} if layer.bias is not None else {})
    return grad_x, _add_prefix(name, grads)


def _add_prefix(prefix: str, grads: Gradients) -> Gradients:
    return {f"{prefix}.{name}": grad for name, grad in grads.items()}


def _check_supported(root: nn.Module) -> None:
    """Raise InputError if a module has a part whose backward pass is not written here, or if dropout is active."""
    if root.training:
        raise InputError("the module is in training mode, in which dropout is active; call eval() first")
    for module in root.modules():
        unsupported = {
            "qk_norm": isinstance(module, MultiHead) and not isinstance(module.q_norm, nn.Identity),
            "clip_qkv": isinstance(module, MultiHead) and module.clip_qkv is not None,
            "softcap on scores": isinstance(module, MultiHead) and module.kernel.softcap is not None,
            "an attention sink": isinstance(module, MultiHead) and module.sink is not None,
            "the kernel 'flex'": isinstance(module, MultiHead) and module.kernel.name == "flex",
            "a skip connection after the norm (norm_skip)": isinstance(module, Block) and module.norm_skip,
            "cross-attention": isinstance(module, Block) and module.cross is not None,
            "the clamped SwiGLU": isinstance(module, ClampedSwiGLUMLP),
            "a relative position bias": isinstance(module, RelativeBias),
            "disentangled attention": isinstance(module, Disentangled),
            "a pooler": isinstance(module, EncoderOnly) and module.pooler is not None,
            "a head with a transform": isinstance(module, LMHead) and module.transform is not None,
            "softcap on logits": isinstance(module, LMHead) and module.softcap is not None,
            "token types": isinstance(module, Embedding) and module.token_types is not None,
            "a factorized embedding": isinstance(module, Embedding) and module.project is not None,
            "a norm on embeddings": isinstance(module, Embedding) and not isinstance(module.norm, nn.Identity),
        }
        for name, is_present in unsupported.items():
            if is_present:
                raise _not_supported(name)


def _not_supported(name: str) -> InputError:
    return InputError(f"the backward pass by hand does not cover {name}; use autograd: loss.backward()")
