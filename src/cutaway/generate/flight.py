"""A step's tokens on their way from the device."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cutaway.generate.sampling import Drawn
from cutaway.generate.ticket import Ticket


class Flight:
    """Tokens that were drawn for these requests. Looking at them waits for the device; sending them off does not."""

    def __init__(self, drawn: Drawn, tickets: Sequence[Ticket]) -> None:
        self.tickets = list(tickets)
        self.landed = None
        if drawn.tokens.device.type == "cuda":
            copies = [None if part is None else pinned(part) for part in drawn]
            drawn = Drawn(*copies)  # type: ignore[arg-type]
            self.landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.landed.record()
        self.host = drawn

    def drawn(self) -> Iterator[tuple[Ticket, int, bool, float | None, dict[int, float] | None]]:
        """For each request its token, whether its logits were bad, and log-probabilities if there are any."""
        if self.landed is not None:
            self.landed.synchronize()
        host = self.host
        tokens, bad = host.tokens.tolist(), host.bad.tolist()
        logprobs = None if host.logprob is None else host.logprob.tolist()
        names = None if host.top_tokens is None else host.top_tokens.tolist()
        values = None if host.top_logprobs is None else host.top_logprobs.tolist()
        for place, ticket in enumerate(self.tickets):
            top = None
            if names is not None and values is not None and ticket.settings.logprobs:
                count = ticket.settings.logprobs
                top = dict(zip(names[place][:count], values[place][:count], strict=True))
            yield ticket, tokens[place], bad[place], None if logprobs is None else logprobs[place], top


def pinned(tensor: Tensor) -> Tensor:
    """A copy on the host, complete once the device gets there."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
