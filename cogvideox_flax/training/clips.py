"""A folder of clips with captions: finding and checking them, and loading one in the model's size and frame rate.

clips/a.mp4  clips/a.txt            a video of any kind that `open_video` reads, and its caption beside it
clips/b/0000.png ...  clips/b.txt   a directory of PNGs is a video
clips/more/d.mov  clips/more/d.txt  subfolders too; names with a leading dot are skipped
clips/videos/a.mp4  clips/labels/a.txt     or captions in a folder of their own
clips/captions.jsonl                or all captions in one file, a line per clip (or metadata.jsonl):
                                    {"file": "a.mp4", "caption": "a red kite over the sea"}
clips/metadata.json                 or a list of such objects
clips/metadata.csv                  or the same as columns, with a first line of their names
clips/videos.txt  clips/prompts.txt        or a line per clip in both
clips/e.jpg  clips/e.txt            an image, where clips of one frame are trained on

A control model needs a control clip for each, as long as it and of its aspect ratio: a.control.mp4 beside a.mp4 (any
kind of video, or a directory a.control); control/a.mp4 beside videos/ and labels/; or the key "control" of a table.
Other models train on the same folder without them.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.clips import Resampled
from cogvideox_flax.io.contents import Contents, content_hashes
from cogvideox_flax.io.images import SUFFIXES as IMAGE_SUFFIXES
from cogvideox_flax.io.images import ImageSequence, is_one_image
from cogvideox_flax.io.paths import read_text
from cogvideox_flax.io.source import StoredVideo
from cogvideox_flax.io.values import text_lines
from cogvideox_flax.io.video import open_video

log = logging.getLogger(__name__)

SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".gif"),
    *(".mpg", ".mpeg", ".m2v", ".ts", ".m2ts", ".flv", ".wmv", ".ogv", ".dv"),
)
"""Of files that are clips whether they have a caption or not; with one, a file of any name is."""

TABLES = ("captions.jsonl", "metadata.jsonl", "metadata.json", "metadata.csv")
"""Files of all captions: JSON lines, a JSON list, or columns."""

VIDEOS, PROMPTS = "videos.txt", "prompts.txt"
"""The same as two files, a line per clip in each."""

FILE_KEYS = ("file", "file_name", "file_path", "video", "video_path")
CAPTION_KEYS = ("caption", "text", "prompt")
CONTROL_KEYS = ("control", "control_file_path", "control_path")
"""Names in a table; the first of them that is there counts."""

CONTROL = ".control"
"""Ends the name of a clip's control clip, before the suffix."""

MAX_NAMED = 5
"""Files that a warning names."""


@dataclass(frozen=True)
class Clip:
    """A video (a file, a directory of PNGs, or an image) and its caption.

    name: its path inside the folder of clips.
    num_frames: at the frame rate of the model.
    height, width: pixels of the file.
    control: its control clip, for control models.
    """

    path: Path
    name: str
    caption: str
    num_frames: int = 0
    height: int = 0
    width: int = 0
    control: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Its fields as JSON values."""
        return vars(self) | {"path": str(self.path), "control": self.control and str(self.control)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Clip:
        """The inverse of `to_json`."""
        return cls(**{**values, **{name: values[name] and Path(values[name]) for name in ("path", "control")}})


class StillImage(ImageSequence):
    """An image as a video of one frame."""

    def __init__(self, path: Path):
        self.path, self._ground, self.files = path, "white", [path]

    def _text(self, name: str) -> str:
        return ""  # a frame of a video states the rate of that


def _open(path: Path, num_frames: int) -> StoredVideo:
    """A video; or, of clips of one frame, an image. Errors as for `open_video`."""
    return StillImage(path) if num_frames == 1 and _is_image(path) else open_video(path)


def find_clips(folder: Path, num_frames: int, fps: float, *, control: bool = False) -> list[Clip]:
    """The clips of a folder, in the order of their names. Nothing is decoded yet.

    Args:
        num_frames: how long a clip must be at least, at `fps` frames per second. At 1, an image with a caption of its
            own is a clip too.
        control: each clip needs a control clip.

    Raises:
        InputError: there are no clips; or some have faults, all in one message: a caption that is missing or empty, a
            video that is missing, unreadable or too short, a file name that leaves the folder, a control clip that is
            missing, shorter than its clip or of another aspect ratio.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder of clips {folder}; expected videos with a caption each (NAME.txt)")
    tables = [name for name in TABLES if (folder / name).exists()]
    if (folder / VIDEOS).exists() and (folder / PROMPTS).exists():
        tables.append(f"{VIDEOS} with {PROMPTS}")
    if len(tables) > 1:
        raise InputError(f"{folder} holds both {' and '.join(tables[:2])}; keep one")
    if tables:
        clips, faults = _read_caption_table(folder, tables[0], control)
    else:
        clips, faults = _read_caption_files(folder, num_frames == 1, control)
    seen = []
    for clip in clips:
        try:
            seen.append(_with_facts(clip, num_frames, fps))
        except InputError as e:
            faults.append(f"  {clip.name}: {e}")
    if faults:
        raise InputError(f"{folder} cannot be trained on ({len(faults)} faults):\n" + "\n".join(faults))
    if not clips:
        raise InputError(f"{folder} holds no clips; expected {', '.join(SUFFIXES)} or directories of images")
    return sorted(seen, key=lambda clip: clip.name)


def clip_contents(clips: Sequence[Clip]) -> list[Contents]:
    """Hash the contents of each clip, of its control clip too, all files at once.

    Raises:
        CheckpointError: a file cannot be read.
    """
    files = []
    for clip in clips:
        paths = [clip.path] if clip.control is None else [clip.path, clip.control]
        files.append([file for path in paths for file in sorted(_open(path, clip.num_frames).files)])
    hashes = iter(content_hashes([path for each in files for path in each]))
    return [Contents(clip.path, each, [next(hashes) for _ in each]) for clip, each in zip(clips, files, strict=True)]


def clips_fingerprint(clips: Sequence[Clip], contents: Sequence[Contents]) -> str:
    """SHA-256 over the names, captions and contents of clips."""
    digest = hashlib.sha256()
    for clip, each in zip(clips, contents, strict=True):
        for path, sha256 in zip(each.files, each.hashes, strict=True):
            digest.update(json.dumps([clip.name, clip.caption, path.name, sha256]).encode())
    return digest.hexdigest()


def load_clip(
    path: Path, num_frames: int, height: int, width: int, fps: float, *, count: int | None = None
) -> UInt8[np.ndarray, "F H W 3"]:
    """The middle `num_frames` of a video at `fps`, resized to cover height x width and cropped around the centre.

    Each frame is the nearest one in time. PNGs without a frame rate are not resampled. Peak memory is the result and
    about one frame of the video.

    Args:
        count: of the first so many frames at `fps`; None: of all.

    Raises:
        InputError: the video cannot be read or is too short.
    """
    clip = Resampled.at(_open(path, num_frames), fps)
    if clip.count < max(num_frames, count or 0):
        needed = max(num_frames, count or 0)
        raise InputError(f"{path} has {clip.count} frames at {fps:g} per second; {needed} are needed")
    start = ((count or clip.count) - num_frames) // 2
    return clip.read(range(start, start + num_frames), height, width)


def _read_caption_table(folder: Path, table: str, control: bool) -> tuple[list[Clip], list[str]]:
    clips: dict[str, Clip] = {}
    faults, controls = [], set()
    fields = (FILE_KEYS, CAPTION_KEYS, CONTROL_KEYS) if control else (FILE_KEYS, CAPTION_KEYS)
    names = ("file", "caption", "control")[: len(fields)]
    expected = ", ".join(f'"{name}": ...' for name in names)
    try:
        entries = list(_table_entries(folder, table))
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise InputError(f"cannot read {folder / table}: {e}; expected UTF-8 text") from e
    for number, entry in entries:
        place = f"  {table} {'entry' if table.endswith('.json') else 'line'} {number}"
        keys = [next((key for key in known if key in entry), None) for known in fields]
        if None in keys:
            faults.append(f"{place}: expected {{{expected}}}")
            continue
        name, caption, *guides = values = [entry[key] for key in keys if key is not None]
        if not all(isinstance(value, str) for value in values) or not all(map(_is_file_name, (name, *guides))):
            faults.append(f"{place}: {' and '.join(names)} must be text; got {' and '.join(map(repr, values))}")
            continue
        inside, *guides = map(os.path.normpath, (name, *guides))
        if outside := [path for path in (inside, *guides) if _leaves(path)]:
            faults.append(f"{place}: {outside[0]} leaves the folder; name a file inside it")
        elif inside in clips:
            faults.append(f"{place}: {name} has a caption already")
        else:
            guide = folder / guides[0] if guides else None
            clips[inside] = Clip(folder / inside, inside, caption.strip(), control=guide)
            controls.update(guides)
            if not caption.strip():
                faults.append(f"  {inside}: its caption in {table} is empty")
    there = [path for path in _visible(folder) if path.is_dir() or path.suffix.lower() in SUFFIXES]
    left_out = [path for path in there if str(path.relative_to(folder)) not in clips.keys() | controls]
    _warn(folder, f"clips without a caption in {table}, which are left out", left_out)
    return list(clips.values()), faults


def _is_file_name(text: str) -> bool:
    return text != "" and "\0" not in text


def _leaves(path: str) -> bool:
    """Whether a normal path does not lead to a file in the folder that it is relative to."""
    return os.path.isabs(path) or path.split(os.sep)[0] == ".." or path == "."


def _table_entries(folder: Path, table: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The number of each line of a table of captions, and what it says; nothing of one that is no table."""
    if table.endswith(".csv"):
        rows = csv.DictReader(io.StringIO(read_text(folder / table), newline=""))
        for row in rows:
            yield rows.line_num, {key: value for key, value in row.items() if value is not None}
    elif table.endswith(".json"):
        try:
            entries = json.loads(read_text(folder / table))
        except (ValueError, RecursionError) as e:
            raise InputError(f"{folder / table} is not JSON: {e}") from e
        for number, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
            yield number, entry if isinstance(entry, dict) else {}
    elif table.endswith(".jsonl"):
        for number, line in enumerate(text_lines(read_text(folder / table)), 1):
            if line.strip():
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    entry = None
                yield number, entry if isinstance(entry, dict) else {}
    else:
        names, captions = (
            [line.strip() for line in text_lines(read_text(folder / file))] for file in (VIDEOS, PROMPTS)
        )
        for lines in (names, captions):
            while lines and not lines[-1]:
                lines.pop()
        if len(names) != len(captions):
            counts = f"{folder / VIDEOS} has {len(names)} lines and {PROMPTS} {len(captions)}"
            raise InputError(f"{counts}; expected a line per clip in both")
        for number, (name, caption) in enumerate(zip(names, captions, strict=True), 1):
            if name or caption:
                yield number, {"file": name, "caption": caption}


def _read_caption_files(folder: Path, images: bool, control: bool) -> tuple[list[Clip], list[str]]:
    videos, labels = folder / "videos", folder / "labels"
    if not (videos.is_dir() and labels.is_dir()):
        videos = labels = folder
    captions = {path.relative_to(labels).with_suffix(""): path for path in _visible(labels) if path.suffix == ".txt"}
    named: dict[Path, list[Path]] = {}  # by the name of their caption
    others: dict[Path, list[Path]] = {}
    controls: dict[Path, list[Path]] = {}
    if control and labels != folder and (folder / "control").is_dir():
        for path in _visible(folder / "control"):
            controls.setdefault(_stem(path, folder / "control"), []).append(path)
    for path in _visible(videos):
        stem = _stem(path, videos)
        if stem.name.endswith(CONTROL) and (control or stem not in captions):
            controls.setdefault(stem.with_name(stem.name.removesuffix(CONTROL)), []).append(path)
        elif path.is_dir() or path.suffix.lower() in SUFFIXES:
            named.setdefault(stem, []).append(path)
        elif path.suffix != ".txt":
            others.setdefault(stem, []).append(path)
    for stem in captions.keys() & others.keys() - named.keys():
        named[stem] = [path for path in others[stem] if _is_video(path) or (images and _is_image(path))]
    clips, faults = [], []
    for stem, path in [(stem, path) for stem, paths in named.items() for path in paths]:
        name, text, caption = str(path.relative_to(folder)), labels / f"{stem}.txt", ""
        about = f"  {name}: its caption {text.relative_to(folder)}"
        try:
            caption = read_text(text).strip()
            if not caption:
                faults.append(f"{about} is empty")
        except FileNotFoundError:
            faults.append(f"  {name}: no caption {text.relative_to(folder)}")
        except (OSError, UnicodeDecodeError) as e:
            faults.append(f"{about} cannot be read ({e})")
        guides = controls.get(stem, []) if control else []
        if control and len(guides) != 1:
            several = ", ".join(str(each.relative_to(folder)) for each in guides)
            one = f"{stem}{CONTROL}.mp4" if labels == folder else f"control/{stem}.mp4"
            faults.append(f"  {name}: {f'several control clips, {several}' if guides else f'no control clip {one}'}")
        clips.append(Clip(path, name, caption, control=guides[0] if guides else None))
    _warn(folder, "captions without a clip", [path for stem, path in captions.items() if not named.get(stem)])
    return clips, faults


def _stem(path: Path, folder: Path) -> Path:
    """A video's path in a folder, without the suffix of a file."""
    inside = path.relative_to(folder)
    return inside if path.is_dir() else inside.with_suffix("")


def _visible(folder: Path) -> Iterator[Path]:
    """The files of a folder and of its subfolders, and the directories that are videos themselves; no dot files."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if not path.is_dir() or _is_frames(path):
            yield path
        elif not folder.resolve().is_relative_to(path.resolve()):  # a link to a folder above has no end
            yield from _visible(path)


def _is_frames(folder: Path) -> bool:
    """Whether a directory holds the frames of one video: images without captions of their own, and no videos."""
    files = [path for path in folder.iterdir() if not path.name.startswith(".")]
    images = {path.stem for path in files if path.suffix.lower() in IMAGE_SUFFIXES}
    captions = {path.stem for path in files if path.suffix == ".txt"}
    return bool(images) and not images & captions and not any(path.suffix.lower() in SUFFIXES for path in files)


def _is_video(path: Path) -> bool:
    """Whether a file is a video by its contents; one image is none."""
    if path.suffix.lower() in IMAGE_SUFFIXES and path.suffix.lower() != ".webp":
        return False
    try:
        open_video(path)
    except InputError:
        return False
    return True


def _is_image(path: Path) -> bool:
    """Whether a file is an image by its name, and not an animated one."""
    suffix = path.suffix.lower()
    return suffix in IMAGE_SUFFIXES and path.is_file() and (suffix != ".webp" or is_one_image(path))


def _warn(folder: Path, what: str, paths: Sequence[Path]) -> None:
    if paths:
        names = ", ".join(str(path.relative_to(folder)) for path in paths[:MAX_NAMED])
        more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
        log.warning("%s holds %s: %s%s", folder, what, names, more)


def _with_facts(clip: Clip, num_frames: int, fps: float) -> Clip:
    """The clip with what its file states.

    Raises:
        InputError: it or its control clip cannot be read or is too short; or the two have other aspect ratios.
    """
    resampled = Resampled.at(_open(clip.path, num_frames), fps)
    if resampled.count < num_frames:
        raise InputError(f"too short, {resampled.count} frames at {fps:g} per second; {num_frames} are needed")
    if resampled.ratio < 0.99:
        rate = resampled.source.info.fps
        log.warning("%s has %.3g frames per second, the model %g: frames will repeat", clip.name, rate, fps)
    info = resampled.source.info
    if clip.control is not None:
        guide = Resampled.at(_open(clip.control, num_frames), fps)
        own, name = guide.source.info, f"its control clip {clip.control.name}"
        if guide.count < resampled.count:
            frames = f"{guide.count} frames at {fps:g} per second"
            raise InputError(f"{name} has {frames}; expected at least {resampled.count}, as many as the clip")
        if abs(own.height * info.width - own.width * info.height) > 0.01 * own.height * info.width:
            raise InputError(
                f"{name} is {own.width}x{own.height}, the clip {info.width}x{info.height}; expected one of its aspect "
                "ratio"
            )
    return replace(clip, num_frames=resampled.count, height=info.height, width=info.width)
