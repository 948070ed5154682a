# %% [markdown]
# # 7. Information and loss
#
# A language model is trained on one number, its surprise at the next token. Afterwards you can compute that number by
# hand, say what it is before training, where it must end on a source that is known, how to compare it between
# tokenizers, and how far text remembers what stood before. Needs: softmax; notebook 5 helps with training.

# %%
import argparse
import ast
import inspect
import math
import typing
import zlib

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import cutaway as ct
from cutaway.evaluate import (
    bits_per_byte,
    calibration,
    cross_entropy,
    entropy,
    information,
    kl_divergence,
    mutual_information,
    perplexity,
)
from cutaway.learn import claim

# %% [markdown]
# ## By hand
#
# Something with probability $p$ surprises by $-\log_2 p$ bits. **Entropy** is the mean surprise of someone who knows
# the distribution, $H(P) = -\sum p \log_2 p$; **cross-entropy** that of someone who believes $Q$, $H(P,Q) = -\sum p
# \log_2 q$; **KL divergence** is what the wrong belief costs; **perplexity** is $2^H$: among how many equally likely
# things one would be as unsure. By hand:
#
# - a fair coin: 1 bit. A coin of 0.9 and 0.1: $0.9 \cdot 0.152 + 0.1 \cdot 3.322 = 0.469$;
# - the true class had $p = 0.9,\ 0.4,\ 0.01$: $-\log_2 p = 0.1520,\ 1.3219,\ 6.6439$ bits, perplexities $1/p = 1.11,\
#   2.5,\ 100$;
# - $P = (.7, .2, .1)$, $Q = (.5, .3, .2)$: $H(P) = 1.1568$, $KL = 0.1228$, and so $H(P, Q) = 1.2796$.

# %%
P, Q = [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]
print(claim("entropy of a fair coin (bits)", entropy([0.5, 0.5]), predicted=1, rtol=0))
print(claim("of a coin of 0.9 and 0.1", entropy([0.9, 0.1]), predicted=0.469, rtol=1e-3))
for p, bits in ((0.9, 0.1520), (0.4, 1.3219), (0.01, 6.6439)):
    print(claim(f"surprise at a class of p = {p}", cross_entropy(q=[p, 1 - p], target=0), predicted=bits, rtol=1e-3))
print(claim("perplexity at p = 0.9", perplexity(q=[0.9, 0.1], target=0), predicted=1.11, rtol=2e-3))
print(claim("perplexity at p = 0.4", perplexity(q=[0.4, 0.6], target=0), predicted=2.5, rtol=0))
print(claim("H(P)", entropy(P), predicted=1.1568, rtol=1e-4))
print(claim("KL(P ‖ Q)", kl_divergence(P, Q), predicted=0.1228, rtol=1e-3))
claim("cross-entropy is entropy and divergence: H(P, Q)", cross_entropy(P, Q), predicted=1.1568 + 0.1228, rtol=1e-4)

# %%
figure, axes = plt.subplots(figsize=(6, 3))
p = torch.linspace(0.005, 0.995, 199)
axes.plot(p, -p.log2(), color="#d55e00", label="surprise, −log₂ p")
axes.plot(p, [entropy([float(x), 1 - float(x)]) for x in p], color="#0072b2", label="entropy of a coin (p, 1 − p)")
for x, y in ((0.9, 0.1520), (0.4, 1.3219), (0.01, 6.6439), (0.5, 1.0), (0.9, 0.4690)):
    axes.plot(x, y, "o", color="black", ms=4)
    axes.annotate(f"{y:.3f}", (x, y), xytext=(5, -9 if y < 0.2 else 4), textcoords="offset points", fontsize=7)
axes.set(xlabel="probability p", ylabel="bits", title="Rare things surprise; a fair coin is the least certain")
axes.legend(fontsize=8)
figure.tight_layout()

# %% [markdown]
# ## Before training
#
# A fresh model knows nothing, so its loss should be $\ln V$, the entropy of an even guess. Nearly: its logits are not
# all equal but small random numbers of variance $\sigma^2$, and the mean of $\ln \sum e^{l}$ over Gaussian logits is
# $\ln V + \sigma^2/2$. The head multiplies a normed vector of length $\sqrt d$ by rows drawn with deviation 0.02:
# $\sigma^2 = 0.02^2\, d$, 0.10 with $d = 256$. So the shipped shape with $V = 2048$ must begin at $7.625 + 0.051$
# nats, a perplexity near 2,048 (and a model that begins elsewhere has a bug in its head or its loss).

# %%
shipped = ct.load("tiny-python", dtype=torch.float32)
tokens = torch.randint(2045, (4, 64), generator=torch.Generator().manual_seed(0))
losses = []
with torch.no_grad():
    for seed in range(3):
        logits = ct.build(shipped.config, seed=seed)(tokens[:, :-1])  # (B, T, V)
        losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item())
begin = sum(losses) / 3
print([round(loss, 3) for loss in losses])
expected = math.log(2048) + 0.02**2 * 256 / 2
print(claim("loss of fresh weights, ln V + σ²/2 (nats)", begin, predicted=expected, rtol=0.003))
claim("as a perplexity, near V", math.exp(begin), predicted=2048, rtol=0.1)

# %% [markdown]
# ## Where it must end
#
# No model can be less surprised than the source is random. A Markov chain with transitions $P$ and frequencies $\pi$
# has an *entropy rate* that can be written down,
#
# $$h = \sum_i \pi_i H(P_i),$$
#
# and $\text{loss} = h + \sum_i \pi_i\, KL(P_i \,\|\, Q_i)$ for a model that says $Q_i$ after letter $i$. We take three
# chains over 12 letters, from nearly certain to nearly even, train the same small model on each for 60 steps, and
# predict both the end and what is still missing from it.

# %%
LETTERS, STEPS = 12, 60


def chain(sharpness):
    """Transitions, frequencies, entropy rate in nats."""
    rows = torch.softmax(
        sharpness * torch.randn(LETTERS, LETTERS, generator=torch.Generator().manual_seed(1)), -1
    ).double()
    often = torch.linalg.matrix_power(rows, 500)[0]
    return rows, often, (often * entropy(rows, unit="nats")).sum().item()


def walks(rows, often, count, length, draw):
    """Texts that the chain writes, (count, length)."""
    text = torch.multinomial(often, count, replacement=True, generator=draw)[:, None]
    for _ in range(length - 1):
        text = torch.cat([text, torch.multinomial(rows[text[:, -1]], 1, generator=draw)], 1)
    return text


def learn(rows, often, seed=0):
    """A trained model and its losses on the way."""
    block = {"attention": {"heads": 2}, "ffn": {"kind": "mlp"}}
    shape = {"form": "decoder", "vocab_size": LETTERS, "d_model": 32, "init": {"kind": "xavier"}}
    model = ct.build({**shape, "decoder": {"layers": 1, "block": block}}, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    batches = walks(rows, often, 64 * STEPS, 17, torch.Generator().manual_seed(seed)).split(64)
    losses = []
    for batch in batches:
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


# %%
rates, curves, ended, missing = [], [], [], []
for sharpness in (4, 2, 0.75):
    rows, often, rate = chain(sharpness)
    model, losses = learn(rows, often)
    fresh = walks(rows, often, 2048, 17, torch.Generator().manual_seed(99))
    with torch.no_grad():
        logits = model(fresh[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), fresh[:, 1:].flatten()).item()
    divergence = kl_divergence(rows[fresh[:, :-1]], q_logits=logits.double(), unit="nats").mean().item()
    for into, value in ((rates, rate), (curves, losses), (ended, loss), (missing, divergence)):
        into.append(value)
    print(claim(f"loss on unseen text of a chain with rate {rate:.3f} nats", loss, predicted=rate, rtol=0.12))

# %%
gaps = [abs(loss - rate - divergence) for loss, rate, divergence in zip(ended, rates, missing, strict=True)]
print([f"{divergence:.4f}" for divergence in missing])
print(claim("loss = entropy rate + divergence: largest gap over three chains (nats)", max(gaps), below=0.04))

figure, axes = plt.subplots(figsize=(6, 3.2))
for losses, rate, colour in zip(curves, rates, ("#0072b2", "#009e73", "#d55e00"), strict=True):
    axes.plot(range(1, STEPS + 1), losses, color=colour)
    axes.axhline(rate, color=colour, lw=0.8, ls=":")
    axes.text(STEPS + 1.5, rate, f"h = {rate:.2f}", fontsize=7, va="center")
axes.axhline(math.log(LETTERS), color="black", lw=0.8)
axes.text(STEPS + 1.5, math.log(LETTERS), "ln 12", fontsize=7, va="center")
axes.set(
    xlabel="step",
    ylabel="loss (nats a letter)",
    xlim=(0, STEPS + 1),
    title="Each model goes down to its source's entropy rate, and stays",
)
figure.tight_layout()

# %% [markdown]
# ## Tokens are not comparable, bytes are
#
# Loss is per token, and tokens are of different lengths. A tokenizer with longer tokens has fewer and harder guesses:
# its loss a token *rises* while the text as a whole gets *cheaper*. What can be compared is the surprise at the whole
# text divided by its bytes:
#
# $$\text{bits per byte} = \frac{\text{loss a token} / \ln 2}{\text{bytes a token}}.$$
#
# We see it without any model: guess every token by its frequency alone, once with bytes as tokens and once with the
# shipped model's 2,048. The text is cutaway's own source, which the model has never read.

# %%
text = "".join(inspect.getsource(each) for each in (information, calibration))
pieces, letters = shipped.tokenizer.encode(text), list(text.encode())
by_piece, by_byte = (entropy(samples=each, unit="nats") for each in (pieces, letters))
length = len(letters) / len(pieces)
print(f"{len(letters):,} bytes, {len(pieces):,} tokens of {length:.2f} bytes")
print(claim("nats a token: longer tokens are harder (ratio to bytes)", by_piece / by_byte, above=1))
claim("bits a byte: the text is cheaper (ratio)", bits_per_byte(by_piece, length) / bits_per_byte(by_byte, 1), below=1)

# %% [markdown]
# Now the trained model, which also uses what stands before. It was trained to 1.087 bits a byte on held-out code of
# the standard library; someone else's code should cost more, and still far less than letters alone. Whoever predicts
# well compresses well (a code of $-\log_2 p$ bits a token exists), so a compressor is a fair rival: `zlib` starts
# without knowing Python.

# %%
score = ct.evaluate(shipped, [text], stride=512)
packed = 8 * len(zlib.compress(text.encode(), 9)) / len(letters)
costs = {
    "even guess": 8.0,
    "bytes, counted": by_byte / math.log(2),
    "tokens, counted": bits_per_byte(by_piece, length),
    "zlib": packed,
    "tiny-python": score.bits_per_byte,
}
print(f"loss {score.loss:.3f} nats a token, perplexity {score.perplexity:.1f}, {score.bits_per_byte:.3f} bits a byte")
spent, by_letters = score.bits_per_byte, costs["bytes, counted"]
print(claim("bits a byte on code it has not read: above its own text's", spent, above=1.087, below=by_letters))
ratio = spent / costs["tokens, counted"]
print(claim("against guessing each token by its frequency (ratio)", ratio, below=0.9))

figure, axes = plt.subplots(figsize=(6, 2.6))
bars = axes.barh(list(costs), list(costs.values()), color=["#999999"] * 4 + ["#0072b2"])
axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
axes.invert_yaxis()
axes.set(xlabel="bits a byte of code", xlim=(0, 9), title="To predict is to compress")
figure.tight_layout()

# %% [markdown]
# ## How far text remembers
#
# What does a byte tell of the one $k$ places later? Mutual information $I(X;Y) = KL(P(x,y)\,\|\,P(x)P(y))$ says it in
# bits. Two predictions to hold it against:
#
# - *the estimate is too high*. Counting pairs in $n$ samples finds information where there is none: about $(K-1)^2/2n$
#   nats if all pairs of $K$ outcomes were common, at least $(K_{xy} - K_x - K_y + 1)/2n$ if only the $K_{xy}$ pairs
#   that were seen count (Miller and Madow). Shuffled text, which remembers nothing, must show an amount between the
#   two; we take it off everywhere;
# - *if text were a Markov chain* with its own pairs of neighbours, knowledge would pass through every byte between:
#   $P(x, y) = \pi_x (P^k)_{xy}$, which falls off exponentially. Language is known to fall off as a power ([Lin and
#   Tegmark 2016](https://arxiv.org/abs/1606.06737)): the chain must lose by far.

# %%
code = torch.frombuffer(bytearray("".join(map(inspect.getsource, (argparse, ast, typing))).encode()), dtype=torch.uint8)
known, code = torch.unique(code[:150_000], return_inverse=True)
n, K = len(code), len(known)


def joint(k, text):
    """How often x stands k places before y, (K, K)."""
    return torch.bincount(text[:-k] * K + text[k:], minlength=K * K).double().view(K, K)


def told(table):
    return mutual_information(table / table.sum())  # bits


shuffled = joint(1, code[torch.randperm(n, generator=torch.Generator().manual_seed(0))])
chance, seen = told(shuffled), int((shuffled > 0).sum())
least, most = ((each / (2 * n)) / math.log(2) for each in (seen - 2 * K + 1, (K - 1) ** 2))
print(f"{n:,} bytes, {K} different ones, {seen:,} different pairs")
claim("shuffled text: mutual information that chance alone shows (bits)", chance, above=least, below=most)

# %%
pairs = joint(1, code)
often, step = pairs.sum(1) / pairs.sum(), pairs / pairs.sum(1, keepdim=True).clamp(min=1)
distances = [1, 2, 4, 8, 16, 32, 64, 128]
measured = [told(joint(k, code)) - chance for k in distances]
chained = [told(often[:, None] * torch.linalg.matrix_power(step, k)) for k in distances]
print([f"{each:.3f}" for each in measured])
print([f"{each:.3f}" for each in chained])
print(claim("16 bytes on: what text still tells, as a multiple of the chain's", measured[4] / chained[4], above=3))
print(claim("64 bytes on: what is left of that between neighbours", measured[6] / measured[0], above=1e-3))

figure, axes = plt.subplots(figsize=(6, 3.2))
axes.plot(distances, measured, "o-", color="#0072b2", label="Python text")
axes.plot(distances, [max(each, 1e-9) for each in chained], "s--", color="#d55e00", label="Markov chain of its pairs")
axes.axhline(chance, color="black", lw=0.7, ls=":", label="taken off: chance")
axes.set(
    xscale="log",
    yscale="log",
    ylim=(3e-4, 4),
    xticks=distances,
    xticklabels=distances,
    xlabel="distance (bytes)",
    ylabel="mutual information (bits)",
    title="Text remembers; a chain forgets",
)
axes.minorticks_off()
axes.legend(fontsize=8)
figure.tight_layout()

# %% [markdown]
# What lies between the curves is what attention is for: a model that saw the last byte alone would be the chain.
#
# ## Does it know how sure it is?
#
# Minimising cross-entropy does not only order the tokens, it asks for the right probabilities: if all logits are
# divided by $\tau$, the loss on the text trained on is least at $\tau = 1$, or a step along $\tau$ would have lowered
# it. So on the standard library the best $\tau$ must be near 1, and there the model must be right as often as it says.
# Sharper ($\tau = 0.5$) it must be too sure, flatter ($\tau = 2$) not sure enough. Of code that is unlike its own
# nothing of the kind follows: there models are found to be too sure ([Guo et al.
# 2017](https://arxiv.org/abs/1706.04599)), which a $\tau$ above 1 would mend.


# %%
def told_of(text, windows=8):
    """Logits and the tokens that came, (N, V) and (N,), in windows of 256."""
    ids = shipped.tokenizer.encode(text)
    rows = torch.tensor(ids[: min(windows, len(ids) // 257) * 257]).view(-1, 257)
    with torch.no_grad():
        return shipped.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()


def best_temperature(logits, targets):
    asked = torch.linspace(0.5, 2, 16)
    return asked[torch.tensor([F.cross_entropy(logits / each, targets) for each in asked]).argmin()].item()


home, abroad = told_of(inspect.getsource(argparse)), told_of(text)
print(claim("best temperature on the standard library", best_temperature(*home), predicted=1, rtol=0.15))
claim("best temperature on cutaway's own code", best_temperature(*abroad), above=1.15)

# %%
logits, targets = home
found = {each: ct.evaluate.evaluate_calibration(logits=logits / each, targets=targets) for each in (0.5, 1.0, 2.0)}
for each, told_so in found.items():
    said = f"says {told_so.confidence:.3f}, is right {told_so.accuracy:.3f}, calibration error {told_so.ece:.3f}"
    print(f"τ = {each}: {said}")
over, under = found[0.5].confidence - found[0.5].accuracy, found[2.0].accuracy - found[2.0].confidence
print(claim("too sure at τ = 0.5: says more than it is right, by", over, above=0.05))
print(claim("not sure enough at τ = 2, by", under, above=0.05))
claim("calibration error at τ = 1", found[1.0].ece, below=0.06)

# %%
figure, axes = plt.subplots(figsize=(4.2, 3.6))
for (each, told_so), colour in zip(found.items(), ("#d55e00", "#0072b2", "#009e73"), strict=True):
    rows = [row for row in told_so.bins if row["count"] >= 20]
    axes.plot(
        [row["confidence"] for row in rows],
        [row["accuracy"] for row in rows],
        "o-",
        ms=4,
        color=colour,
        label=f"τ = {each:g}",
    )
axes.plot([0, 1], [0, 1], color="black", lw=0.7, ls=":")
axes.set(
    xlabel="how sure it is", ylabel="how often it is right", title="As trained, it is about as right as it is sure"
)
axes.title.set_fontsize(10)
axes.legend(fontsize=8)
figure.tight_layout()

# %% [markdown]
# ## Try
#
# - `chain(8)` and `chain(0)`: where must the losses end? (Almost 0; $\ln 12$ at once.)
# - A chain whose letter depends on the last *two*: a model without attention can only know one of them. What are its
#   two floors?
# - `ct.evaluate(shipped, [text], context=32)`: how many bits a byte does a short memory cost? Compare with the curve
#   above.
#
# Exercises: 1 (`cutaway learn start 1`) has the softmax that all of this begins with; 10 has a loss that is not
# shifted. On the command line: `cutaway eval tiny-python --text FILE`. Before: [6. The three forms](06_forms.py).
# Next: [8. What it costs](08_costs.py).
