"""A trace of a transformers model by site name equals a trace of the cutaway model loaded from it."""

import copy
from dataclasses import dataclass, field
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from support.activation_parity import assert_same, call_arguments, compare_activations
from support.family_parity import randomize_weights
from support.tracing import count_hooks
from torch import Tensor, nn

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens import sites

CAUSAL, MASKED, SEQ2SEQ = (
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForMaskedLM,
    transformers.AutoModelForSeq2SeqLM,
)
LLAMA = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "pad_token_id": 0,
}
GEMMA = LLAMA | {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
NEOX = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "head_dim")} | {
    "hidden_size": 32
}
BERT = NEOX | {"max_position_embeddings": 40}
GPT2 = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40}
T5 = {"vocab_size": 61, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 2, "num_heads": 3, "pad_token_id": 0}
BART = {
    "vocab_size": 61,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
OPT = {
    "vocab_size": 61,
    "hidden_size": 24,
    "word_embed_proj_dim": 24,
    "ffn_dim": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
RESID = {"resid_pre", "resid_post"}
ATTENTION = {"attn.in", "attn.v", "attn.pattern", "attn.z", "attn.out"}
FFN = {"ffn.in", "ffn.hidden", "ffn.out"}
ROPE_SITES = RESID | ATTENTION | FFN
MOE_SITES = RESID | ATTENTION | {"resid_mid", "ffn.in", "ffn.out"}
NO_ROPE_SITES = ROPE_SITES | {"resid_mid", "attn.q", "attn.k"}


@dataclass
class Peer:
    """Settings of a family's small model, and the sites that each of its blocks must have."""

    settings: dict[str, Any]
    block_sites: set[str] = field(default_factory=lambda: ROPE_SITES | {"resid_mid"})
    auto_class: Any = CAUSAL


PEERS = {
    "gpt2": Peer(GPT2, NO_ROPE_SITES),
    "llama": Peer(LLAMA),
    "qwen3": Peer(LLAMA),
    "gemma2": Peer(GEMMA),
    "gemma3_text": Peer(GEMMA),
    "olmo2": Peer({key: value for key, value in LLAMA.items() if key != "head_dim"}),
    "granite": Peer({key: value for key, value in LLAMA.items() if key != "head_dim"} | {"residual_multiplier": 0.3}),
    "gpt_neox": Peer(NEOX, ROPE_SITES),
    "phi": Peer(NEOX, ROPE_SITES),
    "opt": Peer(OPT, NO_ROPE_SITES),
    "qwen3_moe": Peer(LLAMA | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}, MOE_SITES),
    "albert": Peer(BERT | {"embedding_size": 12, "num_hidden_groups": 1}, NO_ROPE_SITES - {"attn.in"}, MASKED),
    "bert": Peer(BERT, NO_ROPE_SITES, MASKED),
    "t5": Peer(T5, NO_ROPE_SITES, SEQ2SEQ),
    "bart": Peer(BART, NO_ROPE_SITES, SEQ2SEQ),
}


@cache
def build_pair(name: str) -> tuple[Any, Any]:
    """Return a transformers model with random weights, and the cutaway model loaded from it."""
    peer = PEERS[name]
    config = transformers.CONFIG_MAPPING[name](**peer.settings)
    hf_model = peer.auto_class.from_config(config, attn_implementation="eager").float().eval()
    randomize_weights(hf_model, 0)
    with TemporaryDirectory() as directory:
        hf_model.save_pretrained(directory)
        return hf_model, ct.load(directory).model


def random_inputs(cutaway_model: Any) -> tuple[Tensor, ...]:
    tokens = torch.randint(5, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    return (tokens, tokens[:, :7]) if len(cutaway_model.stacks) > 1 else (tokens,)


@pytest.mark.parametrize("name", PEERS)
def test_activations_equal_cutaway(name: str) -> None:
    hf_model, cutaway_model = build_pair(name)
    compare_activations(hf_model, cutaway_model, random_inputs(cutaway_model))
    hf_sites = sites(hf_model)
    prefixes = [f"{stack}." for stack in cutaway_model.stacks] if len(cutaway_model.stacks) > 1 else [""]
    for prefix in prefixes:
        suffixes = {
            site.split(".", 3 if prefix else 2)[-1] for site in hf_sites if site.startswith(f"{prefix}blocks.0.")
        }
        assert suffixes >= PEERS[name].block_sites, PEERS[name].block_sites - suffixes
        assert hf_sites.keys() >= {f"{prefix}embed", f"{prefix}final_norm"}


@pytest.mark.parametrize("name", PEERS)
def test_hidden_states_and_patterns_equal_the_model_output(name: str) -> None:
    hf_model, cutaway_model = build_pair(name)
    tokens = random_inputs(cutaway_model)
    with torch.no_grad(), ct.trace(hf_model, "resid_post", "pattern", "embed", "final_norm") as t:
        out = hf_model(**call_arguments(tokens), output_hidden_states=True, output_attentions=True)
    if len(cutaway_model.stacks) == 1:
        outputs = [("", "attn", out.hidden_states, out.attentions)]
    else:
        outputs = [
            ("encoder.", "attn", out.encoder_hidden_states, out.encoder_attentions),
            ("decoder.", "attn", out.decoder_hidden_states, out.decoder_attentions),
            ("decoder.", "cross", out.decoder_hidden_states, out.cross_attentions),
        ]
    for prefix, kind, hidden_states, patterns in outputs:
        assert torch.equal(t[f"{prefix}embed"], hidden_states[0])
        for layer, pattern in enumerate(patterns):
            assert torch.equal(t[f"{prefix}blocks.{layer}.{kind}.pattern"], pattern)
            is_last = layer == len(patterns) - 1
            after = t[f"{prefix}final_norm"] if is_last else t[f"{prefix}blocks.{layer}.resid_post"]
            assert torch.equal(after, hidden_states[layer + 1])


@pytest.mark.parametrize("name", PEERS)
def test_gradients_equal_cutaway(name: str) -> None:
    hf_model, cutaway_model = build_pair(name)
    tokens = random_inputs(cutaway_model)
    names = list(sites(hf_model))
    weight = torch.randn(2, tokens[-1].shape[1], 61, generator=torch.Generator().manual_seed(2))
    with ct.trace(hf_model, *names, gradients=True) as t:
        logits = hf_model(**call_arguments(tokens)).logits
        (logits * weight).sum().backward()
    with ct.trace(cutaway_model, *names, gradients=True) as expected:
        (cutaway_model(*tokens) * weight).sum().backward()
    with torch.no_grad():
        assert torch.equal(logits, hf_model(**call_arguments(tokens)).logits)
    for site in names:
        assert_same(t.gradient(site), expected.gradient(site), site)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["gpt2", "granite", "gpt_neox", "opt", "albert", "t5", "bart"])
def test_edits_equal_cutaway(name: str) -> None:
    hf_model, cutaway_model = build_pair(name)
    tokens, before = random_inputs(cutaway_model), count_hooks(hf_model)
    with torch.no_grad():
        plain = hf_model(**call_arguments(tokens)).logits
        for site in sites(hf_model):
            if site.endswith("pattern"):  # the pattern that eager attention returns
                with pytest.raises(InputError, match=r"ct\.load"), ct.edit(hf_model, {site: "zero"}):
                    hf_model(**call_arguments(tokens))
                continue
            with ct.edit(hf_model, {site: {"do": "scale", "value": 1.0}}):
                assert torch.equal(hf_model(**call_arguments(tokens)).logits, plain), site
            halve: Any = {site: {"do": "scale", "value": 0.5}}
            with ct.edit(hf_model, halve):
                edited = hf_model(**call_arguments(tokens)).logits
            with ct.edit(cutaway_model, halve):
                assert_same(edited, cutaway_model(*tokens), site)
            assert not torch.equal(edited, plain), site
    assert count_hooks(hf_model) == before


def test_selection_and_memory_estimate() -> None:
    hf_model, cutaway_model = build_pair("llama")
    selection: dict[str, Any] = {"layers": -1, "positions": [0, -1], "heads": [1, 3]}
    names = ("resid_post", "pattern", "attn.v", "attn.z", "logits")
    with torch.no_grad():
        with ct.trace(hf_model, *names, **selection) as t:
            hf_model(**call_arguments(random_inputs(cutaway_model)))
        with ct.trace(cutaway_model, *names, **selection) as expected:
            cutaway_model(*random_inputs(cutaway_model))
    assert list(t) == list(expected)
    for site in t:
        assert_same(t[site], expected[site], site)
    assert t.estimate_memory(2, 9).nbytes == t.nbytes
    assert repr(t) == repr(expected)


def test_each_generation_step_is_one_call() -> None:
    hf_model, cutaway_model = build_pair("gpt2")
    (tokens,) = random_inputs(cutaway_model)
    with torch.no_grad():
        with ct.trace(hf_model, "resid_post", "attn.v", layers=0) as t:
            sequence = hf_model.generate(tokens, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
        with ct.trace(hf_model, "resid_post", "attn.v", layers=0) as expected:
            hf_model(sequence[:, :-1])
    for site in t:
        assert [value.shape[1] for value in t.calls(site)] == [9, 1, 1, 1]
        assert_same(torch.cat(t.calls(site), 1), expected[site], site)


def test_models_without_lm_head_have_all_sites_but_logits() -> None:
    hf_model, _ = build_pair("llama")
    classifier = transformers.LlamaForSequenceClassification(hf_model.config).eval()
    for model in (hf_model.model, classifier):
        assert sites(hf_model).keys() - sites(model).keys() == {"logits"}
        with pytest.raises(InputError, match="no language modeling head"):
            ct.trace(model, "logits")
    tokens = random_inputs(build_pair("llama")[1])[0]
    with torch.no_grad(), ct.trace(hf_model.model, "final_norm") as t:
        out = hf_model.model(tokens)
    assert torch.equal(t["final_norm"], out.last_hidden_state)
    headless = transformers.AlbertModel(build_pair("albert")[0].config).eval()
    with torch.no_grad(), ct.trace(headless, "resid_post") as t:
        hidden_states = headless(tokens, output_hidden_states=True).hidden_states
        assert t.stack_activation("resid_post").equal(torch.stack(hidden_states[1:]))


def test_unavailable_sites_have_a_reason() -> None:
    hf_model, _ = build_pair("llama")
    flex = transformers.AutoModelForCausalLM.from_config(hf_model.config, attn_implementation="flex_attention")
    assert "blocks.0.attn.pattern" not in sites(flex)
    shared = transformers.AlbertForMaskedLM(build_pair("albert")[0].config)
    shared.set_attn_implementation("sdpa")
    for model, site, message in (
        (flex, "attn.pattern", "attn_implementation='sdpa'"),
        (hf_model, "blocks.0.attn.q", r"RoPE is applied inside its attention module; .*'sdpa' or ct\.load"),
        (hf_model, "scores", "local to its attention module"),
        (shared, "attn.pattern", "its layers share a block"),
        (build_pair("qwen3_moe")[0], "ffn.router", "routing weights"),
        (nn.Sequential(nn.Linear(2, 2)), "resid_post", "its sites are module paths"),
        (nn.Sequential(nn.Linear(2, 2)), "1.out", "its sites are module paths"),
    ):
        with pytest.raises(InputError, match=message):
            ct.trace(model, site)


class AdapterLinear(nn.Module):
    """A base layer plus a parallel layer, as LoRA adapters have it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.adapter = base, nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.adapter(x)


@pytest.mark.nightly
def test_adapter_modules_are_traced() -> None:
    hf_model = copy.deepcopy(build_pair("llama")[0])
    attention = hf_model.model.layers[0].self_attn
    attention.v_proj = AdapterLinear(attention.v_proj)
    (tokens,) = random_inputs(build_pair("llama")[1])
    with torch.no_grad(), ct.trace(hf_model, "attn.in", "attn.v", layers=0) as t:
        hf_model(tokens)
    with torch.no_grad():
        assert torch.equal(t["attn.v"].flatten(-2), attention.v_proj(t["attn.in"]))


class InPlaceModel(nn.Module):
    """Has an in-place activation and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 4), nn.ReLU(inplace=True), DictOutput()

    def forward(self, x: Tensor) -> dict[str, Any]:
        return self.last(scale=2.0, x=self.act(self.first(x)))


class DictOutput(nn.Module):
    def forward(self, x: Tensor, scale: float) -> dict[str, Any]:
        return {"scale": scale, "x": x * scale, "nothing": None}


def test_arbitrary_module_is_traced_by_path() -> None:
    model, x = InPlaceModel(), torch.randn(3, 4)
    assert list(sites(model)) == [f"{path}.{kind}" for path in ("first", "act", "last") for kind in ("in", "out")]
    with ct.trace(model, "*", gradients=True) as t:
        out = model(x)
        out["x"].sum().backward()
    assert not count_hooks(model)
    assert torch.equal(t["first.in"], x)
    assert torch.equal(t["first.out"], model.first(x)), "the in-place ReLU overwrote it"
    assert torch.equal(t["last.in"], t["act.out"])
    assert torch.equal(t["last.out"], out["x"])
    assert torch.equal(t.gradient("last.in"), torch.full((3, 4), 2.0))
    assert "· 3 × · 4" in repr(t["first.in"])
    assert "last.out" in repr(t)
    for call in (lambda: ct.trace(model, "last.in", positions=0), lambda: t.estimate_memory(1, 3)):
        with pytest.raises(InputError):
            call()


def test_arbitrary_module_is_edited_by_path() -> None:
    model, x = InPlaceModel(), torch.randn(3, 4)
    with ct.edit(model, {"last.in": "zero"}), ct.trace(model, "last.out") as t:
        assert not model(x)["x"].any()
    assert not t["last.out"].any()
    with ct.edit(model, {"last.out": {"do": "scale", "value": 3.0}}):
        output = model(x)
    assert torch.equal(output["x"], 3.0 * model(x)["x"])
    assert output["scale"] == 2.0
    with pytest.raises(InputError, match="batch and token axes"), ct.edit(model, {"last.in": "mean"}):
        model(x)
    with pytest.raises(InputError, match="'skip' is a structural edit"):
        ct.edit(model, {"last": "skip"})
    assert not count_hooks(model)


def test_non_module_is_an_error() -> None:
    with pytest.raises(InputError, match=r"nn\.Module"):
        ct.trace("gpt2", "embed")
