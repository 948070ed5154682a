"""A family: its config fields, its weight mappings, and what may be ignored. Read in both directions, without torch."""

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
    "transformers_version": "who wrote the file",
    "_name_or_path": "where the file came from",
    "_commit_hash": "where the file came from",
    "model_type": "names the family",
    "is_causal": "the family says it",
    "is_encoder_decoder": "the family says which form it is",
    "architectures": "the tensors themselves say which head there is",
    "auto_map": "names code to run, which is never run",
    "custom_pipelines": "names code to run, which is never run",
    "torch_dtype": "weights are loaded in the dtype they are stored in, or the one asked for",
    "dtype": "weights are loaded in the dtype they are stored in, or the one asked for",
    "attn_implementation": "how attention is computed, not what",
    "_attn_implementation_autoset": "how attention is computed, not what",
    "experts_implementation": "how experts are computed, not what",
    "use_cache": "a cache changes no result",
    "chunk_size_feed_forward": "working in pieces changes no result",
    "gradient_checkpointing": "recomputing changes no result",
    "pretraining_tp": "how products were cut over devices; the product is the same",
    "torchscript": "how a model is packed",
    "use_bfloat16": "how a model was trained elsewhere",
    "output_attentions": "what a call returns",
    "output_hidden_states": "what a call returns",
    "output_router_logits": "what a call returns",
    "return_dict": "what a call returns",
    "use_return_dict": "what a call returns",
    "initializer_range": "for fresh weights, and these are not",
    "initializer_factor": "for fresh weights, and these are not",
    "router_aux_loss_coef": "the weight of a loss in training",
    "classifier_dropout": "for a classifier, which is not loaded",
    "id2label": "for a classifier, which is not loaded",
    "label2id": "for a classifier, which is not loaded",
    "num_labels": "for a classifier, which is not loaded",
    "problem_type": "for a classifier, which is not loaded",
    "finetuning_task": "what the model was tuned for",
    "task_specific_params": "settings for generation",
    "prefix": "settings for generation",
    "tokenizer_class": "the tokenizer's files say it",
    "bos_token_id": "for the tokenizer and generation",
    "eos_token_id": "for the tokenizer and generation",
    "pad_token_id": "for the tokenizer and generation; padding is told by the mask",
    "cls_token_id": "for the tokenizer",
    "sep_token_id": "for the tokenizer",
    "mask_token_id": "for the tokenizer",
    "decoder_start_token_id": "for generation",
    "forced_bos_token_id": "for generation",
    "forced_eos_token_id": "for generation",
    "generation_config": "for generation",
    "keys_to_ignore_at_inference": "what a call returns",
    "name_or_path": "where the file came from",
    **dict.fromkeys(
        (
            "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature",
            "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "diversity_penalty",
            "output_scores", "return_dict_in_generate", "remove_invalid_values", "exponential_decay_length_penalty",
            "suppress_tokens", "begin_suppress_tokens", "extra_pos_embeddings", "force_bos_token_to_be_generated",
        ),
        "for generation",
    ),
}  # fmt: skip
"""Keys that many files carry and that cannot change what a model computes, with the reason."""

COMMON_FIELDS: tuple[ConfigField, ...] = (
    SupportedValues(
        "quantization_config", (None,), "its weights are packed in fewer bits; load the model as it was before packing"
    ),
    SupportedValues(
        "compression_config", (None,), "its weights are packed in fewer bits; load the unquantized checkpoint"
    ),
    SupportedValues(
        "pruned_heads", ({}, None), "some of its heads were cut out; save it from the library that did so, unpruned"
    ),
    SupportedValues("cross_attention_hidden_size", (None,), "it reads an encoder of another width"),
    SupportedValues("add_cross_attention", (False, None), "it reads an encoder that is not in the file"),
    SupportedValues("tie_encoder_decoder", (False, None), "both stacks would share their weights"),
)


@dataclass(frozen=True)
class Family:
    """How others store one kind of Transformer."""

    name: str
    """`model_type` in config.json."""
    architecture: str
    """The class that opens it elsewhere, with its head."""
    template: Mapping[str, Any]
    """What all of its models have in common, as a configuration with one `block` a stack."""
    fields: tuple[ConfigField, ...]
    weight_mappings: tuple[WeightMapping, ...]
    base_model_prefix: str = ""
    """What their names begin with, unless the file holds the bare trunk."""
    base_architecture: str | None = None
    """The class of the bare trunk, for models without a head."""
    ignored_weights: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may be passed over: a pattern of their whole name, and why. {past} is a layer past the last."""
    ignored_config_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of its config.json that cannot change what the model computes, and why."""
    attribute_map: Mapping[str, str] = field(default_factory=dict)
    """Other names that its config.json may use for a key."""
    weight_renamings: tuple[tuple[str, str], ...] = ()
    """Old spellings of tensor names: a pattern and what it is now."""

    def config_from_hf(
        self, hf_config: Mapping[str, Any], *, head: bool | None = None, pooler: bool | None = None
    ) -> tuple[Config, dict[str, Any], dict[str, str]]:
        """The configuration that a config.json describes, the keys it used, and those it passed over with the reason.

        Whether an encoder has a head and a pooler is told by the tensors, if they are known, else by `architectures`.
        """
        hf_config = self._apply_attribute_map(hf_config)
        tree = ConfigTree(self.template)
        reader = HFConfigReader(hf_config)
        if "is_causal" in hf_config and hf_config["is_causal"] is not (self.template["form"] != "encoder"):
            raise ConfigError(
                f"{self.name}: config.json's 'is_causal' is {hf_config['is_causal']!r}, which is another form"
            )
        bare = self.base_architecture is not None and hf_config.get("architectures") == [self.base_architecture]
        if head is False or (head is None and bare):
            tree.set("head", {"kind": "none"})
        if pooler or (
            pooler is None and bare and any(row.model_keys == ("pooler.dense",) for row in self.weight_mappings)
        ):
            tree.set("pooler", True)
        try:
            for entry in (*COMMON_FIELDS, *self.fields):
                entry.from_hf(reader, tree)
            config = tree.to_config()
        except CutawayError as error:
            raise ConfigError(f"{self.name}: {self._add_hf_key_to_error(str(error))}") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ConfigError(
                f"{self.name}: config.json holds a value of a kind that does not belong: {error}"
            ) from None
        known = {key for entry in (*COMMON_FIELDS, *self.fields) for key in entry.keys}
        reasons = IGNORED_CONFIG_KEYS | dict(self.ignored_config_keys)
        used = {key: value for key, value in hf_config.items() if key in known}
        passed = {key: reasons.get(key, UNKNOWN_KEY_REASON) for key in hf_config if key not in known}
        return config, used, passed

    def _apply_attribute_map(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Other names of a key replaced by its own; two that say different things are refused."""
        named = {key: value for key, value in hf_config.items() if key not in self.attribute_map}
        for other in self.attribute_map.keys() & hf_config.keys():
            key, value = self.attribute_map[other], hf_config[other]
            kept = named.setdefault(key, value)
            # (the number of layers is told by the tensors, and shortened models may keep the old one here)
            if kept is not None and value is not None and kept != value and other != "num_hidden_layers":
                raise ConfigError(
                    f"{self.name}: config.json says {value!r} for '{other}' and {kept!r} for '{key}', which are one;"
                    " remove one of them"
                )
        return named

    def _add_hf_key_to_error(self, message: str) -> str:
        """A problem at a path of ours, with the key of config.json that it came from."""
        path = re.sub(r"\[\d+\]", "", message.split(": ")[0]).replace(".leading_blocks", ".block")
        for entry in self.fields:
            paths = getattr(entry, "path", ())
            if entry.keys and path in ((paths,) if isinstance(paths, str) else paths):
                return f"config.json's '{entry.keys[0]}' does not fit ({message})"
        return message

    def config_to_hf(self, config: Config) -> dict[str, Any]:
        """The config.json that describes this configuration; refused where the family cannot say it."""
        if config.form != self.template["form"]:
            raise ConfigError(f"{self.name}: this is a model of form '{config.form}', not '{self.template['form']}'")
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
            again = self.config_from_hf(hf_config, head=not headless, pooler=getattr(config, "pooler", False))[0]
        except CutawayError as error:
            raise ConfigError(f"family '{self.name}' cannot describe this model: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError):
            raise ConfigError(
                f"family '{self.name}' cannot describe this model: its parts are of other kinds"
            ) from None
        lost = diff_configs(config, again)
        if lost:
            more = f" (and {len(lost) - 3} more)" if len(lost) > 3 else ""
            raise ConfigError(f"family '{self.name}' cannot describe this model: {'; '.join(lost[:3])}{more}")
        return {key: value for key, value in hf_config.items() if value is not MISSING}

    def reason_ignored(self, name: str, num_layers: int) -> str | None:
        """The reason to pass over a tensor of theirs in a model of so many layers, or None."""
        for pattern, why in self.ignored_weights.items():
            found = re.fullmatch(pattern.replace("{past}", r"(?P<past>\d+)"), name)
            if found and int(found.groupdict().get("past", num_layers)) >= num_layers:
                return why
        return None
