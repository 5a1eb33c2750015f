"""`python -m conversion` is `cogvideox convert`."""

import sys

from cogvideox_flax.cli import main

sys.exit(main(["convert", *sys.argv[1:]]))
