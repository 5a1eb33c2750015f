"""MP4, MOV, MKV, WebM and AVI through PyAV, FFmpeg's libraries in this process: read exactly; MP4 and WebM written.

FFmpeg is told which demuxer to use and reads from an open file: no playlists, network addresses or other files.
A video is read at a constant rate: where its own rate varies, frames are repeated or dropped, as in a player.

PyAV is imported where a video is opened: models and programs work without it.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int
from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.io import limits
from cogvideox_flax.io.colours import say_converted, to_bt709
from cogvideox_flax.io.images import to_rgb
from cogvideox_flax.io.paths import open_file
from cogvideox_flax.io.source import Frame, Frames, FrameStream, VideoInfo, format_of

T = TypeVar("T")
log = logging.getLogger(__name__)

CRF = 17  # x264's scale, 0 to 51; at 17 or 18 the loss is about invisible
_CRF_VP9 = 15  # of 0 to 63
_EXACT = "accurate_rnd+full_chroma_int+full_chroma_inp"  # ffmpeg's default colour arithmetic darkens by about a level
_LEAD_SECONDS, _LEAD_FRAMES = 1, 20
"""How long before the first requested frame decoding begins: more than H.264 and HEVC reorder (16 frames), so that no
requested frame is shown before its keyframe and refers to an earlier one."""


_INTRA = 1  # of PyAV's PictureType. A stream may be refreshed in parts, over many frames that begin with none


@dataclass(frozen=True)
class Timeline:
    """The times at which the frames of a video are shown.

    slots: the frame, at the constant rate, in which each packet is first shown, in the order of presentation.
    ticks: presentation times of the packets, sorted, in the stream's unit; None: frames are counted instead.
    lead: ticks before the first requested frame from which decoding begins.
    """

    info: VideoInfo
    slots: Int[np.ndarray, " P"]
    ticks: Int[np.ndarray, " P"] | None
    lead: int = 0


class Container:
    """A `VideoSource` that PyAV decodes.

    Args:
        demuxer: ffmpeg's name: "mov", "matroska", "avi" or "gif".
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
        slots, ticks = self._timeline.slots, self._timeline.ticks
        shown = np.searchsorted(slots, indices, side="right") - 1  # the packet that each index shows
        start = ticks[shown[0]] - self._timeline.lead if ticks is not None else -math.inf
        if ticks is not None and start > ticks[0]:
            try:
                yield from self._decode(indices, shown, int(start))
                return
            except InputError as e:
                log.info("%s: decoded from its beginning, as from frame %d on: %s", self.path, indices[0], e)
        if message := (yield from self._decode(indices, shown, None)):
            log.warning("%s is damaged, its frames may be too: %s", self.path, message)

    def comment(self) -> str:
        with self._open() as (container, _):
            text = {name.lower(): text for name, text in container.metadata.items()}.get("comment", "")
        if len(text) > limits.MAX_METADATA_BYTES:
            raise InputError(f"{self.path} holds more than {limits.MAX_METADATA_BYTES:,} bytes of metadata")
        return text

    @contextmanager
    def _open(self) -> Iterator[tuple[Any, Any]]:
        """The open container and its video stream. FFmpeg's errors inside the context are an InputError."""
        import av

        options = {"max_pixels": str(limits.MAX_PIXELS), "threads": str(limits.DECODER_THREADS)}
        # PyAV 19 always does this
        text: Any = {"metadata_errors": "surrogateescape"} if av.__version__ < "19" else {}
        try:
            with (
                open_file(self.path) as file,
                av.open(file, format=self._demuxer, options=options, io_open=_refuse, **text) as container,
            ):
                container.flags &= ~av.container.Flags.gen_pts.value  # wrong where frames are reordered
                cover = av.stream.Disposition.attached_pic
                stream = next((s for s in container.streams.video if not s.disposition & cover), None)
                if stream is None or stream.codec_context is None:
                    raise InputError(f"{self.path} holds no frame that can be decoded")
                if stream.width and stream.height:  # otherwise only the first frame gives the size
                    limits.check_size(self.path, stream.height, stream.width)
                stream.codec_context.options = options
                stream.thread_type = "AUTO"
                yield container, stream
        except (av.FFmpegError, OSError) as e:
            raise InputError(f"cannot read {self.path}: {e.strerror}") from e

    @cached_property
    def _timeline(self) -> Timeline:
        times = self._read_packets(lambda packet: (packet.pts, packet.dts))
        rate, unit, height, width = self._read_first_frame()
        limits.check_fps(self.path, float(rate))
        has_timestamps = all(presented is not None for presented, _ in times)  # otherwise those of decoding are taken
        ticks = sorted(tick for pair in times if (tick := pair[not has_timestamps]) is not None)
        limits.check_count(self.path, len(ticks))
        up, down = (2 * rate * unit).as_integer_ratio()
        slots = [((tick - ticks[0]) * up + down) // (2 * down) for tick in ticks]  # rounded
        limits.check_count(self.path, slots[-1] + 1)  # the last frame counts once, whatever its duration
        lead = math.ceil((_LEAD_SECONDS + _LEAD_FRAMES / rate) / unit)
        info = VideoInfo(slots[-1] + 1, float(rate), height, width)
        return Timeline(info, np.asarray(slots), np.asarray(ticks) if has_timestamps else None, lead)

    def _read_packets(self, read: Callable[[Any], T]) -> list[T]:
        """The results of `read` for each packet; decodes nothing."""
        facts, count = [], 0
        with self._open() as (container, stream):
            shown = (packet for packet in self._packets(container, stream) if not packet.is_discard)  # by an edit list
            for count, packet in enumerate(limits.timed(self.path, shown), 1):
                if count <= limits.MAX_FRAMES:
                    facts.append(read(packet))
        limits.check_count(self.path, count)
        return facts

    def _read_first_frame(self) -> tuple[Fraction, Fraction, int, int]:
        """Frames per second; seconds of a tick; height and width as shown. Decodes one frame."""
        with self._open() as (container, stream):
            rate, unit, aspect = (
                Fraction(r.numerator, r.denominator)
                for r in (stream.guessed_rate or 0, stream.time_base, stream.sample_aspect_ratio or 1)
            )
            for frame in limits.timed(self.path, self._decoded(container, stream, [])):
                limits.check_size(self.path, frame.height, frame.width)
                size = round(frame.height / min(aspect, 1)), round(frame.width * max(aspect, 1))  # enlarged, as players
                height, width = size[::-1] if any(name == "transpose" for name, _ in _rotation(frame)) else size
                limits.check_size(self.path, height, width)
                return rate, unit, height, width
        raise InputError(f"{self.path} holds no frame of at most {limits.MAX_PIXELS:,} pixels that can be decoded")

    @staticmethod
    def _holds_image(packet: Any) -> bool:
        return packet.size > 0

    def _packets(self, container: Any, stream: Any) -> Iterator[Any]:
        """The packets with images, until the end of the file or where it is cut off."""
        import av

        try:
            yield from filter(self._holds_image, container.demux(stream))
        except av.FFmpegError as e:
            log.info("%s: its end cannot be read: %s", self.path, e.strerror)

    def _decoded(self, container: Any, stream: Any, faults: list[str]) -> Iterator[Any]:
        """The frames in the order of presentation; messages about damaged ones are added to `faults`."""
        import av

        for packet in itertools.chain(self._packets(container, stream), [None]):  # None: what the decoder still holds
            try:
                for frame in stream.codec_context.decode(packet):
                    if frame.is_corrupt:
                        faults.append("a frame is incomplete")
                    yield frame
            except av.FFmpegError as e:
                faults.append(str(e.strerror))

    def _decode(
        self, indices: Sequence[int], shown: Int[np.ndarray, " N"], start: int | None
    ) -> Generator[tuple[int, Frame], None, str]:
        """Yields each index and frame; returns the first message about damage.

        Args:
            shown: the packet that each index shows.
            start: the tick to decode from, where any damage is an error; None: the beginning.
        """
        ticks, convert = self._timeline.ticks, self._converter()
        faults: list[str] = []
        previous, at, done, intra = None, -1, 0, False
        with self._open() as (container, stream):
            if start is not None:
                container.seek(start, stream=stream)
            for frame in limits.timed(self.path, self._decoded(container, stream, faults)):
                at = at + 1 if ticks is None or frame.pts is None else int(np.searchsorted(ticks, frame.pts))
                intra = intra or frame.pict_type == _INTRA
                if start is not None and at >= shown[0]:
                    late = previous is None and at > shown[0]
                    if faults or late or not intra:
                        break
                while done < len(shown) and shown[done] <= at:
                    yield indices[done], convert(frame if shown[done] == at or previous is None else previous)
                    done += 1
                if done == len(shown):
                    return next(iter(faults), "")
                previous = frame
        if start is None and previous is not None and shown[-1] <= at + 1:  # the last packet may hold no frame
            for index in indices[done:]:
                yield index, convert(previous)
            return next(iter(faults), "")
        message = next(iter(faults), "it is damaged")
        raise InputError(f"cannot read {self.path}: {done} of {len(indices)} frames can be decoded; {message}")

    def _converter(self) -> Callable[[Any], Frame]:
        """A function from decoded frames to pixels in BT.709, upright, in the first frame's size."""
        import av

        info, graphs = self.info, {}

        def convert(frame: Any) -> Frame:
            to_sdr = to_bt709(frame.color_trc, frame.color_primaries)
            key = (frame.format.name, frame.width, frame.height, to_sdr)
            if key not in graphs:  # a stream may change its size
                graph = av.filter.Graph()
                size = f"{info.width}:{info.height}:flags={_EXACT}"
                filters = [*_rotation(frame), ("scale", size), ("format", "rgba64le" if to_sdr else "rgba")]
                filters += [("buffersink", None)]
                source = graph.add_buffer(*(None, frame.width, frame.height, frame.format), time_base=Fraction(1))
                graph.link_nodes(source, *(graph.add(name, how) for name, how in filters)).configure()
                graphs[key] = graph
            graphs[key].push(frame)
            pixels: Any = graphs[key].pull().to_ndarray()
            if to_sdr:
                say_converted(self.path, to_sdr.name)
                alpha = (pixels[..., 3:] >> 8).astype(np.uint8)
                pixels = np.concatenate([to_sdr(pixels[..., :3]), alpha], -1)
            opaque = pixels[..., 3].min() == 255  # nearly always
            return pixels[..., :3] if opaque else to_rgb(Image.fromarray(pixels), self._ground)

        return convert


def _refuse(url: str, flags: int, options: dict[str, str]) -> Any:
    raise PermissionError(1, "it refers to another file")


def _rotation(frame: Any) -> list[tuple[str, str | None]]:
    """Filters that turn a frame upright, to the nearest quarter turn."""
    matrix = next((np.frombuffer(d, np.int32) for d in frame.side_data if d.type.name == "DISPLAYMATRIX"), None)
    if matrix is None:
        return []
    a, b, c, d = (int(matrix[i]) for i in (0, 1, 3, 4))  # (x, y) is shown at (a x + c y, b x + d y)
    turned = abs(b) > abs(a)
    across, down = (c, b) if turned else (a, d)
    steps = [("transpose", "cclock_flip", turned), ("hflip", None, across < 0), ("vflip", None, down < 0)]
    return [(name, how) for name, how, needed in steps if needed]


def has_sound(path: Path) -> bool:
    """Whether a file is a video with sound."""
    try:
        with Container(path, format_of(path) or "")._open() as (container, _):
            return len(container.streams.audio) > 0
    except (InputError, ValueError):  # of another format
        return False


def _copy_sound(path: Path, output: Any, seconds: float) -> Iterator[float]:
    """Copy the first sound track of a video from its first frame on, up to `seconds`. A line says where that fails.

    Yields the time of each packet before it is written; the stream is added before the first.
    """
    import av

    try:
        with Container(path, format_of(path) or "")._open() as (container, shown):
            heard = container.streams.audio[0]
            copied = output.add_stream_from_template(heard)
            begin = (shown.start_time or 0) * shown.time_base
            for packet in container.demux(heard):
                if not packet.size or packet.dts is None:
                    continue
                shift = round(begin / packet.time_base)
                packet.dts -= shift
                packet.pts = packet.dts if packet.pts is None else packet.pts - shift
                at = float(packet.pts * packet.time_base)
                if at >= seconds:
                    break
                if at + float((packet.duration or 0) * packet.time_base) >= 0:  # 0: with what a decoder of AAC begins
                    packet.stream = copied
                    yield at
                    output.mux(packet)
    except (av.FFmpegError, InputError, ValueError) as e:
        log.warning("the sound of %s is left out: %s", path, getattr(e, "strerror", e))


def write_mp4(
    path: Path, frames: Frames | FrameStream, fps: float, comment: str, *, crf: int = CRF, sound: Path | None = None
) -> None:
    """H.264 in an MP4; see `_write`."""
    options = {"crf": str(crf)} | x264_params()
    _write(path, frames, fps, comment, sound, "mp4", "libx264", options, {"movflags": "+faststart"})


def x264_params() -> dict[str, str]:
    """The options with which x264 gives the same file for the same frames: its AVX-512 code reads memory that was never
    written."""
    cpu = Path("/proc/cpuinfo")
    return {"x264-params": "asm=AVX2"} if cpu.is_file() and "avx512" in cpu.read_text() else {}


def write_webm(path: Path, frames: Frames | FrameStream, fps: float, comment: str, sound: Path | None = None) -> None:
    """VP9 in a WebM; see `_write`."""
    options = {"crf": str(_CRF_VP9), "b": "0", "row-mt": "1", "deadline": "good", "cpu-used": "4"}
    _write(path, frames, fps, comment, sound, "webm", "libvpx-vp9", options, {})


def _write(
    path: Path,
    frames: Frames | FrameStream,
    fps: float,
    comment: str,
    sound: Path | None,
    container: str,
    codec: str,
    options: dict[str, str],
    muxer: dict[str, str],
) -> None:
    """yuv420p, BT.709; an odd height or width grows by one repeated line, which that format needs.

    sound: a video whose sound is copied.
    """
    import av
    from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

    exact = Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP
    _, height, width, _ = frames.shape
    margins = ((0, height % 2), (0, width % 2), (0, 0))
    convert = VideoReformatter().reformat
    try:
        with av.open(f"file:{path.absolute()}", "w", format=container, options=muxer) as output:
            output.metadata["comment"] = comment
            stream: Any = output.add_stream(codec, rate=Fraction(fps).limit_denominator(10**6), options=options)
            stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
            # Players take untagged HD video for BT.709, ffmpeg converts to BT.601 unless told: be explicit in both.
            context = stream.codec_context
            context.colorspace = context.color_primaries = context.color_trc = 1  # BT.709
            context.color_range = ColorRange.MPEG
            context.thread_type = "AUTO"
            packets = iter(()) if sound is None else _copy_sound(sound, output, len(frames) / fps)
            heard = next(packets, None)
            for i, pixels in enumerate(frames):
                padded = np.ascontiguousarray(np.pad(pixels, margins, mode="edge"))
                frame = convert(
                    av.VideoFrame.from_ndarray(padded, format="rgb24"),
                    format="yuv420p",
                    dst_colorspace=Colorspace.ITU709,
                    dst_color_range=ColorRange.MPEG,
                    interpolation=Interpolation.BICUBIC | exact,
                )
                output.mux(stream.encode(frame))
                while heard is not None and heard <= i / fps:
                    heard = next(packets, None)
            output.mux(stream.encode())
            deque(packets, maxlen=0)
    except InputError:  # of what the frames are made of
        raise
    except (av.FFmpegError, ValueError) as e:
        raise OSError(getattr(e, "errno", None), f"ffmpeg: {getattr(e, 'strerror', e)}") from e
