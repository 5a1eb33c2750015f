"""HunyuanVideo-1.5's transformer in the names of its authors and of ComfyUI: the same checkpoint as in diffusers'."""

from __future__ import annotations

import re

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_hunyuan_video_transformer_to_diffusers
from safetensors.torch import save_file

from cogvideox_flax.checkpoint import read_manifest
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import ConversionError
from tests.support import hunyuan_layout
from tests.support.released_layout import randomise

_REFINER = ("txt_in.individual_token_refiner.blocks.0.", "context_embedder.token_refiner.refiner_blocks.0.")
TENCENT = {
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
    f"{_REFINER[0]}norm1": f"{_REFINER[1]}norm1",
    f"{_REFINER[0]}norm2": f"{_REFINER[1]}norm2",
    f"{_REFINER[0]}self_attn_q": f"{_REFINER[1]}attn.to_q",  # joined below
    f"{_REFINER[0]}self_attn_k": f"{_REFINER[1]}attn.to_k",
    f"{_REFINER[0]}self_attn_v": f"{_REFINER[1]}attn.to_v",
    f"{_REFINER[0]}self_attn_proj": f"{_REFINER[1]}attn.to_out.0",
    f"{_REFINER[0]}mlp.fc1": f"{_REFINER[1]}ff.net.0.proj",
    f"{_REFINER[0]}mlp.fc2": f"{_REFINER[1]}ff.net.2",
    f"{_REFINER[0]}adaLN_modulation.1": f"{_REFINER[1]}norm_out.linear",
    "byt5_in.layernorm": "context_embedder_2.norm",
    "byt5_in.fc1": "context_embedder_2.linear_1",
    "byt5_in.fc2": "context_embedder_2.linear_2",
    "byt5_in.fc3": "context_embedder_2.linear_3",
    "vision_in.proj.0": "image_embedder.norm_in",
    "vision_in.proj.1": "image_embedder.linear_1",
    "vision_in.proj.3": "image_embedder.linear_2",
    "vision_in.proj.4": "image_embedder.norm_out",
    "cond_type_embedding": "cond_type_embed",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
}
BLOCK = {
    "img_mod.linear": "norm1.linear",
    "img_attn_q": "attn.to_q",
    "img_attn_k": "attn.to_k",
    "img_attn_v": "attn.to_v",
    "img_attn_q_norm": "attn.norm_q",
    "img_attn_k_norm": "attn.norm_k",
    "img_attn_proj": "attn.to_out.0",
    "img_mlp.fc1": "ff.net.0.proj",
    "img_mlp.fc2": "ff.net.2",
    "txt_mod.linear": "norm1_context.linear",
    "txt_attn_q": "attn.add_q_proj",
    "txt_attn_k": "attn.add_k_proj",
    "txt_attn_v": "attn.add_v_proj",
    "txt_attn_q_norm": "attn.norm_added_q",
    "txt_attn_k_norm": "attn.norm_added_k",
    "txt_attn_proj": "attn.to_add_out",
    "txt_mlp.fc1": "ff_context.net.0.proj",
    "txt_mlp.fc2": "ff_context.net.2",
}
TENCENT |= {f"double_blocks.{i}.{a}": f"transformer_blocks.{i}.{b}" for i in range(2) for a, b in BLOCK.items()}
"""The authors' name of a module -> diffusers', as in scripts/convert_hunyuan_video1_5_to_diffusers.py there."""

COMFYUI = (
    (r"(txt_in\.t_embedder|time_in|time_r_in)\.mlp\.0\.", r"\1.in_layer."),
    (r"(txt_in\.t_embedder|time_in|time_r_in)\.mlp\.2\.", r"\1.out_layer."),
    (r"c_embedder\.linear_1", "c_embedder.in_layer"),
    (r"c_embedder\.linear_2", "c_embedder.out_layer"),
    (r"_mod\.linear", "_mod.lin"),
    (r"_attn_(qkv|proj)\.", r"_attn.\1."),
    (r"mlp\.fc1", "mlp.0"),
    (r"mlp\.fc2", "mlp.2"),
    (r"_attn_q_norm\.weight", "_attn.norm.query_norm.scale"),
    (r"_attn_k_norm\.weight", "_attn.norm.key_norm.scale"),
)
"""The authors' names -> ComfyUI's, which joins q, k and v everywhere."""


def joined(tensors, where):
    """With q, k and v, of the modules whose name begins so, in one."""
    found = {}
    for name, x in tensors.items():
        letter = re.fullmatch(rf"{where}.*_attn_([qkv])\.(weight|bias)", name)
        if letter is None:
            found[name] = x
        elif letter[1] == "q":
            parts = [tensors[name.replace("_attn_q.", f"_attn_{other}.")] for other in "qkv"]
            found[name.replace("_attn_q.", "_attn_qkv.")] = torch.cat(parts)
    return found


def as_authors(module):
    """The module's tensors in the names of the authors."""
    theirs = {ours: name for name, ours in TENCENT.items()}
    found = {}
    for name, x in module.state_dict().items():
        place, _, leaf = name.rpartition(".")
        if place == "norm_out.linear":
            x = torch.cat(x.chunk(2)[::-1])  # shift first
        found[f"{theirs[place]}.{leaf}"] = x.contiguous()
    return joined(found, "txt_in")


def as_comfyui(module):
    found = {}
    for name, x in joined(as_authors(module), "double_blocks").items():
        for pattern, to in COMFYUI:
            name = re.sub(pattern, to, name)
        found[f"model.diffusion_model.{name}"] = x
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "meanflow"])
def module(request):
    return randomise(hunyuan_layout.build("transformer", small=True, use_meanflow=request.param), 0)


@pytest.fixture
def native(module, tmp_path):
    module.save_pretrained(tmp_path / "diffusers" / "transformer")
    convert(tmp_path / "diffusers", tmp_path / "native")
    return tmp_path / "native"


def converted(native, tensors, tmp_path, **options):
    """The hash of the weights of one file, converted into a checkpoint that says what it is."""
    save_file(tensors, tmp_path / "model.safetensors")
    before = read_manifest(native).weights["transformer"]["sha256"]
    convert(tmp_path / "model.safetensors", native, components=["transformer"], **options)
    return before, read_manifest(native).weights["transformer"]["sha256"]


@pytest.mark.parametrize("names", [as_authors, as_comfyui])
def test_the_same_checkpoint(names, module, native, tmp_path, caplog):
    with caplog.at_level("INFO", "cogvideox_flax"):
        before, after = converted(native, names(module), tmp_path)
    assert before == after
    assert "tensors with the names of another layout are given diffusers'" in caplog.text


def test_the_authors_names_are_those_that_diffusers_reads(module):
    """Diffusers' converter of the first HunyuanVideo reads most of them, and gives the module's own tensors."""
    own = module.state_dict()
    found = convert_hunyuan_video_transformer_to_diffusers(dict(as_authors(module)))
    both = found.keys() & own.keys()
    assert len(both) > len(own) / 2 and all(torch.equal(found[name], own[name]) for name in both)
    assert {"norm_out.linear.weight", "transformer_blocks.1.ff.net.2.bias", f"{_REFINER[1]}attn.to_k.bias"} <= both


def test_joined_weights_in_float8(module, native, tmp_path):
    """A scale for each row, or for all, of q, k and v together."""
    stored, exact = as_comfyui(module), {}
    for i, (name, x) in enumerate(list(stored.items())):
        exact[name] = x.to(torch.bfloat16)
        if name.endswith("qkv.weight"):
            scale = x.abs().amax(1, keepdim=True) / 448 if i % 2 else x.abs().max() / 448
            stored[name] = (x / scale).to(torch.float8_e4m3fn)
            stored[name.replace(".weight", ".weight_scale")] = scale
            exact[name] = (stored[name].float() * scale).to(torch.bfloat16)
    _, expected = converted(native, exact, tmp_path, dtype="bfloat16")
    assert converted(native, stored, tmp_path, dtype="bfloat16") == (expected, expected)


def test_what_does_not_map_is_refused(module, native, tmp_path):
    tensors = as_authors(module)
    tensors["double_blocks.0.img_attn_q.weight"] = tensors["double_blocks.0.img_attn_q.weight"][:3].contiguous()
    with pytest.raises(ConversionError, match=r"blocks\.video\.attn\.q\.kernel layer 0: got"):
        converted(native, tensors, tmp_path)
    tensors["transformer_blocks.0.attn.to_q.weight"] = tensors["double_blocks.0.img_attn_q.weight"].clone()
    with pytest.raises(ConversionError, match="holds tensors twice"):
        converted(native, tensors, tmp_path)
    tensors = {name.replace("_attn_q.", "_attn_qkv."): x for name, x in as_authors(module).items()}
    with pytest.raises(ConversionError, match=r"unused   double_blocks\.0\.img_attn_qkv\.weight"):  # an earlier model's
        converted(native, tensors, tmp_path)
