"""Mixture of experts: the router equals transformers in bf16; selective activation checkpointing keeps its products."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cutaway as ct
from cutaway import config as c
from cutaway.model.moe import Router

D_MODEL, NUM_EXPERTS, TOP_K, NUM_TOKENS = 64, 16, 4, 512


def transformers_router(family: str) -> torch.nn.Module:
    """A router of transformers in bf16, with random weights."""
    from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    shape = {"hidden_size": D_MODEL, "num_experts_per_tok": TOP_K}
    router: torch.nn.Module
    match family:
        case "deepseek_v3":
            router = DeepseekV3TopkRouter(
                DeepseekV3Config(**shape, n_routed_experts=NUM_EXPERTS, n_group=4, topk_group=2)
            )
        case "mixtral":
            router = MixtralTopKRouter(MixtralConfig(**shape, num_local_experts=NUM_EXPERTS))
        case _:
            router = Qwen3MoeTopKRouter(Qwen3MoeConfig(**shape, num_experts=NUM_EXPERTS, norm_topk_prob=True))
    router.to(torch.bfloat16)
    torch.nn.init.normal_(router.weight, std=0.2)
    if family == "deepseek_v3":
        router.e_score_correction_bias = torch.rand(NUM_EXPERTS)  # transformers keeps it in fp32
    return router


ROUTERS = {
    "deepseek_v3": c.Router(
        score="sigmoid",
        dtype="float32",
        top_k=TOP_K,
        scale=2.5,
        selection_bias=True,
        groups=c.ExpertGroups(num_groups=4, top_k=2),
    ),
    "mixtral": c.Router(top_k=TOP_K),
    "qwen3_moe": c.Router(top_k=TOP_K),
}


@pytest.mark.parametrize("family", ROUTERS)
@torch.no_grad()
def test_router_in_bf16_equals_transformers(family: str) -> None:
    torch.manual_seed(0)
    theirs = transformers_router(family)
    router = Router(ROUTERS[family], D_MODEL, NUM_EXPERTS).to(torch.bfloat16)
    router.weight.copy_(theirs.weight)
    if router.selection_bias is not None:
        router.selection_bias.copy_(theirs.e_score_correction_bias)
    x = torch.randn(NUM_TOKENS, D_MODEL, dtype=torch.bfloat16)
    logits, their_weights, their_experts = theirs(x)
    weights, experts = router(x)
    assert torch.equal(router.compute_logits(x), logits.float())
    experts, order = experts.sort(-1)
    their_experts, their_order = their_experts.sort(-1)
    assert torch.equal(experts, their_experts)
    weights = weights.gather(-1, order).to(their_weights.dtype)
    torch.testing.assert_close(weights, their_weights.gather(-1, their_order), rtol=1e-6, atol=0)


def test_fp32_router_ignores_autocast() -> None:
    router = Router(ROUTERS["deepseek_v3"], D_MODEL, NUM_EXPERTS)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(8, D_MODEL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = router.compute_logits(x)
    assert torch.equal(inside, router.compute_logits(x))


def test_families_set_the_router_dtype() -> None:
    for name, expected in {"deepseek-v3": "float32", "mixtral-8x7b": "model", "tiny-mla": "float32"}.items():
        moe = ct.config(name).decoder.blocks[-1].ffn
        assert moe.router.dtype == expected


class OpCounter(TorchDispatchMode):
    """Counts operator calls by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def count_training_ops(mode: str) -> Counter[str]:
    model = ct.build("tiny-moe", seed=0).train().use_activation_checkpointing(mode)
    with OpCounter() as counter:
        model(torch.arange(12).view(2, 6)).sum().backward()
    return counter.counts


def test_selective_checkpointing_keeps_expert_products_and_topk() -> None:
    none, selective, full = (count_training_ops(mode) for mode in ("none", "selective", "full"))
    for op in ("cutaway.grouped_mm", "aten.topk"):
        assert selective[op] == none[op] < full[op], op
