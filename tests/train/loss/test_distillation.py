"""The distillation loss equals its definition, and the alignment of tokenizers is the teacher's own tokenization."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutaway as ct
from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from cutaway.train.loss.chunked_cross_entropy import LossTargets, chunked_cross_entropy
from cutaway.train.loss.cross_entropy import CrossEntropyOptions
from cutaway.train.loss.distillation import DistillationTargets, TokenGroups
from cutaway.train.objectives import causal_lm
from cutaway.train.objectives.build import check_objective
from cutaway.train.objectives.distillation import Teacher, TokenAlignment, distillation
from cutaway.train.recipe.load import load_recipe

V, D, N = 11, 6, 7
TEXT = ["the cat sat on the mat. the cat ran.", "a dog sat on the cat, and the mat was red."] * 4


def build_targets(groups: TokenGroups, kd_ratio: float, use_teacher: Tensor | None = None) -> DistillationTargets:
    head = nn.Linear(4, len(groups.teacher_ids), dtype=torch.float64)
    use_teacher = torch.ones(N, dtype=torch.bool) if use_teacher is None else use_teacher
    return DistillationTargets(torch.randn(N, 4, dtype=torch.float64), use_teacher, head, groups, kd_ratio)


def loss_and_grads(
    targets: DistillationTargets | None, weights: Tensor, chunk_size: int = 3, z: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    head, x = nn.Linear(D, V, dtype=torch.float64), torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(V, (N,))
    selected = LossTargets(tokens, weights, weights.sum(), None)
    options = CrossEntropyOptions(z_loss_coef=z, chunk_size=chunk_size)
    loss = chunked_cross_entropy(head, x, selected, options, targets).loss
    loss.backward()
    assert x.grad is not None
    assert head.weight.grad is not None
    return loss.detach(), x.grad, head.weight.grad


def reference_loss_and_grads(targets: DistillationTargets, weights: Tensor, z: float) -> tuple[Tensor, Tensor, Tensor]:
    """The equation at the top of loss/distillation.py, with autograd."""
    torch.manual_seed(1)
    head, x = nn.Linear(D, V, dtype=torch.float64), torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    tokens, groups = torch.randint(V, (N,)), targets.groups
    logits = head(x)
    p = logits.softmax(-1)
    known = [group for group in range(len(groups.teacher_ids)) if groups.known[group]]
    q = targets.head(targets.hidden).detach()[:, known].softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for row, token in enumerate(tokens.tolist()):
        group_p = torch.stack([p[row, groups.group_of == group].sum() for group in known])
        loss = -p[row, token].log()
        group = int(groups.group_of[token])
        if targets.use_teacher[row] and group in known:
            within = -(p[row, token] / group_p[known.index(group)]).log()
            divergence = (q[row] * (q[row].log() - group_p.log())).sum()
            loss = (1 - targets.kd_ratio) * loss + targets.kd_ratio * (divergence + within)
        total = total + weights[row] * (loss + z * logits[row].logsumexp(-1).square())
    total.backward()
    assert x.grad is not None
    assert head.weight.grad is not None
    return total.detach(), x.grad, head.weight.grad


@pytest.mark.parametrize("kd_ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("z", [0.0, 0.1])
def test_loss_equals_its_definition(kd_ratio: float, z: float) -> None:
    first_tokens: list[int | None] = [4, 2, 4, 0, 7, 2, None, 4, 9, None, 1]
    groups = TokenGroups.from_first_tokens(first_tokens, torch.device("cpu"))
    torch.manual_seed(0)
    targets = build_targets(groups, kd_ratio, torch.arange(N) != 2)
    weights = torch.rand(N, dtype=torch.float64)
    expected = reference_loss_and_grads(targets, weights, z)
    for chunk_size in (3, 100):
        for value, reference in zip(loss_and_grads(targets, weights, chunk_size, z), expected, strict=True):
            torch.testing.assert_close(value, reference)


def test_equal_vocabularies_are_plain_kl_divergence() -> None:
    groups = TokenGroups.from_first_tokens(list(range(V)), torch.device("cpu"))
    torch.manual_seed(0)
    targets, weights = build_targets(groups, 1.0), torch.ones(N, dtype=torch.float64)
    loss, *_ = loss_and_grads(targets, weights)
    torch.manual_seed(1)
    head, x = nn.Linear(D, V, dtype=torch.float64), torch.randn(N, D, dtype=torch.float64)
    teacher = targets.head(targets.hidden).log_softmax(-1)
    expected = F.kl_div(head(x).log_softmax(-1), teacher, reduction="sum", log_target=True)
    torch.testing.assert_close(loss, expected.detach())


def test_kd_ratio_0_is_cross_entropy() -> None:
    groups = TokenGroups.from_first_tokens([0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 7], torch.device("cpu"))
    weights = torch.rand(N, dtype=torch.float64)
    for value, expected in zip(
        loss_and_grads(build_targets(groups, 0.0), weights), loss_and_grads(None, weights), strict=True
    ):
        torch.testing.assert_close(value, expected)


def test_expected_gradient_on_samples_of_the_teacher_is_that_of_cross_entropy() -> None:
    """Averaged over y ~ q with equal vocabularies, the gradient does not depend on kd_ratio."""
    groups = TokenGroups.from_first_tokens(list(range(V)), torch.device("cpu"))
    torch.manual_seed(0)
    hidden, head = torch.randn(1, 4, dtype=torch.float64), nn.Linear(4, V, dtype=torch.float64)
    logits, q = torch.randn(1, V, dtype=torch.float64), head(hidden).softmax(-1).detach()
    grads = []
    for kd_ratio in (0.0, 0.5, 1.0):
        targets = DistillationTargets(hidden.expand(V, 4), torch.ones(V, dtype=torch.bool), head, groups, kd_ratio)
        rows = (logits.expand(V, V), torch.arange(V)[:, None], q.T)
        with torch.no_grad():
            grad, *_ = targets.loss_with_grad(*rows, slice(0, V), CrossEntropyOptions(), torch.float64)
        grads.append(grad.sum(0))
    torch.testing.assert_close(grads[0], grads[1])
    torch.testing.assert_close(grads[0], grads[2])


BLOCK = {"attention": {"heads": 2, "position": {"kind": "rope"}}, "ffn": {"kind": "gated", "hidden": 24}}
DECODER = {"layers": 1, "norm": {"kind": "rmsnorm"}, "block": BLOCK}


def build_checkpoint(tokenizer: Tokenizer, seed: int, directory: Path) -> Checkpoint:
    vocab_size = tokenizer.backend.get_vocab_size()
    config = {"form": "decoder", "vocab_size": vocab_size, "d_model": 16, "context": 64, "decoder": DECODER}
    checkpoint = Checkpoint(ct.build(config, seed=seed), ct.config(config), tokenizer_loader=lambda: tokenizer)
    ct.save(checkpoint, directory)
    return ct.load(directory)


def test_alignment_gives_the_teacher_the_same_text() -> None:
    """Student tokens of whole words become the bytes of the same text, and the teacher sees it up to the same place."""
    tokenizer, teacher_tokenizer = train_bpe(TEXT, 300), byte_tokenizer()
    alignment = TokenAlignment(tokenizer, teacher_tokenizer, teacher_tokenizer.eos_token_id)
    ids = [tokenizer.encode(text) for text in TEXT[:2]]
    length = min(map(len, ids))
    tokens = torch.tensor([row[:length] for row in ids])
    aligned = alignment.align(tokens, None)
    for row in range(2):
        text = tokenizer.decode(tokens[row].tolist())
        ends = aligned.last.view(2, length)[row] - row * aligned.tokens.shape[1]
        bos = teacher_tokenizer.bos_token_id
        assert aligned.tokens[row, : int(ends[-1]) + 1].tolist() == [bos, *text.encode()]
        for column in range(length):
            seen = aligned.tokens[row, 1 : int(ends[column]) + 1].tolist()
            assert bytes(seen).decode() == tokenizer.decode(tokens[row, : column + 1].tolist())


def test_alignment_starts_each_document_anew() -> None:
    tokenizer, teacher_tokenizer = train_bpe(TEXT, 300), byte_tokenizer()
    alignment = TokenAlignment(tokenizer, teacher_tokenizer, teacher_tokenizer.eos_token_id)
    first, second = (tokenizer.encode(text) for text in TEXT[:2])
    document_ids = torch.tensor([[0] * len(first) + [1] * len(second)])
    packed = alignment.align(torch.tensor([[*first, *second]]), document_ids)
    alone = [alignment.align(torch.tensor([ids]), None) for ids in (first, second)]
    lengths = [int(each.last[-1]) + 1 for each in alone]
    assert packed.tokens[0, : sum(lengths)].tolist() == [
        token for each, length in zip(alone, lengths, strict=True) for token in each.tokens[0, :length].tolist()
    ]
    assert packed.document_ids[0, : sum(lengths)].tolist() == [0] * lengths[0] + [1] * lengths[1]
    assert (packed.document_ids[0, sum(lengths) :] == 2).all()


def test_student_equal_to_its_teacher_has_no_divergence(tmp_path: Path) -> None:
    tokenizer = train_bpe(TEXT, 300)
    checkpoint = build_checkpoint(tokenizer, 0, tmp_path / "teacher")
    tokens = torch.tensor([tokenizer.encode(TEXT[0])[:12]])
    teacher = Teacher(ct.load(tmp_path / "teacher"), tokenizer, 1.0, torch.device("cpu"))
    objective = distillation(tokens, None, None, teacher)
    loss = objective.loss(checkpoint.model)
    assert abs(loss.loss.item()) < 1e-4 < loss.cross_entropy.item()
    other = build_checkpoint(tokenizer, 1, tmp_path / "other")
    assert objective.loss(other.model).loss.item() > 1e-3
    with torch.no_grad():  # evaluation is the cross-entropy of the text
        expected = causal_lm(tokens).loss(checkpoint.model)
        torch.testing.assert_close(objective.loss(checkpoint.model).loss, expected.loss)


@pytest.mark.parametrize("own_tokenizer", [True, False])
def test_student_with_padded_vocabulary(own_tokenizer: bool, tmp_path: Path) -> None:
    """The ids of the model beyond the tokenizer's are tokens that the teacher cannot produce."""
    tokenizer = train_bpe(TEXT, 300)
    build_checkpoint(tokenizer if own_tokenizer else byte_tokenizer(), 0, tmp_path / "teacher")
    vocab_size = tokenizer.backend.get_vocab_size() + 20
    config = {"form": "decoder", "vocab_size": vocab_size, "d_model": 16, "context": 64, "decoder": DECODER}
    teacher = Teacher(ct.load(tmp_path / "teacher"), tokenizer, 0.5, torch.device("cpu"), vocab_size)
    loss = distillation(torch.tensor([tokenizer.encode(TEXT[0])[:12]]), None, None, teacher).loss(ct.build(config))
    loss.loss.backward()
    assert torch.isfinite(loss.loss)


def test_recipe_with_teacher_of_another_tokenizer(tmp_path: Path) -> None:
    """A run with a teacher trains, and sources with distill = false are trained on their text only."""
    teacher = build_checkpoint(byte_tokenizer(), 0, tmp_path / "teacher")
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("\n".join(TEXT * 20))
    sources: list[dict[str, Any]] = [{"path": str(tmp_path / f"{name}.txt"), "weight": 1} for name in ("a", "b")]
    sources[1]["distill"] = False
    recipe = {
        "model": {"form": "decoder", "vocab_size": 300, "d_model": 16, "context": 32, "decoder": DECODER},
        "data": {
            "sources": sources,
            "tokenizer": {"kind": "bpe", "vocab_size": 300},
            "seq_len": 16,
            "validation_split": 0.2,
        },
        "objective": {"kind": "distillation", "teacher": str(tmp_path / "teacher")},
        "training": {"max_steps": 12, "batch_size": 4},
        "schedule": {"warmup_steps": 2},
        "eval": {"interval": 12, "num_sequences": 4},
    }
    assert teacher.config.d_model == 16
    run = ct.train(recipe, tmp_path / "run")
    rows = [row for row in map(json.loads, (run.directory / "metrics.jsonl").open()) if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"]
    del sources[0]["weight"], sources[1]["weight"]
    with pytest.raises(InputError, match=r"data\.sources\[\]\.weight"):
        ct.train(recipe, tmp_path / "unweighted")


def test_teacher_must_be_a_decoder() -> None:
    with pytest.raises(InputError, match=r"objective\.teacher"):
        Teacher(ct.load("tiny-dates"), byte_tokenizer(), 0.5, torch.device("cpu"))


def test_tiny_english_distills() -> None:
    recipe = load_recipe("tiny-english")
    assert recipe.objective.kind == "distillation"
    assert [source.distill for source in recipe.data.sources] == [True, False, False, False]


def test_tensor_parallel_is_an_error() -> None:
    recipe = load_recipe("tiny-english", ["parallel.tp=2"])
    with pytest.raises(InputError, match=r"parallel\.tp"):
        check_objective(recipe.objective, recipe.transformer_config, recipe.training, recipe.parallel)
