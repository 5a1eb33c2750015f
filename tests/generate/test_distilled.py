"""Distillations: what their table says, when it decides, and that guidance 1 computes one half."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from cogvideox_flax import GenerationRequest, Pipeline, hub
from cogvideox_flax.checkpoint import load_transformer, read_manifest
from cogvideox_flax.checkpoint.manifest import write_manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.distilled import recognised, with_distillation
from cogvideox_flax.generate.guidance import Unguided
from cogvideox_flax.hub import EMBEDDED
from cogvideox_flax.lora import EMBEDDED_ADAPTERS
from cogvideox_flax.models.registry import FAMILIES, RELEASES
from tests.support.commands import PROMPT, SIZE

pytest_plugins = ["tests.support.commands"]

ALL = {each.name: (family, each) for family in FAMILIES.values() for each in family.distillations}
TDM = {"scheduler": "ddim", "timesteps": [999, 856, 665, 399], "num_inference_steps": 4, "guidance_scale": 1.0}
SMALL = {"num_frames": 9, "height": 32, "width": 48}


def model_of(release):
    if release in hub.EMBEDDED_MODELS:
        return read_manifest(hub.EMBEDDED_MODELS[release]).model
    return FAMILIES[RELEASES[release].family](RELEASES[release].configs)


def settings(request):
    return {name: getattr(request, name) for name in TDM}


@pytest.mark.parametrize("name", ALL)
def test_every_row_can_be_run_on_its_releases(name):
    _, row = ALL[name]
    assert row.steps <= 8 and row.guidance_scale == 1
    for release in row.releases:
        model = model_of(release)
        assert not model.is_guided(row.guidance_scale)
        plan = model.scheduler(row.scheduler).plan(row.steps, **({"timesteps": row.timesteps} if row.timesteps else {}))
        assert len(plan) == row.steps
        if row.timesteps is not None:
            np.testing.assert_allclose(plan.timesteps, row.timesteps, rtol=1e-6)
        for kind in model.schedulers.keys() - {"one_step"} if row.timesteps else (row.scheduler,):
            plan = model.scheduler(kind).plan(row.steps, timesteps=row.timesteps)
            assert all(np.isfinite(table).all() for table in jax.tree.leaves(plan)), kind


def test_timesteps_of_the_published_lists():
    """PSA plays the release's own four steps; LightX2V's list has shift 5."""
    assert model_of("cogvideox-5b").scheduler("dpm").plan(4).timesteps.tolist() == [999, 749, 499, 249]
    np.testing.assert_allclose(ALL["lightx2v"][1].timesteps, [1000, 937.5, 833.333333, 625], rtol=1e-6)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/cache/models--Luo-Yihong--TDM_CogVideoX-2B_LoRA/snapshots/ab/pytorch_lora_weights.safetensors", "tdm"),
        ("Luo-Yihong/TDM_CogVideoX-2B_LoRA", "tdm"),
        ("TDM_CogVideoX-2B_LoRA/", "tdm"),
        ("loras/tdm-cogvideox.safetensors", "tdm"),
        ("BLADE/cogvideox-5b-psa-lora/pytorch_lora_weights.safetensors", "psa"),
        ("GYP666/BLADE/cogvideox-5b-psa-lora/pytorch_lora_weights.safetensors", "psa"),
        ("/cache/models--GYP666--BLADE/snapshots/ab/x.safetensors", "blade"),
        ("gyp666/blade", "blade"),
        ("embedded-four-steps", "embedded"),
        (str(EMBEDDED_ADAPTERS["embedded-four-steps"]), "embedded"),
        ("kites.safetensors", None),
        ("blade-runner/kites.safetensors", None),
        ("blade-runner.safetensors", None),
        ("GYP666/BLADES", None),
        ("not-GYP666/BLADE", None),
        ("/loras/TDM_CogVideoX-2B_LoRA/kites.safetensors", None),
        ("/loras/tdm_cogvideox/kites/pytorch_lora_weights.safetensors", None),
        ("/cache/models--me--kites/snapshots/tdm_cogvideox/pytorch_lora_weights.safetensors", None),
        ("statdm_cogvideox.safetensors", None),
    ],
)
def test_files_are_recognised(path, name):
    """By their own name, or their hub id; directories are the user's, but for that of a file of diffusers' name."""
    found = recognised(path, FAMILIES["cogvideox"])
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("loras/hunyuanvideo1.5_t2v_480p_lightx2v_4step_lora_rank_32_bf16.safetensors", "lightx2v"),
        ("Comfy-Org/HunyuanVideo_1.5_repackaged/loras/t2v_480p_lightx2v_4step_lora.safetensors", "lightx2v"),
        ("/lightx2v/4step/kites.safetensors", None),
    ],
)
def test_files_of_hunyuan_are_recognised(path, name):
    found = recognised(path, FAMILIES["hunyuan_video15"])
    assert (found and found.name) == name


def test_when_it_decides(caplog):
    model = model_of("cogvideox-2b")
    caplog.set_level("INFO", "cogvideox_flax")

    def found(**options):
        return with_distillation(GenerationRequest("p", **options), model)

    assert found(distilled="tdm").timesteps == (999, 856, 665, 399)
    assert found(distilled="tdm").use_dynamic_cfg is False
    assert found(distilled="tdm", num_inference_steps=8).timesteps is None
    assert found(distilled="tdm", scheduler="euler").scheduler == "euler"
    assert found(distilled="tdm", timesteps=[999, 500]).timesteps == [999, 500]
    assert caplog.text == ""
    file = "TDM_CogVideoX-2B_LoRA/pytorch_lora_weights.safetensors"
    for lora in (file, [file], [f"{file}:0.9"], [{"file": file, "scale": 1.0}], ["other.safetensors", Path(file)]):
        assert found(lora=lora).timesteps == (999, 856, 665, 399)
    assert "the distillation tdm: 4 steps of ddim at 999, 856, 665, 399, no guidance" in caplog.text
    assert found(lora=file, distilled="off") == GenerationRequest("p", lora=file, distilled="off")
    caplog.clear()
    assert found(lora=file, num_inference_steps=8).guidance_scale is None, "what was given is of one piece"
    assert "--distilled tdm takes these settings" in caplog.text
    for lora in (
        None,
        [],
        5,
        [5],
        [{"file": 5}],
        "",
        "~nobody-here/x",
        "kites.safetensors",
        "blade-runner/kites.safetensors",
    ):
        assert found(lora=lora).timesteps is None


UNKNOWN = dataclasses.replace(RELEASES["cogvideox-2b"].configs["transformer"], layers=29)
"""The config of a transformer that no release has."""


def unknown_model():
    return FAMILIES["cogvideox"]({**RELEASES["cogvideox-2b"].configs, "transformer": UNKNOWN})


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("lcm", "cogvideox-2b", r"distilled is 'lcm'; expected .* family: embedded, tdm, psa, blade, off"),
        ("tdm", "cogvideox-5b", "tdm was distilled of cogvideox-2b; this model is cogvideox-5b"),
        ("tdm", None, "one by one: --scheduler ddim --timesteps 999,856,665,399 --guidance-scale 1$"),
        ("tdm", "embedded", "tdm was distilled of cogvideox-2b; this model is embedded"),
        ("blade", None, "this model is of no release.* one by one: --scheduler dpm --steps 8 --guidance-scale 1$"),
        ("embedded", None, "embedded was distilled of embedded; this model is of no release"),
        ("embedded", "cogvideox-2b", "this model is cogvideox-2b"),
        ("embedded", "embedded-image-to-video", "this model is embedded-image-to-video"),
        ("lightx2v", "hunyuanvideo1.5-720p-t2v", "--timesteps 1000,937.5,833.3333,625"),
    ],
)
def test_refusals(name, model, message):
    model = unknown_model() if model is None else model_of(model)
    with pytest.raises(InputError, match=message):
        with_distillation(GenerationRequest("p", distilled=name), model)


@pytest.mark.parametrize(
    ("lora", "model"),
    [
        ("tdm_cogvideox.safetensors", "cogvideox-5b"),
        ("tdm_cogvideox.safetensors", None),
        ("gyp666/blade", "cogvideox1.5-5b"),
        ("embedded-four-steps", "embedded-image-to-video"),
    ],
)
def test_an_adapter_of_another_model_decides_nothing(lora, model, caplog):
    """A line says so."""
    caplog.set_level("INFO", "cogvideox_flax")
    request = GenerationRequest("p", lora=[lora, "kites.safetensors"])
    assert with_distillation(request, unknown_model() if model is None else model_of(model)) == request
    said = rf"{lora}: \w+ was distilled of .*; this model is {model or 'of no release'}, whose own settings stay"
    assert re.search(said, caplog.text)


def test_a_fine_tune_has_the_distillations_of_its_release():
    """Its config says which release it came from; one of the embedded model has that model's configs."""
    manifest = dataclasses.replace(read_manifest(EMBEDDED), release_name="cogvideox-2b")
    assert with_distillation(GenerationRequest("p", distilled="tdm"), manifest.model).guidance_scale == 1
    for option in ({"distilled": "embedded"}, {"lora": "embedded-four-steps"}):
        request = with_distillation(GenerationRequest("p", **option), read_manifest(EMBEDDED).model)
        assert (request.scheduler, request.num_inference_steps, request.guidance_scale) == ("ddim", 4, 1)


@pytest.fixture(scope="module")
def native(native, tmp_path_factory):
    """One that says that it came from cogvideox-2b."""
    folder = tmp_path_factory.mktemp("fine-tune") / "2b"
    shutil.copytree(native, folder)
    write_manifest(folder, dataclasses.replace(read_manifest(folder), release_name="cogvideox-2b"))
    return folder


@pytest.fixture(scope="module")
def adapter(native, tmp_path_factory):
    """A file of the name that is known."""
    width = load_transformer(native).blocks.attn.q.kernel.shape[1]
    folder = tmp_path_factory.mktemp("TDM_CogVideoX-2B_LoRA")
    name = "transformer.transformer_blocks.0.attn1.to_q.lora_"
    pair = {f"{name}A.weight": np.ones((2, width), np.float32), f"{name}B.weight": np.ones((width, 2), np.float32)}
    save_file(pair, folder / "pytorch_lora_weights.safetensors")
    return folder


def test_in_python(native, adapter):
    pipe = Pipeline.from_pretrained(native, dtype="float32")
    request = GenerationRequest(PROMPT, **SMALL, distilled="tdm")
    assert settings(pipe.resolve(request).request) == TDM
    assert isinstance(pipe.resolve(request).guidance, Unguided)
    video = pipe(PROMPT, **SMALL, distilled="tdm", output_type="latent", progress=False)
    again = pipe(PROMPT, **SMALL, **TDM, use_dynamic_cfg=False, output_type="latent", progress=False)
    assert (video.frames == again.frames).all()
    assert video.metadata["settings"] == again.metadata["settings"]
    pipe.load_lora(adapter)
    assert settings(pipe.resolve(GenerationRequest(PROMPT, **SMALL)).request) == TDM
    assert pipe.resolve(GenerationRequest(PROMPT, **SMALL, distilled="off")).request.num_inference_steps == 50


def test_in_the_shell(native, adapter, paths, tmp_path, cheap_decoder):
    """Named after stage 1, it takes the place of the settings that are stored."""
    paths("encode", PROMPT, "--model", native, "--dtype", "float32", "--dir", tmp_path / "run", *SIZE)
    paths("denoise", "--dir", tmp_path / "run", "--distilled", "tdm")
    stored = json.loads((tmp_path / "run" / "generation_config.json").read_text())
    assert {name: stored[name] for name in TDM} == TDM
    plain = ["generate", PROMPT, "--model", native, "--dtype", "float32", *SIZE]
    (video,) = paths(*plain, "--out", tmp_path / "a.npz", "--distilled", "tdm")
    own = ["--timesteps", "999,856,665,399", "--guidance-scale", 1]
    (same,) = paths(*plain, "--out", tmp_path / "b.npz", *own)
    (known,) = paths(*plain, "--out", tmp_path / "c.npz", "--lora", adapter)
    latents = [np.load(path)["latents"] for path in (video, same, known)]
    assert (latents[0] == latents[1]).all() and (latents[0] != latents[2]).any()
    assert json.loads(str(np.load(known)["metadata"]))["settings"]["timesteps"] == TDM["timesteps"]


def test_the_page():
    """Every row of the table is in docs/few_steps.md, with its settings."""
    page = (Path(__file__).parents[2] / "docs" / "few_steps.md").read_text()
    for name, (_, row) in ALL.items():
        (line,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1] == row.source.split(",")[0], line
        assert set(row.releases) <= set(cells[2].split(", "))
        assert cells[3].startswith(str(row.steps)) and f"`{row.scheduler}`" in cells[3]
        for timestep in row.timesteps or ():
            assert re.search(rf"\b{timestep:.4g}\b", cells[3]), (line, timestep)
        assert ("hearsay" in row.basis) == ("hearsay" in cells[4])
