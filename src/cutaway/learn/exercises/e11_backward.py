# %% [markdown]
# # 11 · Backward pass by hand
#
# The backward pass of an operation $y = f(x)$ receives $g = \partial L / \partial y$, which has the shape of $y$, and
# returns the gradients of $x$ and of the parameters of $f$. Write four of them, without autograd:
#
# | operation | gradients |
# |---|---|
# | $p = \mathrm{softmax}(s)$ | $\partial L/\partial s = J^\top g$ with $J = \mathrm{diag}(p) - p p^\top$ |
# | $y = \gamma \odot \hat x$, $\hat x = x / r$, $r = \sqrt{\tfrac1d \sum_i x_i^2 + \varepsilon}$ | $x$ and $\gamma$ |
# | $y = x W^\top + b$, one token per row | $x$, $W$ and $b$ |
# | $y = W_2\,\mathrm{ReLU}(W_1 x + b_1) + b_2$ of one token | $x$, $W_1$, $b_1$, $W_2$ and $b_2$ |
#
# A gradient has the shape of its tensor. A parameter that is used for several tokens has the **sum** of the gradients
# of all of them.
#
# **Worked examples.** Softmax: $p = (0.5, 0.3, 0.2)$ and $g = (1, 0, 0)$ give $(0.25, -0.15, -0.10)$. RMSNorm:
# $x = (3, 4)$, $\gamma = 1$ and $g = (1, 0)$ give $(0.181, -0.136)$, because $r = 3.536$ and
# $J = \tfrac1r(I - \tfrac12 \hat x \hat x^\top)$. FFN: $x = (1, 2)$, $W_1 = ((1, 0), (0, -1))$, $b_1 = 0$,
# $W_2 = ((1, 2), (3, 4))$ and $g = (1, 1)$ give $(4, 0)$ for $x$: the second hidden unit is dead, its input is $-2$.
# The theory is in notebook 12.

# %%
import torch
from torch import Tensor


# %%
def softmax_backward(grad: Tensor, p: Tensor) -> Tensor:
    """Return the gradient of the scores, given p, their softmax along the last axis, and the gradient of p."""
    # begin solution
    return p * (grad - (grad * p).sum(-1, keepdim=True))
    # end solution


# %%
def rmsnorm_backward(grad: Tensor, x: Tensor, gamma: Tensor, eps: float) -> dict[str, Tensor]:
    """Return the gradients of "x" (token, width) and of "gamma" (width) of RMSNorm."""
    # begin solution
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    x_hat, grad_hat = x * scale, grad * gamma
    grad_x = scale * (grad_hat - x_hat * (grad_hat * x_hat).mean(-1, keepdim=True))
    return {"x": grad_x, "gamma": (grad * x_hat).sum(0)}
    # end solution


# %%
def linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Return the gradients of "x" (token, d_in), "weight" (d_out, d_in) and "bias" (d_out) of x @ weight.T + bias."""
    # begin solution
    return {"x": grad @ weight, "weight": grad.T @ x, "bias": grad.sum(0)}
    # end solution


# %%
def ffn_backward(grad: Tensor, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> dict[str, Tensor]:
    """Return the gradients of "x", "w1", "b1", "w2" and "b2" of w2 @ relu(w1 @ x + b1) + b2, for one token x (width).

    w1 has the shape (hidden, width), w2 (width, hidden)."""
    # begin solution
    u = w1 @ x + b1
    grad_u = (grad @ w2) * (u > 0)
    w1_and_b1 = {"w1": torch.outer(grad_u, x), "b1": grad_u}
    return {"x": grad_u @ w1, **w1_and_b1, "w2": torch.outer(grad, u.relu()), "b2": grad.clone()}
    # end solution


# %% [markdown]
# Compare your functions with autograd, then run `cutaway learn check 11`.

# %%
example_scores, example_grad = torch.tensor([2.0, 1.0, 0.5], requires_grad=True), torch.tensor([1.0, 0, 0])
example_p = example_scores.softmax(-1)
softmax_backward(example_grad, example_p.detach()), torch.autograd.grad(example_p, example_scores, example_grad)

# %% checker
from cutaway.learn.exercises.task import Case, FunctionTask  # noqa: E402


def random_tensors(seed: int, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def random_softmax(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    grad, scores = random_tensors(seed, shape, shape)
    return grad, scores.softmax(-1)


def double(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


TASKS = [
    FunctionTask(
        softmax_backward,
        [
            Case("for the worked example", (double(1, 0, 0), double(0.5, 0.3, 0.2))),
            Case("for one row of five scores", random_softmax(1, 5)),
            Case("for two heads of three queries and four keys", random_softmax(2, 2, 3, 4)),
            Case("for a saturated row", (double(0.3, -2, 1), double(1, 0, 0))),
        ],
    ),
    FunctionTask(
        rmsnorm_backward,
        [
            Case("for the worked example", (double([1, 0]), double([3, 4]), double(1, 1), 0.0)),
            Case("for three tokens with γ", (*random_tensors(3, (3, 5), (3, 5), (5,)), 1e-5)),
            Case("for ε = 0.5", (*random_tensors(4, (2, 4), (2, 4), (4,)), 0.5)),
        ],
    ),
    FunctionTask(
        linear_backward,
        [
            Case("for one token", random_tensors(5, (1, 3), (1, 2), (3, 2))),
            Case("for four tokens", random_tensors(6, (4, 2), (4, 3), (2, 3))),
            Case("for a square weight", random_tensors(7, (5, 3), (5, 3), (3, 3))),
        ],
    ),
    FunctionTask(
        ffn_backward,
        [
            Case(
                "for the worked example",
                (double(1, 1), double(1, 2), double([1, 0], [0, -1]), double(0, 0), double([1, 2], [3, 4])),
            ),
            Case("for six hidden units", random_tensors(8, (3,), (3,), (6, 3), (6,), (3, 6))),
            Case("for as many hidden units as entries", random_tensors(9, (4,), (4,), (4, 4), (4,), (4, 4))),
        ],
    ),
]
