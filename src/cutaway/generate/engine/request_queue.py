"""Waiting requests: round-robin over clients, and over the API requests of each client."""

from bisect import insort
from collections.abc import Callable, Iterator

from cutaway.generate.engine.request import Request, RequestGroup

LOOKAHEAD = 32
"""Number of requests of a group that are considered in one selection."""


class RequestQueue:
    """Queue of waiting requests. The turn passes to the next client, and the next group of the client, after each pop.

    A client or group whose first request arrives joins at the end of the round. Each pop of a request is therefore
    preceded by at most one pop of every other client and group, whatever the number of requests that they queued.
    Within a group, requests are ordered by priority and arrival, so that a preempted request is first again.
    """

    def __init__(self) -> None:
        self.groups: dict[RequestGroup, list[Request]] = {}
        self.turns: dict[str | RequestGroup, int] = {}
        """Turn of each waiting client and group: the smallest is next."""
        self.last_turn = 0
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Request]:
        return (request for requests in list(self.groups.values()) for request in list(requests))

    def append(self, request: Request) -> None:
        insort(self.groups.setdefault(request.group, []), request, key=_order_in_group)
        self.length += 1
        for member in (request.group.client, request.group):
            if member not in self.turns:
                self._end_turn(member)

    def select(self, is_eligible: Callable[[Request], bool], *, by_priority: bool = False) -> Request | None:
        """Return the next eligible request without removing it; None if there is none.

        `by_priority`: requests of the smallest priority precede all others."""
        best, best_key = None, (0, 0, 0)
        for group, requests in self.groups.items():
            candidate = next(filter(is_eligible, requests[:LOOKAHEAD]), None)
            if candidate is None:
                continue
            key = (candidate.priority if by_priority else 0, self.turns[group.client], self.turns[group])
            if best is None or key < best_key:
                best, best_key = candidate, key
        return best

    def pop(self, request: Request) -> None:
        """Remove a selected request. Its client and its group move to the end of the round."""
        self._end_turn(request.group.client)
        self._end_turn(request.group)
        self.remove(request)

    def remove(self, request: Request) -> None:
        group = request.group
        self.groups[group].remove(request)
        self.length -= 1
        if not self.groups[group]:
            del self.groups[group], self.turns[group]
            if all(other.client != group.client for other in self.groups):
                del self.turns[group.client]

    def clear(self) -> None:
        self.groups.clear()
        self.turns.clear()
        self.length = 0

    def _end_turn(self, member: str | RequestGroup) -> None:
        self.last_turn += 1
        self.turns[member] = self.last_turn


def _order_in_group(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival_index
