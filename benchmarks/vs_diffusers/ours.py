"""Our side: the parts, their FLOPs, and the machine's matrix rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.vs_diffusers.cases import COMPONENT, HUNYUAN_TIMESTEP, KERNELS, PROMPT, STEPS, Case, inputs
from cogvideox_flax import CogVideoXPipeline
from cogvideox_flax.attention import attend
from cogvideox_flax.checkpoint import load_component, read_manifest
from cogvideox_flax.generate.encode import Conditioning
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.nn.conv.causal_conv import conv3d
from cogvideox_flax.nn.layers import precision
from cogvideox_flax.plan.flops import count_flops
from cogvideox_flax.runtime.compile import CompiledProgram, Program, compiler_options
from cogvideox_flax.runtime.devices import GIB


def build(case: Case, folder: Path) -> Callable[[], Any]:
    """A function that computes the part and waits for the result, which `fetch` takes."""
    given = arguments(case)
    native = folder / "native"
    if case.part == "video":
        pipe = CogVideoXPipeline.from_pretrained(native, case.dtype)
        jax.block_until_ready((pipe.text_encoder, pipe.transformer, pipe.vae))  # loading is not timed
        request = GenerationRequest(
            "", "", case.frames, case.height, case.width, STEPS, 6.0, False, "ddim", latents=given["latents"]
        )
        extra = pipe.resolve(request).size.extra_latents
        encode = _program("text encoder", FUNCTIONS["text_encoder"], case, given["ids"].size)

        def video() -> Any:
            context = encode(pipe.text_encoder, given["ids"])
            negative = encode(pipe.text_encoder, jnp.ones_like(given["ids"]))
            conditioning = Conditioning({"prompt_embeds": context}, {"prompt_embeds": negative})
            *_, last = pipe.denoise(conditioning, request)
            return jax.block_until_ready(pipe.decode(last.latents[:, extra:], output_type="float", progress=False))

        return video
    module = None
    if case.part not in KERNELS:
        component = COMPONENT.get(case.part, case.part)
        module = jax.block_until_ready(load_component(component, native, dtype=case.dtype))
    program = program_of(case)
    return lambda: jax.block_until_ready(program(module, *given.values()))


def fetch(x: Any) -> np.ndarray:
    """The result in float32."""
    return np.asarray(x, np.float32)


def arguments(case: Case) -> dict[str, jax.Array]:
    """The inputs as the part takes them."""
    given = inputs(case).items()
    return {name: jnp.asarray(x, case.dtype if x.dtype == np.float32 else x.dtype) for name, x in given}


def program_of(case: Case) -> CompiledProgram:
    """Of any part but the whole video; its arguments are the module and the inputs."""
    return _program(case.part, FUNCTIONS[case.part], case, _tokens(case))


@dataclass(frozen=True)
class _Part(Program):
    """A part's call, compiled as in the pipeline."""

    part: str
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.part

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _program(name: str, function: Callable[..., Any], case: Case, tokens: int | None) -> CompiledProgram:
    return CompiledProgram(_Part(name, function, tokens=tokens), compiler_options(case.dtype))


def _tokens(case: Case) -> int | None:
    """How many go through each layer of the part's model, both halves of guidance included."""
    return {"text_encoder": 226, "transformer": 2 * case.tokens}.get(case.part)


def _both_halves(module: Any, x: Any, *prompt: Any) -> Any:
    """The transformer, with and without the prompt: CogVideoX's context, or `PROMPT`."""
    if len(prompt) == 1:
        return module(x.repeat(2, 0), *prompt, 999)
    return module(x.repeat(2, 0), HUNYUAN_TIMESTEP, **dict(zip(PROMPT, prompt, strict=True)))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "text_encoder": lambda module, ids: module(ids),
    "transformer": _both_halves,
    "encode": lambda module, video: module.encode(video)[0],
    "decode": lambda module, z: module.decode(z),
    "attention": lambda module, q, k, v: attend(q, k, v),
    "convolution": lambda module, x, kernel, bias: conv3d(x, kernel, bias),
}
"""Part -> what our side computes."""


def flops_of(case: Case, folder: Path) -> int:
    """FLOPs of the part's products, counted without running it."""
    given = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs(case).items()}
    if case.part in KERNELS:
        return count_flops(FUNCTIONS[case.part], None, *given.values()).total
    manifest = read_manifest(folder / "native")
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
    """One product of two n x n matrices of the case's dtype."""
    x = jax.random.normal(jax.random.key(0), (n, n)).astype(case.dtype)
    f = jax.jit(lambda x: jnp.matmul(x, x, precision=precision(x.dtype)))
    return lambda: f(x).block_until_ready()


def device_name() -> str:
    return jax.devices()[0].device_kind


def gpu_peak_gib() -> float:
    """Of the GPU's memory, until now."""
    return (jax.devices()[0].memory_stats() or {})["peak_bytes_in_use"] / GIB
