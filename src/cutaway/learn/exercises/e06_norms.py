# %% [markdown]
# # 6 · LayerNorm and RMSNorm
#
# A norm looks at **one token's vector** $x$ of $d$ numbers and gives it a standard size. LayerNorm ([Ba et al.
# 2016](https://arxiv.org/abs/1607.06450)) takes its mean away and divides by its standard deviation; RMSNorm ([Zhang
# and Sennrich 2019](https://arxiv.org/abs/1910.07467)) divides by the root of the mean square and has neither mean nor
# $\beta$:
#
# $$\text{LayerNorm}(x) = \gamma \cdot \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} + \beta \qquad
# \text{RMSNorm}(x) = \gamma \cdot \frac{x}{\sqrt{\tfrac1d \sum_i x_i^2 + \varepsilon}}$$
#
# $\sigma^2 = \tfrac1d \sum_i (x_i - \mu)^2$ is divided by $d$, not by $d - 1$: it describes these numbers and
# estimates nothing. $\varepsilon$ stands under the root, so that a vector of equal numbers gives zeros and not 0/0.
#
# **Numbers to begin with.** $x = (1, 2, 3, 4)$, $\gamma = 1$, $\beta = 0$. The mean is 2.5, the variance 1.25, and
# LayerNorm gives $(-1.342, -0.447, 0.447, 1.342)$. The mean square is 7.5, and RMSNorm gives $(0.365, 0.730, 1.095,
# 1.461)$. The theory is in notebook 4, feed-forward layers and norms.

# %%
import torch
from torch import Tensor


# %%
def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Each vector along the last axis of x, for itself; any number of axes before it."""
    # begin solution
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return gamma * centred / (variance + eps).sqrt() + beta
    # end solution


# %%
def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Each vector along the last axis of x, for itself."""
    # begin solution
    return gamma * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    # end solution


# %% [markdown]
# Try the numbers from above, then ask: `cutaway learn check 6`.

# %%
layer_norm(torch.tensor([1.0, 2, 3, 4]), torch.ones(4), torch.zeros(4), 1e-5)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 15
NOTEBOOK = "04_ffn_norms_residuals"
SITE = "final_norm"
HINTS = (
    "Everything is computed along the last axis, and kept as an axis of size 1: `x.mean(-1, keepdim=True)`.",
    "`x.var()` divides by d − 1 unless it is told otherwise; the mean of the squares of what is left of the mean "
    "does not.",
    "γ · (x − mean) / sqrt(mean of squares + ε) + β; RMSNorm: γ · x / sqrt(mean of x² + ε).",
)


def reduction_axes(mistakes: MistakeSet, x: Tensor) -> tuple[int, ...]:
    if "over the tokens" in mistakes:
        return (-2,)
    return tuple(range(x.ndim)) if "over everything" in mistakes else (-1,)


def wrong_layer_norm(mistakes: MistakeSet, x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    axes = reduction_axes(mistakes, x)
    centred = x - x.mean(axes, keepdim=True)
    variance = x.var(axes, correction=1 if "n−1 variance" in mistakes else 0, keepdim=True)
    eps = 0.0 if "ε forgotten" in mistakes else eps
    spread = variance.sqrt() + eps if "ε outside the root" in mistakes else (variance + eps).sqrt()
    spread = variance + eps if "no square root" in mistakes else spread
    out = (x if "mean not taken away" in mistakes else centred) / spread
    out = out if "γ forgotten" in mistakes else gamma * out
    if "β inside γ" in mistakes:
        return out + gamma * beta
    return out if "β forgotten" in mistakes else out + beta


def wrong_rms_norm(mistakes: MistakeSet, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    axes = reduction_axes(mistakes, x)
    count = x.square().mean(axes, keepdim=True)
    square = x.square().sum(axes, keepdim=True) if "length in place of rms" in mistakes else count
    x = x - x.mean(axes, keepdim=True) if "mean taken away" in mistakes else x
    if "standard deviation in place of rms" in mistakes:
        square = x.var(axes, correction=0, keepdim=True)
    eps = 0.0 if "ε forgotten" in mistakes else eps
    size = square.sqrt() + eps if "ε outside the root" in mistakes else (square + eps).sqrt()
    size = square + eps if "no square root" in mistakes else size
    return x / size if "γ forgotten" in mistakes else gamma * x / size


def random_inputs(
    seed: int, *shape: int, scale: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, float]:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=dice) * scale + offset
    gamma, beta = (torch.randn(shape[-1], generator=dice) for _ in range(2))
    return x, gamma + 1.5, beta, 1e-5


CASES = [
    Case("for (1, 2, 3, 4)", (torch.tensor([1.0, 2, 3, 4]), torch.ones(4), torch.zeros(4), 1e-5)),
    Case("for one vector with γ and β", random_inputs(1, 5)),
    Case("for a batch of (2, 3) tokens", random_inputs(2, 2, 3, 4)),
    Case("for numbers around 3", random_inputs(3, 1, 2, 6, offset=3.0)),
    Case("for numbers near 0.001, where ε counts", random_inputs(4, 2, 3, scale=1e-3)),
    Case("for a vector of zeros", (torch.zeros(2, 3), torch.ones(3), torch.ones(3), 1e-5)),
]
SHARED_MISTAKES = {
    "ε forgotten": "a vector of equal numbers gives 0/0: ε is added under the root",
    "ε outside the root": "ε is added to the variance, under the root, not to the root",
    "no square root": "divided is by the root, not by what stands under it",
    "γ forgotten": "γ is there to be multiplied with, number by number",
    "over everything": "mean and size are taken over all tokens together: each token has its own, dim=-1",
    "over the tokens": "mean and size are taken across tokens; a norm looks at one token's numbers, dim=-1",
}
TASKS = [
    FunctionTask(
        layer_norm,
        CASES,
        wrong_layer_norm,
        {
            "n−1 variance": "the variance is divided by d − 1; LayerNorm divides by d: var(correction=0), or the "
            "mean of squares",
            "mean not taken away": "the mean is taken away above the line too: (x − mean) / root",
            "β forgotten": "β is added at the end",
            "β inside γ": "γ · (… + β) was computed; β is added after γ",
            **SHARED_MISTAKES,
        },
    ),
    FunctionTask(
        rms_norm,
        [Case(case.description, (case.args[0], case.args[1], case.args[3])) for case in CASES],
        wrong_rms_norm,
        {
            "length in place of rms": "divided is by the length of the vector; the mean of the squares was asked, "
            "not their sum",
            "mean taken away": "RMSNorm takes no mean away: that is LayerNorm's",
            "standard deviation in place of rms": "the mean square is of x itself, not of x less its mean",
            **SHARED_MISTAKES,
        },
    ),
]
