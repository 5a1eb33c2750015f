"""Clips to latents and back, the latents that a denoiser sees, and `Codec`: an autoencoder bound to its config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from cogvideox_flax.io.arrays import takes_tensors
from cogvideox_flax.models.chunks import Chunk, in_chunks
from cogvideox_flax.models.tiling import Tiling, check_clip, run_clips
from cogvideox_flax.nn.component import Component

LOGVAR_RANGE = (-30.0, 20.0)


@dataclass(frozen=True)
class LatentStatistics:
    """The normalization of latents for the denoiser: (z - mean) * scale, for all channels or for each.

    scale: diffusers' `scaling_factor`, or 1 / `latents_std`. mean: diffusers' `latents_mean`; None: 0.
    """

    scale: float | tuple[float, ...] = 1.0
    mean: tuple[float, ...] | None = None

    def normalize(self, z: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        """An autoencoder's latents as the denoiser sees them."""
        return (z if self.mean is None else z - np.asarray(self.mean, np.float32)) * self._factor

    def denormalize(self, latents: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        """The inverse of `normalize`."""
        z = latents / self._factor
        return z if self.mean is None else z + np.asarray(self.mean, np.float32)

    @property
    def _factor(self) -> Any:
        return np.asarray(self.scale, np.float32) if isinstance(self.scale, tuple) else self.scale


class ChunkedAutoencoder(Component):
    """Video to latent and back, chunk by chunk. Parameters are float32 at construction; inputs are cast to the
    parameters' dtype.

    pad: as for `sharding.spatial_split`.
    """

    pad: ClassVar[bool] = False
    config: Any
    encoder: Any
    decoder: Any

    def encoding(self, frames: int) -> tuple[Chunk, Sequence[int]]:
        """What encodes a clip of `frames`, and the frames of each chunk."""
        raise NotImplementedError

    def decoding(self, frames: int) -> tuple[Chunk, Sequence[int]]:
        """What decodes a clip of `frames` latent frames, and those of each chunk."""
        raise NotImplementedError

    @takes_tensors
    def encode(
        self, video: Float[Array, "B F H W 3"], *, tiling: Tiling | None = None, slicing: bool = False
    ) -> tuple[Float[Array, "B T h w L"], Float[Array, "B T h w L"]]:
        """Mean and log variance of the latent, raw: without the scaling factor.

        Args:
            video: in [-1, 1]; H and W multiples of `config.spatial_compression`.
            tiling: encode in blended tiles when the video is larger than one; None encodes it whole.
            slicing: one clip of the batch after the other: the same result in less memory.

        Returns:
            (mean, logvar) in the parameters' dtype, logvar clamped to `LOGVAR_RANGE`.

        Raises:
            InputError: a shape or a tiling that does not fit.
        """
        factor = self.config.spatial_compression
        check_clip(video, "video", self.config.in_channels, factor)
        part, sizes = self.encoding(video.shape[1])
        narrow = video.astype(self.encoder.conv_in.kernel.dtype)
        layout = None if tiling is None else tiling.encode_layout(factor)
        run = partial(in_chunks, part, sizes=sizes)
        moments = run_clips(run, narrow, layout, slicing=slicing, factor=factor, pad=self.pad).astype(narrow.dtype)
        mean, logvar = jnp.split(moments, 2, -1)
        return mean, logvar.clip(*LOGVAR_RANGE)

    @takes_tensors
    def decode(
        self,
        z: Float[Array, "B T h w L"],
        *,
        tiling: Tiling | None = None,
        slicing: bool = False,
        chunks: Sequence[int] | None = None,
    ) -> Float[Array, "B F H W 3"]:
        """The video of a latent.

        Args:
            z: raw, i.e. already divided by the scaling factor.
            tiling: decode in blended tiles when the latent is larger than one; None decodes it whole.
            slicing: one clip of the batch after the other: the same result in less memory.
            chunks: latent frames of each chunk; None: those of diffusers.

        Returns:
            Video in about [-1, 1], not clipped, in the parameters' dtype.

        Raises:
            InputError: a shape or a tiling that does not fit.
        """
        check_clip(z, "latent", self.config.latent_channels, 1)
        part, sizes = self.decoding(z.shape[1])
        narrow = z.astype(self.decoder.conv_in.kernel.dtype)
        layout = None if tiling is None else tiling.decode_layout(self.config.spatial_compression)
        run = partial(in_chunks, part, sizes=sizes if chunks is None else chunks)
        return run_clips(run, narrow, layout, slicing=slicing, factor=1, pad=self.pad)


def encode(
    vae: Any, video: Float[Array, "B F H W 3"], *, tiled: bool = False
) -> tuple[Float[Array, "B T h w L"], Float[Array, "B T h w L"]]:
    """Mean and logvar of a video's latents, not normalized; several videos one after the other.

    Args:
        vae: of any family.
        video: in [-1, 1].
        tiled: in the reference's overlapping tiles.
    """
    return vae.encode(video, tiling=vae.config.tiling if tiled else None, slicing=len(video) > 1)


def sample(
    vae: Any,
    video: Float[Array, "B F H W 3"],
    noise: Float32[Array, "B T h w L"],
    *,
    tiled: bool,
    statistics: LatentStatistics,
) -> Float32[Array, "B T h w L"]:
    """Normalized latents drawn with standard normal noise. Other arguments as for `encode`."""
    mean, logvar = (x.astype(jnp.float32) for x in encode(vae, video, tiled=tiled))
    return statistics.normalize(mean + jnp.exp(0.5 * logvar) * noise)


@dataclass(frozen=True)
class Codec:
    """An autoencoder bound to its config. It is a field of the programs that decode: equal configs, equal programs.

    config: with `latent_channels`, `spatial_compression`, `temporal_compression`, `scaling_factor` and, where there are
        tiles, the reference's `tiling`.
    decodes_chunks: whether there is `decode_chunk`, which long clips need.
    """

    config: Any

    decodes_chunks: ClassVar[bool] = False

    @property
    def latent_channels(self) -> int:
        return self.config.latent_channels

    @property
    def spatial_compression(self) -> int:
        """Pixels per latent pixel, along height and along width."""
        return self.config.spatial_compression

    @property
    def temporal_compression(self) -> int:
        """Frames per latent frame, but for the first, which is one frame."""
        return self.config.temporal_compression

    @property
    def statistics(self) -> LatentStatistics:
        """The normalization of the latents."""
        return LatentStatistics(self.config.scaling_factor)

    @property
    def preview_matrix(self) -> Float32[np.ndarray, "C+1 3"] | None:
        """Latents, not normalized, to colours from 0 to 255: one row per channel, then the offset; None: not known."""
        return None

    def check_tiling(self) -> None:
        """Refuse tiles that are not possible."""
        self.config.tiling.check(self.spatial_compression)

    def encode(
        self, vae: Any, video: Float[Array, "B F H W 3"]
    ) -> tuple[Float[Array, "B T h w C"], Float[Array, "B T h w C"]]:
        """Mean and logvar of the latents of a video in [-1, 1], not normalized."""
        return encode(vae, video)

    def decode(self, vae: Any, latents: Float32[Array, "B T h w C"], tiled: bool) -> Float32[Array, "B F H W 3"]:
        """Normalized latents to a video in about [-1, 1], one item at a time.

        tiled: in the reference's overlapping tiles.
        """
        how: Any = {"chunks": self.chunks(latents.shape[1])} if self.decodes_chunks else {}
        how |= {"tiling": self.config.tiling if tiled else None, "slicing": len(latents) > 1}
        return vae.decode(self.statistics.denormalize(latents), **how).astype(jnp.float32)

    def chunks(self, frames: int) -> Sequence[int]:
        """The latent frames of each chunk of a clip of `frames`; they have few different lengths."""
        return [frames]

    def decode_chunk(
        self, vae: Any, latents: Float32[Array, "B t h w C"], cache: Any
    ) -> tuple[Float32[Array, "B F H W 3"], Any]:
        """`decode` of one of `chunks`: its video, and the cache for the next chunk; together exactly `decode`.

        Args:
            cache: of the chunk before, None for the first; arrays [..., B, T, H, W, C], split as
                `sharding.spatial_split` says.
        """
        raise NotImplementedError
