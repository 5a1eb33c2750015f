"""How much a false word in the prompt increases the loss of the embedded model's transformer.

    python -m weights.toy_world.judge.caption_cost [--model weights/embedded] [--clips 192]

Clips of one thing are noised to a timestep, and the loss of v is computed with the true prompt and with a prompt that
states another shape or direction. The difference is 0 if the word adds no information, or if the model does not know
the word. Clips, noise and wording are the same each time; in brackets the standard error over clips. A false prompt may
name a combination that training never showed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import numpy as np

from benchmarks.runner import Report, make_parser
from cogvideox_flax import hub
from weights.toy_world import world
from weights.toy_world.judge.denoiser import Denoiser

TIMESTEPS = (300, 400, 500, 600, 700, 800)
SEED = 123_456_789


@dataclass(frozen=True)
class FalseClaim:
    """A false word: which things it applies to, and what they are called."""

    name: str
    applies: Callable[[world.Thing], bool]
    tell: Callable[[world.Thing], world.Thing]


def call_shape(shape: str, other: str) -> FalseClaim:
    """One shape called another."""
    return FalseClaim(
        f"{shape} called {other}", lambda thing: thing.shape == shape, lambda thing: replace(thing, shape=other)
    )


def turn(thing: world.Thing) -> world.Thing:
    """The thing with another direction."""
    ways = [name for name in world.MOTIONS if name != "still"]
    return thing if thing.motion == "still" else replace(thing, motion=ways[ways.index(thing.motion) - 1])


FALSE_CLAIMS = (
    *(call_shape(shape, other) for shape, other in permutations(world.SHAPES, 2)),
    FalseClaim("another direction", lambda thing: thing.motion != "still", turn),
)


def main() -> int:
    parser = make_parser("weights.toy_world.judge.caption_cost", __doc__)
    parser.add_argument("--model", type=Path, default=hub.EMBEDDED, metavar="DIR")
    parser.add_argument("--clips", type=int, default=192)
    args = parser.parse_args()
    clips = single_things(args.clips)
    loss = make_loss(args.model, clips)
    columns = ("timestep", "loss", *(claim.name for claim in FALSE_CLAIMS))
    report = Report(args.json, columns, model=str(args.model), clips=args.clips)
    for t in TIMESTEPS:
        true = loss(lambda thing: thing, t)
        costs = [
            (loss(claim.tell, t) - true)[[claim.applies(clip.scene.things[0]) for clip in clips]]
            for claim in FALSE_CLAIMS
        ]
        cells = (t, f"{true.mean():.4f}", *map(_mean, costs))
        report.add(dict(zip(columns, cells, strict=True)), cells)
    return 0


def _mean(costs: np.ndarray) -> str:
    return f"{costs.mean():.4f} ({costs.std() / np.sqrt(len(costs)):.4f})" if len(costs) else "no such clip"


def single_things(count: int) -> list[world.Clip]:
    """New clips of one thing, in combinations that training shows."""
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
