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
    """Residual stream (token, width) after one pre-norm block."""
    # begin solution
    x = x + attention(norm1(x))
    return x + ffn(norm2(x))
    # end solution


# %%
def post_norm(x: Tensor, attention: Branch, ffn: Branch, norm1: Branch, norm2: Branch) -> Tensor:
    """Residual stream (token, width) after one post-norm block."""
    # begin solution
    x = norm1(x + attention(x))
    return norm2(x + ffn(x))
    # end solution


# %%
def pre_norm_model(x: Tensor, blocks: Sequence[Branch], final_norm: Branch) -> Tensor:
    """Input of the head: apply all pre-norm blocks and what must follow them. A block returns the residual stream."""
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
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 15
NOTEBOOK = "05_gradients"
SITE = "resid_post"
HINTS = (
    "Two lines per block, each of the form x = …; the second reads the result of the first.",
    "Pre-norm: the norm is the first operation of a branch, and the left operand of + is the "
    "unmodified x. Post-norm: the norm is the last operation of a line.",
    "x = x + attention(norm1(x)); x = x + ffn(norm2(x)). And: x = norm1(x + attention(x)); x = "
    "norm2(x + ffn(x)). The model: all blocks in order, then final_norm.",
)


def wrong_pre_norm(
    mistakes: MistakeSet, x: Tensor, attention: Branch, ffn: Branch, norm1: Branch, norm2: Branch
) -> Tensor:
    norm2 = norm1 if "one norm used twice" in mistakes else norm2
    if "post-norm in place of pre-norm" in mistakes:
        return post_norm(x, attention, ffn, norm1, norm2)
    if "norm after the branch" in mistakes:
        middle = x + norm1(attention(x))
        return middle + norm2(ffn(middle))
    if "norm on the residual stream" in mistakes:
        normed = norm1(x)
        middle = normed + attention(normed)
        normed = norm2(middle)
        return normed + ffn(normed)
    residual_weight = 0.0 if "no residual" in mistakes else 1.0
    middle = residual_weight * x + attention(x if "attention reads without norm" in mistakes else norm1(x))
    ffn_input = x if "both branches read the same input" in mistakes else middle
    return residual_weight * middle + ffn(ffn_input if "the FFN reads without norm" in mistakes else norm2(ffn_input))


def wrong_post_norm(
    mistakes: MistakeSet, x: Tensor, attention: Branch, ffn: Branch, norm1: Branch, norm2: Branch
) -> Tensor:
    norm2 = norm1 if "one norm used twice" in mistakes else norm2
    if "pre-norm in place of post-norm" in mistakes:
        return pre_norm(x, attention, ffn, norm1, norm2)
    if "norm after the branch" in mistakes:
        middle = x + norm1(attention(x))
        return middle + norm2(ffn(middle))
    residual_weight = 0.0 if "no residual" in mistakes else 1.0
    summed = residual_weight * x + attention(x)
    middle = summed if "the first norm forgotten" in mistakes else norm1(summed)
    ffn_input = summed if "the FFN reads before the norm" in mistakes else middle
    out = residual_weight * middle + ffn(ffn_input)
    return out if "the last norm forgotten" in mistakes else norm2(out)


def wrong_pre_norm_model(mistakes: MistakeSet, x: Tensor, blocks: Sequence[Branch], final_norm: Branch) -> Tensor:
    if "final norm first" in mistakes:
        x = final_norm(x)
    for block in blocks[:-1] if "last block omitted" in mistakes else blocks:
        x = x + block(x) if "residual stream added twice" in mistakes else block(x)
        x = final_norm(x) if "norm on the residual stream" in mistakes else x
    return (
        x if {"final norm forgotten", "final norm first", "norm on the residual stream"} & mistakes else final_norm(x)
    )


def scaled_norm(scale: Tensor) -> Branch:
    return lambda x: scale * rms_normalize(x)


def toy_attention(x: Tensor) -> Tensor:
    """Stand-in for attention: the mean over each token and the tokens before it."""
    return x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None]


def toy_ffn(x: Tensor) -> Tensor:
    """Stand-in for a feed-forward layer."""
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
        "for three tokens, with two different norms",
        (random_resid(1, 3, 4), toy_attention, toy_ffn, *random_norms(4)),
    ),
    Case("for one token", (random_resid(2, 1, 5), toy_attention, toy_ffn, *random_norms(5))),
]
RESIDUAL_HINT = (
    "a branch adds to the residual stream: x + …; without it nothing remains of the embedding after one block"
)
TWO_NORMS_HINT = "norm1 and norm2 have separate weights: the feed-forward layer uses norm2"
BRANCH_NORM_HINT = "the norm is after the branch and before the +: that is neither pre-norm nor post-norm"
TASKS = [
    FunctionTask(
        pre_norm,
        TOY_BLOCKS,
        wrong_pre_norm,
        {
            "norm on the residual stream": "the residual stream itself is normalized, which breaks its path of "
            "additions: only the input of a branch is normalized, x + attention(norm1(x))",
            "no residual": RESIDUAL_HINT,
            "post-norm in place of pre-norm": "that is post-norm: here the norm is before the branch, not after the +",
            "norm after the branch": BRANCH_NORM_HINT,
            "both branches read the same input": "the feed-forward layer reads the residual stream before the "
            "attention output is added: that is a parallel block",
            "attention reads without norm": "the input of attention is norm1(x), not x",
            "the FFN reads without norm": "the input of the feed-forward layer is norm2(x), not x",
            "one norm used twice": TWO_NORMS_HINT,
        },
        ("token", "number"),
    ),
    FunctionTask(
        post_norm,
        TOY_BLOCKS,
        wrong_post_norm,
        {
            "pre-norm in place of post-norm": "that is pre-norm: here the norm is applied to the sum, x + attention(x)",
            "norm after the branch": BRANCH_NORM_HINT,
            "no residual": RESIDUAL_HINT,
            "the first norm forgotten": "the sum after attention is normalized too, by norm1",
            "the last norm forgotten": "the block ends with norm2 of the sum",
            "the FFN reads before the norm": "the input of the feed-forward layer is the output of norm1",
            "one norm used twice": TWO_NORMS_HINT,
        },
        ("token", "number"),
    ),
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
        wrong_pre_norm_model,
        {
            "final norm forgotten": "with pre-norm the residual stream is not normalized: the model ends with "
            "final_norm",
            "norm on the residual stream": "the residual stream is normalized after every block; final_norm is "
            "applied once, at the end",
            "final norm first": "final_norm is applied after the blocks",
            "residual stream added twice": "a block already returns the complete residual stream: x = block(x)",
            "last block omitted": "apply all blocks, including the last",
        },
        ("token", "number"),
    ),
]
