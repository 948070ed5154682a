"""What is measured of a model once it is trained: a list of measurements, each under one condition, in numbers."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.edit import edit
from cutaway.lens.structural_edits import supports_structural_edit
from cutaway.model import Transformer, build
from cutaway.train.ablate import model_surgery
from cutaway.train.data.datasets import PackedDataset
from cutaway.train.objectives.objective import Objective
from cutaway.train.trainer.trainer import Trainer

Measurement = dict[str, Any]
"""`condition`: what it is of; and numbers by their names (in `metrics.py`)."""

NUM_EVAL_SEQUENCES = 256
"""Sequences that a loss is the mean of."""
NUM_SEQUENCES = 64
"""Sequences of validation data that are read."""
MAX_LENGTH_FACTOR = 4
"""Times the trained length, up to which models are read."""
POSITION_SHIFT = 7
"""Positions that a text is moved by: any number would do, a model either notices or not."""
NUM_TIMED_STEPS = 12
"""Whose median is a step's time."""


def _spread_indices(trainer: Trainer, count: int) -> list[int]:
    """Positions of so many sequences, evenly from the first to the last; fewer where there are fewer."""
    held = trainer.data.num_validation_sequences
    count = min(count, held)
    return [place * held // count for place in range(count)]


def _spread_objective(trainer: Trainer, count: int) -> Objective:
    return trainer.objective_fn(trainer.data.validation.get_batch_at(_spread_indices(trainer, count)), 0)


@torch.no_grad()
def eval_loss(trainer: Trainer) -> float:
    """Nats a target."""
    trainer.model.eval()
    chosen, batch = _spread_indices(trainer, NUM_EVAL_SEQUENCES), trainer.recipe.training.batch_size
    total = weight = 0.0
    for begin in range(0, len(chosen), batch):
        piece = trainer.objective_fn(trainer.data.validation.get_batch_at(chosen[begin : begin + batch]), begin)
        total += float(trainer.training_module(piece).cross_entropy)
        weight += float(piece.weights.sum())
    return total / max(1.0, weight)


# Gradients by depth


def measure_gradients(trainer: Trainer) -> list[Measurement]:
    """The gradient norm of each block, first to last, with the initial weights and with the trained ones."""
    seed = trainer.recipe.training.seed
    initial = build(trainer.model.config, device=trainer.model.device, seed=seed)
    measurements = []
    for condition, model in (("initial", initial), ("trained", trainer.model)):
        for layer, length in enumerate(lengths := block_grad_norms(model, trainer)):
            measurements.append({"condition": f"{condition}, block {layer}", "grad_norm": length})
        ratio = lengths[0] / max(lengths[-1], 1e-30)
        measurements.append({"condition": condition, "first_to_last_grad_ratio": ratio})
    return measurements


def block_grad_norms(model: Transformer, trainer: Trainer) -> list[float]:
    """On one batch of validation data."""
    model.train().zero_grad(set_to_none=True)
    task = _spread_objective(trainer, trainer.recipe.training.batch_size)
    torch.autograd.backward(task.loss(model).loss / task.weights.sum())
    found = []
    for block in model_surgery.decoder_blocks(model):
        squares = sum(float(each.grad.double().square().sum()) for each in block.parameters() if each.grad is not None)
        found.append(squares**0.5)
    model.zero_grad(set_to_none=True)
    model.eval()
    return found


# Parts taken away


def measure_component_removal(trainer: Trainer) -> list[Measurement]:
    """Loss, top five and the final stream with each part taken out of the trained model, one at a time."""
    model = trainer.model.eval()
    layers, heads = len(model_surgery.decoder_blocks(model)), model_surgery.decoder_blocks(model)[0].attn.f.heads
    middle = layers // 2
    look = partial(_evaluate_with, model, _spread_objective(trainer, NUM_SEQUENCES))
    whole = look(nullcontext())

    def without(part: str) -> AbstractContextManager[Any]:
        return edit(model, {part: "drop"}) if supports_structural_edit(model, part, "drop") else nullcontext()

    away: dict[str, AbstractContextManager[Any]] = {
        "without the first block": edit(model, {"blocks.0": "skip"}),
        "without a middle block": edit(model, {f"blocks.{middle}": "skip"}),
        "without the last block": edit(model, {f"blocks.{layers - 1}": "skip"}),
        "without the final norm": without("final_norm"),
        "FFN before attention": model_surgery.temporary_surgery(model, model_surgery.swap_attention_and_ffn),
        "without positions": without("positions"),
        "without mask": model_surgery.temporary_surgery(model, model_surgery.remove_causal_mask),
        "with the mask": model_surgery.temporary_surgery(model, model_surgery.restore_causal_mask),
    }
    measurements = [_removal_measurement("baseline", whole, whole)]
    measurements += [_removal_measurement(condition, look(change), whole) for condition, change in away.items()]
    heads_away = [{f"blocks.{middle}.attn.z": {"do": "zero", "heads": [head]}} for head in range(heads)]
    each = [look(edit(model, change)) for change in heads_away]
    each.sort(key=lambda found: found[0])
    measurements.append(_removal_measurement("without a middle block's least head", each[0], whole))
    measurements.append(_removal_measurement("without a middle block's greatest head", each[-1], whole))
    return measurements


EvalOutput = tuple[float, float, Tensor]
"""Loss, share of targets among the five likeliest, and the final stream at the targets."""


@torch.no_grad()
def _evaluate_with(model: Transformer, objective: Objective, edit_context: AbstractContextManager[Any]) -> EvalOutput:
    with edit_context:
        x = objective.hidden_states(model).flatten(0, 1)[objective.weights.flatten() > 0]
        logits = torch.as_tensor(model.head(x))  # type: ignore[operator]
    targets = objective.targets.flatten()[objective.weights.flatten() > 0].to(x.device)
    loss = torch.nn.functional.cross_entropy(logits.double(), targets)
    best = logits.topk(min(5, logits.shape[-1])).indices
    return float(loss), float((best == targets.unsqueeze(-1)).any(-1).double().mean()), x


def _removal_measurement(condition: str, output: EvalOutput, baseline: EvalOutput) -> Measurement:
    moved = (output[2] - baseline[2]).norm(dim=-1) / baseline[2].norm(dim=-1).clamp(min=1e-30)
    return {
        "condition": condition,
        "loss": output[0],
        "top5_accuracy": output[1],
        "resid_change": float(moved.mean()),
    }


# Positions


def measure_positions(trainer: Trainer) -> list[Measurement]:
    """Whether order and place matter to the model, and how it does beyond the length it was trained on."""
    model, length = trainer.model.eval(), trainer.recipe.data.seq_len
    tokens = _single_document_sequences(trainer, MAX_LENGTH_FACTOR * length)
    short = tokens[:, :length]
    with model_surgery.temporary_surgery(model, model_surgery.remove_causal_mask):
        free = permutation_sensitivity(model, short)
    measurements: list[Measurement] = [
        {"condition": "permuted, no mask", "hidden_change": free},
        {"condition": "permuted, causal mask", "hidden_change": permutation_sensitivity(model, short)},
        {"condition": f"shifted by {POSITION_SHIFT} positions", "hidden_change": shift_sensitivity(model, short)},
    ]
    far = token_losses(model, tokens)
    near = torch.cat([token_losses(model, piece) for piece in _split_segments(tokens, length)], -1)
    for times in range(1, MAX_LENGTH_FACTOR + 1):
        if times not in (1, 2, MAX_LENGTH_FACTOR):
            continue
        band = slice((times - 1) * length, times * length)
        at_once = float(far[:, band].mean())
        alone = float(near[:, band].mean())
        measurements.append({"condition": f"×{times} the length", "loss": at_once, "context_effect": at_once - alone})
    return measurements


def _split_segments(tokens: Tensor, seq_len: int) -> list[Tensor]:
    """Cut where one piece's last target is the next one's first token, so that every target is told once."""
    return [tokens[:, begin : begin + seq_len + 1] for begin in range(0, tokens.shape[1] - 1, seq_len)]


def _single_document_sequences(trainer: Trainer, seq_len: int) -> Tensor:
    """Stretches of validation text, each from one document."""
    held = trainer.data.validation
    if not isinstance(held, PackedDataset):
        raise InputError("positions are measured on one source of plain text; give the recipe one")
    packed = PackedDataset(held.split, seq_len, held.seed, shuffle=False)
    batch = packed.get_batch(0, packed.num_sequences)
    whole = (batch.document_ids == batch.document_ids[:, :1]).all(-1)
    if not bool(whole.any()):
        raise InputError(
            f"no validation text is {seq_len + 1} tokens long; give longer texts, or a smaller data.seq_len"
        )
    found = batch.tokens[whole]
    return found[:: -(-len(found) // (NUM_SEQUENCES // 2))].to(trainer.model.device)  # from all over


@torch.no_grad()
def token_losses(model: Transformer, tokens: Tensor) -> Tensor:
    """−log p of every token but the first."""
    logits = model(tokens[:, :-1]).double()
    told = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return told.view(len(tokens), -1)


@torch.no_grad()
def permutation_sensitivity(model: Transformer, tokens: Tensor) -> float:
    """How far f(P·x) is from P·f(x), beside how far tokens' vectors lie apart: 0 if order means nothing."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(tokens.shape[1], generator=generator).to(tokens.device)
    plain, other = _hidden_states(model, tokens)[:, order], _hidden_states(model, tokens[:, order])
    return float((plain - other).norm() / (plain - plain.mean((0, 1))).norm())


@torch.no_grad()
def shift_sensitivity(model: Transformer, tokens: Tensor) -> float:
    """How far vectors move when every token stands some positions later: 0 if only distances count."""
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    plain, other = _hidden_states(model, tokens), _hidden_states(model, tokens, positions=places + POSITION_SHIFT)
    return float((plain - other).norm() / (plain - plain.mean((0, 1))).norm())


def _hidden_states(model: Transformer, tokens: Tensor, **forward_kwargs: Any) -> Tensor:
    run: Any = model.hidden_states
    return run(tokens, **forward_kwargs).double()


MEASUREMENTS: dict[str, Callable[[Trainer], list[Measurement]]] = {
    "gradients": measure_gradients,
    "component removal": measure_component_removal,
    "positions": measure_positions,
}


def step_seconds(trainer: Trainer) -> float:
    """On the CPU, seconds of each core that works on it, so that whatever else runs beside it hardly matters."""
    found = []
    device = trainer.model.device
    for number in range(trainer.global_step, trainer.global_step + NUM_TIMED_STEPS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            trainer.train_step(number)
            torch.cuda.synchronize(device)
            found.append(time.perf_counter() - begin)
        else:
            begin = time.process_time()
            trainer.train_step(number)
            found.append((time.process_time() - begin) / torch.get_num_threads())
    return median(found)


def peak_step_memory(trainer: Trainer) -> int:
    """Bytes of weights, gradients, the optimizer's state and all that a step holds beside them when it holds most."""
    if trainer.model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.model.device)
        trainer.train_step(trainer.global_step)
        return int(torch.cuda.max_memory_allocated(trainer.model.device))
    before = sum(_num_bytes(each) for each in trainer.model.parameters()) + sum(
        _num_bytes(each) for each in trainer.optimizer.state_dict().values()
    )
    trainer.optimizer.zero_grad()
    return before + _cpu_step_memory_growth(trainer)


def _num_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _cpu_step_memory_growth(trainer: Trainer) -> int:
    """The most that one step holds above what was there before it, on the CPU."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # it says when it starts and ends
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        trainer.train_step(trainer.global_step)
    results: Any = seen.profiler
    events = [each for each in results.kineto_results.events() if each.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
