"""Answers that are errors: {"error": {"message", "type", "param", "code"}}, with all fields that are wrong."""

from __future__ import annotations

import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from cogvideox_flax.errors import InputError, describe_file_error
from cogvideox_flax.serve.guard import BodyError, error_json

log = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer that is an error.

    fields: field, or "", and message of each that cannot be served.
    retry_after: seconds after which the client may ask again.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        fields: list[tuple[str, str]] | None = None,
        *,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.message, self.fields = status, code, message, fields or []
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    fields = [{"param": field or None, "message": message} for field, message in error.fields]
    param = fields[0]["param"] if fields else None
    more = {"fields": fields} if fields else {}
    return JSONResponse(error_json(error.message, error.code, param, **more), error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    return JSONResponse(error_json(str(error.detail), code), error.status_code, error.headers)


async def _os_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    if describe_file_error(error) is None:
        return await _internal_error(request, error)
    return JSONResponse(error_json(f"the server cannot keep this: {error.strerror}", "server_error"), 507)


async def _input_error(request: Request, error: Exception) -> Response:
    """What a client asked for was checked before, so that this is of the server's own files."""
    cause = error.__cause__
    return await (_os_error(request, cause) if isinstance(cause, OSError) else _internal_error(request, error))


async def _internal_error(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(error_json("a fault of this server; its log says more", "internal_error"), 500)


async def _body_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BodyError)
    return JSONResponse(error_json(str(error), error.code), error.status, {"connection": "close"})


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


HANDLERS: dict[Any, Any] = {
    ApiError: _api_error,
    BodyError: _body_error,
    ClientDisconnect: _left,
    HTTPException: _http_error,
    InputError: _input_error,
    OSError: _os_error,
    Exception: _internal_error,
}
"""Kind of exception -> what answers it."""
