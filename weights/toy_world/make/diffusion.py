"""The tokenizer, text encoder and transformer of the embedded model, and its checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float16, Float32, Int, Key

from cogvideox_flax import sharding
from cogvideox_flax.checkpoint import (
    Domain,
    Manifest,
    parameters,
    read_manifest,
    save,
)
from cogvideox_flax.models.cogvideox.config import TransformerConfig
from cogvideox_flax.models.cogvideox.transformer import Transformer
from cogvideox_flax.models.t5 import TextEncoder
from cogvideox_flax.schedulers import DDIMScheduler
from cogvideox_flax.tokenizer import SPIECE_FILE, Tokenizer
from cogvideox_flax.training.latent_cache import LatentCache, prepare
from cogvideox_flax.training.loop import METRICS_FILE
from cogvideox_flax.training.metrics import plot_metrics
from cogvideox_flax.training.objectives import Metrics, drop_captions, sample_latents, velocity_loss
from cogvideox_flax.training.shuffle import shuffled_indices
from cogvideox_flax.training.step import TrainState
from weights.toy_world import world
from weights.toy_world.make.autoencoder import train_vae, world_clips
from weights.toy_world.make.settings import (
    BRIEF,
    CAPTION_DROPOUT,
    CLIP_SEED,
    CLIPS,
    DIFFUSION_BATCH,
    DTYPES,
    FRAMES,
    GUIDANCE,
    SCHEDULER,
    SEED,
    SHARD,
    SIZE,
    STATISTICS,
    TEXT,
    TOKENIZER,
    TOKENIZER_FILE,
    TRANSFORMER,
    TWO_OBJECTS,
    VAE,
    Phase,
    Run,
)
from weights.toy_world.make.training import train_stage
from weights.toy_world.make.vocabulary import word_model


def words() -> list[str]:
    """Every word that the world's prompts use."""
    found = set()
    for i in range(4000):
        rng = np.random.default_rng([SEED, i])
        found |= set(world.describe(world.sample_scene(rng, "any"), rng).split())
    return sorted(found)


def domain() -> Domain:
    """What the embedded models know. `prompts` are some that the present weights show well at seed 0."""
    return Domain(
        subject="one or two circles, squares or triangles, still or in motion",
        words=tuple(words()),
        stated={
            "colour": tuple(world.COLOURS),
            "shape": (*world.SHAPES, "ball"),
            "motion": ("right", "left", "up", "down", "still", "upwards", "downwards", "move"),
        },
        prompts=(
            "a large yellow circle goes up against a black background",
            "a large blue square stays still on a white background",
            "a large green square moves to the left",
        ),
        colours=(*world.COLOURS.values(), *world.BACKGROUNDS.values()),
        num_frames=FRAMES,
        height=SIZE,
        width=SIZE,
    )


def make_tokenizer(run: Run) -> Tokenizer:
    """Write and open the tokenizer; with a base, the base's tokenizer."""
    path = run.folder / TOKENIZER_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((run.base / SPIECE_FILE).read_bytes() if run.base is not None else word_model(words()))
    return Tokenizer(path, TOKENIZER.max_length, vocab_size=TEXT.vocab_size)


def prepare_latents(run: Run) -> LatentCache:
    """The training clips' latents, computed once."""
    return encode_clips(run, "latents", lambda indices: world_clips(indices, CLIP_SEED))


def encode_clips(run: Run, name: str, clips: Callable[[range], Float32[np.ndarray, "B F H W 3"]]) -> LatentCache:
    """Mean and standard deviation of the latents of the training clips, or of parts of them, in RUN/`name`."""
    vae = train_vae(run)
    encode = jax.jit(lambda vae, video: vae.encode(video))

    def compute(indices: range) -> dict[str, np.ndarray]:
        video = clips(indices)
        place = sharding.named(run.mesh, ("batch",), video.shape, "a shard of clips") if run.mesh is not None else None
        mean, logvar = encode(vae, jax.device_put(video, place))
        std = np.exp(0.5 * np.asarray(logvar))
        return {"mean": np.asarray(mean, np.float16), "std": std.astype(np.float16)}

    sample = clips(range(20))
    digest = hashlib.sha256(sample.tobytes()).hexdigest()  # changes with the world's code
    meta = {"seed": CLIP_SEED, "clips": digest, "vae": sha256_of(vae), "size": [*sample.shape[1:4]]}
    return prepare(run.folder / name, CLIPS, compute, shard_size=SHARD, meta=meta)


def make_batches(
    run: Run, phase: Phase, first_step: int = 0
) -> tuple[Callable[[int], tuple[Int[np.ndarray, " B"], dict[str, np.ndarray]]], Int[np.ndarray, " L"]]:
    """What each step of a phase sees beside latents.

    Args:
        first_step: steps of earlier phases on the same clips.

    Returns:
        A function of the step: the indices of its clips, their prompts' token ids and their corners. The ids of the
        empty prompt.
    """
    tokenizer = make_tokenizer(run)
    scenes, corners = _scenes()
    shown = oversample(scenes, phase.small_squares)

    def batch(step: int) -> tuple[Int[np.ndarray, " B"], dict[str, np.ndarray]]:
        step += first_step
        indices = shown[shuffled_indices(step, batch=DIFFUSION_BATCH, count=len(shown), seed=SEED + 2)]
        # A clip has a new prompt in every epoch: a fixed wording would be memorised.
        prompts = [world.describe(scenes[i], np.random.default_rng([CLIP_SEED, i, step]), BRIEF) for i in indices]
        return indices, {"ids": tokenizer(prompts), "corners": corners[indices]}

    return batch, tokenizer([""])[0]


@cache
def _scenes() -> tuple[tuple[world.Scene, ...], Float16[np.ndarray, "N T h w"]]:
    """The scenes of the training clips, and where their corners are."""
    tracks_of = partial(world.tracks_of_clip, CLIP_SEED, split="train", frames=FRAMES, two_objects=TWO_OBJECTS)
    scenes, tracks = zip(*(tracks_of(i) for i in range(CLIPS)), strict=True)
    return scenes, np.stack([world.corners(track).astype(np.float16) for track in tracks])


def diffusion_loss(
    params: dict[str, Any], empty: Int[Array, " L"], batch: dict[str, Array], key: Key[Array, ""], *, phase: Phase
) -> tuple[Float32[Array, ""], Metrics]:
    """v-prediction; the text encoder is trained too. A `Loss` of the training loop."""
    sample_key, drop_key, noise_key = jax.random.split(key, 3)
    latents = sample_latents(batch["mean"], batch["std"], sample_key, STATISTICS)
    ids = drop_captions(batch["ids"], empty, CAPTION_DROPOUT, drop_key)
    context = params["text_encoder"](ids)

    def denoiser(x: Float[Array, "B T H W C"], t: Int[Array, " B"]) -> Float32[Array, "B T H W C"]:
        return params["transformer"](x, context, t, remat=True)

    weights = 1 + phase.corners * batch["corners"].astype(jnp.float32) if phase.corners else None
    return velocity_loss(denoiser, latents, noise_key, DDIMScheduler(SCHEDULER), phase.density, weights)


def guided_velocity(
    transformer: Transformer, context: Float[Array, "2B L E"], x: Float[Array, "B T h w C"], t: Int[Array, ""]
) -> Float32[Array, "B T h w C"]:
    """The prediction at the checkpoint's guidance. context: of the empty prompts, then of the prompts."""
    empty, worded = jnp.split(transformer(jnp.concatenate([x, x]), context, t), 2)
    return empty + GUIDANCE * (worded - empty)


def train_transformer(run: Run) -> TrainState:
    """Train the transformer and the text encoder together, in all phases of the run."""
    latents = prepare_latents(run)
    params: Any
    if run.base is not None:
        params = {name: run.part(name) for name in ("text_encoder", "transformer")}
    else:
        params = {"text_encoder": TextEncoder(TEXT, rngs=nnx.Rngs(SEED + 4)), "transformer": new_transformer()}

    done = run.steps_before()
    for phase in run.phases:
        make_batch, empty = make_batches(run, phase, done)

        def batch(step: int, make_batch: Callable[..., Any] = make_batch) -> dict[str, np.ndarray]:
            indices, rest = make_batch(step)
            return latents.gather(indices) | rest

        how: Any = {"loss": partial(diffusion_loss, phase=phase), "frozen": empty, "batches": batch}
        how |= {"stop_at": phase.steps, "recorded": phase.recorded()}
        state = train_stage(run, phase.name, phase.config, params, **how)
        params = state.trained if phase.cooled else state.params
        done += phase.steps
    return state


def oversample(scenes: Sequence[world.Scene], small_squares: int) -> Int[np.ndarray, " N"]:
    """The indices of the clips; those with a small square occur `small_squares` times."""

    def has_small_square(scene: world.Scene) -> bool:
        return any((thing.shape, thing.size) == ("square", "small") for thing in scene.things)

    return np.repeat(np.arange(len(scenes)), [small_squares if has_small_square(scene) else 1 for scene in scenes])


def export(run: Run) -> None:
    """Write the averaged weights as a native checkpoint, RUN/checkpoint, and plot the loss, RUN/training.png."""
    state = train_transformer(run)
    files = [run.folder / phase.name / METRICS_FILE for phase in run.phases]
    plot_metrics(files, ("loss", "loss_noisy", "loss_clean"), run.folder / "training.png")
    modules = jax.device_get(state.trained) | {"vae": jax.device_get(train_vae(run))}
    steps = run.steps_before() + sum(phase.steps for phase in run.phases)
    write_checkpoint(run, run.folder / "checkpoint", TRANSFORMER, modules, steps)


def write_checkpoint(
    run: Run, folder: Path, transformer: TransformerConfig, modules: dict[str, nnx.Module], steps: int
) -> None:
    """Write a native checkpoint from the three modules. The preview's map is the base's, whose encoder it keeps."""
    parts = {"text_encoder": TEXT, "transformer": transformer, "vae": VAE}
    configs = parts | {"scheduler": SCHEDULER, "tokenizer": TOKENIZER}
    preview = None if run.base is None else read_manifest(run.base).preview
    manifest = Manifest(family="cogvideox", configs=configs, guidance_scale=GUIDANCE, domain=domain(), preview=preview)
    source = {"recipe": "weights.toy_world", "seed": SEED, "steps": steps}
    make_tokenizer(run)
    save(folder, manifest, modules, DTYPES, source, {SPIECE_FILE: run.folder / TOKENIZER_FILE})


def sha256_of(module: nnx.Module) -> str:
    """SHA-256 of all parameters, with their names."""
    digest = hashlib.sha256()
    for name, value in parameters(module).items():
        digest.update(name.encode() + np.asarray(value).tobytes())
    return digest.hexdigest()


def new_transformer() -> Transformer:
    """The untrained transformer. Each learned position is a sum of random vectors of its frame, row and column."""
    transformer = Transformer(TRANSFORMER, rngs=nnx.Rngs(SEED + 5))
    grid = ((FRAMES - 1) // 4 + 1, SIZE // 16, SIZE // 16)
    rng = np.random.default_rng(SEED + 5)
    frame, row, column = (rng.normal(0, 0.5, (n, TRANSFORMER.width)) for n in grid)
    video = (frame[:, None, None] + row[:, None] + column).reshape(-1, TRANSFORMER.width)
    text = np.zeros((TOKENIZER.max_length, TRANSFORMER.width))
    assert transformer.pos_embedding is not None
    transformer.pos_embedding[...] = jnp.asarray(np.concatenate([text, video]), jnp.float32)
    return transformer
