"""The recipe of a training run as data: model, data, objective, optimizer, schedule and the rest (pydantic)."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, NonNegativeFloat, NonNegativeInt, Tag, TypeAdapter

from cutaway.config import Config
from cutaway.config import config as read_config
from cutaway.config.node import (
    KIND_DISCRIMINATOR,
    ConfigNode,
    PositiveFloat,
    PositiveInt,
    Probability,
    default_kind,
)
from cutaway.errors import ConfigError

STDLIB_PATH = "python-stdlib"
"""The path that means the source code of Python's own standard library."""


DATES_PATH = "dates"
"""The path that means dates in many languages, as pairs of the fields text and iso."""


class ByteTokenizerConfig(ConfigNode):
    """Every byte is a token."""

    kind: Literal["bytes"] = "bytes"


class BPETokenizerConfig(ConfigNode):
    """Byte-level BPE, trained on the data."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: PositiveInt = 4096


class PretrainedTokenizerConfig(ConfigNode):
    """The tokenizer that lies in a directory."""

    kind: Literal["pretrained"] = "pretrained"
    path: str


class SourceConfig(ConfigNode):
    """Texts: a file, a directory of files, Python's own standard library, or dates in many languages."""

    path: str = STDLIB_PATH
    """Empty in a recipe whose text its user has to name."""
    text_column: str = "text"
    """The column of JSON lines, parquet or TSV that holds the text."""
    target_column: str | None = None
    """The column that holds the answer, for sequence to sequence and prefix."""
    group_column: str | None = None
    """The column whose equal values are learned from or looked at, never both; each document by itself, without."""
    weight: PositiveFloat | None = None
    """How often it is read beside the others; as often as it is long, unless any has a weight."""


class DataConfig(ConfigNode):
    """What is read."""

    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1)] = (SourceConfig(),)
    tokenizer: (
        Annotated[
            Annotated[ByteTokenizerConfig | BPETokenizerConfig | PretrainedTokenizerConfig, KIND_DISCRIMINATOR],
            default_kind("bytes"),
        ]
        | None
    ) = None
    """Bytes, unless given; or that of the checkpoint which is trained further."""
    seq_len: PositiveInt = 256
    """Tokens of a sequence."""
    document_mask: bool = True
    """Whether a text sees only itself where several stand in a sequence."""
    validation_split: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The share of documents that is kept for looking at."""


class CausalLMConfig(ConfigNode):
    """Every token says the next one."""

    kind: Literal["causal-lm"] = "causal-lm"
    z_loss_coef: NonNegativeFloat = 0.0
    """Weight of logsumexp², which keeps logits from drifting."""
    aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of how unevenly a mixture of experts uses them; 0.01 is usual."""


class MaskedLMConfig(ConfigNode):
    """Some tokens are hidden, and must be told from the others."""

    kind: Literal["masked-lm"] = "masked-lm"
    mlm_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    span_masking: bool = False
    """Whether neighbours are hidden together."""
    z_loss_coef: NonNegativeFloat = 0.0
    aux_loss_coef: NonNegativeFloat = 0.0


class Seq2SeqConfig(ConfigNode):
    """The target is told from the source and from itself so far."""

    kind: Literal["seq2seq"] = "seq2seq"
    label_smoothing: Probability = 0.0
    """Of each target's certainty, the share that all tokens get."""
    z_loss_coef: NonNegativeFloat = 0.0
    aux_loss_coef: NonNegativeFloat = 0.0


class PrefixLMConfig(ConfigNode):
    """A decoder reads the source and says the target behind it: prompts and answers."""

    kind: Literal["prefix-lm"] = "prefix-lm"
    bidirectional_prefix: bool = False
    """Whether tokens of the source see those behind them too."""
    label_smoothing: Probability = 0.0
    z_loss_coef: NonNegativeFloat = 0.0
    aux_loss_coef: NonNegativeFloat = 0.0


ObjectiveConfig = Annotated[
    Annotated[CausalLMConfig | MaskedLMConfig | Seq2SeqConfig | PrefixLMConfig, KIND_DISCRIMINATOR],
    default_kind("causal-lm"),
]


class AdamWConfig(ConfigNode):
    """Loshchilov and Hutter, 2019."""

    kind: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 1e-3
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1


class MuonConfig(ConfigNode):
    """Jordan, 2024: the layers' matrices by steps of equal length in all directions; AdamW for the rest."""

    kind: Literal["muon"] = "muon"
    lr: PositiveFloat = 1e-3
    momentum: Probability = 0.95
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1


class AdafactorConfig(ConfigNode):
    """Shazeer and Stern, 2018: a row and a column of averages for each matrix."""

    kind: Literal["adafactor"] = "adafactor"
    lr: PositiveFloat = 1e-2
    weight_decay: NonNegativeFloat = 0.0


class SGDConfig(ConfigNode):
    """With momentum."""

    kind: Literal["sgd"] = "sgd"
    lr: PositiveFloat = 0.1
    momentum: Probability = 0.9
    weight_decay: NonNegativeFloat = 0.0


OptimizerConfig = Annotated[
    Annotated[AdamWConfig | MuonConfig | AdafactorConfig | SGDConfig, KIND_DISCRIMINATOR], default_kind("adamw")
]


class ScheduleConfig(ConfigNode):
    """What the learning rate is multiplied by as steps go by."""

    kind: Literal["cosine", "linear", "warmup-stable-decay", "inverse-sqrt", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 20
    """Steps in which it rises linearly to 1; the first has 1 / warmup_steps."""
    min_lr_ratio: Probability = 0.1
    """What is left at the end."""
    decay_ratio: Probability = 0.2
    """For 'warmup-stable-decay': the share of steps at the end in which it falls."""


class TrainingConfig(ConfigNode):
    """How much is learned, and in what numbers."""

    max_steps: PositiveInt = 200
    batch_size: PositiveInt = 16
    """Sequences of a step."""
    grad_accum_steps: PositiveInt = 1
    """Parts that a step's batch is cut into, one after another: less memory, the same step."""
    grad_clip: PositiveFloat = 1.0
    """The gradient's greatest length."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What products are computed in; weights stay fp32. In fp16 the loss is scaled; what overflows is left out."""
    ema_decay: Probability | None = None
    """How much of a running mean of the weights each step keeps; the mean is then looked at and exported."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What a block computes again on the way back, to hold less meanwhile: nothing, what is cheap, or all of it."""
    compile: bool | None = None
    """Whether blocks are compiled; on a GPU they are, unless told otherwise or objective.aux_loss_coef is set."""
    on_grad_spike: Literal["skip", "continue"] = "skip"
    """What is done with a step whose gradient is far longer than usual."""
    preflight: bool = True
    """Whether the model is asked, before the first step, if it is right; one that sees the future is not trained."""
    seed: NonNegativeInt = 0


class ParallelConfig(ConfigNode):
    """What processes share, where torchrun starts several; beside that each has a copy, and sequences of its own."""

    dp_shard: PositiveInt | Literal["all"] = 1
    """Processes that share weights, gradients and the optimizer's state (FSDP2); with 1, each has all of them (DDP)."""
    tp: PositiveInt = 1
    """Processes that share each matrix, and read the same sequences."""


class EvalConfig(ConfigNode):
    """What is looked at on the way."""

    interval: PositiveInt = 50
    """Steps between two looks at the validation data."""
    num_sequences: PositiveInt = 64
    """How many of it."""
    sample_prompt: str | None = None
    """A text that is continued, answered or filled at each look."""
    num_exact_match: NonNegativeInt = 64
    """Of pairs: how many are answered at each look, and compared with their targets."""


class CheckpointConfig(ConfigNode):
    """What is kept in case of an end."""

    interval: PositiveInt = 50
    keep: PositiveInt = 2


class LoggingConfig(ConfigNode):
    """Loggers of a run, beside its own metrics.jsonl."""

    tensorboard: bool = False
    """Whether metrics are written for TensorBoard too."""


class PretrainedModelConfig(ConfigNode):
    """A model that has learned before: its weights, its settings, its tokenizer."""

    checkpoint: str
    """A directory, a run, a .gguf file or a hub id."""


def _model_source_tag(value: Any) -> str:
    """A table that names a checkpoint says nothing else."""
    if isinstance(value, str):
        return "preset"
    known = isinstance(value, PretrainedModelConfig) or (isinstance(value, Mapping) and "checkpoint" in value)
    return "pretrained" if known else "config"


ModelSource = Annotated[
    Annotated[str, Tag("preset")]
    | Annotated[PretrainedModelConfig, Tag("pretrained")]
    | Annotated[dict[str, Any], Tag("config")],
    Discriminator(_model_source_tag),
]


class Recipe(ConfigNode):
    """A whole run."""

    model: ModelSource = "tiny-gpt"
    """A preset's name or a table of settings, with the tokenizer's vocabulary; or a checkpoint to go on from."""
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = CausalLMConfig()
    optimizer: OptimizerConfig = AdamWConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig = TrainingConfig()
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def transformer_config(self) -> Config:
        """What a model is that begins afresh."""
        if isinstance(self.model, PretrainedModelConfig):
            raise ConfigError(
                "this recipe goes on from a checkpoint; give its model as a preset or a table of settings"
            )
        return read_config(self.model)


RECIPE_ADAPTER = TypeAdapter(Recipe)


def recipe_json_schema() -> dict[str, Any]:
    """The JSON schema of a Recipe, for editors that complete and check."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | RECIPE_ADAPTER.json_schema()
