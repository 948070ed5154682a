"""Who may come in, with what, and what every answer carries: the first that a request meets."""

import asyncio
import hmac
import ipaddress
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cutaway.serve.errors import APIError
from cutaway.serve.json_body import validate_json_body
from cutaway.serve.limits import Limits


class EventLoopThrottle:
    """Work of a millisecond, done for hundreds who came at once, would keep everybody else waiting for its sum."""

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Returns when it is the caller's turn: one in each round of the event loop."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiters.append(turn)
        if len(self._waiters) == 1:
            loop.call_soon(self._release_next, loop)
        await turn

    def _release_next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiters and self._waiters[0].done():  # whoever left the line
            self._waiters.popleft()
        if self._waiters:
            self._waiters.popleft().set_result(None)
        if self._waiters:
            loop.call_soon(self._release_next, loop)


LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
SINGLETON_HEADERS = (
    b"host",
    b"content-length",
    b"content-type",
    b"transfer-encoding",
    b"authorization",
    b"origin",
    b"cookie",
)
"""Headers of which two would leave open which one counts."""
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
"""On every answer."""
ResponseCallback = Callable[[str, int, float], object]
"""Told of each answer: its route, its status, and the seconds it took."""
TIMEOUT_SLACK_SECONDS = 10.0
"""Seconds that a route has, after a request's time, to say that it is over."""
log = logging.getLogger("cutaway.serve")


@dataclass(frozen=True)
class AccessPolicy:
    """Under which names this server may be called, and the key that opens it."""

    allowed_hosts: frozenset[str] = frozenset(LOOPBACK_HOSTS)
    """Names in a Host header, without ports. Any other is a page that had its name point here (DNS rebinding)."""
    allow_any_ip_address: bool = False
    """Whether IP addresses are names too: no page can make its name one. For a bind to all addresses."""
    api_key: str | None = field(default=None, repr=False)
    navigable_paths: frozenset[str] = frozenset({"/"})
    """Paths to which links on other sites may lead."""
    session_token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """What a browser that gave the key is known by, until the server ends."""

    def allows_host(self, host: str) -> bool:
        name = _parse_host_header(host)
        return name in self.allowed_hosts or (self.allow_any_ip_address and is_ip_address(name))

    def accepts_key(self, key: str | None) -> bool:
        """Whether this is the key, in a time that tells nothing about it."""
        return self.api_key is None or (key is not None and _constant_time_equal(key, self.api_key))


def _constant_time_equal(actual: str, expected: str) -> bool:
    return hmac.compare_digest(actual.encode("utf-8", "surrogateescape"), expected.encode("utf-8", "surrogateescape"))


def _parse_host_header(host: str) -> str:
    """The name in a Host header; empty if it is none."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018  # raises for what is no port
    except ValueError:
        return ""
    plain = parts.netloc == host and "@" not in host and not parts.path and host.isascii()
    return (parts.hostname or "").rstrip(".") if plain else ""


def is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class ReplayableReceive:
    """A request's body as it comes, and whether some of it is still to come."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        names = {name for name, _ in scope["headers"]}
        self.receive = receive
        self.has_more_body = bool(names & {b"content-length", b"transfer-encoding"}) and b"expect" not in names
        self.buffered_body: bytes | None = None
        """What was read already, and is given once more."""

    async def __call__(self) -> Message:
        if self.buffered_body is not None:
            body, self.buffered_body = self.buffered_body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self.receive()
        self.has_more_body = message["type"] == "http.request" and message.get("more_body", False)
        return message


class SecurityMiddleware:
    """The middleware: what is refused here reaches no route."""

    def __init__(
        self, app: ASGIApp, access_policy: AccessPolicy, limits: Limits, on_response: ResponseCallback | None = None
    ) -> None:
        self.app, self.access_policy, self.limits, self.on_response = app, access_policy, limits, on_response
        self.num_active_requests, self.throttle = 0, EventLoopThrottle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self.handle_request(scope, receive, send)
        else:  # no route here speaks WebSocket
            await send({"type": "websocket.close", "code": 1008, "reason": ""})

    async def handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, status, incoming = False, 500, ReplayableReceive(scope, receive)
        arrived = time.monotonic()

        async def dressed(message: Message) -> None:
            nonlocal begun, status
            if message["type"] == "http.response.start":
                begun, status = True, message["status"]
                message = {**message, "headers": _add_security_headers(message.get("headers", []))}
            await send(message)

        self.num_active_requests += 1
        try:
            if self.num_active_requests > self.limits.max_concurrent_requests:
                wait = {"retry-after": str(self.limits.retry_after_seconds)}
                raise APIError(429, "too many requests at once; try again later", code="overloaded", headers=wait)
            headers = _validate_headers(scope, self.limits)
            self.check_origin(scope, headers)
            entered = self.authenticate(scope, headers)
            if entered is not None:
                await _send_response(dressed, 303, b"", entered)
                return
            incoming.buffered_body = await self.read_body(headers, incoming)
            if incoming.buffered_body:
                await self.throttle.acquire()
                validate_json_body(incoming.buffered_body, self.limits)
            async with asyncio.timeout(self.limits.request_timeout + TIMEOUT_SLACK_SECONDS):
                await self.app(scope, incoming, dressed)
        except APIError as refused:
            if begun:
                raise
            await self.send_error(refused, incoming, dressed)
        except TimeoutError:
            if not begun:
                late = APIError(
                    408, f"no answer within {self.limits.request_timeout:g} seconds; ask for less", code="timeout"
                )
                await self.send_error(late, incoming, dressed)
        except Exception:
            log.exception("a request to %s failed", scope["path"][:80].encode("ascii", "backslashreplace").decode())
            if not begun:
                await self.send_error(APIError(500, "the server failed to answer; its log says why"), incoming, dressed)
        finally:
            self.num_active_requests -= 1
            if self.on_response is not None:
                self.on_response(getattr(scope.get("route"), "path", "none"), status, time.monotonic() - arrived)

    def check_origin(self, scope: Scope, headers: dict[bytes, str]) -> None:
        """Whether the request is meant for this server, and made by its own page or by no page."""
        host = headers.get(b"host", "")
        if not self.access_policy.allows_host(host):
            raise APIError(
                421, "this server is not called that; use the address it printed when it started", code="unknown_host"
            )
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            raise APIError(403, "requests from other sites are refused", code="cross_origin")
        if headers.get(b"sec-fetch-site", "none") not in ("same-origin", "none"):
            link = headers.get(b"sec-fetch-mode") == "navigate" and headers.get(b"sec-fetch-dest") == "document"
            if not (link and scope["method"] == "GET" and scope["path"] in self.access_policy.navigable_paths):
                raise APIError(403, "requests from other sites are refused", code="cross_origin")

    def authenticate(self, scope: Scope, headers: dict[bytes, str]) -> dict[str, str] | None:
        """Refuses who has no key. One who brings it in the page's address gets a cookie, and the address without it."""
        door = self.access_policy
        name = f"cutaway-{(scope.get('server') or ('', 0))[1]}"  # cookies know no ports
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for key, value in query if key == "api_key"]
        if given and scope["method"] == "GET" and scope["path"] in door.navigable_paths:
            if not door.accepts_key(given[0]):
                raise APIError(401, "this is not the key; look where the server was started", code="invalid_api_key")
            rest = urlencode([(key, value) for key, value in query if key != "api_key"])
            place = {"location": scope["path"] + (f"?{rest}" if rest else "")}
            kept = f"{name}={door.session_token}; HttpOnly; SameSite=Strict; Path=/"
            return place if door.api_key is None else {**place, "set-cookie": kept}
        if door.api_key is None:
            return None
        kind, _, bearer = headers.get(b"authorization", "").partition(" ")
        if kind.lower() == "bearer" and door.accepts_key(bearer.strip()):
            return None
        if _constant_time_equal(_get_cookie(headers.get(b"cookie", ""), name), door.session_token):
            return None
        message = "this server wants its key; send it as 'Authorization: Bearer KEY'"
        raise APIError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    async def read_body(self, headers: dict[bytes, str], incoming: ReplayableReceive) -> bytes | None:
        """The body, if it is announced and no larger than it may be; it is never held beyond that."""
        length = headers.get(b"content-length")
        if length is None and b"transfer-encoding" not in headers:
            return None
        if length is not None and not (length.isascii() and length.isdigit()):
            raise APIError(400, "Content-Length is not a whole number")
        too_large = APIError(
            413, f"the body is larger than {self.limits.max_body_bytes} bytes; ask for less", code="too_large"
        )
        if length is not None and (len(length) > 18 or int(length) > self.limits.max_body_bytes):
            raise too_large
        if length is not None and int(length) == 0:
            return b""
        if headers.get(b"content-encoding", "identity") != "identity":
            raise APIError(415, "the body is compressed; send it as it is")
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise APIError(415, "the body must be JSON; send it with 'Content-Type: application/json'")
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_timeout):
                while True:
                    message = await incoming()
                    if message["type"] == "http.disconnect":
                        raise APIError(400, "the connection ended within the body")
                    body += message.get("body", b"")
                    if len(body) > self.limits.max_body_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            late = f"the body did not arrive within {self.limits.body_timeout:g} seconds"
            raise APIError(408, late, code="timeout") from None

    async def send_error(self, error: APIError, incoming: ReplayableReceive, send: Send) -> None:
        """Say so. What is still being sent is dropped for a moment: a connection cut at once loses the answer too."""
        headers = {"content-type": "application/json", **error.headers}
        if not incoming.has_more_body:
            await _send_response(send, error.status_code, error.to_json(), headers)
            return
        await _send_response(
            send, error.status_code, error.to_json(), {**headers, "connection": "close"}, more_body=True
        )
        try:
            async with asyncio.timeout(self.limits.lingering_timeout):
                while incoming.has_more_body:
                    await incoming()
        except TimeoutError:
            log.debug("a refused body went on")
        await send({"type": "http.response.body", "body": b""})


def _validate_headers(scope: Scope, limits: Limits) -> dict[bytes, str]:
    """The headers by name, if there are not too many and none is doubtful."""
    pairs = scope["headers"]
    if (
        len(pairs) > limits.max_headers
        or sum(len(name) + len(value) for name, value in pairs) > limits.max_header_bytes
    ):
        raise APIError(431, "the request has too many headers, or too long ones; send fewer")
    if len(scope.get("raw_path", b"")) + len(scope["query_string"]) > limits.max_url_bytes:
        raise APIError(414, f"the address is longer than {limits.max_url_bytes} bytes; shorten it")
    found: dict[bytes, str] = {}
    for name, value in pairs:
        if name in found and name in SINGLETON_HEADERS:
            raise APIError(400, f"the header {name.decode('latin-1')} is there twice; send it once")
        found[name] = value.decode("latin-1")
    if b"content-length" in found and b"transfer-encoding" in found:
        raise APIError(400, "the body's length is given in two ways; give Content-Length or Transfer-Encoding")
    if "\0" in scope["path"]:
        raise APIError(400, "the address holds a null byte; leave it out")
    return found


def _get_cookie(header: str, name: str) -> str:
    """A cookie's value; empty if it is not there."""
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _add_security_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """An answer's headers with the strict ones, and kept by nobody unless it says otherwise."""
    there = {name.lower() for name, _ in headers}
    more = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items() if name.encode() not in there]
    return [*headers, *more, *([] if b"cache-control" in there else [(b"cache-control", b"no-store")])]


async def _send_response(
    send: Send, status: int, body: bytes, headers: dict[str, str], *, more_body: bool = False
) -> None:
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    pairs.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})
