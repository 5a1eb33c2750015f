"""`python -m cogvideox_flax` is `cogvideox`."""

import sys

from cogvideox_flax.cli import main

sys.exit(main())
