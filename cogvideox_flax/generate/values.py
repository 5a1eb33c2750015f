"""Checks of single values of a request."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.limits import MAX_WRITTEN_FPS
from cogvideox_flax.io.values import is_count, shown

if TYPE_CHECKING:
    from cogvideox_flax.checkpoint import Manifest

MAX_SEED = 2**32 - 1

MAX_VIDEOS = 10_000
"""Videos of one request."""


class Faults:
    """Collects errors, to raise them together."""

    def __init__(self) -> None:
        self._found: list[InputError] = []

    @contextmanager
    def caught(self) -> Iterator[None]:
        try:
            yield
        except InputError as e:
            self._found.append(e)

    def __bool__(self) -> bool:
        return bool(self._found)

    def raise_all(self) -> None:
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise InputError("\n".join(map(str, self._found)))


def check_prompts(
    prompt: str | Sequence[str], negative_prompt: str | Sequence[str] = ""
) -> tuple[list[str], list[str]]:
    """Prompts and negative prompts as lists of equal length.

    Raises:
        InputError: no prompt, something that is not a string or not Unicode, or counts that do not agree.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    negatives = [negative_prompt] * len(prompts) if isinstance(negative_prompt, str) else list(negative_prompt)
    if not prompts:
        raise InputError("the list of prompts is empty; give at least one prompt")
    for text in (*prompts, *negatives):
        if not isinstance(text, str):
            raise InputError(f"prompts must be strings; got {type(text).__name__}: {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"the prompt {text!r} is not valid Unicode at character {e.start}; retype it") from e
    if len(negatives) != len(prompts):
        raise InputError(f"{len(prompts)} prompts but {len(negatives)} negative prompts; give one for all, or one each")
    return prompts, negatives


def check_num_videos(num_videos: int) -> None:
    """Refuse a number of videos per prompt that is out of range.

    Raises:
        InputError: it is.
    """
    if not is_count(num_videos, MAX_VIDEOS):
        raise InputError(f"num_videos is {shown(num_videos)}; expected a whole number from 1 to {MAX_VIDEOS}")


def check_fps(fps: int | None) -> None:
    """Refuse a frame rate that no video is written at; None is the release's.

    Raises:
        InputError: it is none.
    """
    if fps is not None and not is_count(fps, MAX_WRITTEN_FPS):
        raise InputError(f"fps is {shown(fps)}; expected a whole number from 1 to {MAX_WRITTEN_FPS} frames per second")


def parse_lora(text: str) -> dict[str, Any]:
    """'my.safetensors:0.8' -> file and scale; a colon that no number follows is part of the name."""
    file, _, scale = text.rpartition(":")
    try:
        return {"file": file, "scale": float(scale)} if file else {"file": text, "scale": 1.0}
    except ValueError:
        return {"file": text, "scale": 1.0}


def describe_adapter(adapter: Any, manifest: Manifest) -> dict[str, Any]:
    """An adapter's `LoRARecord`, from what a user gives."""
    from cogvideox_flax.lora import describe_lora

    record = parse_lora(os.fspath(adapter)) if isinstance(adapter, str | os.PathLike) else adapter
    if not isinstance(record, Mapping) or "file" not in record:
        raise InputError(f"lora holds {shown(adapter)}; expected a file, 'FILE:SCALE', or a record with file and scale")
    family = manifest.model_family
    if kind := manifest.quantized(family.lora.component):
        raise InputError(f"adapters go with weights as they were trained; those of this model are {kind}")
    return dict(
        describe_lora(family, record["file"], record.get("scale", 1.0), manifest.configs[family.lora.component])
    )


def is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
