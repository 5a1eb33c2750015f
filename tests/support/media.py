"""Images and video files for tests, these made and decoded by PyAV alone; the memory that reading one takes."""

from __future__ import annotations

import json
import os
import random
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.video import open_video, read_metadata, read_video, save_video
from tests.support import processes

ROOT = Path(__file__).resolve().parents[2]
EXACT = "flags=accurate_rnd+full_chroma_int+full_chroma_inp"


def smooth(seed: int, *shape: int) -> np.ndarray:
    """Random images with large structures, uint8 [..., H, W, 3]."""
    small = np.random.default_rng(seed).integers(0, 256, (*shape[:-2], 4, 6, 3), np.uint8)
    frames = [
        np.asarray(Image.fromarray(each).resize(shape[:-3:-1], Image.Resampling.BICUBIC))
        for each in small.reshape(-1, 4, 6, 3)
    ]
    return np.stack(frames).reshape(*shape, 3)


def pattern(width: int = 64, height: int = 48, rate: object = 24, seconds: float = 6) -> str:
    """A source for `encode` whose frames are all different."""
    return f"testsrc2=s={width}x{height}:r={rate}:d={seconds}"


def encode(
    path: Path,
    source: str,
    codec: str,
    options: dict[str, object] | None = None,
    pix_fmt: str = "yuv420p",
    muxer: dict[str, str] | None = None,
    container: str | None = None,
    turn: tuple[int, bool, bool] | None = None,
    **properties: object,
) -> None:
    """Write a video.

    Args:
        source: a graph of FFmpeg's filters that makes the frames.
        turn: degrees and flips that the file states.
        properties: of the encoder, such as `sample_aspect_ratio` and `color_trc`.
    """
    with (
        av.open(source, format="lavfi") as frames,
        av.open(str(path), "w", format=container, options=muxer or {}) as output,
    ):
        made = frames.streams.video[0]
        settings = {name: str(value) for name, value in (options or {}).items()}
        stream: Any = output.add_stream(codec, rate=Fraction(str(made.guessed_rate)), options=settings)
        stream.width, stream.height, stream.pix_fmt = made.width, made.height, pix_fmt
        for name, value in properties.items():
            setattr(stream.codec_context, name, value)
        if turn:
            stream.set_display_rotation(*turn)
        for frame in frames.decode(video=0):
            frame.pict_type = 0  # the encoder chooses
            output.mux(stream.encode(frame))
        output.mux(stream.encode())


def add_sound(source: Path, path: Path, seconds: float, codec: str = "aac", offset: float = 0) -> Path:
    """The packets of a video in another file, `offset` seconds after the beginning of a tone."""
    with (
        av.open(f"sine=r=48000:d={seconds}", format="lavfi") as tone,
        av.open(str(source)) as video,
        av.open(str(path), "w") as output,
    ):
        shown, heard = output.add_stream_from_template(video.streams.video[0]), output.add_stream(codec, rate=48000)
        for frame in tone.decode(audio=0):
            output.mux(heard.encode(frame))
        output.mux(heard.encode())
        for packet in video.demux(video=0):
            if packet.size:
                packet.pts += round(offset / packet.time_base)
                packet.dts += round(offset / packet.time_base)
                packet.stream = shown
                output.mux(packet)
    return path


def sound_of(path: Path) -> tuple[str, float, list[bytes]]:
    """Its codec; seconds until its end, from the first frame; its packets."""
    with av.open(str(path)) as container:
        shown, heard = container.streams.video[0], container.streams.audio[0]
        packets = [packet for packet in container.demux(heard) if packet.size]
        end = packets[-1].pts + packets[-1].duration
        begin = (shown.start_time or 0) * shown.time_base
        return heard.codec_context.name, float(end * heard.time_base - begin), [bytes(packet) for packet in packets]


def count_frames(path: str | Path) -> tuple[int, float]:
    """How many frames a video has, and how many a second; nothing is decoded."""
    info = open_video(path).info
    return info.num_frames, info.fps


def copy(source: Path, path: Path, container: str | None = None, rate: int = 0) -> None:
    """The packets of a video in another container; a `rate` gives times to those that have none, without B-frames."""
    with av.open(str(source)) as packets, av.open(str(path), "w", format=container) as output:
        stream = output.add_stream_from_template(packets.streams.video[0])
        for i, packet in enumerate(packets.demux(video=0)):
            if packet.size:
                if rate:
                    packet.pts, packet.dts, packet.duration, packet.time_base = i, i, 1, Fraction(1, rate)
                packet.stream = stream
                output.mux(packet)


def whole(path: Path, *filters: tuple[str, str]) -> np.ndarray:
    """Every frame of a video in the plainest way: no seeking, one graph of filters."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        graph = av.filter.Graph()
        nodes = [*filters, ("scale", EXACT), ("format", "rgb24"), ("buffersink", None)]
        graph.link_nodes(graph.add_buffer(stream), *(graph.add(*node) for node in nodes)).configure()
        frames = []
        for frame in container.decode(stream):
            graph.push(frame)
            frames.append(graph.pull().to_ndarray())
    return np.stack(frames)


_MEASURED = """
import json, os, sys, time
from pathlib import Path
from cogvideox_flax.training.clips import load_clip

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024

before, began = peak(), time.monotonic()
clip = load_clip(Path(sys.argv[1]), 9, 32, 48, 8)
print(json.dumps({"shape": clip.shape, "memory": peak() - before, "seconds": time.monotonic() - began}))
"""


def cost_of_loading(path: Path) -> dict:
    """What a new process takes to load 9 frames of 32x48 at 8 per second.

    Returns:
        memory: MiB at its peak above what it had before; seconds; shape.
    """
    run = processes.run([sys.executable, "-c", _MEASURED, path], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def refusals_of_damaged(path: Path, data: bytes, trials: int, head: int) -> int:
    """Bits flipped, in all of a file or in its first `head` bytes, and its end cut off: how many of three readings of
    each are refused, in one line that names the file. The others give a result."""
    draws = random.Random(0)
    refused = 0
    for trial in range(trials):
        damaged = bytearray(data)
        for _ in range(draws.choice([1, 4, 40])):
            damaged[draws.randrange(len(damaged) if trial % 2 else head)] ^= 1 << draws.randrange(8)
        if trial % 3 == 0:
            del damaged[draws.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        for read in (count_frames, read_metadata, read_video):
            try:
                read(path)
            except InputError as e:
                refused += 1
                assert str(path) in str(e) and "\n" not in str(e)
    return refused


CAPTION = "a small red circle"


def make_clips(folder):
    """An mp4 at another rate and size, a gif, and a directory of PNGs, each moving, with captions beside them."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (40, 90, 3)).astype(np.uint8)
    frames = np.stack([np.roll(image, 3 * i, 1) for i in range(20)])
    save_video(folder / "a.mp4", frames, 16)
    save_video(folder / "b.gif", frames[:10, :32, :48], 8)
    save_video(folder / "c", frames[:9, :, :40], 8)
    for name, caption in (("a", CAPTION), ("b", "a large blue square\n"), ("c", "a white circle")):
        (folder / f"{name}.txt").write_text(caption)
    return folder
