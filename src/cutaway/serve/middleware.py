"""ASGI middleware: host and origin checks, authentication, header and body limits, security headers."""

import asyncio
import hmac
import ipaddress
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlencode, urlsplit

from starlette.datastructures import MutableHeaders, QueryParams
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cutaway.serve.api_keys import ApiKeys, KeyUsage
from cutaway.serve.errors import APIError, overload_error, shutdown_error
from cutaway.serve.json_body import JSON_VALUE, JSONBodyParser
from cutaway.serve.limits import Limits
from cutaway.serve.request_context import RequestContext, choose_request_id, set_current_request

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
SINGLETON_HEADERS = frozenset(b"host content-length content-type transfer-encoding authorization origin cookie".split())
"""Headers that must not be repeated, because it would be ambiguous which value counts."""
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
"""Headers added to every response."""
ResponseCallback = Callable[[str, int, float], object]
"""Called after each response with the route, the status code and the duration in seconds."""
CROSS_ORIGIN_MESSAGE = "cross-origin requests are not allowed; send the request from this server's own page"
TIMEOUT_SLACK_SECONDS = 10.0
"""Time in seconds that a route has after `request_timeout` to send its own timeout error."""
log = logging.getLogger("cutaway.serve")


@dataclass(frozen=True)
class AccessPolicy:
    """Allowed host names and API keys of a server."""

    allowed_hosts: frozenset[str] = frozenset(LOOPBACK_HOSTS)
    """Names accepted in the Host header, without ports. Other names are rejected, to prevent DNS rebinding attacks."""
    allow_any_ip_address: bool = False
    """Whether to accept any IP address in the Host header, for a server bound to all addresses.

    This is safe, because DNS rebinding requires a name.
    """
    api_key: str | None = field(default=None, repr=False)
    """API key without limits."""
    api_keys: ApiKeys | None = field(default=None, repr=False)
    """API keys of several clients, with limits."""
    public_paths: frozenset[str] = frozenset()
    """Paths that need no API key, with the method GET."""
    navigable_paths: frozenset[str] = frozenset({"/"})
    """Paths to which links on other sites may navigate."""
    session_token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """Cookie value of an authenticated browser, valid until the server stops."""

    def allows_host(self, host: str) -> bool:
        """Return whether a Host header names this server.

        Starlette's TrustedHostMiddleware is not used, because it cannot allow every IP address together with a list of
        names, and because it responds in plain text with status 400 instead of an error object with status 421.
        """
        name = _parse_host_header(host)
        return name in self.allowed_hosts or (self.allow_any_ip_address and is_ip_address(name))

    @property
    def requires_key(self) -> bool:
        return self.api_key is not None or self.api_keys is not None

    def accepts_key(self, key: str) -> bool:
        """Whether `key` equals the API key without limits, compared in constant time. True if no key is required."""
        return not self.requires_key or (self.api_key is not None and _constant_time_equal(key, self.api_key))

    def find_key(self, key: str) -> KeyUsage | None:
        """The use of `key` if it is one of the API keys with limits."""
        return None if self.api_keys is None else self.api_keys.find(key)


def _constant_time_equal(actual: str, expected: str) -> bool:
    return hmac.compare_digest(actual.encode("utf-8", "surrogateescape"), expected.encode())


def _parse_host_header(host: str) -> str:
    """Return the host name of a Host header without the port, or an empty string if the header is invalid."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018  # raises ValueError for an invalid port
    except ValueError:
        return ""
    is_valid = parts.netloc == host and "@" not in host and not parts.path and host.isascii()
    return (parts.hostname or "").rstrip(".") if is_valid else ""


def is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _ReplayableReceive:
    """ASGI receive callable that first returns `buffered_body` if the middleware has already read the body."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        names = {name for name, _ in scope["headers"]}
        self.receive = receive
        self.has_more_body = bool(names & {b"content-length", b"transfer-encoding"}) and b"expect" not in names
        self.buffered_body: bytes | None = None
        """Body that the middleware has read and the application has not. None if there is none."""

    async def __call__(self) -> Message:
        if self.buffered_body is not None:
            body, self.buffered_body = self.buffered_body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self.receive()
        self.has_more_body = message["type"] == "http.request" and message.get("more_body", False)
        return message


class SecurityMiddleware:
    """ASGI middleware that rejects invalid, unauthorized and oversized requests before they reach a route."""

    def __init__(
        self, app: ASGIApp, access_policy: AccessPolicy, limits: Limits, on_response: ResponseCallback | None = None
    ) -> None:
        self.app, self.access_policy, self.limits, self.on_response = app, access_policy, limits, on_response
        self.num_active_requests, self.body_parser = 0, JSONBodyParser(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self.handle_request(scope, receive, send)
        else:  # there are no WebSocket routes
            await send({"type": "websocket.close", "code": 1008, "reason": ""})

    async def handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        response_started, status, incoming = False, 500, _ReplayableReceive(scope, receive)
        context = _build_context(scope)
        set_current_request(context)
        is_counted = False

        async def send_with_headers(message: Message) -> None:
            nonlocal response_started, status
            if message["type"] == "http.response.start":
                response_started, status = True, message["status"]
                message = {**message, "headers": _add_response_headers(message.get("headers", []), context)}
            await send(message)

        is_active = False
        try:
            headers = _validate_headers(scope, self.limits)
            self.check_origin(scope, headers)
            if (redirect := self.authenticate(scope, headers, context)) is not None:
                await redirect(scope, incoming, send_with_headers)
                return
            if context.usage is not None and scope["method"] == "POST":
                context.usage.start_request()
                is_counted = True
            incoming.buffered_body = await self.read_body(headers, incoming)
            if incoming.buffered_body:
                if self.num_active_requests >= self.limits.max_concurrent_requests:
                    raise overload_error("too many requests at once; try again later", "overloaded", self.limits)
                is_active = True
                self.num_active_requests += 1
                scope[JSON_VALUE] = await self.body_parser.parse(incoming.buffered_body)
            async with asyncio.timeout(self.limits.request_timeout + TIMEOUT_SLACK_SECONDS):
                await self.app(scope, incoming, send_with_headers)
        except APIError as error:
            context.error_code = error.code
            if response_started:
                raise
            await self.send_error(error, incoming, send_with_headers)
        except TimeoutError:
            if not response_started:
                message = f"the request took longer than {self.limits.request_timeout:g} seconds; send a smaller one"
                await self.send_error(APIError(408, message, code="timeout"), incoming, send_with_headers)
        except Exception:
            path = scope["path"][:80].encode("ascii", "backslashreplace").decode()
            log.exception("request %s to %s failed", context.request_id, path)
            if not response_started:
                internal_error = APIError(500, "internal server error; see the server log")
                await self.send_error(internal_error, incoming, send_with_headers)
        except asyncio.CancelledError:  # the server shuts down, and the time for requests in progress is over
            if not response_started:
                await self.send_error(shutdown_error(), incoming, send_with_headers)
            raise
        finally:
            self.num_active_requests -= is_active
            if is_counted and context.usage is not None:
                context.usage.end_request()
            if self.on_response is not None:
                route = getattr(scope.get("route"), "path", "none")
                self.on_response(route, status, time.monotonic() - context.start_time)

    def check_origin(self, scope: Scope, headers: dict[bytes, str]) -> None:
        """Raise if the Host header is not allowed, or if a web page of another origin sent the request."""
        host = headers.get(b"host", "")
        if not self.access_policy.allows_host(host):
            message = "the Host header is not a name of this server; use the URL printed at startup"
            raise APIError(421, message, code="unknown_host")
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            raise APIError(403, CROSS_ORIGIN_MESSAGE, code="cross_origin")
        if headers.get(b"sec-fetch-site", "none") not in ("same-origin", "none"):
            fetch = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest"))
            if fetch != ("navigate", "document") or not self._is_page(scope):
                raise APIError(403, CROSS_ORIGIN_MESSAGE, code="cross_origin")

    def _is_page(self, scope: Scope) -> bool:
        return scope["method"] == "GET" and scope["path"] in self.access_policy.navigable_paths

    def authenticate(self, scope: Scope, headers: dict[bytes, str], context: RequestContext) -> Response | None:
        """Raise if the server has API keys and the request has neither one of them nor a session cookie.

        If the key is in the query string of a page, return a redirect that sets a session cookie and removes the key
        from the URL.
        """
        policy = self.access_policy
        # The cookie name contains the port, because a browser shares cookies between the ports of a host.
        cookie_name = f"cutaway-{(scope.get('server') or ('', 0))[1]}"
        query = QueryParams(scope["query_string"]).multi_items()
        query_keys = [value for key, value in query if key == "api_key"]
        if query_keys and self._is_page(scope):
            if not policy.accepts_key(query_keys[0]):
                raise APIError(401, "the API key is wrong; use the URL printed at startup", code="invalid_api_key")
            remaining_query = urlencode([(key, value) for key, value in query if key != "api_key"])
            redirect = Response(status_code=303)
            redirect.headers["location"] = scope["path"] + (f"?{remaining_query}" if remaining_query else "")
            if policy.api_key is not None:
                redirect.set_cookie(cookie_name, policy.session_token, httponly=True, samesite="strict")
            return redirect
        if not policy.requires_key or (scope["method"] == "GET" and scope["path"] in policy.public_paths):
            return None
        scheme, _, bearer = headers.get(b"authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            context.usage = policy.find_key(bearer.strip())
            if context.usage is not None or policy.accepts_key(bearer.strip()):
                return None
        if _constant_time_equal(cookie_parser(headers.get(b"cookie", "")).get(cookie_name, ""), policy.session_token):
            return None
        message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
        raise APIError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    async def read_body(self, headers: dict[bytes, str], incoming: _ReplayableReceive) -> bytes | None:
        """Return the body, or None if the request has none. Raise as soon as the body exceeds `max_body_bytes`."""
        length = headers.get(b"content-length")
        if length is None and b"transfer-encoding" not in headers:
            return None
        if length is not None and not (length.isascii() and length.isdigit()):
            raise APIError(400, "Content-Length is not an integer; send the number of bytes of the body")
        max_bytes = self.limits.max_body_bytes
        too_large = APIError(413, f"the body is larger than {max_bytes} bytes; send a smaller body", code="too_large")
        if length is not None and (len(length) > 18 or int(length) > max_bytes):
            raise too_large
        if length is not None and int(length) == 0:
            return b""
        if headers.get(b"content-encoding", "identity") != "identity":
            raise APIError(415, "the body is compressed, which is not supported; send it uncompressed")
        content_type = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise APIError(415, "the body must be JSON; send it with 'Content-Type: application/json'")
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_timeout):
                while True:
                    message = await incoming()
                    if message["type"] == "http.disconnect":
                        raise APIError(400, "the connection was closed before the body was complete")
                    body += message.get("body", b"")
                    if len(body) > max_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            message_text = f"the body did not arrive within {self.limits.body_timeout:g} seconds; send it faster"
            raise APIError(408, message_text, code="timeout") from None

    async def send_error(self, error: APIError, incoming: _ReplayableReceive, send: Send) -> None:
        """Send an error response.

        The rest of the body is received and discarded for `lingering_timeout` seconds. Closing the connection at once
        would reset it, and the client would lose the response.
        """
        response = error.to_response()
        lingering = incoming.has_more_body
        if lingering:
            response.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": lingering})
        if not lingering:
            return
        try:
            async with asyncio.timeout(self.limits.lingering_timeout):
                while incoming.has_more_body:
                    await incoming()
        except TimeoutError:
            log.debug("the rest of a rejected body was not received in time")
        await send({"type": "http.response.body", "body": b""})


def _validate_headers(scope: Scope, limits: Limits) -> dict[bytes, str]:
    """Return a dict from header name to value. Raise if headers or URL exceed the limits or are ambiguous."""
    pairs = scope["headers"]
    num_bytes = sum(len(name) + len(value) for name, value in pairs)
    if len(pairs) > limits.max_headers or num_bytes > limits.max_header_bytes:
        limit = f"{limits.max_headers} headers or {limits.max_header_bytes} bytes"
        raise APIError(431, f"the request headers exceed {limit}; send fewer")
    if len(scope.get("raw_path", b"")) + len(scope["query_string"]) > limits.max_url_bytes:
        raise APIError(414, f"the URL is longer than {limits.max_url_bytes} bytes; shorten it")
    headers: dict[bytes, str] = {}
    for name, value in pairs:
        if name in headers and name in SINGLETON_HEADERS:
            raise APIError(400, f"the header {name.decode('latin-1')} is duplicated; send it once")
        headers[name] = value.decode("latin-1")
    if b"content-length" in headers and b"transfer-encoding" in headers:
        raise APIError(400, "the request has Content-Length and Transfer-Encoding; send only one of them")
    if "\0" in scope["path"]:
        raise APIError(400, "the path has a null byte; remove it")
    return headers


def _build_context(scope: Scope) -> RequestContext:
    client_ids = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"]
    address = (scope.get("client") or ("unknown", 0))[0]
    request_id = choose_request_id(client_ids[0] if client_ids else None)
    return RequestContext(request_id, address, scope["method"], scope["path"])


def _add_response_headers(headers: list[tuple[bytes, bytes]], context: RequestContext) -> list[tuple[bytes, bytes]]:
    """Add the request id, the rate limits of the API key and the security headers.

    `Cache-Control: no-store` is added unless the response sets Cache-Control.
    """
    response_headers = MutableHeaders(raw=list(headers))
    rate_limits = {} if context.usage is None else context.usage.headers()
    defaults = SECURITY_HEADERS | {"cache-control": "no-store", "x-request-id": context.request_id} | rate_limits
    for name, value in defaults.items():
        response_headers.setdefault(name, value)
    return response_headers.raw
