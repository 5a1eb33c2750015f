"""The bodies of requests: JSON, or a form with files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from cogvideox_flax.serve.errors import ApiError
from cogvideox_flax.serve.guard import MAX_JSON_BYTES


async def read_body(request: Request) -> tuple[dict[str, Any], dict[str, UploadFile]]:
    """The values and the files of a body: JSON, or a form whose field `request` may hold JSON.

    Raises:
        ApiError: it is neither.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        try:
            form = await request.form(max_files=8, max_fields=200, max_part_size=MAX_JSON_BYTES)
        except (MultiPartException, HTTPException) as e:
            raise ApiError(422, "invalid_value", f"the form cannot be read: {getattr(e, 'message', e)}") from e
        values = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        files = {name: value for name, value in form.multi_items() if isinstance(value, UploadFile)}
        if len(values) + len(files) < len(form.multi_items()):
            raise ApiError(422, "invalid_value", "the form gives a field twice")
        return {**_object(values.pop("request", "{}")), **values}, files
    if kind not in ("application/json", ""):
        raise ApiError(415, "unsupported_type", f"expected application/json or multipart/form-data; got {kind[:80]!r}")
    return _object(await request.body() or b"{}"), {}


def _object(text: str | bytes) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ApiError(422, "invalid_json", "the body is no JSON") from e
    if not isinstance(values, dict):
        raise ApiError(422, "invalid_json", "the body is no JSON object")
    return values


def digest_of(values: Mapping[str, Any], files: Mapping[str, UploadFile]) -> str:
    """SHA-256 of a request: of its values, and of its files' contents."""
    contents = {}
    for name, file in files.items():
        reader: Any = file.file
        contents[name] = hashlib.file_digest(reader, "sha256").hexdigest()
        file.file.seek(0)
    return hashlib.sha256(json.dumps([dict(values), contents], sort_keys=True).encode()).hexdigest()
