"""Adapters with the head of a task: those of PEFT opened here, and those written here opened by PEFT."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from support.family_parity import assert_close
from support.transformers_models import find_peers
from torch import Tensor

import cutaway as ct
from cutaway.errors import WeightError
from cutaway.families import families
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.replace_head import replace_head

TASK_TYPES = {"sequence-classification": "SEQ_CLS", "token-classification": "TOKEN_CLS"}
CASES = [
    pytest.param(name, head_class.kind, id=head_class.architecture)
    for name in (
        "bert",
        "roberta",
        "electra",
        "modernbert",
        "albert",
        "distilbert",
        "deberta-v2",
        "gpt2",
        "llama",
        "t5",
    )
    for head_class in families()[name].head_classes
    if head_class.kind in TASK_TYPES
]
LABELS = ("ham", "spam", "other")
LINEAR_TYPES = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
TOKENS = torch.randint(5, 40, (2, 9), generator=torch.Generator().manual_seed(1))


def build_model(name: str, kind: str) -> Any:
    """A random transformers model with a head."""
    config = find_peers(name.replace("-", "_"), seed=1)[0].config
    config.id2label, config.label2id = dict(enumerate(LABELS)), {label: i for i, label in enumerate(LABELS)}
    if families()[name].template["form"] == "decoder":
        config.pad_token_id = 0
    head_class = families()[name].head_class_for(kind)
    assert head_class is not None
    torch.manual_seed(0)
    return getattr(transformers, head_class.architecture)(config).eval()


def build_adapter(model: Any, kind: str) -> Any:
    """A random adapter of the linear layers of the blocks, with a random classifier."""
    names = [name for name, module in model.named_modules() if isinstance(module, LINEAR_TYPES)]
    targets = [name for name in names if any(part.isdigit() for part in name.split("."))]
    config = peft.LoraConfig(r=2, task_type=TASK_TYPES[kind], target_modules=targets)
    adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_" in parameter_name or "modules_to_save" in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return adapted


@torch.no_grad()
def their_logits(model: Any) -> Tensor:
    tokens = TOKENS.clone()
    if model.config.is_encoder_decoder:  # the head reads the position of the last EOS
        tokens[:, -1] = model.config.eos_token_id
    logits: Tensor = model(input_ids=tokens).logits
    return logits


@torch.no_grad()
def our_logits(checkpoint: Checkpoint) -> Tensor:
    inputs = [TOKENS]
    if checkpoint.config.form == "encoder-decoder":
        eos, start = (int(str(checkpoint.hf_config[f"{each}_token_id"])) for each in ("eos", "decoder_start"))
        source = torch.cat([TOKENS[:, :-1], torch.full((2, 1), eos)], 1)
        inputs = [source, torch.cat([torch.full((2, 1), start), source[:, :-1]], 1)]
    logits: Tensor = checkpoint.model(*inputs)
    return logits


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_head_of_an_adapter(name: str, kind: str, tmp_path: Path) -> None:
    """PEFT saves `classifier` or `score` only. All other layers of the head are those of the base model."""
    base = build_model(name, kind)
    base.save_pretrained(tmp_path / "base")
    theirs = build_adapter(base, kind)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = their_logits(theirs)

    ours = ct.load(tmp_path / "base", adapters=tmp_path / "theirs")
    assert_close(our_logits(ours), expected, 0.0, "opened here")
    assert ours.config.head.label_names == LABELS  # type: ignore[union-attr]
    ct.save_adapter(ours, tmp_path / "ours")
    reopened = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours").eval()
    assert_close(their_logits(reopened), expected, 0.0, "opened by PEFT")
    assert_close(our_logits(ct.load(tmp_path / "base", adapters=tmp_path / "ours")), expected, 0.0, "opened again")
    merged = type(base).from_pretrained(ct.save(ours, tmp_path / "merged")).eval()
    assert_close(their_logits(merged), expected, 0.0, "merged")


@pytest.mark.parametrize("architecture", ["BertForPreTraining", "BertForMaskedLM"])
def test_weights_of_the_head_that_are_in_the_base_model(architecture: str, tmp_path: Path) -> None:
    """BERT's pooler is part of the head. An adapter on a base model without pooler cannot be opened."""
    kind = "sequence-classification"
    model = build_model("bert", kind)
    base: Any = getattr(transformers, architecture)(model.config).eval()
    base.bert.load_state_dict(model.bert.state_dict(), strict=False)
    base.save_pretrained(tmp_path / "base")
    theirs = build_adapter(model, kind)
    theirs.save_pretrained(tmp_path / "theirs")
    if architecture == "BertForMaskedLM":
        with pytest.raises(WeightError, match=r"neither the adapter nor the base model has 'bert\.pooler\.dense"):
            ct.load(tmp_path / "base", adapters=tmp_path / "theirs")
        return
    ours = ct.load(tmp_path / "base", adapters=tmp_path / "theirs")
    assert_close(our_logits(ours), their_logits(theirs), 0.0, "logits")


def test_adapter_without_classifier_on_a_language_model_is_refused(tmp_path: Path) -> None:
    """PEFT does not save the classifier of an encoder-decoder, whose name is another."""
    kind = "sequence-classification"
    model = build_model("bart", kind)
    build_adapter(model, kind).save_pretrained(tmp_path / "theirs")
    transformers.BartForConditionalGeneration(model.config).save_pretrained(tmp_path / "base")
    with pytest.raises(WeightError, match="neither it nor the base model has the weights of a classifier"):
        ct.load(tmp_path / "base", adapters=tmp_path / "theirs")


def test_adapter_that_replaces_one_with_a_head(tmp_path: Path) -> None:
    model = ct.build("tiny-llama", seed=0)
    head: Any = replace_head(model, "sequence-classification", seed=0)
    head.model.add_adapter({"rank": 2})
    ct.save_adapter(head, tmp_path / "adapter")
    model.add_adapter({"rank": 2})
    ct.save_adapter(model, tmp_path / "adapter")
    ct.save(ct.build("tiny-llama", seed=0), tmp_path / "base")
    loaded = ct.load(tmp_path / "base", adapters=tmp_path / "adapter")
    assert loaded.config.head.kind == "lm"
