# %% [markdown]
# # 8. Parameters, FLOPs, memory and time
#
# The number of parameters, the FLOPs and the memory of a Transformer can be computed from its configuration. A lower
# bound of the time can be computed from these and from the peak FLOP/s and memory bandwidth of the device. This
# notebook compares rules of thumb with exact counts, and the exact counts with measurements by PyTorch.
#
# Prerequisites: attention ([notebook 2](02_attention.py)), the FFN ([notebook 4](04_ffn_norms_residuals.py)),
# activation checkpointing ([notebook 5](05_gradients.py)) for the memory of training.

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
from cutaway.learn.studies import load_results
from cutaway.size import custom_hardware


def make_classic_config(layers, d_model, vocab_size, heads=32):
    """Return a configuration to which the rules of thumb apply: FFN of 4d, untied head, no position parameters."""
    block = {"attention": {"heads": heads, "position": {"kind": "none"}}, "ffn": {"kind": "mlp", "bias": False}}
    sizes = {"vocab_size": vocab_size, "d_model": d_model, "head": {"tied": False}}
    return ct.config({"form": "decoder", **sizes, "decoder": {"layers": layers, "block": block}})


# %% [markdown]
# ## Parameters
#
# In a classic block (one key-value head per query head, no gate) attention has four $d \times d$ matrices, the FFN two
# of $d \times 4d$: $4d^2 + 8d^2 = 12 d^2$, of which the FFN has two thirds. The embedding and an untied head have $V d$
# each:
#
# $$12\,N d^2 + 2\,V d.$$
#
# Norms and biases are omitted: they have from $2d$ parameters per block (Llama) to $13d$ (GPT-2), compared with
# $12 d^2$. With $N=32$, $d=4096$, $V=50{,}000$ the formula gives 6.85 billion parameters. At two bytes each the weights
# alone take 13.7 GB of a memory of 16 GB; KV cache, activations and the runtime need the rest. The weights of a model
# with $N=40$, $d=5120$ do not fit. `ct.size` counts every tensor.

# %%
V = 50_000
for layers, d in ((32, 4096), (40, 5120)):
    size = ct.size(make_classic_config(layers, d, V), dtype="fp16", context=1)
    rule = 12 * layers * d**2 + 2 * V * d
    billions = size.num_parameters / 1e9
    print(
        claim(f"N = {layers}, d = {d:,}: billions of parameters", billions, predicted=rule / 1e9, rtol=1e-3, id="C220")
    )
    print(f"  weights: {size.memory.bytes_by_component['weights'] / 1e9:.1f} GB of 16 GB")

# %%
layer = ct.size(make_classic_config(1, 4096, V)).parameters.per_layer[0]
print(claim("classic FFN at d = 4,096: 8d² parameters", layer.ffn, predicted=8 * 4096**2, rtol=0, id="C226"))
print(
    claim(
        "classic block: FFN parameters / attention parameters",
        layer.ffn / layer.attention,
        predicted=2,
        rtol=0,
        id="C089",
    )
)
llama = ct.size("llama-3-8b").parameters.per_layer[0]
claim(
    "Llama 3 8B: SwiGLU of one layer, 3·4096·14336 parameters", llama.ffn, predicted=3 * 4096 * 14336, rtol=0, id="C227"
)

# %%
names = ["gpt2", "gpt2-xl", "opt-6.7b", "llama-2-7b", "llama-3-8b", "gpt3-175b"]
relative_errors = {}
for name in names:
    config = ct.config(name)
    num_tables = 1 if config.head.tied else 2  # a tied head shares the embedding
    rule = 12 * config.decoder.layers * config.d_model**2 + num_tables * config.vocab_size * config.d_model
    relative_errors[name] = rule / ct.size(config).num_parameters - 1
figure, axes = plt.subplots(figsize=(6, 2.8))
axes.barh(names, [100 * error for error in relative_errors.values()], color="#0072b2")
axes.axvline(0, color="black", lw=0.8)
axes.invert_yaxis()
axes.set(xlabel="error of 12Nd² + 2Vd, %", title="Rule of thumb compared with the exact number of parameters")
figure.tight_layout()
worst = max(abs(relative_errors[name]) for name in names if "llama" not in name)
claim("largest relative error of the rule for GPT-2, OPT and GPT-3", worst, below=0.02, id="C220")

# %% [markdown]
# Llama 2 has SwiGLU with $h \approx \frac23 \cdot 4d$, so $3dh \approx 8d^2$, and the rule applies. Llama 3 has fewer
# key-value heads, a wider FFN and a vocabulary of 128,256.
#
# ## FLOPs
#
# Each parameter of a matrix product costs one multiplication and one addition per token. For $N$ parameters this is
# $2N$ FLOPs per token in the forward pass and twice as many in the backward pass, so $6N$ in training. Attention scores
# and weighted sums add $2 \cdot 2\,T d$ per layer and token, which is not proportional to the parameters. So:
#
# | | |
# |---|---|
# | 7 B parameters, one token | 14 GFLOP |
# | 175 B at 100 tokens per second | 35 TFLOP/s |
# | Llama 3 8B, 15 T tokens | 1,875 tokens per parameter, 94 times [Chinchilla](https://arxiv.org/abs/2203.15556)'s 20 |

# %%
llama_2 = ct.size("llama-2-7b", context=1)
gigaflop = llama_2.decode_flops.total / 1e9
print(
    claim("Llama 2 7B: GFLOP per token, 2N", gigaflop, predicted=2 * llama_2.num_parameters / 1e9, rtol=0.03, id="C213")
)
gpt3 = ct.size("gpt3-175b", context=1)
teraflops = 100 * gpt3.decode_flops.total / 1e12
print(claim("GPT-3 at 100 tokens per second: TFLOP/s", teraflops, predicted=35, rtol=0.03, id="C214"))
budget = ct.size("llama-3-8b", mode="train", train_tokens=15 * 10**12).training_budget
print(
    claim("Llama 3 8B on 15 T: tokens per parameter", budget.tokens_per_parameter, predicted=1875, rtol=0.01, id="C218")
)
claim(
    "multiple of Chinchilla's tokens",
    budget.train_tokens / budget.chinchilla_tokens,
    predicted=94,
    rtol=0.01,
    id="C218",
)

# %% [markdown]
# The next cell repeats this count for a real model with PyTorch's FLOP counter. `tiny-english` has a tied embedding of
# 4,096 × 256, which is counted once as a parameter and once in a matrix product (the head; a lookup has no FLOPs), and
# norms, which are not matrix products. $N$ is the number of all parameters. The quadratic term is $4\,T\,d$ per layer
# and token over *all* pairs, because PyTorch counts masked pairs too.

# %%
model = ct.load("tiny-english", dtype=torch.float32).model
model.use_kernel("explicit")  # PyTorch's counter does not count its fused attention kernel on CPUs
N, layers, d = sum(param.numel() for param in model.parameters()), 6, 256


def count_flops(length, *, backward):
    """Count the FLOPs of a forward pass, or of a forward and backward pass, over `length` tokens."""
    tokens = torch.randint(4096, (1, length), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        logits = model(tokens)
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


T = 64
forward_flops, training_flops = count_flops(T, backward=False), count_flops(T, backward=True)
rule = 2 * N + 4 * layers * T * d
print(
    claim("forward pass: FLOPs per token, 2N + 4·layers·T·d", forward_flops / T, predicted=rule, rtol=0.01, id="C216")
)
print(
    claim(
        "forward and backward pass: FLOPs per token, 3 × that",
        training_flops / T,
        predicted=3 * rule,
        rtol=0.01,
        id="C215",
    )
)
difference = ct.size(model.config, context=512).forward_flops.total - count_flops(512, backward=False)
claim("ct.size − PyTorch's counter at 512 tokens, FLOPs", difference, predicted=0, rtol=0)

# %% [markdown]
# When does the quadratic term exceed the rest? In a classic block the products with weights are $24 d^2$ FLOPs per
# token and the quadratic term is $4Td$: they are equal at $T = 6d$. With GPT-2's $d = 768$ that is 4,608 tokens (over
# all pairs; twice as many over the visible pairs of a causal mask).

# %%
lengths = [256, 1024, 4608, 9216, 16384]
all_pairs_share, visible_share = [], []
for T in lengths:
    flops = ct.size("gpt2", context=T).forward_flops
    for counts, shares in ((flops.full, all_pairs_share), (flops.visible, visible_share)):
        quadratic = counts["scores"] + counts["values"]
        shares.append(quadratic / (quadratic + counts["projections"] + counts["ffn"]))
print(claim("GPT-2: share of the quadratic term at T = 6d", all_pairs_share[2], predicted=0.5, rtol=0.01, id="C216"))

figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(lengths, all_pairs_share, "o-", color="#d55e00", label="all pairs")
axes.plot(lengths, visible_share, "o-", color="#0072b2", label="visible pairs of a causal mask")
axes.axvline(6 * 768, color="black", lw=0.7, ls=":")
axes.text(6 * 768, 0.05, " T = 6d", fontsize=8)
axes.set(
    xscale="log",
    xticks=lengths,
    xticklabels=lengths,
    xlabel="sequence length, tokens",
    ylabel="share of a block's FLOPs",
    ylim=(0, 1),
    title="GPT-2: share of the quadratic term of attention",
)
axes.minorticks_off()
axes.legend(fontsize=8)
figure.tight_layout()

# %% [markdown]
# ## Memory of attention scores, and tiled attention
#
# $\text{softmax}(QK^\top)V$ computed directly needs $T \times T$ numbers per head, and training stores the pattern:
# $4 H T^2$ bytes per layer. A row of the result can instead be accumulated over tiles of keys: with $m$ the largest
# score so far, $\ell = \sum e^{s - m}$ and $o = \sum e^{s-m} v$, a new tile updates
#
# $$m' = \max(m, s), \qquad \ell' = e^{m - m'}\ell + \sum e^{s - m'}, \qquad o' = e^{m-m'} o + \sum e^{s-m'} v,$$
#
# and $o/\ell$ is the exact result ([FlashAttention](https://arxiv.org/abs/2205.14135)):


# %%
def tiled_attention(q, k, v, tile_size):
    """softmax(q·kᵀ/√D)·v with at most (T, tile_size) scores in memory."""
    row_max = torch.full((*q.shape[:-1], 1), -math.inf)  # (H, T, 1)
    row_sum, out = torch.zeros_like(row_max), torch.zeros_like(v)
    for start in range(0, k.shape[-2], tile_size):
        tile = slice(start, start + tile_size)
        scores = q @ k[..., tile, :].transpose(-1, -2) / math.sqrt(q.shape[-1])  # (H, T, tile_size)
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        weights, rescale = (scores - new_max).exp(), (row_max - new_max).exp()
        row_sum = rescale * row_sum + weights.sum(-1, keepdim=True)
        out = rescale * out + weights @ v[..., tile, :]
        row_max = new_max
    return out / row_sum


q, k, v = torch.randn(3, 8, 512, 32, generator=torch.Generator().manual_seed(0))
direct = (q @ k.transpose(-1, -2) / math.sqrt(32)).softmax(-1) @ v
difference = (tiled_attention(q, k, v, 64) - direct).abs().max()
claim("tiles of 64 keys against the full matrix: largest difference", difference, below=1e-5, id="C066")

# %% [markdown]
# The library has both kernels: `explicit` computes the full score matrix, `sdpa` is tiled. With `sdpa`, autograd stores
# a fixed number of vectors per token in each layer, which is proportional to $T$. With `explicit`, it also stores
# $4 H T^2$ bytes for each stored $T \times T$ matrix (one to three matrices: the pattern and its copies). So from 256
# to 512 tokens the memory with `sdpa` doubles, and the difference between the two kernels is multiplied by four.


# %%
def saved_bytes(kernel, length):
    """Count the bytes that autograd stores for the backward pass, without the weights, each storage once."""
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.use_kernel(kernel).hidden_states(torch.zeros(1, length, dtype=torch.long))
    return sum(num_bytes for address, (num_bytes, _) in saved.items() if address not in weights)


saved = {(kernel, T): saved_bytes(kernel, T) for kernel in ("sdpa", "explicit") for T in (256, 512)}
model.use_kernel("sdpa")
print(
    claim(
        "sdpa: bytes at 512 tokens / at 256", saved["sdpa", 512] / saved["sdpa", 256], predicted=2, rtol=0.02, id="C192"
    )
)
extra = {T: saved["explicit", T] - saved["sdpa", T] for T in (256, 512)}
print(claim("explicit − sdpa: bytes at 512 tokens / at 256", extra[512] / extra[256], predicted=4, rtol=0.1, id="C192"))
num_matrices = extra[512] / (6 * 8 * 512**2 * 4)
claim("explicit − sdpa in T × T matrices per head and layer", num_matrices, above=0.9, below=3.1, id="C192")

# %% [markdown]
# ## Roofline: compute-bound and bandwidth-bound
#
# A device has a peak compute rate (FLOP/s) and a memory bandwidth (bytes/s). A forward pass or a training step takes at
# least the larger of FLOPs / peak and bytes / bandwidth. Which one is larger depends on the arithmetic intensity, FLOPs
# per byte:
#
# - *decoding one sequence*: every weight of 4 bytes is read for 2 FLOPs: 0.5 FLOPs per byte in fp32 (1 in bf16), for
#   any model;
# - *training on $n$ tokens*: $6n$ FLOPs per weight. The weight is read in the forward and backward pass and written by
#   the optimizer, its gradient is written and read, and AdamW's state is read and written, which is at least 36 bytes
#   per weight. So there are at most $n/6$ FLOPs per byte.
#
# The boundary is the *ridge point*, peak FLOP/s divided by bandwidth: below it an operation is bandwidth-bound, above
# it compute-bound. The claims use a data-sheet CPU (EPYC 9654) and a model of 12 million parameters in fp32.

# %%
config = make_classic_config(6, 384, 2048, heads=8)
options = {"context": 64, "dtype": "fp32", "hardware": "epyc-9654"}
decode = ct.size(config, **options).decode_time
train = ct.size(config, **options, batch_size=8, mode="train").train_time
print(f"ridge point of the EPYC 9654: {decode.ridge_point:.1f} FLOPs per byte")
print(claim("decoding one sequence: FLOPs per byte", decode.arithmetic_intensity, predicted=0.5, rtol=0.15, id="C205"))
print(
    claim(
        "training on 512 tokens: FLOPs per byte, n/6",
        train.arithmetic_intensity,
        predicted=512 / 6,
        rtol=0.25,
        id="C189",
    )
)
decode_ratio = decode.bandwidth_seconds / decode.compute_seconds
print(claim("decoding is bandwidth-bound: bandwidth time / compute time", decode_ratio, above=1, id="C189"))
train_ratio = train.compute_seconds / train.bandwidth_seconds
claim("training is compute-bound: compute time / bandwidth time", train_ratio, above=1, id="C189")

# %% [markdown]
# A batch shares one read of the weights, while each sequence has its own KV cache. With $W$ bytes of weights in matrix
# products and $C$ bytes of cache per sequence, a step with $n$ sequences reads $W/n + C$ bytes per token at the same
# FLOPs per token. So a batch of 32 has $(W + C)/(W/32 + C)$ times the arithmetic intensity of one sequence.

# %%
batch_sizes = (1, 2, 4, 8, 16, 32)
intensity = {n: ct.size(config, **options, batch_size=n).decode_time.arithmetic_intensity for n in batch_sizes}
size = ct.size(config, **options)
weight_bytes = 4 * (size.num_parameters - 2048 * 384)  # without the embedding, which is a lookup
sequence_bytes = size.kv_cache.total_bytes
expected = (weight_bytes + sequence_bytes) / (weight_bytes / 32 + sequence_bytes)
ratio = intensity[32] / intensity[1]
claim("batch of 32: FLOPs per byte relative to one sequence", ratio, predicted=expected, rtol=0.02, id="C206")

# %% [markdown]
# The following cells measure this machine: its copy bandwidth and matrix-product FLOP/s, the speed of a decode step and
# of a training step as a share of both limits, and decode throughput by batch size. These numbers depend on the machine
# and its load, so they are printed and plotted without a claim.

# %%
cpu = torch.device("cpu")
bandwidth = measure_copy_bandwidth(cpu)
peak = max(matmul_flops_at_size(side, cpu, torch.float32) for side in (256, 1024))
print(f"{bandwidth / 1e9:.1f} GB/s, {peak / 1e9:.1f} GFLOP/s, ridge point {peak / bandwidth:.1f} FLOPs per byte")
options["hardware"] = custom_hardware(bandwidth=bandwidth, flops=peak)
decode = ct.size(config, **options).decode_time
train = ct.size(config, **options, batch_size=8, mode="train").train_time
decoder = ct.build(config, seed=0)
optimizer = torch.optim.AdamW(decoder.parameters(), fused=True)


def min_seconds(function, repeats):
    """Smallest time of `repeats` calls after a warm-up call."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def time_decode_step(batch_size):
    cache = decoder.new_cache(batch_size, 64)
    last_tokens = torch.zeros(batch_size, 1, dtype=torch.long)
    with torch.no_grad():
        return min_seconds(lambda: decoder(last_tokens, cache=cache), 8)


def train_step():
    tokens = torch.randint(2048, (8, 64))
    F.cross_entropy(decoder(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


decode_seconds = {n: time_decode_step(n) for n in batch_sizes}
train_seconds = min_seconds(train_step, 2)
shares = {
    "decoding one sequence": (decode.bandwidth_seconds / decode_seconds[1], decode.compute_seconds / decode_seconds[1]),
    "training on 512 tokens": (train.bandwidth_seconds / train_seconds, train.compute_seconds / train_seconds),
}
for name, (memory_share, compute_share) in shares.items():
    print(
        f"{name}: {100 * memory_share:.0f} % of the bandwidth limit, {100 * compute_share:.0f} % of the compute limit"
    )
throughput = {n: n * decode_seconds[1] / decode_seconds[n] for n in batch_sizes}
print({n: f"{value:.1f}×" for n, value in throughput.items()})

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3))
for index, (name, color) in enumerate((("bandwidth", "#0072b2"), ("compute", "#d55e00"))):
    heights = [100 * share[index] for share in shares.values()]
    left.bar([0.38 * index, 1 + 0.38 * index], heights, width=0.36, color=color, label=name)
left.set(
    xticks=[0.19, 1.19],
    xticklabels=["decode,\n1 sequence", "train,\n512 tokens"],
    ylabel="share of this machine's limit, %",
    title="Measured time and roofline",
)
left.legend(fontsize=8)
right.plot(batch_sizes, [throughput[n] for n in batch_sizes], "o-", color="#0072b2", label="measured throughput")
right.plot(batch_sizes, [intensity[n] / intensity[1] for n in batch_sizes], color="#d55e00", label="FLOPs per byte")
right.plot(batch_sizes, batch_sizes, color="black", lw=0.7, ls=":", label="proportional to batch size")
right.set(
    xscale="log",
    yscale="log",
    xticks=batch_sizes,
    xticklabels=batch_sizes,
    yticks=batch_sizes,
    yticklabels=batch_sizes,
    xlabel="batch size",
    ylabel="relative to one sequence",
    title="Decoding by batch size",
)
right.minorticks_off()
right.legend(fontsize=7)
figure.tight_layout()

# %% [markdown]
# ## Components at an equal budget
#
# - **SwiGLU and GELU**: SwiGLU has three matrices instead of two, so it has $\frac23$ of the hidden units for equal
#   parameters and FLOPs.
# - **GQA and MHA**: with $g$ times fewer key-value heads the cache is $g$ times smaller; $2d^2(1 - 1/g)$ of a block's
#   $12d^2$ parameters can be used for a wider FFN.
# - **RMSNorm and LayerNorm**: RMSNorm has half the parameters ($\gamma$ without $\beta$) and one statistic per token
#   instead of two. Both norms are cheap compared with the matrices.


# %%
def make_variant(attention=None, ffn=None, norm="rmsnorm"):
    block = {"attention": {"heads": 8, **(attention or {})}, "ffn": ffn or {"kind": "mlp", "bias": False}}
    stack = {"layers": 2, "norm": {"kind": norm}, "block": block}
    return ct.config({"form": "decoder", "vocab_size": 4096, "d_model": 512, "decoder": stack})


variants = {
    "GELU": make_variant(),
    "SwiGLU": make_variant(ffn={"kind": "gated", "hidden": 1368}),
    "GQA, 2 KV heads": make_variant(attention={"kv_heads": 2}, ffn={"kind": "mlp", "bias": False, "hidden": 2432}),
    "LayerNorm": make_variant(norm="layernorm"),
}
models = {name: ct.build(variant, seed=0) for name, variant in variants.items()}
tokens = torch.zeros(1, 128, dtype=torch.long)
sizes = {name: ct.size(variant, context=128, dtype="fp32") for name, variant in variants.items()}
with torch.no_grad():
    seconds = {name: min_seconds(partial(variant, tokens), 3) for name, variant in models.items()}
for name, size in sizes.items():
    params, gflop = size.num_parameters / 1e6, size.flops.total / 1e9
    cache = size.kv_cache.total_bytes / 1e6
    print(f"{name:17}{params:6.2f} M parameters {gflop:5.2f} GFLOP {cache:5.2f} MB cache {1e3 * seconds[name]:5.0f} ms")


# %%
def cache_bytes(model):
    """Bytes of the KV cache tensors for 128 tokens."""
    return sum(layer.k.nbytes + layer.v.nbytes for layer in model.new_cache(1, 128).layers)


gelu, swiglu, gqa, layer_norm = (size.num_parameters for size in sizes.values())
print(
    claim("SwiGLU with 2/3 of the hidden units: parameters / GELU's", swiglu / gelu, predicted=1, rtol=0.005, id="C085")
)
print(claim("GQA with a wider FFN: parameters / GELU's", gqa / gelu, predicted=1, rtol=0.005))
flops = {name: size.flops.total for name, size in sizes.items()}
print(
    claim("largest FLOPs / smallest FLOPs of the four variants", max(flops.values()) / min(flops.values()), below=1.01)
)
ratio = cache_bytes(models["GELU"]) / cache_bytes(models["GQA, 2 KV heads"])
print(claim("KV cache tensors: 8 KV heads / 2 KV heads", ratio, predicted=4, rtol=0, id="C198"))
claim("LayerNorm's additional parameters / all parameters", layer_norm / gelu - 1, below=1e-3)

# %% [markdown]
# Which variant has the lowest loss at an equal budget is a matter of training, with several seeds. The study
# `components` trains variants of a decoder of 3 blocks on equal tokens, bytes of Python's standard library, ten seeds
# each, each with the best of seven learning rates; SwiGLU, GELU and ReLU have equal parameters, and so have the numbers
# of heads. The figure shows the validation loss minus that of the baseline (RMSNorm, pre-norm,
# SwiGLU, 4 heads, RoPE, tied embeddings). `cutaway ablate components` compares variants of your own.

# %%
study = load_results("components")
labels = {
    "layernorm": "LayerNorm",
    "heads-8": "8 heads",
    "untied": "untied",
    "relu": "ReLU",
    "heads-2": "2 heads",
    "swap": "FFN before attention",
    "ffn-half": "FFN of half the width",
    "heads-1": "1 head",
    "post-norm": "post-norm",
    "gelu": "GELU",
    "no-final-norm": "no final norm",
    "no-ffn": "no FFN",
    "no-norm": "no norm",
    "no-attention": "no attention",
}
differences = {name: study.get(f"difference/{name}-baseline") for name in labels}
labels = {name: labels[name] for name in sorted(labels, key=lambda name: differences[name].mean)}
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
axes.barh(
    range(len(labels)),
    [differences[name].mean for name in labels],
    xerr=[
        [differences[name].mean - differences[name].low for name in labels],
        [differences[name].high - differences[name].mean for name in labels],
    ],
    color="#0072B2",
)
axes.set_yticks(range(len(labels)), labels.values(), fontsize=8)
axes.invert_yaxis()
axes.set(xlabel="validation loss − baseline's, nats per byte", title="Trained with one change, 10 seeds")

# %%
print(claim("GELU − SwiGLU at equal parameters", differences["gelu"].low, above=0, id="C087"))
print(claim("ReLU − SwiGLU at equal parameters", differences["relu"].low, above=0, id="C087"))
print(claim("LayerNorm − RMSNorm", differences["layernorm"].mean, above=-0.01, below=0.01, id="C110"))
print(
    claim(
        "no attention / no FFN, absent in training",
        differences["no-attention"].low / differences["no-ffn"].high,
        above=2,
        id="C098",
    )
)
removed = {name: study.get(f"difference/after-{name}") for name in ("no-attention", "no-ffn")}
print(
    claim(
        "no attention / no FFN, removed after training",
        removed["no-attention"].high / removed["no-ffn"].low,
        below=1,
        id="C098",
    )
)
print(
    claim(
        "FFN before attention, trained that way / after training",
        differences["swap"].high / study.get("difference/after-swap").low,
        below=0.1,
        id="C120",
    )
)
claim("8 heads − 4 heads", differences["heads-8"].mean, above=-0.01, below=0.02, id="C262")

# %% [markdown]
# ## Try
#
# - `ct.size("llama-3-8b", hardware="h100").compute_bound_batch_size`: the batch size at which decoding becomes
#   compute-bound. Estimate it first from the ridge point.
# - `ct.size("llama-3-8b", dtype="int4", context=8192).memory.peak_by_component`: does it fit in 16 GB, and which
#   component is the largest?
# - Use `optimizer="sgd"` or `activation_checkpointing="full"` with `mode="train"`: which components of `memory` change?
#
# Exercises 4, 5 and 8 (`cutaway learn start 4`) count parameters and cache memory by hand. On the command line:
# `cutaway size llama-3-8b --gpu h100`; `cutaway bench` measures this machine. Previous:
# [7. Information](07_information.py). Next: [9. Decoding](09_decoding.py).
