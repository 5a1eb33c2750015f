"""The linear maps of HunyuanVideo-1.5's transformer that can have adapters, and their names in files.

The authors' own model, musubi-tuner and ComfyUI name the maps otherwise than diffusers does, and ComfyUI's files hold
q, k and v as one map.
"""

from __future__ import annotations

import re

from cogvideox_flax.models.model import LoRALayout

_BLOCK, _REFINER = "transformer_blocks.{i}", "context_embedder.token_refiner.refiner_blocks.{i}"


def _of_a_stream(
    stream: str, projections: tuple[str, str, str, str], mlp: str, norm: str
) -> dict[str, str | tuple[str, ...]]:
    """The names of a stream's maps in the authors' model, and those of diffusers."""
    q, k, v, out = (f"{_BLOCK}.attn.{name}" for name in projections)
    theirs = f"double_blocks.{{i}}.{stream}"
    return {
        **{f"{theirs}_attn_{letter}": name for letter, name in zip("qkv", (q, k, v), strict=True)},
        f"{theirs}_attn_proj": out,
        f"{theirs}_mlp.fc1": f"{_BLOCK}.{mlp}.net.0.proj",
        f"{theirs}_mlp.fc2": f"{_BLOCK}.{mlp}.net.2",
        f"{theirs}_mod.linear": f"{_BLOCK}.{norm}.linear",
    }


TENCENT: dict[str, str | tuple[str, ...]] = {
    **_of_a_stream("img", ("to_q", "to_k", "to_v", "to_out.0"), "ff", "norm1"),
    **_of_a_stream("txt", ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"), "ff_context", "norm1_context"),
    "img_in.proj": "x_embedder.proj",
    "time_in.mlp.0": "time_embed.timestep_embedder.linear_1",
    "time_in.mlp.2": "time_embed.timestep_embedder.linear_2",
    "time_r_in.mlp.0": "time_embed.timestep_embedder_r.linear_1",
    "time_r_in.mlp.2": "time_embed.timestep_embedder_r.linear_2",
    "txt_in.t_embedder.mlp.0": "context_embedder.time_text_embed.timestep_embedder.linear_1",
    "txt_in.t_embedder.mlp.2": "context_embedder.time_text_embed.timestep_embedder.linear_2",
    "txt_in.c_embedder.linear_1": "context_embedder.time_text_embed.text_embedder.linear_1",
    "txt_in.c_embedder.linear_2": "context_embedder.time_text_embed.text_embedder.linear_2",
    "txt_in.input_embedder": "context_embedder.proj_in",
    "txt_in.individual_token_refiner.blocks.{i}.self_attn_qkv": (
        f"{_REFINER}.attn.to_q",
        f"{_REFINER}.attn.to_k",
        f"{_REFINER}.attn.to_v",
    ),
    "txt_in.individual_token_refiner.blocks.{i}.self_attn_proj": f"{_REFINER}.attn.to_out.0",
    "txt_in.individual_token_refiner.blocks.{i}.mlp.fc1": f"{_REFINER}.ff.net.0.proj",
    "txt_in.individual_token_refiner.blocks.{i}.mlp.fc2": f"{_REFINER}.ff.net.2",
    "txt_in.individual_token_refiner.blocks.{i}.adaLN_modulation.1": f"{_REFINER}.norm_out.linear",
    "byt5_in.fc1": "context_embedder_2.linear_1",
    "byt5_in.fc2": "context_embedder_2.linear_2",
    "byt5_in.fc3": "context_embedder_2.linear_3",
    "vision_in.proj.1": "image_embedder.linear_1",
    "vision_in.proj.3": "image_embedder.linear_2",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
}
"""Names of the linear maps in the authors' model, which musubi-tuner has too -> diffusers'."""


def _comfyui() -> dict[str, str | tuple[str, ...]]:
    """Names in ComfyUI's model -> diffusers': it renames the authors' maps, and q, k and v of a stream are one."""
    names = {_comfyui_name(name): source for name, source in TENCENT.items() if not re.search("_attn_[qkv]$", name)}
    for stream in ("img", "txt"):
        theirs = f"double_blocks.{{i}}.{stream}_attn"
        names[f"{theirs}.qkv"] = tuple(str(TENCENT[f"{theirs}_{letter}"]) for letter in "qkv")
    return names


def _comfyui_name(name: str) -> str:
    name = re.sub(r"_attn_(qkv|proj)$", r"_attn.\1", name).replace("_mod.linear", "_mod.lin")
    name = name.replace("mlp.fc1", "mlp.0").replace("mlp.fc2", "mlp.2")
    for old, new in (("1", "in_layer"), ("2", "out_layer")):
        name = name.replace(f"c_embedder.linear_{old}", f"c_embedder.{new}")
    return re.sub(r"^(time_in|time_r_in|txt_in\.t_embedder)\.mlp\.([02])$", _in_or_out_layer, name)


def _in_or_out_layer(found: re.Match[str]) -> str:
    return f"{found[1]}.{'in_layer' if found[2] == '0' else 'out_layer'}"


COMFYUI = _comfyui()

LORA = LoRALayout(
    component="transformer",
    maps={
        "q": ("blocks.video.attn.q", "attn.to_q"),
        "k": ("blocks.video.attn.k", "attn.to_k"),
        "v": ("blocks.video.attn.v", "attn.to_v"),
        "out": ("blocks.video.attn.out", "attn.to_out.0"),
        "up": ("blocks.video.mlp.up", "ff.net.0.proj"),
        "down": ("blocks.video.mlp.down", "ff.net.2"),
        "text_q": ("blocks.text.attn.q", "attn.add_q_proj"),
        "text_k": ("blocks.text.attn.k", "attn.add_k_proj"),
        "text_v": ("blocks.text.attn.v", "attn.add_v_proj"),
        "text_out": ("blocks.text.attn.out", "attn.to_add_out"),
        "text_up": ("blocks.text.mlp.up", "ff_context.net.0.proj"),
        "text_down": ("blocks.text.mlp.down", "ff_context.net.2"),
    },
    default_targets=("q", "k", "v", "out"),
    other_names=TENCENT | COMFYUI,
    written={"comfyui": COMFYUI, "kohya": TENCENT},
    swapped=("final_layer.adaLN_modulation.1",),
)
