# %% [markdown]
# # 6 · LayerNorm and RMSNorm
#
# A norm rescales **one token's vector** $x$ of $d$ entries. LayerNorm ([Ba et al.
# 2016](https://arxiv.org/abs/1607.06450)) subtracts the mean and divides by the standard deviation; RMSNorm ([Zhang and
# Sennrich 2019](https://arxiv.org/abs/1910.07467)) divides by the root mean square and has neither mean nor $\beta$:
#
# $$\text{LayerNorm}(x) = \gamma \cdot \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} + \beta \qquad
# \text{RMSNorm}(x) = \gamma \cdot \frac{x}{\sqrt{\tfrac1d \sum_i x_i^2 + \varepsilon}}$$
#
# $\sigma^2 = \tfrac1d \sum_i (x_i - \mu)^2$ is divided by $d$, not by $d - 1$: it is the variance of these entries, not
# an estimate. $\varepsilon$ is under the root, so that a vector of equal entries gives zeros and not 0/0.
#
# **Worked examples.** $x = (1, 2, 3, 4)$, $\gamma = 1$, $\beta = 0$. The mean is 2.5, the variance 1.25, and LayerNorm
# gives $(-1.342, -0.447, 0.447, 1.342)$. The mean square is 7.5, and RMSNorm gives $(0.365, 0.730, 1.095, 1.461)$. The
# theory is in notebook 4, feed-forward layers and norms.

# %%
import torch
from torch import Tensor


# %%
def layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    """Normalize each vector along the last axis of x. There may be any number of leading axes."""
    # begin solution
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    return gamma * centered / (variance + eps).sqrt() + beta
    # end solution


# %%
def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Normalize each vector along the last axis of x."""
    # begin solution
    return gamma * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    # end solution


# %% [markdown]
# Try the worked examples, then run `cutaway learn check 6`.

# %%
layer_norm(torch.tensor([1.0, 2, 3, 4]), torch.ones(4), torch.zeros(4), 1e-5)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet  # noqa: E402

MINUTES = 15
NOTEBOOK = "04_ffn_norms_residuals"
SITE = "final_norm"
HINTS = (
    "All statistics are computed along the last axis and kept as an axis of size 1: `x.mean(-1, keepdim=True)`.",
    "`x.var()` divides by d − 1 by default; the mean of the squared deviations from the mean does not.",
    "γ · (x − mean) / sqrt(mean of squares + ε) + β; RMSNorm: γ · x / sqrt(mean of x² + ε).",
)


def reduction_axes(mistakes: MistakeSet, x: Tensor) -> tuple[int, ...]:
    if "over the tokens" in mistakes:
        return (-2,)
    return tuple(range(x.ndim)) if "over everything" in mistakes else (-1,)


def wrong_layer_norm(mistakes: MistakeSet, x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    axes = reduction_axes(mistakes, x)
    centered = x - x.mean(axes, keepdim=True)
    variance = x.var(axes, correction=1 if "n−1 variance" in mistakes else 0, keepdim=True)
    eps = 0.0 if "ε forgotten" in mistakes else eps
    divisor = variance.sqrt() + eps if "ε outside the root" in mistakes else (variance + eps).sqrt()
    divisor = variance + eps if "no square root" in mistakes else divisor
    out = (x if "mean not subtracted" in mistakes else centered) / divisor
    out = out if "γ forgotten" in mistakes else gamma * out
    if "β inside γ" in mistakes:
        return out + gamma * beta
    return out if "β forgotten" in mistakes else out + beta


def wrong_rms_norm(mistakes: MistakeSet, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    axes = reduction_axes(mistakes, x)
    mean_square = x.square().mean(axes, keepdim=True)
    squares = x.square().sum(axes, keepdim=True) if "L2 norm in place of rms" in mistakes else mean_square
    x = x - x.mean(axes, keepdim=True) if "mean subtracted" in mistakes else x
    if "standard deviation in place of rms" in mistakes:
        squares = x.var(axes, correction=0, keepdim=True)
    eps = 0.0 if "ε forgotten" in mistakes else eps
    divisor = squares.sqrt() + eps if "ε outside the root" in mistakes else (squares + eps).sqrt()
    divisor = squares + eps if "no square root" in mistakes else divisor
    return x / divisor if "γ forgotten" in mistakes else gamma * x / divisor


def random_inputs(
    seed: int, *shape: int, scale: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * scale + offset
    gamma, beta = (torch.randn(shape[-1], generator=generator) for _ in range(2))
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
    "ε forgotten": "a vector of equal entries gives 0/0: ε is added under the root",
    "ε outside the root": "ε is added to the variance, under the root, not to the root",
    "no square root": "the divisor is the square root, not its argument",
    "γ forgotten": "multiply elementwise by γ",
    "over everything": "mean and scale are computed over all tokens together: each token has its own, dim=-1",
    "over the tokens": "mean and scale are computed across tokens; a norm uses the entries of one token, dim=-1",
}
TASKS = [
    FunctionTask(
        layer_norm,
        CASES,
        wrong_layer_norm,
        {
            "n−1 variance": "the variance is divided by d − 1; LayerNorm divides by d: var(correction=0), or the mean "
            "of squares",
            "mean not subtracted": "the mean is subtracted in the numerator too: (x − mean) / root",
            "β forgotten": "add β at the end",
            "β inside γ": "this computes γ · (… + β); β is added after γ",
            **SHARED_MISTAKES,
        },
    ),
    FunctionTask(
        rms_norm,
        [Case(case.description, (case.args[0], case.args[1], case.args[3])) for case in CASES],
        wrong_rms_norm,
        {
            "L2 norm in place of rms": "the divisor is the L2 norm of the vector; use the mean of the squares, not "
            "their sum",
            "mean subtracted": "RMSNorm subtracts no mean: LayerNorm does",
            "standard deviation in place of rms": "use the mean square of x itself, not of x minus its mean",
            **SHARED_MISTAKES,
        },
    ),
]
