"""Adapters in the model: an adapted linear map holds two thin matrices beside its own weights.

Nothing else of the model changes, and its code knows nothing of adapters. Functions return new transformers, which
share the arrays of the one they are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from cogvideox_flax import checkpoint, sharding
from cogvideox_flax.errors import InputError
from cogvideox_flax.models.cogvideox.transformer import Transformer
from cogvideox_flax.nn.layers import Linear, Permutation, permuted, precision
from cogvideox_flax.nn.quantized import QuantizedLinear, kind_of
from cogvideox_flax.nn.stack import same_arrays

TARGETS: dict[str, str] = {"q": "attn", "k": "attn", "v": "attn", "out": "attn", "up": "mlp", "down": "mlp"}
"""What can be adapted: name of a linear map -> the part of a block that holds it."""

ATTENTION = ("q", "k", "v", "out")


class LoRALinear(nnx.Module):
    """y = base(x) + alpha / rank * (x @ a) @ b, summed in float32 whatever the dtype.

    a: [in, rank]; b: [rank, out]; like the base's kernel with a leading layer axis where the blocks are stacked.
    """

    def __init__(
        self, base: Linear, a: Float[Array, "*layers in rank"], b: Float[Array, "*layers rank out"], alpha: float
    ):
        self.base = base
        self.a = nnx.Param(a)
        self.b = nnx.Param(b)
        self.alpha = alpha

    @property
    def scale(self) -> float:
        return self.alpha / self.a.shape[-1]

    def __call__(
        self, x: Float[Array, "*batch in"], permutation: Permutation | None = None, *, out_dtype: Any = None
    ) -> Float[Array, "*batch out"]:
        """As for `layers.Linear`."""
        thin = _matmul(x, self.a[...].astype(x.dtype)).astype(x.dtype)
        b = permuted(self.b[...], permutation).astype(x.dtype)
        y = self.base(x, permutation, out_dtype=jnp.float32) + self.scale * _matmul(thin, b)
        return y.astype(out_dtype or x.dtype)

    def merged(self) -> Linear:
        """The plain linear map of stacked blocks that computes the same: kernel + alpha / rank * a @ b.

        Summed in float32, then cast to the kernel's dtype; laid out as the kernel was.
        """
        kernel = self.base.kernel[...]
        scales = jnp.full(len(kernel), self.scale)
        # layer by layer: a float32 copy of all layers at once would be gigabytes
        _, merged = jax.lax.scan(_merge_layer, None, (kernel, self.a[...], self.b[...], scales))
        linear = same_arrays(self.base)
        linear.kernel = nnx.Param(jax.device_put(merged, kernel.sharding))
        return linear


def add_lora(
    transformer: Transformer,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] = ATTENTION,
    *,
    rngs: nnx.Rngs,
    mesh: Mesh | None = None,
) -> Transformer:
    """The transformer with new float32 adapters that change nothing yet: `b` is zero.

    `a` is uniform in ±in^-1/2, which is PEFT's own start (Kaiming uniform with a = sqrt(5)).

    Args:
        transformer: without adapters on these targets.
        rank: 1 or more.
        alpha: the adapters' results are multiplied by alpha / rank; default: the rank.
        targets: names of TARGETS.
        mesh: the one that the transformer lies on.

    Raises:
        InputError: a rank below 1, no target, an unknown one or one that is adapted already.
    """
    if rank < 1:
        raise InputError(f"the rank of a LoRA must be 1 or more; got {rank}")
    if not targets or (unknown := [name for name in targets if name not in TARGETS]):
        wrong = f"unknown LoRA targets {', '.join(unknown)}" if targets else "a LoRA needs at least one target"
        raise InputError(f"{wrong}; known are {', '.join(TARGETS)}")
    model = same_arrays(transformer)
    for target in dict.fromkeys(targets):
        layers, width, out = plain_linear(model, target).kernel.shape
        bound = width**-0.5
        a = jax.random.uniform(rngs.params(), (layers, width, rank), minval=-bound, maxval=bound)
        model = with_adapter(model, target, a, jnp.zeros((layers, rank, out)), rank if alpha is None else alpha, mesh)
    return model


def adapters(transformer: Transformer) -> Iterator[tuple[str, LoRALinear]]:
    """The targets that are adapted, with their adapters."""
    for target, part in TARGETS.items():
        if isinstance(linear := getattr(getattr(transformer.blocks, part), target), LoRALinear):
            yield target, linear


def lora_parameters(transformer: Transformer) -> dict[str, Array]:
    """Name -> array of the adapters alone; what training differentiates and keeps."""
    names = {f"blocks.{TARGETS[target]}.{target}.{half}" for target, _ in adapters(transformer) for half in "ab"}
    return {name: value for name, value in checkpoint.parameters(transformer).items() if name in names}


def with_parameters(transformer: Transformer, parameters: Mapping[str, Array]) -> Transformer:
    """The transformer with some parameters replaced, by name.

    `jax.grad(lambda adapters: loss(with_parameters(model, adapters)))(lora_parameters(model))` is the gradient of the
    adapters alone: the rest of the model is a constant to it.

    Raises:
        KeyError: a name that the transformer does not have.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(transformer)
    names = [sharding.parameter_name(path) for path, _ in leaves]
    if unknown := parameters.keys() - set(names):
        raise KeyError(f"the transformer has no parameters {', '.join(sorted(unknown))}")
    values = [parameters.get(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, values)


def merge_lora(transformer: Transformer) -> Transformer:
    """A plain transformer that computes the same: the adapters are added to the weights, in the weights' dtype."""
    model = same_arrays(transformer)
    for target, linear in list(adapters(model)):
        setattr(getattr(model.blocks, TARGETS[target]), target, linear.merged())
    return model


def plain_linear(transformer: Transformer, target: str) -> Linear:
    """The linear map that is to be adapted.

    Raises:
        InputError: it is adapted already, or quantized.
    """
    linear = getattr(getattr(transformer.blocks, TARGETS[target]), target)
    if isinstance(linear, QuantizedLinear):
        raise InputError(
            f"adapters go with weights as they were trained, and this transformer's are {kind_of(linear.kernel.dtype)}"
        )
    if isinstance(linear, LoRALinear):
        raise InputError(f"{target} of this transformer has a LoRA already; merge_lora makes it part of the weights")
    return linear


def with_adapter(
    transformer: Transformer,
    target: str,
    a: Float[Any, "layers width rank"],
    b: Float[Any, "layers rank out"],
    alpha: float,
    mesh: Mesh | None,
) -> Transformer:
    """The transformer with one target adapted, the adapter laid out by the table of `sharding`."""
    model = same_arrays(transformer)
    part = TARGETS[target]

    def place(half: str, value: Any) -> Array:
        if mesh is None:
            return jnp.asarray(value)
        name = f"blocks.{part}.{target}.{half}"
        return jax.device_put(value, sharding.parameter_sharding(mesh, "transformer", name, value.shape))

    linear = LoRALinear(plain_linear(model, target), place("a", a), place("b", b), float(alpha))
    setattr(getattr(model.blocks, part), target, linear)
    return model


def _merge_layer(carry: None, layer: tuple[Array, Array, Array, Array]) -> tuple[None, Array]:
    kernel, a, b, scale = layer
    delta = scale * _matmul(a.astype(jnp.float32), b.astype(jnp.float32))
    return carry, (kernel.astype(jnp.float32) + delta).astype(kernel.dtype)


def _matmul(x: Array, y: Array) -> Float32[Array, "*batch out"]:
    return jnp.matmul(x, y, preferred_element_type=jnp.float32, precision=precision(x.dtype))
