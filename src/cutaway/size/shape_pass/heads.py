"""Shape pass of the heads: LM head, and heads of tasks."""

from cutaway.config.head import (
    ClassificationHead,
    EmbeddingHead,
    HeadTransform,
    LMHead,
    MultipleChoiceHead,
    TokenClassificationHead,
)
from cutaway.config.transformer import Config
from cutaway.size.shape_pass.functional import apply_activation, dropout, norm
from cutaway.size.shape_pass.tape import Tape
from cutaway.size.shape_pass.tensor import ShapeTensor, WeightKey


def run_head(tape: Tape, x: ShapeTensor, config: Config) -> ShapeTensor:
    """Apply the head; return its output, or the hidden states of a model without a head."""
    head = config.head
    match head:
        case LMHead():
            return _lm_head(tape, x, config, head)
        case EmbeddingHead():
            return _embedding_head(tape, x, head)
        case TokenClassificationHead():
            return _classify(tape, x, head, head.num_labels)
        case ClassificationHead():
            return _classify(tape, _pool(tape, x, head.pooling), head, head.num_labels)
        case MultipleChoiceHead():
            return _classify(tape, _pool(tape, x, head.pooling), head, 1)
        case _:
            return x


def _lm_head(tape: Tape, x: ShapeTensor, config: Config, head: LMHead) -> ShapeTensor:
    """Apply the transform, if any, the output matrix, scale and softcap; return the logits."""
    if head.transform is not None:
        *_, stack = config.stacks.values()
        width = stack.embedding.token_table_dim(config.d_model) if head.tied else config.d_model
        x = _transform(tape, x, head.transform, width)
    key: WeightKey = ("tokens",) if head.tied else ("head",)
    logits = tape.linear(
        tape.copy_to_tp_region(x), config.vocab_size, key, bias=head.bias == "learned", component="head"
    )
    if head.scale != 1.0:
        logits = tape.record_op([logits])
    if head.softcap is not None:
        logits = tape.record_op([logits])
        logits = tape.record_op([logits], save_output=True)
        logits = tape.record_op([logits])
    return logits


def _transform(tape: Tape, x: ShapeTensor, transform: HeadTransform, width: int) -> ShapeTensor:
    x = dropout(tape, x, transform.dropout)
    x = tape.linear(x, width, ("head", "transform"), bias=transform.bias, component="head")
    return norm(tape, apply_activation(tape, x, transform.activation), transform.norm, ("head", "norm"))


def _classify(
    tape: Tape, x: ShapeTensor, head: ClassificationHead | MultipleChoiceHead, num_labels: int
) -> ShapeTensor:
    if head.transform is not None:
        x = _transform(tape, x, head.transform, x.shape[-1])
    x = dropout(tape, x, head.dropout)
    return tape.linear(x, num_labels, ("head", "classifier"), bias=head.bias, component="head")


def _embedding_head(tape: Tape, x: ShapeTensor, head: EmbeddingHead) -> ShapeTensor:
    x = _pool(tape, x, head.pooling)
    if head.projection is not None:
        x = tape.linear(x, head.projection.dim, ("head", "projection"), bias=head.projection.bias, component="head")
        x = apply_activation(tape, x, head.projection.activation)
    if head.normalize:
        length = tape.record_op([x], shape=(x.shape[0], 1), saved=[x], save_output=True)
        x = tape.record_op([x, length], saved=[x])
    return x


def _pool(tape: Tape, x: ShapeTensor, pooling: str) -> ShapeTensor:
    """One vector per sequence. Only the mask, the indices, or the maxima are saved for the backward pass."""
    batch_size, seq_len, width = x.shape
    pooled = (batch_size, width)
    match pooling:
        case "first" | "last":
            return tape.record_op([x], shape=pooled, saved=[tape.empty((2, batch_size), 8)])
        case "mean":
            x = tape.record_op([x], saved=[tape.empty((batch_size, seq_len), x.itemsize)])
            total = tape.record_op([x], shape=pooled)
            return tape.record_op([total], saved=[tape.empty((batch_size, 1), x.itemsize)])
        case _:
            x = tape.record_op([x], extra_saved_bytes=batch_size * seq_len)
            return tape.record_op([x], shape=pooled, saved=[x], save_output=True)
