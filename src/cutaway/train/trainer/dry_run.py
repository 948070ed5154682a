"""Dry run of a distributed training step on one machine, which measures memory and collectives of rank 0.

The model is built and parallelized by the same code as in training, with fake tensors and a fake process group, and no
data is read. The bytes that rank 0 would allocate and communicate are compared with the estimate of `cutaway.size`.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.size.estimate import SizeEstimate
from cutaway.size.parallel import ParallelDims
from cutaway.train.checkpoint.pretrained_checkpoint import load_base_config
from cutaway.train.data.training_data import build_tokenizer
from cutaway.train.distributed.dtensor import to_local
from cutaway.train.distributed.parallelize import parallelize_module
from cutaway.train.distributed.process_group import SINGLE_PROCESS, DistributedContext, MultiProcessContext
from cutaway.train.loss.chunked_cross_entropy import LossTargets
from cutaway.train.objectives.build import check_objective
from cutaway.train.objectives.objective import Objective
from cutaway.train.optim.optimizer import OptimizersContainer, build_optimizer
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import (
    BPETokenizerConfig,
    CausalLMConfig,
    MaskedLMConfig,
    PrefixLMConfig,
    Recipe,
    Seq2SeqConfig,
    SFTConfig,
    read_model_config,
)
from cutaway.train.trainer.bad_step_policy import BadStepPolicy
from cutaway.train.trainer.launch import check_adapter
from cutaway.train.trainer.memory_check import size_step
from cutaway.train.trainer.train_step import TrainStepRunner
from cutaway.train.trainer.training_module import TrainingModule, build_training_model

SIMULATED_OBJECTIVES = (CausalLMConfig, SFTConfig, MaskedLMConfig, PrefixLMConfig, Seq2SeqConfig)
"""Objectives whose loss is a cross-entropy of tokens, and that are simulated for a checkpoint, too."""
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
"""Kind of collective by PyTorch operator. The bytes of a collective are those of the full tensor, although a backend
may send only parts of it."""


class MemoryCommTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives, and the bytes of all live storages that operations have returned.

    A storage is counted once, until it is freed. Of a DTensor, only the local shard is counted. Workspace that a kernel
    allocates and frees internally is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self.storage_sizes: MutableMapping[torch.UntypedStorage, list[int]] = WeakIdKeyDictionary()
        self.collective_counts: Counter[str] = Counter()
        """Number of collectives by kind."""
        self.collective_bytes: Counter[str] = Counter()
        """Number of bytes by kind of collective. For each collective, the larger of input and output is counted."""
        self.patches = ExitStack()

    def __enter__(self) -> "MemoryCommTracker":
        resize = torch.UntypedStorage.resize_

        def resize_and_track(storage: torch.UntypedStorage, size: int) -> object:
            result = resize(storage, size)
            self.track_storage(storage)
            return result

        # FSDP2 frees and reallocates gathered weights by resizing their storages, which dispatches no operation.
        self.patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_and_track))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self.patches.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def track_storage(self, storage: torch.UntypedStorage) -> None:
        """Count a storage with its current size, replacing the size that was counted before."""
        size = storage.nbytes()
        if storage in self.storage_sizes:
            counted = self.storage_sizes[storage]
        else:
            counted = self.storage_sizes[storage] = [0]
            weakref.finalize(storage, self._on_storage_freed, counted)
        self.live_bytes += size - counted[0]
        counted[0] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _on_storage_freed(self, counted: list[int]) -> None:
        self.live_bytes -= counted[0]
        counted[0] = 0

    def reset_peak(self) -> None:
        """Set the peak to the bytes that are live now, and the counts of collectives to 0."""
        self.peak_bytes = self.live_bytes
        self.collective_counts.clear()
        self.collective_bytes.clear()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented  # DTensor handles this operation and calls operations on local tensors, counted here
        inputs = _list_tensors((args, kwargs))
        if inputs and not any(isinstance(tensor, FakeTensor) for tensor in inputs):
            with unset_fake_temporarily():  # real tensors, e.g. the ranks of a mesh, keep their values
                result = func(*args, **(kwargs or {}))
        elif func is aten._local_scalar_dense.default:  # a fake tensor has no value: return 0, 1.0 or False
            dtype = inputs[0].dtype
            scalar = False if dtype == torch.bool else 0
            result = 1.0 if dtype.is_floating_point else scalar
        else:
            result = func(*args, **(kwargs or {}))
        outputs = _list_tensors(result)
        for output in outputs:
            self.track_storage(output.untyped_storage())
        kind = COLLECTIVE_OPS.get(str(func.overloadpacket))
        if kind is not None:
            self.collective_counts[kind] += 1
            self.collective_bytes[kind] += max(tensor.nbytes for tensor in inputs + outputs)
        return result


def _list_tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class StepUsage:
    """Memory of rank 0 in bytes, by kind of tensor and at its peak, and the collectives of a training step."""

    weights: int
    gradients: int
    optimizer: int
    peak_bytes: int
    collectives: dict[str, tuple[int, int]]
    """By kind of collective: the number of calls, and the number of bytes of the full tensors."""

    @property
    def transient(self) -> int:
        """Peak bytes minus weights and optimizer state: activations, gradients and communication buffers."""
        return self.peak_bytes - self.weights - self.optimizer


@dataclass(frozen=True)
class DryRunReport:
    """Memory and collectives of a step, as measured by the dry run and as predicted by `cutaway.size`."""

    world_size: int
    devices: ParallelDims
    num_parameters: int
    measured: StepUsage
    predicted: StepUsage

    def to_dict(self) -> dict[str, object]:
        """Measured and predicted values as a JSON-serializable dict."""
        data: dict[str, object] = {"world_size": self.world_size, **asdict(self.devices)}
        data["num_parameters"] = self.num_parameters
        for name in ("weights", "gradients", "optimizer", "transient", "peak_bytes"):
            measured, predicted = getattr(self.measured, name), getattr(self.predicted, name)
            ratio = predicted / measured if measured else None
            row = {"measured_bytes": measured, "predicted_bytes": predicted, "ratio": ratio}
            data[name.removesuffix("_bytes")] = row
        collectives = {}
        for kind in sorted({*self.measured.collectives, *self.predicted.collectives}):
            (count, size), predicted = (each.collectives.get(kind, (0, 0)) for each in (self.measured, self.predicted))
            row = {"count": count, "bytes": size, "predicted_count": predicted[0], "predicted_bytes": predicted[1]}
            collectives[kind] = row
        return data | {"collectives": collectives}


def dry_run(recipe: Recipe, world_size: int) -> DryRunReport:
    """Measure memory and collectives of rank 0 in a step on `world_size` ranks. Reads no data and writes no files."""
    if world_size < 1:
        raise InputError(f"world_size is {world_size}; it is the number of processes, so pass 1 or more")
    if recipe.training.precision == "auto":  # the simulated devices are GPUs
        recipe = load_recipe(recipe, ["training.precision=bf16"])
    config = _load_config(recipe)
    with _fake_process_group(world_size) as dist_context:
        dist_context.init_mesh(recipe.parallel, CPU_DEVICE)
        if dist_context.mesh is None and world_size > 1:
            raise InputError(
                "with data-parallel replicas (DDP), each rank needs the same memory as a single process; use"
                " --world-size 1, or set parallel.dp_shard or parallel.tp"
            )
        estimate = size_step(recipe, config, CPU_DEVICE, dist_context)
        model = build_training_model(config, recipe.training, torch.device("meta"))
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        with FakeTensorMode(allow_non_fake_inputs=True), MemoryCommTracker() as tracker:
            measured = _run_two_steps(model, recipe, dist_context, tracker)
    predicted = _predict_usage(estimate, recipe, dist_context)
    return DryRunReport(world_size, estimate.options.parallel_dims, num_parameters, measured, predicted)


def _run_two_steps(
    model: Transformer, recipe: Recipe, dist_context: DistributedContext, tracker: MemoryCommTracker
) -> StepUsage:
    """Run two training steps, and return the usage of the second. The first step allocates the optimizer state."""
    _materialize_fake_tensors(model)
    training_module = TrainingModule(model, recipe.objective, recipe.training.precision)
    parallelize_module(training_module, dist_context)
    model.train()
    optimizer = build_optimizer(recipe.optimizer, model)
    data: Any = SimpleNamespace(train=SimpleNamespace(get_batch=lambda first, count: count))
    runner = TrainStepRunner(
        recipe,
        training_module,
        optimizer,
        data,
        lambda count, first: _fake_objective(recipe, count),
        BadStepPolicy(recipe.training.grad_accum_steps, device=CPU_DEVICE),
        dist_context=dist_context,
    )
    runner.run(0)
    tracker.reset_peak()
    runner.run(1)
    return _measure_usage(model, optimizer, tracker)


@contextmanager
def _fake_process_group(world_size: int) -> Iterator[DistributedContext]:
    """Create a fake process group and yield the DistributedContext of rank 0. Collectives return immediately."""
    if world_size == 1:
        yield SINGLE_PROCESS
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise InputError("this process already has a process group; start the dry run in a process of its own")
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=world_size)
    try:
        yield MultiProcessContext(store, 0, world_size)
    finally:
        dist.destroy_process_group()


def _load_config(recipe: Recipe) -> Config:
    """Config of the model, for a checkpoint that is fine-tuned from its files. Raises InputError for some recipes."""
    base_config = load_base_config(recipe.model)
    if base_config is None:
        return read_model_config(recipe.model, _vocab_size(recipe))
    if not isinstance(recipe.objective, SIMULATED_OBJECTIVES) or check_adapter(recipe, is_sharded=False):
        what = "an adapter" if check_adapter(recipe, is_sharded=False) else f"objective {recipe.objective.kind}"
        raise InputError(
            f"a dry run of several ranks does not simulate {what}; use --world-size 1, which reports data, parameters,"
            " steps and memory"
        )
    check_objective(recipe.objective, base_config, recipe.training, recipe.parallel)
    return base_config


def _vocab_size(recipe: Recipe) -> int:
    """Vocabulary size of the recipe's tokenizer. For BPE, the size is read from the recipe, without training."""
    if isinstance(recipe.data.tokenizer, BPETokenizerConfig):
        return recipe.data.tokenizer.vocab_size
    return build_tokenizer(recipe.data, recipe.objective).vocab_size


def _materialize_fake_tensors(model: Transformer) -> None:
    """Replace meta tensors by fake tensors on the CPU, in place."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            empty = _empty(parameter)
            module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = _empty(buffer)


def _empty(tensor: Tensor) -> Tensor:
    """Fake tensor like a meta tensor. empty_like would return a real one: the tracker runs it as its argument is."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU_DEVICE)


def _fake_objective(recipe: Recipe, count: int) -> Objective:
    """Objective of `count` sequences of data.seq_len fake tokens."""
    tokens = torch.zeros((count, recipe.data.seq_len), dtype=torch.long)
    is_seq2seq = isinstance(recipe.objective, Seq2SeqConfig)
    inputs = (tokens, tokens.clone(), None, None) if is_seq2seq else (tokens,)
    targets, weights = tokens.clone(), torch.ones(tokens.shape)
    selected = LossTargets(targets.flatten(), weights.flatten(), weights.sum(), None)
    return Objective(inputs, targets, weights, loss_targets=selected)


def _measure_usage(model: Transformer, optimizer: OptimizersContainer, tracker: MemoryCommTracker) -> StepUsage:
    # Tensors by id, so that tied weights are counted once
    model_tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    tensor_lists = (model_tensors, grads, optimizer.state_dict().values())
    weights, gradients, state = (sum(to_local(tensor).nbytes for tensor in tensors) for tensors in tensor_lists)
    collectives = {kind: (count, tracker.collective_bytes[kind]) for kind, count in tracker.collective_counts.items()}
    return StepUsage(weights, gradients, state, tracker.peak_bytes, collectives)


def _predict_usage(estimate: SizeEstimate, recipe: Recipe, dist_context: DistributedContext) -> StepUsage:
    """Memory and collectives of a step that the estimate of `cutaway.size` predicts."""
    memory = estimate.training_memory
    training = recipe.training
    repeats = len(dist_context.micro_batch_ranges(training.batch_size, training.grad_accum_steps))
    collectives = {kind: (repeats * count, repeats * size) for kind, (count, size) in estimate.collectives.items()}
    if dist_context.world_size > 1:  # add the sums over ranks: weight and number of targets; loss; squared norm
        count, num_bytes = collectives.get("all-reduce", (0, 0))
        collectives["all-reduce"] = count + 3, num_bytes + 2 * 8 + 8 + 4
    weights, gradients, state = (memory.bytes_by_component[name] for name in ("weights", "gradients", "optimizer"))
    return StepUsage(weights, gradients, state, memory.total_bytes, collectives)
