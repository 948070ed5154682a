"""Signs of a sick model: attention that says nothing, values near overflow, heads and neurons that do nothing."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.context import CheckContext
from cutaway.check.module_state import require_uncompiled
from cutaway.check.probes.activation_tracer import (
    MASKED_SCORE,
    ActivationTracer,
    GatedAttention,
    LinearCall,
    trace_residual_streams,
)
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError

MIN_VISIBLE_KEYS = 4
"""Rows that see fewer keys say nothing about a pattern."""
FLAT_SPREAD, COLLAPSED_WEIGHT, MAX_LOGIT_SPREAD = 1e-6, 0.995, 500.0
FP16_MAX, FP16_HEADROOM = 65504.0, 4.0
MAX_BLOCK_GROWTH, MAX_TOTAL_GROWTH = 1e3, 1e6
DEAD_RATIO, DEAD_SIGMAS, MAX_DEAD_SHARE, MAX_UNREAD_SHARE = 1e-6, 6.0, 0.3, 0.05


def _trace_activations(context: CheckContext) -> tuple[ActivationTracer, Tensor]:
    """One pass with its attentions and products, and the logits."""

    def make() -> tuple[ActivationTracer, Tensor]:
        target = context.model
        assert target.logits is not None
        if target.module is not None:
            require_uncompiled(target.module)
        tokens = context.random_tokens(1 if context.is_slow else 2)
        with torch.enable_grad(), ActivationTracer(target.module, len(tokens)) as seen:
            out = target.logits(tokens)
        return seen, out

    found: tuple[ActivationTracer, Tensor] = context.compute_once(f"inside {context.noise_ratio}", make)
    return found


def _trace_gated_attentions(context: CheckContext) -> list[GatedAttention]:
    found = _trace_activations(context)[0].gated_attentions
    if not found:
        raise SkipCheckError("needs attention by softmax or scaled_dot_product_attention")
    return found


def _score_spread(attention: GatedAttention) -> tuple[Tensor, Tensor]:
    """The largest less the smallest score that each query sees, and how many it sees."""
    shown = (attention.scores > MASKED_SCORE) & attention.scores.isfinite()
    high = attention.scores.masked_fill(~shown, -torch.inf).amax(-1)
    low = attention.scores.masked_fill(~shown, torch.inf).amin(-1)
    return (high - low).nan_to_num(0.0, 0.0, 0.0), shown.sum(-1)


@register_check(
    "attention-entropy",
    catches="attention that does not choose (the same weight for every key), or that sees one key only, in all heads",
    cause="queries, keys or the scale are zero; or scores have grown so far that softmax lets one key through",
    fix="look at the scale and at the weights of q and k; in training, normalize queries and keys (qk-norm)",
)
def attention_entropy(context: CheckContext) -> Iterator[CaseResult]:
    """Watch every softmax of one pass. Weights that are equal to the last digit for all queries of a head are flat; a
    layer whose heads all give more than 0.995 to one key that is not the first has collapsed."""
    for one in _trace_gated_attentions(context):
        apart, keys = _score_spread(one)
        asked = keys >= MIN_VISIBLE_KEYS
        if not bool(asked.any()):
            continue
        wide = apart.masked_fill(~asked, 0.0).amax((0, 2))
        flat = [n for n, value in enumerate(wide.tolist()) if value <= FLAT_SPREAD]
        if flat:
            message = f"head {flat[0]} gives every key the same weight ({len(flat)} of {len(wide)} heads)"
            yield CaseResult("warn", message, float(wide[flat[0]]), FLAT_SPREAD, one.module)
        top, at = one.pattern.max(-1)
        asked = asked & (at > 0)
        if int(asked.sum()) * 2 < int((keys >= MIN_VISIBLE_KEYS).sum()):
            continue
        mean = float(top[asked].mean())
        if mean > COLLAPSED_WEIGHT:
            yield CaseResult(
                "warn", "all heads see one key only: the attention has collapsed", mean, COLLAPSED_WEIGHT, one.module
            )
    yield CaseResult("pass", "attention chooses, and is not collapsed")


@register_check(
    "attention-logits",
    catches="attention logits so large that softmax is saturated and narrow types cannot tell keys apart",
    cause="the scale is missing or inverted, or q and k have grown without bound in training",
    fix="multiply q·k by 1/sqrt(d_head); in training, use qk-norm, a soft-cap or a smaller learning rate",
)
def attention_logits(context: CheckContext) -> CaseResult:
    """Measure how far apart the scores are that one query sees, in every attention of a pass. Beyond 500, bf16 knows
    scores to 2 only: a factor of seven in the weights."""
    sizes = [(float(_score_spread(one)[0].max()), one.module) for one in _trace_gated_attentions(context)]
    worst, where = max(sizes)
    if worst > MAX_LOGIT_SPREAD:
        return CaseResult(
            "warn", f"attention logits of one query are {worst:.0f} apart", worst, MAX_LOGIT_SPREAD, where
        )
    return CaseResult("pass", f"attention logits of one query are at most {worst:.1f} apart", worst, MAX_LOGIT_SPREAD)


NAN_CAUSE = "weights that were not loaded or have diverged, 0/0 in a norm, or a softmax over nothing"


@register_check(
    "fp16-overflow",
    catches="values that fp16 cannot hold, or that are so near to its limit of 65504 that other texts overflow",
    cause="weights of a model trained in bf16 or fp32 are used in fp16, or a factor is wrong",
    fix="run it in bf16 or fp32, or keep the layer that is named in fp32",
)
def fp16_overflow(context: CheckContext) -> CaseResult:
    """Take the largest number that goes into or out of any product with a weight, in fp32. An fp16 model must stay a
    factor of 4 below 65504; of any other it is told whether fp16 could hold them."""
    products = _trace_activations(context)[0].linear_calls
    if not products:
        raise SkipCheckError("needs products by linear layers")
    nan = next((n for n, each in enumerate(products) if bool(each.out.isnan().any())), None)
    if nan is not None:
        where = products[nan].module or f"product {nan}"
        learned = not bool(products[nan].weight.isfinite().all())
        message = "a weight is not a number" if learned else "a value is not a number"
        return CaseResult(
            "fail", message, location=where, cause=NAN_CAUSE, fix="find where it first comes up, with the module named"
        )
    sizes = [(_max_activation(each), n) for n, each in enumerate(products)]
    worst, at = max(sizes)
    where = products[at].module or f"product {at}"
    message = f"values reach {worst:.3g}; fp16 ends at 65504"
    if context.model.dtype == torch.float16 and worst > FP16_MAX / FP16_HEADROOM:
        return CaseResult("fail" if worst > FP16_MAX else "warn", message, worst, FP16_MAX / FP16_HEADROOM, where)
    if worst > FP16_MAX / FP16_HEADROOM:
        return CaseResult("pass", f"{message}, so keep it in bf16 or fp32", worst, None, where)
    return CaseResult("pass", f"values reach {worst:.3g}, far from fp16's limit", worst, FP16_MAX / FP16_HEADROOM)


def _max_activation(call: LinearCall) -> float:
    values = [float(x.float().abs().max()) for x in (call.x, call.out) if x.numel()]
    return max((torch.inf if value != value else value for value in values), default=0.0)


@register_check(
    "residual-growth",
    catches="a stream that explodes or vanishes from block to block",
    cause="a missing norm, a wrong factor on a branch, or a residual connection that is left out",
    fix="normalize what each branch reads, add what it gives to the stream, and look at the factor of the block named",
    needs=("logits", "module"),
)
def residual_growth(context: CheckContext) -> Iterator[CaseResult]:
    """Follow the stream through blocks that each read what the one before gave. A usual token's vector must not grow or
    shrink by more than a thousand in one block, nor by more than a million in all."""
    target = context.model
    assert target.module is not None
    assert target.logits is not None
    require_uncompiled(target.module)
    with torch.no_grad(), trace_residual_streams(target.module) as chains:
        target.logits(context.random_tokens())
    chains = [chain for chain in chains if len(chain.block_names) > 1]
    if not chains:
        raise SkipCheckError("needs blocks, each a module that is given what the one before it gave")
    for chain in chains:
        sizes = [float(x.float().square().mean(-1).sqrt().median()) for x in chain.values]
        for n, name in enumerate(chain.block_names):
            if not all(bool(x.isfinite().all()) for x in chain.values[n : n + 2]):
                yield CaseResult("fail", "the stream is not finite", location=name)
                break
            for ratio, limit in ((sizes[n + 1] / max(sizes[n], 1e-30), MAX_BLOCK_GROWTH),
                                 (sizes[n + 1] / max(sizes[0], 1e-30), MAX_TOTAL_GROWTH)):  # fmt: skip
                if not 1 / limit < ratio < limit:
                    what = "grows" if ratio > 1 else "shrinks"
                    since = "in one block" if limit == MAX_BLOCK_GROWTH else "since the first block"
                    yield CaseResult(
                        "warn", f"the stream {what} by a factor of {ratio:.2g} {since}", ratio, limit, name
                    )
    yield CaseResult("pass", "the stream neither explodes nor vanishes")


@register_check(
    "dead-heads",
    catches="heads that add nothing: their values or their part of the output matrix are zero",
    cause="weights were pruned, not loaded, or loaded into the wrong place; or what attention gives is not used",
    fix="look at v and o of the layer that is named; what is not wanted can be taken out",
)
def dead_heads(context: CheckContext) -> Iterator[CaseResult]:
    """Put a gate on what each head reads, and take the gradient of a random sum of the logits with respect to it
    (Michel et al. 2019). A head whose gate has none adds nothing."""
    found, out = _trace_gated_attentions(context), _trace_activations(context)[1]
    if not out.requires_grad:
        raise SkipCheckError("needs gradients")
    draw = torch.randn(out.shape, generator=torch.Generator().manual_seed(context.seed)).to(out.device, out.dtype)
    gates = [one.gate for one in found]
    slopes = torch.autograd.grad((out * draw).sum(), gates, allow_unused=True, retain_graph=True)
    sizes = []
    used = {one.module for one, slope in zip(found, slopes, strict=True) if slope is not None}
    for one, slope in zip(found, slopes, strict=True):
        if slope is None and one.module in used:  # computed beside another, to be looked at only
            sizes.append(torch.ones(one.pattern.shape[1], device=one.gate.device))
            continue
        got = torch.zeros_like(one.gate) if slope is None else slope
        got = got.reshape(*one.pattern.shape[:2], *got.shape[1:]) if got.ndim == 3 else got
        sizes.append(got.float().abs().amax((0, 2, 3)))
    top = max(float(each.max()) for each in sizes)
    if top == 0.0:
        yield CaseResult(
            "pass", "no attention adds anything yet: its last matrices are zero, as some fresh models have them"
        )
        return
    for one, each in zip(found, sizes, strict=True):
        dead = [
            n for n, value in enumerate(each.tolist()) if value <= DEAD_RATIO * max(float(each.max()), DEAD_RATIO * top)
        ]
        if dead:
            message = f"head {dead[0]} adds nothing ({len(dead)} of {len(each)} heads)"
            yield CaseResult("warn", message, float(each[dead[0]]), DEAD_RATIO * float(each.max()), one.module)
    yield CaseResult("pass", "every head adds something")


@register_check(
    "dead-neurons",
    catches="neurons of feed-forward layers that never fire, or that nothing reads",
    cause="a large negative bias, a wrong sign before the activation, or weights that are zero",
    fix="look at the weights and biases on both sides of the layer that is named",
)
def dead_neurons(context: CheckContext) -> Iterator[CaseResult]:
    """Find products that read what another made wider. A neuron is dead if it gives zero for all tokens and what comes
    before its activation lies six deviations below zero; or if its outgoing weights are all zero."""
    pairs = list(_find_ffn_layers(_trace_activations(context)[0].linear_calls))
    if not pairs:
        raise SkipCheckError("needs feed-forward layers of two linear layers")
    unread = [one.weight.abs().amax(0) == 0 for one, _ in pairs]
    fresh = all(bool(each.all()) for each in unread)
    for (one, before), blind in zip(pairs, unread, strict=True):
        x = one.x.float().flatten(0, -2)
        size = x.abs().amax(0)
        silent = size <= DEAD_RATIO * float(size.median())
        if not bool(silent.all()):
            silent = silent & _never_active(before, len(size))
        dead = silent if fresh else silent | blind
        share, unused = float(dead.float().mean()), float(blind.float().mean())
        if share >= MAX_DEAD_SHARE or (not fresh and unused >= MAX_UNREAD_SHARE):
            message = f"{int(dead.sum())} of {len(dead)} neurons are dead, such as {int(dead.long().argmax())}"
            yield CaseResult("warn", message, share, MAX_DEAD_SHARE, one.module or None)
    yield CaseResult("pass", "no layer has dead neurons")


def _never_active(pre_activation: Tensor, num_neurons: int) -> Tensor:
    """Which neurons are far from firing, by what comes before the activation (gates may lie beside it)."""
    y = pre_activation.float().flatten(0, -2)
    far = y.mean(0) + DEAD_SIGMAS * y.std(0) <= 0
    return far if len(far) == num_neurons else far[:num_neurons] | far[num_neurons:] | far[::2] | far[1::2]


def _find_ffn_layers(linear_calls: list[LinearCall]) -> Iterator[tuple[LinearCall, Tensor]]:
    """Each last product of a feed-forward layer, with what the first one gave."""
    for n, one in enumerate(linear_calls):
        rows, (out, width) = one.x.shape[:-1].numel(), one.weight.shape
        if rows < 8 or n == 0:
            continue
        for other in linear_calls[max(0, n - 3) : n]:
            wide = other.weight.shape[0] in (width, 2 * width) and other.weight.shape[1] == out
            if (
                wide
                and other.num_attentions_before == one.num_attentions_before
                and other.out.shape[:-1].numel() == rows
                and width > out
            ):
                yield one, other.out
                break
