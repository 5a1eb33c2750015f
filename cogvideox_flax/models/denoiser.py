"""The interface of a denoiser: tokens are embedded, go through blocks, and a head makes a prediction of them."""

from __future__ import annotations

from typing import Any, Protocol

from jaxtyping import Array, Float, Float32

from cogvideox_flax.nn.remat import Remat

Features = dict[str, Float[Any, "B ..."]]
"""Name -> features of each prompt. The names are those in the file of stage 1."""


class Tokens(Protocol):
    """The tokens that a denoiser's `embed` makes, its blocks update and its head reads: a registered dataclass.

    x: the residual streams, float32: an array [B, S, D], or any pytree of such arrays.
    video: of these, the video's tokens, without padding.
    """

    @property
    def x(self) -> Any: ...

    @property
    def video(self) -> Float32[Array, "B n D"]: ...


class Denoiser(Protocol):
    """The module that denoises. The family's `embed` and these methods make a prediction."""

    def run_blocks(self, tokens: Any, *, start: int = 0, stop: int | None = None, remat: Remat = False) -> Any:
        """The tokens after blocks: all of them, or those of a slice.

        Args:
            start, stop: as of a slice; start=-1 is the last block.
            remat: what is recomputed in the backward pass, see `nn.remat`; True: each block.
        """

    def run_attended(self, tokens: Any, attended: Any = None) -> tuple[Any, Any]:
        """The tokens after all blocks, and what their attentions return; or with that of another step in their place.

        attended: arrays [layers, B, S, D], from an earlier call; None is returned with it.
        """

    def teacache_signal(self, tokens: Any) -> Float32[Array, "B ..."]:
        """The array that TeaCache compares from step to step; see `VideoModel.teacache`."""

    def head(self, tokens: Any) -> Float[Array, "B T h w C"]:
        """The prediction from the tokens after the last block."""
