"""A convolution in time and space as a Pallas TPU kernel: one product of matrices per few rows of a frame.

XLA's own convolution reaches an eighth of a v6e's matrix rate at 128 channels of a large picture, and takes seconds to
compile each. Here the taps in time and height lie side by side in the contracted dimension (their rows are whole
registers, so that costs nothing) and those in width side by side in the result, whose three parts are shifted against
each other by a pixel and added. Bias, residual and the one rounding happen on the way out.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.layers import precision, round_up
from cogvideox_flax.sharding import Padding

NAME = "cogvideox_conv"

DTYPES = (jnp.bfloat16, jnp.float32)
"""What the compiler for TPUs takes in a kernel."""

LANES = 128

TAPS = 3
"""In height and width."""

_ROW_TILE = 16  # rows of a bfloat16 tile: a row of pixels padded to that is whole registers
_MIB = 2**20
_VMEM = 60 * _MIB
"""Of fast memory; a v5p has 64 MiB, v5e and v6e twice that."""
_BUDGET = {2: 48 * _MIB, 4: 30 * _MIB}
"""Of that, for what is known to be held, by bytes per number; products of float32 hold parts of their operands too."""
_CHOICES = ((12, 1408, 256), (12, 704, 256), (8, 704, 256), (8, 704, 128), (4, 352, 128), (1, 1, 128))
"""MiB of the input at a time (twice that is held), pixels of one product, output channels at a time; best first."""


@dataclass(frozen=True)
class Tiles:
    """How one convolution is cut.

    width: pixels of a row in fast memory, padding included.
    block: rows of a grid step. group: rows of one product within it; each divides what it is a part of.
    parts: of the output channels, each `part` of them.
    """

    width: int
    block: int
    group: int
    part: int
    parts: int

    @classmethod
    def of(cls, rows: int, columns: int, channels: int, out_channels: int, taps: int, itemsize: int) -> Tiles:
        """For an output of so many rows and columns; channels are multiples of 128."""
        width = round_up(columns + 2, _ROW_TILE)
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
        """Fast memory: input, weights, result and residual twice, and one product's operand and sums."""
        inputs = taps * (self.block + 2) * self.width * channels * itemsize
        weights = taps * TAPS * channels * TAPS * self.part * itemsize
        outputs = 2 * self.block * self.width * self.part * itemsize
        product = self.group * self.width * (taps * TAPS * channels * itemsize + TAPS * self.part * 4)
        return 2 * (inputs + weights + outputs) + product


def why_not(x: Array, residual: Array | None, dtype: Any) -> str | None:
    """Why the kernel cannot take x and the residual to a result of this dtype, or None if it can."""
    dtypes = [x.dtype, jnp.dtype(dtype), *([] if residual is None else [residual.dtype])]
    others = [str(d) for d in dtypes if d not in DTYPES]
    return f"it computes in bfloat16 or float32; got {others[0]}" if others else None


def convolve(
    x: Float[Array, "B T+kt-1 h w I"],
    kernel: Float[Array, "kt 3 3 I O"],
    bias: Float[Array, " O"],
    residual: Float[Array, "B T H W O"] | None,
    *,
    padding: Padding = ((1, 1), (1, 1)),
    dtype: Any = None,
    interpret: bool = False,
) -> Float[Array, "B T H W O"]:
    """Valid in time. Summed in float32, rounded once.

    Args:
        x: bfloat16 or float32, the kernel's too. Channels that fill no register (the latents, the colours) are padded.
        residual: bfloat16 or float32; added before rounding.
        dtype: bfloat16 or float32, what is rounded to; None is the residual's, or without one x's.
        padding: zeros before and after the rows, and the columns; h and w grow by that and shrink by 2.

    Raises:
        InputError: another dtype.
    """
    dtype = dtype or (x.dtype if residual is None else residual.dtype)
    if reason := why_not(x, residual, dtype):
        raise InputError(f"the convolution kernel for TPUs: {reason}")
    if missing := -kernel.shape[-1] % LANES:
        more = partial(_pad_channels, count=missing)
        wide = None if residual is None else more(residual)
        y = convolve(x, more(kernel), more(bias), wide, padding=padding, dtype=dtype, interpret=interpret)
        return y[..., : kernel.shape[-1]]
    kernel = jnp.pad(kernel, ((0, 0),) * 3 + ((0, -kernel.shape[-2] % LANES), (0, 0)))
    taps, _, _, channels, out_channels = kernel.shape
    (top, bottom), (left, right) = padding
    batch, frames, rows = x.shape[0], x.shape[1] - taps + 1, x.shape[2] + top + bottom - 2
    columns = x.shape[3] + left + right - 2
    tiles = Tiles.of(rows, columns, channels, out_channels, taps, x.dtype.itemsize)
    width, block, group, part, parts = astuple(tiles)
    around = (top, bottom), (left, width - left - x.shape[3]), (0, channels - x.shape[-1])
    x = jnp.pad(x, ((0, 0), (0, 0), *around))

    # [parts, taps * height * in, width * out of a part]
    weights = kernel.reshape(taps * TAPS, TAPS, channels, parts, part).transpose(3, 0, 2, 1, 4)
    weights = weights.reshape(parts, taps * TAPS * channels, TAPS * part)

    here = pl.BlockSpec((1, 1, block, columns, part), lambda n, b, t, r: (b, t, r, 0, n))
    specs = [
        pl.BlockSpec(
            (pl.Element(1), pl.Element(taps), pl.Element(block + 2), pl.Element(width), pl.Element(channels)),
            lambda n, b, t, r: (b, t, r * block, 0, 0),
        ),
        pl.BlockSpec((1, *weights.shape[1:]), lambda n, b, t, r: (n, 0, 0)),
        pl.BlockSpec((1, 1, part), lambda n, b, t, r: (n, 0, 0)),
    ]
    args = [x, weights, bias.astype(jnp.float32).reshape(parts, 1, part)]
    if residual is not None:
        specs, args = [*specs, here], [*args, residual]
    shape = (batch, frames, rows, columns, out_channels)

    def body(x_ref: Any, weights_ref: Any, bias_ref: Any, *refs: Any) -> None:
        out_ref = refs[-1]

        def rows_of(g: Any, _: None) -> None:
            at = g * group
            taken = [
                x_ref[0, t, pl.ds(at + h, group)].reshape(group * width, channels)
                for t in range(taps)
                for h in range(TAPS)
            ]
            sums = jax.lax.dot_general(
                jnp.concatenate(taken, 1),
                weights_ref[0],
                (((1,), (0,)), ((), ())),
                precision=precision(x.dtype),
                preferred_element_type=jnp.float32,
            )
            first, second, third = (sums[:, i * part : (i + 1) * part] for i in range(TAPS))
            size = group * width
            y = first + pltpu.roll(second, size - 1, 0) + pltpu.roll(third, size - 2, 0) + bias_ref[0]
            y = y.reshape(group, width, part)[:, :columns]
            if residual is not None:
                y = y + refs[0][0, 0, pl.ds(at, group)].astype(jnp.float32)
            out_ref[0, 0, pl.ds(at, group)] = y.astype(dtype)

        jax.lax.fori_loop(0, block // group, rows_of, None)

    outputs = batch * frames * rows * columns * out_channels
    cost = pl.CostEstimate(
        flops=2 * taps * TAPS**2 * channels * outputs,
        transcendentals=0,
        bytes_accessed=taps * x.nbytes + outputs * x.dtype.itemsize * (1 if residual is None else 2),
    )
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        grid=(parts, batch, frames, rows // block),
        in_specs=specs,
        out_specs=here,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
        cost_estimate=cost,
        interpret=interpret,
        name=NAME,
    )(*args)


def _pad_channels(x: Array, count: int) -> Array:
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, count),))
