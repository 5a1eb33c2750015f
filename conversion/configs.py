"""The family and the configs of a directory in the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.config import require
from cogvideox_flax.conversion.source import class_names, components_of, contents_of, is_alone, read_json
from cogvideox_flax.errors import ConversionError, InputError
from cogvideox_flax.models.model import Release, VideoModel
from cogvideox_flax.models.registry import FAMILIES


def find_family(src: Path, preferred: str | None = None) -> type[VideoModel]:
    """The family to which most class names in the components' config.json files belong.

    On a tie, the family with the most component directories; then `preferred`.
    """
    families = sorted(FAMILIES.values(), key=lambda family: family.name != preferred)

    def matches(family: type[VideoModel]) -> tuple[int, int]:
        folders = folders_of(src, family)
        named = sum(not class_names(folders[name]).isdisjoint(family.components[name].class_names) for name in folders)
        return named, sum((src / name).is_dir() for name in family.components)

    return max(families, key=matches)


def folders_of(src: Path, family: type[VideoModel]) -> dict[str, Path]:
    """Where each component lies: below `src`, or `src` itself, of which one component alone may be the contents.

    A file, or a folder without config.json, may be any of them.
    """
    if not is_alone(src):
        return {name: src / name for name in family.components}
    names = class_names(src)
    return {name: src for name, c in family.components.items() if not names or not names.isdisjoint(c.class_names)}


def read_configs(
    src: Path,
    family: type[VideoModel],
    wanted: Iterable[str],
    release: Release | None = None,
    into: Manifest | None = None,
) -> Manifest:
    """The configs of some components in a directory, of its scheduler and its tokenizer.

    Args:
        release: use the configs of the components and the scheduler of this release instead.
        into: of the checkpoint that the components become part of. What belongs to its denoiser and this directory
            lacks is taken from it.

    Raises:
        ConversionError: a config file is missing or not supported.
    """
    into = into or Manifest(family=family.name)
    configs = {name: _component_config(src, family, name, release, into.configs.get(name)) for name in wanted}
    if "image_encoder" in configs:
        _check_feature_extractor(src, configs["image_encoder"].image_size)
    kept = into if family.denoiser in into.configs else Manifest(family=family.name)
    scheduler_file = src / "scheduler" / "scheduler_config.json"
    known = release or family.find_release(configs)
    if release is None and scheduler_file.is_file():
        configs["scheduler"] = _parse(scheduler_file, family.scheduler_config.from_hf)
        kept = Manifest(family=family.name)  # a model of its own
    elif release is None and "scheduler" in kept.configs:
        configs["scheduler"] = kept.configs["scheduler"]
    elif known is not None and family.denoiser in configs:
        configs["scheduler"] = known.configs["scheduler"]
    tokenizer_file = src / "tokenizer" / "tokenizer_config.json"
    if tokenizer_file.is_file():
        configs["tokenizer"] = _parse(tokenizer_file, lambda raw: family.read_tokenizer(raw, configs))
    else:
        configs["tokenizer"] = kept.configs.get("tokenizer") or family.read_tokenizer({}, configs)
    guidance_scale = _guidance_scale(src)
    return Manifest(
        family=family.name,
        configs=configs,
        release_name=kept.release_name if release is None else release.name,
        guidance_scale=kept.guidance_scale if guidance_scale is None else guidance_scale,
    )


def kept_beside(there: Manifest, configs: Mapping[str, Any], dst: object) -> Manifest:
    """What a checkpoint keeps beside components with these configs: nothing of a model that they replace as a whole.

    Raises:
        ConversionError: a component is of another architecture than the one that it would replace.
    """
    faults = []
    for name in configs.keys() & there.configs.keys() & there.model.components.keys():
        new, old = (each[name].architecture().to_dict() for each in (configs, there.configs))
        faults += [f"its {name} has {key} {new[key]}, not {old[key]}" for key in old if new[key] != old[key]]
    if not faults:
        return there
    if there.configs.keys() & there.model.components.keys() <= configs.keys():
        return Manifest(family=there.family, tokenizer_sha256=there.tokenizer_sha256)
    raise ConversionError(
        f"this is no part of the checkpoint in {dst}: {'; '.join(sorted(faults))}. Take one of the same architecture, "
        "or convert the whole model into another directory"
    )


def check_complete(src: Path, family: type[VideoModel], release: Release | None = None) -> None:
    """Refuse a directory that is not a whole model: a component without weights, or no tokenizer that it can use.

    Args:
        release: as for `read_configs`.
    """
    found = components_of(src, family.components)
    absent = [
        f"{name}/ holds no safetensors weights ({contents_of(src / name)})"
        if (src / name).is_dir()
        else f"there is no {name}/"
        for name in family.components
        if name not in found
    ]
    if absent:
        raise ConversionError(
            f"{src} is not a whole model: {'; '.join(absent)}; to convert what is there, name it with --component"
        )
    read_configs(src, family, family.components, release).model.make_tokenizer(src)


def _guidance_scale(src: Path) -> float | None:
    """The scale in the guider's config (diffusers `ClassifierFreeGuidance`); None without a guider."""
    path = src / "guider" / "guider_config.json"
    if not path.is_file():
        return None

    def read(raw: dict[str, Any]) -> float:
        expected = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}
        require("guider", raw, _class_name="ClassifierFreeGuidance", **expected)
        return float(raw.get("guidance_scale", 7.5)) if raw.get("enabled", True) else 1.0

    return _parse(path, read)


def _check_feature_extractor(src: Path, side: int) -> None:
    """Refuse images for the image encoder that are made otherwise than SigLIP's: bicubic, squashed, in [-1, 1]."""
    path = src / "feature_extractor" / "preprocessor_config.json"
    if not path.is_file():
        return
    half = [0.5, 0.5, 0.5]
    usual = {"do_rescale": True, "do_normalize": True, "image_mean": half, "image_std": half, "resample": 3}
    usual |= {"rescale_factor": 1 / 255, "size": {"height": side, "width": side}}
    off = {"do_center_crop": False, "do_pad": False}
    _parse(
        path, lambda raw: require("feature_extractor", {"size": {"height": 224, "width": 224}} | raw, **usual, **off)
    )


def _component_config(src: Path, family: type[VideoModel], name: str, release: Release | None, replaced: Any) -> Any:
    if release is not None:
        return release.configs[name]
    folders = folders_of(src, family)
    if name not in folders:
        found = ", ".join(folders or sorted(class_names(src)))
        raise ConversionError(f"{src} holds {found} alone; expected the {name} of a {family.name} model")
    folder = folders[name]
    path = folder / "config.json"
    if replaced is not None and (folder.is_file() or not path.is_file()):
        return replaced
    if folder.is_file():
        raise ConversionError(
            f"{folder} does not say what the weights are; convert it into a checkpoint that has a {name} already, "
            "or name the model: cogvideox convert SRC DST --release NAME"
        )
    if not path.is_file():
        raise ConversionError(
            f"{path} is missing; it says what the weights are. Download it too, "
            "or name the model: cogvideox convert SRC DST --release NAME."
        )
    return _parse(path, family.components[name].config.from_hf)


def _parse(path: Path, make: Callable[[dict[str, Any]], Any]) -> Any:
    raw = read_json(path)
    try:
        return make(raw)
    except InputError as e:
        raise ConversionError(f"{path}: {e}") from e
    except (TypeError, AttributeError, ValueError, OverflowError) as e:
        raise ConversionError(f"{path} holds a value of the wrong type: {e}") from e
