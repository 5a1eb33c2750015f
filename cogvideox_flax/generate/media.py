"""Images and clips that a request gives: checked when it is resolved, read when they are encoded."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.io import limits
from cogvideox_flax.io.arrays import channels_last_advice, from_torch
from cogvideox_flax.io.clips import Resampled, fit_frames, resize_frames
from cogvideox_flax.io.containers import has_sound
from cogvideox_flax.io.contents import Contents, content_hash
from cogvideox_flax.io.images import decoding, is_one_image, read_image, to_rgb
from cogvideox_flax.io.paths import expand_user
from cogvideox_flax.io.source import DEMUXERS, Frames, format_of
from cogvideox_flax.io.values import is_count
from cogvideox_flax.io.video import HashedVideo
from cogvideox_flax.models.model import VideoModel
from cogvideox_flax.runtime.multihost import hosts

log = logging.getLogger(__name__)

IMAGES, CLIPS = ("image", "last_image"), ("video", "control_video")
MASK = "mask_video"
MEDIA = (*IMAGES, *CLIPS, MASK)
"""Fields of the request."""


@dataclass(frozen=True)
class Media:
    """An image or clip that was checked.

    file: its path, or what it is.
    sha256: of its contents.
    height, width: pixels.
    num_frames: at the model's frame rate; 1 for an image.
    source: its frames; None where only the facts are known: on other hosts than the first, and after stage 1.
    """

    file: str
    sha256: str
    height: int
    width: int
    num_frames: int
    source: Frames | Resampled | None = dataclasses.field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Media:
        """What `facts` gave, without its frames."""
        return cls(**{name: facts[name] for name in UNSEEN.facts()})

    def facts(self) -> dict[str, Any]:
        """All but the frames, as JSON values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "source"}

    @property
    def dtype(self) -> np.dtype:
        """Of its frames: uint8, or float32 in [0, 255] where a caller within the library has such."""
        return self.source.dtype if isinstance(self.source, np.ndarray) else np.dtype(np.uint8)

    def read(self, num_frames: int, height: int, width: int, fit: str) -> Frames:
        """The first `num_frames` frames in this size; the last one is repeated where there are fewer.

        Raises:
            InputError: one cannot be decoded, the file is not as it was hashed, or the frames are not at hand.
        """
        indices = np.minimum(np.arange(num_frames), self.num_frames - 1)
        if isinstance(self.source, Resampled):
            return self.source.read(indices.tolist(), height, width, fit)
        if self.source is None:
            raise InputError(f"{self.file} is known by its hash only; give the file again to encode it")
        if self.source.shape[1:3] == (height, width):
            return self.source[indices]
        return fit_frames(self.source[:num_frames], height, width, fit)[indices]


UNSEEN = Media("an image or clip", "", 0, 0, 0)
"""Stands for any of them where a run is only planned."""


def describe_media(values: Mapping[str, Any]) -> dict[str, Any]:
    """Field -> file and hash of each image or clip, for the metadata of a video."""
    given = {name: values[name] for name in MEDIA if values.get(name)}
    return {name: [{"file": each.file, "sha256": each.sha256} for each in media] for name, media in given.items()}


def resolve_media(model: VideoModel, given: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Check the images and clips of a request.

    Args:
        given: field of the request -> its value; None where there is none.
        batch: how many prompts there are.

    Returns:
        Field -> list of `Media`, one for all prompts or one each, for the fields that are given.

    Raises:
        InputError: an input that the model does not take or that is missing, or cannot be read; all faults in one
            message.
    """
    names = [name for name in MEDIA if given.get(name) is not None]
    model.check_inputs(names)
    fps = model.defaults.fps
    media: dict[str, Any] = {}
    for name in names:
        values = [from_torch(x) for x in (given[name] if isinstance(given[name], list | tuple) else [given[name]])]
        if _is_frames(values) and (name in CLIPS or (name == MASK and len(values) not in (1, batch))):
            values = [values]
        if len(values) not in (1, batch):
            raise InputError(f"{name}: {len(values)} for {batch} prompts; give one for all, or one each")
        media[name] = [_check(name, value, fps) for value in values]
    if MASK in media:
        _check_masks(media[MASK], media["video"])
    return media


def frames_of_clips(model: VideoModel, found: Mapping[str, Any], any_length: bool) -> int | None:
    """The frame count that goes with the clips of `resolve_media`; None if there are none.

    any_length: also beyond what the model was trained on.
    """
    lengths = [clip.num_frames for name in CLIPS for clip in found.get(name, ()) if clip is not UNSEEN]
    if not lengths:
        return None
    return model.size_rule.fit_frames(min(lengths) if any_length else min(*lengths, model.defaults.max_frames))


def size_from_image(
    model: VideoModel, found: Mapping[str, Any], asked: tuple[int | None, int | None]
) -> tuple[int | None, int | None]:
    """The height and width to ask `resolve_size` for: those asked for, or what goes with the first image given."""
    images = [image for name in IMAGES for image in found.get(name, ()) if image is not UNSEEN]
    if asked != (None, None) or not images:
        return asked
    return model.size_from_image(images[0].height, images[0].width) or asked


def _check(name: str, value: Any, fps: float) -> Media:
    if isinstance(value, Media):
        if value is not UNSEEN:  # out of a file, perhaps
            limits.check_size(Path(value.file), value.height, value.width)
            limits.check_count(Path(value.file), value.num_frames)
        return value
    is_image = name in IMAGES or (name == MASK and _is_image(value))
    ground = "black" if name == MASK else "white"  # where nothing is drawn on a mask, the video is kept
    return _open_image(value, ground) if is_image else _open_clip(value, fps, ground)


def _open_image(value: Any, ground: str) -> Media:
    if isinstance(value, str | os.PathLike):
        path = expand_user(os.fspath(value))
        if not path.is_file():
            raise InputError(f"there is no image {path}")
        contents = Contents.of(path, [path])
        with contents.reading():
            image = read_image(path, ground=ground)
        return _media(str(path), image[None], contents.sha256)
    if isinstance(value, Image.Image):
        limits.check_size(Path("the PIL image"), value.height, value.width)
        with decoding("the PIL image"):
            value = to_rgb(value, ground)
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 3 or value.shape[-1] != 3:
        raise InputError(f"an image must be a path, a PIL image or uint8 [H, W, 3]; got {_kind(value)}")
    return _media("an array", value[None])


def _open_clip(value: Any, fps: float, ground: str) -> Media:
    if isinstance(value, str | os.PathLike):
        path = expand_user(os.fspath(value))
        if path.is_file() and format_of(path) not in (*DEMUXERS, "gif") and is_one_image(path):
            raise InputError(f"{path} is one image, and a clip was expected; a first frame is given as --image")
        video = HashedVideo(path, ground)
        clip, info = Resampled.at(video, fps), video.info
        return Media(str(path), video.contents.sha256, info.height, info.width, clip.count, clip)
    if _is_frames(value):
        value = frames_of(value, ground)
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 4 or value.shape[-1] != 3:
        raise InputError(f"a video must be a path, a list of PIL images or uint8 [F, H, W, 3]; got {_kind(value)}")
    return _media("an array", value)


def _is_frames(value: Any) -> bool:
    """Whether these are the frames of one clip: PIL images or uint8 [H, W, 3]."""

    def is_frame(x: Any) -> bool:
        is_array = isinstance(x, np.ndarray) and x.dtype == np.uint8 and x.shape[2:] == (3,)
        return is_array or isinstance(x, Image.Image)

    return isinstance(value, list | tuple) and len(value) > 0 and all(map(is_frame, value))


def frames_of(images: Sequence[Image.Image | np.ndarray], ground: str = "white") -> Frames:
    """PIL images or uint8 [H, W, 3] of one size as the frames of a clip.

    ground: the colour of transparent parts.
    """
    pil = [Image.fromarray(image) if isinstance(image, np.ndarray) else image for image in images]
    limits.check_size(Path("the PIL images"), pil[0].height, pil[0].width)
    with decoding("the PIL images"):
        frames = [to_rgb(image, ground) for image in pil]
    if len(sizes := {frame.shape[:2] for frame in frames}) > 1:
        named = ", ".join(f"{width}x{height}" for height, width in sorted(sizes)[:4])
        raise InputError(f"the PIL images of a clip have different sizes: {named}")
    return np.stack(frames)


def _is_image(mask: Any) -> bool:
    """Whether a mask is one image, and not a clip."""
    if isinstance(mask, str | os.PathLike):
        path = expand_user(os.fspath(mask))
        kind = format_of(path) if path.is_file() else "none"
        return kind not in (*DEMUXERS, "gif", "none") and (kind != "webp" or is_one_image(path))
    if _is_frames(mask):
        return False
    if not isinstance(mask, Image.Image | np.ndarray):
        raise InputError(
            f"a mask must be a path, one or a list of PIL images, uint8 [F, H, W, 3] or [H, W, 3]; got {_kind(mask)}"
        )
    return isinstance(mask, Image.Image) or mask.ndim == 3


def _is_white(mask: UInt8[np.ndarray, "*shape 3"]) -> Bool[np.ndarray, "*shape"]:
    """Where a mask's grey level is 128 and above: what is made anew."""
    red, green, blue = np.moveaxis(mask, -1, 0)
    return (red * np.uint16(77) + green * np.uint16(150) + blue * np.uint16(29)) >> 8 >= 128  # Rec. 601


def _check_masks(masks: Sequence[Media], videos: Sequence[Media]) -> None:
    """Refuse masks that do not lie on their videos."""
    count = max(len(masks), len(videos))
    for i in range(count):
        mask, video = masks[i % len(masks)], videos[i % len(videos)]
        if mask is UNSEEN or video is UNSEEN:
            continue
        if mask.num_frames not in (1, video.num_frames):
            raise InputError(
                f"the mask {mask.file} has {mask.num_frames} frames at the model's rate, the video {video.file} has "
                f"{video.num_frames}; give as many, or one image for all frames"
            )
        if abs(mask.height * video.width - mask.width * video.height) > 0.01 * mask.height * video.width:
            raise InputError(
                f"the mask {mask.file} is {mask.width}x{mask.height}, the video {video.file} "
                f"{video.width}x{video.height}; give a mask of the video's aspect ratio"
            )


def _media(name: str, frames: Frames, sha256: str | None = None) -> Media:
    count, height, width, _ = frames.shape
    limits.check_size(Path(name), height, width)
    limits.check_count(Path(name), count)
    return Media(name, sha256 or hashlib.sha256(frames.tobytes()).hexdigest(), height, width, count, frames)


def _kind(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return type(value).__name__
    is_float = np.issubdtype(value.dtype, np.floating)
    scale = ". Of floats in [0, 1], give round(255 x) as uint8" if is_float else ""
    return f"{value.dtype} {list(value.shape)}{channels_last_advice(value.shape, 3)}{scale}"


def resolve_strength(strength: float | None, has_video: bool, has_mask: bool, num_inference_steps: Any) -> float | None:
    """The share of the steps that a run from a video does; None for a run from noise.

    The default is 0.8; with a mask, which says what is kept, it is 1.

    Raises:
        InputError: too small for one step, or given without a video.
    """
    if not has_video:
        if strength is not None:
            raise InputError("strength is how far a given video is changed; give --video, or leave strength out")
        return None
    value = (1.0 if has_mask else 0.8) if strength is None else strength
    if is_count(num_inference_steps, 10**6) and int(num_inference_steps * value) < 1:
        raise InputError(
            f"strength {value:g} of {num_inference_steps} steps is less than one step; "
            f"use {1 / num_inference_steps:.3g} or more"
        )
    return value


def check_image_scale(model: VideoModel, image_scale: Any) -> None:
    """Refuse a factor of the image's latents for a model that sees the image in a masked video."""
    masked = any(stage.input == "image" and stage.mask_channels for stage in model.visual)
    if masked and image_scale is not None:
        raise InputError("image_scale is for image-to-video models; leave it out")


def describe_fit(name: str, media: Media, num_frames: int, height: int, width: int, fit: str) -> str | None:
    """What of an image or clip does not reach the model, as a sentence; None if all of it does.

    Of a mask, whether it changes nothing: its size and length are those of its video.

    Raises:
        InputError: a control clip is too short.
    """
    if name == MASK and isinstance(media.source, np.ndarray) and not _is_white(media.source).any():
        return f"{media.file}: the mask is white nowhere, so nothing is made anew; paint white what shall be"
    if media is UNSEEN or name == MASK:
        return None
    if name == "control_video" and media.num_frames < num_frames:
        raise InputError(
            f"{media.file} controls {media.num_frames} frames at the model's rate; the video has {num_frames}"
        )
    said = []
    if abs(media.height * width - media.width * height) > 0.01 * media.height * width:
        how = "its middle is used" if fit == "crop" else "it is distorted"
        said.append(f"{media.width}x{media.height} has another aspect ratio than {width}x{height}, {how}")
    if name in CLIPS and media.num_frames > num_frames:
        said.append(f"the last {media.num_frames - num_frames} of {media.num_frames} frames are not used")
    if name in CLIPS and media.num_frames < num_frames:
        said.append(f"its last frame is repeated {num_frames - media.num_frames} times")
    return f"{media.file}: {'; '.join(said)}" if said else None


def clips_with_sound(clips: Sequence[Media] | None, batch: int, speed: float) -> list[Path | None]:
    """Of each video of a batch, the clip that it begins from if that has sound which goes with it.

    speed: at which the video is played, of the clip's own; at another than 1 a line says that its sound is left out.
    """
    paths: list[Path | None] = []
    for clip in clips or ():
        path = Path(clip.file)
        is_there = path.is_file() and content_hash(path) == clip.sha256 and has_sound(path)
        if is_there and speed != 1:
            log.warning("the sound of %s is left out: the video is played at %g of its speed", path, speed)
        paths.append(path if is_there and speed == 1 else None)
    return paths * (batch // max(len(paths), 1))


def read_media(
    media: Sequence[Media], shape: Sequence[int], fit: str, video: tuple[int, int] | None = None
) -> UInt8[np.ndarray, "B F H W 3"]:
    """The frames of images or clips in a shape [B, F, H, W, 3], on every host; one may stand for all of the batch.

    video: height and width of the video. Frames of another size are those of the video, resized.
    """
    batch, num_frames, height, width, _ = shape

    @hosts.broadcast_result
    def read() -> UInt8[np.ndarray, "N F H W 3"]:
        clips = [each.read(num_frames, *(video or (height, width)), fit) for each in media]
        is_resized = video not in (None, (height, width))
        return np.stack([resize_frames(frames, height, width) for frames in clips] if is_resized else clips)

    return np.repeat(read(), batch // len(media), 0)


def read_masked(
    given: Mapping[str, Sequence[Media] | None], shape: Sequence[int], fit: str
) -> UInt8[np.ndarray, "B F H W 4"]:
    """A video and its mask: a request's video with its mask; or its images, with everything else masked.

    Args:
        given: field of the request -> its images or clips.
        shape: [B, F, H, W, 4].

    Returns:
        The last channel is 255 where the video is made anew, else 0.
    """
    batch, num_frames, height, width, _ = shape
    frames = np.zeros(shape, np.uint8)
    frames[..., 3] = 255
    if (video := given["video"]) is not None:
        frames[..., :3] = read_media(video, (*shape[:4], 3), fit)
        if (mask := given[MASK]) is not None:
            # thresholded in grey after it was resized, as in the reference
            frames[..., 3] = np.where(_is_white(read_media(mask, (*shape[:4], 3), fit)), 255, 0)
    for name, at in (("image", 0), ("last_image", num_frames - 1)):
        if (image := given[name]) is not None:
            frames[:, at, ..., :3] = read_media(image, (batch, 1, height, width, 3), fit)[:, 0]
            frames[:, at, ..., 3] = 0
    return frames
