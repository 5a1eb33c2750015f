"""A page that shows the videos of a queue beside it."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.atomic import write_text
from cogvideox_flax.io.paths import read_text
from cogvideox_flax.io.values import printable

PAGE = "index.html"

_MARK = '<meta name="generator" content="cogvideox-flax">'


@dataclass(frozen=True)
class PageRow:
    """A video of the page, or what stands in its place.

    line: its number in the file of prompts.
    text: the prompt, or the line as it is.
    path: of the video; None if there is none.
    metadata: of the video.
    fault: why there is none; "" where it is still to be made.
    """

    line: int
    text: str
    path: Path | None = None
    metadata: Mapping[str, Any] | None = None
    fault: str = ""


def check_page(folder: Path) -> None:
    """Refuse a folder that holds a page of somebody else's."""
    path = folder / PAGE
    try:
        is_ours = _MARK in read_text(path, errors="replace")[:1000]
    except FileNotFoundError:
        return
    except OSError as e:
        raise InputError(f"cannot write {path}: {e.strerror}; choose another place") from e
    if not is_ours:
        raise InputError(f"{path} is not one that this program wrote; give --out another folder, as DIR/video.mp4")


def write_page(folder: Path, title: str, rows: Sequence[PageRow]) -> None:
    """Write `index.html`: the videos beside it with prompts, settings and seconds; what failed; what is to be made."""
    made = sum(row.path is not None for row in rows)
    body = "\n".join(_figure(row) for row in rows)
    write_text(
        folder / PAGE,
        f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
{_MARK}
<title>{_escape(title)}</title>
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 24px; background: #fafafa; color: #222 }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 20px }}
figure {{ margin: 0 }} figcaption {{ overflow-wrap: anywhere }}
video, img {{ width: 100%; background: #ddd }}
small {{ color: #666 }} .fault {{ color: #a00 }}
</style>
<h1>{_escape(title)}</h1>
<p>{made} of {len(rows)} videos</p>
<main>
{body}
</main>
</html>
""",
    )


def _figure(each: PageRow) -> str:
    caption = f"<b>{each.line}</b> {_escape(each.text)}"
    if each.path is None:
        state = f'<span class="fault">{_escape(each.fault)}</span>' if each.fault else "<small>to be made</small>"
        return f"<figure><figcaption>{caption}<br>{state}</figcaption></figure>"
    link = quote(each.path.name)
    match each.path.suffix.lower():
        case ".mp4" | ".webm":
            media = f'<video src="{link}" controls loop muted preload="metadata"></video>'
        case ".gif" | ".webp":
            media = f'<img src="{link}" alt="" loading="lazy">'
        case _:
            media = f'<a href="{link}">{_escape(each.path.name)}</a>'
    facts = dict(each.metadata or {})
    settings = {"seed": facts.get("seed"), **facts.get("settings", {})}
    said = ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()
    )
    seconds = f"{facts['seconds']:g} s; " if isinstance(facts.get("seconds"), int | float) else ""
    return f"<figure>{media}<figcaption>{caption}<br><small>{seconds}{_escape(said)}</small></figcaption></figure>"


def _escape(text: str) -> str:
    return html.escape(printable(text))
