"""`ct.check` of models that are in no other test: written in other ways, right and wrong, with few adapters."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cutaway as ct
from cutaway.check import Report
from cutaway.errors import InputError

pytestmark = pytest.mark.unchecked

V, D, HEADS = 53, 32, 4


def begun(model: nn.Module, std: float = 0.1) -> Any:
    """Weights drawn anew, biases zero."""
    draw = torch.Generator().manual_seed(0)
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            part.weight.data.normal_(0.0, std, generator=draw)
        if isinstance(part, nn.Linear) and part.bias is not None:
            part.bias.data.zero_()
    return model.eval()


class Biased(nn.Module):
    """Positions by a bias of the scores: ALiBi's slopes, or a learned table (T5), which goes without a scale."""

    def __init__(self, kind: str = "alibi", sign: float = -1.0) -> None:
        super().__init__()
        self.kind, self.sign = kind, sign
        self.embed, self.qkv, self.out = nn.Embedding(V, D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V)
        if kind == "t5":
            self.table = nn.Embedding(16, HEADS)

    def bias(self, far: Tensor) -> Tensor:
        if self.kind == "t5":
            return self.table(far.clamp(0, 15)).permute(2, 0, 1)  # type: ignore[no-any-return]
        slopes = torch.tensor([2.0 ** -(n + 1) for n in range(HEADS)])
        return self.sign * slopes[:, None, None] * far

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x, place = self.embed(tokens), torch.arange(tokens.shape[1])
        far = place[:, None] - place[None]
        bias = self.bias(far).masked_fill(far < 0, -torch.inf)[None]
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        scale = 1.0 if self.kind == "t5" else None
        read = F.scaled_dot_product_attention(q, k, v, bias.type_as(q).expand(len(x), -1, -1, -1), scale=scale)
        return {"logits": self.head(x + self.out(read.transpose(1, 2).flatten(2)))}


class Turned(nn.Module):
    """RoPE by complex numbers; layers may be kept where PyTorch does not look for them."""

    def __init__(self, frequency: Callable[[Tensor], Tensor] | None = None, *, hidden: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        layers = [nn.ModuleDict({"qkv": nn.Linear(D, 3 * D), "out": nn.Linear(D, D)}) for _ in range(2)]
        self.layers = layers if hidden else nn.ModuleList(layers)
        width = D // HEADS
        j = torch.arange(0, width, 2)
        freqs = 10_000.0 ** (-j / width) if frequency is None else frequency(j)
        self.freqs_cis = torch.polar(torch.ones(64, width // 2), torch.outer(torch.arange(64.0), freqs))

    def turned(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(z * self.freqs_cis[: x.shape[-2]]).flatten(-2).type_as(x)

    def forward(self, tokens: Tensor) -> tuple[None, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in layer["qkv"](x).chunk(3, -1))
            read = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
            x = x + layer["out"](read.transpose(1, 2).flatten(2))
        return None, self.head(x)


class Recurrent(nn.Module):
    """No attention at all."""

    def __init__(self, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(V, D), nn.GRU(D, D, batch_first=True), nn.Linear(D, V)
        self.norm = nn.BatchNorm1d(D) if batch_norm else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x if self.norm is None else self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.mix(x)[0])  # type: ignore[no-any-return]


class Encoded(nn.Module):
    """PyTorch's own layers, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(V, D), nn.Embedding(48, D), nn.Linear(D, V)
        layer = nn.TransformerEncoderLayer(D, HEADS, 4 * D, 0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.place(torch.arange(length))
        return self.head(self.layers(x, mask=nn.Transformer.generate_square_subsequent_mask(length)))  # type: ignore[no-any-return]


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def without_a_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    e = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf).exp()
    return e / e.sum(-1, keepdim=True) @ v


def with_zero_head() -> Any:
    model = begun(Turned())
    nn.init.zeros_(model.head.weight)
    return model


RIGHT: dict[str, Callable[[], Any]] = {
    "alibi": lambda: begun(Biased()),
    "t5": lambda: begun(Biased("t5")),
    "complex rope": lambda: begun(Turned()),
    "complex rope in bf16": lambda: begun(Turned()).bfloat16(),
    "a zero head": with_zero_head,
    "gru": lambda: begun(Recurrent()),
    "gru in fp64": lambda: begun(Recurrent()).double(),
    "nn.TransformerEncoder": lambda: begun(Encoded()).train(),
    "a function": lambda: begun(Encoded()).forward,
    "a kernel": lambda: kernel,
}


def alarms(report: Report) -> list[str]:
    return [f"{each.check}: {each.message}" for each in report.findings if each.verdict in ("fail", "warn")]


def state(module: nn.Module) -> list[Any]:
    """All that a check must leave as it was."""
    tensors = [x.detach().clone() for x in (*module.parameters(), *module.buffers())]
    parts = [(part.training, len(part._forward_hooks), len(part._forward_pre_hooks)) for part in module.modules()]
    return [tensors, parts, [each.grad for each in module.parameters()], torch.get_rng_state()]


@pytest.mark.parametrize("name", RIGHT)
def test_right_ones_raise_no_alarm_and_stay_as_they_are(name: str) -> None:
    model = RIGHT[name]()
    before = state(model) if isinstance(model, nn.Module) else []
    assert alarms(ct.check(model, budget=60)) == []
    after = state(model) if isinstance(model, nn.Module) else []
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_running_means_are_put_back() -> None:
    model = begun(Recurrent(batch_norm=True))
    before = [x.clone() for x in model.buffers()]
    report = ct.check(model, budget=60)
    assert not report.ok  # in training, a row sees others
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


def patched(change: Callable[[nn.Module, Tensor], Tensor]) -> Any:
    """A right model whose forward does something more."""
    model = begun(Encoded())
    plain = model.forward
    model.forward = lambda tokens: change(model, tokens) if change.__code__.co_argcount == 2 else plain(tokens)
    model.plain = plain
    return model


def in_place(model: Any, tokens: Tensor) -> Tensor:
    tokens[:, 0] = 0
    return model.plain(tokens)  # type: ignore[no-any-return]


def wearing(model: Any, tokens: Tensor) -> Tensor:
    model.head.weight.data.mul_(1.0005)
    return model.plain(tokens)  # type: ignore[no-any-return]


WRONG: dict[str, tuple[Callable[[], Any], str, str]] = {
    "alibi upside down": (lambda: begun(Biased(sign=1.0)), "rope-shift-invariance", "the further a key is"),
    "one frequency": (lambda: begun(Turned(torch.ones_like), 0.2), "rope-layout", "by the same angle"),
    "a list of layers": (lambda: begun(Turned(hidden=True)), "unused-parameters", "not among the model's parameters"),
    "tokens in place": (lambda: patched(in_place), "eval-determinism", "changes the tokens"),
    "weights in place": (lambda: patched(wearing), "eval-determinism", "changes the weight head.weight"),
    "probabilities": (lambda: patched(lambda m, t: m.plain(t).softmax(-1)), "initial-loss", "probabilities"),
    "relu": (lambda: patched(lambda m, t: m.plain(t).relu()), "initial-loss", "exactly zero"),
    "no token": (lambda: patched(lambda m, t: m.plain(t) * 0 + m.head.weight[:, 0]), "causality-gradient", "no token"),
    "exp overflows": (lambda: without_a_largest, "attention-kernels", "not finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones_are_named(name: str) -> None:
    make, check, said = WRONG[name]
    overrides = {"relative_positions": True} if name.startswith("alibi") else {}
    found = {each.check: each for each in ct.check(make(), budget=60, **overrides).failures}
    assert check in found, list(found)
    assert said in found[check].message


ADAPTERS: dict[str, tuple[str, Any, str]] = {
    "last logits only": (
        "logits_with_mask",
        lambda m: lambda t, _: m(t)[1][:, -1],
        "logits_with_mask= gave a tensor of shape",
    ),
    "nothing": ("logits_with_mask", lambda m: lambda t, _: None, "logits_with_mask= gave a NoneType"),
    "one argument": (
        "logits_with_mask",
        lambda m: lambda t: m(t),
        "logits_with_mask= cannot be called with 2 arguments",
    ),
    "no state": ("logits_with_cache", lambda m: lambda t, _: m(t)[1], "it must give logits and the state"),
    "state None": (
        "logits_with_cache",
        lambda m: lambda t, _: (m(t)[1], None),
        "logits_with_cache= gave None as its state",
    ),
    "a loss a token": ("loss", lambda m: lambda t, _: t.float(), "loss= gave a tensor of shape"),
    "words": ("generate", lambda m: lambda t, _: "words", "generate= gave a str for"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_wrong_adapter_is_no_bug_of_the_model(name: str) -> None:
    keyword, make, said = ADAPTERS[name]
    model = begun(Turned())
    only = {
        "logits_with_mask": "mask-polarity",
        "logits_with_cache": "cache-decode",
        "loss": "loss-shift",
        "generate": "generation",
    }[keyword]
    report = ct.check(model, only=[only], **{keyword: make(model)})
    (found,) = report.findings
    assert found.verdict == "warn", found
    assert said in found.message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"kind": "gpt"}, "kind is 'gpt'"),
        ({"window": "6"}, "window is '6'; it is a whole number"),
        ({"logits_with_mask": 3}, "logits_with_mask is a int; give a function"),
        ({"vocab_size": 5000}, "give vocab_size= and max_seq_len="),
        ({"logits_by_kernel": [1]}, "give a dict"),
        ({"logits": lambda tokens: tokens}, "logits= gave a tensor of shape (1, 2)"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        ct.check(begun(Turned()), **overrides)
