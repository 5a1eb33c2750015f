"""CogVideoX as a family: what its runs compute and what they may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from cogvideox_flax.config import TransformerConfig, find_release
from cogvideox_flax.errors import InputError
from cogvideox_flax.models.cogvideox.autoencoder import Autoencoder
from cogvideox_flax.models.cogvideox.sizes import check_text_to_video, resolve_size, size_warnings
from cogvideox_flax.models.cogvideox.tiling import Tiling
from cogvideox_flax.models.cogvideox.transformer import Transformer
from cogvideox_flax.models.family import Configs, Defaults, Features, ModelFamily, Size, TextStage, Workload
from cogvideox_flax.models.t5 import TextEncoder
from cogvideox_flax.schedulers import SCHEDULERS
from cogvideox_flax.tokenizer import SPIECE_FILE, Tokenizer

OFS = 2.0
"""The motion scalar that the released pipeline gives to releases that take one."""


def encode_text(encoder: TextEncoder, ids: Int32[Array, "B L"]) -> Features:
    """`prompt_embeds` [B, L, E]: every position, padding included, is attended."""
    return {"prompt_embeds": encoder(ids)}


def predict(
    transformer: Transformer, latents: Float32[Array, "B T h w C"], text: Features, timestep: Int[Array, ""]
) -> Float32[Array, "B T h w C"]:
    """The prediction of v = sqrt(abar) noise - sqrt(1 - abar) x0."""
    ofs = None if transformer.config.ofs_width is None else OFS
    return transformer(latents, text["prompt_embeds"], timestep, ofs).astype(jnp.float32)


def decode(vae: Autoencoder, latents: Float[Array, "B T h w C"], tiled: bool) -> Float32[Array, "B F H W 3"]:
    """Scaled latents to a video in about [-1, 1], one item at a time; tiled: in the reference's overlapping tiles."""
    tiling = Tiling.official(vae.config) if tiled else None
    video = vae.decode(latents / vae.config.scaling_factor, tiling=tiling, slicing=len(latents) > 1)
    return video.astype(jnp.float32)


def _tokenizer(native_dir: Path, configs: Configs) -> Tokenizer:
    length, vocab_size = configs["tokenizer"].max_length, configs["text_encoder"].vocab_size
    return Tokenizer(native_dir / SPIECE_FILE, length, vocab_size=vocab_size)


def _feature_shapes(configs: Configs, batch: int) -> dict[str, tuple[int, ...]]:
    config: TransformerConfig = configs["transformer"]
    return {"prompt_embeds": (batch, config.text_length, config.text_width)}


def _defaults(configs: Configs) -> Defaults:
    """The release's; for an architecture that was not released, those that the releases share."""
    release = find_release(configs["transformer"])
    if release is None:
        return Defaults(
            fps=16 if configs["transformer"].patch_size_t else 8,
            num_inference_steps=50,
            guidance_scale=6.0,
            use_dynamic_cfg=False,
            scheduler=configs["scheduler"].kind,
        )
    return Defaults(
        fps=release.fps,
        num_inference_steps=release.num_inference_steps,
        guidance_scale=release.guidance_scale,
        use_dynamic_cfg=release.use_dynamic_cfg,
        scheduler=release.sampler,
    )


def _resolve_size(configs: Configs, num_frames: int | None, height: int | None, width: int | None) -> Size:
    given: Sequence[int | None] = (num_frames, height, width)
    return resolve_size(configs["transformer"], configs["vae"], find_release(configs["transformer"]), *given)


def _size_warnings(configs: Configs, size: Size) -> list[str]:
    release = find_release(configs["transformer"])
    return [] if release is None else size_warnings(release, size)


def _check(configs: Configs, where: object) -> None:
    check_text_to_video(configs["transformer"], configs["vae"], where)
    if configs["text_encoder"].width != configs["transformer"].text_width:
        raise InputError(
            f"{where} holds parts that do not belong together: the text encoder gives {configs['text_encoder'].width} "
            f"channels, the transformer takes {configs['transformer'].text_width}"
        )


def _workload(configs: Configs, size: Size) -> Workload:
    config: TransformerConfig = configs["transformer"]
    video = size.latent_frames // (config.patch_size_t or 1) * size.latent_height * size.latent_width
    return Workload(
        layers=config.layers,
        heads=config.heads,
        head_dim=config.head_dim,
        tokens=config.text_length + video // config.patch_size**2,
        modulation=config.time_width,
    )


COGVIDEOX = ModelFamily(
    name="cogvideox",
    components=("text_encoder", "transformer", "vae"),
    denoiser="transformer",
    decoder="vae",
    text=(
        TextStage(
            component="text_encoder",
            tokenizer=_tokenizer,
            token_shapes=lambda configs, batch: jax.ShapeDtypeStruct((batch, configs["tokenizer"].max_length), "int32"),
            encode=encode_text,
        ),
    ),
    feature_shapes=_feature_shapes,
    predict=predict,
    decode=decode,
    resolve_size=_resolve_size,
    size_warnings=_size_warnings,
    defaults=_defaults,
    samplers=SCHEDULERS,
    check=_check,
    check_dtype=lambda configs, dtype: configs["transformer"].check_dtype(dtype),
    check_tiling=lambda configs: Tiling.official(configs["vae"]).check(configs["vae"].spatial_compression),
    heads=lambda configs: {name: configs[name].heads for name in ("text_encoder", "transformer")},
    workload=_workload,
)
