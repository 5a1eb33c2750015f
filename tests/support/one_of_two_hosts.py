"""One process of a run over two: python one_of_two_hosts.py NUMBER PORT CHECKPOINT OUT.npy"""

from __future__ import annotations

import sys

import jax
import numpy as np


def main() -> None:
    number, port, native, out = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, int(number))
    from cogvideox_flax import sharding
    from tests.models.test_sharding import generate

    assert jax.process_count() == 2 and jax.device_count() == 8 and len(jax.local_devices()) == 4
    np.save(out, generate(native, sharding.make_mesh(1, 4, 2)))


if __name__ == "__main__":
    main()
