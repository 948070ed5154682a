"""The loss in chunks ≡ cross-entropy over whole logits; objectives ≡ worked by hand, and ≡ transformers' own losses."""

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
from cutaway.train.loss.chunked_cross_entropy import chunked_cross_entropy

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


def small(head: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    block = {"attention": {"heads": 2}, "ffn": {"kind": "mlp", "hidden": 12}}
    config = {"form": "decoder", "vocab_size": V, "d_model": D, "decoder": {"layers": 1, "block": block}, "head": head}
    model = ct.build(config, dtype=dtype, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        if head.get("bias") == "fixed":
            model.head.bias.normal_()
    return model.train()


def plain_loss(logits: Tensor, targets: Tensor, weights: Tensor, smoothing: float, z: float) -> Tensor:
    each = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    return (weights * (each + z * logits.logsumexp(-1).square())).sum()


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.02), (0.2, 0.01)])
@pytest.mark.parametrize("head", HEADS)
def test_in_chunks_is_over_whole_logits(head: str, smoothing: float, z: float, chunk: int) -> None:
    """Values, and the gradients of every weight of a model: a tied table's comes from both ends."""
    model = small(HEADS[head])
    tokens, targets = torch.randint(V, (2, 7)), torch.randint(V, (14,))
    weights = torch.rand(14, dtype=torch.float64) * torch.tensor([0, 1, 1, 0.5, 0, 2, 1]).repeat(2)
    plain = plain_loss(model(tokens).flatten(0, 1), targets, weights, smoothing, z)
    expected = torch.autograd.grad(plain, list(model.parameters()))
    x = model.hidden_states(tokens).flatten(0, 1)
    loss = chunked_cross_entropy(
        model.head, x, targets, weights, label_smoothing=smoothing, z_loss_coef=z, chunk_size=chunk
    )
    found = torch.autograd.grad(3 * loss.loss, list(model.parameters()))
    torch.testing.assert_close(loss.loss, plain)
    torch.testing.assert_close(loss.weight, weights.sum())
    torch.testing.assert_close(loss.cross_entropy, plain_loss(model(tokens).flatten(0, 1), targets, weights, 0, 0))
    assert not loss.weight.requires_grad
    assert not loss.cross_entropy.requires_grad
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, 3 * theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("head", HEADS)
def test_gradients_are_differences(head: str) -> None:
    module = small(HEADS[head]).head
    x, targets = torch.randn(5, D, dtype=torch.float64, requires_grad=True), torch.randint(V, (5,))
    weights = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0], dtype=torch.float64)

    def total(x: Tensor, *_: Tensor) -> Tensor:
        return chunked_cross_entropy(
            module, x, targets, weights, label_smoothing=0.1, z_loss_coef=0.01, chunk_size=2
        ).loss

    assert torch.autograd.gradcheck(total, (x, *module.parameters()))


def test_without_gradients_there_is_the_value_alone() -> None:
    model = small(HEADS["bias"])
    x, targets, weights = torch.randn(9, D, dtype=torch.float64), torch.randint(V, (9,)), torch.rand(9).double()
    with_gradient = chunked_cross_entropy(model.head, x, targets, weights, label_smoothing=0.1, chunk_size=4)
    with torch.no_grad():
        without = chunked_cross_entropy(model.head, x, targets, weights, label_smoothing=0.1, chunk_size=4)
    model.requires_grad_(False)
    frozen = chunked_cross_entropy(model.head, x, targets, weights, label_smoothing=0.1, chunk_size=4)
    assert with_gradient.loss.requires_grad
    for other in (without, frozen):
        assert not other.loss.requires_grad
        assert torch.equal(other.loss, with_gradient.loss)
        assert torch.equal(other.cross_entropy, with_gradient.cross_entropy)


def test_frozen_parts_are_left_alone() -> None:
    """Only the head, only the stream, only the bias: each gets what it gets with all."""
    x, targets, weights = torch.randn(9, D).double(), torch.randint(V, (9,)), torch.rand(9).double()

    def grads(wants_x: bool, wants: tuple[str, ...]) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        head = small(HEADS["transform"]).head
        for name, parameter in head.named_parameters():
            parameter.requires_grad_(name in wants)
        here = x.clone().requires_grad_(wants_x)
        chunked_cross_entropy(head, here, targets, weights, chunk_size=4).loss.backward()
        return {"x": here.grad} | {name: parameter.grad for name, parameter in head.named_parameters()}

    every = tuple(name for name, _ in small(HEADS["transform"]).head.named_parameters())
    full = grads(True, every)
    for wants_x, wants in ((True, ()), (False, every), (True, ("bias",)), (False, ("transform.dense.weight",))):
        part = grads(wants_x, wants)
        assert {name for name, grad in part.items() if grad is not None} == {*wants, *(["x"] if wants_x else [])}
        for name, grad in part.items():
            assert grad is None or torch.equal(grad, full[name])


class Counting(nn.Module):
    """A head that remembers how many rows it was given at once."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head, self.rows = head, []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return self.head(x)


def test_targets_of_weight_0_are_not_computed() -> None:
    """Not even looked at: they may be no tokens, and what stands before them may be no numbers."""
    head = Counting(small(HEADS["tied"]).head)
    x, targets, weights = torch.randn(10, D).double(), torch.randint(V, (10,)), torch.ones(10).double()
    weights[[2, 3, 7]], targets[[2, 3, 7]], x[[2, 3, 7]] = 0, -100, float("nan")
    x.requires_grad_()
    loss = chunked_cross_entropy(head, x, targets, weights, chunk_size=3)
    loss.loss.backward()
    assert head.rows == [3, 3, 1]
    assert loss.loss.isfinite()
    assert x.grad is not None
    assert not x.grad[[2, 3, 7]].any()
    assert x.grad[weights > 0].any(-1).all()


def test_no_target_at_all_is_a_loss_of_zero_that_can_be_gone_back_from() -> None:
    """As where one rank of several has only padding: its gradients must be there, and be 0."""
    model = small(HEADS["bias"])
    x = torch.randn(4, D, dtype=torch.float64, requires_grad=True)
    loss = chunked_cross_entropy(model.head, x, torch.zeros(4, dtype=torch.long), torch.zeros(4), chunk_size=2)
    loss.loss.backward()
    assert loss.loss == 0
    assert loss.weight == 0
    for tensor in (x, *model.head.parameters()):
        assert tensor.grad is not None
        assert not tensor.grad.any()


class Peak(TorchDispatchMode):
    """The most bytes that new tensors took at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.known | known:
                key, size = storage._cdata, storage.nbytes()
                self.known.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, key, size)
        return result

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def test_whole_logits_are_never_there() -> None:
    rows, width, vocab, chunk = 512, 8, 1000, 32
    head = nn.Linear(width, vocab)
    x, targets = torch.randn(rows, width, requires_grad=True), torch.randint(vocab, (rows,))
    weights, whole = torch.ones(rows), rows * vocab * 4

    def peak(work: Callable[[], Tensor]) -> int:
        with Peak() as mode:
            work().backward()
        return mode.most

    assert peak(lambda: F.cross_entropy(head(x), targets)) >= 2 * whole  # the measure sees them where they are
    own = 4 * (4 * rows * width + 5 * width * vocab)  # gradients, their sums, and those that are handed out
    bound = own + 5 * chunk * vocab * 4
    assert bound < whole / 2
    assert (
        peak(
            lambda: (
                chunked_cross_entropy(
                    head, x, targets, weights, label_smoothing=0.1, z_loss_coef=0.1, chunk_size=chunk
                ).loss
            )
        )
        <= bound
    )


@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_is_summed_in_fp32(autocast: bool) -> None:
    """Over many chunks the error stays what rounding one product gives; the gradients' dtypes are the weights' own."""
    torch.manual_seed(1)
    exact = nn.Linear(16, 50).double()
    x, targets, weights = torch.randn(640, 16), torch.randint(50, (640,)), torch.ones(640)
    wide = x.bfloat16().double().requires_grad_()
    head = nn.Linear(16, 50).to(torch.float32 if autocast else torch.bfloat16)
    with torch.no_grad():
        for mine, theirs in zip(head.parameters(), exact.parameters(), strict=True):
            mine.copy_(theirs)
            theirs.copy_(mine.bfloat16())
    chunked_cross_entropy(exact, wide, targets, weights.double(), chunk_size=640).loss.backward()
    here = x.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = chunked_cross_entropy(head, here, targets, weights, chunk_size=10)
    loss.loss.backward()
    assert loss.loss.dtype == torch.float32
    pairs = [(here, wide), *zip(head.parameters(), exact.parameters(), strict=True)]
    for mine, theirs in pairs:
        assert mine.grad is not None
        assert theirs.grad is not None
        assert mine.grad.dtype == mine.dtype
        assert (mine.grad - theirs.grad).norm() <= 2**-7 * theirs.grad.norm()


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunk_size": 0}, "chunk_size"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"z_loss_coef": -1.0}, "z_loss_coef is"),
        ({"weights": torch.ones(4, dtype=torch.long)}, "dtype"),
        ({"targets": torch.zeros(5, dtype=torch.long)}, "shapes"),
        ({"targets": torch.full((4,), V)}, f"targets hold {V}"),
        ({"targets": torch.full((4,), -100)}, "targets hold -100"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, Any], words: str) -> None:
    given = {"x": torch.randn(4, D).double(), "targets": torch.zeros(4, dtype=torch.long), "weights": torch.ones(4)}
    with pytest.raises(InputError, match=words):
        chunked_cross_entropy(small({}).head, **({"chunk_size": 2} | given | change))


# Objectives


def test_next_token_by_hand() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]])
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
    task = objectives.causal_lm(tokens, documents)
    assert [each.tolist() for each in task.inputs] == [[[5, 6, 7, 8], [1, 2, 3, 4]]]
    assert task.model_kwargs["document_ids"].tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    assert task.targets.tolist() == [[6, 7, 8, 9], [2, 3, 4, 5]]
    assert task.weights.tolist() == [[1, 0, 1, 1], [1, 1, 1, 0]]


def test_packed_documents_lose_what_they_lose_apart() -> None:
    model = ct.build("tiny-gpt", dtype=torch.float64, seed=0).train()
    texts = [torch.randint(250, (1, length)) for length in (5, 3, 6)]
    documents = torch.cat([torch.full((1, text.shape[-1]), number) for number, text in enumerate(texts)], -1)
    packed = objectives.causal_lm(torch.cat(texts, -1), documents).loss(model)
    apart = [objectives.causal_lm(text).loss(model) for text in texts]
    torch.testing.assert_close(packed.loss, sum(each.loss for each in apart))
    assert packed.weight == sum(each.weight for each in apart) == 4 + 2 + 5


def test_rows_of_one_document_need_no_mask() -> None:
    tokens, documents = torch.randint(250, (2, 6)), torch.tensor([[3] * 6, [0] * 6])
    assert objectives.causal_lm(tokens, documents).model_kwargs == {}
    assert objectives.causal_lm(tokens, documents).weights.tolist() == [[1.0] * 5] * 2


def test_prefix_by_hand() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    task = objectives.prefix_lm(tokens, documents, torch.tensor([2, 4]))
    assert task.targets.tolist() == [[6, 7, 8, 9, 10], [2, 3, 4, 5, 6]]
    assert task.weights.tolist() == [[0, 1, 0, 0, 1], [0, 0, 0, 1, 1]]
    assert task.model_kwargs["prefix_lengths"].tolist() == [2, 4]


def test_a_prefix_of_none_is_next_token_and_no_target_is_seen() -> None:
    model = ct.build("tiny-gpt", dtype=torch.float64, seed=0).train()
    tokens = torch.randint(250, (2, 9))
    bare = objectives.prefix_lm(tokens, None, torch.tensor([0, 0])).loss(model)
    torch.testing.assert_close(bare.loss, objectives.causal_lm(tokens).loss(model).loss)
    task = objectives.prefix_lm(tokens, None, torch.tensor([4, 2]))
    before = task.hidden_states(model)
    for at in range(1, 8):
        changed = tokens.clone()
        changed[:, at] = (changed[:, at] + 1) % 250
        moved = (objectives.prefix_lm(changed, None, torch.tensor([4, 2])).hidden_states(model) != before).any(-1)
        for row in range(2):
            if task.weights[row, at - 1]:  # what is a target moves no vector up to the one that tells it
                assert not moved[row, :at].any()
            elif at == 1:
                assert moved[row, 0]  # what belongs to the prefix is seen from its first token


def test_seq2seq_by_hand() -> None:
    source, target = torch.tensor([[5, 6, 0], [7, 8, 9]]), torch.tensor([[1, 5, 6, 2], [1, 7, 2, 0]])
    task = objectives.seq2seq(source, source != 0, target, target != 0)
    read, given, source_mask, mask = task.inputs
    assert read is source
    assert given is not None
    assert given.tolist() == [[1, 5, 6], [1, 7, 2]]
    assert source_mask is not None
    assert source_mask.tolist() == [[True, True, False], [True, True, True]]
    assert mask is None  # nothing that is read is padding here
    assert task.targets.tolist() == [[5, 6, 2], [7, 2, 0]]
    assert task.weights.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_seq2seq_is_the_same_with_padding_on_either_side() -> None:
    model = ct.build("tiny-t5", dtype=torch.float64, seed=0).train()
    source, target = torch.randint(2, 250, (1, 6)), torch.randint(2, 250, (1, 5))
    plain = objectives.seq2seq(source, None, target, None).loss(model, label_smoothing=0.1)
    real = torch.ones(1, 5, dtype=torch.bool)
    for sides in ((2, 0), (0, 3), (1, 2)):
        padded = F.pad(target, sides), F.pad(real, sides)
        loss = objectives.seq2seq(F.pad(source, sides), F.pad(source, sides) > 0, *padded).loss(
            model, label_smoothing=0.1
        )
        assert loss.weight == plain.weight == 4
        torch.testing.assert_close(loss.loss, plain.loss)


MASKING: dict[str, Any] = {"mask_id": 3, "vocab_size": 1000, "special_ids": (0, 1), "seed": 7}


@pytest.mark.parametrize("spans", [False, True])
def test_masked_hides_80_10_10_of_the_rate(spans: bool) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(10, 1000, (400, 128))
    tokens[:, 0] = 1
    task = objectives.masked_lm(tokens, mlm_probability=0.15, positions=range(400), span_masking=spans, **MASKING)
    hidden, shown = task.weights > 0, task.inputs[0]
    assert shown is not None
    assert torch.equal(task.targets, tokens)
    assert torch.equal(shown[~hidden], tokens[~hidden])
    assert not hidden[:, 0].any()

    def near(found: Tensor, share: float) -> bool:
        """Within four standard deviations, twice as wide where the tokens of a span fall together."""
        spread = math.sqrt(share * (1 - share) / found.numel()) * (2 if spans else 1)
        return bool(abs(found.double().mean() - share) < 4 * spread)

    assert near(hidden[:, 1:], 0.15)
    assert near(shown[hidden] == 3, 0.8)
    assert near(shown[hidden] == tokens[hidden], 0.1)
    random = shown[hidden & (shown != 3) & (shown != tokens)]
    assert 400 < random.double().mean() < 600
    assert random.unique().numel() > 300
    neighbours = (hidden[:, 2:] & hidden[:, 1:-1]).double().mean() / hidden[:, 1:].double().mean()
    assert (neighbours > 0.6) == spans
    if spans:  # neighbours in a span share its fate
        both = hidden[:, 2:] & hidden[:, 1:-1]
        assert ((shown[:, 2:] == 3) == (shown[:, 1:-1] == 3))[both].double().mean() > 0.9


@pytest.mark.parametrize("rate", [0.15, 0.5])
@pytest.mark.parametrize("spans", [False, True])
def test_every_column_is_hidden_as_often(spans: bool, rate: float) -> None:
    """The first tokens too, where spans have less room to begin. Rows are independent: four standard deviations."""
    tokens = torch.full((6000, 14), 9)
    columns = objectives.masked_lm(
        tokens, mlm_probability=rate, positions=range(6000), span_masking=spans, **MASKING
    ).weights.mean(0)
    assert ((columns - rate).abs() < 4 * math.sqrt(rate * (1 - rate) / 6000)).all(), columns


@pytest.mark.parametrize("spans", [False, True])
def test_what_is_hidden_follows_from_seed_and_position(spans: bool) -> None:
    tokens = torch.randint(10, 1000, (6, 64))
    how = MASKING | {"span_masking": spans, "mlm_probability": 0.3}
    whole = objectives.masked_lm(tokens, positions=[4, 5, 6, 7, 8, 2**62], **how)
    part = objectives.masked_lm(tokens[[3, 5]], positions=torch.tensor([7, 2**62]), **how)
    assert torch.equal(whole.inputs[0][[3, 5]], part.inputs[0])  # type: ignore[index, arg-type]
    assert torch.equal(whole.weights[[3, 5]], part.weights)
    assert not torch.equal(whole.weights[0], whole.weights[1])
    other = objectives.masked_lm(tokens, positions=[4, 5, 6, 7, 8, 2**62], **(how | {"seed": 8}))
    assert not torch.equal(other.weights[0], whole.weights[0])


def test_padding_is_never_hidden_and_is_masked() -> None:
    tokens = torch.randint(10, 1000, (4, 32))
    mask = torch.arange(32).expand(4, 32) < 20
    task = objectives.masked_lm(tokens, mask=mask, positions=range(4), mlm_probability=0.9, **MASKING)
    assert not task.weights[~mask].any()
    assert task.weights.sum() > 40
    assert torch.equal(task.model_kwargs["mask"], mask)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: objectives.causal_lm(t[:, :1]), "2 tokens or more"),
        (
            lambda t: objectives.masked_lm(t, positions=range(4), mlm_probability=1.0, **MASKING),
            "mlm_probability is 1.0",
        ),
        (lambda t: objectives.masked_lm(t, positions=range(3), **MASKING), "3 positions for 4 rows"),
        (lambda t: objectives.prefix_lm(t, None, torch.tensor([1])), "one length for each of 4 rows"),
    ],
)
def test_wrong_batches_are_refused(call: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(torch.randint(10, 1000, (4, 8)))


# Ours ≡ transformers


def both(model: Any, directory: Path) -> tuple[Any, Any]:
    """The peer's model and ours with the same weights, both training without dropout."""
    transformers.logging.set_verbosity_error()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return model.train(), ct.load(directory).model.train()


def assert_same(theirs: Any, ours: Any, their_loss: Tensor, task: objectives.Objective, tied: str, **how: Any) -> None:
    """The mean loss, and the gradient of the table that both ends share."""
    loss = task.loss(ours, chunk_size=4, **how)
    mean = loss.loss / loss.weight
    torch.testing.assert_close(mean, their_loss, rtol=1e-5, atol=1e-5)
    their_loss.backward()
    mean.backward()
    their_grad = theirs.get_parameter(tied).grad
    our_grad = ours.head.matrix.weight.grad
    assert (our_grad - their_grad).norm() <= 1e-4 * their_grad.norm()


def test_next_token_is_gpt2s_loss(tmp_path: Path) -> None:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(vocab_size=61, n_positions=40, n_embd=16, n_layer=2, n_head=2, **off)
    theirs, ours = both(transformers.GPT2LMHeadModel(config), tmp_path)
    tokens = torch.randint(61, (3, 12))
    peer = theirs(input_ids=tokens, labels=tokens).loss
    assert_same(theirs, ours, peer, objectives.causal_lm(tokens), "transformer.wte.weight")


def test_masked_is_berts_loss(tmp_path: Path) -> None:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    shape = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**shape, intermediate_size=24, max_position_embeddings=40, **off)
    theirs, ours = both(transformers.BertForMaskedLM(config), tmp_path)
    tokens = torch.randint(4, 61, (3, 12))
    mask = torch.arange(12) < torch.tensor([[12], [9], [5]])
    task = objectives.masked_lm(
        tokens,
        mask=mask,
        mask_id=3,
        vocab_size=61,
        mlm_probability=0.4,
        seed=0,
        positions=range(3),
        special_ids=(0, 1, 2),
    )
    labels = task.targets.masked_fill(task.weights == 0, -100)
    peer = theirs(input_ids=task.inputs[0], attention_mask=mask.long(), labels=labels).loss
    assert_same(theirs, ours, peer, task, "bert.embeddings.word_embeddings.weight")


def test_seq2seq_is_t5s_loss(tmp_path: Path) -> None:
    shape = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    theirs, ours = both(transformers.T5ForConditionalGeneration(config), tmp_path)
    source, labels = torch.randint(2, 61, (3, 9)), torch.randint(2, 61, (3, 7))
    source_mask, real = (
        torch.arange(9) < torch.tensor([[9], [6], [4]]),
        torch.arange(7) < torch.tensor([[4], [7], [5]]),
    )
    target = torch.cat([torch.zeros(3, 1, dtype=torch.long), labels], -1)
    task = objectives.seq2seq(source, source_mask, target, F.pad(real, (1, 0), value=True))
    peer = theirs(input_ids=source, attention_mask=source_mask.long(), labels=labels.masked_fill(~real, -100)).loss
    assert_same(theirs, ours, peer, task, "shared.weight")


@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.1, 1e-2)])
@pytest.mark.parametrize("ones", [True, False])
def test_by_hand_is_by_autograd(smoothing: float, z: float, ones: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that is a matrix alone is gone through by hand, and comes to what autograd comes to."""
    monkeypatch.setitem(linear_cross_entropy.MAX_CHUNK_LOGITS, "cpu", 128 * 300)  # several chunks
    monkeypatch.setattr(linear_cross_entropy, "MIN_CPU_LOGITS", 0)
    model = ct.build(ct.config("tiny-gpt").replace(vocab_size=300), seed=0)
    assert isinstance(model.head, LMHead)
    x, targets = torch.randn(500, model.config.d_model), torch.randint(300, (500,))
    weights = torch.ones(500) if ones else torch.rand(500) * (torch.rand(500) > 0.3)
    found = []
    for by_hand in (True, False):
        with monkeypatch.context() as patch:
            if not by_hand:
                patch.setattr(linear_cross_entropy, "can_use_linear_cross_entropy", lambda *args: False)
            here = x.clone().requires_grad_()
            model.zero_grad()
            loss = chunked_cross_entropy(
                model.head, here, targets, weights, label_smoothing=smoothing, z_loss_coef=z, chunk_size=64
            )
            (loss.loss / 7).backward()
        matrix = model.head.matrix.weight
        found.append([loss.loss.detach(), loss.cross_entropy, here.grad, matrix.grad])  # type: ignore[list-item]
    for hand, auto in zip(*found, strict=True):
        torch.testing.assert_close(hand, auto, rtol=1e-4, atol=1e-5)


def test_by_hand_goes_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "MIN_CPU_LOGITS", 0)
    model = ct.build("tiny-gpt", seed=0)
    assert isinstance(model.head, LMHead)
    x = torch.randn(9, model.config.d_model, requires_grad=True)
    loss = chunked_cross_entropy(model.head, x, torch.zeros(9, dtype=torch.long), torch.ones(9), chunk_size=4).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute it again"):
        loss.backward()
