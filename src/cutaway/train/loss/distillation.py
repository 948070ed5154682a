"""Distillation loss: the student learns the teacher's distribution of the next token as well as the text's token.

For a position with the text's token y, student distribution p and teacher distribution q over the same vocabulary:

    loss = (1 − r)·(−log p_y) + r·KL(q ‖ p),   r = kd_ratio

If the tokenizers differ, q is a distribution over other tokens. Then student tokens are divided into groups: g(t) is
the first teacher token of the text of student token t. The teacher's distribution of its next token is a distribution
over groups, and P_g = Σ p_t over the tokens of group g. The chain rule −log p_y = −log P_g(y) − log(p_y / P_g(y))
separates the choice of the group, for which the teacher has a distribution, from the choice within the group, for
which only the text is known:

    loss = (1 − r)·(−log p_y) + r·[KL(q ‖ P) − log(p_y / P_g(y))]

For text sampled from the teacher, both terms have the same expected gradient; the second has less variance. With equal
tokenizers every group is one token, and the last term is 0.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from cutaway.device import has_triton
from cutaway.train.loss.cross_entropy import CrossEntropyOptions

MIN_PROBABILITY = 1e-30
"""Lower bound of the probability of a group, so that its logarithm is finite."""


class TokenGroups(NamedTuple):
    """Groups of student tokens that start with the same teacher token."""

    group_of: Int[Tensor, " V"]
    """Group of each student token."""
    teacher_ids: Int[Tensor, " G"]
    """Teacher token of each group."""
    known: Bool[Tensor, " G"]
    """False for a group of tokens that the teacher cannot produce, e.g. the padding token."""
    first_member: Int[Tensor, " G"]
    """A student token of each group."""
    shared: Int[Tensor, " S"]
    """Student tokens of groups with several tokens."""
    shared_groups: Int[Tensor, " H"]
    """The groups with several tokens."""
    membership: Float[Tensor, "S H"]
    """1 if the token of the row is in the group of the column. Sums by a matrix product are deterministic on a GPU."""

    @classmethod
    def from_first_tokens(cls, first_tokens: list[int | None], device: torch.device) -> "TokenGroups":
        """Build the groups from the first teacher token of each student token; None if the teacher has none."""
        group_by_key = {key: group for group, key in enumerate(dict.fromkeys(first_tokens))}
        group_of = torch.tensor([group_by_key[key] for key in first_tokens])
        member_by_key = {key: token for token, key in reversed([*enumerate(first_tokens)])}
        first_member = torch.tensor([member_by_key[key] for key in group_by_key])
        sizes = group_of.bincount(minlength=len(group_by_key))
        shared_groups = (sizes > 1).nonzero().squeeze(-1)
        shared = (sizes[group_of] > 1).nonzero().squeeze(-1)
        tensors = (
            group_of,
            torch.tensor([key or 0 for key in group_by_key]),
            torch.tensor([key is not None for key in group_by_key]),
            first_member,
            shared,
            shared_groups,
            (group_of[shared, None] == shared_groups).float(),
        )
        return cls(*(each.to(device) for each in tensors))

    def log_probs(self, token_log_probs: Float[Tensor, "n V"]) -> Float[Tensor, "n G"]:
        """Log-probability of each group: the logarithm of the sum of the probabilities of its tokens."""
        log_probs = token_log_probs[:, self.first_member]
        if not len(self.shared):
            return log_probs
        sums = token_log_probs[:, self.shared].exp() @ self.membership.to(token_log_probs.dtype)
        return log_probs.index_copy(1, self.shared_groups, sums.clamp(min=MIN_PROBABILITY).log())


class DistillationTargets(NamedTuple):
    """The teacher's distribution of the next token, computed from its hidden state, as targets of the student."""

    hidden: Float[Tensor, "N d"]
    """Last hidden state of the teacher at each target."""
    use_teacher: Bool[Tensor, " N"]
    """False where only the text's token is a target."""
    head: nn.Module
    """Computes the logits of `TokenGroups.teacher_ids`."""
    groups: TokenGroups
    kd_ratio: float

    def loss_with_grad(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor,
        rows: slice,
        options: CrossEntropyOptions,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        compute = _compiled_distillation() if logits.is_cuda and has_triton() else distillation_with_grad
        kd_ratio = self.kd_ratio * self.use_teacher[rows, None].to(dtype)
        teacher_logits = self.head(self.hidden[rows])
        return compute(logits, teacher_logits, target, weight, kd_ratio, self.groups, options.z_loss_coef, dtype)


@cache
def _compiled_distillation() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    # Without shape padding: it changes the strides of matrix products, which the compiled code then rejects.
    return torch.compile(distillation_with_grad, options={"shape_padding": False})


def distillation_with_grad(
    logits: Float[Tensor, "n V"],
    teacher_logits: Float[Tensor, "n G"],
    target: Int[Tensor, "n 1"],
    weight: Float[Tensor, "n 1"],
    kd_ratio: Float[Tensor, "n 1"],
    groups: TokenGroups,
    z_loss_coef: float,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "n V"], Float[Tensor, "n 1"], Float[Tensor, "n 1"]]:
    """Return ∂loss/∂logits, the loss and the cross-entropy of each row, all multiplied by the weight of the row.

    The loss is −log p_y + r·[KL(q ‖ P) + log P_g(y)], which equals the equation at the top. Its gradient is

        ∂loss/∂l_t = p_t − onehot(y)_t − r·(q_g(t) − onehot(g(y))_g(t)) · p_t / P_g(t)
    """
    log_p = logits.log_softmax(-1, dtype=dtype)
    log_group = groups.log_probs(log_p)
    log_q = teacher_logits.to(dtype).masked_fill(~groups.known, -torch.inf).log_softmax(-1)
    q = log_q.exp()
    target_group = groups.group_of[target]
    kd_ratio = kd_ratio * groups.known[target_group]  # the teacher has no distribution for this token
    divergence = (q * (log_q - log_group).masked_fill(~groups.known, 0.0)).sum(-1, keepdim=True)
    cross_entropy = -log_p.gather(-1, target)
    loss = cross_entropy + kd_ratio * (divergence + log_group.gather(-1, target_group))
    p = log_p.exp()
    is_target_group = torch.arange(q.shape[-1], device=q.device) == target_group
    surplus = (q - is_target_group.to(dtype)) * (-log_group).exp()  # (n, G)
    is_target = torch.arange(p.shape[-1], device=p.device) == target
    lse = logits.gather(-1, target).to(dtype) + cross_entropy
    loss = loss + z_loss_coef * lse.square()
    grad = p * (1 + 2 * z_loss_coef * lse - kd_ratio * surplus[:, groups.group_of]) - is_target.to(dtype)
    return weight * grad, weight * loss, weight * cross_entropy
