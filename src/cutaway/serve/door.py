"""Who may come in, with what, and what every answer carries: the first that a request meets."""

import asyncio
import hmac
import ipaddress
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cutaway.serve.json_body import check_json
from cutaway.serve.limits import Limits
from cutaway.serve.refusal import Refused
from cutaway.serve.turns import Turns

LOOPBACK = ("localhost", "127.0.0.1", "::1")
ONCE = (b"host", b"content-length", b"content-type", b"transfer-encoding", b"authorization", b"origin", b"cookie")
"""Headers of which two would leave open which one counts."""
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
STRICT = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
"""On every answer."""
Watch = Callable[[str, int, float], object]
"""Told of each answer: its route, its status, and the seconds it took."""
SLACK = 10.0
"""Seconds that a route has, after a request's time, to say that it is over."""
log = logging.getLogger("cutaway.serve")


@dataclass(frozen=True)
class Door:
    """Under which names this server may be called, and the key that opens it."""

    hosts: frozenset[str] = frozenset(LOOPBACK)
    """Names in a Host header, without ports. Any other is a page that had its name point here (DNS rebinding)."""
    any_address: bool = False
    """Whether IP addresses are names too: no page can make its name one. For a bind to all addresses."""
    key: str | None = field(default=None, repr=False)
    pages: frozenset[str] = frozenset({"/"})
    """Paths to which links on other sites may lead."""
    cookie: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """What a browser that gave the key is known by, until the server ends."""

    def knows(self, host: str) -> bool:
        name = host_name(host)
        return name in self.hosts or (self.any_address and is_address(name))

    def opens(self, given: str | None) -> bool:
        """Whether this is the key, in a time that tells nothing about it."""
        return self.key is None or (given is not None and same(given, self.key))


def same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode("utf-8", "surrogateescape"))


def host_name(host: str) -> str:
    """The name in a Host header; empty if it is none."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018  # raises for what is no port
    except ValueError:
        return ""
    plain = parts.netloc == host and "@" not in host and not parts.path and host.isascii()
    return (parts.hostname or "").rstrip(".") if plain else ""


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Incoming:
    """A request's body as it comes, and whether some of it is still to come."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        names = {name for name, _ in scope["headers"]}
        self.receive = receive
        self.open = bool(names & {b"content-length", b"transfer-encoding"}) and b"expect" not in names
        self.again: bytes | None = None
        """What was read already, and is given once more."""

    async def __call__(self) -> Message:
        if self.again is not None:
            body, self.again = self.again, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self.receive()
        self.open = message["type"] == "http.request" and message.get("more_body", False)
        return message


class Doorway:
    """The middleware: what is refused here reaches no route."""

    def __init__(self, app: ASGIApp, door: Door, limits: Limits, watch: Watch | None = None) -> None:
        self.app, self.door, self.limits, self.watch = app, door, limits, watch
        self.inside, self.turns = 0, Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self.visit(scope, receive, send)
        else:  # no route here speaks WebSocket
            await send({"type": "websocket.close", "code": 1008, "reason": ""})

    async def visit(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, status, incoming = False, 500, Incoming(scope, receive)
        arrived = time.monotonic()

        async def dressed(message: Message) -> None:
            nonlocal begun, status
            if message["type"] == "http.response.start":
                begun, status = True, message["status"]
                message = {**message, "headers": dress(message.get("headers", []))}
            await send(message)

        self.inside += 1
        try:
            if self.inside > self.limits.requests:
                wait = {"retry-after": str(self.limits.retry_after)}
                raise Refused(429, "too many requests at once; try again later", code="overloaded", headers=wait)
            headers = check_headers(scope, self.limits)
            self.check_sender(scope, headers)
            entered = self.entered(scope, headers)
            if entered is not None:
                await answer(dressed, 303, b"", entered)
                return
            incoming.again = await self.read_body(headers, incoming)
            if incoming.again:
                await self.turns.mine()
                check_json(incoming.again, self.limits)
            async with asyncio.timeout(self.limits.seconds + SLACK):
                await self.app(scope, incoming, dressed)
        except Refused as refused:
            if begun:
                raise
            await self.refuse(refused, incoming, dressed)
        except TimeoutError:
            if not begun:
                late = Refused(408, f"no answer within {self.limits.seconds:g} seconds; ask for less", code="timeout")
                await self.refuse(late, incoming, dressed)
        except Exception:
            log.exception("a request to %s failed", scope["path"][:80].encode("ascii", "backslashreplace").decode())
            if not begun:
                await self.refuse(Refused(500, "the server failed to answer; its log says why"), incoming, dressed)
        finally:
            self.inside -= 1
            if self.watch is not None:
                self.watch(getattr(scope.get("route"), "path", "none"), status, time.monotonic() - arrived)

    def check_sender(self, scope: Scope, headers: dict[bytes, str]) -> None:
        """Whether the request is meant for this server, and made by its own page or by no page."""
        host = headers.get(b"host", "")
        if not self.door.knows(host):
            raise Refused(
                421, "this server is not called that; use the address it printed when it started", code="unknown_host"
            )
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            raise Refused(403, "requests from other sites are refused", code="cross_origin")
        if headers.get(b"sec-fetch-site", "none") not in ("same-origin", "none"):
            link = headers.get(b"sec-fetch-mode") == "navigate" and headers.get(b"sec-fetch-dest") == "document"
            if not (link and scope["method"] == "GET" and scope["path"] in self.door.pages):
                raise Refused(403, "requests from other sites are refused", code="cross_origin")

    def entered(self, scope: Scope, headers: dict[bytes, str]) -> dict[str, str] | None:
        """Refuses who has no key. One who brings it in the page's address gets a cookie, and the address without it."""
        door = self.door
        name = f"cutaway-{(scope.get('server') or ('', 0))[1]}"  # cookies know no ports
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for key, value in query if key == "key"]
        if given and scope["method"] == "GET" and scope["path"] in door.pages:
            if not door.opens(given[0]):
                raise Refused(401, "this is not the key; look where the server was started", code="invalid_api_key")
            rest = urlencode([(key, value) for key, value in query if key != "key"])
            place = {"location": scope["path"] + (f"?{rest}" if rest else "")}
            kept = f"{name}={door.cookie}; HttpOnly; SameSite=Strict; Path=/"
            return place if door.key is None else {**place, "set-cookie": kept}
        if door.key is None:
            return None
        kind, _, bearer = headers.get(b"authorization", "").partition(" ")
        if kind.lower() == "bearer" and door.opens(bearer.strip()):
            return None
        if same(cookie(headers.get(b"cookie", ""), name), door.cookie):
            return None
        message = "this server wants its key; send it as 'Authorization: Bearer KEY'"
        raise Refused(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    async def read_body(self, headers: dict[bytes, str], receive: Incoming) -> bytes | None:
        """The body, if it is announced and no larger than it may be; it is never held beyond that."""
        length = headers.get(b"content-length")
        if length is None and b"transfer-encoding" not in headers:
            return None
        if length is not None and not (length.isascii() and length.isdigit()):
            raise Refused(400, "Content-Length is not a whole number")
        too_large = Refused(413, f"the body is larger than {self.limits.body} bytes; ask for less", code="too_large")
        if length is not None and (len(length) > 18 or int(length) > self.limits.body):
            raise too_large
        if length is not None and int(length) == 0:
            return b""
        if headers.get(b"content-encoding", "identity") != "identity":
            raise Refused(415, "the body is compressed; send it as it is")
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, "the body must be JSON; send it with 'Content-Type: application/json'")
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "the connection ended within the body")
                    body += message.get("body", b"")
                    if len(body) > self.limits.body:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            late = f"the body did not arrive within {self.limits.body_seconds:g} seconds"
            raise Refused(408, late, code="timeout") from None

    async def refuse(self, refused: Refused, incoming: Incoming, send: Send) -> None:
        """Say so. What is still being sent is dropped for a moment: a connection cut at once loses the answer too."""
        headers = {"content-type": "application/json", **refused.headers}
        if not incoming.open:
            await answer(send, refused.status, refused.encoded, headers)
            return
        await answer(send, refused.status, refused.encoded, {**headers, "connection": "close"}, last=False)
        try:
            async with asyncio.timeout(self.limits.linger_seconds):
                while incoming.open:
                    await incoming()
        except TimeoutError:
            log.debug("a refused body went on")
        await send({"type": "http.response.body", "body": b""})


def check_headers(scope: Scope, limits: Limits) -> dict[bytes, str]:
    """The headers by name, if there are not too many and none is doubtful."""
    pairs = scope["headers"]
    if len(pairs) > limits.headers or sum(len(name) + len(value) for name, value in pairs) > limits.header_bytes:
        raise Refused(431, "the request has too many headers, or too long ones; send fewer")
    if len(scope.get("raw_path", b"")) + len(scope["query_string"]) > limits.target:
        raise Refused(414, f"the address is longer than {limits.target} bytes; shorten it")
    found: dict[bytes, str] = {}
    for name, value in pairs:
        if name in found and name in ONCE:
            raise Refused(400, f"the header {name.decode('latin-1')} is there twice; send it once")
        found[name] = value.decode("latin-1")
    if b"content-length" in found and b"transfer-encoding" in found:
        raise Refused(400, "the body's length is given in two ways; give Content-Length or Transfer-Encoding")
    if "\0" in scope["path"]:
        raise Refused(400, "the address holds a null byte; leave it out")
    return found


def cookie(header: str, name: str) -> str:
    """A cookie's value; empty if it is not there."""
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


def dress(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """An answer's headers with the strict ones, and kept by nobody unless it says otherwise."""
    there = {name.lower() for name, _ in headers}
    more = [(name.encode(), value.encode()) for name, value in STRICT.items() if name.encode() not in there]
    return [*headers, *more, *([] if b"cache-control" in there else [(b"cache-control", b"no-store")])]


async def answer(send: Send, status: int, body: bytes, headers: dict[str, str], *, last: bool = True) -> None:
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    pairs.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": not last})
