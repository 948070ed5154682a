# %% [markdown]
# # 6. Three forms, three objectives
#
# One stack makes three kinds of Transformer: a decoder that continues, an encoder that reads what stands there,
# and an encoder-decoder that writes one text while reading another. Afterwards you know who sees whom in each, what
# each is asked during training, and which tasks each can and cannot learn, with the loss it must end at. Needs:
# attention and masks (2).

# %%
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import cutaway as ct
from cutaway.learn import claim
from cutaway.lens.analysis import cached_decoding_error
from cutaway.train import objectives


def shaped(form, vocab_size):
    """The same small stack in each form: one block of 4 heads, learned positions."""
    block = {"attention": {"heads": 4}, "ffn": {"kind": "mlp"}}
    stack = {"layers": 1, "block": block, "embedding": {"position": {"kind": "learned", "length": 16}}}
    cross = {**stack, "block": {**block, "cross": {"heads": 4}}}
    sides = {
        "decoder": {"decoder": stack},
        "encoder": {"encoder": stack},
        "encoder-decoder": {"encoder": stack, "decoder": cross},
    }
    return ct.config({"form": form, "vocab_size": vocab_size, "d_model": 32, "init": {"kind": "xavier"}, **sides[form]})


# %% [markdown]
# ## Who sees whom
#
# | form | self-attention | sees |
# |---|---|---|
# | decoder | causal | itself and what came before: $T(T+1)/2$ pairs |
# | encoder | bidirectional | everything: $T^2$ pairs |
# | encoder-decoder | source bidirectional, target causal | and each target token the whole source: $T \cdot S$ pairs |
#
# We count the pairs in real patterns of fresh models, with $T = 8$ and a source of $S = 11$.

# %%
T, S = 8, 11
tokens, source = torch.arange(T)[None], torch.arange(S)[None]
forms = {form: ct.build(shaped(form, 16), seed=0) for form in ("decoder", "encoder", "encoder-decoder")}
patterns = {}
with torch.no_grad():
    for form in ("decoder", "encoder"):
        with ct.trace(forms[form], "blocks.0.attn.pattern") as t:
            forms[form](tokens)
        patterns[form] = t["blocks.0.attn.pattern"][0, 0]  # one head, (queries, keys)
    with ct.trace(forms["encoder-decoder"], "decoder.blocks.0.cross.pattern") as t:
        forms["encoder-decoder"](source, tokens)
    patterns["encoder-decoder"] = t["decoder.blocks.0.cross.pattern"][0, 0]
seen = {form: int((pattern > 0).sum()) for form, pattern in patterns.items()}
print(claim("pairs that a decoder sees", seen["decoder"], predicted=T * (T + 1) / 2, rtol=0))
print(claim("pairs that an encoder sees", seen["encoder"], predicted=T * T, rtol=0))
claim("pairs that cross-attention sees", seen["encoder-decoder"], predicted=T * S, rtol=0)

# %%
figure, axes = plt.subplots(1, 3, figsize=(7, 2.6))
titles = "self-attention of\na decoder", "self-attention of\nan encoder", "cross-attention of\nan encoder-decoder"
for plot, title, pattern in zip(axes, titles, patterns.values(), strict=True):
    plot.imshow(pattern > 0, cmap="Blues", vmin=0, vmax=1.4)
    plot.set_title(title, fontsize=9)
    plot.set(xlabel="token that is seen", ylabel="token that looks")
figure.tight_layout()

# %% [markdown]
# ## Cross-attention by hand
#
# Queries come from the decoder's stream, keys and values from the encoder's result, $\text{softmax}(Q_\text{dec}
# K_\text{enc}^\top / \sqrt{d_\text{head}})\,V_\text{enc}$. No mask: the source is all there. Four lines must give what
# the library has at `cross.out`.

# %%
both = forms["encoder-decoder"]
with torch.no_grad(), ct.trace(both, "decoder.blocks.0.cross.in", "decoder.blocks.0.cross.out") as t:
    both(source, tokens)
read, written = t["decoder.blocks.0.cross.in"], t["decoder.blocks.0.cross.out"]  # (1, T, 32)
cross = both.decoder.blocks[0].cross.f


def heads(x):
    return x.unflatten(-1, (4, 8)).transpose(1, 2)  # (1, T, 32) → (1, 4 heads, T, 8)


with torch.no_grad():
    memory = both.encode(source)  # (1, S, 32)
    q, k, v = heads(cross.q(read)), heads(cross.k(memory)), heads(cross.v(memory))
    pattern = (q @ k.transpose(-1, -2) / math.sqrt(8)).softmax(-1)  # (1, 4, T, S)
    by_hand = cross.o((pattern @ v).transpose(1, 2).flatten(2))  # (1, T, 32)
claim("cross-attention by hand: largest difference to the library's", (by_hand - written).abs().max(), below=1e-5)

# %% [markdown]
# ## What each is asked
#
# An objective says what the model reads, what it must say at each place, and which places count:
#
# - **next token**: place $t$ must say token $t+1$: $T-1$ targets in a text of $T$ tokens, all at once;
# - **masked**: 15 % of the tokens are hidden, and only they count. Of these 80 % become a mask, 10 % any token, 10 %
#   stay ([BERT](https://arxiv.org/abs/1810.04805)), so that no place may be taken on trust;
# - **sequence to sequence**: next token on the target, given the source; padding does not count.

# %%
rows = torch.randint(4, 1000, (64, 128), generator=torch.Generator().manual_seed(0))
asked = objectives.masked_lm(rows, mask_id=3, vocab_size=1000, seed=0, positions=range(64))
[shown], hidden = asked.inputs, asked.weights.bool()
print(claim("share of tokens that count when they are masked", hidden.float().mean(), predicted=0.15, rtol=0.1))
print(claim("of those, share that became the mask", (shown[hidden] == 3).float().mean(), predicted=0.8, rtol=0.05))
stayed = (shown == rows)[hidden].float().mean()
print(claim("of those, share that stayed as they were", stayed, predicted=0.1, rtol=0.3))

real = torch.tensor([[True] * 6 + [False] * 2, [True] * 8])  # a target of 6 tokens and one of 8
asked = objectives.seq2seq(source.expand(2, -1), None, tokens.expand(2, -1), real)
print(asked.weights.int())
claim("targets that count: each text's tokens but its first", asked.weights.sum(), predicted=5 + 7, rtol=0)

# %% [markdown]
# ## The middle word
#
# A language in which the middle depends on both sides: texts are $a\; s\; b$ with $a, b$ drawn freely from $M = 5$
# letters and $s = a + b \bmod M$. One text carries $2 \ln M$ nats. What must trained models reach?
#
# - A **decoder** sees nothing before $a$: $\ln M$. It sees $a$ before $s$, and $b$ is still free: $\ln M$ again. With
#   $a$ and $s$, $b$ is certain: 0.
# - An **encoder** that is shown any two finds the third: 0 everywhere. It learns what the decoder cannot; but its
#   three losses no longer add up to what a text carries. A masked loss is no likelihood of a text.

# %%
M, BEGIN, MASK = 5, 5, 6
a, b = torch.cartesian_prod(torch.arange(M), torch.arange(M)).T
texts = torch.stack([a, (a + b) % M, b], 1)  # (25, 3): every text that there is


def train(model, step, steps, rate=1e-2):
    """Minimise `step(number)`; the losses on the way."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    losses = []
    for number in range(steps):
        loss = step(number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def decoder_losses():
    """By place: a, s, b. The objective reads BEGIN a s, and is told a s b."""
    task = objectives.causal_lm(F.pad(texts, (1, 0), value=BEGIN))
    return F.cross_entropy(decoder(*task.inputs).transpose(1, 2), task.targets, reduction="none").mean(0)  # (3,)


def encoder_losses():
    """By place: each is hidden in turn, the other two are shown."""
    shown = texts.expand(3, 25, 3).clone()
    shown[range(3), :, range(3)] = MASK
    logits = encoder(shown.flatten(0, 1)).unflatten(0, (3, 25))[range(3), :, range(3)]  # (3 hidden, 25, V)
    return F.cross_entropy(logits.transpose(1, 2), texts.T, reduction="none").mean(1)  # (3,)


decoder, encoder = ct.build(shaped("decoder", 7), seed=0), ct.build(shaped("encoder", 7), seed=0)
train(decoder, lambda _: decoder_losses().mean(), 100)
train(encoder, lambda _: encoder_losses().mean(), 100)
with torch.no_grad():
    told = {"decoder": decoder_losses(), "encoder": encoder_losses()}

# %%
even, (_, middle, last) = math.log(M), told["decoder"]
print(claim("decoder: the middle letter costs ln 5, whatever it learns", middle, predicted=even, rtol=0.05))
print(claim("decoder: the last letter is certain (nats)", last, below=0.1))
carried = told["decoder"].sum()
print(claim("decoder: all three together are what a text carries, 2·ln 5", carried, predicted=2 * even, rtol=0.05))
print(claim("encoder: the middle letter, both neighbours shown (nats)", told["encoder"][1], below=0.1))

figure, axes = plt.subplots(figsize=(6, 3))
for shift, (form, colour) in enumerate((("decoder", "#0072b2"), ("encoder", "#d55e00"))):
    bars = axes.bar([place + 0.36 * shift for place in range(3)], told[form], width=0.34, color=colour, label=form)
    axes.bar_label(bars, fmt="%.2f", fontsize=7)
axes.axhline(math.log(M), color="black", lw=0.7, ls=":")
axes.text(2.6, math.log(M), "ln 5", va="bottom", ha="right", fontsize=8)
axes.set_ylim(0, 1.9)
axes.set(
    xticks=[0.18, 1.18, 2.18],
    xticklabels=["a", "s = a + b", "b"],
    ylabel="loss (nats)",
    title="The middle letter needs what stands to its right",
)
axes.legend(fontsize=8, loc="center right")
figure.tight_layout()

# %% [markdown]
# ## Writing while reading
#
# Now the target is the source backwards: six letters of eight. A decoder that sees the target alone can do no better
# than $\ln 8$ a letter. With the source it could be certain. With *label smoothing* $\varepsilon$ it is not allowed to
# be: the truth it is held against is $1 - \varepsilon + \varepsilon/V$ for the right token and $\varepsilon/V$ for
# each other one, and the least cross-entropy is that distribution's own entropy
#
# $$-\Big(1-\varepsilon+\frac{\varepsilon}{V}\Big)\ln\Big(1-\varepsilon+\frac{\varepsilon}{V}\Big)
# - (V-1)\,\frac{\varepsilon}{V}\ln\frac{\varepsilon}{V}.$$
#
# Training ends there, and the plain loss ends at $-\ln(1-\varepsilon+\varepsilon/V)$.

# %%
K, N, START, smoothing = 8, 6, 8, 0.1
V, draw = K + 1, torch.Generator().manual_seed(0)
translator = ct.build(shaped("encoder-decoder", V), seed=0)


def pairs(count):
    source = torch.randint(K, (count, N), generator=draw)
    return objectives.seq2seq(source, None, F.pad(source.flip(1), (1, 0), value=START), None)


def smoothed(number):
    loss = pairs(64).loss(translator, objectives.CrossEntropyOptions(label_smoothing=smoothing))
    return loss.loss / loss.weight


losses = train(translator, smoothed, 140)
with torch.no_grad():
    task = pairs(256)
    loss = task.loss(translator, objectives.CrossEntropyOptions(label_smoothing=smoothing))

# %%
sure = 1 - smoothing + smoothing / V
floor = -sure * math.log(sure) - (V - 1) * smoothing / V * math.log(smoothing / V)
ended, plain = (loss.loss / loss.weight).item(), (loss.cross_entropy / loss.weight).item()
print(claim("smoothed loss ends at the smoothed truth's entropy", ended, predicted=floor, rtol=0.03))
print(claim("plain loss ends at −ln(1 − ε + ε/V)", plain, predicted=-math.log(sure), rtol=0.1))
with torch.no_grad(), ct.edit(translator, {"decoder.blocks.0.cross.out": "zero"}):
    blind = task.loss(translator)
blind = (blind.loss / blind.weight).item()
claim("without cross-attention it is worse than guessing letters, ln 8", blind, above=math.log(K))

# %% [markdown]
# What does it look at? To write letter $t$ it needs source letter $N - 1 - t$, which no one told it. Two ways to ask:
# where its cross-attention falls, and what happens to each written letter when one source letter is another. The
# second must be the backward diagonal: the needed letter changes the answer always, any other hardly ever.

# %%
read, written = task.inputs[:2]
with torch.no_grad(), ct.trace(translator, "decoder.blocks.0.cross.pattern") as t:
    said = translator(read, written).argmax(-1)  # (256, N)
attention = t["decoder.blocks.0.cross.pattern"].mean((0, 1))  # over texts and heads, (N, N)

depends = torch.zeros(N, N)
for place in range(N):
    other = read.clone()
    other[:, place] = (other[:, place] + 1) % K
    with torch.no_grad():
        depends[:, place] = (translator(other, written).argmax(-1) != said).float().mean(0)
needed = torch.eye(N).flip(1).bool()
print(claim("another letter at the needed place changes the answer (share)", depends[needed].mean(), above=0.97))
claim("another letter anywhere else does", depends[~needed].mean(), below=0.1)

# %%
figure, (curve, *heats) = plt.subplots(1, 3, figsize=(8, 2.8), width_ratios=(1.5, 1, 1), layout="constrained")
curve.plot(losses, color="#0072b2")
for level, name in ((math.log(K), "source unseen: ln 8"), (floor, "floor of smoothing")):
    curve.axhline(level, color="black", lw=0.7, ls=":")
    curve.text(len(losses), level + 0.03, name, ha="right", va="bottom", fontsize=7)
curve.set(xlabel="step", ylabel="smoothed loss (nats)", ylim=(0, None))
curve.set_title("Training ends at the predicted floor", fontsize=9)
for heat, values, title in zip(heats, (attention, depends), ("Cross-attention", "Answers that change"), strict=True):
    drawn = heat.imshow(values, cmap="Blues", vmin=0, vmax=1)
    heat.set(xlabel="source letter")
    heat.set_title(title, fontsize=9)
heats[0].set_ylabel("letter to write")
figure.colorbar(drawn, ax=heats, shrink=0.7, label="share")

# %% [markdown]
# Here the two agree. They need not: from another seed the encoder's own attention may carry letters to other places
# first, and cross-attention then picks them up there (weights and texts from seed 1 do so, with the same loss).
# Attention shows where a vector was read, a change to the input what it depends on.

# %% [markdown]
# ## At once and step by step
#
# Training reads all places of a target in one pass, since the truth so far is known (*teacher forcing*). Writing takes
# one step a token with a cache. A causal mask makes the two the same function: whatever a place sees in training, it
# sees in its own step. In exact arithmetic the logits are equal; in 32 bits they may differ by rounding, about
# $10^{-7}$ of the largest logit, times a few operations.

# %%
checkpoint = ct.load("tiny-python", dtype=torch.float32)
shipped = cached_decoding_error(checkpoint, "for name in sorted(os.listdir(path)):")
trained = cached_decoding_error(translator, task.inputs[1][:1], source=task.inputs[0][:1])
print(shipped.note)
print(claim("decoder: one pass against steps, largest difference of a logit", shipped.values.max(), below=1e-4))
claim("encoder-decoder: one pass against steps", trained.values.max(), below=1e-4)

# %% [markdown]
# An encoder has no such equality: each place sees what comes after. Change the last token, and all vectors move; in a
# decoder, none before it does.

# %%
with torch.no_grad():
    moved = {}
    for form in ("decoder", "encoder"):
        changed = tokens.clone()
        changed[0, -1] = 15
        moved[form] = (forms[form](changed) - forms[form](tokens))[0, :-1].abs().amax(-1)  # (T − 1,)
moved = {form: int((each > 0).sum()) for form, each in moved.items()}
print(claim("decoder: earlier places that move when the last token changes", moved["decoder"], predicted=0, rtol=0))
claim("encoder: earlier places that move", moved["encoder"], predicted=T - 1, rtol=0)

# %% [markdown]
# ## Try
#
# - Order the letters $a\; b\; s$ in `texts`: now the decoder too is certain of $s$. Order is half of what a decoder
#   can know.
# - `smoothing = 0.0`: the floor falls to 0, and the losses go on falling. What does smoothing cost at the end, in
#   nats?
# - Let the target be the source sorted: what should the cross-attention look like then?
#
# Exercises 2 (`cutaway learn start 2`, the causal mask) and 9 (name the mask) belong here. A trained encoder-decoder
# of this kind that reads dates in 47 locales: `cutaway train dates`. Before: [5. The way back](05_gradients.py). Next:
# [7. Information](07_information.py).
