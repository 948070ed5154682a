# %% [markdown]
# # 10. Analyzing a trained model: logit lens, attribution, patching, ablation
#
# The residual stream is a sum of sublayer outputs. So the contribution of each sublayer to a logit is well defined, the
# residual stream can be decoded after any block, and components can be ablated or replaced by activations of another
# run. This notebook applies each method to `tiny-english`, a model of children's stories, with a prediction. Activation
# patching finds the heads that copy a name from one sentence of a story to another.
#
# Prerequisites: attention ([notebook 2](02_attention.py)), the residual stream ([notebook
# 4](04_ffn_norms_residuals.py)). `docs/mechanisms.md` measures more mechanisms of the same model, each on many prompts.

# %%
import json
import math
import random
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import cutaway as ct
from cutaway.learn import claim
from cutaway.lens import analysis
from cutaway.pretrained import ABLATIONS_FILE

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
checkpoint = ct.load("tiny-english", dtype=torch.float32)
model, tokenizer = checkpoint.model, checkpoint.tokenizer
untrained = ct.build(checkpoint.config, seed=0, dtype=torch.float32)  # the same configuration, random weights
story = """Once upon a time, there was a little girl named Sue. She had a red ball and a friend named Ben. One day, they
went to the park to play. Sue threw the ball to Ben, but it fell into the water. "Oh no!" said Sue. "My ball is gone!"
Ben was not afraid. He took a long stick and pulled the ball out of the water. "Thank you, Ben," said Sue. She was very
happy, and they played until the sun went down."""
story = story.replace("\n", " ")
tokens = torch.tensor([tokenizer.encode(story)])  # (1, T)

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
norm_ratios = analysis.update_norm_ratios(checkpoint, story).values.mean(1)  # (sublayer,), mean over tokens
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
panels[0].plot(analysis.resid_norms(checkpoint, story).values.mean(1), "o-", color=BLUE)
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
# the final one should increase with every block. The last line is the prediction at one position, after "Sue and", in a
# story in which Sue has a friend named Ben.

# %%
lens = analysis.logit_lens(checkpoint, story)  # (depth, token), annotated with the predicted token
input_tokens = lens.labels[1]
itself = sum(a == b for a, b in zip(lens.annotations[0], input_tokens, strict=True)) / len(input_tokens)
agreement = [float((row == lens.annotations[-1]).mean()) for row in lens.annotations]
print([round(share, 2) for share in agreement])
print(claim("embedding: share of positions where the prediction is the input token", itself, above=0.95))
smallest_increase = min(b - a for a, b in pairwise(agreement))
print(claim("smallest increase of agreement with the final prediction per block", smallest_increase, above=0))
template = (
    "Once upon a time, there was a girl named Sue. She had a friend named {}. They liked to play. One day, Sue and"
)
after_and = analysis.logit_lens(checkpoint, template.format("Ben")).annotations[:, -1]
print("after 'Sue and', from the embedding to block 5:", [str(token) for token in after_and])

# %% [markdown]
# ## Direct logit attribution
#
# The example is a name that occurs in one sentence and is predicted in a later one:

# %%
clean, corrupted = template.format("Ben"), template.format("Tom")
with torch.no_grad():
    last_logits = model(torch.tensor([tokenizer.encode(clean)]))[0, -1]
for prob, token in zip(*last_logits.softmax(-1).topk(3), strict=True):
    print(f"{tokenizer.decode([int(token)])!r}: {float(prob):.3f}")

# %% [markdown]
# The final norm divides the residual stream of a token by one number; with that number held fixed, a logit is linear in
# the residual stream, so it is a sum of contributions of the sublayers. The same holds for the *logit difference* of
# ` Ben` and ` Tom`. The embedding of ` and` does not depend on the name, and FFNs process each token independently:
# information about the name reaches the last position through attention only. Prediction: attention has more than 0.8
# of the logit difference. (An FFN can amplify what attention has moved, so the share need not be 1.)

# %%
contributions = analysis.direct_logit_attribution(checkpoint, clean, " Ben", incorrect_token=" Tom")
ben_id, tom_id = (tokenizer.encode(name)[-1] for name in (" Ben", " Tom"))
logit_difference = float(last_logits[ben_id] - last_logits[tom_id])
print(contributions)
total = contributions.values.sum()
print(claim("contributions sum to the logit difference", total, predicted=logit_difference, rtol=1e-4, id="C273"))
attention_share = sum(float(contributions[f"{layer}.attn"]) for layer in range(6)) / logit_difference
claim("share of attention in the logit difference", attention_share, above=0.8)

# %% [markdown]
# ## Attention entropy
#
# Uniform attention at position $t$ has an entropy of $\log_2 t$ bits. The average over $T$ tokens is
#
# $$\frac1T \sum_{t=1}^{T} \log_2 t = \frac{\log_2 T!}{T}.$$
#
# Before training scores are close to 0, so the entropy of every head should be close to this value. After training the
# entropy of all heads should be below it, and that of at least one head by more than 40 %.

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
claim("trained: smallest entropy / uniform", entropies["trained"].min() / uniform_entropy, below=0.6)

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
# control. Prediction: the score falls below 40 % of its value when the previous-token head is ablated, and stays above
# 90 % when a head is ablated that is not a previous-token head (score below 0.5).


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
previous_scores = head_scores.select(head_type="previous_token").values[int(previous_head[0])]  # (head,)
controls = [share for share, score in zip(remaining, previous_scores, strict=True) if score < 0.5]
print("previous-token score:    ", *(f"{score:.2f}" for score in previous_scores))
print("remaining induction score", *(f"{share:.2f}" for share in remaining))
print(
    claim(
        "previous-token head ablated: remaining induction score", remaining[int(previous_head[1])], below=0.4, id="C270"
    )
)
claim(f"one of {len(controls)} other heads ablated: smallest remaining score", min(controls), above=0.9)

# %% [markdown]
# Block 2 has a second previous-token head, and its ablation has a small effect too.
#
# Do these heads copy words? Stories hardly repeat a sequence word by word, but 1 % of the training text is lists of
# random words that are written several times, one repetition per line. Predictions for lists of 12 words: the loss of
# the repetition is below a fifth of the loss of the first line, and without the previous-token head it is more than
# twice as high. An induction head attends by content, so a space instead of the newline between the repetitions should
# make no difference.

# %%
vocabulary = """always answer apple behind brave break bring busy climb cold dark early empty fast follow garden gentle
high hungry kitchen listen loud maybe morning never open paper quiet rain remember river sharp sing slow
small soft sugar teach thick thunder town under warm whisper window wood yellow"""
lines = [" ".join(random.Random(seed).sample(vocabulary.split(), 12)) for seed in range(16)]


@torch.no_grad()
def measure_repetition(separator):
    """Loss of the first and second repetition, and attention of the induction head to its target in the second."""
    results = []
    for line in lines:
        first_line, ids = tokenizer.encode(line), torch.tensor(tokenizer.encode(line + separator + line))
        with ct.trace(model, f"blocks.{induction_head[0]}.attn.pattern", heads=int(induction_head[1])) as t:
            loss = F.cross_entropy(model(ids[None])[0, :-1], ids[1:], reduction="none")
        pattern = t[f"blocks.{induction_head[0]}.attn.pattern"][0, 0]  # (T, T)
        period = len(ids) - len(first_line)
        results.append([loss[:11].mean(), loss[-11:].mean(), pattern.diagonal(1 - period)[-12:-1].mean()])
    return torch.tensor(results).mean(0).tolist()


without_previous = {f"blocks.{previous_head[0]}.attn.z": {"do": "zero", "heads": [int(previous_head[1])]}}
first, second, attention = measure_repetition("\n")
with ct.edit(checkpoint, without_previous):
    _, second_ablated, _ = measure_repetition("\n")
_, second_after_space, attention_after_space = measure_repetition(" ")
print(f"first line {first:.2f} nats per token, for example: {lines[0]}")
print(f"second line {second:.2f}, without the previous-token head {second_ablated:.2f}")
print(f"second repetition after a space instead of a newline: {second_after_space:.2f}")
print(f"attention to the target: {attention:.2f} after a newline, {attention_after_space:.2f} after a space")
print(claim("loss of the second line / first line", second / first, below=0.2))
print(claim("the same without the previous-token head / with it", second_ablated / second, above=2))
claim("loss of the repetition after a space / first line", second_after_space / first, above=0.9)

# %% [markdown]
# The last prediction failed. After a space, the head still has a third of its attention weight on the word that comes
# next, but the loss is as high as without a repetition: the model copies only after a newline, as in the lists of its
# training text. An attention pattern alone does not show the effect of a head.

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
# For the story about Sue and her friend: run the text with `Tom`, replace one activation by its value from the run with
# `Ben`, and measure the share of the logit difference that is restored (1 means all of it). Attribution shows that
# attention in blocks 3 to 5 adds the name. So patching the residual stream before block 3 at the name's own token
# should restore everything, and patching it before block 5 at the last token should restore a part.
#
# Is the head with the largest restored share an induction head? The last token, ` and`, does not occur earlier, and
# ` Sue` is not followed by the name. So it should not be: its induction score should be close to that of uniform
# attention.

# %%
pair = {"clean": clean, "corrupted": corrupted, "answer_token": " Ben", "incorrect_token": " Tom"}
resid_patching = analysis.activation_patching(checkpoint, **pair, site="resid_pre")  # (layer, token)
head_patching = analysis.activation_patching(checkpoint, **pair, site="attn.z", by_head=True)  # (layer, head)
name_position = next(index for index, token in enumerate(resid_patching.labels[1]) if "Ben" in token)
at_name = resid_patching.values[3, name_position]
print(claim("name's token, before block 3: restored share", at_name, predicted=1, rtol=0.1))
print(claim("last token, before block 5: restored share", resid_patching.values[5, -1], above=0.3))
(best_head, restored), (second_head, second_restored), *_ = head_patching.top(2)
print("heads with the largest restored shares: block {}, head {}".format(*best_head), f"({restored:.2f}),", end=" ")
print("block {}, head {}".format(*second_head), f"({second_restored:.2f})")
score = float(head_scores[best_head[0], best_head[1], "induction"])
claim("induction score of the first / uniform", score / uniform, below=2)

# %% [markdown]
# A head that copies the name must attend to it: at the last token, ` and`, more than half of its attention weight
# should be on ` Ben`. Is this sufficient? A head can attend to the name and write something else, so a head with such a
# weight and almost no effect on the answer may exist.

# %%
with torch.no_grad(), ct.trace(model, "attn.pattern", positions=-1) as t:
    model(torch.tensor([tokenizer.encode(clean)]))
attention_to_name = torch.stack(
    [t[f"blocks.{layer}.attn.pattern"][0, :, 0, name_position] for layer in range(6)]
)  # (layer, head)
best_attention = float(attention_to_name[int(best_head[0]), int(best_head[1])])
print(claim("attention weight of that head on the name", best_attention, above=0.5))
claim(
    "among heads with such a weight: smallest restored share",
    head_patching.values[attention_to_name > 0.5].min(),
    below=0.1,
)

# %% [markdown]
# One head attends to the name and has almost no effect: attention is necessary for copying, and not sufficient.
#
# Two interventions on the story with `Ben` follow. The first replaces the residual stream of ` Ben` before block 3 by
# that of ` Tom`: the text names Ben, and the answer should be Tom. The second ablates the heads. Patching found two
# heads, and each of them copies the name; so the answer should stay Ben without one of them, and change without both.


# %%
def top_tokens(text, edits):
    """The three most probable next tokens after a text, with their probabilities."""
    with torch.no_grad(), ct.edit(checkpoint, edits):
        probs = model(torch.tensor([tokenizer.encode(text)]))[0, -1].softmax(-1)
    return {tokenizer.decode([int(token)]): round(float(prob), 3) for prob, token in zip(*probs.topk(3), strict=True)}


with torch.no_grad(), ct.trace(model, "blocks.3.resid_pre") as t:
    model(torch.tensor([tokenizer.encode(corrupted)]))
tom = t["blocks.3.resid_pre"][0, name_position]
replace_name = {"do": "replace", "value": tom, "positions": [name_position]}
patched = top_tokens(clean, {"blocks.3.resid_pre": replace_name})
print("residual stream of Tom:", patched)
print(claim("probability of Tom", patched.get(" Tom", 0), above=0.9))
zero_heads = {
    f"blocks.{layer}.attn.z": {"do": "zero", "heads": [int(head)]} for layer, head in (best_head, second_head)
}
one_ablated = [top_tokens(clean, {site: edit}) for site, edit in zero_heads.items()]
both_ablated = top_tokens(clean, zero_heads)
print("without one head:", *one_ablated)
print("without both:", both_ablated)
print(claim("without one head: smallest probability of Ben", min(top[" Ben"] for top in one_ablated), above=0.8))
claim("without both: probability of Ben", both_ablated.get(" Ben", 0), below=0.5)

# %%
figure, panels = plt.subplots(1, 2, figsize=(7.2, 3.2), gridspec_kw={"width_ratios": [1.5, 1]})
first = name_position - 2
image = panels[0].imshow(resid_patching.values[:, first:], cmap="viridis", vmin=0, vmax=1, aspect="auto")
token_labels = [token.replace("\n", "↵").replace(" ", "·") for token in resid_patching.labels[1][first:]]
panels[0].set_xticks(range(len(token_labels)), token_labels, rotation=60, ha="right")
panels[0].set(ylabel="before block", title="Patching the residual stream")
figure.colorbar(image, ax=panels[0], label="restored logit difference")
panels[1].scatter(attention_to_name, head_patching.values, s=14, color=BLUE)
for (layer, head), share in head_patching.top(2):
    panels[1].annotate(
        f"block {layer}, head {head}",
        (attention_to_name[int(layer), int(head)], share),
        (-8, 0),
        textcoords="offset points",
        ha="right",
        va="center",
    )
panels[1].set(
    xlabel="attention weight on the name",
    ylabel="restored logit difference",
    title="Patching one head",
    ylim=(-0.1, 0.75),
)
figure.tight_layout()

# %% [markdown]
# ## Steering
#
# The residual stream may encode a property as a direction. The difference of its values after "happy" and "sad", mean
# of four pairs of sentences, is added before block 4 at the last token of six other texts, or subtracted ([Turner et
# al. 2023](https://arxiv.org/abs/2308.10248)). Prediction: the logit difference of ` happy` and ` sad` increases or
# decreases by more than 2 in every text. The control is a random vector of the same norm: its effect should be less
# than half of this.

# %%
sentences = ["The girl was very {}", "Tom felt {}", "They were so {}", "Lily was {}"]
texts = [
    "Tom looked at the box. He felt very",
    "When Mom came home, she was",
    "Ben opened the letter. He looked",
    "The little bird saw the snow and was",
    "Anna went to school. She felt",
    "The king sat down. He was very",
]
site = "blocks.4.resid_pre"


def last_resid(text):
    with torch.no_grad(), ct.trace(model, site) as t:
        model(torch.tensor([tokenizer.encode(text)]))
    return t[site][0, -1].as_subclass(torch.Tensor)


def happy_minus_sad(vector):
    """(text,): logit difference after each text, with a vector added at its last token."""
    happy, sad = (tokenizer.encode(word)[-1] for word in (" happy", " sad"))
    with torch.no_grad(), ct.edit(checkpoint, {site: {"do": "add", "value": vector, "positions": [-1]}}):
        logits = torch.stack([model(torch.tensor([tokenizer.encode(text)]))[0, -1] for text in texts])
    return logits[:, happy] - logits[:, sad]


differences = [last_resid(each.format("happy")) - last_resid(each.format("sad")) for each in sentences]
direction = torch.stack(differences).mean(0)  # (d,)
random_vector = F.normalize(torch.randn(256, generator=torch.Generator().manual_seed(0)), dim=0) * direction.norm()
unchanged = happy_minus_sad(torch.zeros(256))
for sign, name in ((1, "happy"), (-1, "sad")):
    edit = {"do": "add", "value": sign * direction, "positions": [-1]}
    print(f"{texts[-1]} … (steered to {name})", top_tokens(texts[-1], {site: edit}))
added, subtracted = happy_minus_sad(direction) - unchanged, unchanged - happy_minus_sad(-direction)
random_effect = (happy_minus_sad(random_vector) - unchanged).abs()
print(f"mean effect: added {added.mean():.2f}, subtracted {subtracted.mean():.2f}, random {random_effect.mean():.2f}")
print(claim("smallest effect on a text, added or subtracted", torch.minimum(added, subtracted).min(), above=2))
ratio = random_effect.mean() / torch.minimum(added, subtracted).mean()
claim("mean effect of a random vector / of the direction", ratio, below=0.5)

# %% [markdown]
# ## Ablation of a trained model
#
# Predictions for removing a component from the trained model:
#
# - **A middle block**: the outputs of its sublayers have about half of the norm of the residual stream, and later
#   blocks still get most of their input, so the loss should increase by less than 1 nat on average. **Block 0**: its
#   outputs have several times the norm of the embedding, so the increase should be much larger.
# - **The order** of attention and FFN within a block: if they are swapped, the input of each differs by one of many
#   updates, so the increase should be small relative to that without the block.
# - **The final norm** divides each token's residual stream by its RMS and multiplies it by gains. With equal gains, the
#   logits without it are those with it times RMS$(x)$ / gain, one factor per token: the ranking of tokens stays, the
#   probabilities change. Prediction: this factor, with the mean of the gains, explains most of the loss increase, and
#   most of the top 5 stay.
# - **The mask**: later tokens become visible, including the target. The loss should still *increase*, because the model
#   was not trained with visible later tokens.
# - **Positions**: without RoPE's rotation, scores do not depend on the distance between query and key, so the loss
#   should increase.

# %%
ablation = analysis.ablation(checkpoint, story)
baseline = float(ablation["baseline", "loss"])
rms = final_resid[0].pow(2).mean(-1, keepdim=True).sqrt()  # (T, 1)
gain = model.stacks["decoder"].final_norm.weight.detach()
predicted_loss = float(F.cross_entropy((logits * rms / gain.mean())[:-1], tokens[0, 1:]))


def loss_increase(condition):
    return float(ablation[condition, "loss"]) - baseline


middle_blocks = [loss_increase(f"without block {layer}") for layer in (1, 2, 3, 4)]
print(f"loss of the unchanged model: {baseline:.3f} nats per token")

# %%
mean_increase = sum(middle_blocks) / 4
print("without block 1, 2, 3, 4:", *(f"{increase:.2f}" for increase in middle_blocks))
print(claim("without a middle block: mean loss increase, nats per token", mean_increase, above=0, below=1, id="C127"))
ratio = loss_increase("without block 0") / max(middle_blocks)
print(claim("loss increase without block 0 / largest of a middle block", ratio, above=5, id="C127"))
without_norm = loss_increase("without the final norm")
print(f"without the final norm: loss increase {without_norm:.2f}, by the factor alone {predicted_loss - baseline:.2f}")
explained = (predicted_loss - baseline) / without_norm
print(
    claim("without the final norm: share of the factor in the loss increase", explained, above=0.5, below=1, id="C119")
)
overlap = ablation["without the final norm", "top-5 overlap"].values
print(claim("without the final norm: share of the top 5 that stays", overlap, above=0.7, id="C119"))
print(claim("without the mask: loss increase", loss_increase("without the mask"), above=0.3))
print(claim("without positions: loss increase", loss_increase("without positions"), above=0.3))
swapped = loss_increase("FFN before attention in block 3") / loss_increase("without block 3")
claim("block 3: loss increase with FFN before attention / without the block", swapped, below=0.3)

# %% [markdown]
# The factor does not explain all of the increase, because the gains are not equal. A few dimensions of the residual
# stream have much larger values than the others, and their gains are small:

# %%
small = gain < 1
share = final_resid[0][:, small].square().sum() / final_resid.square().sum()
print(f"gains: mean {gain.mean():.2f}, smallest {gain.min():.2f}; {int(small.sum())} of 256 are below 1")
claim("share of the squared norm in the dimensions with a gain below 1", share, above=0.2)

# %% [markdown]
# Are heads redundant? If their effects were independent, ablating all heads would cost the sum of the single
# ablations; if heads can replace each other, it costs more.

# %%
single_heads = analysis.head_ablation(checkpoint, story)  # (layer, head): loss increase
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
axes.set(xlabel="loss, nats per token", title="Loss after ablation", xlim=(0, 16.5))
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
# - Swap `Ben` and `Tom`: use the text with `Tom` as the clean one. The same head should have the largest restored
#   share.
# - Use mean ablation instead of zero ablation (`{"do": "mean", "heads": [7]}`). For a head whose mean output carries
#   information the effect is smaller; for the previous-token head it should be about the same.
# - Insert a sentence of ten words before "One day". The heads that copy the name attend by content, not by distance:
#   the attention weight should change little.
#
# Exercise: `cutaway learn start 1` (attention by hand). On the web page (`cutaway open tiny-english`), the screen
# *Edit* ablates components, and the screen *Attention* shows each head's pattern.
