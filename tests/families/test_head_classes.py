"""Heads of tasks against the classes of transformers: logits, padding, labels, load and save, new heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.family_parity import PeerModel, assert_close, padding_masks, randomize_weights
from support.transformers_models import find_peers
from torch import Tensor

import cutaway as ct
from cutaway import config as c
from cutaway.errors import ConfigError, InputError
from cutaway.families import families
from cutaway.families.head_classes import HeadClass
from cutaway.families.replace_head import replace_head

CASES = [
    pytest.param(name, head_class, id=head_class.architecture)
    for name, family in families().items()
    for head_class in family.head_classes
]
LABELS = ("ham", "spam", "other")
PAD, EOS = 0, 2
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
SEEDS = {"opt": 1}
"""Seed of the family's config where 0 does not work: OPT with a factorized embedding has no head for tasks."""


def build_peer(name: str, head_class: HeadClass, seed: int = 0) -> tuple[PeerModel, Any]:
    """A small random transformers model of a class."""
    peer = find_peers(name.replace("-", "_"), SEEDS.get(name, seed))[0]
    config = peer.config
    config.num_labels = len(LABELS)
    config.id2label, config.label2id = dict(enumerate(LABELS)), {label: i for i, label in enumerate(LABELS)}
    set_special_tokens(peer)
    architecture = getattr(transformers, head_class.architecture)
    model = architecture._from_config(config, attn_implementation="sdpa" if peer.skip_eager else "eager").float().eval()
    randomize_weights(model, seed, peer.frozen)
    return peer, fix_peer(peer, model)


def set_special_tokens(peer: PeerModel) -> None:
    form = families()[peer.config.model_type].template["form"]
    if form == "decoder":
        peer.config.pad_token_id = PAD
    elif form == "encoder-decoder":
        peer.config.eos_token_id = EOS


def fix_peer(peer: PeerModel, model: Any) -> Any:
    """Apply the family's fix of transformers, and select the plain kernel of experts, which has no size limits."""
    if peer.modify_model is not None and peer.config.model_type == "mpt":
        peer.modify_model(model)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def random_batch(peer: PeerModel, mask: Tensor, seed: int) -> Tensor:
    pad = getattr(peer.config, "pad_token_id", None)
    tokens = torch.randint(5, peer.config.vocab_size, mask.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(mask, tokens, PAD if pad is None else pad)


@torch.no_grad()
def compare_outputs(peer: PeerModel, model: Any, checkpoint: ct.Checkpoint, side: str, seed: int = 0) -> None:
    """Compare the outputs for a padded batch."""
    kind = checkpoint.config.head.kind
    mask = padding_masks(3, 9) if side == "right" else padding_masks(3, 9).flip(1)
    tokens = random_batch(peer, mask, seed)
    if kind == "multiple-choice":
        mask, tokens = (torch.stack([value, value.flip(0)], 1) for value in (mask, tokens))
    options = {}
    if peer.pass_position_ids and side == "left":
        options["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    if checkpoint.config.form == "encoder-decoder":
        # The class uses the position of the last EOS of the source, which is the last token of the target.
        tokens = torch.where(mask & ~mask.roll(-1, 1).index_fill(1, torch.tensor([8]), False), EOS, tokens)
        target = tokens.roll(1, 1)
        options["decoder_input_ids"] = target
        output = checkpoint.model(tokens, target, mask, mask)
    else:
        output = checkpoint.model(tokens, mask)
    expected = model(input_ids=tokens, attention_mask=mask.long(), **options).logits
    if kind == "token-classification":
        output, expected = output[mask], expected[mask]
    assert_close(output, expected, 0.0, f"{type(model).__name__}, padded on the {side}")


@pytest.mark.sample(25)
@pytest.mark.parametrize(("name", "head_class"), CASES)
def test_class_matches_transformers(name: str, head_class: HeadClass, tmp_path: Path) -> None:
    peer, model = build_peer(name, head_class)
    model.save_pretrained(tmp_path / "transformers")
    checkpoint = ct.load(tmp_path / "transformers")
    assert checkpoint.load_report is not None
    assert checkpoint.load_report.ok
    assert checkpoint.config.head.kind == head_class.kind
    is_decoder = checkpoint.config.form == "decoder"
    sides = ("right", "left") if is_decoder and peer.left_padding else ("right",)
    for side in sides:
        compare_outputs(peer, model, checkpoint, side)
    if head_class.kind != "multiple-choice":
        assert checkpoint.config.head.label_names == LABELS  # type: ignore[union-attr]

    saved = ct.save(checkpoint, tmp_path / "cutaway")
    again = type(model).from_pretrained(saved, attn_implementation=model.config._attn_implementation)
    state, expected = again.state_dict(), model.state_dict()
    unused = [key for key in expected if key not in state or not torch.equal(state[key], expected[key])]
    assert all(any(part in key for part in peer.unused_parameters) for key in unused)
    assert tuple(again.config.id2label.values()) == LABELS or head_class.kind == "multiple-choice"
    reloaded = ct.load(saved)
    assert reloaded.config == checkpoint.config
    native = ct.load(ct.save(checkpoint, tmp_path / "native", family="cutaway"))
    assert native.config == checkpoint.config


@pytest.mark.sample(20)
@pytest.mark.parametrize(("name", "head_class"), CASES)
def test_new_head_has_the_published_shape(name: str, head_class: HeadClass, tmp_path: Path) -> None:
    """A language model gets a new head; transformers opens it and computes the same."""
    peer = find_peers(name.replace("-", "_"), SEEDS.get(name, 0))[0]
    set_special_tokens(peer)
    base = peer.auto_class.from_config(peer.config).float().eval()
    randomize_weights(base, 1, peer.frozen)
    base.save_pretrained(tmp_path / "base")
    labels = () if head_class.kind == "multiple-choice" else LABELS
    checkpoint = replace_head(ct.load(tmp_path / "base"), head_class.kind, labels=labels, seed=3)
    saved = ct.save(checkpoint, tmp_path / "new")
    architecture = getattr(transformers, head_class.architecture)
    kernel = "sdpa" if peer.skip_eager else "eager"
    model, report = architecture.from_pretrained(saved, attn_implementation=kernel, output_loading_info=True)
    assert not report["missing_keys"] - {key for key in report["missing_keys"] if "position_ids" in key}
    compare_outputs(peer, fix_peer(peer, model.float().eval()), checkpoint, "right")
    assert ct.load(saved).config == checkpoint.config


def test_every_family_class_exists_in_transformers() -> None:
    for family in families().values():
        for head_class in family.head_classes:
            assert hasattr(transformers, head_class.architecture), head_class.architecture


def test_new_head_shares_the_body_and_keeps_the_pooler() -> None:
    base: Any = ct.build(ct.config("tiny-bert").replace(pooler=True), seed=0)
    checkpoint = replace_head(base, "sequence-classification", labels=("no", "yes"), seed=1)
    model: Any = checkpoint.model
    assert model.encoder.embed.token.weight.data_ptr() == base.encoder.embed.token.weight.data_ptr()
    assert torch.equal(model.head.transform.dense.weight, base.pooler.dense.weight)
    tokens = torch.randint(5, 100, (2, 7))
    with torch.no_grad():
        assert torch.equal(model.encode(tokens), base.encode(tokens))
        assert torch.equal(torch.tanh(model.head.transform.dense(base.encode(tokens)[:, 0])), base.pool(tokens))
    assert not model.config.pooler
    assert base.config.pooler
    again: Any = replace_head(base, "sequence-classification", num_labels=2, seed=1).model
    assert torch.equal(again.head.classifier.weight, model.head.classifier.weight)


@pytest.mark.parametrize(
    ("name", "old", "kept"),
    [
        ("modernbert", "ModernBertForMaskedLM", {"head.dense", "head.norm"}),
        ("bert", "BertForSequenceClassification", {"bert.pooler.dense"}),
        ("roberta", "RobertaForSequenceClassification", {"classifier.dense"}),
        ("roberta", "RobertaForMaskedLM", set()),
    ],
)
def test_new_head_keeps_the_layers_that_transformers_keeps(name: str, old: str, kept: set[str], tmp_path: Path) -> None:
    """Layers before the classifier that the checkpoints of both classes store under the same name."""
    config = find_peers(name, 0)[0].config
    config.num_labels = 2
    base = getattr(transformers, old)(config)
    randomize_weights(base, 1, ())
    base.save_pretrained(tmp_path / "base")
    new = transformers.AutoModelForSequenceClassification
    expected = new.from_pretrained(tmp_path / "base", num_labels=5, ignore_mismatched_sizes=True).state_dict()
    checkpoint = replace_head(ct.load(tmp_path / "base"), "sequence-classification", num_labels=5, seed=0)
    model = new.from_pretrained(ct.save(checkpoint, tmp_path / "new"))
    state = model.state_dict()
    head = [key for key in expected if key.startswith(("head.", "classifier.", "bert.pooler."))]
    equal = {key for key in head if torch.equal(expected[key], state[key]) and expected[key].any()}
    assert {key.rpartition(".")[0] for key in equal} == kept
    assert not any(key.rpartition(".")[0] in kept for key in set(head) - equal)


def test_new_head_from_fields() -> None:
    base = ct.build("tiny-llama", seed=0)
    reward = replace_head(base, "sequence-classification", num_labels=1).config.head
    assert (reward.problem_type, reward.pooling, reward.bias) == ("regression", "last", False)  # type: ignore[union-attr]
    head = replace_head(base, c.EmbeddingHead(), pooling="max").config.head
    assert head == c.EmbeddingHead(pooling="max")


def test_heads_that_cannot_be_replaced() -> None:
    base = ct.build("tiny-llama", seed=0)
    with pytest.raises(InputError, match="replace_head adds a head for a task, not 'lm'; use 'sequence-class"):
        replace_head(base, "lm")
    with pytest.raises(ConfigError, match="kind 'multiple-choice' is not for decoders"):
        replace_head(base, "multiple-choice")
    with pytest.raises(ConfigError, match="head: unknown key 'pool'"):
        replace_head(base, "sequence-classification", pool="mean")
    with pytest.raises(InputError, match="replace the head first, then add an adapter"):
        replace_head(ct.build("tiny-llama", seed=0).add_adapter({"rank": 2}), "sequence-classification")


def test_family_without_class_is_saved_in_the_native_format(tmp_path: Path) -> None:
    checkpoint = replace_head(ct.build("tiny-llama", seed=0), "sequence-classification")
    checkpoint.family = "granite"
    with pytest.raises(ConfigError, match=r"no class of family 'granite' .* save it with family='cutaway'"):
        ct.save(checkpoint, tmp_path / "hf")
    assert ct.load(ct.save(checkpoint, tmp_path / "native", family="cutaway")).config == checkpoint.config


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("BertForQuestionAnswering", r"supported classes of this family: BertForMaskedLM, .*; .*\[\"BertModel\"\]"),
        ("BertForNextSentencePrediction", "whose head cutaway does not have"),
    ],
)
def test_class_without_supported_head_is_rejected(architecture: str, message: str, tmp_path: Path) -> None:
    config = find_peers("bert", 0)[0].config
    getattr(transformers, architecture)(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        ct.load(tmp_path)


def test_problem_type_is_read_and_written(tmp_path: Path) -> None:
    config = find_peers("bert", 0)[0].config
    config.problem_type, config.num_labels = "multi_label_classification", 4
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "many")
    checkpoint = ct.load(tmp_path / "many")
    assert checkpoint.config.head.problem_type == "multi_label_classification"  # type: ignore[union-attr]
    changed = replace_head(checkpoint, "sequence-classification", num_labels=1, dropout=0.25)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(ct.save(changed, tmp_path / "one"))
    assert (loaded.config.problem_type, loaded.config.num_labels) == ("regression", 1)
    assert loaded.config.classifier_dropout == 0.25


def test_default_padding_tokens_equal_those_of_transformers() -> None:
    for name, family in families().items():
        for each in family.head_classes:
            if each.head.get("pooling") == "last" and family.template["form"] == "decoder":
                [default] = [field.default for field in each.fields if getattr(field, "key", "") == "pad_token_id"]  # type: ignore[attr-defined]
                assert default == transformers.AutoConfig.for_model(name).pad_token_id, name


@torch.no_grad()
@pytest.mark.parametrize("pad", [7, None, -1])
def test_padding_tokens_at_the_end_of_a_text_are_not_pooled(pad: int | None, tmp_path: Path) -> None:
    """As in transformers, also if the mask marks them as text: EOS at the end, if it is the padding token too."""
    config = transformers.LlamaConfig(**SMALL, pad_token_id=pad)
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    checkpoint = ct.load(tmp_path)
    tokens = torch.randint(10, 60, (1, 9))
    tokens[0, 5:] = 7
    logits = model(input_ids=tokens).logits
    assert_close(checkpoint.model(tokens), logits, 0.0, "without mask")
    assert_close(checkpoint.model(tokens, torch.ones(1, 9, dtype=torch.bool)), logits, 0.0, "with mask")
    shorter = model(input_ids=tokens[:, :5]).logits
    assert torch.allclose(logits, shorter, atol=1e-6) == (pad == 7)


def test_decoder_classifier_is_saved_with_the_padding_token_of_its_tokenizer(tmp_path: Path) -> None:
    """transformers needs it to find the last token of each sequence of a batch."""
    base = ct.load("tiny-english", dtype=torch.float32)
    checkpoint = replace_head(base, "sequence-classification", num_labels=2, seed=0)
    saved = ct.save(checkpoint, tmp_path / "model")
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(saved).eval()
    tokenizer: Any = base.tokenizer
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    assert model.config.pad_token_id == pad
    mask = padding_masks(3, 9)
    tokens = torch.where(mask, torch.randint(20, 200, mask.shape), pad)
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=mask.long()).logits
        assert_close(checkpoint.model(tokens, mask), expected, 0.0, "logits")
