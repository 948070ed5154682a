"""A trace of another library's model, by our names ≡ a trace of ours that was loaded from it."""

import copy
from dataclasses import dataclass, field
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from support.activation_parity import assert_same, call_arguments, compare_activations, count_hooks
from support.family_parity import randomize_weights
from torch import Tensor, nn

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens import sites

CAUSAL, MASKED, BOTH = (
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
STREAM = {"resid_pre", "resid_post"}
ATTENTION = {"attn.in", "attn.v", "attn.pattern", "attn.z", "attn.out"}
FFN = {"ffn.in", "ffn.hidden", "ffn.out"}
TURNED = STREAM | ATTENTION | FFN
MIXED = STREAM | ATTENTION | {"resid_mid", "ffn.in", "ffn.out"}
STILL = TURNED | {"resid_mid", "attn.q", "attn.k"}


@dataclass
class Peer:
    """A family's small model, and which sites every block of it must have."""

    settings: dict[str, Any]
    ends: set[str] = field(default_factory=lambda: TURNED | {"resid_mid"})
    auto: Any = CAUSAL


PEERS = {
    "gpt2": Peer(GPT2, STILL),
    "llama": Peer(LLAMA),
    "qwen3": Peer(LLAMA),
    "gemma2": Peer(GEMMA),
    "gemma3_text": Peer(GEMMA),
    "olmo2": Peer({key: value for key, value in LLAMA.items() if key != "head_dim"}),
    "granite": Peer({key: value for key, value in LLAMA.items() if key != "head_dim"} | {"residual_multiplier": 0.3}),
    "gpt_neox": Peer(NEOX, TURNED),
    "phi": Peer(NEOX, TURNED),
    "opt": Peer(OPT, STILL),
    "qwen3_moe": Peer(LLAMA | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}, MIXED),
    "albert": Peer(BERT | {"embedding_size": 12, "num_hidden_groups": 1}, STILL - {"attn.in"}, MASKED),
    "bert": Peer(BERT, STILL, MASKED),
    "t5": Peer(T5, STILL, BOTH),
    "bart": Peer(BART, STILL, BOTH),
}


@cache
def made(name: str) -> tuple[Any, Any]:
    """Theirs with random weights, and ours loaded from it."""
    peer = PEERS[name]
    config = transformers.CONFIG_MAPPING[name](**peer.settings)
    theirs = peer.auto.from_config(config, attn_implementation="eager").float().eval()
    randomize_weights(theirs, 0)
    with TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        return theirs, ct.load(directory).model


def texts(ours: Any) -> tuple[Tensor, ...]:
    tokens = torch.randint(5, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    return (tokens, tokens[:, :7]) if len(ours.stacks) > 1 else (tokens,)


@pytest.mark.parametrize("name", PEERS)
def test_values_in_theirs_are_those_in_ours(name: str) -> None:
    theirs, ours = made(name)
    compare_activations(theirs, ours, texts(ours))
    known = sites(theirs)
    stacks = [f"{stack}." for stack in ours.stacks] if len(ours.stacks) > 1 else [""]
    for stack in stacks:
        found = {name.split(".", 3 if stack else 2)[-1] for name in known if name.startswith(f"{stack}blocks.0.")}
        assert found >= PEERS[name].ends, PEERS[name].ends - found
        assert known.keys() >= {f"{stack}embed", f"{stack}final_norm"}


@pytest.mark.parametrize("name", PEERS)
def test_streams_and_patterns_are_what_the_peer_tells_itself(name: str) -> None:
    theirs, ours = made(name)
    tokens = texts(ours)
    with torch.no_grad(), ct.trace(theirs, "resid_post", "pattern", "embed", "final_norm") as t:
        out = theirs(**call_arguments(tokens), output_hidden_states=True, output_attentions=True)
    if len(ours.stacks) == 1:
        told = [("", "attn", out.hidden_states, out.attentions)]
    else:
        told = [
            ("encoder.", "attn", out.encoder_hidden_states, out.encoder_attentions),
            ("decoder.", "attn", out.decoder_hidden_states, out.decoder_attentions),
            ("decoder.", "cross", out.decoder_hidden_states, out.cross_attentions),
        ]
    for stack, kind, stream, patterns in told:
        assert torch.equal(t[f"{stack}embed"], stream[0])
        for layer, pattern in enumerate(patterns):
            assert torch.equal(t[f"{stack}blocks.{layer}.{kind}.pattern"], pattern)
            after = t[f"{stack}blocks.{layer}.resid_post"] if layer < len(patterns) - 1 else t[f"{stack}final_norm"]
            assert torch.equal(after, stream[layer + 1])


@pytest.mark.parametrize("name", PEERS)
def test_gradients_in_theirs_are_those_in_ours(name: str) -> None:
    theirs, ours = made(name)
    tokens = texts(ours)
    known = list(sites(theirs))
    weight = torch.randn(2, tokens[-1].shape[1], 61, generator=torch.Generator().manual_seed(2))
    with ct.trace(theirs, *known, gradients=True) as t:
        logits = theirs(**call_arguments(tokens)).logits
        (logits * weight).sum().backward()
    with ct.trace(ours, *known, gradients=True) as own:
        (ours(*tokens) * weight).sum().backward()
    with torch.no_grad():
        assert torch.equal(logits, theirs(**call_arguments(tokens)).logits)
    for site in known:
        assert_same(t.gradient(site), own.gradient(site), site)


READ_ONLY = ("pattern", "resid_mid", "cross.resid_pre")


@pytest.mark.parametrize("name", ["gpt2", "granite", "gpt_neox", "opt", "albert", "t5", "bart"])
def test_what_is_put_back_unchanged_changes_nothing_and_less_does_what_it_does_in_ours(name: str) -> None:
    theirs, ours = made(name)
    tokens, before = texts(ours), count_hooks(theirs)
    with torch.no_grad():
        alone = theirs(**call_arguments(tokens)).logits
        for site in sites(theirs):
            if site.endswith(READ_ONLY) and (site.endswith("pattern") or name not in ("albert", "bart")):
                with pytest.raises(InputError, match=r"ct\.load"), ct.edit(theirs, {site: "zero"}):
                    theirs(**call_arguments(tokens))
                continue
            with ct.edit(theirs, {site: {"do": "scale", "value": 1.0}}):
                assert torch.equal(theirs(**call_arguments(tokens)).logits, alone), site
            less: Any = {site: {"do": "scale", "value": 0.5}}
            with ct.edit(theirs, less):
                after = theirs(**call_arguments(tokens)).logits
            with ct.edit(ours, less):
                assert_same(after, ours(*tokens), site)
            assert not torch.equal(after, alone), site
    assert count_hooks(theirs) == before


def test_layers_positions_heads_and_the_preview() -> None:
    theirs, ours = made("llama")
    some: dict[str, Any] = {"layers": -1, "positions": [0, -1], "heads": [1, 3]}
    names = ("resid_post", "pattern", "attn.v", "attn.z", "logits")
    with torch.no_grad():
        with ct.trace(theirs, *names, **some) as t:
            theirs(**call_arguments(texts(ours)))
        with ct.trace(ours, *names, **some) as own:
            ours(*texts(ours))
    assert list(t) == list(own)
    for site in t:
        assert_same(t[site], own[site], site)
    assert t.estimate_memory(2, 9).nbytes == t.nbytes
    assert repr(t) == repr(own)


def test_each_step_of_their_generation_is_a_call() -> None:
    theirs, ours = made("gpt2")
    (tokens,) = texts(ours)
    with torch.no_grad():
        with ct.trace(theirs, "resid_post", "attn.v", layers=0) as t:
            whole = theirs.generate(tokens, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
        with ct.trace(theirs, "resid_post", "attn.v", layers=0) as once:
            theirs(whole[:, :-1])
    for site in t:
        assert [value.shape[1] for value in t.calls(site)] == [9, 1, 1, 1]
        assert_same(torch.cat(t.calls(site), 1), once[site], site)


def test_the_trunk_and_a_classifier_have_all_but_the_logits() -> None:
    theirs, _ = made("llama")
    classifier = transformers.LlamaForSequenceClassification(theirs.config).eval()
    for model in (theirs.model, classifier):
        assert sites(theirs).keys() - sites(model).keys() == {"logits"}
        with pytest.raises(InputError, match="no head that predicts tokens"):
            ct.trace(model, "logits")
    tokens = texts(made("llama")[1])[0]
    with torch.no_grad(), ct.trace(theirs.model, "final_norm") as t:
        out = theirs.model(tokens)
    assert torch.equal(t["final_norm"], out.last_hidden_state)
    headless = transformers.AlbertModel(made("albert")[0].config).eval()
    with torch.no_grad(), ct.trace(headless, "resid_post") as t:
        stream = headless(tokens, output_hidden_states=True).hidden_states
        assert t.stack_activation("resid_post").equal(torch.stack(stream[1:]))


def test_what_cannot_be_had_says_why() -> None:
    theirs, _ = made("llama")
    fast = transformers.AutoModelForCausalLM.from_config(theirs.config, attn_implementation="sdpa")
    assert "blocks.0.attn.pattern" not in sites(fast)
    for model, site, why in (
        (fast, "attn.pattern", "attn_implementation='eager'"),
        (fast, "blocks.0.attn.q", r"turned inside its attention; .*ct\.load"),
        (fast, "scores", "never leave its attention"),
        (made("qwen3_moe")[0], "ffn.router", "experts"),
        (nn.Sequential(nn.Linear(2, 2)), "resid_post", "the paths of its modules"),
        (nn.Sequential(nn.Linear(2, 2)), "1.out", "the paths of its modules"),
    ):
        with pytest.raises(InputError, match=why):
            ct.trace(model, site)


class Adapted(nn.Module):
    """A layer with a small one beside it, as adapters have it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.beside = base, nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.beside(x)


def test_an_adapter_in_a_modules_place_is_seen_through() -> None:
    theirs = copy.deepcopy(made("llama")[0])
    attention = theirs.model.layers[0].self_attn
    attention.v_proj = Adapted(attention.v_proj)
    (tokens,) = texts(made("llama")[1])
    with torch.no_grad(), ct.trace(theirs, "attn.in", "attn.v", layers=0) as t:
        theirs(tokens)
    with torch.no_grad():
        assert torch.equal(t["attn.v"].flatten(-2), attention.v_proj(t["attn.in"]))


class Odd(nn.Module):
    """Gives back what it likes, and writes into what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.told = nn.Linear(4, 4), nn.ReLU(inplace=True), Told()

    def forward(self, x: Tensor) -> dict[str, Any]:
        return self.told(scale=2.0, x=self.act(self.first(x)))


class Told(nn.Module):
    def forward(self, x: Tensor, scale: float) -> dict[str, Any]:
        return {"scale": scale, "x": x * scale, "nothing": None}


def test_any_module_by_path() -> None:
    model, x = Odd(), torch.randn(3, 4)
    assert list(sites(model)) == [f"{path}.{side}" for path in ("first", "act", "told") for side in ("in", "out")]
    with ct.trace(model, "*", gradients=True) as t:
        out = model(x)
        out["x"].sum().backward()
    assert not count_hooks(model)
    assert torch.equal(t["first.in"], x)
    assert torch.equal(t["first.out"], model.first(x)), "the ReLU wrote over it"
    assert torch.equal(t["told.in"], t["act.out"])
    assert torch.equal(t["told.out"], out["x"])
    assert torch.equal(t.gradient("told.in"), torch.full((3, 4), 2.0))
    assert "· 3 × · 4" in repr(t["first.in"])
    assert "told.out" in repr(t)
    for refused in (lambda: ct.trace(model, "told.in", positions=0), lambda: t.estimate_memory(1, 3)):
        with pytest.raises(InputError):
            refused()


def test_any_module_is_edited_by_path() -> None:
    model, x = Odd(), torch.randn(3, 4)
    with ct.edit(model, {"told.in": "zero"}), ct.trace(model, "told.out") as t:
        assert not model(x)["x"].any()
    assert not t["told.out"].any()
    with ct.edit(model, {"told.out": {"do": "scale", "value": 3.0}}):
        told = model(x)
    assert torch.equal(told["x"], 3.0 * model(x)["x"])
    assert told["scale"] == 2.0
    with pytest.raises(InputError, match="rows and tokens"), ct.edit(model, {"told.in": "mean"}):
        model(x)
    with pytest.raises(InputError, match="'skip' is for a part"):
        ct.edit(model, {"told": "skip"})
    assert not count_hooks(model)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InputError, match=r"nn\.Module"):
        ct.trace("gpt2", "embed")
