"""`train_sae`: train a sparse autoencoder on an activation dataset.

Loss of each architecture, for inputs that are scaled to a mean squared norm of d_in:

    standard   ‖x − x̂‖² + sparsity_coefficient · Σ f            decoder directions have norm 1
    topk       ‖x − x̂‖²                                          the `k` largest features
    jumprelu   ‖x − x̂‖² + sparsity_coefficient · (number of active features)

All use the auxiliary loss of Gao et al. 2024 (https://arxiv.org/abs/2406.04093) for dead features. JumpReLU has the
straight-through gradients of Rajamanoharan et al. 2024 (https://arxiv.org/abs/2407.14435).
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutaway.argument_checks import check_positive_int, check_seed
from cutaway.errors import InputError
from cutaway.lens.activations import ActivationDataset
from cutaway.lens.sae.autoencoder import SAEConfig, SparseAutoencoder

_SAMPLE_TOKENS = 8192
"""Number of tokens from which the mean and the scale of the input are estimated."""
_AUX_COEFFICIENT = 1 / 32
_BANDWIDTH = 0.05
"""Width of the kernel that estimates the density of pre-activations at the threshold, for JumpReLU."""
_INITIAL_THRESHOLD = 0.1


@dataclass(frozen=True)
class SAETrainStep:
    """Metrics of one training step, on its batch."""

    step: int
    num_steps: int
    loss: float
    explained_variance: float
    """1 − ‖x − x̂‖² / ‖x − mean‖²."""
    l0: float
    """Mean number of active features of a token."""
    dead_fraction: float
    """Fraction of the features that no token of the last `dead_after_tokens` tokens has activated."""


def train_sae(
    dataset: ActivationDataset,
    cfg: SAEConfig,
    *,
    num_steps: int,
    batch_size: int = 1024,
    lr: float = 1e-3,
    sparsity_coefficient: float | None = None,
    dead_after_tokens: int = 50_000,
    seed: int = 0,
    device: str | None = None,
    on_step: Callable[[SAETrainStep], None] | None = None,
    progress: bool = True,
) -> SparseAutoencoder:
    """Train a sparse autoencoder on the activations of `cfg.site`. The result depends only on the arguments.

    Args:
        dataset: activations, which are read in shuffled batches, several times if necessary.
        cfg: architecture (standard, topk or jumprelu), d_in, d_sae, k, and the site, which the dataset must have.
        lr: learning rate of Adam. It is warmed up over 5 % of the steps and decays linearly over the last 20 %.
        sparsity_coefficient: weight of the sparsity loss of `standard` (L1) and `jumprelu` (L0). A larger value gives
            fewer active features. `topk` has none.
        dead_after_tokens: a feature that none of so many tokens has activated counts as dead.
        on_step: called with the metrics of each step.
    """
    check_positive_int("num_steps", num_steps)
    check_positive_int("batch_size", batch_size)
    check_positive_int("dead_after_tokens", dead_after_tokens)
    check_seed(seed)
    site = dataset.resolve_site(cfg.site)
    width = math.prod(dataset.index.sites[site].shape)
    if width != cfg.d_in:
        raise InputError(f"cfg.d_in is {cfg.d_in}, but the activations at {site} have width {width}; pass d_in={width}")
    if cfg.architecture == "gated":
        raise InputError("a gated autoencoder can be loaded, but not trained; use standard, topk or jumprelu")
    coefficient = _check_coefficient(cfg, sparsity_coefficient)
    trainer = _Trainer(cfg, _sample_inputs(dataset, site, seed), lr, coefficient, seed, device)
    steps = zip(range(num_steps), _iterate_inputs(dataset, site, batch_size, seed), strict=False)
    for step, x in _track_steps(steps, num_steps, progress):
        trainer.set_lr(lr * _lr_factor(step, num_steps))
        metrics = trainer.step(x, step, num_steps, dead_after_tokens)
        if on_step is not None:
            on_step(metrics)
    return trainer.finish()


class _Trainer:
    """An autoencoder of scaled inputs, its optimizer, and the number of tokens since each feature was active."""

    def __init__(
        self, cfg: SAEConfig, sample: Tensor, lr: float, coefficient: float, seed: int, device: str | None
    ) -> None:
        self.cfg, self.coefficient, self.device = cfg, coefficient, device
        self.scale = math.sqrt(cfg.d_in) / float(sample.norm(dim=1).square().mean().sqrt())
        self.sae = SparseAutoencoder(cfg, seed=seed, device=device)
        with torch.no_grad():
            self.sae.b_dec.copy_(sample.mean(0) * self.scale)
            if cfg.architecture == "jumprelu":
                self.sae.threshold.fill_(_INITIAL_THRESHOLD)
            if not cfg.apply_b_dec_to_input:  # the pre-activations begin with those of the centered input
                self.sae.b_enc.copy_(-(self.sae.b_dec @ self.sae.W_enc))
        self.optimizer = torch.optim.Adam(self.sae.parameters(), lr=lr, betas=(0.9, 0.999))
        self.tokens_since_active = torch.zeros(cfg.d_sae, dtype=torch.long, device=device)

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self, x: Tensor, step: int, num_steps: int, dead_after_tokens: int) -> SAETrainStep:
        """Update the weights with one batch, (n, d_in)."""
        sae, x = self.sae, x.to(self.device) * self.scale
        pre = sae.pre_activations(x)
        acts, sparsity = self._activate(pre)
        residual = x - sae.decode(acts)
        loss = residual.square().sum(1).mean()
        error = float(loss.detach())
        if self.cfg.architecture != "topk":
            # The coefficient increases over the first 10 % of the steps, which leaves fewer features dead.
            loss = loss + self.coefficient * min(1.0, step / max(0.1 * num_steps, 1)) * sparsity
        is_dead = self.tokens_since_active >= dead_after_tokens
        if bool(is_dead.any()):
            loss = loss + _AUX_COEFFICIENT * self._auxiliary_loss(pre, residual.detach(), is_dead)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            _remove_parallel_gradient(sae.W_dec)
            torch.nn.utils.clip_grad_norm_(sae.parameters(), 1.0 * math.sqrt(self.cfg.d_in))
            self.optimizer.step()
            sae.W_dec.div_(sae.W_dec.norm(dim=1, keepdim=True))
            if self.cfg.architecture == "jumprelu":
                sae.threshold.clamp_(min=0.0)
            active = (acts > 0).any(0)
            self.tokens_since_active = torch.where(active, 0, self.tokens_since_active + len(x))
            variance = float((x - x.mean(0)).square().sum(1).mean())
            l0 = float((acts > 0).sum(1, dtype=torch.float32).mean())
        explained = 1 - error / max(variance, 1e-12)
        dead = float((self.tokens_since_active >= dead_after_tokens).float().mean())
        return SAETrainStep(step, num_steps, float(loss.detach()), explained, l0, dead)

    def _activate(self, pre: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features, (n, d_sae), and their sparsity loss."""
        if self.cfg.architecture == "jumprelu":
            acts: Tensor = _JumpReLU.apply(pre, self.sae.threshold)  # type: ignore[no-untyped-call]
            active: Tensor = _Step.apply(pre, self.sae.threshold)  # type: ignore[no-untyped-call]
            return acts, active.sum(1).mean()
        if self.cfg.architecture == "topk":
            assert self.cfg.k is not None
            values, indices = pre.topk(self.cfg.k, dim=1)
            return torch.zeros_like(pre).scatter(1, indices, values.relu()), pre.new_zeros(())
        acts = pre.relu()
        return acts, acts.sum(1).mean()

    def _auxiliary_loss(self, pre: Tensor, residual: Tensor, is_dead: Tensor) -> Tensor:
        """Return the error of a reconstruction of `residual` by the dead features with the largest pre-activations."""
        dead = is_dead.nonzero()[:, 0]
        k = min(self.cfg.d_in // 2, len(dead))
        values, indices = pre[:, dead].topk(k, dim=1)
        acts = torch.zeros(len(pre), len(dead), device=pre.device).scatter(1, indices, values)
        error = (acts @ self.sae.W_dec[dead] - residual).square().sum(1).mean()
        return error * min(1.0, len(dead) / (self.cfg.d_in // 2))

    @torch.no_grad()
    def finish(self) -> SparseAutoencoder:
        """Return the autoencoder for inputs that are not scaled: the scale is folded into the weights.

        Scaling an input by s scales b_dec, and the features, which stay in the units of the input, by 1/s.
        """
        sae = self.sae.eval().requires_grad_(False)
        for name in ("b_enc", "b_dec", "threshold"):
            if hasattr(sae, name):
                getattr(sae, name).div_(self.scale)
        return sae


class _JumpReLU(torch.autograd.Function):
    """Pre-activations above the threshold, with a straight-through gradient of the threshold."""

    @staticmethod
    def forward(ctx: Any, pre: Tensor, threshold: Tensor) -> Tensor:
        ctx.save_for_backward(pre, threshold)
        return torch.where(pre > threshold, pre, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        pre, threshold = ctx.saved_tensors
        near = ((pre - threshold).abs() < _BANDWIDTH / 2).to(pre.dtype)
        return grads[0] * (pre > threshold), -(threshold / _BANDWIDTH * near * grads[0]).sum(0)


class _Step(torch.autograd.Function):
    """1 for pre-activations above the threshold, else 0, with a straight-through gradient of the threshold."""

    @staticmethod
    def forward(ctx: Any, pre: Tensor, threshold: Tensor) -> Tensor:
        ctx.save_for_backward(pre, threshold)
        return (pre > threshold).to(pre.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        pre, threshold = ctx.saved_tensors
        near = ((pre - threshold).abs() < _BANDWIDTH / 2).to(pre.dtype)
        return torch.zeros_like(pre), -(near / _BANDWIDTH * grads[0]).sum(0)


def _check_coefficient(cfg: SAEConfig, coefficient: float | None) -> float:
    if (coefficient is None) != (cfg.architecture == "topk"):
        needs = "has no sparsity loss; leave it out" if cfg.architecture == "topk" else "needs one; pass a number > 0"
        raise InputError(f"sparsity_coefficient is {coefficient}, but {cfg.architecture} {needs}")
    if coefficient is not None and not 0 < coefficient < math.inf:
        raise InputError(f"sparsity_coefficient is {coefficient!r}; pass a number > 0")
    return coefficient or 0.0


def _lr_factor(step: int, num_steps: int) -> float:
    warmup, decay = 0.05 * num_steps, 0.2 * num_steps
    return min(1.0, (step + 1) / max(warmup, 1), (num_steps - step) / max(decay, 1))


def _remove_parallel_gradient(directions: Tensor) -> None:
    """Remove the component of the gradient that would change the norms of the directions."""
    assert directions.grad is not None
    directions.grad -= (directions.grad * directions).sum(1, keepdim=True) * directions


def _sample_inputs(dataset: ActivationDataset, site: str, seed: int) -> Tensor:
    count = min(_SAMPLE_TOKENS, len(dataset))
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(len(dataset), (count,), generator=generator).sort().values
    return dataset.read(indices, [site])[site].flatten(1).float()


def _iterate_inputs(dataset: ActivationDataset, site: str, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Yield batches of activations, (n, d_in), in a new order in each pass over the dataset."""
    if len(dataset) < batch_size:
        raise InputError(
            f"the dataset has {len(dataset)} tokens, fewer than batch_size = {batch_size}; pass a smaller one"
        )
    epoch = 0
    while True:
        for batch in dataset.batches(batch_size, seed=seed + epoch, sites=[site], drop_last=True):
            yield batch[site].flatten(1).float()
        epoch += 1


def _track_steps(steps: Iterator[tuple[int, Tensor]], num_steps: int, progress: bool) -> Iterator[tuple[int, Tensor]]:
    if not progress or not sys.stderr.isatty():
        return steps
    from rich.console import Console
    from rich.progress import track

    return iter(track(steps, "autoencoder", num_steps, transient=True, console=Console(stderr=True)))
