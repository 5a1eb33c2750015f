"""Arrays and dtypes of other libraries. PyTorch is never imported: its tensors are known by their methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np

Method = TypeVar("Method", bound=Callable[..., Any])


def from_torch(value: Any) -> Any:
    """A tensor of PyTorch as an array of NumPy, floats as float32; anything else as it is.

    Tensors may be of any dtype and device, and have gradients, which end here.
    """
    if not (callable(getattr(value, "detach", None)) and callable(getattr(value, "numpy", None))):
        return value
    tensor = value.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def takes_tensors(method: Method) -> Method:
    """The method of a module, which takes tensors of PyTorch too."""

    @wraps(method)
    def converted(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *map(from_torch, args), **{name: from_torch(x) for name, x in kwargs.items()})

    return converted  # type: ignore[return-value]


def channels_last_advice(shape: Sequence[int], channels: int) -> str:
    """What to do about an array [..., C, H, W] or [..., C, T, H, W] of so many channels; "" for others."""
    axes = [axis for axis in (-3, -4) if len(shape) >= -axis and shape[axis] == channels != shape[-1]]
    return f". Channels come last here: move axis {axes[0]} to the end (np.moveaxis, or movedim)" if axes else ""


def dtype_name(dtype: Any) -> str:
    """Such as "bfloat16", of a dtype of NumPy, JAX or PyTorch, or of its name."""
    if isinstance(dtype, str):
        return dtype
    try:
        return np.dtype(dtype).name
    except TypeError:
        return str(dtype).removeprefix("torch.")
