"""Decoder, decoder with a bidirectional prefix, and encoder-decoder at equal parameters and sequences."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.config import Config
from cutaway.config import config as read_config
from cutaway.learn.studies.components import (
    D_MODEL,
    HIDDEN,
    LRS,
    SEQ_LEN,
    TRAINING_TEXT,
    VALIDATION_TEXT,
    VOCAB_SIZE,
    LibraryText,
    limit_loss,
    sample_evaluation,
)
from cutaway.learn.studies.study import Estimate, PartFn, PartResults, estimate, estimate_difference, exact
from cutaway.learn.studies.train_grid import LossFn, TrainingGrid, next_token_loss, train_grid
from cutaway.model import EncoderDecoder, Transformer, build

SOURCE_LENGTH = 12
NUM_SYMBOLS = 32
SEPARATOR = NUM_SYMBOLS
TEXT_PREFIX_LENGTH = SEQ_LEN // 2
LAYERS = 4
CROSS_HIDDEN = HIDDEN - 2 * D_MODEL // 3
"""Hidden dimension of the encoder-decoder: its cross-attentions have the parameters that its FFNs lack."""
FORMS = ("decoder", "prefix", "encoder-decoder")
GRID = TrainingGrid(lrs=LRS[:-1], warmups=(50,), num_seeds=10, steps=500, batch_size=16, seq_len=0)


class PairData:
    """Source and target sequences of a toy task: SOURCE_LENGTH symbols, a separator, SOURCE_LENGTH symbols.

    `translate` replaces each symbol by another one and reverses the order; `sort` sorts the symbols.
    """

    prefix_length: ClassVar[int] = SOURCE_LENGTH
    vocab_size: ClassVar[int] = NUM_SYMBOLS + 1

    def __init__(self, task: Literal["translate", "sort"]) -> None:
        self.task = task
        self.dictionary = torch.randperm(NUM_SYMBOLS, generator=torch.Generator().manual_seed(0))

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        source = torch.randint(NUM_SYMBOLS, (count, SOURCE_LENGTH), generator=generator)
        target = self.dictionary[source].flip(1) if self.task == "translate" else source.sort(1).values
        return torch.cat([source, torch.full((count, 1), SEPARATOR), target], 1)


class TextPairData:
    """Windows of text. The source is the first half."""

    prefix_length: ClassVar[int] = TEXT_PREFIX_LENGTH
    vocab_size: ClassVar[int] = VOCAB_SIZE

    def __init__(self, text: LibraryText) -> None:
        self.text = text

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        return self.text.sample(count, length, generator)


TASKS = ("translate", "sort", "text")


def list_parts(device: str) -> dict[str, PartFn]:
    return {f"{form}, {task}": partial(measure_part, task, form, device) for task, form in product(TASKS, FORMS)}


def describe_settings(device: str) -> dict[str, Any]:
    return {
        "layers": f"{LAYERS}; in the encoder-decoder {LAYERS // 2} + {LAYERS // 2}",
        "d_model": D_MODEL,
        "positions": "sinusoidal",
        "seeds": GRID.num_seeds,
        "training": f"Adam, {GRID.steps} steps of {GRID.batch_size} sequences, best of lr {GRID.lrs}",
        "text": f"second half of {SEQ_LEN} bytes of Python {platform.python_version()}'s standard library",
    }


def summarize(results: Mapping[str, PartResults]) -> dict[str, Estimate]:
    """Estimates of all forms, and differences to the decoder."""
    forms: dict[tuple[str, str], FormResults] = {}
    for part, values in results.items():
        form, task = part.split(", ")
        raw = cast(Mapping[str, Sequence[float]], values)
        forms[task, form] = FormResults(raw["losses"], raw["exact"], int(raw["parameters"][0]), raw["lr"][0])
    return compare_forms(forms)


def measure_part(task: str, form: str, device: str) -> PartResults:
    result = measure_form(task, form, device)
    return {
        "losses": result.losses,
        "exact": result.exact,
        "parameters": [float(result.parameters)],
        "lr": [result.lr],
    }


def form_config(form: str, vocab_size: int) -> Config:
    """Config of a form. All forms have the same number of layers and, within 1 %, of parameters."""
    hidden = CROSS_HIDDEN if form == "encoder-decoder" else HIDDEN
    block: dict[str, Any] = {
        "attention": {"heads": 4, "position": {"kind": "none"}},
        "ffn": {"kind": "gated", "hidden": hidden},
    }
    # Positions are on the embedding, so that cross-attention has them too.
    stack = {
        "layers": LAYERS,
        "embedding": {"position": {"kind": "sinusoidal"}, "scale": "sqrt_d_model"},
        "block": block,
    }
    common = {"vocab_size": vocab_size, "d_model": D_MODEL, "init": {"kind": "xavier"}}
    if form != "encoder-decoder":
        return read_config(common | {"form": "decoder", "decoder": stack})
    half = stack | {"layers": LAYERS // 2}
    decoder = half | {"block": block | {"cross": {"heads": 4}}}
    return read_config(common | {"form": "encoder-decoder", "encoder": half, "decoder": decoder})


class FormModel(nn.Module):
    """A model of a form that maps tokens (B, T), source and target, to logits (B, T, V).

    The logits of an encoder-decoder at source positions are zero.
    """

    def __init__(self, form: str, model: Transformer, prefix_length: int) -> None:
        super().__init__()
        self.form, self.model, self.prefix_length = form, model.use_kernel("explicit"), prefix_length

    def forward(self, tokens: Tensor) -> Tensor:
        if isinstance(self.model, EncoderDecoder):
            source, target = tokens.split([self.prefix_length, tokens.shape[1] - self.prefix_length], 1)
            return F.pad(self.model(source, target), (0, 0, self.prefix_length, 0))
        if self.form == "prefix":
            lengths = torch.full((len(tokens),), self.prefix_length, device=tokens.device)
            return self.model(tokens, prefix_lengths=lengths)
        return self.model(tokens)


def target_loss(prefix_length: int) -> LossFn:
    """Loss on the tokens after the first target token (the separator, in a toy task)."""

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        return next_token_loss(logits[:, prefix_length:], tokens[:, prefix_length:])

    return loss


@dataclass(frozen=True)
class FormResults:
    """Losses on target tokens, shares of exactly correct targets, one per seed; parameters and best learning rate."""

    losses: Sequence[float]
    exact: Sequence[float]
    parameters: int
    lr: float


def measure_form(task: str, form: str, device: str = "cpu", grid: TrainingGrid = GRID) -> FormResults:
    """Train a form on a task, and evaluate the members with the best learning rate.

    A decoder learns from every token of a text, the other forms from the tokens of the target.
    """
    data = TextPairData(TRAINING_TEXT) if task == "text" else PairData(task)  # type: ignore[arg-type]
    evaluation = TextPairData(VALIDATION_TEXT) if task == "text" else data
    length = SEQ_LEN if task == "text" else 2 * SOURCE_LENGTH + 1
    config = form_config(form, data.vocab_size)

    def build_model(seed: int) -> nn.Module:
        return FormModel(form, build(config, seed=seed), data.prefix_length)

    loss = next_token_loss if form == "decoder" and task == "text" else target_loss(data.prefix_length)
    trained = train_grid(build_model, data, replace(grid, seq_len=length), loss=loss, device=device)
    tokens = sample_evaluation(evaluation, length, device)
    results: dict[float, list[tuple[float, float]]] = {}
    for index, (lr, _, _) in enumerate(grid.members):
        results.setdefault(lr, []).append(_evaluate_form(trained.load_member(index), tokens, data.prefix_length))
    best_lr = min(results, key=lambda lr: fmean(loss for loss, _ in results[lr]))
    losses, exact = zip(*results[best_lr], strict=True)
    return FormResults(losses, exact, sum(p.numel() for p in trained.model.parameters()), best_lr)


@torch.no_grad()
def _evaluate_form(model: nn.Module, tokens: Tensor, prefix_length: int) -> tuple[float, float]:
    """Loss on the target, and share of targets that greedy decoding would produce exactly."""
    logits = model(tokens)
    correct = (logits.argmax(-1)[:, prefix_length:-1] == tokens[:, prefix_length + 1 :]).all(1)
    return limit_loss(float(target_loss(prefix_length)(logits, tokens))), float(correct.float().mean())


def compare_forms(results: Mapping[tuple[str, str], FormResults]) -> dict[str, Estimate]:
    """Losses of the forms, and differences to the decoder with the same seed."""
    estimates = {}
    for (task, form), result in results.items():
        estimates[f"loss/{task}/{form}"] = estimate(result.losses)
        estimates[f"parameters/{task}/{form}"] = exact(result.parameters)
        estimates[f"best-lr/{task}/{form}"] = exact(result.lr)
        if task != "text":
            estimates[f"exact/{task}/{form}"] = estimate(result.exact)
        if form != "decoder":
            difference = estimate_difference(result.losses, results[task, "decoder"].losses)
            estimates[f"difference/{task}/{form}-decoder"] = difference
    return estimates
