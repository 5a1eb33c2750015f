"""One process of a small training run over several:

python -m tests.support.training_host NUMBER COUNT PORT FOLDER RESULT.npz MESH STEPS [KILLED_AFTER]

Each of the processes has two devices. The state, after so many steps, is written to RESULT.npz by process 0. A process
with KILLED_AFTER is killed so many seconds after its first step.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.runtime.global_arrays import fetch
from cogvideox_flax.runtime.multihost import hosts
from cogvideox_flax.runtime.multihost.rendezvous import ProcessAddress
from cogvideox_flax.sharding import make_mesh, parse_mesh
from cogvideox_flax.training import loop
from cogvideox_flax.training.config import LoopConfig, OptimizerConfig

CONFIG = LoopConfig(
    steps=8,
    log_every=1,
    save_minutes=1e-9,
    ema_decay=0.9,
    optimizer=OptimizerConfig(kind="adamw_bfloat16", learning_rate=0.1, warmup_steps=0),
)
ROWS = {name: component.sharding for name, component in CogVideoX.components.items()}


def pull(params, _, batch, key):
    """Least squares towards the batch, with noise that depends on the key."""
    errors = [x - batch["x"][0, 0] for x in params["transformer"].values()]
    noise = jax.random.normal(key, ())
    return sum(jnp.square(error + noise).mean() for error in errors), {}


def main() -> None:
    number, count, port, folder, result, mesh, steps, *after = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, force=True, format="%(message)s")
    loop.MAX_SAVE_SHARE = float("inf")
    address = ProcessAddress(f"127.0.0.1:{port}", int(count), int(number))
    rng = np.random.default_rng(0)
    shapes = {"blocks.attn.q.kernel": (2, 256, 256), "blocks.attn.q.bias": (2, 256)}
    params = {"transformer": {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}}

    def on_step(done, state):
        if after:
            timer = threading.Timer(float(after.pop()), os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()

    with hosts.joined(address, {}, lambda e: (1, None)):
        trainer = loop.Trainer(
            loss=pull,
            batches=lambda step: {"x": np.random.default_rng(step).normal(size=(4, 1)).astype(np.float32)},
            config=CONFIG,
            folder=Path(folder),
            mesh=make_mesh(*parse_mesh(mesh)),
            rows=ROWS,
            stop_at=int(steps),
        )
        state = jax.tree.map(fetch, trainer.train(params, on_step))
        if hosts.is_first():
            np.savez(result, *[np.asarray(x, np.float32) for x in jax.tree.leaves(state)])


if __name__ == "__main__":
    main()
