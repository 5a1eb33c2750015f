"""The choice of a mesh for a run without compiling, from the modelled time and memory of a denoising step on each.

The coefficients come from compiled forecasts (CogVideoX1.5-5B at 768x1360x81 on v6e-8): a layer moves 78 bytes per
token and channel outside of matrix products; tensor parallelism all-reduces two float32 tensors per layer, sequence
parallelism exchanges four of the weights' dtype. The traffic of ring attention and of gathered weights is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from cogvideox_flax import sharding
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.run import Run
from cogvideox_flax.plan.chips import CHIPS, Chip
from cogvideox_flax.plan.timing import ATTENTION_RATES, attention_rate
from cogvideox_flax.sharding.sequence_parallel import ulysses_group

_MATMUL_EFFICIENCY = 0.85  # share of the matrix rate that products reach
_LAYER_TRAFFIC = 78  # bytes per token and channel that a layer moves
_USABLE_MEMORY = 0.85  # share of a chip's memory for weights and activations
_ACTIVATION_BYTES = 60  # per token and channel, over all layers


@dataclass(frozen=True)
class Layout:
    """A mesh, modelled seconds of one denoising step on it, and bytes on each device."""

    mesh: sharding.MeshShape
    seconds: float
    nbytes: int


def meshes(devices: int, slices: int = 1) -> list[tuple[int, int, int]]:
    """Every (dp, sp, tp) over this number of devices, with sp and tp inside each of so many slices."""
    parts = [n for n in range(1, devices + 1) if devices % n == 0]
    found = [(dp, sp, devices // dp // sp) for dp in parts for sp in parts if devices % (dp * sp) == 0]
    return [mesh for mesh in found if mesh[0] % slices == 0]


def layouts(run: Run, devices: int, chip: Chip, slices: int = 1, fsdp: bool = False) -> list[Layout]:
    """All meshes that can serve this run, the fastest first.

    fsdp: split weights over dp and sp too.
    """
    manifest, batch = run.manifest, run.denoiser_batch
    work = manifest.model.workload(run.size)
    all_heads = manifest.model.heads.values()
    bytes_each = 1 if manifest.quantized(manifest.model.denoiser) else jnp.dtype(run.dtype).itemsize
    found = []
    for dp, sp, tp in meshes(devices, slices):
        if batch % dp or any(heads % tp for heads in all_heads):
            continue
        local_channels = batch // dp * work.tokens / sp * work.width  # tokens times channels on a device
        heads = work.heads // tp
        group = ulysses_group(heads, sp)  # devices that exchange heads; keys circulate between groups
        flops = 4 * work.tokens**2 * work.head_dim * -(-heads // group) / (sp // group) * (batch // dp)
        seconds = flops / (attention_rate(work.head_dim, ATTENTION_RATES, chip.unit) * chip.flops)
        seconds += 24 * work.width * local_channels / tp / (_MATMUL_EFFICIENCY * chip.flops)
        seconds += _LAYER_TRAFFIC * local_channels / chip.bandwidth
        wire = 2 * local_channels / tp * (4 * (1 - 1 / group) + 2 * (sp // group - 1)) + 2 * 4 * local_channels * 2 * (
            1 - 1 / tp
        )
        layer_bytes = bytes_each * 12 * work.width * (work.width / tp + work.modulation)  # modulation is not split
        weight_bytes = work.layers * layer_bytes
        if fsdp:
            wire += layer_bytes * (1 - 1 / (dp * sp))
            weight_bytes = (
                weight_bytes / (dp * sp) + 2 * layer_bytes
            )  # two gathered layers: the current one and the next
        mesh = (dp, sp, tp, True) if fsdp else (dp, sp, tp)
        found.append(
            Layout(
                mesh, work.layers * (seconds + wire / chip.link), int(weight_bytes + _ACTIVATION_BYTES * local_channels)
            )
        )
    return sorted(found, key=lambda layout: layout.seconds)


def suitable_layouts(run: Run, devices: int, chip: Chip, slices: int = 1) -> list[Layout]:
    """The meshes over all devices on which the share of weights and activations fits: the fastest first, and those that
    split weights (FSDP) after all others.

    Args:
        slices: of which the devices are.

    Raises:
        InputError: none fits.
    """
    found = layouts(run, devices, chip, slices) + layouts(run, devices, chip, slices, fsdp=True)
    if not found:
        raise InputError(
            f"a batch of {run.denoiser_batch} (prompts, twice with guidance) does not divide over {slices} slices; "
            "take one slice, or more prompts"
        )
    if fits := [layout for layout in found if layout.nbytes <= _USABLE_MEMORY * chip.hbm]:
        return fits
    least = min(layout.nbytes for layout in found)
    raise InputError(
        f"this run needs {least / 2**30:.1f} GiB on each of {devices} devices, which have "
        f"{chip.hbm / 2**30:.1f} GiB: take more devices, or fewer frames or pixels"
    )


def chip_of_device(device: jax.Device) -> Chip:
    """The chip of an attached device; for an unknown kind, a v6e's rates with the memory that the device reports."""
    kind = device.device_kind.lower().replace(" lite", "e").replace("tpu ", "")
    kind = {"v5": "v5p"}.get(kind, kind)  # the device kind of a v5p
    if kind in CHIPS:
        return CHIPS[kind]
    limit = (device.memory_stats() or {}).get("bytes_limit", CHIPS["v6e"].hbm)
    return replace(CHIPS["v6e"], hbm=limit)
