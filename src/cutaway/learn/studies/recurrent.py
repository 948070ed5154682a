"""Recurrent models and a Transformer of equal size: gradients and recall by distance, dependent steps, loss and time.

The recurrent models are a baseline. `nn.LSTM` has no batching rule for vmap on a GPU, so `RecurrentModel` applies the
equations of `nn.RNN` and `nn.LSTM` to their weights in training, and calls the module itself where time is measured.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cutaway.config import Config
from cutaway.config import config as read_config
from cutaway.learn.studies.components import TRAINING_TEXT, VOCAB_SIZE
from cutaway.learn.studies.recall_tasks import (
    COPY_GRID,
    EVAL_SEED,
    LRS,
    RECALL_GRID,
    CopyTask,
    RecallTask,
    Task,
    list_tasks,
)
from cutaway.learn.studies.study import Estimate, PartFn, PartResults, estimate, exact
from cutaway.learn.studies.train_grid import TrainedGrid, TrainingGrid, next_token_loss, train_grid
from cutaway.model import Transformer, build

ModelName = Literal["rnn", "rnn-orthogonal", "lstm", "lstm-forget-1", "transformer"]
MODELS: tuple[ModelName, ...] = ("rnn", "rnn-orthogonal", "lstm", "lstm-forget-1", "transformer")
"""`rnn-orthogonal` has orthogonal recurrent matrices at initialization, `lstm-forget-1` a forget bias of 1."""
TRAINED_MODELS: tuple[ModelName, ...] = ("rnn", "lstm", "lstm-forget-1", "transformer")
D_MODEL, LAYERS = 32, 2
"""Width of the Transformer, and number of blocks or recurrent layers."""
TEXT_GRID = TrainingGrid(lrs=LRS, warmups=(50,), steps=1000, batch_size=16, seq_len=129)
DISTANCES = (1, 2, 4, 8, 16, 32, 64)
"""Distances k from the last position T at which the gradient of its output is measured."""
GRADIENT_BATCH = 16
STEP_LENGTHS = (16, 32, 64)
NUM_EVAL_SEQUENCES = 512
TIMED_SIZES = {"cpu": ((32, 16, 128), (128, 8, 256)), "cuda": ((32, 16, 128), (512, 16, 1024))}
"""d_model, batch size and sequence length of timed training steps, by device."""
REPEATS = 10


def list_parts(device: str) -> dict[str, PartFn]:
    parts: dict[str, PartFn] = {"dependent products": count_dependent_steps}
    parts |= {f"gradients: {name}": partial(measure_gradients, name, device) for name in MODELS}
    for task, name in product(list_tasks(), TRAINED_MODELS):
        parts[f"{task.key}: {name}"] = partial(measure_task, task, name, device)
    parts |= {f"text: {name}": partial(measure_text, name, device) for name in TRAINED_MODELS}
    return parts | {"step times": partial(measure_step_times, device)}


TIMED_PARTS = ("step times",)


def summarize(results: Mapping[str, PartResults]) -> dict[str, Estimate]:
    """Estimates of all parts, and the comparison of losses on text after equal steps and after equal time."""
    estimates = {key: value for part in results.values() for key, value in part.items() if isinstance(value, Estimate)}
    estimates |= {f"baseline/{task.key}": exact(task.baseline) for task in list_tasks()}
    curves = {}
    for name in TRAINED_MODELS:
        *seeds, lr = cast(Sequence[Sequence[float]], results[f"text: {name}"].values())
        curves[name] = torch.tensor(seeds).T
        estimates[f"best-lr/text/{name}"] = exact(lr[0])
    return estimates | compare_on_text(curves, cast(Mapping[str, Estimate], results["step times"]))


def describe_settings(device: str) -> dict[str, Any]:
    return {
        "layers": LAYERS,
        "d_model of the Transformer": D_MODEL,
        "parameters without embeddings": {name: num_core_parameters(name) for name in TRAINED_MODELS},
        "copy": f"{CopyTask.num_copied} of {CopyTask.num_symbols - 2} symbols, {_describe(COPY_GRID)}",
        "recall": f"{RecallTask.num_keys} keys, {RecallTask.num_values} values, {_describe(RECALL_GRID)}",
        "text": f"{TEXT_GRID.seq_len - 1} bytes of Python's standard library per sequence, {_describe(TEXT_GRID)}",
        "learning rate": "the one with the lowest mean final loss, by model and task",
        "time": f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, nn.LSTM and nn.RNN, SDPA",
    }


def _describe(grid: TrainingGrid) -> str:
    return f"{grid.steps} steps of {grid.batch_size} sequences, {len(grid.lrs)} learning rates, {grid.num_seeds} seeds"


# ---------------------------------------------------------------------------------------- models


class RecurrentModel(nn.Module):
    """Embedding, `nn.RNN` or `nn.LSTM`, and a linear head: maps tokens (B, T) to logits (B, T, V)."""

    def __init__(self, core: nn.RNN | nn.LSTM, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, core.input_size)
        self.core = core
        self.head = nn.Linear(core.hidden_size, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.run_core(self.embed(tokens)))

    def run_core(self, x: Tensor) -> Tensor:
        """Apply the equations of the recurrent layers: (B, T, d) to (B, T, d)."""
        for layer in range(self.core.num_layers):
            x = self._run_layer(x, layer)
        return x

    def _run_layer(self, x: Tensor, layer: int) -> Tensor:
        names = (f"weight_ih_l{layer}", f"weight_hh_l{layer}", f"bias_ih_l{layer}", f"bias_hh_l{layer}")
        w_input, w_state, b_input, b_state = (getattr(self.core, name) for name in names)
        inputs = F.linear(x, w_input, b_input + b_state)
        h = c = x.new_zeros(len(x), self.core.hidden_size)
        outputs = []
        for projected in inputs.unbind(1):
            gates = projected + h @ w_state.T
            if isinstance(self.core, nn.LSTM):
                i, f, g, o = gates.chunk(4, -1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            else:
                h = gates.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1)

    def run_module(self, tokens: Tensor) -> Tensor:
        """Logits by a call of the PyTorch module, which is faster than `forward`."""
        return self.head(self.core(self.embed(tokens))[0])


def build_model(name: ModelName, vocab_size: int, seed: int, d_model: int = D_MODEL) -> nn.Module:
    """Build a model. The width of a recurrent one is that at which its core has as many parameters as the blocks."""
    if name == "transformer":
        return build(transformer_config(vocab_size, d_model), seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = RecurrentModel(_build_core(name, _equal_width(name, d_model)), vocab_size)
        if name == "rnn-orthogonal":
            for layer in range(LAYERS):
                nn.init.orthogonal_(getattr(model.core, f"weight_hh_l{layer}"))
    if name == "lstm-forget-1":
        width = model.core.hidden_size
        for layer in range(LAYERS):
            for side in ("ih", "hh"):  # both biases are added
                getattr(model.core, f"bias_{side}_l{layer}").data[width : 2 * width] = 0.5
    return model


def transformer_config(vocab_size: int, d_model: int = D_MODEL) -> Config:
    """A pre-norm decoder with LayerNorm, RoPE, an FFN of 4·d_model and Xavier initialization."""
    stack = {
        "layers": LAYERS,
        "norm": {"kind": "layernorm"},
        "embedding": {"scale": "sqrt_d_model"},
        "block": {"attention": {"heads": max(2, d_model // 64)}, "ffn": {"kind": "mlp"}},
    }
    init = {"kind": "xavier"}
    return read_config(
        {"form": "decoder", "vocab_size": vocab_size, "d_model": d_model, "init": init, "decoder": stack}
    )


def _build_core(name: ModelName, width: int) -> nn.RNN | nn.LSTM:
    kind = nn.LSTM if name.startswith("lstm") else nn.RNN
    return kind(width, width, num_layers=LAYERS, batch_first=True)


def _equal_width(name: ModelName, d_model: int) -> int:
    """Width at which the recurrent layers have about as many parameters as the blocks of a Transformer."""
    matrices = 12 * d_model**2
    per_square = 8 if name.startswith("lstm") else 2
    return round((matrices / per_square) ** 0.5)


def num_core_parameters(name: ModelName) -> int:
    """Number of parameters without embedding and head."""
    core = build_model(name, 16, 0).get_submodule("decoder.blocks" if name == "transformer" else "core")
    return sum(parameter.numel() for parameter in core.parameters())


# ---------------------------------------------------------------------------------------- dependent steps


class _DependentProducts(TorchDispatchMode):
    """Longest chain of matrix products in which each needs the result of the one before."""

    PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[int, tuple[int, Tensor]] = {}
        """id of a tensor: length of the longest chain that ends in it, and the tensor, so that its id stays in use."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        length = max((self.length(tensor) for tensor in _tensors(args)), default=0)
        length += func.overloadpacket.__name__ in self.PRODUCTS
        for tensor in _tensors((result,)):
            self.lengths[id(tensor)] = length, tensor
        return result

    def length(self, tensor: Tensor) -> int:
        return self.lengths.get(id(tensor), (0, tensor))[0]


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    lists = [value if isinstance(value, tuple | list) else (value,) for value in values]
    return [value for items in lists for value in items if isinstance(value, Tensor)]


@torch.no_grad()
def dependent_products(model: nn.Module, length: int) -> int:
    """Number of matrix products in sequence of a forward pass: a lower bound of its time on any hardware."""
    if isinstance(model, Transformer):
        model.use_kernel("explicit")
    with _DependentProducts() as mode:
        logits = model(torch.zeros(1, length, dtype=torch.long))
    return mode.length(logits)


def count_dependent_steps() -> dict[str, Estimate]:
    """Exact counts by length. The path is the number of weight matrices between an input and the output T later."""
    estimates = {}
    for name in ("rnn", "lstm", "transformer"):
        for length in STEP_LENGTHS:
            count = dependent_products(build_model(name, 16, 0), length)
            estimates[f"dependent-products/{name}/{length}"] = exact(count)
    return estimates


# ---------------------------------------------------------------------------------------- gradients


def gradient_by_distance(model: nn.Module, tokens: Tensor, seed: int = 0) -> Tensor:
    """Norm of the gradient of a random projection of the logits at the last position, by position of the input: (T,).

    The gradient is with respect to the embedding output. The root mean square over projections is ‖∂output/∂input‖_F
    up to a factor that is equal for all positions; `tokens` (B, T) have one projection each.
    """
    embed = model.get_submodule("decoder.embed" if isinstance(model, Transformer) else "embed")
    leaves: list[Tensor] = []

    def make_leaf(module: Any, args: object, out: Tensor) -> Tensor:
        leaves.append(out.detach().requires_grad_())
        return leaves[-1]

    handle = embed.register_forward_hook(make_leaf)
    try:
        with torch.enable_grad():
            logits = model(tokens)[:, -1]
            projection = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)).to(logits)
            (gradient,) = torch.autograd.grad((logits * projection).sum(), leaves)
    finally:
        handle.remove()
    return gradient.norm(dim=-1).square().mean(0).sqrt()


def measure_gradients(name: ModelName, device: str = "cpu", num_seeds: int = 10) -> dict[str, Estimate]:
    """Gradient at initialization by distance, on random tokens."""
    norms = []
    for seed in range(num_seeds):
        model = build_model(name, 16, seed).to(device)
        tokens = torch.randint(16, (GRADIENT_BATCH, max(DISTANCES) + 1), generator=torch.Generator().manual_seed(seed))
        norms.append(gradient_by_distance(model, tokens.to(device), seed))
    return _summarize_gradients(f"init/{name}", norms)


def _summarize_gradients(key: str, norms: Sequence[Tensor]) -> dict[str, Estimate]:
    """Gradient by distance relative to distance 1, and its geometric mean factor per position over the whole range."""
    ratios = torch.stack([by_position.flip(0) / by_position[-2] for by_position in norms]).double().cpu().clamp(1e-30)
    distances = [distance for distance in DISTANCES if distance < ratios.shape[1]]
    last = distances[-1]
    estimates = {f"gradient/{key}/{k}": estimate(ratios[:, k].tolist(), ratio=True) for k in distances}
    factors = ratios[:, last] ** (1 / (last - 1))
    return estimates | {f"gradient-per-step/{key}": estimate(factors.tolist(), ratio=True)}


# ---------------------------------------------------------------------------------------- copy and recall


def train_task(task: Task, name: ModelName, device: str = "cpu", grid: TrainingGrid | None = None) -> TrainedGrid:
    """Train all seeds and learning rates on the cross-entropy of the targets."""

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        targets = task.targets(tokens)
        return F.cross_entropy(logits[:, -targets.shape[1] :].flatten(0, 1), targets.flatten())

    grid = replace(grid or task.grid, seq_len=task.length)
    return train_grid(lambda seed: build_model(name, task.num_symbols, seed), task, grid, loss=loss, device=device)


def measure_task(
    task: Task, name: ModelName, device: str = "cpu", grid: TrainingGrid | None = None
) -> dict[str, Estimate]:
    """Accuracy on new sequences, for recall also by distance, and gradient by distance after training.

    `gradient-at-target` is the gradient at the position of the target, relative to the position of the largest one.
    """
    trained = train_task(task, name, device, grid)
    tokens = task.sample(NUM_EVAL_SEQUENCES, task.length, torch.Generator().manual_seed(EVAL_SEED)).to(device)
    targets, distances = task.targets(tokens), task.distances(tokens)
    accuracies, by_distance, norms = [], [], []
    bands = _distance_bands(distances)
    for member in trained.best_members():
        model = trained.load_member(member)
        with torch.no_grad():
            correct = (model(tokens)[:, -targets.shape[1] :].argmax(-1) == targets).double()
        accuracies.append(float(correct.mean()))
        by_distance.append([float(correct[(distances >= low) & (distances < high)].mean()) for low, high in bands])
        norms.append(gradient_by_distance(model, tokens[:GRADIENT_BATCH]))
    key = f"{task.key}/{name}"
    estimates = {f"accuracy/{key}": estimate(accuracies), f"best-lr/{key}": exact(trained.best_lr)}
    estimates |= _summarize_gradients(f"trained/{key}", norms)
    if bool((distances == distances[0, 0]).all()):
        ratios = [float(by_position.flip(0)[distances[0, 0]] / by_position.max()) for by_position in norms]
        estimates[f"gradient-at-target/{key}"] = estimate([max(ratio, 1e-30) for ratio in ratios], ratio=True)
    else:
        for (low, high), values in zip(bands, zip(*by_distance, strict=True), strict=True):
            estimates[f"accuracy-by-distance/{key}/{low}-{high - 1}"] = estimate(values)
    return estimates


def _distance_bands(distances: Tensor) -> list[tuple[int, int]]:
    """Powers of two that contain distances, as [low, high)."""
    bands = [(2**power, 2 ** (power + 1)) for power in range(8)]
    return [band for band in bands if bool(((distances >= band[0]) & (distances < band[1])).any())]


# ---------------------------------------------------------------------------------------- text: loss by step and time


def train_on_text(name: ModelName, device: str = "cpu", grid: TrainingGrid = TEXT_GRID) -> tuple[Tensor, float]:
    """Training loss at the best learning rate, (steps, seeds), as mean over the last 5 % of the steps; that rate."""
    trained = train_grid(lambda seed: build_model(name, VOCAB_SIZE, seed), TRAINING_TEXT, grid, device=device)
    losses = _trailing_mean(trained.losses[:, trained.best_members()], max(1, grid.steps // 20))
    return losses.cpu(), trained.best_lr


def measure_text(name: ModelName, device: str) -> dict[str, list[float]]:
    """Training losses by step, for each seed, and the learning rate."""
    curves, lr = train_on_text(name, device)
    return {f"seed {seed}": curve.tolist() for seed, curve in enumerate(curves.T)} | {"lr": [lr]}


def _trailing_mean(values: Tensor, width: int) -> Tensor:
    sums = F.pad(values.cumsum(0), (0, 0, 1, 0))
    ends = torch.arange(1, len(values) + 1, device=values.device)
    starts = (ends - width).clamp(min=0)
    return (sums[ends] - sums[starts]) / (ends - starts)[:, None]


def measure_step_times(device: str) -> dict[str, Estimate]:
    """Time of a training step relative to the Transformer, by model and d_model, in alternating rounds."""
    ratios = {}
    for d_model, batch_size, length in TIMED_SIZES[device]:
        tokens = torch.randint(VOCAB_SIZE, (batch_size, length), device=device)
        models = {name: build_model(name, VOCAB_SIZE, 0, d_model).to(device) for name in ("rnn", "lstm", "transformer")}
        steps = {name: _training_step(model, tokens) for name, model in models.items()}
        for step in steps.values():
            _time(step, device)  # warm-up
        rounds = [{name: _time(step, device) for name, step in steps.items()} for _ in range(REPEATS)]
        for name in ("rnn", "lstm"):
            ratios[f"step-time/{name}-to-transformer/{d_model}"] = estimate(
                [times[name] / times["transformer"] for times in rounds], ratio=True
            )
    return ratios


def _training_step(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    """A step with PyTorch's own kernels: nn.RNN and nn.LSTM, or SDPA."""
    forward = model.run_module if isinstance(model, RecurrentModel) else model
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        next_token_loss(forward(tokens), tokens).backward()
        optimizer.step()

    return step


def _time(step: Callable[[], None], device: str) -> float:
    """Median seconds of a step."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def compare_on_text(curves: Mapping[ModelName, Tensor], times: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Loss of each model and difference to the Transformer, after equal steps and after equal time.

    Equal time is by the ratio of step times at each measured d_model; the slower model has fewer steps.
    `text-steps-to-equal` is the number of steps after which the Transformer has the final loss of the recurrent model,
    as a part of all steps; it is 1 if it never has.
    """
    estimates: dict[str, Estimate] = {}
    transformer = curves["transformer"]
    steps = len(transformer)
    for name, curve in curves.items():
        estimates[f"text-loss/{name}"] = estimate(curve[-1].tolist())
        if name == "transformer":
            continue
        estimates[f"text-loss-difference/equal-steps/{name}"] = estimate((curve[-1] - transformer[-1]).tolist())
        for key, ratio in times.items():
            timed, d_model = key.removeprefix("step-time/").split("-to-transformer/")
            if name.startswith(timed):
                step, other = (max(1, round(steps * min(1.0, part))) - 1 for part in (1 / ratio.mean, ratio.mean))
                difference = (curve[step] - transformer[other]).tolist()
                estimates[f"text-loss-difference/equal-time/{d_model}/{name}"] = estimate(difference)
        below = transformer <= curve[-1]
        reached = torch.where(below.any(0), below.float().argmax(0) + 1, steps)
        estimates[f"text-steps-to-equal/{name}"] = estimate((reached / steps).tolist(), ratio=True)
    return estimates
