"""A sibling of the embedded model that takes four steps without guidance: an adapter of its transformer.

Runs of the guided model from noise, in `TEACHER_STEPS` steps of DDIM, are kept at the four timesteps where a run of
four steps is. The adapter learns to make each of the four steps at once: the velocity that leads from a kept
state to the next one. Both schedulers are deterministic, so a seed's video stays the same.

Source: progressive distillation (arXiv 2202.00512), in one round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int, Key

from cogvideox_flax.lora import add_lora, lora_parameters, save_lora, with_parameters
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.schedulers import DDIMScheduler, StepTable
from cogvideox_flax.training.latent_cache import LatentCache, prepare
from cogvideox_flax.training.loop import METRICS_FILE
from cogvideox_flax.training.metrics import plot_metrics
from cogvideox_flax.training.objectives import Metrics
from cogvideox_flax.training.shuffle import shuffled_indices
from weights.toy_world import world
from weights.toy_world.make.diffusion import guided_velocity, make_tokenizer, sha256_of
from weights.toy_world.make.settings import (
    BRIEF,
    DISTIL_BATCH,
    DISTIL_LOOP,
    DISTIL_RANK,
    SCHEDULER,
    SEED,
    SHARD,
    SIZE,
    TEACHER_STEPS,
    TRAJECTORIES,
    TWO_OBJECTS,
    VAE,
    Run,
)
from weights.toy_world.make.training import train_stage

STEPS = 4
NAME, FOLDER = "four-steps", "embedded_four_steps"
PROMPT_SEED = SEED + 13
TARGETS = tuple(CogVideoX.lora.targets)
SHAPE = (5, SIZE // 8, SIZE // 8, VAE.latent_channels)
"""Of the latents."""


def train_four_steps(run: Run) -> dict[str, Any]:
    """The adapter's parameters, trained for the model of `run.base`.

    Raises:
        InputError: the run has no base.
    """
    trajectories, tokenizer = prepare_trajectories(run), make_tokenizer(run)
    transformer = _with_adapter(run.part("transformer"))
    frozen = {"transformer": transformer, "text_encoder": run.part("text_encoder")}

    def batch(step: int) -> dict[str, np.ndarray]:
        indices = shuffled_indices(step, batch=DISTIL_BATCH, count=TRAJECTORIES, seed=PROMPT_SEED)
        return trajectories.gather(indices) | {"ids": tokenizer([_prompt(int(i)) for i in indices])}

    params, how = {"transformer": lora_parameters(transformer)}, {"loss": step_loss, "batches": batch, "frozen": frozen}
    return train_stage(run, NAME, DISTIL_LOOP, params, **how).trained["transformer"]


def step_loss(
    params: dict[str, Any], frozen: dict[str, Any], batch: dict[str, Array], key: Key[Array, ""]
) -> tuple[Float32[Array, ""], Metrics]:
    """The error of the velocity that leads from a kept state to the next. A `Loss` of the training loop."""
    states = batch["states"].astype(jnp.float32)
    plan = jax.tree.map(jnp.asarray, DDIMScheduler(SCHEDULER).plan(STEPS))
    step = jax.random.permutation(key, jnp.arange(len(states)) % STEPS)
    here, there = (states[jnp.arange(len(states)), i] for i in (step, step + 1))
    model, context = _bind(params, frozen, batch)
    error = model(here, context, plan.timesteps[step], remat=True) - velocity_between(plan, step, here, there)
    loss = jnp.square(error).mean()
    return loss, {"velocity": loss}


def velocity_between(
    plan: StepTable, step: Int[Array, " B"], here: Float32[Array, "B T h w C"], there: Float32[Array, "B T h w C"]
) -> Float32[Array, "B T h w C"]:
    """The velocity with which these steps of DDIM lead from one state to another."""
    row = jax.tree.map(lambda table: table[step].reshape(-1, 1, 1, 1, 1), plan)
    return ((row.from_sample + row.from_x0 * row.signal) * here - there) / (row.from_x0 * row.sigma)


def prepare_trajectories(run: Run) -> LatentCache:
    """Guided runs of the base: `states` [STEPS + 1, T, h, w, C], from noise to the last latents."""
    encoder, transformer = map(run.part, ("text_encoder", "transformer"))
    tokenizer, scheduler = make_tokenizer(run), DDIMScheduler(SCHEDULER)
    plan = jax.tree.map(jnp.asarray, scheduler.plan(TEACHER_STEPS))
    every = TEACHER_STEPS // STEPS

    @jax.jit
    def run_guided(encoder: Any, transformer: Any, ids: Any, noise: Any) -> Any:
        context = encoder(ids)

        def step(x: Any, i: Any) -> tuple[Any, Any]:
            return scheduler.step(plan, i, guided_velocity(transformer, context, x, plan.timesteps[i]), x)[0], x

        last, states = jax.lax.scan(step, noise, jnp.arange(TEACHER_STEPS))
        return jnp.stack([*states[::every], last], 1)

    def compute(indices: range) -> dict[str, np.ndarray]:
        prompts = [_prompt(i) for i in indices]
        ids = np.concatenate([tokenizer([""] * len(prompts)), tokenizer(prompts)])
        noise = np.random.default_rng([PROMPT_SEED, indices.start]).standard_normal((len(prompts), *SHAPE))
        states = run_guided(encoder, transformer, ids, jnp.asarray(noise, jnp.float32))
        return {"states": np.asarray(states, np.float16)}

    meta = {"seed": PROMPT_SEED, "steps": TEACHER_STEPS, "model": [sha256_of(part) for part in (encoder, transformer)]}
    return prepare(run.folder / "trajectories", TRAJECTORIES, compute, shard_size=SHARD, meta=meta)


def export_four_steps(run: Run) -> Path:
    """Write an adapter in diffusers' layout to the folder RUN/embedded_four_steps, and plot the loss.

    Returns:
        The adapter's file.
    """
    parameters = train_four_steps(run)
    plot_metrics([run.folder / NAME / METRICS_FILE], ("velocity",), run.folder / f"training-{NAME}.png")
    transformer = _with_adapter(run.part("transformer"))
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters)
    return save_lora(CogVideoX, run.folder / FOLDER, with_parameters(transformer, narrow))


def _with_adapter(transformer: Any) -> Any:
    return add_lora(CogVideoX, transformer, DISTIL_RANK, targets=TARGETS, rngs=nnx.Rngs(PROMPT_SEED))


def _bind(params: dict[str, Any], frozen: dict[str, Any], batch: dict[str, Array]) -> tuple[Any, Array]:
    """The transformer with the adapter, and the prompts' features."""
    return with_parameters(frozen["transformer"], params["transformer"]), frozen["text_encoder"](batch["ids"])


def _prompt(index: int) -> str:
    rng = np.random.default_rng([PROMPT_SEED, index])
    return world.describe(world.sample_scene(rng, "train", TWO_OBJECTS), rng, BRIEF)
