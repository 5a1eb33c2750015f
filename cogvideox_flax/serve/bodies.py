"""Bodies: of requests, JSON or a form with files; of answers, files."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import FileResponse

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
        items = form.multi_items()
        inner = _object(next((str(value) for name, value in items if name == "request"), "{}"))
        own = [(name, value) for name, value in items if name != "request"]
        _check_once([*inner, *(name for name, _ in items)])
        values = {name: value for name, value in own if isinstance(value, str)}
        return inner | values, {name: value for name, value in own if isinstance(value, UploadFile)}
    if kind not in ("application/json", ""):
        raise ApiError(415, "unsupported_type", f"expected application/json or multipart/form-data; got {kind[:80]!r}")
    return _object(await request.body() or b"{}"), {}


def _object(text: str | bytes) -> dict[str, Any]:
    """A JSON object whose keys are given once, without NaN, infinity and halves of surrogate pairs."""
    try:
        values = json.loads(text, object_pairs_hook=_pairs, parse_constant=_refuse_constant)
        json.dumps(values, ensure_ascii=False).encode()  # which a lone surrogate fails
    except (ValueError, RecursionError) as e:
        raise ApiError(422, "invalid_json", "the body is not valid JSON") from e
    if not isinstance(values, dict):
        raise ApiError(422, "invalid_json", "the body is not a JSON object")
    return values


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_once([name for name, _ in pairs])
    return dict(pairs)


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _check_once(names: Sequence[str]) -> None:
    """Refuse a field that is given twice: one of its values would be lost."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        message = f"{twice[0][:80]} is given more than once"
        raise ApiError(422, "invalid_value", message, [(twice[0][:80], message)])


def digest_of(values: Mapping[str, Any], files: Mapping[str, UploadFile]) -> str:
    """SHA-256 of a request: of its values, and of its files' contents."""
    contents = {}
    for name, file in files.items():
        reader: Any = file.file
        contents[name] = hashlib.file_digest(reader, "sha256").hexdigest()
        file.file.seek(0)
    return hashlib.sha256(json.dumps([dict(values), contents], sort_keys=True).encode()).hexdigest()


class OpenedFile(FileResponse):
    """A file that is opened before it is answered: it is sent whole, whatever happens to its name meanwhile.

    Raises:
        FileNotFoundError: it is not there.
    """

    def __init__(self, path: Path, media_type: str, **how: Any):
        self.file = path.open("rb")
        stat = os.fstat(self.file.fileno())
        super().__init__(f"/dev/fd/{self.file.fileno()}", media_type=media_type, stat_result=stat, **how)

    async def __call__(self, *connection: Any) -> None:
        with self.file:
            await super().__call__(*connection)
