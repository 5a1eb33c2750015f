"""A folder of clips with captions: finding and checking them, and loading one in the model's size and frame rate.

clips/a.mp4  clips/a.txt            a video and its caption beside it; .gif, .mov, .mkv and .webm too
clips/b/0000.png ...  clips/b.txt   a directory of PNGs is a video
clips/captions.jsonl                or all captions in one file (or metadata.jsonl), a line per clip:
                                    {"file": "a.mp4", "caption": "a red kite over the sea"}
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.clips import Resampled
from cogvideox_flax.io.contents import Contents, content_hashes
from cogvideox_flax.io.images import SUFFIXES as IMAGE_SUFFIXES
from cogvideox_flax.io.images import sequence_files
from cogvideox_flax.io.paths import read_text
from cogvideox_flax.io.video import open_video

log = logging.getLogger(__name__)

SUFFIXES = (".mp4", ".gif", ".mov", ".mkv", ".webm")
CAPTION_FILES = ("captions.jsonl", "metadata.jsonl")


@dataclass(frozen=True)
class Clip:
    """A video (a file, or a directory of PNGs) and its caption. `name` is its path inside the folder of clips."""

    path: Path
    name: str
    caption: str


def find_clips(folder: Path, num_frames: int, fps: float) -> list[Clip]:
    """The clips of a folder, in the order of their names. Nothing is decoded yet.

    Args:
        num_frames: how long a clip must be at least, at `fps` frames per second.

    Raises:
        InputError: there are no clips; or some have faults, all in one message: a caption that is missing or empty, a
            video that is missing, unreadable or too short, a file name that leaves the folder.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder of clips {folder}; expected videos with a caption each (NAME.txt)")
    tables = [folder / name for name in CAPTION_FILES if (folder / name).exists()]
    if len(tables) > 1:
        raise InputError(f"{folder} holds both {' and '.join(CAPTION_FILES)}; keep one")
    clips, faults = _read_caption_table(folder, tables[0]) if tables else _read_caption_files(folder)
    for clip in clips:
        faults += _video_faults(clip, num_frames, fps)
    if faults:
        raise InputError(f"{folder} cannot be trained on ({len(faults)} faults):\n" + "\n".join(faults))
    if not clips:
        raise InputError(f"{folder} holds no clips; expected {', '.join(SUFFIXES)} or directories of PNGs")
    return sorted(clips, key=lambda clip: clip.name)


def clip_contents(clips: Sequence[Clip]) -> list[Contents]:
    """Hash the contents of each clip, all files at once.

    Raises:
        CheckpointError: a file cannot be read.
    """
    files = [sorted(sequence_files(clip.path)) if clip.path.is_dir() else [clip.path] for clip in clips]
    hashes = iter(content_hashes([path for each in files for path in each]))
    return [Contents(clip.path, each, [next(hashes) for _ in each]) for clip, each in zip(clips, files, strict=True)]


def clips_fingerprint(clips: Sequence[Clip], contents: Sequence[Contents]) -> str:
    """SHA-256 over the names, captions and contents of clips."""
    digest = hashlib.sha256()
    for clip, each in zip(clips, contents, strict=True):
        for path, sha256 in zip(each.files, each.hashes, strict=True):
            digest.update(json.dumps([clip.name, clip.caption, path.name, sha256]).encode())
    return digest.hexdigest()


def load_clip(path: Path, num_frames: int, height: int, width: int, fps: float) -> UInt8[np.ndarray, "F H W 3"]:
    """The middle `num_frames` of a video at `fps`, resized to cover height x width and cropped around the centre.

    Each frame is the nearest one in time. PNGs without a frame rate are not resampled. Peak memory is the result and
    about one frame of the video.

    Raises:
        InputError: the video cannot be read or is too short.
    """
    clip = Resampled.at(open_video(path), fps)
    if clip.count < num_frames:
        raise InputError(f"{path} has {clip.count} frames at {fps:g} per second; {num_frames} are needed")
    start = (clip.count - num_frames) // 2
    return clip.read(range(start, start + num_frames), height, width)


def _read_caption_table(folder: Path, table: Path) -> tuple[list[Clip], list[str]]:
    clips: dict[str, Clip] = {}
    faults = []
    try:
        lines = read_text(table).splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"cannot read {table}: {e}; expected UTF-8 text") from e
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"  {table.name} line {number}"
        try:
            entry: Any = json.loads(line)
            name, caption = entry["file"], entry["caption"]
        except (ValueError, KeyError, TypeError, RecursionError):
            faults.append(f'{place}: expected {{"file": ..., "caption": ...}}')
            continue
        if not isinstance(name, str) or not isinstance(caption, str) or not name or "\0" in name:
            faults.append(f"{place}: file and caption must be text; got {name!r} and {caption!r}")
            continue
        inside = os.path.normpath(name)
        if os.path.isabs(inside) or inside.split(os.sep)[0] == ".." or inside == ".":
            faults.append(f"{place}: {name} leaves the folder; name a file inside it")
        elif inside in clips:
            faults.append(f"{place}: {name} has a caption already")
        else:
            clips[inside] = Clip(folder / inside, inside, caption.strip())
            if not caption.strip():
                faults.append(f"  {inside}: its caption in {table.name} is empty")
    return list(clips.values()), faults


def _read_caption_files(folder: Path) -> tuple[list[Clip], list[str]]:
    clips, faults = [], []
    for path in sorted(folder.iterdir()):
        is_video = (
            any(p.suffix.lower() in IMAGE_SUFFIXES for p in path.iterdir())
            if path.is_dir()
            else path.suffix.lower() in SUFFIXES
        )
        if not is_video:
            continue
        text = path.with_name(f"{path.name if path.is_dir() else path.stem}.txt")
        caption = ""
        try:
            caption = read_text(text).strip()
            if not caption:
                faults.append(f"  {path.name}: its caption {text.name} is empty")
        except FileNotFoundError:
            faults.append(f"  {path.name}: no caption {text.name}")
        except (OSError, UnicodeDecodeError) as e:
            faults.append(f"  {path.name}: its caption {text.name} cannot be read ({e})")
        clips.append(Clip(path, path.name, caption))
    return clips, faults


def _video_faults(clip: Clip, num_frames: int, fps: float) -> list[str]:
    try:
        resampled = Resampled.at(open_video(clip.path), fps)
    except InputError as e:
        return [f"  {clip.name}: {e}"]
    if resampled.count < num_frames:
        return [f"  {clip.name}: too short, {resampled.count} frames at {fps:g} per second; {num_frames} are needed"]
    if resampled.ratio < 0.99:
        own = resampled.source.info.fps
        log.warning("%s has %.3g frames per second, the model %g: frames will repeat", clip.name, own, fps)
    return []
