"""Attention sites of transformers models with the default SDPA attention equal those of the loaded cutaway model."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.family_parity import randomize_weights
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens import Intervention, describe_model

TOKENS = torch.randint(5, 61, (2, 9), generator=torch.Generator().manual_seed(1))
SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": SIZES | HEADS,
    "qwen3": SIZES | HEADS,  # QK-norm
    "gemma3_text": SIZES | HEADS | {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "bert": SIZES | {"num_attention_heads": 4, "max_position_embeddings": 40},
}
SITES = ("attn.q", "attn.k", "attn.v", "attn.scores", "attn.pattern", "attn.z")
EDITS: list[dict[str, Any]] = [
    {"blocks.0.attn.q": Intervention("zero", heads=[1])},
    {"blocks.0.attn.k": Intervention("scale", 0.5, heads=[3])},
    {"blocks.1.attn.v": "mean"},
    {"blocks.0.attn.scores": {"do": "scale", "value": 2.0}},
    {"blocks.1.attn.pattern": Intervention("mean", heads=[0, 2]), "blocks.0.attn.z": Intervention("zero", heads=[1])},
]


@cache
def build_pair(name: str) -> tuple[Any, Any]:
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    hf_model = auto.from_config(transformers.CONFIG_MAPPING[name](**SETTINGS[name])).float().eval()
    randomize_weights(hf_model, 0)
    with TemporaryDirectory() as directory:
        hf_model.save_pretrained(directory)
        return hf_model, ct.load(directory).model


def padding_mask(name: str) -> Tensor | None:
    """A mask with padding, so that the model passes a mask tensor to SDPA, and repeated key-value heads."""
    return None if name == "llama" else (torch.arange(9) < torch.tensor([[9], [6]]))


def assert_same(actual: Tensor, expected: Tensor) -> None:
    actual, expected = (value.as_subclass(Tensor).clamp(min=-1e30) for value in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_activations_equal_cutaway(name: str) -> None:
    hf_model, model = build_pair(name)
    visible = padding_mask(name)
    hf_mask = None if visible is None else visible.long()
    plain = hf_model(TOKENS, attention_mask=hf_mask).logits
    with ct.trace(hf_model, *SITES) as actual:
        traced = hf_model(TOKENS, attention_mask=hf_mask).logits
    with ct.trace(model, *SITES) as expected:
        model(TOKENS, visible)
    assert torch.equal(traced, plain)
    assert list(actual) == list(expected)
    for site in actual:
        axes = actual[site].axes
        assert (axes, actual[site].shape) == (expected[site].axes, expected[site].shape)
        # (B, T, …), without the rows of padding tokens, which are not defined.
        rows = [t[site].transpose(1, 2) if axes == "BHTS" else t[site] for t in (actual, expected)]
        assert_same(*(rows if visible is None else [row[visible] for row in rows]))


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("edits", EDITS, ids=[next(iter(edits)) for edits in EDITS])
@torch.no_grad()
def test_edits_equal_cutaway(name: str, edits: dict[str, Any]) -> None:
    hf_model, model = build_pair(name)
    plain = hf_model(TOKENS).logits
    with ct.edit(hf_model, edits):
        actual = hf_model(TOKENS).logits
    with ct.edit(model, edits):
        expected = model(TOKENS)
    assert_same(actual, expected)
    assert not torch.equal(actual, plain)
    assert torch.equal(hf_model(TOKENS).logits, plain)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_gradients_equal_cutaway(name: str) -> None:
    gradients = []
    for model in build_pair(name):
        with ct.trace(model, *SITES, gradients=True) as t:
            output = model(TOKENS)
            logits = output if isinstance(output, Tensor) else output.logits
            logits.square().mean().backward()
        gradients.append({site: t.gradient(site) for site in t})
        model.zero_grad()
    for site, gradient in gradients[0].items():
        assert_same(gradient, gradients[1][site])


@torch.no_grad()
def test_keys_and_values_of_the_cache_are_traced() -> None:
    hf_model, _ = build_pair("llama")
    with ct.trace(hf_model, "blocks.0.attn.k", "blocks.0.attn.pattern") as full:
        hf_model(TOKENS)
    cache = hf_model(TOKENS[:, :8], use_cache=True).past_key_values
    with ct.trace(hf_model, "blocks.0.attn.k", "blocks.0.attn.pattern") as step:
        hf_model(TOKENS[:, 8:], past_key_values=cache)
    assert_same(step["attn.k"], full["attn.k"])
    assert_same(step["attn.pattern"], full["attn.pattern"][:, :, 8:])


class Attention(nn.Module):
    """Attention that calls SDPA, raises an exception before it, or does not call it."""

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "raise":
            raise RuntimeError("no attention")
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        z = F.scaled_dot_product_attention(q, q, q) if mode == "sdpa" else q
        return z.transpose(1, 2).flatten(-2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([nn.ModuleDict({"attn": Attention()})]), nn.Linear(4, 7)

    def forward(self, x: Tensor, mode: str = "sdpa") -> Tensor:
        return self.head(self.blocks[0]["attn"](x, mode))  # type: ignore[index]


def described() -> Any:
    paths = {"blocks.{i}.resid_post": "blocks.{i}.attn", "blocks.{i}.attn": "blocks.{i}.attn"}
    return describe_model(Model(), sites=paths, unembed="head", num_heads=2)


def test_mode_is_left_after_an_exception() -> None:
    model, x = described(), torch.randn(1, 3, 4)
    with pytest.raises(RuntimeError, match="no attention"), ct.trace(model, "attn.pattern"):
        model.model(x, "raise")
    assert not _get_current_function_mode_stack()
    with ct.trace(model, "attn.pattern", "attn.z", "resid_post") as t:
        model.model(x)
    assert not _get_current_function_mode_stack()
    torch.testing.assert_close(t["attn.pattern"].sum(-1), torch.ones(1, 2, 3))
    torch.testing.assert_close(t["attn.z"].flatten(-2), t["resid_post"].as_subclass(Tensor))


def test_attention_without_sdpa_is_an_error() -> None:
    model = described()
    with (
        pytest.raises(InputError, match="Attention did not call scaled_dot_product_attention"),
        ct.trace(model, "attn.pattern"),
    ):
        model.model(torch.randn(1, 3, 4), "other")


@torch.no_grad()
def test_other_threads_are_not_intercepted() -> None:
    hf_model, _ = build_pair("gemma3_text")
    edits = [{"blocks.0.attn.pattern": "mean"}, {"blocks.0.attn.k": "zero"}, {"blocks.1.attn.scores": "zero"}]
    expected = [hf_model(TOKENS).logits]
    for each in edits:
        with ct.edit(hf_model, each):
            expected.append(hf_model(TOKENS).logits)
    barrier = threading.Barrier(len(expected))

    @torch.no_grad()
    def work(index: int) -> bool:
        barrier.wait()
        if index == 0:
            return all(torch.equal(hf_model(TOKENS).logits, expected[0]) for _ in range(10))
        with ct.edit(hf_model, edits[index - 1]):
            return all(torch.equal(hf_model(TOKENS).logits, expected[index]) for _ in range(10))

    with ThreadPoolExecutor(len(expected)) as pool:
        assert all(pool.map(work, range(len(expected))))
