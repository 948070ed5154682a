"""Training: initial-loss, gradient-flow, overfit, update-ratio, gradient-accumulation, activation-checkpointing."""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn

from cutaway.check.checked_model import require
from cutaway.check.checks.loss import IGNORE_INDEX, compute_loss, distinct_logits, model_loss
from cutaway.check.context import CheckContext, compute_once
from cutaway.check.module_state import (
    MAX_PERTURBED_PARAMS,
    add_noise,
    fork_rng,
    preserve_state,
    require_uncompiled,
    swap_tensors,
)
from cutaway.check.numerics import NOISE_MARGIN
from cutaway.check.probes.embedding_gradients import check_finite_differences
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError, failure, skipped, success, warning

_MAX_LOSS_ABOVE_UNIFORM, _MIN_LOSS_RATIO = 2.0, 0.5
"""An initial loss is unusual if it exceeds ln V by more than the first number, in nats, or is below the second number
times ln V. Logits with a variance of 4 add 2 nats."""


_OVERFIT_LRS, _OVERFIT_STEPS, _OVERFIT_LOSS_RATIO = (3e-3, 3e-2, 3e-4), 30, 0.9
"""Learning rates that are tried one after another, number of steps at each, and the fraction of the initial loss that
the loss must fall to."""


_RMS_SAMPLE_SIZE = 1 << 16
"""Maximum number of sampled elements for the RMS of a gradient."""


_GRADIENT_SAMPLE_SIZE = 256
"""Number of sampled elements of a gradient that are compared."""


_MIN_NORM_RATIO = 1e-7
"""Norm of a gradient, relative to the largest one, up to which it may be a rounding error."""


_ROUTER_NAME_PATTERN = re.compile(r"rout|gate|switch")
_ROUTER_PERTURBATION = 1.0
"""Perturbation of a router, relative to its RMS, that makes it select other experts."""


_NUM_TRAINING_RUNS = 3
"""Number of random states in which a parameter must get no gradient in training mode to report a bug."""


_PARAMETER_PERTURBATION = 1e-2
"""Perturbation, relative to a parameter's RMS, that tests whether the parameter affects the loss."""


_ADAM_LR = 3e-4
NO_ROUTER_GRADIENT = "selects experts, but gets no gradient"


_MIN_UPDATE_RATIO, _MAX_UPDATE_RATIO = 1e-11, 3.0
"""Usual range of a first Adam update relative to the RMS of the parameter."""


def _trainable_parameters(ctx: CheckContext) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name; raise SkipCheckError if there are none."""
    params = {name: param for name, param in ctx.module.named_parameters() if param.requires_grad}
    if not params:
        raise SkipCheckError("needs parameters that require a gradient")
    return params


def _run_backward(ctx: CheckContext, tokens: Tensor) -> Tensor:
    """Run a forward and a backward pass; return the loss. The parameters then have new gradients."""
    _clear_gradients(ctx)
    with torch.enable_grad():
        loss = compute_loss(ctx, tokens)
        if not loss.requires_grad and ctx.model.loss is None:
            raise SkipCheckError("needs logits that require a gradient; these do not, as with torch.inference_mode")
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@dataclass
class _GradientStats:
    """Statistics of one parameter's gradient."""

    is_finite: bool
    is_nonzero: bool
    norm: float
    update_ratio: float | None
    """RMS of the first Adam update divided by the RMS of the parameter; None for a vector or without a gradient."""


@compute_once
def _collect_gradient_stats(ctx: CheckContext) -> tuple[Tensor, float, dict[str, _GradientStats]]:
    """Tokens, loss, and gradient statistics per parameter; computed once, because it takes a backward pass."""
    tokens = ctx.random_tokens(1, min(12, ctx.seq_len))
    loss = float(_run_backward(ctx, tokens))
    stats = {name: _gradient_stats(param) for name, param in _trainable_parameters(ctx).items()}
    _clear_gradients(ctx)
    return tokens, loss, stats


def _gradient_stats(parameter: nn.Parameter) -> _GradientStats:
    """Statistics of a parameter's gradient. `update_ratio` is computed from a sample of the elements."""
    if parameter.grad is None:
        return _GradientStats(True, False, 0.0, None)
    total = float(parameter.grad.abs().sum())
    grad, weights = parameter.grad.flatten(), parameter.flatten()
    stride = max(1, grad.numel() // _RMS_SAMPLE_SIZE)
    sample = grad[::stride].float()
    sample = sample[sample != 0]
    rms = float(weights[::stride].float().square().mean().sqrt())
    ratio = None
    if parameter.ndim >= 2 and rms > 0 and len(sample):  # the first Adam update is lr · g / (|g| + ε)
        ratio = _ADAM_LR * float((sample / (sample.abs() + 1e-8)).square().mean().sqrt()) / rms
    return _GradientStats(math.isfinite(total), total != 0, float(parameter.grad.float().norm()), ratio)


def _clear_gradients(ctx: CheckContext) -> None:
    for param in _trainable_parameters(ctx).values():
        param.grad = None


def _sample_gradients(ctx: CheckContext, tokens: Tensor) -> Tensor:
    """The loss and a sample of each parameter's gradient, concatenated."""
    with fork_rng():
        torch.manual_seed(ctx.seed)
        loss = _run_backward(ctx, tokens)
    samples = [loss.float().reshape(1)]
    for param in _trainable_parameters(ctx).values():
        grad = (torch.zeros_like(param) if param.grad is None else param.grad).detach().flatten().float()
        samples.append(grad[:: max(1, grad.numel() // _GRADIENT_SAMPLE_SIZE)])
    _clear_gradients(ctx)
    return torch.cat(samples)


@register_check("initial-loss", needs=("logits", "module"), depends_on=("loss-shift", "loss-reduction"))
def initial_loss(ctx: CheckContext) -> CaseResult:
    """Catches initial weights of the wrong scale: the initial loss is far from ln V, and the first steps correct that.

    The loss of an untrained model on random tokens must be near ln V. A model is untrained if `trained` is False, or if
    norm gains and biases have their initial values and the rows of the embedding have similar norms.

    Cause: a tied embedding has the default initialization N(0, 1), or the residual stream grows with depth.
    Fix: initialize the embedding with std 0.02, and output projections of attention and FFN with 0.02/√(2·layers).
    """
    model = ctx.model
    if failure := _detect_non_logits(ctx.logits(ctx.random_tokens(2)), model.kind):
        return failure
    if model.trained or (model.trained is None and not _is_untrained(ctx.module, model.vocab_size)):
        raise SkipCheckError("needs an untrained model (the property trained=False)")
    loss, uniform = float(compute_loss(ctx, ctx.random_tokens(2))), math.log(model.vocab_size or 1)
    message = f"the initial loss is {loss:.4g}, and ln V is {uniform:.4g}"
    if not loss <= uniform + _MAX_LOSS_ABOVE_UNIFORM:
        return warning(message, loss, uniform + _MAX_LOSS_ABOVE_UNIFORM)
    if (model.vocab_size or 0) >= 16 and loss < _MIN_LOSS_RATIO * uniform and model.kind != "encoder":
        return warning(f"{message}: random tokens cannot be predicted", loss, _MIN_LOSS_RATIO * uniform)
    return success(message, loss, uniform + _MAX_LOSS_ABOVE_UNIFORM)


def _is_untrained(module: nn.Module, vocab_size: int | None) -> bool:
    """Whether the model is probably untrained: initial gains and biases, and embedding rows of similar norms."""
    vectors = [param for param in module.parameters() if param.ndim == 1 and param.numel() > 1]  # gains and biases
    if not vectors or not all(bool((x == x[0]).all()) for x in vectors if not _is_default_bias_init(x)):
        return False
    if not any(bool((x == x[0]).all()) for x in vectors):
        return False
    for submodule in module.modules():
        if isinstance(submodule, nn.Embedding) and submodule.num_embeddings == vocab_size:
            norms = submodule.weight.float().norm(dim=1)
            norms = norms[norms > 0]
            if len(norms) < 2 or float(norms.std() / norms.mean()) > 3 / math.sqrt(2 * submodule.embedding_dim):
                return False
    return True


def _is_default_bias_init(bias: Tensor) -> bool:
    """Whether a bias may have nn.Linear's initialization, which is uniform in ±1/√fan_in: the maximum is then about
    twice the mean absolute value."""
    magnitude = bias.float().abs()
    return bool(bias.numel() >= 8 and magnitude.max() <= 2.5 * magnitude.mean() and magnitude.max() < 1)


@register_check("gradient-flow", needs=("logits", "module"))
def gradient_flow(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches parameters that affect the loss but get no gradient, so that they are never trained.

    Run a backward pass from the loss. Perturb each parameter without a gradient: if the loss changes, the parameter
    should have had a gradient. Unused experts, and heads that attend to one token only, correctly have no gradient.
    Parameters with a gradient in eval mode must have one in training mode too. Then compare the gradient with respect
    to the token embeddings with finite differences.

    Cause: detach(), no_grad(), .data or torch.tensor(…) cuts the graph, or the weight of a single expert is normalized.
    Fix: use the parameter itself in every op between it and the loss, with gradients enabled.
    """
    require_uncompiled(ctx.module)
    params = _trainable_parameters(ctx)
    tokens, loss, stats = _collect_gradient_stats(ctx)
    not_finite = [name for name, stat in stats.items() if not stat.is_finite]
    without = [name for name, stat in stats.items() if not stat.is_nonzero]
    if not math.isfinite(loss):
        raise SkipCheckError("needs a finite loss")
    if not_finite:
        yield failure(f"the gradient of {not_finite[0]} is not finite", len(not_finite), 0, not_finite[0])
        return
    affecting = without if without and _affects_loss(ctx, tokens, [params[name] for name in without]) else []
    confirmed = [name for name in affecting[:12] if _affects_loss(ctx, tokens, [params[name]])]
    least = _MIN_NORM_RATIO * max(stat.norm for stat in stats.values())
    routers = {name for name in params if _ROUTER_NAME_PATTERN.search(name) and params[name].ndim == 2}
    if others := [name for name in confirmed if name not in routers]:
        more = f" (and {len(affecting) - 1} more)" if len(affecting) > 1 else ""
        yield failure(f"{others[0]}{more} affects the loss but gets no gradient", len(affecting), 0, others[0])
        return
    # With one selected expert, whose weight is normalized to one, the gradient of the router is a rounding error
    rounding = [name for name in routers if stats[name].is_nonzero and stats[name].norm <= least]
    rounding = [name for name in rounding if _affects_loss(ctx, tokens, [params[name]], _ROUTER_PERTURBATION)]
    for name in sorted({*confirmed, *rounding}):
        cause = "the weights of the selected experts are normalized to a sum of one, and only one is selected"
        fix = "multiply the output of a single expert by its probability from the softmax over all experts"
        yield warning(f"{name} {NO_ROUTER_GRADIENT}", stats[name].norm, least, name, cause=cause, fix=fix)
        return
    num_reached = len(params) - len(without)
    yield success(f"{num_reached} of {len(params)} parameters get a gradient; the others do not affect this loss")
    lost = None if ctx.is_slow else _lost_in_training_mode(ctx, tokens, set(params) - set(without))
    if lost is None and not ctx.is_slow:
        cause = (
            "a number that depends on the training flag divides by zero, or dropout multiplies a score of -inf by zero"
        )
        fix = "apply dropout after the softmax, and test each op that depends on self.training"
        yield failure("the loss is finite in eval mode, and not in training mode", cause=cause, fix=fix)
        return
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        message = f"{lost[0]}{more} gets a gradient in eval mode, but none in training mode"
        cause = "the code path of training, such as activation checkpointing, cuts the graph"
        yield failure(message, len(lost), 0, lost[0], cause=cause)
        return
    try:
        yield check_finite_differences(ctx)
    except SkipCheckError as error:
        yield skipped(f"the comparison with finite differences {error}")


def _lost_in_training_mode(ctx: CheckContext, tokens: Tensor, names: set[str]) -> list[str] | None:
    """The parameters of `names` that get no gradient in training mode, whatever the random state is.

    None if the loss is not finite in training mode.
    """
    lost, num_finite = list(names), 0
    try:
        for seed in range(_NUM_TRAINING_RUNS):
            with preserve_state(ctx.module, training=True), fork_rng():
                torch.manual_seed(ctx.seed + seed)
                if not math.isfinite(float(_run_backward(ctx, tokens))):
                    _clear_gradients(ctx)
                    continue
                num_finite += 1
                params = _trainable_parameters(ctx)
                lost = [name for name in params if name in lost and not _has_gradient(params[name])]
                _clear_gradients(ctx)
            if not lost:
                return []
    except Exception:  # some models need other inputs in training mode, such as labels
        _clear_gradients(ctx)
        return []
    return lost if num_finite else None


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


def _affects_loss(
    ctx: CheckContext, tokens: Tensor, parameters: list[nn.Parameter], scale: float = _PARAMETER_PERTURBATION
) -> bool:
    """Whether perturbations of the parameters, relative to their RMS, change the loss by more than rounding noise."""
    generator = torch.Generator().manual_seed(ctx.seed)
    base = float(compute_loss(ctx, tokens))
    change = 0.0
    tolerance = NOISE_MARGIN * ctx.measure_noise(lambda: compute_loss(ctx, tokens).reshape(1))
    for sign in (1.0, -1.0):
        with add_noise(parameters, sign * scale, generator):
            change = max(change, abs(float(compute_loss(ctx, tokens)) - base))
    return change > tolerance


@register_check("overfit", needs=("logits", "module"), depends_on=("loss-shift", "loss-reduction"))
def overfit(ctx: CheckContext) -> CaseResult:
    """Catches a model that cannot overfit one sequence: the backward pass or the loss is wrong.

    Train a copy of the weights on one short sequence, with 30 AdamW steps at each of three learning rates: at one of
    them, the loss must fall by 10 %.

    Cause: the graph is cut (detach, no_grad, .data, numpy), a custom backward is wrong, or the loss is wrong.
    Fix: trace the gradient back from the loss; test custom backward functions with torch.autograd.gradcheck.
    """
    params = _trainable_parameters(ctx)
    if sum(param.numel() for param in params.values()) > MAX_PERTURBED_PARAMS or ctx.is_slow:
        raise SkipCheckError(f"needs a model of at most {MAX_PERTURBED_PARAMS:,} parameters, because it is trained")
    tokens = ctx.random_tokens(1, min(8, ctx.seq_len))
    best = first = math.inf
    for lr in _OVERFIT_LRS:
        with swap_tensors([*ctx.module.parameters(), *ctx.module.buffers()], Tensor.clone), fork_rng():
            optimizer = torch.optim.AdamW(params.values(), lr=lr, weight_decay=0.0)
            for step in range(_OVERFIT_STEPS):
                loss = float(_run_backward(ctx, tokens))
                first = loss if step == 0 else first
                best = min(best, loss)
                if best <= _OVERFIT_LOSS_RATIO * first:
                    _clear_gradients(ctx)
                    steps = f"{step} step{'s' * (step != 1)}"
                    message = f"the loss on one sequence falls from {first:.4g} to {best:.4g} in {steps}"
                    return success(message, best, _OVERFIT_LOSS_RATIO * first)
                optimizer.step()
        _clear_gradients(ctx)
    message = f"{_OVERFIT_STEPS} AdamW steps on one sequence reduce the loss only from {first:.4g} to {best:.4g}"
    return failure(message, best, _OVERFIT_LOSS_RATIO * first)


@register_check("update-ratio", needs=("logits", "module"), depends_on=("gradient-flow",))
def update_ratio(ctx: CheckContext) -> CaseResult:
    """Catches matrices that one Adam step would overwrite, or leave unchanged.

    Compare the first Adam update of each matrix, at a learning rate of 3e-4, with the matrix itself.

    Cause: weights are far too small or too large, or a gradient is far below Adam's ε.
    Fix: initialize matrices with std 0.02 or 1/√d_model, and inspect how gradients shrink through the layers.
    """
    _, loss, stats = _collect_gradient_stats(ctx)
    ratios = {name: stat.update_ratio for name, stat in stats.items() if stat.update_ratio is not None}
    least = _MIN_NORM_RATIO * max(stat.norm for stat in stats.values())
    for name in [name for name in ratios if _ROUTER_NAME_PATTERN.search(name) and stats[name].norm <= least]:
        del ratios[name]  # a rounding error, which gradient-flow reports
    if not ratios or not math.isfinite(loss):
        raise SkipCheckError("needs matrices with a gradient")
    low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    for name, limit, is_unusual in (
        (high, _MAX_UPDATE_RATIO, ratios[high] > _MAX_UPDATE_RATIO),
        (low, _MIN_UPDATE_RATIO, ratios[low] < _MIN_UPDATE_RATIO),
    ):
        if is_unusual:
            message = f"an Adam step at lr {_ADAM_LR:g} changes {name} by {ratios[name]:.3g} times its RMS"
            return warning(message, ratios[name], limit, name)
    median = sorted(ratios.values())[len(ratios) // 2]
    return success(f"an Adam step at lr {_ADAM_LR:g} changes a matrix by {median:.2g} times its RMS (median)", median)


@register_check(
    "gradient-accumulation",
    needs=("loss", "accumulated_loss"),
    depends_on=("batch-isolation", "loss-shift", "loss-reduction", "loss-ignore-index"),
)
def gradient_accumulation(ctx: CheckContext) -> CaseResult:
    """Catches gradient accumulation that differs from the full batch: short micro-batches weigh as much as long ones.

    Split a batch into micro-batches with few and many labels: the accumulated loss must equal that of the batch.

    Cause: the mean losses of the micro-batches are averaged, whatever their numbers of labels.
    Fix: sum the losses of all micro-batches, and divide by the total number of labels.
    """
    accumulated_loss = require(ctx.model.accumulated_loss)
    tokens = ctx.random_tokens(3)
    labels = tokens.clone()
    labels[0, 3:] = IGNORE_INDEX
    micro_batches = [(tokens[:1], labels[:1]), (tokens[1:], labels[1:])]

    def accumulate() -> Tensor:
        return accumulated_loss(micro_batches).float().reshape(1)

    with distinct_logits(ctx, tokens):
        full = model_loss(ctx, tokens, labels)
        diff = ctx.compare(lambda: model_loss(ctx, tokens, labels), accumulate, first_result=full)
        diff.tolerance = max(diff.tolerance, 1e-5 * max(1.0, abs(float(full))))
        if diff.within_tolerance:
            return diff.success("the accumulated loss equals that of the full batch")
        means = [float(model_loss(ctx, *micro_batch)) for micro_batch in micro_batches]
        value = float(accumulate())
    known = {"the mean of the micro-batch means": sum(means) / 2, "the sum of the micro-batch means": sum(means)}
    reason = next((f", which is {name}" for name, other in known.items() if abs(value - other) <= diff.tolerance), "")
    message = f"the loss of the full batch is {float(full):.4g}, but the accumulated loss is {value:.4g}"
    return diff.failure(f"{message}{reason}")


@register_check("activation-checkpointing", needs=("logits", "module", "set_activation_checkpointing"))
def activation_checkpointing(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches activation checkpointing that changes the gradients: other dropout masks, or missing gradients.

    Compare the loss and the gradients with and without activation checkpointing, in training mode and with the same
    random state: they must be equal, both with the model's own dropout and with a dropout of 0.3.

    Cause: the recomputation uses another random state or other inputs, or reentrant checkpointing cuts the graph.
    Fix: use torch.utils.checkpoint with use_reentrant=False and preserve_rng_state=True.
    """
    module, set_checkpointing = ctx.module, require(ctx.model.set_activation_checkpointing)
    require_uncompiled(module)
    tokens = ctx.random_tokens(1, min(8, ctx.seq_len))

    def gradients(checkpointing: bool) -> Tensor:
        module.train()
        set_checkpointing(checkpointing)
        try:
            return _sample_gradients(ctx, tokens)
        finally:
            set_checkpointing(False)
            module.eval()

    dropouts = [submodule for submodule in module.modules() if isinstance(submodule, nn.Dropout)]
    for p in (None, 0.3) if dropouts and not ctx.is_slow else (None,):
        with ExitStack() as stack:
            for dropout in dropouts if p is not None else ():
                stack.enter_context(patch.object(dropout, "p", p))
            base = gradients(False)
            diff = ctx.compare(lambda: gradients(False), lambda: gradients(True), first_result=base)
        condition = "" if p is None else f" with dropout {p:g}"
        yield diff.expect_equal(
            passed=f"loss and gradients are the same with activation checkpointing{condition}",
            failed=f"activation checkpointing changes the loss or the gradients{condition}",
            location=_gradient_location(ctx, diff.index[0]),
        )


def _gradient_location(ctx: CheckContext, index: int) -> str:
    """Describe the element of `_sample_gradients` with this index: the loss, or the gradient of a parameter."""
    if index == 0:
        return "the loss"
    end = 1
    for name, param in _trainable_parameters(ctx).items():
        end += len(range(0, param.numel(), max(1, param.numel() // _GRADIENT_SAMPLE_SIZE)))
        if index < end:
            return f"the gradient of {name}"
    return ""


def _detect_non_logits(logits: Tensor, kind: str) -> CaseResult | None:
    """Return a failure if `logits` are probabilities, or the output of an activation; None if they can be logits."""
    if logits.shape[-1] < 3 or not bool((logits >= 0).all()):
        return None
    if bool(((logits.float().sum(-1) - 1).abs() < 1e-2).all()):
        return failure(
            "the logits are probabilities: they are not negative and sum to one",
            cause="the model applies softmax, and the loss applies it again",
            fix="return the logits, and apply softmax where probabilities are needed",
        )
    zeros = float((logits == 0).float().mean())
    if kind != "encoder" and 0.05 < zeros < 1:
        return failure(
            f"no logit is negative, and {zeros:.0%} are exactly zero",
            zeros,
            0.05,
            cause="an activation follows the head",
            fix="return the output of the head: unlikely tokens have negative logits",
        )
    return None
