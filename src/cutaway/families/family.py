"""Family: config fields, weight mappings and ignored keys of a model family, for load and save. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cutaway.config import Config, EmbeddingHead
from cutaway.errors import ConfigError, CutawayError
from cutaway.families.config_fields import ConfigFields, HFConfigReader, SupportedValues
from cutaway.families.config_tree import MISSING, ConfigTree, Node, diff_configs
from cutaway.families.head_classes import TASK_CLASS_PATTERN, HeadClass, class_prefix
from cutaway.families.load_report import UNKNOWN_KEY_REASON
from cutaway.families.rope_fields import RopeField
from cutaway.families.weight_conversion import WeightMapping


def keys_by_reason(keys: Mapping[str, str]) -> dict[str, str]:
    """Convert {reason: "key key …"} to {key: reason}."""
    return {key: reason for reason, names in keys.items() for key in names.split()}


IGNORED_CONFIG_KEYS = keys_by_reason(
    {
        "provenance of the file": "transformers_version _name_or_path name_or_path _commit_hash",
        "names the family": "model_type",
        "fixed by the family": "is_causal is_encoder_decoder",
        "names the class, which determines the head": "architectures",
        "names remote code, which is never run": "auto_map custom_pipelines",
        "weights are loaded in their stored dtype, or in the dtype argument": "torch_dtype dtype",
        "attention kernel; does not change the result": "attn_implementation _attn_implementation_autoset",
        "expert kernel; does not change the result": "experts_implementation",
        "a KV cache does not change the result": "use_cache",
        "chunking does not change the result": "chunk_size_feed_forward",
        "activation checkpointing does not change the result": "gradient_checkpointing",
        "tensor-parallel slicing of matrix products; does not change the result": "pretraining_tp",
        "export format": "torchscript",
        "training setting": "use_bfloat16",
        "selects outputs of a call": "output_attentions output_hidden_states output_router_logits return_dict"
        " use_return_dict keys_to_ignore_at_inference",
        "initialization; weights are loaded": "initializer_range initializer_factor",
        "coefficient of a training loss": "router_aux_loss_coef",
        "for classification heads": "classifier_dropout id2label label2id num_labels problem_type",
        "name of the fine-tuning task": "finetuning_task",
        "read from the tokenizer files": "tokenizer_class",
        "for the tokenizer and generation": "bos_token_id eos_token_id",
        "for the tokenizer and generation; padding is given by the mask": "pad_token_id",
        "for the tokenizer": "cls_token_id sep_token_id mask_token_id",
        "generation setting": "task_specific_params prefix decoder_start_token_id forced_bos_token_id"
        " forced_eos_token_id generation_config max_length min_length do_sample early_stopping num_beams"
        " num_beam_groups temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size"
        " encoder_no_repeat_ngram_size bad_words_ids num_return_sequences diversity_penalty output_scores"
        " return_dict_in_generate remove_invalid_values exponential_decay_length_penalty suppress_tokens"
        " begin_suppress_tokens extra_pos_embeddings force_bos_token_to_be_generated",
    }
)
"""Common config.json keys that do not change what a model computes, with the reason."""

COMMON_FIELDS: ConfigFields = (
    SupportedValues("quantization_config", (None,), "the weights are quantized; load the unquantized checkpoint"),
    SupportedValues("compression_config", (None,), "the weights are quantized; load the unquantized checkpoint"),
    SupportedValues("pruned_heads", ({}, None), "attention heads are pruned; save the model without pruning"),
    SupportedValues("cross_attention_hidden_size", (None,), "the model attends to an encoder of another hidden size"),
    SupportedValues("add_cross_attention", (False, None), "the model attends to an encoder that is not in the file"),
    SupportedValues("tie_encoder_decoder", (False, None), "encoder and decoder share their weights"),
)


EMBEDDING_PROJECTION = WeightMapping("dense.linear", "head.projection")
"""Mapping of the module Dense of a sentence-transformers directory, whose tensors are in a file of their own."""
HFConfig = Mapping[str, object]
Parsed = tuple[Config, dict[str, object], dict[str, str]]
"""(Config, {used key of config.json: value}, {ignored key of config.json: reason})."""


@dataclass(frozen=True)
class Family:
    """Mapping of one `model_type` of transformers: config.json ↔ Config, checkpoint tensors ↔ model state dict."""

    name: str
    """`model_type` in config.json."""
    architecture: str
    """transformers class of the model with its head, written to `architectures`."""
    template: Node
    """Config values shared by all models of the family, as a dict with one `block` per stack."""
    fields: ConfigFields
    weight_mappings: tuple[WeightMapping, ...]
    base_model_prefix: str = ""
    """Prefix of checkpoint keys. Files with the base model only, without a head, do not have this prefix."""
    base_architecture: str | None = None
    """transformers class of the base model, for models without a head."""
    ignored_weights: Mapping[str, str] = field(default_factory=dict)
    """Ignored tensors: regular expression of the full name → reason. {past} matches an index past the last layer."""
    ignored_config_keys: Mapping[str, str] = field(default_factory=dict)
    """config.json keys that do not change what the model computes → the reason."""
    attribute_map: Mapping[str, str] = field(default_factory=dict)
    """Aliases of config.json keys → the canonical key."""
    weight_renamings: tuple[tuple[str, str], ...] = ()
    """Legacy tensor names: (regular expression, replacement)."""
    head_classes: tuple[HeadClass, ...] = ()
    """transformers classes with heads for tasks."""

    def find_head_class(self, hf_config: HFConfig) -> HeadClass | None:
        """The class with a head for a task that `architectures` names. Raises if it is not supported."""
        architectures = hf_config.get("architectures")
        name = architectures[0] if isinstance(architectures, list) and architectures else None
        known = {head_class.architecture: head_class for head_class in self.head_classes}
        if name in known:
            return known[name]
        if isinstance(name, str) and TASK_CLASS_PATTERN.fullmatch(name):
            supported = ", ".join((self.architecture, *known))
            base = self.base_architecture
            hint = f"; to load it without its head, set 'architectures' in config.json to [\"{base}\"]" if base else ""
            raise ConfigError(
                f"{self.name}: the checkpoint is a {name}, whose head cutaway does not have; supported classes of this"
                f" family: {supported}{hint}"
            )
        return None

    def head_class_for(self, kind: str) -> HeadClass | None:
        """The class with a head of this kind; None if transformers has none in this family."""
        return next((head_class for head_class in self.head_classes if head_class.kind == kind), None)

    def weight_mappings_for(self, config: Config) -> tuple[WeightMapping, ...]:
        """Weight mappings of a Config: those of the body, and those of its head."""
        if config.head.kind in ("lm", "none"):
            return self.weight_mappings
        body = tuple(row for row in self.weight_mappings if not row.model_keys[0].startswith("head."))
        if isinstance(config.head, EmbeddingHead):
            return (*body, EMBEDDING_PROJECTION)
        head_class = self.head_class_for(config.head.kind)
        return (*body, *(head_class.weight_mappings if head_class else ()))

    def config_from_hf(
        self, hf_config: HFConfig, *, head: bool | EmbeddingHead | None = None, pooler: bool | None = None
    ) -> Parsed:
        """Convert a config.json to (Config, used keys, ignored keys → reason).

        `head` says whether the tensors contain an LM head, or is the head of a sentence-transformers directory.
        `pooler` says whether the tensors contain a pooler. By default, `architectures` decides.
        """
        hf_config = self._apply_attribute_map(hf_config)
        tree = ConfigTree(self.template)
        reader = HFConfigReader(hf_config)
        form = self.template["form"]
        if "is_causal" in hf_config and hf_config["is_causal"] is not (form != "encoder"):
            is_causal = f"config.json's 'is_causal' is {hf_config['is_causal']!r}"
            raise ConfigError(f"{self.name}: {is_causal}, but this family has form '{form}'; correct config.json")
        architectures = hf_config.get("architectures")
        is_base_model = self.base_architecture is not None and architectures == [self.base_architecture]
        head_class = self.find_head_class(hf_config) if head is None else None
        head = not is_base_model if head is None else head
        if pooler is None:
            pooler = is_base_model and any(mapping.model_keys == ("pooler.dense",) for mapping in self.weight_mappings)
        head_fields = () if head_class is None else head_class.fields
        head_node = head_class.head if head_class else {"kind": "none"} if not head else None
        if isinstance(head, EmbeddingHead):
            head_node = head.model_dump(mode="json")
        if head_node is not None:
            tree.set("head", head_node)
        if pooler:
            tree.set("pooler", True)
        try:
            for entry in (*COMMON_FIELDS, *self.fields):
                entry.from_hf(reader, tree)
            if head_node is not None:
                tree.set("head", head_node)  # without the fields of an LM head, which entries of the family may set
            for entry in head_fields:
                entry.from_hf(reader, tree)
            config = tree.to_config()
        except CutawayError as error:
            raise ConfigError(f"{self.name}: {self._add_hf_key_to_error(str(error))}") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ConfigError(f"{self.name}: config.json has a value of the wrong type: {error}") from None
        known = {key for entry in (*COMMON_FIELDS, *self.fields, *head_fields) for key in entry.keys}
        reasons = IGNORED_CONFIG_KEYS | dict(self.ignored_config_keys)
        used = {key: value for key, value in hf_config.items() if key in known}
        ignored = {key: reasons.get(key, UNKNOWN_KEY_REASON) for key in hf_config if key not in known}
        return config, used, ignored

    def _apply_attribute_map(self, hf_config: HFConfig) -> dict[str, object]:
        """Replace aliases by canonical keys; raise if an alias and its key have different values."""
        canonical_config = {key: value for key, value in hf_config.items() if key not in self.attribute_map}
        for alias in self.attribute_map.keys() & hf_config.keys():
            key, value = self.attribute_map[alias], hf_config[alias]
            canonical = canonical_config.setdefault(key, value)
            # The number of layers is checked against the tensors; truncated models may keep an old num_hidden_layers.
            if canonical is not None and value is not None and canonical != value and alias != "num_hidden_layers":
                values = f"{value!r} for '{alias}' and {canonical!r} for '{key}'"
                raise ConfigError(f"{self.name}: config.json has {values}, which are the same setting; remove one")
        return canonical_config

    def _add_hf_key_to_error(self, message: str) -> str:
        """Add the config.json key to an error message that starts with a Config path."""
        path = re.sub(r"\[\d+\]", "", message.split(": ")[0]).replace(".leading_blocks", ".block")
        for entry in self.fields:
            paths = getattr(entry, "path", ())
            if entry.keys and path in ((paths,) if isinstance(paths, str) else paths):
                return f"config.json's '{entry.keys[0]}' is invalid ({message})"
        return message

    def architecture_for(self, config: Config) -> str:
        """Name of the transformers class for a Config, which depends on its head."""
        match config.head.kind:
            case "lm":
                return self.architecture
            case "none" | "embedding":
                return self.base_architecture or f"{class_prefix(self.architecture)}Model"
            case kind:
                head_class = self.head_class_for(kind)
                if head_class is None:
                    raise ConfigError(
                        f"transformers has no class of family '{self.name}' with a head of kind '{kind}'; save it with"
                        " family='cutaway'"
                    )
                return head_class.architecture

    def config_to_hf(self, config: Config) -> dict[str, object]:
        """Convert a Config to the contents of config.json; raise ConfigError if the family cannot represent it."""
        form = self.template["form"]
        if config.form != form:
            raise ConfigError(f"{self.name}: the model is of form '{config.form}', but this family has form '{form}'")
        hf_config: dict[str, object] = {"architectures": [self.architecture_for(config)], "model_type": self.name}
        tree = ConfigTree.from_config(config)
        try:
            head_class = self.head_class_for(config.head.kind)
            for entry in (*self.fields, *(head_class.fields if head_class else ())):
                entry.to_hf(tree, hf_config)
            for entry in self.fields:
                if isinstance(entry, RopeField):
                    entry.write_legacy_keys(hf_config)
            restored = self.config_like(config, hf_config)
        except CutawayError as error:
            raise ConfigError(f"family '{self.name}' cannot represent this model: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError):
            reason = "the family does not have the model's kinds of components"
            raise ConfigError(f"family '{self.name}' cannot represent this model: {reason}") from None
        differences = diff_configs(config, restored)
        if differences:
            more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
            raise ConfigError(f"family '{self.name}' cannot represent this model: {'; '.join(differences[:3])}{more}")
        return {key: value for key, value in hf_config.items() if value is not MISSING}

    def config_like(self, config: Config, hf_config: HFConfig) -> Config:
        """Convert a config.json to a Config with the head and pooler that `config` has."""
        head: bool | EmbeddingHead | None = None
        if config.head.kind in ("lm", "none"):
            head = config.head.kind == "lm"
        elif isinstance(config.head, EmbeddingHead):
            head = config.head
        return self.config_from_hf(hf_config, head=head, pooler=getattr(config, "pooler", False))[0]

    def reason_ignored(self, name: str, num_layers: int) -> str | None:
        """Reason why the tensor `name` is ignored in a model with `num_layers` layers; None if it is not ignored."""
        for pattern, reason in self.ignored_weights.items():
            match = re.fullmatch(pattern.replace("{past}", r"(?P<past>\d+)"), name)
            if match and int(match.groupdict().get("past", num_layers)) >= num_layers:
                return reason
        return None
