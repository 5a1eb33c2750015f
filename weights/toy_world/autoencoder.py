"""The autoencoder of the embedded model: first single frames, then runs of them."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32

from cogvideox_flax.checkpoint import Manifest, load_vae, save
from cogvideox_flax.io.video import from_uint8
from cogvideox_flax.models.cogvideox.autoencoder import Autoencoder
from cogvideox_flax.nn.norms import SpatialNormSiLU
from cogvideox_flax.training.loop import to_the_end
from cogvideox_flax.training.objectives import reconstruction
from weights.toy_world import world
from weights.toy_world.settings import (
    DENSE_SHARE,
    FINE_DENSE_SHARE,
    FRAMES,
    IMAGE_BATCH,
    IMAGE_LOOP,
    KL_WEIGHT,
    L1_WEIGHT,
    SEED,
    SIZE,
    VAE,
    VIDEO_BATCH,
    VIDEO_COOL,
    VIDEO_FINE,
    VIDEO_FRAMES,
    VIDEO_LOOP,
    VIDEO_STOP,
    Run,
)


def vae_batch(
    step: int, *, batch: int, frames: int, seed: int, dense: float = DENSE_SHARE
) -> Float32[np.ndarray, "B F H W 3"]:
    """The clips of one step, in [-1, 1]: runs of frames out of longer clips."""
    clips = []
    for i in range(step * batch, (step + 1) * batch):
        rng = np.random.default_rng([seed, i, 1])
        if rng.random() < dense:
            clip = world.dense_clip(seed, i, FRAMES, SIZE)
        else:
            clip = world.sample_clip(seed, i, "any", FRAMES, SIZE).video
        start = int(rng.integers(FRAMES - frames + 1))
        clips.append(clip[start : start + frames])
    return from_uint8(np.stack(clips))


def vae_loss(params: dict[str, Autoencoder], _: None, video: Any, key: Any) -> Any:
    """A `loop.Loss` of the world's autoencoder."""
    return reconstruction(params["vae"], video, key, kl_weight=KL_WEIGHT, l1_weight=L1_WEIGHT)


def train_vae_images(run: Run) -> Autoencoder:
    """First single frames: a third of the work per frame, and enough to learn shapes and colours."""
    start = {"vae": Autoencoder(VAE, rngs=nnx.Rngs(SEED))}
    batches = partial(vae_batch, batch=IMAGE_BATCH, frames=1, seed=SEED)
    return to_the_end(start, None, vae_loss, batches, IMAGE_LOOP, run.folder / "vae-images", mesh=run.mesh).result[
        "vae"
    ]


@cache  # two stages want it
def train_vae(run: Run) -> Autoencoder:
    """Then runs of frames, from latents whose channels have been brought to mean 0 and standard deviation 1."""
    if run.base is not None:
        return load_vae(run.base, dtype="float32")
    done = run.folder / "vae-done"  # kept as it is: all later stages are made from these very numbers
    if not done.exists():
        save(
            done,
            Manifest(family="cogvideox", configs={"vae": VAE}),
            {"vae": _train_vae(run)},
            "float32",
            {"seed": SEED},
        )
    return load_vae(done)


def _train_vae(run: Run) -> Autoencoder:
    images = train_vae_images(run)
    sample = vae_batch(0, batch=256, frames=1, seed=SEED + 5)
    mean, _ = jax.jit(lambda vae, video: vae.encode(video))(images, sample)
    start = {"vae": standardise(images, mean.mean((0, 1, 2, 3)), mean.std((0, 1, 2, 3)))}
    batches = partial(vae_batch, batch=VIDEO_BATCH, frames=VIDEO_FRAMES, seed=SEED + 1)
    learned = to_the_end(
        start, None, vae_loss, batches, VIDEO_LOOP, run.folder / "vae", mesh=run.mesh, stop_at=VIDEO_STOP
    )
    batches = partial(vae_batch, batch=VIDEO_BATCH, frames=VIDEO_FRAMES, seed=SEED + 7)
    cooled = to_the_end(learned.result, None, vae_loss, batches, VIDEO_COOL, run.folder / "vae-cool", run.mesh)
    batches = partial(vae_batch, batch=VIDEO_BATCH, frames=VIDEO_FRAMES, seed=SEED + 8, dense=FINE_DENSE_SHARE)
    fine = to_the_end(cooled.result, None, vae_loss, batches, VIDEO_FINE, run.folder / "vae-fine", run.mesh)
    vae = fine.result["vae"]
    mean, _ = jax.jit(lambda vae, video: vae.encode(video))(vae, world_clips(range(64), SEED + 5))
    return standardise(vae, jnp.zeros(VAE.latent_channels), mean.std((0, 1, 2, 3)))  # exact: the means stay


def world_clips(indices: range, seed: int) -> Float32[np.ndarray, "B F H W 3"]:
    """Clips of the training split, in [-1, 1]."""
    return from_uint8(np.stack([world.sample_clip(seed, i, "train", FRAMES, SIZE).video for i in indices]))


def standardise(vae: Autoencoder, mean: Float[Array, " L"], std: Float[Array, " L"]) -> Autoencoder:
    """The same autoencoder with latents (z - mean) / std, folded into the weights at both ends of the latent.

    Exact, except for a mean other than 0 at the border of the frame, which the decoder's first convolution pads.
    """
    vae = jax.tree.map(lambda x: x, vae)  # new modules around the old arrays
    out, into, width = vae.encoder.conv_out, vae.decoder.conv_in, mean.shape[0]
    shift = jnp.concatenate([mean, 2 * jnp.log(std)])
    scale = jnp.concatenate([std, jnp.ones(width)])
    out.kernel[...] = out.kernel[...] / scale
    out.bias[...] = (out.bias[...] - shift) / scale
    into.bias[...] = into.bias[...] + jnp.einsum("hwtio,i->o", into.kernel[...], mean)
    into.kernel[...] = into.kernel[...] * std[:, None]
    for norm in jax.tree.leaves(vae, is_leaf=lambda x: isinstance(x, SpatialNormSiLU)):
        if isinstance(norm, SpatialNormSiLU):
            for linear in (norm.y, norm.b):
                assert linear.bias is not None
                linear.bias[...] = linear.bias[...] + jnp.einsum("...io,i->...o", linear.kernel[...], mean)
                linear.kernel[...] = linear.kernel[...] * std[:, None]
    return vae
