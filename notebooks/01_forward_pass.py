# %% [markdown]
# # 1. The forward pass, step by step
#
# The forward pass maps a text to a probability for each next token. This notebook computes every step from the
# weights in plain PyTorch and compares each activation with the value that the library records under the same site
# name. It then measures what each sublayer adds to the residual stream and to a logit, and at which depth the
# predicted token stops changing.
#
# Prerequisites: matrices, softmax. The model is `tiny-english`, which is included in cutaway: 6 blocks, 8 heads,
# d_model 256, trained on children's stories.

# %%
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import cutaway as ct
from cutaway.learn import claim
from cutaway.lens import analysis

torch.set_grad_enabled(False)
checkpoint = ct.load("tiny-english", dtype=torch.float32)
model, tokenizer = checkpoint.model, checkpoint.tokenizer
w = {name.removeprefix("decoder."): weight for name, weight in model.state_dict().items()}
text = "The cat sat on the"

# %% [markdown]
# ## Number of parameters
#
# The number of parameters follows from the shapes: an embedding of $V$ rows of width $d$, shared with the head; in
# each of $N$ blocks four $d \times d$ matrices for attention, three $d \times h$ matrices for the FFN and two norms
# of $d$ gains; and a final norm:
#
# $$V d + N\,(4 d^2 + 3 d h + 2 d) + d$$

# %%
V, d, N, H, h = 4096, 256, 6, 8, 688
D = d // H  # 32, d_head
closed_form = V * d + N * (4 * d * d + 3 * d * h + 2 * d) + d
claim("number of parameters from five sizes", sum(p.numel() for p in model.parameters()), predicted=closed_form, rtol=0)

# %% [markdown]
# ## Text to tokens to embeddings
#
# The tokenizer splits the text into tokens of its vocabulary. A token is an integer; its embedding is the row of the
# embedding matrix with that index. No position is added here: this model encodes positions in attention, by rotation
# (RoPE, [notebook 3](03_positions.py)). A space belongs to the token after it: `The` and ` the` are different tokens.

# %%
ids = tokenizer.encode(text)
tokens = torch.tensor([ids])  # (1, T)
token_texts = [tokenizer.decode([token]) for token in ids]
T = len(ids)
x = w["embed.token.weight"][tokens]  # (1, T, d)
print(dict(zip(token_texts, ids, strict=True)), "→", tuple(x.shape))

# %% [markdown]
# The head is tied to the embedding: the logit of token $j$ is the dot product of the residual stream with row $j$. If
# the head is applied to the embedding directly, without any block, the token itself should have the largest logit,
# because the dot product of a vector with itself is large and two random directions in 256 dimensions have a cosine
# of about $1/\sqrt{256} = 0.06$. The prediction is that this holds for more than 90 % of the 4,096 tokens. It fails
# for a token if the row of a similar token has a larger norm.

# %%
embedding = w["embed.token.weight"]
predicted_tokens = model.head(model.decoder.final_norm(embedding)).argmax(-1)  # (V,)
is_itself = predicted_tokens == torch.arange(V)
claim(
    "without blocks the token itself has the largest logit: share of the vocabulary",
    is_itself.float().mean(),
    above=0.9,
)

# %% [markdown]
# Most exceptions are single bytes (the tokenizer has a token for each of the 256 bytes) that hardly occur in stories.
# The others are pieces of words that are usually merged further, such as `itchen` in ` kitchen`. Almost all of the
# gradient of such a row is from the softmax, which decreases the logits of all absent tokens alike. So these rows
# should be nearly parallel.

# %%
exceptions = F.normalize(embedding[~is_itself], dim=-1)  # (number of exceptions, d)
cosines = (exceptions @ exceptions.T)[~torch.eye(len(exceptions), dtype=torch.bool)]
print(f"{len(exceptions)} exceptions, of which {(~is_itself[:256]).sum()} are single bytes")
claim("mean cosine between the rows of two exceptions", cosines.mean(), above=0.7)

# %% [markdown]
# ## RMSNorm, RoPE and attention
#
# RMSNorm divides a vector by its root mean square and multiplies it by learned gains:
# $\mathrm{norm}(x) = x / \sqrt{\mathrm{mean}(x^2) + \epsilon} \cdot g$. Before the gains, the output has norm
# $\sqrt d = 16$ for any norm of $x$.
#
# RoPE rotates each pair $(a_i, b_i)$ of a head's dimensions by the angle position $\cdot\ 10000^{-2i/D}$.
#
# Attention computes the dot product of each query with the keys at its own and earlier positions, and averages the
# values with the softmax of these scores as weights.


# %%
def norm(x, gain):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def rope(x):  # (1, T, H, D)
    angle = torch.arange(x.shape[1])[:, None] * 10000 ** (-torch.arange(0, D, 2) / D)  # (T, D/2)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]  # (T, 1, D/2), broadcast over heads
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend(q, k, v):  # (1, T, H, D) each
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(D)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, -torch.inf)
    pattern = scores.softmax(-1)  # (1, H, T, T), rows sum to 1
    return scores, pattern, torch.einsum("bhts,bshd->bthd", pattern, v)


# %%
claim("norm of 100·x after RMSNorm without gains, √d", norm(100 * x, 1.0).norm(dim=-1).mean(), predicted=16, id="C103")

# %% [markdown]
# ## One block: two residual additions
#
# $$x \leftarrow x + W_o\,\mathrm{attention}(\mathrm{norm}(x)) \qquad x \leftarrow x + \mathrm{FFN}(\mathrm{norm}(x))$$
#
# with $\mathrm{FFN}(y) = W_\text{down}\,(\mathrm{silu}(W_\text{gate}\,y) \odot W_\text{up}\,y)$. Each value is stored
# under the library's site name.


# %%
def block(x, i):
    """Return the residual stream after block i and the block's activations by site name."""
    p, s = f"blocks.{i}.", {}
    s["resid_pre"] = x
    s["attn.in"] = y = norm(x, w[p + "attn.norm_in.weight"])
    q, k, v = ((y @ w[p + f"attn.f.{name}.weight"].T).view(1, T, H, D) for name in "qkv")
    s["attn.q"], s["attn.k"], s["attn.v"] = rope(q), rope(k), v
    s["attn.scores"], s["attn.pattern"], s["attn.z"] = attend(rope(q), rope(k), v)
    s["attn.out"] = s["attn.z"].flatten(-2) @ w[p + "attn.f.o.weight"].T
    s["resid_mid"] = x = x + s["attn.out"]
    s["ffn.in"] = y = norm(x, w[p + "ffn.norm_in.weight"])
    gate, up = (y @ w[p + f"ffn.f.{name}.weight"].T for name in ("gate", "up"))  # (1, T, h)
    s["ffn.hidden"] = F.silu(gate) * up
    s["ffn.out"] = s["ffn.hidden"] @ w[p + "ffn.f.down.weight"].T
    s["resid_post"] = x = x + s["ffn.out"]
    return x, {p + name: value for name, value in s.items()}


# %% [markdown]
# The whole model is six blocks, the final norm and the head. It has $1 + 6 \cdot 14 + 2 = 87$ sites.

# %%
activations = {"embed": x}
for i in range(N):
    x, block_activations = block(x, i)
    activations |= block_activations
activations["final_norm"] = norm(x, w["final_norm.weight"])
activations["logits"] = activations["final_norm"] @ embedding.T  # (1, T, V)

with ct.trace(model, "*") as t:
    model(tokens)
claim("number of sites", len(t), predicted=len(activations), rtol=0)

# %% [markdown]
# `ct.trace` records the same activations during the library's forward pass. The library uses PyTorch's fused
# attention kernel, which sums in a different order, so the results differ by rounding: float32 has about 7 decimal
# digits, and rounding errors accumulate over some hundred operations. Prediction: at each of the 87 sites the largest
# difference is below $10^{-5}$ of the largest value.


# %%
def relative_error(a, b):
    """Return max|a − b| / max|b| over finite values; inf if a and b are not −∞ (masked) at the same entries."""
    finite = torch.isfinite(b)
    if not (finite == torch.isfinite(a)).all():
        return math.inf
    return float((a - b)[finite].abs().max() / b[finite].abs().max())


worst = max(relative_error(activations[name], t[name].as_subclass(torch.Tensor)) for name in activations)
claim("by hand against the library: largest relative error over 87 sites", worst, below=1e-5, id="C001")

# %% [markdown]
# ## The residual stream is a sum
#
# Each sublayer adds its output to the residual stream. So the residual stream before the final norm is the embedding
# plus twelve sublayer outputs:
#
# $$x_\text{final} = x_\text{embed} + \sum_{i=0}^{5} (\text{attn.out}_i + \text{ffn.out}_i)$$

# %%
outputs = {
    name: activations[name][0, -1] for name in activations if name.endswith(("attn.out", "ffn.out"))
}  # 12 × (d,)
total = activations["embed"][0, -1] + sum(outputs.values())
final_resid = t["blocks.5.resid_post"][0, -1]
claim(
    "embedding + 12 sublayer outputs = final residual stream", relative_error(total, final_resid), below=1e-5, id="C121"
)

# %% [markdown]
# If the sublayer outputs were orthogonal, the squared norm of the sum would be the sum of the squared norms
# (Pythagoras). Outputs with positive cosines give a larger norm. The cell measures the ratio of the two norms
# for the last token.

# %%
terms = torch.stack([activations["embed"][0, -1], *outputs.values()])  # (13, d)
norms = terms.norm(dim=-1)
orthogonal_norms = norms.square().cumsum(0).sqrt()
labels = ["embed", *(name.removeprefix("blocks.").removesuffix(".out") for name in outputs)]
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.bar(labels, norms, color=["#999999"] + ["#0072B2", "#E69F00"] * N)
axes.plot(
    labels, terms.cumsum(0).norm(dim=-1), color="black", marker="o", markersize=3, label="residual stream after it"
)
axes.plot(labels, orthogonal_norms, color="black", linestyle=":", label="if all outputs were orthogonal")
axes.set(ylabel="norm", title=f"Outputs of attention (blue) and FFN (orange) at token “{token_texts[-1].strip()}”")
axes.tick_params(axis="x", rotation=60)
axes.legend(frameon=False)
claim("norm of the residual stream / norm if outputs were orthogonal", total.norm() / orthogonal_norms[-1], above=1)

# %% [markdown]
# ## From the residual stream to the next token
#
# Softmax turns the last token's 4,096 logits into probabilities. Greedy decoding selects the largest.

# %%
probs = activations["logits"][0, -1].softmax(-1)
top = probs.topk(5)
for prob, token in zip(top.values, top.indices, strict=True):
    print(f"{tokenizer.decode([token])!r:10} {prob:.3f}")
[completion] = ct.generate(checkpoint, text, max_new_tokens=1)
claim(
    "the token with the largest logit is generated", top.indices[0], predicted=completion.tokens[0], rtol=0, id="C009"
)

# %% [markdown]
# The head is linear, and the final norm divides the residual stream of a token by one number, its RMS. With the RMS
# held fixed, the logit of token $j$ is a sum with one term per sublayer,
# $\text{gain} \odot \text{out} / \text{rms} \cdot E_j$. This is direct logit attribution.

# %%
rms = (total.square().mean() + 1e-6).sqrt()
logit_direction = w["final_norm.weight"] * embedding[top.indices[0]]  # (d,)
contributions = terms @ logit_direction / rms  # (13,)
library = analysis.direct_logit_attribution(checkpoint, text, completion.text).values
difference = (contributions - library).abs().max()
print(claim("direct logit attribution by hand against the library: largest difference", difference, below=1e-3))
logit = float(activations["logits"][0, -1].max())
claim("the contributions sum to the logit", contributions.sum(), predicted=logit, rtol=1e-4, id="C273")

# %% [markdown]
# ## Logit lens: the prediction after each block
#
# The residual stream has the same width after every block, so the final norm and the head can be applied after any
# block. This is the *logit lens*. There are two predictions. After the embedding, the largest logit is usually that of
# the token itself, which is rarely the next token, so the loss should be above that of a uniform distribution,
# $\log_2 4096 = 12$ bits. The mean loss at the next token should decrease with every block. The text is a short story.

# %%
story = (
    "Once upon a time, there was a girl named Sue. She had a friend named Ben. One day, Sue and Ben went to the park "
    'to play with a red ball. Ben kicked the ball very hard, and it flew over the fence. "Oh no!" said Sue. "We have '
    'to get the ball back." A big dog was behind the fence. The dog had the ball in its mouth. Ben was scared, but Sue '
    "said hello to the dog. The dog dropped the ball and wagged its tail. Sue and Ben were very happy."
)
story_tokens = torch.tensor([tokenizer.encode(story)])
with ct.trace(model, "embed", "resid_post") as t:
    model(story_tokens)
resid = torch.cat([t[name].as_subclass(torch.Tensor) for name in t])  # (N + 1, T, d)
logits = model.head(model.decoder.final_norm(resid))  # (N + 1, T, V)
target = story_tokens[:, 1:].expand(N + 1, -1)
loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), target, reduction="none") / math.log(2)  # bits
loss_by_depth = loss.mean(1)
print(claim("logit lens at the embedding: mean loss, bits per token", loss_by_depth[0], above=math.log2(V)))
claim("number of blocks that decrease the mean loss", (loss_by_depth.diff() < 0).sum(), predicted=N, rtol=0)

# %%
depths = ["embed", *map(str, range(N))]
figure, axes = plt.subplots(figsize=(6, 3.2))
low, high = loss.quantile(torch.tensor([0.25, 0.75]), dim=1)
axes.fill_between(depths, low, high, color="#0072B2", alpha=0.2, label="25th to 75th percentile")
axes.plot(depths, loss_by_depth, color="#0072B2", marker="o", label="mean")
axes.axhline(math.log2(V), color="black", linestyle=":", label="uniform over 4,096 tokens")
axes.set(
    xlabel="after block", ylabel="loss, bits per token", title="Logit lens: the mean loss decreases with every block"
)
axes.legend(frameon=False)

# %% [markdown]
# The library's `logit_lens` gives the token with the largest logit at each depth, here for the short text:

# %%
lens = analysis.logit_lens(checkpoint, text)
lens.plot()

# %% [markdown]
# Call a prediction *final at depth n* if the token with the largest logit does not change after depth n. For the
# longer text, the prediction is that fewer than half of the tokens are final after block 2, the middle of the model.

# %%
predicted_tokens = logits.argmax(-1)  # (N + 1, T)
stays = (predicted_tokens == predicted_tokens[-1]).flip(0).cumprod(0).flip(0)  # 1 from the depth where it is final
final_depth = (N + 1) - stays.sum(0)  # 0 is the embedding, 1 is block 0, …
counts = torch.bincount(final_depth, minlength=N + 1)
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.bar(depths, counts / len(final_depth), color="#009E73")
axes.set(xlabel="final after block", ylabel="share of tokens", title="Depth at which the predicted token becomes final")
claim("share of predictions that are final after block 2", (final_depth <= N // 2).float().mean(), below=0.5)

# %% [markdown]
# ## Try
#
# - Change `text` and read the logit lens. After `"Once upon a time"` the prediction, a comma, is final from block 1;
#   after `"Sue had a friend named Ben. One day, Sue and"` it is final from block 3: `Ben`.
# - Remove `/ math.sqrt(D)` in `attend`: the first site that differs is `blocks.0.attn.scores`. [Notebook
#   2](02_attention.py) explains the division.
# - Remove the mask: the pattern of the first query changes most. The last token's activations change in later blocks
#   only, since all keys are visible to it in block 0 anyway.
#
# Exercises: `cutaway learn start 1` (attention by hand), `cutaway learn start 3` (head splitting),
# `cutaway learn start 4` (count the parameters of Q, K, V, O). The same steps as figures: `cutaway open`.
