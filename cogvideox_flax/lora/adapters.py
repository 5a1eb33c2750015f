"""Adapters in the model: an adapted linear map has two low-rank matrices beside its own weights.

The rest of the model and its code do not change. Functions return new transformers that share the arrays of their
argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from cogvideox_flax import checkpoint, sharding
from cogvideox_flax.errors import InputError
from cogvideox_flax.lora.product import adapted_product
from cogvideox_flax.models.model import Family
from cogvideox_flax.nn.layers import Linear, matmul, product
from cogvideox_flax.nn.platforms import by_platform
from cogvideox_flax.nn.quantized import QuantizedLinear, WidenedLinear, kind_of
from cogvideox_flax.nn.stack import same_arrays

SCOPE = "adapter"
"""The name of an adapter's products in compiled programs."""


class LoRALinear(nnx.Module):
    """y = base(x) + alpha / rank * (x @ a) @ b, summed in float32 whatever the dtype.

    a: [in, rank]; b: [rank, out]; like the base's kernel, with a leading layer axis in stacked blocks. They may be
    float32 beside a base of 16 bits, as in training: products round them, and their gradients stay float32.
    """

    def __init__(
        self,
        base: Linear | QuantizedLinear,
        a: Float[Array, "*layers in rank"],
        b: Float[Array, "*layers rank out"],
        alpha: float,
    ):
        self.base = base
        self.a = nnx.Param(a)
        self.b = nnx.Param(b)
        self.alpha = alpha

    @property
    def scale(self) -> float:
        return self.alpha / self.a.shape[-1]

    def __call__(self, x: Float[Array, "*batch in"], *, out_dtype: Any = None) -> Float[Array, "*batch out"]:
        """As for `layers.Linear`."""
        if not isinstance(self.base, Linear | WidenedLinear) or sharding.devices_of("heads") > 1:
            y = self._two_products(x)
        else:
            y = by_platform(x, default=self._two_products, tpu=self._one_product)
        return y.astype(out_dtype or x.dtype)

    def _two_products(self, x: Float[Array, "*batch in"]) -> Float32[Array, "*batch out"]:
        with jax.named_scope(SCOPE):
            thin = product(matmul, x, self.a[...]).astype(x.dtype)
            more = self.scale * product(matmul, thin, self.b[...])
        return self.base(x, out_dtype=jnp.float32) + more

    def _one_product(self, x: Float[Array, "*batch in"]) -> Float32[Array, "*batch out"]:
        """Where neither axis of the weights is split: what is split cannot be made longer without an exchange."""
        base, b = self.base, self.scale * self.b[...].astype(jnp.float32)
        if isinstance(base, WidenedLinear):  # whose scale is applied to the sum
            y = adapted_product(x, self.a[...], b / base.scale[...], base.kernel[...].astype(x.dtype))
            return base.finish(y, jnp.float32)
        y = adapted_product(x, self.a[...], b, base.kernel[...].astype(x.dtype))
        return y if base.bias is None else y + base.bias[...].astype(jnp.float32)

    def merged(self) -> Linear:
        """The plain linear map that computes the same.

        Raises:
            InputError: the base is quantized; most of what an adapter adds is smaller than a step of 8-bit weights.
        """
        if isinstance(self.base, QuantizedLinear):
            raise InputError("an adapter beside 8-bit weights cannot be merged into them")
        return with_product(self.base, self.a[...], self.scale * self.b[...])


def add_lora(
    family: Family,
    transformer: Any,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] | None = None,
    *,
    rngs: nnx.Rngs,
    mesh: Mesh | None = None,
) -> Any:
    """The transformer with new float32 adapters that do not change its output yet: `b` is zero.

    `a` is uniform in ±in^-1/2, PEFT's initialisation (Kaiming uniform with a = sqrt(5)).

    Args:
        family: of the transformer.
        transformer: without adapters on these targets.
        rank: 1 or more.
        alpha: the adapters' results are multiplied by alpha / rank; default: the rank.
        targets: names of the family's `lora.targets`; default: its `lora.default_targets`.
        mesh: the transformer's mesh.

    Raises:
        InputError: a rank below 1, no target, an unknown target or one that has an adapter already; weights of 8
            bits that are not of `quantize_frozen`.
    """
    if rank < 1:
        raise InputError(f"the rank of a LoRA must be 1 or more; got {rank}")
    places = family.lora.targets
    targets = family.lora.default_targets if targets is None else targets
    if not targets or (unknown := [name for name in targets if name not in places]):
        wrong = f"unknown LoRA targets {', '.join(unknown)}" if targets else "a LoRA needs at least one target"
        raise InputError(f"{wrong}; known are {', '.join(places)}")
    model = same_arrays(transformer)
    for target in dict.fromkeys(targets):
        linear = unadapted(model, places[target])
        if isinstance(linear, QuantizedLinear) and not isinstance(linear, WidenedLinear):
            kind = kind_of(linear.kernel.dtype)
            raise InputError(
                f"rows of x are quantized too where weights are {kind}, which has no gradient; expected a transformer "
                "of nn.quantized.quantize_frozen"
            )
        layers, width, out = linear.kernel.shape
        bound = width**-0.5
        a = jax.random.uniform(rngs.params(), (layers, width, rank), minval=-bound, maxval=bound)
        b = jnp.zeros((layers, rank, out))
        model = with_adapter(family, model, places[target], a, b, rank if alpha is None else alpha, mesh)
    return model


def adapters(transformer: Any) -> dict[str, LoRALinear]:
    """Path -> adapter, for all adapted linear maps."""
    modules = nnx.iter_modules(transformer)
    return {".".join(map(str, path)): module for path, module in modules if isinstance(module, LoRALinear)}


def lora_parameters(transformer: Any) -> dict[str, Array]:
    """Name -> array, for the adapters only: the parameters that LoRA training optimizes and saves."""
    names = {f"{path}.{half}" for path in adapters(transformer) for half in "ab"}
    return {name: value for name, value in checkpoint.parameters(transformer).items() if name in names}


def is_adapter_parameter(name: str) -> bool:
    """Whether a name is that of half of an adapter, such as "blocks.attn.q.a"."""
    return name.endswith((".a", ".b"))


def with_parameters(transformer: Any, parameters: Mapping[str, Array]) -> Any:
    """The transformer with some parameters replaced, by name.

    `jax.grad(lambda adapters: loss(with_parameters(model, adapters)))(lora_parameters(model))` is the gradient of the
    adapters alone: the rest of the model is constant.

    Raises:
        KeyError: a name that the transformer does not have.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(transformer)
    names = [sharding.parameter_name(path) for path, _ in leaves]
    if unknown := parameters.keys() - set(names):
        raise KeyError(f"the transformer has no parameters {', '.join(sorted(unknown))}")
    values = [parameters.get(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, values)


def merge_lora(transformer: Any) -> Any:
    """Add the adapters to the weights, in the weights' dtype: a transformer without adapters that computes the same."""
    model = same_arrays(transformer)
    for path, linear in adapters(model).items():
        set_linear(model, path, linear.merged())
    return model


def without_adapters(transformer: Any) -> Any:
    """Remove the adapters: the transformer with its own weights."""
    model = same_arrays(transformer)
    for path, linear in adapters(model).items():
        set_linear(model, path, linear.base)
    return model


def unadapted(transformer: Any, path: str) -> Linear | QuantizedLinear:
    """The linear map at a path such as "blocks.attn.q", to be adapted.

    Raises:
        InputError: it has an adapter already.
    """
    linear: Linear | QuantizedLinear | LoRALinear = attrgetter(path)(transformer)
    if isinstance(linear, LoRALinear):
        raise InputError(f"{path} of this transformer has a LoRA already; merge_lora makes it part of the weights")
    return linear


def with_product(linear: Linear, a: Float32[Array, "*layers in rank"], b: Float32[Array, "*layers rank out"]) -> Linear:
    """The linear map whose kernel is kernel + a @ b, with the kernel's sharding; the bias is shared.

    Summed in float32, and cast to the kernel's dtype once.
    """
    kernel = linear.kernel[...]
    if kernel.ndim == 2:  # one layer that is not stacked
        merged = _merge_layer(None, (kernel, a, b))[1]
    else:  # layer by layer: a float32 copy of all layers would take gigabytes
        merged = jax.lax.scan(_merge_layer, None, (kernel, a, b))[1]
    result: Linear = same_arrays(linear)
    result.kernel = nnx.Param(jax.device_put(merged, kernel.sharding))
    return result


def set_linear(model: Any, path: str, linear: nnx.Module) -> None:
    """Put a linear map in the place of another, by its path."""
    owner, _, name = path.rpartition(".")
    setattr(attrgetter(owner)(model) if owner else model, name, linear)


def with_adapter(
    family: Family,
    transformer: Any,
    path: str,
    a: Float[Any, "layers width rank"],
    b: Float[Any, "layers rank out"],
    alpha: float,
    mesh: Mesh | None,
) -> Any:
    """The transformer with one linear map adapted, the adapter sharded by the family's rows."""
    rows = family.components[family.lora.component].sharding

    def place(half: str, value: Any) -> Array:
        if mesh is None:
            return jnp.asarray(value)
        return jax.device_put(value, sharding.parameter_sharding(mesh, rows, f"{path}.{half}", value.shape))

    model = same_arrays(transformer)
    set_linear(model, path, LoRALinear(attrgetter(path)(model), place("a", a), place("b", b), float(alpha)))
    return model


def _merge_layer(carry: None, layer: tuple[Array, Array, Array]) -> tuple[None, Array]:
    kernel, a, b = layer
    delta = matmul(a.astype(jnp.float32), b.astype(jnp.float32))
    return carry, (kernel.astype(jnp.float32) + delta).astype(kernel.dtype)
