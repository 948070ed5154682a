# %% [markdown]
# # 2. Attention, masks and heads
#
# Attention is the only place where tokens mix. Afterwards you know why scores are divided by $\sqrt{d_\text{head}}$
# and what happens without, who sees whom under each of six masks, that nothing leaks back from the future, what heads
# come to do in a trained model, and why attention without mask and positions cannot tell the order of its tokens.
#
# Needs: notebook 1.

# %%
import math

import matplotlib.pyplot as plt
import torch

import cutaway as ct
from cutaway.config import to_dict
from cutaway.learn import claim
from cutaway.lens import analysis

torch.set_grad_enabled(False)
draw = torch.Generator().manual_seed(0)
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#999999"

# %% [markdown]
# ## Why the square root
#
# $$\mathrm{attention}(Q, K, V) = \mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{d_\text{head}}} + \text{mask}\right) V$$
#
# Take a query and a key whose values are independent, with mean 0 and variance 1. Each product $q_i k_i$ has variance
# 1, and $q \cdot k$ is a sum of $d_\text{head}$ of them: its standard deviation is $\sqrt{d_\text{head}}$. For a head
# of 64 that is 8; for 1024 it is 32.

# %%
widths = [4, 16, 64, 256, 1024]
q, k = torch.randn(2, 10_000, 1024, generator=draw)
spread = torch.stack([(q[:, :width] * k[:, :width]).sum(-1).std() for width in widths])
print(claim("spread of q·k at a head width of 64", spread[2], predicted=8, rtol=0.05))
slope = (spread[-1] / spread[0]).log() / math.log(widths[-1] / widths[0])
claim("q·k spreads as a power of the width", slope, predicted=0.5, rtol=0.03)

# %% [markdown]
# What does a spread of 8 do to softmax? Let 128 keys have scores $s_j \sim N(0, \sigma^2)$, and measure how
# concentrated the weights are by $\sum_j p_j^2$: 1 when one key gets all, $1/n$ when all get the same;
# $1/\sum_j p_j^2$ is the number of keys that are really looked at.
#
# - Small $\sigma$: sums of $e^{s}$ are near their means, so
#   $\sum p^2 \approx \frac{1}{n}\frac{E[e^{2s}]}{E[e^{s}]^2} = \frac{e^{\sigma^2}}{n}$. With $\sigma = 1$:
#   $e/128 = 0.021$, or 47 keys.
# - Large $\sigma$: the largest few scores decide. This is a known problem of physics, the random energy model
#   (Derrida 1981): above $\sigma_c = \sqrt{2 \ln n}$ the weights freeze, and $\sum p^2 \to 1 - \sigma_c/\sigma$ as
#   $n \to \infty$. With $n = 128$, $\sigma_c = 3.1$, and $\sigma = 8$ gives 0.61: fewer than two keys. The limit is
#   reached slowly, from above (the curve below lies over it throughout), so allow 15 %.

# %%
n = 128
q, k = torch.randn(2000, 1, 64, generator=draw), torch.randn(2000, n, 64, generator=draw)
scores = (q * k).sum(-1)  # (2000, n)
plain, scaled = scores.softmax(-1), (scores / math.sqrt(64)).softmax(-1)
together = {name: p.square().sum(-1).mean() for name, p in (("plain", plain), ("scaled", scaled))}
print(claim("divided by √64: concentration", together["scaled"], predicted=math.e / n, rtol=0.08))
frozen = 1 - math.sqrt(2 * math.log(n)) / 8
claim("not divided: concentration", together["plain"], predicted=frozen, rtol=0.15)

# %%
sigma = torch.linspace(0.25, 12, 48)
normal = torch.randn(2000, n, generator=draw)
measured = torch.stack([(s * normal).softmax(-1).square().sum(-1).mean() for s in sigma])
critical = math.sqrt(2 * math.log(n))
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.plot(sigma, measured, color=BLUE, label="measured, 128 keys")
axes.plot(sigma[sigma < 2], sigma[sigma < 2].square().exp() / n, color=ORANGE, linestyle="--", label="$e^{σ^2}/n$")
axes.plot(sigma[sigma > critical], 1 - critical / sigma[sigma > critical], color=GREEN, ls="--", label="$1 − σ_c/σ$")
for place, name in ((1, "scaled"), (8, "d_head 64, not scaled")):
    axes.axvline(place, color=GREY, linewidth=0.8)
    axes.text(place + 0.15, 0.93, name, color="#555555", fontsize=8)
axes.set(xlabel="spread of the scores, σ", ylabel="concentration Σp²", ylim=(0, 1), title="Wide scores freeze softmax")
axes.legend(frameon=False, loc="lower right")

# %% [markdown]
# A frozen softmax hardly learns. The slope of a weight by its own score is
# $\partial p_j / \partial s_j = p_j (1 - p_j)$, and summed over the keys that is $1 - \sum p^2$: the gradient gets
# what concentration leaves. Autograd must say the same.

# %%
slopes = torch.func.vmap(torch.func.jacrev(lambda s: s.softmax(-1)))(scores[:20])  # (20, n, n)
left = slopes.diagonal(dim1=-2, dim2=-1).sum(-1).mean()
concentrated = plain[:20].square().sum(-1).mean()
claim("what is left of the slope without the division", left, predicted=1 - float(concentrated), rtol=1e-4)

# %% [markdown]
# ## The shapes, on GPT-2
#
# Width 768 in 12 heads is 64 a head. Every head compares all tokens with all tokens: 128 tokens make a matrix of 128
# × 128 in each of the 12 heads of each layer. `estimate_memory` says so before anything runs, on a model
# without values.

# %%
gpt2 = ct.build("gpt2", device="meta")
wide = ct.trace(gpt2, "attn.q", "attn.scores", layers=0).estimate_memory(batch_size=1, seq_len=128)
print(wide)
print(claim("width of a head, 768 over 12", wide[0].shape[-1], predicted=64, rtol=0))
claim("numbers in the scores of one layer", math.prod(wide[1].shape), predicted=12 * 128 * 128, rtol=0)

# %% [markdown]
# ## Four lines, on a real model
#
# q, k and v as the trained model made them, and from there by hand.

# %%
checkpoint = ct.load("tiny-python", dtype=torch.float32)
model, tokenizer = checkpoint.model, checkpoint.tokenizer
code = '''def read(path, encoding="utf-8"):
    """Return the text of a file, line by line."""
    lines = []
    with open(path, encoding=encoding) as file:
        for line in file:
            line = line.strip()
            if line:
                lines.append(line)
    return lines
'''
tokens = torch.tensor([tokenizer.encode(code)])  # (1, T)
T = tokens.shape[1]
with ct.trace(model, "blocks.2.attn.*") as t:
    model(tokens)
at = {name.split(".")[-1]: t[name].as_subclass(torch.Tensor) for name in t}

# %%
q, k, v = (at[name].transpose(1, 2) for name in "qkv")  # (1, H, T, D)
scores = q @ k.mT / math.sqrt(32)  # (1, H, T, T)
scores = scores + torch.full((T, T), -torch.inf).triu(1)
pattern = scores.softmax(-1)
z = (pattern @ v).transpose(1, 2)  # (1, T, H, D)
print(claim("by hand and by the library: largest difference in z", (z - at["z"]).abs().max(), below=1e-4))
claim("rows of the pattern sum to 1: largest miss", (at["pattern"].sum(-1) - 1).abs().max(), below=1e-5)

# %% [markdown]
# Heads do not talk to each other. $W_o$ applied to all of them side by side is the same as each head adding its own
# part through its own 32 columns of $W_o$: $\text{out} = \sum_h W_o^{(h)} z_h$. So one can say what a head added.

# %%
columns = model.decoder.blocks[2].attn.f.o.weight.view(256, 8, 32)  # (d, H, D)
by_head = torch.einsum("bthe,dhe->bhtd", at["z"], columns)  # (1, H, T, d)
claim("the heads' own parts add up to attn.out", (by_head.sum(1) - at["out"]).abs().max(), below=1e-4)

# %% [markdown]
# ## Six masks
#
# A mask says which keys a query may see; what it may not see gets a score of $-\infty$, so a weight of exactly 0. How
# many pairs are left can be counted beforehand, for $T = 12$ tokens:
#
# | mask | pairs | |
# |---|---|---|
# | causal | $T(T+1)/2$ | itself and what came before |
# | left padding, 4 of 12 | $8 \cdot 9/2$ | padding sees nothing and is not seen |
# | window of 4 | $T \cdot 4 - 4 \cdot 3/2$ | the last four, itself among them |
# | prefix of 5 | $T(T+1)/2 + 5 \cdot 4/2$ | the first five see each other, too |
# | packed, 4 + 5 + 3 | $\sum n(n+1)/2$ | three texts in one row |
# | cross, source of 9, two of it padding | $T \cdot 7$ | every target token sees every real source token |
#
# The masks below are not drawn by hand: they are where the library's patterns are above 0.


# %%
def seen(model, *given, site="blocks.0.attn.pattern", **how):
    """(T, S): where a query gives a key any weight."""
    with ct.trace(model, site) as t:
        model(*given, **how)
    return t[site][0, 0] > 0


def tiny(**attention):
    block = {"attention": {"heads": 4, **attention}}
    return ct.build(
        {"form": "decoder", "vocab_size": 64, "d_model": 32, "decoder": {"layers": 2, "block": block}}, seed=0
    )


twelve = torch.arange(12)[None]
real = (torch.arange(12) >= 4)[None]
texts = torch.tensor([[0] * 4 + [1] * 5 + [2] * 3])
source, source_mask = torch.arange(9)[None], (torch.arange(9) < 7)[None]

# %%
masks = {
    "causal": (seen(tiny(), twelve), 12 * 13 // 2),
    "left padding": (seen(tiny(), twelve, real), 8 * 9 // 2),
    "window of 4": (seen(tiny(window=4), twelve), 12 * 4 - 4 * 3 // 2),
    "prefix of 5": (seen(tiny(), twelve, prefix_lengths=torch.tensor([5])), 12 * 13 // 2 + 5 * 4 // 2),
    "packed 4 + 5 + 3": (seen(tiny(), twelve, document_ids=texts), 4 * 5 // 2 + 5 * 6 // 2 + 3 * 4 // 2),
}
translator = ct.build("tiny-t5", seed=0)
across = seen(translator, source, twelve, source_mask, site="decoder.blocks.0.cross.pattern")
masks["cross, source 9 − 2"] = (across, 12 * 7)
for name, (visible, pairs) in masks.items():
    print(claim(f"{name}: pairs that see each other", visible.sum(), predicted=pairs, rtol=0))

# %%
figure, all_axes = plt.subplots(2, 3, figsize=(6, 4.2), layout="constrained")
for axes, (name, (visible, _)) in zip(all_axes.flat, masks.items(), strict=True):
    axes.imshow(visible, cmap="Blues", vmin=0, vmax=1.3)
    axes.set_title(name, fontsize=9)
    axes.set_xticks([]), axes.set_yticks([])
figure.supxlabel("key", fontsize=9)
figure.supylabel("query", fontsize=9)
figure.suptitle("Who sees whom: six masks of the library", fontsize=10)

# %% [markdown]
# ## Nothing leaks back
#
# The mask acts inside each layer; does it hold for the model? Change one token $j$ and see which logits move. Under a
# causal mask only those at $j$ and behind it may: again $T(T+1)/2$ pairs. Without the mask all $T^2$. One batch holds
# the text and its twenty variants, each with another token replaced.

# %%
short = tokens[:, :20]
variants = short.repeat(21, 1)  # the last row is the text itself
variants[range(20), range(20)] = (variants[range(20), range(20)] + 1) % 2048


def moved():
    """(changed token, place): the largest change of any logit."""
    logits = model(variants)
    return (logits[:20] - logits[20]).abs().amax(-1)


with_mask = moved()
with ct.edit(model, {"mask": "drop"}):
    without = moved()
noise = 1e-3
print(claim("pairs (token, later place) that notice", (with_mask > noise).sum(), predicted=20 * 21 // 2, rtol=0))
print(claim("largest change at an earlier place", with_mask.tril(-1).max(), below=noise))
claim("pairs that notice without the mask", (without > noise).sum(), predicted=20 * 20, rtol=0)

# %%
figure, both = plt.subplots(1, 2, figsize=(6, 3.2), layout="constrained")
for axes, change, name in zip(both, (with_mask, without), ("causal mask", "mask dropped"), strict=True):
    drawn = axes.imshow((change.T + 1e-6).log10(), cmap="Blues", vmin=-4, vmax=1.5)
    axes.set(title=name, xlabel="token changed", ylabel="place of the logits")
figure.colorbar(drawn, ax=both, shrink=0.7, label="log₁₀ of the largest change")
figure.suptitle("Masked, a change is felt from its place on; unmasked, everywhere", fontsize=10)

# %% [markdown]
# ## What heads come to do
#
# How widely a head looks is the entropy of its pattern's rows. A head that looks everywhere alike has $\log_2 t$ bits
# at token $t$, so over $T$ tokens $\log_2(T!)/T$.
#
# Fresh weights are almost such heads. With weights $N(0, 0.02^2)$ and a normed input of width 256 each value of q and
# k has the standard deviation $0.02 \cdot \sqrt{256} = 0.32$, and a score, divided by $\sqrt{d_\text{head}}$, has
# $\sigma = 0.32^2 = 0.102$. To second order that costs $\sigma^2/2$ nats of entropy, times $1 - 1/t$ since scores
# matter only by their differences: about 0.007 bits.

# %%
fresh = ct.build(checkpoint.config, seed=0)
different = torch.randperm(2000, generator=draw)[:64][None]
limit = math.log2(math.factorial(64)) / 64
share = 1 - sum(1 / t for t in range(1, 65)) / 64
missing = 0.32**4 / 2 / math.log(2) * share
first = analysis.attention_entropy(fresh, different).values[0].mean()
claim("bits that a fresh block 0 lacks to looking everywhere alike", limit - first, predicted=missing, rtol=0.2)

# %% [markdown]
# Training takes that away: a head that is of use must choose. The sharpest one should look at less than a quarter of
# the places that looking everywhere alike would give. On real code, each dot a head:

# %%
trained = analysis.attention_entropy(checkpoint, code).values  # (layers, heads)
untrained = analysis.attention_entropy(fresh, tokens).values
most = math.lgamma(T + 1) / math.log(2) / T
figure, axes = plt.subplots(figsize=(6, 3.2))
for values, colour, name in ((untrained, GREY, "fresh"), (trained, BLUE, "trained")):
    axes.scatter(torch.arange(6).repeat_interleave(8), values, s=16, color=colour, label=name)
axes.axhline(most, color="black", linestyle=":", label="everywhere alike")
axes.set(xlabel="block", ylabel="entropy, bits", ylim=(0, None), title="Training makes heads choose")
axes.legend(frameon=False, loc="lower left")
claim("places of the sharpest trained head, 2^entropy, beside all", 2 ** (trained.min() - most), below=0.25)

# %% [markdown]
# Two kinds of heads are known by what they look at ([Olsson et al. 2022](https://arxiv.org/abs/2209.11895)). A
# *previous-token head* looks one back. An *induction head* looks at what followed the last time the present token was
# there, and so copies repetitions. The second needs the first: a key must know which token came before it, and in
# block 0 it knows only its own. So, on random tokens that are repeated:
#
# - in block 0 no head can be an induction head: all stay at chance, the mean of $1/t$ over the second half, 0.021;
# - the best induction head stands in a later block than the best previous-token head.

# %%
kinds = analysis.head_scores(checkpoint)  # 32 random tokens, twice
previous, induction = (kinds.select(head_type=each).values for each in ("previous_token", "induction"))
chance = sum(1 / t for t in range(33, 65)) / 32
print(claim("induction in block 0, mean of its heads", induction[0].mean(), predicted=chance, rtol=0.1))
looks_back, copies = (divmod(int(kind.argmax()), 8) for kind in (previous, induction))
print(f"best previous-token head {looks_back}, best induction head {copies}, as (block, head)")
print(claim("best previous-token head, beside chance", previous.max() / chance, above=10))
print(claim("best induction head, beside chance", induction.max() / chance, above=5))
claim("blocks from the best previous-token head to the best induction head", copies[0] - looks_back[0], above=0)

# %%
figure, both = plt.subplots(1, 2, figsize=(6, 3), layout="constrained")
for axes, values, name in zip(both, (previous, induction), ("previous token", "induction"), strict=True):
    drawn = axes.imshow(values, cmap="Blues", vmin=0)
    axes.set(title=name, xlabel="head", ylabel="block")
    figure.colorbar(drawn, ax=axes, shrink=0.7)
figure.suptitle("Share of attention on the token before, and on what followed last time", fontsize=10)

# %% [markdown]
# ## Fewer keys and values
#
# Queries are made for the moment; keys and values are kept for all tokens to come. Grouped-query attention ([Ainslie
# et al. 2023](https://arxiv.org/abs/2305.13245)) lets several query heads share one key and value head. With $G$ of
# them a token leaves $2 N G d_\text{head}$ numbers behind instead of $2 N H d_\text{head}$. Llama-3 8B has $H = 32$,
# $G = 8$: a quarter.

# %%
bytes_kept = {}
for groups in (32, 8, 1):
    shape = to_dict(ct.config("llama-3-8b"))
    shape["decoder"]["block"][0]["attention"]["kv_heads"] = groups
    bytes_kept[groups] = ct.size(shape, batch_size=1, context=8192, dtype="bf16").memory.peak_by_component["kv cache"]
print({f"{groups} key heads": f"{size / 2**30:.3f} GiB" for groups, size in bytes_kept.items()})
print(claim("GQA, 8 of 32: cache beside MHA", bytes_kept[8] / bytes_kept[32], predicted=1 / 4, rtol=0))
claim("MQA, 1 of 32: cache beside MHA", bytes_kept[1] / bytes_kept[32], predicted=1 / 32, rtol=0)

# %% [markdown]
# It is the same attention: an MHA model whose key and value heads are copies, each as often as it is shared, must say
# the same.

# %%
shared, full = tiny(kv_heads=2), tiny()
weights = shared.state_dict()
for name, weight in weights.items():
    if name.endswith((".k.weight", ".v.weight")):  # (2·8, 32) → (4·8, 32)
        weights[name] = weight.view(2, 8, 32).repeat_interleave(2, 0).flatten(0, 1)
full.load_state_dict(weights)
claim("GQA and MHA with repeated heads: largest difference", (shared(twelve) - full(twelve)).abs().max(), below=1e-5)

# %% [markdown]
# ## Attention does not know the order
#
# $\mathrm{softmax}(QK^\top)V$ is a sum over keys, and a sum has no order. Without mask and positions, shuffling the
# tokens shuffles the outputs and changes none of them: $f(Px) = P f(x)$. A causal mask alone breaks this, and so does
# every position method (notebook 3).

# %%
unordered = {"layers": 2, "block": {"attention": {"heads": 4, "position": {"kind": "none"}}}}
order = torch.randperm(12, generator=draw)


def noticed(model):
    """How much a shuffled text is not the shuffled output, beside the output's size."""
    straight, shuffled = model(twelve), model(twelve[:, order])
    return float((shuffled - straight[:, order]).norm() / straight.norm())


shape = {"vocab_size": 64, "d_model": 32, "init": {"kind": "xavier"}}
encoder = ct.build({"form": "encoder", "encoder": unordered, **shape}, seed=0)
decoder = ct.build({"form": "decoder", "decoder": unordered, **shape}, seed=0)
print(claim("no positions, no mask: a shuffle that the model notices", noticed(encoder), below=1e-5))
claim("no positions, causal mask: the same shuffle", noticed(decoder), above=0.01)

# %% [markdown]
# ## Try
#
# - Give `n` 1024 keys: $\sigma_c$ grows only as $\sqrt{\ln n}$, to 3.7, so longer texts do not help a score of spread
#   8.
# - Use `{"kind": "rope"}` in `unordered`: the encoder notices the shuffle at once.
# - Put the window mask and packed documents together (`tiny(window=4)` with `document_ids=texts`): rules are joined by
#   *and*. In the three texts 10 + 14 + 6 pairs are left.
#
# Exercises: `cutaway learn start 1` (attention by hand), `cutaway learn start 2` (causal mask),
# `cutaway learn start 3` (head splitting), `cutaway learn start 9` (name the mask).
