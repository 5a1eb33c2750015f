"""The tokenizer, text encoder and transformer of the embedded model, and the checkpoint out of all parts."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from cogvideox_flax import sharding
from cogvideox_flax.checkpoint import Manifest, load_text_encoder, load_transformer, parameters, save
from cogvideox_flax.models.cogvideox.transformer import Transformer
from cogvideox_flax.models.t5 import TextEncoder
from cogvideox_flax.tokenizer import SPIECE_FILE, Tokenizer
from cogvideox_flax.training.latent_cache import Store, prepare
from cogvideox_flax.training.loop import State, to_the_end
from cogvideox_flax.training.metrics import plot_metrics
from cogvideox_flax.training.objectives import Focus, drop_captions, sample_latents, v_prediction
from cogvideox_flax.training.order import examples_of_step
from weights.toy_world import world
from weights.toy_world.autoencoder import train_vae, world_clips
from weights.toy_world.settings import (
    CAPTION_DROPOUT,
    CLIP_SEED,
    CLIPS,
    DIFFUSION_BATCH,
    DTYPES,
    FOCUS,
    FRAMES,
    GUIDANCE,
    SCHEDULER,
    SEED,
    SHARD,
    SIZE,
    TEXT,
    TOKENIZER,
    TOKENIZER_FILE,
    TRANSFORMER,
    VAE,
    Run,
)
from weights.toy_world.vocabulary import word_model

log = logging.getLogger(__name__)


def words() -> list[str]:
    """Every word that the world's prompts use."""
    found = set()
    for i in range(4000):
        rng = np.random.default_rng([SEED, i])
        found |= set(world.describe(world.sample_scene(rng, "any"), rng).split())
    return sorted(found)


def make_tokenizer(run: Run) -> Tokenizer:
    """Write the tokenizer, and open it; weights that are gone on with keep their own."""
    path = run.folder / TOKENIZER_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((run.base / SPIECE_FILE).read_bytes() if run.base is not None else word_model(words()))
    return Tokenizer(path, TOKENIZER.max_length, vocab_size=TEXT.vocab_size)


def prepare_latents(run: Run) -> Store:
    """The training clips' latents, computed once."""
    vae = train_vae(run)
    encode = jax.jit(lambda vae, video: vae.encode(video))
    shape = (SHARD, FRAMES, SIZE, SIZE, 3)
    place = sharding.named(run.mesh, ("batch",), shape, "a shard of clips") if run.mesh is not None else None

    def make(indices: range) -> dict[str, np.ndarray]:
        video = world_clips(indices, CLIP_SEED)
        mean, logvar = encode(vae, jax.device_put(video, place))
        std = np.exp(0.5 * np.asarray(logvar))
        return {"mean": np.asarray(mean, np.float16), "std": std.astype(np.float16)}

    sample = hashlib.sha256(world_clips(range(20), CLIP_SEED).tobytes()).hexdigest()  # the world may have changed
    meta = {"seed": CLIP_SEED, "clips": sample, "vae": sha256_of(vae), "size": [FRAMES, SIZE, SIZE]}
    return prepare(run.folder / "latents", CLIPS, make, shard_size=SHARD, meta=meta, progress=_report)


def diffusion_loss(
    params: dict[str, Any], empty: Any, batch: dict[str, Any], key: Any, focus: Focus = FOCUS, corners: float = 0.0
) -> Any:
    """v-prediction with the text encoder learning along. focus, corners: see `settings.Phase`."""
    sample_key, drop_key, noise_key = jax.random.split(key, 3)
    latents = sample_latents(batch["mean"], batch["std"], sample_key, VAE.scaling_factor)
    ids = drop_captions(batch["ids"], empty, CAPTION_DROPOUT, drop_key)
    context = params["text_encoder"](ids)

    def denoiser(x: Any, t: Any) -> Any:
        return params["transformer"](x, context, t, remat=True)

    weights = 1 + corners * batch["corners"].astype(jnp.float32) if corners else None
    return v_prediction(denoiser, latents, noise_key, SCHEDULER, focus, weights)


def train_transformer(run: Run) -> State:
    """The transformer and the text encoder, together."""
    store = prepare_latents(run)
    tokenizer = make_tokenizer(run)
    empty = tokenizer([""])[0]
    scenes, tracks = zip(*(world.tracks_of_clip(CLIP_SEED, i, "train", FRAMES) for i in range(len(store))), strict=True)
    corners = np.stack([world.corners(track).astype(np.float16) for track in tracks])
    if run.base is not None:
        start: dict[str, nnx.Module] = {
            "text_encoder": load_text_encoder(run.base, dtype="float32"),
            "transformer": load_transformer(run.base, dtype="float32"),
        }
    else:
        start = {"text_encoder": TextEncoder(TEXT, rngs=nnx.Rngs(SEED + 4)), "transformer": new_transformer()}

    def batches(shown: np.ndarray, step: int) -> dict[str, np.ndarray]:
        indices = shown[examples_of_step(step, batch=DIFFUSION_BATCH, count=len(shown), seed=SEED + 2)]
        # new words at every visit: by a wording of its own, a clip would be learned by heart
        prompts = [world.describe(scenes[i], np.random.default_rng([CLIP_SEED, i, step])) for i in indices]
        return store.gather(indices) | {"ids": tokenizer(prompts), "corners": corners[indices]}

    params: Any = start
    seen = run.steps_before()
    for phase in run.phases:
        state = to_the_end(
            params,
            empty,
            partial(diffusion_loss, focus=phase.focus, corners=phase.corners),
            partial(_from, partial(batches, repeated(scenes, phase.small_squares)), seen),
            phase.config,
            run.folder / phase.name,
            run.mesh,
            stop_at=phase.steps,
            made_of={
                "scheduler": SCHEDULER.to_dict(),
                "focus": dataclasses.asdict(phase.focus),
                "corners": phase.corners,
                "small_squares": phase.small_squares,
            },
        )
        params, seen = state.result if phase.cooled else state.params, seen + phase.steps
    return state


def repeated(scenes: Sequence[world.Scene], small_squares: int) -> Int[np.ndarray, " N"]:
    """The indices of the clips, those with a small square `small_squares` times each."""

    def has_one(scene: world.Scene) -> bool:
        return any((thing.shape, thing.size) == ("square", "small") for thing in scene.things)

    return np.repeat(np.arange(len(scenes)), [small_squares if has_one(scene) else 1 for scene in scenes])


def _from(batches: Callable[[int], dict[str, np.ndarray]], start: int, step: int) -> dict[str, np.ndarray]:
    return batches(start + step)


def export(run: Run) -> None:
    """The averaged weights as a native checkpoint, RUN/checkpoint, and the loss on the way, RUN/training.png."""
    state = train_transformer(run)
    files = [run.folder / phase.name / "metrics.jsonl" for phase in run.phases]
    plot_metrics(files, ("loss", "loss_noisy", "loss_clean"), run.folder / "training.png")
    modules = jax.device_get(state.result) | {"vae": jax.device_get(train_vae(run))}
    write_checkpoint(run, modules, run.steps_before() + sum(phase.steps for phase in run.phases))


def write_checkpoint(run: Run, modules: dict[str, nnx.Module], steps: int) -> None:
    """RUN/checkpoint out of the three modules."""
    parts = {"text_encoder": TEXT, "transformer": TRANSFORMER, "vae": VAE}
    configs = parts | {"scheduler": SCHEDULER, "tokenizer": TOKENIZER}
    manifest = Manifest(family="cogvideox", configs=configs, guidance_scale=GUIDANCE)
    source = {"recipe": "weights.toy_world", "seed": SEED, "steps": steps}
    make_tokenizer(run)
    save(run.folder / "checkpoint", manifest, modules, DTYPES, source, {SPIECE_FILE: run.folder / TOKENIZER_FILE})


def sha256_of(module: nnx.Module) -> str:
    """A fingerprint of all parameters."""
    digest = hashlib.sha256()
    for name, value in parameters(module).items():
        digest.update(name.encode() + np.asarray(value).tobytes())
    return digest.hexdigest()


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
