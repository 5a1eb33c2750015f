"""MP4, MOV, MKV, WebM and AVI, read through ffmpeg; MP4 written through it.

ffmpeg is told which demuxer to use and may open only the given file: no playlists, network addresses or other files.
A video is read at a constant rate: where its own rate varies, frames are repeated or dropped, as in a player.
"""

from __future__ import annotations

import io
import logging
import math
import re
import shutil
import subprocess
import tempfile
import threading
import time
from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Self, cast

import numpy as np
from jaxtyping import Int64
from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.io import limits
from cogvideox_flax.io.pictures import to_rgb
from cogvideox_flax.io.source import Frame, Frames, FrameStream, VideoInfo

log = logging.getLogger(__name__)

_CRF = 17  # x264's scale, 0 to 51; at 17 or 18 the loss is about invisible
_CRF_VP9 = 15  # of 0 to 63
_EXACT = "accurate_rnd+full_chroma_int+full_chroma_inp"  # ffmpeg's default colour arithmetic darkens by about a level
_LEAD_SECONDS, _LEAD_FRAMES = 1, 20
"""How long before the first requested frame decoding begins: more than H.264 and HEVC reorder (16 frames), so that no
requested frame is shown before its keyframe and refers to an earlier one."""
_MAX_RUNS = 2000  # of neighbouring frames in one command line: 40 bytes each; Linux allows 128 KiB
_NO_TIMESTAMP = -(2**63)
_PACKET = re.compile(rb"0, *(-?\d+), *(-?\d+), *\d+, *\d+, 0x[0-9a-f]+(?:, F=0x([0-9A-F]+))?")  # of framecrc's lines
_DISCARD = 4  # a packet's flag: the edit list leaves it out
_LOG_BYTES = 8192  # of ffmpeg's messages; the first ones give the cause
_CONTEXT = re.compile(r"^(\[[^]]*@ 0x[0-9a-f]+\] )+")  # "[mov,mp4 @ 0x55d0] ", before a message
_KILLED = (-9, -15)


@dataclass(frozen=True)
class _Packets:
    """A video stream before decoding.

    ticks: presentation times of the packets in units of `unit` seconds, sorted.
    has_timestamps: False where some packets have none (AVI with B-frames); `ticks` are then decoding times.
    """

    ticks: Int64[np.ndarray, " P"]
    unit: Fraction
    has_timestamps: bool


@dataclass(frozen=True)
class _Timeline:
    """When the frames of a video are shown.

    rate: frames per second.
    start: seconds of the first frame in the container's time.
    """

    packets: _Packets
    rate: Fraction
    start: Fraction
    info: VideoInfo

    def seek_target(self, index: int) -> Fraction | None:
        """Seconds to decode from for a frame; None for the beginning."""
        ticks, unit = self.packets.ticks, self.packets.unit
        if not self.packets.has_timestamps:
            return None  # without timestamps, frames are timed by counting from the first
        shown_until = (index + Fraction(1, 2)) / (self.rate * unit)
        shown = np.searchsorted(ticks - ticks[0], math.ceil(shown_until)) - 1
        target = self.start + int(ticks[shown] - ticks[0]) * unit - _LEAD_SECONDS - _LEAD_FRAMES / self.rate
        return target if target > self.start else None


class Container:
    """A `VideoSource` that ffmpeg decodes.

    Args:
        demuxer: ffmpeg's name: "mov", "matroska" or "avi".
        ground: the colour of transparent parts.
    """

    def __init__(self, path: Path, demuxer: str, ground: str = "white"):
        self.path, self.files = path, (path,)
        self._demuxer, self._ground = demuxer, ground

    @property
    def info(self) -> VideoInfo:
        return self._timeline.info

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[int, Frame]]:
        if not indices:
            return
        target = self._timeline.seek_target(indices[0])
        try:
            if target is not None:
                try:
                    message = yield from self._decode(indices, target)
                except FfmpegTimeout:
                    raise
                except FfmpegError as e:
                    message = str(e)
                if not message:
                    return
                log.info("%s: decoded from its beginning, as from frame %d on: %s", self.path, indices[0], message)
            if message := (yield from self._decode(indices, None)):
                log.warning("%s is damaged, its frames may be too: %s", self.path, message)
        except FfmpegError as e:
            raise InputError(f"cannot read {self.path}: {e}") from e

    def comment(self) -> str:
        try:
            with Ffmpeg([*self._input(), "-f", "ffmetadata", "pipe:1"]) as process:
                text = process.read(2 * limits.MAX_METADATA_BYTES + 1)  # twice: each byte may be escaped
                if len(text) > 2 * limits.MAX_METADATA_BYTES:
                    raise InputError(f"{self.path} holds more than {limits.MAX_METADATA_BYTES:,} bytes of metadata")
                process.finish()
        except FfmpegError as e:
            raise InputError(f"cannot read {self.path}: {e}") from e
        return _parse_tags(text.decode(errors="replace")).get("comment", "")

    def _input(self, seek_target: Fraction | None = None) -> list[str]:
        seek: list[str] = []
        if seek_target is not None:  # decodes all frames from a keyframe on, with their own times
            seek = ["-seek_timestamp", "1", "-noaccurate_seek", "-ss", f"{float(seek_target):.6f}"]
        one_file = ["-protocol_whitelist", "file", "-f", self._demuxer]
        if self._demuxer == "mov":
            one_file += ["-enable_drefs", "0", "-use_absolute_path", "0"]
        bounds = ["-max_alloc", str(limits.MAX_BLOCK_BYTES), "-threads", str(limits.DECODER_THREADS)]
        bounds += ["-max_pixels", str(limits.MAX_PIXELS)]
        # A stream may change its size; the filters then continue, with their frame count.
        timing = ["-copyts", "-reinit_filter", "0"]
        return [*bounds, *timing, *seek, *one_file, "-i", f"file:{self.path.absolute()}"]

    @cached_property
    def _timeline(self) -> _Timeline:
        try:
            packets = self._read_packets()
            rate, slot, height, width = self._read_first_frame()
        except FfmpegError as e:
            raise InputError(f"cannot read {self.path}: {e}") from e
        seconds = (int(packets.ticks[-1]) - int(packets.ticks[0])) * packets.unit
        count = math.floor(seconds * rate + Fraction(1, 2)) + 1  # the last frame counts once, whatever its duration
        limits.check_count(self.path, count)
        start = int(packets.ticks[0]) * packets.unit if packets.has_timestamps else slot / rate
        return _Timeline(packets, rate, start, VideoInfo(count, float(rate), height, width))

    def _read_packets(self) -> _Packets:
        """Reads the whole file and decodes nothing; refuses frames that are too large to be decoded."""
        unit = Fraction(1)
        presented, decoded = array("q"), array("q")
        count = 0
        with Ffmpeg([*self._input(), "-map", "0:V:0", "-c", "copy", "-f", "framecrc", "pipe:1"]) as process:
            for line in process.lines():
                if found := _PACKET.match(line):
                    if int(found[3] or b"0", 16) & _DISCARD:
                        continue
                    count += 1
                    if count <= limits.MAX_FRAMES:
                        decoded.append(int(found[1]))
                        presented.append(int(found[2]))
                elif line.startswith(b"#tb 0:"):
                    unit = Fraction(line[6:].decode())
                elif line.startswith(b"#dimensions 0:"):
                    width, height = map(int, line[14:].split(b"x"))
                    if width and height:  # otherwise only the first frame gives the size
                        limits.check_size(self.path, height, width)
            message = process.finish()
        if not count and message:
            raise FfmpegError(f"ffmpeg: {message}")
        limits.check_count(self.path, count)
        has_timestamps = _NO_TIMESTAMP not in presented
        ticks = [tick for tick in (presented if has_timestamps else decoded) if tick != _NO_TIMESTAMP]
        limits.check_count(self.path, len(ticks))
        return _Packets(np.sort(np.asarray(ticks, np.int64)), unit, has_timestamps)

    def _read_first_frame(self) -> tuple[Fraction, int, int, int]:
        """Frames per second; the first frame's time in such frames; height and width as shown. Decodes one frame."""
        one = ["-map", "0:V:0", "-frames:v", "1", "-f", "framecrc", "pipe:1"]
        with Ffmpeg([*self._input(), *one]) as process:
            text = process.read(4096)
            process.finish()
        unit, size = (re.search(rb"#%s 0: (\S+)" % name, text) for name in (b"tb", b"dimensions"))
        packet = re.search(rb"^" + _PACKET.pattern, text, re.MULTILINE)
        if not (unit and size and packet):
            raise InputError(f"{self.path} holds no frame that can be decoded")
        width, height = map(int, size[1].split(b"x"))
        limits.check_size(self.path, height, width)
        rate = 1 / Fraction(unit[1].decode())
        limits.check_fps(self.path, float(rate))
        return rate, int(packet[2]), height, width

    def _decode(self, indices: Sequence[int], target: Fraction | None) -> Generator[tuple[int, Frame], None, str]:
        """Yields each index and frame; returns ffmpeg's first message.

        Raises:
            FfmpegError: ffmpeg fails, or gives fewer frames than it should.
        """
        timeline, info = self._timeline, self.info
        wanted = set(indices)
        runs = _runs(indices)
        if len(runs) > _MAX_RUNS:
            runs = [(indices[0], indices[-1])]
        select = _sum([rf"between(pts\,{first}\,{last})" for first, last in runs])
        given = [i for first, last in runs for i in range(first, last + 1)]
        filters = (
            f"setpts=round(PTS-({timeline.start.numerator})/{timeline.start.denominator}/TB)",
            "tpad=stop=1:stop_mode=clone",  # the fps filter may drop the last frame
            f"fps={timeline.rate}:round=near" + (":start_time=0" if target is None else ""),
            f"select={select}",
            "setpts=N",  # renumber: gaps would be filled with repeated frames
            f"scale={info.width}:{info.height}:flags={_EXACT}",
        )
        raw = ["-frames:v", str(len(given)), "-pix_fmt", "rgba", "-f", "rawvideo", "pipe:1"]
        with Ffmpeg([*self._input(target), "-map", "0:V:0", "-vf", ",".join(filters), *raw]) as process:
            for count, i in enumerate(given):
                frame = np.empty((info.height, info.width, 4), np.uint8)
                if process.read_into(frame.reshape(-1).data) < frame.nbytes:
                    message = process.finish()
                    raise FfmpegError(f"{count} of {len(given)} frames can be decoded; {message or 'it is damaged'}")
                if i in wanted:
                    opaque = frame[..., 3].min() == 255  # nearly always
                    yield i, frame[..., :3] if opaque else to_rgb(Image.fromarray(frame), self._ground)
            return process.finish()


def write_mp4(path: Path, frames: Frames | FrameStream, fps: float, comment: str) -> None:
    """H.264 in an MP4; see `_write`."""
    _write(path, frames, fps, comment, "mp4", ("-c:v", "libx264", "-crf", str(_CRF), "-movflags", "+faststart"))


def write_webm(path: Path, frames: Frames | FrameStream, fps: float, comment: str) -> None:
    """VP9 in a WebM; see `_write`."""
    codec = ("-c:v", "libvpx-vp9", "-crf", str(_CRF_VP9), "-b:v", "0", "-row-mt", "1", "-deadline", "good")
    _write(path, frames, fps, comment, "webm", (*codec, "-cpu-used", "4"))


def _write(
    path: Path, frames: Frames | FrameStream, fps: float, comment: str, container: str, codec: tuple[str, ...]
) -> None:
    """yuv420p, BT.709; an odd height or width grows by one repeated line, which that format needs.

    Args:
        comment: of any length; ffmpeg reads it from a file, since a command line is limited.

    Raises:
        OSError: ffmpeg fails.
    """
    _, height, width, _ = frames.shape
    margins = ((0, height % 2), (0, width % 2), (0, 0))
    size = f"{width + width % 2}x{height + height % 2}"
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="\n", suffix=".ffmetadata") as tags:
        tags.write(f";FFMETADATA1\ncomment={_escape(comment)}\n")
        tags.flush()
        arguments = [
            *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(fps), "-i", "pipe:0"),
            *("-f", "ffmetadata", "-i", f"file:{tags.name}", "-map", "0:v", "-map_metadata", "1"),
            # Players take untagged HD video for BT.709, ffmpeg converts to BT.601 unless told: be explicit in both.
            *("-vf", f"scale=out_color_matrix=bt709:out_range=tv:flags={_EXACT}", "-pix_fmt", "yuv420p"),
            *("-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv"),
            *codec,
            *("-f", container, f"file:{path.absolute()}"),
        ]
        with Ffmpeg(arguments, feed=True) as process:
            for frame in frames:
                process.write(np.ascontiguousarray(np.pad(frame, margins, mode="edge")).reshape(-1).data)
            process.finish()


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of neighbouring indices."""
    breaks = [k for k in range(1, len(indices)) if indices[k] != indices[k - 1] + 1]
    return [(indices[a], indices[b - 1]) for a, b in zip([0, *breaks], [*breaks, len(indices)], strict=True)]


def _sum(terms: list[str]) -> str:
    """A sum as a balanced tree: ffmpeg's parser takes at most 100 terms in a row."""
    half = len(terms) // 2
    return f"({_sum(terms[:half])}+{_sum(terms[half:])})" if half else terms[0]


def _escape(text: str) -> str:
    """A value of ffmpeg's text form of tags."""
    return re.sub(r"([=;#\\\n])", r"\\\1", text)


def _parse_tags(text: str) -> dict[str, str]:
    """The file's tags, parsed from ffmpeg's text form: `name=value` lines before the stream and chapter sections."""
    tags: dict[str, str] = {}
    parts: list[str] = []
    for line in text.split("\n"):
        parts.append(line)
        if (len(line) - len(line.rstrip("\\"))) % 2:
            continue  # an escaped line break: the value goes on
        whole, parts = "\n".join(parts), []
        if whole.startswith("["):
            break
        name, found, value = whole.partition("=")
        if found:
            tags[name.lower()] = re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL)
    return tags


class FfmpegError(OSError):
    """ffmpeg failed; the text is its own first message."""


class FfmpegTimeout(FfmpegError):
    """ffmpeg took too long."""


def find_ffmpeg() -> str:
    """The path of the ffmpeg program.

    Raises:
        InputError: ffmpeg is not installed.
    """
    try:
        import imageio_ffmpeg  # not at the top: models and programs work without it

        path = imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as e:
        raise InputError(
            "there is no ffmpeg for .mp4 (imageio-ffmpeg is missing or brings none for this machine); "
            "install one and set IMAGEIO_FFMPEG_EXE, or save as .gif or as a directory of PNGs"
        ) from e
    if shutil.which(path) is None:  # imageio-ffmpeg does not check a path from the environment
        raise InputError(f"IMAGEIO_FFMPEG_EXE is {path}, which is not a program; set it to the path of ffmpeg")
    return path


class Ffmpeg:
    """One run of ffmpeg. Leaving the `with` block ends the process.

    Args:
        arguments: of the command line, after the general ones.
        feed: whether the caller writes its input (`pipe:0`).

    Raises:
        InputError: ffmpeg is not installed.
        FfmpegError: it cannot be started.

    A reader waits for ffmpeg for at most `MAX_DECODE_SECONDS` in total, a writer for at most that long per write; the
    caller's own time does not count.
    """

    def __init__(self, arguments: Sequence[str], *, feed: bool = False):
        command = [find_ffmpeg(), "-hide_banner", "-nostdin", "-loglevel", "error", "-y", *arguments]
        self._feed = feed
        self._seconds = limits.MAX_DECODE_SECONDS
        self._expired = False
        self._timer: threading.Timer | None = None
        self._log = b""
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if feed else subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if feed else subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as e:
            raise FfmpegError(f"ffmpeg: {command[0]} cannot be started ({e.strerror})") from e
        self._output = cast(io.BufferedReader, self._process.stdout)
        self._log_reader = threading.Thread(target=self._read_log, daemon=True)
        self._log_reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer:
            self._timer.cancel()
        if self._process.poll() is None:
            self._process.kill()
        self._close()

    def read_into(self, buffer: memoryview) -> int:
        """Fill a buffer from ffmpeg's output; returns the number of bytes read, fewer at the end of the output."""
        with self._limited():
            return self._output.readinto(buffer)

    def read(self, max_bytes: int) -> bytes:
        """The whole output, or its first `max_bytes`."""
        with self._limited():
            return self._output.read(max_bytes)

    def lines(self) -> Iterator[bytes]:
        """The output line by line. The consumer's time counts as ffmpeg's, so it should be short."""
        with self._limited():
            yield from self._output

    def write(self, data: memoryview) -> None:
        """Write to ffmpeg's input.

        Raises:
            FfmpegError: it ended early.
        """
        pipe = cast(io.BufferedWriter, self._process.stdin)
        try:
            with self._limited():
                pipe.write(data)
                pipe.flush()
        except BrokenPipeError:
            self.finish()
            raise FfmpegError("ffmpeg: it ended before all frames were written") from None

    def finish(self) -> str:
        """Wait for the end. Returns the first of ffmpeg's messages, "" if it had none.

        Raises:
            FfmpegError: it failed.
            FfmpegTimeout: it took too long.
        """
        for pipe in (self._process.stdin, self._process.stdout):  # ends a run that still has output
            if pipe:
                with suppress(BrokenPipeError):
                    pipe.close()
        with self._limited():
            code = self._process.wait()
        self._close()
        message = self._message()
        if self._expired and code in _KILLED:
            raise FfmpegTimeout(f"ffmpeg: no end after {limits.MAX_DECODE_SECONDS:g} seconds; it was stopped")
        if code:
            raise FfmpegError(f"ffmpeg: {message or f'exit code {code}'}")
        return message

    def _message(self) -> str:
        lines = self._log.decode(errors="replace").splitlines()
        return next((text for line in lines if (text := _CONTEXT.sub("", line).strip())), "")

    def _read_log(self) -> None:
        pipe = cast(io.BufferedReader, self._process.stderr)
        while chunk := pipe.read1(_LOG_BYTES):
            if len(self._log) < _LOG_BYTES:
                self._log += chunk

    def _close(self) -> None:
        self._process.wait()
        self._log_reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _expire(self) -> None:
        self._expired = True
        self._process.kill()

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Kills ffmpeg when the time limit expires inside the context."""
        began = time.monotonic()
        self._timer = threading.Timer(max(self._seconds, 0), self._expire)
        self._timer.daemon = True
        self._timer.start()
        try:
            yield
        finally:
            self._timer.cancel()
            if not self._feed:
                self._seconds -= time.monotonic() - began
