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
# A GiB is $2^{30}$ bytes; a GB is $10^9$, 7 % less. Here we count in GiB; `cutaway size llama-3-8b --context 8192`
# reports 1.074 GB for the same bytes. The theory is in notebook 9, decoding.


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
    """Maximum number of tokens in each of `batch` sequences whose cache fits in `gib` GiB."""
    # begin solution
    return int(gib * 2**30) // kv_cache_bytes(n_layers, n_heads, n_kv_heads, d_head, 1, batch, bytes_per_value)
    # end solution


# %% [markdown]
# Try the worked example, then run `cutaway learn check 8`.

# %%
bytes_to_gib(kv_cache_bytes(32, 32, 8, 128, 8192, 1, 2))

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 10
NOTEBOOK = "09_decoding"
SITE = "attn.k"
HINTS = (
    "Count the numbers that one token adds to the cache of one layer, then multiply.",
    "One token, one layer: one key and one value for each of n_kv_heads heads, d_head numbers "
    "each. n_heads does not matter.",
    "A GiB is 2**30 bytes. The number of tokens that fit is the available memory divided by the "
    "bytes of one token, rounded down: //.",
)


def wrong_kv_cache_bytes(
    mistakes: MistakeSet,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    d_head: int,
    tokens: int,
    batch: int,
    bytes_per_value: int,
) -> int:
    sides = 1 if "missing K+V" in mistakes else 2
    heads = n_heads if "query heads instead of kv heads" in mistakes else n_kv_heads
    layers = 1 if "layers forgotten" in mistakes else n_layers
    sequences = 1 if "batch forgotten" in mistakes else batch
    size = 1 if "values in place of bytes" in mistakes else bytes_per_value
    size = size * 8 if "bits in place of bytes" in mistakes else size
    length = tokens * tokens if "tokens squared" in mistakes else tokens
    return sides * layers * heads * d_head * length * sequences * size


def wrong_bytes_to_gib(mistakes: MistakeSet, n_bytes: int) -> float:
    unit = 10**9 if "GB and GiB" in mistakes else 2**20 if "MiB" in mistakes else 2**30
    return n_bytes // unit if "truncated to an integer" in mistakes else n_bytes / unit


def wrong_max_cached_tokens(
    mistakes: MistakeSet,
    gib: float,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    d_head: int,
    batch: int,
    bytes_per_value: int,
) -> int:
    available = int(gib * (10**9 if "GB and GiB" in mistakes else 2**30))
    per_token = wrong_kv_cache_bytes(mistakes, n_layers, n_heads, n_kv_heads, d_head, 1, batch, bytes_per_value)
    return -(-available // per_token) if "rounded up" in mistakes else available // per_token


KV_HINT = "keys and values are both cached: twice as much"
KV_HEADS_HINT = "keys and values have n_kv_heads heads; queries are used once and not cached"
GIB_HINT = "a GiB is 2**30 bytes; 10**9 is a GB, which is 7 % less"
SHARED_MISTAKES = {
    "missing K+V": KV_HINT,
    "query heads instead of kv heads": KV_HEADS_HINT,
    "layers forgotten": "each layer has its own keys and values",
    "batch forgotten": "each sequence of the batch has its own cache",
    "values in place of bytes": "that is the number of values; each takes bytes_per_value bytes",
    "bits in place of bytes": "bytes_per_value is in bytes; do not multiply by 8",
}
CACHE_CASES = {
    "for Llama-3 8B at 8,192 tokens": (32, 32, 8, 128, 8192, 1, 2),
    "for Llama-3 70B, 16 sequences of 4,096 tokens": (80, 64, 8, 128, 4096, 16, 2),
    "for one key head, 8 bits per value": (18, 8, 1, 256, 1000, 3, 1),
    "for one token of a tiny model in fp32": (2, 4, 4, 8, 1, 1, 4),
}
TASKS = [
    FunctionTask(
        kv_cache_bytes,
        [Case(name, shape) for name, shape in CACHE_CASES.items()],
        wrong_kv_cache_bytes,
        {
            **SHARED_MISTAKES,
            "tokens squared": "the scores are tokens × tokens, and are not cached; the cache is linear in the number "
            "of tokens",
        },
    ),
    FunctionTask(
        bytes_to_gib,
        [Case(f"for {n:,} bytes", (n,)) for n in (2**30, 3 * 2**29, 10**9, 16 * 2**30)],
        wrong_bytes_to_gib,
        {
            "GB and GiB": GIB_HINT,
            "MiB": "2**20 bytes are a MiB; a GiB is 2**30",
            "truncated to an integer": "half a GiB is 0.5: divide with /, not with //",
        },
    ),
    FunctionTask(
        max_cached_tokens,
        [
            Case("for Llama-3 8B in 1 GiB", (1.0, 32, 32, 8, 128, 1, 2)),
            Case("for 16 sequences in 8 GiB", (8.0, 80, 64, 8, 128, 16, 2)),
            Case("for memory that is not a multiple of one token", (0.1, 3, 6, 2, 40, 3, 4)),
            Case("for less memory than one token needs", (0.0001, 80, 64, 8, 128, 4, 2)),
        ],
        wrong_max_cached_tokens,
        {
            "GB and GiB": GIB_HINT,
            "rounded up": "the last token would no longer fit: round down",
            **SHARED_MISTAKES,
        },
    ),
]
