"""Short trainings: the settings of a fine-tune, small models, and the training loop with their sharding."""

from __future__ import annotations

from typing import Any

from cogvideox_flax.models.cogvideox.config import TransformerConfig
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.t5 import TextEncoderConfig
from cogvideox_flax.training.loop import Trainer
from cogvideox_flax.training.step import TrainState

TEXT = TextEncoderConfig(vocab_size=32, width=32, layers=1, heads=2, head_dim=16, mlp_width=32)
SMALL = TransformerConfig(
    layers=2, heads=2, head_dim=16, text_width=32, text_length=4, time_width=16, rotary=True, sample_height=4,
    sample_width=4, sample_frames=5,
)  # fmt: skip
ROWS = {name: component.sharding for name, component in CogVideoX.components.items()}


def train(params: Any, loss: Any, batches: Any, config: Any, folder: Any, *, mesh: Any = None, on_step: Any = None,
          stop_after: int | None = None) -> TrainState:  # fmt: skip
    """Train, up to a step where one is named."""
    trainer = Trainer(loss=loss, batches=batches, config=config, folder=folder, mesh=mesh, rows=ROWS)
    return trainer.train(params, on_step or (lambda done, _: done == stop_after))


def settings(top: str = "", lora: str = "", loop: str = "") -> str:
    """A TOML file for `str.format`, of four steps on clips of 9x32x48, at a rate that changes much.

    Args:
        top, lora, loop: more lines, at the top of the file and in these tables.
    """
    return f"""
model = "{{model}}"
clips = "{{clips}}"
out = "{{out}}"
method = "{{method}}"
num_frames = 9
height = 32
width = 48
batch = 2
{top}

[lora]
rank = 2
{lora}

[loop]
steps = 4
dtype = "float32"
{loop}

[optimizer]
learning_rate = 3e-2
warmup_steps = 0
"""
