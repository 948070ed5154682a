"""A step of many ranks on one machine: the same model, spread by the same code, on tensors that have only shapes.

Weights are fake tensors, the other ranks a process group that answers at once. What rank 0 would hold and send is
counted, and stands beside what `size` says of it.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.size.estimate import SizeEstimate
from cutaway.size.parallel import ParallelDims
from cutaway.tokenizer import byte_tokenizer
from cutaway.train.data.data_loader import build_tokenizer
from cutaway.train.distributed.dtensor import to_local
from cutaway.train.distributed.parallelize import parallelize_module
from cutaway.train.distributed.process_group import SINGLE_PROCESS, DistributedContext, MultiProcessContext
from cutaway.train.loss.chunked_cross_entropy import LossTargets
from cutaway.train.objectives.objective import Objective
from cutaway.train.optim.optimizer import OptimizersContainer, build_optimizer, optimizer_parameters
from cutaway.train.recipe.schema import BPETokenizerConfig, ByteTokenizerConfig, Recipe, Seq2SeqConfig
from cutaway.train.trainer.launch import build_training_model
from cutaway.train.trainer.memory_check import size_step
from cutaway.train.trainer.step_policy import StepPolicy
from cutaway.train.trainer.train_step import TrainStepRunner
from cutaway.train.trainer.training_module import TrainingModule

aten = torch.ops.aten
CPU_DEVICE = torch.device("cpu")
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
COLLECTIVE_OPS = {
    "c10d._allgather_base_": ALL_GATHER,
    "c10d.allgather_": ALL_GATHER,
    "c10d._reduce_scatter_base_": REDUCE_SCATTER,
    "c10d.allreduce_": ALL_REDUCE,
    "_c10d_functional.all_gather_into_tensor": ALL_GATHER,
    "_c10d_functional.reduce_scatter_tensor": REDUCE_SCATTER,
    "_c10d_functional.all_reduce": ALL_REDUCE,
    "_c10d_functional.all_reduce_": ALL_REDUCE,
}
"""PyTorch's names for them. What they are given in parts, an engine may send whole, so bytes are those of the whole."""


class MemoryCommTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every storage that an operation gives is counted once, from then on until nothing refers to it.

    A tensor that is spread over ranks is counted by what this rank has of it. What a kernel takes for itself and gives
    back before it ends is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self.storage_sizes: Any = WeakIdKeyDictionary()
        self.collective_counts: Counter[str] = Counter()
        """Collectives by kind,"""
        self.collective_bytes: Counter[str] = Counter()
        """and what they give or take, whichever is more."""
        self.patches = ExitStack()

    def __enter__(self) -> "MemoryCommTracker":
        resize: Callable[..., Any] = torch.UntypedStorage.resize_
        tracker = self

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            tracker.track_storage(storage)
            return result

        # Sharded weights come and go in storages that stay: no operation tells of it.
        self.patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self.patches.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def track_storage(self, storage: torch.UntypedStorage) -> None:
        """Count a storage for as much as it is now."""
        size = storage.nbytes()
        if storage in self.storage_sizes:
            box = self.storage_sizes[storage]
        else:
            box = self.storage_sizes[storage] = [0]
            weakref.finalize(storage, self._on_storage_freed, box)
        self.live_bytes += size - box[0]
        box[0] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _on_storage_freed(self, box: list[int]) -> None:
        self.live_bytes -= box[0]
        box[0] = 0

    def reset_peak(self) -> None:
        """Begin anew with peak and collectives; what is alive stays counted."""
        self.peak_bytes = self.live_bytes
        self.collective_counts.clear()
        self.collective_bytes.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it is taken apart first, into what this rank does
        kind = COLLECTIVE_OPS.get(str(func.overloadpacket))
        result = self.run_op(func, args, kwargs or {})
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        for each in tensors:
            self.track_storage(each.untyped_storage())
        if kind is not None:
            given = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            self.collective_counts[kind] += 1
            self.collective_bytes[kind] += max(each.nbytes for each in given + tensors)
        return result

    def run_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


@dataclass(frozen=True)
class StepUsage:
    """Of rank 0: bytes by what they are for, those at the fullest moment, and a step's collectives."""

    weights: int
    gradients: int
    optimizer: int
    peak_bytes: int
    collectives: dict[str, tuple[int, int]]
    """By kind: how many, and bytes, of a whole that is given or taken in parts."""

    @property
    def transient(self) -> int:
        """Beside weights and optimizer, at the fullest moment: activations, gradients, what is gathered and sent."""
        return self.peak_bytes - self.weights - self.optimizer


@dataclass(frozen=True)
class DryRunReport:
    """What was counted, and what size predicts."""

    world_size: int
    devices: ParallelDims
    num_parameters: int
    measured: StepUsage
    predicted: StepUsage

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data: dict[str, Any] = {"world_size": self.world_size, **asdict(self.devices)}
        data["num_parameters"] = self.num_parameters
        for name in ("weights", "gradients", "optimizer", "transient", "peak"):
            attribute = "peak_bytes" if name == "peak" else name
            measured, predicted = getattr(self.measured, attribute), getattr(self.predicted, attribute)
            data[name] = {
                "measured_bytes": measured,
                "predicted_bytes": predicted,
                "ratio": predicted / measured if measured else None,
            }
        kinds = sorted({*self.measured.collectives, *self.predicted.collectives})
        data["collectives"] = {kind: _compare_collectives(self.measured, self.predicted, kind) for kind in kinds}
        return data


def _compare_collectives(measured: StepUsage, predicted: StepUsage, kind: str) -> dict[str, int]:
    count, num_bytes = measured.collectives.get(kind, (0, 0))
    predicted_count, predicted_bytes = predicted.collectives.get(kind, (0, 0))
    return {
        "count": count,
        "bytes": num_bytes,
        "predicted_count": predicted_count,
        "predicted_bytes": predicted_bytes,
    }


class FakeTensorTracker(MemoryCommTracker):  # type: ignore[no-untyped-call]
    """A tracker that answers where a value is asked for, since there are none: 0, 1.0, no."""

    def run_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if tensors and not any(isinstance(each, FakeTensor) for each in tensors):
            with unset_fake_temporarily():  # what has values keeps them: where ranks stand in a mesh
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            kind = args[0].dtype
            return False if kind == torch.bool else 1.0 if kind.is_floating_point else 0
        return super().run_op(func, args, kwargs)


def dry_run(recipe: Recipe, world_size: int) -> DryRunReport:
    """Rank 0's part of a step of `world_size` ranks. Nothing is read and nothing written."""
    if world_size < 1:
        raise InputError(f"a world of {world_size} has no rank; give the number of processes, 1 or more")
    config = recipe.transformer_config.replace(vocab_size=_vocab_size(recipe))
    with _fake_process_group(world_size) as ranks:
        ranks.init_mesh(recipe.parallel, CPU_DEVICE)
        if ranks.mesh is None and world_size > 1:
            raise InputError(
                "whole copies (DDP) hold what one rank alone does; dry-run that with --world-size 1, or set"
                " parallel.dp_shard or parallel.tp"
            )
        predicted = size_step(recipe, config, CPU_DEVICE, ranks)
        model = build_training_model(recipe, config, torch.device("meta"))
        parameters = sum(each.numel() for each in model.parameters())
        with FakeTensorMode(allow_non_fake_inputs=True), FakeTensorTracker() as tracker:
            counted = _run_two_steps(model, recipe, ranks, tracker)
    return DryRunReport(
        world_size, predicted.options.parallel_dims, parameters, counted, _predict_usage(predicted, recipe, ranks)
    )


def _run_two_steps(
    model: Transformer, recipe: Recipe, dist_context: DistributedContext, tracker: MemoryCommTracker
) -> StepUsage:
    """A step in which the optimizer's state is made, and one that is counted."""
    _materialize_fake_tensors(model)
    training_module = TrainingModule(model, recipe)
    parallelize_module(training_module, dist_context)
    model.train()
    chosen = recipe.optimizer
    optimizer = build_optimizer(chosen.kind, model, **chosen.model_dump(exclude={"kind"}))
    reading: Any = FakeData(recipe)
    policy = StepPolicy(recipe.training.grad_accum_steps, device=CPU_DEVICE)
    runner = TrainStepRunner(
        recipe, training_module, optimizer, reading, reading.objective, policy, dist_context=dist_context
    )
    runner.run(0)
    tracker.reset_peak()
    runner.run(1)
    return _measure_usage(model, optimizer, tracker)


@contextmanager
def _fake_process_group(world_size: int) -> Iterator[DistributedContext]:
    """Rank 0 among others that are not there."""
    if world_size == 1:
        yield SINGLE_PROCESS
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise InputError("processes train together here already; dry-run in a process of its own")
    store: Any = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=world_size)
    try:
        yield MultiProcessContext(store, 0, world_size)
    finally:
        dist.destroy_process_group()


def _vocab_size(recipe: Recipe) -> int:
    """How many tokens the tokenizer will know, if it must not be trained to tell."""
    match recipe.data.tokenizer:
        case ByteTokenizerConfig():
            return byte_tokenizer().vocab_size
        case BPETokenizerConfig(vocab_size=size):
            return size
    return build_tokenizer(recipe).vocab_size


def _materialize_fake_tensors(model: Transformer) -> None:
    """Fake memory in the place of none."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device=CPU_DEVICE)
                module._parameters[name] = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CPU_DEVICE)


class FakeData:
    """In the place of data: as many sequences as are asked for, of the recipe's length."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.train = recipe, self

    def get_batch(self, first: int, count: int) -> int:
        return count

    def objective(self, count: int, first: int) -> Objective:
        tokens = torch.zeros((count, self.recipe.data.seq_len), dtype=torch.long)
        reads: tuple[Tensor | None, ...] = (tokens,)
        if isinstance(self.recipe.objective, Seq2SeqConfig):
            reads = (tokens, tokens.clone(), None, None)
        targets, weights = tokens.clone(), torch.ones(tokens.shape)
        return Objective(
            reads, targets, weights, loss_targets=LossTargets(targets.flatten(), weights.flatten(), weights.sum(), None)
        )


def _measure_usage(model: Transformer, optimizer: OptimizersContainer, tracker: MemoryCommTracker) -> StepUsage:
    held = {id(each): each for each in model.state_dict(keep_vars=True).values()}.values()
    slopes = [each.grad for each in model.parameters() if each.grad is not None]
    states = [
        value
        for part in optimizer.optimizers
        for each in optimizer_parameters(part)
        for value in part.state.get(each, {}).values()
    ]
    weights, gradients, state = (sum(to_local(each).nbytes for each in tensors) for tensors in (held, slopes, states))
    kinds = {kind: (number, tracker.collective_bytes[kind]) for kind, number in tracker.collective_counts.items()}
    return StepUsage(weights, gradients, state, tracker.peak_bytes, kinds)


def _predict_usage(size: SizeEstimate, recipe: Recipe, dist_context: DistributedContext) -> StepUsage:
    """What size says of the same step."""
    memory = size.training_memory
    pieces = len(dist_context.micro_batch_ranges(recipe.training.batch_size, recipe.training.grad_accum_steps))
    kinds = {kind: (pieces * number, pieces * each) for kind, (number, each) in size.collectives.items()}
    if dist_context.world_size > 1:  # targets, loss and the gradient's length, each summed over ranks
        number, each = kinds.get("all-reduce", (0, 0))
        kinds["all-reduce"] = number + 3, each + 8 + 8 + 4
    whole = memory.bytes_by_component
    return StepUsage(whole["weights"], whole["gradients"], whole["optimizer"], memory.total_bytes, kinds)
