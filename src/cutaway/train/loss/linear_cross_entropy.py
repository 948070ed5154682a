"""Cross-entropy of a linear head without bias, and its gradient, computed without autograd.

Each chunk of targets takes three matrix products (two if the head is frozen) and one pass that computes the gradient of
the logits (equation in chunked_cross_entropy.py). All chunks use the same buffers. This implementation is used for
fp32 on a CPU and for bf16 on a GPU, where one kernel overwrites the logits by their gradient
(kernels/cross_entropy.py).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cutaway.device import has_triton
from cutaway.model.head import LMHead
from cutaway.train.loss.cross_entropy import CrossEntropyOptions, cross_entropy_with_grad

MAX_CHUNK_LOGITS = {"cpu": 2**26, "cuda": 2**30}
"""Maximum number of logits per chunk, by device type. Larger matrix products are faster, but need more memory."""
MAX_CHUNK_LOGITS_FROZEN = 2**26
"""The same for a frozen head. No chunk is added to a gradient of the weights, so that small chunks cost little."""
MIN_CPU_LOGITS = 2**22
"""Minimum number of logits (targets · vocabulary size) on a CPU. With fewer, this implementation is not faster."""
VOCAB_TILE = 128
"""On a GPU, the vocabulary is padded to a multiple of this: matrix products of other widths take twice as long."""


class _LinearCrossEntropyOutput(NamedTuple):
    """Loss and cross-entropy, summed over targets, and gradients not yet multiplied by the upstream gradient."""

    loss: Tensor
    cross_entropy: Tensor
    x_grad: Tensor
    weight_grad: Tensor | None


def can_use_linear_cross_entropy(head: Any, x: Tensor, head_params: Sequence[Tensor]) -> bool:
    """Whether `linear_cross_entropy` supports the head and x.

    The head must be one matrix, trainable or frozen, without bias, transform, scale or softcap. The device and dtype of
    x must be supported and, on a CPU, there must be at least MIN_CPU_LOGITS logits.
    """
    is_linear = isinstance(head, LMHead) and head.transform is None and head.bias is None and head.softcap is None
    if not is_linear or head.scale != 1.0 or not len(x):
        return False
    weight = head.matrix.weight
    if not isinstance(weight, nn.Parameter) or any(each is not weight for each in head_params):
        return False  # other modules compute their weight from other parameters
    device_type = x.device.type
    if device_type == "cpu":
        is_fp32 = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        return is_fp32 and len(x) * len(weight) >= MIN_CPU_LOGITS
    autocasts_to_bf16 = (
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == torch.bfloat16
    )
    is_bf16 = autocasts_to_bf16 or x.dtype == weight.dtype == torch.bfloat16
    return device_type == "cuda" and has_triton() and is_bf16


def linear_cross_entropy(
    head_weight: Tensor, x: Tensor, targets: Tensor, weights: Tensor, options: CrossEntropyOptions
) -> _LinearCrossEntropyOutput:
    """Compute loss and gradients over all targets, in chunks. On a CPU, buffers are taken from `options.buffers`.

    If the weight does not require a gradient, none is computed for it.
    """
    (rows, d_model), vocab, on_gpu = x.shape, len(head_weight), x.is_cuda
    columns = -(-vocab // VOCAB_TILE) * VOCAB_TILE if on_gpu else vocab
    weight = head_weight.detach()
    if on_gpu and (columns != vocab or weight.dtype != torch.bfloat16):
        weight = x.new_zeros(columns, d_model, dtype=torch.bfloat16)
        weight[:vocab] = head_weight
    x = x.to(weight.dtype)
    is_trained = head_weight.requires_grad
    max_logits = MAX_CHUNK_LOGITS[x.device.type] if is_trained else MAX_CHUNK_LOGITS_FROZEN
    num_chunks = -(-rows // max(VOCAB_TILE, max_logits // columns))
    chunk_size = min(rows, -(-rows // num_chunks // VOCAB_TILE) * VOCAB_TILE)  # equal chunks, except the last
    # Only the CPU reuses buffers between calls: there, the system zeroes newly allocated memory, which takes time. On
    # a GPU, PyTorch's caching allocator reuses memory by itself.
    buffers = None if on_gpu else options.buffers
    logits = _get_buffer(buffers, "logits", x.new_empty, chunk_size, columns)
    logits_grad = logits if on_gpu else _get_buffer(buffers, "logits_grad", x.new_empty, chunk_size, columns)
    x_grad = torch.empty_like(x)
    allocate_grad = x.new_zeros if on_gpu else x.new_empty  # on a CPU, the first product overwrites it
    weight_grad = allocate_grad(columns, d_model, dtype=torch.float32) if is_trained else None
    losses, cross_entropies = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    options_of_grad: Any = {"out_dtype": torch.float32} if on_gpu else {}
    for start in range(0, rows, chunk_size):
        chunk = slice(start, start + chunk_size)
        x_chunk, filled = x[chunk], slice(0, min(chunk_size, rows - start))  # the last chunk may be shorter
        torch.mm(x_chunk, weight.T, out=logits[filled])
        if on_gpu:
            from cutaway.train.kernels.cross_entropy import logits_to_grad_in_place

            tensors = (logits[filled], targets[chunk], weights[chunk], losses[chunk], cross_entropies[chunk])
            logits_to_grad_in_place(*tensors, vocab, options.label_smoothing, options.z_loss_coef)
        else:
            target, weight_column, out = targets[chunk, None], weights[chunk, None], logits_grad[filled]
            _, loss, cross_entropy = cross_entropy_with_grad(
                logits[filled], target, weight_column, options, torch.float32, out=out
            )
            losses[chunk], cross_entropies[chunk] = loss.squeeze(-1), cross_entropy.squeeze(-1)
        torch.mm(logits_grad[filled], weight, out=x_grad[chunk])
        if weight_grad is not None:
            if not on_gpu:
                options_of_grad["beta"] = 1 if start else 0
            torch.addmm(weight_grad, logits_grad[filled].T, x_chunk, out=weight_grad, **options_of_grad)
    if weight_grad is not None and columns != vocab:  # a view that autograd cannot add to in place
        weight_grad = weight_grad[:vocab]
    return _LinearCrossEntropyOutput(losses.sum(), cross_entropies.sum(), x_grad, weight_grad)


def _get_buffer(buffers: dict[str, Tensor] | None, name: str, allocate: Callable[..., Tensor], *shape: int) -> Tensor:
    """Return a buffer of this shape from `buffers`, or allocate it and store it there."""
    buffer = None if buffers is None else buffers.get(name)
    if buffer is None or buffer.shape != shape:
        buffer = allocate(*shape)
        if buffers is not None:
            buffers[name] = buffer
    return buffer
