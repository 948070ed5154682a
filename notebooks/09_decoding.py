# %% [markdown]
# # 9. Decoding and the KV cache
#
# A trained decoder gives chances for one next token. This notebook turns them into text: what is computed again and
# again without a cache, what a cache weighs, how a token is chosen, and how several can be had in one pass.
# Afterwards you can say from a configuration what a text costs, and from a distribution what a setting will do to it.
#
# It needs attention and the causal mask (notebook 2).

# %%
import math
import time

import matplotlib.pyplot as plt
import torch

import cutaway as ct
from cutaway.evaluate import entropy
from cutaway.generate import Engine, EngineConfig, SamplingParams
from cutaway.generate.sampling.logits_processing import logits_to_probs
from cutaway.generate.sampling.sampler import Sampler
from cutaway.generate.speculative.speculative_decoder import SpeculativeDecoder
from cutaway.learn import claim
from cutaway.lens import analysis

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
checkpoint = ct.load("tiny-python", dtype=torch.float32)
model, tokenizer = checkpoint.model, checkpoint.tokenizer
text = "class Reader:\n    def __init__(self, path):\n        self."
tokens = torch.tensor([tokenizer.encode(text)])  # (1, T)

# %% [markdown]
# ## Without a cache, the past is computed again for every token
#
# To choose token $t+1$ a decoder reads tokens $1 \dots t$. Read anew each time, that is one key and one value for
# each of them, in every layer: for $n$ tokens
#
# $$1 + 2 + \dots + n = \frac{n(n+1)}{2}$$
#
# pairs a layer. A hook on the key matrix of block 0 counts them while we write by hand, the likeliest token each
# time.


# %%
class Counted:
    """Counts the tokens for which block 0 makes a key."""

    def __enter__(self):
        self.pairs = 0
        keys = model.stacks["decoder"].blocks[0].attn.f.k
        self.hook = keys.register_forward_hook(self.add)
        return self

    def add(self, module, given, made):
        self.pairs += made.shape[:-1].numel()  # (B, T, G·D): B·T keys

    def __exit__(self, *error):
        self.hook.remove()


# %%
@torch.no_grad()
def write(n, cache=None):
    """n tokens, each the likeliest, the first pass over one token."""
    said = torch.tensor([[tokenizer.encode("import")[0]]])
    for _ in range(n):
        new = said if cache is None else said[:, -1:]
        said = torch.cat((said, model(new, cache=cache)[:, -1:].argmax(-1)), 1)
    return said


# %%
lengths, plain, kept = [5, 10, 20, 40], [], []
for n in lengths:
    with Counted() as seen:
        without = write(n)
    plain.append(seen.pairs)
    with Counted() as seen:
        behind = write(n, cache=model.new_cache(1, n))
    kept.append(seen.pairs)
claim("40 tokens without a cache make 40·41/2 pairs", plain[-1], predicted=40 * 41 / 2, rtol=0)

# %% [markdown]
# With a cache a step makes one pair, so $n$ tokens make $n$. The counts of three lengths fix a parabola; at 1,000
# tokens it should stand at about 500,000.

# %%
a, b, c = torch.linalg.solve(
    torch.tensor([[n * n, n, 1.0] for n in lengths[1:]], dtype=torch.float64), torch.tensor(plain[1:]).double()
)
print(claim("40 tokens with a cache make 40 pairs", kept[-1], predicted=40, rtol=0))
print(claim("and they are the same tokens (differing ones)", (without != behind).sum(), predicted=0))
claim("1,000 tokens without a cache recompute about half a million pairs", a * 1e6 + b * 1e3 + c, predicted=5e5)

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
grid = torch.logspace(0.7, 3.2, 50)
axes.loglog(grid, grid * (grid + 1) / 2, color=RED, lw=1, label="n(n+1)/2")
axes.loglog(grid, grid, color=BLUE, lw=1, label="n")
axes.loglog(lengths, plain, "o", color=RED, label="counted, no cache")
axes.loglog(lengths, kept, "s", color=BLUE, label="counted, cache")
axes.axvline(1000, color="0.7", lw=0.8, ls=":")
axes.set(xlabel="tokens written", ylabel="key/value pairs a layer", title="Without a cache the work is quadratic")
axes.legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# ## What the past leaves behind
#
# Why keys and values, and nothing else? For the last token, attention is
#
# $$z = \sum_s \operatorname{softmax}_s\!\left(\frac{q \cdot k_s}{\sqrt{d_{head}}}\right) v_s .$$
#
# The past enters through $k_s$ and $v_s$ alone, and no later token can change them: the mask forbids it. Four lines
# by hand, with the values that the model had; they should give what the model has at `blocks.2.attn.z`.

# %%
with torch.no_grad(), ct.trace(model, "blocks.2.attn.*") as t:
    model(tokens)
q, k, v = (t[f"blocks.2.attn.{name}"][0] for name in "qkv")  # (T, H, D)
scores = torch.einsum("hd,shd->hs", q[-1], k) / math.sqrt(q.shape[-1])  # (H, S)
z = torch.einsum("hs,shd->hd", scores.softmax(-1), v)  # (H, D)
claim(
    "the last token's attention by hand (largest difference)", (z - t["blocks.2.attn.z"][0, -1]).abs().max(), below=1e-5
)

# %% [markdown]
# So a step with a cache must give the logits of a whole pass, but for rounding. A float32 has 24 bits; some hundred
# sums in another order may cost some hundred times $2^{-24} \approx 6 \cdot 10^{-8}$ of the largest logit: below
# $10^{-5}$ of it. This is why training can be parallel (all positions at once, teacher forcing) and decoding
# sequential, and both be the same model.

# %%
apart = analysis.cached_decoding_error(checkpoint, text)
largest = model(tokens).detach().abs().max()
claim("token by token equals one pass (difference over largest logit)", apart.values.max() / largest, below=1e-5)

# %% [markdown]
# ## What a cache weighs
#
# Two vectors a token, layer and key head:
#
# $$\text{bytes} = 2 \cdot \text{layers} \cdot \text{kv heads} \cdot d_{head} \cdot \text{tokens} \cdot
# \text{bytes a number}.$$
#
# For this model and 512 tokens in float32: $2 \cdot 6 \cdot 8 \cdot 32 \cdot 512 \cdot 4 = 6{,}291{,}456$.

# %%
cache = model.new_cache(1, 512)
claim(
    "bytes of the real buffers",
    sum(layer.k.nbytes + layer.v.nbytes for layer in cache.layers),
    predicted=2 * 6 * 8 * 32 * 512 * 4,
    rtol=0,
)

# %% [markdown]
# Grouped-query attention ([GQA](https://arxiv.org/abs/2305.13245)) lets several query heads share a key head, so the
# cache shrinks by heads / kv heads. Llama-2 7B and Llama-3 8B both have 32 layers and 32 query heads of width 128;
# the first has 32 key heads, the second 8. Falcon 7B ([multi-query](https://arxiv.org/abs/1911.02150)) has a single
# one of width 64: a 64th of Llama-2's. `ct.size` counts published models without their weights.

# %%
contexts = [2**n for n in range(10, 18)]
names = {"llama-2-7b": RED, "llama-3-8b": ORANGE, "falcon-7b": BLUE}
gib = {name: [ct.size(name, context=n, dtype="bf16").kv_cache.total_bytes / 2**30 for n in contexts] for name in names}
print(
    claim(
        "GiB of Llama-3 8B's cache at 8,192 tokens", gib["llama-3-8b"][3], predicted=2 * 32 * 8 * 128 * 8192 * 2 / 2**30
    )
)
print(claim("Llama-2 7B's is larger by 32 / 8", gib["llama-2-7b"][3] / gib["llama-3-8b"][3], predicted=4))
claim("and than Falcon 7B's by 32·128 / 64", gib["llama-2-7b"][3] / gib["falcon-7b"][3], predicted=64)

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
for name, colour in names.items():
    axes.loglog(contexts, gib[name], "o-", color=colour, ms=4, label=name)
axes.axhline(16, color="0.7", lw=0.8, ls=":")
axes.text(contexts[0], 17, "16 GiB", color="0.4", va="bottom")
axes.set(xlabel="tokens of context", ylabel="cache of one text, GiB (bf16)", title="Shared key heads shrink the cache")
axes.legend(frameon=False, loc="lower right")
figure.tight_layout()

# %% [markdown]
# ## Fewer bytes: int8
#
# A vector of 32 numbers may be kept as 32 bytes and one 16-bit scale: 34 bytes in place of 128, or 0.266. What does
# the rounding cost? With a step of $m/127$, where $m$ is the vector's largest number, the errors are spread evenly
# over one step, and such a spread has a standard deviation of $1/\sqrt{12}$ steps. So of a vector with root mean
# square $r$ the share
#
# $$\frac{m / r}{127 \sqrt{12}}$$
#
# is lost. We predict it from block 0's keys as they are, and measure it on what the cache gives back. (Later blocks
# differ a little more: they read a stream that earlier rounding has moved already.)

# %%
in_int8 = EngineConfig(model, max_num_seqs=1, max_model_len=512, kv_cache_dtype=torch.int8).build_cache()
print(claim("int8 takes 34 bytes where float32 takes 128", in_int8.num_bytes / 6_291_456, predicted=34 / 128))
with torch.no_grad(), ct.trace(model, "blocks.0.attn.k") as t:
    exact = model(tokens)
    rounded = model(tokens, cache=in_int8)
k, given = t["blocks.0.attn.k", 0], t["blocks.0.attn.k", 1]  # (B, T, H, D): what attention read in each of the passes
steps = k.abs().amax(-1) / k.pow(2).mean(-1).sqrt() / (127 * math.sqrt(12))  # (B, T, H): the prediction
lost = (given - k).pow(2).mean(-1).sqrt() / k.pow(2).mean(-1).sqrt()
print(claim("share of a key that rounding takes", lost.mean(), predicted=float(steps.mean()), rtol=0.05))
moved = torch.nn.functional.kl_div(rounded.log_softmax(-1), exact.log_softmax(-1), reduction="none", log_target=True)
claim("nats that the next token's distribution moves by", moved.sum(-1).mean(), below=0.01)

# %% [markdown]
# ## Pages: texts that begin alike
#
# A cache in pages of 64 tokens gives a text only the pages it needs, and full pages whose tokens are known can be
# shared. Two questions about the same long beginning: the second needs only its own end to be read. Of a prompt of
# $P$ tokens the last must be read, as its logits are wanted; so with the same beginning in the pages already
#
# $$P - 64 \left\lfloor \frac{P - 1}{64} \right\rfloor$$
#
# tokens are left to read.

# %%
long = torch.randint(300, 2000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
with Engine(
    EngineConfig(model, max_num_seqs=2, max_model_len=256, cache_implementation="paged", compile=False)
) as engine:
    reads = []
    for _ in range(2):
        with Counted() as seen:
            ticket = engine.submit(long, SamplingParams(max_new_tokens=1), seed=0)
            engine.run()
        reads.append(seen.pairs)
print(claim("the first time all 200 tokens are read", reads[0], predicted=200, rtol=0))
claim("the second time what is behind the last full page", reads[1], predicted=200 - 64 * (199 // 64), rtol=0)

# %% [markdown]
# ## Prefill and decode, alone and together
#
# A step for one text reads every weight to make one token: it waits for memory, and the arithmetic idles. A prompt's
# tokens share one reading of the weights (prefill), and so do the rows of a batch. So a token of a prompt must cost a
# small part of a decoded one, and a batch of 16 must write more tokens a second than one text: more than twice as
# many, and less than 16 times, since arithmetic is not free. How much more depends on the machine; the bounds here
# are wide on purpose.


# %%
@torch.no_grad()
def fastest(rows, width, tries=5):
    """Seconds of a pass over `width` new tokens of each row, behind 64 that were read before."""
    cache = model.new_cache(rows, 64 + width)
    model(tokens[:, :1].expand(rows, 64), cache=cache)
    best = math.inf
    for _ in range(tries):
        start = time.perf_counter()
        model(tokens[:, :1].expand(rows, width), cache=cache)
        best = min(best, time.perf_counter() - start)
        cache.crop(64)
    return best


batches = [1, 2, 4, 8, 16]
speeds = [rows / fastest(rows, 1) for rows in batches]
print(claim("a prompt's token is cheaper than a step (times)", fastest(1, 1) / (fastest(1, 256, 3) / 256), above=3))
claim("tokens a second of 16 texts, over those of one", speeds[4] / speeds[0], above=1.5, below=16)

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.semilogx(batches, speeds, "o-", color=BLUE, label="measured here")
axes.semilogx(batches, [speeds[0] * rows for rows in batches], color="0.6", ls=":", label="if more rows were free")
axes.set(xlabel="texts at once", ylabel="tokens a second", title="Batching is the lever for throughput")
axes.set_xticks(batches, batches)
axes.minorticks_off()
axes.legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# ## Choosing a token: temperature
#
# The chance of a token with logit $x_i$ is $p_i \propto e^{x_i/T}$. As $T$ falls to 0 all of it goes to the likeliest
# token and the entropy to 0; as $T$ grows it goes to $\log_2 V = 11$ bits, as $V = 2048$. In between it only rises,
# with a slope that can be written down (differentiate $H = \ln Z - \langle x \rangle / T$, with $Z = \sum e^{x/T}$):
#
# $$\frac{dH}{dT} = \frac{\operatorname{Var}_p(x)}{T^3}.$$
#
# We take the logits after `self.` from the model, and the distributions from the library's own sampler.

# %%
logits = exact[0, -1]  # (V,)


def chances(**settings):
    """The distribution that these settings draw from."""
    sampler = Sampler(1, len(logits))
    sampler.set_row(0, SamplingParams(**{"temperature": 1.0, **settings}), [], seed=0)
    return logits_to_probs(logits[None], sampler.first_rows(1), sampler.features(1))[0]


p = chances()
mean = (p * logits).sum()
variance = float((p * (logits - mean) ** 2).sum())
slope = (entropy(chances(temperature=1.05)) - entropy(chances(temperature=0.95))) / 0.1 * math.log(2)  # in nats
print(claim("slope of the entropy at temperature 1", slope, predicted=variance, rtol=0.02))
claim("bits of entropy at temperature 100", entropy(chances(temperature=100.0)), predicted=11, rtol=0.01)

# %% [markdown]
# ## Choosing a token: top-k, top-p, min-p
#
# Three ways to cut off the tail. Top-k keeps $k$ tokens; [top-p](https://arxiv.org/abs/1904.09751) the fewest whose
# chances add up to $p$; [min-p](https://arxiv.org/abs/2407.01082) those with at least the share $m$ of the likeliest
# one's chance. A distribution over $n$ tokens has at most $\log_2 n$ bits, so top-k bounds the entropy whatever the
# model thinks, min-p bounds the number of tokens by $1/(m \, p_{max})$, and top-p follows the model: few tokens where
# it is sure, many where it is not.

# %%
temperatures = [0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 5]
filters = {"all": {}, "top_k = 16": {"top_k": 16}, "top_p = 0.9": {"top_p": 0.9}, "min_p = 0.1": {"min_p": 0.1}}
bits = {name: [entropy(chances(temperature=t, **how)) for t in temperatures] for name, how in filters.items()}
ordered = p.sort(descending=True).values
by_hand = {
    "top_p": int((ordered.cumsum(0) < 0.9).sum()) + 1,  # one more than those that do not yet reach it
    "min_p": int((p >= 0.1 * p.max()).sum()),
}
kept = {name: int((chances(**how) > 0).sum()) for name, how in filters.items()}
print(kept)
print(claim("tokens that top_p = 0.9 keeps", kept["top_p = 0.9"], predicted=by_hand["top_p"], rtol=0))
print(
    claim(
        "tokens that min_p = 0.1 keeps, of 1/(m·p_max) at most",
        kept["min_p = 0.1"],
        below=1 / (0.1 * float(p.max())) + 1e-6,
    )
)
claim("most bits that top_k = 16 leaves at any temperature", max(bits["top_k = 16"]), above=3, below=4)

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
for (name, values), colour in zip(bits.items(), ["0.3", BLUE, GREEN, ORANGE], strict=True):
    axes.plot(temperatures, values, "o-", ms=4, color=colour, label=name)
axes.axhline(11, color="0.7", lw=0.8, ls=":")
axes.text(0.25, 11.1, "log₂ V", va="bottom", color="0.4")
axes.axhline(4, color=BLUE, lw=0.8, ls=":")
axes.text(5, 4.1, "log₂ 16", ha="right", va="bottom", color=BLUE)
axes.set(
    xlabel="temperature",
    ylabel="entropy of the next token, bits",
    title="What the settings leave open after self.",
    ylim=(0, 12.5),
)
axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
figure.tight_layout()

# %% [markdown]
# ## Are the draws fair?
#
# Draw $n$ tokens and count. The share of token $i$ misses $p_i$ by luck alone, with standard deviation
# $\sqrt{p_i(1-p_i)/n}$, and a normal variable is on average $\sqrt{2/\pi}$ deviations from its mean. So the total
# variation between counts and distribution, half the sum of all misses, should be
#
# $$\tfrac12 \sum_i \sqrt{\frac{2 \, p_i (1 - p_i)}{\pi n}},$$
#
# not more and not less. And the statistic $\chi^2 = \sum (\text{count} - n p_i)^2 / n p_i$ should be about as large
# as there are tokens to choose from, less one, give or take $\sqrt{2 \cdot}$ of that.

# %%
n = 3000
sampler = Sampler(n, len(logits))
for row in range(n):
    sampler.set_row(row, SamplingParams(temperature=1.5, top_k=16), [], seed=row)
drawn = sampler.sample(logits.expand(n, -1), sampler.features(n)).tokens  # (n,)
q = chances(temperature=1.5, top_k=16).double()
counts = torch.bincount(drawn, minlength=len(q)).double()
among = q > 0
luck = float((2 * q * (1 - q) / (math.pi * n)).sqrt().sum() / 2)
chi = float(((counts - n * q)[among] ** 2 / (n * q[among])).sum())
print(claim("tokens drawn from outside the sixteen", counts[~among].sum(), predicted=0))
print(claim("total variation of 3,000 draws", (counts / n - q).abs().sum() / 2, predicted=luck, rtol=0.5))
claim("χ² with 15 degrees of freedom, within four deviations", chi, above=0, below=15 + 4 * math.sqrt(30))

# %% [markdown]
# ## Greedy, drawn, searched
#
# Of a text that was *drawn* from the model, each token surprises the model by $-\ln p$ on average exactly as much as
# the model is uncertain there, $H$: that is what entropy means. Greedy text surprises it much less: it is no typical
# text. And beams look for a text that is likelier as a whole than the one greedy steps stumble into.

# %%
prompts = ["import os\n\ndef ", "class Queue:\n    def ", "try:\n    value = ", "# Copyright"]
how = {"max_new_tokens": 32, "ignore_eos": True, "logprobs": 0}
greedy = ct.generate(checkpoint, prompts, **how)
free = ct.generate(checkpoint, prompts, temperature=1.0, n=8, seed=0, **how)
searched = ct.generate(checkpoint, prompts, beams=4, max_new_tokens=32, ignore_eos=True)


# %%
@torch.no_grad()
def surprise(prompt, answer):
    """−ln p of each token of an answer, and the entropy it was drawn with."""
    start = tokenizer.encode(prompt)
    says = model(torch.tensor([start + answer.tokens]))[0, len(start) - 1 : -1].log_softmax(-1)  # (n, V)
    return -says[range(len(answer.tokens)), answer.tokens], -(says.exp() * says).sum(-1)


# %%
told = [surprise(prompts[number // 8], answer) for number, answer in enumerate(free)]
likely = [surprise(prompt, answer)[0] for prompt, answer in zip(prompts, greedy, strict=True)]
best = [surprise(prompt, answer)[0].sum() for prompt, answer in zip(prompts, searched, strict=True)]
drawn_nats, uncertain = (torch.cat(each) for each in zip(*told, strict=True))
print(
    claim("nats a drawn token surprises the model by", drawn_nats.mean(), predicted=float(uncertain.mean()), rtol=0.15)
)
print(claim("greedy tokens, as a share of that", torch.cat(likely).mean() / drawn_nats.mean(), below=0.7))
claim(
    "nats that beams find beyond greedy, mean of four texts",
    (torch.stack([x.sum() for x in likely]) - torch.stack(best)).mean(),
    above=0,
)

# %%
for name, answers in (("greedy", greedy), ("drawn", free[::8]), ("4 beams", searched)):
    print(f"--- {name}\n{prompts[1]}{answers[1].text}")

# %% [markdown]
# ## Several tokens a pass: speculation
#
# A small model guesses $k$ tokens, the large one reads them all in one pass and keeps those it might have said
# itself: a guess $x$ stays with chance $\min(1, p(x)/q(x))$, and at the first refusal a token is drawn from what is
# left, $\max(p - q, 0)$ ([Leviathan et al.](https://arxiv.org/abs/2211.17192), [Chen et
# al.](https://arxiv.org/abs/2302.01318)). A guess is accepted with chance
#
# $$\alpha = \sum_x q(x) \min\!\left(1, \frac{p(x)}{q(x)}\right) = \sum_x \min(p(x), q(x)),$$
#
# so a pass gives $1 + \alpha + \dots + \alpha^k = (1 - \alpha^{k+1})/(1 - \alpha)$ tokens, and the text has exactly
# the distribution $p$. By hand, with two distributions that do not depend on the text:


# %%
def speculate(p, q, k, rounds, draw):
    """Tokens a pass in each round, and the first token of each."""
    guess = torch.multinomial(q, rounds * k, replacement=True, generator=draw).view(rounds, k)
    stays = torch.rand(rounds, k, generator=draw) < (p / q)[guess]
    accepted = stays.long().cumprod(-1).sum(-1)  # up to the first refusal
    own = torch.multinomial((p - q).clamp(min=0), rounds, replacement=True, generator=draw)
    return accepted + 1, torch.where(stays[:, 0], guess[:, 0], own)


dice = torch.Generator().manual_seed(0)
p, q = (torch.randn(2, 20, generator=dice) * 0.8).softmax(-1)
alpha = float(torch.minimum(p, q).sum())
lengths, first = speculate(p, q, 4, 20_000, dice)
shares = torch.bincount(first, minlength=20) / 20_000
luck = float((2 * p * (1 - p) / (math.pi * 20_000)).sqrt().sum() / 2)
print(f"α = {alpha:.3f}")
print(claim("tokens a pass", lengths.float().mean(), predicted=(1 - alpha**5) / (1 - alpha), rtol=0.02))
claim("total variation from p, by luck alone", (shares - p).abs().sum() / 2, predicted=luck, rtol=0.6)

# %% [markdown]
# Now the real thing. The draft is the same model with noise on its matrices, a fifth of their own spread. Eight texts
# are written with it; $\alpha$ is the mean of $\sum \min(p, q)$ over their tokens, by both models' own distributions.
# The formula takes every guess for as hard as any other, and real texts have easy and hard stretches; and the last
# pass of a text is cut short. So 20 % is allowed.

# %%
draft = ct.load("tiny-python", dtype=torch.float32).model
noise = torch.Generator().manual_seed(0)
with torch.no_grad():
    for weight in draft.parameters():
        if weight.ndim == 2:
            weight += 0.2 * weight.std() * torch.randn(weight.shape, generator=noise)
start, asked = tokenizer.encode(prompts[2]), SamplingParams(max_new_tokens=32, temperature=1.0, ignore_eos=True)
speculation = SpeculativeDecoder(
    EngineConfig(model, max_num_seqs=8, max_model_len=96), draft_model=draft, num_draft_tokens=4
)
tickets = [speculation.submit(start, asked, seed=seed) for seed in range(8)]
speculation.run()
found = speculation.stats.tokens_per_forward_pass

# %%
rows = torch.tensor([start + ticket.result().tokens for ticket in tickets])  # (8, T)
with torch.no_grad():
    p, q = model(rows).softmax(-1), draft(rows).softmax(-1)  # (8, T, V)
alpha = float(torch.minimum(p, q).sum(-1)[:, len(start) - 1 : -1].mean())
print(f"α = {alpha:.3f}")
print(claim("tokens a pass, guessing four ahead", found, predicted=(1 - alpha**5) / (1 - alpha), rtol=0.2))
again = ct.generate(checkpoint, prompts[2], draft_model=draft, max_new_tokens=32, ignore_eos=True)
claim(
    "greedy tokens that a draft changes",
    sum(a != b for a, b in zip(again[0].tokens, greedy[2].tokens, strict=True)),
    predicted=0,
)

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
grid = torch.linspace(0, 0.999, 100)
for k, colour in ((1, "0.6"), (2, GREEN), (4, BLUE), (8, ORANGE)):
    axes.plot(grid, (1 - grid ** (k + 1)) / (1 - grid), color=colour, label=f"{k} ahead")
axes.plot([alpha], [found], "D", color=RED, label="measured, 4 ahead")
axes.set(
    xlabel="chance that a guess is accepted, α", ylabel="tokens a pass", title="Better guesses, more tokens a pass"
)
axes.legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# ## Try
#
# - Count pairs when the prompt has 100 tokens and 40 are written. Without a cache each pass reads the prompt too:
#   expect $40 \cdot 100 + 39 \cdot 40 / 2$. With one: the prompt once and a pair a step.
# - Make a temperature of 1.5 and `min_p=0.1` write a class, then temperature 1.5 alone. Look at the entropies in the
#   picture first.
# - Guess 8 tokens ahead in place of 4. The formula says how little that adds at this $\alpha$; say the number before
#   you run it.
#
# The exercise that belongs here is `cutaway learn start 8`: the memory of a KV cache. `cutaway bench decode
# tiny-python` measures steps beside the limit of this machine, and the page's *Generate* screen (`cutaway open
# tiny-python`) shows each token's chances as it is chosen.
