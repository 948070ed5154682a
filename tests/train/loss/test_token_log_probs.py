"""Log-probabilities of target tokens in chunks: equal to those of the full logits, with equal gradients."""

import pytest
import torch
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.model.head import LMHead
from cutaway.model.layers import EmbeddingTable
from cutaway.train.loss.chunked_cross_entropy import select_targets
from cutaway.train.loss.token_log_probs import sequence_log_probs, token_log_probs

BATCH, LENGTH, WIDTH, VOCAB = 4, 9, 6, 23


class CountingHead(nn.Module):
    """Linear head that records the number of rows of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)
        self.num_rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.num_rows.append(len(x))
        return self.linear(x)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    is_target = torch.rand(BATCH, LENGTH) < 0.6
    is_target[2] = False  # a sequence without targets
    return x, torch.randint(VOCAB, (BATCH, LENGTH)), is_target


@pytest.mark.parametrize("trainable", [True, False], ids=["head", "frozen-head"])
@pytest.mark.parametrize("chunk_size", [1, 5, 1000])
def test_equal_full_logits(chunk_size: int, trainable: bool) -> None:
    head = CountingHead().requires_grad_(trainable)
    x, targets, is_target = inputs()
    selected = select_targets(targets.flatten(), is_target.flatten().float())
    upstream = torch.randn(BATCH, LENGTH, dtype=torch.float64)
    leaves = [x, *(each for each in head.parameters() if trainable)]

    ours = sequence_log_probs(head, x, selected, chunk_size=chunk_size)
    assert max(head.num_rows) <= chunk_size
    assert sum(head.num_rows) == int(is_target.sum()), "logits are computed for positions without a target"
    loss = (ours.tokens * upstream).sum() + ours.sums.square().sum() + ours.means.exp().sum()
    grads = torch.autograd.grad(loss, leaves)

    log_probs = head(x).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1) * is_target
    sums, counts = log_probs.sum(-1), is_target.sum(-1)
    expected = (log_probs * upstream).sum() + sums.square().sum() + (sums / counts.clamp(min=1)).exp().sum()
    torch.testing.assert_close(ours.tokens, log_probs, rtol=0, atol=1e-12)
    assert torch.equal(ours.num_targets, counts)
    for grad, reference in zip(grads, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(grad, reference, rtol=0, atol=1e-10)


def test_tied_head_with_softcap_and_autocast() -> None:
    table = EmbeddingTable(VOCAB, WIDTH)
    nn.init.normal_(table.weight)
    head = LMHead(cfg.LMHead(tied=True, softcap=5.0), WIDTH, VOCAB, table)
    x, targets, _ = inputs()
    selected = select_targets(targets.flatten(), torch.ones(BATCH * LENGTH))
    rows = x.detach().float().flatten(0, 1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ours = token_log_probs(head, rows, selected, chunk_size=7)
        expected = head(rows).log_softmax(-1, dtype=torch.float32).gather(-1, targets.flatten()[:, None]).squeeze(-1)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    leaves = [rows, table.weight]
    upstream = torch.randn(len(rows))
    for grad, reference in zip(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(grad, reference, rtol=2e-2, atol=2e-2)  # chunks are added in bf16


def test_no_targets() -> None:
    head, (x, targets, _) = CountingHead(), inputs()
    selected = select_targets(targets.flatten(), torch.zeros(BATCH * LENGTH))
    log_probs = token_log_probs(head, x.flatten(0, 1), selected)
    assert not log_probs.any()
    log_probs.sum().backward()
    assert x.grad is not None
    assert not x.grad.any()
