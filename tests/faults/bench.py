"""The fixtures of the trials: a small model in every form, clips, and each command's result without faults."""

from __future__ import annotations

import hashlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from cogvideox_flax.checkpoint import WEIGHTS_FILE
from cogvideox_flax.io.video import read_video, save_video
from cogvideox_flax.lora import FILE_NAME
from tests.faults.child import Runner
from tests.support.released_layout import save_layout

PROMPT = "a small red circle moves to the left"
SIZE = ("--num-frames", 9, "--height", 32, "--width", 48)
STEPS = 12

TRAINING = """
model = "native"
clips = "clips"
out = "trained"
num_frames = 9
height = 32
width = 48
batch = 2
seed = 7

[lora]
rank = 2

[loop]
steps = 5
save_minutes = 1e-9
log_every = 1
ema_decay = 0.9
"""


@dataclass(frozen=True)
class Bench:
    """A folder of fixtures, and the results and times of commands without faults.

    expected, seconds: by `key_of(argv)`.
    """

    folder: Path
    run: Runner
    expected: dict[str, str]
    seconds: dict[str, float]

    @classmethod
    def make(cls, folder: Path, run: Runner) -> Bench:
        """Convert, quantize, generate and train once."""
        layout = save_layout(folder / "layout", "cogvideox-5b")
        as_hub(layout, folder / "hub")
        bench = cls(folder, run, {}, {})
        first = bench.trial_folder("first", bare=True)
        for argv in (bench.convert(), bench.quantize(), bench.generate(), bench.generate("video.mp4"), bench.train()):
            if argv[1] == "generate":
                shutil.rmtree(first / "run", ignore_errors=True)
            if argv[1] == "train":
                make_clips(first / "clips")
                (first / "train.toml").write_text(TRAINING)
            start = time.monotonic()
            ended = run(argv, first)
            if ended.code:
                raise RuntimeError(f"{argv} failed without a fault: {ended.err}")
            bench.seconds[key_of(argv)] = time.monotonic() - start
            bench.expected[key_of(argv)] = bench.result(argv, first)
        tensors = load_file(first / "trained" / FILE_NAME)
        save_file(tensors, first / "foreign.safetensors")  # as other programs write it: without our checksum
        (first / "prompts.txt").write_text(PROMPT + "\n")
        first.rename(folder / "whole")
        return bench

    # the commands, as they are run in a trial's folder

    def convert(self) -> list[object]:
        return ["conversion", self.folder / "hub" / "snapshots" / "main", "native"]

    def quantize(self) -> list[object]:
        return ["cogvideox", "quantize", "native", "small"]

    def generate(self, out: str = "latents.npz", *more: object) -> list[object]:
        command = ["cogvideox", "generate", PROMPT, "--model", "native", "--dtype", "float32"]
        return [*command, *SIZE, "--steps", STEPS, "--dir", "run", "--out", out, *more]

    def train(self) -> list[object]:
        return ["cogvideox", "train", "--config", "train.toml"]

    def trial_folder(self, name: str, *, bare: bool = False, without: tuple[str, ...] = ()) -> Path:
        """A new folder for a trial, with all files of a run without faults.

        bare: an empty folder. without: files to leave out.
        """
        folder = self.folder / name
        if bare:
            folder.mkdir()
            return folder
        shutil.copytree(self.folder / "whole", folder)
        for left_out in without:
            path = folder / left_out
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return folder

    def result(self, argv: list[object], folder: Path) -> str:
        """What a command made, as a hash of what matters in it."""
        match argv[:2]:
            case ["conversion", _]:
                return weights_of(folder / "native")
            case [_, "quantize"]:
                return weights_of(folder / "small")
            case [_, "train"]:
                return arrays_of(load_file(folder / "trained" / FILE_NAME))
        out = folder / str(argv[argv.index("--out") + 1])
        return arrays_of({"": np.load(out)["latents"] if out.suffix == ".npz" else read_video(out)[0]})

    def is_right(self, argv: list[object], folder: Path) -> bool:
        """Whether a command's result is what it is without faults."""
        return self.result(argv, folder) == self.expected[key_of(argv)]


def key_of(argv: list[object]) -> str:
    return " ".join(map(str, argv))


def arrays_of(arrays: dict[str, np.ndarray]) -> str:
    """A hash of arrays and their names; the order of a file's metadata is by chance."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def weights_of(native: Path) -> str:
    """The weights and the tokenizer of a native checkpoint."""
    return " ".join(_hash(path) for path in sorted([*native.glob(f"*/{WEIGHTS_FILE}"), *native.glob("tokenizer/*")]))


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def as_hub(layout: Path, cache: Path) -> None:
    """A layout as the hub's cache has it: files named by their hash, and a snapshot of links to them."""
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "main"
    blobs.mkdir(parents=True)
    for path in sorted(p for p in layout.rglob("*") if p.is_file()):
        data = path.read_bytes()
        large = path.suffix in (".safetensors", ".model")
        name = hashlib.sha256(data) if large else hashlib.sha1(b"blob %d\0" % len(data) + data)
        blob, link = blobs / name.hexdigest(), snapshot / path.relative_to(layout)
        blob.write_bytes(data)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)


def make_clips(folder: Path) -> None:
    """An mp4, a gif and a directory of PNGs, each with its caption."""
    folder.mkdir()
    image = np.random.default_rng(0).integers(0, 256, (40, 64, 3)).astype(np.uint8)
    frames = np.stack([np.roll(image, 3 * i, 1) for i in range(12)])
    for name in ("a.mp4", "b.gif", "c"):
        save_video(folder / name, frames, 8)
        (folder / f"{Path(name).stem}.txt").write_text(f"a circle in {name}")


__all__ = ["PROMPT", "Bench", "weights_of"]
