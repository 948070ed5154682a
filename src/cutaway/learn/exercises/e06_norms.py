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
    """Apply LayerNorm to each vector along the last axis of x. There may be any number of leading axes."""
    # begin solution
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    return gamma * centered / (variance + eps).sqrt() + beta
    # end solution


# %%
def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm to each vector along the last axis of x. There may be any number of leading axes."""
    # begin solution
    return gamma * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    # end solution


# %% [markdown]
# Try the worked examples, then run `cutaway learn check 6`.

# %%
layer_norm(torch.tensor([1.0, 2, 3, 4]), torch.ones(4), torch.zeros(4), 1e-5)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask  # noqa: E402


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
    Case("for numbers near 0.001, where ε matters", random_inputs(4, 2, 3, scale=1e-3)),
    Case("for a vector of zeros", (torch.zeros(2, 3), torch.ones(3), torch.ones(3), 1e-5)),
]
TASKS = [
    FunctionTask(layer_norm, CASES),
    FunctionTask(rms_norm, [Case(case.description, (case.args[0], case.args[1], case.args[3])) for case in CASES]),
]
