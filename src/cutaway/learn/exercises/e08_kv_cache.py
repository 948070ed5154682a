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
def cache_bytes(
    n_layers: int, n_heads: int, n_kv_heads: int, d_head: int, tokens: int, batch: int, bytes_per_value: int
) -> int:
    """What the cache of `batch` texts of `tokens` tokens each takes."""
    # begin solution
    return 2 * n_layers * n_kv_heads * d_head * tokens * batch * bytes_per_value
    # end solution


# %%
def in_gib(n_bytes: int) -> float:
    """Bytes as GiB."""
    # begin solution
    return n_bytes / 2**30
    # end solution


# %%
def tokens_that_fit(
    gib: float, n_layers: int, n_heads: int, n_kv_heads: int, d_head: int, batch: int, bytes_per_value: int
) -> int:
    """How many tokens each of `batch` texts may have at most, if the cache must fit in so many GiB."""
    # begin solution
    return int(gib * 2**30) // cache_bytes(n_layers, n_heads, n_kv_heads, d_head, 1, batch, bytes_per_value)
    # end solution


# %% [markdown]
# Try the number from above, then ask: `cutaway learn check 8`.

# %%
in_gib(cache_bytes(32, 32, 8, 128, 8192, 1, 2))

# %% checker
from cutaway.learn.task import Case, Made, Task  # noqa: E402

MINUTES = 10
NOTEBOOK = "09_decoding"
SITE = "attn.k"
HINTS = (
    "Count the numbers that one token leaves behind in one layer, then multiply.",
    "One token, one layer: a key and a value for each of n_kv_heads heads, d_head numbers each. n_heads plays no part.",
    "A GiB is 2**30 bytes. What fits is the whole number of times that one token's bytes go into the room: //.",
)


def wrong_bytes(
    made: Made, n_layers: int, n_heads: int, n_kv_heads: int, d_head: int, tokens: int, batch: int, bytes_per_value: int
) -> int:
    sides = 1 if "missing K+V" in made else 2
    heads = n_heads if "query heads instead of kv heads" in made else n_kv_heads
    layers = 1 if "layers forgotten" in made else n_layers
    texts = 1 if "batch forgotten" in made else batch
    size = 1 if "values in place of bytes" in made else bytes_per_value
    size = size * 8 if "bits in place of bytes" in made else size
    reach = tokens * tokens if "tokens squared" in made else tokens
    return sides * layers * heads * d_head * reach * texts * size


def wrong_gib(made: Made, n_bytes: int) -> float:
    unit = 10**9 if "GB and GiB" in made else 2**20 if "MiB" in made else 2**30
    return n_bytes // unit if "cut to a whole number" in made else n_bytes / unit


def wrong_fit(
    made: Made, gib: float, n_layers: int, n_heads: int, n_kv_heads: int, d_head: int, batch: int, bytes_per_value: int
) -> int:
    room = int(gib * (10**9 if "GB and GiB" in made else 2**30))
    one = wrong_bytes(made, n_layers, n_heads, n_kv_heads, d_head, 1, batch, bytes_per_value)
    return -(-room // one) if "rounded up" in made else room // one


SIDES = "keys and values are both kept: twice as much"
HEADS = "keys and values have n_kv_heads heads; the queries are used once and not kept"
GIB = "a GiB is 2**30 bytes; 10**9 is a GB, which is 7 % less"
SHARED = {
    "missing K+V": SIDES,
    "query heads instead of kv heads": HEADS,
    "layers forgotten": "each layer has keys and values of its own",
    "batch forgotten": "each text of the batch has a cache of its own",
    "values in place of bytes": "that is how many values there are; each takes bytes_per_value bytes",
    "bits in place of bytes": "bytes_per_value counts bytes; nothing is to be multiplied by 8",
}
MODELS = {
    "for Llama-3 8B at 8,192 tokens": (32, 32, 8, 128, 8192, 1, 2),
    "for Llama-3 70B, 16 texts of 4,096 tokens": (80, 64, 8, 128, 4096, 16, 2),
    "for one key head, 8 bits a value": (18, 8, 1, 256, 1000, 3, 1),
    "for one token of a tiny model in fp32": (2, 4, 4, 8, 1, 1, 4),
}
TASKS = [
    Task(
        cache_bytes,
        [Case(what, shape) for what, shape in MODELS.items()],
        wrong_bytes,
        {**SHARED, "tokens squared": "the scores are tokens × tokens, and are not kept; a cache grows with tokens"},
    ),
    Task(
        in_gib,
        [Case(f"for {n:,} bytes", (n,)) for n in (2**30, 3 * 2**29, 10**9, 16 * 2**30)],
        wrong_gib,
        {
            "GB and GiB": GIB,
            "MiB": "2**20 bytes are a MiB; a GiB is 2**30",
            "cut to a whole number": "half a GiB is 0.5: divide by /, not by //",
        },
    ),
    Task(
        tokens_that_fit,
        [
            Case("for Llama-3 8B in 1 GiB", (1.0, 32, 32, 8, 128, 1, 2)),
            Case("for 16 texts in 8 GiB", (8.0, 80, 64, 8, 128, 16, 2)),
            Case("for a room that no whole number fills", (0.1, 3, 6, 2, 40, 3, 4)),
            Case("for less room than one token needs", (0.0001, 80, 64, 8, 128, 4, 2)),
        ],
        wrong_fit,
        {
            "GB and GiB": GIB,
            "rounded up": "the last token would not fit any more: round down",
            **SHARED,
        },
    ),
]
