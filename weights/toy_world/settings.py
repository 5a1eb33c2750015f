"""The settings of the embedded model: what it is, and how each stage of its training goes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from jax.sharding import Mesh

from cogvideox_flax.checkpoint import read_manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.models.cogvideox.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.t5 import TextEncoderConfig
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.tokenizer import TokenizerConfig
from cogvideox_flax.training.loop import LoopConfig
from cogvideox_flax.training.objectives import Focus
from cogvideox_flax.training.optimizer import OptimizerConfig

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
VIDEO_COOL = LoopConfig(
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
DENSE_SHARE, FINE_DENSE_SHARE = 0.7, 0.3
"""Share of crowded clips in the training of the autoencoder, and in its last stage; the rest are as in the world."""


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
    learned_positions=True,  # as 5b-I2V has beside rotary ones: rotations by 0 to 3 patches tell little
    sample_height=SIZE // 8,
    sample_width=SIZE // 8,
    sample_frames=FRAMES,
)
GUIDANCE = 2.0
"""What the checkpoint recommends. At 6, as the releases do, early weights overshot: triangles got three prongs."""
TOKENIZER_FILE = "spiece.model"
DTYPES = {"text_encoder": "float16", "transformer": "bfloat16", "vae": "float16"}
SCHEDULER = SchedulerConfig(snr_shift_scale=3.0)

CLIPS, CLIP_SEED, SHARD = 16_000, SEED + 3, 40
DIFFUSION_BATCH = 32
FOCUS = Focus(0.5, 0.85, 0.85)
"""Noise levels at which shape and direction are decided: above, little but the text is to be seen; below, nothing is
left to decide. A wrong direction in the prompt costs the most at 0.7 to 0.75, a wrong colour at 0.65 to 0.8."""
FOCUS_AGAIN = Focus(0.3, 0.7, 0.75)
"""Of further rounds. Corners are small, so they show later: with all else known, noise of 0.62 still hides whether they
are there, noise of 0.33 does not. Up to 0.8, for the places of two things, did not help in 1500 steps."""
CORNERS_AGAIN = 40.0
"""Of further rounds: how much more a latent pixel weighs that is all corners. A sixth of all latent pixels are touched
by a corner, which is an eighth of them. At timestep 500, "circle" instead of "square" moved the answer to 64 clips of
squares by 34 % of what it should; 3600 steps with all weights the same made that 40 %, 150 with 80 here 53 %. (As
`benchmarks.word_shift` measures it; those weights are not kept.)"""
SMALL_SQUARES_AGAIN = 6
"""Of further rounds: how often a clip with a small square is shown for each time of another. They came out as circles,
or too large, and are better for it. Two things, of which one video in ten was all right, were no better after 1500
steps in which they were shown four times as often."""
AGAIN = FOCUS_AGAIN, CORNERS_AGAIN, SMALL_SQUARES_AGAIN
"""How the phase of a further round differs: its focus, corners and small squares."""
DIFFUSION_OPTIMIZER = OptimizerConfig(
    kind="muon", learning_rate=2e-3, final_learning_rate=2e-3, warmup_steps=50, b2=0.98, weight_decay=1e-3
)
DIFFUSION_LOOP = LoopConfig(steps=100_000, seed=SEED + 2, ema_decay=0.999, optimizer=DIFFUSION_OPTIMIZER)
DIFFUSION_STOP = 5000
DIFFUSION_COOL = LoopConfig(
    steps=4000,
    seed=SEED + 6,
    ema_decay=0.995,
    optimizer=replace(DIFFUSION_OPTIMIZER, final_learning_rate=1e-5, warmup_steps=50),
)
"""A constant rate for as long as one likes, then a decay to almost nothing: the first part can be gone on with."""
DIFFUSION_AGAIN = LoopConfig(
    steps=6500,
    seed=SEED + 9,
    ema_decay=0.995,
    optimizer=replace(DIFFUSION_OPTIMIZER, learning_rate=1e-3, final_learning_rate=1e-5, warmup_steps=100),
)
"""Further rounds, from the cooled weights at half the rate (warm restarts, arXiv 1608.03983): what is small, as the
difference between two shapes, is learned when little else moves."""
DIFFUSION_FROM_BASE = replace(DIFFUSION_AGAIN, optimizer=replace(DIFFUSION_AGAIN.optimizer, learning_rate=5e-4))
"""Further rounds from a base, which was cooled several times: at a quarter of the first rate."""


@dataclass(frozen=True)
class Phase:
    """A part of the transformer's training: `steps` steps of the schedule laid out in `config`.

    focus: noise levels that it sees the most of.
    corners: how much more than others latent pixels weigh that are all corners.
    small_squares: how often a clip with a small square is shown for each time of another.
    cooled: whether the rate falls to its end, so that what goes on is the average of the weights.
    """

    name: str
    config: LoopConfig
    steps: int
    focus: Focus = FOCUS
    corners: float = 0.0
    small_squares: int = 1
    cooled: bool = True


@dataclass(frozen=True)
class Run:
    """One run of the recipe.

    folder: gets all that the stages write, and what they go on from.
    base: a native checkpoint of this model to start from: its autoencoder as it is, its other weights to train on.
    stop: steps of the transformer at a constant rate, before it is cooled down; none of them with a base.
    rounds: how often it is cooled down in all; each further time from the cooled weights, as the first from a base.
    round_steps: of each further time.
    """

    folder: Path
    mesh: Mesh | None = None
    base: Path | None = None
    stop: int = DIFFUSION_STOP
    rounds: int = 1
    round_steps: int = DIFFUSION_AGAIN.steps

    @property
    def phases(self) -> list[Phase]:
        """The transformer's training, in order."""
        if self.base is not None:
            again = replace(DIFFUSION_FROM_BASE, steps=self.round_steps)
            which = read_manifest(self.base).weights["transformer"]["sha256"][:8]
            return [Phase(f"transformer-{which}-again-{n}", again, again.steps, *AGAIN) for n in self._rounds]
        again = replace(DIFFUSION_AGAIN, steps=self.round_steps)
        cooled = f"transformer-cool-{self.stop}"
        return [
            Phase("transformer", DIFFUSION_LOOP, self.stop, cooled=False),
            Phase(cooled, DIFFUSION_COOL, DIFFUSION_COOL.steps),
            *(Phase(f"{cooled}-{n}", again, again.steps, *AGAIN) for n in self._rounds[1:]),
        ]

    @property
    def _rounds(self) -> range:
        return range(1, self.rounds + 1)

    def steps_before(self) -> int:
        """Steps that the base has seen, as far as it says."""
        if self.base is None:
            return 0
        return int(read_manifest(self.base).weights["transformer"].get("source", {}).get("steps", 0))

    def __post_init__(self) -> None:
        if not 1 <= self.stop <= DIFFUSION_LOOP.steps:
            raise InputError(f"the transformer's steps must be 1 to {DIFFUSION_LOOP.steps}; got {self.stop}")
        if self.round_steps < 1:
            raise InputError(f"a round of cooling must have 1 step or more; got {self.round_steps}")
        if self.rounds < 1:
            raise InputError(f"the transformer must be cooled down once or more often; got {self.rounds} rounds")
        if self.base is not None:
            found = read_manifest(self.base).configs
            if [found.get(name) for name in ("vae", "text_encoder", "transformer")] != [VAE, TEXT, TRANSFORMER]:
                raise InputError(f"{self.base} is not this model: its config.json differs; give weights/embedded")
            if self.base.resolve().is_relative_to(self.folder.resolve()):
                raise InputError(
                    f"{self.base} lies in the run's own folder, which would replace it; give another folder"
                )
