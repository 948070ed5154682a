"""Classes of transformers with a head for a task, such as BertForSequenceClassification. Imports no torch."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from cutaway.errors import ConfigError
from cutaway.families.config_fields import ConfigFields, Custom, HFConfigReader, Key
from cutaway.families.config_tree import ConfigTree, Node
from cutaway.families.weight_conversion import WeightMapping

TASK_SUFFIXES = {
    "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "multiple-choice": "ForMultipleChoice",
}
"""Kind of head → end of the name of the transformers class."""
TASK_CLASS_PATTERN = re.compile(
    r"\w+For(SequenceClassification|TokenClassification|MultipleChoice|QuestionAnswering|NextSentencePrediction|Reward\w*)"
)
"""Classes whose checkpoints have a head that is not an LM head."""


@dataclass(frozen=True)
class HeadClass:
    """A transformers class of a family with a head for a task: config.json ↔ head, checkpoint tensors ↔ head."""

    architecture: str
    head: Node
    """Config values of the head."""
    weight_mappings: tuple[WeightMapping, ...]
    """Mappings of the head's tensors. Those of the body are the same in all classes of a family."""
    fields: ConfigFields = ()
    body_prefix: str = ""
    """Prefix of the names of the body's modules, which the class with an LM head does not have (T5)."""

    @property
    def kind(self) -> str:
        """Kind of the head, such as 'sequence-classification'."""
        return str(self.head["kind"])


def class_prefix(architecture: str) -> str:
    """Name of a class with an LM head without its end: 'LlamaForCausalLM' → 'Llama'."""
    return re.sub(r"(For(CausalLM|MaskedLM|ConditionalGeneration)|LMHeadModel|MTModel)$", "", architecture)


def head_class(
    prefix: str,
    kind: str,
    *weight_mappings: WeightMapping,
    fields: ConfigFields = (),
    num_labels: int = 2,
    **head: object,
) -> HeadClass:
    """Build a HeadClass. `num_labels` is the family's default, `head` are more config values of the head."""
    labels = () if kind == "multiple-choice" else (labels_field(kind, num_labels),)
    return HeadClass(f"{prefix}{TASK_SUFFIXES[kind]}", {"kind": kind, **head}, weight_mappings, (*labels, *fields))


# --------------------------------------------------------------------------------------------------- labels


def labels_field(kind: str, default_num_labels: int) -> Custom:
    """Field of the labels: `id2label`, `label2id` and `num_labels`, and `problem_type` of sequence classification."""

    def from_hf(hf_config: HFConfigReader, tree: ConfigTree) -> None:
        names = _read_label_names(hf_config, default_num_labels)
        tree.set("head.num_labels", len(names))
        tree.set("head.labels", [] if names == _default_names(len(names)) else names)
        if kind == "sequence-classification":
            inferred = "regression" if len(names) == 1 else "single_label_classification"
            tree.set("head.problem_type", hf_config.get("problem_type") or inferred)

    def to_hf(tree: ConfigTree, hf_config: dict[str, object]) -> None:
        names = tree.get("head.labels") or _default_names(tree.get("head.num_labels"))
        hf_config["id2label"] = {str(i): name for i, name in enumerate(names)}
        hf_config["label2id"] = {name: i for i, name in enumerate(names)}
        if kind == "sequence-classification":
            hf_config["problem_type"] = tree.get("head.problem_type")

    return Custom(("id2label", "label2id", "num_labels", "problem_type"), from_hf, to_hf)


def _default_names(num_labels: int) -> list[str]:
    return [f"LABEL_{i}" for i in range(num_labels)]


def _read_label_names(hf_config: HFConfigReader, default_num_labels: int) -> list[str]:
    """Names of the labels in the order of their ids."""
    id2label = hf_config.get("id2label")
    if not id2label:
        return _default_names(hf_config.get_number("num_labels", default_num_labels))
    try:
        names = {int(key): str(name) for key, name in id2label.items()}
        return [names[i] for i in range(len(names))]
    except (AttributeError, KeyError, ValueError):
        raise ConfigError(
            "config.json's 'id2label' must map the ids 0, 1, 2 … to the names of the labels; correct it"
        ) from None


# --------------------------------------------------------------------------------------------------- dropout


def classifier_dropout(fallback_key: str, fallback: float, *paths: str, key: str = "classifier_dropout") -> Key:
    """Field of the head's dropout. If its key is absent or null, it is the value at another key of config.json."""
    default: Callable[[HFConfigReader], object] = lambda hf_config: hf_config.get_number(fallback_key, fallback)  # noqa: E731
    return Key(key, ("head.dropout", *paths), default)


# --------------------------------------------------------------------------------------------------- encoder-decoders


def encoder_decoder_head_class(prefix: str, num_labels: int = 2) -> HeadClass:
    """Sequence classification of an encoder-decoder: a dense layer and a matrix on the last token of the target.

    In transformers, the target is the source, shifted by one token.
    """
    return head_class(
        prefix,
        "sequence-classification",
        WeightMapping("classification_head.dense", "head.transform.dense"),
        WeightMapping("classification_head.out_proj", "head.classifier"),
        fields=(Key("classifier_dropout", ("head.dropout", "head.transform.dropout"), 0.0),),
        num_labels=num_labels,
        pooling="last",
        transform={"activation": "tanh"},
    )


# --------------------------------------------------------------------------------------------------- decoders

_WITHOUT_CLASSES = (
    "codegen", "cohere", "cohere2", "cwm", "dbrx", "dots1", "ernie4_5", "ernie4_5_moe", "glm4_moe", "granite",
    "granitemoe", "granitemoeshared", "jais2", "minimax_m2", "olmoe", "xglm",
)  # fmt: skip
"""Decoder families for which transformers has no classification classes."""
_WITHOUT_TOKEN_CLASSIFICATION = ("deepseek_v2", "gemma3_text", "gptj", "olmo", "olmo2", "olmo3", "opt")
_WITH_TOKEN_CLASSIFIER = ("biogpt", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "mpt")
"""Families whose token classifier has the checkpoint key `classifier` instead of `score`."""
_DEFAULT_PAD_TOKEN_IDS = {
    "biogpt": 1, "gemma": 0, "gemma2": 0, "gemma3_text": 0, "glm": 151329, "glm4": 151329, "helium": 3, "olmo": 1,
    "olmo2": 1, "olmo3": 1, "opt": 1, "phi3": 32000, "seed_oss": 1, "smollm3": 128004,
}  # fmt: skip
"""Padding token of the families whose configurations have one by default."""


def decoder_head_classes(family_name: str, architecture: str) -> tuple[HeadClass, ...]:
    """Classes of a decoder family: `score` on the last token of a sequence, or on each token.

    A reward model is sequence classification with one label.
    """
    if family_name in _WITHOUT_CLASSES:
        return ()
    prefix = "Gemma3Text" if family_name == "gemma3_text" else class_prefix(architecture)
    score = WeightMapping("score", "head.classifier")
    default = _DEFAULT_PAD_TOKEN_IDS.get(family_name)
    pad = Key("pad_token_id", ("head.pad_token_id",), default, lambda value: None if value == -1 else value)
    classes = [head_class(prefix, "sequence-classification", score, fields=(pad,), pooling="last", bias=False)]
    if family_name not in _WITHOUT_TOKEN_CLASSIFICATION:
        key = "classifier" if family_name in _WITH_TOKEN_CLASSIFIER else "score"
        dropout = classifier_dropout("hidden_dropout", 0.1)
        classes.append(
            head_class(prefix, "token-classification", WeightMapping(key, "head.classifier"), fields=(dropout,))
        )
    return tuple(classes)
