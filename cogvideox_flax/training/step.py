"""The training state and one training step, a pure function of the state and the step's batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32, Key

from cogvideox_flax import sharding
from cogvideox_flax.errors import InputError
from cogvideox_flax.lora import is_adapter_parameter
from cogvideox_flax.runtime.compile import compiler_options
from cogvideox_flax.runtime.global_arrays import put
from cogvideox_flax.runtime.settings import random_key
from cogvideox_flax.sharding import ParameterRows
from cogvideox_flax.training.config import LoopConfig
from cogvideox_flax.training.objectives import Metrics
from cogvideox_flax.training.optimizer import make_optimizer

Params = Any
"""What is trained: component name -> module, or any pytree of arrays."""

Batch = Any
"""A pytree of arrays whose first axis is the batch."""

Loss = Callable[[Params, Any, Batch, Key[Array, ""]], tuple[Float32[Array, ""], Metrics]]
"""loss(params, frozen, batch, key) -> (loss, metrics): means over the batch, or `Mean`s over parts of it."""


@jax.tree_util.register_dataclass
@dataclass
class TrainState:
    """Everything that changes during training. `ema` is like `params`, or None; `step` counts the steps done."""

    step: Int32[Array, ""]
    params: Params
    ema: Params | None
    opt_state: Any

    @property
    def trained(self) -> Params:
        """The result of the training: the moving average where there is one, else the parameters."""
        return self.params if self.ema is None else self.ema


def init_state(
    params: Params, config: LoopConfig, mesh: Mesh | None, rows: Mapping[str, ParameterRows] | None = None
) -> TrainState:
    """The state before the first step, in float32. On a mesh, a moment is placed like its parameter.

    Args:
        params: component name -> module with the starting weights.
        rows: component name -> the sharding of its parameters on the mesh.
    """
    first = partial(_first_state, config=config)
    if mesh is None:
        return first(params)
    placements = _placements(params, mesh, rows or {})
    shardings = _state_shardings(jax.eval_shape(first, params), placements, config, mesh)
    return jax.jit(first, out_shardings=shardings)(jax.tree.map(put, params, placements))


def abstract_state(
    params: Params, config: LoopConfig, mesh: Mesh | None, rows: Mapping[str, ParameterRows] | None = None
) -> TrainState:
    """`init_state` as shapes with their shardings; params are shapes too."""
    state = jax.eval_shape(partial(_first_state, config=config), params)
    if mesh is None:
        return state
    shardings = _state_shardings(state, _placements(params, mesh, rows or {}), config, mesh)
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state, shardings)


def _first_state(params: Params, config: LoopConfig) -> TrainState:
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    ema = jax.tree.map(jnp.copy, params) if config.ema_decay else None
    moments = make_optimizer(config.optimizer, config.steps).init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, ema, moments)


def _state_shardings(state: TrainState, placements: Any, config: LoopConfig, mesh: Mesh) -> TrainState:
    """Where the arrays of a state lie: a moment like its parameter, but for axes that it has not or has shorter."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(moment: Any, like: NamedSharding) -> Any:
        if isinstance(moment, optax.MaskedNode):  # a parameter of Muon's other part
            return moment
        return NamedSharding(mesh, sharding.dividing_spec(mesh, like.spec, moment.shape))

    moments = optax.tree_utils.tree_map_params(
        make_optimizer(config.optimizer, config.steps),
        place,
        state.opt_state,
        placements,
        transform_non_params=lambda _: replicated,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    step: Any = replicated
    return TrainState(step, placements, placements if config.ema_decay else None, moments)


def jit_step(loss: Loss, config: LoopConfig, state: TrainState, platform: str | None = None, **options: Any) -> Any:
    """The training step, jitted. Its state takes the memory of the one before, and lies where that lies.

    Args:
        state: or its shapes with their shardings.
        platform: as for `compiler_options`.
        options: more options of XLA.
    """
    return jax.jit(
        partial(train_step, loss=loss, config=config),
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda x: x.sharding, state), None),
        compiler_options=compiler_options(config.dtype, platform=platform, training=True) | options,
    )


def train_step(
    state: TrainState, frozen: Any, batch: Batch, *, loss: Loss, config: LoopConfig
) -> tuple[TrainState, Metrics]:
    """One optimizer step.

    Args:
        frozen: passed to `loss`; arrays that are not trained, in the dtype in which they compute.
        batch: micro-batches from `put_batch`.

    Returns:
        The next state, and the metrics of the step.
    """
    optimizer = make_optimizer(config.optimizer, config.steps)
    key = jax.random.fold_in(random_key(config.seed), state.step)

    def gradient(micro: tuple[Batch, Array]) -> tuple[Params, Metrics]:
        batch, i = micro

        mean_loss = jax.value_and_grad(in_dtype(loss, config.dtype), has_aux=True)
        (value, metrics), grads = mean_loss(state.params, frozen, batch, jax.random.fold_in(key, i))
        return grads, {"loss": value} | metrics

    micro_batches = batch, jnp.arange(config.accumulate)
    first = jax.tree.map(lambda x: x[0], micro_batches)
    if config.accumulate == 1:
        grads, metrics = gradient(first)
    else:
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(gradient, first))
        total, _ = jax.lax.scan(
            lambda sums, micro: (jax.tree.map(jnp.add, sums, gradient(micro)), None), zeros, micro_batches
        )
        grads, metrics = jax.tree.map(lambda x: x / config.accumulate, total)  # both fields of a `Mean`

    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = None
    if state.ema is not None:
        n = state.step.astype(jnp.float32)
        decay = jnp.minimum(config.ema_decay, (1 + n) / (10 + n))
        ema = jax.tree.map(lambda average, new: decay * average + (1 - decay) * new, state.ema, params)
    metrics = metrics | {"gradient_norm": optax.tree.norm(grads)}
    return TrainState(state.step + 1, params, ema, opt_state), metrics


def in_dtype(loss: Loss, dtype: str) -> Loss:
    """The loss as a function of float32 parameters: its weights are rounded to this dtype.

    Those of a component's blocks are rounded in their layers, so that gradients are summed in float32 (`Rounded`);
    so are adapters (`nn.layers.product`). Frozen arrays are left as they are.
    """

    def rounded(path: jax.tree_util.KeyPath, x: Array) -> Any:
        name = sharding.parameter_name(path)
        if is_adapter_parameter(name) or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == dtype:
            return x
        _, _, inside = name.partition(".")
        return sharding.Rounded(x, dtype) if inside.startswith("blocks.") else x.astype(dtype)

    def loss_in_dtype(
        params: Params, frozen: Any, batch: Batch, key: Key[Array, ""]
    ) -> tuple[Float32[Array, ""], Metrics]:
        return loss(jax.tree_util.tree_map_with_path(rounded, params), frozen, batch, key)

    return loss_in_dtype


def put_batch(batch: Batch, config: LoopConfig, mesh: Mesh | None) -> Batch:
    """A batch of host arrays on the devices, as micro-batches [accumulate, batch, ...] split over dp.

    Raises:
        InputError: it does not divide into the micro-batches, or these over dp.
    """

    def put_one(x: np.ndarray) -> Array:
        if x.shape[0] % config.accumulate:
            raise InputError(f"a batch of {x.shape[0]} does not divide into {config.accumulate} micro-batches")
        x = x.reshape(config.accumulate, -1, *x.shape[1:])
        if mesh is None:
            return jnp.asarray(x)
        return put(x, sharding.named(mesh, (None, "batch"), x.shape, "a training batch"))

    return jax.tree.map(put_one, batch)


def _placements(params: Params, mesh: Mesh, rows: Mapping[str, ParameterRows]) -> Any:
    """The sharding of each parameter, from the table of its component, which is the outermost key."""

    def place(path: jax.tree_util.KeyPath, leaf: Array) -> NamedSharding:
        component, _, name = sharding.parameter_name(path).partition(".")
        return sharding.parameter_sharding(mesh, rows[component], name, leaf.shape)

    return jax.tree_util.tree_map_with_path(place, params)
