"""Small JSON files, such as configs and records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cogvideox_flax.io.paths import open_file

MAX_BYTES = 64 * 2**20


def load_json(path: Path) -> Any:
    """The value of a JSON file in UTF-8.

    Raises:
        ValueError: it is not JSON, nested too deeply, or larger than `MAX_BYTES`.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e
