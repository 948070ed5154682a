# %% [markdown]
# # 6. Decoder, encoder, encoder-decoder and their training objectives
#
# The same stack is used in three forms of Transformer: a decoder (causal), an encoder (bidirectional), and an
# encoder-decoder, whose decoder also attends to an encoder's output. This notebook counts the visible pairs of tokens
# in each, computes cross-attention by hand, shows the inputs, targets and loss weights of each objective, and trains
# each form on a small task for which the minimal loss is known. It then measures on trained models what the form makes
# possible: a masked word is predicted from the words after it, and each field of a date from its source tokens.
#
# Prerequisites: attention and masks ([notebook 2](02_attention.py)). The trained models are included in cutaway:
# `tiny-english` (a decoder) and `tiny-english-encoder` are trained on children's stories, and `tiny-dates` (an
# encoder-decoder) converts dates in words of 47 locales to ISO 8601.

# %%
import calendar
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import cutaway as ct
from cutaway.generate.fill_mask import fill_mask
from cutaway.learn import claim
from cutaway.learn.studies import load_results
from cutaway.learn.studies.mechanisms.encoder_prompts import VERB_OBJECTS  # verbs, and an object of each
from cutaway.lens.analysis import cached_decoding_error
from cutaway.train import objectives

english = ct.load("tiny-english", dtype=torch.float32)
english_encoder = ct.load("tiny-english-encoder", dtype=torch.float32)
dates = ct.load("tiny-dates", dtype=torch.float32)


def make_config(form, vocab_size):
    """Return the configuration of a small model of the given form: one block of 4 heads, learned positions."""
    block = {"attention": {"heads": 4}, "ffn": {"kind": "mlp"}}
    stack = {"layers": 1, "block": block, "embedding": {"position": {"kind": "learned", "length": 16}}}
    cross = {**stack, "block": {**block, "cross": {"heads": 4}}}
    stacks = {
        "decoder": {"decoder": stack},
        "encoder": {"encoder": stack},
        "encoder-decoder": {"encoder": stack, "decoder": cross},
    }
    return ct.config(
        {"form": form, "vocab_size": vocab_size, "d_model": 32, "init": {"kind": "xavier"}, **stacks[form]}
    )


# %% [markdown]
# ## Visible pairs in each form
#
# | form | self-attention | visible keys |
# |---|---|---|
# | decoder | causal | the query's own and earlier positions: $T(T+1)/2$ pairs |
# | encoder | bidirectional | all positions: $T^2$ pairs |
# | encoder-decoder | source bidirectional, target causal | cross-attention: all source positions, $T \cdot S$ pairs |
#
# The pairs are counted in the attention scores of the trained models: the score of a pair that is not visible is
# $-\infty$. The sentence has $T = 7$ tokens; the date has $S = 5$ source tokens and 7 target tokens.


# %%
def encode(checkpoint, text):
    """(1, T): the tokens of a text."""
    return torch.tensor([checkpoint.tokenizer.encode(text)])


def token_texts(checkpoint, tokens):
    """The text of each token, with a visible space if it is a space."""
    return [checkpoint.tokenizer.decode([token]).strip() or "␣" for token in tokens[0].tolist()]


sentence = "The cat sat on the mat."
tokens, encoder_tokens = encode(english, sentence), encode(english_encoder, sentence)  # (1, T) each
source, target = encode(dates, "12 Nisan 1832"), encode(dates, "<|bos|>1832-04-12")  # (1, S), (1, T)
T, S = tokens.shape[1], source.shape[1]
inputs = {
    "decoder": (english.model, (tokens,), "blocks.0.attn.scores"),
    "encoder": (english_encoder.model, (encoder_tokens,), "blocks.0.attn.scores"),
    "encoder-decoder": (dates.model, (source, target), "decoder.blocks.0.cross.scores"),
}
visible = {}
for form, (model, args, site) in inputs.items():
    with torch.no_grad(), ct.trace(model, site) as t:
        model(*args)
    visible[form] = t[site][0, 0] > -torch.inf  # one head, (queries, keys)
num_visible = {form: int(pairs.sum()) for form, pairs in visible.items()}
print(
    claim(
        "decoder: visible pairs in self-attention", num_visible["decoder"], predicted=T * (T + 1) / 2, rtol=0, id="C077"
    )
)
print(claim("encoder: visible pairs in self-attention", num_visible["encoder"], predicted=T * T, rtol=0, id="C077"))
claim(
    "encoder-decoder: visible pairs in cross-attention",
    num_visible["encoder-decoder"],
    predicted=T * S,
    rtol=0,
    id="C077",
)

# %%
figure, panels = plt.subplots(1, 3, figsize=(8, 3.2), layout="constrained")
words, fields = token_texts(english, tokens), token_texts(dates, source)
target_texts = ["<bos>", *token_texts(dates, target)[1:]]
titles = "self-attention of\na decoder", "self-attention of\nan encoder", "cross-attention of\nan encoder-decoder"
labels = (words, words), (words, words), (target_texts, fields)
for axes, title, pairs, (queries, keys) in zip(panels, titles, visible.values(), labels, strict=True):
    axes.imshow(pairs, cmap="Blues", vmin=0, vmax=1.4)
    axes.set_title(title, fontsize=9)
    axes.set_xticks(range(len(keys)), keys, rotation=60, fontsize=8)
    axes.set_yticks(range(len(queries)), queries, fontsize=8)
    axes.set(xlabel="key", ylabel="query")

# %% [markdown]
# ## Cross-attention by hand
#
# Queries are computed from the decoder's residual stream, keys and values from the encoder's output:
# $\text{softmax}(Q_\text{dec} K_\text{enc}^\top / \sqrt{d_\text{head}})\,V_\text{enc}$. There is no causal mask. The
# result is compared with the library's `cross.out` in the first decoder block of `tiny-dates`.

# %%
with torch.no_grad(), ct.trace(dates.model, "decoder.blocks.0.cross.in", "decoder.blocks.0.cross.out") as t:
    dates.model(source, target)
cross_in, cross_out = t["decoder.blocks.0.cross.in"], t["decoder.blocks.0.cross.out"]  # (1, T, 128)
cross = dates.model.decoder.blocks[0].cross.f


def split_heads(x):
    return x.unflatten(-1, (4, 32)).transpose(1, 2)  # (1, T, 128) → (1, 4 heads, T, 32)


with torch.no_grad():
    memory = dates.model.encode(source)  # (1, S, 128)
    q, k, v = split_heads(cross.q(cross_in)), split_heads(cross.k(memory)), split_heads(cross.v(memory))
    pattern = (q @ k.transpose(-1, -2) / math.sqrt(32)).softmax(-1)  # (1, 4, T, S)
    by_hand = cross.o((pattern @ v).transpose(1, 2).flatten(2))  # (1, T, 128)
difference = (by_hand - cross_out).abs().max()
claim("cross-attention by hand: largest difference from the library", difference, below=1e-5, id="C065")

# %% [markdown]
# ## Training objectives: inputs, targets, loss weights
#
# - **causal LM**: the target at position $t$ is token $t+1$: $T-1$ targets in a sequence of $T$ tokens;
# - **masked LM**: 15 % of the tokens are targets. Of these 80 % are replaced by the mask token, 10 % by a random token,
#   and 10 % are unchanged ([BERT](https://arxiv.org/abs/1810.04805)), so the model cannot rely on any input token being
#   correct;
# - **sequence to sequence**: next-token prediction on the target given the source; padding has loss weight 0.

# %%
rows = torch.randint(4, 1000, (64, 128), generator=torch.Generator().manual_seed(0))
task = objectives.masked_lm(rows, mask_id=3, vocab_size=1000, seed=0, positions=range(64))
[masked_rows], is_target = task.inputs, task.weights.bool()
print(claim("masked LM: share of tokens that are targets", is_target.float().mean(), predicted=0.15, rtol=0.1))
masked = (masked_rows[is_target] == 3).float().mean()
print(claim("masked LM: share of targets replaced by the mask token", masked, predicted=0.8, rtol=0.05))
unchanged = (masked_rows == rows)[is_target].float().mean()
print(claim("masked LM: share of targets that are unchanged", unchanged, predicted=0.1, rtol=0.3))

target_mask = torch.tensor([[True] * 6 + [False] * 2, [True] * 8])  # targets of 6 and 8 tokens
task = objectives.seq2seq(torch.arange(11).expand(2, -1), None, torch.arange(8).expand(2, -1), target_mask)
print(task.weights.int())
claim(
    "seq2seq: number of targets, all tokens but the first of each",
    task.weights.sum(),
    predicted=5 + 7,
    rtol=0,
    id="C080",
)

# %% [markdown]
# ## Decoder and encoder on the same data
#
# The data are sequences $a\; s\; b$ with $a, b$ uniform over $M = 5$ symbols and $s = a + b \bmod M$. A sequence has
# entropy $2 \ln M$ nats. The minimal losses are:
#
# - **decoder**: $\ln M$ for $a$; $\ln M$ for $s$, because $b$ is not visible; 0 for $b$ given $a$ and $s$;
# - **encoder** with one symbol masked: 0 for each, because the other two determine it. The three losses do not add up
#   to the entropy of a sequence: a masked-LM loss is not a likelihood.

# %%
M, BOS, MASK = 5, 5, 6
a, b = torch.cartesian_prod(torch.arange(M), torch.arange(M)).T
sequences = torch.stack([a, (a + b) % M, b], 1)  # (25, 3): all sequences


def train(model, compute_loss, steps, lr=1e-2):
    """Minimize `compute_loss()` and return the loss at each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = compute_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def decoder_losses():
    """(3,): loss of a, s and b; the inputs are BOS, a, s."""
    task = objectives.causal_lm(F.pad(sequences, (1, 0), value=BOS))
    return F.cross_entropy(decoder(*task.inputs).transpose(1, 2), task.targets, reduction="none").mean(0)


def encoder_losses():
    """(3,): loss of a, s and b; each is masked with the other two visible."""
    inputs = sequences.expand(3, 25, 3).clone()
    inputs[range(3), :, range(3)] = MASK
    logits = encoder(inputs.flatten(0, 1)).unflatten(0, (3, 25))[range(3), :, range(3)]  # (3 masked, 25, V)
    return F.cross_entropy(logits.transpose(1, 2), sequences.T, reduction="none").mean(1)


decoder, encoder = ct.build(make_config("decoder", 7), seed=0), ct.build(make_config("encoder", 7), seed=0)
train(decoder, lambda: decoder_losses().mean(), 100)
train(encoder, lambda: encoder_losses().mean(), 100)
with torch.no_grad():
    losses_by_form = {"decoder": decoder_losses(), "encoder": encoder_losses()}

# %%
uniform, (_, middle, last) = math.log(M), losses_by_form["decoder"]
print(claim("decoder: loss of s is ln 5", middle, predicted=uniform, rtol=0.05))
print(claim("decoder: loss of b, nats", last, below=0.1))
total = losses_by_form["decoder"].sum()
print(
    claim(
        "decoder: sum of the losses is the entropy of a sequence, 2·ln 5",
        total,
        predicted=2 * uniform,
        rtol=0.05,
        id="C243",
    )
)
print(claim("encoder: loss of s with a and b visible, nats", losses_by_form["encoder"][1], below=0.1))

figure, axes = plt.subplots(figsize=(6, 3))
for shift, (form, color) in enumerate((("decoder", "#0072b2"), ("encoder", "#d55e00"))):
    positions = [position + 0.36 * shift for position in range(3)]
    bars = axes.bar(positions, losses_by_form[form], width=0.34, color=color, label=form)
    axes.bar_label(bars, fmt="%.2f", fontsize=7)
axes.axhline(uniform, color="black", lw=0.7, ls=":")
axes.text(2.6, uniform, "ln 5", va="bottom", ha="right", fontsize=8)
axes.set_ylim(0, 1.9)
axes.set(
    xticks=[0.18, 1.18, 2.18],
    xticklabels=["a", "s = a + b mod 5", "b"],
    ylabel="loss, nats",
    title="Loss by position: b is not visible to a decoder at s",
)
axes.legend(fontsize=8, loc="center right")
figure.tight_layout()

# %% [markdown]
# ## The context on the right of a mask
#
# The same difference in English. In “The boy saw the [MASK] and kicked it.”, the verb that determines the masked noun
# is on its right. `tiny-english-encoder` fills the mask:

# %%
for text in (
    "The [MASK] sat on the mat.",
    "The boy saw the [MASK] and kicked it.",
    "The boy saw the [MASK] and read it.",
):
    [[fills]] = fill_mask(english_encoder.model, english_encoder.tokenizer, [text], top_k=3)
    print(text, "→", ", ".join(f"{fill.token.strip()} {fill.probability:.0%}" for fill in fills))

# %% [markdown]
# Twelve verbs each have an object that fits it better than the others. Predictions:
#
# - each object is more probable with its own verb than with the others. A prediction that ignores the right context has
#   a share of 1/12;
# - if the query at the mask has no attention to tokens on its right, the loss of the objects is larger by at least 2
#   nats;
# - with a causal mask in all blocks, the probabilities are the same for all verbs;
# - for a decoder, the next token after “The boy saw the” must be predicted without the verb. The loss of the objects is
#   at least 2 nats larger than in the encoder.

# %%
verb_rows = torch.cat(
    [encode(english_encoder, f"The boy saw the [MASK] and {verb} it.") for verb in VERB_OBJECTS]
)  # (12, T)
object_ids = torch.cat([encode(english_encoder, f" {noun}")[0] for noun in VERB_OBJECTS.values()])  # (12,)
mask_position = int((verb_rows[0] == english_encoder.tokenizer.mask_token_id).nonzero())


def object_log_probs(hidden_pairs=None):
    """(verbs, objects): log-probability of each object at the mask, without attention to the hidden pairs (T, T)."""
    edits = {"blocks.*.attn.scores": lambda scores: scores.masked_fill(hidden_pairs, -torch.inf)}
    with torch.no_grad():
        if hidden_pairs is None:
            logits = english_encoder.model(verb_rows)
        else:
            with ct.edit(english_encoder.model, edits):
                logits = english_encoder.model(verb_rows)
    return logits[:, mask_position].log_softmax(-1)[:, object_ids]


later = torch.ones(2 * verb_rows.shape[1:], dtype=torch.bool).triu(1)  # (T, T): keys after the query
at_mask = torch.zeros_like(later).index_fill(0, torch.tensor(mask_position), True)  # queries at the mask
both_sides, no_right, causal = object_log_probs(), object_log_probs(later & at_mask), object_log_probs(later)
with torch.no_grad():
    left_log_probs = english.model(encode(english, "The boy saw the"))[0, -1].log_softmax(-1)
decoder_ids = torch.cat([encode(english, f" {noun}")[0] for noun in VERB_OBJECTS.values()])

# %%
own_verb = (both_sides.argmax(0) == torch.arange(12)).float().mean()
print(claim("encoder: share of objects that are most probable with their own verb", own_verb, above=0.8))
losses = {
    "encoder": -both_sides.diagonal().mean(),
    "encoder, no attention from the mask to the right": -no_right.diagonal().mean(),
    "decoder": -left_log_probs[decoder_ids].mean(),
}
for name, loss in losses.items():
    print(f"mean loss of the objects, {name}: {loss:.2f} nats")
increases = {name: loss - losses["encoder"] for name, loss in losses.items()}
increase = increases["encoder, no attention from the mask to the right"]
print(claim("increase of the loss without attention to the right, nats", increase, above=2))
print(claim("causal mask: largest difference between verbs", (causal - causal[0]).abs().max(), below=1e-5))
claim("decoder: loss minus that of the encoder, nats", increases["decoder"], above=2)

# %%
figure, axes = plt.subplots(figsize=(5.6, 4.4), layout="constrained")
image = axes.imshow(both_sides - both_sides.mean(0), cmap="RdBu", vmin=-7, vmax=7)
axes.set_xticks(range(12), VERB_OBJECTS.values(), rotation=60)
axes.set_yticks(range(12), VERB_OBJECTS)
axes.set(xlabel="object at the mask", ylabel="verb on the right")
axes.set_title("“The boy saw the [MASK] and VERB it.”", fontsize=10)
figure.colorbar(image, ax=axes, shrink=0.8, label="log-probability at the mask\nminus its mean over verbs, nats")

# %% [markdown]
# ## An encoder-decoder with label smoothing
#
# The target is the reversed source: six symbols of eight. Without the source the minimal loss is $\ln 8$ per symbol;
# with the source it is 0. With *label smoothing* $\varepsilon$ the target distribution is
# $1 - \varepsilon + \varepsilon/V$ for the correct token and $\varepsilon/V$ for each other one, and the minimal
# cross-entropy is the entropy of that distribution:
#
# $$-\Big(1-\varepsilon+\frac{\varepsilon}{V}\Big)\ln\Big(1-\varepsilon+\frac{\varepsilon}{V}\Big)
# - (V-1)\,\frac{\varepsilon}{V}\ln\frac{\varepsilon}{V}.$$
#
# At this minimum the loss without smoothing is $-\ln(1-\varepsilon+\varepsilon/V)$.

# %%
K, N, START, label_smoothing = 8, 6, 8, 0.1
V, generator = K + 1, torch.Generator().manual_seed(0)
reverser = ct.build(make_config("encoder-decoder", V), seed=0)


def sample_task(count):
    source = torch.randint(K, (count, N), generator=generator)
    return objectives.seq2seq(source, None, F.pad(source.flip(1), (1, 0), value=START), None)


def smoothed_loss():
    result = sample_task(64).loss(reverser, objectives.CrossEntropyOptions(label_smoothing=label_smoothing))
    return result.loss / result.weight


training_losses = train(reverser, smoothed_loss, 140)
with torch.no_grad():
    task = sample_task(256)
    result = task.loss(reverser, objectives.CrossEntropyOptions(label_smoothing=label_smoothing))

# %%
correct_prob = 1 - label_smoothing + label_smoothing / V
minimum = -correct_prob * math.log(correct_prob) - (V - 1) * label_smoothing / V * math.log(label_smoothing / V)
smoothed, plain = (result.loss / result.weight).item(), (result.cross_entropy / result.weight).item()
print(claim("smoothed loss after training is the smoothed target's entropy", smoothed, predicted=minimum, rtol=0.03))
print(claim("plain loss after training is −ln(1 − ε + ε/V)", plain, predicted=-math.log(correct_prob), rtol=0.1))
with torch.no_grad(), ct.edit(reverser, {"decoder.blocks.0.cross.out": "zero"}):
    ablated = task.loss(reverser)
ablated_loss = (ablated.loss / ablated.weight).item()
claim("loss with cross.out set to zero is above ln 8", ablated_loss, above=math.log(K))

# %% [markdown]
# Output symbol $t$ is source symbol $N - 1 - t$. Two things are measured: where cross-attention has its weight, and
# which output symbols change when one source symbol is replaced. The second measures dependence and must be the
# anti-diagonal: replacing the needed symbol changes the output, replacing another symbol rarely does.

# %%
symbols, prefix = task.inputs[:2]
with torch.no_grad(), ct.trace(reverser, "decoder.blocks.0.cross.pattern") as t:
    predictions = reverser(symbols, prefix).argmax(-1)  # (256, N)
attention = t["decoder.blocks.0.cross.pattern"].mean((0, 1))  # mean over sequences and heads, (N, N)

change_rate = torch.zeros(N, N)  # (output position, source position)
for position in range(N):
    replaced = symbols.clone()
    replaced[:, position] = (replaced[:, position] + 1) % K
    with torch.no_grad():
        change_rate[:, position] = (reverser(replaced, prefix).argmax(-1) != predictions).float().mean(0)
needed = torch.eye(N).flip(1).bool()
print(claim("needed source symbol replaced: share of outputs that change", change_rate[needed].mean(), above=0.97))
claim("another source symbol replaced: share of outputs that change", change_rate[~needed].mean(), below=0.1)

# %%
figure, (curve, *heatmaps) = plt.subplots(1, 3, figsize=(8, 2.8), width_ratios=(1.5, 1, 1), layout="constrained")
curve.plot(training_losses, color="#0072b2")
for level, name in ((math.log(K), "without source: ln 8"), (minimum, "minimum with smoothing")):
    curve.axhline(level, color="black", lw=0.7, ls=":")
    curve.text(len(training_losses), level + 0.03, name, ha="right", va="bottom", fontsize=7)
curve.set(xlabel="step", ylabel="smoothed loss, nats per token", ylim=(0, None))
curve.set_title("Training loss and predicted minimum", fontsize=9)
titles = ("Cross-attention weight", "Outputs that change")
for axes, values, title in zip(heatmaps, (attention, change_rate), titles, strict=True):
    image = axes.imshow(values, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="source position")
    axes.set_title(title, fontsize=9)
heatmaps[0].set_ylabel("output position")
figure.colorbar(image, ax=heatmaps, shrink=0.7, label="share")

# %% [markdown]
# The two measurements agree for this seed, but this need not be so: the encoder's self-attention can move information
# to other positions, from which cross-attention reads it. This happens with seed 1 for weights and data, with the same
# loss. An attention pattern shows which vectors are averaged; replacing an input shows what the output depends on.

# %% [markdown]
# ## Alignment in a trained encoder-decoder
#
# `tiny-dates` converts dates in many languages:

# %%
for text in ("12 Nisan 1832", "12 avril 1832", "12 kwietnia 1832", "12. April 1832", "the 12th of April 1832"):
    [completion] = ct.generate(dates, text, max_new_tokens=12)
    print(text, "→", completion.text)

# %% [markdown]
# The target `1832-04-12` has the tokens `183`, `2`, `-`, `04`, `-`, `12`. Three measurements are made for the twelve
# dates “12 January 1832” to “12 December 1832”, whose source tokens are the day, the month, a space and two tokens of
# the year. Predictions:
#
# - *attention*: at the positions that generate a field, the largest cross-attention weight in decoder block 1 is on the
#   source tokens of this field;
# - *dependence*: if one field of the source is replaced, the tokens of this field change, and no others;
# - *intervention*: if all cross-attention scores at the month's source token are set to $-\infty$, the month is not
#   predicted better than by chance (1 of 12), while year and day are correct.

# %%
months = calendar.month_name[1:]
sources = torch.cat([encode(dates, f"12 {month} 1832") for month in months])  # (12, 5)
targets = torch.cat([encode(dates, f"<|bos|>1832-{number:02}-12") for number in range(1, 13)])  # (12, 7)
source_tokens = {"day": [0], "month": [1], "year": [3, 4]}
generated_at = {"day": [5], "month": [3], "year": [0, 1]}  # positions of the decoder's input that generate the field
with torch.no_grad(), ct.trace(dates.model, "decoder.blocks.1.cross.pattern") as t:
    date_predictions = dates.model(sources, targets).argmax(-1)  # (12, 7)
date_attention = t["decoder.blocks.1.cross.pattern"].mean(1)  # mean over heads, (12, 7, 5)
correct = (date_predictions[:, :-1] == targets[:, 1:]).float().mean()
print(claim("share of predicted tokens that are correct", correct, above=0.95))
for field, positions in generated_at.items():
    largest = date_attention.argmax(-1)[:, positions]  # (12, positions)
    aligned = torch.isin(largest, torch.tensor(source_tokens[field])).float().mean()
    print(claim(f"{field}: share of tokens with the largest weight on this field", aligned, above=0.9))

# %%
other_months = [*months[1:], months[0]]
replaced_sources = {
    "day": [f"25 {month} 1832" for month in months],
    "month": [f"12 {month} 1832" for month in other_months],
    "year": [f"12 {month} 1975" for month in months],
}
change_by_field = torch.zeros(7, 3)  # (position, replaced field)
with torch.no_grad():
    for column, texts in enumerate(replaced_sources.values()):
        changed = dates.model(torch.cat([encode(dates, text) for text in texts]), targets).argmax(-1)
        change_by_field[:, column] = (changed != date_predictions).float().mean(0)
own_field = torch.zeros(7, 3, dtype=torch.bool)
for column, field in enumerate(replaced_sources):
    own_field[generated_at[field], column] = True
print(claim("own field replaced: share of tokens that change", change_by_field[own_field].mean(), above=0.9))
print(claim("another field replaced: share of tokens that change", change_by_field[~own_field].mean(), below=0.05))


def hide_month(scores):  # (B, H, T, S)
    scores[..., source_tokens["month"]] = -torch.inf
    return scores


with torch.no_grad(), ct.edit(dates.model, {"decoder.blocks.*.cross.scores": hide_month}):
    without_month = dates.model(sources, targets).argmax(-1)
is_correct = without_month[:, :-1] == targets[:, 1:]  # (12, 6)
for field, positions in generated_at.items():
    limits = {"below": 0.25} if field == "month" else {"above": 0.9}
    correct = is_correct[:, positions].float().mean()
    print(claim(f"without attention to the month: share of {field} tokens that are correct", correct, **limits))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.4), layout="constrained")
generated = [*token_texts(dates, target)[1:], "<eos>"]
with torch.no_grad(), ct.trace(dates.model, "decoder.blocks.1.cross.pattern") as t:
    dates.model(source, target)
left.imshow(t["decoder.blocks.1.cross.pattern"][0].mean(0), cmap="Blues", vmin=0, vmax=1, aspect="auto")
left.set_xticks(range(S), fields)
left.set_title("Cross-attention weight, “12 Nisan 1832”", fontsize=9)
left.set(xlabel="source token", ylabel="generated token")
image = right.imshow(change_by_field, cmap="Blues", vmin=0, vmax=1, aspect="auto")
right.set_xticks(range(3), replaced_sources)
right.set_title("Outputs that change, twelve months", fontsize=9)
right.set(xlabel="replaced field of the source")
for axes in (left, right):
    axes.set_yticks(range(7), generated)
figure.colorbar(image, ax=(left, right), shrink=0.8, label="share")

# %% [markdown]
# In this model all three measurements agree. More dates, languages and interventions are in the study `mechanisms`
# (`cutaway learn study mechanisms`).

# %% [markdown]
# ## Teacher forcing equals cached decoding
#
# Training computes all target positions in one forward pass, because the previous tokens are known (*teacher
# forcing*). Decoding computes one position per step with a KV cache. Under a causal mask both compute the same
# function. In exact arithmetic the logits are equal; in float32 they differ by rounding, about $10^{-7}$ of the largest
# logit times a small factor.

# %%
decoder_error = cached_decoding_error(english, "Once upon a time, there was a little girl named Lily.")
date_error = cached_decoding_error(dates, target, source=source)
print(decoder_error.note)
print(
    claim(
        "decoder: one pass against cached decoding, largest difference",
        decoder_error.values.max(),
        below=1e-4,
        id="C181",
    )
)
claim("encoder-decoder: one pass against cached decoding", date_error.values.max(), below=1e-4, id="C180")

# %% [markdown]
# An encoder cannot be decoded step by step: each position attends to later ones. If the last token of “The cat sat on
# the mat.” is replaced by an exclamation mark, the outputs of the encoder change at all positions, and those of the
# decoder at no earlier position.

# %%
num_changed = {}
with torch.no_grad():
    for form, checkpoint in (("decoder", english), ("encoder", english_encoder)):
        rows = torch.cat([encode(checkpoint, sentence), encode(checkpoint, sentence.replace(".", "!"))])  # (2, T)
        logits = checkpoint.model(rows)
        change = (logits[1] - logits[0])[:-1].abs().amax(-1)  # (T − 1,)
        num_changed[form] = int((change > 1e-3).sum())
print(
    claim(
        "decoder: earlier positions that change with the last token",
        num_changed["decoder"],
        predicted=0,
        rtol=0,
        id="C078",
    )
)
claim(
    "encoder: earlier positions that change with the last token",
    num_changed["encoder"],
    predicted=T - 1,
    rtol=0,
    id="C256",
)

# %% [markdown]
# ## Why decoder-only? Three forms at an equal budget
#
# The study `forms` trains a decoder, a decoder with a bidirectional prefix and an encoder-decoder with equal
# parameters and equal sequences, ten seeds each, on three tasks: *text*, where the second half of a window is
# predicted; *translate*, a reversal with a dictionary; and *sort*. The figure shows the loss minus that of the decoder.
#
# On text the decoder is better: each token of a window is a target, while the other forms learn from the second half
# only. On *translate* the forms are nearly equal. In *sort*, the source tokens of a decoder cannot be compared with
# later ones, and forms with a bidirectional source learn faster. Here decoders are favored by the data rather than by
# the architecture: text has no source, and all of it is a target.

# %%
study = load_results("forms")
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
for shift, (form, color) in zip((-0.15, 0.15), (("prefix", "#E69F00"), ("encoder-decoder", "#0072B2")), strict=True):
    for place, task in enumerate(("text", "translate", "sort")):
        difference = study.get(f"difference/{task}/{form}-decoder")
        errors = [[difference.mean - difference.low], [difference.high - difference.mean]]
        label = form if place == 0 else None
        axes.bar(place + shift, difference.mean, width=0.28, yerr=errors, color=color, label=label, capsize=3)
axes.axhline(0, color="black", lw=0.8)
axes.set_xticks(range(3), ("text", "translate", "sort"))
axes.set(ylabel="loss − decoder's, nats", title="Equal parameters and sequences, 10 seeds")
axes.legend(fontsize=8, frameon=False)

# %%
text, sort = (study.get(f"difference/{task}/encoder-decoder-decoder") for task in ("text", "sort"))
parameters = [study.get(f"parameters/sort/{form}").mean for form in ("decoder", "encoder-decoder")]
print(claim("parameters: encoder-decoder / decoder", parameters[1] / parameters[0], predicted=1, rtol=0.01, id="C260"))
print(claim("text: encoder-decoder − decoder, nats per byte", text.low, above=0, id="C260"))
claim("sort: encoder-decoder − decoder, nats per token", sort.high, below=0, id="C260")

# %% [markdown]
# ## Try
#
# - Order the symbols $a\; b\; s$ in `sequences`: the decoder's loss for $s$ becomes 0.
# - Set `label_smoothing = 0.0`: the minimum is 0, and the loss keeps decreasing. By how many nats does smoothing
#   increase the final loss?
# - Make the target the sorted source: what should the cross-attention pattern be?
# - Use dates in other languages in `sources`, such as “12 Nisan 1832”. A month of several tokens needs other positions
#   in `source_tokens`.
#
# Exercises 2 (`cutaway learn start 2`, causal mask) and 9 (name the mask). The trained models as figures: `cutaway open
# tiny-english-encoder`, `cutaway open tiny-dates`.
# Previous: [5. Gradients](05_gradients.py). Next: [7. Information](07_information.py).
