# %% [markdown]
# # 8. What it costs
#
# Parameters, FLOPs, bytes and seconds of a Transformer follow from its shape, before it exists. Afterwards you can say
# from four numbers how large a model is, what a token costs, what fits into a device, and whether arithmetic or memory
# is what it waits for. Needs: attention (2), the FFN (4), checkpointing (5) for the memory of training.

# %%
import math
import time
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import cutaway as ct
from cutaway.bench.hardware import matmul_flops_at_size, measure_copy_bandwidth
from cutaway.learn import claim
from cutaway.size import custom_hardware


def classic(layers, d_model, vocab_size, heads=32):
    """The shape that rules of thumb are for: FFN of 4d, two tables, positions that cost nothing."""
    block = {"attention": {"heads": heads, "position": {"kind": "none"}}, "ffn": {"kind": "mlp", "bias": False}}
    sizes = {"vocab_size": vocab_size, "d_model": d_model, "head": {"tied": False}}
    return ct.config({"form": "decoder", **sizes, "decoder": {"layers": layers, "block": block}})


# %% [markdown]
# ## Parameters
#
# Attention has four matrices of $d \times d$, the FFN two of $d \times 4d$: $4d^2 + 8d^2 = 12 d^2$ a block, twice as
# much in the FFN as in attention. A table of $V$ tokens is read at the bottom and another at the top:
#
# $$12\,N d^2 + 2\,V d.$$
#
# Norms and biases are left out: from $2d$ a block (Llama) to $13d$ (GPT-2) beside $12 d^2$, about one part in $d$ at
# most. With $N=32$, $d=4096$, $V=50{,}000$ this gives 6.85 billion, 13.7 GB at two bytes each: it fits into 16 GB. With
# $N=40$, $d=5120$ it does not. `ct.size` counts every tensor.

# %%
V = 50_000
for layers, d in ((32, 4096), (40, 5120)):
    sized = ct.size(classic(layers, d, V), dtype="fp16", context=1)
    rule = 12 * layers * d**2 + 2 * V * d
    billions = sized.num_parameters / 1e9
    print(claim(f"N = {layers}, d = {d:,}: billions of parameters", billions, predicted=rule / 1e9, rtol=1e-3))
    print(f"  weights alone: {sized.memory.bytes_by_component['weights'] / 1e9:.1f} GB of 16")

# %%
layer = ct.size(classic(1, 4096, V)).parameters.per_layer[0]
print(claim("classic FFN at d = 4,096, 8d² parameters", layer.ffn, predicted=8 * 4096**2, rtol=0))
print(claim("FFN to attention in a classic block", layer.ffn / layer.attention, predicted=2, rtol=0))
llama = ct.size("llama-3-8b").parameters.per_layer[0]
claim("Llama 3 8B's SwiGLU, 3·4096·14336 parameters", llama.ffn, predicted=3 * 4096 * 14336, rtol=0)

# %%
names = ["gpt2", "gpt2-xl", "opt-6.7b", "llama-2-7b", "llama-3-8b", "gpt3-175b"]
configs = {name: ct.config(name) for name in names}
off = {}
for name, shape in configs.items():
    tables = 1 if shape.head.tied else 2  # a tied head is the table again
    rule = 12 * shape.decoder.layers * shape.d_model**2 + tables * shape.vocab_size * shape.d_model
    off[name] = rule / ct.size(shape).num_parameters - 1
figure, axes = plt.subplots(figsize=(6, 2.8))
axes.barh(names, [100 * each for each in off.values()], color="#0072b2")
axes.axvline(0, color="black", lw=0.8)
axes.invert_yaxis()
axes.set(xlabel="rule of thumb against the exact count (%)", title="12Nd² + 2Vd is within 1 % for classic shapes")
figure.tight_layout()
worst = max(abs(off[name]) for name in names if "llama" not in name)
claim("the rule's largest error for classic shapes (GPT-2, OPT, GPT-3)", worst, below=0.02)

# %% [markdown]
# Llama 2 has SwiGLU with $h \approx \frac23 \cdot 4d$, which is $3dh \approx 8d^2$ again: the rule holds. Llama 3 has
# fewer key heads, a wider FFN and a vocabulary of 128,256.
#
# ## FLOPs
#
# A parameter in a product is one multiplication and one addition for each token: $2N$ FLOPs a token forward, twice
# that on the way back: $6N$ in training. Beside that stand attention's scores and weighted sums, $2 \cdot 2\,T d$ a
# layer and token, which no parameter counts. So:
#
# | | |
# |---|---|
# | 7 B parameters, one token | 14 GFLOP |
# | 175 B at 100 tokens a second | 35 TFLOP/s |
# | Llama 3 8B on 15 T tokens | 1,875 a parameter, 94 times [Chinchilla](https://arxiv.org/abs/2203.15556)'s 20 |

# %%
seven = ct.size("llama-2-7b", context=1)
gigaflop = seven.decode_flops.total / 1e9
print(claim("Llama 2 7B: GFLOP for one token, 2N", gigaflop, predicted=2 * seven.num_parameters / 1e9, rtol=0.03))
gpt3 = ct.size("gpt3-175b", context=1)
print(claim("GPT-3 at 100 tokens a second: TFLOP/s", 100 * gpt3.decode_flops.total / 1e12, predicted=35, rtol=0.03))
run = ct.size("llama-3-8b", mode="train", train_tokens=15 * 10**12).training_budget
print(claim("Llama 3 8B on 15 T: tokens a parameter", run.tokens_per_parameter, predicted=1875, rtol=0.01))
claim("as a multiple of Chinchilla's", run.train_tokens / run.chinchilla_tokens, predicted=94, rtol=0.01)

# %% [markdown]
# Now a real model, and PyTorch's own counter. The shipped model has a tied table of 2,048 × 256, which counts once as
# a parameter and once in a product (as the head; a lookup multiplies nothing), and norms that are no products. $N$
# here is all of it, and the quadratic part comes on top: $4\,T\,d$ a layer and token, over *all* pairs, since PyTorch
# counts masked ones too.

# %%
model = ct.load("tiny-python", dtype=torch.float32).model
model.use_kernel("explicit")  # PyTorch's counter passes over its tiled kernel on CPUs
N, layers, d = sum(each.numel() for each in model.parameters()), 6, 256


def counted(length, *, back):
    """FLOPs of so many tokens there, or there and back."""
    tokens = torch.randint(2048, (1, length), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(back):
        out = model(tokens)
        if back:
            out.sum().backward()
    return counter.get_total_flops()


T = 64
there, both = counted(T, back=False), counted(T, back=True)
rule = 2 * N + 4 * layers * T * d
print(claim("forward, FLOPs a token: 2N + 4·layers·T·d", there / T, predicted=rule, rtol=0.01))
print(claim("there and back, FLOPs a token: three times that", both / T, predicted=3 * rule, rtol=0.01))
apart = ct.size(model.config, context=512).forward_flops.total - counted(512, back=False)
claim("ct.size against PyTorch's counter at 512 tokens: FLOPs apart", apart, predicted=0, rtol=0)

# %% [markdown]
# When does the quadratic part overtake the rest? In a classic block, products with weights are $24 d^2$ and attention
# is $4Td$: at $T = 6d$. With GPT-2's $d = 768$ that is 4,608 tokens (over all pairs; over those that a causal mask
# leaves, twice as many).

# %%
lengths = [256, 1024, 4608, 9216, 16384]
shares, seen = [], []
for T in lengths:
    flops = ct.size("gpt2", context=T).forward_flops
    for sums, into in ((flops.full, shares), (flops.visible, seen)):
        quadratic = sums["scores"] + sums["values"]
        into.append(quadratic / (quadratic + sums["projections"] + sums["ffn"]))
print(claim("share of attention's quadratic part in GPT-2's blocks at T = 6d", shares[2], predicted=0.5, rtol=0.01))

figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(lengths, shares, "o-", color="#d55e00", label="over all pairs")
axes.plot(lengths, seen, "o-", color="#0072b2", label="over pairs that a causal mask leaves")
axes.axvline(6 * 768, color="black", lw=0.7, ls=":")
axes.text(6 * 768, 0.05, " T = 6d", fontsize=8)
axes.set(
    xscale="log",
    xticks=lengths,
    xticklabels=lengths,
    xlabel="tokens read at once",
    ylabel="share of a block's FLOPs",
    ylim=(0, 1),
    title="Attention's own part overtakes the weights at T = 6d",
)
axes.minorticks_off()
axes.legend(fontsize=8)
figure.tight_layout()

# %% [markdown]
# ## Memory: the score matrix that need not be
#
# Written as $\text{softmax}(QK^\top)V$, attention holds $T \times T$ numbers a head, and training keeps the pattern:
# $4 H T^2$ bytes a layer. But a row of the result needs only running sums over keys: with $m$ the largest score so
# far, $\ell = \sum e^{s - m}$ and $o = \sum e^{s-m} v$, a new tile of keys changes them by
#
# $$m' = \max(m, s), \qquad \ell' = e^{m - m'}\ell + \sum e^{s - m'}, \qquad o' = e^{m-m'} o + \sum e^{s-m'} v,$$
#
# and $o/\ell$ at the end is exact ([FlashAttention](https://arxiv.org/abs/2205.14135)). Eight lines:


# %%
def tiled(q, k, v, tile):
    """softmax(q·kᵀ/√D)·v, never more than (T, tile) scores at once."""
    most = torch.full((*q.shape[:-1], 1), -math.inf)
    total, out = torch.zeros_like(most), torch.zeros_like(v)
    for at in range(0, k.shape[-2], tile):
        scores = q @ k[..., at : at + tile, :].transpose(-1, -2) / math.sqrt(q.shape[-1])  # (H, T, tile)
        more = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - more).exp(), (most - more).exp()
        total, out = shrink * total + weights.sum(-1, keepdim=True), shrink * out + weights @ v[..., at : at + tile, :]
        most = more
    return out / total


q, k, v = torch.randn(3, 8, 512, 32, generator=torch.Generator().manual_seed(0))
whole = (q @ k.transpose(-1, -2) / math.sqrt(32)).softmax(-1) @ v
claim("tiles of 64 against the whole matrix: largest difference", (tiled(q, k, v, 64) - whole).abs().max(), below=1e-5)

# %% [markdown]
# The library has both kernels: `explicit` writes the matrix out, `sdpa` is tiled. What autograd keeps in a layer: with
# tiles, a number of vectors a token, so it grows as $T$; written out, the pattern comes on top, $4 H T^2$ bytes for
# each matrix of scores that is kept (the pattern and its copies: one to three). So from 256 to 512 tokens the first
# doubles, and the difference between the two grows fourfold.


# %%
def kept_bytes(kernel, length):
    """What waits for the way back, weights aside, each piece of memory once."""
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.use_kernel(kernel).hidden_states(torch.zeros(1, length, dtype=torch.long))
    return sum(size for place, (size, _) in held.items() if place not in weights)


kept = {(kernel, T): kept_bytes(kernel, T) for kernel in ("sdpa", "explicit") for T in (256, 512)}
model.use_kernel("sdpa")
doubled = kept["sdpa", 512] / kept["sdpa", 256]
print(claim("tiled: memory kept, 512 tokens against 256", doubled, predicted=2, rtol=0.02))
beside = {T: kept["explicit", T] - kept["sdpa", T] for T in (256, 512)}
print(claim("what writing the scores out adds, 512 against 256", beside[512] / beside[256], predicted=4, rtol=0.1))
claim("that is, in matrices of T × T a head and layer", beside[512] / (6 * 8 * 512**2 * 4), above=0.9, below=3.1)

# %% [markdown]
# ## Two limits
#
# A device multiplies so fast (FLOP/s) and reads so fast (bytes/s). A pass takes at least as long as the slower of the
# two needs. What decides is how many FLOPs are done for each byte read:
#
# - *decoding one text*: every weight of 4 bytes is read for 2 FLOPs: 0.5 FLOP a byte in 32 bits (1 in 16 bits),
#   whatever the model. The device waits for memory;
# - *training on $n$ tokens*: the same weights serve all of them, $6n$ FLOPs for each weight, which is read there and
#   back and written anew, its gradient written and read, AdamW's state read and written: at least 36 bytes. That is
#   $n/6$ FLOPs a byte. With some hundred tokens the device waits for arithmetic.
#
# The device turns from one to the other at its own ratio of the two rates, the *ridge*. First this machine's limits,
# measured bare (one copy, one large product); then a model of 12 million parameters, too large for a cache.

# %%
cpu = torch.device("cpu")
bandwidth, peak = (
    measure_copy_bandwidth(cpu),
    max(matmul_flops_at_size(side, cpu, torch.float32) for side in (256, 1024)),
)
here = custom_hardware(bandwidth=bandwidth, flops=peak)
print(f"{bandwidth / 1e9:.1f} GB/s, {peak / 1e9:.1f} GFLOP/s: the ridge is at {peak / bandwidth:.1f} FLOP a byte")
shape = classic(6, 384, 2048, heads=8)
asked = {"context": 64, "dtype": "fp32", "hardware": here}
decode = ct.size(shape, **asked).decode_time
train = ct.size(shape, **asked, batch_size=8, mode="train").train_time
print(claim("decoding one text: FLOPs a byte", decode.arithmetic_intensity, predicted=0.5, rtol=0.15))
claim("training on 512 tokens: FLOPs a byte, n/6", train.arithmetic_intensity, predicted=512 / 6, rtol=0.25)

# %%
big = ct.build(shape, seed=0)
optimizer = torch.optim.AdamW(big.parameters(), fused=True)


def seconds(work, times):
    """The fastest of several, the first not counted."""
    taken = []
    for _ in range(times + 1):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def decode_step(rows):
    cache = big.new_cache(rows, 64)
    last = torch.zeros(rows, 1, dtype=torch.long)
    with torch.no_grad():
        return seconds(lambda: big(last, cache=cache), 8)


def train_step():
    tokens = torch.randint(2048, (8, 64))
    F.cross_entropy(big(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


rows = (1, 2, 4, 8, 16, 32)
steps = {n: decode_step(n) for n in rows}
trained = seconds(train_step, 2)
decoded = steps[1]
shares = {
    "decoding one text": (decode.bandwidth_seconds / decoded, decode.compute_seconds / decoded),
    "training on 512 tokens": (train.bandwidth_seconds / trained, train.compute_seconds / trained),
}
for name, (memory, arithmetic) in shares.items():
    print(f"{name}: {100 * memory:.0f} % of the memory's limit, {100 * arithmetic:.0f} % of the arithmetic's")

# %% [markdown]
# If decoding waits for memory, more texts in one step are nearly free until the ridge: the weights are read once for
# all of them. On any machine whose ridge is above 0.5 FLOP a byte (all that are sold) eight texts must take far less
# than eight times as long, so tokens a second grow. That is why servers batch.

# %%
gain = {n: n * steps[1] / steps[n] for n in rows}
(read, decoding), (moved, training) = shares.values()
print(claim("decoding is nearer to the memory's limit than to the arithmetic's (ratio)", read / decoding, above=1))
print(claim("training is nearer to the arithmetic's (ratio)", training / moved, above=1))
print(claim("training makes more of the arithmetic than decoding does (ratio)", training / decoding, above=1.5))
print(claim("tokens a second, 32 texts at once against one", gain[32], above=2))

figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3))
for shift, (what, place, colour) in enumerate((("memory", 0, "#0072b2"), ("arithmetic", 1, "#d55e00"))):
    heights = [100 * each[place] for each in shares.values()]
    left.bar([0.38 * shift, 1 + 0.38 * shift], heights, width=0.36, color=colour, label=what)
left.set(
    xticks=[0.19, 1.19],
    xticklabels=["decode,\n1 text", "train,\n512 tokens"],
    ylabel="share of this machine's limit (%)",
    title="What each comes near to",
)
left.legend(fontsize=8)
right.plot(rows, [gain[n] for n in rows], "o-", color="#0072b2", label="measured")
right.plot(rows, rows, color="black", lw=0.7, ls=":", label="more texts for free")
right.set(
    xscale="log",
    yscale="log",
    xticks=rows,
    xticklabels=rows,
    yticks=rows,
    yticklabels=rows,
    xlabel="texts at once",
    ylabel="tokens a second (one text = 1)",
    title="Batching",
)
right.minorticks_off()
right.legend(fontsize=8)
figure.tight_layout()

# %% [markdown]
# ## Parts at an equal budget
#
# - **SwiGLU against GELU**: three matrices in place of two, so $\frac23$ of the width: equal in parameters and FLOPs.
# - **Grouped queries against one key head a query head**: with $g$ times fewer key heads the cache is $g$ times
#   smaller; of a block's $12d^2$ parameters, $2d^2(1 - 1/g)$ are free for a wider FFN.
# - **RMSNorm against LayerNorm**: half the vectors ($\gamma$ without $\beta$), one statistic a token in place of two;
#   beside the products both are small.


# %%
def variant(attention=None, ffn=None, norm="rmsnorm"):
    block = {"attention": {"heads": 8, **(attention or {})}, "ffn": ffn or {"kind": "mlp", "bias": False}}
    stack = {"layers": 2, "norm": {"kind": norm}, "block": block}
    return ct.config({"form": "decoder", "vocab_size": 4096, "d_model": 512, "decoder": stack})


kinds = {
    "GELU": variant(),
    "SwiGLU": variant(ffn={"kind": "gated", "hidden": 1368}),
    "GQA, 2 key heads": variant(attention={"kv_heads": 2}, ffn={"kind": "mlp", "bias": False, "hidden": 2432}),
    "LayerNorm": variant(norm="layernorm"),
}
models = {name: ct.build(kind, seed=0) for name, kind in kinds.items()}
tokens = torch.zeros(1, 128, dtype=torch.long)
sizes = {name: ct.size(kind, context=128, dtype="fp32") for name, kind in kinds.items()}
with torch.no_grad():
    pace = {name: seconds(partial(each, tokens), 3) for name, each in models.items()}
for name, one in sizes.items():
    costs = f"{one.num_parameters / 1e6:6.2f} M parameters {one.flops.total / 1e9:5.2f} GFLOP"
    cache = f"{one.kv_cache.total_bytes / 1e6:5.2f} MB of cache"
    print(f"{name:17}{costs} {cache} {1e3 * pace[name]:5.0f} ms")


# %%
def cache_bytes(model):
    """Of real tensors: keys and values of 128 tokens."""
    layers = model.new_cache(1, 128).layers
    return sum(each.k.nbytes + each.v.nbytes for each in layers)


gelu, gated, grouped, layer_norm = (one.num_parameters for one in sizes.values())
print(claim("SwiGLU with 2/3 of the width: parameters against GELU's", gated / gelu, predicted=1, rtol=0.005))
print(claim("fewer key heads, wider FFN: parameters against GELU's", grouped / gelu, predicted=1, rtol=0.005))
smaller = cache_bytes(models["GELU"]) / cache_bytes(models["GQA, 2 key heads"])
print(claim("cache of 8 key heads against 2, in real tensors", smaller, predicted=4, rtol=0))
print(claim("LayerNorm's extra vectors as a share of all parameters", layer_norm / gelu - 1, below=1e-3))
spread = max(pace.values()) / min(pace.values())
claim("at an equal budget no variant is much slower (slowest to fastest)", spread, below=4)

# %% [markdown]
# Which of them *learns* best at an equal budget is a question of training, seeds and intervals:
# `cutaway ablate components` trains all of them, three seeds each, in some minutes.
#
# ## Try
#
# - `ct.size("llama-3-8b", hardware="h100").compute_bound_batch_size`: the number of texts at which decoding turns
#   from waiting for memory to waiting for arithmetic. Estimate it first from the ridge.
# - `ct.size("llama-3-8b", dtype="int4", context=8192).memory.peak_by_component`: what fits into 16 GB after all, and
#   what is then the largest part?
# - `optimizer="sgd"` or `activation_checkpointing="full"` in a `mode="train"` question: which of the parts of
#   `memory` move?
#
# Exercises 4, 5 and 8 (`cutaway learn start 4`) count by hand what is counted here. On the command line: `cutaway size
# llama-3-8b --gpu h100`, and `cutaway bench` measures this machine properly. Before: [7.
# Information](07_information.py). Next: [9. Decoding](09_decoding.py).
