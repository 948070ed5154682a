"""Reference policy: the model before training, from which the losses of DPO, KTO and GRPO measure a distance.

If an adapter is trained, the reference is the same model under a disabled adapter, which needs no memory. If all
weights are trained, it is a frozen copy of the initial weights. A resumed run takes both from the base checkpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cutaway.model import Transformer
from cutaway.train.recipe.schema import Precision


class ReferenceModel:
    """The initial model, as a frozen copy or as the trained model under a disabled adapter.

    It is not a module of the trained model: DDP, FSDP, optimizer and checkpoints do not contain it. With several
    processes, each has its own copy.
    """

    def __init__(self, model: Transformer | None = None, precision: Precision = "fp32") -> None:
        """`model`: model with the initial weights, which is frozen in place. None: the policy has an adapter."""
        self.model = model
        if model is not None:
            model.requires_grad_(False).eval()
            model.use_activation_checkpointing("none")
            if precision == "bf16":  # the residual stream of the policy is bf16 too, see TrainingModule.autocast
                for stack in model.stacks.values():
                    stack.embed.register_forward_hook(_to_bf16)

    @contextmanager
    def use(self, policy: Transformer) -> Iterator[Transformer]:
        """Context that yields the reference model, on the device of `policy`, without gradients and dropout."""
        if self.model is not None:
            if self.model.device != policy.device:
                self.model.to(policy.device)
            with torch.no_grad():
                yield self.model
            return
        with torch.no_grad(), policy.disable_adapters(), eval_mode(policy):
            yield policy


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in evaluation mode, without dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _to_bf16(module: nn.Module, args: object, x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)
