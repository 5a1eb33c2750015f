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

import numpy as np

from benchmarks.denoiser import Denoiser
from cogvideox_flax.checkpoint import hub
from weights.toy_world import world

TIMESTEPS = (300, 400, 500, 600, 700, 800)
SEED = 123_456_789


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
    denoiser = Denoiser(model)
    z = denoiser.latents([clip.video for clip in clips])

    def loss(change: Callable[[world.Thing], world.Thing], t: int) -> np.ndarray:
        scenes = [replace(clip.scene, things=(change(clip.scene.things[0]),)) for clip in clips]
        prompts = [world.describe(scene, np.random.default_rng([SEED, i])) for i, scene in enumerate(scenes)]
        return np.square(denoiser.velocity(z, prompts, t) - denoiser.true_velocity(z, t)).mean((1, 2, 3, 4))

    return loss


if __name__ == "__main__":
    sys.exit(main())
