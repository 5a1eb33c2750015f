"""Pictures and video files for tests, these made and decoded by ffmpeg alone; the memory that reading one takes."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import processes
from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.video import count_frames, read_metadata, read_video, save_video

ROOT = Path(__file__).resolve().parents[1]
EXACT = "scale=flags=accurate_rnd+full_chroma_int+full_chroma_inp"


def smooth(seed: int, *shape: int) -> np.ndarray:
    """Random pictures with large structures, uint8 [..., H, W, 3]."""
    small = np.random.default_rng(seed).integers(0, 256, (*shape[:-2], 4, 6, 3), np.uint8)
    frames = [
        np.asarray(Image.fromarray(each).resize(shape[:-3:-1], Image.Resampling.BICUBIC))
        for each in small.reshape(-1, 4, 6, 3)
    ]
    return np.stack(frames).reshape(*shape, 3)


def ffmpeg(*arguments: object) -> bytes:
    """Run ffmpeg; returns what it writes to stdout."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-nostdin", "-loglevel", "error", "-y"]
    done = processes.run([*command, *arguments], text=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pattern(width: int = 64, height: int = 48, rate: object = 24, seconds: float = 6) -> list[str]:
    """Arguments for a source whose frames are all different."""
    return ["-f", "lavfi", "-i", f"testsrc2=s={width}x{height}:r={rate}:d={seconds}"]


def whole(path: Path) -> np.ndarray:
    """Every frame of a video in the plainest way: one command, no seeking."""
    size = re.search(r"#dimensions 0: (\d+)x(\d+)", ffmpeg("-i", path, "-frames:v", 1, "-f", "framecrc", "-").decode())
    assert size
    raw = ffmpeg("-i", path, "-map", "0:V:0", "-vf", EXACT, "-pix_fmt", "rgb24", "-f", "rawvideo", "-")
    return np.frombuffer(raw, np.uint8).reshape(-1, int(size[2]), int(size[1]), 3)


_MEASURED = """
import json, os, sys, time
from pathlib import Path
from cogvideox_flax.training.clips import load_clip

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024

before, began = peak(), time.monotonic()
clip = load_clip(Path(sys.argv[1]), 9, 32, 48, 8)
print(json.dumps({"shape": clip.shape, "python": peak() - before, "seconds": time.monotonic() - began}))
"""

_WRAPPER = """#!{python} -SE
import os, sys
pid = os.spawnv(os.P_NOWAIT, {ffmpeg!r}, ["ffmpeg", *sys.argv[1:]])
_, status, usage = os.wait4(pid, 0)
with open({log!r}, "a") as log:
    log.write(str(usage.ru_maxrss) + "\\n")
sys.exit(os.waitstatus_to_exitcode(status) % 256)
"""


def cost_of_loading(path: Path, folder: Path) -> dict:
    """What a new process takes to load 9 frames of 32x48 at 8 per second.

    Returns:
        python: MiB at its peak above what it had before; ffmpeg: MiB of its largest child; seconds; shape.
    """
    log, wrapper = folder / "ffmpeg.log", folder / "ffmpeg"
    log.touch()
    text = _WRAPPER.format(python=sys.executable, ffmpeg=imageio_ffmpeg.get_ffmpeg_exe(), log=str(log))
    wrapper.write_text(text)
    wrapper.chmod(0o755)
    env = os.environ | {"IMAGEIO_FFMPEG_EXE": str(wrapper), "PYTHONPATH": str(ROOT)}
    run = processes.run([sys.executable, "-c", _MEASURED, path], env=env)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout) | {"ffmpeg": max(map(int, log.read_text().split()), default=0) / 1024}


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
    picture = random.integers(0, 256, (40, 90, 3)).astype(np.uint8)
    frames = np.stack([np.roll(picture, 3 * i, 1) for i in range(20)])
    save_video(folder / "a.mp4", frames, 16)
    save_video(folder / "b.gif", frames[:10, :32, :48], 8)
    save_video(folder / "c", frames[:9, :, :40], 8)
    for name, caption in (("a", CAPTION), ("b", "a large blue square\n"), ("c", "a white circle")):
        (folder / f"{name}.txt").write_text(caption)
    return folder
