"""The 3-D convolution as a Pallas TPU kernel: one matrix product for a few rows of a frame.

XLA's own convolution reaches an eighth of a v6e's matrix rate at 128 channels of a large picture, and each takes
seconds to compile. Here the taps in time and height are concatenated along the contracted dimension (their rows are
whole registers, so that costs nothing) and those in width along the result, whose three parts are shifted against each
other by a pixel and added. Bias and residual are added, and the sum rounded once, before it is written.

Nothing is laid out for it: weights and pixels are read as they are stored. A row in VMEM is longer than the picture's,
and the kernel writes the columns beside the picture into the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.layers import precision, round_up
from cogvideox_flax.nn.tpu import KERNEL_DTYPES, LANES

NAME = "cogvideox_conv"

TAPS = 3
"""In height and width."""

_ROW_TILE = 16  # rows of a bfloat16 tile: a row of pixels padded to that is whole registers
_MIB = 2**20
_VMEM = 60 * _MIB
"""Limit of fast memory; a v5p has 64 MiB, v5e and v6e have twice that."""
_BUDGET = {2: 48 * _MIB, 4: 30 * _MIB}
"""Bytes per number -> limit of `Tiles.nbytes`. float32 products need extra memory for parts of their operands."""
_CHOICES = ((12, 1408, 256), (12, 704, 256), (8, 704, 256), (8, 704, 128), (4, 352, 128), (1, 1, 128))
"""MiB of an input block (of two buffers), pixels of one product, output channels of a block; the best first."""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one convolution.

    width: pixels of a row in VMEM: the picture's, the column to its right, some of no meaning, the column to its left.
    block: rows of a grid step, a divisor of the picture's rows.
    group: rows of one product, a divisor of `block`.
    part: output channels of a grid step. parts: number of those.
    """

    width: int
    block: int
    group: int
    part: int
    parts: int

    @classmethod
    def of(cls, rows: int, columns: int, channels: int, out_channels: int, taps: int, itemsize: int) -> Tiles:
        """For an output of this many rows and columns; channels are multiples of 128."""
        width = row_width(columns)
        row_bytes = taps * width * channels * itemsize
        for mib, pixels, part in _CHOICES:
            fits = [n for n in range(1, rows + 1) if rows % n == 0 and (n + 2) * row_bytes <= mib * _MIB]
            block = max(fits, default=1)
            group = max(n for n in range(1, block + 1) if block % n == 0 and (n == 1 or n * width <= pixels))
            part = part if out_channels % part == 0 else LANES
            tiles = cls(width, block, group, part, out_channels // part)
            if tiles.nbytes(channels, taps, itemsize) <= _BUDGET[itemsize]:
                break
        return tiles

    def nbytes(self, channels: int, taps: int, itemsize: int) -> int:
        """Bytes of VMEM: two buffers of input, weights, result and residual, and one product's operand and sums."""
        inputs = taps * (self.block + 2) * self.width * channels * itemsize
        weights = taps * TAPS * channels * TAPS * self.part * itemsize
        outputs = 2 * self.block * self.width * self.part * itemsize
        product = self.group * self.width * (taps * TAPS * channels * itemsize + TAPS * self.part * 4)
        return 2 * (inputs + weights + outputs) + product


def row_width(columns: int) -> int:
    """Pixels of a row that the kernel computes for a picture with this many columns."""
    return round_up(columns + 2, _ROW_TILE)


def why_not(x: Array, residual: Array | None, dtype: Any) -> str | None:
    """Why the kernel does not support these dtypes of x, residual and result, or None if it does."""
    dtypes = [x.dtype, jnp.dtype(dtype), *([] if residual is None else [residual.dtype])]
    others = [str(d) for d in dtypes if d not in KERNEL_DTYPES]
    return f"it computes in bfloat16 or float32; got {others[0]}" if others else None


def convolve(
    x: Float[Array, "B T+kt-1 h W I"],
    kernel: Float[Array, "kt 3 3 I O"],
    bias: Float[Array, " O"],
    residual: Float[Array, "B T H W O"] | None,
    *,
    sides: Float[Array, "B T+kt-1 h 2 I"] | None = None,
    rows: tuple[int, int] = (1, 1),
    dtype: Any = None,
    interpret: bool = False,
) -> Float[Array, "B T H W O"]:
    """Valid in time. Summed in float32, rounded once.

    Args:
        x, kernel: bfloat16 or float32. Channels that do not fill a register (latents, colours) are padded.
        residual: bfloat16 or float32; added before rounding.
        sides: the columns to the left and right of x; None is zeros.
        rows: of zeros above and below x; h grows by that and shrinks by 2.
        dtype: of the result, bfloat16 or float32; None is the residual's, or x's without a residual.

    Raises:
        InputError: another dtype.
    """
    dtype = dtype or (x.dtype if residual is None else residual.dtype)
    if reason := why_not(x, residual, dtype):
        raise InputError(f"the convolution kernel for TPUs: {reason}")
    if missing := -kernel.shape[-1] % LANES:
        more = partial(_pad_channels, count=missing)
        wide = None if residual is None else more(residual)
        how: dict[str, Any] = {"sides": sides, "rows": rows, "dtype": dtype, "interpret": interpret}
        return convolve(x, more(kernel), more(bias), wide, **how)[..., : kernel.shape[-1]]
    if missing := -kernel.shape[-2] % LANES:
        kernel = jnp.pad(kernel, ((0, 0),) * 3 + ((0, missing), (0, 0)))
        x, sides = jax.tree.map(partial(_pad_channels, count=missing), (x, sides))
    x, sides = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 0), rows, (0, 0), (0, 0))), (x, sides))
    taps, _, _, channels, out_channels = kernel.shape
    batch, frames, height, columns, _ = x.shape
    shape = batch, frames - taps + 1, height - (TAPS - 1), columns, out_channels
    tiles = Tiles.of(*shape[2:4], channels, out_channels, taps, x.dtype.itemsize)
    weights = kernel.reshape(taps * TAPS, TAPS, channels, out_channels)
    around = () if sides is None else (sides,)
    args = [x, *around, weights, bias.astype(jnp.float32).reshape(1, out_channels)]
    args += [] if residual is None else [residual]
    return _kernel_call(tiles, jax.ShapeDtypeStruct(shape, dtype), sides is not None, args, interpret)


def forward(
    x: Array,
    sides: Array | None,
    residual: Array | None,
    kernel: Array,
    bias: Array,
    *,
    rows: tuple[int, int],
    dtype: Any,
) -> Float[Array, "B T H W O"]:
    """See `causal_conv.conv3d`."""
    return convolve(x, kernel, bias, residual, sides=sides, rows=rows, dtype=dtype)


def _kernel_call(
    tiles: Tiles, result: jax.ShapeDtypeStruct, has_sides: bool, args: list[Array], interpret: bool
) -> Array:
    """The kernel of x, its sides if there are any, weights, bias and, if there is one, the residual. The grid is parts
    of the output channels, batch, frames, blocks of rows."""
    batch, frames, rows, columns, _ = result.shape
    x, weights = args[0], args[1 + has_sides]
    residual = args[3 + has_sides :]
    channels, taps = x.shape[-1], weights.shape[0] // TAPS
    height = tiles.block + TAPS - 1

    def in_rows(width: pl.Element) -> pl.BlockSpec:
        block = (*(pl.Element(n) for n in (1, taps, height)), width, pl.Element(channels))
        return pl.BlockSpec(block, lambda n, b, t, r: (b, t, r * tiles.block, 0, 0))

    out_spec = pl.BlockSpec((1, 1, tiles.block, columns, tiles.part), lambda n, b, t, r: (b, t, r, 0, n))
    outputs = math.prod(result.shape)
    return pl.pallas_call(
        partial(_kernel, tiles, columns, has_sides),
        out_shape=result,
        grid=(tiles.parts, batch, frames, rows // tiles.block),
        in_specs=[
            in_rows(pl.Element(tiles.width, (0, tiles.width - columns))),
            *[in_rows(pl.Element(2))] * has_sides,
            pl.BlockSpec((*weights.shape[:3], tiles.part), lambda n, b, t, r: (0, 0, 0, n)),
            pl.BlockSpec((1, tiles.part), lambda n, b, t, r: (0, n)),
            *[out_spec] * len(residual),
        ],
        out_specs=out_spec,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * taps * TAPS**2 * channels * outputs,
            transcendentals=0,
            bytes_accessed=taps * x.nbytes + outputs * x.dtype.itemsize * (1 + len(residual)),
        ),
        interpret=interpret,
        name=NAME,
    )(*args)


def _kernel(tiles: Tiles, columns: int, has_sides: bool, x_ref: Any, *refs: Any) -> None:
    """One block of rows of a frame, product by product. refs: the sides if there are any, weights, bias, the residual
    if there is one, and the result."""
    sides_ref, refs = (refs[0], refs[1:]) if has_sides else (None, refs)
    weights_ref, bias_ref, *residual_ref, out_ref = refs
    _, taps, height, width, channels = x_ref.shape
    group, part = tiles.group, tiles.part

    for column, side in ((width - 1, 0), (columns, 1)):
        shape = 1, taps, height, 1, channels
        beside = jnp.zeros(shape, x_ref.dtype) if sides_ref is None else sides_ref[:, :, :, side : side + 1]
        x_ref[:, :, :, column : column + 1] = beside

    def rows_of(g: Any, _: None) -> None:
        at = g * group
        taken = [
            x_ref[0, t, pl.ds(at + h, group)].reshape(group * width, channels) for t in range(taps) for h in range(TAPS)
        ]
        weights = [weights_ref[:, w].reshape(taps * TAPS * channels, part) for w in range(TAPS)]
        sums = jax.lax.dot_general(
            jnp.concatenate(taken, 1),
            jnp.concatenate(weights, 1),
            (((1,), (0,)), ((), ())),
            precision=precision(x_ref.dtype),
            preferred_element_type=jnp.float32,
        )
        left, own, right = (sums[:, i * part : (i + 1) * part].reshape(group, width, part) for i in range(TAPS))
        y = (pltpu.roll(left, 1, 1) + own + pltpu.roll(right, width - 1, 1))[:, :columns] + bias_ref[...]
        for ref in residual_ref:
            y = y + ref[0, 0, pl.ds(at, group)].astype(jnp.float32)
        out_ref[0, 0, pl.ds(at, group)] = y.astype(out_ref.dtype)

    jax.lax.fori_loop(0, tiles.block // group, rows_of, None)


def _pad_channels(x: Array, count: int) -> Array:
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, count),))
