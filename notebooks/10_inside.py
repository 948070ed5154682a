# %% [markdown]
# # 10. Analyzing a trained model: logit lens, attribution, patching, ablation
#
# The residual stream is a sum of sublayer outputs. So the contribution of each sublayer to a logit is well defined, the
# residual stream can be decoded after any block, and components can be ablated or replaced by activations of another
# run. This notebook applies each method to `tiny-python` with a prediction, and uses activation patching to find the
# head that copies a name from one line of code to the next.
#
# Prerequisites: attention ([notebook 2](02_attention.py)), the residual stream ([notebook
# 4](04_ffn_norms_residuals.py)). The gallery (`docs/gallery.md`) shows more analyses of the same model.

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
untrained = ct.build(checkpoint.config, seed=0, dtype=torch.float32)  # the same configuration, random weights
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
# ## The residual stream is a sum
#
# In a pre-norm model every sublayer adds its output to the residual stream:
#
# $$x_{final} = x_{embed} + \sum_{l} \left( a_l + f_l \right).$$
#
# So the embedding plus the twelve sublayer outputs must equal the residual stream after the last block, up to float32
# rounding.

# %%
with torch.no_grad(), ct.trace(model, "embed", "attn.out", "ffn.out", "resid_post") as t:
    logits = model(tokens)[0]  # (T, V)
outputs = [t[f"blocks.{layer}.{sublayer}.out"] for layer in range(6) for sublayer in ("attn", "ffn")]
final_resid = t["blocks.5.resid_post"]  # (1, T, d)
error = (t["embed"] + sum(outputs) - final_resid).norm() / final_resid.norm()
claim("embedding + sublayer outputs − final residual stream: relative error", error, below=1e-6, id="C121")

# %% [markdown]
# ## Norm and direction of the sublayer outputs
#
# In an untrained model each sublayer output is a random linear map of its input, with a random direction. The cosine of
# two random directions in $d$ dimensions has mean 0 and standard deviation $1/\sqrt d$, so its mean absolute value is
#
# $$\sqrt{\tfrac{2}{\pi}} \cdot \frac{1}{\sqrt{256}} = 0.0499.$$
#
# After training, the mean cosine between an output and the residual stream should differ from 0. The norm of the
# residual stream grows with depth, so the norm of an output relative to it should decrease.

# %%
cosines = {
    name: analysis.update_cosine_similarities(m, tokens).values
    for name, m in (("untrained", untrained), ("trained", model))
}
norm_ratios = analysis.update_norm_ratios(checkpoint, code).values.mean(1)  # (sublayer,), mean over tokens
expected = math.sqrt(2 / math.pi / 256)
print(claim("untrained: mean |cosine|", cosines["untrained"].abs().mean(), predicted=expected, rtol=0.2))
threshold = 3 / math.sqrt(256)  # three standard deviations of one random cosine
print(claim("trained: mean cosine", cosines["trained"].mean(), above=threshold))
claim(
    "‖output‖ / ‖residual stream‖: block 5's FFN / block 0's FFN",
    norm_ratios[11] / norm_ratios[1],
    below=0.2,
    id="C281",
)

# %%
figure, panels = plt.subplots(1, 2, figsize=(6, 3))
panels[0].plot(analysis.resid_norms(checkpoint, code).values.mean(1), "o-", color=BLUE)
panels[0].set_xticks(range(7), ["embed", *range(6)])
panels[0].set(xlabel="after block", ylabel="mean norm", title="Residual stream")
for offset, (sublayer, color) in enumerate((("attention", ORANGE), ("FFN", GREEN))):
    panels[1].semilogy(range(6), norm_ratios[offset::2], "o-", color=color, label=sublayer)
panels[1].set(xlabel="block", ylabel="‖output‖ / ‖residual stream‖", title="Sublayer outputs")
panels[1].set_yticks([0.3, 1, 3], ["0.3", "1", "3"])
panels[1].minorticks_off()
panels[1].legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# ## Logit lens
#
# The logit lens applies the final norm and the head to the residual stream after each block
# ([nostalgebraist 2020](https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens)). There are
# two predictions. The head is tied to the embedding, and the dot product of a vector with itself is usually the
# largest, so at the embedding the prediction should be the input token. The share of positions whose prediction equals
# the final one should increase with every block.

# %%
lens = analysis.logit_lens(checkpoint, code)  # (depth, token), annotated with the predicted token
input_tokens = lens.labels[1]
itself = sum(a == b for a, b in zip(lens.annotations[0], input_tokens, strict=True)) / len(input_tokens)
agreement = [float((row == lens.annotations[-1]).mean()) for row in lens.annotations]
print([round(share, 2) for share in agreement])
print(claim("embedding: share of positions where the prediction is the input token", itself, above=0.95))
smallest_increase = min(b - a for a, b in pairwise(agreement))
claim("smallest increase of agreement with the final prediction per block", smallest_increase, above=0)

# %% [markdown]
# ## Direct logit attribution
#
# The example is a name that is bound on one line of code and used on another:

# %%
template = "try:\n    value = int(text)\nexcept ValueError as {}:\n    raise TypeError("
clean, corrupted = template.format("error"), template.format("err")
with torch.no_grad():
    last_logits = model(torch.tensor([tokenizer.encode(clean)]))[0, -1]
for prob, token in zip(*last_logits.softmax(-1).topk(3), strict=True):
    print(f"{tokenizer.decode([int(token)])!r}: {float(prob):.2f}")

# %% [markdown]
# The final norm divides the residual stream of a token by one number; with that number held fixed, a logit is linear in
# the residual stream, so it is a sum of contributions of the sublayers. The same holds for the *logit difference* of
# `error` and `err`. The embedding of `(` does not depend on the name, and FFNs process each token independently:
# information about the name reaches the last position through attention only.

# %%
contributions = analysis.direct_logit_attribution(checkpoint, clean, "error", incorrect_token="err")
error_id, err_id = (tokenizer.encode(name)[-1] for name in ("error", "err"))
logit_difference = float(last_logits[error_id] - last_logits[err_id])
print(contributions)
total = contributions.values.sum()
claim("contributions sum to the logit difference", total, predicted=logit_difference, rtol=1e-4, id="C273")

# %% [markdown]
# ## Attention entropy
#
# Uniform attention at position $t$ has an entropy of $\log_2 t$ bits. The average over $T$ tokens is
#
# $$\frac1T \sum_{t=1}^{T} \log_2 t = \frac{\log_2 T!}{T}.$$
#
# Before training scores are close to 0, so the entropy of every head should be close to this value. After training the
# entropy of all heads should be below it, and that of at least one head by a factor of two.

# %%
entropies = {
    name: analysis.attention_entropy(m, tokens).values for name, m in (("untrained", untrained), ("trained", model))
}
uniform_entropy = math.lgamma(tokens.shape[1] + 1) / math.log(2) / tokens.shape[1]
print(
    claim(
        "untrained: smallest entropy, bits",
        entropies["untrained"].min(),
        predicted=uniform_entropy,
        rtol=0.01,
        id="C280",
    )
)
print(claim("trained: largest entropy, bits", entropies["trained"].max(), below=uniform_entropy))
claim("trained: smallest entropy / uniform", entropies["trained"].min() / uniform_entropy, below=0.5)

# %% [markdown]
# ## Induction heads
#
# The input is a sequence of random tokens that is repeated: A B C … A B C …. An induction head attends from the second
# A to the token after the first A, which is B: with $L$ tokens per half, from position $t$ to $t - (L-1)$. Its key at B
# must encode that the preceding token is A, which requires a *previous-token head* in an earlier block
# ([Olsson et al.](https://arxiv.org/abs/2209.11895)). So previous-token heads should be in earlier blocks than
# induction heads, and ablating them should reduce the induction score.

# %%
head_scores = analysis.head_scores(checkpoint)  # (layer, head, head_type)
uniform = sum(1 / t for t in range(33, 65)) / 32  # uniform attention in the second half of 64 tokens
previous_head, previous_score = head_scores.select(head_type="previous_token").top(1)[0]
induction_head, induction_score = head_scores.select(head_type="induction").top(1)[0]
print("best previous-token head: block {}, head {}".format(*previous_head), f"(score {previous_score:.2f})")
print("best induction head:      block {}, head {}".format(*induction_head), f"(score {induction_score:.2f})")
untrained_mean = analysis.head_scores(untrained).select(head_type="induction").values.mean()
print(
    claim("untrained: mean induction score is that of uniform attention", untrained_mean, predicted=uniform, rtol=0.05)
)
print(claim("score of the best induction head / uniform", induction_score / uniform, above=5, id="C270"))
distance = int(induction_head[0]) - int(previous_head[0])
claim("block of the induction head − block of the previous-token head", distance, above=0)

# %% [markdown]
# Ablate the previous-token head and measure the induction head's score; the other heads of the same block are the
# control. Prediction: the score falls below 60 % of its value when the previous-token head is ablated, and stays above
# 85 % when any other head is ablated.


# %%
def measure_induction():
    scores = analysis.head_scores(checkpoint, batch_size=4)
    return float(scores[induction_head[0], induction_head[1], "induction"])


def measure_without(head):
    """Induction score with one head of the previous-token head's block set to zero."""
    with ct.edit(checkpoint, {f"blocks.{previous_head[0]}.attn.z": {"do": "zero", "heads": [head]}}):
        return measure_induction()


baseline = measure_induction()
remaining = [measure_without(head) / baseline for head in range(8)]
controls = [share for head, share in enumerate(remaining) if head != int(previous_head[1])]
print(
    claim(
        "previous-token head ablated: remaining induction score", remaining[int(previous_head[1])], below=0.6, id="C270"
    )
)
claim("another head of the block ablated: smallest remaining score", min(controls), above=0.85)

# %%
figure, panels = plt.subplots(1, 2, figsize=(6.4, 3))
titles = {"previous_token": "previous token", "induction": "induction"}
for axes, (head_type, title) in zip(panels, titles.items(), strict=True):
    image = axes.imshow(head_scores.select(head_type=head_type).values, cmap="viridis", vmin=0, aspect="auto")
    axes.set(xlabel="head", ylabel="block", title=title)
    figure.colorbar(image, ax=axes, label="attention weight")
figure.tight_layout()

# %%
figure, axes = plt.subplots(figsize=(6, 2.8))
axes.bar(range(8), remaining, color=[RED if head == int(previous_head[1]) else BLUE for head in range(8)])
axes.axhline(1, color="0.6", lw=0.8, ls=":")
axes.set(
    xlabel=f"ablated head of block {previous_head[0]}",
    ylabel="remaining induction score",
    title=f"Induction score of block {induction_head[0]}, head {induction_head[1]}",
)
figure.tight_layout()

# %% [markdown]
# ## Activation patching
#
# For `except ValueError as error`: run the text with `err`, replace one activation by its value from the run with
# `error`, and measure the share of the logit difference that is restored (1 means all of it). The induction heads are
# in blocks 4 and 5. If they copy the name, patching the residual stream before block 4 at the name's own token should
# restore everything, and patching it before block 5 at the last token should restore a part.

# %%
pair = {"clean": clean, "corrupted": corrupted, "answer_token": "error", "incorrect_token": "err"}
resid_patching = analysis.activation_patching(checkpoint, **pair, site="resid_pre")  # (layer, token)
head_patching = analysis.activation_patching(checkpoint, **pair, site="attn.z", by_head=True)  # (layer, head)
name_position = next(index for index, token in enumerate(resid_patching.labels[1]) if "error" in token)
at_name = resid_patching.values[4, name_position]
print(claim("name's token, before block 4: restored share", at_name, predicted=1, rtol=0.1))
print(claim("last token, before block 5: restored share", resid_patching.values[5, -1], above=0.3))
best_head, restored = head_patching.top(1)[0]
print("head with the largest restored share: block {}, head {}".format(*best_head), f"({restored:.2f})")
claim("it is the best induction head on random tokens (1 = yes)", best_head == induction_head, predicted=1)

# %% [markdown]
# A head that copies the name must attend to it: at the last token, `(`, more than half of its attention weight should
# be on ` error`.

# %%
with torch.no_grad(), ct.trace(model, "attn.pattern", positions=-1) as t:
    model(torch.tensor([tokenizer.encode(clean)]))
attention_to_name = torch.stack(
    [t[f"blocks.{layer}.attn.pattern"][0, :, 0, name_position] for layer in range(6)]
)  # (layer, head)
best_attention = float(attention_to_name[int(best_head[0]), int(best_head[1])])
claim("attention weight of that head on the name", best_attention, above=0.5)

# %%
figure, panels = plt.subplots(1, 2, figsize=(7.2, 3.2), gridspec_kw={"width_ratios": [1.5, 1]})
first = name_position - 2
image = panels[0].imshow(resid_patching.values[:, first:], cmap="viridis", vmin=0, vmax=1, aspect="auto")
token_labels = [token.replace("\n", "↵").replace(" ", "·") for token in resid_patching.labels[1][first:]]
panels[0].set_xticks(range(len(token_labels)), token_labels, rotation=60, ha="right")
panels[0].set(ylabel="before block", title="Patching the residual stream")
figure.colorbar(image, ax=panels[0], label="restored logit difference")
panels[1].scatter(attention_to_name, head_patching.values, s=14, color=BLUE)
panels[1].annotate(
    f"block {best_head[0]}, head {best_head[1]}",
    (best_attention, restored),
    (-8, 0),
    textcoords="offset points",
    ha="right",
    va="center",
)
panels[1].set(
    xlabel="attention weight on the name",
    ylabel="restored logit difference",
    title="Patching one head",
    ylim=(-0.1, 0.55),
)
figure.tight_layout()

# %% [markdown]
# ## Ablation of a trained model
#
# Predictions for removing a component from the trained model:
#
# - **A middle block**: its update has about a third of the norm of the residual stream, and later blocks still get most
#   of their input, so the loss should increase moderately. **Block 0**: its update has several times the norm of the
#   embedding, so the increase should be much larger.
# - **The order** of attention and FFN within a block: if they are swapped, the input of each differs by one of many
#   updates, so the increase should be small.
# - **The final norm** divides each token's residual stream by its RMS and multiplies it by gains. Without it the logits
#   are scaled by about one factor per token if the gains are similar: the ranking of tokens stays, the probabilities
#   change. The loss is predicted from the logits times RMS$(x)$ / mean gain.
# - **The mask**: later tokens become visible, including the target. The loss should still *increase*, because the model
#   was not trained with visible later tokens.
# - **Positions**: without RoPE's rotation, scores do not depend on the distance between query and key, so the loss
#   should increase.

# %%
ablation = analysis.ablation(checkpoint, code)
baseline = float(ablation["baseline", "loss"])
rms = final_resid[0].pow(2).mean(-1, keepdim=True).sqrt()  # (T, 1)
gain = model.stacks["decoder"].final_norm.weight.detach()
predicted_loss = float(F.cross_entropy((logits * rms / gain.mean())[:-1], tokens[0, 1:]))


def loss_increase(condition):
    return float(ablation[condition, "loss"]) - baseline


middle_blocks = [loss_increase(f"without block {layer}") for layer in (1, 2, 3, 4)]
print(f"loss of the unchanged model: {baseline:.3f} nats per token")

# %%
print(
    claim(
        "without a middle block: largest loss increase, nats per token", max(middle_blocks), above=0, below=1, id="C127"
    )
)
ratio = loss_increase("without block 0") / max(middle_blocks)
print(claim("loss increase without block 0 / largest of a middle block", ratio, above=5, id="C127"))
without_norm = float(ablation["without the final norm", "loss"])
print(claim("without the final norm: loss", without_norm, predicted=predicted_loss, rtol=0.02, id="C119"))
overlap = ablation["without the final norm", "top-5 overlap"].values
print(claim("without the final norm: share of the top 5 that stays", overlap, above=0.9, id="C119"))
print(claim("without the mask: loss increase", loss_increase("without the mask"), above=0.3))
print(claim("without positions: loss increase", loss_increase("without positions"), above=0.3))
claim("FFN before attention in block 3: loss increase", loss_increase("FFN before attention in block 3"), below=0.1)

# %% [markdown]
# Are heads redundant? If their effects were independent, ablating all heads would cost the sum of the single
# ablations; if heads can replace each other, it costs more.

# %%
single_heads = analysis.head_ablation(checkpoint, code)  # (layer, head): loss increase
with torch.no_grad(), ct.edit(checkpoint, {"blocks.*.attn.z": "zero"}):
    all_heads = float(F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:])) - baseline
sum_of_single = float(single_heads.values.sum())
print(f"sum of 48 single ablations {sum_of_single:.2f}, all heads at once {all_heads:.2f} nats per token")
print(
    claim("median loss increase without one head, nats per token", single_heads.values.median(), below=0.05, id="C128")
)
claim("loss increase without all heads / sum of single ablations", all_heads / sum_of_single, above=1.5)

# %%
figure, axes = plt.subplots(figsize=(6, 4))
conditions = [
    "baseline",
    *(f"without block {n}" for n in range(6)),
    "FFN before attention in block 0",
    "FFN before attention in block 3",
    "without the final norm",
    "without the mask",
    "without positions",
]
rows = range(len(conditions))
losses = [float(ablation[name, "loss"]) for name in conditions]
axes.barh(rows, losses, color=["0.5", *[BLUE] * 8, *[ORANGE] * 3])
for row, name in enumerate(conditions):
    overlap = float(ablation[name, "top-5 overlap"])
    axes.text(losses[row] + 0.1, row, f"top-5 overlap {overlap:.2f}", va="center", fontsize=8)
axes.set_yticks(rows, conditions)
axes.invert_yaxis()
axes.set(xlabel="loss, nats per token", title="Loss after ablation", xlim=(0, 11.5))
figure.tight_layout()

# %% [markdown]
# ## Removed after training and absent during training
#
# When a component is removed after training, the other components, which were trained with it, lack its output.
# `cutaway ablate component-removal` trains small models without each component, with three seeds each; the results are
# included in cutaway. There are two predictions. The loss increase without positions is *smaller* if they are absent
# during training than if they are removed afterwards. A model trained without a mask can copy the next token from its
# input, so its loss is close to 0, although it cannot generate text.

# %%
study = json.loads(ABLATIONS_FILE.read_text())
trained_losses = {row["variant"]: row["loss"]["mean"] for row in study["variants"]}
ablated_losses = {
    row["condition"]: row["mean"]
    for row in study["measurements"]
    if row["variant"] == "full model" and row["metric"] == "loss"
}
components = {  # component: (variant trained without it, condition of the full model)
    "a middle block": ("one block fewer", "without a middle block"),
    "the final norm": ("no final norm", "without the final norm"),
    "positions": ("no positions", "without positions"),
    "the mask": ("no mask", "without mask"),
}
absent = {name: trained_losses[variant] - trained_losses["full model"] for name, (variant, _) in components.items()}
removed = {name: ablated_losses[condition] - ablated_losses["baseline"] for name, (_, condition) in components.items()}
difference = removed["positions"] - absent["positions"]
print(claim("positions: loss increase if removed − if absent during training", difference, above=0))
claim("trained without a mask: loss", trained_losses["no mask"], above=0, below=0.5, id="C079")

# %%
figure, axes = plt.subplots(figsize=(6, 3))
positions = torch.arange(len(components))
axes.bar(positions - 0.2, list(removed.values()), 0.4, color=ORANGE, label="removed after training")
axes.bar(positions + 0.2, list(absent.values()), 0.4, color=BLUE, label="absent during training")
axes.axhline(0, color="0.3", lw=0.8)
axes.set_xticks(positions, list(components))
axes.set(ylabel="loss increase, nats per token", title="Components removed after training or absent during it")
axes.legend(frameon=False, loc="lower left")
figure.tight_layout()

# %% [markdown]
# ## Try
#
# - Swap `error` and `err`: use the text with `err` as the clean one. The same head should have the largest restored
#   share, although the model's probability of `err` is lower.
# - Use mean ablation instead of zero ablation (`{"do": "mean", "heads": [7]}`). For a head whose mean output carries
#   information the effect is smaller; for the previous-token head it should be about the same.
# - Insert a comment of twenty words between the two lines. Induction heads attend by content, not by distance: the
#   attention weight should change little.
#
# Exercise: `cutaway learn start 1` (attention by hand). On the web page (`cutaway open tiny-python`), the screen *Edit*
# ablates components, and the screen *Attention* shows each head's pattern.
