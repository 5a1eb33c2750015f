"""The recipe of the embedded model: a tiny CogVideoX, trained from scratch on the procedural world.

    python -m cogvideox_flax.training.embedded RUN            # every stage, in order
    python -m cogvideox_flax.training.embedded RUN vae        # one stage

RUN is a folder. Each stage goes on from where it stopped, and is skipped once it is done.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, UInt8

from cogvideox_flax import sharding
from cogvideox_flax.checkpoint import Manifest, parameters, save
from cogvideox_flax.config import SchedulerConfig, TextEncoderConfig, TokenizerConfig, TransformerConfig, VAEConfig
from cogvideox_flax.models.autoencoder import Autoencoder
from cogvideox_flax.models.group_norm import SpatialNormSiLU
from cogvideox_flax.models.text_encoder import TextEncoder
from cogvideox_flax.models.transformer import Transformer
from cogvideox_flax.tokenizer import Tokenizer
from cogvideox_flax.training import world
from cogvideox_flax.training.loop import LoopConfig, Loss, State, train
from cogvideox_flax.training.objectives import drop_captions, reconstruction, v_prediction
from cogvideox_flax.training.optimizer import OptimizerConfig
from cogvideox_flax.training.order import examples_of_step
from cogvideox_flax.training.store import Store, prepare
from cogvideox_flax.training.vocabulary import word_model

log = logging.getLogger(__name__)

SEED = 20
SIZE, FRAMES = 64, 17

VAE = VAEConfig(
    block_channels=(8, 16, 32, 64),
    layers_per_block=1,
    norm_groups=4,
    sample_height=SIZE,
    sample_width=SIZE,
    scaling_factor=1.0,
)

VAE_OPTIMIZER = OptimizerConfig(
    learning_rate=2e-3, final_learning_rate=4e-4, warmup_steps=50, b2=0.98, weight_decay=1e-4
)
IMAGE_LOOP = LoopConfig(steps=1500, seed=SEED, ema_decay=0.995, optimizer=VAE_OPTIMIZER)
VIDEO_LOOP = LoopConfig(
    steps=2600,
    seed=SEED + 1,
    ema_decay=0.998,
    optimizer=replace(VAE_OPTIMIZER, learning_rate=8e-4, final_learning_rate=2e-5, warmup_steps=100),
)
VIDEO_STOP = 1390
VIDEO_COOL = LoopConfig(
    steps=300,
    seed=SEED + 7,
    ema_decay=0.99,
    optimizer=replace(VAE_OPTIMIZER, learning_rate=3e-4, final_learning_rate=5e-6, warmup_steps=20),
)
KL_WEIGHT, L1_WEIGHT = 2e-4, 0.1
CAPTION_DROPOUT = 0.1
IMAGE_BATCH, VIDEO_BATCH, VIDEO_FRAMES = 24, 4, 9
DENSE_SHARE = 0.7
"""Share of crowded clips in the training of the autoencoder; the rest are clips as in the world."""


TEXT = TextEncoderConfig(
    vocab_size=128, width=128, layers=2, heads=4, head_dim=32, mlp_width=256, position_max_distance=32
)
TOKENIZER = TokenizerConfig(max_length=24)
TRANSFORMER = TransformerConfig(
    layers=6,
    heads=4,
    head_dim=48,
    text_width=TEXT.width,
    text_length=TOKENIZER.max_length,
    time_width=128,
    rotary=True,
    learned_positions=True,  # as 5b-I2V has beside rotary ones: rotations by 0 to 3 patches tell little
    sample_height=SIZE // 8,
    sample_width=SIZE // 8,
    sample_frames=FRAMES,
)
TOKENIZER_FILE = "spiece.model"
DTYPES = {"text_encoder": "float16", "transformer": "bfloat16", "vae": "float16"}
SCHEDULER = SchedulerConfig(snr_shift_scale=3.0)

CLIPS, SHARD = 12_000, 40
DIFFUSION_BATCH = 32
DIFFUSION_OPTIMIZER = OptimizerConfig(
    kind="muon", learning_rate=2e-3, final_learning_rate=2e-3, warmup_steps=50, b2=0.98, weight_decay=1e-3
)
DIFFUSION_LOOP = LoopConfig(steps=100_000, seed=SEED + 2, ema_decay=0.999, optimizer=DIFFUSION_OPTIMIZER)
DIFFUSION_STOP = 10_000
DIFFUSION_COOL = LoopConfig(
    steps=2000,
    seed=SEED + 6,
    ema_decay=0.995,
    optimizer=replace(DIFFUSION_OPTIMIZER, final_learning_rate=1e-5, warmup_steps=50),
)
"""A constant rate for as long as one likes, then a decay to almost nothing: the first part can be gone on with."""


def vae_batch(step: int, *, batch: int, frames: int, seed: int) -> Float32[np.ndarray, "B F H W 3"]:
    """The clips of one step, in [-1, 1]: runs of frames out of longer clips."""
    clips = []
    for i in range(step * batch, (step + 1) * batch):
        rng = np.random.default_rng([seed, i, 1])
        if rng.random() < DENSE_SHARE:
            clip = world.dense_clip(seed, i, FRAMES, SIZE)
        else:
            clip = world.sample_clip(seed, i, "any", FRAMES, SIZE).video
        start = int(rng.integers(FRAMES - frames + 1))
        clips.append(clip[start : start + frames])
    return to_model(np.stack(clips))


def to_model(video: UInt8[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """0..255 to [-1, 1]."""
    return video.astype(np.float32) / 127.5 - 1


def vae_loss(params: dict[str, Autoencoder], _: None, video: Any, key: Any) -> Any:
    return reconstruction(params["vae"], video, key, kl_weight=KL_WEIGHT, l1_weight=L1_WEIGHT)


def train_vae_images(folder: Path, mesh: Mesh | None) -> Autoencoder:
    """First single frames: a third of the work per frame, and enough to learn shapes and colours."""
    start = {"vae": Autoencoder(VAE, rngs=nnx.Rngs(SEED))}
    batches = partial(vae_batch, batch=IMAGE_BATCH, frames=1, seed=SEED)
    return _to_the_end(start, None, vae_loss, batches, IMAGE_LOOP, folder / "vae-images", mesh=mesh).result["vae"]


def train_vae(folder: Path, mesh: Mesh | None) -> Autoencoder:
    """Then runs of frames, from latents whose channels have been brought to mean 0 and standard deviation 1."""
    images = train_vae_images(folder, mesh)
    sample = vae_batch(0, batch=256, frames=1, seed=SEED + 5)
    mean, _ = jax.jit(lambda vae, video: vae.encode(video))(images, sample)
    start = {"vae": standardise(images, mean.mean((0, 1, 2, 3)), mean.std((0, 1, 2, 3)))}
    batches = partial(vae_batch, batch=VIDEO_BATCH, frames=VIDEO_FRAMES, seed=SEED + 1)
    learned = _to_the_end(start, None, vae_loss, batches, VIDEO_LOOP, folder / "vae", mesh=mesh, stop_at=VIDEO_STOP)
    batches = partial(vae_batch, batch=VIDEO_BATCH, frames=VIDEO_FRAMES, seed=SEED + 7)
    cooled = _to_the_end(learned.result, None, vae_loss, batches, VIDEO_COOL, folder / "vae-cool", mesh=mesh)
    vae = cooled.result["vae"]
    mean, _ = jax.jit(lambda vae, video: vae.encode(video))(vae, world_clips(range(64), SEED + 5)[0])
    return standardise(vae, jnp.zeros(VAE.latent_channels), mean.std((0, 1, 2, 3)))  # exact: the means stay


def world_clips(indices: range, seed: int) -> tuple[Float32[np.ndarray, "B F H W 3"], list[str]]:
    """Clips of the training split in [-1, 1], and their prompts."""
    clips = [world.sample_clip(seed, i, "train", FRAMES, SIZE) for i in indices]
    return to_model(np.stack([clip.video for clip in clips])), [clip.prompt for clip in clips]


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


def words() -> list[str]:
    """Every word that the world's prompts use."""
    found = set()
    for i in range(4000):
        rng = np.random.default_rng([SEED, i])
        found |= set(world.describe(world.sample_scene(rng, "any"), rng).split())
    return sorted(found)


def make_tokenizer(folder: Path) -> Tokenizer:
    """Write the tokenizer, and open it."""
    path = folder / TOKENIZER_FILE
    path.write_bytes(word_model(words()))
    return Tokenizer(path, TOKENIZER.max_length, vocab_size=TEXT.vocab_size)


def prepare_latents(folder: Path, mesh: Mesh | None) -> Store:
    """The training clips' latents and token ids, computed once."""
    vae = train_vae(folder, mesh)
    tokenizer = make_tokenizer(folder)
    encode = jax.jit(lambda vae, video: vae.encode(video))
    places = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp")) if mesh is not None else None

    def make(indices: range) -> dict[str, np.ndarray]:
        video, prompts = world_clips(indices, SEED + 3)
        mean, logvar = encode(vae, jax.device_put(video, places))
        std = np.exp(0.5 * np.asarray(logvar))
        return {"mean": np.asarray(mean, np.float16), "std": std.astype(np.float16), "ids": tokenizer(prompts)}

    meta = {"seed": SEED + 3, "vae": sha256_of(vae), "size": [FRAMES, SIZE, SIZE]}
    return prepare(folder / "latents", CLIPS, make, shard_size=SHARD, meta=meta, progress=_report)


def diffusion_loss(params: dict[str, Any], empty: Any, batch: dict[str, Any], key: Any) -> Any:
    """v-prediction with the text encoder learning along."""
    sample_key, drop_key, noise_key = jax.random.split(key, 3)
    mean, std = batch["mean"].astype(jnp.float32), batch["std"].astype(jnp.float32)
    latents = VAE.scaling_factor * (mean + std * jax.random.normal(sample_key, mean.shape))
    ids = drop_captions(batch["ids"], empty, CAPTION_DROPOUT, drop_key)
    context = params["text_encoder"](ids)
    return v_prediction(lambda x, t: params["transformer"](x, context, t, remat=True), latents, noise_key, SCHEDULER)


def train_transformer(folder: Path, mesh: Mesh | None) -> State:
    """The transformer and the text encoder, together."""
    store = prepare_latents(folder, mesh)
    empty = make_tokenizer(folder)([""])[0]
    start = {"text_encoder": TextEncoder(TEXT, rngs=nnx.Rngs(SEED + 4)), "transformer": new_transformer()}

    def batches(step: int) -> dict[str, np.ndarray]:
        return store.gather(examples_of_step(step, batch=DIFFUSION_BATCH, count=len(store), seed=SEED + 2))

    run = partial(_to_the_end, frozen=empty, loss=diffusion_loss, mesh=mesh)
    learned = run(start, batches=batches, config=DIFFUSION_LOOP, folder=folder / "transformer", stop_at=DIFFUSION_STOP)

    def later(step: int) -> dict[str, np.ndarray]:
        return batches(DIFFUSION_STOP + step)

    return run(learned.params, batches=later, config=DIFFUSION_COOL, folder=folder / "transformer-cool")


def export(folder: Path, mesh: Mesh | None) -> None:
    """The averaged weights, trained as far as they are, as a native checkpoint in RUN/checkpoint."""
    state = train_transformer(folder, mesh)
    modules = jax.device_get(state.result) | {"vae": jax.device_get(train_vae(folder, mesh))}
    write_checkpoint(folder, modules, int(state.step))


def write_checkpoint(folder: Path, modules: dict[str, nnx.Module], steps: int) -> None:
    """RUN/checkpoint out of the three modules."""
    manifest = Manifest(text_encoder=TEXT, transformer=TRANSFORMER, vae=VAE, scheduler=SCHEDULER, tokenizer=TOKENIZER)
    source = {"recipe": "cogvideox_flax.training.embedded", "seed": SEED, "steps": steps}
    make_tokenizer(folder)
    save(folder / "checkpoint", manifest, modules, DTYPES, source, spiece=folder / TOKENIZER_FILE)


def sha256_of(module: nnx.Module) -> str:
    """A fingerprint of all parameters."""
    digest = hashlib.sha256()
    for name, value in parameters(module).items():
        digest.update(name.encode() + np.asarray(value).tobytes())
    return digest.hexdigest()


def _to_the_end(
    params: Any,
    frozen: Any,
    loss: Loss,
    batches: Callable[[int], Any],
    config: LoopConfig,
    folder: Path,
    mesh: Mesh | None,
    stop_at: int | None = None,
) -> State:
    """`train`, which returns early when it is told to stop: no later stage may start from what there is then.

    Raises:
        KeyboardInterrupt: stopped.
    """
    state = train(params, frozen, loss, batches, config, folder, mesh=mesh, stop_at=stop_at)
    if int(state.step) < (stop_at or config.steps):
        raise KeyboardInterrupt
    return state


def new_transformer() -> Transformer:
    """The transformer before training. Positions start as the sum of a random vector per frame, row and column."""
    transformer = Transformer(TRANSFORMER, rngs=nnx.Rngs(SEED + 5))
    grid = ((FRAMES - 1) // 4 + 1, SIZE // 16, SIZE // 16)
    rng = np.random.default_rng(SEED + 5)
    frame, row, column = (rng.normal(0, 0.5, (n, TRANSFORMER.width)) for n in grid)
    video = (frame[:, None, None] + row[:, None] + column).reshape(-1, TRANSFORMER.width)
    text = np.zeros((TOKENIZER.max_length, TRANSFORMER.width))
    assert transformer.pos_embedding is not None
    transformer.pos_embedding[...] = jnp.asarray(np.concatenate([text, video]), jnp.float32)
    return transformer


def _report(done: int, count: int) -> None:
    if done % (25 * SHARD) == 0:
        log.info("%d of %d clips encoded", done, count)


STAGES: dict[str, Callable[[Path, Mesh | None], Any]] = {
    "vae-images": train_vae_images,
    "vae": train_vae,
    "latents": prepare_latents,
    "transformer": train_transformer,
    "export": export,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("stage", nargs="*", choices=[*STAGES, []])
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("absl").setLevel(logging.WARNING)
    mesh = sharding.make_mesh(dp=len(jax.devices())) if len(jax.devices()) > 1 else None
    try:
        for stage in args.stage or STAGES:
            STAGES[stage](args.run, mesh)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
