"""Who may ask: the host and the origin of each request, a password, the bytes of a body, and what a browser may do."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

COOKIE = "cogvideox_session"

MAX_SESSIONS = 1000

FREE_TRIES, TRY_INTERVAL_S, MAX_ADDRESSES = 5, 1.0, 10_000
"""Wrong passwords of an address before it must wait, how long, and how many addresses are remembered."""

RECEIVE_TIMEOUT_S = 60.0
"""Seconds in which the next bytes of a body must arrive."""

MAX_JSON_BYTES = 2**20

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}

SCRIPTS = ("app.js", "api.js", "dom.js", "form.js", "videos.js", "compare.js")

PAGES = {"/": "index.html", **{f"/{name}": name for name in (*SCRIPTS, "style.css", "icon.svg")}}
"""Path -> file of the page."""

OPEN_PATHS = ("/health", "/login", *PAGES)
"""What is answered without the password: nothing that a job holds."""


class BodyError(Exception):
    """A body that is too large, or does not arrive. The connection is closed, since the rest may follow."""

    def __init__(self, status: int, code: str, message: str):
        super().__init__(message)
        self.status, self.code = status, code


class Guard:
    """An ASGI application before another one.

    Args:
        hosts: names under which the server is reached, beside addresses and this machine's names.
        password: None: everybody who reaches the server may use it.
        max_bytes: of an upload.
    """

    def __init__(self, app: Any, *, hosts: Collection[str], password: str | None, max_bytes: int):
        self.app, self.password, self.max_bytes = app, password, max_bytes
        self.hosts = {name.lower() for name in (*hosts, "localhost", socket.gethostname(), socket.getfqdn())}
        self._sessions: OrderedDict[str, None] = OrderedDict()
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()  # address -> wrong passwords, when the last

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)

        async def guarded_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refused(request)
        if answer is None and scope["path"] == "/login" and request.method == "POST":
            try:
                answer = await self._login(Request(scope, _limited(request.headers, receive, 4096)))
            except BodyError as e:
                answer = _error(e.status, e.code, str(e), {"connection": "close"})
        is_form = request.headers.get("content-type", "").startswith("multipart/")
        receive = _limited(request.headers, receive, self.max_bytes if is_form else MAX_JSON_BYTES)
        await (answer or self.app)(scope, receive, guarded_send)

    def _refused(self, request: Request) -> Response | None:
        """The answer to a request that is refused; None: it is not."""
        headers = request.headers
        host = headers.get("host", "")
        if not self._is_own(host):
            return _error(403, "wrong_host", f"this server is not {host[:100]!r}; use the address that it printed")
        origin = None if request.method in ("GET", "HEAD") else headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host.lower():
            return _error(403, "wrong_origin", f"a page of {origin[:100]!r} may not change anything here")
        is_open = self.password is None or request.scope["path"] in OPEN_PATHS
        if is_open or request.cookies.get(COOKIE) in self._sessions:
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            words = "a password is needed: the header Authorization: Bearer PASSWORD, or the page's form"
            return _error(401, "unauthorized", words, {"www-authenticate": "Bearer"})
        return self._checked(request, given.strip().encode("latin-1"))  # the bytes as they were sent

    def _is_own(self, host: str) -> bool:
        """Whether a Host header is an address, which no foreign name is resolved to, or a name of this server."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.hosts
        return True

    def _checked(self, request: Request, given: bytes) -> Response | None:
        """Compare a password; after `FREE_TRIES` wrong ones, an address has one try a second."""
        address = request.client.host if request.client else ""
        count, last = self._wrong.get(address, (0, 0.0))
        if count >= FREE_TRIES and (wait := last + TRY_INTERVAL_S - time.monotonic()) > 0:
            return _error(429, "too_many_tries", f"wrong passwords; try again in {wait:.1f} s", {"retry-after": "1"})
        assert self.password is not None
        if hmac.compare_digest(given, self.password.encode()):
            self._wrong.pop(address, None)
            return None
        self._wrong[address] = count + 1, time.monotonic()
        self._wrong.move_to_end(address)
        if len(self._wrong) > MAX_ADDRESSES:
            self._wrong.popitem(last=False)
        return _error(401, "unauthorized", "the password is wrong", {"www-authenticate": "Bearer"})

    async def _login(self, request: Request) -> Response:
        """Answer the page's form: {"password": TEXT} for a cookie."""
        try:
            given = (await request.json())["password"]
        except (ValueError, TypeError, KeyError, RecursionError, ClientDisconnect):
            given = None
        if not isinstance(given, str):
            return _error(422, "invalid_value", 'expected {"password": TEXT}')
        refused = None if self.password is None else self._checked(request, given.encode(errors="replace"))
        if refused is not None:
            return refused
        self._sessions[session := secrets.token_hex(32)] = None
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        secure = "; Secure" if request.scope.get("scheme") == "https" else ""
        cookie = f"{COOKIE}={session}; HttpOnly; SameSite=Strict; Path=/{secure}"
        return JSONResponse({}, headers={"set-cookie": cookie})


def _limited(headers: Headers, receive: Any, most: int) -> Any:
    """`receive`, which fails where a body is too large or does not arrive."""
    seen = 0
    too_large = BodyError(413, "too_large", f"the body is larger than {most} bytes")

    async def limited() -> Any:
        nonlocal seen
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length) > most:
            raise too_large
        if seen < 0:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), RECEIVE_TIMEOUT_S)
        except TimeoutError as e:
            raise BodyError(408, "too_slow", f"no bytes arrived for {RECEIVE_TIMEOUT_S:g} s") from e
        seen += len(message.get("body", b""))
        if seen > most:
            raise too_large
        if message["type"] != "http.request" or not message.get("more_body"):
            seen = -1  # the body is whole: what comes is the client's leaving
        return message

    return limited


def _error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(error_json(message, code), status, headers)


def error_json(message: str, code: str, param: str | None = None, **more: Any) -> dict[str, Any]:
    """The body of an answer that is an error."""
    kind = (
        "invalid_request_error"
        if code not in ("internal_error", "server_error", "starting", "failed")
        else "server_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **more}}
