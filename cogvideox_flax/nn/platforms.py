"""Operations that have a form of their own on some platforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

compiling_for = jax.make_user_context(default_value=None)
"""compiling_for(platform): context in which programs are traced for one platform alone, which takes half of the time.

Platforms have XLA's names: "cpu", "tpu", "cuda", "rocm". None, the default, is all of them.
"""


def platform_of(device: jax.Device) -> str:
    """XLA's name of a device's platform; the device need not be there."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def by_platform(*args: Any, default: Callable[..., Any], **forms: Callable[..., Any]) -> Any:
    """The result of an operation, in the form of the platform that it is compiled for.

    Args:
        args: of the operation, arrays.
        default: the form on platforms that `forms` does not name.
        forms: "cpu", "tpu", "cuda" or "rocm" -> the form there.
    """
    if (platform := compiling_for.value) is None:
        return jax.lax.platform_dependent(*args, default=default, **forms)
    return forms.get(platform, default)(*args)
