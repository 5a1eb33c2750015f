"""A page that shows the videos of a queue beside it."""

from __future__ import annotations

import html
import json
import shlex
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


def write_page(folder: Path, title: str, rows: Sequence[PageRow], model: str | None = None) -> None:
    """Write `index.html`: the videos beside it with prompts, seconds, the settings that they do not share, and the
    command that makes each again; what failed; what is to be made.

    model: as `--model` names it; None: the embedded one.
    """
    settings = [_settings(row) for row in rows if row.path is not None]
    made, first = len(settings), settings[0] if len(settings) > 1 else {}
    shared = {name: value for name, value in first.items() if all(each.get(name) == value for each in settings)}
    body = "\n".join(_figure(row, shared, model) for row in rows)
    write_text(
        folder / PAGE,
        f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
{_MARK}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escape(title)}</title>
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 24px; background: #fafafa; color: #222 }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 20px }}
figure {{ margin: 0 }} figcaption {{ overflow-wrap: anywhere }}
video, img {{ width: 100%; background: #ddd }}
small {{ color: #666 }} code {{ user-select: all }} .fault {{ color: #a00 }}
</style>
<h1>{_escape(title)}</h1>
<p>{made} of {len(rows)} videos</p>
<p><small>{_text(shared)}</small></p>
<main>
{body}
</main>
</html>
""",
    )


def _settings(row: PageRow) -> dict[str, Any]:
    return dict((row.metadata or {}).get("settings", {}))


def _text(settings: Mapping[str, Any]) -> str:
    return _escape(", ".join(f"{name} {x if isinstance(x, str) else json.dumps(x)}" for name, x in settings.items()))


def _figure(each: PageRow, shared: Mapping[str, Any], model: str | None) -> str:
    caption = f"<b>{each.line}</b> {_escape(each.text)}"
    if each.path is None:
        state = f'<span class="fault">{_escape(each.fault)}</span>' if each.fault else "<small>to be made</small>"
        return f"<figure><figcaption>{caption}<br>{state}</figcaption></figure>"
    link = quote(each.path.name)
    match each.path.suffix.lower():
        case ".mp4" | ".webm":
            media = f'<video src="{link}" controls autoplay loop muted playsinline preload="metadata"></video>'
        case ".gif" | ".webp":
            media = f'<img src="{link}" alt="" loading="lazy">'
        case _:
            media = f'<a href="{link}">{_escape(each.path.name)}</a>'
    facts = dict(each.metadata or {})
    own = {name: value for name, value in _settings(each).items() if name not in shared}
    seconds = f"{facts['seconds']:g} s; " if isinstance(facts.get("seconds"), int | float) else ""
    said = f"{seconds}{_text({'seed': facts.get('seed'), **own})}"
    command = ["cogvideox", "generate", "--like", str(each.path), *(("--model", model) if model else ())]
    again = f"<code>{_escape(shlex.join(command))}</code>"
    return f"<figure>{media}<figcaption>{caption}<br><small>{said}<br>{again}</small></figcaption></figure>"


def _escape(text: str) -> str:
    return html.escape(printable(text))
