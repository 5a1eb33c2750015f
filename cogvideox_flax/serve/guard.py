"""Who may ask: the host and the origin of each request, a password, the bytes of a body, and what a browser may do."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

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
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}

        async def guarded_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(each for each in more if each[0] not in names)]
            await send(message)

        refused = self._refused(scope, headers)
        if refused is None and scope["path"] == "/login" and scope["method"] == "POST":
            try:
                refused = await self._login(scope, self._limited(headers, receive, 4096))
            except BodyError as e:
                refused = e.status, e.code, str(e), {"connection": "close"}
        if refused is not None:
            await _answer(guarded_send, *refused)
        else:
            await self.app(scope, self._limited(headers, receive, self._most(headers)), guarded_send)

    def _most(self, headers: dict[str, str]) -> int:
        """The bytes that a body may have."""
        return self.max_bytes if headers.get("content-type", "").startswith("multipart/") else MAX_JSON_BYTES

    def _refused(self, scope: Any, headers: dict[str, str]) -> tuple[int, str, str, dict[str, str]] | None:
        """Why a request is refused: status, code, message, headers; None: it is not."""
        host = headers.get("host", "")
        if not self._is_own(host):
            return 403, "wrong_host", f"this server is not {host[:100]!r}; use the address that it printed", {}
        origin = None if scope["method"] in ("GET", "HEAD") else headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host.lower():
            return 403, "wrong_origin", f"a page of {origin[:100]!r} may not change anything here", {}
        if self.password is None or scope["path"] in OPEN_PATHS or self._has_session(headers):
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            words = "a password is needed: the header Authorization: Bearer PASSWORD, or the page's form"
            return 401, "unauthorized", words, {"www-authenticate": "Bearer"}
        return self._checked(scope, given.strip().encode("latin-1"))  # the bytes as they were sent

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

    def _has_session(self, headers: dict[str, str]) -> bool:
        pairs = [pair.strip().partition("=") for pair in headers.get("cookie", "").split(";")]
        return any(name == COOKIE and value in self._sessions for name, _, value in pairs)

    def _checked(self, scope: Any, given: bytes) -> tuple[int, str, str, dict[str, str]] | None:
        """Compare a password; after `FREE_TRIES` wrong ones, an address has one try a second."""
        address = (scope.get("client") or ("", 0))[0]
        count, last = self._wrong.get(address, (0, 0.0))
        if count >= FREE_TRIES and (wait := last + TRY_INTERVAL_S - time.monotonic()) > 0:
            return 429, "too_many_tries", f"wrong passwords; try again in {wait:.1f} s", {"retry-after": "1"}
        assert self.password is not None
        if hmac.compare_digest(given, self.password.encode()):
            self._wrong.pop(address, None)
            return None
        self._wrong[address] = count + 1, time.monotonic()
        self._wrong.move_to_end(address)
        if len(self._wrong) > MAX_ADDRESSES:
            self._wrong.popitem(last=False)
        return 401, "unauthorized", "the password is wrong", {"www-authenticate": "Bearer"}

    async def _login(self, scope: Any, receive: Any) -> tuple[int, str, str, dict[str, str]]:
        """Answer the page's form: {"password": TEXT} for a cookie."""
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        try:
            given = json.loads(body)["password"]
        except (ValueError, TypeError, KeyError, RecursionError):
            given = None
        if not isinstance(given, str):
            return 422, "invalid_value", 'expected {"password": TEXT}', {}
        if self.password is not None and (refused := self._checked(scope, given.encode(errors="replace"))) is not None:
            return refused
        self._sessions[session := secrets.token_hex(32)] = None
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        secure = "; Secure" if scope.get("scheme") == "https" else ""
        return 200, "", "", {"set-cookie": f"{COOKIE}={session}; HttpOnly; SameSite=Strict; Path=/{secure}"}

    def _limited(self, headers: dict[str, str], receive: Any, most: int) -> Any:
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


async def _answer(send: Any, status: int, code: str, message: str, headers: dict[str, str]) -> None:
    value = error_json(message, code) if status >= 400 else {}
    body = json.dumps(value).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    pairs = [(name.encode(), text.encode("latin-1")) for name, text in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def error_json(message: str, code: str, param: str | None = None, **more: Any) -> dict[str, Any]:
    """The body of an answer that is an error."""
    kind = (
        "invalid_request_error"
        if code not in ("internal_error", "server_error", "starting", "failed")
        else "server_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **more}}
