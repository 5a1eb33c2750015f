"""The way back: native checkpoints in diffusers' layout, equal to what they were converted from."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch

from cogvideox_flax.checkpoint import read_manifest
from cogvideox_flax.checkpoint.quantize import quantize_checkpoint
from cogvideox_flax.cli import main
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.conversion.export import export
from cogvideox_flax.conversion.rules import Ignore
from cogvideox_flax.conversion.source import Source
from cogvideox_flax.conversion.tables import get_tables
from cogvideox_flax.models.registry import RELEASES
from cogvideox_flax.schedulers import flow_match
from cogvideox_flax.schedulers.config import DIFFUSERS_NAMES, SchedulerConfig
from tests.support import hunyuan_layout
from tests.support.released_layout import ARCHITECTURES, build, randomise, save_layout

HUNYUAN = {"hunyuan": {}, "hunyuan image": {"image": True}, "hunyuan distilled": {"use_meanflow": True}}
HALF = "cogvideox-5b in bfloat16"


def save(folder: Path, name: str) -> Path:
    if name in HUNYUAN:
        return hunyuan_layout.save_layout(folder, **HUNYUAN[name])
    if name == HALF:
        return save_layout(
            folder,
            "cogvideox-5b",
            transformer=randomise(build("transformer", "cogvideox-5b", small=True)).to(torch.bfloat16),
        )
    return save_layout(folder, name)


def pipeline_of(layouts: Path) -> str:
    """The class of diffusers, by what tells the models apart: their transformer's input."""
    transformer = json.loads((layouts / "hf" / "transformer" / "config.json").read_text())
    if "Hunyuan" in transformer["_class_name"]:
        return str(json.loads((layouts / "hf" / "model_index.json").read_text())["_class_name"])
    return "CogVideoXPipeline" if transformer["in_channels"] == 16 else "CogVideoXImageToVideoPipeline"


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with Source(folder) as source:
        values = {name: source.read(name) for name in source.where}
    # a position table of float64, as diffusers computes it, is float32 from conversion on; the released one is bfloat16
    values = {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in values.items()}
    return {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in values.items()}


@pytest.fixture(scope="module", params=[*ARCHITECTURES, HALF, *HUNYUAN])
def layouts(request, tmp_path_factory):
    """A released layout; the native checkpoint; and what is exported."""
    folder = tmp_path_factory.mktemp("layouts")
    save(folder / "hf", request.param)
    convert(folder / "hf", folder / "native", whole=True)
    export(folder / "native", folder / "back")
    return folder


def test_every_tensor_comes_back_bit_for_bit(layouts):
    manifest = read_manifest(layouts / "native")
    for name, config in manifest.configs.items():
        if name in manifest.weights:
            before, after = tensors(layouts / "hf" / name), tensors(layouts / "back" / name)
            ignored = [r.source for r in get_tables(manifest.family)[name](config) if isinstance(r, Ignore)]
            left_out = {tensor for tensor in before if any(re.fullmatch(source, tensor) for source in ignored)}
            assert before.keys() - left_out == after.keys(), name
            assert not left_out or name in ("text_encoder", "image_encoder")
            for tensor, value in after.items():
                assert value == before[tensor], tensor


def test_it_converts_to_the_same_checkpoint(layouts, tmp_path):
    convert(layouts / "back", tmp_path / "again", whole=True)
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (layouts / "native", tmp_path / "again")
    )
    for values in (before, after):
        values.pop("checksum")
        for record in values["weights"].values():
            record.pop("source")
    assert after == before


def test_diffusers_opens_it(layouts):
    pipe = diffusers.DiffusionPipeline.from_pretrained(layouts / "back")
    assert type(pipe).__name__ == pipeline_of(layouts)
    reference = type(pipe.transformer).from_pretrained(layouts / "hf" / "transformer")
    for name, value in reference.state_dict().items():
        np.testing.assert_array_equal(value.float().numpy(), pipe.transformer.state_dict()[name].float().numpy(), name)
    original = type(pipe.scheduler).from_pretrained(layouts / "hf" / "scheduler")
    assert {k: v for k, v in pipe.scheduler.config.items() if k[0] != "_"} == {
        k: v for k, v in original.config.items() if k[0] != "_"
    }
    ids = pipe.tokenizer("a small red circle", padding="max_length", max_length=12, truncation=True).input_ids
    assert len(ids) == 12


@pytest.mark.parametrize("name", RELEASES)
def test_configs_of_releases_come_back(name):
    for part, config in RELEASES[name].configs.items():
        if part != "tokenizer":
            assert type(config).from_hf(json.loads(json.dumps(config.to_hf()))) == config, part


def test_the_command(tmp_path, capsys):
    target = tmp_path / "out"
    assert main(["export", "embedded", str(target), "--component", "transformer"]) == 0
    assert capsys.readouterr().out.strip() == str(target)
    assert sorted(p.name for p in target.iterdir()) == ["transformer"]
    model = diffusers.CogVideoXTransformer3DModel.from_pretrained(target / "transformer")
    assert model.config.num_layers == read_manifest("cogvideox_flax/weights/embedded").configs["transformer"].layers
    for args, message in (
        (["embedded", str(target)], "exists and is not an empty directory"),
        (["embedded", str(tmp_path / "b"), "--component", "unet"], "has no unet; it has text_encoder"),
        (["embedded", str(tmp_path / "b"), "--as", "peft"], "--as is of adapters"),
        (["embedded-four-steps", str(tmp_path / "b"), "--component", "vae"], "--component is of native checkpoints"),
    ):
        assert main(["export", *args]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("layouts", ["cogvideox-2b"], indirect=True)
def test_what_is_refused(layouts, tmp_path, capsys):
    quantize_checkpoint(layouts / "native", tmp_path / "int8")
    assert main(["export", str(tmp_path / "int8"), str(tmp_path / "out")]) == 2
    assert re.search(
        "holds text_encoder as int8.*export the checkpoint that it was quantized from", capsys.readouterr().err
    )
    convert(layouts / "hf", tmp_path / "part", components=["vae"])
    assert main(["export", str(tmp_path / "part"), str(tmp_path / "out")]) == 2
    assert "a run needs the whole checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [*DIFFUSERS_NAMES.values(), "dpmpp_2m_sde"])
def test_a_scheduler_keeps_its_class(kind):
    """Also one that came from another class of diffusers; on a flow, too."""
    config = SchedulerConfig(kind=kind, beta_start=0.001, rescale_betas_zero_snr=kind == "ddim")
    assert replace(config, snr_shift_scale=1.0) == replace(SchedulerConfig.from_hf(config.to_hf()), snr_shift_scale=1.0)


@pytest.mark.parametrize("kind", [*flow_match.DIFFUSERS_NAMES.values(), "dpmpp_2m_sde"])
def test_a_scheduler_of_a_flow_keeps_its_class(kind):
    config = flow_match.FlowMatchConfig(kind=kind, shift=7.0)
    assert flow_match.FlowMatchConfig.from_hf(config.to_hf()) == config
