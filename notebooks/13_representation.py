# %% [markdown]
# # 13. Representation: superposition, probes, attention weights and facts
#
# What does a vector of the residual stream contain, and what does a component contribute? This notebook trains toy
# models whose answer is known and applies the same measurements to `tiny-python`.
#
# Contents:
#
# - *superposition*: how many features fit into $d$ dimensions, and what they cost each other;
# - *linear probes*: how many bits on a property of the text a linear readout extracts, by depth;
# - *one softmax*: what one head cannot do and two can;
# - *attention weight and importance*, measured by removing edges;
# - *where facts are stored*: FFN and attention, ablated and patched;
# - *necessary and sufficient components*: what ablation shows that the logit lens does not.
#
# These are small versions of the study `representation`: `cutaway learn study representation` prints its results over
# seeds with intervals.
#
# Prerequisites: attention ([notebook 2](02_attention.py)), information ([notebook 7](07_information.py)), patching and
# ablation ([notebook 10](10_inside.py)).

# %%
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import cutaway as ct
from cutaway.learn import claim
from cutaway.learn.studies.rank_correlation import spearman
from cutaway.learn.studies.representation import answers, attention_weights, facts, python_texts, two_targets
from cutaway.lens import analysis

BLUE, ORANGE, GREEN, RED, GRAY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
checkpoint = ct.load("tiny-python", dtype=torch.float32)
model, tokenizer = checkpoint.model, checkpoint.tokenizer

# %% [markdown]
# ## Superposition
#
# In $d$ dimensions there are only $d$ orthogonal directions, but many more that are almost orthogonal. A model can
# therefore give each of $n > d$ features a direction of its own; reading one feature then also reads a part of every
# other feature that is active at the same time (*interference*). If features are sparse, few are active together, and a
# ReLU with a negative bias removes small interference.
#
# The toy model of [Elhage et al. 2022](https://arxiv.org/abs/2209.10652) compresses $n = 20$ features to $d = 5$
# dimensions and reads them back:
#
# $$h = W x, \qquad \hat x = \mathrm{ReLU}(W^\top h + b), \qquad L = \sum_i 0.9^i\, (x_i - \hat x_i)^2 .$$
#
# A feature is 0 with probability $S$ (the *sparsity*), else uniform in $[0, 1]$. A feature is *represented* if the
# squared norm of its direction $W_i$ exceeds ½. Predictions: without sparsity, the 5 most important features are
# represented, each with a dimension of its own; with sparsity, more than 5, and the loss falls below that of one
# dimension per feature.

# %%
SPARSITIES, NUM_FEATURES, NUM_DIMS, NUM_SEEDS = (0.0, 0.5, 0.7, 0.9, 0.97, 0.99), 20, 5, 2
importance = 0.9 ** torch.arange(NUM_FEATURES)
sparsity = torch.tensor(SPARSITIES)[:, None, None, None]
generator = torch.Generator().manual_seed(0)


def sample_features(sparsity, count=128):
    """(sparsities, seeds, count, features)"""
    shape = (len(SPARSITIES), NUM_SEEDS, count, NUM_FEATURES)
    return torch.rand(shape, generator=generator) * (torch.rand(shape, generator=generator) >= sparsity)


W = torch.randn(len(SPARSITIES), NUM_SEEDS, NUM_FEATURES, NUM_DIMS, generator=generator) / math.sqrt(NUM_FEATURES)
b = torch.zeros(len(SPARSITIES), NUM_SEEDS, 1, NUM_FEATURES)
optimizer = torch.optim.Adam([W.requires_grad_(), b.requires_grad_()], lr=0.01)
for step in range(1000):
    optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 1000)
    x = sample_features(sparsity)
    loss = ((torch.relu(x @ W @ W.mT + b) - x).square() * importance).mean((2, 3)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
W, b = W.detach(), b.detach()

# %%
represented = (W.square().sum(-1) > 0.5).sum(-1).float().mean(1)  # (sparsities,), mean over seeds
unit = F.normalize(W, dim=-1)
overlap = (unit @ W.mT).square()  # (…, i, j): squared part of feature j in the direction of feature i
interference = ((overlap.sum(-1) - overlap.diagonal(dim1=-2, dim2=-1)) * (W.norm(dim=-1) > 0.7)).sum(-1) / (
    W.norm(dim=-1) > 0.7
).sum(-1)
x = sample_features(sparsity, 2000)
test_loss = ((torch.relu(x @ W @ W.mT + b) - x).square() * importance).sum(-1).mean(-1).mean(1)
active = 1 - torch.tensor(SPARSITIES)
one_dimension_each = importance[NUM_DIMS:].sum() * (active / 3 - active.square() / 4)  # other features: their mean
relative_loss = test_loss / one_dimension_each
print("features represented:", [round(value, 1) for value in represented.tolist()])
print("interference:        ", [round(value, 2) for value in interference.mean(1).tolist()])
print("relative loss:       ", [round(value, 2) for value in relative_loss.tolist()])
print(claim("no sparsity: features represented in 5 dimensions", represented[0], predicted=5, rtol=0))
print(claim("sparsity 0.99: features represented in 5 dimensions", represented[-1], above=12, id="C272"))
print(claim("sparsity 0.99: loss / loss of one dimension per feature", relative_loss[-1], below=0.6, id="C274"))
claim("interference at sparsity 0.99 (0 would be orthogonal)", interference[-1].mean(), above=1)

# %% [markdown]
# The last claim contradicts "with little interference": the directions of so many features in 5 dimensions overlap a
# lot. What keeps the loss small is that two overlapping features are rarely active together. The same model fails when
# features are dense: it recovers fewer of them (share of variance explained above ½).

# %%
recovered = {}
for test_sparsity in (0.99, 0.9, 0.7):
    x = sample_features(torch.tensor(test_sparsity), 4000)[-1]
    error = (torch.relu(x @ W[-1] @ W[-1].mT + b[-1]) - x).square().mean(1)
    recovered[test_sparsity] = float((1 - error / x.var(1, correction=0) > 0.5).sum(-1).float().mean())
print(recovered)
claim(
    "trained at 0.99, tested at 0.7: recovered / recovered at 0.99",
    recovered[0.7] / recovered[0.99],
    below=0.3,
    id="C274",
)

# %%
figure, panels = plt.subplots(1, 3, figsize=(8, 2.9), gridspec_kw={"width_ratios": [1.5, 1, 1]}, layout="constrained")
ticks = range(len(SPARSITIES))
panels[0].plot(ticks, represented, "o-", color=BLUE, label="features represented")
panels[0].axhline(NUM_DIMS, color=GRAY, lw=0.8, ls=":")
panels[0].text(3.8, NUM_DIMS + 0.4, "dimensions", color=GRAY, fontsize=8)
panels[0].plot(ticks, interference.mean(1), "s--", color=RED, label="interference")
panels[0].set_xticks(ticks, [f"{value:g}" for value in SPARSITIES])
panels[0].set(xlabel="sparsity", ylim=(0, 20), title="20 features in 5 dimensions")
panels[0].legend(fontsize=8, frameon=False, loc="upper left")
for axes, row in ((panels[1], 0), (panels[2], -1)):
    image = axes.imshow(W[row, 0] @ W[row, 0].T, cmap="RdBu", vmin=-1.2, vmax=1.2)
    axes.set(title=f"$W W^T$, sparsity {SPARSITIES[row]:g}", xticks=[], yticks=[])
figure.colorbar(image, ax=list(panels[1:]), shrink=0.7)

# %% [markdown]
# In `tiny-python` the 2,048 tokens share 256 dimensions. The embedding is also the output matrix, so interference is
# measured directly: does the embedding of a token have its largest logit at the token itself?

# %%
with torch.no_grad():
    E = model.head.matrix.weight
    decoded = float(((E @ E.T).argmax(-1) == torch.arange(len(E))).float().mean())
print(claim("tokens per dimension", len(E) / E.shape[1], predicted=8, id="C272"))
claim("share of tokens whose embedding has the largest logit at the token", decoded, above=0.9)

# %% [markdown]
# ## Linear probes: information by depth
#
# A probe is a linear classifier that predicts a property of the text from an activation. Its cross-entropy $CE$ on
# other text bounds the mutual information of activation and property from below ([notebook 7](07_information.py)):
#
# $$I(\text{property};\, h) \;\ge\; H(\text{property}) - CE .$$
#
# The property here is whether a token is inside a string literal. The token alone says little (a word can be code or
# text), so the information at the embedding should be small, and grow where attention brings in the context. A control
# with shuffled labels must give about 0 bits, otherwise the probe has learned its training tokens by heart.


# %%
def load_windows(names):
    texts = [python_texts.load_module_text(name, 3) for name in names]
    return torch.cat([text.ids for text in texts]), torch.cat([text.in_string for text in texts])[:, 32:].flatten()


def record_stream(network, ids):
    """(7, tokens, 256): residual stream after the embedding and each block, without the first 32 tokens of a window."""
    with torch.no_grad(), ct.trace(network, "embed", "resid_post") as t:
        network(ids)
    return torch.stack([t[name].as_subclass(torch.Tensor)[:, 32:].flatten(0, 1) for name in t])


def probe_information(train, train_labels, test, test_labels):
    """(7,): bits that a logistic regression extracts at each depth."""
    mean, std = train.mean(1, keepdim=True), train.std(1, keepdim=True)
    train, test = (train - mean) / std, (test - mean) / std
    weight, bias = torch.zeros(7, 256, 1, requires_grad=True), torch.zeros(7, 1, 1, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr=0.02, weight_decay=0.01)
    for step in range(100):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 100)
        rows = torch.randint(train.shape[1], (384,), generator=generator)
        logits = (train[:, rows] @ weight + bias)[..., 0]
        loss = F.binary_cross_entropy_with_logits(logits, train_labels[rows].float().expand_as(logits))
        optimizer.zero_grad()
        (7 * loss).backward()
        optimizer.step()
    with torch.no_grad():
        logits = (test @ weight + bias)[..., 0]
        losses = F.binary_cross_entropy_with_logits(logits, test_labels.float().expand_as(logits), reduction="none")
        share = train_labels.float().mean()
        baseline = F.binary_cross_entropy(share.expand(len(test_labels)), test_labels.float())
    return (baseline - losses.mean(1)) / math.log(2)


train_ids, train_labels = load_windows(("argparse", "ast", "csv", "logging", "pdb", "shutil", "tarfile"))
test_ids, test_labels = load_windows(("calendar", "mailbox", "random", "tempfile"))
untrained = ct.build(checkpoint.config, seed=0, dtype=torch.float32)
train, test = record_stream(model, train_ids), record_stream(model, test_ids)
information = {
    "tiny-python": probe_information(train, train_labels, test, test_labels),
    "untrained": probe_information(
        record_stream(untrained, train_ids), train_labels, record_stream(untrained, test_ids), test_labels
    ),
}
shuffled = train_labels[torch.randperm(len(train_labels), generator=generator)]
shuffled_test = test_labels[torch.randperm(len(test_labels), generator=generator)]
information["shuffled labels"] = probe_information(train, shuffled, test, shuffled_test)
bits = information["tiny-python"]
print({name: [round(value, 2) for value in values.tolist()] for name, values in information.items()})
print(claim("inside a string: bits after block 4 / bits at the embedding", bits[5] / bits[0], above=2, id="C251"))
print(claim("shuffled labels: largest information, bits", information["shuffled labels"].max(), below=0.02))
claim(
    "untrained model: largest information / that of tiny-python", information["untrained"].max() / bits.max(), below=0.5
)

# %%
figure, axes = plt.subplots(figsize=(6, 3))
for (name, values), color, marker in zip(information.items(), (BLUE, ORANGE, GRAY), "os^", strict=True):
    axes.plot(values, marker=marker, color=color, label=name)
share = float(test_labels.float().mean())
entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share))
axes.axhline(entropy, color="black", lw=0.7, ls=":")
axes.text(0, entropy - 0.07, "entropy of the property", fontsize=8)
axes.axhline(0, color=GRAY, lw=0.5)
axes.set_xticks(range(7), ["embed", *range(6)])
axes.set(xlabel="after block", ylabel="bits", title="Information of a linear probe: inside a string?")
axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, 0.88))
figure.tight_layout()

# %% [markdown]
# A value below 0 means that the probe fits its training tokens better than other text: the bound is not tight there.
#
# A deterministic function cannot increase information, but this does not contradict the curve: the residual stream at
# one position receives information on *other* positions through attention, and later blocks make it linearly readable.
#
# ## One softmax, two targets
#
# One head has one row of weights per query and one value projection. Its output is one weighted sum, $z = \sum_s a_s
# W_V x_s$. The task: report the tokens at *two* positions, the first one in one group of logits, the second one in
# another. Suppose that the weights depend on positions only: $(w, 1-w)$ with $w \ge ½$.
#
# - With $w = 1$ the second token is lost.
# - With $w = ½$ the sum $W_V x_1 + W_V x_2$ says which two tokens there are, but not which is where: at best a
#   probability of ½ each, a loss of $\ln 2$ per target.
# - With a $w$ in between, a linear readout is still not enough. The loss is convex in the readout and symmetric in
#   the $V$ tokens, so some best readout treats all tokens alike, and its logit grows with the weight of a token. The
#   first target can then be solved, but the second token never gets more than half of the probability.
#
# So one head has a mean loss per target of at least $(1 - \frac1V)\frac{\ln 2}{2}$, which is 0.325 for $V = 16$. Two
# heads of half the width attend to one target each, and their loss goes to 0. The argument also says what can help one
# head: an FFN, whose readout is not linear, or weights that depend on the tokens.

# %%


def train(network, data, loss_fn, steps, batch_size, length):
    """Train with Adam, and return the network and its mean loss in the last 50 steps."""
    batches = data.sample(steps * batch_size, length, torch.Generator().manual_seed(0)).split(batch_size)
    optimizer, losses = torch.optim.Adam(network.parameters(), lr=5e-3, betas=(0.9, 0.98)), []
    for batch in batches:
        loss = loss_fn(network(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return network.eval(), sum(losses[-50:]) / 50


data = two_targets.UniformTokens()
test_tokens = data.sample(1000, two_targets.SEQ_LEN, generator)
targets = test_tokens[:, list(two_targets.TARGETS)]
results = {}
for name, config in two_targets.VARIANTS.items():
    layer, final_loss = train(two_targets.AttentionLayer(config, 0), data, two_targets.two_target_loss, 550, 64, 8)
    with torch.no_grad():
        accuracy = (layer(test_tokens).argmax(-1) == targets).float().mean(0)
        weights = layer.pattern(test_tokens)[:, :, list(two_targets.TARGETS)].mean(0)
    results[name] = {"loss": final_loss, "accuracy": accuracy, "weights": weights}
    print(f"{name}: loss {results[name]['loss']:.3f}, accuracy {accuracy.tolist()}, weights {weights.tolist()}")
bound = (1 - 1 / two_targets.VOCAB) * math.log(2) / 2
print(claim("one head, weights by position: loss", results["1-head"]["loss"], above=bound, id="C059"))
print(claim("two heads: loss", results["2-heads"]["loss"], below=0.01, id="C059"))
print(
    claim("one head, weights by position: accuracy of the worse target", results["1-head"]["accuracy"].min(), below=0.6)
)
print(claim("one head, weights by token: mean accuracy", results["1-head-token-weights"]["accuracy"].mean(), above=0.8))
claim("one head and an FFN: mean accuracy", results["1-head-ffn"]["accuracy"].mean(), above=0.9)

# %%
figure, panels = plt.subplots(1, 2, figsize=(7.2, 3))
labels = {
    "1-head": "one head",
    "2-heads": "two heads",
    "1-head-token-weights": "one head,\nweights by token",
    "1-head-ffn": "one head\nand FFN",
}
for offset in range(2):
    values = [float(results[name]["accuracy"].sort(descending=True).values[offset]) for name in labels]
    bars = panels[0].bar([i + 0.36 * offset for i in range(4)], values, 0.34, color=(BLUE, ORANGE)[offset])
    bars.set_label("better target" if offset == 0 else "other target")
panels[0].set_xticks([i + 0.18 for i in range(4)], labels.values(), fontsize=7)
panels[0].set(ylabel="accuracy", ylim=(0, 1.35), title="Accuracy of the two targets")
panels[0].legend(fontsize=8, frameon=False, ncol=2, loc="upper center")
rows = [(f"{labels[name]}", weight) for name in ("1-head", "1-head-ffn") for weight in results[name]["weights"]]
rows += [(f"two heads,\nhead {head}", weight) for head, weight in enumerate(results["2-heads"]["weights"])]
for offset, target in enumerate(("first target", "second target")):
    panels[1].bar(
        [i + 0.36 * offset for i in range(len(rows))],
        [float(weight[offset]) for _, weight in rows],
        0.34,
        color=(GREEN, RED)[offset],
        label=target,
    )
panels[1].set_xticks([i + 0.18 for i in range(len(rows))], [name for name, _ in rows], fontsize=7)
panels[1].set(ylabel="attention weight", ylim=(0, 1.35), title="Weights at the two targets")
panels[1].legend(fontsize=8, frameon=False, ncol=2, loc="upper center")
figure.tight_layout()

# %% [markdown]
# One head without an FFN is a compromise between the two targets. With an FFN it finds unequal weights (right panel)
# from which the FFN reads both tokens, and weights that depend on the tokens also help. So "one softmax cannot serve
# two targets" holds for weights that depend on positions only and a linear readout, and not in general.
#
# ## Attention is linear in the values
#
# With the weights held fixed, $z = A V$ is linear in $V$. So doubling the values doubles the output of attention, and
# the output is a sum of one term $a_s W_O v_s$ per edge. It is not linear in the *input*: scaling queries and keys by 2
# multiplies the scores by 4 and changes the weights.

# %%
prompt = python_texts.PROMPTS[1]
ids = torch.tensor([tokenizer.encode(prompt)])
with torch.no_grad(), ct.trace(model, "blocks.2.attn.out") as baseline_trace:
    baseline_logits = model(ids)
outputs = {}
for name, edits in {
    "values": {"blocks.2.attn.v": {"do": "scale", "value": 2.0}},
    "input": {f"blocks.2.attn.{part}": {"do": "scale", "value": 2.0} for part in ("q", "k", "v")},
}.items():
    with torch.no_grad(), ct.edit(model, edits), ct.trace(model, "blocks.2.attn.out") as t:
        model(ids)
    outputs[name] = (t["blocks.2.attn.out"] - 2 * baseline_trace["blocks.2.attn.out"]).norm()
relative = {name: float(value / (2 * baseline_trace["blocks.2.attn.out"]).norm()) for name, value in outputs.items()}
print(claim("values × 2: relative difference to 2 × output", relative["values"], below=1e-6, id="C067"))
claim("queries, keys and values × 2: relative difference to 2 × output", relative["input"], above=0.05, id="C067")

# %% [markdown]
# ## Attention weight is not importance
#
# The contribution of an edge is weight × value, and what matters is which part of it later layers read. A weight says
# only that query and key align. A counter-example with two keys: the head attends to the first key with weight 0.99,
# but its value is 0 in the direction that is read; the second key has weight 0.01 and a large value.

# %%
a = torch.tensor([0.99, 0.01])
values = torch.tensor([[5.0, 0.0], [0.0, 300.0]])  # one row per key
readout = torch.tensor([0.0, 1.0])
answer = a @ values @ readout
effects = [float(answer - (a * (torch.arange(2) != key)) @ values @ readout) for key in range(2)]
print(f"answer {answer:.2f}; effect of removing key 0: {effects[0]:.2f}, key 1: {effects[1]:.2f}")
claim(
    "effect of the edge with weight 0.99 / effect of the edge with weight 0.01",
    effects[0] / effects[1],
    predicted=0,
    id="C271",
)

# %% [markdown]
# In `tiny-python` the edges from the last token are removed one at a time: the term $a_s v_s$ of one head and one key
# is subtracted from the output of that head. The effect is the KL divergence of the next-token distribution. An edge
# with weight 0 has no effect, so over all edges the rank correlation must be positive. The question is whether edges
# with a large weight have an effect.

# %%
weight, effect = [], []
for prompt in (python_texts.PROMPTS[1], python_texts.PROMPTS[3]):
    edges = attention_weights.measure_edges(model, torch.tensor([tokenizer.encode(prompt)]))
    weight.append(edges.weight.flatten())
    effect.append(edges.effect.flatten())
weight, effect = torch.cat(weight), torch.cat(effect)
large = weight > 0.5
small_share = float((effect[large] < 0.01).float().mean())
print(f"{len(weight)} edges, {int(large.sum())} with a weight above 0.5")
print(claim("rank correlation of weight and effect", spearman(weight, effect), above=0.5))
print(claim("weight above 0.5: share of edges with an effect below 0.01 nats", small_share, above=0.1, id="C271"))
spread = float(effect[large].max() / effect[large].min())
claim("weight above 0.5: largest / smallest effect", spread, above=50, id="C271")

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.scatter(weight[~large], effect[~large].clamp(min=1e-7), s=5, color=GRAY, label="weight below 0.5")
axes.scatter(weight[large], effect[large], s=14, color=RED, label="weight above 0.5")
axes.axhline(0.01, color="black", lw=0.7, ls=":")
axes.set(
    yscale="log",
    ylim=(1e-7, 2),
    xlabel="attention weight of the edge",
    ylabel="KL divergence without it, nats",
    title="Edges of the last token, all heads of tiny-python",
)
axes.legend(fontsize=8, frameon=False, loc="lower right")
figure.tight_layout()

# %% [markdown]
# ## Where facts are stored
#
# 384 random facts, such as "subject 17, relation 3 → object 29", cannot be derived from each other: a model must store
# them. The text is `subject relation`, and the object is predicted at the relation. Three predictions:
#
# - *Ablation of attention* removes all facts, because only attention moves the subject to the position of the relation.
#   This says nothing about storage.
# - *Ablation of the FFNs* removes most facts, if they are stored there.
# - *Key-value memory* ([Geva et al. 2021](https://arxiv.org/abs/2012.14913)): the neurons that add most to the logit of
#   a fact's object are specific to this fact. So zeroing the 8 neurons (of 256) of one fact should remove that fact,
#   and keep other facts.

# %%
table = facts.FactTable()
fact_network, _ = train(ct.build(facts.fact_config(2), seed=0), table, facts.object_loss, 350, 128, 3)
fact_model = facts.FactModel(fact_network, table.all_facts(0))
ablated = facts.ablate_sublayers(fact_model)
neurons = facts.ablate_neurons(fact_model, 0)
restored = facts.patch_sublayers(fact_model, 0)
chance = 1 / facts.NUM_OBJECTS
print({name: round(value, 2) for name, value in (ablated | neurons | restored).items()})
print(claim("accuracy on all facts", fact_model.accuracy(), above=0.95))
print(claim("attention ablated: accuracy", ablated["ablated/attn"], below=3 * chance, id="C096"))
print(claim("FFNs ablated: accuracy", ablated["ablated/ffn"], below=0.5, id="C096"))
print(claim("8 neurons of the fact zeroed: accuracy", neurons["neurons/own"], below=0.3, id="C094"))
claim("8 neurons of another fact zeroed: accuracy", neurons["neurons/other"], above=0.85, id="C094")

# %% [markdown]
# Patching says the same. In a run with another subject, the FFN outputs of the clean run, at the relation, restore most
# answers; outputs at the subject do not. All attention outputs at the relation restore every answer, because
# they contain all that this position knows of the subject.
#
# Are FFNs then *the* place of facts? The same number of parameters without FFNs, in a deeper model of attention only,
# can be trained on the same facts.

# %%
attention_only = ct.build(facts.fact_config(facts.LAYERS_WITHOUT_FFN, 1), seed=0)
with ct.edit(attention_only, facts.NO_FFN):
    train(attention_only, table, facts.object_loss, 350, 128, 3)
without_ffn = facts.FactModel(attention_only, table.all_facts(0))
accuracy_without_ffn = without_ffn.accuracy(facts.NO_FFN)
claim("attention only, equal number of parameters: accuracy on all facts", accuracy_without_ffn, above=0.9, id="C096")

# %%
bars = {
    "all sublayers": fact_model.accuracy(),
    "without attention": ablated["ablated/attn"],
    "without FFNs": ablated["ablated/ffn"],
    "without 8 neurons of the fact": neurons["neurons/own"],
    "without 8 neurons of another fact": neurons["neurons/other"],
    "trained without FFNs": accuracy_without_ffn,
}
figure, axes = plt.subplots(figsize=(6, 2.8))
drawn = axes.barh(list(bars), list(bars.values()), color=[BLUE, *[ORANGE] * 2, *[GREEN] * 2, BLUE])
axes.bar_label(drawn, fmt="%.2f", fontsize=8, padding=2)
axes.axvline(chance, color="black", lw=0.7, ls=":")
axes.invert_yaxis()
axes.set(xlabel="accuracy on 384 facts", xlim=(0, 1.15), title="Where a small model stores facts")
figure.tight_layout()

# %% [markdown]
# Facts are stored where training puts them: in the FFNs if there are any, with specific neurons, and in attention and
# embeddings if there are none.
#
# ## Necessary and sufficient components
#
# The logit lens ([notebook 10](10_inside.py)) shows from which sublayer on the answer is the top-1 token. This is an
# observation at one place, and not evidence that this sublayer causes the answer. `component_effects` intervenes:
#
# - a component is *necessary* if the answer changes when it is ablated;
# - it is *sufficient* if its output alone, patched into the run of another text, restores the answer;
# - two components are *jointly necessary* if neither is necessary, but the answer changes when both are ablated
#   (redundancy, or a backup that takes over).

# %%
template = "try:\n    value = int(text)\nexcept ValueError as {}:\n    raise TypeError("
clean, corrupted = template.format("error"), template.format("err")
effects = analysis.component_effects(checkpoint, clean, corrupted=corrupted, ablation="resample", pairs=True)
print(effects)
shown = answers.logit_lens_sublayer(checkpoint, torch.tensor([tokenizer.encode(clean)]))
print("the logit lens shows the answer from", shown, "on")
print(claim("this sublayer is necessary (1 = yes)", effects[shown, "necessary"].values, predicted=0))
claim("it is jointly necessary with another one (1 = yes)", effects[shown, "jointly necessary"].values, predicted=1)

# %% [markdown]
# The same for ten prompts, with zero ablation: in how many is the sublayer of the logit lens necessary?

# %%
necessary = []
for prompt in python_texts.PROMPTS:
    sublayer = answers.logit_lens_sublayer(checkpoint, torch.tensor([tokenizer.encode(prompt)]))
    result = analysis.component_effects(checkpoint, prompt).select(metric="necessary")
    necessary.append(bool(result[sublayer].values))
    count = int(result.values.sum())
    print(
        f"{prompt[-20:]!r}: logit lens {sublayer}, necessary: {necessary[-1]}, number of necessary sublayers: {count}"
    )
claim("sublayer of the logit lens: not necessary in … of 10 prompts", necessary.count(False), above=1)

# %% [markdown]
# ## Try
#
# - Use 8 dimensions for the 20 features. At which sparsity are all 20 represented?
# - Probe the indentation depth (`text.indent` in `load_windows`, five classes): it needs more context than strings.
# - Set `two_targets.VOCAB = 64`: with more tokens to tell apart, one head with an FFN does not solve the task in the
#   same number of steps, and two heads do.
# - Use `analysis.component_effects(checkpoint, prompt, by_head=True)`, and compare the heads with the induction scores
#   of [notebook 10](10_inside.py).
#
# Previous: [12. The backward pass by hand](12_backward_by_hand.py).
# Next: [14. Depth, residual connections and recurrence](14_depth_and_recurrence.py).
