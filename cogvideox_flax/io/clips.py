"""Images and clips in the size and frame rate of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from cogvideox_flax.io.source import Frame, Frames, VideoSource

_MAX_WHOLE = 8
"""How many times the pixels of the result a frame may have after it is resized, before it is cropped."""


@dataclass(frozen=True)
class Resampled:
    """The frames of a video at another frame rate, each the nearest one in time.

    ratio: frames of the video per frame of the clip; a video without a rate of its own is not resampled.
    count: how many frames there are at the new rate: the largest n with round((n - 1) * ratio) < the video's count.
    """

    source: VideoSource
    ratio: float
    count: int

    @classmethod
    def at(cls, source: VideoSource, fps: float) -> Resampled:
        """The video at `fps` frames per second. Errors as for `VideoSource.info`."""
        info = source.info
        ratio = info.fps / fps if info.fps else 1.0
        return cls(source, ratio, math.ceil((info.num_frames - 0.5) / ratio))

    def read(self, indices: Sequence[int], height: int, width: int, fit: str = "crop") -> UInt8[np.ndarray, "F H W 3"]:
        """Frames in increasing order, resized. Peak memory is the result and about one frame of the video.

        Args:
            indices: of frames at the new rate, 0 to count - 1; one may occur several times in a row.
            fit: "crop" or "stretch".

        Raises:
            InputError: a frame cannot be decoded.
        """
        info = self.source.info
        nearest = np.floor(np.asarray(indices) * self.ratio + 0.5).astype(int)
        chosen = np.minimum(nearest, info.num_frames - 1)  # rounding may give one frame too many
        clip = np.empty((len(chosen), height, width, 3), np.uint8)
        for i, frame in self.source.frames(np.unique(chosen).tolist()):
            clip[chosen == i] = fit_frame(frame, height, width, fit)
        return clip


def fit_frame(frame: Frame, height: int, width: int, fit: str = "crop") -> Frame:
    """A frame resized (Lanczos), cropped around its centre where its aspect ratio differs and `fit` is "crop".

    It is resized to whole pixels and then cropped, as by diffusers' `VaeImageProcessor.resize`. Of a thin frame, which
    would grow beyond `_MAX_WHOLE`, only the part that stays is resized; that differs by rounding alone.
    """
    own_height, own_width, _ = frame.shape
    whole_height, whole_width = height, width
    if fit == "crop" and own_width * height > width * own_height:
        whole_width = own_width * height // own_height
    elif fit == "crop":
        whole_height = own_height * width // own_width
    left, top = whole_width // 2 - width // 2, whole_height // 2 - height // 2
    image = Image.fromarray(frame)
    if whole_height * whole_width <= _MAX_WHOLE * height * width:
        resized = image.resize((whole_width, whole_height), Image.Resampling.LANCZOS)
        return np.asarray(resized)[top : top + height, left : left + width]
    right, bottom = left + width, top + height
    box = (
        left * own_width / whole_width,
        top * own_height / whole_height,
        right * own_width / whole_width,
        bottom * own_height / whole_height,
    )
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS, box))


def fit_frames(frames: Frames, height: int, width: int, fit: str = "crop") -> Frames:
    """`fit_frame` of each frame."""
    return np.stack([fit_frame(frame, height, width, fit) for frame in frames])


def resize_frames(frames: Frames, height: int, width: int) -> Frames:
    """Each frame resized, bicubic and antialiased, as image encoders expect."""
    resized = [Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC) for frame in frames]
    return np.stack([np.asarray(frame) for frame in resized])
