"""`ct.check` on other modules, functions and kernels: correct ones pass, wrong ones fail, wrong overrides warn."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.seeded_bugs.reference_gpt import ReferenceGPT
from torch import Tensor, nn
from torch.nn import functional as F

import cutaway as ct
from cutaway.check import Report
from cutaway.errors import InputError

pytestmark = [pytest.mark.unchecked, pytest.mark.usefixtures("frozen_check_clock")]

VOCAB_SIZE, D_MODEL, HEADS = 53, 32, 4


def initialize(model: nn.Module, std: float = 0.1) -> Any:
    """Draw the weights from N(0, std²) and set the biases to zero."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(0.0, std, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()
    return model.eval()


class BiasedAttentionModel(nn.Module):
    """Positions as a bias on the scores: ALiBi, or a learned relative bias without an attention scale (T5)."""

    def __init__(self, kind: str = "alibi", sign: float = -1.0) -> None:
        super().__init__()
        self.kind, self.sign = kind, sign
        self.embed, self.qkv, self.out = (
            nn.Embedding(VOCAB_SIZE, D_MODEL),
            nn.Linear(D_MODEL, 3 * D_MODEL),
            nn.Linear(D_MODEL, D_MODEL),
        )
        self.norm, self.head = nn.LayerNorm(D_MODEL), nn.Linear(D_MODEL, VOCAB_SIZE)
        if kind == "t5":
            self.relative_bias = nn.Embedding(16, HEADS)

    def bias(self, distance: Tensor) -> Tensor:
        if self.kind == "t5":
            return self.relative_bias(distance.clamp(0, 15)).permute(2, 0, 1)  # type: ignore[no-any-return]
        slopes = torch.tensor([2.0 ** -(n + 1) for n in range(HEADS)])
        return self.sign * slopes[:, None, None] * distance

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x, positions = self.embed(tokens), torch.arange(tokens.shape[1])
        distance = positions[:, None] - positions[None]
        bias = self.bias(distance).masked_fill(distance < 0, -torch.inf)[None]
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        scale = 1.0 if self.kind == "t5" else None
        z = F.scaled_dot_product_attention(q, k, v, bias.type_as(q).expand(len(x), -1, -1, -1), scale=scale)
        return {"logits": self.head(x + self.out(z.transpose(1, 2).flatten(2)))}


class ComplexRopeModel(nn.Module):
    """RoPE with complex numbers; with `unregistered`, the layers are in a Python list."""

    def __init__(self, frequency: Callable[[Tensor], Tensor] | None = None, *, unregistered: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB_SIZE, D_MODEL), nn.Linear(D_MODEL, VOCAB_SIZE, bias=False)
        layers = [
            nn.ModuleDict({"qkv": nn.Linear(D_MODEL, 3 * D_MODEL), "out": nn.Linear(D_MODEL, D_MODEL)})
            for _ in range(2)
        ]
        self.layers = layers if unregistered else nn.ModuleList(layers)
        head_dim = D_MODEL // HEADS
        j = torch.arange(0, head_dim, 2)
        freqs = 10_000.0 ** (-j / head_dim) if frequency is None else frequency(j)
        self.freqs_cis = torch.polar(torch.ones(64, head_dim // 2), torch.outer(torch.arange(64.0), freqs))

    def apply_rope(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(z * self.freqs_cis[: x.shape[-2]]).flatten(-2).type_as(x)

    def forward(self, tokens: Tensor) -> tuple[None, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in layer["qkv"](x).chunk(3, -1))
            z = F.scaled_dot_product_attention(self.apply_rope(q), self.apply_rope(k), v, is_causal=True)
            x = x + layer["out"](z.transpose(1, 2).flatten(2))
        return None, self.head(x)


class RecurrentModel(nn.Module):
    """A GRU without attention."""

    def __init__(self, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.embed, self.mix, self.head = (
            nn.Embedding(VOCAB_SIZE, D_MODEL),
            nn.GRU(D_MODEL, D_MODEL, batch_first=True),
            nn.Linear(D_MODEL, VOCAB_SIZE),
        )
        self.norm = nn.BatchNorm1d(D_MODEL) if batch_norm else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x if self.norm is None else self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.mix(x)[0])  # type: ignore[no-any-return]


class TorchEncoderModel(nn.Module):
    """nn.TransformerEncoder with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position, self.head = (
            nn.Embedding(VOCAB_SIZE, D_MODEL),
            nn.Embedding(48, D_MODEL),
            nn.Linear(D_MODEL, VOCAB_SIZE),
        )
        layer = nn.TransformerEncoderLayer(D_MODEL, HEADS, 4 * D_MODEL, 0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.position(torch.arange(length))
        return self.head(self.layers(x, mask=nn.Transformer.generate_square_subsequent_mask(length)))  # type: ignore[no-any-return]


def causal_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def kernel_without_max_subtraction(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    e = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf).exp()
    return e / e.sum(-1, keepdim=True) @ v


def build_with_zero_head() -> Any:
    model = initialize(ComplexRopeModel())
    nn.init.zeros_(model.head.weight)
    return model


CORRECT_MODELS: dict[str, Callable[[], Any]] = {
    "alibi": lambda: initialize(BiasedAttentionModel()),
    "t5": lambda: initialize(BiasedAttentionModel("t5")),
    "complex rope": lambda: initialize(ComplexRopeModel()),
    "complex rope in bf16": lambda: initialize(ComplexRopeModel()).bfloat16(),
    "zero head": build_with_zero_head,
    "gru": lambda: initialize(RecurrentModel()),
    "gru in fp64": lambda: initialize(RecurrentModel()).double(),
    "nn.TransformerEncoder": lambda: initialize(TorchEncoderModel()).train(),
    "function": lambda: initialize(TorchEncoderModel()).forward,
    "kernel": lambda: causal_kernel,
}


def failures_and_warnings(report: Report) -> list[str]:
    return [f"{finding.check}: {finding.message}" for finding in (*report.failures, *report.warnings)]


def snapshot(module: nn.Module) -> list[Any]:
    """The state that a check must not change: tensors, training flags, hooks, gradients, random state."""
    tensors = [x.detach().clone() for x in (*module.parameters(), *module.buffers())]
    flags = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in module.modules()]
    return [tensors, flags, [param.grad for param in module.parameters()], torch.get_rng_state()]


@pytest.mark.parametrize("name", CORRECT_MODELS)
def test_correct_model_passes_and_is_unchanged(name: str) -> None:
    model = CORRECT_MODELS[name]()
    before = snapshot(model) if isinstance(model, nn.Module) else []
    assert failures_and_warnings(ct.check(model, budget=60)) == []
    after = snapshot(model) if isinstance(model, nn.Module) else []
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_batch_norm_statistics_are_restored() -> None:
    model = initialize(RecurrentModel(batch_norm=True))
    before = [x.clone() for x in model.buffers()]
    report = ct.check(model, budget=60)
    assert not report.ok  # in training mode, rows affect each other
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


def replace_forward(forward: Callable[[Any, Tensor], Tensor]) -> Any:
    """A correct model with another forward(model, tokens); `model.original` is the correct one."""
    model = initialize(TorchEncoderModel())
    model.original = model.forward
    model.forward = lambda tokens: forward(model, tokens)
    return model


def change_tokens_in_place(model: Any, tokens: Tensor) -> Tensor:
    tokens[:, 0] = 0
    return model.original(tokens)  # type: ignore[no-any-return]


def change_weights_in_place(model: Any, tokens: Tensor) -> Tensor:
    model.head.weight.data.mul_(1.0005)
    return model.original(tokens)  # type: ignore[no-any-return]


WRONG_MODELS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "alibi with the wrong sign": (
        lambda: initialize(BiasedAttentionModel(sign=1.0)),
        "rope-shift-invariance",
        "grow linearly with the distance",
    ),
    "one frequency": (lambda: initialize(ComplexRopeModel(torch.ones_like), 0.2), "rope-layout", "by the same angle"),
    "layers in a list": (
        lambda: initialize(ComplexRopeModel(unregistered=True)),
        "unused-parameters",
        "module.parameters() does not have",
    ),
    "tokens changed in place": (
        lambda: replace_forward(change_tokens_in_place),
        "eval-determinism",
        "changes its input tokens",
    ),
    "weights changed in place": (
        lambda: replace_forward(change_weights_in_place),
        "eval-determinism",
        "changes the parameter head.weight",
    ),
    "probabilities instead of logits": (
        lambda: replace_forward(lambda m, t: m.original(t).softmax(-1)),
        "initial-loss",
        "probabilities",
    ),
    "relu after the head": (lambda: replace_forward(lambda m, t: m.original(t).relu()), "initial-loss", "exactly zero"),
    "independent of the tokens": (
        lambda: replace_forward(lambda m, t: m.original(t) * 0 + m.head.weight[:, 0]),
        "causality-gradient",
        "do not depend on any token",
    ),
    "exp overflow": (lambda: kernel_without_max_subtraction, "attention-kernels", "not finite"),
}


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_wrong_model_fails_with_message(name: str) -> None:
    build, check, message = WRONG_MODELS[name]
    overrides = {"relative_positions": True} if name.startswith("alibi") else {}
    failures = {finding.check: finding for finding in ct.check(build(), budget=60, **overrides).failures}
    assert check in failures, list(failures)
    assert message in failures[check].message


WRONG_OVERRIDES: dict[str, tuple[str, Any, str]] = {
    "last logits only": (
        "logits_with_mask",
        lambda m: lambda t, _: m(t)[1][:, -1],
        "logits_with_mask= returned a tensor of shape",
    ),
    "None instead of logits": (
        "logits_with_mask",
        lambda m: lambda t, _: None,
        "logits_with_mask= returned a NoneType",
    ),
    "one argument": (
        "logits_with_mask",
        lambda m: lambda t: m(t),
        "logits_with_mask= cannot be called with 2 arguments",
    ),
    "no cache": ("logits_with_cache", lambda m: lambda t, _: m(t)[1], "it must return (logits, cache)"),
    "cache None": (
        "logits_with_cache",
        lambda m: lambda t, _: (m(t)[1], None),
        "logits_with_cache= returned None as the cache",
    ),
    "loss per token": ("loss", lambda m: lambda t, _: t.float(), "loss= returned a tensor of shape"),
    "text instead of tokens": ("generate", lambda m: lambda t, _: "text", "generate= returned a str for"),
}


@pytest.mark.parametrize("name", WRONG_OVERRIDES)
def test_wrong_override_is_inconclusive(name: str) -> None:
    keyword, build_override, message = WRONG_OVERRIDES[name]
    model = initialize(ComplexRopeModel())
    only = {
        "logits_with_mask": "mask-polarity",
        "logits_with_cache": "cache-decode",
        "loss": "loss-shift",
        "generate": "generation",
    }[keyword]
    report = ct.check(model, only=[only], **{keyword: build_override(model)})
    (finding,) = report.findings
    assert finding.verdict == "inconclusive", finding
    assert message in finding.message
    assert not report.ok


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kind": "gpt"}, "kind is 'gpt'"),
        ({"window": "6"}, "window is '6'; pass an integer"),
        ({"logits_with_mask": 3}, "logits_with_mask is a int; pass a function"),
        ({"vocab_size": 5000}, "pass vocab_size= and max_seq_len="),
        ({"logits_by_kernel": [1]}, "pass a dict"),
        ({"logits": lambda tokens: tokens}, "logits= returned a tensor of shape (1, 2)"),
    ],
)
def test_invalid_override_is_an_error(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        ct.check(initialize(ComplexRopeModel()), **overrides)


class SourceModel(nn.Module):
    """An encoder-decoder whose forward takes a source, a source mask and decoder tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB_SIZE, D_MODEL), nn.Embedding(96, D_MODEL)
        self.transformer = nn.Transformer(D_MODEL, HEADS, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(D_MODEL, VOCAB_SIZE)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))  # type: ignore[no-any-return]

    def forward(self, source: Tensor, mask: Tensor | None, tokens: Tensor) -> Tensor:
        padding = None if mask is None else ~mask
        future = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        out = self.transformer(
            self.embed_tokens(source),
            self.embed_tokens(tokens),
            tgt_mask=future,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.head(out)  # type: ignore[no-any-return]


def test_encoder_decoder_needs_no_other_function_than_logits_with_source() -> None:
    model = SourceModel().eval()
    kwargs: dict[str, Any] = {"kind": "encoder-decoder", "logits_with_source": model, "only": ["causality", "cross"]}
    for source in (model, None):
        report = ct.check(source, vocab_size=VOCAB_SIZE, **kwargs)
        assert not report.problems, report
        assert report["causality"].verdict == report["cross-attention-source"].verdict == "pass"
    with pytest.raises(InputError, match="vocab_size is unknown"):
        ct.check(model, **kwargs)


@pytest.mark.parametrize(
    ("name", "check", "output", "message"),
    [
        ("hidden_states", "residual-growth", [torch.ones(1, 16, 8)], "one before the first block and one per block"),
        ("hidden_states", "residual-growth", torch.ones(1, 16, 8), r"returned a tensor of shape \(1, 16, 8\)"),
        ("attentions", "attention-entropy", [torch.ones(2, 16, 16)], r"of shape \(2, heads, 16, 16\), one per layer"),
    ],
)
def test_wrong_hidden_states_and_attentions_are_described(name: str, check: str, output: Any, message: str) -> None:
    table = torch.randn(VOCAB_SIZE, D_MODEL, generator=torch.Generator().manual_seed(0))
    overrides: dict[str, Any] = {name: lambda tokens: output}
    finding = ct.check(lambda tokens: table[tokens].cumsum(1), only=[check], has_positions=False, **overrides)[check]
    assert finding.verdict == "inconclusive"
    assert re.search(message, finding.message), finding


def test_a_kernel_that_is_passed_does_not_replace_the_logits_of_the_module() -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    model = ReferenceGPT()
    report = ct.check(model, attention=kernel, only=["attention-kernels", "causality"])
    assert [finding.verdict for finding in report.findings] == ["pass", "pass"]
    assert report.properties["vocab_size"] == model.embed.num_embeddings


class KeyAlibiModel(BiasedAttentionModel):
    """ALiBi that depends on the key only, which adds a constant to each row (curated-transformers)."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary_embeds = None

    def bias(self, distance: Tensor) -> Tensor:
        return super().bias(distance[-1:].expand_as(distance))


def test_attribute_without_rope_is_not_rope() -> None:
    """`rotary_embeds = None` must not make the check compare scores with the constant of each row."""
    report = ct.check(initialize(KeyAlibiModel()), only=["rope-shift-invariance"], relative_positions=True)
    assert report["rope-shift-invariance"].verdict == "pass"


class ShortformerModel(BiasedAttentionModel):
    """Learned positions in queries and keys only, as in Shortformer."""

    def __init__(self) -> None:
        super().__init__("shortformer")
        self.position = nn.Embedding(64, D_MODEL)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        y, position = self.norm(x), self.position(torch.arange(tokens.shape[1]))
        q, k, v = self.qkv.weight.chunk(3)
        heads = [F.linear(z, w).unflatten(-1, (HEADS, -1)) for z, w in ((y + position, q), (y + position, k), (y, v))]
        z = F.scaled_dot_product_attention(*(h.transpose(1, 2) for h in heads), is_causal=True)
        return {"logits": self.head(x + self.out(z.transpose(1, 2).flatten(2)))}


def test_positions_of_queries_and_keys_are_not_rope() -> None:
    facts = {"relative_positions": False, "max_seq_len": 64}
    report = ct.check(initialize(ShortformerModel()), only=["rope-layout"], **facts)
    assert report["rope-layout"].verdict == "skip"


class TableRopeModel(BiasedAttentionModel):
    """RoPE with a table of 512 positions that is computed again for longer sequences (curated-transformers)."""

    def __init__(self, table_dtype: torch.dtype) -> None:
        super().__init__("rope")
        self.table_dtype, size = table_dtype, D_MODEL // HEADS
        self.register_buffer("frequencies", 1e4 ** -(torch.arange(0, size, 2) / size), persistent=False)
        self.extend(512)

    def extend(self, length: int) -> None:
        frequencies = self.frequencies.to(self.table_dtype)
        angles = (torch.arange(length, dtype=self.table_dtype)[:, None] * frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        if len(self.cos) < x.shape[2]:
            self.extend(x.shape[2])
        a, b = x.chunk(2, -1)
        cos, sin = (table[: x.shape[2]].to(x.dtype) for table in (self.cos, self.sin))
        return x * cos + torch.cat((-b, a), -1) * sin

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        z = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return {"logits": self.head(x + self.out(z.transpose(1, 2).flatten(2)))}


@pytest.mark.parametrize(("table_dtype", "verdict"), [(torch.bfloat16, "fail"), (torch.float32, "pass")])
def test_table_that_is_extended_in_low_precision(table_dtype: torch.dtype, verdict: str) -> None:
    facts = {"relative_positions": True, "max_seq_len": 700, "only": ["rope-precision"]}
    model = initialize(TableRopeModel(torch.float32)).bfloat16()
    model.table_dtype = table_dtype
    assert ct.check(model, **facts)["rope-precision"].verdict == verdict
    assert len(model.cos) == 512
