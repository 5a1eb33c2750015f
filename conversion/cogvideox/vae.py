"""diffusers `AutoencoderKLCogVideoX` -> `cogvideox_flax.models.cogvideox.autoencoder.Autoencoder`."""

from __future__ import annotations

import itertools

from cogvideox_flax.conversion.rules import Rule, Table, convolution, norm, pointwise
from cogvideox_flax.models.cogvideox.config import VAEConfig


def vae_table(config: VAEConfig) -> Table:
    """The mapping table for one architecture. A block's first ResNet is not stacked if it changes the width."""
    return (
        *convolution(r"(en|de)coder\.conv_(in|out)\.conv", r"\1coder.conv_\2"),
        *_blocks("encoder", "down", config.block_channels, config.layers_per_block),
        *_resnet(r"encoder\.mid_block\.resnets\.(?P<slot>\d+)", "encoder.mid"),
        *norm(r"encoder\.norm_out", "encoder.norm_out"),
        *_resnet(r"decoder\.mid_block\.resnets\.(?P<slot>\d+)", "decoder.mid", modulated=True),
        *_blocks("decoder", "up", config.block_channels[::-1], config.layers_per_block + 1, modulated=True),
        *_modulated_norm(r"decoder\.norm_out", "decoder.norm_out"),
    )


def _blocks(coder: str, direction: str, widths: tuple[int, ...], layers: int, *, modulated: bool = False) -> Table:
    """The blocks of an encoder or decoder. widths: channels of each block."""
    blocks = rf"{coder}\.{direction}_blocks"
    rows: Table = convolution(rf"{blocks}\.(\d+)\.{direction}samplers\.0\.conv", rf"{coder}.blocks.\1.{direction}")
    changes = [False] + [a != b for a, b in itertools.pairwise(widths)]
    for i, changes_width in enumerate(changes):
        rows += _resnets(rf"{blocks}\.{i}\.resnets", f"{coder}.blocks.{i}", layers, changes_width, modulated=modulated)
    return rows


def _resnets(source: str, target: str, n: int, changes: bool, *, modulated: bool) -> Table:
    rows: Table = ()
    if changes:
        rows += _resnet(source + r"\.0", target + ".first", modulated=modulated)
        rows += pointwise(source + r"\.0\.conv_shortcut", target + ".first.shortcut")
    if n > changes:
        slot = r"\.(?P<slot>[1-9]\d*)" if changes else r"\.(?P<slot>\d+)"
        rows += _resnet(source + slot, target + ".resnets", modulated=modulated, first_slot=int(changes))
    return rows


def _resnet(source: str, target: str, *, modulated: bool = False, first_slot: int = 0) -> Table:
    norms = _modulated_norm if modulated else norm
    rows = [row for i in (1, 2) for row in norms(rf"{source}\.norm{i}", f"{target}.norm{i}")]
    rows += [row for i in (1, 2) for row in convolution(rf"{source}\.conv{i}\.conv", f"{target}.conv{i}")]
    return tuple(row._replace(first_slot=first_slot) for row in rows)


def _modulated_norm(source: str, target: str) -> tuple[Rule, ...]:
    return (
        *norm(source + r"\.norm_layer", target + ".norm"),
        *pointwise(source + r"\.conv_y\.conv", target + ".y"),
        *pointwise(source + r"\.conv_b\.conv", target + ".b"),
    )
