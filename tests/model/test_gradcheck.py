"""gradcheck in fp64 on each part: autograd's derivative is the function's."""

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


@pytest.mark.parametrize("kind", ["pre", "post", "sandwich", "output", "parallel"])
@pytest.mark.parametrize("name", STACKS)
def test_of_a_whole_model_by_its_parameters(name: str, kind: str) -> None:
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

    def logits(*parameters: torch.Tensor) -> torch.Tensor:
        return functional_call(model, dict(zip(names, parameters, strict=True)), (tokens, mask))[mask]

    inputs = tuple(value.detach().requires_grad_() for value in values)
    assert torch.autograd.gradcheck(logits, inputs, fast_mode=True, atol=1e-6)


@pytest.mark.parametrize("norm", [c.LayerNorm(), c.LayerNorm(bias=False), c.RMSNorm(), c.RMSNorm(unit_offset=True)])
def test_of_the_norms(norm: c.Norm) -> None:
    module = build_norm(norm, 4).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))


def test_of_the_grouped_product() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([2, 2, 4, 5])
    assert torch.autograd.gradcheck(lambda x, w: grouped_mm(x, w, ends), (x, weight))
    torch.library.opcheck(grouped_mm, (x, weight, ends))


@pytest.mark.parametrize("kernel", ["explicit", "sdpa"])
def test_of_attention_where_some_queries_see_nothing(kernel: str) -> None:
    """A fully masked row reads zeros, and sends no NaN back."""
    mask = torch.tensor([[False, False, True, True], [True, True, True, False]])
    where = number_tokens(2, 4, torch.device("cpu"), mask)
    attend = build_kernel(kernel, scale=0.5)
    plan = attend.prepare_mask(self_attention_mask(where, where, is_causal=True), None, torch.float64)
    q, k, v = (torch.randn(2, 4, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    z = attend(q, k, v, plan)
    assert (z[~mask] == 0).all()
    z.square().sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: attend(*x, plan), (q, k, v))


@pytest.mark.parametrize("kernel", ["explicit", "sdpa"])
def test_a_row_of_padding_alone_is_finite(kernel: str) -> None:
    model = build_randomized_model(c.config("tiny-gpt")).use_kernel(kernel)
    tokens = torch.zeros(2, 5, dtype=torch.long)
    mask = torch.tensor([[True] * 5, [False] * 5])
    out = model(tokens, mask)
    out.square().mean().backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
