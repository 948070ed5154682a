"""Distillation: causal language modeling with a teacher model, which may have another tokenizer.

The teacher runs in each training step, on the text of the batch. A student token is mapped to the teacher tokens of its
text, so that both models have the same context at the end of each student token.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Self, cast

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from cutaway.argument_checks import VALUES_CHECKED
from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.generate.generation_config import unpack_checkpoint
from cutaway.model import DecoderOnly, Transformer
from cutaway.model.head import LMHead
from cutaway.tokenizer import Tokenizer
from cutaway.train.kernels.compile import compile_for_training
from cutaway.train.loss.chunked_cross_entropy import LossSums, LossTargets, chunked_cross_entropy, to_device_async
from cutaway.train.loss.cross_entropy import CrossEntropyOptions
from cutaway.train.loss.distillation import DistillationTargets, TokenGroups
from cutaway.train.objectives.objective import Objective, causal_lm

CHUNK_SIZE = 8192
"""Number of targets whose logits are in memory at a time."""
LENGTH_MULTIPLE = 64
"""Teacher sequences are padded to a multiple of this length, so that few shapes are compiled."""


class TokenAlignment:
    """Teacher tokens of each student token.

    The text of a student token is encoded by the teacher's tokenizer on its own. A document starts with the teacher's
    BOS token, and its first token is encoded as the start of a text, where some tokenizers add a space.
    """

    def __init__(
        self, tokenizer: Tokenizer, teacher_tokenizer: Tokenizer, eos_id: int | None, vocab_size: int | None = None
    ) -> None:
        """`eos_id`: the teacher's token that ends a document. `vocab_size`: that of the student, if it is padded."""
        num_tokens = tokenizer.backend.get_vocab_size(with_added_tokens=True)
        self.vocab_size = num_tokens if vocab_size is None else vocab_size
        vocab, teacher_vocab = tokenizer.backend.get_vocab(), teacher_tokenizer.backend.get_vocab()
        special = tokenizer.backend.get_added_tokens_decoder()
        bos_id = teacher_tokenizer.bos_token_id
        if vocab == teacher_vocab:
            pieces = [[token] if token < num_tokens else [] for token in range(self.vocab_size)]
            self._set_tables(pieces, pieces)
            return
        pieces, start_pieces = [], []
        for token in range(self.vocab_size):
            text = tokenizer.decode([token]) if token < num_tokens else "\ufffd"
            if token in special or "\ufffd" in text:  # U+FFFD: the token is a part of a character
                ids = [eos_id] if token == tokenizer.eos_token_id and eos_id is not None else []
                start = ids
            else:
                ids, start = _encode_continuation(teacher_tokenizer, text), teacher_tokenizer.encode(text)
            pieces.append(ids)
            start_pieces.append(start if bos_id is None or start[:1] == [bos_id] else [bos_id, *start])
        self._set_tables(pieces, start_pieces)

    def _set_tables(self, pieces: list[list[int]], start_pieces: list[list[int]]) -> None:
        self.first_tokens = [ids[0] if ids else None for ids in pieces]
        rows = [ids or [0] for ids in (*pieces, *start_pieces)]  # a special token is a token that is never a target
        self.lengths = np.array([len(row) for row in rows], np.int64)
        self.starts = self.lengths.cumsum() - self.lengths
        self.ids = np.concatenate([np.array(row, np.int64) for row in rows])

    def align(self, tokens: Int[Tensor, "B T"], document_ids: Int[Tensor, "B T"] | None) -> "TeacherInputs":
        """Teacher tokens of a batch of student tokens. Each row of the batch starts a document."""
        ids = tokens.numpy()
        documents = np.zeros_like(ids) if document_ids is None else document_ids.numpy()
        is_start = np.ones_like(ids, bool)
        is_start[:, 1:] = documents[:, 1:] != documents[:, :-1]
        index = ids + self.vocab_size * is_start
        counts = self.lengths[index]  # (B, T)
        ends = counts.cumsum(1)
        length = -(-int(ends[:, -1].max()) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        is_token = np.arange(length) < ends[:, -1:]
        flat_counts = counts.ravel()
        within = np.arange(flat_counts.sum()) - np.repeat(flat_counts.cumsum() - flat_counts, flat_counts)
        teacher_tokens = np.zeros(is_token.shape, np.int64)
        teacher_tokens[is_token] = self.ids[np.repeat(self.starts[index.ravel()], flat_counts) + within]
        teacher_documents = np.full(is_token.shape, documents.max() + 1)  # padding is a document of its own
        teacher_documents[is_token] = np.repeat(documents.ravel(), flat_counts)
        last = ends - 1 + length * np.arange(len(ids))[:, None]
        return TeacherInputs(*(torch.from_numpy(each) for each in (teacher_tokens, teacher_documents, last.ravel())))


def _encode_continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text that continues a document, without special tokens and without the space of a document start."""
    marker = "\n"
    prefix = tokenizer.encode(marker, add_special_tokens=False)
    ids = tokenizer.encode(marker + text, add_special_tokens=False)
    if ids[: len(prefix)] == prefix and len(ids) > len(prefix):
        return ids[len(prefix) :]
    return tokenizer.encode(text, add_special_tokens=False)  # the text and the marker form one token


@dataclass(frozen=True)
class TeacherInputs:
    """Teacher tokens of a batch, and for each student token the index of its last teacher token."""

    tokens: Int[Tensor, "B U"]
    document_ids: Int[Tensor, "B U"]
    last: Int[Tensor, " N"]
    """Index into the flattened (B, U), for each of the B·T student tokens."""

    def to(self, device: torch.device | str) -> "TeacherInputs":
        return TeacherInputs(*(to_device_async(getattr(self, field.name), device) for field in fields(self)))


class Teacher:
    """A frozen causal language model that gives the target distribution of the next token."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        kd_ratio: float,
        device: torch.device,
        vocab_size: int | None = None,
    ) -> None:
        """`vocab_size`: that of the student, if it is larger than the tokenizer's."""
        model, teacher_tokenizer, generation_config = unpack_checkpoint(checkpoint)
        if not isinstance(model, DecoderOnly) or not isinstance(model.head, LMHead) or teacher_tokenizer is None:
            raise InputError(
                "objective.teacher must predict the next token, but it is not a decoder with a language modeling head"
                " and a tokenizer; pass the checkpoint of a causal language model"
            )
        self.kd_ratio = kd_ratio
        eos_id = next(iter(generation_config.eos_token_ids), None)
        self.alignment = TokenAlignment(tokenizer, teacher_tokenizer, eos_id, vocab_size)
        self.groups = TokenGroups.from_first_tokens(self.alignment.first_tokens, device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model: DecoderOnly = model.to(device, dtype).eval().requires_grad_(False)
        self.head = prune_head(model.head, self.groups.teacher_ids)
        self.compiled_context: Callable[[], AbstractContextManager[None]] = compile_for_training(model, None)

    @torch.no_grad()
    def hidden_states(self, inputs: TeacherInputs) -> Tensor:
        """Hidden state of the teacher at the last teacher token of each student token: (B·T, d)."""
        token = VALUES_CHECKED.set(True)  # packed documents may be longer than the context together
        try:
            with self.compiled_context(), torch.autocast(inputs.tokens.device.type, enabled=False):
                hidden = self.model.hidden_states(inputs.tokens, document_ids=inputs.document_ids)
        finally:
            VALUES_CHECKED.reset(token)
        return hidden.flatten(0, 1)[inputs.last]


def prune_head(head: LMHead, token_ids: Int[Tensor, " G"]) -> LMHead:
    """Return a copy of a language modeling head that computes the logits of `token_ids` only."""
    pruned, matrix = copy.deepcopy(head), cast(nn.Linear, head.matrix)  # an embedding, if tied, has a weight too
    cast(nn.Linear, pruned.matrix).weight = nn.Parameter(matrix.weight[token_ids].clone(), requires_grad=False)
    if head.bias is not None:
        del pruned.bias
        pruned.register_buffer("bias", head.bias[token_ids].clone())
    return pruned


@dataclass(frozen=True, kw_only=True)
class DistillationObjective(Objective):
    """Causal language modeling objective of a batch, with the teacher and its inputs."""

    teacher: Teacher
    teacher_inputs: TeacherInputs
    use_teacher: Bool[Tensor, "B T"]

    def loss(self, model: Transformer, options: CrossEntropyOptions = CrossEntropyOptions()) -> LossSums:
        """Distillation loss in training, and cross-entropy in evaluation."""
        if not torch.is_grad_enabled():
            return super().loss(model, options)
        assert isinstance(model.head, LMHead)
        x, targets = (
            self.hidden_states(model).flatten(0, 1),
            self.loss_targets or self.select_targets().to(model.device),
        )
        hidden = self.teacher.hidden_states(self.teacher_inputs)
        soft_targets = DistillationTargets(
            hidden, self.use_teacher.flatten(), self.teacher.head, self.teacher.groups, self.teacher.kd_ratio
        )
        return chunked_cross_entropy(model.head, x, targets, options._replace(chunk_size=CHUNK_SIZE), soft_targets)

    def select_targets(self) -> LossTargets:
        """All targets, including those with weight 0, so that every batch has the same shape and is compiled once."""
        weights = self.weights.flatten()
        return LossTargets(self.targets.flatten(), weights, weights.sum(), None)

    def to(self, device: torch.device | str) -> Self:
        teacher_inputs, use_teacher = self.teacher_inputs.to(device), to_device_async(self.use_teacher, device)
        return replace(super().to(device), teacher_inputs=teacher_inputs, use_teacher=use_teacher)


def distillation(
    tokens: Int[Tensor, "B T1"],
    document_ids: Int[Tensor, "B T1"] | None,
    use_teacher: Bool[Tensor, " B"] | None,
    teacher: Teacher,
) -> DistillationObjective:
    """`causal_lm` with a teacher. `use_teacher` is False for rows whose text is outside the teacher's domain."""
    objective = causal_lm(tokens, document_ids)
    inputs = tokens[:, :-1]
    use_teacher = torch.ones(len(tokens), dtype=torch.bool) if use_teacher is None else use_teacher
    return DistillationObjective(
        objective.inputs,
        objective.targets,
        objective.weights,
        objective.model_kwargs,
        teacher=teacher,
        teacher_inputs=teacher.alignment.align(inputs, None if document_ids is None else document_ids[:, :-1]),
        use_teacher=use_teacher[:, None].expand_as(inputs).contiguous(),
    )
