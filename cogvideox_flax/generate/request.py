"""Everything that a user can ask of a run: each option once, with its default and its help. `resolve` checks it.

No JAX, so that the command line answers at once.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from jaxtyping import Float

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.clips import FITS
from cogvideox_flax.io.limits import MAX_WRITTEN_FPS

if TYPE_CHECKING:
    from cogvideox_flax.generate.media import Media
    from cogvideox_flax.schedulers import Scheduler

DTYPES = ("bfloat16", "float32", "float16")

STAGES = ("encode", "denoise", "decode")
"""Of a run in stages. "run" is all of them as one program."""

GUIDANCE = ("cfg", "cfg_zero", "apg")
"""Forms of guidance; see `guidance`."""

STEP_CACHES = (
    *("deepcache", "residual", "taylorseer", "first_block", "dbcache", "teacache", "magcache"),
    *("pab", "fastercache"),
)
"""What a cached step computes; see `predict.forms`."""

THRESHOLDS = {"teacache": 0.1, "first_block": 0.05, "dbcache": 0.08, "magcache": 0.06}
"""Form of the step cache with a threshold -> its default, that of its authors (TeaCache's slowest)."""

MAX_SEED = 2**32 - 1

MAX_VIDEOS = 10_000
"""Videos of one request."""

WHAT, INPUTS, SAMPLING, LONG, CACHE, OUTPUT = (
    "what to make",
    "pictures and clips",
    "sampling and guidance",
    "long clips",
    "step cache",
    "decoding",
)
"""The groups of options, as a reader thinks of them."""

Stage = Literal["encode", "denoise", "decode", "generate"]


@dataclass(frozen=True)
class Option:
    """How an option is given on the command line.

    help: what it does, and its default.
    group: the heading in the help under which it stands.
    stage: the first stage that needs it; "generate": none of the stages alone.
    recorded: whether the settings in a run directory hold it.
    flags: other names of the flag.
    parse: text -> value; ValueError or InputError where it cannot be; None: by the field's type.
    choices: text -> value, for options of few values.
    common: whether the short help shows it.
    for_media: whether encoding pictures and clips needs it too.
    planned: whether a forecast depends on it.
    json: the type of its value in a JSON file; None: that of the field.
    metavar, repeat: as argparse has them; repeat: each use adds a value.
    """

    help: str
    group: str = ""
    stage: Stage = "denoise"
    recorded: bool = True
    flags: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    choices: Mapping[str, Any] | None = None
    metavar: str | None = None
    repeat: bool = False
    common: bool = False
    for_media: bool = False
    planned: bool = False
    json: Any = None


def options_of(kind: type) -> dict[str, Option]:
    """Field of a dataclass -> its option."""
    fields = dataclasses.fields(kind)
    return {field.name: field.metadata["option"] for field in fields if "option" in field.metadata}


class _AdapterRecord(TypedDict):
    file: str
    scale: float


class AdapterRecord(_AdapterRecord, total=False):
    """An adapter, as the settings of a run hold it; alpha where it was given."""

    alpha: float


class MediaFacts(TypedDict):
    """A picture or clip, as the settings of a run hold it; see `media.Media`."""

    file: str
    sha256: str
    height: int
    width: int
    num_frames: int


def option(default: Any, help: str, **how: Any) -> Any:
    """A field of the request that is an option of the command line; `how`: as for `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **how)})


def _media_option(help: str, common: bool = False) -> Any:
    """A field for pictures or clips."""
    how: dict[str, Any] = {"parse": str, "metavar": "FILE", "repeat": True, "json": list[MediaFacts]}
    return option(None, help, group=INPUTS, stage="encode", common=common, **how)


def parse_lora(text: str) -> dict[str, Any]:
    """'my.safetensors:0.8:alpha=32' -> file, scale, alpha; a colon that no number follows is part of the name."""
    file, alpha = _before_number(text, ":alpha=")
    file, scale = _before_number(file, ":")
    return {"file": file, "scale": 1.0 if scale is None else scale} | ({} if alpha is None else {"alpha": alpha})


def _before_number(text: str, mark: str) -> tuple[str, float | None]:
    """'a:2' -> 'a' and 2; what does not end so -> itself and None."""
    before, _, number = text.rpartition(mark)
    try:
        return (before, float(number)) if before else (text, None)
    except ValueError:
        return text, None


def parse_schedule(text: str) -> list[int]:
    """'11,45,4' -> [11, 45, 4].

    Raises:
        InputError: not three whole numbers.
    """
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"step_cache_schedule must be START,END,INTERVAL such as 11,45,4; got {text!r}")
    return [int(part) for part in parts]


_SIDE = "pixels; default: the release's, or what suits the picture"


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate. None stands for what the release's authors recommend; `resolve` fills it in.

    prompt: one prompt or a list, each a video of one batch.
    negative_prompt: what to steer away from; one for all or one per prompt; None is "". Used where
        guidance is on.
    latents: initial standard normal noise float32 [B, T, h, w, C] in place of random noise; extra latent frames count.
    output_type: "uint8", "float" or "latent"; see `GenerationResult`.
    lora: adapters of this run, each a file or a hub id, "FILE:SCALE", or a mapping with file and scale; None stands for
        those that the pipeline has loaded.
    noise: the sampler's noise [N, B, T, h, w, C] for every step that is done, in place of random noise.
    image, last_image: a path, a PIL image or uint8 [H, W, 3]. One for all prompts, or a list with one each.
    video, control_video: a path, a folder of PNGs or uint8 [F, H, W, 3] at the model's frame rate; as many.
    mask_video: as a video; or one picture for all of its frames, [H, W, 3] in Python; as many.
    text_features: features in place of prompts, which are then "": `prompt_embeds`, float [B, L, E], with guidance also
        `negative_prompt_embeds`; for HunyuanVideo-1.5 also those with _mask, _2 and _mask_2.
    encoder_noise: "image", "last_image", "video" or "mask_video" -> standard normal [B, T, h, w, C], in place of random
        noise, of the encoder's posterior. A clip's extra latent frames do not count. [B, F, H, W, 3] for inpainting
        models with `add_noise_in_inpaint_model`: what is added to "image" or, with "mask_video", to the video.
    one_program: run everything, tokens to frames, as one compiled program, all components loaded at once.
    same_noise: each video of the batch gets the noise that it would get alone; else each gets noise of its own.
    The help of the other fields says what they are.
    """

    prompt: str | Sequence[str]
    negative_prompt: str | Sequence[str] | None = option(
        "", "what to steer away from", group=WHAT, stage="encode", common=True
    )
    num_frames: int | None = option(
        None,
        "such as 49; default: the release's, or what the video has",
        group=WHAT,
        common=True,
        for_media=True,
        planned=True,
    )
    height: int | None = option(None, _SIDE, group=WHAT, common=True, for_media=True, planned=True)
    width: int | None = option(None, _SIDE, group=WHAT, common=True, for_media=True, planned=True)
    num_inference_steps: int | None = option(
        None, "default: the release's, such as 50", group=SAMPLING, flags=("--steps",), common=True, planned=True
    )
    guidance_scale: float | None = option(
        None, "default: the checkpoint's, such as 6; 1 turns guidance off", group=SAMPLING, common=True, planned=True
    )
    use_dynamic_cfg: bool | Literal["index"] | None = option(
        None,
        "guidance that changes over the steps: as released (timestep) or rising (index); default: the release's",
        group=SAMPLING,
        flags=("--dynamic-cfg",),
        choices={"off": False, "timestep": True, "index": "index"},
    )
    scheduler: str | Scheduler | None = option(  # noqa: RUF009
        None,
        "the sampler, such as ddim, dpm, euler, uni_pc; default: the release's",
        group=SAMPLING,
        common=True,
        planned=True,
    )
    seed: int = option(0, f"0 to {MAX_SEED}; default: 0", group=SAMPLING, common=True, for_media=True)
    latents: Float[Any, "B T h w C"] | None = dataclasses.field(default=None, compare=False)
    output_type: str = "uint8"
    _: KW_ONLY
    guidance: str = option(
        "cfg",
        "how the prompt weighs: cfg as released; cfg_zero scales the half without the prompt, apg leaves out what only "
        "makes colours stronger; for large guidance scales; default: cfg",
        group=SAMPLING,
        choices={name: name for name in GUIDANCE},
    )
    guidance_rescale: float = option(
        0.0,
        "0 to 1: against colours that a large guidance scale makes too strong, such as 0.7; default: 0",
        group=SAMPLING,
    )
    guidance_interval: Sequence[float] | None = option(
        None,
        "guidance in a part of the steps, such as 0,0.6: the others take half the time; default: all",
        group=SAMPLING,
        metavar="START,STOP",
    )
    skip_layer: int | None = option(
        None,
        "away from what the model predicts without this block, such as 11 of 42: clearer shapes, half a guided step "
        "more work in the first fifth of the steps; default: off",
        group=SAMPLING,
        metavar="BLOCK",
        planned=True,
    )
    skip_layer_scale: float = option(1.0, "of --skip-layer; default: 1", group=SAMPLING)
    timesteps: Sequence[float] | None = option(
        None,
        "those that the denoiser sees, such as 999,749,499,249, in place of the sampler's own: each step leads to the "
        "next of them; for models that were distilled to a few",
        group=SAMPLING,
        metavar="T,T,...",
        planned=True,
    )
    distilled: str | None = option(
        None,
        "steps, timesteps, sampler and guidance of a model that was distilled to a few steps, such as tdm; off: not "
        "even those of an adapter that is known by its name; see docs/few_steps.md",
        group=SAMPLING,
        recorded=False,
        planned=True,
        metavar="NAME",
    )
    force: bool = option(
        False,
        "go on at a size at which the model gives no usable video",
        group=WHAT,
        for_media=True,
        planned=True,
    )
    lora: Sequence[Any] | None = option(
        None,
        "an adapter and its strength; see docs/adapters.md",
        group=WHAT,
        common=True,
        parse=parse_lora,
        metavar="FILE|HUB_ID[:SCALE]",
        repeat=True,
        json=list[AdapterRecord],
    )
    num_videos: int = option(
        1,
        "videos of each prompt, of seed, seed + 1, ...; default: 1",
        group=WHAT,
        stage="generate",
        recorded=False,
        common=True,
    )
    image: Any = _media_option(  # noqa: RUF009
        "the first frame, for image-to-video and inpainting models (without --model an embedded one): PNG, JPEG or "
        "WebP; once for all prompts, or once for each",
        common=True,
    )
    last_image: Any = _media_option(  # noqa: RUF009
        "the last frame too, for inpainting models and checkpoints trained on both"
    )
    video: Any = _media_option(  # noqa: RUF009
        "a clip to start from, for text-to-video and inpainting models: a video file or a folder of PNGs",
        common=True,
    )
    control_video: Any = _media_option(  # noqa: RUF009
        "a clip of poses, edges or depths to follow, for control models: a video file or a folder of PNGs"
    )
    mask_video: Any = _media_option(  # noqa: RUF009
        "what of the video is made anew, for inpainting models: white is, black stays; a video file, a folder of PNGs, "
        "or one picture for all frames"
    )
    strength: float | None = option(
        None,
        "how much of the video is changed: above 0 to 1, which forgets it; default: 0.8, with a mask 1",
        group=INPUTS,
        common=True,
    )
    fit: str = option(
        "crop",
        "what happens to pictures of another aspect ratio: crop uses their middle, stretch is the reference's way; "
        "default: crop",
        group=INPUTS,
        stage="encode",
        choices={name: name for name in FITS},
    )
    image_scale: float | None = option(
        None,
        "factor of the pictures' latents; default: as released. 1.5-I2V divides by 0.7, where its authors' own code "
        "has 1; users report first frames nearer to the picture with 1",
        group=INPUTS,
        stage="encode",
    )
    text_features: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)
    encoder_noise: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)
    sparse_attention: str | None = option(
        None,
        "for HunyuanVideo-1.5: tiles of the video attend to those around them alone (sliding), or also to the most "
        "important ones (selective), as its sparse checkpoints were trained; default: all tokens to all",
        group=SAMPLING,
        choices={"sliding": "sliding", "selective": "selective"},
        planned=True,
    )
    positions: str | None = option(
        None,
        "for clips longer than in training: riflex lowers the rotary frequency that makes them repeat; default: as "
        "trained",
        group=LONG,
        choices={"riflex": "riflex"},
        planned=True,
    )
    window: int | None = option(
        None,
        "frames that are denoised at once, such as 49: longer clips are made in overlapping windows, in the memory of "
        "one; default: the whole clip",
        group=LONG,
        planned=True,
    )
    window_overlap: int | None = option(
        None, "frames that two windows share; default: a third of one", group=LONG, planned=True
    )
    step_cache: str | None = option(
        None,
        "leave out work in some steps: faster, another video (docs/step_cache.md); default: every step is full",
        group=CACHE,
        choices={name: name for name in STEP_CACHES},
        planned=True,
    )
    step_cache_schedule: Sequence[int] | None = option(
        None,
        "which of the steps, counted from 0, are full: those before START, then every INTERVAL-th before END, and all "
        "from END on; default: 11,45,4 for 50 steps, START and END scaled for others, about half of the steps",
        group=CACHE,
        parse=parse_schedule,
        metavar="START,END,INTERVAL",
        planned=True,
    )
    step_cache_threshold: float | None = option(
        None,
        "a step is full when something has changed by more; higher is faster; default: "
        + ", ".join(f"{form} {threshold:g}" for form, threshold in THRESHOLDS.items()),
        group=CACHE,
        planned=True,
    )
    step_cache_full: Sequence[int] | None = option(
        None,
        "the full steps, counted from 0, as a run with first_block logs them",
        group=CACHE,
        metavar="N,N,...",
        planned=True,
    )
    step_cache_ratios: Sequence[float] | None = option(
        None,
        "for magcache, which measures and logs them in a run without",
        group=CACHE,
        metavar="R,R,...",
        planned=True,
    )
    compiled_loop: bool = option(
        False, "run all steps as one compiled program", group=SAMPLING, recorded=False, planned=True
    )
    tiling: bool = option(False, "decode in tiles: less memory, slightly different", group=OUTPUT, stage="decode")
    fps: int | None = option(None, f"1 to {MAX_WRITTEN_FPS}; default: the release's", group=OUTPUT, stage="decode")
    noise: Float[Any, "N B T h w C"] | None = dataclasses.field(default=None, compare=False)
    one_program: bool = False
    same_noise: bool = False


@dataclass(frozen=True, kw_only=True)
class FilledRequest(GenerationRequest):
    """A request whose every None that stands for a recommendation was filled in: that of a `run.Run`."""

    if TYPE_CHECKING:
        prompt: list[str]
        negative_prompt: list[str]
        num_frames: int
        height: int
        width: int
        num_inference_steps: int
        guidance_scale: float
        use_dynamic_cfg: bool | Literal["index"]
        scheduler: str | Scheduler
        lora: list[Mapping[str, Any]] | None
        fps: int
        image: list[Media] | None
        last_image: list[Media] | None
        video: list[Media] | None
        control_video: list[Media] | None
        mask_video: list[Media] | None


def options(*stages: Stage) -> dict[str, Option]:
    """Field of the request -> its option, for those of these stages."""
    return {name: option for name, option in options_of(GenerationRequest).items() if option.stage in stages}


@cache
def option_names() -> dict[str, str]:
    """Every name of an option of the request, such as `num_inference_steps` and `steps`, to its field."""
    names = {name: name for name in options_of(GenerationRequest)}
    flags = [(flag, name) for name, each in options_of(GenerationRequest).items() for flag in each.flags]
    return names | {flag.lstrip("-").replace("-", "_"): name for flag, name in flags}


@cache
def types_of(kind: type) -> dict[str, Any]:
    """Field of a dataclass of options -> its type; a sampler is held by its name."""
    return typing.get_type_hints(kind, localns={"Scheduler": str})


def json_type(name: str) -> Any:
    """The type that the value of a field of the request has in a JSON file."""
    found = options_of(GenerationRequest).get(name)
    return types_of(GenerationRequest)[name] if found is None or found.json is None else found.json


def given_options(request: GenerationRequest) -> frozenset[str]:
    """The options that a request gives: those that are neither None nor their default."""

    def is_given(field: dataclasses.Field[Any]) -> bool:
        value = getattr(request, field.name)
        is_default = isinstance(value, str | bool | int | float) and value == field.default
        return "option" in field.metadata and value is not None and not is_default

    return frozenset(field.name for field in dataclasses.fields(GenerationRequest) if is_given(field))


def recorded(*stages: Stage) -> list[str]:
    """Fields of the request, of these stages, that decide what a run computes: its results hold them."""
    return [name for name, option in options(*stages).items() if option.recorded]
