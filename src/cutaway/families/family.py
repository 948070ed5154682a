"""A family: a table of fields, a table of rows, and what may be passed over. Read in both directions, without torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cutaway.config import Config
from cutaway.errors import ConfigError, CutawayError
from cutaway.families.fields import Field, Only, Theirs
from cutaway.families.report import UNKNOWN
from cutaway.families.rope import Rope
from cutaway.families.rows import Row
from cutaway.families.tree import MISSING, Tree, differences

HARMLESS = {
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

EVERYWHERE: tuple[Field, ...] = (
    Only(
        "quantization_config", (None,), "its weights are packed in fewer bits; load the model as it was before packing"
    ),
    Only("compression_config", (None,), "its weights are packed in fewer bits; load the unquantised checkpoint"),
    Only("pruned_heads", ({}, None), "some of its heads were cut out; save it from the library that did so, unpruned"),
    Only("cross_attention_hidden_size", (None,), "it reads an encoder of another width"),
    Only("add_cross_attention", (False, None), "it reads an encoder that is not in the file"),
    Only("tie_encoder_decoder", (False, None), "both stacks would share their weights"),
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
    fields: tuple[Field, ...]
    rows: tuple[Row, ...]
    prefix: str = ""
    """What their names begin with, unless the file holds the bare trunk."""
    trunk: str | None = None
    """The class of the bare trunk, for models without a head."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may be passed over: a pattern of their whole name, and why. {past} is a layer past the last."""
    harmless: Mapping[str, str] = field(default_factory=dict)
    """Keys of its config.json that cannot change what the model computes, and why."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names that its config.json may use for a key."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Old spellings of tensor names: a pattern and what it is now."""

    def read(
        self, theirs: Mapping[str, Any], *, head: bool | None = None, pooler: bool | None = None
    ) -> tuple[Config, dict[str, Any], dict[str, str]]:
        """The configuration that a config.json describes, the keys it used, and those it passed over with the reason.

        Whether an encoder has a head and a pooler is told by the tensors, if they are known, else by `architectures`.
        """
        theirs = self._one_name_a_key(theirs)
        ours = Tree(self.template)
        seen = Theirs(theirs)
        if "is_causal" in theirs and theirs["is_causal"] is not (self.template["form"] != "encoder"):
            raise ConfigError(
                f"{self.name}: config.json's 'is_causal' is {theirs['is_causal']!r}, which is another form"
            )
        bare = self.trunk is not None and theirs.get("architectures") == [self.trunk]
        if head is False or (head is None and bare):
            ours.set("head", {"kind": "none"})
        if pooler or (pooler is None and bare and any(row.targets == ("pooler.dense",) for row in self.rows)):
            ours.set("pooler", True)
        try:
            for entry in (*EVERYWHERE, *self.fields):
                entry.read(seen, ours)
            config = ours.finish()
        except CutawayError as error:
            raise ConfigError(f"{self.name}: {self._in_their_words(str(error))}") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ConfigError(
                f"{self.name}: config.json holds a value of a kind that does not belong: {error}"
            ) from None
        known = {key for entry in (*EVERYWHERE, *self.fields) for key in entry.keys}
        reasons = HARMLESS | dict(self.harmless)
        used = {key: value for key, value in theirs.items() if key in known}
        passed = {key: reasons.get(key, UNKNOWN) for key in theirs if key not in known}
        return config, used, passed

    def _one_name_a_key(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """Other names of a key replaced by its own; two that say different things are refused."""
        named = {key: value for key, value in theirs.items() if key not in self.aliases}
        for other in self.aliases.keys() & theirs.keys():
            key, value = self.aliases[other], theirs[other]
            kept = named.setdefault(key, value)
            # (the number of layers is told by the tensors, and shortened models may keep the old one here)
            if kept is not None and value is not None and kept != value and other != "num_hidden_layers":
                raise ConfigError(
                    f"{self.name}: config.json says {value!r} for '{other}' and {kept!r} for '{key}', which are one;"
                    " remove one of them"
                )
        return named

    def _in_their_words(self, problem: str) -> str:
        """A problem at a path of ours, with the key of config.json that it came from."""
        path = re.sub(r"\[\d+\]", "", problem.split(": ")[0]).replace(".lead", ".block")
        for entry in self.fields:
            paths = getattr(entry, "path", ())
            if entry.keys and path in ((paths,) if isinstance(paths, str) else paths):
                return f"config.json's '{entry.keys[0]}' does not fit ({problem})"
        return problem

    def write(self, config: Config) -> dict[str, Any]:
        """The config.json that describes this configuration; refused where the family cannot say it."""
        if config.form != self.template["form"]:
            raise ConfigError(f"{self.name}: this is a model of form '{config.form}', not '{self.template['form']}'")
        headless = getattr(config.head, "kind", None) == "none"
        theirs: dict[str, Any] = {"architectures": [self.trunk if headless and self.trunk else self.architecture]}
        theirs["model_type"] = self.name
        ours = Tree.of(config)
        try:
            for entry in self.fields:
                entry.write(ours, theirs)
            for entry in self.fields:
                if isinstance(entry, Rope):
                    entry.repeat(theirs)
            again = self.read(theirs, head=not headless, pooler=getattr(config, "pooler", False))[0]
        except CutawayError as error:
            raise ConfigError(f"family '{self.name}' cannot describe this model: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError):
            raise ConfigError(
                f"family '{self.name}' cannot describe this model: its parts are of other kinds"
            ) from None
        lost = differences(config, again)
        if lost:
            more = f" (and {len(lost) - 3} more)" if len(lost) > 3 else ""
            raise ConfigError(f"family '{self.name}' cannot describe this model: {'; '.join(lost[:3])}{more}")
        return {key: value for key, value in theirs.items() if value is not MISSING}

    def why_ignored(self, name: str, layers: int) -> str | None:
        """The reason to pass over a tensor of theirs in a model of so many layers, or None."""
        for pattern, why in self.ignored.items():
            found = re.fullmatch(pattern.replace("{past}", r"(?P<past>\d+)"), name)
            if found and int(found.groupdict().get("past", layers)) >= layers:
                return why
        return None
