# %% [markdown]
# # 14. Depth, residual connections and recurrence
#
# A Transformer is deep in one direction, over its blocks, and shallow in the other, over positions. This notebook
# measures what residual connections do for the first direction, and what a recurrent network does in the second.
#
# Contents:
#
# - *degradation*: the training loss of stacks without residual connections, by depth;
# - *paths*: a residual stack as a sum over subsets of its sublayers, and which of them carry the gradient;
# - *deletion*: what one block costs;
# - *loss landscape* with and without residual connections;
# - *recurrent networks*: number of dependent steps, gradient by distance, copying and recall at equal parameters, and
#   the loss after equal steps and equal time.
#
# The figures with intervals are those of the studies `residual-depth` and `recurrent` (`cutaway learn study recurrent`
# prints them, `--run` repeats them). The cells train small versions with one seed.
#
# Prerequisites: gradients by norm placement ([notebook 5](05_gradients.py)), ablation ([notebook 10](10_inside.py)).

# %%
import math
from contextlib import nullcontext
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import cutaway as ct
from cutaway.learn import claim
from cutaway.learn.studies import load_results, loss_landscape, recurrent
from cutaway.learn.studies.residual_depth import count_paths, measure_gradient_paths, residual_stack, sample_texts
from cutaway.learn.studies.train_grid import MarkovChain, train_grid
from cutaway.lens.analysis.gradients import placement_config

BLUE, ORANGE, GREEN, RED, GRAY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
LABELS = {"rnn": "RNN", "rnn-orthogonal": "RNN, orthogonal", "lstm": "LSTM", "lstm-forget-1": "LSTM, forget bias 1"}
depth_study, recurrent_study = load_results("residual-depth"), load_results("recurrent")

# %% [markdown]
# ## Degradation: deeper and worse
#
# Each token of a random sequence is predicted from itself. A residual stack can do this with sublayers that output 0;
# without residual connections every sublayer has to pass the token on. Every batch is new, so the training loss is the
# loss on unseen data, and a higher loss of a deeper stack is not overfitting. Predictions: with residual connections
# the loss is near 0 at every depth; without them it rises with depth to that of a uniform guess, $\ln 16$.


# %%
def train_copying(depth, residual, steps=150, lr=3e-3):
    """Mean training loss of the last 10 steps."""
    torch.manual_seed(0)
    model = ct.build(placement_config("pre", depth, activation="relu", d_model=32, vocab_size=16), seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    with nullcontext() if residual else ct.edit(model, {"blocks.*": "no_residual"}):
        for _ in range(steps):
            tokens = torch.randint(16, (16, 17))
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses[-10:]) / 10


losses = {(depth, residual): train_copying(depth, residual) for depth in (1, 3, 8) for residual in (True, False)}
for (depth, residual), loss in losses.items():
    print(f"{depth} blocks, {'with' if residual else 'without'} residual connections: {loss:.4f} nats per token")
print(claim("8 blocks with residual connections: loss", losses[8, True], below=0.05, id="C124"))
print(claim("1 block without residual connections: loss", losses[1, False], below=0.1, id="C171"))
claim(
    "8 blocks without residual connections: loss, relative to ln 16",
    losses[8, False] / math.log(16),
    above=0.9,
    id="C171",
)

# %%
depths = (1, 2, 3, 6, 12, 24, 48, 96)
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for name, color in (("residual", BLUE), ("no-residual", RED)):
    values = [depth_study.get(f"copy-loss/{name}/{depth}") for depth in depths]
    axes.plot(depths, [e.mean for e in values], "o-", color=color, label=name.replace("-", " ") + " connections")
    axes.fill_between(depths, [e.low for e in values], [e.high for e in values], color=color, alpha=0.2)
axes.axhline(math.log(16), color="black", lw=0.7, ls=":")
axes.text(1, math.log(16) * 0.97, "uniform guess", va="top", fontsize=8)
axes.set(xscale="log", xlabel="blocks", ylabel="training loss, nats", title="Copying, best of 8 settings, 10 seeds")
axes.set_xticks(depths, map(str, depths))
axes.minorticks_off()
axes.legend(fontsize=8, frameon=False)
print(
    claim(
        "stored: 3 blocks without residual connections, accuracy",
        depth_study.get("copy-accuracy/no-residual/3").low,
        above=0.99,
        id="C124",
    )
)
claim(
    "stored: 6 blocks without residual connections, accuracy",
    depth_study.get("copy-accuracy/no-residual/6").high,
    below=0.2,
    id="C124",
)

# %% [markdown]
# ## Paths
#
# A residual stack of $n$ sublayers $x \leftarrow x + F_i(x)$ is a product of $n$ factors $1 + F_i$. If the $F_i$ were
# linear, the output would be the sum over all $2^n$ subsets of sublayers, one path each. $N$ sequential blocks of
# attention and FFN have $n = 2N$ sublayers and $2^{2N}$ paths; $N$ parallel blocks have $3^N$.

# %%
paths = count_paths((1, 2, 6))
print(claim("paths of 6 sequential blocks", paths["paths/sequential/6"].mean, predicted=2**12, rtol=0, id="C125"))
claim("paths of 6 parallel blocks", paths["paths/parallel/6"].mean, predicted=3**6, rtol=0, id="C125")

# %% [markdown]
# The sublayers are not linear, and the expansion is not useful for the output: partial sums over all subsets of up to
# $k$ sublayers are far from it. For the *gradient* it is exact, since a Jacobian at a point is a product of
# $1 + J_i$. The figure shows the norm of the part of the gradient at the embedding that passes through $k$ sublayers.
# All paths counted equally have a mean length of half of the sublayers; weighted by their gradients they are shorter.

# %%
checkpoint = ct.load("tiny-python", dtype=torch.float32)
texts = sample_texts(checkpoint.tokenizer, 4, 128)
by_length = measure_gradient_paths(checkpoint.model, texts)
print(
    claim(
        "tiny-python: mean path length / number of sublayers", by_length["gradient-path-length"], below=0.4, id="C126"
    )
)
error = depth_study.get("path-sum-error/tiny-python/6")
claim("stored: relative error of the sum over subsets of up to 6 sublayers", error.low, above=10, id="C126")

# %%
figure, panels = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for name, count, color in (("tiny-python", 12, BLUE), ("8-blocks", 16, ORANGE), ("32-blocks", 64, GREEN)):
    norms = [depth_study.get(f"gradient-by-path-length/{name}/{length}").mean for length in range(count + 1)]
    panels[0].plot(
        range(0, 17), [*norms, *[math.nan] * 16][:17], "o-", ms=3, color=color, label=f"{name} ({count} sublayers)"
    )
panels[0].xaxis.get_major_locator().set_params(integer=True)
panels[0].set(
    xlabel="sublayers on the path", ylabel="gradient norm / whole gradient", title="Gradient by length of the path"
)
panels[0].legend(fontsize=8, frameon=False)
errors = [depth_study.get(f"path-sum-error/tiny-python/{order}").mean for order in range(12)]
panels[1].plot(range(12), errors, "o-", color=RED)
panels[1].set(
    yscale="log", xlabel="largest number of sublayers", ylabel="relative error", title="Output as a sum over subsets"
)

# %% [markdown]
# ## Deletion of a block
#
# If paths that avoid one block carry most of the output, deleting the block costs little. In a trained model the first
# block costs many times as much as any other, and the more blocks there are, the less each of the others costs.

# %%
stack = residual_stack(checkpoint.model, texts)
with torch.no_grad():
    costs = [float(stack.cost([2 * block, 2 * block + 1]).mean()) for block in range(6)]
print("increase of the loss by deletion of each block:", [round(cost, 2) for cost in costs])
print(claim("first block: increase of the loss", costs[0], above=5, id="C127"))
claim("largest other block: increase of the loss", max(costs[1:]), below=1, id="C127")

# %%
figure, panels = plt.subplots(1, 3, figsize=(8, 2.8), layout="constrained")
for axes, (name, count) in zip(panels, (("tiny-python", 6), ("8-blocks", 8), ("32-blocks", 32)), strict=True):
    values = [depth_study.get(f"delete-block/{name}/{block}") for block in range(count)]
    axes.bar(range(count), [max(e.mean, 1e-3) for e in values], color=[RED] + [BLUE] * (count - 1))
    axes.set(yscale="log", ylim=(3e-3, 10), xlabel="deleted block", title=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
panels[0].set_ylabel("increase of the loss, nats")
sizes = [depth_study.get(f"size-cost-correlation/{name}/blocks-without-first") for name in ("32-blocks", "tiny-python")]
print(claim("stored: 32 blocks, rank correlation of update size and cost", sizes[0].low, above=0.3, id="C131"))
claim("stored: tiny-python, rank correlation without the first block", sizes[1].high, below=0.3, id="C131")

# %% [markdown]
# ## Loss landscape
#
# Slices of the loss around trained weights along a random direction whose rows have the norms of the rows of the
# weights ([Li et al. 2018](https://arxiv.org/abs/1712.09913)). Three blocks train with and without residual
# connections, so both minima can be compared. Prediction: without them the loss rises faster.

# %%
data = MarkovChain()
grid = replace(loss_landscape.GRID, lrs=(3e-3,), num_seeds=1, steps=300)
config = placement_config("pre", 3, activation="relu", d_model=32, vocab_size=16)
steps = torch.linspace(-1, 1, 41)
slices = {}
for residual in (True, False):
    edits = None if residual else {"blocks.*": "no_residual"}
    trained = train_grid(lambda seed: ct.build(config, seed=seed), data, grid, edits=edits)
    tokens = data.sample(64, 17, torch.Generator().manual_seed(1))
    with torch.no_grad(), nullcontext() if residual else ct.edit(trained.model, edits):
        surface = loss_landscape.LossSurface(trained, tokens)
        direction = surface.random_direction(trained.weights[0], torch.Generator().manual_seed(0))
        slices[residual] = surface.losses(trained.weights[0] + steps[:, None] * direction)
sharpness = {residual: loss_landscape.describe_slice(values)["sharpness"] for residual, values in slices.items()}
ratio = sharpness[False] / sharpness[True]
print(
    claim("increase of the loss at half of the slice, without / with residual connections", ratio, above=1.5, id="C136")
)
claim(
    "stored: largest eigenvalue of the Hessian, 6 blocks, without / with",
    depth_study.get("landscape/hessian-max/no-residual/6").low
    / depth_study.get("landscape/hessian-max/residual/6").high,
    above=2,
    id="C136",
)

# %%
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for residual, color in ((True, BLUE), (False, RED)):
    axes.plot(steps, slices[residual], color=color, label=f"{'with' if residual else 'without'} residual connections")
axes.set(xlabel="step along a random direction", ylabel="loss, nats per token", title="Slice of the loss, 3 blocks")
axes.legend(fontsize=8, frameon=False)

# %% [markdown]
# At 12 blocks the stack without residual connections does not train. There, random slices of its loss are flatter than
# with residual connections, and the largest eigenvalue of the Hessian is larger.
#
# ## Recurrent networks: dependent steps
#
# A recurrent network computes position $t$ from position $t - 1$. The longest chain of matrix products, each of which
# needs the result of the one before, grows with the length; in a Transformer it depends on the number of layers only.

# %%
for name in ("rnn", "lstm", "transformer"):
    counts = [recurrent.dependent_products(recurrent.build_model(name, 16, 0), length) for length in (16, 64)]
    print(f"{name}: {counts[0]} dependent products for 16 tokens, {counts[1]} for 64")
    if name == "transformer":
        claim("Transformer: dependent products for 64 tokens / for 16", counts[1] / counts[0], predicted=1, id="C268")

# %% [markdown]
# ## Gradient by distance
#
# How much does the output at the last position depend on the input $k$ positions before? At initialization the gradient
# of a recurrent network shrinks by a factor per position: the factor of a plain RNN is near ½ with PyTorch's
# initialization. An LSTM with a forget bias of 1 starts by keeping most of its cell. In attention all positions are at
# distance one layer.

# %%
factors = {}
for name in recurrent.MODELS:
    result = recurrent.measure_gradients(name, num_seeds=2)
    factors[name] = result[f"gradient-per-step/init/{name}"].mean
    print(f"{name}: factor per position {factors[name]:.2f}")
print(claim("RNN: factor per position", factors["rnn"], below=0.7, id="C265"))
print(claim("LSTM with forget bias 1: factor per position", factors["lstm-forget-1"], above=0.8, below=0.95, id="C265"))
claim("Transformer: factor per position", factors["transformer"], predicted=1, rtol=0.05, id="C069")

# %%
colors = dict(zip(recurrent.MODELS, (RED, ORANGE, GREEN, "#56B4E9", BLUE), strict=True))
figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for name in recurrent.MODELS:
    values = [recurrent_study.get(f"gradient/init/{name}/{distance}").mean for distance in recurrent.DISTANCES]
    panels[0].plot(recurrent.DISTANCES, values, "o-", ms=3, color=colors[name], label=LABELS.get(name, "Transformer"))
panels[0].set(
    xscale="log", yscale="log", xlabel="distance", ylabel="gradient / at distance 1", title="At initialization"
)
panels[0].set_xticks(recurrent.DISTANCES, map(str, recurrent.DISTANCES))
panels[0].minorticks_off()
panels[0].legend(fontsize=7, frameon=False)
tasks = [
    ("copy/4", "copy, gap 4"),
    ("copy/16", "gap 16"),
    ("copy/64", "gap 64"),
    ("recall/4", "recall, 4 pairs"),
    ("recall/16", "16 pairs"),
]
for index, name in enumerate(recurrent.TRAINED_MODELS):
    values = [recurrent_study.get(f"accuracy/{key}/{name}").mean for key, _ in tasks]
    places = [place + 0.2 * (index - 1.5) for place in range(len(tasks))]
    panels[1].bar(places, values, width=0.2, color=colors[name], label=LABELS.get(name, "Transformer"))
baselines = [recurrent_study.get(f"baseline/{key}").mean for key, _ in tasks]
panels[1].hlines(
    baselines,
    [place - 0.45 for place in range(len(tasks))],
    [place + 0.45 for place in range(len(tasks))],
    color="black",
    lw=0.9,
    ls=":",
)
panels[1].set_xticks(range(len(tasks)), [label for _, label in tasks], fontsize=7)
panels[1].set(ylabel="accuracy", title="Copy and recall, equal parameters")

# %% [markdown]
# ## Copy and recall
#
# All models have 25 thousand parameters without embeddings and equal training. Over a gap of 4 tokens every model
# copies. Over 64 only the Transformer does: the gradient at the token to be copied vanishes in the others. In recall,
# where pairs of key and value are followed by a key, the distance is short and the recurrent models still fail: they
# are hardly better than the most frequent value, whatever the key (dotted line), or worse.

# %%
print(
    claim(
        "stored: copy over 64, Transformer",
        recurrent_study.get("accuracy/copy/64/transformer").low,
        above=0.99,
        id="C266",
    )
)
print(claim("stored: copy over 64, LSTM", recurrent_study.get("accuracy/copy/64/lstm").high, below=0.15, id="C266"))
claim(
    "stored: recall of one of 16 pairs, LSTM", recurrent_study.get("accuracy/recall/16/lstm").high, below=0.3, id="C266"
)

# %% [markdown]
# ## Text: equal steps and equal time
#
# On text with short dependencies a small RNN learns about as fast per step as a Transformer. The time of a step depends
# on the size: at d_model 32 cuDNN runs all steps of an RNN in one kernel, faster than the Transformer runs its own; at
# d_model 512 and 1,024 tokens it is several times slower. The cell prints the loss minus that of the Transformer after
# equal steps, and after equal time with the step times of both sizes. The losses are those of d_model 32.

# %%
for name in ("rnn", "lstm"):
    print(f"{name}: equal steps {recurrent_study.get(f'text-loss-difference/equal-steps/{name}')}")
    for d_model in (32, 512):
        time = recurrent_study.get(f"step-time/{name}-to-transformer/{d_model}")
        difference = recurrent_study.get(f"text-loss-difference/equal-time/{d_model}/{name}")
        print(f"  step time at d_model {d_model} relative to the Transformer {time}; equal time {difference}")
rnn = recurrent_study.get("text-loss-difference/equal-steps/rnn")
print(claim("stored: RNN minus Transformer after equal steps, nats per byte", rnn.high, below=0.05, id="C269"))
faster = recurrent_study.get("text-loss-difference/equal-time/32/rnn").high
print(claim("stored: RNN minus Transformer after equal time, d_model 32", faster, below=0, id="C269"))
slower = recurrent_study.get("step-time/rnn-to-transformer/512").low
claim("stored: step time of the RNN / of the Transformer, d_model 512, H200", slower, above=2, id="C269")

# %% [markdown]
# ## Try
#
# - Use `post-norm` for copying without residual connections (`placement_config("post", …)`): does it help?
# - Delete two blocks at once: `stack.cost([2, 3, 4, 5])`. Is the cost the sum of the two?
# - Copy over a gap of 32 with `recurrent.measure_task(recall_tasks.CopyTask(32), "lstm-forget-1")`, after
#   `from cutaway.learn.studies import recall_tasks` (minutes on a CPU).
#   Which accuracy does it reach, between those of 16 and 64?
#
# Previous: [13. Representation](13_representation.py).
