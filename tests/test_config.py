"""The released config files against the table of releases, and the sizes that each release takes."""

from __future__ import annotations

import dataclasses
import json
import logging
import re

import jax
import pytest
from reference import SHARED

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.generate.checks import check_model
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.models.cogvideox.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.cogvideox.family import COGVIDEOX
from cogvideox_flax.models.cogvideox.releases import find_release
from cogvideox_flax.models.cogvideox.sizes import resolve_size
from cogvideox_flax.models.registry import RELEASES, get_release
from cogvideox_flax.models.t5 import TextEncoderConfig
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.sharding import make_mesh
from cogvideox_flax.tokenizer import TokenizerConfig

CONFIGS = SHARED / "spec" / "configs"
KINDS = {
    "transformer/config.json": ("transformer", TransformerConfig),
    "vae/config.json": ("vae", VAEConfig),
    "text_encoder/config.json": ("text_encoder", TextEncoderConfig),
    "tokenizer/tokenizer_config.json": ("tokenizer", TokenizerConfig),
    "scheduler/scheduler_config.json": ("scheduler", SchedulerConfig),
}


@pytest.mark.skipif(not CONFIGS.is_dir(), reason=f"no released config files in {CONFIGS}")
@pytest.mark.parametrize("release", COGVIDEOX.releases.values(), ids=lambda r: r.name)
@pytest.mark.parametrize("file", KINDS)
def test_released_files_read_as_the_table_says(release, file):
    component, kind = KINDS[file]
    raw = json.loads((CONFIGS / release.hub_id.split("/")[1] / file).read_text())
    assert kind.from_hf(raw) == release.configs[component]


@pytest.mark.parametrize("release", COGVIDEOX.releases.values(), ids=lambda r: r.name)
def test_configs_survive_their_own_file(release):
    for component, kind in KINDS.values():
        config = release.configs[component]
        assert kind.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("release", COGVIDEOX.releases.values(), ids=lambda r: r.name)
def test_release_is_found_whatever_its_nominal_size(release):
    transformer = release.configs["transformer"]
    moved = dataclasses.replace(transformer, sample_height=300, sample_width=300)
    assert find_release({"transformer": moved}) is release
    assert find_release({"transformer": dataclasses.replace(transformer, layers=7)}) is None


def test_our_own_files_are_read_strictly():
    raw = SchedulerConfig().to_dict()
    with pytest.raises(CheckpointError, match=r"unknown keys \['surprise'\]"):
        SchedulerConfig.from_dict(raw | {"surprise": 1})
    with pytest.raises(CheckpointError, match="beta_start"):
        SchedulerConfig.from_dict(raw | {"beta_start": "small"})
    with pytest.raises(InputError, match=r"cogvideox1\.5-5b-i2v"):
        get_release("cogvideox-7b")


def size(name, **kwargs):
    release = RELEASES[name]
    return resolve_size(release.configs["transformer"], release.configs["vae"], release, **kwargs)


@pytest.mark.parametrize(
    ("name", "frames", "height", "width", "latents", "extra"),
    [
        ("cogvideox-2b", 49, 480, 720, 13, 0),
        ("cogvideox-5b", 49, 480, 720, 13, 0),
        ("cogvideox1.5-5b", 81, 768, 1360, 22, 1),
    ],
)
def test_defaults_are_the_official_ones(name, frames, height, width, latents, extra, caplog):
    got = size(name)
    assert (got.num_frames, got.height, got.width) == (frames, height, width)
    assert (got.latent_frames, got.extra_latents) == (latents, extra)
    assert (got.latent_height, got.latent_width) == (height // 8, width // 8)
    assert not caplog.records


@pytest.mark.parametrize("frames", range(1, 60))
def test_frame_rule(frames):
    if frames % 8 == 1:
        assert size("cogvideox-5b", num_frames=frames).latent_frames % 2 == 1
    else:
        with pytest.raises(InputError) as error:
            size("cogvideox-5b", num_frames=frames)
        below = (frames - 1) // 8 * 8 + 1
        assert f"Nearest: {below} and {below + 8}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "kwargs", "warns"),
    [
        ("cogvideox-5b", {"height": 720, "width": 480}, "was trained at 480x720, not 720x480"),
        ("cogvideox-5b", {"num_frames": 57}, "up to 49, not 57"),
        ("cogvideox1.5-5b", {"height": 1360, "width": 768}, None),
        ("cogvideox1.5-5b", {"num_frames": 161}, None),
        ("cogvideox1.5-5b", {"num_frames": 73}, "16 n . 1 frames up to 161, not 73"),
        ("cogvideox1.5-5b", {"height": 480, "width": 720}, "shorter side 768"),
    ],
)
def test_untrained_sizes_warn(name, kwargs, warns, caplog):
    with caplog.at_level(logging.WARNING):
        GenerationRequest("red", **kwargs).resolve(Manifest.of_release(RELEASES[name]))
    assert bool(warns) == bool(caplog.records)
    if warns:
        assert re.search(warns, caplog.text)


@pytest.mark.parametrize("tp", [4, 8])
def test_a_mesh_that_would_cut_a_head_is_refused(tp):
    release = RELEASES["cogvideox-2b"]  # 30 heads of 64: the width divides by 8, the heads do not
    manifest = Manifest.of_release(release)
    with pytest.raises(InputError, match=f"30 does not divide over mesh axis tp of size {tp}"):
        check_model(manifest, "2b", "bfloat16", make_mesh(1, 1, tp))


def test_float16_is_refused_on_tpus(monkeypatch):
    release = RELEASES["cogvideox-2b"]
    manifest = Manifest.of_release(release)
    check_model(manifest, "2b", "float16", None)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    check_model(manifest, "2b", "bfloat16", None)
    check_model(manifest, "2b", "float16", make_mesh(1, 2, 1))  # of CPUs
    with pytest.raises(InputError, match="float16 is not served on TPUs"):
        check_model(manifest, "2b", "float16", None)


def test_no_backend_is_started_to_check_another_dtype(monkeypatch):
    release = RELEASES["cogvideox-2b"]
    manifest = Manifest.of_release(release)
    monkeypatch.setattr(jax, "default_backend", lambda: pytest.fail("a backend was started"))
    check_model(manifest, "2b", "bfloat16", None)


@pytest.mark.parametrize(
    ("name", "changes", "dtype"),
    [
        ("cogvideox-2b", {}, "bfloat16"),
        ("cogvideox1.5-5b", {}, "bfloat16"),
        ("cogvideox-5b", {"in_channels": 48}, "bfloat16"),  # a control model made from it, as CogVideoX-Fun is
        ("cogvideox-2b", {"layers": 18}, "bfloat16"),
        ("cogvideox-2b", {"layers": 16}, "float32"),
    ],
)
def test_the_dtype_of_a_run_is_decided_by_size(name, changes, dtype):
    configs = RELEASES[name].configs
    configs = {**configs, "transformer": dataclasses.replace(configs["transformer"], **changes)}
    manifest = Manifest(family="cogvideox", configs=configs)
    assert manifest.default_dtype == dtype


@pytest.mark.parametrize(
    ("component", "changes", "message"),
    [
        ("transformer", {"layers": 3_000_000}, "layers: got 3000000, expected a whole number from 1 to 1000"),
        ("transformer", {"heads": 10**4000}, "heads: got 1000.*\\.\\.\\., expected a whole number from 1 to"),
        ("transformer", {"norm_eps": 10**400}, "norm_eps: got 1000.*expected a finite number above 0"),
        ("transformer", {"norm_eps": float("nan")}, "norm_eps: got nan, expected a finite number above 0"),
        ("vae", {"scaling_factor": float("inf")}, "scaling_factor: got inf"),
        ("vae", {"block_channels": list(range(1, 40))}, "block_channels: got .*expected up to 16 whole numbers"),
        ("scheduler", {"beta_start": -1.0}, "beta_start: got -1.0"),
        ("scheduler", {"beta_end": 1.5}, "from beta 0.00085 to 1.5; expected it to rise, below 1"),
    ],
    ids=str,
)
def test_values_that_no_model_has_are_refused(component, changes, message):
    """Before anything loops over them or computes with them."""
    config = RELEASES["cogvideox-2b"].configs[component]
    with pytest.raises(CheckpointError, match=message):
        type(config).from_dict(config.to_dict() | changes)
