"""AdamW whose two moments are stored in 8 bits (Dettmers et al., 2021). https://arxiv.org/abs/2110.02861

Each block of 256 values has an fp32 scale, its largest magnitude. A value is stored as the index of the nearest of 256
numbers in [−1, 1], or [0, 1] for the second moment, whose relative spacing is small over seven powers of ten.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BLOCK_SIZE = 256
"""Number of values per scale."""
MIN_NUMEL = 4096
"""Smaller parameters, and those that are not a multiple of a block, have fp32 moments."""
CHUNK_NUMEL = 2**22
"""Number of values that are updated at once. Intermediate values in fp32 exist for one chunk only."""
NUM_EXPONENTS = 7
MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW8bit(Optimizer):
    """AdamW with the state `exp_avg` and `exp_avg_sq` as 8-bit codes, and their scales `<name>_scale`.

    The update itself is computed in fp32. All parameters that have gradients are updated in the same steps.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True})

    @torch.no_grad()
    def step(self, *, grad_divisor: Tensor | None = None, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update the parameters with the gradient divided by `grad_divisor`. If `skip` is true, nothing changes."""
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = initial_state(parameter)
            for quantized in (False, True):
                for chunk in _chunks([each for each in parameters if is_quantized(each) == quantized]):
                    self._update_chunk(group, chunk, grad_divisor, skip, quantized=quantized)

    def _update_chunk(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        grad_divisor: Tensor | None,
        skip: Tensor | None,
        *,
        quantized: bool,
    ) -> None:
        beta1, beta2 = group["betas"]
        states = [self.state[each] for each in parameters]
        grad = torch.cat([each.grad.flatten().float() for each in parameters if each.grad is not None])
        if grad_divisor is not None:
            grad /= grad_divisor
        steps = [state["step"] for state in states]
        step = steps[0] + 1
        old = {name: _concatenate(states, name) for name in _state_names(quantized=quantized)}
        moments = {
            name: dequantize_8bit(old[name], old[f"{name}_scale"], signed=name == "exp_avg") if quantized else old[name]
            for name in MOMENTS
        }
        exp_avg = torch.lerp(moments["exp_avg"], grad, 1 - beta1)
        exp_avg_sq = torch.lerp(moments["exp_avg_sq"], grad.square_(), 1 - beta2)
        values = torch.cat([each.flatten().float() for each in parameters])
        updated = values * (1 - group["lr"] * group["weight_decay"])
        denominator = (exp_avg_sq.sqrt() / (1 - beta2**step).sqrt()).add_(group["eps"])
        updated -= exp_avg / denominator * (group["lr"] / (1 - beta1**step))
        new = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        if quantized:
            for name in MOMENTS:
                new[name], new[f"{name}_scale"] = quantize_8bit(new[name], signed=name == "exp_avg")
        if skip is not None:
            updated = torch.where(skip, values, updated)
            new = {name: torch.where(skip, old[name], value) for name, value in new.items()}
        torch._foreach_add_(steps, 1.0 if skip is None else (~skip).to(steps[0].dtype))
        _scatter(updated, parameters)
        for name, value in new.items():
            _scatter(value, [state[name] for state in states])


def is_quantized(parameter: Tensor) -> bool:
    """Whether the moments of a parameter are stored in 8 bits."""
    return parameter.numel() >= MIN_NUMEL and parameter.numel() % BLOCK_SIZE == 0


def state_shapes(parameter: Tensor) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the state of a parameter."""
    shapes: dict[str, tuple[int, ...]] = {"step": ()}
    for name in _state_names(quantized=is_quantized(parameter)):
        shapes[name] = (parameter.numel() // BLOCK_SIZE,) if name.endswith("_scale") else tuple(parameter.shape)
    return shapes


def initial_state(parameter: Tensor) -> dict[str, Tensor]:
    """State in which both moments are zero."""
    state = {}
    for name, shape in state_shapes(parameter).items():
        is_code = name in MOMENTS and is_quantized(parameter)
        code = zero_code(signed=name == "exp_avg") if is_code else 0
        dtype = torch.uint8 if is_code else torch.float32
        state[name] = torch.full(shape, code, dtype=dtype, device=parameter.device)
    return state


def _state_names(*, quantized: bool) -> tuple[str, ...]:
    return (*MOMENTS, *(f"{name}_scale" for name in MOMENTS)) if quantized else MOMENTS


def _chunks(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of parameters with up to CHUNK_NUMEL values. A larger parameter is a group of its own."""
    chunk: list[Tensor] = []
    for parameter in parameters:
        if chunk and sum(each.numel() for each in chunk) + parameter.numel() > CHUNK_NUMEL:
            yield chunk
            chunk = []
        chunk.append(parameter)
    if chunk:
        yield chunk


def _concatenate(states: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.cat([state[name].flatten() for state in states])


def _scatter(values: Tensor, targets: list[Tensor]) -> None:
    """Copy a flat tensor to the tensors that it was concatenated from."""
    parts = torch.split(values, [target.numel() for target in targets])
    torch._foreach_copy_(targets, [part.view_as(target) for part, target in zip(parts, targets, strict=True)])


# ------------------------------------------------------------------------------------------------------- quantization


@lru_cache(maxsize=2)
def quantization_values(*, signed: bool) -> tuple[float, ...]:
    """The 256 numbers of dynamic tree quantization, in ascending order.

    For the power 10⁻ⁱ (i from 0 to 6), the interval [0.1, 1]·10⁻ⁱ is divided into equal parts, twice as many as for
    10⁻ⁱ⁻¹, whose centers are the numbers. 0 and 1 are added, and for a signed map the negative numbers.
    """
    values = [0.0, 1.0]
    for i in range(NUM_EXPONENTS):
        num_parts = 2 ** (NUM_EXPONENTS - 1 - i) * (1 if signed else 2)
        centers = [(0.1 + 0.9 * (part + 0.5) / num_parts) * 10.0**-i for part in range(num_parts)]
        values += centers + ([-center for center in centers] if signed else [])
    return tuple(sorted(values))


def zero_code(*, signed: bool) -> int:
    """Code of the number 0."""
    return quantization_values(signed=signed).index(0.0)


@lru_cache(maxsize=16)
def _quantization_tensors(device: torch.device, *, signed: bool) -> tuple[Tensor, Tensor]:
    """The numbers, and the borders between them."""
    values = torch.tensor(quantization_values(signed=signed), dtype=torch.float64)
    borders = (values[1:] + values[:-1]) / 2
    return values.float().to(device), borders.float().to(device)


@lru_cache(maxsize=2)
def _first_codes(*, signed: bool) -> Tensor:
    """For the upper 16 bits of an fp32 value: the code of the smallest value that has them, at most 254.

    Values with the same upper 16 bits differ by less than 0.4 %, and neighboring borders by more, so that at most one
    border is between such values.
    """
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    smallest = torch.minimum(upper.view(torch.float32), (upper | 0xFFFF).view(torch.float32))
    borders = _quantization_tensors(torch.device("cpu"), signed=signed)[1]
    codes = torch.bucketize(smallest.nan_to_num(0.0), borders, right=True).clamp_(max=len(borders) - 1)
    return codes.to(torch.uint8)


def _nearest_codes(x: Tensor, *, signed: bool) -> Tensor:
    """Codes of a flat tensor with values in [−1, 1]."""
    borders = _quantization_tensors(x.device, signed=signed)[1]
    if x.device.type != "cpu":
        return torch.bucketize(x, borders, out_int32=True, right=True).to(torch.uint8)
    # On a CPU, a table is three times as fast as the binary search.
    first = _first_codes(signed=signed).index_select(0, x.view(torch.int32) >> 16 & 0xFFFF)
    return first + (x >= borders.index_select(0, first.int()))


def quantize_8bit(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes of a flat fp32 tensor, and the scale of each block."""
    blocks = x.view(-1, BLOCK_SIZE)
    scales = blocks.abs().amax(-1).clamp_(min=1e-12)
    return _nearest_codes((blocks / scales.unsqueeze(-1)).flatten(), signed=signed), scales


def dequantize_8bit(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The fp32 values of flat codes."""
    values = _quantization_tensors(codes.device, signed=signed)[0]
    return (values.index_select(0, codes.int()).view(-1, BLOCK_SIZE) * scales.unsqueeze(-1)).flatten()
