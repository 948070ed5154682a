"""Recipe schema (pydantic): model, data, objective, optimizer, schedule, training, parallel, eval, checkpoint."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, NonNegativeFloat, NonNegativeInt, Tag, TypeAdapter, model_validator

from cutaway.config import Config
from cutaway.config import config as read_config
from cutaway.config.lora import LoRA
from cutaway.config.node import KIND_DISCRIMINATOR, ConfigNode, PositiveFloat, PositiveInt, Probability, default_kind
from cutaway.errors import ConfigError
from cutaway.train.recipe.grpo import GRPOConfig
from cutaway.train.recipe.preference_objectives import DPOConfig, KTOConfig, ORPOConfig
from cutaway.train.recipe.task_objectives import (
    ClassificationConfig,
    EmbeddingConfig,
    MultipleChoiceConfig,
    RewardConfig,
    TokenClassificationConfig,
)

STDLIB_PATH = "python-stdlib"
"""Value of `data.sources[].path` for the source code of Python's standard library."""


class ByteTokenizerConfig(ConfigNode):
    """Byte tokenizer: every byte is a token."""

    kind: Literal["bytes"] = "bytes"


class BPETokenizerConfig(ConfigNode):
    """Byte-level BPE tokenizer, trained on the data."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: PositiveInt = 4096


class PretrainedTokenizerConfig(ConfigNode):
    """Tokenizer loaded from a directory."""

    kind: Literal["pretrained"] = "pretrained"
    path: str


TokenizerConfig = Annotated[
    Annotated[ByteTokenizerConfig | BPETokenizerConfig | PretrainedTokenizerConfig, KIND_DISCRIMINATOR],
    default_kind("bytes"),
]


class SourceConfig(ConfigNode):
    """A text source: a file, a directory of files, or the source code of Python's standard library."""

    path: str = STDLIB_PATH
    """A file, a directory, or 'python-stdlib'. Empty in a recipe for which `--text` must be passed."""
    text_column: str = "text"
    """Column with the text, in JSON Lines, Parquet or TSV files."""
    target_column: str | None = None
    """Column with the target, for the objectives seq2seq and prefix-lm, or with the label of a task head."""
    group_column: str | None = None
    """Column with a group name. All documents of a group are in the same split, training or validation. Without this
    column, each document is assigned to a split on its own."""
    weight: PositiveFloat | None = None
    """Sampling weight relative to the other sources. If no source has a weight, sources are sampled in proportion to
    their length. If some have a weight, the others have weight 1."""

    distill: bool = True
    """For the objective distillation: use the teacher's distribution as a target. False for text outside the teacher's
    domain, where only the text's tokens are targets."""

    @property
    def columns(self) -> list[str]:
        """Columns that every row of a JSON Lines, Parquet or TSV file must have."""
        return [self.text_column, *(column for column in (self.target_column, self.group_column) if column is not None)]


class DataConfig(ConfigNode):
    """Sources, tokenizer, sequence length and validation split."""

    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1)] = (SourceConfig(),)
    tokenizer: TokenizerConfig | None = None
    """Default: the byte tokenizer, or the tokenizer of the checkpoint that is fine-tuned."""
    chat_template: str | None = None
    """Chat template for objective sft, which is saved with the model: the name of a shipped template (chatml, llama-3,
    plain, alpaca, zephyr), the path of a file, or a Jinja template. Default: the template of the tokenizer, or the
    first shipped one whose special tokens the tokenizer has."""
    seq_len: PositiveInt = 256
    """Number of tokens per sequence."""
    document_mask: bool = True
    """In packed sequences, restrict attention to tokens of the same document."""
    validation_split: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Fraction of the documents used for validation."""


class LossTermsConfig(ConfigNode):
    """Terms that are added to the cross-entropy of every objective."""

    z_loss_coef: NonNegativeFloat = 0.0
    """Coefficient of the z-loss, the squared logsumexp of the logits, which keeps logits from drifting."""
    aux_loss_coef: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing auxiliary loss of a mixture of experts; 0.01 is usual."""


class CausalLMConfig(LossTermsConfig):
    """Next-token prediction (causal language modeling)."""

    kind: Literal["causal-lm"] = "causal-lm"


class DistillationConfig(LossTermsConfig):
    """Next-token prediction with a teacher, whose distribution of the next token is a target beside the text."""

    kind: Literal["distillation"] = "distillation"
    teacher: str
    """Checkpoint of the teacher, a decoder: a checkpoint directory, a run directory, a .gguf file or a Hugging Face Hub
    id. Its tokenizer may differ from the tokenizer of the recipe."""
    kd_ratio: Probability = 0.5
    """Weight of the divergence from the teacher's distribution; 1 − kd_ratio is the weight of the cross-entropy."""


class MaskedLMConfig(LossTermsConfig):
    """Masked language modeling: some tokens are masked and predicted from the others."""

    kind: Literal["masked-lm"] = "masked-lm"
    mlm_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Fraction of the tokens that are masked."""
    span_masking: bool = False
    """Mask spans of adjacent tokens instead of single tokens."""


class Seq2SeqConfig(LossTermsConfig):
    """Sequence to sequence: each target token is predicted from the source and the preceding target tokens."""

    kind: Literal["seq2seq"] = "seq2seq"
    label_smoothing: Probability = 0.0
    """Probability mass distributed uniformly over the vocabulary in the target distribution."""


class PrefixLMConfig(LossTermsConfig):
    """Prefix language modeling: a decoder reads the source, e.g. a prompt, and predicts the target, e.g. its answer."""

    kind: Literal["prefix-lm"] = "prefix-lm"
    bidirectional_prefix: bool = False
    """Use bidirectional attention within the source, instead of causal attention."""
    label_smoothing: Probability = 0.0


class SFTConfig(LossTermsConfig):
    """Supervised fine-tuning on conversations, prompts with completions, or texts.

    The loss is the mean over all target tokens of a batch.
    """

    kind: Literal["sft"] = "sft"
    train_on: Literal["assistant", "all"] = "assistant"
    """Target tokens: those that the assistant generates, including the token that ends its turn, and completions; or
    all tokens."""
    packing: bool = False
    """Put several records into one sequence of up to data.seq_len tokens, which avoids padding. training.batch_size
    then counts such sequences. With data.document_mask, the loss is the same as without packing."""
    truncation: Literal["right", "drop"] = "right"
    """Handling of records with more than data.seq_len + 1 tokens: 'right' removes the tokens at the end, 'drop' leaves
    out the record."""


ObjectiveConfig = Annotated[
    Annotated[
        CausalLMConfig
        | DistillationConfig
        | MaskedLMConfig
        | Seq2SeqConfig
        | PrefixLMConfig
        | SFTConfig
        | ClassificationConfig
        | TokenClassificationConfig
        | MultipleChoiceConfig
        | EmbeddingConfig
        | RewardConfig
        | GRPOConfig
        | DPOConfig
        | KTOConfig
        | ORPOConfig,
        KIND_DISCRIMINATOR,
    ],
    default_kind("causal-lm"),
]


class AdamWConfig(ConfigNode):
    """AdamW (Loshchilov and Hutter, 2019)."""

    kind: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 1e-3
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    state_dtype: Literal["fp32", "int8"] = "fp32"
    """Dtype of the two moments. 'int8': 8-bit codes with a scale per 256 values, which take a quarter of the memory."""


class MuonConfig(ConfigNode):
    """Muon (Jordan, 2024), which orthogonalizes momentum, for weight matrices in layers. Other parameters use AdamW."""

    kind: Literal["muon"] = "muon"
    lr: PositiveFloat = 1e-3
    momentum: Probability = 0.95
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1


class AdafactorConfig(ConfigNode):
    """Adafactor (Shazeer and Stern, 2018), which stores only row and column averages of a matrix's second moment."""

    kind: Literal["adafactor"] = "adafactor"
    lr: PositiveFloat = 1e-2
    weight_decay: NonNegativeFloat = 0.0


class SGDConfig(ConfigNode):
    """SGD with momentum."""

    kind: Literal["sgd"] = "sgd"
    lr: PositiveFloat = 0.1
    momentum: Probability = 0.9
    weight_decay: NonNegativeFloat = 0.0


OptimizerConfig = Annotated[
    Annotated[AdamWConfig | MuonConfig | AdafactorConfig | SGDConfig, KIND_DISCRIMINATOR], default_kind("adamw")
]


class ScheduleConfig(ConfigNode):
    """Learning rate schedule: the factor by which the learning rate is multiplied at each step."""

    kind: Literal["cosine", "linear", "warmup-stable-decay", "inverse-sqrt", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 20
    """Number of steps of linear warm-up to factor 1. The factor of the first step is 1 / warmup_steps."""
    warmup_ratio: Probability | None = None
    """Fraction of all steps that are warm-up steps. It sets warmup_steps, unless the recipe sets warmup_steps."""
    min_lr_ratio: Probability = 0.1
    """Factor at the end of the decay."""
    decay_ratio: Probability = 0.2
    """For 'warmup-stable-decay': the fraction of all steps, at the end of the run, during which the factor decays."""


Precision = Literal["auto", "fp32", "bf16", "fp16", "float8"]
Quantization = Literal["none", "nf4", "int8"]


class Float8Config(ConfigNode):
    """float8 training with torchao, for `training.precision = "float8"`."""

    recipe_name: Literal["tensorwise", "rowwise"] = "tensorwise"
    """torchao's name for the scales of the fp8 values: one per tensor, or one per row of each operand of a product."""
    emulate: bool = False
    """Compute the products in fp32, from values rounded to fp8. This needs no fp8 hardware and is slower than bf16."""


class TrainingConfig(ConfigNode):
    """Number of steps, batch size, precision, gradient handling."""

    max_steps: PositiveInt = 200
    num_epochs: PositiveFloat | None = None
    """Number of passes over the training data. It sets max_steps when the data has been read, unless the recipe sets
    max_steps."""
    batch_size: PositiveInt = 16
    """Number of sequences per step, over all processes."""
    grad_accum_steps: PositiveInt = 1
    """Number of micro-batches per step. They are processed one after another, which needs less memory and computes the
    same step."""
    grad_clip: PositiveFloat = 1.0
    """Maximum gradient norm. A gradient with a larger norm is scaled down to it."""
    precision: Precision = "fp32"
    """Dtype of matrix products (autocast). Weights stay fp32. fp16 uses loss scaling and skips steps that overflow.
    'float8': bf16, with fp8 products in the linear layers of blocks, which needs torchao and a GPU with fp8. 'auto':
    bf16 on a GPU that computes in bf16, otherwise fp32."""
    float8: Float8Config | None = None
    """Options of float8 training. None: their defaults."""
    ema_decay: Probability | None = None
    """Decay of an exponential moving average of the weights, which is evaluated and exported instead of the weights.
    None: no average."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes instead of storing them: none, those that are cheap to recompute,
    or those of whole blocks."""
    activation_checkpointing_layers: PositiveInt | None = None
    """Number of layers of each stack, from the first, that activation_checkpointing applies to. Each layer more takes
    less memory and more time. Default: all."""
    compile: bool | None = None
    """Compile the blocks with torch.compile. Default: true on a GPU, unless objective.aux_loss_coef is set."""
    on_grad_spike: Literal["skip", "continue"] = "skip"
    """Handling of a step whose gradient norm is far above the running average: 'skip' leaves the weights unchanged,
    'continue' updates them."""
    preflight: bool = True
    """Check the model before the first step. It is an error if the model attends to future tokens."""
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check_activation_checkpointing(self) -> "TrainingConfig":
        if self.activation_checkpointing_layers is not None and self.activation_checkpointing == "none":
            raise ValueError(
                f"activation_checkpointing_layers is {self.activation_checkpointing_layers}, but"
                " activation_checkpointing is 'none'; set it to 'full', or remove activation_checkpointing_layers"
            )
        return self

    @model_validator(mode="after")
    def _check_float8(self) -> "TrainingConfig":
        if self.float8 is not None and self.precision != "float8":
            raise ValueError(
                f"float8 is set, but precision is '{self.precision}'; set precision to 'float8', or remove float8"
            )
        return self


class ParallelConfig(ConfigNode):
    """Parallelism across the processes started by torchrun.

    The number of data-parallel replicas is the number of processes divided by dp_shard · tp.
    """

    dp_shard: PositiveInt | Literal["all"] = 1
    """Number of processes that share one copy of weights, gradients and optimizer state (FSDP2). With 1, each process
    has a full copy (DDP). 'all' is the number of processes divided by tp."""
    tp: PositiveInt = 1
    """Number of tensor-parallel processes, which split each weight matrix and process the same sequences."""


class EarlyStoppingConfig(ConfigNode):
    """Stop the run when eval_loss no longer improves."""

    patience: PositiveInt = 3
    """Number of consecutive evaluations without improvement after which the run stops."""
    min_delta: NonNegativeFloat = 0.0
    """An evaluation is an improvement if its eval_loss is lower by more than min_delta than at the last improvement."""


class EvalConfig(ConfigNode):
    """Evaluation during training. A fine-tuning run is also evaluated before its first step."""

    interval: PositiveInt = 50
    """Number of steps between evaluations."""
    num_sequences: PositiveInt = 64
    """Number of validation sequences per evaluation."""
    sample_prompts: tuple[str, ...] = ()
    """Prompts from which samples are generated at each evaluation. A decoder continues the prompt, or answers it if its
    tokenizer has a chat template; an encoder fills the masks in the prompt; an encoder-decoder uses the prompt as its
    source. `sample_prompt` sets a single prompt."""
    num_exact_match: NonNegativeInt = 64
    """Number of source-target pairs per evaluation for which an output is generated and compared with the target."""
    early_stopping: EarlyStoppingConfig | None = None
    """Stop before training.max_steps if eval_loss no longer improves. None: never."""
    general_text: str | None = None
    """Text file for `general_loss`, the loss on a general text before, during and after the fine-tuning of a decoder.
    A rise shows that the model forgets what it could do before. Default: a short English text that is part of cutaway.
    Empty: no general_loss."""

    @model_validator(mode="before")
    @classmethod
    def _read_single_prompt(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "sample_prompt" not in data:
            return data
        prompt = data["sample_prompt"]
        rest = {key: value for key, value in data.items() if key != "sample_prompt"}
        return rest | {"sample_prompts": () if prompt is None else (prompt,)}


class CheckpointConfig(ConfigNode):
    """Number of steps between checkpoints, and number of checkpoints and snapshots that are kept."""

    interval: PositiveInt = 50
    keep: PositiveInt = 2
    num_snapshots: NonNegativeInt | None = None
    """Number of snapshots: files with the weights only, at step 0 and at logarithmically spaced steps, that are kept to
    inspect them with `cutaway open RUN`. A snapshot has 4 bytes per parameter. Sharded models have none. Default: 12
    for models of up to 30 million parameters, otherwise 0."""
    export: Literal["last", "best"] = "last"
    """Weights that are exported at the end of the run: those of the last step, or those with the lowest eval_loss. With
    'best', a checkpoint is also saved at each evaluation with a new lowest eval_loss."""


class WandbConfig(ConfigNode):
    """Weights & Biases run. Set the environment variable WANDB_MODE=offline to log without a network connection."""

    project: str = "cutaway"
    name: str | None = None
    """Name of the run. Default: the name of the run directory."""


class LoggingConfig(ConfigNode):
    """Loggers in addition to metrics.jsonl in the run directory."""

    tensorboard: bool = False
    """Write metrics to TensorBoard event files too."""
    wandb: WandbConfig | None = None
    """Log metrics to Weights & Biases too."""


class PretrainedModelConfig(ConfigNode):
    """A pretrained checkpoint to fine-tune. Weights, config and tokenizer come from the checkpoint."""

    checkpoint: str
    """A checkpoint directory, a run directory, a .gguf file or a Hugging Face Hub id."""
    adapter: LoRA | None = None
    """Train a LoRA adapter instead of the weights of the checkpoint. The run exports the adapter in PEFT's format."""
    quantization: Quantization = "none"
    """Store the frozen linear layers of the checkpoint in 4 bits (nf4) or 8 bits (int8); requires `adapter` (QLoRA)."""

    @model_validator(mode="after")
    def _check_quantization(self) -> "PretrainedModelConfig":
        if self.quantization != "none" and self.adapter is None:
            raise ValueError(
                f"quantization is {self.quantization}, but quantized weights cannot be trained; set model.adapter, or"
                " remove model.quantization"
            )
        return self


def _model_source_tag(value: object) -> str:
    """Discriminator of `ModelSource`. A table with the key `checkpoint` becomes a `PretrainedModelConfig`."""
    if isinstance(value, str):
        return "preset"
    is_pretrained = isinstance(value, PretrainedModelConfig) or (isinstance(value, Mapping) and "checkpoint" in value)
    return "pretrained" if is_pretrained else "config"


ModelSource = Annotated[
    Annotated[str, Tag("preset")]
    | Annotated[PretrainedModelConfig, Tag("pretrained")]
    | Annotated[dict[str, Any], Tag("config")],
    Discriminator(_model_source_tag),
]


Purpose = Literal["pretrain", "fine-tune", "align", "classify", "embed"]
"""What a recipe is for: training from scratch, fine-tuning a checkpoint, preference learning and reinforcement
learning, task heads (classification, regression), sentence embeddings."""


class Recipe(ConfigNode):
    """Description of a training run."""

    description: str = ""
    """One line for `cutaway train --list`. It has no effect on training."""
    purpose: Purpose | None = None
    """Group of the recipe in `cutaway train --list`. It has no effect on training."""
    model: ModelSource = "tiny-gpt"
    """A preset name, a config table, or a checkpoint to fine-tune. The vocab_size of a preset is replaced by that of
    the tokenizer. A config table needs no vocab_size; one that is larger than the tokenizer is kept, as padding."""
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = CausalLMConfig()
    optimizer: OptimizerConfig = AdamWConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig = TrainingConfig()
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _check_float8(self) -> "Recipe":
        if self.training.precision != "float8":
            return self
        use_bf16 = "use training.precision = 'bf16'"
        if isinstance(self.model, PretrainedModelConfig) and self.model.adapter is not None:
            raise ValueError(
                "training.precision = 'float8' cannot be used with model.adapter, because a layer with an adapter"
                f" computes its products with the frozen weight in the dtype of that weight; {use_bf16}, or remove"
                " model.adapter"
            )
        if isinstance(self.objective, DPOConfig | KTOConfig | GRPOConfig):
            raise ValueError(
                f"training.precision = 'float8' cannot be used with objective {self.objective.kind}, which compares"
                " log-probabilities of the model in training with those of a model in bf16: they would differ by the"
                f" rounding to fp8 alone; {use_bf16}"
            )
        if self.parallel.tp > 1:
            raise ValueError(
                f"training.precision = 'float8' cannot be used with parallel.tp = {self.parallel.tp}, whose ranks"
                f" multiply parts of the weights; {use_bf16}, or set parallel.tp = 1 and use parallel.dp_shard"
            )
        return self

    @property
    def transformer_config(self) -> Config:
        """Config of the model, if it is trained from scratch. Raises ConfigError if it is a checkpoint to fine-tune.

        A BPE tokenizer is assumed to have as many tokens as the recipe says; it has fewer if the text is small.
        """
        return read_model_config(self.model, self._nominal_vocab_size)

    @property
    def _nominal_vocab_size(self) -> int:
        """Number of tokens of the recipe's tokenizer before it is trained. That of a tokenizer on disk is not read."""
        if isinstance(self.data.tokenizer, BPETokenizerConfig):
            return self.data.tokenizer.vocab_size
        return NUM_BYTE_TOKENS + isinstance(self.objective, MaskedLMConfig)


NUM_BYTE_TOKENS = 256 + 3
"""Number of tokens of the byte tokenizer: all bytes, BOS, EOS and padding."""


def read_model_config(source: ModelSource, vocab_size: int) -> Config:
    """Config of a model trained from scratch. Raises ConfigError if the model is a checkpoint to fine-tune.

    `vocab_size` is that of the tokenizer. It replaces the vocab_size of a preset, and is the default of a config table.
    A larger vocab_size in a table stays: the additional ids are padding.
    """
    if isinstance(source, PretrainedModelConfig):
        raise ConfigError(
            "the recipe fine-tunes a checkpoint, so it has no model config; set model to a preset or a config table"
        )
    if isinstance(source, str):
        return read_config(source).replace(vocab_size=vocab_size)
    config = read_config({"vocab_size": vocab_size} | source)
    if config.vocab_size < vocab_size:
        raise ConfigError(
            f"model.vocab_size is {config.vocab_size:,}, but the tokenizer has {vocab_size:,} tokens; remove"
            " model.vocab_size, so that it follows from the tokenizer, or raise it"
        )
    return config


RECIPE_ADAPTER = TypeAdapter(Recipe)


def recipe_json_schema() -> dict[str, object]:
    """JSON schema of `Recipe`, for completion and validation in editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | RECIPE_ADAPTER.json_schema()
