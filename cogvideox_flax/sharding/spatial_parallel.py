"""Spatial parallelism: height and width are split over all devices, and convolutions exchange halos."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from cogvideox_flax.sharding.tables import AXES, RULES

log = logging.getLogger(__name__)

HEIGHT, WIDTH = 2, 3
"""Axes of `B T H W C`."""

Padding = tuple[tuple[int, int], tuple[int, int]]
"""Zeros before and after the rows, and before and after the columns."""

_Names = tuple[str, ...]
_layout: ContextVar[PartitionSpec | None] = ContextVar("layout of B T H W C", default=None)
_rows: ContextVar[tuple[int, int]] = ContextVar("rows of the picture, and with padding", default=(1, 1))


@contextmanager
def spatial_split(
    x: Float[Array, "B T H W C"], factor: int = 1, *, pad: bool = False
) -> Iterator[Float[Array, "B T H W C"]]:
    """Yields x split over the mesh; inside the context, `spatial_parallel_conv` assumes that its clips are split alike.

    A batch that divides over dp is split over dp. The remaining mesh axes split rows if those divide, else columns or
    both. Where neither divides, as many devices as possible are used; the others repeat their work.

    Args:
        factor: height and width of all clips inside the context are multiples of x's, divided by this.
        pad: rather than split columns or let devices repeat work, add rows at the bottom until they divide, if few are
            missing; `picture_rows` says which are the picture's. For models that repeat edges, and look at neighbours
            in convolutions alone.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        yield x
        return
    height, layout, extra = x.shape[HEIGHT], None, 0
    if pad:
        layout, extra = _padded_layout(dict(mesh.shape), x.shape, factor)
        x = jnp.pad(x, [(0, extra * factor) if axis == HEIGHT else (0, 0) for axis in range(x.ndim)])
    if layout is None:
        layout = spatial_layout(mesh, x.shape, factor=factor)
    tokens = _layout.set(layout), _rows.set((height, x.shape[HEIGHT]))
    try:
        yield jax.lax.with_sharding_constraint(x, NamedSharding(mesh, layout))
    finally:
        _layout.reset(tokens[0])
        _rows.reset(tokens[1])


def _padded_layout(sizes: Mapping[str, int], shape: tuple[int, ...], factor: int) -> tuple[PartitionSpec | None, int]:
    """The layout with rows over all devices, and how many rows it needs more; (None, 0) where that does not help.

    Only the last device has rows that are not the picture's, and at least one that is. Up to an eighth more rows cost
    less than a split of columns, whose edges are not contiguous and whose narrow parts fill no registers.
    """
    batch, rows, columns = _choose(sizes, shape, factor)
    free = tuple(name for name, n in sizes.items() if n > 1 and name not in batch)
    parts, height = math.prod(sizes[name] for name in free), shape[HEIGHT] // factor
    each = -(-height // parts)
    extra = each * parts - height
    divided = math.prod(sizes[name] for name in rows + columns) == parts
    worse = extra > height // 8 or not columns if divided else extra >= each
    if worse:
        return None, 0
    return PartitionSpec(batch or None, None, free, None), extra


def picture_rows(height: int) -> int:
    """How many of the rows of a clip inside `spatial_split` are the picture's."""
    picture, padded = _rows.get()
    return height * picture // padded


def spatial_layout(
    mesh: Mesh | AbstractMesh, shape: tuple[int, ...], ndim: int = 5, *, factor: int = 1
) -> PartitionSpec:
    """How `spatial_split` places x of a shape [B, T, H, W, C], and what is computed from it inside the context.

    Args:
        ndim: of the array to place, [..., B, T, H, W, C].
        factor: as for `spatial_split`.
    """
    sizes = dict(mesh.shape)
    batch, rows, columns = _choose(sizes, shape, factor)
    free = math.prod(sizes.values()) // math.prod(sizes[name] for name in batch)
    parts = math.prod(sizes[name] for name in rows + columns)
    if parts < free:
        _log_idle(shape[HEIGHT] // factor, shape[WIDTH] // factor, free, parts)
    return PartitionSpec(*[None] * (ndim - 5), *(names or None for names in (batch, (), rows, columns)))


def _choose(sizes: Mapping[str, int], shape: tuple[int, ...], factor: int = 1) -> tuple[_Names, _Names, _Names]:
    """The mesh axes that split the batch, rows and columns. sizes: of the mesh axes."""
    batch = RULES["batch"]
    split_batch = shape[0] > 1 and shape[0] % sizes[batch] == 0
    free = {name: n for name, n in sizes.items() if n > 1 and not (split_batch and name == batch)}
    rows, columns = _split(shape[HEIGHT] // factor, shape[WIDTH] // factor, tuple(free.items()))
    return (batch,) if split_batch else (), rows, columns


def picture_mesh(mesh: Mesh, shape: tuple[int, ...]) -> Mesh:
    """The same devices in the same order as dp, sp and tp in the sizes over which a clip divides best.

    An axis splits rows or columns, never both: over one axis of 8 devices neither 60 rows nor 90 columns divide, but
    over axes of 4 and 2 they do. A mesh whose own axes use as many devices is returned itself, and one with weights
    split over all of it (FSDP) too.

    Args:
        shape: [B, T, H, W, C] of the clip.
    """
    if mesh.axis_names != AXES:
        return mesh

    def used(sizes: tuple[int, ...]) -> int:
        named = dict(zip(AXES, sizes, strict=True))
        split_batch, rows, columns = _choose(named, shape)
        return math.prod(named[name] for name in (*split_batch, *rows, *columns))

    n = mesh.size
    others = ((n // (sp * tp), sp, tp) for sp in _divisors(n) for tp in _divisors(n // sp))
    best = max((mesh.devices.shape, *others), key=used)  # the first of equals
    if best == mesh.devices.shape:
        return mesh
    return Mesh(mesh.devices.reshape(best), AXES, axis_types=mesh.axis_types)


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def spatial_constrain(tree: Any) -> Any:
    """Arrays [..., B, T, H, W, C], computed inside `spatial_split`, split as it says."""
    layout, mesh = _layout.get(), jax.sharding.get_abstract_mesh()
    if layout is None:
        return tree

    def place(x: Array) -> Array:
        where = NamedSharding(mesh, PartitionSpec(*[None] * (x.ndim - 5), *layout))
        return jax.lax.with_sharding_constraint(x, where)

    return jax.tree.map(place, tree)


@cache
def _split(height: int, width: int, axes: tuple[tuple[str, int], ...]) -> tuple[_Names, _Names]:
    """(mesh axes that split rows, mesh axes that split columns): as many devices as divide, preferably rows only."""
    sizes = dict(axes)
    best: tuple[tuple[int, bool, int], tuple[_Names, _Names]] = ((0, False, 0), ((), ()))
    for choice in itertools.product((HEIGHT, WIDTH, None), repeat=len(axes)):
        rows, columns = (tuple(n for n, c in zip(sizes, choice, strict=True) if c == axis) for axis in (HEIGHT, WIDTH))
        down, across = (math.prod(sizes[n] for n in names) for names in (rows, columns))
        if height % down == 0 and width % across == 0:
            best = max(best, ((down * across, down == 1 or across == 1, down), (rows, columns)))
    return best[1]


@cache
def _log_idle(height: int, width: int, devices: int, parts: int) -> None:
    """Logs once per size and process: a model is traced many times."""
    log.info("latents of %dx%d divide over %d of %d devices", height, width, parts, devices)


def spatial_parallel_conv(
    conv: Callable[..., Float[Array, "B T H W O"]],
    x: Float[Array, "B T H W I"],
    residual: Float[Array, "B T H W O"] | None,
    *params: Array,
    halo: tuple[int, int],
    repeat_edges: bool = False,
) -> Float[Array, "B T h w O"]:
    """A convolution on each device's part of height and width, after a halo exchange.

    Args:
        conv: conv(x, sides, residual, *params, padding=), where `sides` are the columns beside x, [B, T, h, n, I], or
            None, and `padding` is the zero padding that x needs at its edges.
        residual: has the result's shape and sharding.
        params: replicated.
        halo: pixels that conv reads before and after each pixel.
        repeat_edges: outside of the picture are its edges, not zeros.
    """
    layout = _layout.get()
    axes = {} if layout is None else {axis: layout[axis] for axis in (HEIGHT, WIDTH) if layout[axis] is not None}
    padding = tuple((0, 0) if repeat_edges or axis in axes else halo for axis in (HEIGHT, WIDTH))

    def local_conv(x: Array, residual: Array | None, *params: Array) -> Array:
        x, sides = _with_neighbours(x, axes, halo, repeat_edges)
        return conv(x, sides, residual, *params, padding=padding)

    if layout is None:
        return local_conv(x, residual, *params)
    # also where the pictures are whole: the compiler cannot split a TPU kernel itself
    specs: tuple[Any, ...] = (layout, layout, *[PartitionSpec()] * len(params))
    return jax.shard_map(local_conv, in_specs=specs, out_specs=layout, check_vma=False)(x, residual, *params)


def _count(names: str | _Names) -> int:
    """Devices along one or several mesh axes."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[name] for name in ((names,) if isinstance(names, str) else names))


def whole_clips(x: Float[Array, "B ..."]) -> Float[Array, "B ..."]:
    """x with all of each clip on the devices that have a part of it, inside `spatial_split`."""
    layout = _layout.get()
    if layout is None:
        return x
    where = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(layout[0]))
    return jax.lax.with_sharding_constraint(x, where)


def on_each_part(
    f: Callable[..., Float[Array, "B T h w O"]], x: Float[Array, "B T H W I"], clips: Any, *whole: Array
) -> Float[Array, "B T H W O"]:
    """f(x, *clips, *whole) on each device's part of x, inside `spatial_split`.

    Args:
        clips: arrays [B, ...], each device's clips whole.
        whole: the same on all devices.
    """
    layout = _layout.get()
    if layout is None:
        return f(x, *clips, *whole)
    specs = (layout, *[PartitionSpec(layout[0])] * len(clips), *[PartitionSpec()] * len(whole))
    return jax.shard_map(f, in_specs=specs, out_specs=layout, check_vma=False)(x, *clips, *whole)


def _with_neighbours(
    x: Float[Array, "B T H W C"], axes: Mapping[int, Any], halo: tuple[int, int], repeat_edges: bool
) -> tuple[Float[Array, "B T h W C"], Float[Array, "B T h n C"] | None]:
    """A device's part of a picture with its neighbours' rows, and the columns to its left and right; outside of the
    picture its own edges where those repeat. The columns are None where they are zeros.

    axes: axis of x -> the mesh axes over which it is split.
    """
    parts, start = [x], 0
    last = _last_row(x.shape[HEIGHT], axes.get(HEIGHT))
    if repeat_edges or HEIGHT in axes:
        first, below = (jax.lax.dynamic_slice_in_dim(x, at, 1, HEIGHT) for at in (0, last))
        before, after = _received(first, below, axes.get(HEIGHT), halo, repeat_edges)
        parts, start = [*before, x, *after], len(before)

    def joined(parts: list[Array]) -> Array:
        y = jnp.concatenate(parts, HEIGHT)
        if isinstance(last, Array):  # the rows after the one below the picture do not matter
            y = jax.lax.dynamic_update_slice_in_dim(y, parts[-1], start + last + 1, HEIGHT)
        return y

    sides = None
    if repeat_edges or WIDTH in axes:
        # of each part, which with the neighbours' rows gives the corners
        ends = ([jax.lax.slice_in_dim(p, at, at + 1, axis=WIDTH) for p in parts] for at in (0, x.shape[WIDTH] - 1))
        left, right = (joined(end) for end in ends)
        before, after = _received(left, right, axes.get(WIDTH), halo, repeat_edges)
        sides = jnp.concatenate([*before, *after], WIDTH)
    return joined(parts), sides


def _received(
    first: Array, last: Array, names: Any, halo: tuple[int, int], repeat_edges: bool
) -> tuple[list[Array], list[Array]]:
    """The pixels before and after a device's part, whose own edges are these; none where conv reads none.

    names: of mesh axes; None where the picture is not split.
    """
    n = 1 if names is None else _count(names)

    def other(edge: Array, pairs: list[tuple[int, int]], end: int, own: Array) -> Array:
        if names is None:
            return own
        received = jax.lax.ppermute(edge, names, pairs)  # zeros for the device at the picture's end
        return jnp.where(jax.lax.axis_index(names) == end, own, received) if repeat_edges else received

    before = [other(last, [(i, i + 1) for i in range(n - 1)], 0, first)] if halo[0] else []
    after = [other(first, [(i + 1, i) for i in range(n - 1)], n - 1, last)] if halo[1] else []
    return before, after


def _last_row(own: int, names: Any) -> Int[Array, ""] | int:
    """The last of a device's `own` rows that is the picture's; an array where the picture has been padded."""
    picture, padded = _rows.get()
    if picture == padded:
        return own - 1
    n = _count(names)
    return jnp.where(jax.lax.axis_index(names) == n - 1, picture_rows(own * n) - own * (n - 1), own) - 1
