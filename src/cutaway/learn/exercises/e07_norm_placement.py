# %% [markdown]
# # 7 · Pre-norm and post-norm
#
# A block has two branches, attention and a feed-forward layer. Each reads the residual stream $x$ and **adds** to it.
# The two placements differ only in the position of the norm:
#
# ```
#   pre-norm    ──┬── norm1 ── attention ── + ──┬── norm2 ── ffn ── + ──
#                 └─────────────────────────┘   └───────────────────┘
#
#   post-norm   ──┬── attention ── + ── norm1 ──┬── ffn ── + ── norm2 ──
#                 └────────────────┘            └──────────┘
# ```
#
# Write each as two lines of the form x = …
#
# With pre-norm the residual stream itself is never normalized: from the embedding to the last block there is a path of
# additions only, and gradients flow back along it unchanged. The disadvantage is that the residual stream is not
# normalized when it reaches the head, so the model needs a final norm. Post-norm (the [2017
# Transformer](https://arxiv.org/abs/1706.03762), BERT) normalizes the residual stream after every sublayer.
#
# **A worked example.** The residual stream is $((1, 2), (3, 4))$, attention returns zeros, the feed-forward layer is a
# ReLU, norms are RMSNorms with $\gamma = 1$. Pre-norm gives $((1.632, 3.265), (3.849, 5.131))$: the residual stream
# plus the normalized residual stream. The theory is in notebooks 4 and 5, residuals and gradients.

# %%
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Branch = Callable[[Tensor], Tensor]


# %%
def pre_norm(x: Tensor, attention: Branch, ffn: Branch, norm1: Branch, norm2: Branch) -> Tensor:
    """Apply one pre-norm block to the residual stream x (token, width); return the new residual stream."""
    # begin solution
    x = x + attention(norm1(x))
    return x + ffn(norm2(x))
    # end solution


# %%
def post_norm(x: Tensor, attention: Branch, ffn: Branch, norm1: Branch, norm2: Branch) -> Tensor:
    """Apply one post-norm block to the residual stream x (token, width); return the new residual stream."""
    # begin solution
    x = norm1(x + attention(x))
    return norm2(x + ffn(x))
    # end solution


# %%
def pre_norm_model(x: Tensor, blocks: Sequence[Branch], final_norm: Branch) -> Tensor:
    """Return the input of the head: apply all pre-norm blocks to x, and then what must follow them.

    Each block returns the new residual stream."""
    # begin solution
    for block in blocks:
        x = block(x)
    return final_norm(x)
    # end solution


# %% [markdown]
# Try the worked example, then run `cutaway learn check 7`.


# %%
def rms_normalize(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


pre_norm(torch.tensor([[1.0, 2], [3, 4]]), torch.zeros_like, torch.relu, rms_normalize, rms_normalize)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask  # noqa: E402


def scaled_norm(scale: Tensor) -> Branch:
    return lambda x: scale * rms_normalize(x)


def toy_attention(x: Tensor) -> Tensor:
    """Stand-in for attention: the mean over each token and the tokens before it."""
    return x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None]


def toy_ffn(x: Tensor) -> Tensor:
    """Stand-in for a feed-forward layer: tanh of the scaled and shifted vector in reverse order."""
    return torch.tanh(x.flip(-1) * 1.5 + 0.3)


def random_resid(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1


def random_norms(d_model: int) -> tuple[Branch, Branch]:
    return scaled_norm(torch.linspace(0.5, 2, d_model)), scaled_norm(torch.linspace(1.5, 0.7, d_model))


TOY_BLOCKS = [
    Case(
        "for the worked example",
        (torch.tensor([[1.0, 2], [3, 4]]), torch.zeros_like, torch.relu, rms_normalize, rms_normalize),
    ),
    Case(
        "for three tokens, with two different norms", (random_resid(1, 3, 4), toy_attention, toy_ffn, *random_norms(4))
    ),
    Case("for one token", (random_resid(2, 1, 5), toy_attention, toy_ffn, *random_norms(5))),
]
TASKS = [
    FunctionTask(pre_norm, TOY_BLOCKS, ("token", "feature")),
    FunctionTask(post_norm, TOY_BLOCKS, ("token", "feature")),
    FunctionTask(
        pre_norm_model,
        [
            Case(
                "for two blocks",
                (random_resid(3, 2, 4), [lambda x: x + toy_attention(x), lambda x: x + toy_ffn(x)], random_norms(4)[0]),
            ),
            Case("for one block", (random_resid(4, 1, 3), [lambda x: x + toy_ffn(x)], random_norms(3)[1])),
            Case("for zero blocks", (random_resid(5, 2, 3), [], random_norms(3)[0])),
        ],
        ("token", "feature"),
    ),
]
