"""torch.autograd.gradcheck in fp64: whole models, norms, grouped matmul, attention kernels."""

import pytest
import torch
from support.config_strategies import build_randomized_model
from torch.func import functional_call

from cutaway import config as c
from cutaway.model.kernels import build_kernel
from cutaway.model.masks import number_tokens, self_attention_mask
from cutaway.model.moe import grouped_mm
from cutaway.model.norms import build_norm

STACKS = {
    "gqa, rope, qk-norm": {"attention": {"heads": 4, "kv_heads": 2, "qk_norm": {}}},
    "full-width qk-norm, clip, biases": {
        "attention": {
            "heads": 2,
            "qk_norm": {"over": "full", "norm": {"kind": "layernorm"}},
            "clip_qkv": 3.0,
            "bias": ["q", "k", "v", "o"],
        }
    },
    "softcap and sink": {"attention": {"heads": 2, "softcap": 2.0, "sink": True, "window": 2}},
    "alibi": {"attention": {"heads": 2, "position": {"kind": "alibi"}}},
    "relative bias": {
        "attention": {"heads": 2, "position": {"kind": "relative-bias", "buckets": 8, "max_distance": 16}}
    },
    "latent": {
        "attention": {"kind": "latent", "heads": 2, "q_rank": 3, "kv_rank": 4, "d_nope": 2, "d_rope": 2, "d_value": 3}
    },
    "mlp": {"attention": {"heads": 2}, "ffn": {"kind": "mlp", "activation": "gelu"}},
    "clamped swiglu": {"attention": {"heads": 2}, "ffn": {"kind": "clamped-swiglu", "bias": True}},
    "moe": {
        "attention": {"heads": 2},
        "ffn": {
            "kind": "moe",
            "experts": 4,
            "router": {"top_k": 2, "score": "sigmoid"},
            "expert": {"bias": True},
            "shared": {"hidden": 4},
        },
    },
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("kind", ["pre", "post", "sandwich", "output", "parallel"])
@pytest.mark.parametrize("name", STACKS)
def test_gradcheck_of_models(name: str, kind: str) -> None:
    config = c.config(
        {
            "form": "decoder",
            "vocab_size": 5,
            "d_model": 8,
            "decoder": {"layers": 1, "block": STACKS[name], "placement": {"kind": kind}},
            "head": {"softcap": 3.0, "bias": "learned"},
        }
    )
    model = build_randomized_model(config, torch.float64)
    names, values = zip(*model.named_parameters(), strict=True)
    tokens = torch.tensor([[0, 3, 1]])
    mask = torch.tensor([[False, True, True]])

    def compute_logits(*parameters: torch.Tensor) -> torch.Tensor:
        return functional_call(model, dict(zip(names, parameters, strict=True)), (tokens, mask))[mask]

    inputs = tuple(value.detach().requires_grad_() for value in values)
    assert torch.autograd.gradcheck(compute_logits, inputs, fast_mode=True, atol=1e-6)


@pytest.mark.parametrize("norm", [c.LayerNorm(), c.LayerNorm(bias=False), c.RMSNorm(), c.RMSNorm(unit_offset=True)])
def test_gradcheck_of_norms(norm: c.Norm) -> None:
    module = build_norm(norm, 4).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))


def test_gradcheck_of_grouped_mm() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([2, 2, 4, 5])
    assert torch.autograd.gradcheck(lambda x, w: grouped_mm(x, w, offsets), (x, weight))
    torch.library.opcheck(grouped_mm, (x, weight, offsets))


@pytest.mark.parametrize("kernel", ["explicit", "sdpa"])
def test_gradcheck_of_attention_with_fully_masked_queries(kernel: str) -> None:
    """The output of a fully masked query is zero and its gradients are finite."""
    mask = torch.tensor([[False, False, True, True], [True, True, True, False]])
    positions = number_tokens(2, 4, torch.device("cpu"), mask)
    attention_kernel = build_kernel(kernel, scale=0.5)
    prepared_mask = attention_kernel.prepare_mask(
        self_attention_mask(positions, positions, is_causal=True), None, torch.float64
    )
    q, k, v = (torch.randn(2, 4, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    z = attention_kernel(q, k, v, prepared_mask)
    assert (z[~mask] == 0).all()
    z.square().sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: attention_kernel(*x, prepared_mask), (q, k, v))


@pytest.mark.parametrize("kernel", ["explicit", "sdpa"])
def test_row_of_padding_only_is_finite(kernel: str) -> None:
    model = build_randomized_model(c.config("tiny-gpt")).use_kernel(kernel)
    tokens = torch.zeros(2, 5, dtype=torch.long)
    mask = torch.tensor([[True] * 5, [False] * 5])
    out = model(tokens, mask)
    out.square().mean().backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
