"""Chunked cross-entropy equals cross-entropy over full logits; objectives equal worked examples and transformers."""

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cutaway as ct
from cutaway.errors import InputError
from cutaway.model.head import LMHead
from cutaway.train import objectives
from cutaway.train.loss import linear_cross_entropy
from cutaway.train.loss.chunked_cross_entropy import LossSums, chunked_cross_entropy, select_targets
from cutaway.train.loss.cross_entropy import CrossEntropyOptions

V, D = 23, 8
TRANSFORM = {"activation": "gelu", "norm": {"kind": "layernorm"}}
HEADS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False},
    "bias": {"bias": "learned"},
    "fixed bias": {"bias": "fixed"},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0, "tied": False},
    "transform": {"transform": TRANSFORM, "bias": "learned"},
    "everything": {"transform": TRANSFORM, "bias": "learned", "scale": 1.7, "softcap": 3.0, "tied": False},
}


def chunked_loss(head: Any, x: Tensor, targets: Tensor, weights: Tensor, **options: Any) -> LossSums:
    selected = select_targets(targets, weights).to(x.device)
    return chunked_cross_entropy(head, x, selected, CrossEntropyOptions(**options))


def build_model(head: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    block = {"attention": {"heads": 2}, "ffn": {"kind": "mlp", "hidden": 12}}
    config = {"form": "decoder", "vocab_size": V, "d_model": D, "decoder": {"layers": 1, "block": block}, "head": head}
    model = ct.build(config, dtype=dtype, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        if head.get("bias") == "fixed":
            model.head.bias.normal_()
    return model.train()


def reference_loss(logits: Tensor, targets: Tensor, weights: Tensor, smoothing: float, z: float) -> Tensor:
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    return (weights * (losses + z * logits.logsumexp(-1).square())).sum()


@pytest.mark.sample(40)  # each chunk size and each kind of loss for each head
@pytest.mark.parametrize("chunk_size", [1, 5, 100])
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.02), (0.2, 0.01)])
@pytest.mark.parametrize("head", HEADS)
def test_chunked_equals_full_logits(head: str, smoothing: float, z: float, chunk_size: int) -> None:
    """Values, and gradients of every parameter of a model; a tied table has gradients from input and output."""
    model = build_model(HEADS[head])
    tokens, targets = torch.randint(V, (2, 7)), torch.randint(V, (14,))
    weights = torch.rand(14, dtype=torch.float64) * torch.tensor([0, 1, 1, 0.5, 0, 2, 1]).repeat(2)
    expected = reference_loss(model(tokens).flatten(0, 1), targets, weights, smoothing, z)
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))
    x = model.hidden_states(tokens).flatten(0, 1)
    loss = chunked_loss(
        model.head, x, targets, weights, label_smoothing=smoothing, z_loss_coef=z, chunk_size=chunk_size
    )
    grads = torch.autograd.grad(3 * loss.loss, list(model.parameters()))
    torch.testing.assert_close(loss.loss, expected)
    torch.testing.assert_close(loss.weight, weights.sum())
    torch.testing.assert_close(loss.cross_entropy, reference_loss(model(tokens).flatten(0, 1), targets, weights, 0, 0))
    assert not loss.weight.requires_grad
    assert not loss.cross_entropy.requires_grad
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, 3 * expected_grad, rtol=1e-10, atol=1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize("head", HEADS)
def test_gradients_equal_finite_differences(head: str) -> None:
    module = build_model(HEADS[head]).head
    x, targets = torch.randn(5, D, dtype=torch.float64, requires_grad=True), torch.randint(V, (5,))
    weights = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0], dtype=torch.float64)

    def loss_fn(x: Tensor, *_: Tensor) -> Tensor:
        return chunked_loss(module, x, targets, weights, label_smoothing=0.1, z_loss_coef=0.01, chunk_size=2).loss

    assert torch.autograd.gradcheck(loss_fn, (x, *module.parameters()))


def test_loss_without_gradients_has_the_same_value() -> None:
    model = build_model(HEADS["bias"])
    x, targets, weights = torch.randn(9, D, dtype=torch.float64), torch.randint(V, (9,)), torch.rand(9).double()
    with_gradient = chunked_loss(model.head, x, targets, weights, label_smoothing=0.1, chunk_size=4)
    with torch.no_grad():
        without = chunked_loss(model.head, x, targets, weights, label_smoothing=0.1, chunk_size=4)
    model.requires_grad_(False)
    frozen = chunked_loss(model.head, x, targets, weights, label_smoothing=0.1, chunk_size=4)
    assert with_gradient.loss.requires_grad
    for other in (without, frozen):
        assert not other.loss.requires_grad
        assert torch.equal(other.loss, with_gradient.loss)
        assert torch.equal(other.cross_entropy, with_gradient.cross_entropy)


def test_frozen_parameters_have_no_gradient() -> None:
    """With some of the gradients required, each equals that with all required."""
    x, targets, weights = torch.randn(9, D).double(), torch.randint(V, (9,)), torch.rand(9).double()

    def gradients(x_requires_grad: bool, trained: tuple[str, ...]) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        head = build_model(HEADS["transform"]).head
        for name, parameter in head.named_parameters():
            parameter.requires_grad_(name in trained)
        inputs = x.clone().requires_grad_(x_requires_grad)
        chunked_loss(head, inputs, targets, weights, chunk_size=4).loss.backward()
        return {"x": inputs.grad} | {name: parameter.grad for name, parameter in head.named_parameters()}

    all_names = tuple(name for name, _ in build_model(HEADS["transform"]).head.named_parameters())
    expected = gradients(True, all_names)
    cases = ((True, ()), (False, all_names), (True, ("bias",)), (False, ("transform.dense.weight",)))
    for x_requires_grad, trained in cases:
        grads = gradients(x_requires_grad, trained)
        with_grad = {name for name, grad in grads.items() if grad is not None}
        assert with_grad == {*trained, *(["x"] if x_requires_grad else [])}
        for name, grad in grads.items():
            assert grad is None or torch.equal(grad, expected[name])


class RowCountingHead(nn.Module):
    """A head that records the number of rows of each call."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head, self.rows = head, []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return self.head(x)


def test_targets_of_weight_0_are_not_computed() -> None:
    """Their targets may be invalid ids, and their hidden states NaN."""
    head = RowCountingHead(build_model(HEADS["tied"]).head)
    x, targets, weights = torch.randn(10, D).double(), torch.randint(V, (10,)), torch.ones(10).double()
    weights[[2, 3, 7]], targets[[2, 3, 7]], x[[2, 3, 7]] = 0, -100, float("nan")
    x.requires_grad_()
    loss = chunked_loss(head, x, targets, weights, chunk_size=3)
    loss.loss.backward()
    assert head.rows == [3, 3, 1]
    assert loss.loss.isfinite()
    assert x.grad is not None
    assert not x.grad[[2, 3, 7]].any()
    assert x.grad[weights > 0].any(-1).all()


def test_no_targets_have_zero_loss_and_zero_gradients() -> None:
    """As on a rank that has only padding: its gradients must exist, and be 0."""
    model = build_model(HEADS["bias"])
    x = torch.randn(4, D, dtype=torch.float64, requires_grad=True)
    loss = chunked_loss(model.head, x, torch.zeros(4, dtype=torch.long), torch.zeros(4), chunk_size=2)
    loss.loss.backward()
    assert loss.loss == 0
    assert loss.weight == 0
    for tensor in (x, *model.head.parameters()):
        assert tensor.grad is not None
        assert not tensor.grad.any()


class PeakMemory(TorchDispatchMode):
    """Peak bytes of newly allocated tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.tracked: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.tracked | inputs:
                key, size = storage._cdata, storage.nbytes()
                self.tracked.add(key)
                self.live_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(storage, self.on_freed, key, size)
        return result

    def on_freed(self, key: int, size: int) -> None:
        self.tracked.discard(key)
        self.live_bytes -= size


def test_full_logits_are_never_allocated() -> None:
    rows, d_model, vocab, chunk_size = 512, 8, 1000, 32
    head = nn.Linear(d_model, vocab)
    x, targets = torch.randn(rows, d_model, requires_grad=True), torch.randint(vocab, (rows,))
    weights, full_bytes = torch.ones(rows), rows * vocab * 4

    def peak_bytes(loss_fn: Callable[[], Tensor]) -> int:
        with PeakMemory() as memory:
            loss_fn().backward()
        return memory.peak_bytes

    def loss_in_chunks() -> Tensor:
        return chunked_loss(head, x, targets, weights, label_smoothing=0.1, z_loss_coef=0.1, chunk_size=chunk_size).loss

    assert peak_bytes(lambda: F.cross_entropy(head(x), targets)) >= 2 * full_bytes  # full logits are measured
    grad_bytes = 4 * (4 * rows * d_model + 5 * d_model * vocab)  # gradients, accumulators and returned copies
    bound = grad_bytes + 5 * chunk_size * vocab * 4
    assert bound < full_bytes / 2
    assert peak_bytes(loss_in_chunks) <= bound


@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_is_accumulated_in_fp32(autocast: bool) -> None:
    """Over many chunks the error is that of rounding one product; gradients have the dtype of their tensors."""
    torch.manual_seed(1)
    exact_head = nn.Linear(16, 50).double()
    x, targets, weights = torch.randn(640, 16), torch.randint(50, (640,)), torch.ones(640)
    exact_x = x.bfloat16().double().requires_grad_()
    head = nn.Linear(16, 50).to(torch.float32 if autocast else torch.bfloat16)
    with torch.no_grad():
        for parameter, exact in zip(head.parameters(), exact_head.parameters(), strict=True):
            parameter.copy_(exact)
            exact.copy_(parameter.bfloat16())
    chunked_loss(exact_head, exact_x, targets, weights.double(), chunk_size=640).loss.backward()
    bf16_x = x.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = chunked_loss(head, bf16_x, targets, weights, chunk_size=10)
    loss.loss.backward()
    assert loss.loss.dtype == torch.float32
    pairs = [(bf16_x, exact_x), *zip(head.parameters(), exact_head.parameters(), strict=True)]
    for tensor, exact in pairs:
        assert tensor.grad is not None
        assert exact.grad is not None
        assert tensor.grad.dtype == tensor.dtype
        assert (tensor.grad - exact.grad).norm() <= 2**-7 * exact.grad.norm()


@pytest.mark.parametrize("target", [V, -100])
def test_target_outside_the_vocabulary_is_an_error(target: int) -> None:
    with pytest.raises(InputError, match=f"targets contain the token id {target}"):
        chunked_loss(build_model({}).head, torch.randn(4, D).double(), torch.full((4,), target), torch.ones(4))


# Objectives


def test_causal_lm_by_hand() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]])
    document_ids = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
    objective = objectives.causal_lm(tokens, document_ids)
    assert [tensor.tolist() for tensor in objective.inputs] == [[[5, 6, 7, 8], [1, 2, 3, 4]]]
    assert objective.model_kwargs["document_ids"].tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    assert objective.targets.tolist() == [[6, 7, 8, 9], [2, 3, 4, 5]]
    assert objective.weights.tolist() == [[1, 0, 1, 1], [1, 1, 1, 0]]


def test_packed_documents_have_the_loss_of_separate_ones() -> None:
    model = ct.build("tiny-gpt", dtype=torch.float64, seed=0).train()
    texts = [torch.randint(250, (1, length)) for length in (5, 3, 6)]
    document_ids = torch.cat([torch.full((1, text.shape[-1]), number) for number, text in enumerate(texts)], -1)
    packed = objectives.causal_lm(torch.cat(texts, -1), document_ids).loss(model)
    separate = [objectives.causal_lm(text).loss(model) for text in texts]
    torch.testing.assert_close(packed.loss, sum(loss.loss for loss in separate))
    assert packed.weight == sum(loss.weight for loss in separate) == 4 + 2 + 5


def test_rows_of_one_document_need_no_mask() -> None:
    tokens, document_ids = torch.randint(250, (2, 6)), torch.tensor([[3] * 6, [0] * 6])
    assert objectives.causal_lm(tokens, document_ids).model_kwargs == {}
    assert objectives.causal_lm(tokens, document_ids).weights.tolist() == [[1.0] * 5] * 2


def test_prefix_lm_by_hand() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6]])
    document_ids = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    objective = objectives.prefix_lm(tokens, document_ids, torch.tensor([2, 4]))
    assert objective.targets.tolist() == [[6, 7, 8, 9, 10], [2, 3, 4, 5, 6]]
    assert objective.weights.tolist() == [[0, 1, 0, 0, 1], [0, 0, 0, 1, 1]]
    assert objective.model_kwargs["prefix_lengths"].tolist() == [2, 4]


def test_prefix_lm_with_empty_prefix_equals_causal_lm_and_targets_are_masked() -> None:
    model = ct.build("tiny-gpt", dtype=torch.float64, seed=0).train()
    tokens = torch.randint(250, (2, 9))
    empty_prefix = objectives.prefix_lm(tokens, None, torch.tensor([0, 0])).loss(model)
    torch.testing.assert_close(empty_prefix.loss, objectives.causal_lm(tokens).loss(model).loss)
    objective = objectives.prefix_lm(tokens, None, torch.tensor([4, 2]))
    before = objective.hidden_states(model)
    for position in range(1, 8):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 250
        after = objectives.prefix_lm(changed, None, torch.tensor([4, 2])).hidden_states(model)
        is_affected = (after != before).any(-1)
        for row in range(2):
            if objective.weights[row, position - 1]:  # a target is not visible to the position that predicts it
                assert not is_affected[row, :position].any()
            elif position == 1:
                assert is_affected[row, 0]  # a prefix token is visible to the first token


def test_seq2seq_by_hand() -> None:
    source, target = torch.tensor([[5, 6, 0], [7, 8, 9]]), torch.tensor([[1, 5, 6, 2], [1, 7, 2, 0]])
    objective = objectives.seq2seq(source, source != 0, target, target != 0)
    encoder_input, decoder_input, source_mask, mask = objective.inputs
    assert encoder_input is source
    assert decoder_input is not None
    assert decoder_input.tolist() == [[1, 5, 6], [1, 7, 2]]
    assert source_mask is not None
    assert source_mask.tolist() == [[True, True, False], [True, True, True]]
    assert mask is None  # the decoder input has no padding
    assert objective.targets.tolist() == [[5, 6, 2], [7, 2, 0]]
    assert objective.weights.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_seq2seq_loss_is_independent_of_the_padding_side() -> None:
    model = ct.build("tiny-t5", dtype=torch.float64, seed=0).train()
    source, target = torch.randint(2, 250, (1, 6)), torch.randint(2, 250, (1, 5))
    expected = objectives.seq2seq(source, None, target, None).loss(model, CrossEntropyOptions(label_smoothing=0.1))
    target_mask = torch.ones(1, 5, dtype=torch.bool)
    for padding in ((2, 0), (0, 3), (1, 2)):
        padded_source = F.pad(source, padding)
        objective = objectives.seq2seq(
            padded_source, padded_source > 0, F.pad(target, padding), F.pad(target_mask, padding)
        )
        loss = objective.loss(model, CrossEntropyOptions(label_smoothing=0.1))
        assert loss.weight == expected.weight == 4
        torch.testing.assert_close(loss.loss, expected.loss)


MASKING: dict[str, Any] = {"mask_id": 3, "vocab_size": 1000, "special_ids": (0, 1), "seed": 7}


@pytest.mark.parametrize("span_masking", [False, True])
def test_masked_lm_replaces_80_10_10_of_the_masked_tokens(span_masking: bool) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(10, 1000, (400, 128))
    tokens[:, 0] = 1
    objective = objectives.masked_lm(
        tokens, mlm_probability=0.15, positions=range(400), span_masking=span_masking, **MASKING
    )
    is_masked, inputs = objective.weights > 0, objective.inputs[0]
    assert inputs is not None
    assert torch.equal(objective.targets, tokens)
    assert torch.equal(inputs[~is_masked], tokens[~is_masked])
    assert not is_masked[:, 0].any()

    def has_mean(values: Tensor, mean: float) -> bool:
        """Within four standard deviations, twice as wide for spans, whose tokens are not independent."""
        deviation = math.sqrt(mean * (1 - mean) / values.numel()) * (2 if span_masking else 1)
        return bool(abs(values.double().mean() - mean) < 4 * deviation)

    assert has_mean(is_masked[:, 1:], 0.15)
    assert has_mean(inputs[is_masked] == 3, 0.8)
    assert has_mean(inputs[is_masked] == tokens[is_masked], 0.1)
    random_tokens = inputs[is_masked & (inputs != 3) & (inputs != tokens)]
    assert 400 < random_tokens.double().mean() < 600
    assert random_tokens.unique().numel() > 300
    both_masked = is_masked[:, 2:] & is_masked[:, 1:-1]
    assert (both_masked.double().mean() / is_masked[:, 1:].double().mean() > 0.6) == span_masking
    if span_masking:  # tokens of a span have the same kind of replacement
        assert ((inputs[:, 2:] == 3) == (inputs[:, 1:-1] == 3))[both_masked].double().mean() > 0.9


@pytest.mark.parametrize("rate", [0.15, 0.5])
@pytest.mark.parametrize("span_masking", [False, True])
def test_every_column_is_masked_equally_often(span_masking: bool, rate: float) -> None:
    """Including the first tokens, before which few spans can start. Rows are independent: four standard deviations."""
    tokens = torch.full((6000, 14), 9)
    columns = objectives.masked_lm(
        tokens, mlm_probability=rate, positions=range(6000), span_masking=span_masking, **MASKING
    ).weights.mean(0)
    assert ((columns - rate).abs() < 4 * math.sqrt(rate * (1 - rate) / 6000)).all(), columns


@pytest.mark.parametrize("span_masking", [False, True])
def test_masking_is_a_function_of_seed_and_position(span_masking: bool) -> None:
    tokens = torch.randint(10, 1000, (6, 64))
    options = MASKING | {"span_masking": span_masking, "mlm_probability": 0.3}
    batch = objectives.masked_lm(tokens, positions=[4, 5, 6, 7, 8, 2**62], **options)
    subset = objectives.masked_lm(tokens[[3, 5]], positions=torch.tensor([7, 2**62]), **options)
    assert torch.equal(batch.inputs[0][[3, 5]], subset.inputs[0])  # type: ignore[index, arg-type]
    assert torch.equal(batch.weights[[3, 5]], subset.weights)
    assert not torch.equal(batch.weights[0], batch.weights[1])
    other_seed = objectives.masked_lm(tokens, positions=[4, 5, 6, 7, 8, 2**62], **(options | {"seed": 8}))
    assert not torch.equal(other_seed.weights[0], batch.weights[0])


def test_padding_is_never_a_target() -> None:
    tokens = torch.randint(10, 1000, (4, 32))
    mask = torch.arange(32).expand(4, 32) < 20
    objective = objectives.masked_lm(tokens, mask=mask, positions=range(4), mlm_probability=0.9, **MASKING)
    assert not objective.weights[~mask].any()
    assert objective.weights.sum() > 40
    assert torch.equal(objective.model_kwargs["mask"], mask)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: objectives.causal_lm(t[:, :1]), "2 tokens or more"),
        (
            lambda t: objectives.masked_lm(t, positions=range(4), mlm_probability=1.0, **MASKING),
            "mlm_probability is 1.0",
        ),
        (lambda t: objectives.masked_lm(t, positions=range(3), **MASKING), "3 items, but tokens has 4 rows"),
        (lambda t: objectives.prefix_lm(t, None, torch.tensor([1])), "one length for each of 4 rows"),
    ],
)
def test_invalid_batches_are_errors(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(torch.randint(10, 1000, (4, 8)))


# Equal to transformers


def load_pair(reference: Any, directory: Path) -> tuple[Any, Any]:
    """The transformers model and ours with the same weights, both in training mode without dropout."""
    transformers.logging.set_verbosity_error()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    reference.save_pretrained(directory)
    return reference.train(), ct.load(directory).model.train()


def assert_equal_loss(
    reference: Any, model: Any, reference_loss: Tensor, objective: objectives.Objective, tied_name: str
) -> None:
    """The mean loss and the gradient of the tied embedding are equal."""
    loss = objective.loss(model, CrossEntropyOptions(chunk_size=4))
    mean = loss.loss / loss.weight
    torch.testing.assert_close(mean, reference_loss, rtol=1e-5, atol=1e-5)
    reference_loss.backward()
    mean.backward()
    expected = reference.get_parameter(tied_name).grad
    grad = model.head.matrix.weight.grad
    assert (grad - expected).norm() <= 1e-4 * expected.norm()


def test_causal_lm_equals_gpt2_loss(tmp_path: Path) -> None:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(vocab_size=61, n_positions=40, n_embd=16, n_layer=2, n_head=2, **no_dropout)
    reference, model = load_pair(transformers.GPT2LMHeadModel(config), tmp_path)
    tokens = torch.randint(61, (3, 12))
    expected = reference(input_ids=tokens, labels=tokens).loss
    assert_equal_loss(reference, model, expected, objectives.causal_lm(tokens), "transformer.wte.weight")


def test_masked_lm_equals_bert_loss(tmp_path: Path) -> None:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    shape = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**shape, intermediate_size=24, max_position_embeddings=40, **no_dropout)
    reference, model = load_pair(transformers.BertForMaskedLM(config), tmp_path)
    tokens = torch.randint(4, 61, (3, 12))
    mask = torch.arange(12) < torch.tensor([[12], [9], [5]])
    objective = objectives.masked_lm(
        tokens,
        mask=mask,
        mask_id=3,
        vocab_size=61,
        mlm_probability=0.4,
        seed=0,
        positions=range(3),
        special_ids=(0, 1, 2),
    )
    labels = objective.targets.masked_fill(objective.weights == 0, -100)
    expected = reference(input_ids=objective.inputs[0], attention_mask=mask.long(), labels=labels).loss
    assert_equal_loss(reference, model, expected, objective, "bert.embeddings.word_embeddings.weight")


def test_seq2seq_equals_t5_loss(tmp_path: Path) -> None:
    shape = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    reference, model = load_pair(transformers.T5ForConditionalGeneration(config), tmp_path)
    source, labels = torch.randint(2, 61, (3, 9)), torch.randint(2, 61, (3, 7))
    source_mask = torch.arange(9) < torch.tensor([[9], [6], [4]])
    label_mask = torch.arange(7) < torch.tensor([[4], [7], [5]])
    target = torch.cat([torch.zeros(3, 1, dtype=torch.long), labels], -1)
    objective = objectives.seq2seq(source, source_mask, target, F.pad(label_mask, (1, 0), value=True))
    labels = labels.masked_fill(~label_mask, -100)
    expected = reference(input_ids=source, attention_mask=source_mask.long(), labels=labels).loss
    assert_equal_loss(reference, model, expected, objective, "shared.weight")


@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.1, 1e-2)])
@pytest.mark.parametrize("equal_weights", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
def test_linear_cross_entropy_equals_autograd(
    smoothing: float, z: float, equal_weights: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The explicit gradient of a linear head equals autograd's."""
    monkeypatch.setitem(linear_cross_entropy.MAX_CHUNK_LOGITS, "cpu", 128 * 300)  # several chunks
    monkeypatch.setattr(linear_cross_entropy, "MAX_CHUNK_LOGITS_FROZEN", 128 * 300)
    monkeypatch.setattr(linear_cross_entropy, "MIN_CPU_LOGITS", 0)
    model = ct.build(ct.config("tiny-gpt").replace(vocab_size=300), seed=0)
    assert isinstance(model.head, LMHead)
    model.requires_grad_(not frozen)
    x, targets = torch.randn(500, model.config.d_model), torch.randint(300, (500,))
    weights = torch.ones(500) if equal_weights else torch.rand(500) * (torch.rand(500) > 0.3)
    results = []
    for use_linear in (True, False):
        with monkeypatch.context() as patch:
            if not use_linear:
                patch.setattr(linear_cross_entropy, "can_use_linear_cross_entropy", lambda *args: False)
            inputs = x.clone().requires_grad_()
            model.zero_grad()
            loss = chunked_loss(
                model.head, inputs, targets, weights, label_smoothing=smoothing, z_loss_coef=z, chunk_size=64
            )
            (loss.loss / 7).backward()
        results.append([loss.loss.detach(), loss.cross_entropy, inputs.grad])  # type: ignore[list-item]
        if not frozen:
            results[-1].append(model.head.matrix.weight.grad)  # type: ignore[union-attr, arg-type]
    for linear, autograd in zip(*results, strict=True):
        torch.testing.assert_close(linear, autograd, rtol=1e-4, atol=1e-5)


def test_linear_cross_entropy_supports_one_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "MIN_CPU_LOGITS", 0)
    model = ct.build("tiny-gpt", seed=0)
    assert isinstance(model.head, LMHead)
    x = torch.randn(9, model.config.d_model, requires_grad=True)
    loss = chunked_loss(model.head, x, torch.zeros(9, dtype=torch.long), torch.ones(9), chunk_size=4).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()
