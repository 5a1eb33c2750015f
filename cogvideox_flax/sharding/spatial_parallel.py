"""Spatial parallelism: height and width are split over all devices, and convolutions exchange halos."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from cogvideox_flax.sharding.tables import AXES, mesh_axes

log = logging.getLogger(__name__)

HEIGHT, WIDTH = 2, 3
"""Axes of `B T H W C`."""

Padding = tuple[tuple[int, int], tuple[int, int]]
"""Zeros before and after the rows, and before and after the columns."""


class WithHalo(NamedTuple):
    """A device's part of a clip, and what is around it; None where that is zeros or nothing.

    x: [B, F, h, w, C].
    past: the frames before them, [B, P, h, w, C].
    edges: the rows above (if conv reads one) and below all frames, [B, P+F, 1 or 2, w, C].
    sides: the columns to the left (if it reads one) and right of all frames and `edges`, [B, P+F, h+..., 1 or 2, C].
    end: where the image ends before x does, the row in whose place the row below belongs; None is h.
    """

    x: Array
    past: Array | None
    edges: Array | None
    sides: Array | None
    end: Int[Array, ""] | None

    def whole(self, before: int) -> Float[Array, "B P+F h+... w+... C"]:
        """The part and its halo in one array. before: the pixels that conv reads before each."""
        x = self.x if self.past is None else jnp.concatenate([self.past, self.x], 1)
        x = _between(x, self.edges, before, self.end)
        if self.sides is None:
            return x
        left, right = jnp.split(self.sides, [before], WIDTH)
        return jnp.concatenate([left, x, right], WIDTH)


_Names = tuple[str, ...]
_layout: ContextVar[PartitionSpec | None] = ContextVar("layout of B T H W C", default=None)
_rows: ContextVar[tuple[int, int]] = ContextVar("rows of the image, and with padding", default=(1, 1))


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
            missing; `image_rows` says which are the image's. For models that repeat edges, and look at neighbours
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

    Only the last device has rows that are not the image's, and at least one that is. Up to an eighth more rows cost
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


def image_rows(height: int) -> int:
    """The number of rows of a clip inside `spatial_split` that are the image's."""
    image, padded = _rows.get()
    return height * image // padded


def spatial_layout(
    mesh: Mesh | AbstractMesh, shape: tuple[int, ...], ndim: int = 5, *, factor: int = 1
) -> PartitionSpec:
    """The sharding inside `spatial_split` of x [B, T, H, W, C], and of what is computed from it.

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
    batch = mesh_axes(sizes, "batch")
    if shape[0] == 1 or shape[0] % math.prod(sizes[name] for name in batch):
        batch = ()
    free = {name: n for name, n in sizes.items() if n > 1 and name not in batch}
    rows, columns = _split(shape[HEIGHT] // factor, shape[WIDTH] // factor, tuple(free.items()))
    return batch, rows, columns


def image_mesh(mesh: Mesh, shape: tuple[int, ...]) -> Mesh:
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
    x: Float[Array, "B F H W I"],
    past: Float[Array, "B P H W I"] | None,
    residual: Float[Array, "B T H W O"] | None,
    *params: Array,
    halo: tuple[int, int],
    repeat_edges: bool = False,
) -> Float[Array, "B T h w O"]:
    """A convolution on each device's part of height and width, after a halo exchange.

    Args:
        conv: conv(surrounded, residual, *params, padding=), where `padding` is the zero padding at the edges.
        past: the frames before x.
        residual: has the result's shape and sharding.
        params: replicated.
        halo: pixels that conv reads before and after each pixel.
        repeat_edges: outside of the image are its edges, not zeros.
    """
    layout = _layout.get()
    axes = {} if layout is None else {axis: layout[axis] for axis in (HEIGHT, WIDTH) if layout[axis] is not None}
    padding = tuple((0, 0) if repeat_edges or axis in axes else halo for axis in (HEIGHT, WIDTH))

    def local_conv(x: Array, past: Array | None, residual: Array | None, *params: Array) -> Array:
        return conv(_with_neighbours(x, past, axes, halo, repeat_edges), residual, *params, padding=padding)

    if layout is None:
        return local_conv(x, past, residual, *params)
    # also where the images are whole: the compiler cannot split a TPU kernel itself
    specs: tuple[Any, ...] = (layout, layout, layout, *[PartitionSpec()] * len(params))
    return jax.shard_map(local_conv, in_specs=specs, out_specs=layout, check_vma=False)(x, past, residual, *params)


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
    x: Array, past: Array | None, axes: Mapping[int, Any], halo: tuple[int, int], repeat_edges: bool
) -> WithHalo:
    """A device's part of a clip with its neighbours' rows and columns; outside of the image its own edges where those
    repeat.

    axes: axis of x -> the mesh axes over which it is split.
    """
    last = _last_row(x.shape[HEIGHT], axes.get(HEIGHT))
    end = last + 1 if isinstance(last, Array) else None
    edges: Array | None = None
    sides: Array | None = None

    def cut(at: Any, axis: int) -> Array:
        """One row or column of all frames."""
        frames = [x] if past is None else [past, x]
        return jnp.concatenate([jax.lax.dynamic_slice_in_dim(f, at, 1, axis) for f in frames], 1)

    if repeat_edges or HEIGHT in axes:
        before, after = _received(cut(0, HEIGHT), cut(last, HEIGHT), axes.get(HEIGHT), halo, repeat_edges)
        edges = jnp.concatenate([*before, *after], HEIGHT)
    if repeat_edges or WIDTH in axes:
        # between the pixels of `edges`, which are the corners
        ends = (0, x.shape[WIDTH] - 1)
        corners = [None if edges is None else jax.lax.slice_in_dim(edges, at, at + 1, axis=WIDTH) for at in ends]
        left, right = (_between(cut(at, WIDTH), c, halo[0], end) for at, c in zip(ends, corners, strict=True))
        before, after = _received(left, right, axes.get(WIDTH), halo, repeat_edges)
        sides = jnp.concatenate([*before, *after], WIDTH)
    return WithHalo(x, past, edges, sides, end)


def _between(x: Array, edges: Array | None, above: int, end: Array | None) -> Array:
    """Put x between rows, `above` of them on top; see `WithHalo`."""
    if edges is None:
        return x
    before, after = jnp.split(edges, [above], HEIGHT)
    y = jnp.concatenate([before, x, after], HEIGHT)
    # the rows after the one below the image do not matter
    return y if end is None else jax.lax.dynamic_update_slice_in_dim(y, after, above + end, HEIGHT)


def _received(
    first: Array, last: Array, names: Any, halo: tuple[int, int], repeat_edges: bool
) -> tuple[list[Array], list[Array]]:
    """The pixels before and after a device's part, whose own edges are these; none where conv reads none.

    names: of mesh axes; None where the image is not split.
    """
    n = 1 if names is None else _count(names)

    def other(edge: Array, pairs: list[tuple[int, int]], end: int, own: Array) -> Array:
        if names is None:
            return own
        received = jax.lax.ppermute(edge, names, pairs)  # zeros for the device at the image's end
        return jnp.where(jax.lax.axis_index(names) == end, own, received) if repeat_edges else received

    before = [other(last, [(i, i + 1) for i in range(n - 1)], 0, first)] if halo[0] else []
    after = [other(first, [(i + 1, i) for i in range(n - 1)], n - 1, last)] if halo[1] else []
    return before, after


def _last_row(own: int, names: Any) -> Int[Array, ""] | int:
    """The last of a device's `own` rows that is the image's; an array where the image has been padded."""
    image, padded = _rows.get()
    if image == padded:
        return own - 1
    n = _count(names)
    return jnp.where(jax.lax.axis_index(names) == n - 1, image_rows(own * n) - own * (n - 1), own) - 1
