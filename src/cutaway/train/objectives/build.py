"""Check the objective of a recipe, and build the function that turns a batch into an Objective."""

from typing import Any, get_args

import torch

from cutaway.config import Config
from cutaway.config.ffn import Moe
from cutaway.errors import InputError
from cutaway.families.load import load
from cutaway.tokenizer import Tokenizer
from cutaway.train.objectives.distillation import Teacher, distillation
from cutaway.train.objectives.masked_lm import masked_lm
from cutaway.train.objectives.objective import Objective, ObjectiveFn, causal_lm, prefix_lm, seq2seq, sft
from cutaway.train.objectives.preference import dpo, kto, orpo
from cutaway.train.objectives.reference_model import ReferenceModel
from cutaway.train.objectives.task import build_task_objective
from cutaway.train.recipe.grpo import GRPOConfig
from cutaway.train.recipe.preference_objectives import (
    MIN_KTO_BATCH_SIZE,
    DPOConfig,
    KTOConfig,
    ORPOConfig,
    PreferenceConfig,
)
from cutaway.train.recipe.schema import (
    CausalLMConfig,
    DataConfig,
    DistillationConfig,
    MaskedLMConfig,
    ObjectiveConfig,
    ParallelConfig,
    PrefixLMConfig,
    Recipe,
    Seq2SeqConfig,
    SFTConfig,
    TrainingConfig,
)
from cutaway.train.recipe.task_objectives import MultipleChoiceConfig, RewardConfig, TaskObjectiveConfig

OBJECTIVE_FORMS: dict[type[Any], tuple[str, ...]] = {
    CausalLMConfig: ("decoder",),
    DistillationConfig: ("decoder",),
    MaskedLMConfig: ("encoder",),
    Seq2SeqConfig: ("encoder-decoder",),
    PrefixLMConfig: ("decoder",),
    SFTConfig: ("decoder",),
    MultipleChoiceConfig: ("encoder",),
    RewardConfig: ("decoder",),
    GRPOConfig: ("decoder",),
    DPOConfig: ("decoder",),
    KTOConfig: ("decoder",),
    ORPOConfig: ("decoder",),
}
"""Model forms that an objective requires. Other objectives train encoders and decoders."""


def check_form(objective: ObjectiveConfig, config: Config) -> None:
    """Raise InputError if the objective cannot train a model of this form: encoder, decoder or encoder-decoder."""
    forms = OBJECTIVE_FORMS.get(type(objective), ("encoder", "decoder"))
    if config.form not in forms:
        raise InputError(
            f"objective {objective.kind} requires a model of form {' or '.join(forms)}, but model.form is"
            f" {config.form}; use another model, or an objective for this one:"
            f" {', '.join(_objectives_of_form(config.form))}"
        )


def check_objective(
    objective: ObjectiveConfig, config: Config, training: TrainingConfig, parallel: ParallelConfig
) -> None:
    """Raise InputError if the objective cannot train a model with this config, e.g. masked-lm and a decoder."""
    check_form(objective, config)
    if config.head.kind == "none":
        raise InputError("the model has no output head, so it computes no logits; set model.head.kind = 'lm'")
    if config.head.kind != "lm" and not isinstance(objective, TaskObjectiveConfig):
        raise InputError(
            f"objective {objective.kind} predicts tokens, but the model has a head for {config.head.kind}; use a"
            " checkpoint with an LM head, or an objective for this head, such as classification"
        )
    if isinstance(objective, DistillationConfig) and parallel.tp > 1:
        raise InputError(
            f"objective distillation needs the full vocabulary on each rank, but parallel.tp is {parallel.tp}; set"
            " parallel.tp = 1, and use parallel.dp_shard to save memory"
        )
    if isinstance(objective, PreferenceConfig) and parallel.tp > 1:
        raise InputError(
            f"objective {objective.kind} needs the full vocabulary on each rank, but parallel.tp is {parallel.tp}; set"
            " parallel.tp = 1; without it, several processes train data-parallel"
        )
    if isinstance(objective, KTOConfig) and training.batch_size < MIN_KTO_BATCH_SIZE:
        raise InputError(
            "training.batch_size is 1, but objective kto compares an answer with the other answers of its batch; use at"
            " least 2, with training.grad_accum_steps to save memory"
        )
    blocks = [block for stack in config.stacks.values() for block in stack.blocks]
    if objective.aux_loss_coef and not any(isinstance(block.ffn, Moe) for block in blocks):
        raise InputError(
            f"objective.aux_loss_coef is {objective.aux_loss_coef:g}, but the model has no experts; remove it, or use"
            " a model with ffn.kind = 'moe'"
        )
    if objective.aux_loss_coef and training.compile:
        raise InputError(
            "objective.aux_loss_coef cannot be used with training.compile = true, because it needs forward hooks on the"
            " routers, which compiled blocks do not call; remove one of the two"
        )


def _objectives_of_form(form: str) -> list[str]:
    """Kinds of the objectives that train models of a form, in the order of the recipe schema."""
    union, *_ = get_args(ObjectiveConfig)
    classes = {each.model_fields["kind"].default: each for each in get_args(union)}
    return [kind for kind, each in classes.items() if form in OBJECTIVE_FORMS.get(each, ("encoder", "decoder"))]


def check_grpo(recipe: Recipe, dp_size: int) -> None:
    """Raise InputError if a setting of the recipe cannot be used with objective grpo on `dp_size` processes."""
    objective, parallel, batch_size = recipe.objective, recipe.parallel, recipe.training.batch_size
    assert isinstance(objective, GRPOConfig)
    if parallel.tp > 1 or parallel.dp_shard != 1:
        raise InputError(
            "objective grpo generates with the model in training, which needs all weights on each process; remove"
            " parallel.tp and parallel.dp_shard: several processes then train data-parallel, and model.adapter saves"
            " memory"
        )
    if batch_size < dp_size:
        raise InputError(
            f"training.batch_size is {batch_size} prompts, but each of the {dp_size} processes needs one or more; raise"
            " training.batch_size, or start fewer processes"
        )
    if objective.num_iterations > 1 and dp_size > 1:
        raise InputError(
            "objective.num_iterations above 1 is supported on one process only, because checkpoints store the"
            " completions of one process; set it to 1, or start one process"
        )


def uses_reference_model(objective: ObjectiveConfig) -> bool:
    """Whether the loss of the objective depends on the model before training."""
    return isinstance(objective, DPOConfig | KTOConfig) or (isinstance(objective, GRPOConfig) and objective.beta > 0)


def build_objective_fn(
    objective: ObjectiveConfig,
    data: DataConfig,
    tokenizer: Tokenizer,
    config: Config,
    seed: int,
    device: torch.device,
    reference: ReferenceModel | None = None,
) -> ObjectiveFn:
    """Build the function that turns a batch, and the data position of its first sequence, into an Objective.

    `reference` is the model before training, for objectives that depend on it.
    """
    vocab_size = config.vocab_size
    if isinstance(objective, TaskObjectiveConfig):
        return lambda batch, first: build_task_objective(objective, config.head, batch).to(device)
    if isinstance(objective, CausalLMConfig):
        return lambda batch, first: causal_lm(batch.tokens, batch.document_ids if data.document_mask else None).to(
            device
        )
    if isinstance(objective, DistillationConfig):
        teacher = Teacher(load(objective.teacher), tokenizer, objective.kd_ratio, device, vocab_size)
        return lambda batch, first: distillation(
            batch.tokens, batch.document_ids if data.document_mask else None, batch.distill, teacher
        ).to(device)
    if isinstance(objective, Seq2SeqConfig):
        return lambda batch, first: seq2seq(*batch).to(device)
    if isinstance(objective, PrefixLMConfig):
        return lambda batch, first: prefix_lm(
            batch.tokens, None, batch.prefix_lengths, mask=batch.mask, bidirectional=objective.bidirectional_prefix
        ).to(device)
    if isinstance(objective, SFTConfig):
        return lambda batch, first: sft(*batch, document_mask=data.document_mask).to(device)
    if isinstance(objective, GRPOConfig):  # for layer statistics; training steps have completions too
        return lambda batch, first: causal_lm(batch.padded_tokens()).to(device)
    if isinstance(objective, ORPOConfig):
        return lambda batch, first: orpo(batch, objective).to(device)
    if isinstance(objective, DPOConfig | KTOConfig):
        if reference is None:
            raise InputError(f"objective {objective.kind} needs a reference model; pass the model before training")
        if isinstance(objective, DPOConfig):
            return lambda batch, first: dpo(batch, objective, reference).to(device)
        return lambda batch, first: kto(batch, objective, reference).to(device)
    mask_id = tokenizer.mask_token_id
    if mask_id is None:
        raise InputError("objective masked-lm needs a mask token, but the tokenizer has none; use another tokenizer")
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, mask_id)
    special_ids = [token_id for token_id in special if token_id is not None]

    def build_masked_lm(batch: Any, first: int) -> Objective:
        tokens = batch.tokens[:, :-1]  # the last token of a row is also the first token of the next sequence
        return masked_lm(
            tokens,
            batch.document_ids[:, :-1] if data.document_mask else None,
            mask_id=mask_id,
            vocab_size=vocab_size,
            special_ids=special_ids,
            mlm_probability=objective.mlm_probability,
            seed=seed,
            positions=range(first, first + len(tokens)),
            span_masking=objective.span_masking,
        ).to(device)

    return build_masked_lm
