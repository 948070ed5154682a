# %% [markdown]
# # 4. FFN, norms, residual stream and initialization
#
# A block contains, besides attention, an FFN, two norms and two residual additions. This notebook shows that the FFN
# is applied to each token independently, computes an FFN, two norms and a block by hand, counts parameters, and
# predicts the variance of the residual stream at any depth from the initialization.
#
# Prerequisites: [notebook 1](01_forward_pass.py).

# %%
import math

import matplotlib.pyplot as plt
import torch

import cutaway as ct
from cutaway.config import LayerNorm, RMSNorm
from cutaway.learn import claim
from cutaway.model.norms import build_norm

torch.set_grad_enabled(False)
BLUE, ORANGE, GREEN, GRAY = "#0072B2", "#E69F00", "#009E73", "#999999"
story = (
    "Sue had a friend named Ben. One day, Sue and Ben went to the park to play with a red ball. Ben kicked the ball "
    "very hard, and it flew over the fence."
)

# %% [markdown]
# ## The FFN is applied to each token independently
#
# $\mathrm{FFN}(x_t)$ depends on $x_t$ only, and so do norms and residual additions. So with the outputs of attention
# set to zero, the logits at a position depend on its own token only: replacing token 10 of 20 changes the logits at 1
# position. With attention, the logits change at all positions to which token 10 is visible: the 10 positions 10 to 19.
# The model is `tiny-english`, which is trained on children's stories, and token 10 is the name `Sue`, which is replaced
# by `Lily`.

# %%
checkpoint = ct.load("tiny-english", dtype=torch.float32)
model = checkpoint.model
tokens = torch.tensor([checkpoint.tokenizer.encode(story)[:20]])
replaced = tokens.clone()
replaced[0, 10] = checkpoint.tokenizer.encode(" Lily")[0]


def max_logit_change():
    """(20,): largest absolute change of any logit at each position."""
    return (model(replaced) - model(tokens))[0].abs().amax(-1)


with_attention = max_logit_change()
with ct.edit(model, {"blocks.*.attn.out": "zero"}):
    without_attention = max_logit_change()
print(
    claim("positions that change without attention", (without_attention > 1e-3).sum(), predicted=1, rtol=0, id="C008")
)
claim("positions that change with attention", (with_attention > 1e-3).sum(), predicted=10, rtol=0, id="C008")

# %%
figure, axes = plt.subplots(figsize=(6, 3))
axes.bar(torch.arange(20) - 0.2, with_attention, width=0.4, color=BLUE, label="unchanged model")
axes.bar(torch.arange(20) + 0.2, without_attention, width=0.4, color=ORANGE, label="attn.out set to zero")
axes.set(xlabel="position", ylabel="largest change of a logit", xticks=range(0, 20, 2))
axes.set_title("Token 10, “Sue”, is replaced: only attention affects other positions")
axes.legend(frameon=False)

# %% [markdown]
# ## An FFN by hand
#
# $h = \mathrm{ReLU}(x W_1)$, then $h W_2$. Let $x = (0.5, -1, 0.8)$ and the rows of $W_1$ be
#
# $$(1, 0, -1, 0.5), \quad (0, 1, 0, -1), \quad (0.5, -0.5, 1, 0)$$
#
# By column: $0.5 + 0.4 = 0.9$; $-1 - 0.4 = -1.4$, which ReLU sets to 0; $-0.5 + 0.8 = 0.3$; $0.25 + 1 = 1.25$. So
# $h = (0.9, 0, 0.3, 1.25)$. `ct.edit` sets the FFN's input to $x$, and `ct.trace` records the hidden activations.


# %%
def build_relu_decoder(d_model, hidden, *, layers=1, heads=1, placement="pre", init=None):
    """A decoder with ReLU FFNs and RMSNorm, without positions and biases."""
    attention = {"heads": heads, "position": {"kind": "none"}}
    ffn = {"kind": "mlp", "hidden": hidden, "activation": "relu", "bias": False}
    stack = {"layers": layers, "block": {"attention": attention, "ffn": ffn}, "placement": {"kind": placement}}
    init = init or {"kind": "normal"}
    return ct.build({"form": "decoder", "vocab_size": 256, "d_model": d_model, "init": init, "decoder": stack}, seed=0)


W1 = torch.tensor([[1, 0, -1, 0.5], [0, 1, 0, -1], [0.5, -0.5, 1, 0]])
x = torch.tensor([0.5, -1.0, 0.8])
one_block = build_relu_decoder(3, 4)
one_block.decoder.blocks[0].ffn.f.up.weight.copy_(W1.T)
with ct.edit(one_block, {"blocks.0.ffn.in": x}), ct.trace(one_block, "ffn.hidden") as t:
    one_block(torch.tensor([[0]]))
hidden = t["blocks.0.ffn.hidden"][0, 0]
by_hand = torch.tensor([0.9, 0, 0.3, 1.25])
print(hidden)
claim("FFN by hand: largest difference", (hidden - by_hand).abs().max(), below=1e-6, id="C288")

# %% [markdown]
# ## LayerNorm and RMSNorm by hand
#
# For $(1, 2, 3, 4)$: the mean is 2.5, the variance $(2.25 + 0.25 + 0.25 + 2.25)/4 = 1.25$, the mean square
# $(1 + 4 + 9 + 16)/4 = 7.5$.
#
# $$\mathrm{LayerNorm}: \frac{x - 2.5}{\sqrt{1.25}} = (-1.342, -0.447, 0.447, 1.342) \qquad
# \mathrm{RMSNorm}: \frac{x}{\sqrt{7.5}} = (0.365, 0.730, 1.095, 1.461)$$

# %%
x = torch.tensor([1.0, 2.0, 3.0, 4.0])
layer_norm, rms_norm = build_norm(LayerNorm(eps=1e-6), 4), build_norm(RMSNorm(eps=1e-6), 4)
print(layer_norm(x), rms_norm(x))
layer_expected, rms_expected = torch.tensor([-1.342, -0.447, 0.447, 1.342]), torch.tensor([0.365, 0.730, 1.095, 1.461])
print(
    claim(
        "LayerNorm of (1, 2, 3, 4): largest difference",
        (layer_norm(x) - layer_expected).abs().max(),
        below=5e-4,
        id="C287",
    )
)
claim("RMSNorm of (1, 2, 3, 4): largest difference", (rms_norm(x) - rms_expected).abs().max(), below=5e-4, id="C101")

# %% [markdown]
# Both are invariant to the scale of a vector. LayerNorm is also invariant to adding a constant to all entries; RMSNorm
# is not. LayerNorm of $x$ is RMSNorm of $x - \bar x$, because the variance is the mean square of the centered vector.

# %%
v = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
print(claim("RMSNorm of 10·x: change", (rms_norm(10 * v) - rms_norm(v)).abs().max(), below=1e-3, id="C104"))
print(claim("LayerNorm of x + 10: change", (layer_norm(v + 10) - layer_norm(v)).abs().max(), below=1e-2, id="C104"))
print(claim("RMSNorm of x + 10: change", (rms_norm(v + 10) - rms_norm(v)).abs().max(), above=0.5, id="C101"))
centered = v - v.mean(-1, keepdim=True)
claim(
    "LayerNorm against RMSNorm of the centered vector",
    (layer_norm(v) - rms_norm(centered)).abs().max(),
    below=1e-3,
    id="C100",
)

# %% [markdown]
# ## A block by hand
#
# A pre-norm block with $W_o = 0$ and an FFN of identity matrices with ReLU, on the residual stream $((1, 2), (3, 4))$,
# computes $x + \mathrm{ReLU}(\mathrm{RMSNorm}(x))$. The first token has mean square $2.5$ and becomes
# $(1 + 1/\sqrt{2.5},\ 2 + 2/\sqrt{2.5}) = (1.632, 3.265)$; the second has $12.5$ and becomes $(3.849, 5.131)$.
#
# A post-norm block normalizes each sum: it computes $\mathrm{RMSNorm}(x + \mathrm{ReLU}(x))$, where $x$ is the output
# of attention's norm. So the residual stream has root mean square 1 after every block.

# %%
resid = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
resid_post = {}
for placement in ("pre", "post"):
    one_block = build_relu_decoder(2, 2, placement=placement)
    one_block.decoder.blocks[0].attn.f.o.weight.zero_()
    one_block.decoder.blocks[0].ffn.f.up.weight.copy_(torch.eye(2))
    one_block.decoder.blocks[0].ffn.f.down.weight.copy_(torch.eye(2))
    with ct.edit(one_block, {"embed": resid}), ct.trace(one_block, "resid_post") as t:
        one_block(torch.tensor([[0, 1]]))
    resid_post[placement] = t["blocks.0.resid_post"][0]
print(resid_post["pre"])
by_hand = torch.tensor([[1.632, 3.265], [3.849, 5.131]])
print(
    claim(
        "pre-norm block by hand: largest difference", (resid_post["pre"] - by_hand).abs().max(), below=1e-3, id="C290"
    )
)
rms = resid_post["post"].square().mean(-1).sqrt()
claim("post-norm block: root mean square, mean over tokens", rms.mean(), predicted=1, rtol=1e-4, id="C133")

# %% [markdown]
# ## Parameters of attention and FFN
#
# Attention has four $d \times d$ matrices, the classic FFN two of $d \times 4d$: $4 d^2$ and $8 d^2$, a ratio of 1 to
# 2. At $d = 4096$ the FFN has $8 \cdot 4096^2 = 134$ million parameters. A gated FFN (SwiGLU, [Shazeer
# 2020](https://arxiv.org/abs/2002.05202)) has three matrices; with $\tfrac23 \cdot 4d$ hidden units it also has
# $8 d^2$. Llama-3 8B uses 14,336 hidden units: $3 \cdot 4096 \cdot 14336 = 176$ million per layer.


# %%
def num_matrix_params(module):
    return sum(p.numel() for p in module.parameters() if p.ndim == 2)


def num_ffn_params(ffn, d_model=4096):
    block = {"attention": {"heads": 32}, "ffn": ffn}
    config = {"form": "decoder", "vocab_size": 8, "d_model": d_model, "decoder": {"layers": 1, "block": block}}
    return num_matrix_params(ct.build(config, device="meta").decoder.blocks[0].ffn)  # meta device: no memory


gpt2 = ct.build("gpt2", device="meta").decoder.blocks[0]
llama = ct.build("llama-3-8b", device="meta").decoder.blocks[0]
ratio = num_matrix_params(gpt2.ffn) / num_matrix_params(gpt2.attn)
print(claim("GPT-2: FFN parameters / attention parameters", ratio, predicted=2, rtol=0, id="C089"))
classic, gated = num_ffn_params({"kind": "mlp"}), num_ffn_params({"kind": "gated"})
print(
    claim(
        "classic FFN at d = 4,096, millions of parameters",
        classic / 1e6,
        predicted=8 * 4096**2 / 1e6,
        rtol=0,
        id="C226",
    )
)
print(claim("SwiGLU with 2/3 · 4d hidden units / classic FFN", gated / classic, predicted=1, rtol=1e-3, id="C085"))
millions = num_matrix_params(llama.ffn) / 1e6
claim("Llama-3 8B: FFN of one layer, millions of parameters", millions, predicted=176.16, rtol=1e-4, id="C227")

# %% [markdown]
# ## Initialization: variance through a chain of matrices
#
# Multiply a vector of $n$ entries with variance 1 by a matrix of independent weights with variance $\sigma^2$: each
# entry of the product is a sum of $n$ terms, so its variance is $n \sigma^2$. After $L$ matrices the standard deviation
# is $(\sqrt n\,\sigma)^L$. At $n = 256$:
#
# - $\sigma = 0.02$: a factor of $0.32$ per matrix, $10^{-4.9}$ after ten;
# - $\sigma = 0.1$: a factor of $1.6$ per matrix, $10^{+2.0}$ after ten;
# - Xavier (Glorot and Bengio 2010), uniform in $\pm\sqrt{6/(n_\text{in} + n_\text{out})}$, has variance
#   $2/(n_\text{in} + n_\text{out})$, which is $1/n$ for a square matrix: a factor of 1. For $d \to 4d$ the variance is
#   multiplied by $2d/5d = 0.4$, for $4d \to d$ by 1.6.

# %%
generator = torch.Generator().manual_seed(0)
bound = math.sqrt(6 / 512)
initializations = {
    "σ = 0.02": lambda: 0.02 * torch.randn(256, 256, generator=generator),
    "σ = 0.1": lambda: 0.1 * torch.randn(256, 256, generator=generator),
    "Xavier": lambda: bound * (2 * torch.rand(256, 256, generator=generator) - 1),
}
stds = {}
for name, sample_matrix in initializations.items():
    x = torch.randn(64, 256, generator=generator)
    stds[name] = [float(x.std())]
    for _ in range(10):
        x = x @ sample_matrix()
        stds[name].append(float(x.std()))

# %%
small, large = (math.log10(stds[name][-1]) for name in ("σ = 0.02", "σ = 0.1"))
print(
    claim(
        "ten matrices of σ = 0.02: log₁₀ of the standard deviation", small, predicted=10 * math.log10(0.32), rtol=0.05
    )
)
print(
    claim("ten matrices of σ = 0.1: log₁₀ of the standard deviation", large, predicted=10 * math.log10(1.6), rtol=0.1)
)
claim("ten Xavier matrices: standard deviation", stds["Xavier"][-1], predicted=1, rtol=0.2, id="C184")

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
for (name, values), color, factor in zip(stds.items(), (BLUE, ORANGE, GREEN), (0.32, 1.6, 1), strict=True):
    axes.semilogy(values, "o", color=color, label=name)
    axes.semilogy([factor**depth for depth in range(11)], color=color, linewidth=1)
axes.set(
    xlabel="number of matrices",
    ylabel="standard deviation",
    title="Standard deviation after a chain of matrices (lines: predicted)",
)
axes.legend(frameon=False)

# %% [markdown]
# The library's Xavier initialization has the same variances:

# %%
xavier = build_relu_decoder(256, 1024, heads=4, init={"kind": "xavier"}).decoder.blocks[0]
q_std, up_std = xavier.attn.f.q.weight.std(), xavier.ffn.f.up.weight.std()
print(claim("Xavier, 256 → 256: standard deviation", q_std, predicted=math.sqrt(2 / 512), rtol=0.02, id="C184"))
claim("Xavier, 256 → 1024: standard deviation", up_std, predicted=math.sqrt(2 / 1280), rtol=0.02, id="C184")

# %% [markdown]
# ## Initialization: variance of the residual stream
#
# In a pre-norm Transformer every sublayer has a normalized input (mean square 1) and adds its output to the residual
# stream. With independent weights, variances add. With $\sigma = 0.02$ for all weights:
#
# - attention of a token to itself alone adds $d^2\sigma^4$: $W_v$ gives variance $d\sigma^2$, and $W_o$ multiplies it
#   by $d\sigma^2$;
# - the FFN adds $2 d^2 \sigma^4$: $W_1$ gives variance $d\sigma^2$, ReLU halves the mean square, and $W_2$ sums $4d$
#   terms.
#
# So after $N$ blocks the variance of the residual stream is
#
# $$\sigma^2 + 3 N d^2 \sigma^4$$
#
# which at $d = 256$ and $N = 32$ is 1.007, 2,500 times the variance of the embedding, and grows with depth. GPT-2
# divides the output projections ($W_o$, $W_2$) by $\sqrt{2N}$, so their variance by $2N$. The variance is then
#
# $$\sigma^2 + \tfrac32 d^2 \sigma^4 = 0.0161$$
#
# at *every* depth. (The outputs of ReLU have a mean that is common to all tokens, so one draw of the weights is a
# sample of 256 values, not of 65,536: the tolerance is 15 % at 32 blocks, where independent draws average out, and
# 25 % at 4.)

# %%
d, sigma, depths = 256, 0.02, (4, 8, 16, 32)
single_tokens = torch.arange(256)[:, None]  # (256, 1): sequences of one token, which attends to itself alone
variances = {}
for scaled in (False, True):
    for depth in depths:
        init = {"kind": "normal", "std": sigma, "depth_scaled": scaled}
        deep = build_relu_decoder(d, 4 * d, layers=depth, heads=4, init=init)
        with ct.trace(deep, "embed", "resid_post") as t:
            deep(single_tokens)
        variances[scaled, depth] = [float(t[name].square().mean()) for name in t]  # depth + 1 values
unscaled_variance = sigma**2 + 3 * 32 * d**2 * sigma**4
scaled_variance = sigma**2 + 1.5 * d**2 * sigma**4
print(
    claim(
        "32 blocks, not scaled: variance", variances[False, 32][-1], predicted=unscaled_variance, rtol=0.15, id="C173"
    )
)
print(claim("32 blocks, scaled: variance", variances[True, 32][-1], predicted=scaled_variance, rtol=0.15, id="C173"))
print(claim("4 blocks, scaled: variance", variances[True, 4][-1], predicted=scaled_variance, rtol=0.25, id="C173"))
ratio = (variances[False, 32][-1] - sigma**2) / (variances[False, 4][-1] - sigma**2)
claim("not scaled: variance added by 32 blocks / by 4 blocks", ratio, predicted=8, rtol=0.25, id="C132")

# %%
figure, axes = plt.subplots(figsize=(6, 3.4))
for scaled, color, name in ((False, ORANGE, "not scaled"), (True, BLUE, "scaled by 1/√2N")):
    for depth in depths:
        label = name if depth == 32 else None
        axes.semilogy(variances[scaled, depth], color=color, marker="o", markersize=3, linewidth=1, label=label)
axes.semilogy([sigma**2 + 3 * n * d**2 * sigma**4 for n in range(33)], color="black", linestyle=":", label="predicted")
axes.axhline(scaled_variance, color="black", linestyle=":")
axes.set(xlabel="block (models of 4, 8, 16 and 32 blocks)", ylabel="variance of the residual stream")
axes.set_title("With depth scaling, the final variance is independent of depth")
axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.7))

# %% [markdown]
# ## Norm of the update relative to the residual stream
#
# If every block adds the same variance $a$, the ratio of the norms of block $n$'s update and the residual stream is
# $\sqrt{a / (\sigma^2 + n a)}$: it falls as $1/\sqrt n$. For block 31 with $a = 3 d^2 \sigma^4$:
# $1/\sqrt{31} = 0.18$.

# %%
unscaled = build_relu_decoder(d, 4 * d, layers=32, heads=4, init={"kind": "normal", "depth_scaled": False})
with ct.trace(unscaled, "resid_pre", "resid_post") as t:
    unscaled(single_tokens)
before, after = t.stack_activation("resid_pre"), t.stack_activation("resid_post")  # (32, 256, 1, d)
untrained_ratio = ((after - before).norm(dim=-1) / before.norm(dim=-1)).mean((1, 2))  # (32,)
a = 3 * d**2 * sigma**4
expected = [math.sqrt(a / (sigma**2 + n * a)) for n in range(32)]
claim(
    "untrained: ‖update‖ / ‖residual stream‖ of block 31",
    untrained_ratio[31],
    predicted=expected[31],
    rtol=0.1,
    id="C281",
)

# %% [markdown]
# The derivation does not apply to trained weights, because both of its assumptions can fail, with opposite effects:
#
# - *equal norms*: if the norm of the updates grows with depth, the ratio is larger than $1/\sqrt n$;
# - *orthogonal updates*: if an update has a positive cosine with the residual stream, the residual stream grows faster
#   than the root of the sum of squares, and the ratio is smaller.
#
# Two trained models are measured, each on text like its training data: `tiny-english` on the story and `tiny-python` on
# Python code. Let $u_n$ and $r_n$ be the root mean squares over tokens of the norms of block $n$'s update and of its
# input. With orthogonal updates the norm of the input would be $o_n = \sqrt{r_0^2 + \sum_{m<n} u_m^2}$. So the ratio
# relative to the rule is the product of two factors:
#
# $$\frac{u_n}{r_n} \Big/ \frac{1}{\sqrt n} = \frac{u_n \sqrt n}{o_n} \cdot \frac{o_n}{r_n}$$
#
# The first is 1 if all updates have equal norms, the second if they are orthogonal. Block 0 is excluded: its update has
# more than ten times the norm of the embedding. The story does not begin with “Once upon a time”: in `tiny-english` the
# tokens of this phrase have several times the norm of other tokens and would dominate the means.

# %%
code = """def read(path, encoding="utf-8"):
    lines = []
    with open(path, encoding=encoding) as file:
        for line in file:
            lines.append(line.strip())
    return lines
"""


def measure_norms(checkpoint, text):
    """(6,) each: root mean square over tokens of the norm of each block's update and of its input."""
    with ct.trace(checkpoint.model, "resid_pre", "resid_post") as t:
        checkpoint.model(torch.tensor([checkpoint.tokenizer.encode(text)]))
    before, after = t.stack_activation("resid_pre"), t.stack_activation("resid_post")  # (6, 1, T, d)
    return [(x.square().sum(-1).mean((1, 2))).sqrt() for x in (after - before, before)]


rule = 1 / torch.arange(1, 6).sqrt()
trained_ratio = {}
for name, text in (("tiny-english", story), ("tiny-python", code)):
    u, r = measure_norms(ct.load(name, dtype=torch.float32), text)
    o = (r[0] ** 2 + u.square().cumsum(0)[:-1]).sqrt()  # (5,): the input of blocks 1 to 5 if updates were orthogonal
    trained_ratio[name] = u[1:] / r[1:]
    rows = {
        "ratio": u[1:] / r[1:],
        "ratio · √n": u[1:] / r[1:] / rule,
        "u √n / o": u[1:] / o / rule,
        "o / r": o / r[1:],
    }
    print(f"{name}, blocks 1 to 5")
    for label, values in rows.items():
        print(f"  {label:10}", *(f"{value:5.2f}" for value in values))
    print(claim(f"{name}: ‖update‖ of block 5 / of block 1 (1 under the assumption)", u[5] / u[1], above=1.5))
    print(claim(f"{name}: o / r in block 5 (1 if orthogonal)", o[4] / r[5], below=0.85))

# %%
english, python = trained_ratio["tiny-english"], trained_ratio["tiny-python"]
print(claim("tiny-english: ratio of block 4 / of block 1", english[3] / english[0], below=0.8, id="C281"))
print(claim("tiny-english: ratio of block 5 relative to 1/√5", english[4] / rule[4], above=1.5, id="C281"))
error = (python / rule - 1).abs().max()
claim("tiny-python: largest relative deviation from 1/√n, blocks 1 to 5", error, below=0.25, id="C281")

# %% [markdown]
# In both models the ratio decreases over the first blocks, and both assumptions fail: the norms of the updates grow
# with depth, and the updates are not orthogonal to the residual stream ([notebook 1](01_forward_pass.py)). The factor
# $o_n/r_n$ of the directions is nearly the same in both models, about 0.7 in block 5. In `tiny-python` the updates grow
# by a factor of two, which compensates it, so the ratio is close to $1/\sqrt n$. In `tiny-english` they grow by a
# factor of five; the ratio in block 5 is twice that of the rule, and larger than in block 4. So agreement with the rule
# in one model does not confirm its assumptions.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(6.8, 3.2), layout="constrained")
left.loglog(range(1, 32), untrained_ratio[1:], "o", markersize=3, color=GRAY, label="measured")
left.loglog(range(1, 32), expected[1:], color="black", linestyle=":", label="predicted")
left.set_yticks([1, 0.5, 0.3, 0.2], ["1", "0.5", "0.3", "0.2"])
left.minorticks_off()
left.set(title="untrained, 32 blocks", xlabel="block", ylabel="‖update‖ / ‖residual stream‖")
right.plot(range(1, 6), english, "o-", linewidth=1, color=BLUE, label="tiny-english")
right.plot(range(1, 6), python, "s-", linewidth=1, color=ORANGE, label="tiny-python")
right.plot(range(1, 6), rule, color="black", linestyle=":", label="1/√n")
right.set(title="trained, 6 blocks", xlabel="block", ylim=(0, None))
left.legend(frameon=False), right.legend(frameon=False, loc="lower left")
figure.suptitle("Norm of the update relative to the residual stream", fontsize=10)

# %% [markdown]
# ## Try
#
# - Replace ReLU by GELU in `build_relu_decoder`: for inputs this small GELU is close to $x/2$ and multiplies the mean
#   square by about 0.3 instead of 0.5, so the final variance is lower.
# - Give `single_tokens` the shape (16, 16): attention averages the values of several tokens, which reduces the variance
#   that it adds, and the final variance is below the prediction.
# - Use `placement="post"` with 32 blocks: the variance is 1 after every block for any initialization. [Notebook
#   5](05_gradients.py) measures the effect on gradients.
#
# Exercises: `cutaway learn start 5` (FFN against attention parameters), `cutaway learn start 6` (LayerNorm and
# RMSNorm of one vector), `cutaway learn start 7` (pre-norm and post-norm equations).
