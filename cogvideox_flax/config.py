"""What the released config files say, as frozen dataclasses, and the table of releases.

`from_hf` reads the JSON that diffusers and transformers write: unknown keys are dropped, missing ones get the
reference's class defaults, and a value that would change the computation in a way we do not implement is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io.values import is_count, is_finite_number, shown


def _require(component: str, raw: Mapping[str, Any], **expected: Any) -> None:
    """Refuse config values that the implementation does not cover, all at once."""
    faults = [
        f"  {key}: got {raw[key]!r}, supported is {value!r}"
        for key, value in expected.items()
        if key in raw and raw[key] is not None and raw[key] != value
    ]
    if faults:
        raise CheckpointError(
            f"{component} config is not a CogVideoX configuration we implement:\n" + "\n".join(faults)
        )


MAX = {"layers": 1000, "layers_per_block": 100, "temporal_compression": 64}
"""Field -> its largest value, where that decides how much is looped over."""

DEFAULT_MAX = 2**24


_VALID: dict[str, Callable[[Any, int], bool]] = {
    "int": is_count,
    "int | None": lambda value, most: value is None or is_count(value, most),
    "float": lambda value, most: is_finite_number(value) and value > 0,
    "bool": lambda value, most: isinstance(value, bool),
    "str": lambda value, most: isinstance(value, str),
    "tuple[int, ...]": lambda value, most: (
        isinstance(value, tuple) and 0 < len(value) <= 16 and all(is_count(n, most) for n in value)
    ),
}
"""Field annotation -> whether a value that came out of a JSON file is one, and not beyond the largest."""

_EXPECTED = {
    "int": "a whole number from 1 to {most}",
    "int | None": "a whole number from 1 to {most}, or null",
    "float": "a finite number above 0",
    "bool": "true or false",
    "str": "a text",
    "tuple[int, ...]": "up to 16 whole numbers from 1 to {most}",
}


class _Config:
    """Shared by the component configs: checked values, dict in, dict out."""

    def __post_init__(self) -> None:
        faults = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            kind, value, most = str(field.type), getattr(self, field.name), MAX.get(field.name, DEFAULT_MAX)
            if not _VALID[kind](value, most):
                faults.append(f"  {field.name}: got {shown(value)}, expected {_EXPECTED[kind].format(most=most)}")
        if faults:
            raise CheckpointError(f"{type(self).__name__} read from a config file is invalid:\n" + "\n".join(faults))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote; unknown and missing keys are errors, since we wrote the file ourselves."""
        fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(set(raw) - set(fields))
        missing = sorted(n for n, f in fields.items() if n not in raw and f.default is dataclasses.MISSING)
        if unknown or missing:
            raise CheckpointError(f"{cls.__name__}: unknown keys {unknown}, missing keys {missing}")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(_Config):
    """How prompts are cut: `max_length` ids, end-of-sequence included (`tokenizer_config.json`)."""

    max_length: int = 226

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], max_length: int | None = None) -> Self:
        """max_length: the transformer's `max_text_seq_length`, which wins over the tokenizer's own limit."""
        return cls(max_length=max_length or int(raw.get("model_max_length", 226)))


@dataclass(frozen=True, kw_only=True)
class TextEncoderConfig(_Config):
    """The encoder half of T5 v1.1 (transformers `T5Config`)."""

    vocab_size: int = 32128
    width: int = 4096
    layers: int = 24
    heads: int = 64
    head_dim: int = 64
    mlp_width: int = 10240
    position_buckets: int = 32
    position_max_distance: int = 128
    norm_eps: float = 1e-6

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        _require("text_encoder", raw, feed_forward_proj="gated-gelu", dense_act_fn="gelu_new", model_type="t5")
        # transformers' T5Config defaults describe t5-small; a saved file always holds these six.
        needed = ("vocab_size", "d_model", "num_layers", "num_heads", "d_kv", "d_ff")
        missing = [key for key in needed if key not in raw]
        if missing:
            raise CheckpointError(f"text_encoder/config.json lacks {missing}; expected a T5 v1.1 encoder config")
        return cls(
            vocab_size=raw["vocab_size"],
            width=raw["d_model"],
            layers=raw["num_layers"],
            heads=raw["num_heads"],
            head_dim=raw["d_kv"],
            mlp_width=raw["d_ff"],
            position_buckets=raw.get("relative_attention_num_buckets", 32),
            position_max_distance=raw.get("relative_attention_max_distance", 128),
            norm_eps=raw.get("layer_norm_epsilon", 1e-6),
        )


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(_Config):
    """The 3D diffusion transformer (diffusers `CogVideoXTransformer3DModel`).

    `sample_height`, `sample_width` are in latent pixels, `sample_frames` in video frames: the size of training.
    """

    layers: int = 30
    heads: int = 30
    head_dim: int = 64
    in_channels: int = 16
    out_channels: int = 16
    patch_size: int = 2
    patch_size_t: int | None = None
    text_width: int = 4096
    text_length: int = 226
    time_width: int = 512
    ofs_width: int | None = None
    rotary: bool = False
    learned_positions: bool = False
    patch_bias: bool = True
    attention_bias: bool = True
    sample_height: int = 60
    sample_width: int = 90
    sample_frames: int = 49
    temporal_compression: int = 4
    spatial_interpolation_scale: float = 1.875
    temporal_interpolation_scale: float = 1.0
    norm_eps: float = 1e-5

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        _require(
            "transformer",
            raw,
            activation_fn="gelu-approximate",
            timestep_activation_fn="silu",
            flip_sin_to_cos=True,
            freq_shift=0,
            norm_elementwise_affine=True,
        )
        learned = raw.get("use_learned_positional_embeddings", False)
        rotary = raw.get("use_rotary_positional_embeddings", False)
        if learned and not rotary:
            raise CheckpointError("transformer config has learned positions without rotary ones; no release has that")
        patch_size_t = raw.get("patch_size_t")
        return cls(
            layers=raw.get("num_layers", 30),
            heads=raw.get("num_attention_heads", 30),
            head_dim=raw.get("attention_head_dim", 64),
            in_channels=raw.get("in_channels", 16),
            out_channels=raw.get("out_channels") or 16,
            patch_size=raw.get("patch_size", 2),
            patch_size_t=patch_size_t,
            text_width=raw.get("text_embed_dim", 4096),
            text_length=raw.get("max_text_seq_length", 226),
            time_width=raw.get("time_embed_dim", 512),
            ofs_width=raw.get("ofs_embed_dim"),
            rotary=rotary,
            learned_positions=learned,
            # the reference's linear patch embedding (1.5) has a bias whatever `patch_bias` says
            patch_bias=raw.get("patch_bias", True) or patch_size_t is not None,
            attention_bias=raw.get("attention_bias", True),
            sample_height=raw.get("sample_height", 60),
            sample_width=raw.get("sample_width", 90),
            sample_frames=raw.get("sample_frames", 49),
            temporal_compression=raw.get("temporal_compression_ratio", 4),
            spatial_interpolation_scale=raw.get("spatial_interpolation_scale", 1.875),
            temporal_interpolation_scale=raw.get("temporal_interpolation_scale", 1.0),
            norm_eps=raw.get("norm_eps", 1e-5),
        )

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def patch_volume(self) -> int:
        """Latent pixels in one token."""
        return (self.patch_size_t or 1) * self.patch_size**2

    def check_dtype(self, dtype: str | None) -> None:
        """Refuse float16 for the rotary releases (5b and 1.5): trained in bfloat16, they overflow in it.

        Raises:
            InputError: that is what was asked for.
        """
        if self.rotary and dtype == "float16":
            raise InputError(
                "float16 gives NaN (black video) with CogVideoX-5b and 1.5, which were trained in bfloat16; "
                "use bfloat16 or float32"
            )

    @property
    def learned_shape(self) -> tuple[int, int]:
        """(positions, width) of the stored table of a `learned_positions` model: text, then video at sample size."""
        frames = (self.sample_frames - 1) // self.temporal_compression + 1
        grid = (self.sample_height // self.patch_size) * (self.sample_width // self.patch_size)
        return self.text_length + frames * grid, self.width


@dataclass(frozen=True, kw_only=True)
class VAEConfig(_Config):
    """The causal video VAE (diffusers `AutoencoderKLCogVideoX`). `sample_height`, `sample_width` are in pixels."""

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 16
    block_channels: tuple[int, ...] = (128, 256, 256, 512)
    layers_per_block: int = 3
    norm_groups: int = 32
    norm_eps: float = 1e-6
    temporal_compression: int = 4
    scaling_factor: float = 1.15258426
    invert_scale_latents: bool = False
    sample_height: int = 480
    sample_width: int = 720

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        _require("vae", raw, act_fn="silu", use_quant_conv=False, use_post_quant_conv=False)
        for key in ("down_block_types", "up_block_types"):
            odd = {b for b in raw.get(key, ()) if not b.startswith("CogVideoX")}
            if odd:
                raise CheckpointError(f"vae config: {key} has {sorted(odd)}; expected CogVideoX blocks only")
        return cls(
            in_channels=raw.get("in_channels", 3),
            out_channels=raw.get("out_channels", 3),
            latent_channels=raw.get("latent_channels", 16),
            block_channels=tuple(raw.get("block_out_channels", (128, 256, 256, 512))),
            layers_per_block=raw.get("layers_per_block", 3),
            norm_groups=raw.get("norm_num_groups", 32),
            norm_eps=raw.get("norm_eps", 1e-6),
            temporal_compression=int(raw.get("temporal_compression_ratio", 4)),
            scaling_factor=raw.get("scaling_factor", 1.15258426),
            invert_scale_latents=raw.get("invert_scale_latents", False),
            sample_height=raw.get("sample_height", 480),
            sample_width=raw.get("sample_width", 720),
        )

    @property
    def temporal_levels(self) -> int:
        """How many of the first blocks halve (encoder) or double (decoder) the frame count."""
        return self.temporal_compression.bit_length() - 1

    @property
    def spatial_compression(self) -> int:
        return 2 ** (len(self.block_channels) - 1)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(_Config):
    """The noise schedule (diffusers `CogVideoXDDIMScheduler`, `CogVideoXDPMScheduler`)."""

    kind: str = "ddim"
    num_train_timesteps: int = 1000
    beta_start: float = 0.00085
    beta_end: float = 0.012
    snr_shift_scale: float = 3.0
    rescale_betas_zero_snr: bool = True
    set_alpha_to_one: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta_start <= self.beta_end < 1:
            raise CheckpointError(
                f"the noise schedule goes from beta {self.beta_start} to {self.beta_end}; expected it to rise, below 1"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        kinds = {"CogVideoXDDIMScheduler": "ddim", "CogVideoXDPMScheduler": "dpm"}
        name = raw.get("_class_name", "CogVideoXDDIMScheduler")
        if name not in kinds:
            raise CheckpointError(f"scheduler config names {name}; expected one of {sorted(kinds)}")
        _require(
            "scheduler",
            raw,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            timestep_spacing="trailing",
            trained_betas=None,  # clip_sample and steps_offset do nothing here, in the reference too
        )
        return cls(
            kind=kinds[name],
            num_train_timesteps=raw.get("num_train_timesteps", 1000),
            beta_start=raw.get("beta_start", 0.00085),
            beta_end=raw.get("beta_end", 0.012),
            snr_shift_scale=raw.get("snr_shift_scale", 3.0),
            rescale_betas_zero_snr=raw.get("rescale_betas_zero_snr", True),
            set_alpha_to_one=raw.get("set_alpha_to_one", True),
        )


COMPONENTS = ("text_encoder", "transformer", "vae")
"""The components that have weights, in the order in which a run needs them."""

CONFIG_TYPES: dict[str, type[_Config]] = {
    "tokenizer": TokenizerConfig,
    "text_encoder": TextEncoderConfig,
    "transformer": TransformerConfig,
    "vae": VAEConfig,
    "scheduler": SchedulerConfig,
}


@dataclass(frozen=True, kw_only=True)
class Release:
    """One released model: its component configs and the settings its authors recommend.

    `dtype` is the dtype it was trained in; a bfloat16 release overflows in float16.
    Sizes are (height, width) in pixels; `frame_step` is the rule of the trained frame counts, n * frame_step + 1.
    """

    name: str
    hub_id: str
    transformer: TransformerConfig
    vae: VAEConfig
    scheduler: SchedulerConfig
    text_encoder: TextEncoderConfig = TextEncoderConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    dtype: str = "bfloat16"
    height: int = 480
    width: int = 720
    num_frames: int = 49
    max_frames: int = 49
    frame_step: int = 8
    fps: int = 8
    num_inference_steps: int = 50
    guidance_scale: float = 6.0
    sampler: str = "dpm"
    use_dynamic_cfg: bool = True
    any_size: bool = False  # trained on many sizes: shorter side `height`, longer side up to `width`


_5B = TransformerConfig(layers=42, heads=48, rotary=True)
_1_5 = dataclasses.replace(_5B, patch_size_t=2, sample_height=96, sample_width=170, sample_frames=81)
_VAE_5B = VAEConfig(scaling_factor=0.7)
_VAE_1_5 = VAEConfig(scaling_factor=0.7, invert_scale_latents=True)
_UNSHIFTED = SchedulerConfig(snr_shift_scale=1.0)

RELEASES: dict[str, Release] = {
    release.name: release
    for release in (
        Release(
            name="cogvideox-2b",
            hub_id="zai-org/CogVideoX-2b",
            transformer=TransformerConfig(),
            vae=VAEConfig(),
            scheduler=SchedulerConfig(),
            dtype="float16",
            sampler="ddim",
            use_dynamic_cfg=False,
        ),
        Release(
            name="cogvideox-5b",
            hub_id="zai-org/CogVideoX-5b",
            transformer=_5B,
            vae=_VAE_5B,
            scheduler=_UNSHIFTED,
        ),
        Release(
            name="cogvideox-5b-i2v",
            hub_id="zai-org/CogVideoX-5b-I2V",
            transformer=dataclasses.replace(_5B, in_channels=32, learned_positions=True),
            vae=_VAE_5B,
            scheduler=_UNSHIFTED,
        ),
        Release(
            name="cogvideox1.5-5b",
            hub_id="zai-org/CogVideoX1.5-5B",
            transformer=_1_5,
            vae=_VAE_1_5,
            scheduler=_UNSHIFTED,
            height=768,
            width=1360,
            num_frames=81,
            max_frames=161,
            frame_step=16,
            fps=16,
            any_size=True,
        ),
        Release(
            name="cogvideox1.5-5b-i2v",
            hub_id="zai-org/CogVideoX1.5-5B-I2V",
            transformer=dataclasses.replace(_1_5, in_channels=32, ofs_width=512),
            vae=_VAE_1_5,
            scheduler=_UNSHIFTED,
            height=768,
            width=1360,
            num_frames=81,
            max_frames=161,
            frame_step=16,
            fps=16,
            any_size=True,
        ),
    )
}


def find_release(transformer: TransformerConfig) -> Release | None:
    """The release whose transformer has this architecture, or None.

    The `sample_*` fields do not count: the 1.5 configs were re-uploaded with another nominal size.
    """

    def architecture(config: TransformerConfig) -> TransformerConfig:
        return dataclasses.replace(config, sample_height=1, sample_width=1, sample_frames=1)

    for release in RELEASES.values():
        if architecture(release.transformer) == architecture(transformer):
            return release
    return None


def get_release(name: str) -> Release:
    """The release called `name` (case does not matter).

    Raises:
        InputError: no such release; the message lists those there are.
    """
    try:
        return RELEASES[name.lower()]
    except KeyError:
        raise InputError(f"unknown release {name!r}; known are {', '.join(RELEASES)}") from None
