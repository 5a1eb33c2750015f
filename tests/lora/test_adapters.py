"""Files of adapters in every layout: against the same differences added to the reference's weights."""

from __future__ import annotations

import copy
import json
import logging
import re
import shlex
import subprocess
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from cogvideox_flax import Pipeline
from cogvideox_flax.checkpoint import load_transformer, parameters
from cogvideox_flax.checkpoint.quantize import quantize_checkpoint
from cogvideox_flax.cli import main
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.generate.request import parse_lora
from cogvideox_flax.lora import FILE_NAME, describe_lora, export_adapter, merge_files, open_adapter
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.hunyuan_video15.model import HunyuanVideo15
from cogvideox_flax.sharding import make_mesh
from tests.models.test_hunyuan_transformer import inputs as hunyuan_inputs
from tests.models.test_hunyuan_transformer import run_reference as run_hunyuan
from tests.models.test_transformer import inputs, run_ours, run_reference
from tests.support.hunyuan_layout import build
from tests.support.reference import convert_component, make_transformer, random, relative_error, rms_error, save_layout
from tests.support.released_layout import randomise

BAR = 1e-4
RANK = 3


class Model:
    """A reference model, ours with the same weights, and both with an adapter."""

    def __init__(self, family, reference, native, run, run_reference):
        self.family, self.reference, self.model = family, reference, load_transformer(native, "float32")
        self._run, self._run_reference = run, run_reference

    def merged(self, path, scale=1.0, alpha=None):
        config = self.model.config
        record = describe_lora(self.family, path, scale, config, alpha)
        return merge_files(self.family, config, self.model, [record]).denoiser

    def check(self, path, deltas, scale=1.0, alpha=None):
        """Compare outputs; deltas: module of the reference -> what is added to its weight."""
        ours = self._run(self.merged(path, scale, alpha))
        plain = self._run_reference(self.reference)
        with added(self.reference, {name: scale * delta for name, delta in deltas.items()}):
            expected = self._run_reference(self.reference)
        assert relative_error(plain, expected) > 0.01, "the adapter is no trifle"
        assert relative_error(ours, expected) < BAR

    def maps(self, *endings, seed=3):
        """Random A and B of all linear maps and convolutions whose names end so."""
        random = np.random.default_rng(seed)
        found = {}
        for name, module in self.reference.named_modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Conv2d | torch.nn.Conv3d) and name.endswith(endings or ""):
                out, *rest = module.weight.shape
                a = random.normal(size=(RANK, *rest)) / np.sqrt(np.prod(rest))
                found[name] = a.astype(np.float32), (random.normal(size=(out, RANK)) / 4).astype(np.float32)
        return found


@contextmanager
def added(reference, deltas):
    weights = {name: reference.get_submodule(name).weight for name in deltas}
    before = {name: weight.data.clone() for name, weight in weights.items()}
    for name, delta in deltas.items():
        weights[name].data += torch.tensor(delta, dtype=torch.float32)
    try:
        yield
    finally:
        for name, weight in weights.items():
            weight.data = before[name]


def product(a, b, strength=1.0):
    return strength * np.tensordot(b, a, 1)


@pytest.fixture(scope="module", params=["cogvideox-5b", "cogvideox1.5-5b-i2v"])
def cogvideox(request, tmp_path_factory):
    reference = make_transformer(request.param)
    native = convert_component("transformer", reference, tmp_path_factory.mktemp("model"))
    args = inputs(reference, 4, 8, 12)
    return Model(
        CogVideoX, reference, native, lambda model: run_ours(model, *args), lambda module: run_reference(module, *args)
    )


@pytest.fixture(scope="module")
def hunyuan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hunyuan")
    reference = randomise(build("transformer", small=True, use_meanflow=True))
    reference.save_pretrained(folder / "hf" / "transformer")
    convert(folder / "hf", folder / "native")
    given = hunyuan_inputs(True) | {"next_timestep": [900.5, 0.0]}
    latents, timestep = random(0, 2, 3, 4, 6, 9), [987.654, 12.25]
    call = jax.jit(lambda model: model(latents, jnp.array(timestep), **jax.tree.map(jnp.array, given)))
    return Model(
        HunyuanVideo15,
        reference,
        folder / "native",
        call,
        lambda module: run_hunyuan(module, latents, timestep, given),
    )


# --- CogVideoX ---


def named(maps, prefix, a, b, alpha=None):
    tensors = {}
    for name, (one, two) in maps.items():
        tensors |= {f"{prefix}{name}.{a}.weight": one, f"{prefix}{name}.{b}.weight": two}
        if alpha is not None:
            tensors[f"{prefix}{name}.alpha"] = np.array(alpha, np.float32)
    return tensors


def kohya(maps, alpha):
    """CogVideoX-Fun's: dots become underscores, and matrices of convolutions are convolutions."""
    tensors = {}
    for name, (a, b) in maps.items():
        start = "lora_unet__" + name.replace(".", "_")
        wide = b.reshape(*b.shape, *[1] * (a.ndim - 2))
        tensors |= {f"{start}.lora_down.weight": a, f"{start}.lora_up.weight": wide}
        if alpha is not None:
            tensors[f"{start}.alpha"] = np.array(alpha, np.float32)
    return tensors


PEFT = json.dumps({"r": RANK, "lora_alpha": 5})
LAYOUTS = {
    "diffusers": (lambda maps: named(maps, "transformer.", "lora_A", "lora_B"), {}, 1),
    "PEFT": (lambda maps: named(maps, "", "lora_A.default", "lora_B.default"), {"lora_adapter_metadata": PEFT}, 5 / 3),
    "base model": (lambda maps: named(maps, "base_model.model.", "lora_A", "lora_B"), {}, 1),
    "finetrainers": (lambda maps: named(maps, "transformer.", "lora_A", "lora_B"), {"lora_config": PEFT}, 5 / 3),
    "older": (lambda maps: named(maps, "transformer.", "lora.down", "lora.up", 2.0), {}, 2 / 3),
    "kohya": (lambda maps: kohya(maps, 1.5), {}, 0.5),
    "kohya without alpha": (lambda maps: kohya(maps, None), {}, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_linear_map_in_every_layout(cogvideox, tmp_path, layout):
    write, metadata, strength = LAYOUTS[layout]
    maps = cogvideox.maps()
    assert {"patch_embed.proj", "proj_out", "time_embedding.linear_1", "norm_out.linear"} < maps.keys()
    save_file(write(maps), tmp_path / "a.safetensors", {"format": "pt", **metadata})
    deltas = {name: product(*pair, strength) for name, pair in maps.items()}
    cogvideox.check(tmp_path / "a.safetensors", deltas, 0.5)


def sat_tensors(maps):
    """As the SAT trainer names them: q, k and v are numbered matrices of one map."""
    tensors = {}
    for name, (a, b) in maps.items():
        _, layer, _, last = name.replace("to_out.0", "out").split(".")
        place = f"model.diffusion_model.transformer.layers.{layer}.attention."
        which = "dense" if last == "out" else "query_key_value"
        number = {"to_q": 0, "to_k": 1, "to_v": 2, "out": 0}[last]
        tensors |= {f"{place}{which}.matrix_A.{number}": a, f"{place}{which}.matrix_B.{number}": b}
    return tensors


@pytest.mark.parametrize(("alpha", "strength"), [(None, 1 / 3), (6, 2)])
def test_sat(cogvideox, tmp_path, alpha, strength):
    """Its alpha is 1 where nobody says another."""
    maps = cogvideox.maps("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0")
    save_file(sat_tensors(maps), tmp_path / "sat.safetensors")
    deltas = {name: product(*pair, strength) for name, pair in maps.items()}
    cogvideox.check(tmp_path / "sat.safetensors", deltas, alpha=alpha)


def test_the_line_that_makes_safetensors_of_a_pickle(cogvideox, tmp_path):
    maps = cogvideox.maps("attn1.to_q", "attn1.to_out.0")
    state = {name: torch.tensor(value) for name, value in sat_tensors(maps).items()}
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": state | {"model.x.original.weight": torch.ones(3)}}, path)
    with pytest.raises(CheckpointError, match="never read") as error:
        cogvideox.merged(path)
    (line,) = [line for line in str(error.value).splitlines() if line.startswith("  python -c")]
    subprocess.run(shlex.split(line), cwd=tmp_path, check=True, timeout=120)
    found = load_file(tmp_path / "adapter.safetensors")
    assert found.keys() == state.keys()
    cogvideox.check(tmp_path / "adapter.safetensors", {name: product(*pair, 1 / 3) for name, pair in maps.items()})


# --- PEFT's folders ---

PLAIN = {"r": 4, "lora_alpha": 16, "target_modules": ["to_q", "to_v", "ff.net.2"]}
PEFT_CONFIGS = {
    "alpha": {},
    "rsLoRA": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"to_q": 2, "^transformer_blocks.1.ff.net.2": 3},
        "alpha_pattern": {"transformer_blocks.0.attn1.to_v": 5, "ff.net.2": 1.5},
    },
    "all": {"use_rslora": True, "rank_pattern": {"ff.net.2": 3}, "alpha_pattern": {"to_q": 3}},
    "regular expression as targets": {"target_modules": r".*\.attn1\.to_[qv]"},
}


def save_with_peft(model, folder, **options):
    """A folder that PEFT wrote, with random B; and the adapted reference."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    adapted = peft.get_peft_model(copy.deepcopy(model.reference), peft.LoraConfig(**PLAIN | options))
    for name, value in adapted.named_parameters():
        if "lora_B" in name:
            value.data = torch.randn(value.shape) / 8
    adapted.save_pretrained(folder)
    return adapted


@pytest.mark.parametrize("kind", PEFT_CONFIGS)
def test_a_folder_that_peft_wrote(cogvideox, tmp_path, kind):
    """Against PEFT, which reads the same folder: all of its config counts, whichever way the adapter is named."""
    save_with_peft(cogvideox, tmp_path, **PEFT_CONFIGS[kind])
    from peft import PeftModel

    expected = cogvideox._run_reference(PeftModel.from_pretrained(copy.deepcopy(cogvideox.reference), tmp_path))
    assert relative_error(cogvideox._run_reference(cogvideox.reference), expected) > 0.01
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        assert relative_error(cogvideox._run(cogvideox.merged(path)), expected) < BAR


def test_a_peft_folder_on_hunyuan(hunyuan, tmp_path):
    adapted = save_with_peft(hunyuan, tmp_path, target_modules=["to_q", "add_k_proj"], alpha_pattern={"to_q": 7})
    assert relative_error(hunyuan._run(hunyuan.merged(tmp_path)), hunyuan._run_reference(adapted)) < BAR


@pytest.mark.parametrize("adapter", ["my_adapter", "0", "a-b"])
def test_names_of_adapters_in_keys(cogvideox, tmp_path, adapter):
    maps = cogvideox.maps("attn1.to_q")
    halves = (f"lora_A.{adapter}", f"lora_B.{adapter}")
    save_file(named(maps, "base_model.model.", *halves), tmp_path / "a.safetensors")
    cogvideox.check(tmp_path / "a.safetensors", {name: product(*pair) for name, pair in maps.items()})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "a DoRA"),
        ({"peft_type": "LOHA"}, "PEFT's kind LOHA"),
        ({"use_qalora": True}, "a LoRA with use_qalora"),
        ({"init_lora_weights": "pissa"}, "began as 'pissa'"),
        ({"r": 8}, f"says rank 8 for transformer_blocks.0.attn1.to_q, whose matrices are of rank {RANK}"),
        ({"target_modules": ["to_k"]}, "does not name transformer_blocks.0.attn1.to_q among its target_modules, to_k"),
        ({"alpha_pattern": {".*to_q": 3}}, "regular expressions"),
        ({"lora_alpha": "16"}, "must hold numbers"),
        ([1], "adapter_config.json is damaged"),
    ],
)
def test_peft_configs_that_are_refused(cogvideox, tmp_path, config, message):
    """Other kinds by name, and a config that is not this file's."""
    save_file(named(cogvideox.maps("attn1.to_q"), "", "lora_A", "lora_B"), tmp_path / "a.safetensors")
    text = PLAIN | {"r": RANK, "peft_type": "LORA"} | config if isinstance(config, dict) else config
    (tmp_path / "adapter_config.json").write_text(json.dumps(text))
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        cogvideox.merged(tmp_path / "a.safetensors")
    assert "adapter_config.json" in str(error.value) and "\n" not in str(error.value)


def test_another_config_is_another_adapter(cogvideox, tmp_path):
    save_with_peft(cogvideox, tmp_path)
    config = cogvideox.model.config
    record = describe_lora(cogvideox.family, tmp_path, 1.0, config)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 8}))
    assert describe_lora(cogvideox.family, tmp_path, 1.0, config)["sha256"] != record["sha256"]
    with pytest.raises(CheckpointError, match="changed while this run was under way"):
        merge_files(cogvideox.family, config, cogvideox.model, [record])


@pytest.mark.parametrize(("alpha", "strength"), [("6.0", 2), ("None", 1), ("0", 1)])
def test_kohyas_metadata(cogvideox, tmp_path, alpha, strength):
    """Where no tensor holds the alpha. kohya's networks take none and 0 as the rank."""
    maps = cogvideox.maps("attn1.to_q", "ff.net.2")
    save_file(kohya(maps, None), tmp_path / "a.safetensors", {"ss_network_dim": str(RANK), "ss_network_alpha": alpha})
    cogvideox.check(tmp_path / "a.safetensors", {name: product(*pair, strength) for name, pair in maps.items()})


def test_an_adapter_that_changes_nothing_is_said(cogvideox, tmp_path, caplog, capsys):
    maps = {name: (a, 0 * b) for name, (a, b) in cogvideox.maps("attn1.to_q").items()}
    save_file(named(maps, "", "lora_A", "lora_B"), tmp_path / "a.safetensors")
    with caplog.at_level(logging.WARNING):
        cogvideox.merged(tmp_path / "a.safetensors")
    assert [r.getMessage() for r in caplog.records] == [
        f"adapter {tmp_path}/a.safetensors changes nothing: its B are all zero, as before training"
    ]
    released_adapter(tmp_path / "b.safetensors")  # of zeros
    assert main(["info", str(tmp_path / "b.safetensors")]) == 0
    assert "changes nothing" in capsys.readouterr().out


def test_folders_of_adapters(cogvideox, tmp_path):
    maps = cogvideox.maps("attn1.to_q")
    save_file(named(maps, "", "lora_A", "lora_B"), tmp_path / "kites.safetensors")
    (tmp_path / ".cogvideox-0.partial.safetensors").write_bytes(b"")  # of a process that was killed
    cogvideox.check(tmp_path, {name: product(*pair) for name, pair in maps.items()})
    save_file(named(maps, "", "lora_A", "lora_B"), tmp_path / "style.safetensors")
    with pytest.raises(InputError, match=r"has 2 safetensors files \(kites.safetensors, style.safetensors\)"):
        cogvideox.merged(tmp_path)


# --- HunyuanVideo-1.5 ---

STREAM = {
    "attn.to_q": "img_attn_q", "attn.to_k": "img_attn_k", "attn.to_v": "img_attn_v", "attn.to_out.0": "img_attn_proj",
    "attn.add_q_proj": "txt_attn_q", "attn.add_k_proj": "txt_attn_k", "attn.add_v_proj": "txt_attn_v",
    "attn.to_add_out": "txt_attn_proj", "ff.net.0.proj": "img_mlp.fc1", "ff.net.2": "img_mlp.fc2",
    "ff_context.net.0.proj": "txt_mlp.fc1", "ff_context.net.2": "txt_mlp.fc2",
    "norm1.linear": "img_mod.linear", "norm1_context.linear": "txt_mod.linear",
}  # fmt: skip
"""Diffusers' names in a block -> Tencent's."""


def blocks(model, *endings):
    return {name: pair for name, pair in model.maps(*endings).items() if name.startswith("transformer_blocks")}


def tencent_name(name):
    _, layer, rest = name.split(".", 2)
    return f"double_blocks.{layer}.{STREAM[rest]}"


def test_hunyuan_in_diffusers_names(hunyuan, tmp_path):
    maps = hunyuan.maps()
    save_file(named(maps, "", "lora_A", "lora_B"), tmp_path / "a.safetensors")
    hunyuan.check(tmp_path / "a.safetensors", {name: product(*pair) for name, pair in maps.items()})


def test_tencents_names(hunyuan, tmp_path):
    maps = blocks(hunyuan, *STREAM)
    renamed = {tencent_name(name): pair for name, pair in maps.items()}
    head = hunyuan.maps("norm_out.linear", "proj_out")
    last = head["norm_out.linear"]
    renamed |= {"final_layer.linear": head["proj_out"], "final_layer.adaLN_modulation.1": last}
    metadata = {"lora_adapter_metadata": json.dumps({"r": 8, "lora_alpha": 16})}
    save_file(named(renamed, "", "lora_A", "lora_B"), tmp_path / "a.safetensors", metadata)
    deltas = {name: product(*pair, 16 / RANK) for name, pair in maps.items()}
    shift, scale = np.split(product(*last, 16 / RANK), 2)  # Tencent's order; diffusers' is scale, shift
    deltas |= {"norm_out.linear": np.concatenate([scale, shift]), "proj_out": product(*head["proj_out"], 16 / RANK)}
    hunyuan.check(tmp_path / "a.safetensors", deltas, 0.25)


def test_musubi(hunyuan, tmp_path):
    maps = blocks(hunyuan, *STREAM)
    tensors = {}
    for name, (a, b) in maps.items():
        start = "lora_unet_" + tencent_name(name).replace(".", "_")
        tensors |= {
            f"{start}.lora_down.weight": a,
            f"{start}.lora_up.weight": b,
            f"{start}.alpha": np.array(1, np.float32),
        }
    save_file(tensors, tmp_path / "a.safetensors")
    hunyuan.check(tmp_path / "a.safetensors", {name: product(*pair, 1 / RANK) for name, pair in maps.items()})


@pytest.mark.parametrize("style", ["diffusion_model.", "lora_unet_"])
def test_fused_maps(hunyuan, tmp_path, style):
    """q, k and v of a stream as one map, with one A; as ComfyUI names them, with dots or underscores."""
    random = np.random.default_rng(8)
    tensors, deltas = {}, {}
    for layer in range(2):
        for stream, names in (("img", ["to_q", "to_k", "to_v"]), ("txt", ["add_q_proj", "add_k_proj", "add_v_proj"])):
            sources = [f"transformer_blocks.{layer}.attn.{name}" for name in names]
            out, width = hunyuan.reference.get_submodule(sources[0]).weight.shape
            a = (random.normal(size=(RANK, width)) / np.sqrt(width)).astype(np.float32)
            b = (random.normal(size=(3 * out, RANK)) / 4).astype(np.float32)
            name = f"double_blocks.{layer}.{stream}_attn.qkv"
            place = style + (name if style.endswith(".") else name.replace(".", "_"))
            halves = ("lora_A", "lora_B") if style.endswith(".") else ("lora_down", "lora_up")
            tensors |= {f"{place}.{halves[0]}.weight": a, f"{place}.{halves[1]}.weight": b}
            tensors[f"{place}.alpha"] = np.array(6, np.float32)
            deltas |= {source: product(a, part, 2) for source, part in zip(sources, np.split(b, 3), strict=True)}
    save_file(tensors, tmp_path / "a.safetensors")
    hunyuan.check(tmp_path / "a.safetensors", deltas)


# --- written for other programs ---


def mixed(model, path):
    """An adapter of all maps, with ranks and alphas that differ. Returns map -> what it adds to the weight."""
    tensors, deltas = {}, {}
    for i, (name, (a, b)) in enumerate(model.maps().items()):
        rank, alpha = 1 + i % RANK, (0.5, 1.75, 3)[i % 3]
        a, b = a[:rank], np.ascontiguousarray(b[:, :rank])
        tensors |= named({name: (a, b)}, "transformer.", "lora.down", "lora.up", alpha)
        deltas[name] = product(a, b, alpha / rank)
    save_file(tensors, path)
    return deltas


def exported(model, source, target, layout):
    with open_adapter(source) as file:
        return export_adapter(model.family, model.model.config, file, target, layout)


@pytest.mark.parametrize("layout", ["peft", "diffusers", "comfyui", "kohya"])
def test_out_and_in_again(cogvideox, hunyuan, tmp_path, layout):
    for name, model in {"cogvideox": cogvideox, "hunyuan": hunyuan}.items():
        deltas = mixed(model, tmp_path / f"{name}.safetensors")
        back = model.merged(exported(model, tmp_path / f"{name}.safetensors", tmp_path / name, layout))
        model.check(tmp_path / f"{name}.safetensors", deltas)
        before = parameters(model.merged(tmp_path / f"{name}.safetensors"))
        for path, value in parameters(back).items():
            np.testing.assert_allclose(value, before[path], atol=1e-6 if layout == "comfyui" else 0, err_msg=path)


def test_peft_and_diffusers_read_what_is_written(cogvideox, hunyuan, tmp_path):
    peft = pytest.importorskip("peft")
    for name, model in {"cogvideox": cogvideox, "hunyuan": hunyuan}.items():
        source, folder = tmp_path / f"{name}.safetensors", tmp_path / name
        mixed(model, source)
        expected = model._run(model.merged(source))
        adapted = copy.deepcopy(model.reference)
        exported(model, source, folder / "peft", "peft")
        found = model._run_reference(peft.PeftModel.from_pretrained(adapted, folder / "peft"))
        assert relative_error(found, expected) < BAR
        adapted = copy.deepcopy(model.reference)
        exported(model, source, folder / "diffusers", "diffusers")
        adapted.load_lora_adapter(folder / "diffusers", prefix="transformer", weight_name=FILE_NAME)
        assert relative_error(model._run_reference(adapted), expected) < BAR


def test_the_names_that_are_written(cogvideox, hunyuan, tmp_path):
    """kohya's as CogVideoX-Fun and musubi-tuner have them; ComfyUI's as its models name their maps."""
    maps = cogvideox.maps("attn1.to_q", "ff.net.2", "time_embedding.linear_1")
    save_file(named(maps, "", "lora_A", "lora_B"), tmp_path / "a.safetensors")
    found = load_file(exported(cogvideox, tmp_path / "a.safetensors", tmp_path / "k.safetensors", "kohya"))
    expected = kohya(maps, RANK)
    assert found.keys() == expected.keys() and all((found[name] == x).all() for name, x in expected.items())
    found = load_file(exported(cogvideox, tmp_path / "a.safetensors", tmp_path / "c.safetensors", "comfyui"))
    names = {name.removeprefix("diffusion_model.").rsplit(".lora_A", 1)[0] for name in found if "lora_A" in name}
    layers = {f"blocks.{i}.{name}" for i in range(2) for name in ("q", "ff_out")}
    assert names == {*layers, "time_embedding_linear_1"}

    maps = blocks(hunyuan, "attn.to_q", "attn.to_v", "norm1.linear")
    save_file(named(maps, "", "lora_A", "lora_B"), tmp_path / "h.safetensors")
    found = load_file(exported(hunyuan, tmp_path / "h.safetensors", tmp_path / "hk.safetensors", "kohya"))
    assert {name.split(".")[0] for name in found} == {
        f"lora_unet_double_blocks_{i}_img_{name}" for i in range(2) for name in ("attn_q", "attn_v", "mod_linear")
    }
    found = load_file(exported(hunyuan, tmp_path / "h.safetensors", tmp_path / "hc.safetensors", "comfyui"))
    one, two = maps["transformer_blocks.0.attn.to_q"], maps["transformer_blocks.0.attn.to_v"]
    place = "diffusion_model.double_blocks.0.img_attn.qkv"
    assert found[f"{place}.alpha"] == 2 * RANK
    fused = found[f"{place}.lora_B.weight"] @ found[f"{place}.lora_A.weight"]
    np.testing.assert_allclose(fused, np.concatenate([product(*one), 0 * product(*one), product(*two)]), atol=1e-6)
    assert "diffusion_model.double_blocks.1.img_mod.lin.lora_A.weight" in found


def test_a_file_of_fused_maps_comes_back_as_it_was(hunyuan, tmp_path):
    random = np.random.default_rng(8)
    width = hunyuan.reference.get_submodule("transformer_blocks.0.attn.to_q").weight.shape[1]
    place = "diffusion_model.double_blocks.0.img_attn.qkv"
    tensors = {
        f"{place}.lora_A.weight": random.normal(size=(RANK, width)).astype(np.float16),
        f"{place}.lora_B.weight": random.normal(size=(3 * width, RANK)).astype(np.float16),
        f"{place}.alpha": np.array(6, np.float32),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    found = load_file(exported(hunyuan, tmp_path / "a.safetensors", tmp_path / "b.safetensors", "comfyui"))
    assert found.keys() == tensors.keys()
    assert all(x.dtype == found[name].dtype and (x == found[name]).all() for name, x in tensors.items())


def test_the_export_command(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").touch()
    for args in ((tmp_path / "peft",), (tmp_path / "comfy.safetensors", "--as", "comfyui")):
        assert main(["export", "embedded-four-steps", *map(str, args)]) == 0
        assert capsys.readouterr().out.strip() == str(args[0])
        assert main(["info", str(args[0])]) == 0
        assert "rank 32" in capsys.readouterr().out
    assert main(["export", "embedded-four-steps", str(tmp_path / "full")]) == 2
    assert "name a new or empty one" in capsys.readouterr().err


# --- several at once, on every kind of weights ---


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    convert(save_layout(folder / "hf", "cogvideox-5b"), folder / "plain")
    quantize_checkpoint(folder / "plain", folder / "int8")
    return folder


@pytest.fixture(scope="module")
def three_files(cogvideox, tmp_path_factory):
    """Of different layouts, which share some of their maps."""
    folder = tmp_path_factory.mktemp("files")
    save_file(kohya(cogvideox.maps("attn1.to_q", "ff.net.2", "norm1.linear"), 1.5), folder / "one.safetensors")
    save_file(named(cogvideox.maps("attn1.to_q", "to_k", seed=4), "", "lora_A", "lora_B"), folder / "two.safetensors")
    maps = cogvideox.maps("attn1.to_q", "to_v", seed=5)
    save_file(sat_tensors(maps), folder / "three.safetensors")
    return folder


KINDS = {
    "float32": ("plain", "float32", None),
    "bfloat16": ("plain", "bfloat16", None),
    "mesh": ("plain", "float32", (1, 2, 2, True)),
    "int8": ("int8", "float32", None),
    "int8 mesh": ("int8", "float32", (1, 2, 2)),
}


@pytest.mark.parametrize("cogvideox", ["cogvideox-5b"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_three_adapters_leave_no_trace(checkpoints, three_files, monkeypatch, kind):
    name, dtype, shape = KINDS[kind]

    def opened():
        return Pipeline.from_pretrained(checkpoints / name, dtype, None if shape is None else make_mesh(*shape))

    def bits(pipe):
        return {name: np.asarray(x).tobytes() for name, x in parameters(pipe.transformer).items()}

    pipe, other = opened(), opened()
    base, placed = bits(pipe), {name: x.sharding for name, x in parameters(pipe.transformer).items()}
    other.load_lora(three_files / "two.safetensors", 0.5)
    assert bits(other) != base
    monkeypatch.setattr("cogvideox_flax.checkpoint.load_component", None)  # nothing is loaded again
    for name in ("one", "two", "three"):
        pipe.load_lora_weights(three_files, f"{name}.safetensors", adapter_name=name)
    everything = bits(pipe)
    pipe.set_adapters(["two"], [0.5])
    assert bits(pipe) == bits(other) != everything
    pipe.set_adapters(["one", "two", "three"])
    assert bits(pipe) == everything
    pipe.unload_lora_weights()
    assert bits(pipe) == base
    assert {name: x.sharding for name, x in parameters(pipe.transformer).items()} == placed


@pytest.mark.parametrize("cogvideox", ["cogvideox-5b"], indirect=True)
def test_on_8_bit_weights(checkpoints, cogvideox, three_files):
    """The error is that of the weights alone."""
    pipes = [Pipeline.from_pretrained(checkpoints / name, "float32") for name in ("plain", "int8")]
    args = inputs(cogvideox.reference, 4, 8, 12)
    plain, small = (run_ours(pipe.transformer, *args) for pipe in pipes)
    for pipe in pipes:
        pipe.load_lora(three_files / "one.safetensors", 2.0)
    exact, found = (run_ours(pipe.transformer, *args) for pipe in pipes)
    assert relative_error(exact, plain) > 0.1
    assert rms_error(found, exact) < 1.25 * rms_error(small, plain)


def test_a_failed_adapter_changes_nothing(checkpoints, three_files, tmp_path):
    pipe = Pipeline.from_pretrained(checkpoints / "plain", "float32")
    pipe.load_lora(three_files / "one.safetensors", name="one")
    before, records = pipe.transformer, pipe.loras
    tensors = load_file(three_files / "two.safetensors")
    save_file({name: np.full_like(x, np.nan) for name, x in tensors.items()}, tmp_path / "nan.safetensors")
    with pytest.raises(CheckpointError, match="NaN"):
        pipe.load_lora(tmp_path / "nan.safetensors")
    assert pipe.transformer is before and pipe.loras == records
    assert pipe.get_list_adapters() == ["one"]


# --- refusals, and what is said ---


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("transformer.transformer_blocks.0.attn1.to_q.lora_magnitude_vector.weight", "a DoRA"),
        ("transformer.transformer_blocks.0.attn1.to_q.dora_scale", "a DoRA"),
        ("lora_unet__transformer_blocks_0_attn1_to_q.lokr_w1", "a LoKr"),
        ("lora_unet__transformer_blocks_0_attn1_to_q.hada_w1_a", "a LoHa"),
        ("lora_te_encoder_block_0_layer_0_SelfAttention_q.lora_down.weight", "an adapter of the text encoder"),
        ("model.diffusion_model.transformer.layers.0.attention.dense.original.weight", "a SAT checkpoint"),
        ("diffusion_model.blocks.0.attn.diff", "a file of whole differences"),
        ("transformer.transformer_blocks.0.attn1.to_q.lora_B.bias", "an adapter with biases"),
    ],
)
def test_other_kinds_are_refused_by_name(cogvideox, tmp_path, name, what):
    tensors = named(cogvideox.maps("attn1.to_q"), "transformer.", "lora_A", "lora_B") | {name: np.ones(3, np.float32)}
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=what):
        cogvideox.merged(tmp_path / "a.safetensors")


def released_adapter(path, out=3072, width=3072, name="transformer_blocks.0.attn1.to_q"):
    """At the width of a release; a header is all that is read."""
    save_file(
        named({name: (np.zeros((2, width), np.float16), np.zeros((out, 2), np.float16))}, "", "lora_A", "lora_B"), path
    )


def test_a_file_for_another_model_is_refused_by_name(cogvideox, hunyuan, tmp_path):
    released_adapter(tmp_path / "a.safetensors")
    for model in (cogvideox, hunyuan):
        with pytest.raises(CheckpointError, match=r"It fits cogvideox-5b, cogvideox-5b-i2v, cogvideox1\.5-5b"):
            model.merged(tmp_path / "a.safetensors")
    released_adapter(tmp_path / "b.safetensors", 2048, 2048, "double_blocks.53.img_attn_q")
    with pytest.raises(CheckpointError, match=r"It fits hunyuanvideo1\.5-480p-t2v, "):
        cogvideox.merged(tmp_path / "b.safetensors")


def test_info(tmp_path, capsys):
    released_adapter(tmp_path / "a.safetensors", 1920, 1920)
    assert main(["info", str(tmp_path / "a.safetensors")]) == 0
    text = capsys.readouterr().out
    assert "PEFT layout, 1 map, rank 2, alpha / rank 1 (no alpha in the file, taken as the rank" in text
    assert "transformer_blocks.*.attn1.to_q" in text
    assert "cogvideox-2b" in text and "cogvideox-5b" not in text
    assert main(["info", str(tmp_path / "a.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] == ["cogvideox-2b"]
    released_adapter(tmp_path / "b.safetensors", 17, 17)
    assert main(["info", str(tmp_path / "b.safetensors")]) == 2
    assert "fits no release" in capsys.readouterr().err
    assert main(["info", "embedded-four-steps"]) == 0
    out = capsys.readouterr().out
    assert "rank 32" in out and "fits     embedded," in out and "made for the distillation embedded: 4 steps" in out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.safetensors", {"file": "a.safetensors", "scale": 1.0}),
        ("a:b.safetensors:0.5", {"file": "a:b.safetensors", "scale": 0.5}),
        ("a:0.5:alpha=32", {"file": "a", "scale": 0.5, "alpha": 32.0}),
        ("a:alpha=32", {"file": "a", "scale": 1.0, "alpha": 32.0}),
        ("a:alpha=much", {"file": "a:alpha=much", "scale": 1.0}),
    ],
)
def test_how_an_adapter_is_named(text, expected):
    assert parse_lora(text) == expected


def test_parameters_that_no_adapter_touches_are_shared(cogvideox, tmp_path):
    save_file(named(cogvideox.maps("attn1.to_q"), "", "lora_A", "lora_B"), tmp_path / "a.safetensors")
    before, after = parameters(cogvideox.model), parameters(cogvideox.merged(tmp_path / "a.safetensors"))
    assert [name for name, value in after.items() if value is not before[name]] == ["blocks.attn.q.kernel"]
