"""A step of many ranks on one machine: the same model, spread by the same code, on tensors that have only shapes.

Weights are fake tensors, the other ranks a process group that answers at once. What rank 0 would hold and send is
counted, and stands beside what `size` says of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.size.parallel import Devices
from cutaway.size.sizing import Size
from cutaway.text import byte_tokenizer
from cutaway.train.ingredients import Bpe, Bytes
from cutaway.train.learner import Learner
from cutaway.train.ledger import Ledger
from cutaway.train.loss import Asked
from cutaway.train.objectives import Task
from cutaway.train.optimise import Optimiser, make, owned
from cutaway.train.parts import own
from cutaway.train.policy import Policy
from cutaway.train.ranks import ALONE, Ranks
from cutaway.train.reading import tokenizer_of
from cutaway.train.recipe import Recipe, Seq2Seq
from cutaway.train.room import sized
from cutaway.train.spread import spread
from cutaway.train.start import shaped
from cutaway.train.step import Stepper
from cutaway.train.together import Together

aten = torch.ops.aten
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Figures:
    """Of rank 0: bytes by what they are for, those at the fullest moment, and a step's collectives."""

    weights: int
    gradients: int
    optimizer: int
    peak: int
    collectives: dict[str, tuple[int, int]]
    """By kind: how many, and bytes, of a whole that is given or taken in parts."""

    @property
    def beside(self) -> int:
        """Beside weights and optimizer, at the fullest moment: activations, gradients, what is gathered and sent."""
        return self.peak - self.weights - self.optimizer


@dataclass(frozen=True)
class Rehearsal:
    """What was counted, and what size predicts."""

    world: int
    devices: Devices
    parameters: int
    counted: Figures
    predicted: Figures

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        told: dict[str, Any] = {"world": self.world, **asdict(self.devices), "parameters": self.parameters}
        for name in ("weights", "gradients", "optimizer", "beside", "peak"):
            mine, size = getattr(self.counted, name), getattr(self.predicted, name)
            told[name] = {"bytes": mine, "size": size, "ratio": size / mine if mine else None}
        kinds = sorted({*self.counted.collectives, *self.predicted.collectives})
        told["collectives"] = {kind: beside(self.counted, self.predicted, kind) for kind in kinds}
        return told


def beside(counted: Figures, predicted: Figures, kind: str) -> dict[str, int]:
    (number, size), (told, told_bytes) = (each.collectives.get(kind, (0, 0)) for each in (counted, predicted))
    return {"number": number, "bytes": size, "size_number": told, "size_bytes": told_bytes}


class Shapes(Ledger):  # type: ignore[no-untyped-call]
    """A ledger that answers where a value is asked for, since there are none: 0, 1.0, no."""

    def carry_out(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if tensors and not any(isinstance(each, FakeTensor) for each in tensors):
            with unset_fake_temporarily():  # what has values keeps them: where ranks stand in a mesh
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            kind = args[0].dtype
            return False if kind == torch.bool else 1.0 if kind.is_floating_point else 0
        return super().carry_out(func, args, kwargs)


def rehearse(recipe: Recipe, world: int) -> Rehearsal:
    """Rank 0's part of a step of `world` ranks. Nothing is read and nothing written."""
    if world < 1:
        raise InputError(f"a world of {world} has no rank; give the number of processes, 1 or more")
    config = recipe.shape.replace(vocab_size=vocabulary(recipe))
    with pretended(world) as ranks:
        ranks.arrange(recipe.parallel, CPU)
        if ranks.mesh is None and world > 1:
            raise InputError(
                "whole copies (DDP) hold what one rank alone does; rehearse that with --world 1, or set parallel.shards"
                " or parallel.tensor"
            )
        predicted = sized(recipe, config, CPU, ranks)
        model = shaped(recipe, config, torch.device("meta"))
        parameters = sum(each.numel() for each in model.parameters())
        with FakeTensorMode(allow_non_fake_inputs=True), Shapes() as ledger:
            counted = take_steps(model, recipe, ranks, ledger)
    return Rehearsal(world, predicted.question.devices, parameters, counted, said(predicted, recipe, ranks))


def take_steps(model: Transformer, recipe: Recipe, ranks: Ranks, ledger: Ledger) -> Figures:
    """A step in which the optimiser's state is made, and one that is counted."""
    lay_out(model)
    learner = Learner(model, recipe)
    spread(learner, ranks)
    model.train()
    chosen = recipe.optimiser
    optimiser = make(chosen.kind, model, **chosen.model_dump(exclude={"kind"}))
    reading: Any = Pretended(recipe)
    policy = Policy(recipe.training.pieces, device=CPU)
    stepper = Stepper(recipe, learner, optimiser, reading, reading.task, policy, ranks=ranks)
    stepper.step(0)
    ledger.forget()
    stepper.step(1)
    return figures(model, optimiser, ledger)


@contextmanager
def pretended(world: int) -> Iterator[Ranks]:
    """Rank 0 among others that are not there."""
    if world == 1:
        yield ALONE
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise InputError("processes train together here already; rehearse in a process of its own")
    store: Any = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=world)
    try:
        yield Together(store, 0, world)
    finally:
        dist.destroy_process_group()


def vocabulary(recipe: Recipe) -> int:
    """How many tokens the tokenizer will know, if it must not be trained to tell."""
    match recipe.data.tokenizer:
        case Bytes():
            return byte_tokenizer().vocab_size
        case Bpe(vocab_size=size):
            return size
    return tokenizer_of(recipe).vocab_size


def lay_out(model: Transformer) -> None:
    """Fake memory in the place of none."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device=CPU)
                module._parameters[name] = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CPU)


class Pretended:
    """In the place of data: as many sequences as are asked for, of the recipe's length."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.train = recipe, self

    def batch(self, first: int, count: int) -> int:
        return count

    def task(self, count: int, first: int) -> Task:
        tokens = torch.zeros((count, self.recipe.data.length), dtype=torch.long)
        reads: tuple[Tensor | None, ...] = (tokens,)
        if isinstance(self.recipe.objective, Seq2Seq):
            reads = (tokens, tokens.clone(), None, None)
        targets, weights = tokens.clone(), torch.ones(tokens.shape)
        return Task(reads, targets, weights, asked=Asked(targets.flatten(), weights.flatten(), weights.sum(), None))


def figures(model: Transformer, optimiser: Optimiser, ledger: Ledger) -> Figures:
    held = {id(each): each for each in model.state_dict(keep_vars=True).values()}.values()
    slopes = [each.grad for each in model.parameters() if each.grad is not None]
    states = [value for part in optimiser.parts for each in owned(part) for value in part.state.get(each, {}).values()]
    weights, gradients, state = (sum(own(each).nbytes for each in tensors) for tensors in (held, slopes, states))
    kinds = {kind: (number, ledger.bytes[kind]) for kind, number in ledger.sent.items()}
    return Figures(weights, gradients, state, ledger.peak, kinds)


def said(size: Size, recipe: Recipe, ranks: Ranks) -> Figures:
    """What size says of the same step."""
    memory = size.training
    pieces = len(ranks.portions(recipe.training.batch, recipe.training.pieces))
    kinds = {kind: (pieces * number, pieces * each) for kind, (number, each) in size.collectives.items()}
    if ranks.world > 1:  # targets, loss and the gradient's length, each summed over ranks
        number, each = kinds.get("all-reduce", (0, 0))
        kinds["all-reduce"] = number + 3, each + 8 + 8 + 4
    whole = memory.whole
    return Figures(whole["weights"], whole["gradients"], whole["optimizer"], memory.total, kinds)
