"""Everything that a user can ask of a run: each option once, with its default, its help and what it takes.

No JAX and no arrays, so that the command line and the server answer at once.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.limits import MAX_CRF, MAX_WRITTEN_FPS
from cogvideox_flax.io.values import expected_of, is_finite_number, short_repr, typed

if TYPE_CHECKING:
    from jaxtyping import Float

    from cogvideox_flax.generate.media import Media
    from cogvideox_flax.schedulers import Scheduler

DTYPES = ("bfloat16", "float32", "float16")

STAGES = ("encode", "denoise", "decode")
"""Of a run in stages. "run" is all of them as one program."""

GUIDANCE = ("cfg", "cfg_zero", "apg")
"""Forms of guidance; see `guidance`."""


@dataclass(frozen=True)
class StepCacheForm:
    """A form of the step cache.

    path: MODULE:CLASS in `generate.predict`.
    threshold: its default, that of its authors (TeaCache's slowest); None: its full steps are a schedule.
    has_ratios: whether its full steps follow from ratios that an earlier run measured.
    needs_guidance: whether its cached steps compute one half of guidance.
    """

    path: str
    threshold: float | None = None
    has_ratios: bool = False
    needs_guidance: bool = False

    @property
    def decides_itself(self) -> bool:
        """Whether each step decides, once for all videos of a batch, if it is full."""
        return self.threshold is not None and not self.has_ratios


STEP_CACHES = {
    "deepcache": StepCacheForm("step_cache:DeepCache"),
    "residual": StepCacheForm("step_cache:ResidualCache"),
    "taylorseer": StepCacheForm("parts:TaylorSeer"),
    "first_block": StepCacheForm("adaptive:FirstBlocks", 0.05),
    "dbcache": StepCacheForm("adaptive:DBCache", 0.08),
    "teacache": StepCacheForm("adaptive:TeaCache", 0.1),
    "magcache": StepCacheForm("adaptive:MagCache", 0.06, has_ratios=True),
    "pab": StepCacheForm("parts:PyramidBroadcast"),
    "fastercache": StepCacheForm("parts:FasterCache", needs_guidance=True),
}
"""Name -> form of the step cache."""

MAX_SEED = 2**32 - 1

RANDOM = "random"
"""In place of a seed on the command line."""

MAX_VIDEOS = 10_000
"""Videos of one request."""

MAX_STEPS = 1_000_000

MAX_INT = 2**63 - 1
"""Of any whole number that is given; most options have a range of their own."""

WHAT, INPUTS, SAMPLING, LONG, CACHE, OUTPUT = (
    "what to make",
    "images and clips",
    "sampling and guidance",
    "long clips",
    "step cache",
    "decoding",
)
"""The groups of options, as a reader thinks of them."""

Stage = Literal["encode", "denoise", "decode", "generate"]


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, or without an upper end.

    is_open: `low` itself is not one of them.
    """

    low: float
    high: float | None = None
    is_open: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.is_open else self.low <= value) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"above {self.low}" if self.is_open else f"of {self.low} or more"
        return f"{'above' if self.is_open else 'from'} {self.low} to {self.high}"


@dataclass(frozen=True)
class Option:
    """What an option takes, what it does, and how it is given on the command line.

    help: what it does; `help_of` adds the range and the default.
    unset: what its default None stands for.
    range: of its number, or of each of its numbers.
    length: how many numbers it takes, for options of several; 0: one or more.
    unit: of its numbers.
    group: the heading in the help under which it stands.
    stage: the first stage that needs it; "generate": none of the stages alone.
    recorded: whether the settings in a run directory hold it.
    flags: other names of the flag.
    parse: text -> value; ValueError or InputError where it cannot be; None: by the field's type.
    choices: text -> value, for options of few values.
    words: texts that the command line takes in place of a value and resolves itself.
    common: whether the short help shows it.
    for_media: whether encoding images and clips needs it too.
    affects_forecast: whether a forecast depends on it.
    json: the type of its value in a JSON file; None: that of the field.
    metavar, repeat: as argparse has them; repeat: each use adds a value.
    """

    help: str
    unset: str = ""
    range: Range | None = None
    length: int | None = None
    unit: str = ""
    group: str = ""
    stage: Stage = "denoise"
    recorded: bool = True
    flags: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    choices: Mapping[str, Any] | None = None
    words: tuple[str, ...] = ()
    metavar: str | None = None
    repeat: bool = False
    common: bool = False
    for_media: bool = False
    affects_forecast: bool = False
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
    """An image or clip, as the settings of a run hold it; see `media.Media`."""

    file: str
    sha256: str
    height: int
    width: int
    num_frames: int


def option(default: Any, help: str, **how: Any) -> Any:
    """A field of the request that is an option of the command line; `how`: as for `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **how)})


def _media_option(help: str, common: bool = False) -> Any:
    """A field for images or clips."""
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


def _side_option(side: str) -> Any:
    """A field for the height or the width."""
    unset = "the release's, or what suits the image"
    how: dict[str, Any] = {"common": True, "for_media": True, "affects_forecast": True}
    return option(None, f"{side} in pixels", unset=unset, unit="pixels", group=WHAT, **how)


def _names(names: Iterable[str]) -> dict[str, str]:
    """Choices that are called what they are."""
    return {name: name for name in names}


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate. None stands for what the release's authors recommend; `resolve` fills it in.

    prompt: one prompt or a list, each a video of one batch.
    negative_prompt: what to steer away from; one for all or one per prompt; None is "". Used where
        guidance is on.
    latents: initial standard normal noise float32 [B, T, h, w, C] in place of random noise; T includes extra latent
        frames.
    output_type: "uint8" or "float" frames [B, F, H, W, 3], or "latent" [B, T, h, w, C]; see `GenerationResult`.
    lora: adapters of this run, each a file or a hub id, "FILE:SCALE", or a mapping with file and scale; None stands for
        those that the pipeline has loaded.
    noise: the scheduler's noise [N, B, T, h, w, C] for every step that is done, in place of random noise.
    image, last_image: a path, a PIL image or uint8 [H, W, 3]. One for all prompts, or a list with one each.
    video, control_video: a path, a folder of images, a list of PIL images or uint8 [F, H, W, 3] at the
        model's frame rate; as many.
    mask_video: as a video; or one image for all of its frames, [H, W, 3] in Python; as many.
    text_features: features in place of prompts, which are then "": `prompt_embeds`, float [B, L, E], with guidance also
        `negative_prompt_embeds`; for HunyuanVideo-1.5 also those with _mask, _2 and _mask_2.
    encoder_noise: "image", "last_image", "video" or "mask_video" -> standard normal [B, T, h, w, C], in place of random
        noise, of the encoder's posterior. A clip's extra latent frames do not count. [B, F, H, W, 3] for inpainting
        models with `add_noise_in_inpaint_model`: what is added to "image" or, with "mask_video", to the video.
    one_program: run everything, tokens to frames, as one compiled program, all components loaded at once.
    same_noise: each video of the batch gets the noise that it would get alone; else each gets noise of its own.
    The help of the other fields says what they are, and their `Option` what they take: see `check_option`.
    """

    prompt: str | Sequence[str]
    negative_prompt: str | Sequence[str] | None = option(
        "", "prompt to steer away from", group=WHAT, stage="encode", common=True
    )
    num_frames: int | None = option(
        None,
        "number of frames, such as 49",
        unset="the release's, or what the video has",
        unit="frames",
        group=WHAT,
        common=True,
        for_media=True,
        affects_forecast=True,
    )
    height: int | None = _side_option("height")
    width: int | None = _side_option("width")
    num_inference_steps: int | None = option(
        None,
        "number of denoising steps",
        unset="the release's, such as 50",
        group=SAMPLING,
        flags=("--steps",),
        common=True,
        affects_forecast=True,
    )
    guidance_scale: float | None = option(
        None,
        "weight of the prompt; 1 turns guidance off",
        unset="the checkpoint's, such as 6",
        group=SAMPLING,
        common=True,
        affects_forecast=True,
    )
    use_dynamic_cfg: bool | Literal["index"] | None = option(
        None,
        "guidance that changes over the steps: as released (timestep) or rising (index)",
        unset="the release's",
        group=SAMPLING,
        flags=("--dynamic-cfg",),
        choices={"off": False, "timestep": True, "index": "index"},
    )
    scheduler: str | Scheduler | None = option(  # noqa: RUF009
        None,
        "scheduler, such as ddim, dpm, euler, uni_pc",
        unset="the release's",
        group=SAMPLING,
        common=True,
        affects_forecast=True,
    )
    seed: int = option(
        0,
        "seed, or random",
        range=Range(0, MAX_SEED),
        group=SAMPLING,
        words=(RANDOM,),
        common=True,
        for_media=True,
    )
    latents: Float[Any, "B T h w C"] | None = dataclasses.field(default=None, compare=False)
    output_type: Literal["uint8", "float", "latent"] = "uint8"
    _: KW_ONLY
    guidance: str = option(
        "cfg",
        "guidance: cfg (as released), cfg_zero (CFG-Zero*), apg (less oversaturation at large scales)",
        group=SAMPLING,
        choices=_names(GUIDANCE),
    )
    guidance_rescale: float = option(
        0.0,
        "share of a correction against the oversaturation of a large guidance scale, such as 0.7",
        range=Range(0, 1),
        group=SAMPLING,
    )
    guidance_interval: Sequence[float] | None = option(
        None,
        "the part of the steps that has guidance, such as 0,0.6; the others take half the time",
        unset="all",
        range=Range(0, 1),
        length=2,
        group=SAMPLING,
        metavar="START,STOP",
    )
    skip_layer: int | None = option(
        None,
        "skip-layer guidance: steer away from the prediction without this block, such as 11 of 42: sharper shapes; "
        "half a step more in the first fifth of the steps",
        unset="off",
        range=Range(0),
        group=SAMPLING,
        metavar="BLOCK",
        affects_forecast=True,
    )
    skip_layer_scale: float = option(1.0, "weight of skip-layer guidance", group=SAMPLING)
    timesteps: Sequence[float] | None = option(
        None,
        "timesteps that the denoiser sees, such as 999,749,499,249, in place of the scheduler's own; each step leads "
        "to the next of them; for models that were distilled to a few",
        length=0,
        group=SAMPLING,
        metavar="T,T,...",
        affects_forecast=True,
    )
    distilled: str | None = option(
        None,
        "settings (steps, timesteps, scheduler, guidance) of a model that was distilled to a few steps, such as tdm; "
        "off: not even those of an adapter that is known by its name; see docs/few_steps.md",
        group=SAMPLING,
        recorded=False,
        affects_forecast=True,
        metavar="NAME",
    )
    force: bool = option(
        False,
        "go on at a size at which the model gives no usable video",
        group=WHAT,
        for_media=True,
        affects_forecast=True,
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
        "videos of each prompt, with seed, seed + 1, ...",
        range=Range(1, MAX_VIDEOS),
        group=WHAT,
        stage="generate",
        recorded=False,
        common=True,
    )
    image: Any = _media_option(  # noqa: RUF009
        "the first frame, for image-to-video and inpainting models (without --model an embedded one); once for "
        "all prompts, or once for each",
        common=True,
    )
    last_image: Any = _media_option(  # noqa: RUF009
        "the last frame too, for inpainting models and checkpoints trained on both"
    )
    video: Any = _media_option(  # noqa: RUF009
        "a clip to start from, for text-to-video and inpainting models: a video file or a folder of images",
        common=True,
    )
    control_video: Any = _media_option(  # noqa: RUF009
        "a clip of poses, edges or depths to follow, for control models: a video file or a folder of images"
    )
    mask_video: Any = _media_option(  # noqa: RUF009
        "a mask of the video, for inpainting models: white is made anew, black stays; a video file, a folder of "
        "images, or one image for all frames"
    )
    strength: float | None = option(
        None,
        "share of the steps to do; 1 ignores the video",
        unset="0.8, with a mask 1",
        range=Range(0, 1, is_open=True),
        group=INPUTS,
        common=True,
    )
    fit: str = option(
        "crop",
        "images of another aspect ratio: crop uses their middle, stretch distorts them as the reference does",
        group=INPUTS,
        stage="encode",
        choices=_names(("crop", "stretch")),
    )
    image_scale: float | None = option(
        None,
        "factor of the images' latents. 1.5-I2V divides by 0.7, where its authors' own code has 1; users report first "
        "frames nearer to the image with 1",
        unset="as released",
        range=Range(0, is_open=True),
        group=INPUTS,
        stage="encode",
    )
    text_features: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)
    encoder_noise: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)
    sparse_attention: str | None = option(
        None,
        "attention between tiles, for HunyuanVideo-1.5: neighbouring ones alone (sliding), or also the most important "
        "ones (selective), as its sparse checkpoints were trained",
        unset="all tokens to all",
        group=SAMPLING,
        choices=_names(("sliding", "selective")),
        affects_forecast=True,
    )
    positions: str | None = option(
        None,
        "positions of clips longer than in training: riflex lowers the rotary frequency that makes them repeat",
        unset="as trained",
        group=LONG,
        choices=_names(("riflex",)),
        affects_forecast=True,
    )
    window: int | None = option(
        None,
        "frames that are denoised at once, such as 49; longer clips are made in overlapping windows, in the memory of "
        "one",
        unset="the whole clip",
        unit="frames",
        group=LONG,
        affects_forecast=True,
    )
    window_overlap: int | None = option(
        None,
        "frames that two windows share",
        unset="a third of a window",
        range=Range(1),
        unit="frames",
        group=LONG,
        affects_forecast=True,
    )
    step_cache: str | None = option(
        None,
        "leave out work in some steps: faster, another video; see docs/step_cache.md",
        unset="every step is full",
        group=CACHE,
        choices=_names(STEP_CACHES),
        affects_forecast=True,
    )
    step_cache_schedule: Sequence[int] | None = option(
        None,
        "full steps, counted from 0: those before START, then every INTERVAL-th before END, and all from END on",
        unset="11,45,4 for 50 steps, START and END scaled for others, about half of the steps",
        range=Range(1, MAX_STEPS),
        length=3,
        group=CACHE,
        metavar="START,END,INTERVAL",
        affects_forecast=True,
    )
    step_cache_threshold: float | None = option(
        None,
        "change above which a step is full; higher is faster",
        unset=", ".join(f"{name} {form.threshold:g}" for name, form in STEP_CACHES.items() if form.threshold),
        range=Range(0),
        group=CACHE,
        affects_forecast=True,
    )
    step_cache_full: Sequence[int] | None = option(
        None,
        "the full steps, counted from 0, as a run with first_block logs them",
        range=Range(0, MAX_STEPS),
        length=0,
        group=CACHE,
        metavar="N,N,...",
        affects_forecast=True,
    )
    step_cache_ratios: Sequence[float] | None = option(
        None,
        "ratios of magcache; a run without them measures and logs them",
        length=0,
        group=CACHE,
        metavar="R,R,...",
        affects_forecast=True,
    )
    compiled_loop: bool = option(
        False, "run all steps as one compiled program", group=SAMPLING, recorded=False, affects_forecast=True
    )
    tiling: bool = option(False, "decode in tiles: less memory, slightly different", group=OUTPUT, stage="decode")
    fps: int | None = option(
        None,
        "frame rate of the file",
        unset="the release's",
        range=Range(1, MAX_WRITTEN_FPS),
        unit="frames per second",
        group=OUTPUT,
        stage="decode",
    )
    crf: int | None = option(
        None,
        "constant rate factor of H.264 in an .mp4: lower is better and larger",
        unset="17, a loss that is about invisible",
        range=Range(0, MAX_CRF),
        group=OUTPUT,
        stage="decode",
    )
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
    """Field of a dataclass of options -> its type, of arrays Any; a scheduler is held by its name."""
    return typing.get_type_hints(kind, localns={"Scheduler": str, "Float": typing.Annotated})


def check_option(name: str, value: Any, kind: type = GenerationRequest) -> Any:
    """Return a value of an option as its type.

    Args:
        kind: the dataclass of options.

    Raises:
        InputError: it is of another type, none of the choices, out of range, not finite, or not so many numbers.
    """
    hint, option = types_of(kind)[name], options_of(kind).get(name, Option(""))
    try:
        result = typed(hint, value)
    except ValueError:
        result = _REFUSED
    if result is _REFUSED or not _is_taken(option, result):
        is_huge = isinstance(value, int) and option.range is None and abs(value) > MAX_INT
        words = f"a whole number of at most {MAX_INT}" if is_huge else expected(option, hint)
        raise InputError(f"{name} is {short_repr(value)}; expected {words}")
    return result


_REFUSED = object()


def _is_taken(option: Option, value: Any) -> bool:
    """Whether a value of an option's type is one that the option takes."""
    if value is None or isinstance(value, bool):
        return True
    if option.choices is not None:
        return value in option.choices.values()
    if option.length is not None:
        return len(value) == (option.length or len(value) or 1) and all(
            _is_taken(dataclasses.replace(option, length=None), each) for each in value
        )
    if isinstance(value, int):
        return value in (option.range or Range(-MAX_INT, MAX_INT))
    return not isinstance(value, float) or (is_finite_number(value) and (option.range is None or value in option.range))


def expected(option: Option, hint: Any) -> str:
    """What an option takes, in words."""
    if option.choices is not None and all(name == value for name, value in option.choices.items()):
        return " or ".join(option.choices)
    words = expected_of(hint).replace(" in quotes", "").removesuffix(" or null")
    words = words if option.range is None else f"{words} {option.range} {option.unit}".rstrip()
    return f"{words}: {option.metavar}" if option.length else words


def help_of(field: dataclasses.Field[Any]) -> str:
    """The help of an option: what it does, its range, its default."""
    option, default = field.metadata["option"], field.default
    if isinstance(default, int | float) and not isinstance(default, bool):
        default = f"{default:g}"
    has_ends = option.range is not None and (option.range.is_open or option.range.high not in (None, MAX_STEPS))
    limits = f"{option.range} {option.unit}".rstrip() if has_ends else ""
    said = f"default: {option.unset or default}" if option.unset or (default and default is not None) else ""
    return "; ".join(part for part in (option.help, limits, said) if part)


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
