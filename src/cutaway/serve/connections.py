"""Limits on the number of connections, in total and per client address."""

import ipaddress
import time
from typing import Protocol

from cutaway.serve.limits import Limits


class Connection(Protocol):
    """A connection of the server."""

    @property
    def waiting_since(self) -> float | None:
        """Time since when the server waits for a complete request, or None while it responds to one."""

    def close_idle(self) -> None:
        """Close the connection without a response."""


class ConnectionTable:
    """Open connections by client address.

    If there are too many, a connection is closed on which no complete request has arrived for `min_idle_time`: clients
    that are silent or slow do not prevent others from connecting.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._by_address: dict[str, dict[Connection, None]] = {}
        self._next_search: dict[str, float] = {}
        """Time before which no connection of an address can be closed, because a search found none."""

    def __len__(self) -> int:
        return sum(map(len, self._by_address.values()))

    def add(self, connection: Connection, address: str) -> bool:
        """Add a connection. Returns False if there are too many connections and none can be closed instead."""
        own = self._by_address.setdefault(address, {})
        has_room = len(own) < self.limits.max_connections_per_address or self._close_idle(address)
        if has_room and len(self) >= self.limits.max_connections:
            by_count = sorted(self._by_address, key=lambda address: len(self._by_address[address]), reverse=True)
            has_room = any(self._close_idle(address) for address in by_count)
        if has_room:
            own[connection] = None
        return has_room

    def discard(self, connection: Connection, address: str) -> None:
        own = self._by_address.get(address, {})
        own.pop(connection, None)
        if not own:
            self._by_address.pop(address, None)
            self._next_search.pop(address, None)

    def _close_idle(self, address: str) -> bool:
        """Close the oldest connection of an address that waits for a request. Returns whether there is one."""
        now, min_idle_time = time.monotonic(), self.limits.min_idle_time
        if now < self._next_search.get(address, 0):
            return False
        for connection in self._by_address.get(address, ()):
            since = connection.waiting_since
            if since is not None and now - since >= min_idle_time:
                del self._by_address[address][connection]
                connection.close_idle()
                return True
        self._next_search[address] = now + min_idle_time / 10  # bounds the time of searches while clients connect
        return False


def client_network(host: str) -> str:
    """Return the address that counts as one client: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
