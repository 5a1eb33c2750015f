"""The keywords of `Pipeline.__call__`: the options of a request in its signature and help, and diffusers' names."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from cogvideox_flax.generate.request import GenerationRequest, help_of, option_names, options_of

Call = TypeVar("Call", bound=Callable[..., Any])

CALL = {
    "generator": "seed=0 is the seed, [0, 1] one for each video; latents= and noise= take the noise itself",
    "callback_on_step_end": "callback=f, called as f(step, timestep, latents), which may return latents to go on with "
    "or True to stop; or iterate over pipe.run(request)",
    "callback_on_step_end_tensor_inputs": "callback=f is given the latents [B, T, h, w, C]",
    "eta": "leave it out: the schedulers are those of the releases, and DDIM's eta is 0",
    "sigmas": "timesteps=[...]; for flow matching, 1000 sigma after the shift",
    "return_dict": "leave it out: the result has .frames, .fps and .metadata",
    "attention_kwargs": "lora='FILE:SCALE' is an adapter and its strength",
    "max_sequence_length": "leave it out: it is the checkpoint's own",
    "control_video_latents": "control_video= takes the clip",
    "torch_dtype": "dtype='bfloat16' of from_pretrained",
}
"""Argument of a diffusers pipeline -> what takes its place."""

METHODS = {
    "to": "from_pretrained(where, dtype=..., mesh=...) places the weights; JAX uses the devices that it finds",
    "save_pretrained": "`cogvideox_flax.checkpoint.save`, or the directory that from_pretrained reads: pipe.native_dir",
    "save_lora_weights": "fine-tuning writes its adapters: `cogvideox train`",
    "encode_image": "pipe.encode(GenerationRequest(prompt, image=...))",
    "get_timesteps": "pipe.resolve(request).steps.timesteps",
    "prepare_control_latents": "control_video= takes the clip",
    "encode_prompt": "pipe.encode(prompt)",
    "decode_latents": "pipe.decode(latents)",
    "check_inputs": "pipe.resolve(request)",
    "prepare_latents": "latents= takes noise of the shape pipe.resolve(request).size.latent_shape(batch)",
    "set_progress_bar_config": "progress=False in a call",
    "progress_bar": "progress=False in a call",
    "fuse_lora": "leave it out: adapters are always added to the weights",
    "unfuse_lora": "pipe.unload_lora_weights()",
    "disable_lora": "pipe.set_adapters([])",
    "enable_lora": "pipe.set_adapters(pipe.get_list_adapters())",
    "delete_adapters": "pipe.unload_lora_weights(), and load those that stay",
    "set_lora_device": "leave it out: adapters are added to the weights",
    "load_lora_into_transformer": "pipe.load_lora_weights(file)",
    "lora_state_dict": "pipe.load_lora_weights(file)",
    "components": "attributes by their names, such as pipe.transformer; `pipe.component(name)`",
    "from_pipe": "pipe takes images and clips as far as its checkpoint does: pipe(prompt, image=...)",
    "from_config": "from_pretrained(where)",
    "maybe_free_model_hooks": "pipe.release()",
    "remove_all_hooks": "pipe.release()",
    "fuse_qkv_projections": "leave it out: it changes no number here",
    "unfuse_qkv_projections": "leave it out: it changes no number here",
    "enable_vae_tiling": "tiling=True in a call",
    "enable_vae_slicing": "leave it out: the videos of a batch are decoded one after the other",
    "enable_model_cpu_offload": "the command line holds one component at a time; in Python pipe.release(name)",
    "enable_sequential_cpu_offload": "from_pretrained(mesh=...) splits weights over devices; or take int8 weights",
    "enable_group_offload": "from_pretrained(mesh=...) splits weights over devices; or take int8 weights",
    "enable_xformers_memory_efficient_attention": "leave it out: attention never holds all scores",
    "disable_xformers_memory_efficient_attention": "leave it out: attention never holds all scores",
    "enable_attention_slicing": "leave it out: attention never holds all scores",
    "disable_attention_slicing": "leave it out: attention never holds all scores",
}
"""Method of a diffusers pipeline -> what takes its place."""

DIFFUSERS_OUTPUT_TYPES: dict[str, Literal["uint8", "float"]] = {"np": "float", "pil": "uint8"}
"""diffusers' output_type -> ours; "pil" is a list of PIL images for each video."""

PT = (
    "output_type is 'pt', a tensor of PyTorch; take 'float', of which torch.from_numpy(video.frames).movedim(-1, 2) is "
    "that tensor"
)
"""The answer to diffusers' output_type "pt"."""


def check_keywords(named: Mapping[str, Any]) -> None:
    """Refuse keywords that are no options, with the name to use.

    Raises:
        TypeError: as Python does for keywords that a function does not have.
    """
    fields = [field.name for field in dataclasses.fields(GenerationRequest)]
    faults = []
    for name in named:
        if name in CALL:
            faults.append(f"{name} is diffusers' name; here: {CALL[name]}")
        elif name not in fields:
            names = {each: each for each in fields} | option_names()
            near = get_close_matches(name, names, 1)
            faults.append(f"there is no option {name!r}" + (f"; did you mean {names[near[0]]!r}?" if near else ""))
    if faults:
        raise TypeError("\n".join(faults))


def with_options(call: Call) -> Call:
    """The method, with the options of a request in its signature and in its docstring."""
    of_method = [each for each in inspect.signature(call).parameters.values() if each.name not in ("options", "named")]
    prompt = [each.name for each in of_method].index("prompt") + 1
    positional: list[inspect.Parameter] = []
    keywords: list[inspect.Parameter] = []
    for field in dataclasses.fields(GenerationRequest)[1:]:
        kind = inspect.Parameter.KEYWORD_ONLY if field.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameter = inspect.Parameter(field.name, kind, default=field.default, annotation=field.type)
        (keywords if field.kw_only else positional).append(parameter)
    parameters = [*of_method[:prompt], *positional, *keywords, *of_method[prompt:]]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    known, lines = options_of(GenerationRequest), []
    fields = {field.name: field for field in dataclasses.fields(GenerationRequest)}
    for group in {option.group: None for option in known.values()}:
        lines += ["", f"{group}:"]
        for text in (f"{name}: {help_of(fields[name])}" for name, option in known.items() if option.group == group):
            lines += textwrap.wrap(
                text, 112, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False
            )
    own, options = inspect.cleandoc(call.__doc__ or ""), "\n".join(lines)
    call.__doc__ = f"{own}\n\nOptions; None is what the release recommends.\n{options}"
    return call
