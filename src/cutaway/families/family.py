"""Family: config fields, weight mappings and ignored keys of a model family, for load and save. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cutaway.config import Config
from cutaway.errors import ConfigError, CutawayError
from cutaway.families.config_fields import ConfigField, HFConfigReader, SupportedValues
from cutaway.families.config_tree import MISSING, ConfigTree, diff_configs
from cutaway.families.load_report import UNKNOWN_KEY_REASON
from cutaway.families.rope_fields import RopeField
from cutaway.families.weight_conversion import WeightMapping

IGNORED_CONFIG_KEYS = {
    "transformers_version": "provenance of the file",
    "_name_or_path": "provenance of the file",
    "_commit_hash": "provenance of the file",
    "model_type": "names the family",
    "is_causal": "fixed by the family",
    "is_encoder_decoder": "fixed by the family",
    "architectures": "the head is determined from the tensors",
    "auto_map": "names remote code, which is never run",
    "custom_pipelines": "names remote code, which is never run",
    "torch_dtype": "weights are loaded in their stored dtype, or in the dtype argument",
    "dtype": "weights are loaded in their stored dtype, or in the dtype argument",
    "attn_implementation": "attention kernel; does not change the result",
    "_attn_implementation_autoset": "attention kernel; does not change the result",
    "experts_implementation": "expert kernel; does not change the result",
    "use_cache": "a KV cache does not change the result",
    "chunk_size_feed_forward": "chunking does not change the result",
    "gradient_checkpointing": "activation checkpointing does not change the result",
    "pretraining_tp": "tensor-parallel slicing of matrix products; does not change the result",
    "torchscript": "export format",
    "use_bfloat16": "training setting",
    "output_attentions": "selects outputs of a call",
    "output_hidden_states": "selects outputs of a call",
    "output_router_logits": "selects outputs of a call",
    "return_dict": "selects outputs of a call",
    "use_return_dict": "selects outputs of a call",
    "initializer_range": "initialization; weights are loaded",
    "initializer_factor": "initialization; weights are loaded",
    "router_aux_loss_coef": "coefficient of a training loss",
    "classifier_dropout": "classification head, which is not loaded",
    "id2label": "classification head, which is not loaded",
    "label2id": "classification head, which is not loaded",
    "num_labels": "classification head, which is not loaded",
    "problem_type": "classification head, which is not loaded",
    "finetuning_task": "name of the fine-tuning task",
    "task_specific_params": "generation setting",
    "prefix": "generation setting",
    "tokenizer_class": "read from the tokenizer files",
    "bos_token_id": "for the tokenizer and generation",
    "eos_token_id": "for the tokenizer and generation",
    "pad_token_id": "for the tokenizer and generation; padding is given by the mask",
    "cls_token_id": "for the tokenizer",
    "sep_token_id": "for the tokenizer",
    "mask_token_id": "for the tokenizer",
    "decoder_start_token_id": "generation setting",
    "forced_bos_token_id": "generation setting",
    "forced_eos_token_id": "generation setting",
    "generation_config": "generation setting",
    "keys_to_ignore_at_inference": "selects outputs of a call",
    "name_or_path": "provenance of the file",
    **dict.fromkeys(
        (
            "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature",
            "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "diversity_penalty",
            "output_scores", "return_dict_in_generate", "remove_invalid_values", "exponential_decay_length_penalty",
            "suppress_tokens", "begin_suppress_tokens", "extra_pos_embeddings", "force_bos_token_to_be_generated",
        ),
        "generation setting",
    ),
}  # fmt: skip
"""Common config.json keys that do not change what a model computes, with the reason."""

COMMON_FIELDS: tuple[ConfigField, ...] = (
    SupportedValues("quantization_config", (None,), "its weights are quantized; load the unquantized checkpoint"),
    SupportedValues("compression_config", (None,), "its weights are quantized; load the unquantized checkpoint"),
    SupportedValues(
        "pruned_heads",
        ({}, None),
        "some of its attention heads are pruned; save it unpruned from the library that pruned it",
    ),
    SupportedValues("cross_attention_hidden_size", (None,), "it attends to an encoder of another hidden size"),
    SupportedValues("add_cross_attention", (False, None), "it attends to an encoder that is not in the file"),
    SupportedValues("tie_encoder_decoder", (False, None), "encoder and decoder share their weights"),
)


@dataclass(frozen=True)
class Family:
    """Mapping of one `model_type` of transformers: config.json ↔ Config, checkpoint tensors ↔ model state dict."""

    name: str
    """`model_type` in config.json."""
    architecture: str
    """transformers class of the model with its head, written to `architectures`."""
    template: Mapping[str, Any]
    """Config values shared by all models of the family, as a dict with one `block` per stack."""
    fields: tuple[ConfigField, ...]
    weight_mappings: tuple[WeightMapping, ...]
    base_model_prefix: str = ""
    """Prefix of checkpoint keys; absent in files that hold the base model without head."""
    base_architecture: str | None = None
    """transformers class of the base model, for models without a head."""
    ignored_weights: Mapping[str, str] = field(default_factory=dict)
    """Ignored tensors: regular expression of the full name → reason. {past} matches a layer index past the last."""
    ignored_config_keys: Mapping[str, str] = field(default_factory=dict)
    """config.json keys that do not change what the model computes → the reason."""
    attribute_map: Mapping[str, str] = field(default_factory=dict)
    """Aliases of config.json keys → the canonical key."""
    weight_renamings: tuple[tuple[str, str], ...] = ()
    """Legacy tensor names: (regular expression, replacement)."""

    def config_from_hf(
        self, hf_config: Mapping[str, Any], *, head: bool | None = None, pooler: bool | None = None
    ) -> tuple[Config, dict[str, Any], dict[str, str]]:
        """Convert a config.json to (Config, used keys, ignored keys → reason).

        `head` and `pooler`: whether the tensors contain them; by default both follow from `architectures`.
        """
        hf_config = self._apply_attribute_map(hf_config)
        tree = ConfigTree(self.template)
        reader = HFConfigReader(hf_config)
        if "is_causal" in hf_config and hf_config["is_causal"] is not (self.template["form"] != "encoder"):
            raise ConfigError(
                f"{self.name}: config.json's 'is_causal' is {hf_config['is_causal']!r}, but this family has form"
                f" '{self.template['form']}'; correct config.json"
            )
        is_base_model = self.base_architecture is not None and hf_config.get("architectures") == [
            self.base_architecture
        ]
        if head is False or (head is None and is_base_model):
            tree.set("head", {"kind": "none"})
        if pooler or (
            pooler is None
            and is_base_model
            and any(mapping.model_keys == ("pooler.dense",) for mapping in self.weight_mappings)
        ):
            tree.set("pooler", True)
        try:
            for entry in (*COMMON_FIELDS, *self.fields):
                entry.from_hf(reader, tree)
            config = tree.to_config()
        except CutawayError as error:
            raise ConfigError(f"{self.name}: {self._add_hf_key_to_error(str(error))}") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ConfigError(f"{self.name}: config.json has a value of the wrong type: {error}") from None
        known = {key for entry in (*COMMON_FIELDS, *self.fields) for key in entry.keys}
        reasons = IGNORED_CONFIG_KEYS | dict(self.ignored_config_keys)
        used = {key: value for key, value in hf_config.items() if key in known}
        ignored = {key: reasons.get(key, UNKNOWN_KEY_REASON) for key in hf_config if key not in known}
        return config, used, ignored

    def _apply_attribute_map(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Replace aliases by canonical keys; raise if an alias and its key have different values."""
        canonical_config = {key: value for key, value in hf_config.items() if key not in self.attribute_map}
        for alias in self.attribute_map.keys() & hf_config.keys():
            key, value = self.attribute_map[alias], hf_config[alias]
            canonical = canonical_config.setdefault(key, value)
            # The number of layers is checked against the tensors; truncated models may keep an old num_hidden_layers.
            if canonical is not None and value is not None and canonical != value and alias != "num_hidden_layers":
                raise ConfigError(
                    f"{self.name}: config.json has {value!r} for '{alias}' and {canonical!r} for '{key}', which are"
                    " the same setting; remove one of them"
                )
        return canonical_config

    def _add_hf_key_to_error(self, message: str) -> str:
        """Add the config.json key to an error message about a Config path."""
        path = re.sub(r"\[\d+\]", "", message.split(": ")[0]).replace(".leading_blocks", ".block")
        for entry in self.fields:
            paths = getattr(entry, "path", ())
            if entry.keys and path in ((paths,) if isinstance(paths, str) else paths):
                return f"config.json's '{entry.keys[0]}' is invalid ({message})"
        return message

    def config_to_hf(self, config: Config) -> dict[str, Any]:
        """Convert a Config to config.json; raise ConfigError if the family cannot represent it."""
        if config.form != self.template["form"]:
            raise ConfigError(
                f"{self.name}: the model is of form '{config.form}', this family of form '{self.template['form']}'"
            )
        headless = getattr(config.head, "kind", None) == "none"
        hf_config: dict[str, Any] = {
            "architectures": [self.base_architecture if headless and self.base_architecture else self.architecture]
        }
        hf_config["model_type"] = self.name
        tree = ConfigTree.from_config(config)
        try:
            for entry in self.fields:
                entry.to_hf(tree, hf_config)
            for entry in self.fields:
                if isinstance(entry, RopeField):
                    entry.write_legacy_keys(hf_config)
            restored = self.config_from_hf(hf_config, head=not headless, pooler=getattr(config, "pooler", False))[0]
        except CutawayError as error:
            raise ConfigError(f"family '{self.name}' cannot represent this model: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError):
            raise ConfigError(
                f"family '{self.name}' cannot represent this model: its components are of other kinds"
            ) from None
        differences = diff_configs(config, restored)
        if differences:
            more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
            raise ConfigError(f"family '{self.name}' cannot represent this model: {'; '.join(differences[:3])}{more}")
        return {key: value for key, value in hf_config.items() if value is not MISSING}

    def reason_ignored(self, name: str, num_layers: int) -> str | None:
        """The reason a checkpoint tensor is ignored in a model with `num_layers` layers, or None."""
        for pattern, reason in self.ignored_weights.items():
            match = re.fullmatch(pattern.replace("{past}", r"(?P<past>\d+)"), name)
            if match and int(match.groupdict().get("past", num_layers)) >= num_layers:
                return reason
        return None
