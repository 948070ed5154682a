"""Each analysis of a model of another library equals the same analysis of the cutaway model loaded from it."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from support.family_parity import randomize_weights
from support.other_models import PLAIN_SITES, LoraLinear, PeftWrapper, plain_copy
from support.tracing import count_hooks
from torch import Tensor, nn

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens import analysis, describe_model, sites
from cutaway.lens.analysis import LabeledTensor

LLAMA = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 0,
}  # fmt: skip
SETTINGS = {
    "llama": LLAMA,
    "gpt2": {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gemma3_text": LLAMA | {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": LLAMA | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}
CLEAN, CORRUPTED = [3, 7, 9, 21, 40, 5], [3, 7, 33, 21, 40, 5]
TOLERANCE = 1e-5

ANALYSES: dict[str, Callable[[Any], LabeledTensor]] = {
    "ablation": lambda m: analysis.ablation(m, CLEAN, SKIPPED_BLOCKS),
    "ablation of values": lambda m: analysis.ablation(m, CLEAN, {"z": {"attn.z": "mean"}, "q": {"attn.q": "mean"}}),
    "activation_patching": lambda m: analysis.activation_patching(m, CLEAN, CORRUPTED, 5),
    "activation_patching of resid_mid": lambda m: analysis.activation_patching(
        m, CLEAN, CORRUPTED, 5, site="resid_mid"
    ),
    "activation_patching by head": lambda m: analysis.activation_patching(
        m, CLEAN, CORRUPTED, 5, incorrect_token=6, site="attn.z", by_head=True
    ),
    "attribution_patching": lambda m: analysis.attribution_patching(m, CLEAN, CORRUPTED, 5),
    "attribution_patching by head": lambda m: analysis.attribution_patching(
        m, CLEAN, CORRUPTED, 5, incorrect_token=6, site="attn.z", by_head=True
    ),
    "attention_entropy": lambda m: analysis.attention_entropy(m, CLEAN),
    "attention_knockout": lambda m: analysis.attention_knockout(m, CLEAN),
    "cached_decoding_error": lambda m: analysis.cached_decoding_error(m, CLEAN),
    "component_effects": lambda m: analysis.component_effects(m, CLEAN, pairs=True),
    "component_effects by head": lambda m: analysis.component_effects(m, CLEAN, by_head=True, ablation="mean"),
    "component_effects by token": lambda m: analysis.component_effects(m, CLEAN, by_token=True),
    "direct_logit_attribution": lambda m: analysis.direct_logit_attribution(m, CLEAN, incorrect_token=9),
    "direct_logit_attribution by head": lambda m: analysis.direct_logit_attribution(
        m, CLEAN, 7, by_head=True, by_token=True
    ),
    "gradient_by_depth": lambda m: analysis.gradient_by_depth(m, CLEAN),
    "head_ablation": lambda m: analysis.head_ablation(m, CLEAN),
    "head_scores": lambda m: analysis.head_scores(m, repeat_len=8, batch_size=2),
    "logit_lens": lambda m: analysis.logit_lens(m, CLEAN),
    "logit_lens of a token": lambda m: analysis.logit_lens(m, CLEAN, 7, unit="logit"),
    "neuron_activations": lambda m: analysis.neuron_activations(m, CLEAN, 1, 3),
    "neuron_logit_effects": lambda m: analysis.neuron_logit_effects(m, 1, 3),
    "pair_ablation": lambda m: analysis.pair_ablation(m, CLEAN),
    "path_patching": lambda m: analysis.path_patching(m, CLEAN, CORRUPTED, 5, "blocks.0.attn.out"),
    "path_patching of a head": lambda m: analysis.path_patching(m, CLEAN, CORRUPTED, 5, "blocks.0.attn.z", heads=[1]),
    "position_similarity": lambda m: analysis.position_similarity(m, 7, seq_len=5),
    "resid_norms": lambda m: analysis.resid_norms(m, CLEAN),
    "update_cosine_similarities": lambda m: analysis.update_cosine_similarities(m, CLEAN),
    "update_norm_ratios": lambda m: analysis.update_norm_ratios(m, CLEAN),
}
SKIPPED_BLOCKS = {
    f"without block {layer}": {f"blocks.{layer}.attn.out": "zero", f"blocks.{layer}.ffn.out": "zero"}
    for layer in range(2)
}
NOT_COMPARED = {
    "LabeledTensor": "the class of the results",
    "activation_checkpointing_cost": "measures cutaway's own activation checkpointing, with times",
    "gradient_by_placement": "takes a configuration, not a model",
}
"""Exported names without a comparison."""
HAS_EXPERTS = "has experts, each with its own neurons"
REFUSED = {
    ("qwen3_moe", "neuron_activations"): HAS_EXPERTS,
    ("qwen3_moe", "neuron_logit_effects"): HAS_EXPERTS,
    ("plain", "cached_decoding_error"): "the KV cache of a PlainGPT is not known",
    ("plain", "position_similarity"): "the position method of a PlainGPT is not known",
}
"""(model, analysis) that raise an error, and the reason. Experts are refused in cutaway models too."""


def test_every_analysis_is_compared() -> None:
    compared = {name.split()[0] for name in ANALYSES}
    assert compared | NOT_COMPARED.keys() == set(analysis.__all__)
    assert not compared & NOT_COMPARED.keys()


def load_copy(hf_model: Any) -> Any:
    with TemporaryDirectory() as directory:
        hf_model.save_pretrained(directory)
        return ct.load(directory).model


def build_hf(name: str) -> Any:
    config = transformers.CONFIG_MAPPING[name](**SETTINGS[name])
    hf_model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    randomize_weights(hf_model, 0)
    return hf_model


@cache
def build_pair(name: str) -> tuple[Any, Any]:
    """Return a model of another library and an equal cutaway model."""
    if name == "plain":
        model = ct.build("tiny-gpt", seed=0).eval()
        g = torch.Generator().manual_seed(0)
        for parameter in model.parameters():  # a zero bias or a gain of one would hide a mistake
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=g)
        plain = plain_copy(model)
        return describe_model(plain, sites=PLAIN_SITES, final_norm="ln_f", unembed="lm_head", num_heads=4), model
    if name == "lora":
        peft_model = PeftWrapper(build_hf("llama"), ("q_proj", "o_proj", "down_proj", "lm_head"))
        return peft_model, load_copy(peft_model.merge_and_unload())
    hf_model = build_hf(name)
    assert hf_model.config._attn_implementation == "sdpa"  # the default
    return hf_model, load_copy(hf_model)


def assert_close(actual: LabeledTensor, expected: LabeledTensor) -> None:
    assert actual.axes == expected.axes
    assert actual.labels == expected.labels
    assert actual.title == expected.title
    scale = max(1.0, float(expected.values.nan_to_num().abs().max()))
    torch.testing.assert_close(
        actual.values.double(), expected.values.double(), rtol=0, atol=TOLERANCE * scale, equal_nan=True
    )


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", [*SETTINGS, "lora", "plain"])
@pytest.mark.parametrize("analysis_name", ANALYSES)
def test_analysis_equals_cutaway(name: str, analysis_name: str) -> None:
    other, cutaway_model = build_pair(name)
    run = ANALYSES[analysis_name]
    if (name, analysis_name) in REFUSED:
        with pytest.raises(InputError, match=REFUSED[name, analysis_name]):
            run(other)
        return
    assert_close(run(other), run(cutaway_model))
    assert count_hooks(getattr(other, "model", other)) == 0


def test_default_ablation_skips_blocks() -> None:
    hf_model, cutaway_model = build_pair("llama")
    expected = analysis.ablation(cutaway_model, CLEAN, {f"without block {i}": {f"blocks.{i}": "skip"} for i in (0, 1)})
    assert_close(analysis.ablation(hf_model, CLEAN), expected)


def test_structural_edits_and_checkpointing_are_refused() -> None:
    hf_model, _ = build_pair("llama")
    with pytest.raises(InputError, match=r"'swap' is a structural edit, .*; load the model with ct\.load"):
        analysis.ablation(hf_model, CLEAN, {"swap": {"blocks.0": "swap"}})
    with pytest.raises(InputError, match=r"LlamaForCausalLM of another library; load it with ct\.load"):
        analysis.activation_checkpointing_cost(hf_model, CLEAN)
    with pytest.raises(InputError, match=r"the structure of Linear is not known: .*describe_model\(sites=…\)"):
        analysis.logit_lens(nn.Linear(2, 2), CLEAN)


def test_eager_attention_is_analyzed_but_not_edited() -> None:
    hf_model, cutaway_model = build_pair("llama")
    eager = deepcopy(hf_model)
    eager.set_attn_implementation("eager")
    for name in ("attention_entropy", "head_scores", "direct_logit_attribution by head"):
        assert_close(ANALYSES[name](eager), ANALYSES[name](cutaway_model))
    with pytest.raises(InputError, match="attn_implementation='sdpa'"):
        analysis.attention_knockout(eager, CLEAN)


def test_encoder_and_encoder_decoder_equal_cutaway() -> None:
    sizes = {"vocab_size": 61, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 2, "num_heads": 3, "pad_token_id": 0}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
    bert_sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=61, **bert_sizes)).eval()
    source = [9, 12, 15, 18]
    for hf_model, kwargs in ((t5, {"source": source}), (bert, {})):
        randomize_weights(hf_model, 0)
        cutaway_model = load_copy(hf_model)
        analyses: list[Callable[[Any], LabeledTensor]] = [
            lambda m, kwargs=kwargs: analysis.logit_lens(m, CLEAN, **kwargs),  # type: ignore[misc]
            lambda m, kwargs=kwargs: analysis.attention_knockout(m, CLEAN, **kwargs),  # type: ignore[misc]
            lambda m, kwargs=kwargs: analysis.component_effects(m, CLEAN, by_head=True, **kwargs),  # type: ignore[misc]
            lambda m, kwargs=kwargs: analysis.gradient_by_depth(m, CLEAN, **kwargs),  # type: ignore[misc]
        ]
        if kwargs:
            analyses += [
                lambda m: analysis.direct_logit_attribution(m, CLEAN, by_head=True, by_token=True, source=source),
                lambda m: analysis.attention_knockout(m, CLEAN, source=source, to_source=True),
                lambda m: analysis.cached_decoding_error(m, CLEAN, source=source),
            ]
        for run in analyses:
            assert_close(run(hf_model), run(cutaway_model))


def test_structure_shares_storage_and_follows_the_model() -> None:
    hf_model = build_hf("llama")
    described = describe_model(hf_model)
    head = described.structure.head.matrix.weight
    assert head.data_ptr() == hf_model.lm_head.weight.data_ptr()
    assert described.structure.decoder.blocks[0].attn.f.q.weight.is_meta  # not read by any analysis
    before = analysis.logit_lens(hf_model, CLEAN)
    with torch.no_grad():
        hf_model.lm_head.weight.mul_(2)
    assert not torch.equal(analysis.logit_lens(hf_model, CLEAN).values, before.values)


def test_adapter_is_part_of_sites_and_merged_weights() -> None:
    peft_model, merged = build_pair("lora")
    tokens = torch.tensor([CLEAN])
    with torch.no_grad():
        with ct.trace(peft_model, "attn.q", "attn.z", "attn.out", "ffn.out", "logits") as t:
            peft_model(tokens)
        with ct.trace(merged, *t) as expected:
            merged(tokens)
    for name in t:
        torch.testing.assert_close(t[name].as_subclass(Tensor), expected[name].as_subclass(Tensor), rtol=0, atol=1e-4)
    base = deepcopy(peft_model)
    for module in base.modules():
        if isinstance(module, LoraLinear):
            module.lora_B["default"].data.zero_()
    assert not torch.allclose(
        analysis.neuron_logit_effects(base, 1, 3).values, analysis.neuron_logit_effects(peft_model, 1, 3).values
    )


def test_transformers_tokenizer_encodes_texts(tmp_path: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["the", "cat", "sat", "on", "a", "mat", "<unk>"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    hf_model, _ = build_pair("llama")
    model = describe_model(hf_model, tokenizer=tokenizer)
    result = analysis.logit_lens(model, "the cat sat", "mat")
    assert result.labels[1] == ("the", "cat", "sat")
    assert torch.equal(result.values, analysis.logit_lens(hf_model, [0, 1, 2], 5).values)
    assert analysis.head_scores(model, repeat_len=4, batch_size=1).values.shape == (2, 4, 4)
    with pytest.raises(InputError, match=r"there is no tokenizer; pass token ids, .*tokenizer=…"):
        analysis.logit_lens(hf_model, "the cat")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"blocks.{i}.attn.outt": "h.{i}.attn"},
            r"'blocks.{i}.attn.outt', which is not a site; use one of .*attn\.out",
        ),
        (
            {"blocks.{i}.ffn.out": "h.{i}.mpl"},
            r"sites\['blocks.{i}.ffn.out'\] is 'h.0.mpl', .* similar paths: .*h.0.mlp",
        ),
        ({"blocks.{i}.resid_post": "h.1"}, r"write {i} for the index of the layer"),
        ({"blocks.{i}.resid_post": "blocks.{i}"}, r"is 'blocks.0', but the model has no such module"),
    ],
)
def test_wrong_site_paths_are_errors(changes: dict[str, str], message: str) -> None:
    plain = build_pair("plain")[0].model
    with pytest.raises(InputError, match=message):
        describe_model(plain, sites=PLAIN_SITES | changes, final_norm="ln_f", unembed="lm_head", num_heads=4)


def test_wrong_arguments_of_describe_model_are_errors() -> None:
    plain = build_pair("plain")[0].model
    resid = {"blocks.{i}.resid_post": "h.{i}"}
    for kwargs, message in (
        ({"sites": {}, "unembed": "lm_head"}, "sites has no 'blocks.{i}.resid_post'"),
        ({"sites": resid}, "unembed is missing"),
        ({"sites": resid, "unembed": "head"}, "unembed is 'head', but the model has no such module"),
        ({"sites": resid, "unembed": "h.0.attn"}, "has no weight matrix"),
        ({"sites": resid, "unembed": "lm_head", "final_norm": "ln"}, "final_norm is 'ln', but the model has no"),
        ({"sites": PLAIN_SITES, "unembed": "lm_head"}, "num_heads is missing"),
        ({"unembed": "lm_head"}, "sites is missing"),
    ):
        with pytest.raises(InputError, match=message):
            describe_model(plain, **kwargs)  # type: ignore[arg-type]


def test_stated_sites_equal_cutaway() -> None:
    described, cutaway_model = build_pair("plain")
    tokens = torch.tensor([CLEAN])
    with torch.no_grad():
        with ct.trace(described, "*") as t:
            described.model(tokens)
        with ct.trace(cutaway_model, "*") as expected:
            cutaway_model(tokens)
    assert list(t) == list(expected) == list(sites(described))
    for name in t:
        assert t[name].axes == expected[name].axes
        pair = (value[name].as_subclass(Tensor).clamp(min=-1e30) for value in (t, expected))
        torch.testing.assert_close(*pair, rtol=0, atol=1e-4)
    assert t.estimate_memory(1, len(CLEAN)).nbytes == t.nbytes
    for name in t:
        halve: Any = {name: {"do": "scale", "value": 0.5}}
        with torch.no_grad(), ct.edit(described, halve):
            edited = described.model(tokens)
        with torch.no_grad(), ct.edit(cutaway_model, halve):
            torch.testing.assert_close(edited, cutaway_model(tokens), rtol=0, atol=1e-4, msg=name)
