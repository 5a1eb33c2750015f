"""A second family, registered by a test: converted, loaded, quantized, adapted, planned and run as the first one is."""

from __future__ import annotations

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cogvideox_flax import RELEASES, GenerationRequest, Pipeline, checkpoint, cli, hub, sharding
from cogvideox_flax.checkpoint.quantize import quantize_checkpoint
from cogvideox_flax.conversion.configs import find_family
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.conversion.tables import TABLES as ALL_TABLES
from cogvideox_flax.conversion.tables import register_tables
from cogvideox_flax.errors import CheckpointError, ConversionError, InputError
from cogvideox_flax.generate.request import STAGES
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.io.tensor_file import TensorFile
from cogvideox_flax.io.video import read_video, save_video
from cogvideox_flax.lora import add_lora, describe_lora, lora_parameters, merge_files, save_lora
from cogvideox_flax.models import registry
from cogvideox_flax.models.registry import FAMILIES, component_names, get_family, get_release, register
from cogvideox_flax.plan import forecast, suitable_layouts
from cogvideox_flax.plan.chips import CHIPS
from cogvideox_flax.plan.flops import count_flops
from cogvideox_flax.training.metrics import read_metrics
from tests.support.tiny_family import CONFIGS, RELEASE, TABLES, Denoiser, Tiny, save_layout


@pytest.fixture(autouse=True, scope="module")
def tiny():
    register(Tiny)
    register_tables("tiny", TABLES)
    yield
    del registry._CLASSES["tiny"]
    del ALL_TABLES["tiny"]


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny") / "hf"


@pytest.fixture(scope="module", autouse=True)
def tensors(layout):
    return save_layout(layout)


@pytest.fixture(scope="module")
def native(layout):
    convert(layout, layout.with_name("native"))
    return layout.with_name("native")


def context():
    return jnp.asarray(np.random.default_rng(1).normal(size=(2, 8, 16)), jnp.float32)


def test_the_registry_knows_both():
    assert list(FAMILIES)[-1] == "tiny" and get_family("tiny") is Tiny
    assert get_release("Tiny-1") is RELEASE and RELEASES["cogvideox-2b"].family == "cogvideox"
    assert component_names()[:3] == ["text_encoder", "transformer", "vae"]
    assert component_names()[-3:] == ["text_encoder_1", "denoiser", "codec"]
    assert (Tiny.denoiser, Tiny.decoder) == ("denoiser", "codec")
    with pytest.raises(InputError, match=r"unknown model family 'wan'; this version knows cogvideox, .*, tiny"):
        get_family("wan")
    with pytest.raises(ValueError, match="registered already"):
        register(Tiny)


def test_a_directory_is_converted_by_the_family_that_its_configs_name(layout, native, tensors):
    assert find_family(layout) is Tiny
    manifest = checkpoint.read_manifest(native)
    assert (manifest.family, manifest.configs, manifest.release) == ("tiny", CONFIGS, RELEASE)
    assert json.loads((native / "config.json").read_text())["family"] == "tiny"
    assert manifest.default_dtype == "float32"
    checkpoint.verify(native)
    loaded = checkpoint.parameters(checkpoint.load_component("denoiser", native))
    for i in range(3):
        source = tensors["denoiser"][f"layers.{i}.ffn.fc1.weight"]
        np.testing.assert_array_equal(loaded["blocks.mlp.up.kernel"][i], source.T)
    embedding = checkpoint.load_component("text_encoder_1", native).embedding[...]
    np.testing.assert_array_equal(embedding, tensors["text_encoder_1"]["embed_tokens.weight"])
    ids = manifest.model.make_tokenizer(native)(["a red ball"])
    assert ids.tolist() == [[1, 2, 3, 0, 0, 0]]
    assert checkpoint.fingerprints(native, manifest).keys() == CONFIGS.keys()


def test_a_checkpoint_that_names_no_family_is_of_the_first():
    raw = json.loads((hub.EMBEDDED / "config.json").read_text())
    del raw["family"]  # as older versions wrote it
    raw["spiece_sha256"] = raw.pop("tokenizer_sha256")["tokenizer/spiece.model"]
    manifest = checkpoint.Manifest.from_json(raw)
    assert manifest == checkpoint.read_manifest(hub.EMBEDDED)
    assert manifest.tokenizer_sha256 == {"tokenizer/spiece.model": raw["spiece_sha256"]}
    again = manifest.from_json(json.loads(json.dumps(manifest.to_json())))
    assert again == manifest and manifest.to_json()["family"] == "cogvideox"


def test_what_does_not_fit_is_refused(layout, native, tmp_path):
    with pytest.raises(InputError, match="does not survive float16"):
        convert(layout, tmp_path / "half", dtype="float16")
    with pytest.raises(InputError, match="unknown component 'vae'; known are text_encoder_1, denoiser, codec"):
        convert(layout, tmp_path / "vae", components=["vae"])
    with pytest.raises(CheckpointError, match="has no vae"):
        checkpoint.load_vae(native)
    with pytest.raises(InputError, match="does not survive float16"):
        checkpoint.load_component("denoiser", native, dtype="float16")
    shutil.copytree(hub.EMBEDDED, tmp_path / "embedded")
    with pytest.raises(InputError, match="holds a model of the family cogvideox"):
        convert(layout, tmp_path / "embedded")
    odd = shutil.copytree(layout, tmp_path / "odd")
    raw = json.loads((odd / "denoiser" / "config.json").read_text())
    (odd / "denoiser" / "config.json").write_text(json.dumps(raw | {"qk_norm": "none"}))
    with pytest.raises(ConversionError, match="asks for what is not implemented"):
        convert(odd, tmp_path / "x")
    raw = json.loads((native / "config.json").read_text())
    other = shutil.copytree(native, tmp_path / "other")
    (other / "config.json").write_text(json.dumps(raw | {"family": "wan"}))
    with pytest.raises(InputError, match=r"config\.json: unknown model family 'wan'"):
        checkpoint.read_manifest(other)


def test_one_component_by_the_command(layout, tmp_path, capsys):
    assert cli.main(["convert", str(layout), str(tmp_path / "dst"), "--component", "denoiser"]) == 0
    manifest = checkpoint.read_manifest(tmp_path / "dst")
    assert list(manifest.weights) == ["denoiser"] and "codec" not in manifest.configs
    assert cli.main(["convert", str(layout), str(tmp_path / "dst"), "--component", "codec"]) == 0
    assert list(checkpoint.read_manifest(tmp_path / "dst").weights) == ["denoiser", "codec"]


def test_the_cache_converts_it_once(layout):
    assert hub.peek(layout).configs == CONFIGS
    native = hub.find(layout, progress=False)
    assert hub.find(layout, progress=False) == native
    assert checkpoint.read_manifest(native).family == "tiny"


@pytest.mark.parametrize("mesh", [(2, 1, 4), (2, 2, 2, True)], ids=["tp", "fsdp"])
def test_on_a_mesh_it_computes_the_same(native, mesh):
    mesh = sharding.make_mesh(*mesh)
    alone = checkpoint.load_component("denoiser", native)(context())
    spread = checkpoint.load_component("denoiser", native, mesh=mesh)
    kernel = spread.blocks.mlp.up.kernel[...]
    parts = mesh.shape["tp"] * (4 if "fsdp" in mesh.axis_names else 1)
    assert kernel.addressable_shards[0].data.size * parts == kernel.size
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(Denoiser.__call__)(spread, context()), alone, atol=1e-5)


def test_quantized(native):
    int8 = native.with_name("int8")
    quantize_checkpoint(native, int8)
    manifest = checkpoint.read_manifest(int8)
    assert [manifest.quantized(name) for name in Tiny.components] == [None, "int8", None]
    assert manifest.tokenizer_sha256 == checkpoint.read_manifest(native).tokenizer_sha256
    small = checkpoint.load_component("denoiser", int8, dtype="bfloat16")
    assert small.blocks.mlp.up.kernel.dtype == jnp.int8 and small.blocks.mlp.up.scale.dtype == jnp.float32
    assert small.blocks.mlp.up.bias is not None and small.blocks.mlp.up.bias.dtype == jnp.bfloat16
    exact, found = (checkpoint.load_component("denoiser", path)(context()) for path in (native, int8))
    assert float(jnp.abs(found - exact).max() / exact.std()) < 0.1
    with pytest.raises(InputError, match="no quantized form of 'codec'; there is one of denoiser"):
        quantize_checkpoint(native, native.with_name("x"), ["codec"])


def test_adapters(native, tmp_path):
    model = checkpoint.load_component("denoiser", native)
    adapted = add_lora(Tiny, model, 2, rngs=nnx.Rngs(0))
    assert sorted(lora_parameters(adapted)) == ["blocks.mlp.up.a", "blocks.mlp.up.b"]
    adapted.blocks.mlp.up.b = nnx.Param(jnp.ones_like(adapted.blocks.mlp.up.b[...]))
    path = save_lora(Tiny, tmp_path, adapted)
    record = describe_lora(Tiny, path, 1.0, CONFIGS["denoiser"])
    assert record["file"] == str(path)
    merged = merge_files(Tiny, CONFIGS["denoiser"], model, [record]).denoiser
    np.testing.assert_allclose(merged(context()), adapted(context()), atol=1e-5)


@pytest.mark.parametrize("form", ["native", "hf"])
def test_info(form, native, layout, capsys):
    assert cli.main(["info", str(native if form == "native" else layout)]) == 0
    text = capsys.readouterr().out
    assert "tiny-1" in text and "5 frames of 16x16 at 8 fps, 4 flow_match steps" in text
    for name, count in (("text_encoder_1", 192), ("denoiser", 13_120), ("codec", 27)):
        assert re.search(rf"  {name} +{count:,} parameters", text)


# --- runs

STEPS = {"num_inference_steps": 3, "progress": False}


@pytest.fixture(scope="module")
def pipe(native):
    return Pipeline.from_pretrained(native, "float32")


def test_the_pipeline_runs_it(pipe):
    video = pipe(["a red ball", "ball rolls"], output_type="float", **STEPS)
    assert video.frames.shape == (2, 5, 16, 16, 3) and video.fps == 8
    assert video.metadata["settings"]["scheduler"] == "flow_match" and video.metadata["release"] == "tiny-1"
    # what it predicts has one colour, so all pixels of a video have it, but for timesteps that are whole numbers
    assert np.ptp(video.frames, (1, 2, 3)).max() < 1e-3 and np.abs(video.frames[0] - video.frames[1]).max() > 1e-3
    plain = pipe("a red ball", output_type="float", guidance_scale=1, **STEPS)
    assert np.abs(plain.frames - video.frames[:1]).max() > 1e-4
    one = pipe(["a red ball", "ball rolls"], output_type="float", one_program=True, **STEPS)
    np.testing.assert_allclose(one.frames, video.frames, atol=1e-5)
    at_once = pipe(["a red ball", "ball rolls"], output_type="float", compiled_loop=True, **STEPS)
    np.testing.assert_allclose(at_once.frames, video.frames, atol=1e-5)
    conditioning = pipe.encode(GenerationRequest("red"), progress=False)
    assert {name: x.shape for name, x in conditioning.text.items()} == Tiny(CONFIGS).feature_shapes(1)


def test_latents_are_normalized_per_channel(pipe):
    """Those of a clip that a run starts from, and back where they are decoded."""
    codec = pipe.manifest.model.codec
    clip = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), np.uint8)
    request = GenerationRequest("a red ball", video=clip, strength=0.5, num_inference_steps=4)
    latents = np.asarray(pipe.encode(request, progress=False).video)
    z = np.asarray(codec.encode(None, clip[None] / np.float32(127.5) - 1)[0])
    mean, std = (np.float32(each) / 1000 for each in (CONFIGS["codec"].latent_mean, CONFIGS["codec"].latent_std))
    np.testing.assert_allclose(latents, (z - mean) / std, atol=1e-6)
    decoded = pipe.decode(latents, output_type="float", progress=False)
    np.testing.assert_allclose(decoded, np.asarray(pipe.codec(z)) / 2 + 0.5, atol=1e-6)
    assert pipe(request, progress=False).frames.shape == (1, 5, 16, 16, 3)
    again = type(codec)(type(CONFIGS["codec"])())  # programs compare by their configs
    assert again == codec and hash(again) == hash(codec)


@pytest.mark.parametrize("form", ["deepcache", "residual"])
def test_a_step_cache_is_of_every_family(pipe, form):
    """Its blocks see the prompt alone, so what they gave in one step is right in all."""
    exact = pipe("a red ball", output_type="float", **STEPS).frames
    schedule = (1, STEPS["num_inference_steps"], 9)
    cached = pipe("a red ball", output_type="float", step_cache=form, step_cache_schedule=schedule, **STEPS)
    np.testing.assert_allclose(cached.frames, exact, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_frames": 9, "height": None}, None),
        ({"num_frames": 8}, "it must be 4 n . 1"),
        ({"scheduler": "ddim"}, "unknown scheduler 'ddim'; known are flow_match"),
        ({"tiling": True}, "the tiny codec has no tiles"),
    ],
)
def test_its_own_rules_count(pipe, change, message):
    if message is None:
        assert pipe("red", **STEPS, **change).frames.shape == (1, 9, 16, 16, 3)
        return
    with pytest.raises(InputError, match=message):
        pipe("red", **STEPS, **change)


def test_in_stages_on_disk_it_is_the_same_run(native, tmp_path, capsys):
    run, steps = str(tmp_path / "run"), ["--steps", "3", "--quiet"]
    assert cli.main(["encode", "a red ball", "--model", str(native), "--dir", run, "--quiet"]) == 0
    with TensorFile(tmp_path / "run" / "stage1_embeddings.safetensors") as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
    both = Tiny(CONFIGS).feature_shapes(1)
    assert shapes == both | {f"negative_{name}": shape for name, shape in both.items()}
    assert cli.main(["denoise", "--dir", run, *steps]) == 0
    assert cli.main(["decode", "--dir", run, "--quiet"]) == 0
    out = tmp_path / "v.mp4"
    assert cli.main(["generate", "a red ball", "--model", str(native), "--out", str(out), *steps]) == 0
    frames = [read_video(path)[0] for path in (out, tmp_path / "run" / "output_video.mp4")]
    assert frames[0].shape == (5, 16, 16, 3) and (frames[0] == frames[1]).all()


@pytest.mark.parametrize("mesh", [(2, 1, 4), (2, 2, 2, True)], ids=["tp", "fsdp"])
def test_a_mesh_gives_the_same_video(pipe, native, mesh):
    spread = Pipeline.from_pretrained(native, "float32", sharding.make_mesh(*mesh))
    alone, found = (each("a red ball", output_type="float", **STEPS).frames for each in (pipe, spread))
    np.testing.assert_allclose(found, alone, atol=1e-5)
    with pytest.raises(InputError, match="4 does not divide over mesh axis tp of size 8"):
        Pipeline.from_pretrained(native, "float32", sharding.make_mesh(1, 1, 8))


def test_quantized_it_runs(pipe, native):
    int8 = native.with_name("int8 run")
    quantize_checkpoint(native, int8)
    found = Pipeline.from_pretrained(int8, "float32")("a red ball", output_type="float", **STEPS).frames
    assert 0 < np.abs(found - pipe("a red ball", output_type="float", **STEPS).frames).max() < 0.05


def test_it_is_fine_tuned(native, tmp_path, capsys):
    """Adapters for red, learned from clips in red."""
    for name in ("a", "b"):
        save_video(tmp_path / "clips" / name, np.full((5, 16, 16, 3), (250, 5, 5), np.uint8), fps=8)
        (tmp_path / "clips" / f"{name}.txt").write_text("a red ball")
    settings = f"""
        model = "{native}"
        clips = "{tmp_path}/clips"
        out = "{tmp_path}/run"
        caption_dropout = 0.0
        [loop]
        steps = 60
        [optimizer]
        learning_rate = 3e-2
        warmup_steps = 0
        [lora]
        rank = 4
        targets = ["up", "down"]
    """
    (tmp_path / "red.toml").write_text(settings)
    assert cli.main(["train", "--config", str(tmp_path / "red.toml"), "--quiet"]) == 0
    adapter = capsys.readouterr().out.strip()
    lines = read_metrics(tmp_path / "run" / "training" / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.3 * losses[0]
    (tmp_path / "red.toml").write_text(settings.replace('"down"', '"q"'))
    assert cli.main(["train", "--config", str(tmp_path / "red.toml")]) == 2
    assert "expected some of up, down" in capsys.readouterr().err
    red = Tiny(CONFIGS).codec.statistics.normalize(
        np.float32([250 / 127.5 - 1, 5 / 127.5 - 1, 5 / 127.5 - 1, *[0] * 5])
    )
    for lora, learned in (([], False), ([adapter], True)):
        found = Pipeline.from_pretrained(native, "float32")(
            "a red ball", output_type="latent", guidance_scale=1, lora=lora, **STEPS
        )
        off = np.abs(found.frames - red)[..., :3].mean()
        assert (off < 0.35) == learned, off


def test_its_stages_are_planned(native):
    manifest = checkpoint.read_manifest(native)
    run = resolve(GenerationRequest(""), manifest, "float32")
    for stage in (*STAGES, "run"):
        ((program, args, runs),) = run.abstract(stage)
        assert (count_flops(program, *args).total > 0) == (stage != "encode")  # which only looks words up
        assert runs == {"encode": 2, "denoise": 4}.get(stage, 1)
    found = suitable_layouts(run, 8, CHIPS["v6e"])[0]
    assert found.mesh[2] <= 4 and found.seconds > 0
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed: pip install 'jax[tpu]'")
    for stage in forecast(run, "v6e:2x4", (2, 1, 4)):
        assert stage.fits and stage.hbm_gib_per_chip > 0
