# %% [markdown]
# # 4. FFN, norms, residuals and first weights
#
# Beside attention a block has an FFN, two norms and two additions. Afterwards you know that the FFN works on each
# token alone, can do a block by hand, can count where the parameters are, and can say from the first weights how
# large the stream will be at any depth, before anything runs.
#
# Needs: notebook 1.

# %%
import math

import matplotlib.pyplot as plt
import torch

import cutaway as ct
from cutaway.config import LayerNorm, RMSNorm
from cutaway.learn import claim
from cutaway.lens import analysis
from cutaway.model.norms import build_norm

torch.set_grad_enabled(False)
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#999999"
code = """def read(path, encoding="utf-8"):
    lines = []
    with open(path, encoding=encoding) as file:
        for line in file:
            lines.append(line.strip())
    return lines
"""

# %% [markdown]
# ## The FFN works on each token alone
#
# $\mathrm{FFN}(x_t)$ has no other token in it; norms and additions have none either. So with attention silenced, a
# model of any depth is a function of each token alone: change token 10 of 20, and the logits at 1 place move. With
# attention on they move at all places that see it: 10 to 19, which is 10.

# %%
checkpoint = ct.load("tiny-python", dtype=torch.float32)
model = checkpoint.model
text = torch.tensor([checkpoint.tokenizer.encode(code)[:20]])
other = text.clone()
other[0, 10] = 300


def moved():
    """(20,): the largest change of any logit at each place."""
    return (model(other) - model(text))[0].abs().amax(-1)


together = moved()
with ct.edit(model, {"blocks.*.attn.out": "zero"}):
    alone = moved()
print(claim("places that move without attention", (alone > 1e-3).sum(), predicted=1, rtol=0))
claim("places that move with attention", (together > 1e-3).sum(), predicted=10, rtol=0)

# %%
figure, axes = plt.subplots(figsize=(6, 3))
axes.bar(torch.arange(20) - 0.2, together, width=0.4, color=BLUE, label="as it is")
axes.bar(torch.arange(20) + 0.2, alone, width=0.4, color=ORANGE, label="attention silenced")
axes.set(xlabel="place in the text", ylabel="largest change of a logit", xticks=range(0, 20, 2))
axes.set_title("Token 10 is changed: only attention carries it on")
axes.legend(frameon=False)

# %% [markdown]
# ## An FFN by hand
#
# $h = \mathrm{ReLU}(x W_1)$, then $h W_2$. Take $x = (0.5, -1, 0.8)$ and the rows of $W_1$
#
# $$(1, 0, -1, 0.5), \quad (0, 1, 0, -1), \quad (0.5, -0.5, 1, 0)$$
#
# Column by column: $0.5 + 0.4 = 0.9$; $-1 - 0.4 = -1.4$, which ReLU makes 0; $-0.5 + 0.8 = 0.3$; $0.25 + 1 = 1.25$.
# So $h = (0.9, 0, 0.3, 1.25)$. `ct.edit` puts $x$ where the FFN reads, `ct.trace` shows what comes of it.


# %%
def plain(d_model, hidden, *, layers=1, heads=1, placement="pre", init=None):
    """A decoder of ReLU FFNs and RMSNorm, without positions and biases."""
    attention = {"heads": heads, "position": {"kind": "none"}}
    ffn = {"kind": "mlp", "hidden": hidden, "activation": "relu", "bias": False}
    stack = {"layers": layers, "block": {"attention": attention, "ffn": ffn}, "placement": {"kind": placement}}
    init = init or {"kind": "normal"}
    return ct.build({"form": "decoder", "vocab_size": 256, "d_model": d_model, "init": init, "decoder": stack}, seed=0)


W1 = torch.tensor([[1, 0, -1, 0.5], [0, 1, 0, -1], [0.5, -0.5, 1, 0]])
x = torch.tensor([0.5, -1.0, 0.8])
small = plain(3, 4)
small.decoder.blocks[0].ffn.f.up.weight.copy_(W1.T)
with ct.edit(small, {"blocks.0.ffn.in": x}), ct.trace(small, "ffn.hidden") as t:
    small(torch.tensor([[0]]))
hidden = t["blocks.0.ffn.hidden"][0, 0]
by_hand = torch.tensor([0.9, 0, 0.3, 1.25])
print(hidden)
claim("FFN by hand: largest difference", (hidden - by_hand).abs().max(), below=1e-6)

# %% [markdown]
# ## Two norms by hand
#
# Of $(1, 2, 3, 4)$: the mean is 2.5, the variance $(2.25 + 0.25 + 0.25 + 2.25)/4 = 1.25$, the mean square
# $(1 + 4 + 9 + 16)/4 = 7.5$.
#
# $$\mathrm{LayerNorm}: \frac{x - 2.5}{\sqrt{1.25}} = (-1.342, -0.447, 0.447, 1.342) \qquad
# \mathrm{RMSNorm}: \frac{x}{\sqrt{7.5}} = (0.365, 0.730, 1.095, 1.461)$$

# %%
x = torch.tensor([1.0, 2.0, 3.0, 4.0])
layer_norm, rms_norm = build_norm(LayerNorm(eps=1e-6), 4), build_norm(RMSNorm(eps=1e-6), 4)
print(layer_norm(x), rms_norm(x))
centred, divided = torch.tensor([-1.342, -0.447, 0.447, 1.342]), torch.tensor([0.365, 0.730, 1.095, 1.461])
print(claim("LayerNorm of (1, 2, 3, 4): largest difference", (layer_norm(x) - centred).abs().max(), below=5e-4))
claim("RMSNorm of (1, 2, 3, 4): largest difference", (rms_norm(x) - divided).abs().max(), below=5e-4)

# %% [markdown]
# Both forget the length of a vector; LayerNorm forgets its mean, too, RMSNorm does not. And LayerNorm is RMSNorm of
# the centred vector, since a variance is the mean square of what is centred.

# %%
v = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
print(claim("RMSNorm, ten times the vector: change", (rms_norm(10 * v) - rms_norm(v)).abs().max(), below=1e-3))
print(claim("LayerNorm, 10 added to every value: change", (layer_norm(v + 10) - layer_norm(v)).abs().max(), below=1e-2))
print(claim("RMSNorm, 10 added to every value: change", (rms_norm(v + 10) - rms_norm(v)).abs().max(), above=0.5))
centred = v - v.mean(-1, keepdim=True)
claim("LayerNorm against RMSNorm of the centred vector", (layer_norm(v) - rms_norm(centred)).abs().max(), below=1e-3)

# %% [markdown]
# ## A block by hand
#
# A pre-norm block with attention off ($W_o = 0$), an FFN of identity matrices and ReLU, on the stream
# $((1, 2), (3, 4))$: $x + \mathrm{ReLU}(\mathrm{RMSNorm}(x))$. The first token has the mean square $2.5$ and becomes
# $(1 + 1/\sqrt{2.5},\ 2 + 2/\sqrt{2.5}) = (1.632, 3.265)$; the second $12.5$ and $(3.849, 5.131)$.
#
# A post-norm block norms the sum instead: $\mathrm{RMSNorm}(x + \mathrm{ReLU}(x))$ after attention's own norm, so
# whatever comes in, the stream has the root mean square 1 behind every block.

# %%
stream = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
after = {}
for placement in ("pre", "post"):
    two = plain(2, 2, placement=placement)
    two.decoder.blocks[0].attn.f.o.weight.zero_()
    two.decoder.blocks[0].ffn.f.up.weight.copy_(torch.eye(2))
    two.decoder.blocks[0].ffn.f.down.weight.copy_(torch.eye(2))
    with ct.edit(two, {"embed": stream}), ct.trace(two, "resid_post") as t:
        two(torch.tensor([[0, 1]]))
    after[placement] = t["blocks.0.resid_post"][0]
print(after["pre"])
by_hand = torch.tensor([[1.632, 3.265], [3.849, 5.131]])
print(claim("pre-norm block by hand: largest difference", (after["pre"] - by_hand).abs().max(), below=1e-3))
rms = after["post"].square().mean(-1).sqrt()
claim("post-norm block: root mean square of every token", rms.mean(), predicted=1, rtol=1e-4)

# %% [markdown]
# ## Where the parameters are
#
# Attention has four matrices of $d \times d$. The classic FFN has two of $d \times 4d$: $8 d^2$ against $4 d^2$, 2 :
# 1. At $d = 4096$ that FFN has $8 \cdot 4096^2 = 134$ million. A gated FFN (SwiGLU, [Shazeer
#    2020](https://arxiv.org/abs/2002.05202)) has three matrices; at $\tfrac23 \cdot 4d$ hidden values it costs the
#    same $8 d^2$. Llama-3 8B takes 14,336 instead: $3 \cdot 4096 \cdot 14336 = 176$ million a layer.


# %%
def matrices(part):
    return sum(p.numel() for p in part.parameters() if p.ndim == 2)


def ffn_of(ffn, d_model=4096):
    block = {"attention": {"heads": 32}, "ffn": ffn}
    shape = {"form": "decoder", "vocab_size": 8, "d_model": d_model, "decoder": {"layers": 1, "block": block}}
    return matrices(ct.build(shape, device="meta").decoder.blocks[0].ffn)  # shapes, and no memory


gpt2 = ct.build("gpt2", device="meta").decoder.blocks[0]
llama = ct.build("llama-3-8b", device="meta").decoder.blocks[0]
print(claim("GPT-2: FFN beside attention", matrices(gpt2.ffn) / matrices(gpt2.attn), predicted=2, rtol=0))
classic, gated = ffn_of({"kind": "mlp"}), ffn_of({"kind": "gated"})
print(claim("classic FFN at 4,096, millions", classic / 1e6, predicted=8 * 4096**2 / 1e6, rtol=0))
print(claim("SwiGLU at 2/3 · 4d beside it", gated / classic, predicted=1, rtol=1e-3))
claim("Llama-3 8B: FFN of a layer, millions", matrices(llama.ffn) / 1e6, predicted=176.16, rtol=1e-4)

# %% [markdown]
# ## First weights: what a matrix does to a spread
#
# Multiply a vector of $n$ values with variance 1 by a matrix of independent weights with variance $\sigma^2$: each
# value of the result is a sum of $n$ terms, so its variance is $n \sigma^2$. In a chain of $L$ matrices the standard
# deviation goes as $(\sqrt n\,\sigma)^L$. At $n = 256$:
#
# - $\sigma = 0.02$: $0.32$ a matrix; after ten, $10^{-4.9}$;
# - $\sigma = 0.1$: $1.6$ a matrix; after ten, $10^{+2.0}$;
# - Xavier (Glorot and Bengio 2010), uniform in $\pm\sqrt{6/(n_\text{in} + n_\text{out})}$, has variance
#   $2/(n_\text{in} + n_\text{out})$, which is $1/n$ for a square: 1 a matrix. For $d \to 4d$ it is $2d/5d = 0.4$ of
#   the variance, for $4d \to d$ 1.6.

# %%
draw = torch.Generator().manual_seed(0)
bound = math.sqrt(6 / 512)
kinds = {
    "σ = 0.02": lambda: 0.02 * torch.randn(256, 256, generator=draw),
    "σ = 0.1": lambda: 0.1 * torch.randn(256, 256, generator=draw),
    "Xavier": lambda: bound * (2 * torch.rand(256, 256, generator=draw) - 1),
}
spreads = {}
for name, matrix in kinds.items():
    x = torch.randn(64, 256, generator=draw)
    spreads[name] = [float(x.std())]
    for _ in range(10):
        x = x @ matrix()
        spreads[name].append(float(x.std()))

# %%
shrunk, grown = (math.log10(spreads[name][-1]) for name in ("σ = 0.02", "σ = 0.1"))
print(claim("ten of σ = 0.02: log₁₀ of the spread", shrunk, predicted=10 * math.log10(0.32), rtol=0.05))
print(claim("ten of σ = 0.1: log₁₀ of the spread", grown, predicted=10 * math.log10(1.6), rtol=0.1))
claim("ten of Xavier's: the spread", spreads["Xavier"][-1], predicted=1, rtol=0.2)

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
for (name, values), colour, factor in zip(spreads.items(), (BLUE, ORANGE, GREEN), (0.32, 1.6, 1), strict=True):
    axes.semilogy(values, "o", color=colour, label=name)
    axes.semilogy([factor**depth for depth in range(11)], color=colour, linewidth=1)
axes.set(
    xlabel="matrices passed",
    ylabel="standard deviation",
    title="A chain of matrices shrinks, explodes or keeps (lines: predicted)",
)
axes.legend(frameon=False)

# %% [markdown]
# The library's Xavier is that one:

# %%
glorot = plain(256, 1024, heads=4, init={"kind": "xavier"}).decoder.blocks[0]
q, up = glorot.attn.f.q.weight.std(), glorot.ffn.f.up.weight.std()
print(claim("spread of Xavier's weights, 256 → 256", q, predicted=math.sqrt(2 / 512), rtol=0.02))
claim("spread of Xavier's weights, 256 → 1024", up, predicted=math.sqrt(2 / 1280), rtol=0.02)

# %% [markdown]
# ## First weights: the stream adds
#
# In a pre-norm Transformer no chain of matrices stands between the ends: every sublayer reads a normed vector (mean
# square 1) and adds. With independent weights, variances add. With $\sigma = 0.02$ for all:
#
# - attention of a token that sees itself alone: $W_v$ makes $d\sigma^2$, $W_o$ makes $d\sigma^2$ of that:
#   $d^2\sigma^4$;
# - the FFN: $W_1$ makes $d\sigma^2$, ReLU leaves half of the mean square, $W_2$ sums $4d$ of them: $2 d^2 \sigma^4$.
#
# So after $N$ blocks the stream's variance is
#
# $$\sigma^2 + 3 N d^2 \sigma^4$$
#
# which at $d = 256$ and $N = 32$ is 1.007: 2,500 times the embedding's, and growing with depth. GPT-2 divides the
# weights of the two matrices that write ($W_o$, $W_2$) by $\sqrt{2N}$, their variance by $2N$. Then it is
#
# $$\sigma^2 + \tfrac32 d^2 \sigma^4 = 0.0161$$
#
# at *every* depth: a model of 32 blocks begins like one of 4. (What ReLU lets through has a mean, the same for all
# tokens, so one draw of weights is a sample of 256 values and not of 65,536: allow 15 % at 32 blocks, where draws
# average out, and 25 % at 4.)

# %%
d, sigma, depths = 256, 0.02, (4, 8, 16, 32)
tokens = torch.arange(256)[:, None]  # (256, 1): texts of one token, which sees itself alone
variances = {}
for scaled in (False, True):
    for depth in depths:
        deep = plain(d, 4 * d, layers=depth, heads=4, init={"kind": "normal", "std": sigma, "depth_scaled": scaled})
        with ct.trace(deep, "embed", "resid_post") as t:
            deep(tokens)
        variances[scaled, depth] = [float(t[name].square().mean()) for name in t]  # depth + 1 values
plain_end = sigma**2 + 3 * 32 * d**2 * sigma**4
scaled_end = sigma**2 + 1.5 * d**2 * sigma**4
print(claim("32 blocks, not scaled: the variance", variances[False, 32][-1], predicted=plain_end, rtol=0.15))
print(claim("32 blocks, scaled", variances[True, 32][-1], predicted=scaled_end, rtol=0.15))
print(claim("4 blocks, scaled", variances[True, 4][-1], predicted=scaled_end, rtol=0.25))
grown = (variances[False, 32][-1] - sigma**2) / (variances[False, 4][-1] - sigma**2)
claim("not scaled: what 32 blocks add beside what 4 add", grown, predicted=8, rtol=0.25)

# %%
figure, axes = plt.subplots(figsize=(6, 3.4))
for scaled, colour, name in ((False, ORANGE, "not scaled"), (True, BLUE, "scaled by 1/√2N")):
    for depth in depths:
        label = name if depth == 32 else None
        axes.semilogy(variances[scaled, depth], color=colour, marker="o", markersize=3, linewidth=1, label=label)
axes.semilogy([sigma**2 + 3 * n * d**2 * sigma**4 for n in range(33)], color="black", linestyle=":", label="predicted")
axes.axhline(scaled_end, color="black", linestyle=":")
axes.set(xlabel="blocks passed (models of 4, 8, 16, 32)", ylabel="variance of the stream")
axes.set_title("Scaled, the stream ends alike at every depth")
axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.7))

# %% [markdown]
# ## Update beside stream
#
# What a block adds matters beside what is there. If every block adds the same variance $a$, the update of block $n$
# beside the stream is $\sqrt{a / (\sigma^2 + n a)}$: it falls as $1/\sqrt n$, so later blocks of a fresh pre-norm
# model change the stream ever less. For block 31 with $a = 3 d^2 \sigma^4$: $1/\sqrt{31} = 0.18$.

# %%
unscaled = plain(d, 4 * d, layers=32, heads=4, init={"kind": "normal", "depth_scaled": False})
with ct.trace(unscaled, "resid_pre", "resid_post") as t:
    unscaled(tokens)
before, after = t.stack_activation("resid_pre"), t.stack_activation("resid_post")  # (32, 256, 1, d)
fresh = ((after - before).norm(dim=-1) / before.norm(dim=-1)).mean((1, 2))  # (32,)
a = 3 * d**2 * sigma**4
expected = [math.sqrt(a / (sigma**2 + n * a)) for n in range(32)]
claim("fresh: update of block 31 beside the stream", fresh[31], predicted=expected[31], rtol=0.1)

# %% [markdown]
# Trained weights need not keep to that: nothing says that their blocks add alike, or at right angles. Take the rule
# as a guess all the same, $1/\sqrt n$ for blocks 1 to 5 of `tiny-python`, and allow a quarter. (Block 0 is another
# matter: what it adds is ten times as long as the embedding.)

# %%
with ct.trace(model, "resid_pre", "resid_post") as t:
    model(torch.tensor([checkpoint.tokenizer.encode(code)]))
before, after = t.stack_activation("resid_pre"), t.stack_activation("resid_post")  # (6, 1, T, d)
trained = ((after - before).norm(dim=-1) / before.norm(dim=-1)).mean((1, 2))  # (6,)
rule = 1 / torch.arange(1, 6).sqrt()
claim("trained: largest miss of the rule at blocks 1 to 5", (trained[1:] / rule - 1).abs().max(), below=0.25)

# %% [markdown]
# The rule holds roughly, here and on five pieces of the standard library, where it misses by 18 to 20 %, but not for
# its reason. What blocks add grows with depth, and it is not at right angles to the stream, as notebook 1 shows: the
# stream grows faster than a random walk, and updates with it. Another guess was wrong: that training makes the last
# FFN alone louder than the rule's 0.45. It adds 0.38.

# %%
grows = (after - before).norm(dim=-1).mean((1, 2))
sizes = analysis.update_norm_ratios(checkpoint, code).values.mean(1).view(6, 2)  # (blocks, attention and FFN)
figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3.2), layout="constrained")
left.loglog(range(1, 32), fresh[1:], "o", markersize=3, color=GREY, label="measured")
left.loglog(range(1, 32), expected[1:], color="black", linestyle=":", label="predicted")
left.set_yticks([1, 0.5, 0.3, 0.2], ["1", "0.5", "0.3", "0.2"])
left.minorticks_off()
left.set(title="fresh, 32 blocks", xlabel="block", ylabel="|update| / |stream|")
right.plot(range(1, 6), trained[1:], "o", color=GREY, label="block")
right.plot(range(1, 6), rule, color="black", linestyle=":", label="1/√n")
for column, (name, colour) in enumerate((("attention", BLUE), ("FFN", ORANGE))):
    right.plot(range(1, 6), sizes[1:, column], marker="s", markersize=3, linewidth=1, color=colour, label=name)
right.set(title="tiny-python, trained", xlabel="block", ylim=(0, None))
left.legend(frameon=False), right.legend(frameon=False)
figure.suptitle("What is added, beside what it is added to", fontsize=10)
claim("trained: length of block 5's update beside block 1's (equal if the reason held)", grows[5] / grows[1], above=1.5)

# %% [markdown]
# ## Try
#
# - Replace ReLU by GELU in `plain`: of values as small as these it is nearly $x/2$ and leaves about 0.3 of the mean
#   square, not 0.5, so the stream ends lower.
# - Give `tokens` the shape (16, 16): attention now averages values of several tokens, which shrinks its share, and
#   the stream ends below the prediction.
# - Use `placement="post"` with 32 blocks: the stream's variance is 1 behind every block, whatever the first weights
#   are. What that does to gradients is notebook 5.
#
# Exercises: `cutaway learn start 5` (FFN against attention parameters), `cutaway learn start 6` (LayerNorm and
# RMSNorm of one vector), `cutaway learn start 7` (pre-norm and post-norm equations).
