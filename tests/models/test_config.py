"""The released config files against the table of releases, and the sizes that each release takes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import re
from typing import Any

import diffusers
import jax
import pytest
import transformers

from cogvideox_flax.checkpoint import Manifest, read_manifest
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.generate.resolve import check_model, resolve
from cogvideox_flax.models.cogvideox.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.hunyuan_video15 import config as hunyuan
from cogvideox_flax.models.hunyuan_video15.qwen import QwenConfig
from cogvideox_flax.models.hunyuan_video15.siglip import VisionConfig
from cogvideox_flax.models.registry import RELEASES, get_release
from cogvideox_flax.models.t5 import TextEncoderConfig
from cogvideox_flax.schedulers import FlowMatchConfig
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.sharding import make_mesh
from cogvideox_flax.tokenizer import TokenizerConfig
from tests.support.reference import SHARED

CONFIGS = SHARED / "spec" / "configs"
KINDS = {
    "transformer/config.json": ("transformer", TransformerConfig),
    "vae/config.json": ("vae", VAEConfig),
    "text_encoder/config.json": ("text_encoder", TextEncoderConfig),
    "tokenizer/tokenizer_config.json": ("tokenizer", TokenizerConfig),
    "scheduler/scheduler_config.json": ("scheduler", SchedulerConfig),
}


@pytest.mark.skipif(not CONFIGS.is_dir(), reason=f"no released config files in {CONFIGS}")
@pytest.mark.parametrize("release", CogVideoX.releases.values(), ids=lambda r: r.name)
@pytest.mark.parametrize("file", KINDS)
def test_released_files_read_as_the_table_says(release, file):
    component, kind = KINDS[file]
    raw = json.loads((CONFIGS / release.hub_id.split("/")[1] / file).read_text())
    assert kind.from_hf(raw) == release.configs[component]


@pytest.mark.parametrize("release", CogVideoX.releases.values(), ids=lambda r: r.name)
def test_configs_survive_their_own_file(release):
    for component, kind in KINDS.values():
        config = release.configs[component]
        assert kind.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("release", CogVideoX.releases.values(), ids=lambda r: r.name)
def test_release_is_found_whatever_its_nominal_size(release):
    transformer = release.configs["transformer"]
    moved = dataclasses.replace(transformer, sample_height=300, sample_width=300)
    assert CogVideoX.find_release({"transformer": moved}) is release
    assert CogVideoX.find_release({"transformer": dataclasses.replace(transformer, layers=7)}) is None


def test_a_checkpoint_is_believed_which_release_it_is(tmp_path, caplog):
    """A CFG-distilled release has the configs of the one it was made from; without a name the first is taken."""
    release = RELEASES["hunyuanvideo1.5-480p-i2v-distilled"]
    raw = Manifest.of_release(release).to_json() | {"weights": {}}
    del raw["guidance_scale"]
    for name, found in ((release.name, release), (None, RELEASES["hunyuanvideo1.5-480p-i2v"])):
        manifest = Manifest.from_json(raw | {"release": name})
        assert manifest.release is found and manifest.model.defaults is found
    assert Manifest.from_json({key: value for key, value in raw.items() if key != "release"}).release is found
    (tmp_path / "config.json").write_text(json.dumps(raw | {"release": "hunyuanvideo9"}))
    assert read_manifest(tmp_path).release is found
    assert "names the release 'hunyuanvideo9', which this version does not know" in caplog.text


def test_our_own_files_are_read_strictly():
    raw = SchedulerConfig().to_dict()
    with pytest.raises(CheckpointError, match=r"unknown keys \['surprise'\]"):
        SchedulerConfig.from_dict(raw | {"surprise": 1})
    with pytest.raises(CheckpointError, match="beta_start"):
        SchedulerConfig.from_dict(raw | {"beta_start": "small"})
    with pytest.raises(InputError, match=r"cogvideox1\.5-5b-i2v"):
        get_release("cogvideox-7b")


def size(name, **kwargs):
    return CogVideoX(RELEASES[name].configs).resolve_size(**kwargs)


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
        resolve(GenerationRequest("red", **kwargs), Manifest.of_release(RELEASES[name]))
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


NOISE = {"clip_sample", "clip_sample_range", "sample_max_value", "steps_offset"}  # of other schedulers or spacings
SAMPLED = {"prediction_type": "v_prediction", "timestep_spacing": "trailing"}
REFERENCES: dict[str, tuple[Any, Any, dict[str, Any], set[str]]] = {
    "cogvideox transformer": (TransformerConfig, diffusers.CogVideoXTransformer3DModel, {}, {"dropout"}),
    "cogvideox vae": (
        VAEConfig,
        diffusers.AutoencoderKLCogVideoX,
        {},
        {
            "shift_factor",
            "latents_mean",
            "latents_std",
            "force_upcast",
        },  # neither its forward nor a pipeline reads them
    ),
    "ddim": (SchedulerConfig, diffusers.CogVideoXDDIMScheduler, SAMPLED, NOISE),
    "dpm": (SchedulerConfig, diffusers.CogVideoXDPMScheduler, SAMPLED, NOISE),
    "t5": (
        TextEncoderConfig,
        transformers.T5Config,
        {"feed_forward_proj": "gated-gelu"},
        {"dropout_rate", "classifier_dropout", "initializer_factor", "use_cache"}
        | {"num_decoder_layers", "is_encoder_decoder", "pad_token_id", "eos_token_id"},
    ),
    "qwen": (
        QwenConfig,
        transformers.Qwen2_5_VLTextConfig,
        {},
        {"attention_dropout", "initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"}
        | {"sliding_window", "max_window_layers", "max_position_embeddings"},  # of what is refused
    ),
    # the head is not run
    "siglip": (VisionConfig, transformers.SiglipVisionConfig, {}, {"attention_dropout", "vision_use_head"}),
    "hunyuan transformer": (hunyuan.TransformerConfig, diffusers.HunyuanVideo15Transformer3DModel, {}, {"task_type"}),
    "hunyuan vae": (hunyuan.VAEConfig, diffusers.AutoencoderKLHunyuanVideo15, {}, set()),
    "flow match": (
        FlowMatchConfig,
        diffusers.FlowMatchEulerDiscreteScheduler,
        {},
        {"base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "time_shift_type"},
    ),
}
"""Ours, the reference's, changes of its defaults, and its keys that do not change what it computes."""


def reference_config(name: str) -> tuple[Any, dict[str, Any], set[str]]:
    """Our type, the config file that the reference writes, and the keys of its class that change what it computes."""
    kind, reference, changes, passed_over = REFERENCES[name]
    if issubclass(reference, transformers.PreTrainedConfig):
        raw, keys = reference(**changes).to_dict(), set(reference.__annotations__)
    else:
        raw = {key: each.default for key, each in inspect.signature(reference.__init__).parameters.items()} | changes
        del raw["self"]
        raw, keys = json.loads(json.dumps(raw)), set(raw)
    assert passed_over <= keys
    return kind, raw, (keys - passed_over) & raw.keys()


def another(value: Any) -> Any:
    """A value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return 2 * value or 1
        case str():
            return value + "-2"
        case dict():
            return value | {"rope_type": "linear", "factor": 2.0}
        case [str(), *_]:
            return ["sliding_attention", *value[1:]]
        case list():
            return [*value[:-1], 2 * value[-1]]
    return [0.5]


@pytest.mark.parametrize("name", REFERENCES)
def test_every_key_that_changes_the_computation_is_read_or_refused(name):
    kind, raw, keys = reference_config(name)
    usual = kind.from_hf(raw)
    assert len(keys) >= 7
    for key in keys:
        try:
            assert kind.from_hf(raw | {key: another(raw[key])}) != usual, key
        except CheckpointError as e:
            assert "supported is" in str(e) or "expected" in str(e)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "qwen",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope_parameters.rope_type: got 'yarn', .*'de",
        ),
        ("qwen", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type: got 'linear'"),
        (
            "qwen",
            {"rope_scaling": {"rope_type": "dynamic", "type": "default"}},
            "rope_scaling.rope_type: got 'dynamic'",
        ),
        ("qwen", {"text_config": {"rope_scaling": {"type": "longrope"}}}, "rope_scaling.rope_type: got 'longrope'"),
        ("qwen", {"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "rope_type: got {'full_attention'"),
        ("qwen", {"use_sliding_window": True}, "use_sliding_window: got True, supported is False"),
        ("qwen", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: got .*'sliding_attention'"),
        ("qwen", {"head_dim": 64}, "head_dim: got 64, supported is 128"),
        ("qwen", {"hidden_act": None}, "hidden_act: got None, supported is 'silu'"),
        ("t5", {"feed_forward_proj": "gated-silu"}, "feed_forward_proj: got 'gated-silu', supported is 'gated-gelu'"),
        ("t5", {"is_gated_act": False}, "is_gated_act: got False"),
        ("t5", {"dense_act_fn": "relu"}, "dense_act_fn: got 'relu', supported is 'gelu_new'"),
        ("t5", {"is_decoder": True}, "is_decoder: got True"),
        ("t5", {"model_type": "umt5"}, "model_type: got 'umt5'"),
        ("t5", {"relative_attention_num_buckets": 3}, "3 buckets of distances up to 128; expected 4"),
        ("t5", {"relative_attention_max_distance": 8}, "32 buckets of distances up to 8"),
        ("siglip", {"hidden_act": "gelu"}, "hidden_act: got 'gelu', supported is 'gelu_pytorch_tanh'"),
        ("siglip", {"num_channels": 1}, "num_channels: got 1, supported is 3"),
        ("siglip", {"image_size": [384, 192]}, r"image_size: got \[384, 192\], expected a whole number"),
        ("cogvideox transformer", {"flip_sin_to_cos": None}, "flip_sin_to_cos: got None, supported is True"),
        ("cogvideox transformer", {"freq_shift": 1}, "freq_shift: got 1, supported is 0"),
        ("cogvideox transformer", {"activation_fn": "gelu"}, "activation_fn: got 'gelu'"),
        ("cogvideox transformer", {"out_channels": None}, "out_channels: got None"),
        ("cogvideox vae", {"use_quant_conv": True}, "use_quant_conv: got True"),
        ("cogvideox vae", {"down_block_types": ["CogVideoXUpBlock3D"] * 4}, "expected CogVideoXDownBlock3D 4 times"),
        ("cogvideox vae", {"up_block_types": ["CogVideoXUpBlock3D"] * 3}, "expected CogVideoXUpBlock3D 4 times"),
        ("cogvideox vae", {"temporal_compression_ratio": 4.5}, "temporal_compression: got 4.5"),
        ("cogvideox vae", {"temporal_compression_ratio": 16}, "compression is 16; expected a power of two, at most 8"),
        ("hunyuan transformer", {"qk_norm": None}, "qk_norm: got None, supported is 'rms_norm'"),
        ("hunyuan transformer", {"patch_size": 2}, "patch_size: got 2, supported is 1"),
        ("hunyuan vae", {"upsample_match_channel": False}, "upsample_match_channel: got False"),
        ("hunyuan vae", {"downsample_match_channel": None}, "downsample_match_channel: got None"),
        ("hunyuan vae", {"temporal_compression_ratio": 3}, "temporal compression is 3; expected a power of two"),
        ("hunyuan vae", {"spatial_compression_ratio": 17}, "spatial compression is 17; expected a power of two"),
        ("ddim", {"prediction_type": "epsilon"}, "prediction_type: got 'epsilon', supported is 'v_prediction'"),
        ("dpm", {"beta_schedule": "linear"}, "beta_schedule: got 'linear', supported is 'scaled_linear'"),
        ("dpm", {"trained_betas": [0.1]}, r"trained_betas: got \[0.1\], supported is None"),
        ("flow match", {"stochastic_sampling": True}, "stochastic_sampling: got True, supported is False"),
        ("flow match", {"shift_terminal": 0.1}, "shift_terminal: got 0.1, supported is None"),
    ],
    ids=str,
)
def test_configs_that_compute_something_else_are_refused(name, changes, message):
    kind, raw, _ = reference_config(name)
    with pytest.raises(CheckpointError, match=message):
        kind.from_hf(raw | changes)


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("t5", "feed_forward_proj", "feed_forward_proj: got 'relu'"),
        ("ddim", "prediction_type", "prediction_type: got 'epsilon'"),
        ("dpm", "timestep_spacing", "timestep_spacing: got 'leading'"),
    ],
)
def test_a_missing_key_has_the_default_of_the_reference(name, key, message):
    kind, raw, _ = reference_config(name)
    del raw[key]
    with pytest.raises(CheckpointError, match=message):
        kind.from_hf(raw)


@pytest.mark.parametrize("name", REFERENCES)
def test_other_missing_keys_too(name):
    kind, raw, keys = reference_config(name)
    needed = {"feed_forward_proj", "prediction_type", "timestep_spacing", "vocab_size", "hidden_size", "d_model"}
    needed |= {
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "d_kv",
        "d_ff",
    }
    for key in keys - needed:
        assert kind.from_hf({name: value for name, value in raw.items() if name != key}) == kind.from_hf(raw), key


@pytest.mark.parametrize(
    "positions",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [16, 24, 24]}},
        {"rope_scaling": {"type": "mrope", "rope_theta": 5e5}, "rope_parameters": {"rope_theta": 7.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [16, 24, 24]}},
        {"rope_parameters": {"rope_type": "mrope", "rope_theta": 5e5}, "rope_theta": 7.0, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
        {"rope_theta": 5e5, "layer_types": ["full_attention"] * 80, "head_dim": None, "use_sliding_window": None},
    ],
    ids=str,
)
def test_positions_of_every_version_are_read(positions):
    kind, raw, _ = reference_config("qwen")
    del raw["rope_parameters"]
    assert kind.from_hf(raw | positions).rope_theta == 5e5
    assert transformers.Qwen2_5_VLTextConfig(**raw | positions).rope_parameters["rope_theta"] == 5e5
