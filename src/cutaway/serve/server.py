"""The server itself: a socket, timeouts for slow clients, and an end that loses nothing it can finish."""

import asyncio
import errno
import gc
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from cutaway.errors import InputError
from cutaway.serve.limits import Limits
from cutaway.serve.middleware import LOOPBACK_HOSTS, SECURITY_HEADERS, AccessPolicy, is_ip_address

ERROR_HEADERS = [
    *SECURITY_HEADERS.items(),
    ("content-type", "text/plain"),
    ("connection", "close"),
    ("cache-control", "no-store"),
]
SERVICE_UNAVAILABLE_RESPONSE = "\r\n".join(
    [
        "HTTP/1.1 503 Service Unavailable",
        *(f"{name}: {value}" for name, value in ERROR_HEADERS),
        "retry-after: 1",
        "content-length: 0",
        "",
        "",
    ]
).encode("ascii")
SOCKET_BACKLOG, ACCEPT_BATCH_SIZE = 1024, 8
"""Connections that may wait to be taken, and that are taken before the event loop looks at the others again."""
WILDCARD_HOSTS = ("0.0.0.0", "::", "")


def build_access_policy(host: str, api_key: str | None, extra_hosts: tuple[str, ...] = ()) -> AccessPolicy:
    """The door for a server bound to this host; without a key only this machine may come in."""
    if api_key is not None and not (
        8 <= len(api_key) <= 512 and api_key.isascii() and api_key.isprintable() and " " not in api_key
    ):
        raise InputError("the key must have 8 to 512 letters, digits or signs of ASCII, without spaces; give another")
    if api_key is None and not is_loopback(host):
        raise InputError(
            f"--host {host} lets other machines in, and there is no key; give --api-key-file FILE or CUTAWAY_API_KEY,"
            " or leave --host out to serve this machine only"
        )
    own = {host, socket.gethostname()} if host in WILDCARD_HOSTS else {host}
    known = {name.lower().strip("[]") for name in (*LOOPBACK_HOSTS, *own, *extra_hosts) if name}
    return AccessPolicy(frozenset(known), allow_any_ip_address=host in WILDCARD_HOSTS, api_key=api_key)


def is_loopback(host: str) -> bool:
    return host == "localhost" or (is_ip_address(host) and (host == "::1" or host.startswith("127.")))


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket at this address; port 0 takes a free one."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port is {port}; give one from 0 (any that is free) to 65535")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InputError(f"--host {host} is no address of this machine ({error.strerror}); try 127.0.0.1") from None
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(SOCKET_BACKLOG)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"port {port} is taken by another program; give another --port, or 0 for any") from None
        raise InputError(f"cannot listen at {host}:{port} ({error.strerror}); give another --host or --port") from None
    return made


def server_url(sock: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class TimeoutProtocol(H11Protocol):
    """A connection that waits neither for slow headers nor for a client that reads nothing."""

    limits = Limits()
    header_timer: asyncio.TimerHandle | None = None
    over_capacity = False
    send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.over_capacity = len(self.connections) > self.limits.max_connections
        self.header_timer = self.loop.call_later(self.limits.header_timeout, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        if self.over_capacity:  # said when the request is here: a connection that ends before is only broken
            self.transport.write(SERVICE_UNAVAILABLE_RESPONSE)
            self.transport.close()
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            _cancel_timers(self.header_timer)
            self.header_timer = None
        elif self.header_timer is None:
            self.header_timer = self.loop.call_later(self.limits.header_timeout, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel_timers(self.header_timer, self.send_timer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self.send_timer = self.loop.call_later(self.limits.send_timeout, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        _cancel_timers(self.send_timer)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP; the connection ends with it."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = h11.Response(status_code=400, headers=ERROR_HEADERS, reason=b"Bad Request")
            for event in (response, h11.Data(data=msg.encode("ascii")), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _cancel_timers(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()


class Server(uvicorn.Server):
    """Ends with the first signal when what runs is finished or has had its time, with the second at once; code 0."""

    def __init__(self, app: FastAPI, limits: Limits, on_ready: Callable[[], object] | None = None) -> None:
        patience = type("Patience", (TimeoutProtocol,), {"limits": limits})
        config = uvicorn.Config(
            app,
            http=patience,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            log_level="critical",
            access_log=False,  # it would show keys in addresses
            server_header=False,
            backlog=ACCEPT_BATCH_SIZE,
            proxy_headers=False,
            timeout_keep_alive=limits.keep_alive_timeout,
            timeout_graceful_shutdown=math.ceil(limits.shutdown_timeout),
            h11_max_incomplete_event_size=limits.max_header_bytes + limits.max_url_bytes,
        )
        super().__init__(config)
        self.on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(SOCKET_BACKLOG)
        if self.on_ready is not None and self.started:
            self.on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def run_server(app: FastAPI, sock: socket.socket, limits: Limits, on_ready: Callable[[], object] | None = None) -> None:
    """Answer until a signal says to stop. `on_ready` is called once requests are taken."""
    server = Server(app, limits, on_ready)
    gc.collect()
    gc.freeze()  # what was made up to here stays: to look through it again would hold all requests up
    server.run(sockets=[sock])
    if server.force_exit:  # what still runs is not waited for
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


@contextmanager
def serve_in_thread(app: FastAPI, sock: socket.socket, limits: Limits | None = None) -> Iterator[str]:
    """A server in a thread of its own for as long as this lasts; gives its address."""
    ready = threading.Event()
    server = Server(app, limits or Limits(), ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="cutaway server", daemon=True)
    where = server_url(sock)
    thread.start()
    try:
        if not ready.wait(30):
            raise InputError("the server did not start within 30 seconds")
        yield where
    finally:
        server.should_exit = True
        thread.join()
