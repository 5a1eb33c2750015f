"""What a run returns, and the names of the files that it is written to."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import logging
import re
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.recipe import PER_ITEM, item_of, read_recipe
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.io.atomic import atomic_write
from cogvideox_flax.io.paths import check_writable, item_paths
from cogvideox_flax.io.source import FrameStream
from cogvideox_flax.io.values import short_repr
from cogvideox_flax.io.video import check_output_path, save_video
from cogvideox_flax.runtime.multihost import hosts

log = logging.getLogger(__name__)

MAX_SHOWN = 8
"""Videos that a notebook shows."""

MAX_SLUG = 40
"""Characters of the prompt in a file's name."""


@dataclass(frozen=True, repr=False)
class GenerationResult:
    """What a run returns.

    frames: uint8 [B, F, H, W, 3]; float32 in [0, 1] for output_type "float"; latents float32 [B, T, h, w, C] for
        "latent" (not unscaled; with the extra frame of 1.5 releases, as the reference returns them, whose axes are
        [B, T, C, h, w], of HunyuanVideo-1.5 [B, C, T, h, w]); a list of
        `FrameStream` from the stages of a long clip.
    fps: frames per second.
    metadata: prompt, seed, release, version and settings of the run.
    crf: of an mp4 that it is saved to; see `save_video`.
    sound: of each item, the clip that it began from, whose sound is saved with it; None where there is none.
    """

    frames: Any
    fps: int
    metadata: dict[str, Any] = field(default_factory=dict)
    crf: int | None = None
    sound: Sequence[Path | None] = ()

    def __repr__(self) -> str:
        if isinstance(self.frames, np.ndarray) and len(self.frames) == 1 and self.frames.ndim == 5:
            count, height, width = self.frames.shape[1:4]
            what = f"{count} frames of {height}x{width}, {self.fps} fps, {self.frames.dtype}"
        elif isinstance(self.frames, np.ndarray):
            what = f"{self.frames.dtype} {list(self.frames.shape)}, {self.fps} fps"
        else:
            what = f"{len(self.frames)} videos, {self.fps} fps"
        return (
            f"<GenerationResult: {what}; {short_repr(self.metadata.get('prompt'))}, seed {self.metadata.get('seed')}>"
        )

    def _repr_html_(self) -> str | None:
        """The videos with prompts and seeds, for a notebook: up to `MAX_SHOWN` of uint8 frames at hand; else None."""
        if not isinstance(self.frames, np.ndarray) or self.frames.dtype != np.uint8:
            return None
        figures = []
        with tempfile.TemporaryDirectory() as folder:
            for i, clip in enumerate(self.frames[:MAX_SHOWN]):
                save_video(path := Path(folder) / "video.mp4", clip, self.fps)
                data = base64.b64encode(path.read_bytes()).decode("ascii")
                prompt, seed = (
                    value[i] if isinstance(value := self.metadata.get(name), list) else value
                    for name in ("prompt", "seed")
                )
                figures.append(
                    f'<figure style="display:inline-block;margin:4px"><video controls loop autoplay muted '
                    f'width="{max(clip.shape[2], 256)}" src="data:video/mp4;base64,{data}"></video>'
                    f"<figcaption>{html.escape(str(prompt))}, seed {seed}</figcaption></figure>"
                )
        if len(self.frames) > MAX_SHOWN:
            figures.append(f"<p>and {len(self.frames) - MAX_SHOWN} more</p>")
        return "".join(figures)

    def save(self, path: str | Path) -> list[Path]:
        """Write one file per item, by the path's suffix (.mp4, .gif, ...); items of a batch are numbered.

        Raises:
            InputError: the frames are not uint8, or the path cannot be written.
        """
        return self.save_items(item_paths(path, len(self.frames)))

    def save_items(self, paths: Sequence[Path]) -> list[Path]:
        """Write each item to a path of its own; errors as for `save`.

        On several hosts process 0 alone writes; the others read along, since frames that are decoded while they are
        read need all hosts.
        """
        if self.frames[0].dtype != np.uint8:
            raise InputError(f"only uint8 frames can be saved; this video holds {self.frames[0].dtype}")
        for i, (name, frames) in enumerate(zip(paths, self.frames, strict=True)):
            if hosts.is_first():
                sound = self.sound[i] if self.sound else None
                save_video(name, frames, self.fps, item_of(self.metadata, i), crf=self.crf, sound=sound)
            elif isinstance(frames, FrameStream):
                deque(frames.parts(), maxlen=0)
        return list(paths)


FIELD = re.compile(r"\{(prompt|seed|n)\}")
"""A field in the name of an output."""


def is_template(out: Path) -> bool:
    """Whether the name of an output has fields.

    Raises:
        InputError: its folder has.
    """
    if FIELD.search(str(out.parent)):
        raise InputError(
            f"--out {out}: {{prompt}}, {{seed}} and {{n}} may stand in the name of the file, not in folders"
        )
    return FIELD.search(out.name) is not None


def slug_of(prompt: str) -> str:
    """The first words of a prompt, as part of a file's name."""
    slug = "-".join(re.findall(r"\w+", prompt.lower()))
    return slug if len(slug) <= MAX_SLUG else slug[: MAX_SLUG + 1].rpartition("-")[0] or slug[:MAX_SLUG]


def fill(out: Path, prompt: str, seed: int, n: int) -> Path:
    """An output with the fields of its name filled: the prompt's first words, the seed, and the number of the video."""
    values = {"prompt": slug_of(prompt) or "no-prompt", "seed": str(seed), "n": f"{n:04}"}
    return out.with_name(FIELD.sub(lambda field: values[field[1]], out.name))


def is_latents(out: Path) -> bool:
    """Whether the output holds latents, not a video."""
    return out.suffix.lower() == ".npz"


def output_paths(out: Path, request: GenerationRequest) -> list[Path]:
    """A path for each video of a request, those of one seed after those of the one before; an npz holds those of all
    prompts.

    Raises:
        InputError: the fields of its name do not tell the videos apart.
    """
    prompts = request.prompt[:1] if is_latents(out) else request.prompt
    if not is_template(out):
        return item_paths(out, len(prompts) * request.num_videos)
    return filled_paths(out, [(prompt, request.seed + i) for i in range(request.num_videos) for prompt in prompts])


def filled_paths(out: Path, videos: Sequence[tuple[str, int]]) -> list[Path]:
    """The output's name with its fields filled, for each prompt and seed.

    Raises:
        InputError: they do not tell the videos apart.
    """
    paths = [fill(out, *video, n) for n, video in enumerate(videos, 1)]
    if twice := next((path for i, path in enumerate(paths) if path in paths[:i]), None):
        raise InputError(f"--out {out} gives two videos the name {twice}; put {{n}} into it")
    return paths


def check_output(
    paths: Sequence[Path], overwrite: bool = False, preview: Path | None = None, *, latents: bool = False
) -> None:
    """Refuse names that could not be written at the end of a run, and files that this library did not write.

    Args:
        overwrite: these may be replaced.
        preview: another file of the run.
        latents: whether these are npz files of latents, not videos.
    """
    if preview is not None and any(preview.absolute() == path.absolute() for path in paths):
        raise InputError(f"{preview} is to hold the video; give --preview another name")
    for path in paths:
        if not latents:
            check_output_path(path)
        else:
            check_writable(path)
            if path.is_dir():
                raise InputError(f"{path} is a directory; give the name of a file to write")
        if not (overwrite or _is_free_or_ours(path)):
            raise InputError(
                f"{path} is there and was not made by this program; give another --out, or --overwrite to replace it"
            )


def _is_free_or_ours(path: Path) -> bool:
    if not (any(path.iterdir()) if path.is_dir() else path.exists()):
        return True
    try:
        return bool(read_recipe(path))
    except InputError:
        return False


@contextmanager
def logging_replaced(paths: Sequence[Path]) -> Iterator[None]:
    """Log which of the files that are written here took the place of others."""
    existing = [path for path in paths if path.exists()]
    yield
    for path in existing:
        log.info("%s was replaced", path)


@hosts.on_process_0
def save_latents(path: Path, latents: Float32[np.ndarray, "B T h w C"], metadata: dict[str, Any]) -> None:
    """Write an npz of `latents`, as the decoder takes them, and of `metadata`, a JSON string."""
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.savez(file, latents=latents, metadata=json.dumps(metadata, ensure_ascii=False))


def items(result: GenerationResult) -> list[GenerationResult]:
    """Each item of a result as a result of its own."""
    return [
        dataclasses.replace(
            result,
            frames=result.frames[i : i + 1],
            metadata=item_of(result.metadata, i),
            sound=result.sound[i : i + 1],
        )
        for i in range(len(result.frames))
    ]


def join(results: Sequence[GenerationResult]) -> GenerationResult:
    """The results of several seeds as one, with all frames at hand."""
    frames = [_in_memory(each.frames) for each in results]
    if len(results) == 1:
        return dataclasses.replace(results[0], frames=frames[0])
    metadata = dict(results[0].metadata)
    for key in (name for name in PER_ITEM if any(name in result.metadata for result in results)):
        each = [(result.metadata.get(key), len(own)) for result, own in zip(results, frames, strict=True)]
        metadata[key] = [x for value, n in each for x in (value if isinstance(value, list) else [value] * n)]
    sound = [path for result in results for path in result.sound]
    return GenerationResult(np.concatenate(frames), results[0].fps, metadata, results[0].crf, sound)


def _in_memory(frames: Any) -> np.ndarray:
    is_stream = isinstance(frames[0], FrameStream)
    return np.stack([np.stack(list(clip)) for clip in frames]) if is_stream else frames
