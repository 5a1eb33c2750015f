"""Models of this library with the random weights of the reference's models, mapped by the converter's tables."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.gpu_proof.values import Values, in_jax, in_numpy, of_weight, traced
from cogvideox_flax import checkpoint
from cogvideox_flax.models.cogvideox.model import CogVideoX
from conversion.mapping import Move, plan

SMALL: dict[str, dict[str, Any]] = {
    "transformer": {
        "layers": 2,
        "heads": 4,
        "head_dim": 16,
        "text_width": 40,
        "text_length": 10,
        "time_width": 24,
        "sample_height": 8,
        "sample_width": 12,
        "sample_frames": 9,
    },
    "text_encoder": {"layers": 2, "heads": 4, "head_dim": 8, "width": 40, "mlp_width": 64},
    "vae": {
        "block_channels": (8, 16, 16, 32),
        "layers_per_block": 1,
        "norm_groups": 4,
        "sample_height": 64,
        "sample_width": 96,
    },
}
"""The config changes of `released_layout.build(small=True)`, in this library's field names."""

LAYER = re.compile(r"(?:transformer_blocks|encoder\.block)\.(\d+)\.")
"""The number of a layer in the name of a tensor."""

Shapes = Mapping[str, tuple[int, ...]]


def config_of(component: str, release: str, layers: int | None = None, small: bool = False) -> Any:
    """The released architecture: all layers or so many, at its own widths or at small ones."""
    changes = SMALL[component] if small else {}
    if layers is not None and component != "vae":
        changes = changes | {"layers": layers}
    return dataclasses.replace(CogVideoX.releases[release].configs[component], **changes)


def tensors_file(folder: str, component: str, release: str) -> Path:
    """The JSON file with the names and shapes of the reference's tensors."""
    return Path(folder) / f"tensors-{component}-{release}.json"


def reference_tensors(folder: str | None, component: str, release: str, layers: int | None) -> Shapes | None:
    """Name -> shape in the released layout, without the layers from `layers` on; None if the file does not exist."""
    if folder is None or not (path := tensors_file(folder, component, release)).is_file():
        return None
    shapes = {name: tuple(shape) for name, shape in json.loads(path.read_text()).items()}
    number = {name: int(found[1]) for name in shapes if (found := LAYER.search(name))}
    return {name: shape for name, shape in shapes.items() if layers is None or number.get(name, 0) < layers}


def random_module(component: str, config: Any, dtype: str, shapes: Shapes | None) -> Any:
    """The module with random weights on JAX's device.

    Args:
        shapes: of the reference's tensors, whose values ours get through the converter's tables (which must fit, both
            ways). None: values by our own names, which no other library has.

    Raises:
        ConversionError: the tensors are not those of this architecture.
    """
    if component == "vae":
        return _on_host(component, config, dtype, shapes)
    abstract, make, seeds = random_weights_program(component, config, dtype, shapes)
    return jax.tree.unflatten(jax.tree.structure(abstract), jax.jit(make)(seeds))


def _on_host(component: str, config: Any, dtype: str, shapes: Shapes | None) -> Any:
    """`random_module` on the CPU, for many small arrays of many shapes: compiling a program for them takes longer."""
    abstract = checkpoint.cast(CogVideoX.components[component].abstract(config), dtype)
    leaves = checkpoint.parameters(abstract)
    if shapes is None:
        makers = {name: partial(in_numpy, _own(name, x), x.shape, x.dtype) for name, x in leaves.items()}
    else:
        names, moves = _sources(component, config, shapes)

        def make(target: str) -> np.ndarray:
            kind = leaves[target].dtype
            found = [moves[n].transform(in_numpy(of_weight(n, shapes[n]), shapes[n], kind)) for n in names[target]]
            return np.stack(found) if moves[names[target][0]].slot is not None else found[0]

        makers = {target: partial(make, target) for target in leaves}
    with ThreadPoolExecutor() as pool:
        arrays = list(pool.map(lambda f: jax.device_put(np.ascontiguousarray(f())), makers.values()))
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


def _sources(component: str, config: Any, shapes: Shapes) -> tuple[dict[str, list[str]], dict[str, Move]]:
    """Parameter -> the tensors that fill it, in order; and tensor -> how."""
    moves = plan(CogVideoX, component, config, shapes).moves
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for name, move in moves.items():
        found[move.target].append((move.slot or 0, name))
    return {target: [name for _, name in sorted(pairs)] for target, pairs in found.items()}, moves


def random_weights_program(
    component: str, config: Any, dtype: str, shapes: Shapes | None
) -> tuple[Any, Callable[[list[np.ndarray]], list[jax.Array]], list[np.ndarray]]:
    """The abstract module, f(seeds) that makes its arrays in one program, and the seeds of each array's tensors."""
    abstract = checkpoint.cast(CogVideoX.components[component].abstract(config), dtype)
    leaves = checkpoint.parameters(abstract)
    if shapes is None:
        own = [_own(name, leaf) for name, leaf in leaves.items()]
        return (
            abstract,
            lambda seeds: [in_jax(v, x.shape, x.dtype) for v, x in zip(own, leaves.values(), strict=True)],
            [],
        )
    sources, moves = _sources(component, config, shapes)
    names = [sources[target] for target in leaves]

    def one(name: str, dtype: Any, seed: Any) -> Any:
        values = of_weight(name, shapes[name])
        transform: Callable[[Any], Any] = moves[name].transform  # it only moves axes, of whatever has some
        return transform(traced(seed, values.factor, values.mean, shapes[name], dtype))

    def make(seeds: list[np.ndarray]) -> list[jax.Array]:
        arrays = []
        for mine, seed, leaf in zip(names, seeds, leaves.values(), strict=True):
            f = partial(one, mine[0], leaf.dtype)  # a layer's shape and scale are those of the first
            arrays.append(jax.vmap(f)(seed) if moves[mine[0]].slot is not None else f(seed[0]))
        return arrays

    seeds = [np.asarray([of_weight(name, shapes[name]).seed for name in mine], np.int32) for mine in names]
    return abstract, make, seeds


def _own(name: str, leaf: Any) -> Values:
    """Values by this library's parameter names, without the reference's names."""
    shape = leaf.shape[1:] if name.startswith("blocks.") else leaf.shape
    if len(shape) < 2:
        return Values(name, 0.2, float(name.endswith("scale")))
    return Values(name, (shape[-1] if name.endswith(".weight") else math.prod(shape[:-1])) ** -0.5)
