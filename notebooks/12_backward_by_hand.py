# %% [markdown]
# # 12. The backward pass by hand
#
# This notebook derives the gradient of every parameter of a Transformer, from the loss back to the embedding, and
# compares each with autograd in fp64. It also measures what the formulas imply: which gradients a saturated softmax
# shrinks, how large the paths through the sublayers are beside the identity path, and the singular values of a block's
# Jacobian, trained and untrained, pre-norm and post-norm.
#
# The short derivations are written out here. The long ones are functions of `cutaway.learn.backward`, which use no
# autograd and are tested for all activations, norms, placements and numbers of heads.
#
# Prerequisites: attention ([notebook 2](02_attention.py)), FFN and norms ([notebook 4](04_ffn_norms_residuals.py)),
# Jacobians of norms ([notebook 5](05_gradients.py)).

# %%
import math
import re

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.autograd.functional import jacobian

import cutaway as ct
from cutaway.evaluate.confidence_interval import mean_confidence_interval
from cutaway.learn import backward, claim

BLUE, ORANGE, GREEN, RED, GRAY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
generator = torch.Generator().manual_seed(0)
checkpoint = ct.load("tiny-english", dtype=torch.float64)
model, tokenizer = checkpoint.model, checkpoint.tokenizer
text = "Lily had a red ball. She gave the ball to Ben, and Ben gave it back to Lily."
tokens = torch.tensor([tokenizer.encode(text)])
inputs, targets = tokens[:, :-1], tokens[:, 1:]  # (1, T)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def largest_difference(one, other):
    return float((one - other).abs().max())


# %% [markdown]
# ## Notation
#
# For an operation $y = f(x)$, let $g = \partial L / \partial y$, a tensor of the shape of $y$. The backward pass of $f$
# computes $\partial L / \partial x = J^\top g$ with the Jacobian $J_{ij} = \partial y_i / \partial x_j$, and the
# gradients of the parameters of $f$, from $g$ and the input $x$. It never forms $J$.
#
# For a linear layer $y = x W^\top + b$ with tokens as rows:
#
# $$\frac{\partial L}{\partial x} = g W, \qquad \frac{\partial L}{\partial W} = g^\top x = \sum_t g_t x_t^\top, \qquad
# \frac{\partial L}{\partial b} = \sum_t g_t .$$
#
# All tokens use the same $W$ and $b$, so the gradients of both are sums over all positions and all sequences.

# %% [markdown]
# ## Cross-entropy
#
# $L = -\frac1N \sum_t \log p_t[y_t]$ with $p = \mathrm{softmax}(z)$ has the gradient
#
# $$\frac{\partial L}{\partial z_t} = \frac{p_t - y_t}{N}, \qquad y_t \text{ one-hot.}$$
#
# With $q = 1 - p_t[y_t]$, the probability of all wrong tokens, the entry of the target is $-q$ and the other entries
# are positive with sum $q$. So $q \le \|p_t - y_t\| \le \sqrt2\, q$: the norm is the upper bound where all wrong
# probability is on one token. The largest gradients, near $\sqrt2 / N$, come from confident mistakes.

# %%
logits = model(inputs).detach().requires_grad_()
F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
p = logits.detach().softmax(-1)
by_hand = (p - F.one_hot(targets, p.shape[-1])) / targets.numel()
difference = largest_difference(by_hand, logits.grad)
print(claim("cross-entropy: largest difference of (p − y)/N from autograd", difference, below=1e-12, id="C187"))
wrong = 1 - p.gather(-1, targets[..., None])[..., 0]  # q, (1, T)
ratio = by_hand.norm(dim=-1) * targets.numel() / wrong
print(claim("smallest ‖p − y‖ / q", ratio.min(), above=1, id="C187"))
claim("largest ‖p − y‖ / q", ratio.max(), below=math.sqrt(2), id="C187")

# %% [markdown]
# ## Softmax
#
# For one row of scores $s$ with $p = \mathrm{softmax}(s)$:
#
# $$\frac{\partial p_i}{\partial s_j} = p_i(\delta_{ij} - p_j), \qquad J = \mathrm{diag}(p) - p p^\top, \qquad
# J^\top g = p \odot (g - p^\top g).$$
#
# $J$ is symmetric and $J \mathbf 1 = 0$: adding a constant to all scores changes nothing. As a row saturates,
# $p_i(\delta_{ij} - p_j) \to 0$. For two scores with the difference $\Delta$, $\|J\|_F = 2 p_1 p_2 \to 2 e^{-\Delta}$.

# %%
scores, g = randn(2, 6)
p = scores.softmax(-1)
J = torch.diag(p) - torch.outer(p, p)
print(
    claim(
        "softmax: diag(p) − ppᵀ",
        largest_difference(J, jacobian(lambda s: s.softmax(-1), scores)),
        below=1e-12,
        id="C159",
    )
)
print(claim("softmax: p ⊙ (g − pᵀg)", largest_difference(p * (g - p @ g), J @ g), below=1e-12, id="C159"))
saturated = torch.tensor([[10, 0], [20, 0]], dtype=torch.float64).softmax(-1)
norms = [float((torch.diag(p) - torch.outer(p, p)).norm()) for p in saturated]
claim(
    "two scores: ln‖J‖ falls by 10 as Δ grows by 10", math.log(norms[0] / norms[1]), predicted=10, rtol=1e-4, id="C159"
)

# %% [markdown]
# ## Norms: γ and β
#
# For $y = \gamma \odot \hat x + \beta$ with $\hat x = (x - \bar x)/\sigma$, or $\hat x = x / r$ and no $\beta$ for
# RMSNorm:
#
# $$\frac{\partial L}{\partial \gamma} = \sum_{b,t} g_{bt} \odot \hat x_{bt}, \qquad
# \frac{\partial L}{\partial \beta} = \sum_{b,t} g_{bt},$$
#
# and with $\hat g = \gamma \odot g$ and means over the $d$ entries of a token (the Jacobians of [notebook
# 5](05_gradients.py)):
#
# $$\text{LayerNorm: } \frac{\partial L}{\partial x} = \frac1\sigma\big(\hat g - \overline{\hat g} -
# \hat x\,\overline{\hat g \hat x}\big), \qquad
# \text{RMSNorm: } \frac{\partial L}{\partial x} = \frac1r\big(\hat g - \hat x\,\overline{\hat g \hat x}\big).$$

# %%
x, g = randn(2, 3, 5, 8)  # 3 sequences of 5 tokens
gamma, beta = randn(2, 8)
gamma.requires_grad_(), beta.requires_grad_()
F.layer_norm(x, (8,), gamma, beta).backward(g)
x_hat = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
print(
    claim(
        "∂L/∂γ = Σ g·x̂ over 3 × 5 tokens",
        largest_difference((g * x_hat).sum((0, 1)), gamma.grad),
        below=1e-12,
        id="C163",
    )
)
print(claim("∂L/∂β = Σ g", largest_difference(g.sum((0, 1)), beta.grad), below=1e-12))
for name, forward in (("layernorm", F.layer_norm), ("rmsnorm", F.rms_norm)):
    x_grad = torch.autograd.grad(forward(x.requires_grad_(), (8,), gamma, eps=1e-5), x, g)[0]
    by_hand = getattr(backward, f"{name}_backward")(g, x, gamma, 1e-5)[0]
    print(claim(f"{name}: ∂L/∂x", largest_difference(by_hand, x_grad), below=1e-12))

# %% [markdown]
# ## FFN
#
# For one token, $y = W_2\,\sigma(u) + b_2$ with $u = W_1 x + b_1$:
#
# $$J = W_2\,\mathrm{diag}(\sigma'(u))\,W_1 .$$
#
# With tokens as rows, $h = \sigma(u)$ and $g_u = (g W_2) \odot \sigma'(u)$: the gradient passes $W_2$ first, then the
# slopes.
#
# $$\frac{\partial L}{\partial W_2} = g^\top h, \quad \frac{\partial L}{\partial b_2} = \sum_t g_t, \quad
# \frac{\partial L}{\partial W_1} = g_u^\top x, \quad \frac{\partial L}{\partial b_1} = \sum_t g_{u,t}, \quad
# \frac{\partial L}{\partial x} = g_u W_1 .$$
#
# A gated FFN $y = W_2(\sigma(W_g x) \odot W_1 x)$ has two paths, one per factor of the product, which add:
#
# $$J = W_2\big[\mathrm{diag}(\sigma'(W_g x) \odot W_1 x)\,W_g + \mathrm{diag}(\sigma(W_g x))\,W_1\big].$$


# %%
def random_mlp(activation, d_model=32, seed=0):
    ffn = {"kind": "mlp", "activation": activation}
    stack = {"layers": 1, "block": {"attention": {"heads": 4}, "ffn": ffn}}
    config = {"form": "decoder", "vocab_size": 8, "d_model": d_model, "init": {"kind": "xavier"}, "decoder": stack}
    return ct.build(config, dtype=torch.float64, seed=seed).decoder.blocks[0].ffn.f.requires_grad_(False)


mlp, x = random_mlp("gelu"), randn(32)
slopes = backward.ACTIVATION_SLOPES["gelu"](mlp.up(x))
J = mlp.down.weight @ torch.diag(slopes) @ mlp.up.weight
print(claim("MLP: W₂·diag(σ′)·W₁", largest_difference(J, jacobian(mlp, x)), below=1e-12, id="C156"))
swiglu, x = model.decoder.blocks[3].ffn.f, randn(256)
with torch.no_grad():
    gate, up = swiglu.gate(x), swiglu.up(x)
    gate_path = (backward.ACTIVATION_SLOPES["silu"](gate) * up)[:, None] * swiglu.gate.weight  # (hidden, d)
    up_path = F.silu(gate)[:, None] * swiglu.up.weight
    J = swiglu.down.weight @ (gate_path + up_path)
claim("gated FFN of tiny-english: two paths", largest_difference(J, jacobian(swiglu, x)), below=1e-10)

# %% [markdown]
# ### Slopes of activations
#
# ReLU has slopes 0 and 1. GELU is $x\,\Phi(x)$, its slope is $\Phi(x) + x\varphi(x)$, and the derivative of the slope,
# $\varphi(x)(2 - x^2)$, is 0 at $\pm\sqrt2$: the slope is between $-0.129$ and $1.129$. SiLU is $x\,\mathrm{sig}(x)$,
# and its slope has its extrema where $x \tanh(x/2) = 2$: it is between $-0.100$ and $1.100$. Slopes above 1 and below 0
# are possible because both functions are not monotonic: they have a minimum below 0.

# %%
grid = torch.linspace(-6, 6, 240_001, dtype=torch.float64)
curves = {name: backward.ACTIVATION_SLOPES[name](grid) for name in ("relu", "gelu", "silu")}
predicted = {"relu": 1.0, "gelu": 0.5 * (1 + math.erf(1)) + math.sqrt(2) * math.exp(-1) / math.sqrt(2 * math.pi)}
root = grid[((grid * (grid / 2).tanh() - 2).abs() + (grid < 0)).argmin()]  # the positive solution, 2.3994
predicted["silu"] = float(backward.ACTIVATION_SLOPES["silu"](root))
for name, slope in curves.items():
    print(claim(f"{name}: largest slope", slope.max(), predicted=predicted[name], rtol=1e-6, id="C157"))
    print(claim(f"{name}: smallest slope", slope.min(), predicted=1 - predicted[name], rtol=1e-4, id="C157"))
print(claim("GELU: position of the largest slope, √2", grid[curves["gelu"].argmax()], predicted=2**0.5, rtol=1e-4))

figure, axes = plt.subplots(figsize=(6, 3.2))
axes.plot([-6, 0, math.nan, 0, 6], [0, 0, math.nan, 1, 1], color=GRAY, label="ReLU")
for name, label, color, side in (("gelu", "GELU", BLUE, 1), ("silu", "SiLU", ORANGE, -1)):
    slope = curves[name]
    axes.plot(grid[::800], slope[::800], color=color, label=label)
    for index, sign in ((int(slope.argmin()), -1), (int(slope.argmax()), 1)):
        axes.plot(grid[index], slope[index], "o", color=color, markersize=4)
        place = {"xytext": (-4 * side * sign, 8 * sign), "textcoords": "offset points", "va": "center"}
        alignment = "right" if side * sign > 0 else "left"
        axes.annotate(
            f"{slope[index]:.3f}", (grid[index], slope[index]), **place, ha=alignment, fontsize=8, color=color
        )
axes.axhline(0, color="black", lw=0.5)
axes.set(xlabel="x", ylabel="slope", ylim=(-0.28, 1.28), title="Slopes of ReLU, GELU and SiLU")
axes.legend(frameon=False, fontsize=8)
figure.tight_layout()

# %% [markdown]
# A ReLU unit with a negative input is dead for this token: its slope is 0, and it contributes nothing to $J$. $J$ is
# the sum $\sum_i w_{2,i} w_{1,i}^\top$ over the active units $i$. For random weights the terms are nearly orthogonal,
# so $\|J\|_F$ is proportional to the square root of the number of active units. With 10 % of them left it should fall
# to $\sqrt{0.1} = 0.316$, and to 0 with none, where the gradient at the input of a block is the identity path alone.


# %%
def relative_jacobian_norm(seed, share_left=0.1):
    """‖J‖_F with a random share of the active units left, relative to ‖J‖_F with all of them."""
    generator = torch.Generator().manual_seed(seed)
    mlp, x = random_mlp("relu", d_model=128, seed=seed), torch.randn(128, generator=generator).double()
    active = (mlp.up(x) > 0).double()
    kept = active * (torch.rand(len(active), generator=generator) < share_left)
    norms = [(mlp.down.weight @ torch.diag(units) @ mlp.up.weight).norm() for units in (kept, active)]
    return float(norms[0] / norms[1])


interval = mean_confidence_interval([relative_jacobian_norm(seed) for seed in range(10)])
print(f"‖J‖ with 10 % of the active units: {interval.mean:.3f} ± {interval.half_width:.3f} (10 seeds)")
claim("‖J_FFN‖ with 10 % of the active ReLU units", interval.mean, predicted=math.sqrt(0.1), rtol=0.1, id="C158")

# %% [markdown]
# ## Attention
#
# For one head, with $S = q k^\top / \sqrt{d_\text{head}}$, $P = \mathrm{softmax}(S + \text{mask})$ and $z = P v$:
#
# $$\frac{\partial L}{\partial v} = P^\top g_z, \qquad \frac{\partial L}{\partial P} = g_z v^\top, \qquad
# \frac{\partial L}{\partial S} = P \odot \Big(\frac{\partial L}{\partial P} - \text{row sums of }
# \frac{\partial L}{\partial P} \odot P\Big),$$
#
# $$\frac{\partial L}{\partial q} = \frac{1}{\sqrt{d_\text{head}}} \frac{\partial L}{\partial S}\,k, \qquad
# \frac{\partial L}{\partial k} = \frac{1}{\sqrt{d_\text{head}}} \Big(\frac{\partial L}{\partial S}\Big)^{\!\top} q .$$
#
# The mask needs no case of its own: masked entries have $P = 0$, so their gradient is 0. The projections are linear
# layers: $\partial L/\partial W_Q = (\partial L/\partial q)^\top x$, the same for $W_K$ and $W_V$, $\partial L /
# \partial W_O = g^\top z$ with all heads side by side, and the gradient at $x$ is the sum of the three paths through
# $q$, $k$ and $v$.

# %%
T, D = 5, 8
q, k, v, g_z = randn(4, T, D)
mask = torch.full((T, T), -math.inf).triu(1)
P = (q @ k.T / math.sqrt(D) + mask).softmax(-1)
g_pattern = g_z @ v.T
g_scores = P * (g_pattern - (g_pattern * P).sum(-1, keepdim=True))
by_hand = g_scores @ k / math.sqrt(D), g_scores.T @ q / math.sqrt(D), P.T @ g_z
q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
z = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
expected = torch.autograd.grad(z, (q, k, v), g_z)
for name, one, other in zip("qkv", by_hand, expected, strict=True):
    print(claim(f"one head: ∂L/∂{name}", largest_difference(one, other), below=1e-12))

# %% [markdown]
# Three additions for a real attention layer:
#
# - **GQA**: a key and value head is used by all query heads of its group, so its gradient is the sum over these heads.
# - **RoPE** rotates $q$ and $k$ by orthogonal matrices $R$, so the backward pass multiplies by $R^\top = R^{-1}$, the
#   rotation by the negative angle.
# - **A bias on $k$** adds $q \cdot b_K$ to all scores of a query, and softmax ignores a constant. So $\partial L /
#   \partial b_K = 0$ without RoPE. With RoPE, $b_K$ is rotated by the position of the key, and its gradient is not 0.
#
# `attention_backward` covers all three. The block below has GQA (8 query heads, 2 key and value heads) and biases.


# %%
def build_decoder(position, *, layers=1, placement="pre", init="xavier", seed=0, d_model=64):
    """A decoder with GQA, LayerNorm, an MLP with GELU, and biases."""
    attention = {"heads": 8, "kv_heads": 2, "bias": ["q", "k", "v", "o"], "position": {"kind": position}}
    stack = {
        "layers": layers,
        "norm": {"kind": "layernorm"},
        "placement": {"kind": placement},
        "block": {"attention": attention, "ffn": {"kind": "mlp", "activation": "gelu"}},
        "embedding": {"scale": "sqrt_d_model"},
    }
    config = {"form": "decoder", "vocab_size": 50, "d_model": d_model, "init": {"kind": init}, "decoder": stack}
    return ct.build(config, dtype=torch.float64, seed=seed)


def compare(by_hand, expected, merge_blocks=False):
    """Print name, shape, largest gradient and largest difference of each parameter. Return the largest difference.

    With `merge_blocks`, equal parameters of all blocks share a line."""
    rows = {}
    for name, gradient in expected.items():
        label = re.sub(r"blocks\.\d+", "blocks.*", name) if merge_blocks else name
        row = rows.setdefault(label, [tuple(gradient.shape), 0.0, 0.0])
        row[1] = max(row[1], float(gradient.abs().max()))
        row[2] = max(row[2], largest_difference(by_hand[name], gradient))
    print(f"{'parameter':36} {'shape':12} {'max |gradient|':>14} {'difference':>11}")
    for label, (shape, size, difference) in rows.items():
        print(f"{label:36} {shape!s:12} {size:14.2e} {difference:11.1e}")
    assert by_hand.keys() == expected.keys()
    return max(difference for _, _, difference in rows.values())


def autograd_block(x, g, block, context):
    """Gradients of a block by autograd: of its input and of its parameters by name."""
    x = x.detach().requires_grad_()
    parameters = dict(block.named_parameters())
    grads = torch.autograd.grad(block(x, context), [x, *parameters.values()], g)
    return dict(zip(["input", *parameters], grads, strict=True))


gqa_tokens = torch.randint(50, (2, 6), generator=generator)
x, g = randn(2, *gqa_tokens.shape, 64)
key_bias_gradients = {}
for position in ("rope", "none"):
    gqa = build_decoder(position)
    block = gqa.decoder.blocks[0]
    [context] = backward.build_layer_contexts(gqa.decoder, gqa_tokens)
    expected = autograd_block(x, g, block.attn.f, context)
    grad_x, grads = backward.attention_backward(g, x, block.attn.f, context)
    print(f"attention, position {position}")
    difference = compare({"input": grad_x} | grads, expected)
    print(claim(f"attention with GQA, position {position}: largest difference", difference, below=1e-10))
    key_bias_gradients[position] = grads["k.bias"].norm() / grads["q.bias"].norm()
print(claim("position none: ‖∂L/∂b_K‖ / ‖∂L/∂b_Q‖", key_bias_gradients["none"], below=1e-12))
claim("RoPE: ‖∂L/∂b_K‖ / ‖∂L/∂b_Q‖", key_bias_gradients["rope"], above=0.1)

# %% [markdown]
# The sum over a group can be seen in a copy of the layer with MHA: with the rows of $W_K$ repeated for each query head,
# the output is the same, and the gradients of the copies add up to the gradient of the shared head.

# %%
attention = block.attn.f
q, k, v = attention.project_qkv(x.detach())
g_z = randn(*q.shape)
pattern = backward.attention_pattern(q, k, attention.kernel.scale, context.prepared_mask)
shared = backward.scaled_dot_product_attention_backward(g_z, q, k, v, pattern, attention.kernel.scale)
copies = backward.scaled_dot_product_attention_backward(
    g_z, q, k.repeat_interleave(4, 2), v.repeat_interleave(4, 2), pattern, attention.kernel.scale
)
sums = [copy.unflatten(2, (2, 4)).sum(3) for copy in copies[1:]]
difference = max(largest_difference(one, other) for one, other in zip(sums, shared[1:], strict=True))
claim("GQA: gradient of a shared K or V head − sum over its 4 query heads", difference, below=1e-12)

# %% [markdown]
# ## Saturated attention
#
# Multiply $W_Q$ of one block by $s$: all scores grow by $s$ and the rows of the pattern saturate. What happens to the
# gradients? A row whose two largest scores differ by $\Delta$ has $\|J\| \approx 2e^{-s\Delta}$, so a single row loses
# its gradient exponentially. But the gaps $\Delta$ of the rows are distributed, with some close to 0: only rows with
# $\Delta$ below about $1/s$ remain unsaturated, and their share is proportional to $1/s$. Predictions for large $s$:
#
# - the mean of $\|J\|_F$ over the rows is proportional to $s^{-1}$;
# - $\partial L / \partial W_Q = (\partial L/\partial q)^\top x$ is a sum over the unsaturated rows. If their terms are
#   nearly orthogonal, its norm is proportional to the square root of their number, $s^{-1/2}$;
# - $\partial L / \partial W_K$ contains in addition $q$, which is $s$ times as large: $s^{+1/2}$. It *grows*;
# - $\partial L / \partial W_V$ and the gradients of the FFN contain no softmax Jacobian: $s^0$.
#
# The texts are eight stories that are sampled from the model.

# %%
options = {"temperature": 1.0, "seed": 0, "ignore_eos": True}
stories = ct.generate(checkpoint, "Once upon a time", n=8, max_new_tokens=129, **options)
windows = torch.tensor([story.tokens for story in stories])  # (8, 129)
print(f"Once upon a time{stories[0].text[:180]} …")
factors = (1, 2, 8, 32, 128)
block = model.decoder.blocks[3]
weights = {
    "W_Q": block.attn.f.q.weight,
    "W_K": block.attn.f.k.weight,
    "W_V": block.attn.f.v.weight,
    "W_up": block.ffn.f.up.weight,
}


def gradient_norms(window):
    """Mean ‖J‖_F of the softmax rows, and the norms of the gradients of `weights`."""
    with ct.trace(model, "blocks.3.attn.pattern") as t:
        loss = F.cross_entropy(model(window[:-1][None])[0], window[1:])
        p = t["blocks.3.attn.pattern"][0, :, 1:].detach()  # (H, T − 1, T); the first row has one key
    squares, cubes = p.square().sum(-1), (p**3).sum(-1)
    softmax_norm = (squares - 2 * cubes + squares.square()).clamp(min=0).sqrt().mean()  # ‖diag(p) − ppᵀ‖_F
    grads = torch.autograd.grad(loss, list(weights.values()))
    return torch.stack([softmax_norm, *(grad.norm() for grad in grads)])


w_q, original = weights["W_Q"], weights["W_Q"].detach().clone()
norms = torch.empty(len(factors), len(windows), 5, dtype=torch.float64)
for row, factor in enumerate(factors):
    with torch.no_grad():
        w_q.copy_(original * factor)
    norms[row] = torch.stack([gradient_norms(window) for window in windows])
with torch.no_grad():
    w_q.copy_(original)
exponents = (norms[-1] / norms[2]).log() / math.log(factors[-1] / factors[2])  # (windows, 5): from s = 8 to 128
names = ["mean ‖J‖ of softmax", *(f"‖∂L/∂{name}‖" for name in weights)]
for name, values, predicted in zip(names, exponents.T.tolist(), (-1, -0.5, 0.5, 0, 0), strict=True):
    interval = mean_confidence_interval(values)
    print(f"{name}: exponent of s {interval.mean:+.3f} ± {interval.half_width:.3f} (95 %, 8 texts)")
    print(
        claim(
            f"{name}: exponent minus the predicted {predicted}",
            interval.mean - predicted,
            above=-0.15,
            below=0.15,
            id="C160",
        )
    )

# %%
figure, axes = plt.subplots(figsize=(6, 3.4))
relative = (norms / norms[0]).log()
for index, (name, color) in enumerate(zip(names, (GRAY, BLUE, GREEN, ORANGE, RED), strict=True)):
    intervals = [mean_confidence_interval(values[:, index].tolist()) for values in relative]
    mean = torch.tensor([interval.mean for interval in intervals])
    half_width = torch.tensor([interval.half_width for interval in intervals])
    axes.fill_between(factors, (mean - half_width).exp(), (mean + half_width).exp(), color=color, alpha=0.2, lw=0)
    axes.plot(factors, mean.exp(), "o-", color=color, markersize=3, lw=1.2, label=name)
axes.set(xscale="log", yscale="log", xlabel="factor s on $W_Q$", ylabel="norm relative to s = 1")
axes.set_xticks(factors, [str(factor) for factor in factors])
axes.minorticks_off()
axes.set_title("Gradients of block 3 as its attention saturates")
axes.legend(frameon=False, fontsize=7)
figure.tight_layout()

# %% [markdown]
# "A saturated softmax stops the gradient" holds exponentially for one row. For the gradient of $W_Q$, a sum over many
# rows, it holds as a power law, about $1/\sqrt s$. The gradient of $W_K$ grows, and those of $W_V$ and of the FFN do
# not shrink.

# %% [markdown]
# ## A block: identity plus path
#
# A pre-norm block is $x_2 = x + A(x)$, $x_4 = x_2 + B(x_2)$, where $A$ and $B$ are attention and FFN with their norms.
#
# $$\frac{\partial L}{\partial x_2} = \frac{\partial L}{\partial x_4} + J_B^\top \frac{\partial L}{\partial x_4}, \qquad
# \frac{\partial L}{\partial x} = \frac{\partial L}{\partial x_2} + J_A^\top \frac{\partial L}{\partial x_2}, \qquad
# \frac{\partial x_4}{\partial x} = (I + J_B)(I + J_A).$$
#
# The code accumulates these two terms per sublayer through `tiny-english`, from the gradient at the output of the last
# block, and compares with autograd at the input of every block.

# %%
contexts = backward.build_layer_contexts(model.decoder, inputs)
with ct.trace(model, "resid_pre", "resid_mid", "resid_post", gradients=True) as t:
    F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
model.zero_grad()
g = t.gradient("blocks.5.resid_post")
path_ratios, cosines, difference = [], [], 0.0
for layer in reversed(range(6)):
    block = model.decoder.blocks[layer]
    for site, branch, args in (("resid_mid", block.ffn, ()), ("resid_pre", block.attn, (contexts[layer],))):
        path, _ = backward.branch_backward(g, t[f"blocks.{layer}.{site}"].detach(), branch, *args)
        path_ratios.append(float(path.norm() / g.norm()))
        cosines.append(float(F.cosine_similarity(path.flatten(), g.flatten(), 0)))
        g = g + path
    difference = max(difference, largest_difference(g, t.gradient(f"blocks.{layer}.resid_pre")))
rms = [float(t[f"blocks.{layer}.resid_pre"].detach().square().mean().sqrt()) for layer in range(6)]
print("root mean square of the residual stream before blocks 0 to 5: ", *(f"{value:.2f}" for value in rms))
print("‖path‖ / ‖identity‖, from block 5 to 0 (FFN, attention): ", *(f"{value:.2f}" for value in path_ratios))
claim("identity + path at the input of every block: largest difference", difference, below=1e-10, id="C161")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(6.6, 3), layout="constrained")
layers = range(5, -1, -1)
for offset, (name, color) in enumerate((("FFN", ORANGE), ("attention", BLUE))):
    left.plot(layers, path_ratios[offset::2], "o-", color=color, markersize=4, lw=1, label=name)
    right.plot(layers, cosines[offset::2], "o-", color=color, markersize=4, lw=1, label=name)
left.axhline(1, color="black", lw=0.8, ls=":")
right.axhline(0, color="black", lw=0.8, ls=":")
left.set(xlabel="block", ylabel="‖path‖ / ‖identity‖", yscale="log", xticks=range(6))
left.set_yticks([0.3, 0.5, 1, 2, 5], ["0.3", "0.5", "1", "2", "5"])
left.minorticks_off()
right.set(xlabel="block", ylabel="cosine of path and identity", xticks=range(6))
left.legend(frameon=False, fontsize=8)
figure.suptitle("Gradient paths through the sublayers of tiny-english", fontsize=10)

# %% [markdown]
# In blocks 1 to 5 the paths have between half and all of the norm of the identity and are nearly orthogonal to it, so
# the norm of the gradient grows towards the input, by 1.1 to 1.4 per sublayer. Block 0 reads the embedding, whose root
# mean square is far below 1. Its norms divide by it, and the path is larger than the identity.

# %% [markdown]
# `block_backward` returns the gradients of all parameters of a block. The tables list a block of `tiny-english`
# (RMSNorm, SwiGLU, RoPE, no biases) and a block with LayerNorm, GELU, GQA and biases, pre-norm and post-norm.

# %%
x, g = t["blocks.3.resid_pre"].detach(), t.gradient("blocks.3.resid_post")
cases = {"tiny-english, block 3": (x, g, model.decoder.blocks[3], contexts[3])}
x, g = randn(2, *gqa_tokens.shape, 64)
for placement in ("pre", "post"):
    gqa = build_decoder("rope", placement=placement)
    [context] = backward.build_layer_contexts(gqa.decoder, gqa_tokens)
    cases[f"GQA with biases, {placement}-norm"] = x, g, gqa.decoder.blocks[0], context
for title, (x, g, block, context) in cases.items():
    grad_x, grads = backward.block_backward(g, x, block, context)
    print(f"\n{title}")
    difference = compare({"input": grad_x} | grads, autograd_block(x, g, block, context))
    print(claim(f"{title}: largest difference of any parameter", difference, below=1e-10, id="C164"))

# %% [markdown]
# ## Spectra: which directions a block shrinks
#
# The rows of a Jacobian are the gradients of the entries of the output. So one backward pass of a batch with all unit
# vectors as $g$ computes it. The cell computes the Jacobians of blocks on two tokens, $512 \times 512$ matrices.
#
# The identity path does not prevent $I + J_A$ from shrinking directions: where $J_A$ has an eigenvalue near $-1$, the
# factor is near 0. Predictions:
#
# - **pre-norm at initialization**: the geometric mean of the singular values is $|\det(I + J_A)|^{1/n}$, and
#   $\frac1n\log|\det(I + J_A)|$ is the mean of $\log|1 + \lambda|$ over the eigenvalues $\lambda$ of $J_A$. For random
#   weights these are spread evenly in a disk around 0. $\log|1 + \lambda|$ is harmonic for $|\lambda| < 1$, so its mean
#   over a disk of radius below 1 is its value at the center, $\log 1 = 0$: the geometric mean is 1, about half of the
#   singular values are below 1.
# - **post-norm**: the last norm of a block removes the direction $\hat x$ of each token (RMSNorm; LayerNorm also the
#   mean), so one singular value per token is 0: 2 of 512.
# - **scale invariance**: a pre-norm sublayer with RMSNorm ignores the scale of its input, $A(cx) = A(x)$, so $J_A x =
#   0$ and $(I + J_A)\,x = x$, up to ε of the norm. The largest singular value of $I + J_A$ is therefore at least 1.


# %%
def rows_of_jacobian(backward_function, x, *args):
    """(n, n): the Jacobian at x (1, T, d), n = T·d, from one backward pass with all unit vectors as a batch."""
    unit_vectors = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape[1:])  # (n, T, d)
    return backward_function(unit_vectors, x.expand_as(unit_vectors), *args)[0].flatten(1)


def block_jacobians(net, tokens, layers):
    """The Jacobians of the blocks `layers`, and the input of each (1, T, d)."""
    contexts = backward.build_layer_contexts(net.decoder, tokens)
    with torch.no_grad(), ct.trace(net, "resid_pre") as t:
        net(tokens)
    resid = [t[f"blocks.{layer}.resid_pre"] for layer in layers]
    blocks = [(net.decoder.blocks[layer], contexts[layer]) for layer in layers]
    return [rows_of_jacobian(backward.block_backward, x, *args) for x, args in zip(resid, blocks, strict=True)], resid


def build_untrained(placement, init, seed):
    """A model with the configuration of tiny-english, except for norm placement and initialization."""
    stack = model.config.decoder.replace(placement={"kind": placement})
    return ct.build(model.config.replace(decoder=stack, init={"kind": init}), dtype=torch.float64, seed=seed)


first_two = tokens[:, :2]
trained, resid = block_jacobians(model, first_two, range(6))
trained = [J.detach() for J in trained]


# %%
def jacobian_factors(net, x, layer=3):
    """Jacobians of attention, of the norm after it, of the FFN and of the norm after it (I if there is no norm)."""
    block, context = net.decoder.blocks[layer], backward.build_layer_contexts(net.decoder, first_two)[layer]
    with torch.no_grad():
        attn_sum = x + block.attn(x, context)
        resid_mid = block.norm_after_attn(attn_sum)
        ffn_sum = resid_mid + block.ffn(resid_mid)
    return (
        rows_of_jacobian(backward.branch_backward, x, block.attn, context),
        rows_of_jacobian(backward.norm_backward, attn_sum, block.norm_after_attn),
        rows_of_jacobian(backward.branch_backward, resid_mid, block.ffn),
        rows_of_jacobian(backward.norm_backward, ffn_sum, block.norm_after_ffn),
    )


eye = torch.eye(512, dtype=torch.float64)
J_attn, _, J_ffn, _ = jacobian_factors(model, resid[3])
difference = largest_difference((eye + J_ffn) @ (eye + J_attn), trained[3])
print(claim("pre-norm block: J = (I + J_ffn)(I + J_attn), largest difference", difference, below=1e-10, id="C137"))
post_norm = build_untrained("post", "xavier", seed=0)
[J_block], [x] = block_jacobians(post_norm, first_two, [3])
A, N1, B, N2 = jacobian_factors(post_norm, x)
difference = largest_difference(N2 @ (eye + B) @ N1 @ (eye + A), J_block)
print(
    claim(
        "post-norm block: J = J_norm(I + J_ffn)J_norm(I + J_attn), largest difference",
        difference,
        below=1e-10,
        id="C138",
    )
)
print(claim("J_ffn between different tokens: largest entry", J_ffn[:256, 256:].abs().max(), predicted=0, id="C097"))
x = resid[3].flatten()
print(claim("‖(I + J_attn)x − x‖ / ‖x‖", (J_attn @ x).norm() / x.norm(), below=1e-4, id="C146"))
with ct.trace(model, "embed", "blocks.5.resid_post", gradients=True) as t:
    model(first_two).logsumexp(-1).sum().backward()
model.zero_grad()
g = t.gradient("blocks.5.resid_post").flatten()
for J in reversed(trained):
    g = J.T @ g
difference = largest_difference(g, t.gradient("embed").flatten())
claim(
    "gradient at the embedding = product of all block Jacobians: largest difference", difference, below=1e-10, id="C139"
)

# %%
seeds, spectra = range(5), {}
for placement in ("pre", "post"):
    for init in ("normal", "xavier"):
        jacobians = [block_jacobians(build_untrained(placement, init, seed), first_two, [3])[0][0] for seed in seeds]
        spectra[placement, init] = torch.stack([torch.linalg.svdvals(J) for J in jacobians])  # (seeds, 512)
left_vectors = [torch.linalg.svd(J)[0] for J in jacobians]  # post-norm, Xavier: gradients at the output
output_directions = torch.stack([vectors[:, :51] for vectors in left_vectors])  # (seeds, 512, 51)
trained_spectra = torch.stack([torch.linalg.svdvals(J) for J in trained])  # (6, 512)


def describe(values):
    """Mean over seeds and 95 % interval."""
    interval = mean_confidence_interval(values.tolist())
    return f"{interval.mean:.3f} ± {interval.half_width:.3f}"


print("block 3, untrained: largest, root mean square, median, geometric mean without zeros, share below 1")
for (placement, init), values in spectra.items():
    nonzero = values[:, : 512 - 2 * (placement == "post")]
    root_mean_square = values.square().mean(1).sqrt()
    statistics = values[:, 0], root_mean_square, values.median(1).values, nonzero.log().mean(1).exp()
    print(f"{placement}-norm, {init}: ", *map(describe, (*statistics, (values < 1).double().mean(1))))
print("tiny-english: largest, root mean square, smallest, geometric mean, share below 1")
for layer, values in enumerate(trained_spectra):
    statistics = values[0], values.square().mean().sqrt(), values[-1], values.log().mean().exp()
    print(f"block {layer}: ", *(f"{value:.3f}" for value in (*statistics, (values < 1).double().mean())))

# %%
for init in ("normal", "xavier"):
    mean = spectra["pre", init].log().mean().exp()
    print(claim(f"pre-norm, {init}: geometric mean of the singular values", mean, predicted=1, rtol=0.02))
    zeros = (spectra["post", init] < 1e-6).sum(1)
    print(claim(f"post-norm, {init}: singular values that are 0", zeros.double().mean(), predicted=2, rtol=0))
    growth = spectra["pre", init].square().mean().sqrt()
    print(claim(f"pre-norm, {init}: growth of a random gradient", growth, above=1))
median = spectra["post", "xavier"].median(1).values.mean()
print(claim("post-norm, xavier: median of the singular values", median, below=0.9))
first, second = output_directions.split(256, 1)  # entries of the first and of the second token
common = ((first + second) / math.sqrt(2)).square().sum(1).mean(1)  # (seeds,); 0.5 for random directions
print(f"post-norm, xavier: share of a common gradient in the 51 most amplified directions: {describe(common)}")
print(claim("post-norm, xavier: this share, mean over seeds", common.mean(), above=0.65))
share = (torch.cat([spectra["pre", "normal"], spectra["pre", "xavier"], trained_spectra[1:]]) < 1).double().mean(1)
claim("pre-norm, trained (blocks 1 to 5) and untrained: smallest share below 1", share.min(), above=0.35)

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.4), layout="constrained", sharey=True)
rank = torch.arange(1, 513)
for layer, values in enumerate(trained_spectra):
    left.plot(rank[::4], values[::4], color=plt.cm.viridis(layer / 6), lw=1.2, label=f"block {layer}")
for (placement, init), values in spectra.items():
    color, line = BLUE if placement == "pre" else ORANGE, "-" if init == "normal" else "--"
    label = f"{placement}-norm, {'GPT-2 init' if init == 'normal' else 'Xavier'}"
    right.plot(rank[::4], values.log().mean(0).exp()[::4], line, color=color, lw=1.2, label=label)
for axes, title in ((left, "tiny-english, trained"), (right, "untrained, block 3, mean of 5 seeds")):
    axes.axhline(1, color="black", lw=0.5)
    axes.set(yscale="log", ylim=(0.05, 150), xlabel="rank of the singular value")
    axes.set_title(title, fontsize=9)
    axes.legend(frameon=False, fontsize=7)
left.set_ylabel("singular value")
figure.suptitle("Singular values of a block's Jacobian (two tokens)", fontsize=10)

# %% [markdown]
# In both pre-norm models and in blocks 1 to 5 of the trained model, almost half of the singular values are below 1: the
# identity path does not guarantee that no gradient shrinks. The directions that shrink are balanced by others that
# grow. The root mean square of the singular values is the factor by which the norm of a random gradient grows. It is
# above 1 under pre-norm, because $\|I + J\|_F^2 \approx \|I\|_F^2 + \|J\|_F^2$ if the trace of $J$ is small.
#
# Placement alone does not decide. With GPT-2's initialization the sublayers add little to a residual stream of root
# mean square 1, and the Jacobian of a post-norm block is close to the identity. With Xavier initialization they add
# about as much as there is, the norms divide by it, and most directions shrink. A prediction failed here: the norm of a
# random gradient does not shrink, because the root mean square of these singular values is also close to 1. A few
# directions grow enough to balance the others, mostly those in which both tokens have the same gradient at the output.
# The loss of $\sqrt2$ per block in [notebook 5](05_gradients.py) is measured on the token-specific gradient, without
# those directions.

# %% [markdown]
# ## A whole model: embedding and tied head
#
# The embedding copies rows of a table, so its backward pass adds the gradient at each position to the row of its token
# (scatter-add). Rows of tokens that do not occur have the gradient 0. The head $z = x E^\top$ is a linear layer, and
# every row of $E$ has a gradient, because every token has a probability above 0. If the head is tied, $E$ is the
# embedding table, and its gradient is the sum of both.

# %%
with torch.no_grad(), ct.trace(model, "final_norm") as t:
    logits = model(inputs)
grad_logits = backward.cross_entropy_backward(logits, targets)
_, head = backward.head_backward(grad_logits, t["final_norm"], model.head)
gradients = backward.model_backward(model, inputs, targets)
table = gradients["decoder.embed.token.weight"]
scatter = table - head["matrix.weight"]  # contribution of the embedding
rows = [int((part.abs().amax(1) > 1e-12).sum()) for part in (scatter, head["matrix.weight"])]
print(f"norms: embedding {scatter.norm():.3f}, head {head['matrix.weight'].norm():.3f}, sum {table.norm():.3f}")
print(claim("rows with a gradient from the embedding", rows[0], predicted=len(inputs.unique()), rtol=0))
claim("rows with a gradient from the head", rows[1], predicted=4096, rtol=0)

# %%
model.zero_grad()
F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
expected = {name: parameter.grad for name, parameter in model.named_parameters()}
difference = compare(gradients, expected, merge_blocks=True)
claim(
    "tiny-english, 5.8 million parameters: largest difference of any gradient entry", difference, below=1e-10, id="C164"
)

# %% [markdown]
# ## Activation checkpointing
#
# The functions above store only the input of each block, `resid` in `model_backward`, and recompute queries, keys,
# patterns and hidden activations from it. That is full activation checkpointing. It changes memory and time ([notebook
# 5](05_gradients.py) measures both) and no value: the recomputed operations are the same in the same order, so
# gradients are equal bit for bit.

# %%
recomputed = {}
model.train()  # tiny-english has no dropout
for mode in ("none", "selective", "full"):
    model.use_activation_checkpointing(mode).zero_grad()
    F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    recomputed[mode] = [parameter.grad.clone() for parameter in model.parameters()]
for mode in ("selective", "full"):
    pairs = zip(recomputed["none"], recomputed[mode], strict=True)
    num_different = sum(int((one != other).sum()) for one, other in pairs)
    print(
        claim(
            f"checkpointing {mode}: gradient entries that differ in any bit",
            num_different,
            predicted=0,
            rtol=0,
            id="C190",
        )
    )
model.eval().use_activation_checkpointing("none").zero_grad()

# %% [markdown]
# ## Try
#
# - Multiply $W_K$ instead of $W_Q$ in *Saturated attention*: the exponents of the two gradients swap.
# - Add `norm={"kind": "layernorm"}` to `replace` in `build_untrained`: a post-norm block then has two zero singular
#   values per token.
# - Compute `block_jacobians` for four tokens: the Jacobian is block lower triangular, because attention is causal.
#
# Exercise: `cutaway learn start 11` (backward passes of softmax, RMSNorm, a linear layer and an FFN). Previous: [11.
# Finding bugs](11_finding_bugs.py).
