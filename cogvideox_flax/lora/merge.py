"""Adds the adapters of files to a denoiser's weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from cogvideox_flax.config import Config
from cogvideox_flax.errors import CheckpointError
from cogvideox_flax.io.tensor_file import TensorFile
from cogvideox_flax.lora.adapters import set_linear, unadapted, with_adapter, with_product
from cogvideox_flax.lora.files import (
    LoRARecord,
    LowRankPair,
    adapter_hash,
    is_without_effect,
    matrix_shape,
    open_adapter,
    read_adapter,
)
from cogvideox_flax.lora.layouts import any_layer
from cogvideox_flax.models.model import Family
from cogvideox_flax.nn.quantized import QuantizedLinear
from cogvideox_flax.nn.stack import same_arrays
from cogvideox_flax.runtime.global_arrays import replicate

log = logging.getLogger(__name__)


class Merged(NamedTuple):
    """A denoiser with adapters, and the names of its parameters that they changed."""

    denoiser: Any
    changed: set[str]


class _Part(NamedTuple):
    """The matrices that one file adds to one layer of a kernel."""

    file: TensorFile
    pair: LowRankPair
    scale: float


def merge_files(
    family: Family, config: Config, denoiser: Any, records: Sequence[LoRARecord], *, mesh: Mesh | None = None
) -> Merged:
    """Add adapters to the weights: kernel + sum of scale * alpha / rank * B A.

    The sum is made in float32, over all adapters at once, and cast to the weights' dtype once. Beside 8-bit weights the
    low-rank matrices stay on their own (`LoRALinear`): a step of the weights is larger than what most adapters add, so
    rounding the sum would lose them. The result shares all other arrays with the denoiser.

    Args:
        config: the denoiser's.
        records: from `describe_lora`.
        mesh: the denoiser's.

    Raises:
        CheckpointError: a file is missing, damaged, not the one that was described, or does not fit.
        InputError: the denoiser has adapters beside its weights already.
    """
    result, changed = same_arrays(denoiser), set[str]()
    with ExitStack() as files:
        kernels: dict[str, list[_Part]] = {}
        for record in records:
            file = files.enter_context(open_adapter(record["file"]))
            adapter = read_adapter(family, config, file, record.get("alpha"))
            log.info("adapter %s: %s, scale %g", file.path.name, adapter, record["scale"])
            if is_without_effect(file, adapter):
                log.warning("adapter %s changes nothing: its B are all zero, as before training", file.path)
            for pair in adapter.pairs.values():
                kernels.setdefault(pair.move.target, []).append(_Part(file, pair, record["scale"]))
        for kernel, parts in kernels.items():
            path = kernel.removesuffix(".kernel")
            linear = unadapted(denoiser, path)
            a, b = _stacked(parts, linear.kernel.shape)
            if isinstance(linear, QuantizedLinear):
                result = with_adapter(family, result, path, a, b, a.shape[-1], mesh)
            else:
                set_linear(result, path, with_product(linear, *replicate((a, b), mesh)))
                changed.add(kernel)
    for record in records:
        if adapter_hash(Path(record["file"])) != record["sha256"]:  # after it was read
            raise CheckpointError(f"{record['file']} changed while this run was under way; start it again")
    return Merged(result, changed)


def load_adapters(
    family: Family, config: Config, denoiser: Any, path: str | Path, targets: Sequence[str], *, mesh: Mesh | None = None
) -> Any:
    """The denoiser with the adapters of a file beside its weights, from which training goes on.

    Args:
        config: the denoiser's.
        targets: from `trained_targets`.
        mesh: the denoiser's.

    Raises:
        CheckpointError: the file is missing, damaged, or does not fit.
        InputError: the denoiser has adapters already.
    """
    with open_adapter(path) as file:
        pairs = list(read_adapter(family, config, file).pairs.values())
        for target in targets:
            place = family.lora.targets[target]
            layers = [pair for pair in pairs if pair.move.target == f"{place}.kernel"]
            # strengths are the adapter's alpha, not in b
            parts = [_Part(file, pair._replace(alpha=pair.rank), 1.0) for pair in layers]
            a, b = _stacked(parts, unadapted(denoiser, place).kernel.shape)
            denoiser = with_adapter(family, denoiser, place, a, b, layers[0].alpha, mesh)
    return denoiser


def trained_targets(family: Family, config: Config, path: str | Path) -> dict[str, LowRankPair]:
    """The targets of an adapter from which training can go on -> its pair in the first layer.

    Raises:
        CheckpointError: it is missing, damaged, or does not fit; or training has no target for one of its maps, or a
            target is not in all layers, with one rank and alpha.
    """
    with open_adapter(path) as file:
        file.check()
        pairs = read_adapter(family, config, file).pairs
        names = {f"{place}.kernel": target for target, place in family.lora.targets.items()}
        adapted: dict[str, list[LowRankPair]] = {}
        for source, pair in pairs.items():
            if pair.move.target not in names:
                raise CheckpointError(
                    f"{file.path} adapts {any_layer(source)}, which is not trained; training goes on from adapters of "
                    f"{', '.join(names.values())}"
                )
            adapted.setdefault(names[pair.move.target], []).append(pair)
        layers = family.components[family.lora.component].abstract(config)
        for target in (targets := [name for name in family.lora.targets if name in adapted]):
            some = adapted[target]
            count = unadapted(layers, family.lora.targets[target]).kernel.shape[0]
            kinds = sorted({(pair.rank, pair.alpha) for pair in some})
            if len(some) != count or len(kinds) > 1:
                raise CheckpointError(
                    f"{file.path} adapts {target} in {len(some)} layers of {count}, with (rank, alpha) "
                    f"{', '.join(map(str, kinds))}; training goes on from one rank and alpha in all layers"
                )
        return {target: adapted[target][0] for target in targets}


def _stacked(
    parts: Sequence[_Part], shape: tuple[int, ...]
) -> tuple[Float32[np.ndarray, "*layers in rank"], Float32[np.ndarray, "*layers rank out"]]:
    """(a, b) of a kernel, strengths in b: of each layer all adapters side by side, then zeros."""
    layers: dict[int | None, list[tuple[np.ndarray, np.ndarray]]] = {}
    for part in parts:
        layers.setdefault(part.pair.move.slot, []).append(_pair(part))
    rank = max(sum(a.shape[1] for a, _ in pairs) for pairs in layers.values())
    *leading, width, out = shape
    stacked_a = np.zeros((*leading, width, rank), np.float32)
    stacked_b = np.zeros((*leading, rank, out), np.float32)
    for layer, pairs in layers.items():
        place: Any = ... if layer is None else layer
        a, b = np.concatenate([a for a, _ in pairs], 1), np.concatenate([b for _, b in pairs])
        stacked_a[place][:, : len(b)] = a
        stacked_b[place][: len(b)] = b
    return stacked_a, stacked_b


def _pair(part: _Part) -> tuple[Float32[np.ndarray, "in rank"], Float32[np.ndarray, "rank out"]]:
    """(a, b) of one adapter of one layer, in our axes.

    Where a weight's axes are not only transposed, as in patch embeddings, the product is moved, and one of the two
    matrices is the identity.
    """
    file, pair, scale = part
    a, b = (
        matrix.astype(np.float32).reshape(matrix_shape(matrix.shape))
        for matrix in (file.read(pair.a), file.read(pair.b))
    )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise CheckpointError(f"{file.path} holds NaN or infinity in {pair.a} or its b; download it again")
    b = np.float32(scale * pair.strength) * b[pair.rows]
    if pair.swapped:
        b = np.roll(b, len(b) // 2, axis=0)
    if pair.move.transform is np.transpose:
        return a.T, b.T
    delta = pair.move.transform((b @ a.reshape(len(a), -1)).reshape(len(b), *a.shape[1:]))
    width, out = delta.shape
    return (np.eye(width, dtype=np.float32), delta) if width < out else (delta, np.eye(out, dtype=np.float32))
