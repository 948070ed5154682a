# %% [markdown]
# # 1. The forward pass of one word
#
# A text goes in, and the model says which token comes next. Here every step between is done by hand from the weights,
# in plain torch, and each value is held against the one that the library shows under its name. Afterwards you know
# every vector that a word becomes on its way, what is added to it where, and at which depth the answer is decided.
#
# Needs: matrices, softmax. The model is `tiny-python`, which comes with cutaway: 6 blocks, 8 heads, width 256,
# trained on Python's standard library.

# %%
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import cutaway as ct
from cutaway.learn import claim
from cutaway.lens import analysis

torch.set_grad_enabled(False)
checkpoint = ct.load("tiny-python", dtype=torch.float32)
model, tokenizer = checkpoint.model, checkpoint.tokenizer
w = {name.removeprefix("decoder."): weight for name, weight in model.state_dict().items()}
text = "for name in sorted(os."

# %% [markdown]
# ## How many numbers there are
#
# Before anything runs: the shapes alone say how large the model is. A table of $V$ rows of width $d$, which the head
# uses again; in each of $N$ blocks four square matrices for attention, three of $d \times h$ for the FFN, and two
# norms of $d$ gains; one more norm at the end:
#
# $$V d + N\,(4 d^2 + 3 d h + 2 d) + d$$

# %%
V, d, N, H, h = 2048, 256, 6, 8, 768
D = d // H  # 32, the width of a head
by_hand = V * d + N * (4 * d * d + 3 * d * h + 2 * d) + d
claim("parameters follow from five sizes", sum(p.numel() for p in model.parameters()), predicted=by_hand, rtol=0)

# %% [markdown]
# ## Text to tokens to vectors
#
# The tokenizer cuts the text into pieces of its vocabulary. A token is a number; its vector is that row of the table.
# No position is added here: this model tells positions apart inside attention, by rotation (notebook 3).

# %%
ids = tokenizer.encode(text)
tokens = torch.tensor([ids])  # (1, T)
words = [tokenizer.decode([token]) for token in ids]
T = len(ids)
x = w["embed.token.weight"][tokens]  # (1, T, d)
print(dict(zip(words, ids, strict=True)), "→", tuple(x.shape))

# %% [markdown]
# The head is the same table read the other way: the logit of token $j$ is the product of the stream with row $j$. So
# if nothing stood between table and head, a token would mostly say itself, since a vector agrees with itself more
# than with others. In 256 dimensions two unrelated directions have a cosine of about $1/\sqrt{256} = 0.06$, so nearly
# all of the 2,048 tokens should. The few that do not have a neighbour with a longer row.

# %%
table = w["embed.token.weight"]
said = model.head(model.decoder.final_norm(table)).argmax(-1)  # (V,)
itself = (said == torch.arange(V)).float().mean()
claim("without any block a token says itself: share of the vocabulary", itself, above=0.9)

# %% [markdown]
# ## Three small functions
#
# RMSNorm divides a vector by its root mean square and multiplies by trained gains:
# $\mathrm{norm}(x) = x / \sqrt{\mathrm{mean}(x^2) + \epsilon} \cdot g$. Whatever the length of $x$ was, before the
# gains it is $\sqrt d = 16$ afterwards.
#
# RoPE turns each pair $(a_i, b_i)$ of a head's values by the angle position $\cdot\ 10000^{-2i/D}$.
#
# Attention compares each query with every key before it, and mixes values by the result.


# %%
def norm(x, gain):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def rope(x):  # (1, T, H, D)
    angle = torch.arange(x.shape[1])[:, None] * 10000 ** (-torch.arange(0, D, 2) / D)  # (T, D/2)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]  # (T, 1, D/2): the same for all heads
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend(q, k, v):  # (1, T, H, D) each
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(D)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    pattern = scores.softmax(-1)  # (1, H, T, T), rows sum to 1
    return scores, pattern, torch.einsum("bhts,bshd->bthd", pattern, v)


# %%
claim("a vector of any length is √d long after the norm", norm(100 * x, 1.0).norm(dim=-1).mean(), predicted=16)

# %% [markdown]
# ## One block, twice a sum
#
# $$x \leftarrow x + W_o\,\mathrm{attention}(\mathrm{norm}(x)) \qquad x \leftarrow x + \mathrm{FFN}(\mathrm{norm}(x))$$
#
# with $\mathrm{FFN}(y) = W_\text{down}\,(\mathrm{silu}(W_\text{gate}\,y) \odot W_\text{up}\,y)$. Every value gets the
# name under which the library knows it.


# %%
def block(x, i):
    """The stream after block i, and every value on the way by its name."""
    p, s = f"blocks.{i}.", {}
    s["resid_pre"] = x
    s["attn.in"] = y = norm(x, w[p + "attn.norm_in.weight"])
    q, k, v = ((y @ w[p + f"attn.f.{name}.weight"].T).view(1, T, H, D) for name in "qkv")
    s["attn.q"], s["attn.k"], s["attn.v"] = rope(q), rope(k), v
    s["attn.scores"], s["attn.pattern"], s["attn.z"] = attend(rope(q), rope(k), v)
    s["attn.out"] = s["attn.z"].flatten(-2) @ w[p + "attn.f.o.weight"].T
    s["resid_mid"] = x = x + s["attn.out"]
    s["ffn.in"] = y = norm(x, w[p + "ffn.norm_in.weight"])
    gate, up = (y @ w[p + f"ffn.f.{name}.weight"].T for name in ("gate", "up"))  # (1, T, h)
    s["ffn.hidden"] = F.silu(gate) * up
    s["ffn.out"] = s["ffn.hidden"] @ w[p + "ffn.f.down.weight"].T
    s["resid_post"] = x = x + s["ffn.out"]
    return x, {p + name: value for name, value in s.items()}


# %% [markdown]
# Six blocks, the final norm, the head: that is the whole model. It has $1 + 6 \cdot 14 + 2 = 87$ named values.

# %%
mine = {"embed": x}
for i in range(N):
    x, inside = block(x, i)
    mine |= inside
mine["final_norm"] = norm(x, w["final_norm.weight"])
mine["logits"] = mine["final_norm"] @ table.T  # (1, T, V)

with ct.trace(model, "*") as t:
    model(tokens)
claim("named values on the way", len(t), predicted=len(mine), rtol=0)

# %% [markdown]
# `ct.trace` reads the same values out of the model while it runs. The model uses PyTorch's fused attention and sums
# in another order, so the last bits may differ: 32-bit numbers have about 7 digits, and some hundred operations
# follow one another. Predicted: equal to 5 digits of each value's own size, at all 87 places.


# %%
def apart(a, b):
    """The largest difference, beside the largest value; hidden scores are −∞ on both sides."""
    seen = torch.isfinite(b)
    return float((a - b)[seen].abs().max() / b[seen].abs().max()) if (seen == torch.isfinite(a)).all() else math.inf


worst = max(apart(mine[name], t[name].as_subclass(torch.Tensor)) for name in mine)
claim("by hand and by the library: largest difference at any of the 87 places", worst, below=1e-5)

# %% [markdown]
# ## The stream is a sum
#
# Blocks only add. So the stream before the final norm is the embedding plus twelve additions, whatever the order:
#
# $$x_\text{final} = x_\text{embed} + \sum_{i=0}^{5} (\text{attn.out}_i + \text{ffn.out}_i)$$

# %%
added = {name: mine[name][0, -1] for name in mine if name.endswith(("attn.out", "ffn.out"))}  # 12 × (d,)
total = mine["embed"][0, -1] + sum(added.values())
claim("embedding + 12 additions = final stream", apart(total, t["blocks.5.resid_post"][0, -1]), below=1e-5)

# %% [markdown]
# Were the additions in unrelated directions, their squares would add up (Pythagoras), and the last vector would be as
# long as the root of the sum of squares. Sublayers that agree make it longer than that. How long does it get?

# %%
lengths = torch.stack([mine["embed"][0, -1], *added.values()]).norm(dim=-1)
straight = lengths.square().sum().sqrt()
labels = ["embed", *(name.removeprefix("blocks.").removesuffix(".out") for name in added)]
so_far = torch.cumsum(torch.stack([mine["embed"][0, -1], *added.values()]), 0).norm(dim=-1)
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.bar(labels, lengths, color=["#999999"] + ["#0072B2", "#E69F00"] * N)
axes.plot(labels, so_far, color="black", marker="o", markersize=3, label="the stream after it")
axes.plot(labels, lengths.square().cumsum(0).sqrt(), color="black", linestyle=":", label="if all were at right angles")
axes.set(ylabel="length of the vector", title=f"What attention (blue) and FFN (orange) add to “{words[-1]}”")
axes.tick_params(axis="x", rotation=60)
axes.legend(frameon=False)
claim("the stream is longer than additions at right angles would make it", total.norm() / straight, above=1)

# %% [markdown]
# ## From the stream to an answer
#
# Softmax turns the last token's 2,048 logits into probabilities.

# %%
p = mine["logits"][0, -1].softmax(-1)
best = p.topk(5)
for share, token in zip(best.values, best.indices, strict=True):
    print(f"{tokenizer.decode([token])!r:10} {share:.3f}")
[answer] = ct.generate(checkpoint, text, max_new_tokens=1)
claim("the likeliest token is the one that is generated", best.indices[0], predicted=answer.tokens[0], rtol=0)

# %% [markdown]
# The head is linear, and the final norm divides the whole vector by one number. With that number held fixed, the
# logit is a sum like the stream: every sublayer's part of it is
# $\text{gain} \odot \text{out} / \text{rms} \cdot E_j$. This is where "who wrote the answer" has an exact meaning.

# %%
rms = (total.square().mean() + 1e-6).sqrt()
row = w["final_norm.weight"] * table[best.indices[0]]  # (d,)
parts = {"embed": mine["embed"][0, -1], **added}
written = {name: float(part @ row / rms) for name, part in parts.items()}
read = analysis.direct_logit_attribution(checkpoint, text, answer.text).values  # the library's reading of the same
print(claim("parts by hand and by the library", (torch.tensor(list(written.values())) - read).abs().max(), below=1e-3))
logit = float(mine["logits"][0, -1].max())
claim("the parts of the logit add up to the logit", sum(written.values()), predicted=logit, rtol=1e-4)

# %% [markdown]
# ## Where the answer is decided
#
# The stream has the same width everywhere, so the head can read it after any block: the *logit lens*. Two numbers can
# be said beforehand. At the embedding the model says the token itself, which is hardly ever the next one: worse than
# guessing among all tokens, $\log_2 2048 = 11$ bits. And since each block was trained to make the end better, the
# surprise at the next token should fall with every block.

# %%
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
many = torch.tensor([tokenizer.encode(code)])
with ct.trace(model, "embed", "resid_post") as t:
    model(many)
streams = torch.cat([t[name].as_subclass(torch.Tensor) for name in t])  # (N + 1, T, d)
logits = model.head(model.decoder.final_norm(streams))  # (N + 1, T, V)
target = many[:, 1:].expand(N + 1, -1)
surprise = F.cross_entropy(logits[:, :-1].transpose(1, 2), target, reduction="none") / math.log(2)  # bits
by_depth = surprise.mean(1)
print(claim("surprise at the embedding, in bits", by_depth[0], above=math.log2(V)))
claim("blocks after which the surprise is lower than before", (by_depth.diff() < 0).sum(), predicted=N, rtol=0)

# %%
depths = ["embed", *map(str, range(N))]
figure, axes = plt.subplots(figsize=(6, 3.2))
low, middle, high = surprise.quantile(torch.tensor([0.25, 0.5, 0.75]), dim=1)
axes.fill_between(depths, low, high, color="#0072B2", alpha=0.2, label="half of the tokens")
axes.plot(depths, by_depth, color="#0072B2", marker="o", label="mean")
axes.axhline(math.log2(V), color="black", linestyle=":", label="guessing among 2,048")
axes.set(
    xlabel="after block", ylabel="surprise at the next token, bits", title="Every block makes the next token likelier"
)
axes.legend(frameon=False)

# %% [markdown]
# An answer is *decided* at the first depth from which on the likeliest token never changes again. Read off
# `logit_lens`, for the short text:

# %%
lens = analysis.logit_lens(checkpoint, text)
lens.plot()

# %% [markdown]
# and counted for the longer one. If blocks only refined an early guess, most answers would stand by the middle of the
# model. The table above suggests otherwise, so predict: fewer than half are decided by block 2, the middle.

# %%
said = logits.argmax(-1)  # (N + 1, T)
holds = (said == said[-1]).flip(0).cumprod(0).flip(0)  # 1 from the depth on where the answer stays
decided = (N + 1) - holds.sum(0)  # 0 is the embedding, 1 is block 0, …
counts = torch.bincount(decided, minlength=N + 1)
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.bar(depths, counts / len(decided), color="#009E73")
axes.set(xlabel="decided after block", ylabel="share of tokens", title="Most answers are decided in the second half")
claim("share of answers that stand by the middle of the model", (decided <= N // 2).float().mean(), below=0.5)

# %% [markdown]
# ## Try
#
# - Change `text`, and follow `logit_lens`. After `"self.name = name\nself.path = path\nself.size ="` the answer, a
#   space, stands from block 2 on; after `"def f(self):\n    return self."` nothing is settled before block 3.
# - Leave out `/ math.sqrt(D)` in `attend`: the first place where the two part is `blocks.0.attn.scores`, and
#   everything after it. Notebook 2 says why the division is there.
# - Leave out the mask: the first row of every pattern changes most. The last token's values change in later blocks
#   only; in block 0 it saw everything anyway.
#
# Exercises: `cutaway learn start 1` (attention by hand), `cutaway learn start 3` (head splitting),
# `cutaway learn start 4` (count the parameters of Q, K, V, O). The same way as pictures: `cutaway open tiny-python`.
