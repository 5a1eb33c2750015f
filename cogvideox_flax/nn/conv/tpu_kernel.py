"""The 3-D convolution as a Pallas TPU kernel: one matrix product for a few rows of a frame.

XLA's own convolution reaches an eighth of a v6e's matrix rate at 128 channels of a large image, and each takes
seconds to compile. Here the taps in time and height are concatenated along the contracted dimension (their rows are
whole registers, so that costs nothing) and those in width along the result, whose three parts are shifted against each
other by a pixel and added. Bias and residual are added, and the sum rounded once, before it is written.

Nothing is laid out for it: weights and pixels are read as they are stored, and so are the frames before them. An image
in VMEM is wider and higher than in memory, and the kernel writes what is around it into the rest.
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
from jaxtyping import Array, Float, Int

from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.layers import precision, round_up
from cogvideox_flax.nn.tpu import KERNEL_DTYPES, LANES
from cogvideox_flax.sharding import WithHalo

NAME = "cogvideox_conv"

TAPS = 3
"""In height and width."""

_ROW_TILE = 16  # rows of a bfloat16 tile: a row of pixels padded to that is whole registers
_MIB = 2**20
_VMEM = 60 * _MIB
"""Limit of fast memory; a v5p has 64 MiB, v5e and v6e have twice that."""
_BUDGET = {2: 48 * _MIB, 4: 30 * _MIB}
"""Bytes per number -> limit of `Tiles.nbytes`. float32 products need extra memory for parts of their operands."""
_CHOICES = ((16, 1408, 256), (12, 1408, 256), (12, 704, 256), (8, 704, 256), (8, 704, 128), (4, 352, 128), (1, 1, 128))
"""MiB of an input block (of two buffers), pixels of one product, output channels of a block; the best first."""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one convolution.

    frames: that a grid step holds.
    width: pixels of a row in VMEM: the image's, the column to its right, some of no meaning, the column to its left.
    block: rows of a grid step, a divisor of the image's rows.
    group: rows of one product, a divisor of `block`.
    part: output channels of a grid step. parts: number of those.
    """

    frames: int
    width: int
    block: int
    group: int
    part: int
    parts: int

    @classmethod
    def of(
        cls, rows: int, columns: int, channels: int, out_channels: int, taps: int, itemsize: int, frames: int = TAPS
    ) -> Tiles:
        """For images of this many rows and columns; channels are multiples of 128. frames: that a grid step holds."""
        width = row_width(columns)
        row_bytes = frames * width * channels * itemsize
        for mib, pixels, part in _CHOICES:
            fits = [n for n in range(1, rows + 1) if rows % n == 0 and (n + 2) * row_bytes <= mib * _MIB]
            block = max(fits, default=1)
            group = max(n for n in range(1, block + 1) if block % n == 0 and (n == 1 or n * width <= pixels))
            part = part if out_channels % part == 0 else LANES
            tiles = cls(frames, width, block, group, part, out_channels // part)
            if tiles.nbytes(channels, taps, itemsize) <= _BUDGET[itemsize]:
                break
        return tiles

    def nbytes(self, channels: int, taps: int, itemsize: int) -> int:
        """Bytes of VMEM: two buffers of frames and the rows around them, of weights, result and residual, and one
        product's operand and sums."""
        inputs = (self.frames * (self.block + 2) + taps * 2) * self.width * channels * itemsize
        weights = taps * TAPS * channels * TAPS * self.part * itemsize
        outputs = 2 * self.block * self.width * self.part * itemsize
        product = self.group * self.width * (taps * TAPS * channels * itemsize + TAPS * self.part * 4)
        return 2 * (inputs + weights + outputs) + product


def row_width(columns: int) -> int:
    """Pixels of a row that the kernel computes for an image with this many columns."""
    return round_up(columns + 2, _ROW_TILE)


def frames_held(frames: int, taps: int, past: bool) -> tuple[int, int]:
    """How many frames of x and of the past a grid step holds. frames: of the result."""
    return (min(frames, taps), taps - 1) if past else (taps, 0)


def why_not(x: Array, residual: Array | None, dtype: Any) -> str | None:
    """Why the kernel does not support these dtypes of x, residual and result, or None if it does."""
    dtypes = [x.dtype, jnp.dtype(dtype), *([] if residual is None else [residual.dtype])]
    others = [str(d) for d in dtypes if d not in KERNEL_DTYPES]
    return f"it computes in bfloat16 or float32; got {others[0]}" if others else None


def convolve(
    x: Float[Array, "B F H W I"],
    kernel: Float[Array, "kt 3 3 I O"],
    bias: Float[Array, " O"],
    residual: Float[Array, "B T H W O"] | None,
    *,
    past: Float[Array, "B kt-1 H W I"] | None = None,
    edges: Float[Array, "B T+kt-1 2 W I"] | None = None,
    sides: Float[Array, "B T+kt-1 H+2 2 I"] | None = None,
    end: Int[Array, ""] | None = None,
    dtype: Any = None,
    interpret: bool = False,
) -> Float[Array, "B T H W O"]:
    """Summed in float32, rounded once.

    Args:
        x, kernel: bfloat16 or float32. Channels that do not fill a register (latents, colours) are padded.
        residual: bfloat16 or float32; added before rounding.
        past: the frames before x; then T = F, else T = F - kt + 1.
        edges: the rows above and below all frames, past ones first; None is zeros.
        sides: the columns to the left and right of those, corners included; None is zeros.
        end: the row in whose place the row below belongs, as the image ends before x does; None is H. Results from
            there on have no meaning.
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
        around: dict[str, Any] = {"past": past, "edges": edges, "sides": sides, "end": end}
        y = convolve(x, more(kernel), more(bias), wide, **around, dtype=dtype, interpret=interpret)
        return y[..., : kernel.shape[-1]]
    if missing := -kernel.shape[-2] % LANES:
        kernel = jnp.pad(kernel, ((0, 0),) * 3 + ((0, missing), (0, 0)))
        x, past, edges, sides = jax.tree.map(partial(_pad_channels, count=missing), (x, past, edges, sides))
    taps, _, _, channels, out_channels = kernel.shape
    batch, frames, height, columns, _ = x.shape
    out_frames = frames if past is not None else frames - taps + 1
    result = jax.ShapeDtypeStruct((batch, out_frames, height, columns, out_channels), dtype)
    operands = {
        "x": x,
        "past": past if taps > 1 else None,
        "edges": edges,
        "sides": sides,
        "weights": kernel.reshape(taps * TAPS, TAPS, channels, out_channels),
        "bias": bias.astype(jnp.float32).reshape(1, out_channels),
        "residual": residual,
        "end": None if end is None else end.astype(jnp.int32).reshape(1),
    }
    return _kernel_call({name: a for name, a in operands.items() if a is not None}, result, interpret)


def forward(
    clip: WithHalo, residual: Array | None, kernel: Array, bias: Array, *, dtype: Any
) -> Float[Array, "B T H W O"]:
    """See `causal_conv.conv3d`."""
    sides = clip.sides
    if sides is not None and clip.edges is None:  # above and below is nothing, and in the corners neither
        sides = jnp.pad(sides, ((0, 0), (0, 0), (1, 1), (0, 0), (0, 0)))
    around: dict[str, Any] = {"past": clip.past, "edges": clip.edges, "sides": sides, "end": clip.end}
    return convolve(clip.x, kernel, bias, residual, **around, dtype=dtype)


def _kernel_call(operands: dict[str, Array], result: jax.ShapeDtypeStruct, interpret: bool) -> Array:
    """The kernel of named operands. The grid is parts of the output channels, batch, frames, blocks of rows."""
    batch, frames, rows, columns, out_channels = result.shape
    x, weights, residual = operands["x"], operands["weights"], operands.get("residual")
    channels, taps, past = x.shape[-1], weights.shape[0] // TAPS, "past" in operands
    of_x, of_past = frames_held(frames, taps, past)
    tiles = Tiles.of(rows, columns, channels, out_channels, taps, x.dtype.itemsize, of_x + of_past)
    height, blocks = tiles.block + TAPS - 1, rows // tiles.block

    def window(count: int, rows: Any, width: Any, at: Any) -> pl.BlockSpec:
        return pl.BlockSpec((pl.Element(1), pl.Element(count), rows, width, pl.Element(channels)), at)

    def first_row(r: Any) -> Any:
        return jnp.maximum(r * tiles.block - 1, 0)

    def x_at(n: Any, b: Any, t: Any, r: Any) -> tuple[Any, ...]:
        return b, jnp.maximum(t - (taps - 1), 0) if past else t, first_row(r), 0, 0

    def past_at(n: Any, b: Any, t: Any, r: Any) -> tuple[Any, ...]:
        # a step that reads none of it asks for what is there already
        return b, 0, first_row(jnp.where(t < taps - 1, r, blocks - 1)), 0, 0

    wide = pl.Element(tiles.width, (0, tiles.width - columns))
    high = pl.Element(height, (0, TAPS - 1))
    out_spec = pl.BlockSpec((1, 1, tiles.block, columns, tiles.part), lambda n, b, t, r: (b, t, r, 0, n))
    specs = {
        "x": window(of_x, high, wide, x_at),
        "past": window(of_past, high, wide, past_at),
        "edges": window(taps, pl.Element(2), wide, lambda n, b, t, r: (b, t, 0, 0, 0)),
        "sides": window(taps, pl.Element(height), pl.Element(2), lambda n, b, t, r: (b, t, r * tiles.block, 0, 0)),
        "weights": pl.BlockSpec((*weights.shape[:3], tiles.part), lambda n, b, t, r: (0, 0, 0, n)),
        "bias": pl.BlockSpec((1, tiles.part), lambda n, b, t, r: (0, n)),
        "residual": out_spec,
        "end": pl.BlockSpec(memory_space=pltpu.SMEM),
    }
    outputs = math.prod(result.shape)
    # a loop over layers would otherwise copy its stream; interpreted, windows that reach past an array cannot do it
    in_place = residual is not None and residual.dtype == result.dtype and not interpret
    return pl.pallas_call(
        lambda *refs: _kernel(tiles, result.shape, dict(zip([*operands, "out"], refs, strict=True))),
        out_shape=result,
        grid=(tiles.parts, batch, frames, blocks),
        in_specs=[specs[name] for name in operands],
        out_specs=out_spec,
        input_output_aliases={list(operands).index("residual"): 0} if in_place else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * taps * TAPS**2 * channels * outputs,
            transcendentals=0,
            bytes_accessed=taps * x.nbytes + outputs * x.dtype.itemsize * (1 + (residual is not None)),
        ),
        interpret=interpret,
        name=NAME,
    )(*operands.values())


def _kernel(tiles: Tiles, shape: tuple[int, ...], refs: dict[str, Any]) -> None:
    """One block of rows of a frame: what is around the frames that it reads, then product by product.

    In VMEM, an image's rows begin with the one above the block, but those of the first block with its own (a window
    that begins before an array is not supported).
    """
    _, frames, height, columns, _ = shape
    is_first = pl.program_id(3) == 0
    end = refs["end"][0] if "end" in refs else height
    below = end - jnp.maximum(pl.program_id(3) * tiles.block - 1, 0)  # where the row below the image belongs
    taken = _frames(pl.program_id(2), frames, refs)
    for tap, choices in enumerate(taken):
        for is_read, ref in choices:

            @pl.when(is_read)
            def _(tap: int = tap, ref: Any = ref) -> None:
                _surround(tiles, columns, is_first, below, refs, tap, ref)

    _products(tiles, columns, is_first, refs, taken)


def _frames(t: Any, frames: int, refs: dict[str, Any]) -> list[list[tuple[Any, Any]]]:
    """Of each tap of frame t, the images in VMEM that may be what it reads, and whether each is it."""
    taps, x, past = refs["weights"].shape[0] // TAPS, refs["x"], refs.get("past")
    if past is None:
        return [[(True, x.at[0, tap])] for tap in range(taps)]
    taken: list[list[tuple[Any, Any]]] = []
    for tap in range(taps):
        before = taps - 1 - tap - t  # how many frames before the first of x; t may be unknown
        own = jnp.clip(jnp.minimum(t, taps - 1) - (taps - 1 - tap), 0, x.shape[1] - 1)
        of_past = before > 0, past.at[0, jnp.clip(taps - 1 - before, 0, taps - 2)]
        of_x = before <= 0, x.at[0, own]
        taken.append([of_x] if tap == taps - 1 else [of_past] if frames == 1 else [of_past, of_x])
    return taken


def _surround(tiles: Tiles, columns: int, is_first: Any, below: Any, refs: dict[str, Any], tap: int, ref: Any) -> None:
    """Write the columns around an image, and the row below it if this block reads it."""
    height, channels = tiles.block + TAPS - 1, ref.shape[-1]

    def around(name: str, rows: slice, width: slice) -> Array:
        if name in refs:
            return refs[name][0, tap, rows, width]
        return jnp.zeros((rows.stop - rows.start, width.stop - width.start, channels), ref.dtype)

    @pl.when((below >= 0) & (below < height))
    def _() -> None:
        ref[pl.ds(below, 1)] = around("edges", slice(1, 2), slice(0, tiles.width))

    for column, end in ((tiles.width - 1, 0), (columns, 1)):
        at, side = slice(column, column + 1), slice(end, end + 1)

        @pl.when(is_first)
        def _(at: slice = at, side: slice = side) -> None:
            ref[: height - 1, at] = around("sides", slice(1, height), side)
            if "edges" in refs:
                refs["edges"][0, tap, :1, at] = around("sides", slice(0, 1), side)

        @pl.when(~is_first)
        def _(at: slice = at, side: slice = side) -> None:
            ref[:, at] = around("sides", slice(0, height), side)


def _products(
    tiles: Tiles, columns: int, is_first: Any, refs: dict[str, Any], taken: list[list[tuple[Any, Any]]]
) -> None:
    """A group of rows after the other. taken: of `_frames`."""
    group, part, width = tiles.group, tiles.part, tiles.width
    channels, taps = refs["x"].shape[-1], len(taken)

    def rows_of(g: Any, _: None) -> None:
        at = g * group
        first = at - is_first.astype(jnp.int32)  # the row above the group; -1 is above the image

        def read(tap: int, row: Any, count: int) -> Array:
            (_, ref), *other = taken[tap]
            rows = ref[pl.ds(row, count)]
            for is_read, ref in other:
                rows = jnp.where(is_read, ref[pl.ds(row, count)], rows)
            return rows

        def pixels(tap: int, h: int) -> Array:
            if h > 0:
                return read(tap, first + h, group)
            above = refs["edges"][0, tap, :1] if "edges" in refs else jnp.zeros((1, width, channels), refs["x"].dtype)
            rows = [jnp.where(first < 0, above, read(tap, jnp.maximum(first, 0), 1))]
            return jnp.concatenate([*rows, *[read(tap, first + 1, group - 1)]] if group > 1 else rows, 0)

        operand = [pixels(tap, h).reshape(group * width, channels) for tap in range(taps) for h in range(TAPS)]
        weights = [refs["weights"][:, w].reshape(taps * TAPS * channels, part) for w in range(TAPS)]
        sums = jax.lax.dot_general(
            jnp.concatenate(operand, 1),
            jnp.concatenate(weights, 1),
            (((1,), (0,)), ((), ())),
            precision=precision(refs["x"].dtype),
            preferred_element_type=jnp.float32,
        )
        left, own, right = (sums[:, i * part : (i + 1) * part].reshape(group, width, part) for i in range(TAPS))
        y = (pltpu.roll(left, 1, 1) + own + pltpu.roll(right, width - 1, 1))[:, :columns] + refs["bias"][...]
        if "residual" in refs:
            y = y + refs["residual"][0, 0, pl.ds(at, group)].astype(jnp.float32)
        refs["out"][0, 0, pl.ds(at, group)] = y.astype(refs["out"].dtype)

    jax.lax.fori_loop(0, tiles.block // group, rows_of, None)


def _pad_channels(x: Array, count: int) -> Array:
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, count),))
