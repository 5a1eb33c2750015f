"""Our side: the parts, what they count to, and what the machine can do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.vs_diffusers.cases import COMPONENT, STEPS, Case, inputs
from cogvideox_flax import CogVideoXPipeline
from cogvideox_flax.checkpoint import LOADERS, read_manifest
from cogvideox_flax.generate.programs import encoding, few_tokens
from cogvideox_flax.nn.layers import precision
from cogvideox_flax.plan.flops import count_flops
from cogvideox_flax.runtime.execution import GIB, Program, Recipe, always, compiler_options, never
from cogvideox_flax.runtime.hosts import fetch


def build(case: Case, folder: Path) -> Callable[[], np.ndarray]:
    """A function that computes the part and waits for the result."""
    given = arguments(case)
    native = folder / "native"
    if case.part == "video":
        pipe = CogVideoXPipeline.from_pretrained(native, case.dtype)
        jax.block_until_ready((pipe.text_encoder, pipe.transformer, pipe.vae))  # loading is not timed
        size = pipe.size(case.frames, case.height, case.width)
        encode = _program(encoding(), case)

        def video() -> np.ndarray:
            context = encode(pipe.text_encoder, given["ids"], announce=False)
            negative = encode(pipe.text_encoder, jnp.ones_like(given["ids"]), announce=False)
            steps: dict[str, Any] = {"num_inference_steps": STEPS, "guidance_scale": 6.0, "latents": given["latents"]}
            x, _ = pipe.denoise(context, negative, size, scheduler="ddim", progress=False, **steps)
            return fetch(pipe.decode_latents(x[:, size.extra_latents :], output_type="float", progress=False))

        return video
    component = COMPONENT.get(case.part, case.part)
    module = jax.block_until_ready(LOADERS[component](native, dtype=case.dtype))
    program = program_of(case)
    return lambda: fetch(program(module, *given.values(), announce=False))


def arguments(case: Case, **text: int) -> dict[str, jax.Array]:
    """The inputs as the part takes them. text: as for `inputs`."""
    given = inputs(case, **text).items()
    return {name: jnp.asarray(x, case.dtype if x.dtype == np.float32 else x.dtype) for name, x in given}


def program_of(case: Case) -> Program:
    """Of any part but the whole video; its arguments are the module and the inputs."""
    component = COMPONENT.get(case.part, case.part)
    return _program(Recipe(case.part, lambda: FUNCTIONS[case.part], apart=APART.get(component, never)), case)


def _program(recipe: Recipe, case: Case) -> Program:
    """As the pipeline makes it."""
    return Program(recipe, compiler_options(case.dtype), None, "", None)


def _both_halves(module: Any, x: Any, context: Any) -> Any:
    """The transformer, with and without the prompt."""
    return module(x.repeat(2, 0), context, 999)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "text_encoder": lambda module, ids: module(ids),
    "transformer": _both_halves,
    "encode": lambda module, video: module.encode(video)[0],
    "decode": lambda module, z: module.decode(z),
}
"""Part -> what our side computes."""


APART: dict[str, Callable[..., bool]] = {
    "text_encoder": always,
    "transformer": lambda module, x, context: few_tokens(module.config, x, context),
}
"""Component -> `Recipe.apart`, as in the pipeline's programs."""


def flops_of(case: Case, folder: Path) -> int:
    """Of the part's products, counted without running it."""
    manifest = read_manifest(folder / "native")
    given = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs(case).items()}
    if case.part != "video":
        module = manifest.abstract(COMPONENT.get(case.part, case.part))
        return count_flops(FUNCTIONS[case.part], module, *given.values()).total
    encoder, transformer, vae = (manifest.abstract(name) for name in ("text_encoder", "transformer", "vae"))
    x, ids = given["latents"], given["ids"]
    context = jax.eval_shape(FUNCTIONS["text_encoder"], encoder, ids)
    both = jax.ShapeDtypeStruct((2, *context.shape[1:]), context.dtype)
    z = jax.ShapeDtypeStruct((1, case.latent_frames, *x.shape[2:]), x.dtype)
    return (
        2 * count_flops(FUNCTIONS["text_encoder"], encoder, ids).total
        + STEPS * count_flops(_both_halves, transformer, x, both).total
        + count_flops(FUNCTIONS["decode"], vae, z).total
    )


def product(n: int, case: Case) -> Callable[[], object]:
    """One product of two n x n matrices of the case's dtype, given in float32, as the layers have it."""
    x = jax.random.normal(jax.random.key(0), (n, n)).astype(case.dtype)
    f = jax.jit(lambda x: jnp.matmul(x, x, precision=precision(x.dtype), preferred_element_type=jnp.float32))
    return lambda: f(x).block_until_ready()


def device_name() -> str:
    return jax.devices()[0].device_kind


def gpu_peak_gib() -> float:
    """Of the GPU's memory, until now."""
    return (jax.devices()[0].memory_stats() or {})["peak_bytes_in_use"] / GIB
