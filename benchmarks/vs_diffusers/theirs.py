"""The other side: the same parts with diffusers and transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline, CogVideoXTransformer3DModel
from transformers import T5EncoderModel

from benchmarks.released_layout import make_scheduler
from benchmarks.vs_diffusers.cases import COMPONENT, STEPS, Case, inputs


def build(case: Case, folder: Path) -> Callable[[], np.ndarray]:
    """A function that computes the part and waits for the result, which is in our layout."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.backends.cudnn.allow_tf32 = False  # nor do we multiply float32 in less
    torch.backends.cudnn.benchmark = True  # as XLA does, it looks for the fastest convolutions
    device, dtype = ("cuda" if case.device == "gpu" else "cpu"), getattr(torch, case.dtype)
    classes: dict[str, Any] = {
        "text_encoder": T5EncoderModel,
        "transformer": CogVideoXTransformer3DModel,
        "vae": AutoencoderKLCogVideoX,
    }

    def load(component: str) -> Any:
        module = classes[component].from_pretrained(folder / "hf" / component, torch_dtype=dtype).to(device).eval()
        return torch.compile(module) if case.torch_compile and component == "transformer" else module

    def put(x: np.ndarray) -> Any:
        return torch.tensor(x).to(device, dtype if x.dtype == np.float32 else torch.long)

    def channels_second(x: np.ndarray) -> Any:
        return put(x).permute(0, 4, 1, 2, 3).contiguous()

    def take(x: Any) -> np.ndarray:
        return x.cpu().float().numpy()

    given = inputs(case)
    latents: Any = put(given["latents"]).permute(0, 1, 4, 2, 3).contiguous() if "latents" in given else None
    if case.part == "video":
        scheduler = make_scheduler("ddim", 1.0)
        pipe: Any = CogVideoXPipeline(None, *(load(c) for c in ("text_encoder", "vae", "transformer")), scheduler)
        pipe.set_progress_bar_config(disable=True)

        def video() -> np.ndarray:
            context, negative = (pipe.text_encoder(put(ids))[0] for ids in (given["ids"], np.ones_like(given["ids"])))
            return pipe(
                prompt_embeds=context,
                negative_prompt_embeds=negative,
                latents=latents,
                num_inference_steps=STEPS,
                guidance_scale=6.0,
                height=case.height,
                width=case.width,
                num_frames=case.frames,
                output_type="np",
            ).frames

        return _without_gradients(video)
    module = load(COMPONENT.get(case.part, case.part))
    if case.part == "text_encoder":
        ids = put(given["ids"])
        return _without_gradients(lambda: take(module(ids)[0]))
    if case.part == "encode":
        video = channels_second(given["video"])
        return _without_gradients(lambda: take(module.encode(video).latent_dist.mean.permute(0, 2, 3, 4, 1)))
    if case.part == "decode":
        z = channels_second(given["latents"])
        return _without_gradients(lambda: take(module.decode(z).sample.permute(0, 2, 3, 4, 1)))
    shape = type("Config", (), {"transformer": module, "vae_scale_factor_spatial": 8})()
    rotary = CogVideoXPipeline._prepare_rotary_positional_embeddings(
        shape, case.height, case.width, case.denoised_frames, torch.device(device)
    )
    both, context, t = latents.repeat(2, 1, 1, 1, 1), put(given["context"]), torch.tensor([999, 999], device=device)

    def step() -> np.ndarray:
        out = module(both, context, t, image_rotary_emb=rotary, return_dict=False)[0]
        return take(out.permute(0, 1, 3, 4, 2))

    return _without_gradients(step)


def _without_gradients(f: Any) -> Any:
    def call() -> Any:
        with torch.no_grad():
            return f()

    return call


def product(n: int, case: Case) -> Callable[[], object]:
    """One product of two n x n matrices of the case's dtype."""
    x = torch.randn(n, n).to("cuda" if case.device == "gpu" else "cpu", getattr(torch, case.dtype))

    def multiply() -> None:
        torch.matmul(x, x)
        if case.device == "gpu":
            torch.cuda.synchronize()

    return _without_gradients(multiply)


def gpu_peak_gib() -> float:
    """Of the GPU's memory, until now."""
    return torch.cuda.max_memory_allocated() / 2**30
