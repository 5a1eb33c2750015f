"""How much a word changes the prediction of the embedded model's transformer, relative to the true difference.

    python -m weights.toy_world.judge.word_shift [--model weights/embedded] [--clips 96]

Clips of one thing are noised to a timestep. The transformer predicts v with the shape's own name and with another name.
The difference of the two predictions is compared with the true difference: between the clip and its twin, which has the
other shape in the same place. Reported is the projection on the true difference, relative to its length: 1.00 if only
the word determines the shape, 0 if the word has no effect or the noisy clip already determines the shape. Guidance
multiplies it. In brackets the length of the difference, relative to the true one's. Combinations that training never
showed are included.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.runner import Report, make_parser
from cogvideox_flax import hub
from weights.toy_world import world
from weights.toy_world.judge.denoiser import Denoiser

TIMESTEPS = (300, 400, 500, 600, 700)
SEED = 123_456_789


def main() -> int:
    parser = make_parser("weights.toy_world.judge.word_shift", __doc__)
    parser.add_argument("--model", type=Path, default=hub.EMBEDDED, metavar="DIR")
    parser.add_argument("--clips", type=int, default=96, help="of each pair of shapes")
    args = parser.parse_args()
    denoiser = Denoiser(args.model)
    pairs = list(combinations(world.SHAPES, 2))
    columns = [shifts(denoiser, *pair, args.clips) for pair in pairs]
    names = ("timestep", *(f"{a}, not {b}" for a, b in pairs))
    report = Report(args.json, names, model=str(args.model), clips=args.clips)
    for t, *found in zip(TIMESTEPS, *columns, strict=True):
        cells = (t, *(f"{along:.2f} ({length:.2f})" for along, length in found))
        report.add(dict(zip(names, cells, strict=True)), cells)
    return 0


def shifts(denoiser: Denoiser, shape: str, other: str, count: int) -> list[tuple[float, float]]:
    """(along, length) at each of TIMESTEPS, of clips of `shape` that are called `other`."""
    scenes = twins(shape, other, count)
    z, z_other = (denoiser.latents([world.render(pair[i], tracks) for *pair, tracks in scenes]) for i in range(2))
    prompts, lies = (
        [world.describe(pair[i], np.random.default_rng([SEED, n])) for n, (*pair, _) in enumerate(scenes)]
        for i in range(2)
    )
    found = []
    for t in TIMESTEPS:
        told = denoiser.velocity(z, prompts, t) - denoiser.velocity(z, lies, t)
        # the noised clip is the same for both, so if x0 is another, v is: v = (sqrt(abar) x_t - x0) / sqrt(1 - abar)
        true = (z_other - z) / np.sqrt(1 - denoiser.scheduler.alphas_cumprod[t])
        size = float(np.square(true).sum())
        found.append((float((told * true).sum()) / size, float(np.sqrt(np.square(told).sum() / size))))
    return found


def twins(shape: str, other: str, count: int) -> list[tuple[world.Scene, world.Scene, world.Tracks]]:
    """Scenes of one thing of `shape`, the same with `other`, and where it goes."""
    found: list[tuple[world.Scene, world.Scene, world.Tracks]] = []
    i = 0
    while len(found) < count:
        scene, tracks = world.tracks_of_clip(SEED, i, "any")
        i += 1
        if len(scene.things) == 1 and scene.things[0].shape == shape:
            twin = replace(scene, things=(replace(scene.things[0], shape=other),))
            found.append((scene, twin, tracks))
    return found


if __name__ == "__main__":
    sys.exit(main())
