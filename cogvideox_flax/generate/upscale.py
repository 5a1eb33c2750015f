"""Upscaling of clips in one step, by a text-to-video model that was fine-tuned for it: DOVE (arXiv 2505.16239).

A clip is enlarged bilinearly, encoded, restored by one step of the denoiser at timestep 399 with an empty prompt, and
decoded. Large frames are cut into tiles of one size, long clips into chunks of one length: one compiled program serves
all of them, and memory does not grow with the clip. Overlaps are blended linearly.

Source: inference_script.py of github.com/zhengchen1999/DOVE. It differs in what is outside of the model: there the
seams lie in the middle of overlaps, and the last tile of a row is larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Num, UInt8
from PIL import Image

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.encode import Conditioning
from cogvideox_flax.generate.events import Finished, last_of, result_of
from cogvideox_flax.generate.journey import encode_text, make_videos
from cogvideox_flax.generate.media import Media, frames_of
from cogvideox_flax.generate.open_model import OpenModel
from cogvideox_flax.generate.recipe import recipe
from cogvideox_flax.generate.request import GenerationRequest, check_option
from cogvideox_flax.generate.resolve import check_run, resolve
from cogvideox_flax.generate.run import ProgramCall, Run
from cogvideox_flax.generate.store import Memory
from cogvideox_flax.generate.tiles import Windows, enlarge
from cogvideox_flax.generate.upscale_options import UpscaleOptions
from cogvideox_flax.io import limits
from cogvideox_flax.io.arrays import from_torch
from cogvideox_flax.io.source import Frames, VideoInfo, VideoSource
from cogvideox_flax.io.values import is_count, short_repr
from cogvideox_flax.io.video import HashedVideo
from cogvideox_flax.runtime.terminal import Progress, reliable_interrupts

SIDE_STEP, FRAME_STEP = 16, 8
"""The clip is padded to a multiple of 16 pixels before it is enlarged, and to 8 n + 1 frames, as in the source."""
SCHEDULER = "one_step"

RunTile = Callable[[Float32[np.ndarray, "F h w 3"]], Float32[np.ndarray, "F h w 3"]]
"""One tile of one chunk, in [0, 255] -> restored, in [0, 1]."""

TileCallback = Callable[[int, int], None]
"""callback(done, total): how many tiles are restored, of how many."""


@dataclass(frozen=True)
class TileLayout:
    """The tiles and windows of a clip and the run of each, known without weights.

    clip: its own properties.
    axes: the windows over frames, height and width of the enlarged clip with its padding.
    run: of one window; the clip in it is a stand-in.
    """

    clip: VideoInfo
    scale: int
    axes: tuple[Windows, Windows, Windows]
    run: Run

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[F, H, W, 3] of the result."""
        return self.clip.num_frames, self.clip.height * self.scale, self.clip.width * self.scale, 3

    @property
    def window(self) -> tuple[int, ...]:
        """(frames, height, width) of a tile of a chunk."""
        return tuple(axis.size for axis in self.axes)


def tile_layout(manifest: Manifest, clip: VideoInfo, options: UpscaleOptions, dtype: str | None = None) -> TileLayout:
    """Lay out the windows of a clip, and check everything that needs no weights.

    Raises:
        InputError: not a text-to-video model, options out of range, or a result beyond `io.limits`.
    """
    model = manifest.model
    if "video" not in [stage.input for stage in model.visual] or SCHEDULER not in model.schedulers:
        raise InputError(
            "upscaling starts from a clip's latents, which takes a text-to-video model fine-tuned for it, such as "
            "DOVE; this model takes other inputs"
        )
    _check_options(options)
    height, width = (-(-side // SIDE_STEP) * SIDE_STEP * options.scale for side in (clip.height, clip.width))
    limits.check_count(Path("the clip"), clip.num_frames)
    limits.check_size(Path("the upscaled clip"), height, width)
    frames = -(-(clip.num_frames - 1) // FRAME_STEP) * FRAME_STEP + 1
    tile_height, tile_width = options.tile or (height, width)
    chunk = options.chunk or model.size_rule.fit_frames(min(frames, model.defaults.max_frames))
    window = min(chunk, frames), min(tile_height, height), min(tile_width, width)
    padded = clip.num_frames if window[0] < clip.num_frames else frames, height, width
    overlaps = options.chunk_overlap, options.overlap, options.overlap
    over_time, down, across = (
        Windows(length, size, overlap if size < length else 0)
        for length, size, overlap in zip(padded, window, overlaps, strict=True)
    )
    if over_time.overlap >= over_time.size:
        raise InputError(
            f"chunks of {over_time.size} frames overlap by {over_time.overlap}; expected fewer. Use longer chunks or a "
            "smaller overlap"
        )
    stand_in = Media("a tile", "", window[1], window[2], window[0], np.empty((0, *window[1:], 3), np.float32))
    how: dict[str, Any] = dict(zip(("num_frames", "height", "width"), window, strict=True))
    how |= {"scheduler": SCHEDULER, "seed": options.seed, "tiling": options.tiling}
    run = resolve(GenerationRequest("", video=[stand_in], output_type="float", **how), manifest, dtype)
    return TileLayout(clip, options.scale, (over_time, down, across), run)


def _check_options(options: UpscaleOptions) -> None:
    faults = []
    for name in ("scale", "overlap", "chunk_overlap"):
        try:
            check_option(name, getattr(options, name), UpscaleOptions)
        except InputError as e:
            faults.append(str(e))
    sides: Any = () if options.tile is None else options.tile
    if options.tile is not None and not (isinstance(sides, tuple | list) and len(sides) == 2):
        faults.append(f"tile is {short_repr(sides)}; expected (height, width) in pixels")
        sides = ()
    for name, side in zip(("height", "width"), sides, strict=False):
        if not is_count(side, limits.MAX_PIXELS) or side % SIDE_STEP:
            faults.append(f"the tile's {name} is {short_repr(side)}; expected a multiple of {SIDE_STEP} pixels")
        elif not faults and options.overlap >= side:
            faults.append(f"overlap is {options.overlap}; expected less than the tile's {name}, {side}")
    if options.chunk is not None and not (
        is_count(options.chunk, limits.MAX_FRAMES) and options.chunk % FRAME_STEP == 1
    ):
        faults.append(f"chunk is {short_repr(options.chunk)}; expected {FRAME_STEP} n + 1 frames, such as 33")
    if faults:
        raise InputError("\n".join(faults))


def upscale(
    pipe: OpenModel,
    video: str | Path | Frames | list[Image.Image],
    options: UpscaleOptions | None = None,
    *,
    progress: bool = True,
    callback: TileCallback | None = None,
) -> UInt8[np.ndarray, "F H W 3"]:
    """Upscale a clip, in memory; `upscale_frames` gives the frames as they are finished.

    Args:
        pipe: a text-to-video model that was fine-tuned for it.
        video: a path, a folder of images, a list of PIL images or uint8 [F, h, w, 3].
        progress: say what is compiled and show a bar, on stderr.
        callback: called after each tile of each chunk; what it raises ends the upscaling.

    Returns:
        uint8 frames of the clip's count and `scale` times its size.

    Raises:
        InputError: as for `tile_layout`, before anything is loaded; or a frame cannot be decoded.
    """
    video = from_torch(video)
    if isinstance(video, list):
        video = frames_of([from_torch(frame) for frame in video])
    source = _Array(video) if isinstance(video, np.ndarray) else HashedVideo(video)
    layout = tile_layout(pipe.manifest, source.info, options or UpscaleOptions(), pipe.dtype)
    check_memory(pipe, layout, progress=progress)
    run_tile = tile_runner(pipe, layout, progress)
    return np.concatenate(list(upscale_frames(source, layout, run_tile, progress=progress, callback=callback)))


@dataclass(frozen=True)
class _Array:
    """A `VideoSource` of frames in memory."""

    array: Frames

    def __post_init__(self) -> None:
        if self.array.dtype != np.uint8 or self.array.ndim != 4 or self.array.shape[-1] != 3:
            found = f"{self.array.dtype} {list(self.array.shape)}"
            raise InputError(f"a video must be a path, a list of PIL images or uint8 [F, H, W, 3]; got {found}")

    @property
    def info(self) -> VideoInfo:
        return VideoInfo(len(self.array), 0, *self.array.shape[1:3])

    def frames(self, indices: Any) -> Iterator[tuple[int, Frames]]:
        return ((i, self.array[i]) for i in indices)


def check_memory(model: OpenModel, layout: TileLayout, *, progress: bool = True) -> None:
    """Compile what a window needs before anything is loaded, and refuse what the devices cannot hold.

    The text encoder leaves before the denoiser comes; the denoiser stays while the decoder works.

    Raises:
        InputError: with the numbers and what to change.
    """
    check_run(layout.run, model.mesh, model.profiling)

    def programs(*stages: str) -> Iterator[tuple[str, Sequence[ProgramCall]]]:
        return ((stage, layout.run.abstract(stage, model.mesh)) for stage in stages)

    try:
        result_of(model.checking_memory(programs("encode"), keep=False), progress)
        result_of(model.checking_memory(programs("denoise", "decode")), progress)
    except InputError as e:
        raise InputError(f"{e} Here: smaller tiles (--tile 512x512) or shorter chunks (--chunk 17).") from e


def tile_runner(model: OpenModel, layout: TileLayout, progress: bool = True) -> RunTile:
    """What upscales one window with a model. The empty prompt is encoded once, with the first window."""
    text: list[Conditioning] = []

    def run_tile(tile: Float32[np.ndarray, "F h w 3"]) -> Float32[np.ndarray, "F h w 3"]:
        frames, height, width, _ = tile.shape
        run = layout.run.varied(video=[Media("a tile", "", height, width, frames, tile)])
        if not text:
            text.append(result_of(encode_text(model, run), progress))
            model.release(*(stage.component for stage in model.manifest.model.text))
        last = last_of(make_videos(model, run, Memory(text[0])), progress, bar=False)
        assert isinstance(last, Finished)
        return last.result.frames[0]

    return run_tile


def upscale_frames(
    source: VideoSource,
    layout: TileLayout,
    run_tile: RunTile,
    *,
    progress: bool = True,
    callback: TileCallback | None = None,
) -> Iterator[UInt8[np.ndarray, "F H W 3"]]:
    """The frames of the result, some at a time, in order. Peak memory is about a chunk of them in float32.

    Raises:
        InputError: a frame cannot be decoded.
    """
    starts, weights = layout.axes[0].starts, layout.axes[0].weights
    count, height, width, _ = layout.shape
    pending = np.zeros((0, height, width, 3), np.float32)
    total = math.prod(len(axis.starts) for axis in layout.axes)
    with reliable_interrupts(), closing(Progress("upscaling", total, unit="tile", shown=progress)) as bar:
        for i, start in enumerate(starts):

            def run(tile: Float32[np.ndarray, "F h w 3"]) -> Float32[np.ndarray, "F h w 3"]:
                done = run_tile(tile)
                bar.advance_to(bar.done + 1)
                if callback is not None:
                    callback(bar.done, total)
                return done

            clip = _read(source, layout, start)
            chunk = _upscale_chunk(clip, layout, run)[:, :height, :width]
            if len(starts) > 1:
                chunk *= weights[i][:, None, None, None]
                chunk[: len(pending)] += pending
            finished = (starts[i + 1] if i + 1 < len(starts) else count) - start
            yield np.stack([np.round(255 * np.clip(frame, 0, 1)).astype(np.uint8) for frame in chunk[:finished]])
            pending = chunk[finished:].copy()


def describe(layout: TileLayout, model: OpenModel, clip: Path) -> dict[str, Any]:
    """What is stored with the result."""
    names = ("prompt", "negative_prompt", "seed", "scheduler")
    made_of: dict[str, Any] = {name: getattr(layout.run.request, name) for name in names}
    made_of |= {"clip": str(clip), "scale": layout.scale, "window": layout.window}
    made_of |= {"overlaps": tuple(axis.overlap for axis in layout.axes)}
    made_of |= {"dtype": model.dtype, "tiling": layout.run.request.tiling}
    return recipe(made_of, model.manifest, model.native_dir.name, model.fingerprints())


def _read(source: VideoSource, layout: TileLayout, start: int) -> UInt8[np.ndarray, "F h w 3"]:
    """The frames of a chunk: the last one repeated, and zeros at the right and at the bottom."""
    info, (over_time, *sides) = layout.clip, layout.axes
    stop = min(start + over_time.size, info.num_frames)
    clip = np.zeros((over_time.size, *(side.length // layout.scale for side in sides), 3), np.uint8)
    for i, frame in source.frames(range(start, stop)):
        clip[i - start, : info.height, : info.width] = frame
    clip[stop - start :] = clip[stop - start - 1]
    return clip


def _upscale_chunk(
    clip: Num[np.ndarray, "F h w 3"], layout: TileLayout, run_tile: RunTile
) -> Float32[np.ndarray, "F H W 3"]:
    """A padded chunk enlarged, restored tile by tile and blended; in [0, 1]."""
    _, down, across = layout.axes
    result = np.zeros((len(clip), down.length, across.length, 3), np.float32)
    for top, by_row in zip(down.starts, down.weights, strict=True):
        for left, by_column in zip(across.starts, across.weights, strict=True):
            rows, columns = slice(top, top + down.size), slice(left, left + across.size)
            tile = run_tile(enlarge(clip, layout.scale, rows, columns))
            result[:, rows, columns] += tile * (by_row[:, None] * by_column)[:, :, None]
    return result
