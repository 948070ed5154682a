# %% [markdown]
# # 8 · The memory of a KV cache
#
# To write a token a decoder needs the keys and values of all tokens before it. They do not change, so they are kept.
# For each token, each layer and each **key** head there is one key and one value of the head's width.
#
# **A number to begin with.** Llama-3 8B: 32 layers, 32 query heads, 8 key heads of width 128. For 8,192 tokens with
# two bytes a value that is $2 \cdot 32 \cdot 8 \cdot 128 \cdot 8192 \cdot 2 = 1{,}073{,}741{,}824$ bytes: exactly 1
# GiB for one text. With a key head for each query head it would be 4 GiB.
#
# A GiB is $2^{30}$ bytes; a GB is $10^9$, 7 % less. Here we count in GiB; `cutaway size llama-3-8b --context 8192` says
# 1.074 GB of the same bytes. The theory is in notebook 9, decoding.


# %%
def kv_cache_bytes(
    n_layers: int, n_heads: int, n_kv_heads: int, d_head: int, tokens: int, batch: int, bytes_per_value: int
) -> int:
    """What the cache of `batch` texts of `tokens` tokens each takes."""
    # begin solution
    return 2 * n_layers * n_kv_heads * d_head * tokens * batch * bytes_per_value
    # end solution


# %%
def bytes_to_gib(n_bytes: int) -> float:
    """Bytes as GiB."""
    # begin solution
    return n_bytes / 2**30
    # end solution


# %%
def max_cached_tokens(
    gib: float, n_layers: int, n_heads: int, n_kv_heads: int, d_head: int, batch: int, bytes_per_value: int
) -> int:
    """How many tokens each of `batch` texts may have at most, if the cache must fit in so many GiB."""
    # begin solution
    return int(gib * 2**30) // kv_cache_bytes(n_layers, n_heads, n_kv_heads, d_head, 1, batch, bytes_per_value)
    # end solution


# %% [markdown]
# Try the number from above, then ask: `cutaway learn check 8`.

# %%
bytes_to_gib(kv_cache_bytes(32, 32, 8, 128, 8192, 1, 2))

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 10
NOTEBOOK = "09_decoding"
SITE = "attn.k"
HINTS = (
    "Count the numbers that one token leaves behind in one layer, then multiply.",
    "One token, one layer: a key and a value for each of n_kv_heads heads, d_head numbers each. n_heads plays no part.",
    "A GiB is 2**30 bytes. What fits is the whole number of times that one token's bytes go into the room: //.",
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
    texts = 1 if "batch forgotten" in mistakes else batch
    size = 1 if "values in place of bytes" in mistakes else bytes_per_value
    size = size * 8 if "bits in place of bytes" in mistakes else size
    reach = tokens * tokens if "tokens squared" in mistakes else tokens
    return sides * layers * heads * d_head * reach * texts * size


def wrong_bytes_to_gib(mistakes: MistakeSet, n_bytes: int) -> float:
    unit = 10**9 if "GB and GiB" in mistakes else 2**20 if "MiB" in mistakes else 2**30
    return n_bytes // unit if "cut to a whole number" in mistakes else n_bytes / unit


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
    room = int(gib * (10**9 if "GB and GiB" in mistakes else 2**30))
    one = wrong_kv_cache_bytes(mistakes, n_layers, n_heads, n_kv_heads, d_head, 1, batch, bytes_per_value)
    return -(-room // one) if "rounded up" in mistakes else room // one


KV_HINT = "keys and values are both kept: twice as much"
KV_HEADS_HINT = "keys and values have n_kv_heads heads; the queries are used once and not kept"
GIB_HINT = "a GiB is 2**30 bytes; 10**9 is a GB, which is 7 % less"
SHARED_MISTAKES = {
    "missing K+V": KV_HINT,
    "query heads instead of kv heads": KV_HEADS_HINT,
    "layers forgotten": "each layer has keys and values of its own",
    "batch forgotten": "each text of the batch has a cache of its own",
    "values in place of bytes": "that is how many values there are; each takes bytes_per_value bytes",
    "bits in place of bytes": "bytes_per_value counts bytes; nothing is to be multiplied by 8",
}
CACHE_CASES = {
    "for Llama-3 8B at 8,192 tokens": (32, 32, 8, 128, 8192, 1, 2),
    "for Llama-3 70B, 16 texts of 4,096 tokens": (80, 64, 8, 128, 4096, 16, 2),
    "for one key head, 8 bits a value": (18, 8, 1, 256, 1000, 3, 1),
    "for one token of a tiny model in fp32": (2, 4, 4, 8, 1, 1, 4),
}
TASKS = [
    FunctionTask(
        kv_cache_bytes,
        [Case(what, shape) for what, shape in CACHE_CASES.items()],
        wrong_kv_cache_bytes,
        {
            **SHARED_MISTAKES,
            "tokens squared": "the scores are tokens × tokens, and are not kept; a cache grows with tokens",
        },
    ),
    FunctionTask(
        bytes_to_gib,
        [Case(f"for {n:,} bytes", (n,)) for n in (2**30, 3 * 2**29, 10**9, 16 * 2**30)],
        wrong_bytes_to_gib,
        {
            "GB and GiB": GIB_HINT,
            "MiB": "2**20 bytes are a MiB; a GiB is 2**30",
            "cut to a whole number": "half a GiB is 0.5: divide by /, not by //",
        },
    ),
    FunctionTask(
        max_cached_tokens,
        [
            Case("for Llama-3 8B in 1 GiB", (1.0, 32, 32, 8, 128, 1, 2)),
            Case("for 16 texts in 8 GiB", (8.0, 80, 64, 8, 128, 16, 2)),
            Case("for a room that no whole number fills", (0.1, 3, 6, 2, 40, 3, 4)),
            Case("for less room than one token needs", (0.0001, 80, 64, 8, 128, 4, 2)),
        ],
        wrong_max_cached_tokens,
        {
            "GB and GiB": GIB_HINT,
            "rounded up": "the last token would not fit any more: round down",
            **SHARED_MISTAKES,
        },
    ),
]
