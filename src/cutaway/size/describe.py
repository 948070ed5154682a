"""An answer as plain data: what `--json` prints."""

from dataclasses import asdict, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cutaway.config.transformer import Encoder
from cutaway.size.cache import KVCache
from cutaway.size.flops import Flops
from cutaway.size.memory import Memory
from cutaway.size.params import LayerParams, Params
from cutaway.size.question import RECOMPUTE
from cutaway.size.roofline import Bound

if TYPE_CHECKING:
    from cutaway.size.sizing import Size

CONVENTION = (
    "2 FLOPs a multiply-add, matrix products only; 'full' counts attention over every pair of tokens,"
    " 'seen' over those that the mask lets see (and MLA's cached latents unexpanded where that is less);"
    " memory is per device, in bytes, with a fused optimizer"
)


def describe(size: "Size", *others: "Size") -> dict[str, Any]:
    """Everything about one question; `others` ask the same of the same model in another mode."""
    config = size.question.config
    every = (size, *others)
    answer: dict[str, Any] = {
        "model": {
            "form": config.form,
            "layers": {name: stack.layers for name, stack in config.stacks.items()},
            "d_model": config.d_model,
            "vocab_size": config.vocab_size,
            "context": config.context,
        },
        "question": {each.question.mode: question(each) for each in every},
        "convention": CONVENTION,
        "parameters": parameters(size.parameters),
        "checkpoint": asdict(size.stored),
        "flops": every_flops(size, every[-1]),
        "memory": {each.question.mode: memory(each.memory) for each in every},
    }
    if size.question.gpus > 1:
        answer["collectives"] = {
            kind: {"number": many, "bytes": whole}
            for each in every
            if each.question.mode == "train"
            for kind, (many, whole) in each.collectives.items()
        }
    if not isinstance(config, Encoder):
        answer["kv_cache"] = kv_cache(size.cache)
    if size.question.hardware is not None:
        answer["hardware"] = asdict(size.question.hardware)
        answer["fits"] = {each.question.mode: each.fits for each in every}
        answer["time"] = {each.question.mode: times(each) for each in every}
    if size.question.mode == "train" and not others:  # asked for by itself: the choices that there are beside it
        answer["memory"]["train"]["choices"] = choices(size)
    for each in every:
        if each.question.mode == "train":
            answer["budget"] = {name: value for name, value in asdict(each.budget).items() if value is not None}
            answer["budget"]["tokens_per_parameter"] = each.budget.tokens_per_parameter
    return answer


def every_flops(size: "Size", step: "Size") -> dict[str, Any]:
    """There, one token more, and there and back; `step` is asked for the last since it knows a training step."""
    params, asked = size.parameters, size.question
    source = sum(layer.active for layer in params.layers if layer.stack == "encoder") if params.two_sided else 0
    target = params.active - source
    met = source * asked.source + target * asked.context  # N times its tokens, those of each side for its own
    answer: dict[str, Any] = {"forward": flops(size.forward_flops, "2N", 2 * met)}
    if size.decode_flops is not None:
        answer["decode"] = flops(size.decode_flops, "2N", 2 * target)
    return answer | {"train": {mode: flops(each, "6N", 6 * met) for mode, each in step.train_flops.items()}}


def question(size: "Size") -> dict[str, Any]:
    asked = size.question
    shown = {
        name: value for name, value in vars(asked).items() if name not in ("config", "hardware", "dtype", "devices")
    }
    shown |= asdict(asked.devices) | {"devices": str(asked.devices)}
    shown |= {"dtype": asked.dtype.name, "hardware": asked.hardware.name if asked.hardware else None}
    return shown | {"batch_per_device": size.batch, "beyond": asked.beyond or None}


def parameters(params: Params) -> dict[str, Any]:
    outside = {
        name: getattr(params, name)
        for name in (
            "embedding",
            "positions",
            "types",
            "embedding_projection",
            "embedding_norm",
            "final_norm",
            "head",
            "head_transform",
            "pooler",
        )
    }
    totals = {"total": params.total, "active": params.active, "non_embedding": params.non_embedding}
    return totals | outside | {"layers": [layer | {"layers": many} for layer, many in kinds(params.per_layer)]}


def kinds(layers: tuple[LayerParams, ...]) -> list[tuple[dict[str, Any], int]]:
    """Runs of equal layers, with how many there are."""
    runs = [(layer, len(list(run))) for layer, run in groupby(layers)]
    return [(asdict(layer) | {"total": layer.total, "active": layer.active}, many) for layer, many in runs]


def flops(of: Flops, rule: str, by_rule: int) -> dict[str, Any]:
    return {
        "tokens": of.tokens,
        "total": of.total,
        "total_seen": of.total_seen,
        "per_token": of.per_token,
        "per_token_seen": of.per_token_seen,
        "full": of.full,
        "seen": of.seen,
        "rule": {"name": rule, "flops": by_rule, "error": of.against(by_rule)},
    }


def memory(of: Memory) -> dict[str, Any]:
    return {"total": of.total, "fullest": of.fullest, "parts": of.parts, "whole": of.whole}


def choices(size: "Size") -> dict[str, Any]:
    """What a step would take with each recompute mode: with the kernel as asked, and with explicit attention."""
    asked, told = size.question, {}
    for mode in RECOMPUTE:
        kernels = dict.fromkeys((asked.kernel, "explicit"))
        steps = {each: type(size)(replace(asked, checkpointing=mode, kernel=each)).training for each in kernels}
        told[mode] = {
            kernel: {"activations": of.whole["activations"], "total": of.total} for kernel, of in steps.items()
        }
    return told


def kv_cache(cache: KVCache) -> dict[str, Any]:
    return {
        "bytes": cache.bytes,
        "bytes_per_token": cache.token,
        "without_windows": cache.unwindowed,
        "expanded": cache.expanded,
        "kinds": {kind: {"layers": many, "bytes": size} for kind, (many, size) in cache.kinds.items()},
    }


def times(size: "Size") -> dict[str, Any]:
    if size.question.mode == "train":
        return {"step": time(size.train_time)}
    shown = {"prefill": time(size.prefill_time)}
    if not isinstance(size.question.config, Encoder):
        shown |= {"decode": time(size.decode_time) | {"turning_batch": size.turning_batch}}
    return shown


def time(bound: Bound | None) -> dict[str, Any]:
    assert bound is not None
    return {
        "bound_seconds": bound.seconds,
        "binds": bound.binds,
        "compute_seconds": bound.compute,
        "bandwidth_seconds": bound.bandwidth,
        "intensity": bound.intensity,
        "ridge": bound.ridge,
        "tokens": bound.tokens,
        "tokens_per_second_bound": bound.tokens_per_second,
        "expected_seconds": [bound.fastest, bound.slowest],
        "eager_seconds_at_most": bound.eager,
        "expected_tokens_per_second": [bound.tokens / bound.slowest, bound.tokens / bound.fastest],
        "efficiency": asdict(bound.efficiency),
    }
