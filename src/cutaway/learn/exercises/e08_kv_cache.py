# %% [markdown]
# # 8 · The memory of a KV cache
#
# To generate a token a decoder needs the keys and values of all earlier tokens. They do not change, so they are cached.
# Per token, per layer and per **key** head there is one key and one value of the head dimension.
#
# **A worked example.** Llama-3 8B: 32 layers, 32 query heads, 8 key heads of dimension 128. For 8,192 tokens at two
# bytes per number that is $2 \cdot 32 \cdot 8 \cdot 128 \cdot 8192 \cdot 2 = 1{,}073{,}741{,}824$ bytes: exactly 1 GiB
# for one sequence. With one key head per query head it would be 4 GiB.
#
# A GiB is $2^{30}$ bytes; a GB is $10^9$, 7 % less. This exercise counts in GiB;
# `cutaway size llama-3-8b --context 8192` reports 1.074 GB for the same bytes. The theory is in notebook 9, decoding.


# %%
def kv_cache_bytes(
    n_layers: int, n_heads: int, n_kv_heads: int, d_head: int, tokens: int, batch: int, bytes_per_value: int
) -> int:
    """Size in bytes of the KV cache of `batch` sequences with `tokens` tokens each."""
    # begin solution
    return 2 * n_layers * n_kv_heads * d_head * tokens * batch * bytes_per_value
    # end solution


# %%
def bytes_to_gib(n_bytes: int) -> float:
    """Convert bytes to GiB."""
    # begin solution
    return n_bytes / 2**30
    # end solution


# %%
def max_cached_tokens(
    gib: float, n_layers: int, n_heads: int, n_kv_heads: int, d_head: int, batch: int, bytes_per_value: int
) -> int:
    """Maximum number of tokens per sequence with which the KV cache of `batch` sequences fits in `gib` GiB."""
    # begin solution
    return int(gib * 2**30) // kv_cache_bytes(n_layers, n_heads, n_kv_heads, d_head, 1, batch, bytes_per_value)
    # end solution


# %% [markdown]
# Try the worked example, then run `cutaway learn check 8`.

# %%
bytes_to_gib(kv_cache_bytes(32, 32, 8, 128, 8192, 1, 2))

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask  # noqa: E402

CACHE_CASES = {
    "for Llama-3 8B at 8,192 tokens": (32, 32, 8, 128, 8192, 1, 2),
    "for Llama-3 70B, 16 sequences of 4,096 tokens": (80, 64, 8, 128, 4096, 16, 2),
    "for one key head, 8 bits per value": (18, 8, 1, 256, 1000, 3, 1),
    "for one token of a tiny model in fp32": (2, 4, 4, 8, 1, 1, 4),
}
TASKS = [
    FunctionTask(kv_cache_bytes, [Case(name, shape) for name, shape in CACHE_CASES.items()]),
    FunctionTask(bytes_to_gib, [Case(f"for {n:,} bytes", (n,)) for n in (2**30, 3 * 2**29, 10**9, 16 * 2**30)]),
    FunctionTask(
        max_cached_tokens,
        [
            Case("for Llama-3 8B in 1 GiB", (1.0, 32, 32, 8, 128, 1, 2)),
            Case("for 16 sequences in 8 GiB", (8.0, 80, 64, 8, 128, 16, 2)),
            Case("for memory that is not a multiple of one token", (0.1, 3, 6, 2, 40, 3, 4)),
            Case("for a remainder of more than half a token", (1.0, 32, 32, 8, 128, 3, 2)),
            Case("for less memory than one token needs", (0.0001, 80, 64, 8, 128, 4, 2)),
        ],
    ),
]
