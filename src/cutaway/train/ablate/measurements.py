"""Measurements of trained models in an ablation: loss, gradients, component removal, positions, time, memory."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.edit import edit
from cutaway.lens.structural_edits import supports_structural_edit
from cutaway.model import Transformer, build
from cutaway.train.data.datasets import PackedDataset
from cutaway.train.objectives.objective import Objective
from cutaway.train.trainer.trainer import Trainer

Measurement = dict[str, Any]
"""Measured values under one condition: the name of the `condition`, and a value per key of `metrics.METRICS`."""

NUM_EVAL_SEQUENCES = 256
"""Number of validation sequences over which the loss is averaged."""
NUM_SEQUENCES = 64
"""Number of validation sequences for component removal. Positions are measured on at most half as many."""
MAX_LENGTH_FACTOR = 4
"""Length of the longest measured sequence, as a multiple of the trained length."""
POSITION_SHIFT = 7
"""Offset that is added to all positions. Its value is arbitrary: a model is either invariant to shifts or not."""
NUM_TIMED_STEPS = 12
"""Number of timed steps. The step time is their median."""


def _spread_indices(trainer: Trainer, count: int) -> list[int]:
    """Indices of `count` evenly spaced validation sequences, or of all sequences if there are fewer."""
    num_sequences = trainer.data.num_validation_sequences
    count = min(count, num_sequences)
    return [index * num_sequences // count for index in range(count)]


def _spread_objective(trainer: Trainer, count: int) -> Objective:
    return trainer.objective_fn(trainer.data.validation.get_batch_at(_spread_indices(trainer, count)), 0)


@torch.no_grad()
def eval_loss(trainer: Trainer) -> float:
    """Loss on at most NUM_EVAL_SEQUENCES evenly spaced validation sequences, in nats per target."""
    trainer.model.eval()
    indices, batch_size = _spread_indices(trainer, NUM_EVAL_SEQUENCES), trainer.recipe.training.batch_size
    total = weight = 0.0
    for start in range(0, len(indices), batch_size):
        batch = trainer.data.validation.get_batch_at(indices[start : start + batch_size])
        objective = trainer.objective_fn(batch, start)
        total += float(trainer.training_module(objective).cross_entropy)
        weight += float(objective.weights.sum())
    return total / max(1.0, weight)


# Gradients by depth


def _measure_gradients(trainer: Trainer) -> list[Measurement]:
    """Gradient norm of each block, and ratio of first to last block, with the initial and the trained weights."""
    seed = trainer.recipe.training.seed
    initial = build(trainer.model.config, device=trainer.model.device, seed=seed)
    measurements = []
    for condition, model in (("initial", initial), ("trained", trainer.model)):
        norms = _block_grad_norms(model, trainer)
        for layer, norm in enumerate(norms):
            measurements.append({"condition": f"{condition}, block {layer}", "grad_norm": norm})
        ratio = norms[0] / max(norms[-1], 1e-30)
        measurements.append({"condition": condition, "first_to_last_grad_ratio": ratio})
    return measurements


def _block_grad_norms(model: Transformer, trainer: Trainer) -> list[float]:
    """Gradient norm of each block on one batch of validation data."""
    model.train().zero_grad(set_to_none=True)
    objective = _spread_objective(trainer, trainer.recipe.training.batch_size)
    torch.autograd.backward(objective.loss(model).loss / objective.weights.sum())
    norms = []
    for block in model.stacks["decoder"].blocks:
        squares = sum(float(each.grad.double().square().sum()) for each in block.parameters() if each.grad is not None)
        norms.append(squares**0.5)
    model.zero_grad(set_to_none=True)
    model.eval()
    return norms


# Component removal


def _measure_component_removal(trainer: Trainer) -> list[Measurement]:
    """Loss, top-5 accuracy and change of the final residual stream when one component at a time is removed."""
    model = trainer.model.eval()
    stack: Any = model.stacks["decoder"]
    layers, heads = len(stack.blocks), stack.blocks[0].attn.f.heads
    middle = layers // 2
    evaluate = partial(_evaluate_with, model, _spread_objective(trainer, NUM_SEQUENCES))
    baseline = evaluate(nullcontext())

    def drop(site: str) -> AbstractContextManager[object]:
        return edit(model, {site: "drop"}) if supports_structural_edit(model, site, "drop") else nullcontext()

    edits: dict[str, AbstractContextManager[object]] = {
        "without the first block": edit(model, {"blocks.0": "skip"}),
        "without a middle block": edit(model, {f"blocks.{middle}": "skip"}),
        "without the last block": edit(model, {f"blocks.{layers - 1}": "skip"}),
        "without the final norm": drop("final_norm"),
        "FFN before attention": edit(model, {"blocks.*": "swap"}),
        "without positions": drop("positions"),
        "without mask": drop("mask"),
        "with the mask": patch.object(stack, "causal", True),
    }
    measurements = [_removal_measurement("baseline", baseline, baseline)]
    measurements += [
        _removal_measurement(condition, evaluate(edit_context), baseline) for condition, edit_context in edits.items()
    ]
    head_edits = [{f"blocks.{middle}.attn.z": {"do": "zero", "heads": [head]}} for head in range(heads)]
    outputs = [evaluate(edit(model, head_edit)) for head_edit in head_edits]
    outputs.sort(key=lambda output: output[0])  # by loss, so that the least important head is first
    for rank, output in (("least", outputs[0]), ("most", outputs[-1])):
        condition = f"without the {rank} important head of a middle block"
        measurements.append(_removal_measurement(condition, output, baseline))
    return measurements


EvalOutput = tuple[float, float, Tensor]
"""Loss, top-5 accuracy, and the final residual stream at positions with a target."""


@torch.no_grad()
def _evaluate_with(model: Transformer, objective: Objective, edits: AbstractContextManager[object]) -> EvalOutput:
    with edits:
        x = objective.hidden_states(model).flatten(0, 1)[objective.weights.flatten() > 0]
        logits = model.lm_head(x)
    targets = objective.targets.flatten()[objective.weights.flatten() > 0].to(x.device)
    loss = torch.nn.functional.cross_entropy(logits.double(), targets)
    top5 = logits.topk(min(5, logits.shape[-1])).indices
    return float(loss), float((top5 == targets.unsqueeze(-1)).any(-1).double().mean()), x


def _removal_measurement(condition: str, output: EvalOutput, baseline: EvalOutput) -> Measurement:
    change = (output[2] - baseline[2]).norm(dim=-1) / baseline[2].norm(dim=-1).clamp(min=1e-30)
    return {"condition": condition, "loss": output[0], "top5_accuracy": output[1], "resid_change": float(change.mean())}


# Positions


def _measure_positions(trainer: Trainer) -> list[Measurement]:
    """Sensitivity of hidden states to token order and position offset, and loss beyond the trained length."""
    model, seq_len = trainer.model.eval(), trainer.recipe.data.seq_len
    tokens = _single_document_sequences(trainer, MAX_LENGTH_FACTOR * seq_len)
    short = tokens[:, :seq_len]
    with edit(model, {"mask": "drop"}):
        unmasked = permutation_sensitivity(model, short)
    measurements: list[Measurement] = [
        {"condition": "permuted, no mask", "hidden_change": unmasked},
        {"condition": "permuted, causal mask", "hidden_change": permutation_sensitivity(model, short)},
        {"condition": f"shifted by {POSITION_SHIFT} positions", "hidden_change": shift_sensitivity(model, short)},
    ]
    long_losses = token_losses(model, tokens)
    # The last target of a segment is also the first token of the next segment, so that every token is a target once.
    segments = [tokens[:, start : start + seq_len + 1] for start in range(0, tokens.shape[1] - 1, seq_len)]
    segment_losses = torch.cat([token_losses(model, segment) for segment in segments], -1)
    for factor in (1, 2, MAX_LENGTH_FACTOR):
        interval = slice((factor - 1) * seq_len, factor * seq_len)
        loss = float(long_losses[:, interval].mean())
        effect = loss - float(segment_losses[:, interval].mean())
        measurements.append({"condition": f"×{factor} the length", "loss": loss, "context_effect": effect})
    return measurements


def _single_document_sequences(trainer: Trainer, seq_len: int) -> Tensor:
    """Evenly spaced validation sequences of `seq_len` + 1 tokens, each within a single document.

    Raises InputError if there are none.
    """
    validation = trainer.data.validation
    if not isinstance(validation, PackedDataset):
        raise InputError("the measurement of positions needs a single source of plain text; use a recipe with one")
    packed = PackedDataset(validation.split, seq_len, validation.seed, shuffle=False)
    batch = packed.get_batch(0, packed.num_sequences)
    is_single_document = (batch.document_ids == batch.document_ids[:, :1]).all(-1)
    if not bool(is_single_document.any()):
        raise InputError(f"no validation document has {seq_len + 1} tokens; use longer texts, or lower data.seq_len")
    tokens = batch.tokens[is_single_document]
    return tokens[:: -(-len(tokens) // (NUM_SEQUENCES // 2))].to(trainer.model.device)  # evenly spaced


@torch.no_grad()
def token_losses(model: Transformer, tokens: Tensor) -> Tensor:
    """Loss −log p of every token except the first, with shape (B, T − 1)."""
    logits = model(tokens[:, :-1]).double()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(len(tokens), -1)


@torch.no_grad()
def permutation_sensitivity(model: Transformer, tokens: Tensor) -> float:
    """Norm of f(P·x) − P·f(x) for a permutation P of the tokens x, where f(x) are the hidden states.

    The norm is divided by the norm of the centered hidden states. It is 0 if the order of tokens has no effect.
    """
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(tokens.shape[1], generator=generator).to(tokens.device)
    return _relative_change(_hidden_states(model, tokens)[:, order], _hidden_states(model, tokens[:, order]))


@torch.no_grad()
def shift_sensitivity(model: Transformer, tokens: Tensor) -> float:
    """Relative change of hidden states if POSITION_SHIFT is added to all positions. 0 for purely relative positions."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return _relative_change(_hidden_states(model, tokens), _hidden_states(model, tokens, positions + POSITION_SHIFT))


def _relative_change(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual).norm() / (expected - expected.mean((0, 1))).norm())


def _hidden_states(model: Transformer, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    run: Any = model.hidden_states
    return run(tokens, positions=positions).double()


MEASUREMENTS: dict[str, Callable[[Trainer], list[Measurement]]] = {
    "gradients": _measure_gradients,
    "component removal": _measure_component_removal,
    "positions": _measure_positions,
}


def step_seconds(trainer: Trainer) -> float:
    """Run NUM_TIMED_STEPS more training steps, and return the median time of a step in seconds.

    On a CPU, this is CPU time per thread, which other processes hardly affect.
    """
    on_gpu = trainer.model.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize(trainer.model.device)
        return clock()

    times = []
    for step in range(trainer.global_step, trainer.global_step + NUM_TIMED_STEPS):
        start = now()
        trainer.train_step(step)
        times.append(now() - start)
    return median(times) / (1 if on_gpu else torch.get_num_threads())


def peak_step_memory(trainer: Trainer) -> int:
    """Peak memory of a step in bytes, including weights, gradients and optimizer state."""
    if trainer.model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.model.device)
        trainer.train_step(trainer.global_step)
        return int(torch.cuda.max_memory_allocated(trainer.model.device))
    persistent = [*trainer.model.parameters(), *trainer.optimizer.state_dict().values()]
    trainer.optimizer.zero_grad()
    return sum(tensor.nbytes for tensor in persistent) + _cpu_step_memory_growth(trainer)


def _cpu_step_memory_growth(trainer: Trainer) -> int:
    """Peak of the memory that one step allocates on the CPU in bytes, from profiler events."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # silence messages at start and end
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        trainer.train_step(trainer.global_step)
    profiler: Any = recording.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak
