"""No false alarms: correct models pass, and the seeded bug next to each of them is still found."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.healthy_models.all_models import MODEL_MODULES  # noqa: F401  registers every model
from support.healthy_models.blocks_of_tokens import BlockLoss, build_block_model
from support.healthy_models.gpt import GPT, MLP, Block, CastingGPT, FusedAttention, MinGPTAttention
from support.healthy_models.registry import HEALTHY_MODELS, initialize
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.zero_initialization import UnusedPositions
from torch import Tensor, nn
from torch.nn import functional as F

import cutaway as ct
from cutaway.check import Report
from cutaway.check.adapters.declared_config import find_declared_theta
from cutaway.check.probes.op_tracer import OpTracer
from cutaway.errors import InputError

pytestmark = [pytest.mark.unchecked, pytest.mark.usefixtures("frozen_check_clock")]


def problems(report: Report) -> dict[str, str]:
    """Name of each check that failed, was inconclusive or warned → its message."""
    findings = (*report.failures, *report.inconclusive, *report.warnings)
    return {finding.check: f"{finding.verdict}: {finding.message}" for finding in findings}


def only(model: Any, check: str, **overrides: Any) -> Any:
    """The finding of one check."""
    return ct.check(model, only=[check], **overrides)[check]


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", HEALTHY_MODELS)
def test_healthy_model_has_only_right_warnings(name: str) -> None:
    healthy = HEALTHY_MODELS[name]
    found = problems(ct.check(healthy.build()))
    assert found.keys() == healthy.warnings.keys(), found
    assert all(message.startswith("warn") for message in found.values()), found


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("name", HEALTHY_MODELS)
def test_healthy_model_has_only_right_warnings_with_other_tokens(name: str, seed: int) -> None:
    healthy = HEALTHY_MODELS[name]
    found = problems(ct.check(healthy.build(), seed=seed))
    assert found.keys() <= healthy.warnings.keys(), found


# attention-kernels, attention-scale: windows of kernels


def windowed_kernel(window: int | None, scale: float | None = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = torch.arange(q.shape[-2])
        distance = index[:, None] - index[None]
        mask = (distance >= 0) & (distance < (window or q.shape[-2]))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    return attention


@pytest.mark.parametrize(("window", "text"), [(5, "with the window of 5"), (None, "without the window")])
def test_kernel_with_or_without_the_window_passes(window: int | None, text: str) -> None:
    model = ReferenceGPT(window=5)
    for check in ("attention-kernels", "attention-scale"):
        finding = only(model, check, **check_kwargs(model), attention=windowed_kernel(window))
        assert finding.verdict == "pass", finding
        assert any(text in case.message for case in finding.cases), finding.cases


def test_kernel_with_another_window_or_scale_fails() -> None:
    model = ReferenceGPT(window=5)
    finding = only(model, "attention-kernels", **check_kwargs(model), attention=windowed_kernel(6))
    assert finding.verdict == "fail"
    assert "with the window of 5 or without it" in finding.message
    finding = only(model, "attention-scale", **check_kwargs(model), attention=windowed_kernel(None, 1.0))
    assert finding.verdict == "fail"
    assert "multiplies q·k by 1, not by 0.25" in finding.message


# mask-diagonal, sliding-window: large scores are not masked


def build_with_large_scores(attention: type[nn.Module] = MinGPTAttention, factor: float = 100.0) -> Any:
    """Scores that differ by more than 5000, so that most softmax weights underflow to zero."""
    torch.manual_seed(0)
    model = initialize(GPT([Block(attention(), MLP()) for _ in range(2)]))
    for block in model.h:
        for name, param in block.attn.named_parameters():
            if "proj" not in name and "value" not in name:
                param.data.mul_(factor)
    return model


@pytest.mark.parametrize("attention", [MinGPTAttention, FusedAttention])
def test_large_scores_are_not_a_mask(attention: type[nn.Module]) -> None:
    finding = only(build_with_large_scores(attention), "mask-diagonal")
    assert finding.verdict == "pass", finding


def test_window_with_large_scores_passes() -> None:
    model = ReferenceGPT(window=5)
    for block in model.blocks:
        block.attention.q.weight.data.mul_(1e5)
    finding = only(model, "sliding-window", **check_kwargs(model))
    assert finding.verdict == "pass", finding


class DiagonalMaskedAttention(MinGPTAttention):
    """Adds a finite number to the scores of later keys, and of the token itself."""

    offset = -1e4

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        hidden = torch.full((x.shape[1], x.shape[1]), self.offset).triu(0)
        hidden[0, 0] = 0.0
        pattern = ((q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) + hidden).softmax(-1)
        return self.proj((pattern @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("offset", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_masked_diagonal_is_found_for_every_kind_of_mask(offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiagonalMaskedAttention, "offset", offset)
    model = initialize(GPT([Block(DiagonalMaskedAttention(), MLP()) for _ in range(2)]))
    assert only(model, "mask-diagonal").verdict == "fail"
    if offset < -1e4:
        assert only(build_with_large_scores(DiagonalMaskedAttention), "mask-diagonal").verdict == "fail"


# loss-ignore-index: trailing labels


def check_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The finding of loss-ignore-index for a loss function logits, labels → scalar."""
    model = ReferenceGPT()
    overrides = check_kwargs(model) | {"loss": lambda tokens, labels: loss(model(tokens)[0], labels)}
    return only(model, "loss-ignore-index", **overrides)


def loss_by_lengths(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the first tokens of each row, up to its number of labels."""
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:].clamp(min=0), reduction="none")
    counted = torch.arange(1, labels.shape[1]) < (labels != -100).sum(1, keepdim=True)
    return losses[counted].mean()


def loss_by_lengths_without_clamp(logits: Tensor, labels: Tensor) -> Tensor:
    """Raises an error for labels of -100 before the end of a row."""
    log_p = logits[:, :-1].log_softmax(-1)
    rows = [row[: int((row != -100).sum())] for row in labels]
    parts = [-log_p[n, : len(row) - 1].gather(1, row[1:, None]) for n, row in enumerate(rows)]
    return torch.cat(parts).mean()


@pytest.mark.parametrize("loss", [loss_by_lengths, loss_by_lengths_without_clamp])
def test_loss_for_trailing_padding_only_is_a_warning(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    finding = check_loss(loss)
    assert finding.verdict == "warn", finding
    assert "mask the labels of prompts" in finding.message
    assert "labels of -100 at the end of a row are ignored" in [case.message for case in finding.cases]


def test_loss_that_ignores_all_labels_of_minus_100_passes() -> None:
    finding = check_loss(lambda logits, labels: F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:]))
    assert finding.verdict == "pass", finding
    assert len(finding.cases) == 4


# attention-scale, grouped-query-attention: declarations


def test_undeclared_scale_is_a_warning_and_a_declared_one_a_failure() -> None:
    model = initialize(GPT([Block(FusedAttention(scale=0.125), MLP()) for _ in range(2)]))
    finding = only(model, "attention-scale")
    assert finding.verdict == "warn"
    assert "pass attention_scale=" in finding.message
    assert only(model, "attention-scale", attention_scale=0.125).verdict == "pass"
    assert only(model, "attention-scale", attention_scale=8**-0.5).verdict == "fail"


def test_undeclared_grouping_is_a_warning_and_a_declared_one_a_failure() -> None:
    model = ReferenceGPT()
    kwargs = check_kwargs(model)
    assert only(model, "grouped-query-attention", **kwargs, kv_heads=2).verdict == "pass"
    assert only(model, "grouped-query-attention", **kwargs, kv_heads=4).verdict == "fail"
    for block in model.blocks:
        block.attention.repeat_kv = lambda x: x.repeat(1, 2, 1, 1)
    finding = only(model, "grouped-query-attention", **kwargs)
    assert finding.verdict == "warn"
    assert "pass kv_heads=" in finding.message
    assert only(model, "grouped-query-attention", **kwargs, kv_heads=2).verdict == "fail"


# position-encoding: tables of zeros


@pytest.mark.parametrize("zero_head", [False, True])
def test_position_table_of_zeros_that_is_never_added_fails(zero_head: bool) -> None:
    models = [initialize(cls([Block(FusedAttention(), MLP()) for _ in range(2)])) for cls in (GPT, UnusedPositions)]
    for model in models:
        nn.init.zeros_(model.wpe.weight)
        if zero_head:
            nn.init.zeros_(model.lm_head.weight)
    before = [{name: x.clone() for name, x in model.state_dict().items()} for model in models]
    assert [only(model, "position-encoding").verdict for model in models] == ["pass", "fail"]
    assert all(
        torch.equal(x, y[name]) for m, y in zip(models, before, strict=True) for name, x in m.state_dict().items()
    )


# weights on the meta device


def build_meta_models() -> dict[str, Any]:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4)
    partly = initialize(GPT([Block(FusedAttention(), MLP())]))
    partly.lm_head = partly.lm_head.to("meta")
    with torch.device("meta"):
        module, llama = GPT([Block(FusedAttention(), MLP())]), transformers.LlamaForCausalLM(config)
    cutaway = ct.build(ct.config("gpt2"), device="meta")
    return {"module": module, "partly": partly, "transformers": llama, "cutaway": cutaway}


@pytest.mark.parametrize("name", ["module", "partly", "transformers", "cutaway"])
def test_weights_on_the_meta_device_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="on the meta device cannot be checked"):
        ct.check(build_meta_models()[name])


# models that cast activations to a configured dtype


def test_model_that_casts_activations_is_checked_in_its_own_dtype() -> None:
    torch.manual_seed(0)
    model = initialize(CastingGPT([Block(FusedAttention(), MLP()) for _ in range(2)])).bfloat16()
    report = ct.check(model, only=["causality", "low-precision"])
    assert report.noise.keys() == {"bfloat16"}
    assert report["causality"].verdict == "pass"
    assert "bfloat16 only" in report["low-precision"].message
    for block in model.h:
        block.attn.forward = lambda x: x + x.mean(1, keepdim=True)
    assert ct.check(model, only=["causality"])["causality"].verdict == "fail"


class HalfPrecisionHead(nn.Module):
    """Casts weights and activations, so that its head runs in bf16 whatever the dtype of its weights is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(53, 32), nn.Embedding(96, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        return F.linear(x.bfloat16(), self.embed.weight.bfloat16()).float()


def test_model_that_still_computes_in_bf16_is_not_upcast() -> None:
    assert ct.check(HalfPrecisionHead().bfloat16(), only=["causality"]).noise.keys() == {"bfloat16"}


# lengths that are a multiple of a number


def test_error_of_a_model_with_blocks_names_multiple() -> None:
    with pytest.raises(InputError, match=re.escape("such as multiple=64")):
        ct.check(build_block_model())


def test_model_with_blocks_passes_with_multiple() -> None:
    report = ct.check(build_block_model(), multiple=8)
    assert problems(report) == {}
    assert report["causality"].verdict == "pass"
    assert report.properties["multiple"] == 8
    assert problems(ct.check(BlockLoss(), multiple=8, only=["loss"])) == {}
    assert ct.check(BlockLoss(), multiple=8, only=["loss"])["loss-shift"].verdict == "pass"


def test_bug_of_a_model_with_blocks_is_found() -> None:
    assert only(build_block_model(causal=False), "causality", multiple=8).verdict == "fail"


def test_encoder_with_blocks() -> None:
    """With a mask all lengths work; without one, checks that need other lengths are skipped."""
    masked = ct.check(build_block_model(causal=False, masked=True), kind="encoder", multiple=8)
    assert problems(masked) == {}
    assert masked["right-padding"].verdict == "pass"
    unmasked = ct.check(build_block_model(causal=False), kind="encoder", multiple=16)
    assert problems(unmasked) == {}
    assert unmasked["eval-determinism"].verdict == "pass"
    assert "a multiple of 16" in unmasked["batch-invariance"].message


@pytest.mark.parametrize("value", [0, -4, 2.5, "8"])
def test_invalid_multiple_is_an_error(value: object) -> None:
    with pytest.raises(InputError, match="multiple is"):
        ct.check(build_block_model(), multiple=value)


# rope-precision: angles that are exact in bf16


@pytest.mark.parametrize(
    ("frequencies", "dtype", "expected"),
    [
        ([1.0, 0.5, 0.25], torch.float32, torch.float32),  # powers of two: no angle is rounded
        ([1.0, 0.1, 0.01], torch.float32, torch.float32),
        ([1.0, 0.1, 0.01], torch.bfloat16, torch.bfloat16),
    ],
)
def test_angles_rounded_to_bf16_are_found(frequencies: list[float], dtype: torch.dtype, expected: torch.dtype) -> None:
    angles = torch.arange(200).to(dtype)[:, None] * torch.tensor(frequencies, dtype=dtype)
    with OpTracer() as tracer:
        angles.float().cos()
    assert [call.dtype for call in tracer.trig_calls] == [expected]


@pytest.mark.parametrize("values", [[1.0, 0.1, 0.01], [1.0, 37 / 4096]])
def test_frequencies_in_bf16_are_not_angles_in_bf16(values: list[float]) -> None:
    """Products of small positions and frequencies in bf16 may be exact in bf16, though they are computed in fp32."""
    frequencies = torch.tensor(values).bfloat16().float()
    with OpTracer() as tracer:
        (torch.arange(6.0)[:, None] * frequencies).cos()
    assert tracer.trig_calls[0].dtype == torch.float32


def test_nested_tensors_of_a_transformer_encoder_are_not_a_failure() -> None:
    """In inference, nn.TransformerEncoder passes nested tensors, which have no shape, to its submodules."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
            self.embed, self.layers, self.head = (
                nn.Embedding(50, 32),
                nn.TransformerEncoder(layer, 1),
                nn.Linear(32, 50),
            )

        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            padding = None if mask is None else ~mask
            return self.head(self.layers(self.embed(tokens), src_key_padding_mask=padding))

    model = Encoder().eval()
    facts = {"kind": "encoder", "logits_with_mask": model.__call__, "has_positions": False}
    assert only(model, "fully-masked-row", **facts).verdict == "pass"


def test_rope_scaling_in_the_configuration_is_not_a_wrong_theta() -> None:
    """llms-from-scratch states the scaling of Llama 3 in `cfg["rope_freq"]`."""
    module = nn.Linear(1, 1)
    module.cfg = {"rope_base": 10_000.0, "rope_freq": None}
    assert find_declared_theta(module) == 10_000
    module.cfg = {"rope_base": 10_000.0, "rope_freq": {"factor": 4.0}}
    assert find_declared_theta(module) is None


@pytest.mark.parametrize(
    "changes", [{"use_yarn_rope": True}, {"use_NTK_by_parts_rope": True}, {"rotary_base_local": 1e6}]
)
def test_rope_scaling_of_transformer_lens_is_not_a_wrong_theta(changes: dict[str, Any]) -> None:
    module = nn.Linear(1, 1)
    fields = {"use_yarn_rope": False, "yarn_truncate": True, "rotary_scaling_factor": 1.0, "rotary_base_local": None}
    module.cfg = {"rotary_base": 10_000, **fields}
    assert find_declared_theta(module) == 10_000
    module.cfg |= changes
    assert find_declared_theta(module) is None


def test_static_cache_of_a_model_with_convolutions() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"layer_types": ["conv", "full_attention"], "eos_token_id": None, "pad_token_id": None}
    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes, **heads, **layers)).eval()
    assert only(model, "cache-unused-slots").verdict in ("pass", "skip")


def test_cache_that_needs_a_mask_is_not_left_in_the_module() -> None:
    """Like torchtune, the module requires a mask in each forward pass after `setup_caches`."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head, self.kv_cache = nn.Embedding(50, 32), nn.Linear(32, 50), None

        def setup_caches(self, batch_size: int, dtype: torch.dtype) -> None:
            self.kv_cache = nn.Identity()

        def forward(self, tokens: Tensor, mask: Tensor | None = None, input_pos: Tensor | None = None) -> Tensor:
            if self.kv_cache is not None and mask is None:
                raise ValueError("the cache needs a mask")
            return self.head(self.embed(tokens))

    model = Model()
    assert only(model, "causality", has_positions=False).verdict == "pass"
    assert model.kv_cache is None


# softmax-dim, cross-attention-source: linear attention, memory keys


class LinearAttention(nn.Module):
    """Efficient attention of an encoder: softmax of q over its features and of k over the tokens, then two products."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(50, 32), nn.Linear(32, 96, bias=False)
        self.positions, self.head = nn.Embedding(64, 32), nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k = q.softmax(-1) * q.shape[-1] ** -0.5, k.softmax(-2)
        context = torch.einsum("bhnd,bhne->bhde", k, v)
        out = torch.einsum("bhnd,bhde->bhne", q, context).transpose(1, 2).flatten(2)
        return self.head(x + out)  # type: ignore[no-any-return]


def test_softmax_of_linear_attention_over_the_tokens_is_right() -> None:
    assert only(LinearAttention().eval(), "softmax-dim", kind="encoder").verdict != "fail"


class MemoryKeys(nn.Module):
    """An encoder-decoder whose self-attention has two memory keys, and whose cross-attention sees `visible` tokens."""

    def __init__(self, visible: int = 96) -> None:
        super().__init__()
        self.visible, self.embed, self.positions = visible, nn.Embedding(50, 32), nn.Embedding(96, 32)
        self.memory, self.head = nn.Parameter(torch.randn(1, 2, 32)), nn.Linear(32, 50)

    def attend(self, x: Tensor, keys: Tensor, *, causal: bool = False) -> Tensor:
        scores = x @ keys.transpose(-1, -2) * 32**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1 + scores.shape[-1] - scores.shape[-2]) > 0, -1e9)
        return x + scores[:, None].softmax(-1)[:, 0] @ keys

    def forward(self, source: Tensor, mask: Tensor | None, tokens: Tensor) -> Tensor:
        encoded, x = (self.embed(y) + self.positions(torch.arange(y.shape[1])) for y in (source, tokens))
        encoded = self.attend(encoded, encoded)
        x = self.attend(x, torch.cat((self.memory.expand(len(x), -1, -1), x), 1), causal=True)
        return self.head(self.attend(x, encoded[:, -self.visible :]))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("visible", "verdict"), [(96, "pass"), (20, "fail")])
def test_memory_keys_of_self_attention_are_not_a_truncated_source(visible: int, verdict: str) -> None:
    model = initialize(MemoryKeys(visible))
    kwargs: dict[str, Any] = {"kind": "encoder-decoder", "vocab_size": 50, "logits_with_source": model}
    assert only(model, "cross-attention-source", **kwargs).verdict == verdict
