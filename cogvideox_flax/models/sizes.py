"""The size of a run, and the size rule that the families share: frame counts in steps, sides that are multiples."""

from __future__ import annotations

from dataclasses import dataclass

from cogvideox_flax.errors import InputError

MAX_FRAMES, MAX_SIDE = 2**14, 2**14
"""The largest frame count and side in pixels, beyond any model and any machine."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a run: of the video, and of the latents that are denoised.

    extra_latents: latent frames that are denoised at the start and dropped before decoding, in models that patch time.
    latent_frames: all denoised latent frames, extra ones included.
    """

    num_frames: int
    height: int
    width: int
    latent_frames: int
    extra_latents: int
    latent_height: int
    latent_width: int
    latent_channels: int

    def latent_shape(self, batch: int) -> tuple[int, int, int, int, int]:
        """[B, T, h, w, C] of the latents that are denoised."""
        return batch, self.latent_frames, self.latent_height, self.latent_width, self.latent_channels

    def video_latent_shape(self, batch: int) -> tuple[int, int, int, int, int]:
        """[B, T, h, w, C] of the latents that are decoded: without the extra latent frames."""
        _, frames, *rest = self.latent_shape(batch)
        return batch, frames - self.extra_latents, *rest  # type: ignore[return-value]

    @property
    def video(self) -> dict[str, int]:
        """`num_frames`, `height` and `width`."""
        return {"num_frames": self.num_frames, "height": self.height, "width": self.width}


@dataclass(frozen=True)
class SizeRule:
    """Frames are period n + first; height and width are multiples of step."""

    first: int
    period: int
    step: int

    def fit_frames(self, count: int) -> int:
        """The largest supported frame count of at most `count`; at least the smallest."""
        return max(count - self.first, 0) // self.period * self.period + self.first

    def check(self, num_frames: int, height: int, width: int) -> None:
        """Refuse what the model cannot take.

        Raises:
            InputError: all faults, each with the nearest sizes that it can.
        """
        faults = []
        if num_frames < self.first or (num_frames - self.first) % self.period:
            below = self.fit_frames(num_frames)
            faults.append(
                f"num_frames is {num_frames}; it must be {self.period} n + {self.first}. "
                + (f"Nearest: {below}" if num_frames > self.first else f"Smallest: {self.first}")
                + f" and {below + self.period}"
            )
        for name, value in (("height", height), ("width", width)):
            if value < self.step or value % self.step:
                below = max(value // self.step * self.step, self.step)
                nearest = f"Nearest: {below} and {below + self.step}"
                faults.append(f"{name} is {value}; it must be a multiple of {self.step}. {nearest}")
        for name, value, most in (
            ("num_frames", num_frames, MAX_FRAMES),
            ("height", height, MAX_SIDE),
            ("width", width, MAX_SIDE),
        ):
            if value > most:
                faults.append(f"{name} is {value}; the most is {most}")
        if faults:
            raise InputError("\n".join(faults))
