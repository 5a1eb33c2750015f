"""The family and the configs of a directory in the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.config import require
from cogvideox_flax.conversion.source import components_of, contents_of, read_json
from cogvideox_flax.errors import ConversionError, InputError
from cogvideox_flax.io.values import load_json
from cogvideox_flax.models.model import Release, VideoModel
from cogvideox_flax.models.registry import FAMILIES


def find_family(src: Path, preferred: str | None = None) -> type[VideoModel]:
    """The family to which most class names in the components' config.json files belong.

    On a tie, the family with the most component directories; then `preferred`.
    """
    families = sorted(FAMILIES.values(), key=lambda family: family.name != preferred)

    def matches(family: type[VideoModel]) -> tuple[int, int]:
        named = sum(not _class_names(src / name).isdisjoint(c.class_names) for name, c in family.components.items())
        return named, sum((src / name).is_dir() for name in family.components)

    return max(families, key=matches)


def _class_names(folder: Path) -> set[str]:
    """The class names in a component's config.json; none if it cannot be read, which `read_configs` reports."""
    try:
        raw = load_json(folder / "config.json")
        return {raw["_class_name"]} if "_class_name" in raw else set(raw.get("architectures") or ())
    except (OSError, ValueError, TypeError, AttributeError):
        return set()


def read_configs(
    src: Path, family: type[VideoModel], wanted: Iterable[str], release: Release | None = None
) -> Manifest:
    """The configs of some components in a directory, of its scheduler and its tokenizer.

    Args:
        release: use the configs of the components and the scheduler of this release instead.

    Raises:
        ConversionError: a config file is missing or not supported.
    """
    configs = {name: _component_config(src, family, name, release) for name in wanted}
    if "image_encoder" in configs:
        _check_feature_extractor(src, configs["image_encoder"].image_size)
    scheduler_file = src / "scheduler" / "scheduler_config.json"
    known = release or family.find_release(configs)
    if release is None and scheduler_file.is_file():
        configs["scheduler"] = _parse(scheduler_file, family.scheduler_config.from_hf)
    elif known is not None and family.denoiser in configs:
        configs["scheduler"] = known.configs["scheduler"]
    tokenizer_file = src / "tokenizer" / "tokenizer_config.json"
    if tokenizer_file.is_file():
        configs["tokenizer"] = _parse(tokenizer_file, lambda raw: family.read_tokenizer(raw, configs))
    else:
        configs["tokenizer"] = family.read_tokenizer({}, configs)
    name = None if release is None else release.name
    return Manifest(family=family.name, configs=configs, release_name=name, guidance_scale=_guidance_scale(src))


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


def _component_config(src: Path, family: type[VideoModel], name: str, release: Release | None) -> Any:
    if release is not None:
        return release.configs[name]
    path = src / name / "config.json"
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
