"""An attached autoencoder does not change the model, and edits of its features equal edits of the activation."""

from typing import Any

import pytest
import torch
import transformers
from support.tracing import TOKENS, count_hooks

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens import sites
from cutaway.lens.analysis import activation_patching, attribution_patching
from cutaway.lens.sae import SAEConfig, SparseAutoencoder, attach_sae
from cutaway.model import Transformer

SITE = "blocks.1.resid_post"


@pytest.fixture(scope="module")
def model() -> Transformer:
    return ct.build("tiny-llama", seed=0)


def build_sae(architecture: Any = "topk", site: str = SITE, d_in: int = 64) -> SparseAutoencoder:
    k = 5 if architecture == "topk" else None
    sae = SparseAutoencoder(SAEConfig(architecture, d_in, 96, k, site=site), seed=1)
    with torch.no_grad():
        sae.b_dec.copy_(torch.linspace(-0.1, 0.1, d_in))
    return sae


@pytest.mark.parametrize("architecture", ["standard", "topk", "jumprelu", "gated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_output_is_unchanged_without_an_edit(architecture: str, dtype: torch.dtype) -> None:
    model = ct.build("tiny-llama", seed=0, dtype=dtype)
    plain = model(TOKENS)
    with attach_sae(model, build_sae(architecture)):
        assert torch.equal(model(TOKENS), plain)
        with ct.edit(model, {f"{SITE}.sae.acts": lambda acts: acts}):
            assert torch.equal(model(TOKENS), plain)
    assert count_hooks(model) == 0
    assert not any(".sae." in name for name in sites(model))


@torch.no_grad()
def test_traced_values_are_those_of_the_autoencoder(model: Transformer) -> None:
    sae = build_sae()
    with ct.trace(model, SITE) as t:
        model(TOKENS)
    x = torch.Tensor(t[SITE])
    with attach_sae(model, sae) as name, ct.trace(model, "sae.*", SITE) as t:
        model(TOKENS)
    assert name == f"{SITE}.sae.acts"
    assert t[name].axes == "BTF"
    assert torch.equal(t[name], sae.encode(x))
    assert torch.equal(t["sae.recons"], sae(x))
    assert torch.equal(t["sae.error"], x - sae(x))
    assert torch.equal(t[SITE], x)


@torch.no_grad()
def test_feature_edits_add_multiples_of_the_decoder_direction(model: Transformer) -> None:
    sae = build_sae("standard")
    with attach_sae(model, sae) as name, ct.trace(model, name) as t:
        plain = model(TOKENS)
    acts = torch.Tensor(t[name])
    feature = int(acts.sum((0, 1)).argmax())
    edits: dict[str, tuple[Any, torch.Tensor]] = {
        "zero": ({"do": "zero", "units": [feature]}, -acts[..., feature]),
        "scale": ({"do": "scale", "value": 3, "units": [feature]}, 2 * acts[..., feature]),
        "set": ({"do": "replace", "value": 7.0, "units": [feature]}, 7 - acts[..., feature]),
    }
    for spec, change in edits.values():
        with attach_sae(model, sae), ct.edit(model, {name: spec}):
            edited = model(TOKENS)
        with ct.edit(model, {SITE: lambda x, change=change: x + change[..., None] * sae.W_dec[feature]}):
            expected = model(TOKENS)
        torch.testing.assert_close(edited, expected, rtol=1e-4, atol=1e-4)
        assert not torch.equal(edited, plain)
    with (
        attach_sae(model, sae),
        ct.edit(model, {name: {"do": "replace", "value": 7.0, "units": [feature], "positions": 3}}),
    ):
        edited = model(TOKENS)
    assert torch.equal(edited[:, :3], plain[:, :3])
    assert not torch.equal(edited[:, 3], plain[:, 3])


@torch.no_grad()
def test_without_the_error_the_model_runs_on_the_reconstruction(model: Transformer) -> None:
    sae = build_sae()
    with ct.edit(model, {SITE: sae}):
        expected = model(TOKENS)
    with attach_sae(model, sae, include_error=False):
        assert torch.equal(model(TOKENS), expected)
        assert f"{SITE}.sae.error" not in sites(model)


def test_gradient_of_a_feature_is_the_projection_on_its_direction(model: Transformer) -> None:
    sae = build_sae("standard").requires_grad_(False)
    with attach_sae(model, sae) as name, ct.trace(model, name, SITE, gradients=True) as t:
        model(TOKENS)[0, -1, 5].backward()
    torch.testing.assert_close(
        torch.Tensor(t.gradient(name)), torch.Tensor(t.gradient(SITE)) @ sae.W_dec.T, rtol=1e-4, atol=1e-6
    )
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad()
    model(TOKENS)[0, -1, 5].backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(expected[key], parameter.grad, rtol=1e-4, atol=1e-6)
    model.zero_grad()


def test_features_can_be_patched(model: Transformer) -> None:
    clean, corrupted = torch.arange(3, 11)[None], torch.tensor([[3, 4, 90, 6, 7, 8, 9, 10]])
    arguments = (clean, corrupted, 5)
    with attach_sae(model, build_sae()):
        for analysis in (activation_patching, attribution_patching):
            result = analysis(model, *arguments, site="resid_post.sae.acts")
            assert result.labels[0] == ("1",)
            assert result.values[0, :2].abs().max() == 0


@torch.no_grad()
def test_heads_are_concatenated(model: Transformer) -> None:
    plain, site = model(TOKENS), "blocks.1.attn.z"
    with attach_sae(model, build_sae(site=site)) as name:
        with ct.trace(model, name) as t:
            assert torch.equal(model(TOKENS), plain)
        with ct.edit(model, {name: {"do": "scale", "value": 2}}):
            assert not torch.equal(model(TOKENS), plain)
    assert t[name].shape == (*TOKENS.shape, 96)


@torch.no_grad()
def test_two_autoencoders_and_a_transformers_model() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 40}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    plain = model(TOKENS).logits
    with attach_sae(model, build_sae()) as first, attach_sae(model, build_sae(site="blocks.0.ffn.out")) as second:
        assert [name for name in sites(model) if name.endswith(".sae.acts")] == [second, first]
        with ct.trace(model, first, second) as t:
            assert torch.equal(model(TOKENS).logits, plain)
        with ct.edit(model, {first: "zero", second: "zero"}):
            assert not torch.equal(model(TOKENS).logits, plain)
    assert t[first].shape == t[second].shape == (*TOKENS.shape, 96)
    assert count_hooks(model) == 0


def test_errors(model: Transformer) -> None:
    with (
        pytest.raises(InputError, match="no site in its configuration"),
        attach_sae(model, SparseAutoencoder(SAEConfig("standard", 64, 96))),
    ):
        pass
    with pytest.raises(InputError, match="is 4 sites"), attach_sae(model, build_sae(), site="resid_post"):
        pass
    with (
        pytest.raises(InputError, match="leave its with-block"),
        attach_sae(model, build_sae()),
        attach_sae(model, build_sae()),
    ):
        pass
    with pytest.raises(InputError, match="d_in = 32"), attach_sae(model, build_sae(d_in=32)):
        model(TOKENS)
    assert count_hooks(model) == 0
