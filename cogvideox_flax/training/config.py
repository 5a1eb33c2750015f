"""The settings of a training run, and how they are read from a TOML file.

model = "zai-org/CogVideoX-2b"      # as --model takes it; left out: the embedded checkpoint
clips = "clips"                     # paths are relative to the working directory
out = "run"
method = "lora"                     # or "full"
seed = 0

[lora]
rank = 64

[loop]
steps = 1000
dtype = "bfloat16"

[optimizer]
learning_rate = 1e-4

[sample]
prompts = ["a red kite over the sea"]
every = 200
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.paths import check_kind, expand_user
from cogvideox_flax.io.values import MAX_FLOAT32, faults_of, is_count, is_finite_number, short_repr, typed
from cogvideox_flax.nn.quantized import KINDS
from cogvideox_flax.nn.remat import Remat
from cogvideox_flax.schedulers.timestep_law import LAWS

AUTO: Literal["auto"] = "auto"
"""Of `remat`: decided before the training."""
DTYPES = ("float32", "bfloat16")
METHODS = ("lora", "full")
OPTIMIZERS = ("adamw", "adamw_bfloat16", "adamw_8bit", "adafactor", "muon")
SCHEDULES = ("cosine", "linear", "constant_with_warmup")

MAX_COUNT = 2**31 - 1
COUNT = f"1 to {MAX_COUNT}"
MAX_RANK = 2**16
"""Above the width of every model."""


def require(config: object, *rules: tuple[str, bool, str]) -> None:
    """Raise one InputError that lists every setting whose rule does not hold.

    Args:
        rules: (dotted name of the setting, whether the rule holds, what is expected).
    """
    faults = [
        f"  {name}: got {short_repr(attrgetter(name)(config))}, expected {expected}"
        for name, holds, expected in rules
        if not holds
    ]
    if faults:
        raise InputError("the training settings are invalid:\n" + "\n".join(faults))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning rate schedule.

    kind: "adamw"; or "muon", which orthogonalises the updates of the blocks' attention and feed-forward matrices and
        trains the other parameters with Adam with Nesterov momentum. Muon learns faster from scratch; weights that
        AdamW trained are better fine-tuned with AdamW. With less memory for moments: "adamw_bfloat16", the first in
        bfloat16; "adamw_8bit", both in 8 bit, but of small parameters; "adafactor", no first, and the second of a
        matrix, if it is at least 128 wide and high, as a product of two vectors. b1, b2 and eps are not Adafactor's.
    learning_rate: the peak, at the end of the warm-up.
    schedule: "cosine" or "linear", from the peak to `final_learning_rate` at the last step; or "constant_with_warmup".
    weight_decay: of matrices and kernels. Biases, norm scales and other vectors do not decay.
    clip_norm: a gradient with a larger global norm is scaled down to this norm.
    """

    kind: str = "adamw"
    learning_rate: float = 1e-4
    schedule: str = "cosine"
    final_learning_rate: float = 0.0
    warmup_steps: int = 100
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 1e-3
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        require(
            self,
            ("kind", self.kind in OPTIMIZERS, " or ".join(OPTIMIZERS)),
            ("learning_rate", 0 < self.learning_rate <= MAX_FLOAT32, "a finite number above 0"),
            ("schedule", self.schedule in SCHEDULES, " or ".join(SCHEDULES)),
            ("final_learning_rate", 0 <= self.final_learning_rate <= self.learning_rate, "0 to learning_rate"),
            ("warmup_steps", 0 <= self.warmup_steps <= MAX_COUNT, f"0 to {MAX_COUNT}"),
            ("b1", 0 <= self.b1 < 1, "0 to below 1"),
            ("b2", 0 <= self.b2 < 1, "0 to below 1"),
            ("eps", 0 <= self.eps <= MAX_FLOAT32, "a finite number, 0 or more"),
            ("weight_decay", 0 <= self.weight_decay <= MAX_FLOAT32, "a finite number, 0 or more"),
            ("clip_norm", self.clip_norm > 0, "above 0"),
        )


@dataclass(frozen=True, kw_only=True)
class LoopTable:
    """[loop] of the file: the training loop.

    steps: optimizer steps in all. The learning rate schedule has this length. A run may go on with more of them.
    accumulate: micro-batches per step, whose gradients are averaged.
    dtype: of the weights in the forward and backward pass; None: that of a run of the model, bfloat16 for all releases.
        The trained weights themselves are float32.
    ema_decay: of the moving average of the weights: min(ema_decay, (1 + n) / (10 + n)) after n steps. 0: no average.
    save_minutes: least time between two training states on disk, which is also at least 20 times as long as the steps
        waited for the last one. One is also written at the end and when the run is stopped.
    keep: how many training states stay on disk.
    tensorboard: write the metrics for TensorBoard too, which needs the package tensorboardX.
    """

    steps: int
    accumulate: int = 1
    dtype: str | None = None
    ema_decay: float = 0.999
    log_every: int = 10
    save_minutes: float = 5.0
    keep: int = 2
    tensorboard: bool = False

    def __post_init__(self) -> None:
        require(
            self,
            ("steps", is_count(self.steps, MAX_COUNT), COUNT),
            ("accumulate", is_count(self.accumulate, MAX_COUNT), COUNT),
            ("dtype", self.dtype in (None, *DTYPES), " or ".join(DTYPES)),
            ("ema_decay", 0 <= self.ema_decay < 1, "0 to below 1"),
            ("log_every", is_count(self.log_every, MAX_COUNT), COUNT),
            ("save_minutes", self.save_minutes > 0, "above 0"),
            ("keep", is_count(self.keep, MAX_COUNT), COUNT),
        )


@dataclass(frozen=True, kw_only=True)
class LoopConfig(LoopTable):
    """The settings of the training loop, and those at the top of the file."""

    dtype: str = "float32"
    seed: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, ("seed", 0 <= self.seed < 2**32, f"0 to {2**32 - 1}"))


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """The adapters of method "lora".

    rank: None for 64.
    alpha: None for the rank.
    targets: names of the family's `lora.targets`; None for its `lora.default_targets`.
    init: an adapter from which training goes on, as --lora takes it; rank, alpha and targets are its own. None for new
        adapters.
    quantize: "int8" or "float8": the blocks' linear maps, which are not trained, have weights of 8 bits, as from
        `cogvideox quantize`, and activations are not quantized; None: as the checkpoint has them.
    """

    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] | None = None
    init: str | None = None
    quantize: str | None = None


@dataclass(frozen=True, kw_only=True)
class TimestepConfig:
    """The distribution of the timesteps that are trained at. What is left out is as the release was trained.

    law: "uniform"; "logit_normal", most of them in the middle of the noise schedule; or "mode".
    mean, std: of the normal distribution of "logit_normal"; a higher mean is more noise.
    shift: above 1, more of the timesteps are at high noise.
    """

    law: str | None = None
    mean: float | None = None
    std: float | None = None
    shift: float | None = None


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Videos generated while training, on a contact sheet with a row per prompt.

    images: of image-to-video models: the first frame of each video, or one for all; of inpainting models, if there are
        some.
    control_videos: of control models: the control clip of each video, or one for all.
    every: steps between two sheets. There is one after the last step too.
    frames: frames of each video on the sheet.
    """

    prompts: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    control_videos: tuple[str, ...] = ()
    every: int = 200
    frames: int = 6
    num_inference_steps: int = 50
    guidance_scale: float = 6.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """The settings of validation: a loss with fixed noise, timesteps and dropped captions, so its curve is smooth.

    clips: so many are held out from training, and the loss is theirs; 0: it is that of clips that are trained on.
    every: steps between two measurements. There is one before the first step and one after the last too.
    """

    clips: int = 0
    every: int = 50


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """A fine-tuning run: the tables and keys of the file.

    model: native or Hugging Face layout directory, or hub id; None for the embedded checkpoint.
    revision: of a hub id: branch, tag or commit.
    variant: of the model's weight files, where they are converted, such as "fp16".
    clips: folder of clips, see `training.clips`.
    out: the run's directory. A stopped run resumes from what is there.
    method: "lora" trains adapters and leaves the weights as they are; "full" trains all weights of the transformer.
    num_frames, height, width: of the clips and of the sample videos; None for the release's.
    buckets: [num_frames, height, width] of the clips, in place of one size for all; a clip is in the longest that it
        fills, of these in the one of the nearest aspect ratio. A bucket of one frame takes images too.
    mesh: "DP,SP,TP", or "DP,SP,TP,fsdp" to shard weights and moments over all devices; None for one device.
    batch: clips per step, all micro-batches of `loop.accumulate` together.
    caption_dropout: share of captions replaced by the empty one, which classifier-free guidance needs.
    min_snr: weight the loss of a clip by min(SNR, min_snr) / (SNR + 1), where SNR is the signal-to-noise ratio at its
        timestep (arXiv 2303.09556, for v-prediction; 5 is usual). For a diffusion schedule, that of CogVideoX. None:
        all the same.
    id_token: a word before each caption, by which a prompt asks for what is learned; sample prompts are used as they
        are.
    image_dropout: of image-to-video models: share of clips that are trained without their first frame; None: the
        release's.
    image_noise: mean and standard deviation of the logarithm of sigma, the noise that is added to the pixels of the
        first frame, or to what an inpainting model sees of the clip, anew in each step; None: the release's.
    remat: true or "full": recompute each block in the backward pass: a third more time, and memory for the activations,
        and on a mesh with FSDP the gathered weights, of one block only. "attention": the same, but on a TPU the result
        of each attention is stored, as many bytes as its queries, and attention is not recomputed. "offload": as
        "attention", and what is stored, the input of each block too, is in the host's memory. false or "none": nothing
        is recomputed, which needs the most memory. "auto": the fastest of these that fits, by compiling them; a run
        that is resumed goes on with the same.
    loop: the training loop. Its `dtype` is also that of the weights that are not trained, and of the preparation.
    """

    clips: Path
    out: Path
    model: str | None = None
    revision: str | None = None
    variant: str | None = None
    method: str = "lora"
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    buckets: tuple[tuple[int, int, int], ...] = ()
    mesh: str | None = None
    batch: int = 1
    caption_dropout: float = 0.1
    min_snr: float | None = None
    id_token: str | None = None
    image_dropout: float | None = None
    image_noise: tuple[float, float] | None = None
    remat: Remat | Literal["auto"] = True
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    timesteps: TimestepConfig = field(default_factory=TimestepConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    loop: LoopTable
    seed: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def trainer(self) -> LoopConfig:
        """The settings of the `Trainer`."""
        return LoopConfig(**vars(self.loop), seed=self.seed, optimizer=self.optimizer)

    def __post_init__(self) -> None:
        lora, accumulate = self.lora, self.trainer.accumulate  # `trainer` checks the seed
        noise = self.image_noise or (0.0, 0.0)
        law, mean, std, shift = (getattr(self.timesteps, name) for name in ("law", "mean", "std", "shift"))
        require(
            self,
            ("method", self.method in METHODS, " or ".join(METHODS)),
            ("batch", is_count(self.batch, MAX_COUNT), COUNT),
            ("batch", self.batch % accumulate == 0, f"a multiple of loop.accumulate, {accumulate}"),
            ("caption_dropout", 0 <= self.caption_dropout <= 1, "0 to 1"),
            ("min_snr", self.min_snr is None or 0 < self.min_snr <= MAX_FLOAT32, "a finite number above 0"),
            ("image_dropout", 0 <= (self.image_dropout or 0) <= 1, "0 to 1"),
            ("image_noise", all(map(is_finite_number, noise)) and noise[1] >= 0, "a mean, and a deviation, 0 or more"),
            ("lora.rank", lora.rank is None or is_count(lora.rank, MAX_RANK), f"1 to {MAX_RANK}"),
            ("lora.init", lora.init is None or self.method == "lora", 'none, with method "full"'),
            ("lora.quantize", lora.quantize in (None, *KINDS), " or ".join(KINDS)),
            ("lora.quantize", lora.quantize is None or self.method == "lora", 'none, with method "full"'),
            ("lora.alpha", lora.alpha is None or 0 < lora.alpha <= MAX_FLOAT32, "a finite number above 0"),
            ("timesteps.law", law is None or law in LAWS, " or ".join(LAWS)),
            ("timesteps.mean", mean is None or is_finite_number(mean), "a finite number"),
            ("timesteps.std", std is None or 0 < std <= MAX_FLOAT32, "a finite number above 0"),
            ("timesteps.shift", shift is None or 0 < shift <= MAX_FLOAT32, "a finite number above 0"),
            ("sample.every", is_count(self.sample.every, MAX_COUNT), COUNT),
            ("sample.frames", is_count(self.sample.frames, MAX_COUNT), COUNT),
            ("validation.clips", 0 <= self.validation.clips <= MAX_COUNT, f"0 to {MAX_COUNT}"),
            ("validation.every", is_count(self.validation.every, MAX_COUNT), COUNT),
        )


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> TrainingConfig:
    """Read a TOML file.

    Args:
        overrides: dotted key ("loop.steps") -> value that replaces the file's.

    Raises:
        InputError: the file cannot be read; or keys are unknown, missing or of a wrong type, all in one message; or
            values are out of range, those of one table in one message.
    """
    try:
        raw = tomllib.loads(_read_text(path))
    except (ValueError, RecursionError) as e:  # also a number of thousands of digits, and brackets as deep
        raise InputError(f"{path} is not TOML: {e}") from e
    for dotted, value in (overrides or {}).items():
        table, _, key = dotted.rpartition(".")
        target = raw.setdefault(table, {}) if table else raw
        if isinstance(target, dict):
            target[key] = value
    faults = []
    for key in ("clips", "out"):
        try:
            if isinstance(raw.get(key), str | Path):
                raw[key] = expand_user(raw[key])
        except InputError as e:  # an unknown user in ~user
            faults.append(f"  {key}: {e}")
    loop = raw.setdefault("loop", {})
    for key in ("seed", "optimizer"):
        if isinstance(loop, dict) and loop.pop(key, None) is not None:
            faults.append(f"  loop.{key}: unknown key; it stands at the top of the file")
    faults += [fault.removesuffix(" or null") for fault in faults_of(TrainingConfig, raw)]  # TOML has no null
    if faults:
        raise InputError(f"{path} is not a training configuration ({len(faults)} faults):\n" + "\n".join(faults))
    return typed(TrainingConfig, raw)


def config_json(config: TrainingConfig) -> dict[str, Any]:
    """All settings as JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def config_of_json(values: Mapping[str, Any]) -> TrainingConfig:
    """The inverse of `config_json`."""
    return typed(TrainingConfig, values)


def _read_text(path: Path) -> str:
    check_kind(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"cannot read the training settings {path}: {e}") from e
