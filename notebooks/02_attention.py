# %% [markdown]
# # 2. Attention, masks and heads
#
# Attention is the only operation of a Transformer that mixes tokens. This notebook measures why scores are divided by
# $\sqrt{d_\text{head}}$, which pairs of tokens are visible under each of six masks, that a causal model has no
# information leak from later tokens, what the heads of a trained model attend to, how grouped-query attention reduces
# the KV cache, and that attention without a mask and without positions is permutation-equivariant.
#
# Prerequisites: [notebook 1](01_forward_pass.py).

# %%
import math

import matplotlib.pyplot as plt
import torch

import cutaway as ct
from cutaway.config import to_dict
from cutaway.learn import claim
from cutaway.lens import analysis

torch.set_grad_enabled(False)
generator = torch.Generator().manual_seed(0)
BLUE, ORANGE, GREEN, GRAY = "#0072B2", "#E69F00", "#009E73", "#999999"

# %% [markdown]
# ## Why scores are divided by √d_head
#
# $$\mathrm{attention}(Q, K, V) = \mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{d_\text{head}}} + \text{mask}\right) V$$
#
# Let the entries of a query and a key be independent, with mean 0 and variance 1. Each product $q_i k_i$ has variance
# 1, and $q \cdot k$ is a sum of $d_\text{head}$ of them: its standard deviation is $\sqrt{d_\text{head}}$. For
# $d_\text{head} = 64$ that is 8; for 1024 it is 32.

# %%
widths = [4, 16, 64, 256, 1024]
q, k = torch.randn(2, 10_000, 1024, generator=generator)
score_std = torch.stack([(q[:, :width] * k[:, :width]).sum(-1).std() for width in widths])
print(claim("standard deviation of q·k at d_head = 64", score_std[2], predicted=8, rtol=0.05, id="C052"))
exponent = (score_std[-1] / score_std[0]).log() / math.log(widths[-1] / widths[0])
claim("exponent of d_head in the standard deviation of q·k", exponent, predicted=0.5, rtol=0.03, id="C051")

# %% [markdown]
# What is softmax of scores with standard deviation 8? Let 128 keys have scores $s_j \sim N(0, \sigma^2)$, and measure
# the concentration of the weights by $\sum_j p_j^2$. It is 1 if one key has all the weight, and $1/n$ if all $n$
# weights are equal. $1/\sum_j p_j^2$ is the effective number of keys.
#
# - Small $\sigma$: sums of $e^{s}$ are close to their means, so
#   $\sum p^2 \approx \frac{1}{n}\frac{E[e^{2s}]}{E[e^{s}]^2} = \frac{e^{\sigma^2}}{n}$. With $\sigma = 1$:
#   $e/128 = 0.021$, or 47 keys.
# - Large $\sigma$: the largest few scores dominate. This is the random energy model of statistical physics (Derrida
#   1981): above $\sigma_c = \sqrt{2 \ln n}$ the weights concentrate on few keys, and $\sum p^2 \to 1 - \sigma_c/\sigma$
#   as $n \to \infty$. With $n = 128$, $\sigma_c = 3.1$, and $\sigma = 8$ gives 0.61: fewer than two keys. Convergence
#   is slow and from above (the measured curve is above the limit throughout), so the tolerance is 15 %.

# %%
n = 128
q, k = torch.randn(2000, 1, 64, generator=generator), torch.randn(2000, n, 64, generator=generator)
scores = (q * k).sum(-1)  # (2000, n)
unscaled, scaled = scores.softmax(-1), (scores / math.sqrt(64)).softmax(-1)
concentration = {name: p.square().sum(-1).mean() for name, p in (("unscaled", unscaled), ("scaled", scaled))}
print(claim("divided by √64: concentration Σp²", concentration["scaled"], predicted=math.e / n, rtol=0.08, id="C053"))
limit = 1 - math.sqrt(2 * math.log(n)) / 8
claim("not divided: concentration Σp²", concentration["unscaled"], predicted=limit, rtol=0.15, id="C053")

# %%
sigma = torch.linspace(0.25, 12, 48)
normal = torch.randn(2000, n, generator=generator)
measured = torch.stack([(s * normal).softmax(-1).square().sum(-1).mean() for s in sigma])
critical = math.sqrt(2 * math.log(n))
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.plot(sigma, measured, color=BLUE, label="measured, 128 keys")
axes.plot(sigma[sigma < 2], sigma[sigma < 2].square().exp() / n, color=ORANGE, linestyle="--", label="$e^{σ^2}/n$")
axes.plot(sigma[sigma > critical], 1 - critical / sigma[sigma > critical], color=GREEN, ls="--", label="$1 − σ_c/σ$")
for position, name in ((1, "scaled"), (8, "d_head 64, not scaled")):
    axes.axvline(position, color=GRAY, linewidth=0.8)
    axes.text(position + 0.15, 0.93, name, color="#555555", fontsize=8)
axes.set(
    xlabel="standard deviation of the scores, σ",
    ylabel="concentration Σp²",
    ylim=(0, 1),
    title="Attention weights concentrate as σ grows",
)
axes.legend(frameon=False, loc="lower right")

# %% [markdown]
# Concentrated weights have small gradients. The derivative of a weight with respect to its own score is
# $\partial p_j / \partial s_j = p_j (1 - p_j)$; its sum over the keys is $1 - \sum p^2$. Autograd must give the same
# number.

# %%
softmax_jacobian = torch.func.vmap(torch.func.jacrev(lambda s: s.softmax(-1)))(scores[:20])  # (20, n, n)
trace = softmax_jacobian.diagonal(dim1=-2, dim2=-1).sum(-1).mean()
expected = 1 - float(unscaled[:20].square().sum(-1).mean())
claim("not divided: Σ ∂p/∂s over the keys, by autograd", trace, predicted=expected, rtol=1e-4, id="C053")

# %% [markdown]
# ## The shapes of GPT-2
#
# GPT-2 has d_model 768 and 12 heads, so 64 dimensions per head. Each head computes a score for every pair of tokens:
# for 128 tokens, a 128 × 128 matrix in each of the 12 heads of each layer. `estimate_memory` gives these shapes before
# a forward pass, for a model on the meta device.

# %%
gpt2 = ct.build("gpt2", device="meta")
estimate = ct.trace(gpt2, "attn.q", "attn.scores", layers=0).estimate_memory(batch_size=1, seq_len=128)
print(estimate)
print(claim("d_head of GPT-2, 768 / 12", estimate[0].shape[-1], predicted=64, rtol=0, id="C055"))
claim("number of scores in one layer", math.prod(estimate[1].shape), predicted=12 * 128 * 128, rtol=0, id="C294")

# %% [markdown]
# ## Attention in four lines, on a trained model
#
# q, k and v are recorded from `tiny-english`, a model of 6 blocks with 8 heads that is trained on children's stories;
# scores, pattern and z are computed by hand.

# %%
checkpoint = ct.load("tiny-english", dtype=torch.float32)
model, tokenizer = checkpoint.model, checkpoint.tokenizer
story = (
    "Once upon a time, there was a girl named Sue. She had a friend named Ben. One day, Sue and Ben went to the park "
    'to play with a red ball. Ben kicked the ball very hard, and it flew over the fence. "Oh no!" said Sue. "We have '
    'to get the ball back." A big dog was behind the fence. The dog had the ball in its mouth. Ben was scared, but Sue '
    "said hello to the dog. The dog dropped the ball and wagged its tail. Sue and Ben were very happy."
)
tokens = torch.tensor([tokenizer.encode(story)])  # (1, T)
T = tokens.shape[1]
with ct.trace(model, "blocks.2.attn.*") as t:
    model(tokens)
attn = {name.split(".")[-1]: t[name].as_subclass(torch.Tensor) for name in t}

# %%
q, k, v = (attn[name].transpose(1, 2) for name in "qkv")  # (1, H, T, D)
scores = q @ k.mT / math.sqrt(32)  # (1, H, T, T)
scores = scores + torch.full((T, T), -torch.inf).triu(1)
pattern = scores.softmax(-1)
z = (pattern @ v).transpose(1, 2)  # (1, T, H, D)
print(claim("by hand against the library: largest difference in z", (z - attn["z"]).abs().max(), below=1e-4, id="C048"))
claim(
    "row sums of the pattern: largest difference from 1",
    (attn["pattern"].sum(-1) - 1).abs().max(),
    below=1e-5,
    id="C050",
)

# %% [markdown]
# Heads are independent until $W_o$. $W_o$ applied to the concatenated heads equals the sum of each head's output
# through its own 32 columns of $W_o$: $\text{out} = \sum_h W_o^{(h)} z_h$. So the contribution of one head to the
# residual stream is well defined.

# %%
columns = model.decoder.blocks[2].attn.f.o.weight.view(256, 8, 32)  # (d, H, D)
by_head = torch.einsum("bthe,dhe->bhtd", attn["z"], columns)  # (1, H, T, d)
difference = (by_head.sum(1) - attn["out"]).abs().max()
claim("per-head outputs sum to attn.out: largest difference", difference, below=1e-4, id="C057")

# %% [markdown]
# ## Six masks
#
# A mask defines which keys are visible to a query; a masked score is $-\infty$, so its weight is exactly 0. The number
# of visible pairs has a closed form, here for $T = 12$ tokens:
#
# | mask | pairs | visible keys |
# |---|---|---|
# | causal | $T(T+1)/2$ | the query's own and earlier positions |
# | left padding, 4 of 12 | $8 \cdot 9/2$ | causal; padding is neither a query nor a key |
# | sliding window of 4 | $T \cdot 4 - 4 \cdot 3/2$ | the last four positions, including the query's own |
# | prefix of 5 | $T(T+1)/2 + 5 \cdot 4/2$ | causal, and bidirectional within the first five |
# | packed documents, 4 + 5 + 3 | $\sum n(n+1)/2$ | causal within each document |
# | cross-attention, source of 9 with 2 padding | $T \cdot 7$ | every source token that is not padding |
#
# The masks below are read from the library's attention patterns: a pair is visible if its weight is above 0.


# %%
def visible_pairs(model, *args, site="blocks.0.attn.pattern", **kwargs):
    """(T, S): True where the attention weight is above 0 in head 0."""
    with ct.trace(model, site) as t:
        model(*args, **kwargs)
    return t[site][0, 0] > 0


def build_decoder(**attention):
    block = {"attention": {"heads": 4, **attention}}
    return ct.build(
        {"form": "decoder", "vocab_size": 64, "d_model": 32, "decoder": {"layers": 2, "block": block}}, seed=0
    )


ids = torch.arange(12)[None]  # (1, 12)
padding_mask = (torch.arange(12) >= 4)[None]
document_ids = torch.tensor([[0] * 4 + [1] * 5 + [2] * 3])
source, source_mask = torch.arange(9)[None], (torch.arange(9) < 7)[None]

# %%
decoder = build_decoder()
prefix = {"prefix_lengths": torch.tensor([5])}
masks = {
    "causal": (visible_pairs(decoder, ids), 12 * 13 // 2),
    "left padding": (visible_pairs(decoder, ids, padding_mask), 8 * 9 // 2),
    "sliding window of 4": (visible_pairs(build_decoder(window=4), ids), 12 * 4 - 4 * 3 // 2),
    "prefix of 5": (visible_pairs(decoder, ids, **prefix), 12 * 13 // 2 + 5 * 4 // 2),
    "packed 4 + 5 + 3": (
        visible_pairs(decoder, ids, document_ids=document_ids),
        4 * 5 // 2 + 5 * 6 // 2 + 3 * 4 // 2,
    ),
}
t5 = ct.build("tiny-t5", seed=0)
cross = visible_pairs(t5, source, ids, source_mask, site="decoder.blocks.0.cross.pattern")
masks["cross, source 9 − 2"] = (cross, 12 * 7)
for name, (visible, num_pairs) in masks.items():
    print(claim(f"{name}: visible pairs", visible.sum(), predicted=num_pairs, rtol=0, id="C070"))

# %%
figure, all_axes = plt.subplots(2, 3, figsize=(6, 4.2), layout="constrained")
for axes, (name, (visible, _)) in zip(all_axes.flat, masks.items(), strict=True):
    axes.imshow(visible, cmap="Blues", vmin=0, vmax=1.3)
    axes.set_title(name, fontsize=9)
    axes.set_xticks([]), axes.set_yticks([])
figure.supxlabel("key", fontsize=9)
figure.supylabel("query", fontsize=9)
figure.suptitle("Visible pairs under six masks", fontsize=10)

# %% [markdown]
# ## Causality of the whole model
#
# The mask applies in each layer, but causality is a property of the whole model. To test it, replace token $j$ and
# record which logits change. Under a causal mask only logits at positions $\ge j$ may change, which are $T(T+1)/2$
# pairs of a replaced token and a position. Without the mask the logits of all $T^2$ pairs change. One batch contains
# the text and twenty variants, each with one token replaced.

# %%
short = tokens[:, :20]
variants = short.repeat(21, 1)  # the last row is the unchanged text
variants[range(20), range(20)] = (variants[range(20), range(20)] + 1) % 4096


def max_logit_change():
    """(replaced token, position): largest absolute change of any logit."""
    logits = model(variants)
    return (logits[:20] - logits[20]).abs().amax(-1)


with_mask = max_logit_change()
with ct.edit(model, {"mask": "drop"}):
    without_mask = max_logit_change()
tolerance = 1e-3
changed_pairs = (with_mask > tolerance).sum()
print(claim("pairs (token, position) whose logits change", changed_pairs, predicted=20 * 21 // 2, rtol=0, id="C078"))
print(claim("largest change at an earlier position", with_mask.tril(-1).max(), below=tolerance, id="C078"))
claim("pairs whose logits change without the mask", (without_mask > tolerance).sum(), predicted=20 * 20, rtol=0)

# %%
figure, panels = plt.subplots(1, 2, figsize=(6, 3.2), layout="constrained")
for axes, change, name in zip(panels, (with_mask, without_mask), ("causal mask", "mask removed"), strict=True):
    image = axes.imshow((change.T + 1e-6).log10(), cmap="Blues", vmin=-4, vmax=1.5)
    axes.set(title=name, xlabel="replaced token", ylabel="position of the logits")
figure.colorbar(image, ax=panels, shrink=0.7, label="log₁₀ of the largest change")
figure.suptitle("Logits that change when one token is replaced", fontsize=10)

# %% [markdown]
# ## Attention entropy
#
# The entropy of the rows of a head's pattern measures how widely the head attends. Uniform attention has an entropy of
# $\log_2 t$ bits at token $t$, so its average over $T$ tokens is $\log_2(T!)/T$.
#
# Untrained heads are nearly uniform. With weights $N(0, 0.02^2)$ and a normalized input of width 256, each entry of q
# and k has standard deviation $0.02 \cdot \sqrt{256} = 0.32$, and a score, divided by $\sqrt{d_\text{head}}$, has
# $\sigma = 0.32^2 = 0.102$. To second order this reduces the entropy by $\sigma^2/2$ nats, times $1 - 1/t$ because
# softmax depends only on score differences: about 0.007 bits.

# %%
untrained = ct.build(checkpoint.config, seed=0)
distinct_tokens = torch.randperm(4096, generator=generator)[:64][None]
uniform_entropy = math.log2(math.factorial(64)) / 64
mean_factor = 1 - sum(1 / t for t in range(1, 65)) / 64  # mean of 1 − 1/t
expected = 0.32**4 / 2 / math.log(2) * mean_factor
block_0 = analysis.attention_entropy(untrained, distinct_tokens).values[0].mean()
claim("untrained, block 0: entropy below uniform, bits", uniform_entropy - block_0, predicted=expected, rtol=0.2)

# %% [markdown]
# Trained heads are more selective. Prediction: the effective number of keys, $2^{\text{entropy}}$, of the most
# selective head is less than a quarter of that of uniform attention. Each point is a head, on one text:

# %%
trained_entropy = analysis.attention_entropy(checkpoint, story).values  # (layers, heads)
untrained_entropy = analysis.attention_entropy(untrained, tokens).values
uniform_entropy = math.lgamma(T + 1) / math.log(2) / T
figure, axes = plt.subplots(figsize=(6, 3.2))
for values, color, name in ((untrained_entropy, GRAY, "untrained"), (trained_entropy, BLUE, "trained")):
    axes.scatter(torch.arange(6).repeat_interleave(8), values, s=16, color=color, label=name)
axes.axhline(uniform_entropy, color="black", linestyle=":", label="uniform attention")
axes.set(
    xlabel="block",
    ylabel="attention entropy, bits",
    ylim=(0, None),
    title="Attention entropy of trained and untrained heads",
)
axes.legend(frameon=False, loc="lower left")
ratio = 2 ** (trained_entropy.min() - uniform_entropy)
claim("effective number of keys of the most selective head / uniform", ratio, below=0.25)

# %% [markdown]
# ## Previous-token heads and induction heads
#
# A *previous-token head* attends to the token before the query. An *induction head* attends to the token that followed
# the previous occurrence of the query's token, and so copies repetitions ([Olsson et al.
# 2022](https://arxiv.org/abs/2209.11895)). An induction head needs keys that encode the preceding token; in block 0 a
# key encodes only its own token. So, on a sequence of 32 random tokens that is repeated:
#
# - heads of block 0 cannot be induction heads. The induction target is 31 positions before the query, and in block 0 it
#   is a random token like its neighbor at 30 positions, so the mean weights on the two are equal. (They are not those
#   of uniform attention: some heads of block 0 attend to the earlier copy of the query's token, at 32 positions.)
# - the best induction head is in a later block than the best previous-token head.

# %%
generator.manual_seed(0)
repeated = torch.stack([torch.randperm(4096, generator=generator)[:32] for _ in range(64)]).repeat(1, 2)  # (64, 64)
with ct.trace(model, "attn.pattern") as t:
    model(repeated)
patterns = t.stack_activation("attn.pattern")  # (layers, B, H, T, T)


def weight_at_offset(offset):
    """(layers, heads): mean attention weight on the token `offset` positions before a query of the second half."""
    return patterns.diagonal(-offset, -2, -1)[..., -31:].mean((1, 3))


target, neighbor = weight_at_offset(31), weight_at_offset(30)
ratio = target[0].mean() / neighbor[0].mean()
print(claim("block 0: weight on the induction target / on its neighbor", ratio, predicted=1, rtol=0.1))
claim("best induction head: weight on the induction target / on its neighbor", (target / neighbor).max(), above=10)

# %% [markdown]
# The library's `head_scores` measures both types, as the mean attention weight on the previous token and on the
# induction target. Uniform attention has a score of 0.021, the mean of $1/t$ over the second half.

# %%
head_scores = analysis.head_scores(checkpoint)  # 32 random tokens, repeated once
previous, induction = (head_scores.select(head_type=name).values for name in ("previous_token", "induction"))
uniform = sum(1 / t for t in range(33, 65)) / 32
best_previous, best_induction = (divmod(int(values.argmax()), 8) for values in (previous, induction))
print(f"best previous-token head {best_previous}, best induction head {best_induction}, as (block, head)")
print(claim("score of the best previous-token head / uniform", previous.max() / uniform, above=10, id="C270"))
print(claim("score of the best induction head / uniform", induction.max() / uniform, above=5, id="C270"))
claim("block of the induction head − block of the previous-token head", best_induction[0] - best_previous[0], above=0)

# %%
figure, panels = plt.subplots(1, 2, figsize=(6, 3), layout="constrained")
for axes, values, name in zip(panels, (previous, induction), ("previous token", "induction"), strict=True):
    image = axes.imshow(values, cmap="Blues", vmin=0)
    axes.set(title=name, xlabel="head", ylabel="block")
    figure.colorbar(image, ax=axes, shrink=0.7)
figure.suptitle("Attention weight on the previous token and on the induction target", fontsize=10)

# %% [markdown]
# ## Heads that attend to a name
#
# After “Sue had a friend named Ben. One day, Sue and”, the next token is the other name. Prediction: some heads attend
# from the last token to `Ben`, and they are needed. If the outputs of all heads with more than half of their weight on
# `Ben` are set to zero, the probability of `Ben` falls below 0.5. The control sets as many other heads of the same
# blocks to zero, those with the smallest weight on `Ben`.

# %%
name_text = "Sue had a friend named Ben. One day, Sue and"
name_tokens = torch.tensor([tokenizer.encode(name_text)])
name_texts = [tokenizer.decode([token]).strip() for token in name_tokens[0].tolist()]
[ben] = tokenizer.encode(" Ben")


def probability_without(heads):
    """Probability of the next token `Ben`, with the outputs of the given heads (block, head) set to zero."""
    edits = {f"blocks.{i}.attn.z": {"do": "zero", "heads": [h for j, h in heads if j == i]} for i, _ in heads}
    with ct.edit(model, edits):
        return model(name_tokens)[0, -1].softmax(-1)[ben]


with ct.trace(model, "attn.pattern") as t:
    probability = model(name_tokens)[0, -1].softmax(-1)[ben]
last_token = t.stack_activation("attn.pattern")[:, 0, :, -1]  # (layers, heads, T): weights of the last token
on_name = last_token[..., name_texts.index("Ben")]  # (layers, heads)
name_heads = [tuple(head) for head in (on_name > 0.5).nonzero().tolist()]
control_heads = []
for i in range(6):
    count = int((on_name[i] > 0.5).sum())
    control_heads += [(i, int(head)) for head in on_name[i].argsort()[:count]]
print("heads with more than half of their weight on Ben, as (block, head):", *name_heads)
print(claim("probability of Ben", probability, above=0.9))
print(claim("probability of Ben without these heads", probability_without(name_heads), below=0.5))
claim("probability of Ben without as many other heads", probability_without(control_heads), above=0.9)

# %%
figure, axes = plt.subplots(figsize=(6.4, 3), layout="constrained")
rows = torch.stack([last_token[head] for head in name_heads])  # (heads, T)
image = axes.imshow(rows, cmap="Blues", vmin=0, vmax=1, aspect="auto")
axes.set_xticks(range(len(name_texts)), name_texts, rotation=60)
axes.set_yticks(range(len(name_heads)), [f"{i}.{h}" for i, h in name_heads])
axes.set(xlabel="key", ylabel="head (block.head)", title="Attention weights of the last token")
figure.colorbar(image, ax=axes, shrink=0.8)

# %% [markdown]
# Several heads attend to the name, and one can replace another: without the head that has the largest weight, the
# probability of `Ben` is still above 0.9. So a large attention weight alone does not show that a head is needed.

# %%
best = divmod(int(on_name.argmax()), 8)
claim("probability of Ben without the head with the largest weight", probability_without([best]), above=0.9)

# %% [markdown]
# ## Grouped-query attention
#
# Keys and values are stored in the KV cache for all later tokens; queries are not. In grouped-query attention
# ([Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)) several query heads share one key-value head. With $G$
# key-value heads the cache stores $2 N G d_\text{head}$ numbers per token instead of $2 N H d_\text{head}$. Llama-3 8B
# has $H = 32$ and $G = 8$, so its cache has a quarter of the size.

# %%
cache_bytes = {}
for kv_heads in (32, 8, 1):
    config = to_dict(ct.config("llama-3-8b"))
    config["decoder"]["block"][0]["attention"]["kv_heads"] = kv_heads
    size = ct.size(config, batch_size=1, context=8192, dtype="bf16")
    cache_bytes[kv_heads] = size.memory.peak_by_component["kv cache"]
print({f"{kv_heads} KV heads": f"{num_bytes / 2**30:.3f} GiB" for kv_heads, num_bytes in cache_bytes.items()})
print(
    claim(
        "GQA with 8 of 32 KV heads: cache / MHA cache",
        cache_bytes[8] / cache_bytes[32],
        predicted=1 / 4,
        rtol=0,
        id="C199",
    )
)
claim("MQA with 1 of 32 KV heads: cache / MHA cache", cache_bytes[1] / cache_bytes[32], predicted=1 / 32, rtol=0)

# %% [markdown]
# GQA equals MHA with repeated heads: an MHA model whose key and value heads are copies of the shared ones must have
# the same logits.

# %%
grouped, full = build_decoder(kv_heads=2), build_decoder()
weights = grouped.state_dict()
for name, weight in weights.items():
    if name.endswith((".k.weight", ".v.weight")):  # (2·8, 32) → (4·8, 32)
        weights[name] = weight.view(2, 8, 32).repeat_interleave(2, 0).flatten(0, 1)
full.load_state_dict(weights)
claim(
    "GQA against MHA with repeated heads: largest difference",
    (grouped(ids) - full(ids)).abs().max(),
    below=1e-5,
    id="C063",
)

# %% [markdown]
# ## Permutation equivariance
#
# $\mathrm{softmax}(QK^\top)V$ is a sum over keys, and a sum does not depend on order. Without a mask or positions,
# permuting the tokens permutes the outputs: $f(Px) = P f(x)$. A causal mask breaks this, and so does every position
# encoding ([notebook 3](03_positions.py)).

# %%
no_positions = {"layers": 2, "block": {"attention": {"heads": 4, "position": {"kind": "none"}}}}
order = torch.randperm(12, generator=generator)


def equivariance_error(model):
    """‖f(Px) − P f(x)‖ / ‖f(x)‖ for a random permutation P."""
    output, permuted = model(ids), model(ids[:, order])
    return float((permuted - output[:, order]).norm() / output.norm())


shape = {"vocab_size": 64, "d_model": 32, "init": {"kind": "xavier"}}
encoder = ct.build({"form": "encoder", "encoder": no_positions, **shape}, seed=0)
decoder = ct.build({"form": "decoder", "decoder": no_positions, **shape}, seed=0)
print(claim("no positions, no mask: equivariance error", equivariance_error(encoder), below=1e-5, id="C022"))
claim("no positions, causal mask: equivariance error", equivariance_error(decoder), above=0.01, id="C024")

# %% [markdown]
# ## Try
#
# - Set `n` to 1024 keys: $\sigma_c$ grows as $\sqrt{\ln n}$, to 3.7, so more keys do not prevent concentration at
#   $\sigma = 8$.
# - Use `{"kind": "rope"}` in `no_positions`: the encoder's equivariance error is no longer 0.
# - Combine the sliding window with packed documents (`build_decoder(window=4)` with `document_ids=document_ids`): a
#   pair is visible if both masks allow it. 10 + 14 + 6 pairs are visible in the three documents.
#
# Exercises: `cutaway learn start 1` (attention by hand), `cutaway learn start 2` (causal mask),
# `cutaway learn start 3` (head splitting), `cutaway learn start 9` (name the mask).
