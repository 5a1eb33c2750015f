"""Train the embedded model.

python -m weights.toy_world RUN                # every stage, in order; ends with RUN/checkpoint
python -m weights.toy_world RUN vae            # up to one stage
python -m weights.toy_world RUN --from weights/embedded    # trains a finished model on

RUN is a folder. Each stage goes on from where it stopped, and is passed over once it is done.
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
from weights.toy_world.autoencoder import train_vae, train_vae_images
from weights.toy_world.diffusion import export, prepare_latents, train_transformer
from weights.toy_world.settings import DIFFUSION_AGAIN, DIFFUSION_STOP, Run

STAGES: dict[str, Callable[[Run], Any]] = {
    "vae-images": train_vae_images,
    "vae": train_vae,
    "latents": prepare_latents,
    "transformer": train_transformer,
    "export": export,
}
"""Each runs those before it, as far as they are not done."""


def main() -> int:
    """Parse, run, and say how it ended: 0 done, 2 cannot be done, 130 stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m weights.toy_world",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("stage", nargs="?", choices=STAGES, default="export")
    parser.add_argument(
        "--rounds", type=int, default=1, help="how often it is cooled down, from the last time's weights"
    )
    parser.add_argument(
        "--round-steps", type=int, default=DIFFUSION_AGAIN.steps, help="of each time but a new model's first"
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--steps", type=int, default=DIFFUSION_STOP, help="of the transformer before it is cooled down")
    start.add_argument("--from", dest="base", type=Path, metavar="CHECKPOINT", help="cool this model's weights again")
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
