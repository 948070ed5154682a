"""One question, one answer: what a configuration costs, to hold, to run and to train."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from cutaway.config.transformer import Config, Encoder
from cutaway.size import memory as bytes_of
from cutaway.size.budget import Budget, budget
from cutaway.size.cache import KVCache, kv_cache
from cutaway.size.calibration import efficiency_of
from cutaway.size.flops import Flops, flops_of
from cutaway.size.hardware import Hardware
from cutaway.size.memory import Memory
from cutaway.size.parallel import Devices, tensor_share
from cutaway.size.params import Params, count
from cutaway.size.question import RECOMPUTE, Question, ask
from cutaway.size.roofline import Bound, Work, bound, decode_work, prefill_work, train_work, turning_batch
from cutaway.size.tensors import Stored, stored
from cutaway.size.walk import Pass, Setting, read, train

read_once = lru_cache(maxsize=32)(read)
"""Questions that differ in batch or device share these."""


class Size:
    """The answers; each is computed when it is first asked for."""

    def __init__(self, question: Question) -> None:
        self.question = question

    # ------------------------------------------------------------------------------------ what it is

    @cached_property
    def parameters(self) -> Params:
        """Exact counts by part and layer."""
        return count(self.question.config)

    @property
    def params(self) -> int:
        """Every parameter once."""
        return self.parameters.total

    @cached_property
    def stored(self) -> Stored:
        """What a checkpoint of it holds."""
        return stored(self.question.config, self.question.dtype)

    # ------------------------------------------------------------------------------------ one device's part of the work

    @property
    def on_gpu(self) -> bool:
        device = self.question.hardware
        return device is None or device.kind not in ("cpu", "apple")

    @cached_property
    def share(self) -> Config:
        """The model as one device has it."""
        return tensor_share(self.question.config, self.question.devices.tensor)

    @property
    def replicas(self) -> int:
        """Devices between which the batch is split."""
        return self.question.devices.readers

    @property
    def batch(self) -> int:
        """Sequences on one device."""
        return self.question.batch // self.replicas

    def setting(self, recompute: str = "none") -> Setting:
        asked = self.question
        device = "cuda" if self.on_gpu else "cpu"
        how: Any = {"kernel": asked.kernel, "recompute": recompute, "device": device}
        return asked.dtype.setting(asked.devices, narrow=asked.loss == "chunked", **how)

    # ------------------------------------------------------------------------------------ FLOPs

    @cached_property
    def reading(self) -> Pass:
        """A sequence of `context` tokens, read at once, on one device."""
        return read_once(self.share, 1, self.question.context, self.setting(), source=self.question.source)

    @cached_property
    def decoding(self) -> Pass:
        """The token that makes a sequence `context` long, on one device."""
        past = self.question.context - 1
        return read_once(self.share, 1, 1, self.setting(), source=self.question.source, past=past, source_read=True)

    @cached_property
    def step(self) -> Pass:
        """A training step on one device."""
        asked = self.question
        setting = self.setting(asked.checkpointing)
        how: Any = {"source": asked.source, "loss": asked.loss, "packed": asked.packed}
        return train(self.share, self.batch, asked.context, setting, **how)

    @cached_property
    def whole(self) -> "Size":
        """The same question for one device that holds the whole model."""
        asked = self.question
        if asked.devices.tensor == 1:
            return self
        one = Devices(asked.devices.copies, asked.devices.shards)
        return Size(replace(asked, gpus=one.readers, parallel="data", devices=one))

    @cached_property
    def forward_flops(self) -> Flops:
        """Of one sequence of `context` tokens."""
        return flops_of(self.whole.reading.tally, self.question.context)

    @cached_property
    def decode_flops(self) -> Flops | None:
        """Of the token that makes a sequence `context` long."""
        return None if isinstance(self.question.config, Encoder) else flops_of(self.whole.decoding.tally, 1)

    @cached_property
    def train_flops(self) -> dict[str, Flops]:
        """Of one sequence, there and back, by recompute mode."""
        asked = self.question
        one = (
            self.whole.step
            if self.whole.batch == 1
            else train(asked.config, 1, asked.context, self.setting(), source=asked.source)
        )
        return {mode: flops_of(one.tally, asked.context, recompute=mode) for mode in RECOMPUTE}

    @property
    def flops(self) -> Flops:
        """Of one sequence: reading it, or training on it."""
        asked = self.question
        return self.train_flops[asked.checkpointing] if asked.mode == "train" else self.forward_flops

    # ------------------------------------------------------------------------------------ memory

    @cached_property
    def cache(self) -> KVCache:
        asked = self.question
        return kv_cache(self.share, batch=self.batch, context=asked.context, source=asked.source, dtype=asked.kv_dtype)

    @cached_property
    def serving(self) -> Memory:
        asked = self.question
        encoder = isinstance(asked.config, Encoder)
        source = asked.source if len(asked.config.stacks) == 2 else 1
        ways = bytes_of.pieces(self.batch, asked.context, source, whole=encoder)
        read_so = (
            read(self.share, rows, length, self.setting(), source=source, past=past, serving=not encoder)
            for rows, length, past, source in ways
        )
        fullest = max(read_so, key=lambda each: each.peak)
        return bytes_of.serving(self.share, asked.dtype, self.cache, fullest, on_gpu=self.on_gpu)

    @cached_property
    def training(self) -> Memory:
        asked = self.question
        where: Any = {"on_gpu": self.on_gpu, "devices": asked.devices}
        return bytes_of.training(self.share, asked.dtype, asked.optimizer, self.step, **where)

    @property
    def collectives(self) -> dict[str, tuple[int, int]]:
        """Of a training step, by kind: how many, and bytes, of a whole that is given or taken in parts."""
        return {kind: (many, self.step.tally.sent_bytes[kind]) for kind, many in self.step.tally.sent.items()}

    @property
    def memory(self) -> Memory:
        """On one device, in the mode that was asked for."""
        return self.training if self.question.mode == "train" else self.serving

    @property
    def fits(self) -> bool | None:
        """Whether the device holds it; None where no memory is known."""
        device = self.question.hardware
        return None if device is None or device.memory is None else self.memory.total <= device.memory

    # ------------------------------------------------------------------------------------ time

    @property
    def prompt_flops(self) -> Flops:
        """Of reading a sequence on one device when only its last token's logits are wanted, as in serving."""
        every = flops_of(self.reading.tally, self.question.context)
        return every if isinstance(self.question.config, Encoder) else every.head_once()

    @cached_property
    def prefill_time(self) -> Bound | None:
        asked = self.question
        if asked.hardware is None:
            return None
        tokens = self.batch * asked.context
        work = prefill_work(
            self.share,
            asked.dtype,
            self.prompt_flops.times(self.batch),
            tokens=tokens,
            cache=self.cache.bytes,
            launches=self.reading.steps,
            devices=self.replicas,
        )
        return bound(work, asked.hardware, asked.dtype, efficiency_of(work.name, asked.hardware, asked.dtype.name))

    def decode_work(self, batch: int) -> Work:
        """A step of decoding for so many sequences on one device."""
        return decode_work(
            self.share,
            self.question.dtype,
            flops_of(self.decoding.tally, 1).times(batch),
            batch=batch,
            cache=batch * (self.cache.bytes // self.cache.batch),
            logits=batch * self.decoding.logits,
            launches=self.decoding.steps,
            devices=self.replicas,
        )

    @cached_property
    def decode_time(self) -> Bound | None:
        asked = self.question
        if asked.hardware is None or isinstance(asked.config, Encoder):
            return None
        efficiency = efficiency_of("decode", asked.hardware, asked.dtype.name)
        return bound(self.decode_work(self.batch), asked.hardware, asked.dtype, efficiency)

    @cached_property
    def turning_batch(self) -> int | None:
        """Sequences on one device at which decoding turns from bandwidth-bound to compute-bound, if it ever does."""
        return None if self.decode_time is None else turning_batch(self.decode_work, self.decode_time.ridge)

    @cached_property
    def train_time(self) -> Bound | None:
        asked = self.question
        if asked.hardware is None:
            return None
        whole = self.training.whole
        work = train_work(
            flops_of(self.step.tally, self.batch * asked.context, recompute=asked.checkpointing),
            weights=whole["weights"],
            gradients=whole["gradients"],
            state=whole["optimizer"],
            tokens=self.batch * asked.context,
            launches=self.step.steps,
            devices=self.replicas,
        )
        return bound(work, asked.hardware, asked.dtype, efficiency_of(work.name, asked.hardware, asked.dtype.name))

    @property
    def time(self) -> Bound | None:
        """A training step, or a step of decoding (reading, for an encoder)."""
        if self.question.mode == "train":
            return self.train_time
        return self.prefill_time if isinstance(self.question.config, Encoder) else self.decode_time

    @cached_property
    def budget(self) -> Budget:
        asked = self.question
        step_flops = asked.batch * self.train_flops[asked.checkpointing].total_seen
        return budget(
            asked.tokens,
            parameters=self.params,
            active=self.parameters.active,
            step_tokens=asked.batch * asked.context,
            step_flops=step_flops,
            gpus=asked.gpus,
            device=asked.hardware,
            bound=self.train_time,
            price=asked.price,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        from cutaway.size.describe import describe

        return describe(self)

    def __repr__(self) -> str:
        asked = self.question
        return f"Size({self.params:,} parameters, {self.memory.total:,} bytes to {asked.mode})"


def size(
    source: Config | Mapping[str, Any] | str | Path,
    *,
    batch: int = 1,
    context: int | None = None,
    dtype: str | None = None,
    mode: str = "infer",
    hardware: Hardware | str | None = None,
    source_length: int | None = None,
    kv_dtype: str | None = None,
    optimizer: str = "adamw",
    checkpointing: str = "none",
    kernel: str = "auto",
    loss: str = "whole",
    packed: bool = False,
    gpus: int = 1,
    parallel: str = "data",
    shards: int | None = None,
    tensor: int | None = None,
    tokens: int | None = None,
    price: float | None = None,
) -> Size:
    """What a model costs before it exists: parameters, FLOPs, bytes and time.

    `batch` counts sequences on all devices together, `context` the tokens of each; `mode` is 'infer' or 'train';
    `dtype` is bf16 to infer and mixed (fp32 weights, bf16 products) to train unless given; `hardware` is a device's
    name, 'here' (as `cutaway bench` measured it), or a Hardware of your own. Of `gpus` devices, `tensor` share each
    matrix and `shards` the states; 'sharded' and 'tensor' are these for all that are left.
    """
    return Size(ask(**locals()))
