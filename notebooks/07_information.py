# %% [markdown]
# # 7. Information and loss
#
# A language model is trained to minimize cross-entropy. This notebook computes entropy, cross-entropy, KL divergence
# and perplexity by hand, predicts the loss of an untrained model and the minimal loss on a known source, compares
# models across tokenizers by bits per byte, measures the mutual information of bytes by distance, and measures the
# calibration of a trained model.
#
# Prerequisites: softmax; [notebook 5](05_gradients.py) for training.

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
# ## Entropy, cross-entropy, KL divergence, perplexity
#
# An outcome of probability $p$ has the information content $-\log_2 p$ bits. **Entropy** is the mean information
# content, $H(P) = -\sum p \log_2 p$. **Cross-entropy** is the mean under $P$ of the information content under $Q$,
# $H(P,Q) = -\sum p \log_2 q$. **KL divergence** is the difference $H(P,Q) - H(P)$. **Perplexity** is $2^H$, the number
# of equally likely outcomes with the same entropy. By hand:
#
# - a fair coin: 1 bit. A coin of 0.9 and 0.1: $0.9 \cdot 0.152 + 0.1 \cdot 3.322 = 0.469$;
# - a correct class with $p = 0.9,\ 0.4,\ 0.01$: $-\log_2 p = 0.1520,\ 1.3219,\ 6.6439$ bits, perplexity
#   $1/p = 1.11,\ 2.5,\ 100$;
# - $P = (.7, .2, .1)$, $Q = (.5, .3, .2)$: $H(P) = 1.1568$, $KL = 0.1228$, and so $H(P, Q) = 1.2796$.

# %%
P, Q = [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]
print(claim("entropy of a fair coin, bits", entropy([0.5, 0.5]), predicted=1, rtol=0, id="C240"))
print(claim("entropy of a coin of 0.9 and 0.1, bits", entropy([0.9, 0.1]), predicted=0.469, rtol=1e-3, id="C240"))
for p, bits in ((0.9, 0.1520), (0.4, 1.3219), (0.01, 6.6439)):
    measured = cross_entropy(q=[p, 1 - p], target=0)
    print(claim(f"cross-entropy at a correct class of p = {p}, bits", measured, predicted=bits, rtol=1e-3, id="C245"))
print(claim("perplexity at p = 0.9", perplexity(q=[0.9, 0.1], target=0), predicted=1.11, rtol=2e-3, id="C293"))
print(claim("perplexity at p = 0.4", perplexity(q=[0.4, 0.6], target=0), predicted=2.5, rtol=0, id="C293"))
print(claim("H(P)", entropy(P), predicted=1.1568, rtol=1e-4, id="C292"))
print(claim("KL(P ‖ Q)", kl_divergence(P, Q), predicted=0.1228, rtol=1e-3, id="C292"))
claim("H(P, Q) = H(P) + KL(P ‖ Q)", cross_entropy(P, Q), predicted=1.1568 + 0.1228, rtol=1e-4, id="C292")

# %%
figure, axes = plt.subplots(figsize=(6, 3))
p = torch.linspace(0.005, 0.995, 199)
axes.plot(p, -p.log2(), color="#d55e00", label="information content, −log₂ p")
axes.plot(p, [entropy([float(x), 1 - float(x)]) for x in p], color="#0072b2", label="entropy of a coin (p, 1 − p)")
for x, y in ((0.9, 0.1520), (0.4, 1.3219), (0.01, 6.6439), (0.5, 1.0), (0.9, 0.4690)):
    axes.plot(x, y, "o", color="black", ms=4)
    axes.annotate(f"{y:.3f}", (x, y), xytext=(5, -9 if y < 0.2 else 4), textcoords="offset points", fontsize=7)
axes.set(xlabel="probability p", ylabel="bits", title="Information content and entropy")
axes.legend(fontsize=8)
figure.tight_layout()

# %% [markdown]
# ## Loss before training
#
# The predictions of an untrained model are nearly uniform, so its loss is close to $\ln V$. Its logits are small random
# numbers of variance $\sigma^2$, and the mean of $\ln \sum e^{l}$ over Gaussian logits is $\ln V + \sigma^2/2$. The
# head multiplies a normalized vector of norm $\sqrt d$ by rows with standard deviation 0.02: $\sigma^2 = 0.02^2\, d$,
# 0.10 at $d = 256$. So with $V = 4096$ the initial loss is $8.318 + 0.051$ nats per token, a perplexity near 4,096. A
# different initial loss indicates a bug in the head or in the loss.

# %%
checkpoint = ct.load("tiny-english", dtype=torch.float32)
tokens = torch.randint(4093, (4, 64), generator=torch.Generator().manual_seed(0))
initial_losses = []
with torch.no_grad():
    for seed in range(3):
        logits = ct.build(checkpoint.config, seed=seed)(tokens[:, :-1])  # (B, T, V)
        initial_losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item())
mean_loss = sum(initial_losses) / 3
print([round(loss, 3) for loss in initial_losses])
expected = math.log(4096) + 0.02**2 * 256 / 2
print(
    claim(
        "initial loss, mean of three seeds: ln V + σ²/2, nats per token",
        mean_loss,
        predicted=expected,
        rtol=0.003,
        id="C176",
    )
)
claim("initial perplexity is close to V", math.exp(mean_loss), predicted=4096, rtol=0.1, id="C176")

# %% [markdown]
# ## Minimal loss on a known source
#
# The expected loss of a model is at least the entropy rate of its source. A Markov chain with transition matrix $P$ and
# stationary distribution $\pi$ has the entropy rate
#
# $$h = \sum_i \pi_i H(P_i),$$
#
# and the loss of a model that predicts $Q_i$ after symbol $i$ is $h + \sum_i \pi_i\, KL(P_i \,\|\, Q_i)$. The same
# small model is trained for 60 steps on each of three chains over 12 symbols, with low to high entropy rates. The loss
# on unseen sequences is compared with $h$, and with $h$ plus the measured divergence.

# %%
NUM_SYMBOLS, STEPS = 12, 60


def make_chain(sharpness):
    """Return the transition matrix, the stationary distribution and the entropy rate in nats of a chain."""
    generator = torch.Generator().manual_seed(1)
    transitions = torch.softmax(sharpness * torch.randn(NUM_SYMBOLS, NUM_SYMBOLS, generator=generator), -1).double()
    stationary = torch.linalg.matrix_power(transitions, 500)[0]
    return transitions, stationary, (stationary * entropy(transitions, unit="nats")).sum().item()


def sample_chain(transitions, stationary, count, length, generator):
    """(count, length): sequences sampled from the chain."""
    sequences = torch.multinomial(stationary, count, replacement=True, generator=generator)[:, None]
    for _ in range(length - 1):
        next_tokens = torch.multinomial(transitions[sequences[:, -1]], 1, generator=generator)
        sequences = torch.cat([sequences, next_tokens], 1)
    return sequences


def train(transitions, stationary, seed=0):
    """Return a trained model and the loss at each step."""
    block = {"attention": {"heads": 2}, "ffn": {"kind": "mlp"}}
    config = {"form": "decoder", "vocab_size": NUM_SYMBOLS, "d_model": 32, "init": {"kind": "xavier"}}
    model = ct.build({**config, "decoder": {"layers": 1, "block": block}}, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    batches = sample_chain(transitions, stationary, 64 * STEPS, 17, generator).split(64)
    losses = []
    for batch in batches:
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


# %%
entropy_rates, curves, eval_losses, divergences = [], [], [], []
for sharpness in (4, 2, 0.75):
    transitions, stationary, rate = make_chain(sharpness)
    model, losses = train(transitions, stationary)
    unseen = sample_chain(transitions, stationary, 2048, 17, torch.Generator().manual_seed(99))
    with torch.no_grad():
        logits = model(unseen[:, :-1])
    eval_loss = F.cross_entropy(logits.flatten(0, 1), unseen[:, 1:].flatten()).item()
    divergence = kl_divergence(transitions[unseen[:, :-1]], q_logits=logits.double(), unit="nats").mean().item()
    entropy_rates.append(rate)
    curves.append(losses)
    eval_losses.append(eval_loss)
    divergences.append(divergence)
    print(
        claim(
            f"loss on unseen sequences, entropy rate {rate:.3f} nats", eval_loss, predicted=rate, rtol=0.12, id="C243"
        )
    )

# %%
differences = [
    abs(loss - rate - divergence)
    for loss, rate, divergence in zip(eval_losses, entropy_rates, divergences, strict=True)
]
print([f"{divergence:.4f}" for divergence in divergences])
print(
    claim("loss − (entropy rate + divergence): largest of three chains, nats", max(differences), below=0.04, id="C243")
)

figure, axes = plt.subplots(figsize=(6, 3.2))
for losses, rate, color in zip(curves, entropy_rates, ("#0072b2", "#009e73", "#d55e00"), strict=True):
    axes.plot(range(1, STEPS + 1), losses, color=color)
    axes.axhline(rate, color=color, lw=0.8, ls=":")
    axes.text(STEPS + 1.5, rate, f"h = {rate:.2f}", fontsize=7, va="center")
axes.axhline(math.log(NUM_SYMBOLS), color="black", lw=0.8)
axes.text(STEPS + 1.5, math.log(NUM_SYMBOLS), "ln 12", fontsize=7, va="center")
axes.set(
    xlabel="step",
    ylabel="loss, nats per token",
    xlim=(0, STEPS + 1),
    title="Training loss and entropy rate of three Markov chains",
)
figure.tight_layout()

# %% [markdown]
# ## Bits per byte
#
# Loss is per token, and tokenizers have tokens of different lengths. With longer tokens there are fewer predictions,
# each with a higher loss, so the loss per token *increases* while the loss of the whole text *decreases*. The
# comparable quantity is the loss of the whole text divided by its number of bytes:
#
# $$\text{bits per byte} = \frac{\text{loss per token} / \ln 2}{\text{bytes per token}}.$$
#
# A comparison without a model: predict every token by its frequency in the text, with bytes as tokens and with the
# 4,096 tokens of `tiny-english`. (The frequencies are those of the text itself, and the table of frequencies is not
# counted.) The text is a story that was written for this notebook, so it is not in the model's training data.

# %%
story = """It was Monday morning, and the house was quiet. Anna woke up before her brother and went to the kitchen. She
put two eggs in a pan and some bread on a plate. Then she looked out of the window. There was snow on the trees, on the
road and on the roof of the old car. "Peter, come and look!" she called. Her brother ran down the stairs with one sock
in his hand. He had waited for snow since his birthday.

After breakfast they put on warm coats and went outside. Peter wanted to build a snowman that was bigger than their
father. They rolled a big ball, a smaller one and a very small one. It was hard work, and their hands were cold. The
neighbor, Mrs. Brown, watched them from her garden. She was eighty years old and lived alone with a gray cat. "Your
snowman has no nose," she said. She went into her house and came back with a carrot, two black stones and a green hat.
The children thanked her and asked if she needed anything from the shop.

Mrs. Brown needed milk, apples and some fish for the cat. The shop was not far, but the road was slippery, so they
walked slowly. On the way they met their friend Maria and her dog. The dog jumped at Peter, and he fell into the snow.
Everybody laughed, and Peter laughed too. In the shop they bought everything on the list, and the man gave them three
pieces of chocolate because they were so polite. On the way back Anna carried the milk and Peter carried the apples.
Nobody remembered the fish.

The cat was waiting at the door. It looked at the bag, and it looked at the children, and then it turned around and
walked away. "Oh no, we forgot the fish," said Anna. Mrs. Brown smiled. "Do not worry. There is still some chicken from
yesterday." She made hot tea with honey and told them about the winter when she was a girl. The snow had been so high
that nobody could open the door. Her father had climbed out of the window and dug a path with a spoon, because the
shovel was in the barn.

In the evening the wind became stronger. Anna and Peter sat near the fire and read a book. Their mother came home late
because the bus had stopped on the hill. She was tired and wet, but she was happy to see them. "There is a very big man
in our garden," she said. "He wears a green hat, and he did not say good evening." The next morning the sun was warm,
and the snowman was a little smaller. A week later there was only the hat, and the gray cat was sleeping in it."""

text = "\n".join(paragraph.replace("\n", " ") for paragraph in story.split("\n\n"))

# %%
token_ids, text_bytes = checkpoint.tokenizer.encode(text), list(text.encode())
token_entropy, byte_entropy = (entropy(samples=samples, unit="nats") for samples in (token_ids, text_bytes))
bytes_per_token = len(text_bytes) / len(token_ids)
print(f"{len(text_bytes):,} bytes, {len(token_ids):,} tokens, {bytes_per_token:.2f} bytes per token")
print(claim("frequencies: nats per token / nats per byte", token_entropy / byte_entropy, above=1, id="C253"))
ratio = bits_per_byte(token_entropy, bytes_per_token) / bits_per_byte(byte_entropy, 1)
claim("frequencies: bits per byte with tokens / with bytes", ratio, below=1, id="C253")

# %% [markdown]
# The trained model also uses the context. Its bits per byte on held-out stories of its training distribution, which
# were sampled from another model, are 0.381. On the story they should be higher, but far below those of byte
# frequencies. A model with cross-entropy $H$ can be used to compress to $H$ bits (arithmetic coding), so a compressor
# is a comparable baseline. The cell uses `zlib`, which has no prior knowledge of English.
#
# Bits per byte also compare models with different tokenizers: `tiny-python`, with 2,048 tokens, was trained on Python
# code. On the story it should need more than twice the bits per byte of `tiny-english`, although it splits the text
# into more tokens.

# %%
result = ct.evaluate(checkpoint, [text], stride=256)
code_checkpoint = ct.load("tiny-python", dtype=torch.float32)
code_result = ct.evaluate(code_checkpoint, [text], stride=256)
zlib_bits = 8 * len(zlib.compress(text.encode(), 9)) / len(text_bytes)
methods = {
    "uniform": 8.0,
    "byte frequencies": byte_entropy / math.log(2),
    "token frequencies": bits_per_byte(token_entropy, bytes_per_token),
    "zlib": zlib_bits,
    "tiny-python (code)": code_result.bits_per_byte,
    "tiny-english": result.bits_per_byte,
}
model_bits, byte_bits = result.bits_per_byte, methods["byte frequencies"]
for name, each in (("tiny-english", result), ("tiny-python", code_result)):
    per_token = f"loss {each.loss:.3f} nats per token, perplexity {each.perplexity:.1f}"
    print(f"{name}: {per_token}, {each.bits_per_byte:.3f} bits per byte")
print(claim("tiny-english on the story, bits per byte", model_bits, above=0.381, below=byte_bits / 2))
ratio = model_bits / methods["token frequencies"]
print(claim("tiny-english / token frequencies, bits per byte", ratio, below=0.9))
print(claim("tiny-python / tiny-english, bits per byte", code_result.bits_per_byte / model_bits, above=2, id="C253"))

figure, axes = plt.subplots(figsize=(6, 2.6))
bars = axes.barh(list(methods), list(methods.values()), color=["#999999"] * 4 + ["#e69f00", "#0072b2"])
axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
axes.invert_yaxis()
axes.set(xlabel="bits per byte", xlim=(0, 9), title="Bits per byte of an English story")
figure.tight_layout()

# %% [markdown]
# ## Mutual information by distance
#
# The mutual information of two bytes at distance $k$ is $I(X;Y) = KL(P(x,y)\,\|\,P(x)P(y))$. Two predictions:
#
# - *bias of the estimate*. Estimated from $n$ pairs, mutual information is positive even for independent bytes: about
#   $(K-1)^2/2n$ nats if all pairs of $K$ values are frequent, and at least $(K_{xy} - K_x - K_y + 1)/2n$ if only the
#   $K_{xy}$ observed pairs count (Miller and Madow). The estimate for shuffled text must be between these two
#   values; it is subtracted from all estimates;
# - *comparison with a Markov chain*. In a chain with the same byte pairs, $P(x, y) = \pi_x (P^k)_{xy}$, and mutual
#   information decays exponentially. In natural language it decays as a power law ([Lin and Tegmark
#   2016](https://arxiv.org/abs/1606.06737)), so at large distances it should be far above that of the chain.
#
# The estimate needs far more text than the story. The cell uses source code of Python's standard library, which is on
# every machine.

# %%
source_bytes = bytearray("".join(map(inspect.getsource, (argparse, ast, typing))).encode())
byte_values, codes = torch.unique(torch.frombuffer(source_bytes, dtype=torch.uint8)[:150_000], return_inverse=True)
n, K = len(codes), len(byte_values)


def count_pairs(k, codes):
    """(K, K): number of occurrences of x at k positions before y."""
    return torch.bincount(codes[:-k] * K + codes[k:], minlength=K * K).double().view(K, K)


def estimate_mutual_information(counts):
    return mutual_information(counts / counts.sum())  # bits


shuffled = count_pairs(1, codes[torch.randperm(n, generator=torch.Generator().manual_seed(0))])
bias, num_observed = estimate_mutual_information(shuffled), int((shuffled > 0).sum())
lower, upper = (count / (2 * n) / math.log(2) for count in (num_observed - 2 * K + 1, (K - 1) ** 2))
print(f"{n:,} bytes, {K} distinct values, {num_observed:,} distinct pairs")
claim("shuffled text: estimated mutual information, bits", bias, above=lower, below=upper)

# %%
pair_counts = count_pairs(1, codes)
stationary = pair_counts.sum(1) / pair_counts.sum()
transitions = pair_counts / pair_counts.sum(1, keepdim=True).clamp(min=1)
distances = [1, 2, 4, 8, 16, 32, 64, 128]
text_information = [estimate_mutual_information(count_pairs(k, codes)) - bias for k in distances]
chain_information = [
    estimate_mutual_information(stationary[:, None] * torch.linalg.matrix_power(transitions, k)) for k in distances
]
print([f"{bits:.3f}" for bits in text_information])
print([f"{bits:.3f}" for bits in chain_information])
print(claim("mutual information at distance 16: text / chain", text_information[4] / chain_information[4], above=3))
print(
    claim("mutual information of text: distance 64 / distance 1", text_information[6] / text_information[0], above=1e-3)
)

figure, axes = plt.subplots(figsize=(6, 3.2))
axes.plot(distances, text_information, "o-", color="#0072b2", label="Python source code")
chain_values = [max(bits, 1e-9) for bits in chain_information]
axes.plot(distances, chain_values, "s--", color="#d55e00", label="Markov chain with the same pairs")
axes.axhline(bias, color="black", lw=0.7, ls=":", label="subtracted bias")
axes.set(
    xscale="log",
    yscale="log",
    ylim=(3e-4, 4),
    xticks=distances,
    xticklabels=distances,
    xlabel="distance, bytes",
    ylabel="mutual information, bits",
    title="Mutual information of two bytes by distance",
)
axes.minorticks_off()
axes.legend(fontsize=8)
figure.tight_layout()

# %% [markdown]
# The chain is the best model that uses the previous byte only; the difference between the curves is information that
# needs a longer context.
#
# ## Calibration
#
# Minimizing cross-entropy also optimizes the probabilities: if all logits are divided by a temperature $\tau$, the loss
# on the training distribution is minimal at $\tau = 1$, otherwise a gradient step along $\tau$ would have reduced it.
# So on the training distribution the best $\tau$ should be close to 1, and confidence (the probability of the predicted
# token) should equal accuracy. With $\tau = 0.5$ the model should be overconfident, with $\tau = 2$ underconfident. On
# other text this does not follow; models are often overconfident there ([Guo et al.
# 2017](https://arxiv.org/abs/1706.04599)), so the best $\tau$ is above 1.
#
# The training text of `tiny-english` is not included in cutaway. That of `tiny-python` is Python's standard library, so
# this model is used for the training distribution, and source code of cutaway is its other text. The other text of
# `tiny-english` is the story.


# %%
def predict_windows(checkpoint, text, length=256, max_windows=8):
    """Logits (N, V) and target tokens (N,), in windows of `length` tokens."""
    ids, size = checkpoint.tokenizer.encode(text), length + 1
    rows = torch.tensor(ids[: min(max_windows, len(ids) // size) * size]).view(-1, size)
    with torch.no_grad():
        return checkpoint.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()


def find_best_temperature(logits, targets):
    temperatures = torch.linspace(0.5, 2, 16)
    losses = torch.tensor([F.cross_entropy(logits / temperature, targets) for temperature in temperatures])
    return temperatures[losses.argmin()].item()


stdlib = predict_windows(code_checkpoint, inspect.getsource(argparse))
other_code = predict_windows(code_checkpoint, "".join(map(inspect.getsource, (information, calibration))))
story_predictions = predict_windows(checkpoint, text, length=145)  # 4 windows
best = find_best_temperature(*stdlib)
print(claim("tiny-python on the standard library: best temperature", best, predicted=1, rtol=0.15))
print(claim("tiny-python on source code of cutaway: best temperature", find_best_temperature(*other_code), above=1.15))
claim("tiny-english on the story: best temperature", find_best_temperature(*story_predictions), above=1.05)

# %%
logits, targets = stdlib
calibrations = {
    temperature: ct.evaluate.evaluate_calibration(logits=logits / temperature, targets=targets)
    for temperature in (0.5, 1.0, 2.0)
}
for temperature, result in calibrations.items():
    print(
        f"τ = {temperature}: confidence {result.confidence:.3f}, accuracy {result.accuracy:.3f}, ECE {result.ece:.3f}"
    )
overconfidence = calibrations[0.5].confidence - calibrations[0.5].accuracy
underconfidence = calibrations[2.0].accuracy - calibrations[2.0].confidence
print(claim("τ = 0.5: confidence − accuracy", overconfidence, above=0.05))
print(claim("τ = 2: accuracy − confidence", underconfidence, above=0.05))
print(claim("τ = 1: expected calibration error", calibrations[1.0].ece, below=0.06, id="C255"))
on_story = ct.evaluate.evaluate_calibration(logits=story_predictions[0], targets=story_predictions[1])
print(f"tiny-english on the story: confidence {on_story.confidence:.3f}, accuracy {on_story.accuracy:.3f}")
claim("tiny-english on the story: confidence − accuracy", on_story.confidence - on_story.accuracy, above=0.05)

# %%
figure, axes = plt.subplots(figsize=(6, 3.6))
curves = {f"argparse, τ = {temperature:g}": result for temperature, result in calibrations.items()}
curves["story, tiny-english"] = on_story
for (label, result), color in zip(curves.items(), ("#d55e00", "#0072b2", "#009e73", "#e69f00"), strict=True):
    bins = [row for row in result.bins if row["count"] >= 20]
    confidence, accuracy = [row["confidence"] for row in bins], [row["accuracy"] for row in bins]
    axes.plot(confidence, accuracy, "o-", ms=4, color=color, label=label)
axes.plot([0, 1], [0, 1], color="black", lw=0.7, ls=":")
axes.set(xlabel="confidence", ylabel="accuracy", title="Calibration on training text and on other text")
axes.title.set_fontsize(10)
axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
figure.tight_layout()

# %% [markdown]
# ## Try
#
# - Use `make_chain(8)` and `make_chain(0)`: what are the final losses? (With 8 almost 0; with 0 the loss is $\ln 12$
#   from the start.)
# - Use a chain whose next symbol depends on the last *two* symbols: a model without attention can use only one of them.
#   What are the minimal losses with and without attention?
# - Run `ct.evaluate(checkpoint, [text], context=32)`: by how many bits per byte does a short context increase the loss?
#   Compare with the curve of mutual information.
#
# Exercises: 1 (`cutaway learn start 1`, attention with softmax), 10 (one of its bugs is a loss without the shift of
# labels). On the command line: `cutaway eval tiny-english --text FILE`. Previous:
# [6. Decoder, encoder, encoder-decoder](06_forms.py). Next: [8. Parameters, FLOPs, memory and time](08_costs.py).
