"""Activation checks: attention-entropy, attention-logits, fp16-overflow, residual-growth, residual-connection,
dead-heads, dead-neurons."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from cutaway.check.context import CheckContext, compute_once
from cutaway.check.module_state import require_uncompiled
from cutaway.check.numerics import Args, Kwargs
from cutaway.check.probes.activation_tracer import (
    MASKED_SCORE,
    ActivationTracer,
    AttentionScores,
    LinearCall,
    ResidualStream,
    TracedAttention,
    is_hidden_state,
    trace_residual_streams,
)
from cutaway.check.probes.op_tracer import OpTracer
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, MeasuredArray, SkipCheckError, failure, success, warning

_MIN_VISIBLE_KEYS = 4
"""Queries with fewer visible keys are ignored."""
_FLAT_SPREAD, _COLLAPSED_WEIGHT, _MAX_LOGIT_SPREAD = 1e-6, 0.995, 500.0
_FP16_MAX, _FP16_HEADROOM = 65504.0, 4.0
_MAX_BLOCK_GROWTH, _MAX_TOTAL_GROWTH = 1e3, 1e6
_MIN_STEADY_GROWTH, _NUM_GROWING_BLOCKS = 1.6, 6
_STREAM_FACTOR, _MIN_RESIDUAL_SIMILARITY = 1e4, 0.2
"""Factor on the input of the first block, and the smallest cosine similarity of a block's output and input."""
_DEAD_RATIO, _DEAD_SIGMAS, _MAX_DEAD_SHARE, _MAX_UNREAD_SHARE = 1e-6, 6.0, 0.3, 0.05


@compute_once
def _trace_activations(ctx: CheckContext) -> tuple[ActivationTracer, Tensor]:
    """Run one forward pass; return the tracer with its attention calls and linear layers, and the logits."""
    if ctx.model.module is not None:
        require_uncompiled(ctx.module)
    tokens = ctx.random_tokens(1 if ctx.is_slow else 2)
    with torch.enable_grad(), ActivationTracer(ctx.model.module, len(tokens)) as tracer:
        return tracer, ctx.logits(tokens)


def _trace_attentions(ctx: CheckContext) -> list[TracedAttention]:
    """The attention calls of the traced forward pass; raise SkipCheckError if there are none."""
    attentions = _trace_activations(ctx)[0].traced_attentions
    if not attentions:
        raise SkipCheckError("needs attention by softmax or scaled_dot_product_attention, or attentions=")
    return attentions


def _get_attention_scores(ctx: CheckContext) -> list[AttentionScores]:
    """The attention calls of one forward pass: from the function `attentions`, if it was passed, otherwise traced.

    The scores of a pattern are its logarithms, up to a constant per query.
    """
    if ctx.model.attentions is None:
        return list(_trace_attentions(ctx))
    patterns = ctx.model.attentions(ctx.random_tokens(1 if ctx.is_slow else 2))
    return [AttentionScores(f"layer {n}", x.float().log(), x.float()) for n, x in enumerate(patterns)]


def _score_spread(attention: AttentionScores) -> tuple[Tensor, Tensor]:
    """Spread (maximum minus minimum) of the visible scores of each query, and the number of visible keys."""
    visible = (attention.scores > MASKED_SCORE) & attention.scores.isfinite()
    high = attention.scores.masked_fill(~visible, -torch.inf).amax(-1)
    low = attention.scores.masked_fill(~visible, torch.inf).amin(-1)
    return (high - low).nan_to_num(0.0, 0.0, 0.0), visible.sum(-1)


@register_check("attention-entropy")
def attention_entropy(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches uniform attention (the same weight for every key), or attention on a single key in all heads.

    Trace every attention softmax of one forward pass, or use the patterns of the function `attentions`. A head is
    uniform if the scores of each query differ by at most 1e-6. A layer has collapsed if at least half of the
    queries, over all heads, have their largest weight on another key than the first, and the mean of these weights
    exceeds 0.995.

    Cause: queries, keys or the scale are zero; or the scores are so large that the softmax is saturated.
    Fix: inspect the scale and the weights of q and k; in training, normalize queries and keys (QK-norm).
    """
    for call in _get_attention_scores(ctx):
        spread, num_keys = _score_spread(call)
        counted = num_keys >= _MIN_VISIBLE_KEYS
        if not bool(counted.any()):
            continue
        head_spread = spread.masked_fill(~counted, 0.0).amax((0, 2))
        has_queries = counted.any(2).any(0).tolist()  # a head without visible keys is not uniform
        flat = [head for head, value in enumerate(head_spread.tolist()) if value <= _FLAT_SPREAD and has_queries[head]]
        if flat:
            message = f"head {flat[0]} has the same weight on every key ({len(flat)} of {len(head_spread)} heads)"
            yield warning(message, float(head_spread[flat[0]]), _FLAT_SPREAD, call.module)
        top_weight, top_key = call.pattern.max(-1)
        not_first = counted & (top_key > 0)  # weight on the first token is a normal attention sink
        if int(not_first.sum()) * 2 < int(counted.sum()):
            continue
        mean = float(top_weight[not_first].mean())
        if mean > _COLLAPSED_WEIGHT:
            message = "all heads attend to a single key: the attention has collapsed"
            yield warning(message, mean, _COLLAPSED_WEIGHT, call.module)
    yield success("attention is neither uniform nor collapsed")


@register_check("attention-logits")
def attention_logits(ctx: CheckContext) -> CaseResult:
    """Catches attention logits so large that the softmax is saturated and bf16 cannot distinguish keys.

    Measure the spread (maximum minus minimum) of the visible scores of each query in every attention call of a forward
    pass. It must not exceed 500. Near 500, neighboring bf16 numbers differ by 2, which is a factor of seven in the
    attention weights.

    Cause: the scale is missing or inverted, or q and k have grown without bound in training.
    Fix: multiply q·k by 1/sqrt(d_head); in training, use QK-norm, a softcap or a lower learning rate.
    """
    spreads = [(float(_score_spread(call)[0].max()), call.module) for call in _trace_attentions(ctx)]
    worst, location = max(spreads)
    if worst > _MAX_LOGIT_SPREAD:
        return warning(f"the attention logits of one query differ by {worst:.0f}", worst, _MAX_LOGIT_SPREAD, location)
    return success(f"the attention logits of one query differ by at most {worst:.1f}", worst, _MAX_LOGIT_SPREAD)


_NAN_CAUSE = "weights that were not loaded or have diverged, 0/0 in a norm, or a softmax over a fully masked row"


@register_check("fp16-overflow")
def fp16_overflow(ctx: CheckContext) -> CaseResult:
    """Catches activations beyond the range of fp16, or so close to its maximum of 65504 that other inputs overflow.

    Find the largest input or output of any linear layer, in fp32. An fp16 model must stay a factor of 4 below 65504;
    for other models the message says whether fp16 would overflow.

    Cause: weights of a model trained in bf16 or fp32 are used in fp16, or a factor is wrong.
    Fix: run the model in bf16 or fp32, or keep the named layer in fp32.
    """
    calls = _trace_activations(ctx)[0].linear_calls
    if not calls:
        raise SkipCheckError("needs linear layers")
    nan_index = next((index for index, call in enumerate(calls) if bool(call.out.isnan().any())), None)
    if nan_index is not None:
        call = calls[nan_index]
        message = "an activation is NaN" if bool(call.weight.isfinite().all()) else "a weight is NaN or infinite"
        return failure(
            message,
            location=call.module or f"linear layer {nan_index}",
            cause=_NAN_CAUSE,
            fix="find the op that first gives NaN, in or before the named module",
        )
    worst, index = max((_max_activation(call), index) for index, call in enumerate(calls))
    location = calls[index].module or f"linear layer {index}"
    limit = _FP16_MAX / _FP16_HEADROOM
    message = f"activations reach {worst:.3g}; the maximum of fp16 is 65504"
    if ctx.model.dtype == torch.float16 and worst > limit:
        return CaseResult("fail" if worst > _FP16_MAX else "warn", message, worst, limit, location)
    if worst > limit:
        return success(f"{message}, so keep the model in bf16 or fp32", worst, None, location)
    return success(f"activations reach {worst:.3g}, far below the maximum of fp16", worst, limit)


def _max_activation(call: LinearCall) -> float:
    """Largest absolute value of a linear layer's input and output; infinite if one is NaN."""
    values = [float(x.float().abs().max()) for x in (call.x, call.out) if x.numel()]
    return max((torch.inf if value != value else value for value in values), default=0.0)


@register_check("residual-growth", needs=("logits", "module|hidden_states"))
def residual_growth(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches a residual stream that explodes or vanishes from block to block.

    Trace the residual stream through blocks that each take the output of the previous one, or use the function
    `hidden_states`. The median RMS of a token's vector must not grow or shrink by a factor of more than 1000 in one
    block or 10⁶ in total, and not grow by a factor of 1.6 per block over six blocks: with a norm in front of each
    sublayer, its output does not grow with the residual stream.

    Cause: a missing norm, a wrong factor on a sublayer, or a missing residual connection.
    Fix: normalize the input of each sublayer, add its output to the residual stream, and check the block's scale.
    """
    streams = _get_residual_streams(ctx)
    array = MeasuredArray(
        "lines", "Residual stream by block", "block (0: embedding)", "median RMS of a token's vector", []
    )
    for number, stream in enumerate(streams):
        rms = [float(x.float().square().mean(-1).sqrt().median()) for x in stream.values]
        array.values.append(rms)
        array.names.append(f"stack {number}" if len(streams) > 1 else "RMS")
        for n, name in enumerate(stream.block_names):
            if not all(bool(x.isfinite().all()) for x in stream.values[n : n + 2]):
                yield failure("the residual stream is not finite", location=name)
                break
            for ratio, limit, span in (
                (rms[n + 1] / max(rms[n], 1e-30), _MAX_BLOCK_GROWTH, "in one block"),
                (rms[n + 1] / max(rms[0], 1e-30), _MAX_TOTAL_GROWTH, "since the first block"),
            ):
                if not 1 / limit < ratio < limit:
                    change = "grows" if ratio > 1 else "shrinks"
                    yield warning(f"the residual stream {change} by a factor of {ratio:.2g} {span}", ratio, limit, name)
        yield from _check_steady_growth(rms, stream.block_names)
    yield success("the residual stream neither explodes nor vanishes", array=array)


def _get_residual_streams(ctx: CheckContext) -> list[ResidualStream]:
    """Residual streams of several blocks: from the function `hidden_states`, if it was passed, otherwise traced."""
    if ctx.model.hidden_states is not None:
        values = list(ctx.model.hidden_states(ctx.random_tokens()))
        return [ResidualStream(values, [f"block {n}" for n in range(len(values) - 1)])]
    require_uncompiled(ctx.module)
    with trace_residual_streams(ctx.module) as streams:
        ctx.logits(ctx.random_tokens())
    streams = [stream for stream in streams if len(stream.block_names) > 1]
    if not streams:
        raise SkipCheckError("needs blocks: modules that each take the output of the previous one")
    return streams


def _check_steady_growth(rms: list[float], block_names: list[str]) -> Iterator[CaseResult]:
    """Warn if the residual stream grows by a similar factor in each of many consecutive blocks.

    The first block is left out: the embedding is often much smaller than the output of a block.
    """
    for start in range(1, len(rms) - _NUM_GROWING_BLOCKS):
        end = start + _NUM_GROWING_BLOCKS
        ratio = (rms[end] / max(rms[start], 1e-30)) ** (1 / _NUM_GROWING_BLOCKS)
        if ratio >= _MIN_STEADY_GROWTH:
            total = rms[-1] / max(rms[0], 1e-30)
            message = (
                f"the residual stream grows by a factor of {ratio:.2g} per block over {_NUM_GROWING_BLOCKS} blocks"
            )
            message += f", and of {total:.2g} in total"
            cause = "a sublayer reads the residual stream without a norm, so that its output grows with the stream"
            yield warning(message, ratio, _MIN_STEADY_GROWTH, block_names[start], cause)
            return


@register_check("residual-connection", needs=("logits", "module"))
def residual_connection(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches a missing residual connection: the output of a sublayer replaces the residual stream.

    Multiply the input of the first block by 10⁴, so that sublayers behind a norm add almost nothing to it: the output
    of each block with attention must point in the direction of its input. Blocks that end with a norm (post-norm) are
    left out.

    Cause: x = sublayer(norm(x)) instead of x = x + sublayer(norm(x)), or the residual is overwritten before the sum.
    Fix: add the output of each sublayer to its input, once.
    """
    require_uncompiled(ctx.module)
    with trace_residual_streams(ctx.module) as streams, OpTracer(ctx.module) as tracer:
        ctx.logits(ctx.random_tokens())
    attentions = [call.module for call in tracer.attentions]
    streams = [stream for stream in streams if len(stream.block_names) > 1]
    streams = [stream for stream in streams if all(_contains(name, attentions) for name in stream.block_names)]
    if not streams:
        raise SkipCheckError("needs blocks with attention: modules that each take the output of the previous one")
    num_blocks = 0
    for stream in streams:
        first = ctx.module.get_submodule(stream.block_names[0])
        with (
            _scale_input(first, _STREAM_FACTOR),
            trace_residual_streams(ctx.module) as scaled_streams,
            _trace_norm_outputs(ctx.module) as norm_outputs,
        ):
            ctx.logits(ctx.random_tokens())
        scaled = next((other for other in scaled_streams if other.block_names == stream.block_names), None)
        if scaled is None or not all(bool(x.isfinite().all()) for x in scaled.values):
            continue
        for n, name in enumerate(stream.block_names):
            before, after = scaled.values[n].float(), scaled.values[n + 1].float()
            if any(x.shape == after.shape and torch.equal(x.float(), after) for x in norm_outputs):
                continue
            similarity = float(torch.cosine_similarity(before, after, -1).mean())
            num_blocks += 1
            if similarity < _MIN_RESIDUAL_SIMILARITY:
                message = f"the output of the block does not contain its input (cosine similarity {similarity:.2f})"
                yield failure(message, similarity, _MIN_RESIDUAL_SIMILARITY, name)
                return
    if not num_blocks:
        raise SkipCheckError("needs blocks that do not end with a norm, and that take larger inputs")
    yield success(f"the residual stream passes through {num_blocks} blocks")


def _contains(block: str, attention_modules: list[str]) -> bool:
    """Whether one of the attention calls is in this block."""
    return any(name == block or name.startswith(f"{block}.") for name in attention_modules)


@contextmanager
def _trace_norm_outputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Record the outputs of all submodules whose class name contains "norm"."""
    outputs: list[Tensor] = []

    def record(_module: nn.Module, _args: Args, out: object) -> None:
        if is_hidden_state(out):
            outputs.append(out.detach())

    with ExitStack() as hooks:
        for submodule in module.modules():
            if "norm" in type(submodule).__name__.lower():
                hooks.enter_context(submodule.register_forward_hook(record))
        yield outputs


@contextmanager
def _scale_input(block: nn.Module, factor: float) -> Iterator[None]:
    """Multiply the hidden states in the arguments of a block by a factor."""

    def scale(_module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        scaled = [value * factor if is_hidden_state(value) else value for value in args[:1]]
        if not any(is_hidden_state(value) for value in args[:1]):
            name = next((name for name, value in kwargs.items() if is_hidden_state(value)), None)
            kwargs = kwargs if name is None else kwargs | {name: kwargs[name] * factor}
        return (*scaled, *args[1:]), kwargs

    with block.register_forward_pre_hook(scale, with_kwargs=True):
        yield


@register_check("dead-heads")
def dead_heads(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches attention heads without effect: their values or their part of the output projection are zero.

    Compute the gradient of a random linear combination of the logits with respect to a gate of one that multiplies the
    output of each head (Michel et al. 2019). A head whose gate has no gradient has no effect. If attention is not
    computed by PyTorch, a head whose weights in the function `attentions` are all zero has no effect.

    Cause: weights were pruned, not loaded, or loaded into the wrong tensor; or the attention output is not used.
    Fix: inspect the v and o projections of the named layer; remove heads that are not needed.
    """
    tracer, out = _trace_activations(ctx)
    if not tracer.traced_attentions and ctx.model.attentions is not None:
        yield from _check_zero_heads(ctx)
        return
    attentions = _trace_attentions(ctx)
    if not out.requires_grad:
        raise SkipCheckError("needs gradients")
    if not all(call.out.requires_grad for call in attentions):
        raise SkipCheckError("needs attention with gradients, without torch.no_grad() or reentrant checkpointing")
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(ctx.seed)).to(out.device, out.dtype)
    outputs = [call.out for call in attentions]
    with torch.enable_grad():
        value = (out * weights).sum()
    gradients = torch.autograd.grad(value, outputs, allow_unused=True, retain_graph=True)
    importances = []  # per attention call, (H,)
    used = {call.module for call, gradient in zip(attentions, gradients, strict=True) if gradient is not None}
    for call, gradient in zip(attentions, gradients, strict=True):
        if gradient is None and call.module in used:  # a second softmax, computed only to return the weights
            importances.append(torch.ones(call.pattern.shape[1], device=call.out.device))
            continue
        grad = torch.zeros_like(call.out) if gradient is None else gradient
        grad = (grad * call.out.detach()).sum(-1, keepdim=True)  # gradient of the gate
        grad = grad.reshape(*call.pattern.shape[:2], *grad.shape[1:]) if grad.ndim == 3 else grad
        importances.append(grad.float().abs().amax((0, 2, 3)))
    overall = max(float(importance.max()) for importance in importances)
    if overall == 0.0:
        yield success("no head has an effect yet: some models initialize the output projections to zero")
        return
    for call, importance in zip(attentions, importances, strict=True):
        highest = float(importance.max())
        threshold = _DEAD_RATIO * max(highest, _DEAD_RATIO * overall)
        dead = [head for head, value in enumerate(importance.tolist()) if value <= threshold]
        if dead:
            message = f"head {dead[0]} has no effect ({len(dead)} of {len(importance)} heads)"
            yield warning(message, float(importance[dead[0]]), _DEAD_RATIO * highest, call.module)
    array = MeasuredArray(
        "matrix",
        "Effect of each head: largest gradient of the logits with respect to its gate",
        "head",
        "attention call",
        [importance.tolist() for importance in importances],
        [call.module or str(number) for number, call in enumerate(attentions)],
        "nonzero for every head",
    )
    yield success("every head has an effect", array=array if len({len(row) for row in array.values}) == 1 else None)


def _check_zero_heads(ctx: CheckContext) -> Iterator[CaseResult]:
    """Warn about heads whose attention weights are all zero."""
    for call in _get_attention_scores(ctx):
        largest = call.pattern.abs().amax((0, 2, 3))
        dead = [head for head, value in enumerate(largest.tolist()) if value == 0.0]
        if dead:
            message = f"head {dead[0]} has no effect ({len(dead)} of {len(largest)} heads): its weights are zero"
            yield warning(message, 0.0, 0.0, call.module)
    yield success("every head has attention weights")


@register_check("dead-neurons")
def dead_neurons(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches FFN neurons that are never active, or whose output weights are zero.

    Find FFNs: a linear layer that increases the dimension, and one that reduces it again. A neuron is dead if it is
    zero for all tokens and the mean of its pre-activations is six standard deviations below zero; or if its output
    weights are all zero.

    Cause: a large negative bias, a wrong sign before the activation, or zero weights.
    Fix: inspect the weights and biases on both sides of the named layer.
    """
    pairs = list(_find_ffn_layers(_trace_activations(ctx)[0].linear_calls))
    if not pairs:
        raise SkipCheckError("needs FFNs of two linear layers")
    unread = [down.weight.abs().amax(0) == 0 for down, _ in pairs]  # per FFN, (neurons,)
    zero_init = all(bool(mask.all()) for mask in unread)  # some models initialize all output weights to zero
    for (down, pre_activation), unread_neurons in zip(pairs, unread, strict=True):
        x = down.x.float().flatten(0, -2)
        largest = x.abs().amax(0)
        inactive = largest <= _DEAD_RATIO * float(largest.median())
        if not bool(inactive.all()):
            inactive = inactive & _never_active(pre_activation, len(largest))
        dead = inactive if zero_init else inactive | unread_neurons
        share, unread_share = float(dead.float().mean()), float(unread_neurons.float().mean())
        if share >= _MAX_DEAD_SHARE or (not zero_init and unread_share >= _MAX_UNREAD_SHARE):
            message = f"{int(dead.sum())} of {len(dead)} neurons are dead, such as neuron {int(dead.long().argmax())}"
            yield warning(message, share, _MAX_DEAD_SHARE, down.module or None)
    yield success("no layer has dead neurons")


def _never_active(pre_activation: Tensor, num_neurons: int) -> Tensor:
    """Boolean per neuron: True if the mean of its pre-activations is `_DEAD_SIGMAS` standard deviations below zero.
    Gate and up projections may be one matrix, in halves or interleaved."""
    y = pre_activation.float().flatten(0, -2)
    inactive = y.mean(0) + _DEAD_SIGMAS * y.std(0) <= 0
    if len(inactive) == num_neurons:
        return inactive
    return inactive[:num_neurons] | inactive[num_neurons:] | inactive[::2] | inactive[1::2]


def _find_ffn_layers(linear_calls: list[LinearCall]) -> Iterator[tuple[LinearCall, Tensor]]:
    """Yield the down projection of each FFN, with the output of its up projection."""
    for n, down in enumerate(linear_calls):
        num_tokens, (d_model, hidden) = down.x.shape[:-1].numel(), down.weight.shape
        if num_tokens < 8 or n == 0:
            continue
        for up in linear_calls[max(0, n - 3) : n]:
            expands = up.weight.shape[0] in (hidden, 2 * hidden) and up.weight.shape[1] == d_model < hidden
            is_same_layer = up.num_attentions_before == down.num_attentions_before
            if expands and is_same_layer and up.out.shape[:-1].numel() == num_tokens:
                yield down, up.out
                break
