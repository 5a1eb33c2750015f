"""The autoencoder of the embedded model: trained on single frames first, then on short clips."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Key

from cogvideox_flax.checkpoint import Manifest, load_vae, save
from cogvideox_flax.io.video import from_uint8
from cogvideox_flax.models.cogvideox.autoencoder import Autoencoder
from cogvideox_flax.nn.norms import SpatialNormSiLU
from cogvideox_flax.training.config import LoopConfig
from weights.toy_world import world
from weights.toy_world.make.objectives import reconstruction
from weights.toy_world.make.settings import (
    CROWDED_SHARE,
    FINE_CROWDED_SHARE,
    FRAMES,
    IMAGE_BATCH,
    IMAGE_LOOP,
    KL_WEIGHT,
    L1_WEIGHT,
    SEED,
    SIZE,
    TWO_OBJECTS,
    VAE,
    VIDEO_BATCH,
    VIDEO_COOLDOWN,
    VIDEO_FINE,
    VIDEO_FRAMES,
    VIDEO_LOOP,
    VIDEO_STOP,
    Run,
)
from weights.toy_world.make.training import train_stage


def vae_batch(
    step: int, *, batch: int, frames: int, seed: int, crowded: float = CROWDED_SHARE
) -> Float32[np.ndarray, "B F H W 3"]:
    """The clips of one step, in [-1, 1]: `frames` consecutive frames of longer clips.

    Args:
        crowded: the share of crowded clips.
    """
    clips = []
    for i in range(step * batch, (step + 1) * batch):
        rng = np.random.default_rng([seed, i, 1])
        if rng.random() < crowded:
            clip = world.crowded_clip(seed, i, FRAMES, SIZE)
        else:
            clip = world.sample_clip(seed, i, "any", FRAMES, SIZE).video
        start = int(rng.integers(FRAMES - frames + 1))
        clips.append(clip[start : start + frames])
    return from_uint8(np.stack(clips))


def vae_loss(params: dict[str, Autoencoder], _: None, video: Array, key: Key[Array, ""]) -> Any:
    """Reconstruction by the autoencoder. A `Loss` of the training loop."""
    return reconstruction(params["vae"], video, key, kl_weight=KL_WEIGHT, l1_weight=L1_WEIGHT)


def train_vae_images(run: Run) -> Autoencoder:
    """Train on single frames, which need a third of the work per frame and teach shapes and colours."""
    batches = partial(vae_batch, batch=IMAGE_BATCH, frames=1, seed=SEED)
    params = {"vae": Autoencoder(VAE, rngs=nnx.Rngs(SEED))}
    return train_stage(run, "vae-images", IMAGE_LOOP, params, loss=vae_loss, batches=batches).trained["vae"]


@cache  # two stages need it
def train_vae(run: Run) -> Autoencoder:
    """Train on short clips, with latent channels standardised first; or load the base's autoencoder."""
    if run.base is not None:
        return run.part("vae")
    done = run.folder / "vae-done"  # saved and loaded, since all later stages need exactly these weights
    if not done.exists():
        manifest = Manifest(family="cogvideox", configs={"vae": VAE})
        save(done, manifest, {"vae": _train_vae_video(run)}, "float32", {"seed": SEED})
    return load_vae(done)


def _train_vae_video(run: Run) -> Autoencoder:
    def train(
        vae: Autoencoder, name: str, config: LoopConfig, crowded: float = CROWDED_SHARE, stop_at: int | None = None
    ) -> Autoencoder:
        batches = partial(vae_batch, batch=VIDEO_BATCH, frames=VIDEO_FRAMES, seed=config.seed, crowded=crowded)
        how: Any = {"loss": vae_loss, "batches": batches, "stop_at": stop_at}
        return train_stage(run, name, config, {"vae": vae}, **how).trained["vae"]

    encode = jax.jit(lambda vae, video: vae.encode(video))
    vae = train_vae_images(run)
    mean, _ = encode(vae, vae_batch(0, batch=256, frames=1, seed=SEED + 5))
    vae = standardise(vae, mean.mean((0, 1, 2, 3)), mean.std((0, 1, 2, 3)))
    vae = train(vae, "vae", VIDEO_LOOP, stop_at=VIDEO_STOP)
    vae = train(vae, "vae-cool", VIDEO_COOLDOWN)
    vae = train(vae, "vae-fine", VIDEO_FINE, crowded=FINE_CROWDED_SHARE)
    mean, _ = encode(vae, world_clips(range(64), SEED + 5))
    return standardise(vae, jnp.zeros(VAE.latent_channels), mean.std((0, 1, 2, 3)))  # exact: the means do not change


def world_clips(indices: range, seed: int) -> Float32[np.ndarray, "B F H W 3"]:
    """Clips of the training split, in [-1, 1]."""
    clips = (world.sample_clip(seed, i, "train", FRAMES, SIZE, TWO_OBJECTS) for i in indices)
    return from_uint8(np.stack([clip.video for clip in clips]))


def standardise(vae: Autoencoder, mean: Float[Array, " L"], std: Float[Array, " L"]) -> Autoencoder:
    """The same autoencoder with latents (z - mean) / std, folded into the weights before and after the latent.

    Exact for a mean of 0. Otherwise the borders differ, since the decoder's first convolution pads with 0.
    """
    vae = jax.tree.map(lambda x: x, vae)  # new modules with the same arrays
    conv_out, conv_in = vae.encoder.conv_out, vae.decoder.conv_in
    shift = jnp.concatenate([mean, 2 * jnp.log(std)])
    scale = jnp.concatenate([std, jnp.ones_like(std)])
    conv_out.kernel[...] = conv_out.kernel[...] / scale
    conv_out.bias[...] = (conv_out.bias[...] - shift) / scale
    conv_in.bias[...] = conv_in.bias[...] + jnp.einsum("hwtio,i->o", conv_in.kernel[...], mean)
    conv_in.kernel[...] = conv_in.kernel[...] * std[:, None]
    for norm in jax.tree.leaves(vae, is_leaf=lambda x: isinstance(x, SpatialNormSiLU)):
        if isinstance(norm, SpatialNormSiLU):
            for linear in (norm.y, norm.b):
                assert linear.bias is not None
                linear.bias[...] = linear.bias[...] + jnp.einsum("...io,i->...o", linear.kernel[...], mean)
                linear.kernel[...] = linear.kernel[...] * std[:, None]
    return vae
