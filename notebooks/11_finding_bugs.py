# %% [markdown]
# # 11. Finding bugs
#
# Most bugs in a Transformer raise no error: the shapes match and the loss decreases. This notebook defines a GPT in
# plain PyTorch and eight one-line bugs, and predicts for each the check of `ct.check` that must fail. It then shows
# what shape annotations can and cannot detect, compares the training loss of a model with an information leak with the
# entropy rate of its data, and predicts attention entropy and residual norms of untrained models.
#
# Prerequisites: attention, masks and positions (notebooks [2](02_attention.py) and [3](03_positions.py)), objectives
# ([notebook 6](06_forms.py)), the KV cache ([notebook 9](09_decoding.py)).

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
# ## A GPT in plain PyTorch
#
# The model has learned position embeddings, pre-norm blocks, and a cache that is passed in and returned. The mask is
# computed from positions: a key at position $j$ is visible to a query at position $i$ if $0 \le j \le i$; padding has
# position −1.


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

    def forward(self, x, positions, cache):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        key_positions = positions
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
            key_positions = torch.cat((cache[2], positions), 1)
        visible = self.visible(positions[:, :, None], key_positions[:, None, :])[:, None]  # (B, 1, T, S)
        z = self.pattern(self.scores(q, k).masked_fill(~visible, -1e30)) @ v  # (B, H, T, D)
        return self.o(z.transpose(1, 2).flatten(2)), (k, v, key_positions)


class Block(nn.Module):
    def __init__(self, d, attention):
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(d), nn.LayerNorm(d), attention
        self.ffn = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, positions, cache):
        attn_out, cache = self.attn(self.norm1(x), positions, cache)
        x = x + attn_out
        return x + self.ffn(self.norm2(x)), cache


# %%
class GPT(nn.Module):
    attention = Attention

    def __init__(self, vocab=32, d=32, layers=2, heads=4, max_length=64, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.position_embed = nn.Embedding(vocab, d), nn.Embedding(max_length, d)
        self.blocks = nn.ModuleList(Block(d, self.attention(d, heads)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.normal_(self.position_embed.weight, std=0.5)

    def number_tokens(self, mask):  # positions of the tokens; padding has −1
        return torch.where(mask, mask.long().cumsum(-1) - 1, -1)

    def num_cached(self, caches):  # number of cached tokens, (B, 1)
        return caches[0][2].max(1, keepdim=True).values + 1

    def forward(self, tokens, mask=None, caches=None):
        positions = self.number_tokens(torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask)
        positions = positions if caches is None else positions + self.num_cached(caches)
        x, new_caches = self.embed(tokens) + self.position_embed(positions.clamp(min=0)), []
        for layer, block in enumerate(self.blocks):
            x, cache = block(x, positions, None if caches is None else caches[layer])
            new_caches.append(cache)
        return self.head(self.norm(x)), new_caches  # (B, T, V)

    def loss(self, tokens, labels):
        return F.cross_entropy(self(tokens)[0][:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100)


# %% [markdown]
# ## Checks of the correct model
#
# `ct.check` accepts any module. Functions that use the padding mask, the cache and the loss are passed as arguments,
# because `ct.check` cannot infer how a model takes them. It runs all applicable checks and lists the skipped ones with
# a reason. A correct model must not fail any check. The time budget is so large that no check is skipped for lack of
# time.


# %%
def run_checks(model, **options):
    return ct.check(
        model,
        logits=lambda tokens: model(tokens)[0],
        logits_with_mask=lambda tokens, mask: model(tokens, mask)[0],
        logits_with_cache=lambda tokens, caches: model(tokens, caches=caches),
        loss=model.loss,
        vocab_size=32,
        max_seq_len=64,
        attention_scale=8**-0.5,  # declared, so that another scale is a failure instead of a warning
        budget=3600,
        **options,
    )


report = run_checks(GPT())
print(report.summary().split(", in")[0])
print(claim("checks that the correct GPT fails", len(report.failures), predicted=0))
claim("checks that it passes", report.counts()["pass"], above=30)

# %% [markdown]
# ## Eight one-line bugs
#
# | bug | consequence | failing check |
# |---|---|---|
# | no mask | logits at $t$ depend on token $t+1$ | `causality` |
# | mask off by one | the same, one token ahead only | `causality` |
# | no $\sqrt{d}$ | $q \cdot k$ is multiplied by 1 instead of $1/\sqrt 8$ | `attention-scale` |
# | softmax over queries | columns sum to 1, rows do not | `softmax-dim` |
# | view without transpose | a head mixes entries of several tokens, including later ones | `causality` |
# | positions count padding | a text after padding has other positions than without | `left-padding` |
# | cache offset too small by one | a new token has the position of the last cached one | `cache-decode` |
# | labels shifted twice | the target is the token after the next | `loss-shift` |


# %%
class NoMask(Attention):
    def visible(self, i, j):
        return j >= 0  # (B, 1, S): the same for every query


class MaskOffByOne(Attention):
    def visible(self, i, j):
        return (j <= i + 1) & (j >= 0)


class NoScale(Attention):
    def scores(self, q, k):
        return q @ k.transpose(-1, -2)


class WrongSoftmaxDim(Attention):
    def pattern(self, scores):
        return scores.softmax(-2)


class NoTranspose(Attention):
    def split(self, x):
        return x.reshape(len(x), self.heads, x.shape[1], -1)  # the correct shape with wrong entries


# %%
class CountsPadding(GPT):
    def number_tokens(self, mask):
        return torch.where(mask, torch.arange(mask.shape[1]), -1)


class CacheOffByOne(GPT):
    def num_cached(self, caches):
        return caches[0][2].max(1, keepdim=True).values


class ShiftedTwice(GPT):
    def loss(self, tokens, labels):
        return F.cross_entropy(self(tokens)[0][:, :-2].transpose(1, 2), labels[:, 2:], ignore_index=-100)


def with_attention(attention):
    return type(attention.__name__, (GPT,), {"attention": attention})


# %%
predicted = {
    with_attention(NoMask): "causality",
    with_attention(MaskOffByOne): "causality",
    with_attention(NoScale): "attention-scale",
    with_attention(WrongSoftmaxDim): "softmax-dim",
    with_attention(NoTranspose): "causality",
    CountsPadding: "left-padding",
    CacheOffByOne: "cache-decode",
    ShiftedTwice: "loss-shift",
}
slow_checks = ["overfit", "eval-determinism"]
reports = {model_class: run_checks(model_class(), skip=slow_checks) for model_class in predicted}
for model_class, report in reports.items():
    print(f"{model_class.__name__}: {report[predicted[model_class]].message}")
num_caught = sum(report[predicted[model_class]].verdict == "fail" for model_class, report in reports.items())
claim("bugs for which the predicted check fails", num_caught, predicted=8, rtol=0, id="C284")

# %% [markdown]
# Checks must also pass where there is no bug. A bug can fail several checks (a softmax over queries also leaks
# information from later tokens), but a padding bug should not fail the cache or loss checks.

# %%
failed = [finding.check for report in reports.values() for finding in report.failures]
names = list(dict.fromkeys([*predicted.values(), *failed]))
grid = torch.tensor([[report[name].verdict == "fail" for name in names] for report in reports.values()]).float()
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.imshow(grid, cmap="Oranges", vmin=0, vmax=2.2, aspect="auto")
for row, model_class in enumerate(predicted):
    axes.plot(names.index(predicted[model_class]), row, "s", ms=13, mfc="none", mec=BLUE, mew=2)
axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
axes.set_yticks(range(len(predicted)), [model_class.__name__ for model_class in predicted])
axes.set(title="Failed checks (filled) and predicted checks (framed)")
figure.tight_layout()

# %%
claim("failed checks beyond the predicted ones, over eight bugs", float(grid.sum()) - 8, below=4, id="C282")

# %% [markdown]
# ## What shape annotations detect
#
# Named axes ([jaxtyping](https://docs.kidger.site/jaxtyping/), checked at run time by beartype) detect a swapped axis:
# if `x` is `B T d`, then heads are `B H T D` with the *same* T. They compare sizes, so they have two limits. If T and H
# are equal, a swap is not detected. And a view with the correct shape and wrong entries is never detected.


# %%
@jaxtyped(typechecker=beartype)
def split_heads(x: Float[Tensor, "B T d"], split) -> Float[Tensor, "B H T D"]:
    return split(x)


def split_without_transpose(x):
    return x.view(*x.shape[:2], 4, -1)  # (B, T, H, D)


def is_rejected(split, length):
    """Whether the shape annotations raise an error."""
    try:
        split_heads(torch.randn(2, length, 32), split)
    except TypeCheckError:
        return True
    return False


# %%
correct_split, wrong_view = Attention(32, 4).split, NoTranspose(32, 4).split
splits = {"correct": correct_split, "no transpose": split_without_transpose, "wrong view": wrong_view}
rejected = {name: [is_rejected(split, 7), is_rejected(split, 4)] for name, split in splits.items()}
print("rejected at 7 tokens, at 4 tokens (the number of heads):", rejected)
print(claim("correct split: rejections", sum(rejected["correct"]), predicted=0, id="C277"))
print(
    claim(
        "missing transpose: rejections, at 7 tokens but not at 4",
        sum(rejected["no transpose"]),
        predicted=1,
        rtol=0,
        id="C277",
    )
)
claim("wrong view with the correct shape: rejections", sum(rejected["wrong view"]), predicted=0)

# %% [markdown]
# So test with sizes that are all different, and test values too. `causality` detects the wrong view, because it
# measures which inputs an output depends on.
#
# ## An information leak reduces the training loss
#
# Let the data be a Markov chain with known transition matrix $P$. The expected loss of any model that uses only earlier
# tokens is at least the entropy rate,
#
# $$H = -\sum_i \pi_i \sum_j P_{ij} \ln P_{ij}, \qquad \pi P = \pi .$$
#
# The loss of a correct model converges to $H$. A loss *below* $H$ implies an information leak. Two more values can be
# predicted. With labels shifted twice, the minimal loss is the entropy two steps ahead, given by the same formula with
# $P^2$. With labels not shifted at all, the target is the input token, and the minimal loss is 0.

# %%
generator = torch.Generator().manual_seed(3)
transitions = (torch.randn(12, 12, generator=generator) * 1.5).softmax(-1)  # (from, to)
stationary = torch.linalg.matrix_power(transitions.double(), 200)[0]


def conditional_entropy(steps):
    """Entropy in nats of the token `steps` ahead, given the current token."""
    distribution = torch.linalg.matrix_power(transitions.double(), steps)
    bits = sum(float(p) * entropy(row) for p, row in zip(stationary, distribution, strict=True))
    return bits * math.log(2)


def sample_chain(count, length, generator):
    """(count, length): sequences sampled from the chain."""
    tokens = [torch.multinomial(stationary, count, replacement=True, generator=generator)]
    while len(tokens) < length:
        tokens.append(torch.multinomial(transitions[tokens[-1]], 1, generator=generator)[:, 0])
    return torch.stack(tokens, 1)


entropy_rate, two_ahead = conditional_entropy(1), conditional_entropy(2)
print(f"entropy rate {entropy_rate:.3f} nats, two steps ahead {two_ahead:.3f}, uniform {math.log(12):.3f}")


# %%
class NotShifted(GPT):
    def loss(self, tokens, labels):
        return F.cross_entropy(self(tokens)[0].transpose(1, 2), labels)


def train(model_class, steps=110):
    """Train a model of one block, with new sequences in every batch. Return the model and its loss at each step."""
    batches = sample_chain(24 * steps, 24, torch.Generator().manual_seed(0)).view(steps, 24, 24)
    model = model_class(vocab=12, layers=1)
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for step, tokens in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 0.01 * min(1, step / 20) * (1 - step / steps)
        loss = model.loss(tokens, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


# %%
model_classes = {
    "correct": GPT,
    "mask off by one": with_attention(MaskOffByOne),
    "labels shifted twice": ShiftedTwice,
    "labels not shifted": NotShifted,
}
runs = {name: train(model_class) for name, model_class in model_classes.items()}
final_losses = {name: sum(losses[-20:]) / 20 for name, (_, losses) in runs.items()}
print({name: round(loss, 3) for name, loss in final_losses.items()})
print(
    claim(
        "correct model: loss is the entropy rate", final_losses["correct"], predicted=entropy_rate, rtol=0.03, id="C243"
    )
)
print(claim("labels shifted twice: loss", final_losses["labels shifted twice"], predicted=two_ahead, rtol=0.03))
print(claim("labels not shifted: loss", final_losses["labels not shifted"], above=0, below=0.1))
claim("mask off by one: loss / entropy rate", final_losses["mask off by one"] / entropy_rate, below=0.5, id="C079")

# %%
figure, axes = plt.subplots(figsize=(6, 3.4))
for (name, (_, losses)), color in zip(runs.items(), (BLUE, RED, ORANGE, GREEN), strict=True):
    axes.plot(losses, color=color, label=name)
axes.axhline(entropy_rate, color=BLUE, lw=0.8, ls=":")
axes.axhline(two_ahead, color=ORANGE, lw=0.8, ls=":")
axes.text(110, entropy_rate - 0.05, "entropy rate", ha="right", va="top", color=BLUE, fontsize=8)
axes.text(110, two_ahead + 0.12, "two steps ahead", ha="right", color=ORANGE, fontsize=8)
axes.set(
    xlabel="step",
    ylabel="training loss, nats per token",
    title="A loss below the entropy rate implies a leak",
    ylim=(0, 2.9),
)
axes.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.35))
figure.tight_layout()

# %% [markdown]
# The model with the leak has a lower training loss than the correct one. In generation the next token is not in the
# input. So evaluate each prefix separately: the loss of the correct model should be unchanged. The loss of the leaking
# model should be above that of a uniform distribution, $\ln 12$ nats, because it was trained to copy a token that is
# now missing.


# %%
@torch.no_grad()
def loss_from_prefixes(model):
    """Return the loss of the token after each prefix, computed without the later tokens in the input."""
    sequences = sample_chain(128, 24, torch.Generator().manual_seed(99))
    logits = [model(sequences[:, :end])[0][:, -1] for end in range(8, 24)]
    return float(F.cross_entropy(torch.stack(logits, -1), sequences[:, 8:]))


prefix_losses = {name: loss_from_prefixes(runs[name][0]) for name in ("correct", "mask off by one")}
print({name: round(loss, 3) for name, loss in prefix_losses.items()})
print(claim("correct model: loss from prefixes", prefix_losses["correct"], predicted=entropy_rate, rtol=0.08))
claim("mask off by one: loss from prefixes", prefix_losses["mask off by one"], above=math.log(12), id="C079")

# %% [markdown]
# Selecting by training loss would choose the model with the bug. `cutaway train` runs `causality` before the first step
# and stops on a leak.
#
# ## Attention entropy and residual norms as diagnostics
#
# **Attention entropy.** If scores are normal with a small standard deviation $s$, softmax over $n$ keys has an entropy
# of about $\frac{s^2}{2}(1 - \frac1n)$ nats below uniform. PyTorch's `nn.Linear` samples weights uniformly from
# $\pm 1/\sqrt{d}$, with variance $1/3d$: for a normalized input, q and k have variance $1/3$, and $q \cdot k$ has
# standard deviation $\sqrt{D}/3$. After the division by $\sqrt D$, $s = 1/3$ and the entropy is $1/18 = 0.056$ nats
# below uniform (slightly less where keys are few), for any head width. Without the division the difference grows with
# the head width.


# %%
def entropy_below_uniform(model_class, head_width, tokens):
    """Entropy of uniform attention minus that of the first block's heads, in nats; mean over queries."""
    model = model_class(d=4 * head_width, heads=4, layers=1)
    patterns = []
    model.blocks[0].attn.pattern = lambda scores: patterns.append(scores.softmax(-1)) or patterns[-1]
    with torch.no_grad():
        model(tokens)
    p = patterns[0][:, :, 1:]  # (B, H, T − 1, S), without the first query, which has one key
    uniform = torch.arange(2, tokens.shape[1] + 1).log()
    return float((uniform + torch.xlogy(p, p).sum(-1)).mean())


tokens = torch.randint(32, (8, 64), generator=torch.Generator().manual_seed(0))
head_widths = [4, 8, 16, 32, 64]
mean_factor = 1 - sum(1 / n for n in range(2, 65)) / 63  # mean of 1 − 1/n
entropy_differences = {
    name: [entropy_below_uniform(model_class, width, tokens) for width in head_widths]
    for name, model_class in (("divided by √D", GPT), ("not divided", with_attention(NoScale)))
}
scaled, unscaled = (values[-1] for values in entropy_differences.values())
print(claim("head width 64: entropy below uniform, nats", scaled, predicted=mean_factor / 18, rtol=0.12))
claim("head width 64: not divided / divided", unscaled / scaled, above=10, id="C280")

# %% [markdown]
# **Residual norms.** In an untrained model the output of a block is nearly orthogonal to the residual stream, so
# squared norms add: $|x_L|^2 = |x_0|^2 + \sum_l |a_l|^2$. With norms every block has an input of the same norm and adds
# about the same amount, so the residual stream grows as $\sqrt L$. Without norms each block multiplies the norm of the
# residual stream by a factor, so it grows exponentially, and the logarithm of the growth over 16 blocks is twice that
# over 8 blocks.


# %%
def residual_streams(with_norms, layers=16):
    """(layers + 1, B, T, d): residual stream before each block and after the last, untrained, with large weights."""
    model = GPT(d=64, layers=layers)
    for block in model.blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.5 / math.sqrt(module.in_features))
        if not with_norms:
            block.norm1, block.norm2 = nn.Identity(), nn.Identity()
    with torch.no_grad(), ct.trace(model, *(f"blocks.{n}.norm1.in" for n in range(layers)), "norm.in") as t:
        model(tokens)
    return torch.stack([t[name] for name in t])


# %%
normalized, unnormalized = residual_streams(with_norms=True), residual_streams(with_norms=False)
added = normalized.diff(dim=0).pow(2).sum(-1).mean((1, 2))  # (layers,): |a|²
squares, unnormalized_squares = (x.pow(2).sum(-1).mean((1, 2)) for x in (normalized, unnormalized))  # (layers + 1,)
print(
    claim(
        "with norms: |x|² after 16 blocks", squares[-1], predicted=float(squares[0] + added.sum()), rtol=0.2, id="C132"
    )
)
print(
    claim("with norms: |x|² after 8 blocks / after 16", squares[8] / squares[-1], predicted=0.5, rtol=0.25, id="C133")
)
log_growth = (unnormalized_squares / unnormalized_squares[0]).log10()
claim("without norms: log growth of 16 blocks / of 8", log_growth[16] / log_growth[8], predicted=2, rtol=0.25)

# %%
figure, panels = plt.subplots(1, 2, figsize=(6.6, 3.1))
for (name, values), color in zip(entropy_differences.items(), (BLUE, RED), strict=True):
    panels[0].loglog(head_widths, values, "o-", color=color, label=name)
panels[0].axhline(1 / 18, color="0.6", lw=0.8, ls=":")
panels[0].text(head_widths[-1], 1 / 17, "1/18", ha="right", va="bottom", color="0.4", fontsize=8)
panels[0].set_xticks(head_widths, head_widths)
panels[0].minorticks_off()
panels[0].set(xlabel="head width D", ylabel="entropy below uniform, nats", title="Attention entropy")
panels[0].legend(frameon=False, fontsize=8)
panels[1].semilogy(squares.sqrt(), "o-", ms=4, color=BLUE, label="with norms")
panels[1].semilogy(unnormalized_squares.sqrt(), "o-", ms=4, color=RED, label="without norms")
panels[1].set(xlabel="block", ylabel="norm of the residual stream", title="Residual norms")
panels[1].legend(frameon=False, fontsize=8)
figure.tight_layout()

# %% [markdown]
# ## Try
#
# - Add a bug of your own: `k` instead of `v`, one head that is not added, a norm without its gain. Predict which check
#   fails, then see whether *any* does. A bug that no check detects needs a test of your own.
# - Make the leak smaller: remove the mask from one head of four. The loss decreases more slowly; `causality` still
#   fails, because it tests for *any* change.
# - Train the leaking model on a chain of order two. The minimal loss is a different entropy; compute it before
#   training.
#
# Exercise: `cutaway learn start 10` (debugging checklist on models with seeded bugs); `start 2` and `start 9` cover
# masks. Every check has a page in `docs/checks` with an example from a public project, and
# `pytest --cutaway my_package.model:make_model` runs each check as a test.
