"""Validation of arguments that many functions share: positive integers, dtypes, devices, seeds."""

import torch

from cutaway.errors import InputError

FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_positive_int(name: str, value: int) -> None:
    """Raise InputError unless the value is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is {value!r}; pass an integer of at least 1")


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise InputError unless the dtype is None or one of FLOAT_DTYPES."""
    if dtype is not None and dtype not in FLOAT_DTYPES:
        allowed = ", ".join(str(each) for each in FLOAT_DTYPES)
        raise InputError(f"dtype is {dtype!r}; use one of {allowed}")


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return the torch device (PyTorch's default device for None). Raise InputError if the device is not available."""
    try:
        target = torch.device(device) if device is not None else torch.get_default_device()
        torch.empty(0, device=target)
    except (RuntimeError, TypeError, AssertionError, ImportError) as error:
        raise InputError(f"device {device!r} is not available: {str(error).splitlines()[0]}") from None
    return target


def check_seed(seed: int | None) -> None:
    """Raise InputError unless the seed is None or an integer that torch.manual_seed accepts."""
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63):
        raise InputError(f"seed is {seed!r}; pass an integer from 0 to 2**63 - 1")
