"""HTTP server: listening socket, access policy, timeouts for slow clients, graceful shutdown."""

import asyncio
import errno
import gc
import ipaddress
import logging
import math
import os
import re
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from cutaway.errors import InputError
from cutaway.serve.api_keys import KEY_PATTERN, ApiKeys
from cutaway.serve.connections import ConnectionTable, client_network
from cutaway.serve.http_connection import LimitedConnection
from cutaway.serve.limits import Limits
from cutaway.serve.middleware import LOOPBACK_HOSTS, SECURITY_HEADERS, AccessPolicy, is_ip_address

ERROR_HEADERS = SECURITY_HEADERS | {"content-type": "text/plain", "connection": "close", "cache-control": "no-store"}
_OVERLOAD_HEADERS = ERROR_HEADERS | {"retry-after": "1", "content-length": "0"}
_OVERLOAD_LINES = ["HTTP/1.1 503 Service Unavailable", *(f"{key}: {value}" for key, value in _OVERLOAD_HEADERS.items())]
SERVICE_UNAVAILABLE_RESPONSE = "\r\n".join([*_OVERLOAD_LINES, "", ""]).encode("ascii")
SOCKET_BACKLOG, ACCEPT_BATCH_SIZE = 1024, 8
"""Length of the listen queue, and maximum number of connections accepted per iteration of the event loop."""
MAX_CONNECTIONS_OVER_CAPACITY = 128
"""Maximum number of connections that wait for status 503. Further ones are closed without a response."""
NUM_OTHER_FILES = 128
"""Number of open files that are not connections."""
FINAL_ERROR_TIMEOUT = 1.0
"""Maximum time in seconds to send errors for the requests that are canceled at shutdown."""
WILDCARD_HOSTS = ("0.0.0.0", "::", "")


def build_access_policy(
    host: str,
    api_key: str | None,
    extra_hosts: tuple[str, ...] = (),
    *,
    api_keys: ApiKeys | None = None,
    public_paths: frozenset[str] = frozenset(),
) -> AccessPolicy:
    """Build the access policy of a server bound to `host`. Raise if `host` is not loopback and there is no API key.

    `extra_hosts` are further names that are accepted in the Host header.
    """
    if api_key is not None and not re.fullmatch(KEY_PATTERN, api_key):
        raise InputError("the API key must have 8 to 512 printable ASCII characters without spaces; choose another")
    if api_key is None and api_keys is None and not is_loopback(host):
        raise InputError(
            f"--host {host} is reachable from other machines, and there is no API key; pass --api-key-file FILE or set"
            " CUTAWAY_API_KEY, or omit --host to serve this machine only"
        )
    bind_names = {host, socket.gethostname()} if host in WILDCARD_HOSTS else {host}
    allowed_hosts = {name.lower().strip("[]") for name in (*LOOPBACK_HOSTS, *bind_names, *extra_hosts) if name}
    return AccessPolicy(
        frozenset(allowed_hosts),
        allow_any_ip_address=host in WILDCARD_HOSTS,
        api_key=api_key,
        api_keys=api_keys,
        public_paths=public_paths,
    )


def check_proxy_addresses(text: str) -> None:
    """Raise unless `text` is a comma-separated list of IP addresses and networks."""
    for part in text.split(","):
        try:
            ipaddress.ip_network(part.strip())
        except ValueError:
            raise InputError(
                f"--forwarded-allow-ips has '{part.strip()}', which is not an IP address or network; pass those of the"
                " proxy, as in 127.0.0.1 or 172.16.0.0/12, because clients could forge their address otherwise"
            ) from None


def is_loopback(host: str) -> bool:
    return host == "localhost" or (is_ip_address(host) and (host == "::1" or host.startswith("127.")))


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 selects a free port."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port is {port}; use 0 (any free port) to 65535")
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InputError(f"--host {host} is not an address of this machine ({error.strerror}); use 127.0.0.1") from None
    family, socket_type, protocol, _, address = addresses[0]
    sock = socket.socket(family, socket_type, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(SOCKET_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"port {port} is already in use; pass another --port, or 0 for any free port") from None
        raise InputError(f"cannot listen on {host}:{port} ({error.strerror}); pass another --host or --port") from None
    return sock


def server_url(sock: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a listening socket. A wildcard address is replaced by the loopback address."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _TimeoutProtocol(H11Protocol):
    """HTTP/1.1 connection with timeouts for receiving headers and for sending to a client that does not read."""

    limits = Limits()
    table = ConnectionTable(limits)
    header_timer: asyncio.TimerHandle | None = None
    over_capacity = False
    send_timer: asyncio.TimerHandle | None = None
    network = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = LimitedConnection(self.limits)
        self.idle_start = time.monotonic()
        self.network = client_network(self.client[0]) if self.client else ""
        self.over_capacity = not self.table.add(self, self.network)
        if len(self.connections) > self.limits.max_connections + MAX_CONNECTIONS_OVER_CAPACITY:
            transport.abort()
        self._start_header_timer()

    @property
    def waiting_since(self) -> float | None:
        return self.idle_start if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) else None

    def close_idle(self) -> None:
        self.transport.close()

    def on_response_complete(self) -> None:
        self.idle_start = time.monotonic()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        # Status 503 is sent when the request arrives. If sent earlier, it would be lost when the connection closes.
        if self.over_capacity and not data.startswith(b"GET /health "):
            self.transport.write(SERVICE_UNAVAILABLE_RESPONSE)
            self.transport.close()
            return
        was_idle = self.conn.their_state is h11.IDLE
        super().data_received(data)
        if was_idle and self.conn.their_state is h11.SEND_BODY:
            self.idle_start = time.monotonic()
        if self.conn.their_state is not h11.IDLE:
            _cancel_timers(self.header_timer)
            self.header_timer = None
        elif self.header_timer is None:
            self._start_header_timer()

    def _start_header_timer(self) -> None:
        self.header_timer = self.loop.call_later(self.limits.header_timeout, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel_timers(self.header_timer, self.send_timer)
        self.table.discard(self, self.network)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self.send_timer = self.loop.call_later(self.limits.send_timeout, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        _cancel_timers(self.send_timer)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Respond to malformed HTTP and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = h11.Response(status_code=400, headers=[*ERROR_HEADERS.items()], reason=b"Bad Request")
            for event in (response, h11.Data(data=msg.encode("ascii")), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _cancel_timers(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()


class Server(uvicorn.Server):
    """uvicorn server that exits with code 0 when it is stopped by a signal.

    The first SIGINT or SIGTERM shuts the server down when the requests in progress have finished, or after
    `shutdown_timeout` seconds. The requests that remain then end with an error. The second signal exits at once.
    """

    has_canceled_requests = False
    """Whether requests were not finished within `shutdown_timeout`."""

    def __init__(
        self,
        app: FastAPI,
        limits: Limits,
        on_ready: Callable[[], object] | None = None,
        *,
        ssl_context: ssl.SSLContext | None = None,
        forwarded_allow_ips: str | None = None,
        on_reload: Callable[[], object] | None = None,
    ) -> None:
        """`forwarded_allow_ips`: addresses of proxies whose X-Forwarded-For header is the address of the client.

        `on_reload` is called on the event loop for each SIGHUP.
        """
        protocol = type("LimitedProtocol", (_TimeoutProtocol,), {"limits": limits, "table": ConnectionTable(limits)})
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            log_level="critical",
            access_log=False,  # it would log API keys in URLs
            server_header=False,
            backlog=ACCEPT_BATCH_SIZE,
            proxy_headers=forwarded_allow_ips is not None,
            forwarded_allow_ips=forwarded_allow_ips,
            timeout_keep_alive=limits.keep_alive_timeout,
            timeout_graceful_shutdown=math.ceil(limits.shutdown_timeout),
        )
        super().__init__(config)
        self.limits, self.on_ready, self.ssl_context, self.on_reload = limits, on_ready, ssl_context, on_reload

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        if self.ssl_context is not None:
            self.config.ssl = self.ssl_context
            # uvicorn has no option for the time that a client has for the handshake, which is 60 s in asyncio.
            create_server = partial(loop.create_server, ssl_handshake_timeout=self.limits.header_timeout)
            loop.create_server = create_server  # type: ignore[method-assign]
        if self.on_reload is not None and hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self.on_reload)
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(SOCKET_BACKLOG)
        if self.on_ready is not None and self.started:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        tasks = list(self.server_state.tasks)
        await super().shutdown(sockets)
        if tasks and not self.force_exit:
            await asyncio.wait(tasks, timeout=FINAL_ERROR_TIMEOUT)
        self.has_canceled_requests = any(task.cancelling() for task in tasks)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Unlike uvicorn's own handler, this does not record the signal to raise it again after the shutdown.
        self.force_exit = self.should_exit
        self.should_exit = True


def fit_to_file_limit(limits: Limits) -> Limits:
    """Raise the limit of open files of this process, or return limits with fewer connections if that is not enough."""
    if sys.platform == "win32":
        return limits
    import resource

    num_files = limits.max_connections + MAX_CONNECTIONS_OVER_CAPACITY + NUM_OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        soft = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        max_connections = max(soft - MAX_CONNECTIONS_OVER_CAPACITY - NUM_OTHER_FILES, soft // 4)
        return replace(limits, max_connections=min(limits.max_connections, max_connections))
    return limits


def run_server(
    app: FastAPI,
    sock: socket.socket,
    limits: Limits,
    on_ready: Callable[[], object] | None = None,
    *,
    ssl_context: ssl.SSLContext | None = None,
    forwarded_allow_ips: str | None = None,
    on_reload: Callable[[], object] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready` is called once the server accepts requests."""
    server = Server(
        app,
        fit_to_file_limit(limits),
        on_ready,
        ssl_context=ssl_context,
        forwarded_allow_ips=forwarded_allow_ips,
        on_reload=on_reload,
    )
    gc.collect()
    gc.freeze()  # exclude existing objects from garbage collection, which would pause all requests
    server.run(sockets=[sock])
    if server.force_exit or server.has_canceled_requests:  # do not wait for running threads
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)
