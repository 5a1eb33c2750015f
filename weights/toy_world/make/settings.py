"""The settings of the embedded model: its configs, and those of each stage of its training."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from cogvideox_flax.checkpoint import load_component, read_manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.models.codec import LatentStatistics
from cogvideox_flax.models.cogvideox.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.t5 import TextEncoderConfig
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.tokenizer import TokenizerConfig
from cogvideox_flax.training.config import LoopConfig, OptimizerConfig
from weights.toy_world.make.objectives import TimestepDensity, focus

SEED = 20
SIZE, FRAMES = 64, 17

VAE = VAEConfig(
    block_channels=(8, 16, 32, 64),
    layers_per_block=1,
    norm_groups=4,
    sample_height=SIZE,
    sample_width=SIZE,
    scaling_factor=1.0,
)
STATISTICS = LatentStatistics(VAE.scaling_factor)

VAE_OPTIMIZER = OptimizerConfig(
    learning_rate=2e-3, final_learning_rate=4e-4, warmup_steps=50, b2=0.98, weight_decay=1e-4
)
IMAGE_LOOP = LoopConfig(steps=1500, seed=SEED, ema_decay=0.995, optimizer=VAE_OPTIMIZER)
VIDEO_LOOP = LoopConfig(
    steps=2600,
    seed=SEED + 1,
    ema_decay=0.998,
    optimizer=replace(VAE_OPTIMIZER, learning_rate=8e-4, final_learning_rate=2e-5, warmup_steps=100),
)
VIDEO_STOP = 1390
VIDEO_COOLDOWN = LoopConfig(
    steps=300,
    seed=SEED + 7,
    ema_decay=0.99,
    optimizer=replace(VAE_OPTIMIZER, learning_rate=3e-4, final_learning_rate=5e-6, warmup_steps=20),
)
VIDEO_FINE = LoopConfig(
    steps=1300,
    seed=SEED + 8,
    ema_decay=0.995,
    optimizer=replace(VAE_OPTIMIZER, learning_rate=4e-4, final_learning_rate=4e-6, warmup_steps=20),
)
KL_WEIGHT, L1_WEIGHT = 2e-4, 0.1
CAPTION_DROPOUT = 0.1
IMAGE_BATCH, VIDEO_BATCH, VIDEO_FRAMES = 24, 4, 9
CROWDED_SHARE, FINE_CROWDED_SHARE = 0.7, 0.3
"""Share of crowded clips in the autoencoder's training, and in its last stage. The others are ordinary clips."""


TEXT = TextEncoderConfig(
    vocab_size=128, width=128, layers=2, heads=4, head_dim=32, mlp_width=256, position_max_distance=32
)
TOKENIZER = TokenizerConfig(max_length=24)
TRANSFORMER = TransformerConfig(
    layers=6,
    heads=4,
    head_dim=48,
    text_width=TEXT.width,
    text_length=TOKENIZER.max_length,
    time_width=128,
    rotary=True,
    learned_positions=True,  # as in 5b-I2V: on a grid of 4 patches, rotary positions alone are too weak
    sample_height=SIZE // 8,
    sample_width=SIZE // 8,
    sample_frames=FRAMES,
)
GUIDANCE = 2.0
"""The checkpoint's default. With the releases' 6, early weights drew triangles with three prongs."""
TOKENIZER_FILE = "spiece.model"
DTYPES = {"text_encoder": "float16", "transformer": "bfloat16", "vae": "float16"}
ROWS = {name: component.sharding for name, component in CogVideoX.components.items()}
"""Component -> the sharding of its parameters."""

SCHEDULER = SchedulerConfig(snr_shift_scale=3.0)

CLIPS, CLIP_SEED, SHARD = 24_000, SEED + 3, 40
TWO_OBJECTS = 1 / 3
"""Share of the training clips with two things, which are harder. Prompts that judge the model have the world's share
of them."""
BRIEF = 0.3
"""Share of the training captions that may leave out everything but shapes; see `world.describe`."""
DIFFUSION_BATCH = 32
DENSITY = focus(0.5, 0.85, 0.85)
"""The noise levels that determine shape and direction: above them the input has little information besides the text,
below them the noisy video already shows both. A wrong direction in the prompt increases the loss most at 0.7 to 0.75, a
wrong colour at 0.65 to 0.8."""
DIFFUSION_OPTIMIZER = OptimizerConfig(
    kind="muon", learning_rate=2e-3, final_learning_rate=2e-3, warmup_steps=50, b2=0.98, weight_decay=1e-3
)
DIFFUSION_LOOP = LoopConfig(steps=100_000, seed=SEED + 2, ema_decay=0.999, optimizer=DIFFUSION_OPTIMIZER)
CONSTANT_STEPS = 5000
DIFFUSION_COOLDOWN = LoopConfig(
    steps=4000,
    seed=SEED + 6,
    ema_decay=0.995,
    optimizer=replace(DIFFUSION_OPTIMIZER, final_learning_rate=1e-5, warmup_steps=50),
)
"""A constant learning rate for any number of steps, then a decay to almost 0."""

RESTART_LOOP = LoopConfig(
    steps=6500,
    seed=SEED + 9,
    ema_decay=0.995,
    optimizer=replace(DIFFUSION_OPTIMIZER, learning_rate=1e-3, final_learning_rate=1e-5, warmup_steps=100),
)
"""Further rounds: warm restarts (arXiv 1608.03983) from the averaged weights at half the learning rate. Small features,
such as the difference between two shapes, are learned while little else changes."""
BASE_RESTART_LOOP = replace(RESTART_LOOP, optimizer=replace(RESTART_LOOP.optimizer, learning_rate=5e-4))
"""Further rounds from a base, which has had several cooldowns: at a quarter of the first learning rate."""
RESTART_DENSITY = TimestepDensity((0.0, 0.3, 0.7, 1.0), (0.38, 0.5, 0.12))
"""Timesteps of further rounds. Corners are small, so lower noise levels determine them. Below 0.3 the outline is drawn:
with an eighth of the timesteps there, the loss was 3 to 5 times the least possible."""
RESTART_CORNERS = 20.0
"""In further rounds: the additional weight of a latent pixel that consists of corners. A sixth of the latent pixels
touch a corner, which covers an eighth of their area. At timestep 500, "circle" instead of "square" changed the
prediction for 64 clips of squares by 34 % of the true difference; 3600 steps with equal weights made that 40 %, 150
steps with 80 here 53 %. (Measured by `weights.toy_world.judge.word_shift`, with weights that are not published.)"""
RESTART_SMALL_SQUARES = 3
"""In further rounds: how often an epoch shows a clip with a small square. These were generated as circles or too large,
and improved. Clips of two things, of which one in ten was right, did not improve in 1500 steps with four times."""

DECODER_CLIPS, DECODER_BATCH = 2400, 4
DECODER_LOOP = LoopConfig(
    steps=2400,
    seed=SEED + 12,
    ema_decay=0.995,
    optimizer=OptimizerConfig(learning_rate=4e-4, final_learning_rate=4e-6, warmup_steps=50, b2=0.98, weight_decay=0.0),
)
"""Of the decoder's last stage. Without decay of weights, the encoder, which has no gradients there, stays as it is."""
LATENT_NOISE, NEAR_WEIGHT = 0.12, 4.0
"""The largest deviation of noise on latents, and the additional weight of pixels near a thing."""
ROLLOUT_STEPS, ROLLOUT_STARTS = 20, (8, 18)
"""Latents of the transformer: from step 8 to 17 of 20, where a clip's noised latents still determine it."""

TEACHER_STEPS, TRAJECTORIES = 40, 4000
"""Of the runs from which four steps are learned: a multiple of four steps, so that their timesteps are among these."""
DISTIL_RANK, DISTIL_BATCH = 32, 32
DISTIL_LOOP = LoopConfig(
    steps=1800,
    seed=SEED + 13,
    ema_decay=0.995,
    optimizer=OptimizerConfig(learning_rate=1e-3, final_learning_rate=2e-5, warmup_steps=50, b2=0.98, weight_decay=0.0),
)


@dataclass(frozen=True)
class Phase:
    """A part of the transformer's training.

    name: of the folder.
    config: settings and schedule of the loop.
    steps: how many steps of the schedule are done.
    density: of the timesteps.
    corners: additional weight of latent pixels that are all corners.
    small_squares: how often an epoch shows a clip with a small square.
    cooled: whether the learning rate ends near 0, so that the averaged weights are the result.
    """

    name: str
    config: LoopConfig
    steps: int
    density: TimestepDensity = DENSITY
    corners: float = 0.0
    small_squares: int = 1
    cooled: bool = True

    def recorded(self) -> dict[str, Any]:
        """What decides the result beside `config`, as JSON values."""
        return {
            "scheduler": SCHEDULER.to_dict(),
            "focus": asdict(self.density),
            "corners": self.corners,
            "small_squares": self.small_squares,
        }


@dataclass(frozen=True)
class Run:
    """One training of the embedded model.

    folder: of all files that the stages write and resume from.
    base: a native checkpoint of this model to start from. Its autoencoder is not trained, its other weights are.
    constant_steps: the transformer's steps at a constant learning rate; not used with a base.
    rounds: how often the learning rate is cooled down. Each further round starts from the averaged weights of the
        previous round or of the base.
    round_steps: of each further round.
    """

    folder: Path
    mesh: Mesh | None = None
    base: Path | None = None
    constant_steps: int = CONSTANT_STEPS
    rounds: int = 1
    round_steps: int = RESTART_LOOP.steps

    def part(self, name: str) -> Any:
        """A component of the base, in float32.

        Raises:
            InputError: the run has no base.
        """
        if self.base is None:
            raise InputError("this stage starts from an existing model; give it with --from")
        return load_component(name, self.base, dtype="float32")

    @property
    def phases(self) -> list[Phase]:
        """The transformer's training, in order."""
        if self.base is not None:
            base_hash = read_manifest(self.base).weights["transformer"]["sha256"][:8]
            names = [f"transformer-{base_hash}-again-{n}" for n in range(1, self.rounds + 1)]
            return [self._restart(name, BASE_RESTART_LOOP) for name in names]
        cooled = f"transformer-cool-{self.constant_steps}"
        return [
            Phase("transformer", DIFFUSION_LOOP, self.constant_steps, cooled=False),
            Phase(cooled, DIFFUSION_COOLDOWN, DIFFUSION_COOLDOWN.steps),
            *(self._restart(f"{cooled}-{n}", RESTART_LOOP) for n in range(2, self.rounds + 1)),
        ]

    def _restart(self, name: str, loop: LoopConfig) -> Phase:
        config = replace(loop, steps=self.round_steps)
        return Phase(name, config, config.steps, RESTART_DENSITY, RESTART_CORNERS, RESTART_SMALL_SQUARES)

    def steps_before(self) -> int:
        """The base's training steps, if its config.json has them."""
        if self.base is None:
            return 0
        return int(read_manifest(self.base).weights["transformer"].get("source", {}).get("steps", 0))

    def __post_init__(self) -> None:
        if not 1 <= self.constant_steps <= DIFFUSION_LOOP.steps:
            raise InputError(f"the transformer's steps must be 1 to {DIFFUSION_LOOP.steps}; got {self.constant_steps}")
        if self.round_steps < 1:
            raise InputError(f"a round of cooling must have 1 step or more; got {self.round_steps}")
        if self.rounds < 1:
            raise InputError(f"cooling down takes 1 round or more; got {self.rounds} rounds")
        if self.base is not None:
            found = read_manifest(self.base).configs
            if [found.get(name) for name in ("vae", "text_encoder", "transformer")] != [VAE, TEXT, TRANSFORMER]:
                raise InputError(f"{self.base} is not this model: its config.json differs; give weights/embedded")
            if self.base.resolve().is_relative_to(self.folder.resolve()):
                raise InputError(
                    f"{self.base} lies in the run's own folder, which would overwrite it; give another folder"
                )
