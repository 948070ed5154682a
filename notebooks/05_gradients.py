# %% [markdown]
# # 5. The way back
#
# Training sends one vector per token back through every block. Afterwards you can write a norm's Jacobian by hand,
# predict by how much a gradient grows or shrinks on its way down with norms before or after the sublayers, and say
# what checkpointing saves and costs. Needs: attention (2), norms and residuals (4).

# %%
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.autograd.functional import jacobian
from torch.utils.flop_counter import FlopCounterMode

import cutaway as ct
from cutaway.learn import claim
from cutaway.lens.analysis import activation_checkpointing_cost

torch.manual_seed(0)
checkpoint = ct.load("tiny-python", dtype=torch.float64)
model = checkpoint.model
text = "def read(path):\n    with open(path) as file:\n        return file.read()\n"
tokens = torch.tensor([checkpoint.tokenizer.encode(text)])  # (1, T)

# %% [markdown]
# ## A norm's Jacobian
#
# RMSNorm is $y = \gamma \odot \hat x$ with $\hat x = x / r$ and $r = \sqrt{\frac1d\sum_i x_i^2}$. Since $\partial r /
# \partial x = \hat x / d$,
#
# $$J_\text{RMS} = \frac{\gamma}{r}\Big(I - \frac{\hat x \hat x^\top}{d}\Big), \qquad
# J_\text{LN} = \frac{\gamma}{\sigma}\Big(I - \frac{1 1^\top}{d} - \frac{\hat x \hat x^\top}{d}\Big).$$
#
# Both divide the gradient by the size of the stream and take directions out of it: RMSNorm the one along $\hat x$
# (longer input, same output), LayerNorm also the mean. So the ranks must be $d-1$ and $d-2$. We ask autograd, at a
# vector that the shipped model really sends into a norm.

# %%
with torch.no_grad(), ct.trace(model, "blocks.3.resid_pre") as t:
    model(tokens)
x = t["blocks.3.resid_pre"][0, -1]  # (d,)
d = len(x)
eye = torch.eye(d, dtype=torch.float64)
trained = model.decoder.blocks[3].attn.norm_in  # RMSNorm
r = (x.square().mean() + trained.eps).sqrt()
by_hand = (trained.weight.detach() / r)[:, None] * (eye - torch.outer(x / r, x / r) / d)  # (d, d)
rms_found = jacobian(trained, x)
apart = (by_hand - rms_found).abs().max()
claim("RMSNorm's Jacobian is (γ/r)(I − x̂x̂ᵀ/d): largest difference to autograd's", apart, below=1e-9)

# %%
wide = ct.build(ct.config("tiny-gpt").replace(d_model=d), dtype=torch.float64)
fresh = wide.decoder.blocks[0].attn.norm_in  # LayerNorm
sigma = (x.var(correction=0) + fresh.eps).sqrt()
unit = (x - x.mean()) / sigma
by_hand = (eye - 1 / d - torch.outer(unit, unit) / d) / sigma  # γ = 1
layer_found = jacobian(fresh, x)
apart = (by_hand - layer_found).abs().max()
print(claim("LayerNorm's Jacobian is (γ/σ)(I − 11ᵀ/d − x̂x̂ᵀ/d): largest difference", apart, below=1e-9))

dead = [int((torch.linalg.svdvals(each) < 1e-4).sum()) for each in (rms_found, layer_found)]
print(claim("directions that RMSNorm takes out of a gradient", dead[0], predicted=1, rtol=0))
claim("directions that LayerNorm takes out of a gradient", dead[1], predicted=2, rtol=0)

# %% [markdown]
# ## Two ways to write a block
#
# With $F$ for a sublayer, a gradient $g$ at a block's output arrives at its input as
#
# $$\text{pre-norm: } g + J_\text{norm}^\top J_F^\top g \qquad\qquad
# \text{post-norm: } (I + J_F^\top)\, J_\text{norm}^\top g .$$
#
# The first contains $g$ itself, untouched: the identity path. In the second every path goes through a norm, which
# divides by the size of $x + F(x)$. ([Xiong et al. 2020](https://arxiv.org/abs/2002.04745) is where this is worked
# out.)
#
# How much is that? Take fresh Xavier weights. A square matrix keeps the variance of what it multiplies. So does a
# token's way through $W_v$ and $W_o$; and the FFN's $d \to 4d \to d$ with ReLU has variance
# $\frac{2}{5}\cdot\frac12\cdot 4\cdot\frac25 = 0.32$, there and back alike.
#
# Attention is what is *not* alike there and back. Fresh heads look at all tokens evenly, so they add the mean over
# tokens. In the stream, let $c$ be the part that all tokens share: attention adds a vector as long as $c$. After each
# post-norm the shared part therefore has doubled its odds against the rest, and soon the tokens are alike: then $x +
# F(x)$ has twice the variance of $x$ and the norm divides by $\sqrt2$. The gradient has no such luck. What comes from
# the loss is different for each token, and the mean over tokens of something that differs is nearly nothing. It is
# divided by $\sqrt 2$ and gets nothing in return. The FFN divides by $\sqrt{1.32}$ and gives $\sqrt{1.32}$ back. So:
#
# - **post-norm**: once tokens are alike, what is a token's own in the gradient shrinks by $1/\sqrt2 \approx 0.71$ a
#   block on its way down;
# - **pre-norm**: it never shrinks. The FFN alone makes it grow by $\sqrt{1 + 0.32 / r^2}$ a block, where $r$ is the
#   size of the stream that its norm divides by; if attention too gave back all that it added, the gradient would grow
#   downwards as the stream grows upwards. It must lie between.


# %%
def fresh_model(placement, layers, seed, *, form="encoder", d_model=64, vocab_size=256):
    stack = {
        "layers": layers,
        "placement": {"kind": placement},
        "norm": {"kind": "layernorm"},
        "embedding": {"scale": "sqrt_d_model"},  # entries of size 1
        "block": {"attention": {"heads": 4}, "ffn": {"kind": "mlp", "activation": "relu"}},
    }
    config = {"form": form, "vocab_size": vocab_size, "d_model": d_model, "init": {"kind": "xavier"}, form: stack}
    return ct.build(config, seed=seed)


def there_and_back(placement, layers, seed, batch=2, length=64):
    """Stream before each FFN and gradient after each block, (layers, B, T, d): every token must be told another one."""
    fresh = fresh_model(placement, layers, seed)
    read, said = torch.randint(256, (2, batch, length), generator=torch.Generator().manual_seed(seed))
    mids, outs = ([f"blocks.{i}.{site}" for i in range(layers)] for site in ("resid_mid", "resid_post"))
    with ct.trace(fresh, *mids, *outs, gradients=True) as t:
        F.cross_entropy(fresh(read).flatten(0, 1), said.flatten()).backward()
    return torch.stack([t[name] for name in mids]), torch.stack([t.gradient(name) for name in outs])


def own(v):
    """Length of what differs between tokens."""
    return (v - v.mean(2, keepdim=True)).flatten(1).norm(dim=1)  # (layers,)


# %%
depths, seeds = (4, 8, 16), 3
found = {(p, n, s): there_and_back(p, n, s) for p in ("pre", "post") for n in depths for s in range(seeds)}
gradients = {key: own(g) / own(g)[-1] for key, (_, g) in found.items()}


def mean_over_seeds(values):
    """Ratios are averaged as ratios."""
    return torch.stack(values).log().mean(0).exp()


last = mean_over_seeds([gradients["post", 16, s][-5] ** (1 / 4) for s in range(seeds)])
print(claim("post-norm: a token's own gradient, as a multiple a block", last, predicted=1 / math.sqrt(2), rtol=0.12))
least = min(gradients["pre", n, s].min() for n in depths for s in range(seeds))
claim("pre-norm: the least there is of it at any depth, as a share of the last block's", least, above=0.99)


# %%
def pre_norm_growth(mids):
    """√Π(1 + 0.32/r²) over the blocks above the first, and how much the stream has grown."""
    r2 = mids.square().mean((1, 2, 3))
    return (1 + 0.32 / r2[1:]).prod().sqrt(), (r2[-1] / r2[0]).sqrt()


growths = [torch.stack(pre_norm_growth(found["pre", 16, s][0])) for s in range(seeds)]
least, most = mean_over_seeds(growths).tolist()
ratio = mean_over_seeds([gradients["pre", 16, s][0] for s in range(seeds)])
claim("pre-norm, 16 blocks: first block's gradient as a multiple of the last's", ratio, above=least, below=most)

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
for placement, colour in (("pre", "#0072b2"), ("post", "#d55e00")):
    for depth, line in zip(depths, (":", "--", "-"), strict=True):
        mean = mean_over_seeds([gradients[placement, depth, s] for s in range(seeds)])
        axes.plot(range(depth), mean, line, color=colour, label=f"{placement}-norm, {depth} blocks")
down = torch.arange(8)
axes.plot(15 - down, 2.0 ** (-down / 2), color="black", lw=0.8, label="√2 a block")
axes.set(
    yscale="log",
    ylim=(0.008, 3),
    xlabel="block",
    ylabel="token's own gradient\n(share of last block's)",
    title="Pre-norm keeps the gradient; post-norm loses √2 a block",
)
axes.legend(fontsize=7, ncol=3, loc="lower center")
figure.tight_layout()

# %% [markdown]
# From the right: for eight blocks the post-norm curve keeps to $\sqrt2$ a block, then it levels off. In the lowest
# blocks the tokens are not yet alike, so attention adds little and the norm takes little; and the part of the gradient
# that all tokens share, which attention does hand down, is turned into differences again wherever ReLU treats tokens
# differently. At 16 blocks the least of it is found a third of the way up, not at the bottom.

# %% [markdown]
# ## Why post-norm wants a warm-up
#
# Adam divides each gradient by its own size, so its first steps are as long as the learning rate says, whatever the
# gradient was. Blocks far from the loss then take full steps along what little reached them, and where tokens have
# become alike there is nothing left to learn from. A warm-up keeps the first steps short.
#
# The task is a Markov chain over 16 letters with known statistics. A model that has learnt the transitions $P$ reaches
# the chain's entropy rate $\sum_i \pi_i H(P_i)$; a model whose tokens are all alike can at best tell how frequent each
# letter is, which costs $H(\pi)$. So we know both floors in advance: six blocks, a high rate (0.01), 40 steps.

# %%
chain = torch.softmax(3 * torch.randn(16, 16, generator=torch.Generator().manual_seed(0)), -1).double()  # P
frequency = torch.linalg.matrix_power(chain, 200)[0]  # π
alike = -(frequency * frequency.log()).sum().item()
learnt = -(frequency[:, None] * chain * chain.log()).sum().item()
print(f"letters alone: {alike:.3f} nats, transitions: {learnt:.3f} nats")


def walks(count, length, draw):
    """Sequences that the chain wrote, (count, length)."""
    tokens = torch.multinomial(frequency, count, replacement=True, generator=draw)[:, None]
    for _ in range(length - 1):
        tokens = torch.cat([tokens, torch.multinomial(chain[tokens[:, -1]], 1, generator=draw)], 1)
    return tokens


def learn(placement, warmup, steps=40, rate=0.01, seed=0):
    learner = fresh_model(placement, 6, seed, form="decoder", d_model=32, vocab_size=16)
    optimizer = torch.optim.AdamW(learner.parameters(), betas=(0.9, 0.98))
    batches = walks(32 * steps, 13, torch.Generator().manual_seed(seed)).split(32)
    losses = []
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / max(1, warmup))
        loss = F.cross_entropy(learner(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


curves = {"pre-norm": learn("pre", 0), "post-norm": learn("post", 0), "post-norm, warm-up of 25": learn("post", 25)}
end = {name: sum(losses[-8:]) / 8 for name, losses in curves.items()}

# %%
print(claim("cold, post-norm learns how frequent letters are, no more", end["post-norm"], predicted=alike, rtol=0.04))
way = {name: (alike - loss) / (alike - learnt) for name, loss in end.items()}
print(claim("cold, pre-norm learns the transitions (share of the way down)", way["pre-norm"], above=0.85))
print(claim("after a warm-up, post-norm learns them too", way["post-norm, warm-up of 25"], above=0.6))

figure, axes = plt.subplots(figsize=(6, 3.2))
for (name, losses), colour in zip(curves.items(), ("#0072b2", "#d55e00", "#009e73"), strict=True):
    axes.plot(range(1, 41), losses, color=colour, label=name)
for level, name in ((alike, "letters alone"), (learnt, "transitions known")):
    axes.axhline(level, color="black", lw=0.7, ls=":")
    axes.text(41.5, level, name, va="center", fontsize=7)
axes.set(
    xlabel="step",
    ylabel="loss (nats a letter)",
    xlim=(0, 41),
    ylim=(1, 4),
    title="Cold, post-norm stays where letters are counted",
)
axes.legend(fontsize=7)
figure.tight_layout()

# %% [markdown]
# ## Checkpointing
#
# The way back needs what the way there computed. A block can keep all of it; or keep its input alone, and compute the
# rest again when the gradient arrives ([Chen et al. 2016](https://arxiv.org/abs/1604.06174)). Predictions:
#
# - *bytes*: with `full` recomputation one more block costs one more stream of $B\cdot T\cdot d$ numbers, $4BTd$ bytes,
#   and nothing else;
# - *FLOPs*: the way back costs twice the way there, so a step is 3 passes, and 4 with recomputation: $4/3$ at most.
#   Less, in truth: the head is not repeated, nor is a block's last product $W_\text{down}h$, whose result is only
#   added to the stream and which no gradient asks for;
# - *results*: the same operations on the same numbers: not one bit may differ.
#
# `ct.size` walks the forward pass on sizes and says what is kept. PyTorch's hooks for saved tensors say what really
# is.


# %%
def shaped(layers):
    return model.config.replace(decoder=model.config.decoder.replace(layers=layers))


def kept_bytes(learner, tokens):
    """Bytes that autograd holds between the way there and the way back, weights aside."""
    weights = {each.untyped_storage().data_ptr() for each in learner.parameters()}
    held = {}

    def pack(tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            held[memory.data_ptr()] = memory.nbytes(), tensor  # held, so that its place is not given away
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        learner(tokens).logsumexp(-1).mean()
    return sum(size for size, _ in held.values())


B, T, depths = 2, 128, (2, 4, 6)
batch = torch.randint(2048, (B, T), generator=torch.Generator().manual_seed(0))
asked = {"mode": "train", "batch_size": B, "context": T, "dtype": "fp32", "hardware": "epyc-9654"}  # some CPU
measured, predicted = {}, {}
for layers in depths:
    learner = ct.build(shaped(layers), seed=0).train()
    for mode in ("none", "full"):
        measured[mode, layers] = kept_bytes(learner.use_activation_checkpointing(mode), batch)
        told = ct.size(shaped(layers), **asked, activation_checkpointing=mode)
        predicted[mode, layers] = told.memory.bytes_by_component["activations"]

# %%
for mode in ("none", "full"):
    found_mb, told_mb = measured[mode, 6] / 1e6, predicted[mode, 6] / 1e6
    print(claim(f"{mode}: megabytes kept by six blocks", found_mb, predicted=told_mb, rtol=0.02))
more = (measured["full", 6] - measured["full", 4]) / 2
claim("full: bytes that one more block keeps, 4·B·T·d", more, predicted=4 * B * T * d, rtol=0)

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
for mode, colour in (("none", "#d55e00"), ("full", "#0072b2")):
    axes.plot(depths, [predicted[mode, n] / 1e6 for n in depths], color=colour, label=f"{mode}, predicted")
    axes.plot(depths, [measured[mode, n] / 1e6 for n in depths], "o", color=colour, label=f"{mode}, measured")
axes.set(
    xlabel="blocks",
    xticks=depths,
    ylabel="kept for the way back (MB)",
    ylim=(0, None),
    title=f"Checkpointing keeps one stream a block ({B} × {T} tokens)",
)
axes.legend(fontsize=7)
figure.tight_layout()


# %%
def step(mode):
    learner.use_activation_checkpointing(mode).zero_grad()
    with FlopCounterMode(display=False) as counted:
        F.cross_entropy(learner(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
    return counted.get_total_flops(), [each.grad.clone() for each in learner.parameters()]


(flops, kept), (more_flops, recomputed) = step("none"), step("full")
down, block, head = d * 768, 4 * d * d + 3 * d * 768, d * 2048  # multiplications a token, scores aside
again = 6 * (block - down) / (3 * (6 * block + head))
print(claim("FLOPs with recomputation, as a multiple", more_flops / flops, predicted=1 + again, rtol=0.02))
differing = sum(int((a != b).sum()) for a, b in zip(kept, recomputed, strict=True))
claim("numbers of the gradient that differ in any bit", differing, predicted=0, rtol=0)

# %% [markdown]
# The library asks the same questions of any model: `analysis.activation_checkpointing_cost` measures memory and time,
# with the middle way `selective`, which keeps the results of matrix products and repeats only what is cheap. Time
# follows FLOPs loosely: expect a step to become longer, and far less than twice as long.

# %%
print(
    found := activation_checkpointing_cost(learner.use_activation_checkpointing("none"), batch[:1, :64], num_repeats=3)
)
none, selective, full = found.values.tolist()
print(claim("full recomputation: time of a step, as a multiple", full[1] / none[1], above=0.7, below=2.5))
between = (selective[0] - full[0]) / (none[0] - full[0])
claim("selective keeps less than all and more than block inputs (place between)", between, above=0, below=1)

# %% [markdown]
# ## Try
#
# - `there_and_back` with `form="decoder"` in `fresh_model`: a causal mask lets the last tokens' gradients reach the
#   first ones without company; post-norm then loses less.
# - `rate=0.002` in `learn`: with shorter steps post-norm needs no warm-up, and learns more slowly.
# - Take `"placement": {"kind": "sandwich"}` or `"output"`: which of the two curves do they follow, and why?
#
# Exercise 7 (`cutaway learn start 7`) asks for the two equations. Claim by claim with confidence intervals: `cutaway
# ablate depth-and-norm`. Before: [4. FFN, norms, residuals](04_ffn_norms_residuals.py). Next: [6. The three
# forms](06_forms.py).
