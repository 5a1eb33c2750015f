"""Frames in and out: mp4, gif, PNG sequences, contact sheets; what made a video is stored inside its file.

A path says the format: `.mp4`; `.gif`; `.png` with a number field (`frames/%04d.png`); no suffix, a directory of PNGs.
Files appear under their name only when they are complete.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, UInt8
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from cogvideox_flax.errors import InputError

FORMATS = ".mp4, .gif, .png with a number field (frames/%04d.png), or no suffix for a directory of PNGs"
_NUMBER = re.compile(r"%0?\d*d")
_CRF = 17  # x264's scale, 0 to 51; at 17 or 18 the loss is about invisible
_EXACT = "accurate_rnd+full_chroma_int+full_chroma_inp"  # ffmpeg's default colour arithmetic darkens by about a level
_SHEET_GAP = 2

Frames = UInt8[np.ndarray, "F H W 3"]


def to_uint8(video: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """[-1, 1] to 0..255: clipped, rounded half to even, as the reference's `VideoProcessor` does."""
    return jnp.round(255 * jnp.clip(video.astype(jnp.float32) / 2 + 0.5, 0, 1)).astype(jnp.uint8)


def from_uint8(video: UInt8[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """0..255 to [-1, 1], on the host: what the VAE encodes."""
    return video.astype(np.float32) / 127.5 - 1


def check_output_path(path: str | Path) -> None:
    """Refuse a path that `save_video` could not write, before any work is done for it.

    Raises:
        InputError: unknown format, something else is there, the directory cannot be written, or ffmpeg is missing.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if path.name in ("", ".."):
        raise InputError(f"{path} has no name of its own; give the name of a file or of a directory to write")
    check_writable(path)
    if path.is_dir():
        if suffix and suffix in _WRITERS:
            raise InputError(f"{path} is a directory; give the name of a file to write")
        if others := [p.name for p in path.iterdir() if not re.fullmatch(r"\d+\.png", p.name)]:
            raise InputError(
                f"{path} holds other files ({', '.join(sorted(others)[:3])}); "
                "give a file name, or a new or empty directory for the frames"
            )
    elif suffix not in _WRITERS:
        raise InputError(f"cannot tell the format of {path} from its suffix {path.suffix!r}; known are {FORMATS}")
    elif not suffix and path.exists():
        raise InputError(f"{path} is a file; a path without a suffix is a directory of frames. Known are {FORMATS}")
    elif suffix == ".png" and len(_NUMBER.findall(path.name)) != 1:
        raise InputError(f"{path} names one picture; known are {FORMATS}")
    if suffix == ".mp4":
        _ffmpeg()


def check_writable(path: Path) -> None:
    """Refuse a name, of a file or directory that is there or not yet, under which nothing could be written.

    Raises:
        InputError: the name is impossible, or the nearest directory above that exists cannot be written.
    """
    parent = existing_parent(path)
    try:
        with suppress(FileNotFoundError):
            path.lstat()
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as e:
        raise InputError(f"cannot write {path}: {parent}: {e.strerror}; choose another place") from e


def existing_parent(path: Path) -> Path:
    """The nearest directory above `path` that is there already."""
    return next(parent for parent in path.absolute().parents if os.path.lexists(parent))


def item_paths(path: str | Path, count: int) -> list[Path]:
    """Where `count` videos go: `path` itself for one, else numbered: video-0.mp4, video-1.mp4, ..."""
    path = Path(path)
    return [path] if count == 1 else [path.with_stem(f"{path.stem}-{i}") for i in range(count)]


def save_video(path: str | Path, frames: Frames, fps: float, metadata: dict[str, Any] | None = None) -> None:
    """Write one video, atomically. Missing directories are made.

    An mp4 is H.264 in yuv420p, BT.709; an odd height or width grows by one repeated line, which that format needs.
    A gif has 256 colours a frame, times in hundredths of a second, and joins equal neighbours.

    Args:
        path: its suffix chooses the format, see `FORMATS`.
        frames: uint8.
        fps: frames per second.
        metadata: JSON values, stored in the file (each file of a PNG sequence); `read_metadata` gives them back.

    Raises:
        InputError: frames of another shape or dtype, a path that `check_output_path` refuses, or the disk is full.
    """
    path, frames = Path(path), _check_frames(frames)
    check_output_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = _write_directory if path.is_dir() else _WRITERS[path.suffix.lower()]
        writer(path, frames, fps, json.dumps(metadata or {}))
    except OSError as e:
        raise InputError(f"writing {path} failed: {e.strerror or e}") from e


def save_contact_sheet(path: str | Path, frames: Frames, columns: int | None = None) -> None:
    """All frames in one PNG, row by row; about square unless `columns` is given.

    Raises:
        InputError: frames of another shape or dtype, not a .png, or the file cannot be written.
    """
    path, frames = Path(path), _check_frames(frames)
    if path.suffix.lower() != ".png":
        raise InputError(f"a contact sheet is a .png; got {path}")
    count, height, width, _ = frames.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    cell = (height + _SHEET_GAP, width + _SHEET_GAP)
    sheet = np.full((rows * cell[0] - _SHEET_GAP, columns * cell[1] - _SHEET_GAP, 3), 255, np.uint8)
    for i, frame in enumerate(frames):
        top, left = i // columns * cell[0], i % columns * cell[1]
        sheet[top : top + height, left : left + width] = frame
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _complete(path) as partial:
            Image.fromarray(sheet).save(partial)
    except OSError as e:
        raise InputError(f"writing {path} failed: {e.strerror or e}") from e


def read_video(path: str | Path) -> tuple[Frames, float]:
    """A video's frames and frames per second (0 for a PNG sequence that does not say).

    Args:
        path: any file that ffmpeg reads, a .gif, or a PNG sequence as `save_video` names one.

    Raises:
        InputError: there is no such video, or it cannot be decoded.
    """
    path = Path(path)
    try:
        if path.is_dir() or path.suffix.lower() == ".png":
            return _read_pngs(path)
        if not path.is_file():
            raise InputError(f"there is no video {path}")
        return _read_gif(path) if path.suffix.lower() == ".gif" else _read_ffmpeg(path)
    except (OSError, UnidentifiedImageError) as e:
        raise InputError(f"cannot read the video {path}: {str(e).splitlines()[0]}") from e


def count_frames(path: str | Path) -> tuple[int, float]:
    """A video's number of frames and frames per second as `read_video` would give them, without decoding it.

    Of a file with a variable frame rate the count may be a few frames low.

    Raises:
        InputError: there is no such video, or it cannot be read.
    """
    path = Path(path)
    try:
        if path.is_dir():
            files = _sequence(path)
            return len(files), float(_read_png(files[0])[1].get("fps", 0))
        if not path.is_file():
            raise InputError(f"there is no video {path}")
        if path.suffix.lower() == ".gif":
            with Image.open(path) as image:
                times = [time for _, time in _gif_frames(image)]
            return len(times), _gif_rate(times)
        _, _, fps = _size_and_rate(path)
        video = ["-i", str(path.absolute()), "-map", "0:v:0", "-c", "copy"]
        progress = _run_ffmpeg([*video, "-progress", "-", "-f", "null", os.devnull]).decode()
        packets, end = (int(re.findall(rf"{name}=(\d+)", progress)[-1]) for name in ("frame", "out_time_us"))
        return max(packets, round(end * 1e-6 * fps)), fps
    except (OSError, UnidentifiedImageError) as e:
        raise InputError(f"cannot read the video {path}: {str(e).splitlines()[0]}") from e


def read_metadata(path: str | Path) -> dict[str, Any]:
    """What `save_video` stored in a file or PNG sequence; {} for a file that is not from there.

    Raises:
        InputError: there is no such file, or it is not a video or picture.
    """
    path = Path(path)
    try:
        if path.is_dir() or path.suffix.lower() == ".png":
            text = _read_png(_sequence(path)[0])[1].get("comment", "")
        elif path.suffix.lower() == ".gif":
            with Image.open(path) as image:
                text = bytes(image.info.get("comment", b"")).decode(errors="replace")
        else:
            text = _read_comment(path)
    except (OSError, UnidentifiedImageError) as e:
        raise InputError(f"cannot read {path}: {e}") from e
    try:
        metadata = json.loads(text)
    except ValueError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _check_frames(frames: Frames) -> Frames:
    frames = np.asarray(frames)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise InputError(f"frames must be uint8 [F, H, W, 3]; got {frames.dtype} {list(frames.shape)}")
    return frames


@contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; it becomes `path` if nothing goes wrong, and vanishes otherwise."""
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _ffmpeg() -> str:
    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as e:
        raise InputError(
            "there is no ffmpeg for .mp4 (imageio-ffmpeg brings none for this machine); "
            "install one and set IMAGEIO_FFMPEG_EXE, or save as .gif or as a directory of PNGs"
        ) from e


def _run_ffmpeg(arguments: list[str], frames: Frames | None = None) -> bytes:
    stdin = None if frames is None else np.ascontiguousarray(frames).reshape(-1).data
    command = [_ffmpeg(), "-hide_banner", "-loglevel", "error", "-y", *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False)
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()
        raise OSError(f"ffmpeg: {message.splitlines()[-1] if message else f'exit code {done.returncode}'}")
    return done.stdout


def _write_mp4(path: Path, frames: Frames, fps: float, comment: str) -> None:
    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    size = f"{frames.shape[2]}x{frames.shape[1]}"
    with _complete(path) as partial:
        _run_ffmpeg(
            [
                *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(fps), "-i", "-"),
                # Players take untagged HD video for BT.709, ffmpeg converts to BT.601 unless told: be explicit in both.
                *("-vf", f"scale=out_color_matrix=bt709:out_range=tv:flags={_EXACT}", "-pix_fmt", "yuv420p"),
                *("-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv"),
                *("-c:v", "libx264", "-crf", str(_CRF), "-movflags", "+faststart"),
                *("-metadata", f"comment={comment}", str(partial.absolute())),
            ],
            frames,
        )


def _write_gif(path: Path, frames: Frames, fps: float, comment: str) -> None:
    # In whole hundredths of a second whose errors do not add up: 8 per second is 12, 13, 12, 13, ...
    times = np.round(np.arange(len(frames) + 1) * 100 / fps).astype(int)
    first, *rest = (Image.fromarray(frame) for frame in frames)
    with _complete(path) as partial:
        first.save(
            partial,
            save_all=True,
            append_images=rest,
            duration=(10 * np.diff(times)).tolist(),
            loop=0,
            comment=comment.encode(),
        )


def _write_png(path: Path, frame: UInt8[np.ndarray, "H W 3"], fps: float, comment: str) -> None:
    info = PngInfo()
    info.add_text("comment", comment)
    info.add_text("fps", str(fps))
    with _complete(path) as partial:
        Image.fromarray(frame).save(partial, pnginfo=info)


def _write_pattern(path: Path, frames: Frames, fps: float, comment: str) -> None:
    field = _NUMBER.findall(path.name)[0]
    for i, frame in enumerate(frames):
        _write_png(path.with_name(path.name.replace(field, field % i)), frame, fps, comment)
    for later in _sequence(path)[len(frames) :]:  # of a longer sequence that stood here before
        later.unlink()


def _write_directory(path: Path, frames: Frames, fps: float, comment: str) -> None:
    """Write a new directory, then exchange it with what `check_output_path` found replaceable."""
    partial, old = (path.with_name(f".{path.name}.{os.getpid()}.{kind}") for kind in ("partial", "old"))
    try:
        partial.mkdir()
        _write_pattern(partial / "%04d.png", frames, fps, comment)
        if path.exists():
            path.rename(old)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


_WRITERS: dict[str, Callable[[Path, Frames, float, str], None]] = {
    ".mp4": _write_mp4,
    ".gif": _write_gif,
    ".png": _write_pattern,
    "": _write_directory,
}


def _sequence(path: Path) -> list[Path]:
    """The files of a PNG sequence (or one picture), by number."""
    if path.is_dir():
        path = path / "%d.png"
    before, *after = _NUMBER.split(path.name)
    pattern = re.compile(re.escape(before) + "".join(r"(\d+)" + re.escape(part) for part in after))
    found = [(match, p) for p in path.parent.iterdir() if (match := pattern.fullmatch(p.name))]
    if not found:
        raise InputError(f"there are no frames {path}")
    return [p for _, p in sorted(found, key=lambda item: [int(number) for number in item[0].groups()])]


def _read_png(path: Path) -> tuple[UInt8[np.ndarray, "H W 3"], dict[str, str]]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")), dict(getattr(image, "text", {}))


def _read_pngs(path: Path) -> tuple[Frames, float]:
    frames, texts = zip(*map(_read_png, _sequence(path)), strict=True)
    if len(sizes := {frame.shape for frame in frames}) > 1:
        raise InputError(f"the frames {path} have different sizes: {sorted(sizes)}")
    return np.stack(frames), float(texts[0].get("fps", 0))


def _read_gif(path: Path) -> tuple[Frames, float]:
    with Image.open(path) as image:
        frames, times = zip(*_gif_frames(image), strict=True)
    return np.stack([np.asarray(frame) for frame in frames]), _gif_rate(times)


def _gif_frames(image: Image.Image) -> Iterator[tuple[Image.Image, int]]:
    """Each frame and its milliseconds."""
    for i in range(getattr(image, "n_frames", 1)):
        image.seek(i)
        yield image.convert("RGB"), image.info.get("duration", 0)


def _gif_rate(times: Sequence[int]) -> float:
    return 1000 * len(times) / sum(times) if sum(times) else 0.0


def _size_and_rate(path: Path) -> tuple[int, int, float]:
    """Width, height and frames per second."""
    # one frame in a format whose header says them: "YUV4MPEG2 W720 H480 F30000:1001 ..."
    one = ["-i", str(path.absolute()), "-frames:v", "1", "-pix_fmt", "yuv420p", "-f", "yuv4mpegpipe", "-"]
    found = re.match(rb"YUV4MPEG2 W(\d+) H(\d+) F(\d+):(\d+) ", _run_ffmpeg(one))
    if not found:
        raise InputError(f"{path} holds no frames")
    width, height, frames, seconds = map(int, found.groups())
    return width, height, frames / seconds


def _read_ffmpeg(path: Path) -> tuple[Frames, float]:
    width, height, fps = _size_and_rate(path)
    exact = ["-vf", f"scale=flags={_EXACT}", "-pix_fmt", "rgb24", "-f", "rawvideo", "-"]
    pixels = _run_ffmpeg(["-i", str(path.absolute()), *exact])
    return np.frombuffer(pixels, np.uint8).reshape(-1, height, width, 3).copy(), fps


def _read_comment(path: Path) -> str:
    """ffmpeg's text form of the tags escapes = ; # \\ with a backslash; a JSON line holds no other line break."""
    text = _run_ffmpeg(["-i", str(path.absolute()), "-f", "ffmetadata", "-"]).decode(errors="replace")
    found = re.search(r"^comment=(.*)$", text, re.MULTILINE)
    return re.sub(r"\\(.)", r"\1", found[1]) if found else ""
