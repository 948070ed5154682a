# %% [markdown]
# # 10. Looking inside a trained model
#
# A trained model is a sum of parts that read and write one stream. So one can ask what each part wrote, read the
# stream half-way, take a part out, or put a value of one run into another. Afterwards you can find which heads carry
# a name from one line of a program to the next, and show that it is these and no others.
#
# It needs the residual stream (notebook 4) and attention (notebook 2). The gallery (`docs/gallery.md`) shows more
# readings of the same model; here each comes with a prediction.

# %%
import json
import math
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import cutaway as ct
from cutaway.learn import claim
from cutaway.lens import analysis
from cutaway.pretrained import ABLATIONS_FILE

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
checkpoint = ct.load("tiny-python", dtype=torch.float32)
model, tokenizer = checkpoint.model, checkpoint.tokenizer
fresh = ct.build(checkpoint.config, seed=0, dtype=torch.float32)  # the same shape before any training
code = '''import socket

class Server:
    """Listen on a port, and answer one request after another."""

    def __init__(self, host, port, timeout=None):
        self.host = host
        self.port = port
        self.timeout = timeout
        self.socket = None

    def connect(self):
        self.socket = socket.create_connection((self.host, self.port), self.timeout)
        return self.socket
'''
tokens = torch.tensor([tokenizer.encode(code)])  # (1, T)

# %% [markdown]
# ## The stream is a sum, and so is a logit
#
# In a pre-norm model every sublayer adds to the stream and nothing ever overwrites it:
#
# $$x_{final} = x_{embed} + \sum_{l} \left( a_l + f_l \right).$$
#
# So embedding and twelve additions, read at their named sites, must give what the last block hands on, but for the
# order of additions in float32.

# %%
with torch.no_grad(), ct.trace(model, "embed", "attn.out", "ffn.out", "resid_post") as t:
    logits = model(tokens)[0]  # (T, V)
added = [t[f"blocks.{layer}.{part}.out"] for layer in range(6) for part in ("attn", "ffn")]
final = t["blocks.5.resid_post"]  # (1, T, d)
miss = (t["embed"] + sum(added) - final).norm() / final.norm()
claim("embedding and additions, short of the stream by this share", miss, below=1e-6)

# %% [markdown]
# ## How large, and in which direction
#
# Of a model without training, each addition is the product of a random matrix: it points anywhere. Random directions
# in $d$ dimensions have a cosine of mean 0 and standard deviation $1/\sqrt d$, so on average its size is
#
# $$\sqrt{\tfrac{2}{\pi}} \cdot \frac{1}{\sqrt{256}} = 0.0499.$$
#
# Training should leave a direction in it. Norms grow with depth, so what a block adds weighs less and less beside the
# stream.

# %%
cosines = {
    name: analysis.update_cosine_similarities(m, tokens).values for name, m in (("fresh", fresh), ("trained", model))
}
sizes = analysis.update_norm_ratios(checkpoint, code)  # (sublayer, token)
by_part = sizes.values.mean(1)
print(
    claim(
        "size of a fresh model's cosines",
        cosines["fresh"].abs().mean(),
        predicted=math.sqrt(2 / math.pi / 256),
        rtol=0.2,
    )
)
print(
    claim("mean cosine after training", cosines["trained"].mean(), above=3 / 16)
)  # three deviations of one random cosine
claim("block 5's FFN beside the stream, over block 0's", by_part[11] / by_part[1], below=0.2)

# %%
figure, both = plt.subplots(1, 2, figsize=(6, 3))
norms = analysis.resid_norms(checkpoint, code).values.mean(1)
both[0].plot(norms, "o-", color=BLUE)
both[0].set_xticks(range(7), ["in", *range(6)])
both[0].set(xlabel="after block (in: the embedding)", ylabel="mean length of the stream", title="The stream grows")
for at, (part, colour) in enumerate((("attention", ORANGE), ("FFN", GREEN))):
    both[1].semilogy(range(6), by_part[at::2], "o-", color=colour, label=part)
both[1].set(xlabel="block", ylabel="|addition| / |stream|", title="so additions weigh less")
both[1].set_yticks([0.3, 1, 3], ["0.3", "1", "3"])
both[1].minorticks_off()
both[1].legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# ## The logit lens
#
# Read the stream after each block with the final norm and the head, as if it were the last ([nostalgebraist
# 2020](https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens)). Two predictions. This
# head is the embedding's own table, and a vector's largest product is usually with itself: after the embedding the
# lens must say the token that was read. And since each block adds to what is there, agreement with the final answer
# must rise from block to block.

# %%
lens = analysis.logit_lens(checkpoint, code)  # (depth, token), with the likeliest token's text
says_itself = sum(a == b for a, b in zip(lens.annotations[0], lens.labels[1], strict=True)) / len(lens.labels[1])
agrees = [float((row == lens.annotations[-1]).mean()) for row in lens.annotations]
print([round(share, 2) for share in agrees])
print(claim("share of tokens at which the embedding says the token itself", says_itself, above=0.95))
claim(
    "smallest rise of agreement from one block to the next",
    min(b - a for a, b in pairwise(agrees)),
    above=0,
)

# %% [markdown]
# ## What wrote it
#
# A name that is bound on one line and used on another:

# %%
bound = "try:\n    value = int(text)\nexcept ValueError as {}:\n    raise TypeError("
clean, corrupt = bound.format("error"), bound.format("err")
with torch.no_grad():
    chances = model(torch.tensor([tokenizer.encode(clean)]))[0, -1].softmax(-1)
for chance, token in zip(*chances.topk(3), strict=True):
    print(f"{tokenizer.decode([int(token)])!r}: {float(chance):.2f}")

# %% [markdown]
# The final norm divides by one number for each token; with that number held fixed, the logit is linear in the stream,
# and the parts of the stream are parts of the logit. How much did each write of the *lead* of `error` over `err`? The
# embedding of `(` knows nothing of either name, and FFNs see only their own token: whatever tells the names apart
# must have been brought by attention first.

# %%
wrote = analysis.direct_logit_attribution(checkpoint, clean, "error", incorrect_token="err")
with torch.no_grad():
    last = model(torch.tensor([tokenizer.encode(clean)]))[0, -1]
lead = float(last[tokenizer.encode("error")[-1]] - last[tokenizer.encode("err")[-1]])
print(wrote)
claim("the parts add up to the lead in logits", wrote.values.sum(), predicted=lead, rtol=1e-4)

# %% [markdown]
# ## Heads: wide and narrow
#
# A head that looks at all it may see alike has, at position $t$, an entropy of $\log_2 t$ bits; over a text of $T$
# tokens
#
# $$\frac1T \sum_{t=1}^{T} \log_2 t = \frac{\log_2 T!}{T}.$$
#
# Before training scores are near 0, so every head must be near that. After training all must be below, some far
# below.

# %%
spread = {name: analysis.attention_entropy(m, tokens).values for name, m in (("fresh", fresh), ("trained", model))}
alike = math.lgamma(tokens.shape[1] + 1) / math.log(2) / tokens.shape[1]
print(claim("bits of a fresh model's narrowest head", spread["fresh"].min(), predicted=alike, rtol=0.01))
print(claim("bits of the trained model's widest head", spread["trained"].max(), below=alike))
claim("its narrowest head, as a share of looking everywhere", spread["trained"].min() / alike, below=0.5)

# %% [markdown]
# ## Induction: two heads that work together
#
# Show random tokens twice: A B C … A B C …. A model that copies must, at the second A, look at what followed the
# first A. The rule says where: with $L$ tokens in a half, from position $t$ to $t - (L-1)$. One head alone cannot: to
# find the place, the key of B must say "I come after A", and only a head that looks at the *token before* can have
# written that there. So ([Olsson et al.](https://arxiv.org/abs/2209.11895)): previous-token heads stand in earlier
# blocks than induction heads, and without them the latter go blind.

# %%
kinds = analysis.head_scores(checkpoint)  # (layer, head, head_type)
chance = sum(1 / t for t in range(33, 65)) / 32  # looking everywhere alike, in the second half of 64 tokens
previous, value = kinds.select(head_type="previous_token").top(1)[0]
copying, score = kinds.select(head_type="induction").top(1)[0]
print("looks at the token before: block {}, head {}".format(*previous), f"({value:.2f} of its attention)")
print("looks at what came next:   block {}, head {}".format(*copying), f"({score:.2f})")
print(
    claim(
        "a fresh model's heads do it by chance",
        analysis.head_scores(fresh).select(head_type="induction").values.mean(),
        predicted=chance,
        rtol=0.05,
    )
)
print(claim("the best induction head, over chance", score / chance, above=5))
claim("blocks from the one to the other", int(copying[0]) - int(previous[0]), above=0)

# %% [markdown]
# Now take the previous-token head away, and look at the induction head two blocks later: it should lose most of its
# target. Any other head of the same block is the control: nothing should happen.


# %%
def left_without(head):
    """The induction head's score without one head of the block of the previous-token head."""
    with ct.edit(checkpoint, {f"blocks.{previous[0]}.attn.z": {"do": "zero", "heads": [head]}}):
        return float(analysis.head_scores(checkpoint, batch_size=4)[copying[0], copying[1], "induction"])


whole = float(analysis.head_scores(checkpoint, batch_size=4)[copying[0], copying[1], "induction"])
left = [left_without(head) / whole for head in range(8)]
others = [share for head, share in enumerate(left) if head != int(previous[1])]
print(claim("share of its score left without the previous-token head", left[int(previous[1])], below=0.6))
claim("without any other head of that block, at least", min(others), above=0.85)

# %%
figure, both = plt.subplots(1, 2, figsize=(6.4, 3))
titles = {"previous_token": "token before", "induction": "what came next"}
for axes, (head_type, title) in zip(both, titles.items(), strict=True):
    drawn = axes.imshow(kinds.select(head_type=head_type).values, cmap="viridis", vmin=0, aspect="auto")
    axes.set(xlabel="head", ylabel="block", title=title)
    figure.colorbar(drawn, ax=axes, label="share of attention")
figure.tight_layout()

# %%
figure, axes = plt.subplots(figsize=(6, 2.8))
axes.bar(range(8), left, color=[RED if head == int(previous[1]) else BLUE for head in range(8)])
axes.axhline(1, color="0.6", lw=0.8, ls=":")
axes.set(
    xlabel=f"head of block {previous[0]} that is taken away",
    ylabel="induction score left",
    title=f"Head {copying[1]} of block {copying[0]} needs one of them",
)
figure.tight_layout()

# %% [markdown]
# ## Where a name is carried
#
# Back to `except ValueError as error`. Copying heads stand in blocks 4 and 5. If they are what brings the name to the
# end, then the name must stay at its own token until block 4, and be at the last one after block 5. Patching tests
# it: run the text with `err`, put in one value of the run with `error`, and see how much of the lead comes back (1 is
# all).

# %%
pair = {"clean": clean, "corrupted": corrupt, "answer_token": "error", "incorrect_token": "err"}
carried = analysis.activation_patching(checkpoint, **pair, site="resid_pre")  # (layer, token)
heads = analysis.activation_patching(checkpoint, **pair, site="attn.z", by_head=True)  # (layer, head)
at = next(place for place, word in enumerate(carried.labels[1]) if "error" in word)
print(claim("share that is at the name's own token before block 4", carried.values[4, at], predicted=1, rtol=0.1))
print(claim("share that is at the last token before block 5", carried.values[5, -1], above=0.3))
best, share = heads.top(1)[0]
print("the head that brings back most: block {}, head {}".format(*best), f"({share:.2f})")
claim("it is the best induction head of random tokens (1 = yes)", best == copying, predicted=1)

# %% [markdown]
# And a head that brings a name must look where it stands. At the last token, `(`, that head should spend most of its
# attention on ` error`.

# %%
with torch.no_grad(), ct.trace(model, "attn.pattern", positions=-1) as t:
    model(torch.tensor([tokenizer.encode(clean)]))
looks = torch.stack([t[f"blocks.{layer}.attn.pattern"][0, :, 0, at] for layer in range(6)])  # (layer, head)
claim("its attention to the name", looks[int(best[0]), int(best[1])], above=0.5)

# %%
figure, both = plt.subplots(1, 2, figsize=(7.2, 3.2), gridspec_kw={"width_ratios": [1.5, 1]})
drawn = both[0].imshow(carried.values[:, at - 2 :], cmap="viridis", vmin=0, vmax=1, aspect="auto")
words = [word.replace("\n", "↵").replace(" ", "·") for word in carried.labels[1][at - 2 :]]
both[0].set_xticks(range(len(words)), words, rotation=60, ha="right")
both[0].set(ylabel="before block", title="The name moves in blocks 4 and 5")
figure.colorbar(drawn, ax=both[0], label="lead that comes back")
both[1].scatter(looks, heads.values, s=14, color=BLUE)
both[1].annotate(
    f"block {best[0]}, head {best[1]}",
    (float(looks[int(best[0]), int(best[1])]), share),
    (-8, 0),
    textcoords="offset points",
    ha="right",
    va="center",
)
both[1].set(
    xlabel="attention to the name", ylabel="lead that comes back", title="Who brings it, looks at it", ylim=(-0.1, 0.55)
)
figure.tight_layout()

# %% [markdown]
# ## Without a part
#
# What should happen when a part is taken out of this model, which was trained with it?
#
# - **A middle block** adds about a third of the stream's length, and the others go on reading the same stream: some
#   loss, and most of the top five should stay. **Block 0** writes several times what it finds; without it later
#   blocks read a language they never saw.
# - **The order** of attention and FFN within a block: each reads a stream that lacks one addition of many. Little.
# - **The final norm** divides each token's stream by its length and multiplies by a gain. Without it the logits are
#   larger, all by one factor a token if the gains are alike: the order of tokens stays, the confidence is wrong. The
#   loss can be predicted: that of the same logits times rms$(x)$/gain.
# - **The mask**: what stands later becomes visible. The answer is in sight, and yet the loss should *rise*: this
#   model never learned to look there.
# - **Positions**: RoPE's turns are gone; every earlier token is as near as any other.

# %%
lost = analysis.ablation(checkpoint, code)
usual = float(lost["baseline", "loss"])
rms = final[0].pow(2).mean(-1, keepdim=True).sqrt()  # (T, 1)
gain = model.stacks["decoder"].final_norm.weight.detach()
louder = float(F.cross_entropy((logits * rms / gain.mean())[:-1], tokens[0, 1:]))
middle = [lost[f"without block {layer}", "loss"].values - usual for layer in (1, 2, 3, 4)]
print(f"loss as it is: {usual:.3f} nats a token")

# %%
print(claim("rise without a middle block, at most", max(middle), above=0, below=1))
print(
    claim(
        "rise without block 0, over the largest of those",
        (float(lost["without block 0", "loss"]) - usual) / max(middle),
        above=5,
    )
)
print(claim("loss without the final norm", float(lost["without the final norm", "loss"]), predicted=louder, rtol=0.02))
print(
    claim(
        "share of the top five that stays without it", lost["without the final norm", "top-5 overlap"].values, above=0.9
    )
)
print(
    claim(
        "rise without the mask, though the answer is in sight",
        float(lost["without the mask", "loss"]) - usual,
        above=0.3,
    )
)
print(claim("rise without positions", float(lost["without positions", "loss"]) - usual, above=0.3))
claim(
    "rise with attention and FFN in the other order in block 3",
    float(lost["FFN before attention in block 3", "loss"]) - usual,
    below=0.1,
)

# %% [markdown]
# Heads back each other up. If each did a work of its own, then taking all away would cost the sum of what each costs
# alone; if others step in, it costs much more.

# %%
alone = analysis.head_ablation(checkpoint, code)  # (layer, head): rise of the loss
with torch.no_grad(), ct.edit(checkpoint, {"blocks.*.attn.z": "zero"}):
    none = float(F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:]))
print(f"sum of 48 single losses {float(alone.values.sum()):.2f}, of all at once {none - usual:.2f} nats")
print(claim("rise without the median head, in nats", alone.values.median(), below=0.05))
claim("all heads at once, over the sum of single ones", (none - usual) / float(alone.values.sum()), above=1.5)

# %%
figure, axes = plt.subplots(figsize=(6, 4))
shown = [
    "baseline",
    *(f"without block {n}" for n in range(6)),
    "FFN before attention in block 0",
    "FFN before attention in block 3",
]
shown += ["without the final norm", "without the mask", "without positions"]
rows = range(len(shown))
axes.barh(rows, [float(lost[name, "loss"]) for name in shown], color=["0.5", *[BLUE] * 8, *[ORANGE] * 3])
for row, name in enumerate(shown):
    axes.text(
        float(lost[name, "loss"]) + 0.1,
        row,
        f"top-5 overlap {float(lost[name, 'top-5 overlap']):.2f}",
        va="center",
        fontsize=8,
    )
axes.set_yticks(rows, shown)
axes.invert_yaxis()
axes.set(xlabel="loss, nats a token", title="What is lost without a part", xlim=(0, 11.5))
figure.tight_layout()

# %% [markdown]
# ## Trained that way
#
# A part that is taken out afterwards is missed by others that learned with it. What if it was never there?
# `cutaway ablate component-removal` trains small models both ways, three seeds each; its results come with cutaway.
# Two predictions: a model that never had a part should miss it *less* than one that loses it. And one trained without
# a mask can read the next token off its input, so its loss must go towards 0: it looks like the best model of all, and
# can write nothing.

# %%
study = json.loads(ABLATIONS_FILE.read_text())
trained = {row["variant"]: row["loss"]["mean"] for row in study["variants"]}
after = {
    row["condition"]: row["mean"]
    for row in study["measurements"]
    if row["variant"] == "full model" and row["metric"] == "loss"
}
pairs = {
    "a middle block": ("one block fewer", "without a middle block"),
    "the final norm": ("no final norm", "without the final norm"),
    "positions": ("no positions", "without positions"),
    "the mask": ("no mask", "without mask"),
}
never = {name: trained[one] - trained["full model"] for name, (one, _) in pairs.items()}
gone = {name: after[other] - after["baseline"] for name, (_, other) in pairs.items()}
print(
    claim(
        "nats that never having positions costs, less than losing them", gone["positions"] - never["positions"], above=0
    )
)
claim("loss of the model that was trained without a mask", trained["no mask"], above=0, below=0.5)

# %%
figure, axes = plt.subplots(figsize=(6, 3))
places = torch.arange(len(pairs))
axes.bar(places - 0.2, list(gone.values()), 0.4, color=ORANGE, label="taken away after training")
axes.bar(places + 0.2, list(never.values()), 0.4, color=BLUE, label="never there")
axes.axhline(0, color="0.3", lw=0.8)
axes.set_xticks(places, list(pairs))
axes.set(ylabel="rise of the loss, nats", title="Only one gets better, and it cheats")
axes.legend(frameon=False, loc="lower left")
figure.tight_layout()

# %% [markdown]
# ## Try
#
# - Swap `error` and `err`: run with `err` as the clean text. The same head should bring it back, though the model is
#   less sure.
# - Mean-ablate in place of zeroing (`{"do": "mean", "heads": [7]}`). A head whose average says something is missed
#   less; expect the previous-token head to matter as much as before.
# - Put a comment of twenty words between the two lines. Copying heads go by content, not by distance: expect nearly
#   the same share of attention.
#
# The exercise that belongs here is `cutaway learn start 1`: attention by hand. On the page (`cutaway open
# tiny-python`), *Edit* takes parts away by mouse, and *Attention* shows each head's pattern.
