"""The whole run as one program: tokens to frames."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Bool

from cogvideox_flax.generate.decode import Decode, Frames
from cogvideox_flax.generate.denoise import DenoiseInputs, DenoiseLoop, DenoiseState
from cogvideox_flax.generate.encode import VIDEO_FEATURE, Conditioning, EncodeText, EncodeVisual
from cogvideox_flax.runtime.compile import Program


@dataclass(frozen=True)
class WholeRun(Program):
    """The other programs one after the other, with all components as the first argument.

    visual: of each image and clip its feature, its component, and how it is encoded.
    denoiser, decoder: components.
    """

    text: tuple[EncodeText, ...]
    visual: tuple[tuple[str, str, EncodeVisual], ...]
    loop: DenoiseLoop
    decode: Decode
    denoiser: str
    decoder: str

    name = "whole run"

    def __call__(
        self,
        models: dict[str, Any],
        tokens: dict[str, Any],
        media: dict[str, tuple[Array, Array]],
        inputs: DenoiseInputs,
        state: DenoiseState,
    ) -> tuple[Frames, Bool[Array, " N"], Bool[Array, ""]]:
        """The frames, whether each step was finite, and whether the frames are.

        Args:
            tokens: of the negative prompts, if guidance is on, then of the prompts.
            media: frames and noise of each feature of an image or clip.
            inputs: without conditioning.
            state: its latents are noise.
        """
        step, batch = self.loop.step, len(state.latents)
        features: dict[str, Array] = {}
        for encode in self.text:
            features |= encode(models[encode.component], tokens[encode.component])
        prompts = {name: value[-batch:] for name, value in features.items()}
        guided = step.guidance.passes == 2
        negative = {name: value[:batch] for name, value in features.items()} if guided else None
        latents = {name: encode(models[part], *media[name])[0] for name, part, encode in self.visual}
        video = latents.pop(VIDEO_FEATURE, None)
        inputs = dataclasses.replace(inputs, conditioning=Conditioning(prompts, negative, latents, video))
        if video is not None:
            first = step.scheduler.start_from(video, state.latents, inputs.steps.timesteps[0])
            state = dataclasses.replace(state, latents=first)
        state, steps_finite = self.loop(models[self.denoiser], inputs, state)
        frames, finite = self.decode(models[self.decoder], state.video_latents)
        return frames, steps_finite, finite
