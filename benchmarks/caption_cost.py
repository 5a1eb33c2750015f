"""What a false word in the prompt costs the embedded model's transformer: how well it knows what the word means.

    python -m benchmarks.caption_cost [--model weights/embedded] [--clips 192]

Clips of one thing are noised to a timestep, and the loss of v is taken with the true prompt and with one in which the
shape, or the direction, is another. The difference is what the word is worth there: 0 where it tells nothing, or where
the model does not know it. The same clips, noise and wording each time; in brackets the standard error over clips. A
false prompt may name a combination that training never showed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cogvideox_flax import hub
from cogvideox_flax.checkpoint import SPIECE_FILE, load_text_encoder, load_transformer, load_vae, read_manifest
from cogvideox_flax.schedulers import DDIMScheduler
from cogvideox_flax.tokenizer import Tokenizer
from cogvideox_flax.training import world

TIMESTEPS = (300, 400, 500, 600, 700, 800)
SEED = 123_456_789
BATCH = 32


@dataclass(frozen=True)
class Lie:
    """A false word: of which things it is told, and what they are said to be."""

    name: str
    applies: Callable[[world.Thing], bool]
    tell: Callable[[world.Thing], world.Thing]


def call_shape(shape: str, other: str) -> Lie:
    """One shape called another."""
    return Lie(f"{shape} called {other}", lambda thing: thing.shape == shape, lambda thing: replace(thing, shape=other))


def turn(thing: world.Thing) -> world.Thing:
    """Moving another way."""
    ways = [name for name in world.MOTIONS if name != "still"]
    return thing if thing.motion == "still" else replace(thing, motion=ways[ways.index(thing.motion) - 1])


LIES = (
    *(call_shape(shape, other) for shape, other in permutations(world.SHAPES, 2)),
    Lie("another direction", lambda thing: thing.motion != "still", turn),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.caption_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=hub.EMBEDDED, metavar="DIR")
    parser.add_argument("--clips", type=int, default=192)
    args = parser.parse_args()
    clips = single_things(args.clips)
    loss = make_loss(args.model, clips)
    print("| timestep | loss | " + " | ".join(lie.name for lie in LIES) + " |")
    print("|---" * (len(LIES) + 2) + "|")
    for t in TIMESTEPS:
        true = loss(lambda thing: thing, t)
        costs = [(loss(lie.tell, t) - true)[[lie.applies(clip.scene.things[0]) for clip in clips]] for lie in LIES]
        print(f"| {t} | {true.mean():.4f} | " + " | ".join(map(_mean, costs)) + " |", flush=True)
    return 0


def _mean(costs: np.ndarray) -> str:
    return f"{costs.mean():.4f} ({costs.std() / np.sqrt(len(costs)):.4f})" if len(costs) else "no such clip"


def single_things(count: int) -> list[world.Clip]:
    """Clips of one thing, of combinations that training shows, but not its clips."""
    clips: list[world.Clip] = []
    i = 0
    while len(clips) < count:
        clip = world.sample_clip(SEED, i)
        clips += [clip] if len(clip.scene.things) == 1 else []
        i += 1
    return clips


def make_loss(
    model: Path, clips: Sequence[world.Clip]
) -> Callable[[Callable[[world.Thing], world.Thing], int], np.ndarray]:
    """loss(change, t): the squared error of v per clip [N] with prompts in which the thing is changed."""
    manifest = read_manifest(model)
    assert manifest.text_encoder and manifest.tokenizer and manifest.scheduler and manifest.vae
    vae, encoder, transformer = (
        load(model, dtype="float32") for load in (load_vae, load_text_encoder, load_transformer)
    )
    tokenizer = Tokenizer(
        model / SPIECE_FILE, manifest.tokenizer.max_length, vocab_size=manifest.text_encoder.vocab_size
    )
    scheduler, scale = DDIMScheduler(manifest.scheduler), manifest.vae.scaling_factor
    encode = jax.jit(lambda vae, video: vae.encode(video)[0])

    @jax.jit
    def error(encoder: Any, transformer: Any, z: Any, ids: Any, t: Any, noise: Any) -> Any:
        t = jnp.full(z.shape[0], t)
        found = transformer(scheduler.add_noise(z, noise, t), encoder(ids), t)
        return jnp.square(found - scheduler.velocity(z, noise, t)).mean((1, 2, 3, 4))

    parts = [range(i, min(i + BATCH, len(clips))) for i in range(0, len(clips), BATCH)]
    videos = (np.stack([clips[i].video for i in part]).astype(np.float32) / 127.5 - 1 for part in parts)
    latents = [scale * encode(vae, video) for video in videos]
    noises = [jax.random.normal(jax.random.key(n), z.shape) for n, z in enumerate(latents)]

    def loss(change: Callable[[world.Thing], world.Thing], t: int) -> np.ndarray:
        scenes = [replace(clip.scene, things=(change(clip.scene.things[0]),)) for clip in clips]
        ids = tokenizer([world.describe(scene, np.random.default_rng([SEED, i])) for i, scene in enumerate(scenes)])
        found = [
            error(encoder, transformer, z, ids[list(part)], t, noise)
            for part, z, noise in zip(parts, latents, noises, strict=True)
        ]
        return np.concatenate(found)

    return loss


if __name__ == "__main__":
    sys.exit(main())
