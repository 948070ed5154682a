"""A trace of another library's model, by our names ≡ a trace of ours that was loaded from it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_parity import randomise
from torch import Tensor, nn

import cutaway as ct
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
STREAM = {"resid_pre", "resid_post"}
ATTENTION = {"attn.in", "attn.v", "attn.pattern", "attn.z", "attn.out"}
FFN = {"ffn.in", "ffn.hidden", "ffn.out"}
TURNED = STREAM | ATTENTION | FFN
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
    "bert": Peer(BERT, STILL, MASKED),
    "t5": Peer(T5, STILL, BOTH),
    "bart": Peer(BART, STILL, BOTH),
}


def made(name: str, directory: Path, **given: Any) -> tuple[Any, Any]:
    """Theirs with random weights, and ours loaded from it."""
    peer = PEERS[name]
    config = transformers.CONFIG_MAPPING[name](**peer.settings)
    theirs = peer.auto.from_config(config, **{"attn_implementation": "eager"} | given).float().eval()
    randomise(theirs, 0)
    theirs.save_pretrained(directory)
    return theirs, ct.load(directory).model


def texts(ours: Any) -> tuple[Tensor, ...]:
    tokens = torch.randint(5, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    return (tokens, tokens[:, :7]) if len(ours.stacks) > 1 else (tokens,)


def asked(tokens: tuple[Tensor, ...], **extra: Any) -> dict[str, Any]:
    """How their models want to be called."""
    return dict(zip(("input_ids", "decoder_input_ids"), tokens, strict=False)) | extra


def no_hooks(model: nn.Module) -> bool:
    return not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def same(one: Tensor, other: Tensor, what: str) -> None:
    assert one.shape == other.shape, (what, one.shape, other.shape)
    worst, bound = (one - other).abs().max().item(), 1e-5 * max(1.0, other.abs().max().item())
    assert worst <= bound, f"{what}: worst difference {worst:.2e}, bound {bound:.2e}"


@pytest.mark.parametrize("name", PEERS)
def test_values_in_theirs_are_those_in_ours(name: str, tmp_path: Path) -> None:
    theirs, ours = made(name, tmp_path)
    tokens = texts(ours)
    known = sites(theirs)
    assert known.keys() <= sites(ours).keys()
    assert known.keys() | known.absent.keys() == sites(ours).keys()
    stacks = [f"{stack}." for stack in ours.stacks] if len(ours.stacks) > 1 else [""]
    for stack in stacks:
        found = {name.split(".", 3 if stack else 2)[-1] for name in known if name.startswith(f"{stack}blocks.0.")}
        assert found >= PEERS[name].ends, PEERS[name].ends - found
        assert known.keys() >= {f"{stack}embed", f"{stack}final_norm"}
    with torch.no_grad():
        alone = theirs(**asked(tokens)).logits
        with ct.trace(theirs, "*") as t:
            traced = theirs(**asked(tokens)).logits
        with ct.trace(ours, *known) as own:
            ours(*tokens)
    assert torch.equal(traced, alone)
    assert no_hooks(theirs)
    assert torch.equal(t["logits"], traced)
    for site in known:
        assert t[site].axes == own[site].axes
        same(t[site], own[site], site)


@pytest.mark.parametrize("name", PEERS)
def test_streams_and_patterns_are_what_the_peer_tells_itself(name: str, tmp_path: Path) -> None:
    theirs, ours = made(name, tmp_path)
    tokens = texts(ours)
    with torch.no_grad(), ct.trace(theirs, "resid_post", "pattern", "embed", "final_norm") as t:
        out = theirs(**asked(tokens), output_hidden_states=True, output_attentions=True)
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
