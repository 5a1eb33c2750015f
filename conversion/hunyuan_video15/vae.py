"""diffusers `AutoencoderKLHunyuanVideo15` -> `cogvideox_flax.models.hunyuan_video15.autoencoder.Autoencoder`."""

from __future__ import annotations

import numpy as np

from cogvideox_flax.conversion.rules import Rule, Table, convolution, pointwise
from cogvideox_flax.models.hunyuan_video15.config import VAEConfig


def vae_table(config: VAEConfig) -> Table:
    """The mapping table, the same for every architecture."""
    return (*_coder("encoder", "down"), *_coder("decoder", "up"))


def _coder(name: str, direction: str) -> Table:
    level, middle = rf"{name}\.{direction}_blocks\.(\d+)\.", rf"{name}\.mid_block\."
    attention = middle + r"attentions\.0\."
    return (
        *convolution(rf"{name}\.conv_(in|out)\.conv", rf"{name}.conv_\1"),
        _gain(rf"{name}\.norm_out", f"{name}.norm_out"),
        *_resnet(level + r"resnets\.(?P<slot>\d+)", rf"{name}.levels.\1.resnets", r"\3"),
        *convolution(level + rf"{direction}samplers\.0\.conv\.conv", rf"{name}.levels.\1.resample.conv"),
        *_resnet(middle + r"resnets\.0", f"{name}.mid.first", r"\1"),
        *_resnet(middle + r"resnets\.1", f"{name}.mid.second", r"\1"),
        _gain(attention + "norm", f"{name}.mid.attn.norm"),
        *pointwise(attention + r"to_([qkv])", rf"{name}.mid.attn.\1"),
        *pointwise(attention + "proj_out", f"{name}.mid.attn.out"),
    )


def _resnet(source: str, target: str, number: str) -> Table:
    """number: the group with the number of a norm or convolution."""
    return (
        _gain(source + r"\.norm([12])", f"{target}.norm{number}"),
        *convolution(source + r"\.conv([12])\.conv", f"{target}.conv{number}"),
    )


def _gain(source: str, target: str) -> Rule:
    """The gain of a norm over channels: [C, 1, 1, 1] -> [C]."""
    return Rule(
        source + r"\.gamma",
        target + ".scale",
        lambda gain: np.reshape(gain, gain.shape[0]),
        shape=lambda shape: (*shape, 1, 1, 1),
    )
