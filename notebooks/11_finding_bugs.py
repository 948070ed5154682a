# %% [markdown]
# # 11. Finding bugs
#
# Most mistakes in a Transformer raise no error: shapes fit, the loss falls, and something is wrong. Here is a GPT
# made at home in some seventy lines of plain PyTorch, and eight bugs, each planted in one line. Before each is tried,
# we say which check must catch it. Then the most dangerous kind: a leak that looks like learning, caught by a number
# that no honest model can go below.
#
# It needs attention, masks and positions (notebooks 2 and 3), the loss (notebook 6) and the cache (notebook 9).

# %%
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from beartype import beartype
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor, nn

import cutaway as ct
from cutaway.evaluate import entropy
from cutaway.learn import claim

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"

# %% [markdown]
# ## A GPT made at home
#
# Learned positions, pre-norm, a cache that is passed in and out. The mask follows from positions: a query at place
# $i$ sees a key at place $j$ if $0 \le j \le i$; padding has place −1.


# %%
class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def split(self, x):  # (B, T, d) → (B, H, T, D)
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def visible(self, i, j):  # (B, T, 1), (B, 1, S) → (B, T, S)
        return (j <= i) & (j >= 0)

    def scores(self, q, k):
        return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, T, S)

    def pattern(self, scores):
        return scores.softmax(-1)

    def forward(self, x, place, state):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        if state is not None:
            k, v = torch.cat((state[0], k), 2), torch.cat((state[1], v), 2)
            held = torch.cat((state[2], place), 1)
        else:
            held = place
        seen = self.visible(place[:, :, None], held[:, None, :])[:, None]  # (B, 1, T, S)
        z = self.pattern(self.scores(q, k).masked_fill(~seen, -1e30)) @ v  # (B, H, T, D)
        return self.o(z.transpose(1, 2).flatten(2)), (k, v, held)


class Block(nn.Module):
    def __init__(self, d, attention):
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(d), nn.LayerNorm(d), attention
        self.ffn = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, place, state):
        added, state = self.attn(self.norm1(x), place, state)
        x = x + added
        return x + self.ffn(self.norm2(x)), state


# %%
class GPT(nn.Module):
    attention = Attention

    def __init__(self, vocab=32, d=32, layers=2, heads=4, longest=64, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.places = nn.Embedding(vocab, d), nn.Embedding(longest, d)
        self.blocks = nn.ModuleList(Block(d, self.attention(d, heads)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.normal_(self.places.weight, std=0.5)

    def number(self, mask):  # real tokens are counted, padding is −1
        return torch.where(mask, mask.long().cumsum(-1) - 1, -1)

    def begun(self, state):  # how many tokens were read before
        return state[0][2].max(1, keepdim=True).values + 1

    def forward(self, tokens, mask=None, state=None):
        place = self.number(torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask)
        place = place if state is None else place + self.begun(state)
        x, kept = self.embed(tokens) + self.places(place.clamp(min=0)), []
        for n, block in enumerate(self.blocks):
            x, layer = block(x, place, None if state is None else state[n])
            kept.append(layer)
        return self.head(self.norm(x)), kept  # (B, T, V)

    def loss(self, tokens, labels):
        return F.cross_entropy(self(tokens)[0][:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100)


# %% [markdown]
# ## Is it right?
#
# `ct.check` takes any module. What it cannot know it is told: how to pass a padding mask, how to go on behind a
# cache, how the loss is taken. It then asks all it can, and says what it did not ask. A correct model must fail
# nothing.


# %%
def examined(model, **how):
    return ct.check(
        model,
        logits=lambda tokens: model(tokens)[0],
        logits_with_mask=lambda tokens, mask: model(tokens, mask)[0],
        logits_with_cache=lambda tokens, state: model(tokens, state=state),
        loss=model.loss,
        vocab_size=32,
        max_seq_len=64,
        **how,
    )


report = examined(GPT())
print(report.summary().split(", in")[0])
print(claim("checks that a correct GPT fails", len(report.failures), predicted=0))
claim("checks that it was asked and passed", report.counts()["pass"], above=30)

# %% [markdown]
# ## Eight bugs, one line each
#
# | bug | what must follow | so it fails |
# |---|---|---|
# | no mask | logits at $t$ move with token $t+1$ | `causality` |
# | mask off by one | the same, one token ahead only | `causality` |
# | no $\sqrt{d}$ | $q \cdot k$ is multiplied by 1, not by $1/\sqrt 8$ | `attention-scale` |
# | softmax over queries | columns sum to 1, rows do not | `softmax-dim` |
# | view without transpose | a "head" mixes numbers of several tokens, later ones too | `causality` |
# | positions count padding | a text behind padding stands at other places | `left-padding` |
# | cache begins one too early | the first cached token stands where the last one stood | `cache-decode` |
# | labels shifted twice | the logits are held to the token after the next | `loss-shift` |


# %%
class NoMask(Attention):
    def visible(self, i, j):
        return j >= 0  # (B, 1, S): alike for every query


class MaskOffByOne(Attention):
    def visible(self, i, j):
        return (j <= i + 1) & (j >= 0)


class NoRoot(Attention):
    def scores(self, q, k):
        return q @ k.transpose(-1, -2)


class WrongAxis(Attention):
    def pattern(self, scores):
        return scores.softmax(-2)


class NoTranspose(Attention):
    def split(self, x):
        return x.reshape(len(x), self.heads, x.shape[1], -1)  # the right shape, and the wrong numbers


# %%
class CountsPadding(GPT):
    def number(self, mask):
        return torch.where(mask, torch.arange(mask.shape[1]), -1)


class CacheOffByOne(GPT):
    def begun(self, state):
        return state[0][2].max(1, keepdim=True).values


class ShiftedTwice(GPT):
    def loss(self, tokens, labels):
        return F.cross_entropy(self(tokens)[0][:, :-2].transpose(1, 2), labels[:, 2:], ignore_index=-100)


def with_attention(kind):
    return type(kind.__name__, (GPT,), {"attention": kind})


# %%
predicted = {
    with_attention(NoMask): "causality",
    with_attention(MaskOffByOne): "causality",
    with_attention(NoRoot): "attention-scale",
    with_attention(WrongAxis): "softmax-dim",
    with_attention(NoTranspose): "causality",
    CountsPadding: "left-padding",
    CacheOffByOne: "cache-decode",
    ShiftedTwice: "loss-shift",
}
found = {kind: examined(kind(), skip=["overfit"]) for kind in predicted}
for kind, report in found.items():
    print(f"{kind.__name__}: {report[predicted[kind]].message}")
caught = sum(report[predicted[kind]].verdict == "fail" for kind, report in found.items())
claim("bugs that are caught by the check that was named before", caught, predicted=8, rtol=0)

# %% [markdown]
# Checks must also be silent where there is nothing to say, or nobody can work with them. A bug may have consequences
# that other checks see (a softmax over queries also lets later tokens in), but a padding bug has none in the cache or
# the loss.

# %%
names = list(dict.fromkeys([*predicted.values(), *(f.check for report in found.values() for f in report.failures)]))
grid = torch.tensor([[report[name].verdict == "fail" for name in names] for report in found.values()]).float()
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.imshow(grid, cmap="Oranges", vmin=0, vmax=2.2, aspect="auto")
for row, kind in enumerate(predicted):
    axes.plot(names.index(predicted[kind]), row, "s", ms=13, mfc="none", mec=BLUE, mew=2)
axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
axes.set_yticks(range(len(predicted)), [kind.__name__ for kind in predicted])
axes.set(title="Filled: failed. Framed: predicted")
figure.tight_layout()

# %%
claim("failures beside the predicted ones, over eight bugs", float(grid.sum()) - 8, below=4)

# %% [markdown]
# ## What shapes can tell, and what they cannot
#
# Axes with names ([jaxtyping](https://docs.kidger.site/jaxtyping/), with beartype to look at run time) catch a
# swapped axis where it happens: if `x` is `B T d`, then heads are `B H T D` with the *same* T. Two limits follow from
# what they compare, which is sizes. If T and H happen to be equal, a swap fits. And a view that puts the right number
# of wrong values in place always fits.


# %%
@jaxtyped(typechecker=beartype)
def heads_of(x: Float[Tensor, "B T d"], split) -> Float[Tensor, "B H T D"]:
    return split(x)


def forgot(x):
    return x.view(*x.shape[:2], 4, -1)  # (B, T, H, D): no transpose at all


def refused(split, length):
    """Whether the shapes say that something is wrong."""
    try:
        heads_of(torch.randn(2, length, 32), split)
    except TypeCheckError:
        return True
    return False


# %%
right, scrambled = Attention(32, 4).split, NoTranspose(32, 4).split
table = {
    name: [refused(split, 7), refused(split, 4)]
    for name, split in (("right", right), ("forgot", forgot), ("scrambled", scrambled))
}
print("refused at 7 tokens, at 4 tokens (as many as heads):", table)
print(claim("refusals of the correct split", sum(table["right"]), predicted=0))
print(claim("refusals of a forgotten transpose: at 7 tokens, not at 4", sum(table["forgot"]), predicted=1, rtol=0))
claim("refusals of a view in the wrong order, which has the right shape", sum(table["scrambled"]), predicted=0)

# %% [markdown]
# So: test with sizes that are all different, and test values too. `causality` found the scrambled view above because
# it asks what a number depends on, not how many there are.
#
# ## A leak looks like learning
#
# Let the text be a Markov chain whose table $P$ we know. No predictor that sees only the past can have a lower mean
# loss than the chain's entropy rate,
#
# $$H = -\sum_i \pi_i \sum_j P_{ij} \ln P_{ij}, \qquad \pi P = \pi .$$
#
# A good model comes down to $H$ and stays. One that goes *below* has seen the answer: no skill can do that. Two more
# numbers can be said in advance. If labels are shifted twice, the best there is is the entropy two steps ahead, the
# same formula with $P^2$ inside. If they are not shifted at all, the model is asked for the token it reads: 0.

# %%
draw = torch.Generator().manual_seed(3)
table = (torch.randn(12, 12, generator=draw) * 1.5).softmax(-1)  # (from, to)
stationary = torch.linalg.matrix_power(table.double(), 200)[0]


def rate(steps):
    """Nats of the token `steps` ahead, given this one."""
    ahead = torch.linalg.matrix_power(table.double(), steps)
    return sum(float(p) * entropy(row) for p, row in zip(stationary, ahead, strict=True)) * math.log(2)


def chain(rows, length, generator):
    """(rows, length) tokens that follow the table."""
    said = [torch.multinomial(stationary, rows, replacement=True, generator=generator)]
    while len(said) < length:
        said.append(torch.multinomial(table[said[-1]], 1, generator=generator)[:, 0])
    return torch.stack(said, 1)


floor, two_ahead = rate(1), rate(2)
print(f"entropy rate {floor:.3f} nats, two steps ahead {two_ahead:.3f}, uniform {math.log(12):.3f}")


# %%
class NotShifted(GPT):
    def loss(self, tokens, labels):
        return F.cross_entropy(self(tokens)[0].transpose(1, 2), labels)


def train(kind, steps=110):
    """A model of one block, and its loss at each step: every batch is new, so nothing is learned by heart."""
    text = chain(24 * steps, 24, torch.Generator().manual_seed(0)).view(steps, 24, 24)
    model = kind(vocab=12, layers=1)
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for step, tokens in enumerate(text):
        optimizer.param_groups[0]["lr"] = 0.01 * min(1, step / 20) * (1 - step / steps)
        loss = model.loss(tokens, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


# %%
kinds = {
    "right": GPT,
    "mask off by one": with_attention(MaskOffByOne),
    "shifted twice": ShiftedTwice,
    "not shifted": NotShifted,
}
runs = {name: train(kind) for name, kind in kinds.items()}
ends = {name: sum(losses[-20:]) / 20 for name, (_, losses) in runs.items()}
print({name: round(loss, 3) for name, loss in ends.items()})
print(claim("the right model's loss", ends["right"], predicted=floor, rtol=0.03))
print(claim("shifted twice: the loss", ends["shifted twice"], predicted=two_ahead, rtol=0.03))
print(claim("not shifted: the loss", ends["not shifted"], above=0, below=0.1))
claim("the leaking model's loss, as a share of what is possible", ends["mask off by one"] / floor, below=0.5)

# %%
figure, axes = plt.subplots(figsize=(6, 3.4))
for (name, (_, losses)), colour in zip(runs.items(), (BLUE, RED, ORANGE, GREEN), strict=True):
    axes.plot(losses, color=colour, label=name)
axes.axhline(floor, color=BLUE, lw=0.8, ls=":")
axes.axhline(two_ahead, color=ORANGE, lw=0.8, ls=":")
axes.text(110, floor - 0.05, "entropy rate", ha="right", va="top", color=BLUE, fontsize=8)
axes.text(110, two_ahead + 0.12, "two steps ahead", ha="right", color=ORANGE, fontsize=8)
axes.set(
    xlabel="step", ylabel="training loss, nats", title="Below the entropy rate nobody goes honestly", ylim=(0, 2.9)
)
axes.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.35))
figure.tight_layout()

# %% [markdown]
# By its loss the leaking model is the best. Ask it to *write*, and the answer that it copied is not there yet: give
# each text up to a token and no further, and score what comes next. The right model must keep its loss, as the future
# never mattered to it. The leaking one has learned to copy and to be sure of it; with nothing there to copy it should
# be worse than one who guesses evenly, at $\ln 12$ nats.


# %%
@torch.no_grad()
def honest(model):
    """The loss of tokens that are not in sight: each prefix is read alone."""
    text = chain(128, 24, torch.Generator().manual_seed(99))
    told = [model(text[:, :end])[0][:, -1] for end in range(8, 24)]
    return float(F.cross_entropy(torch.stack(told, -1), text[:, 8:]))


written = {name: honest(runs[name][0]) for name in ("right", "mask off by one")}
print({name: round(loss, 3) for name, loss in written.items()})
print(claim("the right model, one prefix at a time", written["right"], predicted=floor, rtol=0.08))
claim("the leaking model, one prefix at a time", written["mask off by one"], above=math.log(12))

# %% [markdown]
# A training loss alone would have chosen the broken model. `cutaway train` asks `causality` before the first step,
# and stops on a leak.
#
# ## Two thermometers
#
# **Attention entropy.** Scores that are normal with standard deviation $s$ make softmax over $n$ keys lose about
# $\frac{s^2}{2}(1 - \frac1n)$ nats against looking everywhere alike, as long as $s$ is small. PyTorch's `nn.Linear`
# draws from $\pm 1/\sqrt{d}$, of variance $1/3d$: a normed input gives queries and keys of variance $1/3$, so $q
# \cdot k$ has standard deviation $\sqrt{D}/3$. Divided by $\sqrt D$: $s = 1/3$ and a loss of $1/18 = 0.056$ nats, a
# little less where keys are few, whatever the width. Not divided, it grows with the width.


# %%
def entropy_lost(kind, width, text):
    """Nats that the first block's heads lack to looking everywhere alike; the mean over queries."""
    model = kind(d=4 * width, heads=4, layers=1)
    patterns = []
    model.blocks[0].attn.pattern = lambda scores: patterns.append(scores.softmax(-1)) or patterns[-1]
    with torch.no_grad():
        model(text)
    p = patterns[0][:, :, 1:]  # (B, H, T − 1, S): the first query has no choice
    alike = torch.arange(2, text.shape[1] + 1).log()
    return float((alike + torch.xlogy(p, p).sum(-1)).mean())


text = torch.randint(32, (8, 64), generator=torch.Generator().manual_seed(0))
widths = [4, 8, 16, 32, 64]
fewer = 1 - sum(1 / n for n in range(2, 65)) / 63  # the mean of 1 − 1/n
lost = {kind.__name__: [entropy_lost(kind, width, text) for width in widths] for kind in (GPT, with_attention(NoRoot))}
print(claim("nats lost by a fresh head of width 64", lost["GPT"][-1], predicted=fewer / 18, rtol=0.12))
claim("without the root, times as much", lost["NoRoot"][-1] / lost["GPT"][-1], above=10)

# %% [markdown]
# **Residual norms.** At the start a block's matrices are random, so what it adds stands at a right angle to the
# stream, and squares add up: $|x_L|^2 = |x_0|^2 + \sum_l |a_l|^2$. Behind a norm every block reads vectors of one
# length and adds about as much as any other, so the stream grows like $\sqrt L$. Where someone forgot the norms, each
# block multiplies what it finds: a straight line on a logarithmic scale, of which the first half of the blocks says
# where the second ends.


# %%
def streams(norms, layers=16):
    """The stream (B, T, d) before each block and after the last, in a fresh GPT with large matrices."""
    model = GPT(d=64, layers=layers)
    for block in model.blocks:
        for part in block.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=1.5 / math.sqrt(part.in_features))
        if not norms:
            block.norm1, block.norm2 = nn.Identity(), nn.Identity()
    with torch.no_grad(), ct.trace(model, *(f"blocks.{n}.norm1.in" for n in range(layers)), "norm.in") as t:
        model(text)
    return torch.stack([t[name] for name in t])  # (layers + 1, B, T, d)


# %%
right, forgotten = streams(norms=True), streams(norms=False)
added = right.diff(dim=0).pow(2).sum(-1).mean((1, 2))  # (layers,): |a|²
squares, wild = (x.pow(2).sum(-1).mean((1, 2)) for x in (right, forgotten))  # (layers + 1,)
print(claim("stream after 16 blocks: |x|²", squares[-1], predicted=float(squares[0] + added.sum()), rtol=0.2))
print(claim("of that, at half the depth", squares[8] / squares[-1], predicted=0.5, rtol=0.25))
claim(
    "norms forgotten: powers of ten in the first 8 blocks and in all 16",
    (wild[-1] / wild[0]).log10() / (wild[8] / wild[0]).log10(),
    predicted=2,
    rtol=0.25,
)

# %%
figure, both = plt.subplots(1, 2, figsize=(6.6, 3.1))
for (name, values), colour in zip(lost.items(), (BLUE, RED), strict=True):
    both[0].loglog(widths, values, "o-", color=colour, label={"GPT": "divided by √D"}.get(name, "not divided"))
both[0].axhline(1 / 18, color="0.6", lw=0.8, ls=":")
both[0].text(widths[-1], 1 / 17, "1/18", ha="right", va="bottom", color="0.4", fontsize=8)
both[0].set_xticks(widths, widths)
both[0].minorticks_off()
both[0].set(xlabel="head width D", ylabel="entropy lost, nats", title="Attention entropy")
both[0].legend(frameon=False, fontsize=8)
both[1].semilogy(squares.sqrt(), "o-", ms=4, color=BLUE, label="with norms")
both[1].semilogy(wild.sqrt(), "o-", ms=4, color=RED, label="norms forgotten")
both[1].set(xlabel="block", ylabel="length of the stream", title="Residual norms")
both[1].legend(frameon=False, fontsize=8)
figure.tight_layout()

# %% [markdown]
# ## Try
#
# - Plant a bug of your own: `k` in place of `v`, one head that is never added, a norm without its gain. Say first
#   which check fails; then look whether *any* does. What none catches is worth a test of your own.
# - Let the leak be small: make one head of four blind to the mask. Its loss falls more slowly; `causality` finds it
#   as before, since it asks for *any* change.
# - Train the leaking model on a chain of order two. The floor is another entropy; compute it from the table before
#   you train.
#
# The exercise that belongs here is `cutaway learn start 10`: a debugging checklist, on models with seeded bugs;
# `start 2` and `start 9` are about masks. All checks have a page (`docs/checks`) with a case from a public project,
# and `pytest --cutaway my_package.model:make_model` makes each of them a test of your own.
