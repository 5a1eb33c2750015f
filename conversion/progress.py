"""A progress bar for conversions, on stderr; none where huggingface_hub shall show none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from cogvideox_flax.conversion.write import Progress


@contextmanager
def progress_bar(visible: bool = True) -> Iterator[Progress]:
    """Yields a callback for `convert(progress=...)`; one bar per component."""
    is_hidden = not visible or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") == "1"
    bars: dict[str, tqdm] = {}

    def update(component: str, done: int, total: int) -> None:
        if component not in bars:
            name = f"converting {component}"
            bars[component] = tqdm(total=total, desc=name, unit="B", unit_scale=True, disable=is_hidden)
        bars[component].update(done - bars[component].n)

    try:
        yield update
    finally:
        for bar in bars.values():
            bar.close()
