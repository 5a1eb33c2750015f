"""The other side: the same parts with diffusers and transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo15,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    HunyuanVideo15Transformer3DModel,
)
from transformers import T5EncoderModel

from benchmarks.vs_diffusers.cases import COMPONENT, HUNYUAN_TIMESTEP, KERNELS, STEPS, Case, inputs
from tests.support.released_layout import make_scheduler


def build(case: Case, folder: Path) -> Callable[[], Any]:
    """A function that computes the part, in our layout, and waits for the result, which `fetch` takes."""
    prepare()
    classes: dict[str, Any] = {
        "text_encoder": T5EncoderModel,
        "transformer": HunyuanVideo15Transformer3DModel if case.is_hunyuan else CogVideoXTransformer3DModel,
        "vae": AutoencoderKLHunyuanVideo15 if case.is_hunyuan else AutoencoderKLCogVideoX,
    }

    def load(component: str) -> Any:
        path, dtype = folder / "hf" / component, getattr(torch, case.dtype)
        module = classes[component].from_pretrained(path, torch_dtype=dtype).to(_device(case)).eval()
        for block in _blocks(module) if case.torch_compile else ():
            block.compile()  # identical blocks compile once; 42 layers as one program take minutes
        return module

    if case.part == "video":
        return _video(case, load)
    call = part(case, None if case.part in KERNELS else load(COMPONENT.get(case.part, case.part)))

    def result() -> Any:
        found = call()
        if case.device == "gpu":
            torch.cuda.synchronize()
        return found

    return result


def _blocks(module: Any) -> list[Any]:
    """Those of a transformer or of an autoencoder's decoder, which `torch.compile` takes one by one."""
    decoder = getattr(module, "decoder", None)
    return [decoder.mid_block, *decoder.up_blocks] if decoder else list(getattr(module, "transformer_blocks", ()))


def prepare() -> None:
    """Settings of PyTorch: no gradients, all cores, float32 that is float32, and the fastest convolutions."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.backends.cudnn.allow_tf32 = False  # nor do we multiply float32 in less
    torch.backends.cudnn.benchmark = True  # as XLA does, it looks for the fastest convolutions


def _device(case: Case) -> str:
    return "cuda" if case.device == "gpu" else "cpu"


def _put(x: np.ndarray, case: Case) -> Any:
    """On the device, in the case's dtype."""
    return torch.tensor(x).to(_device(case), getattr(torch, case.dtype) if x.dtype == np.float32 else torch.long)


def fetch(x: Any) -> np.ndarray:
    """The result in float32."""
    return x if isinstance(x, np.ndarray) else x.cpu().float().numpy()


def _video(case: Case, load: Callable[[str], Any]) -> Callable[[], np.ndarray]:
    given = inputs(case)
    scheduler = make_scheduler("ddim", 1.0)
    pipe: Any = CogVideoXPipeline(None, *(load(c) for c in ("text_encoder", "vae", "transformer")), scheduler)
    pipe.set_progress_bar_config(disable=True)

    def video() -> np.ndarray:
        pair = (given["ids"], np.ones_like(given["ids"]))
        context, negative = (pipe.text_encoder(_put(ids, case))[0] for ids in pair)
        return pipe(
            prompt_embeds=context,
            negative_prompt_embeds=negative,
            latents=_put(given["latents"], case).permute(0, 1, 4, 2, 3).contiguous(),
            num_inference_steps=STEPS,
            guidance_scale=6.0,
            height=case.height,
            width=case.width,
            num_frames=case.frames,
            output_type="np",
        ).frames

    return video


def part(case: Case, module: Any) -> Callable[[], Any]:
    """A function that computes any part but the whole video: a tensor in our layout, which may still be under way."""
    given = {name: _put(x, case) for name, x in inputs(case).items()}
    if case.part == "attention":
        q, k, v = (x.transpose(1, 2) for x in given.values())
        return lambda: F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    if case.part == "convolution":
        x, kernel = given["x"].permute(0, 4, 1, 2, 3).contiguous(), given["kernel"].permute(4, 3, 0, 1, 2).contiguous()
        return lambda: F.conv3d(x, kernel, given["bias"], padding=(0, 1, 1)).permute(0, 2, 3, 4, 1)
    if case.part == "text_encoder":
        return lambda: module(given["ids"])[0]
    if case.part == "encode":
        video = given["video"].permute(0, 4, 1, 2, 3).contiguous()
        return lambda: module.encode(video).latent_dist.mean.permute(0, 2, 3, 4, 1)
    if case.part == "decode":
        z = given["latents"].permute(0, 4, 1, 2, 3).contiguous()
        return lambda: module.decode(z).sample.permute(0, 2, 3, 4, 1)
    both = given["latents"].permute(0, 1, 4, 2, 3).contiguous().repeat(2, 1, 1, 1, 1)
    if case.is_hunyuan:
        return _step_of_hunyuan(module, both.transpose(1, 2).contiguous(), given, case)
    shape = type("Config", (), {"transformer": module, "vae_scale_factor_spatial": 8})()
    rotary = CogVideoXPipeline._prepare_rotary_positional_embeddings(
        shape, case.height, case.width, case.denoised_frames, torch.device(_device(case))
    )
    t = torch.tensor([999, 999], device=_device(case))

    def step() -> Any:
        out = module(both, given["context"], t, image_rotary_emb=rotary, return_dict=False)[0]
        return out.permute(0, 1, 3, 4, 2)

    return step


def _step_of_hunyuan(module: Any, both: Any, given: dict[str, Any], case: Case) -> Callable[[], Any]:
    """HunyuanVideo-1.5's transformer; it takes no image as zeros. both: [2, C, T, h, w]."""
    config = module.config
    t = torch.full((2,), HUNYUAN_TIMESTEP, device=both.device, dtype=both.dtype)
    image = torch.zeros(2, 729, config.image_embed_dim, device=both.device, dtype=both.dtype)
    prompt = {
        "encoder_hidden_states": given["text"],
        "encoder_attention_mask": given["text_mask"],
        "encoder_hidden_states_2": given["glyphs"],
        "encoder_attention_mask_2": given["glyph_mask"],
    }
    return lambda: module(both, t, image_embeds=image, return_dict=False, **prompt)[0].permute(0, 2, 3, 4, 1)


def product(n: int, case: Case) -> Callable[[], object]:
    """One product of two n x n matrices of the case's dtype."""
    x = torch.randn(n, n).to(_device(case), getattr(torch, case.dtype))

    def multiply() -> None:
        torch.matmul(x, x)
        if case.device == "gpu":
            torch.cuda.synchronize()

    return multiply


def gpu_peak_gib() -> float:
    """Of the GPU's memory, until now."""
    return torch.cuda.max_memory_allocated() / 2**30
