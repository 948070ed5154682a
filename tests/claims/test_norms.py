"""Claims on LayerNorm and RMSNorm. Each test name begins with the id of the claim."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import cutaway as ct
from cutaway import config as c
from cutaway.model.norms import build_norm

D_MODEL = 16
X = torch.randn(3, 5, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 2


def norm64(config: c.Norm, *, random_gain: bool = False) -> nn.Module:
    """A norm in fp64 with gain 1 and bias 0, or with random ones."""
    norm = build_norm(config, D_MODEL).double()
    for parameter in norm.parameters() if random_gain else ():
        nn.init.normal_(parameter)
    return norm


class MeanCounter(TorchFunctionMode):
    """Counts the means that are computed."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.Tensor.mean
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_c100_layernorm_equation_with_the_biased_variance() -> None:
    norm = norm64(c.LayerNorm(eps=1e-5), random_gain=True)
    for x, y in zip(X.flatten(0, 1), norm(X).flatten(0, 1), strict=True):
        sigma = (x.var(correction=0) + 1e-5).sqrt()
        assert (norm.weight * (x - x.mean()) / sigma + norm.bias - y).abs().max() < 1e-12


@torch.no_grad()
def test_c101_rmsnorm_equation_without_mean_and_bias() -> None:
    norm = norm64(c.RMSNorm(eps=1e-6), random_gain=True)
    for x, y in zip(X.flatten(0, 1), norm(X).flatten(0, 1), strict=True):
        assert (norm.weight * x / (x.square().mean() + 1e-6).sqrt() - y).abs().max() < 1e-12
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


@torch.no_grad()
def test_c102_norm_statistics_are_per_token() -> None:
    for config in (c.LayerNorm(), c.RMSNorm()):
        norm = norm64(config, random_gain=True)
        out = norm(X)
        assert torch.equal(norm(X[1:2]), out[1:2])  # independent of the batch
        assert torch.equal(norm(X[:, :2]), out[:, :2])  # of the length
        assert torch.equal(norm(torch.cat((X[:, :1], 100 * X[:, 1:]), 1))[:, 0], out[:, 0])  # of other tokens


@torch.no_grad()
def test_c103_mean_and_variance_of_normalized_vectors() -> None:
    layernorm, rmsnorm = norm64(c.LayerNorm(eps=1e-14))(X), norm64(c.RMSNorm(eps=1e-14))(X)
    assert layernorm.mean(-1).abs().max() < 1e-12
    assert (layernorm.var(-1, correction=0) - 1).abs().max() < 1e-12
    assert (rmsnorm.square().mean(-1) - 1).abs().max() < 1e-12
    assert rmsnorm.mean(-1).abs().min() > 0.1


@torch.no_grad()
def test_c104_layernorm_ignores_shift_and_scale_and_rmsnorm_scale() -> None:
    """The scale must be positive: a negative one changes the sign of the output. Exact only for eps = 0."""
    layernorm, rmsnorm = norm64(c.LayerNorm(eps=1e-14)), norm64(c.RMSNorm(eps=1e-14))
    assert (layernorm(7 * X + 5) - layernorm(X)).abs().max() < 1e-12
    assert (rmsnorm(7 * X) - rmsnorm(X)).abs().max() < 1e-12
    assert (rmsnorm(-7 * X) + rmsnorm(X)).abs().max() < 1e-12
    assert (rmsnorm(X + 5) - rmsnorm(X)).abs().max() > 0.1
    centered = X - X.mean(-1, keepdim=True)
    assert (rmsnorm(centered) - layernorm(X)).abs().max() < 1e-12


def test_c105_number_of_parameters_of_the_norms() -> None:
    assert sum(p.numel() for p in norm64(c.LayerNorm()).parameters()) == 2 * D_MODEL
    assert sum(p.numel() for p in norm64(c.RMSNorm()).parameters()) == D_MODEL
    assert ct.size("gpt2").parameters.per_layer[0].norm == 2 * 2 * 768
    assert ct.size("llama-3-8b").parameters.per_layer[0].norm == 2 * 4096


@torch.no_grad()
def test_c106_layernorm_has_two_reductions_and_rmsnorm_one() -> None:
    """A mean and a mean of squares, which one pass over x can accumulate; RMSNorm needs only the second."""
    with MeanCounter() as rms_means:
        norm64(c.RMSNorm())(X)
    with MeanCounter() as layer_means:
        mean = X.mean(-1, keepdim=True)
        variance = X.square().mean(-1, keepdim=True) - mean.square()
        out = (X - mean) * torch.rsqrt(variance + 1e-5)
    assert (out - norm64(c.LayerNorm(eps=1e-5))(X)).abs().max() < 1e-12
    assert (layer_means.count, rms_means.count) == (2, 1)


@torch.no_grad()
def test_c107_eps_is_added_to_the_variance_inside_the_square_root() -> None:
    """At σ = 0.001 and eps = 1e-5, sqrt(var + eps) shrinks the output to 0.30, σ + eps to 0.99."""
    x = torch.tensor([-1.0, 1.0] * 8, dtype=torch.float64) * 1e-3
    outside = x / (x.std(correction=0) + 1e-5)
    inside = x / (x.var(correction=0) + 1e-5).sqrt()
    assert (norm64(c.LayerNorm(eps=1e-5))(x) - inside).abs().max() < 1e-12
    assert (F.layer_norm(x, (D_MODEL,), eps=1e-5) - inside).abs().max() < 1e-12
    assert (norm64(c.RMSNorm(eps=1e-5))(x) - inside).abs().max() < 1e-12
    assert (F.rms_norm(x, (D_MODEL,), eps=1e-5) - inside).abs().max() < 1e-12
    assert abs(inside.max().item() - 0.3015) < 1e-4
    assert abs(outside.max().item() - 0.9901) < 1e-4


@torch.no_grad()
def test_c108_rmsnorm_equals_the_builtin_one() -> None:
    norm = norm64(c.RMSNorm(eps=1e-6), random_gain=True)
    builtin = nn.RMSNorm(D_MODEL, eps=1e-6, dtype=torch.float64)
    builtin.load_state_dict(norm.state_dict())
    assert (builtin(X) - norm(X)).abs().max() < 1e-12
    assert (F.rms_norm(X, (D_MODEL,), norm.weight, eps=1e-3) - norm(X)).abs().max() > 1e-6


def test_c111_both_norms_discard_the_scale_and_layernorm_also_the_mean() -> None:
    """The Jacobian loses the direction of the normalized vector in both norms, and that of (1, …, 1) in LayerNorm."""
    x, ones = X[0, 0], torch.ones(D_MODEL, dtype=torch.float64)
    layernorm, rmsnorm = (
        torch.autograd.functional.jacobian(norm64(config), x)
        for config in (c.LayerNorm(eps=1e-14), c.RMSNorm(eps=1e-14))
    )
    assert torch.linalg.matrix_rank(layernorm, rtol=1e-10) == D_MODEL - 2
    assert torch.linalg.matrix_rank(rmsnorm, rtol=1e-10) == D_MODEL - 1
    assert max((layernorm @ ones).abs().max(), (layernorm @ x).abs().max(), (rmsnorm @ x).abs().max()) < 1e-12
    assert (rmsnorm @ ones).abs().max() > 0.01


def test_c112_llama_uses_rmsnorm_and_gpt_layernorm() -> None:
    norms = {name: ct.config(name).decoder.norm for name in ct.presets() if name.startswith(("llama", "gpt2", "gpt3"))}
    assert len(norms) > 15
    for name, norm in norms.items():
        assert isinstance(norm, c.RMSNorm if name.startswith("llama") else c.LayerNorm)
