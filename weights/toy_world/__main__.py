"""Train the embedded model.

python -m weights.toy_world RUN                # every stage, in order; ends with RUN/checkpoint
python -m weights.toy_world RUN vae            # up to one stage
python -m weights.toy_world RUN --from weights/embedded    # trains an existing checkpoint further
python -m weights.toy_world RUN image-to-video --from weights/embedded    # with a first frame as an input
python -m weights.toy_world RUN decoder --from weights/embedded    # its decoder, for the transformer's latents
python -m weights.toy_world RUN four-steps --from weights/embedded    # an adapter that takes four steps

RUN is a folder. Each stage resumes where it stopped, and is skipped once it is done.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from cogvideox_flax import sharding
from cogvideox_flax.errors import InputError
from weights.toy_world.make.autoencoder import train_vae, train_vae_images
from weights.toy_world.make.decoder import export_decoder
from weights.toy_world.make.diffusion import export, prepare_latents, train_transformer
from weights.toy_world.make.four_steps import export_four_steps
from weights.toy_world.make.image_to_video import export_image_to_video
from weights.toy_world.make.settings import CONSTANT_STEPS, RESTART_LOOP, Run

STAGES: dict[str, Callable[[Run], Any]] = {
    "vae-images": train_vae_images,
    "vae": train_vae,
    "latents": prepare_latents,
    "transformer": train_transformer,
    "export": export,
    "image-to-video": export_image_to_video,
    "decoder": export_decoder,
    "four-steps": export_four_steps,
}
"""Each stage first runs the unfinished stages that it needs."""


def main() -> int:
    """Run the command line. Exit codes: 0 done, 2 wrong input, 130 stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m weights.toy_world",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("stage", nargs="?", choices=STAGES, default="export")
    parser.add_argument("--rounds", type=int, default=1, help="how often the learning rate is cooled down; default: 1")
    parser.add_argument(
        "--round-steps", type=int, default=RESTART_LOOP.steps, help="steps of each round but a new model's first"
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--steps", type=int, default=CONSTANT_STEPS, help="steps of the transformer before the first cooldown"
    )
    start.add_argument("--from", dest="base", type=Path, metavar="CHECKPOINT", help="start from this model")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr, force=True)
    logging.getLogger("absl").setLevel(logging.WARNING)
    mesh = sharding.make_mesh(dp=len(jax.devices())) if len(jax.devices()) > 1 else None
    try:
        STAGES[args.stage](Run(args.run, mesh, args.base, args.steps, args.rounds, args.round_steps))
    except InputError as e:
        print(e, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
