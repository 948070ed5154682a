"""Recipe for a text: model, tokenizer, batch size and steps, chosen from the size of the text and the machine.

The choice is a rule of thumb, which a recipe overrides:
- Tokenizer: bytes for a small text, otherwise byte-level BPE with more tokens for more text.
- Model: the largest of `MODEL_SIZES` that sees MIN_TOKENS_PER_PARAMETER tokens per parameter in the given time, and
  has at most MAX_PARAMETERS_PER_TOKEN parameters per token of the text.
- Steps: as many as fit into the time, but at most MAX_EPOCHS epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cutaway.errors import InputError
from cutaway.size.units import format_count, format_si
from cutaway.train.data.text_stats import TextStats, measure_text, resolve_text_sources
from cutaway.train.recipe.load import apply_override
from cutaway.train.recipe.schema import NUM_BYTE_TOKENS

DEFAULT_MINUTES = 5.0
MIN_TEXT_BYTES = 1000
MIN_TOKENS_PER_PARAMETER = 2.0
"""In runs of minutes, a model that sees few tokens per parameter reaches a lower loss than a smaller one that sees the
20 tokens per parameter of long runs."""
MAX_PARAMETERS_PER_TOKEN = 5.0
MAX_EPOCHS = 16
MIN_STEPS_PER_EPOCH = 64
MIN_STEPS = 150
CPU_FLOPS_PER_CORE, MAX_CPU_CORES = 4e10, 8
"""Speed of training small models in fp32, and number of cores that they can use."""
STEP_SECONDS = 0.03
"""Duration of a step apart from matrix products, in the estimate of the duration."""
DEFAULT_GPU_FLOPS, GPU_UTILIZATION = 1e14, 0.25
TRAINING_BYTES_PER_PARAMETER = 16
"""Weights, gradients and two optimizer states in fp32."""
BYTES_PER_BPE_TOKEN = 3.0
MIN_VALIDATION_SHARE = 0.04
"""Documents are assigned to a split by their hash, so that the share of the validation split is not exact."""
SEED = 0


class ModelSize(NamedTuple):
    d_model: int
    layers: int

    @property
    def num_heads(self) -> int:
        return self.d_model // (32 if self.d_model < 512 else 64)

    def num_parameters(self, vocab_size: int) -> int:
        """Number of parameters of layers with a gated FFN, and of the tied token table."""
        return 12 * self.layers * self.d_model**2 + vocab_size * self.d_model


MODEL_SIZES = tuple(
    ModelSize(*size)
    for size in (
        (64, 2), (96, 3), (128, 4), (192, 4), (256, 6), (384, 6), (512, 8), (640, 10), (768, 12), (1024, 16), (1536, 20)
    )
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Device that trains: its speed for this purpose, its free memory and its description."""

    flops_per_second: float
    free_bytes: int | None
    is_gpu: bool
    description: str


class AutoRecipe(NamedTuple):
    """A recipe as a table, and one line that says what was chosen."""

    table: dict[str, Any]
    summary: str


def detect_machine(device: str | None = None) -> Machine:
    """The machine that trains on `device`: by default the GPU if there is one."""
    import torch

    from cutaway.argument_checks import resolve_device
    from cutaway.device import free_memory
    from cutaway.train.data.tokenize import num_cores
    from cutaway.train.logging.throughput import peak_flops_per_second

    resolved = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if resolved.type == "cuda":
        flops = (peak_flops_per_second(resolved, "bf16") or DEFAULT_GPU_FLOPS) * GPU_UTILIZATION
        return Machine(flops, free_memory(resolved), True, torch.cuda.get_device_name(resolved))
    cores = min(num_cores(), torch.get_num_threads())
    flops = CPU_FLOPS_PER_CORE * min(cores, MAX_CPU_CORES)
    return Machine(flops, free_memory(resolved), False, f"{cores} CPU core{'s' * (cores > 1)}")


def build_auto_recipe(
    texts: Sequence[str | Path],
    machine: Machine,
    *,
    minutes: float = DEFAULT_MINUTES,
    text_column: str | None = None,
    overrides: Sequence[str] = (),
) -> AutoRecipe:
    """Build the recipe for files or directories with text. The result depends on the arguments only.

    `overrides` are not applied, but if they change training.max_steps, the warm-up and the intervals follow from it.
    """
    if not 0 < minutes < 1e6:
        raise InputError(f"minutes is {minutes:g}; it is the duration of the training, so pass a positive number")
    sources = resolve_text_sources(texts, text_column)
    stats = measure_text(sources)
    if stats.num_bytes < MIN_TEXT_BYTES:
        raise InputError(
            f"'{texts[0]}' has {stats.num_bytes:,} bytes of text, which is too little to train a model; use at least"
            f" {MIN_TEXT_BYTES:,} bytes, better 100,000"
        )
    vocab_size = _choose_vocab_size(stats.num_bytes)
    seq_len = _choose_seq_len(stats.num_bytes, machine)
    validation_split = _choose_validation_split(stats, seq_len, vocab_size)
    bytes_per_token = 1.0 if vocab_size is None else BYTES_PER_BPE_TOKEN
    num_tokens = round(stats.num_bytes * (1 - validation_split) / bytes_per_token)
    batch_size = _choose_batch_size(num_tokens, seq_len, machine)
    size, max_tokens = _choose_size(num_tokens, vocab_size or NUM_BYTE_TOKENS, seq_len, machine, minutes)
    tokens_per_step = batch_size * seq_len
    max_steps = round(min(max_tokens, MAX_EPOCHS * num_tokens) / tokens_per_step)
    max_steps = _overridden_max_steps(overrides) or max(min(max_steps, 1_000_000), MIN_STEPS)
    num_epochs = max_steps * tokens_per_step / num_tokens
    table = {
        "description": f"Chosen for {', '.join(map(str, texts))[:200]}",
        "purpose": "pretrain",
        "model": _model_table(size, seq_len, dropout=0.1 if num_epochs > 4 else 0.0),
        "data": {
            "sources": [source.model_dump(exclude_defaults=True) for source in sources],
            "tokenizer": {"kind": "bytes"} if vocab_size is None else {"kind": "bpe", "vocab_size": vocab_size},
            "seq_len": seq_len,
            "validation_split": validation_split,
        },
        "optimizer": {"kind": "muon", "lr": 3e-3 * min(1.0, 256 / size.d_model)},
        "schedule": {
            "kind": "warmup-stable-decay",
            "warmup_steps": max(1, min(100, max_steps // 10)),
            "min_lr_ratio": 0.0,
            "decay_ratio": 0.5,
        },
        "training": {"max_steps": max_steps, "batch_size": batch_size, "seed": SEED}
        | ({"precision": "bf16"} if machine.is_gpu else {}),
        "eval": {"interval": max(1, max_steps // 10), "sample_prompts": [stats.first_words]},
        "checkpoint": {"interval": max(1, max_steps // 10), "export": "best"},
    }
    seconds = tokens_per_step * _flops_per_token(size, vocab_size, seq_len) / machine.flops_per_second
    tokenizer = "bytes as tokens" if vocab_size is None else f"BPE with {vocab_size:,} tokens"
    summary = (
        f"{format_si(stats.num_bytes, 'B', digits=3)} of text: a decoder with"
        f" {format_count(size.num_parameters(vocab_size or NUM_BYTE_TOKENS), digits=3)} parameters ("
        f"{size.layers} layers, d_model {size.d_model}), {tokenizer},"
        f" {max_steps:,} steps of {batch_size} × {seq_len} tokens"
        f" ({num_epochs:.2g} epochs), {_format_duration(max_steps * (seconds + STEP_SECONDS))} on {machine.description}"
    )
    return AutoRecipe(table, summary)


def _overridden_max_steps(overrides: Sequence[str]) -> int | None:
    """Value of training.max_steps in the overrides. None if there is none, or if it is invalid."""
    given: dict[str, Any] = {}
    for override in overrides:
        if override.partition("=")[0].strip() == "training.max_steps":
            apply_override(given, override)
    max_steps = given.get("training", {}).get("max_steps")
    return max_steps if isinstance(max_steps, int) and 0 < max_steps < 2**31 else None


def _model_table(size: ModelSize, seq_len: int, dropout: float) -> dict[str, Any]:
    return {
        "form": "decoder",
        "d_model": size.d_model,
        "context": seq_len,
        "decoder": {
            "layers": size.layers,
            "norm": {"kind": "rmsnorm"},
            "dropout": dropout,
            "block": {
                "attention": {"heads": size.num_heads, "position": {"kind": "rope"}},
                "ffn": {"kind": "gated", "hidden": 32 * round(size.d_model * 8 / 3 / 32)},
            },
        },
    }


def _choose_vocab_size(num_bytes: int) -> int | None:
    """Vocabulary size of the BPE tokenizer. None: the byte tokenizer."""
    sizes = ((50_000, None), (300_000, 1024), (3_000_000, 2048), (300_000_000, 4096), (3_000_000_000, 16384))
    return next((vocab_size for limit, vocab_size in sizes if num_bytes < limit), 32768)


def _choose_seq_len(num_bytes: int, machine: Machine) -> int:
    if num_bytes < 50_000:
        return 64 if num_bytes < 10_000 else 128
    return 1024 if machine.is_gpu and num_bytes > 10_000_000 else 256


def _choose_batch_size(num_tokens: int, seq_len: int, machine: Machine) -> int:
    """A step has 4,096 tokens on a CPU and 65,536 on a GPU, but an epoch has at least MIN_STEPS_PER_EPOCH steps."""
    tokens_per_step = min(65_536 if machine.is_gpu else 4096, num_tokens // MIN_STEPS_PER_EPOCH)
    return max(2, tokens_per_step // seq_len)


def _choose_validation_split(stats: TextStats, seq_len: int, vocab_size: int | None) -> float:
    """The smallest fraction for which both splits have some sequences. Only documents of a small text are counted."""
    if stats.num_bytes > 1_000_000 and len(stats.documents) > 100:
        return 0.05
    # Repetitive text has long BPE tokens.
    needed = (seq_len + 1) * (1 if vocab_size is None else 8)
    total = sum(size for _, size in stats.documents)
    for validation_split in (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5):
        validation = stats.validation_bytes(validation_split, SEED)
        if max(needed, MIN_VALIDATION_SHARE * total) <= validation <= total - 2 * needed:
            return validation_split
    num_different = len({key for key, _ in stats.documents})
    raise InputError(
        f"the text has {len(stats.documents)} documents, {num_different} of them different, which cannot be divided"
        " into a training and a validation split with enough text each; add text, or divide it into more documents,"
        " e.g. the lines of a .jsonl file"
    )


def _flops_per_token(size: ModelSize, vocab_size: int | None, seq_len: int) -> int:
    """FLOPs of forward and backward pass per token: 6 per parameter, and those of causal attention."""
    return 6 * (size.num_parameters(vocab_size or NUM_BYTE_TOKENS) + size.layers * size.d_model * seq_len)


def _choose_size(
    num_tokens: int, vocab_size: int, seq_len: int, machine: Machine, minutes: float
) -> tuple[ModelSize, float]:
    """The largest suitable model, and the number of tokens on which it can be trained in the given time."""
    chosen = MODEL_SIZES[0]
    max_bytes = float("inf") if machine.free_bytes is None else machine.free_bytes / 3
    flops = machine.flops_per_second * minutes * 60
    for size in MODEL_SIZES:
        num_parameters = size.num_parameters(vocab_size)
        if (
            flops / _flops_per_token(size, vocab_size, seq_len) >= MIN_TOKENS_PER_PARAMETER * num_parameters
            and num_parameters <= MAX_PARAMETERS_PER_TOKEN * num_tokens
            and num_parameters * TRAINING_BYTES_PER_PARAMETER <= max_bytes
        ):
            chosen = size
    return chosen, flops / _flops_per_token(chosen, vocab_size, seq_len)


def _format_duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 90:
        return "a few seconds" if seconds < 15 else "about half a minute" if seconds < 45 else "about a minute"
    return f"about {minutes} minutes" if minutes < 90 else f"about {seconds / 3600:.1f} hours"
