"""A progress bar for conversions, on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from cogvideox_flax.conversion.write import Progress


@contextmanager
def progress_bar(visible: bool = True) -> Iterator[Progress]:
    """Yields a callback for `convert(progress=...)`; one bar per component."""
    bars: dict[str, tqdm] = {}

    def update(component: str, done: int, total: int) -> None:
        if component not in bars:
            name = f"converting {component}"
            bars[component] = tqdm(total=total, desc=name, unit="B", unit_scale=True, disable=not visible)
        bars[component].update(done - bars[component].n)

    try:
        yield update
    finally:
        for bar in bars.values():
            bar.close()
