"""Adapters on disk: written in diffusers' layout, read strictly in every layout of `layouts`, safetensors only.

transformer.transformer_blocks.{i}.attn1.to_q.lora_A.weight  [rank, in], the transpose of our `a` of layer i
transformer.transformer_blocks.{i}.attn1.to_q.lora_B.weight  [out, rank]
metadata: the adapter's config as JSON
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import jax.numpy as jnp
import numpy as np

from cogvideox_flax import checkpoint, hub
from cogvideox_flax.config import Config
from cogvideox_flax.conversion.mapping import WeightMove, source_moves
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io.contents import content_hash, content_hashes, fingerprint
from cogvideox_flax.io.paths import expand_user
from cogvideox_flax.io.tensor_file import PickledError, TensorFile, write_tensors
from cogvideox_flax.io.values import is_finite_number, short_repr
from cogvideox_flax.lora.adapters import adapters
from cogvideox_flax.lora.alphas import FINETRAINERS_KEY, METADATA_KEY, PEFT_CONFIG, Alphas
from cogvideox_flax.lora.layouts import LoRAKey, any_layer, known_maps, last_layers, parse_key, unsupported_kind
from cogvideox_flax.models.model import Family, LoRALayout
from cogvideox_flax.models.registry import FAMILIES, RELEASES

FILE_NAME = "pytorch_lora_weights.safetensors"
PEFT_FILE = "adapter_model.safetensors"
EMBEDDED_ADAPTERS = {"embedded-four-steps": hub.EMBEDDED.with_name("embedded_four_steps")}
"""Name -> directory of the adapters that come with the source tree, and with an installed package."""
MAX_FAULTS = 20

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""Of files that may hold an adapter; all but the first are pickles, which are refused with what to do."""

_FLOATS = tuple(map(np.dtype, (jnp.bfloat16, np.float16, np.float32, np.float64)))


class _LoRARecord(TypedDict):
    file: str
    scale: float
    sha256: str


class LoRARecord(_LoRARecord, total=False):
    """An adapter of a run: absolute path, strength, `adapter_hash`, alpha where it was given."""

    alpha: float


class LowRankPair(NamedTuple):
    """The adapter of one linear map in a file.

    a, b: names of its tensors: [rank, in, ...], [out, rank, ...].
    rows: those of b that are this map's; all but for a fused one.
    swapped: the two halves of these rows are in the other order.
    alpha: b a is multiplied by `strength`, alpha / rank.
    move: where the map's weight is in our model, and how its axes are moved.
    """

    a: str
    b: str
    rank: int
    rows: slice
    swapped: bool
    alpha: float
    move: WeightMove

    @property
    def strength(self) -> float:
        return self.alpha / self.rank


class Adapter(NamedTuple):
    """The contents of an adapter file, from its header.

    layout: name of the layout, see `layouts`.
    pairs: diffusers' name of a linear map -> its adapter.
    alpha: where the file's alpha comes from, in words.
    """

    layout: str
    pairs: dict[str, LowRankPair]
    alpha: str

    def __str__(self) -> str:
        ranks = sorted({pair.rank for pair in self.pairs.values()})
        strengths = sorted({pair.strength for pair in self.pairs.values()})
        maps = f"{len(self.pairs)} map{'s' if len(self.pairs) > 1 else ''}"
        return f"{self.layout} layout, {maps}, rank {_range(ranks)}, alpha / rank {_range(strengths)} ({self.alpha})"

    @property
    def targets(self) -> list[str]:
        """The names of the maps, with * for a layer's number."""
        return sorted({any_layer(name) for name in self.pairs})


def save_lora(family: Family, path: str | Path, transformer: Any) -> Path:
    """Write the adapters as diffusers does, with their config in the metadata.

    Args:
        path: a `.safetensors` file, or a directory, in which the file has diffusers' name.

    Returns:
        The file.

    Raises:
        InputError: the transformer has no adapters, or the file cannot be written.
    """
    path = Path(path)
    path = path if path.suffix == ".safetensors" else path / FILE_NAME
    tensors, ranks, alphas = {}, {}, {}
    layout, adapted = family.lora, adapters(transformer)
    for place, source in layout.maps.values():
        if (linear := adapted.get(place)) is None:
            continue
        ranks[source] = linear.a.shape[-1]
        alphas[source] = linear.alpha
        for half, value in (("A", linear.a), ("B", linear.b)):
            for layer, matrix in enumerate(np.asarray(value[...])):
                name = f"{layout.component}.{layout.blocks}.{layer}.{source}.lora_{half}.weight"
                tensors[name] = np.ascontiguousarray(matrix.T)
    if not tensors:
        raise InputError(f"there is nothing to write to {path}: the transformer has no LoRA")
    write_tensors(path, tensors, {"format": "pt", METADATA_KEY: pipeline_metadata(layout, peft_config(ranks, alphas))})
    return path


def peft_config(ranks: Mapping[str, int], alphas: Mapping[str, float]) -> dict[str, Any]:
    """The entries of PEFT's `LoraConfig`: module -> rank and alpha; patterns of those that differ from the first."""
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    return {
        "r": rank,
        "lora_alpha": _plain(alpha),
        "target_modules": list(ranks),
        "rank_pattern": {source: value for source, value in ranks.items() if value != rank},
        "alpha_pattern": {source: _plain(value) for source, value in alphas.items() if value != alpha},
    }


def _plain(alpha: float) -> float:
    """A whole number as an integer, as PEFT has it."""
    return int(alpha) if float(alpha).is_integer() else alpha


def pipeline_metadata(layout: LoRALayout, config: Mapping[str, Any]) -> str:
    """PEFT's config as diffusers stores it in an adapter's file."""
    return json.dumps({f"{layout.component}.{key}": value for key, value in config.items()}, indent=2, sort_keys=True)


def describe_lora(
    family: Family, path: str | Path, scale: float, config: Config, alpha: float | None = None
) -> LoRARecord:
    """Check from its header that an adapter fits a transformer of this config; returns the adapter's record.

    Args:
        alpha: in place of the file's.

    Raises:
        CheckpointError: the file is missing, damaged, or does not fit; with all faults.
        InputError: the scale or alpha is not a finite number.
    """
    for what, value in (("scale", scale), ("alpha", 1.0 if alpha is None else alpha)):
        if not is_finite_number(value):
            raise InputError(f"the {what} of a LoRA must be a finite number (1 is as trained); got {short_repr(value)}")
    with open_adapter(path) as file:
        file.check()
        read_adapter(family, config, file, alpha)
    record: LoRARecord = {
        "file": str(file.path.absolute()),
        "scale": float(scale),
        "sha256": adapter_hash(file.path),
    }
    return record if alpha is None else {**record, "alpha": float(alpha)}


def adapter_hash(path: Path) -> str:
    """The start of the SHA-256 of an adapter's file; of it and PEFT's config where that is beside it."""
    config = path.with_name(PEFT_CONFIG)
    if not config.is_file():
        return content_hash(path)[:16]
    return fingerprint(content_hashes([path, config]))[:16]


def find_adapter(where: str | Path) -> Path:
    """The file of an adapter, which may be missing.

    Args:
        where: the file; the directory that diffusers or PEFT saved it to, or that holds no other safetensors file; or,
            where there is nothing of the name, an adapter that comes with the package ("embedded-four-steps"), or a
            hub id ("owner/name"), with the file's name behind it ("owner/name/folder/file.safetensors") unless it is
            diffusers' or the only one.

    Raises:
        InputError: it cannot be downloaded, or there are several files.
    """
    path = expand_user(where)
    if not os.path.exists(path):  # unlike Path.exists, does not raise for a name that is too long
        path = EMBEDDED_ADAPTERS.get(str(where), path)
    if os.path.isdir(path):
        return _file_of_folder(path)
    if not _is_on_hub(where):
        return path
    from cogvideox_flax.conversion.download import download_file  # here, since huggingface_hub takes long to import

    owner, name, *rest = str(where).split("/")
    return download_file(f"{owner}/{name}", "/".join(rest), FILE_NAME, ".safetensors", PEFT_CONFIG)


def _file_of_folder(folder: Path) -> Path:
    """The adapter in a folder: by diffusers' or PEFT's name, or the only safetensors file; else diffusers' name."""
    usual = next((folder / name for name in (FILE_NAME, PEFT_FILE) if (folder / name).is_file()), None)
    if usual is not None:
        return usual
    found = sorted(folder.glob("[!.]*.safetensors"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:20])
        raise InputError(f"{folder} has {len(found)} safetensors files ({names}); expected one adapter: name its file")
    return found[0] if found else folder / FILE_NAME


def _is_on_hub(where: str | Path) -> bool:
    """Whether this is a hub id, with or without a file behind it, and nothing of the name is here."""
    path = expand_user(where)
    owner, *rest = str(where).split("/")
    is_file = len(rest) == 1 and path.suffix in SUFFIXES
    return not (os.path.exists(path) or not owner or not rest or is_file or os.path.exists(expand_user(owner)))


def published_name(where: str | Path) -> str:
    """The name by which an adapter may be known, from its path alone.

    The hub id and the path behind it, also of a file in the hub's cache; else the name of the file, or of its directory
    where that is what has a name: diffusers calls every file the same.
    """
    if _is_on_hub(where):
        return str(where)
    path = expand_user(where).absolute()
    for i, part in enumerate(path.parts):
        if part.startswith("models--") and path.parts[i + 1 : i + 2] == ("snapshots",):
            return "/".join([*part.split("--")[1:], *path.parts[i + 3 :]])
    return path.parent.name if path.name in (FILE_NAME, PEFT_FILE) else path.name


@contextmanager
def open_adapter(path: str | Path) -> Iterator[TensorFile]:
    """An adapter's file.

    Args:
        path: as for `find_adapter`.

    Raises:
        CheckpointError: missing, damaged, or a pickle; with the command that makes safetensors of it.
        InputError: it cannot be downloaded.
    """
    path = find_adapter(path)
    try:
        file = TensorFile(path)
    except PickledError as e:
        raise CheckpointError(
            f"{path} looks like pickled PyTorch weights, which are never read. Where torch is installed, this makes "
            f'safetensors of them, without running their code:\n  python -c "{_UNPICKLE}" {path} adapter.safetensors'
        ) from e
    with file:
        yield file


_UNPICKLE = (
    "import sys, torch, safetensors.torch as s; x = torch.load(sys.argv[1], 'cpu', weights_only=True); "
    "x = x.get('module', x); "
    "s.save_file({k: v.contiguous() for k, v in x.items() if 'matrix_' in k or 'lora' in k}, sys.argv[2])"
)


def read_adapter(family: Family, config: Config, file: TensorFile, alpha: float | None = None) -> Adapter:
    """Match a file with a denoiser of this config, without reading weights.

    Args:
        alpha: in place of the file's.

    Raises:
        CheckpointError: it does not fit, with all faults and the releases that it fits; or another kind of adapter.
    """
    adapter, faults = _match(family, config, file, alpha)
    if not faults:
        return adapter
    fits = _fitting(file)
    more = [f"  ... and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
    raise CheckpointError(
        f"{file.path} is not a LoRA that fits this {family.lora.component} ({len(faults)} faults). "
        + (f"It fits {', '.join(fits)}.\n" if fits else "The layouts that are read are in docs/adapters.md.\n")
        + "\n".join([*faults[:MAX_FAULTS], *more])
    )


def is_without_effect(file: TensorFile, adapter: Adapter) -> bool:
    """Whether all B are zero, as before training."""
    return not any(file.read(pair.b).any() for pair in adapter.pairs.values())


def is_adapter(file: TensorFile) -> bool:
    """Whether a tensor's name is that of an adapter of any layout, or of an adapter of another kind."""
    components = {family.lora.component for family in FAMILIES.values()}
    return any(unsupported_kind(name) or parse_key(name, each) for name in file.tensors for each in components)


def fitting_releases(file: TensorFile) -> dict[str, Adapter]:
    """The releases and embedded models whose denoiser an adapter fits, and what it is for them.

    Raises:
        CheckpointError: it fits none, is another kind of adapter, or damaged.
    """
    if found := _fitting(file):
        return found
    raise CheckpointError(
        f"{file.path} fits no release as an adapter (docs/adapters.md has the layouts); --lora says what is wrong for "
        "one model"
    )


def _fitting(file: TensorFile) -> dict[str, Adapter]:
    """As `fitting_releases`; {} if it fits none."""
    matches: dict[tuple[str, Config], tuple[Adapter, list[str]]] = {}
    fitting = {}
    for name, (family, config) in known_models().items():
        if (family.name, config) not in matches:
            matches[family.name, config] = _match(family, config, file, None)
        adapter, faults = matches[family.name, config]
        if not faults:
            fitting[name] = adapter
    return fitting


def known_models() -> dict[str, tuple[Family, Config]]:
    """The family and the denoiser's config of each release and embedded model."""
    models = {name: (release.family, release.configs) for name, release in RELEASES.items()}
    for name, folder in hub.EMBEDDED_MODELS.items():
        if name is not None and folder.is_dir():
            manifest = checkpoint.read_manifest(folder)
            models[name] = manifest.family, manifest.configs
    families = {name: FAMILIES[family] for name, (family, _) in models.items()}
    return {name: (family, models[name][1][family.lora.component]) for name, family in families.items()}


def _match(family: Family, config: Config, file: TensorFile, given: float | None) -> tuple[Adapter, list[str]]:
    """The adapter, as far as it fits, and the faults."""
    layout, component = family.lora, family.lora.component
    moves = linear_maps(family, config)
    shapes = {
        name: leaf.shape for name, leaf in checkpoint.parameters(family.components[component].abstract(config)).items()
    }
    sources = known_maps(layout, moves)
    groups, keys, faults = _group(file, component, sources)
    alphas = Alphas(file, component, given, keys)
    pairs: dict[str, LowRankPair] = {}
    for name, parts in groups.items():
        if wrong := _shape_faults(file, parts, sources[name], moves, shapes):
            faults += wrong
            continue
        rank, out = file.tensors[parts["A"]].shape[0], file.tensors[parts["B"]].shape[0] // len(sources[name])
        alpha = alphas.of((name, *sources[name]), parts, rank)
        swapped = name in {other.replace(".", mark) for other in layout.swapped for mark in "._"}
        for i, source in enumerate(sources[name]):
            if source in pairs:
                faults.append(f"  twice    {source}: {pairs[source].a} and {parts['A']}")
            rows = slice(i * out, (i + 1) * out)
            pairs[source] = LowRankPair(parts["A"], parts["B"], rank, rows, swapped, alpha, moves[source])
    if not file.tensors:
        faults.append("  missing  any tensor")
    return Adapter(_layout_name(file, keys), pairs, alphas.source), list(dict.fromkeys(faults))


def linear_maps(family: Family, config: Config) -> dict[str, WeightMove]:
    """Diffusers' name of each linear map of the denoiser -> the move of its weight."""
    moves = source_moves(family, family.lora.component, config)
    return {name.removesuffix(".weight"): move for name, move in moves.items() if move.target.endswith(".kernel")}


def _group(
    file: TensorFile, component: str, known: Mapping[str, Any]
) -> tuple[dict[str, dict[str, str]], list[LoRAKey], list[str]]:
    """Map -> names of its A, B and alpha; all names; and the faults of names and dtypes."""
    groups: dict[str, dict[str, str]] = {}
    keys, faults = [], []
    layers = last_layers(known)
    for name, info in file.tensors.items():
        key = parse_key(name, component)
        if key is None or key.map not in known:
            if what := unsupported_kind(name):
                raise CheckpointError(
                    f"{file.path} is {what} ({any_layer(name)}); adapters of two low-rank matrices for each linear map "
                    f"of the {component} are served"
                )
            last = None if key is None else layers.get(any_layer(key.map))
            faults.append(
                f"  unknown  {any_layer(name)}"
                if last is None
                else f"  layer    {name}: the model's last layer is {last}"
            )
            continue
        keys.append(key)
        parts = groups.setdefault(key.map, {})
        if key.part in parts:
            faults.append(f"  twice    {parts[key.part]} and {name}")
        if info.dtype not in _FLOATS:
            faults.append(f"  dtype    {any_layer(name)}: got {info.dtype}, expected bfloat16, float16 or float32")
        parts[key.part] = name
    return groups, keys, faults


def _shape_faults(
    file: TensorFile,
    parts: Mapping[str, str],
    sources: tuple[str, ...],
    moves: Mapping[str, WeightMove],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[str]:
    if missing := {"A", "B"} - parts.keys():
        return [f"  missing  lora_{' and lora_'.join(sorted(missing))} beside {next(iter(parts.values()))}"]
    faults = []
    a, b = (matrix_shape(file.tensors[parts[half]].shape) for half in "AB")
    for move in (moves[source] for source in sources):
        shape = shapes[move.target] if move.slot is None else shapes[move.target][1:]
        if not _fits(move, a, b, shape, len(sources)):
            width, out = shape[0], shape[-1] * len(sources)
            expected = f"(rank, {width}) and ({out}, rank)" if move.transform is np.transpose else f"those of {shape}"
            faults.append(f"  shape    {any_layer(parts['A'])} and its b: got {a} and {b}, expected {expected}")
            break
    if "alpha" in parts and math.prod(file.tensors[parts["alpha"]].shape) != 1:
        faults.append(f"  shape    {any_layer(parts['alpha'])}: expected one number")
    return faults


def _fits(move: WeightMove, a: tuple[int, ...], b: tuple[int, ...], shape: tuple[int, ...], maps: int) -> bool:
    """Whether B A, for one of some fused maps, is of the shape of a weight that moves to `shape`."""
    if not a or a[0] < 1 or len(b) != 2 or b[1] != a[0] or b[0] % maps:
        return False
    try:
        return move.transform(np.broadcast_to(np.float32(0), (b[0] // maps, *a[1:]))).shape == shape
    except (ValueError, IndexError):
        return False


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix, which a file may hold as a pointwise convolution."""
    return shape[:2] if all(n == 1 for n in shape[2:]) else shape


def _layout_name(file: TensorFile, keys: list[LoRAKey]) -> str:
    if FINETRAINERS_KEY in file.metadata:
        return "finetrainers"
    return keys[0].layout if keys else "no"


def _range(values: list[Any]) -> str:
    """'4' or '4 to 8', of sorted numbers."""
    return " to ".join(f"{value:g}" for value in dict.fromkeys(values[:1] + values[-1:]))
