"""minGPT: learned positions, no KV cache; `forward` returns the logits and, with targets, the loss."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

NAME = "minGPT"
HOMEPAGE = "https://github.com/karpathy/minGPT"
REQUIREMENTS = ("transformers==5.23.0",)
REPOSITORY = ("karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26")
LENGTH, VOCAB = 96, 64


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "GPT", partial(make, dropout=0.0)
    yield "GPT, dropout=0.1", partial(make, dropout=0.1)
    yield "GPT-2, compared with transformers", make_parity


def build(dropout: float = 0.0) -> nn.Module:
    from mingpt.model import GPT

    config = GPT.get_default_config()
    config.merge_from_dict({"model_type": None, "n_layer": 2, "n_head": 4, "n_embd": 32})
    config.merge_from_dict({"vocab_size": VOCAB, "block_size": LENGTH})
    config.merge_from_dict({"embd_pdrop": dropout, "resid_pdrop": dropout, "attn_pdrop": dropout})
    return GPT(config).eval()


def make(dropout: float) -> tuple[nn.Module, dict[str, Any]]:
    model = build(dropout)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        # datasets of the projects return targets that are shifted by one, with -1 for positions without a target
        targets = labels[:, 1:].masked_fill(labels[:, 1:] == -100, -1)
        return model(tokens[:, :-1], targets)[1]

    def generate(tokens: Tensor, count: int) -> Tensor:
        return model.generate(tokens, count)[:, tokens.shape[1] :]

    def sample(logits: Tensor, count: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        sampler = Sampler(logits)
        tokens = torch.zeros(count, 1, dtype=torch.long)
        return sampler.generate(tokens, 1, temperature=temperature, do_sample=True, top_k=top_k)[:, 1]

    return model, {
        "logits": lambda tokens: model(tokens)[0],
        "loss": loss,
        "generate": generate,
        "sample": sample,
        "build_module": partial(build, dropout),
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "tied_embeddings": False,
        "relative_positions": False,
        "trained": False,
    }


def Sampler(logits: Tensor) -> nn.Module:  # noqa: N802
    """A GPT whose forward pass returns these logits, so that its `generate` samples from them."""
    from mingpt.model import GPT

    class Constant(GPT):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.block_size = LENGTH

        def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
            return logits.expand(*tokens.shape, -1).clone(), None

    return Constant()


def make_parity() -> tuple[nn.Module, dict[str, Any]]:
    """Weights of a random GPT-2 of transformers, copied as `GPT.from_pretrained` does."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    reference, model = transformers.GPT2LMHeadModel(config).eval(), build()
    weights = model.state_dict()
    for name, value in reference.state_dict().items():
        linear = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        weights[name].copy_(value.t() if linear else value)

    def reference_logits(tokens: Tensor) -> Tensor:
        return reference(tokens, use_cache=False).logits

    facts = {"vocab_size": VOCAB, "max_seq_len": LENGTH, "only": ["parity", "causality", "batch-isolation"]}
    return model, {"logits": lambda tokens: model(tokens)[0], "reference_logits": reference_logits, **facts}
