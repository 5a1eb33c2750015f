"""The nodes: sockets and widgets of ComfyUI on one side, calls of the library on the other.

JAX and torch are imported inside functions: ComfyUI asks for all schemas when it starts, and torch is ComfyUI's own.
Widgets come from the library's tables of options. -1, "default" and an empty text stand for None: what the release's
authors recommend.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import folder_paths
import numpy as np
from comfy_api.latest import ComfyExtension, InputImpl, Types, io
from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.request import (
    DTYPES,
    MAX_STEPS,
    GenerationRequest,
    Option,
    Range,
    help_of,
    options_of,
    types_of,
)
from cogvideox_flax.generate.upscale_options import UpscaleOptions

CATEGORY = "CogVideoX Flax"

MODEL, CONDITIONING, OPTIONS = map(io.Custom, ("COGVIDEOX_FLAX", "COGVIDEOX_FLAX_COND", "COGVIDEOX_FLAX_OPTIONS"))

UNSET, UNSET_NUMBER = "default", -1
"""Widget values that stand for None; that of texts is empty."""

MODEL_FILES = ("model_index.json", "config.json")
"""A folder with one of them is a model."""

EMBEDDED = ("embedded", "embedded-image-to-video")
"""Models that come with the library."""

SCHEDULERS = (
    "ddim",
    "dpm",
    "euler",
    "euler_ancestral",
    "dpmpp_2m",
    "dpmpp_2m_sde",
    "uni_pc",
    "lcm",
    "one_step",
    "flow_match",
)
"""Those of all models; a model refuses what it does not have. (The library's own tables need JAX.)"""

WIDGETS = {
    "num_frames": "num_frames",
    "width": "width",
    "height": "height",
    "steps": "num_inference_steps",
    "cfg": "guidance_scale",
    "seed": "seed",
    "scheduler": "scheduler",
    "denoise_strength": "strength",
}
"""Widgets of a run, by the names that users of ComfyUI know -> options of the request."""

IMAGES = {
    "start_image": ("image", "first frame, for image-to-video and inpainting models"),
    "end_image": ("last_image", "last frame too, for models that take one"),
    "video": ("video", "clip to start from, at the model's frame rate; see denoise_strength"),
    "control_video": ("control_video", "clip of poses, edges or depths to follow, at the model's frame rate"),
}
"""Sockets of images and clips -> option of the request, help."""

OTHERS = ("crf", "negative_prompt", "lora", "mask_video", "compiled_loop")
"""Options with sockets or nodes of their own, one that could be neither watched nor interrupted, and the quality of a
file, which ComfyUI writes itself."""


# --- what goes from node to node


@dataclass(frozen=True)
class Model:
    """An open model, and the adapters that its runs have."""

    pipe: Any
    lora: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A prompt, and its features: a `Conditioning` of the library.

    encoder: what computed them; it does not keep that model open.
    """

    encoder: tuple[Any, ...]
    text: str
    features: Any = field(repr=False)


@dataclass(frozen=True)
class Sampled:
    """Runs and their latents as the library has them, beside the tensor that other nodes see.

    Decoding takes these while `samples` is still the LATENT's tensor: dividing and multiplying again would round.
    """

    samples: Any
    runs: Sequence[tuple[Any, np.ndarray]]


# --- arrays, at the door


def from_images(images: Any) -> np.ndarray:
    """An IMAGE [F, H, W, C] in [0, 1] as uint8 [F, H, W, 3]."""
    return np.rint(images[..., :3].cpu().numpy().clip(0, 1) * 255).astype(np.uint8)


def from_mask(mask: Any) -> np.ndarray:
    """A MASK [F, H, W] as uint8 [F, H, W, 3]; one for all frames as [H, W, 3]."""
    frames = np.repeat(np.rint(mask.cpu().numpy().clip(0, 1) * 255).astype(np.uint8)[..., None], 3, -1)
    return frames[0] if len(frames) == 1 else frames


def to_images(clips: Sequence[np.ndarray]) -> Any:
    """Clips of uint8 frames as one IMAGE. n / 255 is written to a file as n, though ComfyUI rounds down."""
    import torch

    return torch.from_numpy(np.concatenate(clips)) / 255


def to_video(images: Any, fps: float) -> Any:
    return InputImpl.VideoFromComponents(Types.VideoComponents(images=images, frame_rate=Fraction(fps)))


def to_latent(runs: Sequence[tuple[Any, np.ndarray]]) -> dict[str, Any]:
    """A LATENT: samples [B, C, T, h, w] as diffusers' autoencoder takes them: not scaled, no extra latent frames."""
    import torch

    z = [np.asarray(run.model.codec.statistics.denormalize(latents)) for run, latents in runs]
    samples = torch.from_numpy(np.ascontiguousarray(np.moveaxis(np.concatenate(z), -1, 1)))
    return {"samples": samples, "cogvideox_flax": Sampled(samples, runs)}


# --- widgets


def widget(kind: Any, name: str, shown: str | None = None, **more: Any) -> Any:
    """The widget of an option of a dataclass.

    Args:
        shown: its name in ComfyUI; default: the option's.
        more: for the widget.
    """
    declared = kind.__dataclass_fields__[name]
    option, hint, default = declared.metadata["option"], types_of(kind)[name], declared.default
    more |= {"tooltip": help_of(declared), "optional": True}
    id = name if shown is None else shown
    if (choices := choices_of(name, option)) is not None:
        names = [UNSET, *choices] if default is None else list(choices)
        chosen = next((key for key, value in choices.items() if value == default), UNSET)
        return io.Combo.Input(id, options=names, default=chosen, **more)
    if hint is bool:
        return io.Boolean.Input(id, default=default, **more)
    for number, input in ((float, io.Float.Input), (int, io.Int.Input)):
        if number in (hint, *typing.get_args(hint)):
            limits = option.range or Range(0 if default is None else -MAX_STEPS)
            low = UNSET_NUMBER if default is None else limits.low
            high = MAX_STEPS if limits.high is None else limits.high
            step = {} if number is int else {"step": 0.01}
            first = number(UNSET_NUMBER if default is None else default)
            return input(id, default=first, min=number(low), max=number(high), **step, **more)
    return io.String.Input(id, default="", **more)


def choices_of(name: str, option: Option) -> dict[str, Any] | None:
    if name == "scheduler":
        return {name: name for name in SCHEDULERS}
    return None if option.choices is None else dict(option.choices)


def value_of(kind: Any, name: str, value: Any) -> Any:
    """The value of an option that a widget holds; what is no such value is left for the library to refuse."""
    option, default = options_of(kind)[name], kind.__dataclass_fields__[name].default
    if value is None or (default is None and value in ("", UNSET, UNSET_NUMBER)):
        return None
    if option.choices is not None:
        return option.choices.get(value, value)
    if option.length is not None and isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(f"[{value}]")
    return option.parse(value) if option.parse is not None and isinstance(value, str) else value


def values_of(kind: Any, values: dict[str, Any], names: dict[str, str] | None = None) -> dict[str, Any]:
    """Option -> value, for those that say something. names: widget -> option, where they differ."""
    names = {} if names is None else names
    found = {names.get(key, key): value_of(kind, names.get(key, key), value) for key, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


def run_inputs() -> list[Any]:
    """Widgets and sockets of a run."""
    widgets = [
        widget(GenerationRequest, name, shown, **({"control_after_generate": True} if shown == "seed" else {}))
        for shown, name in WIDGETS.items()
    ]
    sockets = [io.Image.Input(name, optional=True, tooltip=tip) for name, (_, tip) in IMAGES.items()]
    mask = io.Mask.Input("mask", optional=True, tooltip="mask of the video, for inpainting models: 1 is made anew")
    return [*widgets, *sockets, mask, OPTIONS.Input("options", optional=True)]


def request_of(model: Model, prompt: str, negative_prompt: str, values: dict[str, Any]) -> GenerationRequest:
    """The request of a run: `values` of `run_inputs`."""
    options = dict(values.get("options") or {})
    options |= values_of(GenerationRequest, {key: values[key] for key in WIDGETS if key in values}, WIDGETS)
    for key, (name, _) in IMAGES.items():
        if (images := values.get(key)) is not None:
            frames = from_images(images)
            options[name] = frames[0] if name in ("image", "last_image") else frames
    if (mask := values.get("mask")) is not None:
        options["mask_video"] = from_mask(mask)
    return GenerationRequest(prompt, negative_prompt, lora=list(model.lora), **options)


# --- runs


@contextmanager
def devices_for(pipe: Any) -> Iterator[None]:
    """ComfyUI's models leave the devices first. A model that does not fit as a whole leaves them after."""
    from comfy import model_management

    model_management.throw_exception_if_processing_interrupted()
    model_management.unload_all_models()
    model_management.soft_empty_cache()
    try:
        yield
    finally:
        if not pipe.fits_at_once():
            pipe.unload()


def watched(pipe: Any, request: GenerationRequest, store: Any, stages: Sequence[str]) -> Iterator[Any]:
    """The events of a run. ComfyUI shows its steps and previews, and its interruption is raised here."""
    from comfy.model_management import throw_exception_if_processing_interrupted
    from comfy.utils import ProgressBar

    from cogvideox_flax.generate.events import LoopBegan, Step
    from cogvideox_flax.generate.journey import generate
    from cogvideox_flax.generate.preview import Preview
    from cogvideox_flax.runtime.settings import in_own_settings

    events = generate(pipe, pipe.resolve(request), store, stages, keep=pipe.fits_at_once())
    preview = None if pipe.manifest.preview_matrix is None else Preview(pipe.manifest)
    if preview is not None:
        events = preview.watch(events)
    with closing(in_own_settings(events)) as own:
        for event in own:
            if isinstance(event, LoopBegan):
                bar = ProgressBar(event.total)
            elif isinstance(event, Step):
                frames = None if preview is None else preview.latest
                bar.update_absolute(int(event.state.step), event.run.num_steps, _shown(event.run, frames))
            throw_exception_if_processing_interrupted()
            yield event


def _shown(run: Any, frames: np.ndarray | None) -> tuple[str, Image.Image, int | None] | None:
    """The middle frame of a preview, in the video's size, as ComfyUI takes it."""
    if frames is None:
        return None
    image = Image.fromarray(frames[0, frames.shape[1] // 2])
    return "JPEG", image.resize((run.size.width, run.size.height), Image.Resampling.BILINEAR), 512


def encoder_of(pipe: Any) -> tuple[Any, ...]:
    return pipe.native_dir, pipe.dtype


def encode_prompt(pipe: Any, text: str) -> Prompt:
    from cogvideox_flax.generate.events import result_of
    from cogvideox_flax.generate.journey import encode_text
    from cogvideox_flax.generate.media import UNSEEN

    needed: dict[str, Any] = {visual.input: [UNSEEN] for visual in pipe.manifest.model.visual if visual.required}
    run = pipe.resolve(GenerationRequest(text, lora=[], **needed))
    return Prompt(encoder_of(pipe), text, result_of(encode_text(pipe, run, negative=False)).on_host())


def decode(pipe: Any, latents: Any, tiling: bool, in_chunks: bool) -> list[np.ndarray]:
    """Latents, scaled, as clips of uint8 frames."""
    from comfy.model_management import throw_exception_if_processing_interrupted

    clips = pipe.decode(latents, tiling=tiling, in_chunks=in_chunks)
    if not in_chunks:
        return list(clips)
    found = []
    for clip in clips:
        frames = []
        for part in clip.parts():  # decoded as it is read
            throw_exception_if_processing_interrupted()
            frames.append(part)
        found.append(np.concatenate(frames))
    return found


# --- nodes


def model_folders() -> dict[str, Path]:
    """Name -> folder of the models in ComfyUI's models/diffusers: released ones and native ones."""
    roots = [Path(root) for root in folder_paths.get_folder_paths("diffusers")]
    files = [file for root in roots for name in MODEL_FILES for file in root.glob(f"*/{name}")]
    return {file.parent.name: file.parent for file in sorted(files)}


class Loader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CogVideoXFlaxLoader",
            display_name="CogVideoX Flax Loader",
            category=CATEGORY,
            description="Opens a model. A checkpoint in diffusers' layout is converted once, into a cache.",
            inputs=[
                io.Combo.Input(
                    "model",
                    options=[*EMBEDDED, *model_folders()],
                    default=EMBEDDED[0],
                    tooltip="a small one that comes with cogvideox-flax, or a folder in models/diffusers",
                ),
                io.String.Input(
                    "path_or_hub_id",
                    default="",
                    optional=True,
                    tooltip="in place of model: a folder, or a hub id such as zai-org/CogVideoX-5b",
                ),
                io.Combo.Input("dtype", options=[UNSET, *DTYPES], default=UNSET, optional=True),
                io.String.Input("mesh", default="", optional=True, tooltip="DP,SP,TP over several devices; empty: one"),
            ],
            outputs=[MODEL.Output(display_name="model")],
        )

    @classmethod
    def execute(cls, model: str, path_or_hub_id: str = "", dtype: str = UNSET, mesh: str = "") -> Any:
        from cogvideox_flax import Pipeline
        from cogvideox_flax.sharding import make_mesh, parse_mesh

        where = path_or_hub_id or model_folders().get(model, model)
        devices = make_mesh(*parse_mesh(mesh)) if mesh else None
        return io.NodeOutput(Model(Pipeline.from_pretrained(where, None if dtype == UNSET else dtype, devices)))


class Lora(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CogVideoXFlaxLora",
            display_name="CogVideoX Flax LoRA",
            category=CATEGORY,
            description="Adds an adapter to the runs of a model; several are chained.",
            inputs=[
                MODEL.Input("model"),
                io.Combo.Input("lora", options=["none", *folder_paths.get_filename_list("loras")], default="none"),
                io.Float.Input("strength", default=1.0, min=-10.0, max=10.0, step=0.01),
                io.String.Input(
                    "path_or_hub_id", default="", optional=True, tooltip="in place of `lora`: a file, or a hub id"
                ),
            ],
            outputs=[MODEL.Output(display_name="model")],
        )

    @classmethod
    def execute(cls, model: Model, lora: str, strength: float, path_or_hub_id: str = "") -> Any:
        if not path_or_hub_id and lora == "none":
            return io.NodeOutput(model)
        file = path_or_hub_id or folder_paths.get_full_path_or_raise("loras", lora)
        return io.NodeOutput(dataclasses.replace(model, lora=(*model.lora, {"file": str(file), "scale": strength})))


class TextEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CogVideoXFlaxTextEncode",
            display_name="CogVideoX Flax Text Encode",
            category=CATEGORY,
            description="A prompt, or a negative one, to what the sampler takes.",
            inputs=[MODEL.Input("model"), io.String.Input("prompt", default="", multiline=True)],
            outputs=[CONDITIONING.Output(display_name="conditioning")],
        )

    @classmethod
    def execute(cls, model: Model, prompt: str) -> Any:
        with devices_for(model.pipe):
            return io.NodeOutput(encode_prompt(model.pipe, prompt))


class Options(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        names = [name for name in options_of(GenerationRequest) if name not in (*WIDGETS.values(), *OTHERS)]
        names = [name for name in names if name not in [option for option, _ in IMAGES.values()]]
        return io.Schema(
            node_id="CogVideoXFlaxOptions",
            display_name="CogVideoX Flax Options",
            category=CATEGORY,
            description="All other options of a run. -1, default and an empty text leave an option out.",
            inputs=[widget(GenerationRequest, name) for name in names],
            outputs=[OPTIONS.Output(display_name="options")],
        )

    @classmethod
    def execute(cls, **values: Any) -> Any:
        return io.NodeOutput(values_of(GenerationRequest, values))


class Sampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CogVideoXFlaxSampler",
            display_name="CogVideoX Flax Sampler",
            category=CATEGORY,
            description="Encodes images and clips, and denoises. -1 and default: as the model's authors recommend.",
            inputs=[
                MODEL.Input("model"),
                CONDITIONING.Input("positive"),
                CONDITIONING.Input("negative"),
                *run_inputs(),
            ],
            outputs=[io.Latent.Output(display_name="samples")],
        )

    @classmethod
    def execute(cls, model: Model, positive: Prompt, negative: Prompt, **values: Any) -> Any:
        from cogvideox_flax.generate.encode import Conditioning
        from cogvideox_flax.generate.events import Denoised
        from cogvideox_flax.generate.store import Memory
        from cogvideox_flax.runtime.global_arrays import fetch

        pipe = model.pipe
        if not positive.encoder == negative.encoder == encoder_of(pipe):
            raise InputError("a prompt was encoded with another model; connect all nodes to one loader")
        with devices_for(pipe):
            run = pipe.resolve(request_of(model, positive.text, negative.text, values))
            text = Conditioning(positive.features.text, negative.features.text if run.guided else None)
            events = watched(pipe, run, Memory(text), ("encode", "denoise"))
            runs = [(event.run, fetch(event.latents)) for event in events if isinstance(event, Denoised)]
        return io.NodeOutput(to_latent(runs))


class Decode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CogVideoXFlaxDecode",
            display_name="CogVideoX Flax Decode",
            category=CATEGORY,
            description="Latents to frames: the sampler's, or [B, C, T, h, w] as diffusers has them, not scaled.",
            inputs=[
                MODEL.Input("model"),
                io.Latent.Input("samples"),
                io.Boolean.Input("enable_vae_tiling", default=False, optional=True, tooltip=_help("tiling")),
            ],
            outputs=[io.Image.Output(display_name="images"), io.Video.Output(display_name="video")],
        )

    @classmethod
    def execute(cls, model: Model, samples: dict[str, Any], enable_vae_tiling: bool = False) -> Any:
        pipe, sampled = model.pipe, samples.get("cogvideox_flax")
        fps, statistics = pipe.manifest.model.defaults.fps, pipe.manifest.model.codec.statistics
        parts: list[tuple[Any, bool]] = []
        if isinstance(sampled, Sampled) and sampled.samples is samples["samples"]:
            fps = sampled.runs[0][0].request.fps
            if all(run.model.codec.statistics == statistics for run, _ in sampled.runs):
                parts = [(latents, run.windows is not None) for run, latents in sampled.runs]
        if not parts:
            z = samples["samples"].float().cpu().numpy()
            parts = [(np.asarray(statistics.normalize(np.moveaxis(z, 1, -1))), False)]
        with devices_for(pipe):
            clips = [clip for part, chunked in parts for clip in decode(pipe, part, enable_vae_tiling, chunked)]
        images = to_images(clips)
        return io.NodeOutput(images, to_video(images, fps))


class Generate(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CogVideoXFlaxGenerate",
            display_name="CogVideoX Flax Generate",
            category=CATEGORY,
            description="Prompt to video in one node. -1 and default: as the model's authors recommend.",
            inputs=[
                MODEL.Input("model"),
                io.String.Input("prompt", default="", multiline=True),
                io.String.Input("negative_prompt", default="", multiline=True),
                *run_inputs(),
            ],
            outputs=[io.Image.Output(display_name="images"), io.Video.Output(display_name="video")],
        )

    @classmethod
    def execute(cls, model: Model, prompt: str, negative_prompt: str, **values: Any) -> Any:
        from cogvideox_flax.generate.events import Finished
        from cogvideox_flax.generate.request import STAGES
        from cogvideox_flax.generate.result import join
        from cogvideox_flax.generate.store import Memory

        with devices_for(model.pipe):
            events = watched(model.pipe, request_of(model, prompt, negative_prompt, values), Memory(), STAGES)
            result = join([event.result for event in events if isinstance(event, Finished)])
        images = to_images(result.frames)
        return io.NodeOutput(images, to_video(images, result.fps))


class Upscale(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="CogVideoXFlaxUpscale",
            display_name="CogVideoX Flax Upscale",
            category=CATEGORY,
            description="Enlarges a clip, with a model that was fine-tuned for it, such as DOVE.",
            inputs=[
                MODEL.Input("model"),
                io.Image.Input("images"),
                *[widget(UpscaleOptions, name) for name in options_of(UpscaleOptions)],
            ],
            outputs=[io.Image.Output(display_name="images")],
        )

    @classmethod
    def execute(cls, model: Model, images: Any, **values: Any) -> Any:
        from comfy.model_management import throw_exception_if_processing_interrupted
        from comfy.utils import ProgressBar

        from cogvideox_flax.generate.upscale import upscale

        def tile_is_done(done: int, total: int) -> None:
            bar.update_absolute(done, total)
            throw_exception_if_processing_interrupted()

        bar, options = ProgressBar(1), UpscaleOptions(**values_of(UpscaleOptions, values))
        with devices_for(model.pipe):
            frames = upscale(model.pipe, from_images(images), options, callback=tile_is_done)
        return io.NodeOutput(to_images([frames]))


def _help(name: str) -> str:
    return options_of(GenerationRequest)[name].help


class Extension(ComfyExtension):
    async def get_node_list(self) -> list[Any]:
        return [Loader, Lora, TextEncode, Options, Sampler, Decode, Generate, Upscale]
