"""`FunctionCalls`: which functions of the checked model have succeeded, and which one raised an exception.

An exception of a function that has worked before is a bug of the model. A function that never works may be called in a
way that it does not support.
"""

import traceback
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from cutaway.check.checked_model import CheckedModel
from cutaway.errors import format_raised

_TRACKED_FUNCTIONS = {
    "logits": "a forward pass",
    "logits_with_mask": "a forward pass with a mask",
    "logits_with_mask_only": "a forward pass with a mask",
    "logits_with_positions": "a forward pass with position ids",
    "logits_with_documents": "a forward pass with packed documents",
    "logits_with_cache": "a forward pass with a KV cache",
    "logits_with_padded_cache": "a forward pass with padding and a KV cache",
    "logits_with_filled_cache": "a forward pass with a KV cache",
    "logits_with_rolling_cache": "a forward pass with a rolling KV cache",
    "logits_with_source": "a forward pass with a source",
    "generate": "generation",
    "generate_padded": "generation from a padded batch",
    "generate_speculative": "speculative decoding",
    "beam_search": "beam search",
    "loss": "the loss",
    "accumulated_loss": "the loss with gradient accumulation",
}
"""Function field of `CheckedModel` → its description in messages."""
_LIBRARY_DIRECTORIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class FunctionCalls:
    """Counts the successful calls of the functions of a `CheckedModel`, and remembers which function raised last."""

    def __init__(self, model: CheckedModel) -> None:
        self.model = model
        self.num_succeeded: Counter[str] = Counter()
        self.raised: tuple[str, BaseException] | None = None
        for name in _TRACKED_FUNCTIONS:
            function = getattr(model, name)
            if function is not None:
                setattr(model, name, self._track(name, function))

    def _track(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def tracked(*args: Any, **kwargs: Any) -> Any:
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                self.raised = name, error
                raise
            self.num_succeeded[name] += 1
            return result

        return tracked

    def describe_crash(self, error: BaseException) -> str | None:
        """Text for an exception of a function that has worked before, or that works on a minimal input; else None."""
        if self.raised is None or self.raised[1] is not error or isinstance(error, NotImplementedError):
            return None
        name = self.raised[0]
        if not self.num_succeeded[name] and not self._works_on_minimal_input(name):
            return None
        return f"{_TRACKED_FUNCTIONS[name]} {format_raised(error)}"

    def _works_on_minimal_input(self, name: str) -> bool:
        """Whether a function works on one row of two tokens."""
        token = min((self.model.vocab_size or 2) - 1, 1)
        tokens = torch.full((1, 2), token, device=self.model.device)
        arguments: dict[str, tuple[object, ...]] = {
            "logits_with_mask": (tokens, torch.ones_like(tokens, dtype=torch.bool)),
            "logits_with_mask_only": (tokens, torch.ones_like(tokens, dtype=torch.bool)),
            "logits_with_positions": (tokens, torch.arange(2, device=tokens.device)[None]),
            "logits_with_documents": (tokens, torch.zeros_like(tokens)),
            "logits_with_cache": (tokens, None),
            "generate": (tokens, 1),
            "generate_padded": (tokens, torch.ones_like(tokens, dtype=torch.bool), 1),
            "generate_speculative": (tokens, 1),
            "loss": (tokens, tokens),
        }
        if name not in arguments:
            return False
        raised = self.raised
        try:
            getattr(self.model, name)(*arguments[name])
        except Exception:  # any exception means that the function does not work
            return False
        finally:
            self.raised = raised
        return True


def locate_exception(error: BaseException) -> str | None:
    """File, line and function of the innermost frame that is neither in torch nor in the checks; None if unknown."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_LIBRARY_DIRECTORIES, "<"))
    ]
    if not frames:
        return None
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}"
