"""Every operation on its way, on the lowest level, without torch's compiler."""

from torch.utils._python_dispatch import TorchDispatchMode


class Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """As torch's own, but where nothing is compiled its compiler is not imported: that takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
