# %% [markdown]
# # 9. Decoding and the KV cache
#
# A decoder gives a distribution over the next token, and decoding turns these distributions into text. This notebook
# measures the work that a KV cache saves, the size of the cache, its quantization and paging, prefill and batching,
# sampling (temperature, top-k, top-p, min-p), beam search, and speculative decoding.
#
# Prerequisites: attention and the causal mask ([notebook 2](02_attention.py)).

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
checkpoint = ct.load("tiny-english", dtype=torch.float32)
model, tokenizer = checkpoint.model, checkpoint.tokenizer
text = "Mom and Lily were in the kitchen. It was late, and the cat sat on the"
tokens = torch.tensor([tokenizer.encode(text)])  # (1, T)

# %% [markdown]
# ## Work with and without a KV cache
#
# The distribution of token $t+1$ needs the keys and values of tokens $1 \dots t$. Without a cache they are recomputed
# in every forward pass: for $n$ tokens
#
# $$1 + 2 + \dots + n = \frac{n(n+1)}{2}$$
#
# key-value pairs per layer. With a cache each step computes one pair, so $n$ tokens need $n$ pairs. A hook on the key
# projection of block 0 counts the pairs during greedy decoding.


# %%
class KeyCounter:
    """Context manager that counts the forward passes and the keys computed in block 0."""

    def __enter__(self):
        self.num_keys = self.num_forward_passes = 0
        key_projection = model.stacks["decoder"].blocks[0].attn.f.k
        self.hook = key_projection.register_forward_hook(self.count)
        return self

    def count(self, module, args, output):
        self.num_keys += output.shape[:-1].numel()  # (B, T, G·D): B·T keys
        self.num_forward_passes += 1

    def __exit__(self, *error):
        self.hook.remove()


# %%
@torch.no_grad()
def decode_greedily(n, cache=None):
    """Decode n tokens from a prompt of one token."""
    sequence = torch.tensor([[tokenizer.encode("Once")[0]]])
    for _ in range(n):
        inputs = sequence if cache is None else sequence[:, -1:]
        sequence = torch.cat((sequence, model(inputs, cache=cache)[:, -1:].argmax(-1)), 1)
    return sequence


# %%
lengths, uncached_counts, cached_counts = [5, 10, 20, 40], [], []
for n in lengths:
    with KeyCounter() as counter:
        uncached = decode_greedily(n)
    uncached_counts.append(counter.num_keys)
    with KeyCounter() as counter:
        cached = decode_greedily(n, cache=model.new_cache(1, n))
    cached_counts.append(counter.num_keys)
print(
    claim(
        "40 tokens without a cache: 40·41/2 pairs per layer",
        uncached_counts[-1],
        predicted=40 * 41 / 2,
        rtol=0,
        id="C200",
    )
)
print(claim("40 tokens with a cache: 40 pairs per layer", cached_counts[-1], predicted=40, rtol=0, id="C200"))
print(claim("tokens that differ between the two", (uncached != cached).sum(), predicted=0))
quadratic = torch.tensor([[n * n, n, 1.0] for n in lengths[1:]], dtype=torch.float64)  # fit of three counts
a, b, c = torch.linalg.solve(quadratic, torch.tensor(uncached_counts[1:]).double())
extrapolated = a * 1e6 + b * 1e3 + c
claim(
    "1,000 tokens without a cache, extrapolated: about 500,000 pairs per layer", extrapolated, predicted=5e5, id="C201"
)

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
grid = torch.logspace(0.7, 3.2, 50)
axes.loglog(grid, grid * (grid + 1) / 2, color=RED, lw=1, label="n(n+1)/2")
axes.loglog(grid, grid, color=BLUE, lw=1, label="n")
axes.loglog(lengths, uncached_counts, "o", color=RED, label="counted, without cache")
axes.loglog(lengths, cached_counts, "s", color=BLUE, label="counted, with cache")
axes.set(xlabel="decoded tokens", ylabel="key-value pairs per layer", title="Computed keys and values")
axes.legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# ## What the cache stores
#
# For the last token, attention is
#
# $$z = \sum_s \operatorname{softmax}_s\!\left(\frac{q \cdot k_s}{\sqrt{d_{head}}}\right) v_s .$$
#
# Earlier tokens enter through $k_s$ and $v_s$ only, and under a causal mask later tokens do not change them. The sum is
# computed by hand from recorded q, k and v and compared with `blocks.2.attn.z`.

# %%
with torch.no_grad(), ct.trace(model, "blocks.2.attn.*") as t:
    model(tokens)
q, k, v = (t[f"blocks.2.attn.{name}"][0] for name in "qkv")  # (T, H, D)
scores = torch.einsum("hd,shd->hs", q[-1], k) / math.sqrt(q.shape[-1])  # (H, S)
z = torch.einsum("hs,shd->hd", scores.softmax(-1), v)  # (H, D)
difference = (z - t["blocks.2.attn.z"][0, -1]).abs().max()
claim("attention of the last token by hand: largest difference", difference, below=1e-5, id="C048")

# %% [markdown]
# So cached decoding gives the logits of a full forward pass, up to rounding. float32 has a 24-bit significand. A few
# hundred sums in a different order can change a logit by a few hundred times $2^{-24} \approx 6 \cdot 10^{-8}$ of the
# largest logit, so the difference should be below $10^{-5}$ of the largest logit. This is why training on all positions
# at once (teacher forcing) and decoding step by step compute the same model.

# %%
error = analysis.cached_decoding_error(checkpoint, text)
largest_logit = model(tokens).detach().abs().max()
claim(
    "cached decoding against one pass: difference / largest logit",
    error.values.max() / largest_logit,
    below=1e-5,
    id="C181",
)

# %% [markdown]
# ## Size of the cache
#
# The cache stores two vectors per token, layer and key-value head:
#
# $$\text{bytes} = 2 \cdot \text{layers} \cdot \text{kv heads} \cdot d_{head} \cdot \text{tokens} \cdot
# \text{bytes per number}.$$
#
# For this model and 512 tokens in float32: $2 \cdot 6 \cdot 8 \cdot 32 \cdot 512 \cdot 4 = 6{,}291{,}456$.

# %%
cache = model.new_cache(1, 512)
num_bytes = sum(layer.k.nbytes + layer.v.nbytes for layer in cache.layers)
claim("bytes of the cache tensors", num_bytes, predicted=2 * 6 * 8 * 32 * 512 * 4, rtol=0, id="C198")

# %% [markdown]
# In grouped-query attention ([GQA](https://arxiv.org/abs/2305.13245)) several query heads share a key-value head, so
# the cache is smaller by heads / kv heads. Llama-2 7B and Llama-3 8B both have 32 layers and 32 query heads of width
# 128; the first has 32 key-value heads, the second 8. Falcon 7B ([multi-query](https://arxiv.org/abs/1911.02150)) has
# one, of width 64: 1/64 of Llama-2's cache. `ct.size` computes these without weights.

# %%
contexts = [2**n for n in range(10, 18)]
names = {"llama-2-7b": RED, "llama-3-8b": ORANGE, "falcon-7b": BLUE}
gib = {name: [ct.size(name, context=n, dtype="bf16").kv_cache.total_bytes / 2**30 for n in contexts] for name in names}
expected = 2 * 32 * 8 * 128 * 8192 * 2 / 2**30
print(claim("Llama-3 8B: GiB of cache at 8,192 tokens", gib["llama-3-8b"][3], predicted=expected, id="C199"))
print(claim("cache of Llama-2 7B / Llama-3 8B", gib["llama-2-7b"][3] / gib["llama-3-8b"][3], predicted=4, id="C199"))
claim("cache of Llama-2 7B / Falcon 7B", gib["llama-2-7b"][3] / gib["falcon-7b"][3], predicted=64)

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
for name, color in names.items():
    axes.loglog(contexts, gib[name], "o-", color=color, ms=4, label=name)
axes.axhline(16, color="0.7", lw=0.8, ls=":")
axes.text(contexts[0], 17, "16 GiB", color="0.4", va="bottom")
axes.set(xlabel="context, tokens", ylabel="KV cache of one sequence, GiB (bf16)", title="MHA, GQA and MQA caches")
axes.legend(frameon=False, loc="lower right")
figure.tight_layout()

# %% [markdown]
# ## int8 KV cache
#
# A vector of 32 numbers can be stored as 32 bytes and one 16-bit scale: 34 bytes instead of 128, or 0.266. The
# quantization step is $m/127$, where $m$ is the largest absolute value of the vector; the rounding error is
# approximately uniform over one step, with standard deviation $1/\sqrt{12}$ steps. So relative to a vector with root
# mean square $r$ the error is
#
# $$\frac{m / r}{127 \sqrt{12}}.$$
#
# The prediction is computed from block 0's keys and compared with the keys read from the cache. (The error of later
# blocks is larger, because their inputs already contain the errors of earlier ones.)

# %%
int8_cache = EngineConfig(model, max_num_seqs=1, max_model_len=512, kv_cache_dtype=torch.int8).build_cache()
print(claim("int8 cache / float32 cache, bytes", int8_cache.num_bytes / 6_291_456, predicted=34 / 128))
with torch.no_grad(), ct.trace(model, "blocks.0.attn.k") as t:
    exact = model(tokens)
    quantized = model(tokens, cache=int8_cache)
k, quantized_k = t["blocks.0.attn.k", 0], t["blocks.0.attn.k", 1]  # (B, T, H, D), one per forward pass
predicted_error = k.abs().amax(-1) / k.pow(2).mean(-1).sqrt() / (127 * math.sqrt(12))  # (B, T, H)
relative_error = (quantized_k - k).pow(2).mean(-1).sqrt() / k.pow(2).mean(-1).sqrt()
print(
    claim(
        "relative quantization error of the keys",
        relative_error.mean(),
        predicted=float(predicted_error.mean()),
        rtol=0.05,
    )
)
kl = torch.nn.functional.kl_div(quantized.log_softmax(-1), exact.log_softmax(-1), reduction="none", log_target=True)
claim("KL divergence of the next-token distribution, nats", kl.sum(-1).mean(), below=0.01)

# %% [markdown]
# ## Paged cache and shared prefixes
#
# A paged cache consists of pages of 64 tokens, and full pages with the same tokens can be shared between requests
# (prefix caching). The last token of a prompt of $P$ tokens must always be computed, because its logits are needed. So
# for a prompt whose full pages are already cached
#
# $$P - 64 \left\lfloor \frac{P - 1}{64} \right\rfloor$$
#
# tokens are prefilled.

# %%
prompt = torch.randint(300, 2000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
config = EngineConfig(model, max_num_seqs=2, max_model_len=256, cache_implementation="paged", compile=False)
with Engine(config) as engine:
    num_prefilled = []
    for _ in range(2):
        with KeyCounter() as counter:
            engine.submit(prompt, SamplingParams(max_new_tokens=1), seed=0)
            engine.run()
        num_prefilled.append(counter.num_keys)
print(claim("first request: prefilled tokens", num_prefilled[0], predicted=200, rtol=0))
claim(
    "second request with the same prompt: prefilled tokens", num_prefilled[1], predicted=200 - 64 * (199 // 64), rtol=0
)

# %% [markdown]
# ## Prefill, decode and batching
#
# A forward pass reads all weights once, for one token or for many. A decode step of one sequence computes one token per
# pass and is bandwidth-bound ([notebook 8](08_costs.py)). Prefill processes all tokens of a prompt in one pass, and a
# batch shares a pass between its sequences. The number of forward passes is counted here: 16 requests with 16 new
# tokens each take one prefill pass and 16 decode passes each if they run one at a time, $16 \cdot 17 = 272$. With all
# 16 in one batch at least 17 passes are needed; prefill in several groups adds a few.

# %%
prompts = [
    "Once upon a time, there was a",
    "Lily and Ben went to the park. They",
    "One day, Tom found a big box. He",
    "The dog was sad because",
]


def count_forward_passes(max_num_seqs):
    """Return the number of forward passes of 16 requests with 16 new tokens each, and the generated tokens."""
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    config = EngineConfig(model, max_num_seqs=max_num_seqs, max_model_len=64, compile=False)
    with Engine(config) as engine, KeyCounter() as counter:
        requests = [engine.submit(tokenizer.encode(prompt), params, seed=0) for prompt in 4 * prompts]
        engine.run()
        return counter.num_forward_passes, [request.result().tokens for request in requests]


(single_passes, single_tokens), (batched_passes, batched_tokens) = (count_forward_passes(n) for n in (1, 16))
print(claim("forward passes, one request at a time", single_passes, predicted=16 * 17, rtol=0, id="C195"))
print(claim("forward passes, 16 requests at a time", batched_passes, above=16, below=24, id="C206"))
num_different = sum(a != b for a, b in zip(single_tokens, batched_tokens, strict=True))
claim("requests whose tokens differ between the two", num_different, predicted=0)

# %% [markdown]
# The time of a pass depends on the machine and its load, so it is printed and plotted without a claim.


# %%
@torch.no_grad()
def min_seconds(batch_size, num_tokens, repeats=5):
    """Smallest time of a forward pass over `num_tokens` new tokens per sequence after 64 cached tokens."""
    cache = model.new_cache(batch_size, 64 + num_tokens)
    model(tokens[:, :1].expand(batch_size, 64), cache=cache)
    smallest = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        model(tokens[:, :1].expand(batch_size, num_tokens), cache=cache)
        smallest = min(smallest, time.perf_counter() - start)
        cache.crop(64)
    return smallest


batch_sizes = [1, 2, 4, 8, 16]
throughput = [batch_size / min_seconds(batch_size, 1) for batch_size in batch_sizes]
prefill_throughput = 256 / min_seconds(1, 256, 3)
print(f"prefill of 256 tokens: {prefill_throughput / throughput[0]:.1f} times the tokens per second of decoding")
print(f"batch of 16: {throughput[-1] / throughput[0]:.1f} times the tokens per second of one sequence")

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.semilogx(batch_sizes, throughput, "o-", color=BLUE, label="measured on this machine")
proportional = [throughput[0] * batch_size for batch_size in batch_sizes]
axes.semilogx(batch_sizes, proportional, color="0.6", ls=":", label="proportional to batch size")
axes.set(xlabel="batch size", ylabel="tokens per second", title="Decode throughput by batch size")
axes.set_xticks(batch_sizes, batch_sizes)
axes.minorticks_off()
axes.legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# ## Temperature
#
# With temperature $T$, the probability of a token with logit $x_i$ is $p_i \propto e^{x_i/T}$. As $T \to 0$ the entropy
# goes to 0; as $T \to \infty$ it goes to $\log_2 V = 12$ bits at $V = 4096$. Its derivative follows from
# $H = \ln Z - \langle x \rangle / T$ with $Z = \sum e^{x/T}$:
#
# $$\frac{dH}{dT} = \frac{\operatorname{Var}_p(x)}{T^3} \ge 0.$$
#
# The logits are those after "the cat sat on the", and the distributions are computed by the library's sampler.

# %%
logits = exact[0, -1]  # (V,)


def sampling_probs(**params):
    """(V,): the distribution that is sampled from with these parameters."""
    sampler = Sampler(1, len(logits))
    sampler.set_row(0, SamplingParams(**{"temperature": 1.0, **params}), [], seed=0)
    return logits_to_probs(logits[None], sampler.first_rows(1), sampler.features(1))[0]


for temperature in (0.5, 1.0, 2.0):
    top_probs, top_ids = sampling_probs(temperature=temperature).topk(5)
    shown = [f"{tokenizer.decode([int(token)])} {prob:.3f}" for prob, token in zip(top_probs, top_ids, strict=True)]
    print(f"temperature {temperature}:", *shown)
p = sampling_probs()
mean_logit = (p * logits).sum()
variance = float((p * (logits - mean_logit) ** 2).sum())
entropy_difference = entropy(sampling_probs(temperature=1.05)) - entropy(sampling_probs(temperature=0.95))
derivative = entropy_difference / 0.1 * math.log(2)  # in nats
print(claim("derivative of the entropy at temperature 1", derivative, predicted=variance, rtol=0.02, id="C209"))
claim(
    "entropy at temperature 100, bits", entropy(sampling_probs(temperature=100.0)), predicted=12, rtol=0.01, id="C209"
)

# %% [markdown]
# ## Top-k, top-p and min-p
#
# There are three ways to truncate the distribution. Top-k keeps the $k$ most probable tokens;
# [top-p](https://arxiv.org/abs/1904.09751) keeps the smallest set of most probable tokens with total probability at
# least $p$; [min-p](https://arxiv.org/abs/2407.01082) keeps the tokens with probability at least $m$ times the largest
# probability. A distribution over $n$ tokens has at most $\log_2 n$ bits, so top-k bounds the entropy, min-p bounds the
# number of tokens by $1/(m \, p_{max})$, and the number of tokens kept by top-p depends on the distribution.

# %%
temperatures = [0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 5]
filters = {"none": {}, "top_k = 16": {"top_k": 16}, "top_p = 0.9": {"top_p": 0.9}, "min_p = 0.1": {"min_p": 0.1}}
bits = {
    name: [entropy(sampling_probs(temperature=t, **params)) for t in temperatures] for name, params in filters.items()
}
sorted_probs = p.sort(descending=True).values
top_p_count = int((sorted_probs.cumsum(0) < 0.9).sum()) + 1  # including the token that reaches 0.9
num_kept = {name: int((sampling_probs(**params) > 0).sum()) for name, params in filters.items()}
print(num_kept)
print(claim("tokens kept by top_p = 0.9", num_kept["top_p = 0.9"], predicted=top_p_count, rtol=0))
bound = 1 / (0.1 * float(p.max())) + 1e-6
print(claim("tokens kept by min_p = 0.1, at most 1/(m·p_max)", num_kept["min_p = 0.1"], below=bound))
claim("largest entropy with top_k = 16 at any temperature, bits", max(bits["top_k = 16"]), above=3, below=4, id="C211")

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
for (name, values), color in zip(bits.items(), ["0.3", BLUE, GREEN, ORANGE], strict=True):
    axes.plot(temperatures, values, "o-", ms=4, color=color, label=name)
axes.axhline(12, color="0.7", lw=0.8, ls=":")
axes.text(0.25, 12.1, "log₂ V", va="bottom", color="0.4")
axes.axhline(4, color=BLUE, lw=0.8, ls=":")
axes.text(5, 4.1, "log₂ 16", ha="right", va="bottom", color=BLUE)
axes.set(
    xlabel="temperature",
    ylabel="entropy of the next token, bits",
    title="Entropy of the token after “the cat sat on the”",
    ylim=(0, 13.5),
)
axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
figure.tight_layout()

# %% [markdown]
# ## Sampled tokens follow the distribution
#
# In $n$ samples the share of token $i$ has standard deviation $\sqrt{p_i(1-p_i)/n}$, and the mean absolute deviation of
# a normal variable is $\sqrt{2/\pi}$ standard deviations. So the expected total variation distance between the counts
# and the distribution is
#
# $$\tfrac12 \sum_i \sqrt{\frac{2 \, p_i (1 - p_i)}{\pi n}}.$$
#
# The statistic $\chi^2 = \sum (\text{count} - n p_i)^2 / n p_i$ has mean $f$ and standard deviation $\sqrt{2f}$, with
# $f$ one less than the number of possible tokens.

# %%
n = 3000
sampler = Sampler(n, len(logits))
for row in range(n):
    sampler.set_row(row, SamplingParams(temperature=1.5, top_k=16), [], seed=row)
samples = sampler.sample(logits.expand(n, -1), sampler.features(n)).tokens  # (n,)
probs = sampling_probs(temperature=1.5, top_k=16).double()
counts = torch.bincount(samples, minlength=len(probs)).double()
possible = probs > 0
expected_tv = float((2 * probs * (1 - probs) / (math.pi * n)).sqrt().sum() / 2)
chi_squared = float(((counts - n * probs)[possible] ** 2 / (n * probs[possible])).sum())
print(claim("samples outside the 16 tokens", counts[~possible].sum(), predicted=0, id="C210"))
total_variation = (counts / n - probs).abs().sum() / 2
print(claim("total variation distance of 3,000 samples", total_variation, predicted=expected_tv, rtol=0.5))
bound = 15 + 4 * math.sqrt(30)
claim("χ² with 15 degrees of freedom, within four standard deviations", chi_squared, above=0, below=bound)

# %% [markdown]
# ## Greedy decoding, sampling and beam search
#
# For text *sampled* from the model at temperature 1, the expected negative log-probability of a token is the entropy of
# its distribution. For greedy text the mean negative log-probability is lower. In most cases beam search finds
# sequences whose total log-probability is at least that of greedy decoding; here the mean over four prompts is
# compared.

# %%
options = {"max_new_tokens": 32, "ignore_eos": True, "logprobs": 0}
greedy = ct.generate(checkpoint, prompts, **options)
sampled = ct.generate(checkpoint, prompts, temperature=1.0, n=8, seed=0, **options)
beams = ct.generate(checkpoint, prompts, beams=4, max_new_tokens=32, ignore_eos=True)


# %%
@torch.no_grad()
def score_completion(prompt, completion):
    """Negative log-probability of each token of a completion and entropy of its distribution, in nats."""
    prompt_ids = tokenizer.encode(prompt)
    sequence = torch.tensor([prompt_ids + completion.tokens])
    logprobs = model(sequence)[0, len(prompt_ids) - 1 : -1].log_softmax(-1)  # (n, V)
    return -logprobs[range(len(completion.tokens)), completion.tokens], -(logprobs.exp() * logprobs).sum(-1)


# %%
sampled_scores = [score_completion(prompts[index // 8], completion) for index, completion in enumerate(sampled)]
sampled_nll, sampled_entropy = (torch.cat(values) for values in zip(*sampled_scores, strict=True))
greedy_nll = [score_completion(prompt, completion)[0] for prompt, completion in zip(prompts, greedy, strict=True)]
beam_nll = [score_completion(prompt, completion)[0] for prompt, completion in zip(prompts, beams, strict=True)]
mean_entropy = float(sampled_entropy.mean())
print(claim("sampled text: mean −ln p, nats per token", sampled_nll.mean(), predicted=mean_entropy, rtol=0.15))
print(
    claim(
        "greedy text: mean −ln p / that of sampled text", torch.cat(greedy_nll).mean() / sampled_nll.mean(), below=0.7
    )
)
gain = sum(a.sum() - b.sum() for a, b in zip(greedy_nll, beam_nll, strict=True)) / 4
claim("total log-probability of beam search − greedy, mean of four, nats", gain, above=0)

# %%
for name, completions in (("greedy", greedy), ("sampled", sampled[::8]), ("4 beams", beams)):
    print(f"--- {name}\n{prompts[1]}{completions[1].text}")

# %% [markdown]
# ## Speculative decoding
#
# A draft model proposes $k$ tokens; the target model scores all of them in one forward pass. A proposed token $x$ is
# accepted with probability $\min(1, p(x)/q(x))$; at the first rejection a token is sampled from the normalized
# $\max(p - q, 0)$ ([Leviathan et al.](https://arxiv.org/abs/2211.17192), [Chen et
# al.](https://arxiv.org/abs/2302.01318)). A proposal is accepted with probability
#
# $$\alpha = \sum_x q(x) \min\!\left(1, \frac{p(x)}{q(x)}\right) = \sum_x \min(p(x), q(x)),$$
#
# so a pass gives $1 + \alpha + \dots + \alpha^k = (1 - \alpha^{k+1})/(1 - \alpha)$ tokens if acceptances are
# independent, and the tokens have exactly the distribution $p$. A simulation with two fixed distributions:


# %%
def simulate_speculation(p, q, k, rounds, generator):
    """Simulate rounds of speculative decoding. Return the number of tokens and the first token of each round."""
    proposals = torch.multinomial(q, rounds * k, replacement=True, generator=generator).view(rounds, k)
    accepted = torch.rand(rounds, k, generator=generator) < (p / q)[proposals]
    num_accepted = accepted.long().cumprod(-1).sum(-1)  # up to the first rejection
    resampled = torch.multinomial((p - q).clamp(min=0), rounds, replacement=True, generator=generator)
    return num_accepted + 1, torch.where(accepted[:, 0], proposals[:, 0], resampled)


generator = torch.Generator().manual_seed(0)
p, q = (torch.randn(2, 20, generator=generator) * 0.8).softmax(-1)
alpha = float(torch.minimum(p, q).sum())
tokens_per_pass, first_tokens = simulate_speculation(p, q, 4, 20_000, generator)
shares = torch.bincount(first_tokens, minlength=20) / 20_000
expected_tv = float((2 * p * (1 - p) / (math.pi * 20_000)).sqrt().sum() / 2)
print(f"α = {alpha:.3f}")
expected = (1 - alpha**5) / (1 - alpha)
print(claim("simulation: tokens per pass", tokens_per_pass.float().mean(), predicted=expected, rtol=0.02))
total_variation = (shares - p).abs().sum() / 2
claim("simulation: total variation distance from p", total_variation, predicted=expected_tv, rtol=0.6)

# %% [markdown]
# With real models: the draft model is the target model with Gaussian noise added to its matrices, 0.2 of their own
# standard deviation. Eight sequences are generated; $\alpha$ is the mean of $\sum \min(p, q)$ over their tokens. The
# formula assumes independent acceptances with the same probability, which real text does not have, and the last pass of
# a sequence is truncated; so the tolerance is 20 %.

# %%
draft_model = ct.load("tiny-english", dtype=torch.float32).model
generator = torch.Generator().manual_seed(0)
with torch.no_grad():
    for weight in draft_model.parameters():
        if weight.ndim == 2:
            weight += 0.2 * weight.std() * torch.randn(weight.shape, generator=generator)
prompt_ids = tokenizer.encode(prompts[2])
params = SamplingParams(max_new_tokens=32, temperature=1.0, ignore_eos=True)
config = EngineConfig(model, max_num_seqs=8, max_model_len=96)
speculative = SpeculativeDecoder(config, draft_model=draft_model, num_draft_tokens=4)
requests = [speculative.submit(prompt_ids, params, seed=seed) for seed in range(8)]
speculative.run()
measured = speculative.stats.tokens_per_forward_pass

# %%
sequences = torch.tensor([prompt_ids + request.result().tokens for request in requests])  # (8, T)
with torch.no_grad():
    p, q = model(sequences).softmax(-1), draft_model(sequences).softmax(-1)  # (8, T, V)
alpha = float(torch.minimum(p, q).sum(-1)[:, len(prompt_ids) - 1 : -1].mean())
print(f"α = {alpha:.3f}")
expected = (1 - alpha**5) / (1 - alpha)
print(claim("tokens per forward pass with 4 draft tokens", measured, predicted=expected, rtol=0.2))
[speculated] = ct.generate(checkpoint, prompts[2], draft_model=draft_model, max_new_tokens=32, ignore_eos=True)
num_different = sum(a != b for a, b in zip(speculated.tokens, greedy[2].tokens, strict=True))
claim("greedy tokens that differ with a draft model", num_different, predicted=0)

# %%
figure, axes = plt.subplots(figsize=(6, 3.2))
grid = torch.linspace(0, 0.999, 100)
for k, color in ((1, "0.6"), (2, GREEN), (4, BLUE), (8, ORANGE)):
    axes.plot(grid, (1 - grid ** (k + 1)) / (1 - grid), color=color, label=f"{k} draft tokens")
axes.plot([alpha], [measured], "D", color=RED, label="measured, 4 draft tokens")
axes.set(xlabel="acceptance probability α", ylabel="tokens per forward pass", title="Speculative decoding")
axes.legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# ## Try
#
# - Count key-value pairs for a prompt of 100 tokens and 40 decoded tokens. Without a cache each pass includes the
#   prompt: $40 \cdot 100 + 39 \cdot 40 / 2$. With a cache: the prompt once and one pair per step.
# - Generate a story with temperature 1.5 and `min_p=0.1`, then with temperature 1.5 alone. Compare the entropies in the
#   figure first.
# - Use 8 draft tokens instead of 4. Compute the expected tokens per pass at this $\alpha$ before running it.
#
# Exercise: `cutaway learn start 8` (memory of a KV cache). `cutaway bench decode tiny-english` compares decode steps
# with this machine's limits, and the *Generate* screen of the web page (`cutaway open tiny-english`) shows the
# probabilities of each token.
