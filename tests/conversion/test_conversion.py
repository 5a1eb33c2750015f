"""Conversion: complete, strict, streaming, atomic, resumable; the models' own tests go through it too."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file
from transformers import T5Tokenizer

from cogvideox_flax.checkpoint import check_weights, load_transformer, load_vae, parameters, read_manifest, verify
from cogvideox_flax.cli import main
from cogvideox_flax.conversion import convert as conversion_module
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.conversion.mapping import weight_moves
from cogvideox_flax.errors import CheckpointError, ConversionError, InputError, install_extra
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.io.tensor_file import TensorFile
from cogvideox_flax.models.cogvideox.config import VAEConfig
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.registry import RELEASES
from cogvideox_flax.models.t5 import TextEncoderConfig
from tests.support import processes
from tests.support.reference import (
    ARCHITECTURES,
    SHARED,
    convert_component,
    make_scheduler,
    make_text_encoder,
    make_transformer,
    make_vae,
    save_layout,
)

KEYS = SHARED / "spec" / "keys"
needs_keys = pytest.mark.skipif(not KEYS.is_dir(), reason=f"no key lists of the released checkpoints in {KEYS}")


def read_keys(name: str) -> dict[str, tuple[int, ...]]:
    rows = (line.split("\t") for line in (KEYS / name).read_text().splitlines())
    return {key: tuple(map(int, re.findall(r"\d+", shape))) for key, shape in rows}


@needs_keys
@pytest.mark.parametrize("release", CogVideoX.releases.values(), ids=lambda r: r.name)
def test_every_released_transformer_key_maps(release):
    keys = read_keys(f"{release.hub_id.split('/')[1]}.transformer.txt")
    mapped = weight_moves(CogVideoX, "transformer", release.configs["transformer"], keys)
    assert set(mapped.moves) == set(keys)
    sizes = sum(int(np.prod(shape)) for shape in mapped.shapes.values())
    assert sizes == sum(int(np.prod(shape)) for shape in keys.values())


@needs_keys
def test_every_released_vae_key_maps():
    keys = read_keys("vae.txt")
    assert set(weight_moves(CogVideoX, "vae", VAEConfig(), keys).moves) == set(keys)


@needs_keys
@pytest.mark.parametrize("absent", [None, "shared.weight", "encoder.embed_tokens.weight"])
def test_every_released_text_encoder_key_maps(absent):
    keys = read_keys("t5_xxl_encoder.txt")
    keys.pop(absent, None)
    moves = weight_moves(CogVideoX, "text_encoder", TextEncoderConfig(), keys).moves
    assert set(keys) - set(moves) <= {"encoder.embed_tokens.weight"}  # tied to shared.weight


@pytest.fixture(scope="module")
def transformer():
    return make_transformer("cogvideox-5b")


def save(module, folder: Path, **kwargs) -> Path:
    module.save_pretrained(folder / "transformer", **kwargs)
    return folder


def weights_of(folder: Path) -> Path:
    return folder / "transformer" / "diffusion_pytorch_model.safetensors"


def edit(folder: Path, change) -> None:
    tensors = load_file(weights_of(folder))
    change(tensors)
    save_file(tensors, weights_of(folder))


def test_sharded_and_single_files_give_the_same(transformer, tmp_path):
    single = save(transformer, tmp_path / "single")
    sharded = save(transformer, tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((sharded / "transformer").glob("*.safetensors"))) > 3
    convert(single, tmp_path / "a")
    convert(sharded, tmp_path / "b")
    a, b = (load_file(tmp_path / x / "transformer" / "model.safetensors") for x in "ab")
    assert a.keys() == b.keys()
    assert all((a[k] == b[k]).all() for k in a)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype, tmp_path):
    model = make_transformer("cogvideox-2b")
    exact = load_transformer(convert_component("transformer", model, tmp_path / "exact"))
    # stored in that dtype and kept; or stored as float32 and cast on the way
    kept = convert_component("transformer", model.to(getattr(torch, dtype)), tmp_path / "kept")
    cast = convert_component("transformer", make_transformer("cogvideox-2b"), tmp_path / "cast", dtype=dtype)
    for native in (kept, cast):
        module = load_transformer(native)
        for name, value in parameters(module).items():
            assert value.dtype == dtype
            assert (np.asarray(value) == np.asarray(parameters(exact)[name]).astype(dtype)).all(), name
        assert read_manifest(native).weights["transformer"]["dtype"] == dtype


def test_loading_casts(tmp_path):
    native = convert_component("vae", make_vae(), tmp_path)
    exact, rounded = parameters(load_vae(native)), parameters(load_vae(native, dtype="bfloat16"))
    for name, value in rounded.items():
        assert value.dtype == "bfloat16"
        assert (np.asarray(value) == np.asarray(exact[name]).astype(ml_dtypes.bfloat16)).all()


@pytest.mark.further
def test_peak_memory_is_near_one_tensor(tmp_path):
    """A fresh process converts 2 GB whose largest tensor is 34 MB; its peak must not know the difference."""
    folder = tmp_path / "hf" / "text_encoder"
    folder.mkdir(parents=True)
    config = {"vocab_size": 64, "d_model": 2048, "num_layers": 12, "num_heads": 32, "d_kv": 64, "d_ff": 4096}
    (folder / "config.json").write_text(json.dumps(config | {"feed_forward_proj": "gated-gelu"}))
    with torch.device("meta"):
        meta = make_meta_text_encoder(config)
    tensors = {
        name: np.zeros(tuple(value.shape), np.float32)
        for name, value in meta.state_dict().items()
        if name != "encoder.embed_tokens.weight"
    }
    total, largest = sum(t.nbytes for t in tensors.values()), max(t.nbytes for t in tensors.values())
    save_file(tensors, folder / "model.safetensors")
    code = """
import resource, sys
from cogvideox_flax.conversion.convert import convert
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024)
"""
    run = processes.run([sys.executable, "-c", code, tmp_path / "hf", tmp_path / "native"])
    assert run.returncode == 0, run.stderr
    grown = int(run.stdout.splitlines()[-1])
    assert total > 10 * largest
    # one tensor as read, cast and turned, as written, and as read back; tracing the abstract model
    assert grown < 4 * largest + 150e6, f"{grown / 1e6:.0f} MB for tensors of {largest / 1e6:.0f} MB"


def make_meta_text_encoder(config):
    import transformers

    return transformers.T5EncoderModel(transformers.T5Config(feed_forward_proj="gated-gelu", **config))


def test_components_can_be_added_one_at_a_time(transformer, tmp_path):
    src = tmp_path / "src"
    transformer.save_pretrained(src / "transformer")
    make_vae().save_pretrained(src / "vae")
    make_text_encoder().save_pretrained(src / "text_encoder")
    dst = tmp_path / "dst"
    for i, component in enumerate(("vae", "transformer", "text_encoder")):
        convert(src, dst, components=[component])
        assert len(read_manifest(dst).weights) == i + 1
        check_weights(dst, component, read_manifest(dst))
    verify(dst)
    assert not (dst / ".conversion").exists()


def test_origin_and_hashes_are_kept(transformer, tmp_path):
    src = save(transformer, tmp_path / "src")
    convert(src, tmp_path / "dst", origin={"hub_id": "a/b", "revision": "c" * 40})
    source = read_manifest(tmp_path / "dst").weights["transformer"]["source"]
    assert source["hub_id"] == "a/b"
    assert source["revision"] == "c" * 40
    assert list(source["sha256"]) == ["diffusion_pytorch_model.safetensors"]
    weights = tmp_path / "dst" / "transformer" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match="SHA-256"):
        verify(tmp_path / "dst")


def test_a_killed_conversion_leaves_nothing_that_loads_and_is_taken_up(transformer, tmp_path, monkeypatch):
    src = save(transformer, tmp_path / "src")
    make_vae().save_pretrained(src / "vae")
    dst = tmp_path / "dst"
    real, written = conversion_module.write_tensors, []

    def die_in_vae(source, todo, targets, path, component, progress):
        if component == "vae":
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(component)
        return real(source, todo, targets, path, component, progress)

    monkeypatch.setattr(conversion_module, "write_tensors", die_in_vae)
    with pytest.raises(KeyboardInterrupt):
        convert(src, dst)
    with pytest.raises(CheckpointError, match="not a native checkpoint"):
        load_transformer(dst)

    def count(*args):
        written.append(args[4])
        return real(*args)

    monkeypatch.setattr(conversion_module, "write_tensors", count)
    convert(src, dst)
    assert written == ["transformer", "vae"]  # the transformer once only
    verify(dst)


def test_a_kill_while_moving_into_place_is_finished_by_the_next_attempt(transformer, tmp_path, monkeypatch):
    src = save(transformer, tmp_path / "src")
    dst = tmp_path / "dst"
    real = os.replace

    def die(a, b):
        if Path(b) == dst / "config.json":
            raise KeyboardInterrupt
        real(a, b)

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        convert(src, dst)
    monkeypatch.setattr(os, "replace", real)
    with pytest.raises(CheckpointError, match=r"is not a native checkpoint: no readable config\.json"):
        load_transformer(dst)
    convert(src, dst)
    verify(dst)


def test_a_kill_while_replacing_a_checkpoint_leaves_no_mixture_that_loads(transformer, tmp_path, monkeypatch):
    src = save(transformer, tmp_path / "src")
    make_vae().save_pretrained(src / "vae")
    dst = tmp_path / "dst"
    convert(src, dst)
    real = Path.rename

    def die(self, target):
        if Path(target) == dst / "vae":
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        convert(src, dst, dtype="bfloat16")
    monkeypatch.undo()
    for load in (load_transformer, load_vae):
        with pytest.raises(CheckpointError, match="not a native checkpoint"):
            load(dst)
    convert(src, dst, dtype="bfloat16")
    verify(dst)
    assert {r["dtype"] for r in read_manifest(dst).weights.values()} == {"bfloat16"}


def test_adding_a_component_keeps_the_noise_schedule(transformer, tmp_path):
    one, other = save(transformer, tmp_path / "one"), tmp_path / "other"
    make_scheduler("ddim", 1.0).save_pretrained(one / "scheduler")
    make_vae().save_pretrained(other / "vae")
    make_scheduler("ddim", 3.0).save_pretrained(other / "scheduler")
    convert(one, tmp_path / "dst")
    convert(other, tmp_path / "dst")
    assert read_manifest(tmp_path / "dst").configs["scheduler"].snr_shift_scale == 1.0


def test_two_conversions_into_one_place(transformer, tmp_path):
    src = save(transformer, tmp_path / "src")

    def meddle(component, done, total):
        with pytest.raises(InputError, match="another conversion is writing"):
            convert(src, tmp_path / "dst")

    convert(src, tmp_path / "dst", progress=meddle)
    verify(tmp_path / "dst")


def test_float16_of_a_bfloat16_model_is_not_loaded(transformer, tmp_path):
    native = convert_component("transformer", transformer, tmp_path)
    with pytest.raises(InputError, match="float16 gives NaN"):
        load_transformer(native, dtype="float16")


def test_changed_source_is_not_taken_over(tmp_path):
    src = save(make_transformer("cogvideox-5b"), tmp_path / "src")
    dst = tmp_path / "dst"
    convert(src, dst)
    first = read_manifest(dst).weights["transformer"]["sha256"]
    save(make_transformer("cogvideox-5b", seed=1), src)
    convert(src, dst)
    assert read_manifest(dst).weights["transformer"]["sha256"] != first
    verify(dst)


# --- bad input: one clear message, nothing that loads left behind ---


def faults(src: Path, dst: Path, **kwargs) -> str:
    with pytest.raises(InputError) as error:
        convert(src, dst, **kwargs)
    assert not (dst / "config.json").exists()
    return str(error.value)


def test_missing_renamed_and_misshapen_tensors_are_all_reported(transformer, tmp_path):
    src = save(transformer, tmp_path / "src")

    def spoil(tensors):
        del tensors["transformer_blocks.1.attn1.norm_q.weight"]
        tensors["transformer_blocks.0.ff.net.9.bias"] = tensors.pop("transformer_blocks.0.ff.net.2.bias")
        tensors["proj_out.bias"] = tensors["proj_out.bias"][:-1]
        tensors["transformer_blocks.2.ff.net.2.bias"] = tensors["norm_final.bias"]

    edit(src, spoil)
    message = faults(src, tmp_path / "dst")
    assert "(5 faults)" in message
    assert "missing  blocks.attn.norm_q.scale layer 1 (transformer_blocks.1.attn1.norm_q.weight)" in message
    assert "missing  blocks.mlp.down.bias layer 0 (transformer_blocks.0.ff.net.2.bias)" in message
    assert "unused   transformer_blocks.0.ff.net.9.bias" in message
    assert "unused   transformer_blocks.2.ff.net.2.bias (this model has no blocks.mlp.down.bias layer 2)" in message
    assert "shape    proj_out.bias: got (63,)" in message


@needs_keys
def test_wrong_release_is_named():
    keys = read_keys("CogVideoX-5b.transformer.txt")
    with pytest.raises(ConversionError, match=r"these tensors fit cogvideox-5b.*--release cogvideox-5b"):
        weight_moves(CogVideoX, "transformer", RELEASES["cogvideox1.5-5b"].configs["transformer"], keys)


@pytest.mark.parametrize("release", ARCHITECTURES)
def test_a_config_of_another_architecture_is_refused(release, tmp_path):
    other = "cogvideox1.5-5b" if "1.5" not in release else "cogvideox-5b"
    src = save(make_transformer(release), tmp_path / "src")
    shutil.copy(save(make_transformer(other), tmp_path / "other") / "transformer" / "config.json", src / "transformer")
    assert "does not match its config" in faults(src, tmp_path / "dst")


def test_truncated_file(transformer, tmp_path):
    src = save(transformer, tmp_path / "src")
    data = weights_of(src).read_bytes()
    weights_of(src).write_bytes(data[: len(data) // 2])
    assert "is cut short" in faults(src, tmp_path / "dst")


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00" * 7, b"\xff" * 64, b"\x10" + b"\x00" * 7 + b"not json at all!", b"\x02" + b"\x00" * 7 + b"[]"],
)
def test_corrupt_header(data, transformer, tmp_path):
    src = save(transformer, tmp_path / "src")
    weights_of(src).write_bytes(data)
    assert "not a valid safetensors file" in faults(src, tmp_path / "dst")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]},
        {"dtype": "F32"},
        7,
    ],
)
def test_headers_that_lie(entry, tmp_path):
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        TensorFile(path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "model.bin", ".."])
def test_index_must_stay_in_its_directory(name, transformer, tmp_path):
    src = save(transformer, tmp_path / "src")
    index = {"weight_map": {"proj_out.bias": name}}
    (src / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    assert "names files outside its directory" in faults(src, tmp_path / "dst")


def test_missing_shard(transformer, tmp_path):
    src = save(transformer, tmp_path / "src", max_shard_size="100KB")
    gone = sorted((src / "transformer").glob("*.safetensors"))[1]
    gone.unlink()
    assert f"lacks 1 of {1 + len(list(src.rglob('*.safetensors')))} shards: {gone.name}" in faults(
        src, tmp_path / "dst"
    )


def test_pickled_weights(transformer, tmp_path):
    src = save(transformer, tmp_path / "src")
    weights_of(src).rename(src / "transformer" / "diffusion_pytorch_model.bin")
    message = faults(src, tmp_path / "dst")
    assert "pickled" in message
    assert "safe_serialization=True" in message


def test_several_files_without_an_index(transformer, tmp_path):
    src = save(transformer, tmp_path / "src")
    shutil.copy(weights_of(src), src / "transformer" / "copy.safetensors")
    assert "has 2 safetensors files and no index" in faults(src, tmp_path / "dst")


def test_an_index_that_an_earlier_save_left_is_named(transformer, tmp_path):
    src = save(transformer, tmp_path / "src", max_shard_size="100KB")
    shards = sorted((src / "transformer").glob("*.safetensors"))
    (index,) = (src / "transformer").glob("*.index.json")
    tensors = {name: x for path in shards for name, x in load_file(path).items()}
    save_file(tensors, weights_of(src))
    message = f"{weights_of(src).name} beside {index.name}, which is older or lacks its shards"
    os.utime(index, (1, 1))
    assert message in faults(src, tmp_path / "dst")
    os.utime(index)
    os.utime(weights_of(src), (1, 1))
    convert(src, tmp_path / "shards")  # an older file does not matter
    shards[0].unlink()
    assert message in faults(src, tmp_path / "dst")
    index.unlink()
    assert "safetensors files and no index" in faults(src, tmp_path / "dst")
    for path in shards[1:]:
        path.unlink()
    convert(src, tmp_path / "single")
    one, other = (read_manifest(tmp_path / x).weights["transformer"]["sha256"] for x in ("shards", "single"))
    assert one == other


def renamed(names):
    return lambda tensors: {new: x for name, x in tensors.items() for new in names(name)}


BLOCK_0 = "transformer_blocks.0."
WRAPPED = {
    "module": (renamed(lambda name: [f"module.{name}"]), "the prefix module. is stripped"),
    "compiled": (renamed(lambda name: [f"_orig_mod.{name}"]), "the prefix _orig_mod. is stripped"),
    "compiled blocks": (
        renamed(lambda name: [name.replace(BLOCK_0, f"{BLOCK_0}_orig_mod.")]),
        "the prefix _orig_mod. is stripped",
    ),
    "several": (
        renamed(lambda name: [f"module._orig_mod.{name.replace(BLOCK_0, BLOCK_0 + '_fsdp_wrapped_module.')}"]),
        "the prefix _orig_mod. is stripped; the prefix _fsdp_wrapped_module. is stripped; the prefix module. is",
    ),
    "one file for other programs": (
        renamed(lambda name: [f"model.diffusion_model.{name}"]),
        "the prefix model.diffusion_model. is stripped",
    ),
    "averaged alone": (renamed(lambda name: [f"ema_model.module.{name}"]), "the prefix ema_model. is stripped"),
    "averaged beside": (
        lambda tensors: (
            renamed(lambda name: [f"module.{name}"])(tensors)
            | {f"ema.module.{name}": x + 1 for name, x in tensors.items()}
        ),
        "tensors of an EMA copy are left out; the prefix module. is stripped",
    ),
}


@pytest.mark.parametrize("form", WRAPPED)
def test_prefixes_and_averaged_copies(form, transformer, tmp_path, caplog):
    wrap, said = WRAPPED[form]
    src = save(transformer, tmp_path / "src")
    convert(src, tmp_path / "plain")
    save_file(wrap(load_file(weights_of(src))), weights_of(src))
    with caplog.at_level("INFO", "cogvideox_flax"):
        convert(src, tmp_path / "dst")
    assert [said in record.message for record in caplog.records if "prefix" in record.message] == [True]
    plain, found = (read_manifest(tmp_path / x).weights["transformer"]["sha256"] for x in ("plain", "dst"))
    assert plain == found


@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
@pytest.mark.parametrize("form", ["plain", "scale_weight", "weight_scale", "rows"])
def test_weights_in_float8_are_dequantized(form, dtype, tmp_path, caplog):
    """As torch dequantizes them; what else is in the file keeps its dtype."""
    module, stored, exact = make_transformer("cogvideox-2b"), {}, {}
    for name, x in module.state_dict().items():
        stored[name] = exact[name] = x
        if name.endswith("weight") and x.ndim == 2:
            scale = x.abs().amax(1, keepdim=True) / 448 if form == "rows" else x.abs().max() / 448
            scale = torch.ones(()) if form == "plain" else scale
            stored[name] = (x / scale).to(torch.float8_e4m3fn)
            exact[name] = (stored[name].float() * scale).to(getattr(torch, dtype or "bfloat16"))
            if form != "plain":
                layer = name.removesuffix(".weight")
                stored[f"{layer}.{'weight_scale' if form == 'rows' else form}"] = scale
                stored[f"{layer}.{'scale_input' if form == 'scale_weight' else 'input_scale'}"] = torch.ones(())
    if form == "scale_weight":
        stored["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    folders = [save(module, tmp_path / name) for name in ("stored", "exact")]
    for folder, tensors in zip(folders, (stored, exact), strict=True):
        save_torch_file({name: x.contiguous() for name, x in tensors.items()}, weights_of(folder))
    with caplog.at_level("INFO", "cogvideox_flax"):
        convert(folders[0], tmp_path / "a", dtype=dtype)
    count = sum(x.dtype == torch.float8_e4m3fn and x.ndim == 2 for x in stored.values())
    said = f"transformer of {folders[0] / 'transformer'}: {count} weights in float8 are dequantized"
    assert [record.message for record in caplog.records if "dequantized" in record.message] == [said]
    convert(folders[1], tmp_path / "b", dtype=dtype)
    found, expected = (read_manifest(tmp_path / x).weights["transformer"]["sha256"] for x in "ab")
    assert found == expected


def write_gguf(path: Path, module, of_others: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Write a module in several forms of GGUF. Returns the values that the package reads back, in `of_others` where
    they are neither float32 nor float16."""
    writer, exact = gguf.GGUFWriter(path, "cogvideox"), {}
    kinds = [gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "BF16", "F16")]
    for i, (name, x) in enumerate(module.state_dict().items()):
        x, kind = x.numpy(), gguf.GGMLQuantizationType.F32
        if x.ndim == 2 and x.shape[1] % 32 == 0:
            kind = kinds[i // 2 % len(kinds)]  # weights and biases take turns
        data = gguf.quants.quantize(x, kind)
        value = torch.from_numpy(np.array(gguf.quants.dequantize(data, kind)).reshape(x.shape))
        exact[name] = value.to({"F32": torch.float32, "F16": torch.float16}.get(kind.name, of_others))
        if x.ndim == 4:  # as ComfyUI's tools do with tensors of more axes than GGUF has
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(x.shape))
            data = data.reshape(x.shape[0], -1)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_gguf(dtype, tmp_path, caplog):
    """Read through the gguf package, whose dequantized values are those of a plain file."""
    module = make_transformer("cogvideox-2b", text_embed_dim=64)
    folders = [save(module, tmp_path / name) for name in ("stored", "exact")]
    weights_of(folders[0]).unlink()
    exact = write_gguf(
        folders[0] / "transformer" / "model-Q4_0.gguf", module, torch.float32 if dtype else torch.bfloat16
    )
    save_torch_file({name: x.contiguous() for name, x in exact.items()}, weights_of(folders[1]))
    with caplog.at_level("INFO", "cogvideox_flax"):
        convert(folders[0], tmp_path / "a", dtype=dtype)
    assert "weights in Q4_0, Q8_0 are dequantized" in caplog.text
    convert(folders[1], tmp_path / "b", dtype=dtype)
    found, expected = (read_manifest(tmp_path / x).weights["transformer"]["sha256"] for x in "ab")
    assert found == expected
    # the file alone, into a checkpoint that says what it is
    convert(folders[0] / "transformer" / "model-Q4_0.gguf", tmp_path / "b", components=["transformer"], dtype=dtype)
    assert read_manifest(tmp_path / "b").weights["transformer"]["sha256"] == expected


@pytest.mark.parametrize("damage", ["half", "empty", "text"])
def test_bad_gguf(damage, tmp_path, monkeypatch):
    src = save(make_transformer("cogvideox-2b", text_embed_dim=64), tmp_path / "src")
    path = weights_of(src).with_suffix(".gguf")
    weights_of(src).unlink()
    write_gguf(path, make_transformer("cogvideox-2b", text_embed_dim=64))
    raw = path.read_bytes()
    path.write_bytes({"half": raw[: len(raw) // 2], "empty": b"", "text": b"hello world\n" * 100}[damage])
    assert f"{path} is not a valid GGUF file" in faults(src, tmp_path / "dst")
    shutil.copy(path, path.with_stem("other"))
    assert "diffusion_pytorch_model.gguf, other.gguf; name one of these files" in faults(src, tmp_path / "dst")
    path.with_stem("other").unlink()
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "which takes the gguf package to read: " + install_extra("gguf") in faults(src, tmp_path / "dst")


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("double_blocks.0.img_attn_q.weight", "Tencent's own and ComfyUI's files"),
        ("model.diffusion_model.double_blocks.0.img_attn.qkv.weight", "Tencent's own and ComfyUI's files"),
        ("model.diffusion_model.transformer.layers.0.attention.query_key_value.weight", "SAT, the code"),
    ],
)
def test_the_names_of_other_layouts_are_refused_in_one_line(name, whose, transformer, tmp_path):
    src = save(transformer, tmp_path / "src")
    save_file({name: np.zeros(3, np.float32)}, weights_of(src))
    message = faults(src, tmp_path / "dst")
    assert message.startswith(f"the transformer has the names of {whose}") and "\n" not in message
    assert "Take the model in diffusers' layout (zai-org/CogVideoX-2b" in message


def test_scales_of_blocks_are_refused(tmp_path):
    src = save(make_transformer("cogvideox-2b"), tmp_path / "src")
    tensors = {name: torch.from_numpy(x) for name, x in load_file(weights_of(src)).items()}
    name = f"{BLOCK_0}ff.net.2.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{BLOCK_0}ff.net.2.weight_scale": torch.ones(2, 2)}
    save_torch_file(tensors, weights_of(src))
    assert "has a scale of shape (2, 2); expected one number, or one for each of its 64 rows" in faults(
        src, tmp_path / "dst"
    )


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "100KB"}], ids=["one file", "shards"])
def test_variants(shards, transformer, tmp_path):
    """Weights as diffusers and transformers save them with `variant`: the only ones, or beside the plain ones."""

    def converted(*names, **kwargs):
        dst = tmp_path / "-".join(("dst", *names))
        convert(tmp_path / "src", dst, **kwargs)
        return {name: record["sha256"] for name, record in read_manifest(dst).weights.items()}

    def save_all(seed, **variant):
        for name, make in (("transformer", make_transformer), ("text_encoder", make_text_encoder)):
            module = make("cogvideox-5b", seed) if name == "transformer" else make(seed)
            module.save_pretrained(tmp_path / "new" / name, **shards, **variant)
        # each by itself, since transformers removes the shards of other variants
        shutil.copytree(tmp_path / "new", tmp_path / "src", dirs_exist_ok=True)
        shutil.rmtree(tmp_path / "new")

    save_all(0, variant="fp16")
    only = converted("only")
    assert only.keys() == {"transformer", "text_encoder"}
    assert converted("named", variant="fp16") == only
    save_all(1, variant="bf16")
    with pytest.raises(ConversionError, match="holds the variants bf16, fp16; name one with --variant"):
        converted("none")
    assert converted("one", variant="fp16") == only
    save_all(1)
    plain = converted("plain")
    assert plain == converted("other", variant="bf16")
    assert all(plain[name] != only[name] for name in only)
    assert converted("again", variant="fp16") == only
    with pytest.raises(ConversionError, match="has no variant fp8; it holds bf16, fp16, the plain one"):
        converted("unknown", variant="fp8")


def test_shards_of_a_variant_as_diffusers_named_them_before(transformer, tmp_path):
    """diffusion_pytorch_model-00001-of-00002.fp16.safetensors, until diffusers 0.29."""
    src = save(transformer, tmp_path / "src", max_shard_size="100KB", variant="fp16")
    convert(src, tmp_path / "new")
    folder = src / "transformer"
    for path in folder.glob("*.safetensors"):
        path.rename(folder / re.sub(r"\.fp16(-\d+-of-\d+)", r"\1.fp16", path.name))
    (index,) = folder.glob("*.index.fp16.json")
    index.write_text(re.sub(r"\.fp16(-\d+-of-\d+)", r"\1.fp16", index.read_text()))
    convert(src, tmp_path / "old")
    new, old = (read_manifest(tmp_path / x).weights["transformer"]["sha256"] for x in ("new", "old"))
    assert new == old


@pytest.mark.parametrize("text", ["{", "[]", '{"num_layers": "two"}', '{"activation_fn": "relu"}'])
def test_bad_config(text, transformer, tmp_path):
    src = save(transformer, tmp_path / "src")
    (src / "transformer" / "config.json").write_text(text)
    assert "config" in faults(src, tmp_path / "dst")


def test_a_byte_order_mark_before_json_is_read(transformer, tmp_path):
    """As editors on Windows write it: config.json, the scheduler's config, the index of shards."""
    src = save(transformer, tmp_path / "src", max_shard_size="100KB")
    make_scheduler("dpm", 2.0).save_pretrained(src / "scheduler")
    for path in src.rglob("*.json"):
        path.write_text(path.read_text(), encoding="utf-8-sig")
    convert(src, tmp_path / "dst")
    assert read_manifest(tmp_path / "dst").configs["scheduler"].snr_shift_scale == 2.0


def test_missing_config_names_the_way_out(transformer, tmp_path):
    src = save(transformer, tmp_path / "src")
    (src / "transformer" / "config.json").unlink()
    assert "--release" in faults(src, tmp_path / "dst")


def test_float16_of_a_bfloat16_model(transformer, tmp_path):
    assert "float16 gives NaN" in faults(save(transformer, tmp_path / "src"), tmp_path / "dst", dtype="float16")


def test_values_beyond_float16(tmp_path):
    src = save(make_transformer("cogvideox-2b"), tmp_path / "src")
    edit(src, lambda tensors: tensors.__setitem__("proj_out.bias", tensors["proj_out.bias"] * 0 + 1e6))
    assert "proj_out.bias holds values beyond float16's range" in faults(src, tmp_path / "dst", dtype="float16")


def test_not_a_checkpoint(tmp_path):
    assert "not a directory" in faults(tmp_path / "nowhere", tmp_path / "dst")
    (tmp_path / "empty").mkdir()
    (tmp_path / "video.mp4").touch()
    for name in ("empty", "video.mp4"):
        assert "not a checkpoint in the Hugging Face layout" in faults(tmp_path / name, tmp_path / "dst")


def test_destination_with_other_files(transformer, tmp_path):
    dst = tmp_path / "dst"
    dst.mkdir()
    (dst / "thesis.tex").touch()
    assert "not empty" in faults(save(transformer, tmp_path / "src"), dst)
    assert (dst / "thesis.tex").exists()


def test_not_enough_disk(transformer, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    message = faults(save(transformer, tmp_path / "src"), tmp_path / "dst")
    assert "and its disk has 0 MiB free; free some space" in message


def test_command_line(transformer, tmp_path, capsys):
    src = save(transformer, tmp_path / "src")
    argv = ["convert", str(src), str(tmp_path / "dst"), "--dtype", "bfloat16"]
    assert main(argv) == 2
    assert capsys.readouterr().err == (
        f"error: {src} is not a whole model: there is no text_encoder/; there is no vae/; "
        "to convert what is there, name it with --component\n"
    )
    assert not (tmp_path / "dst").exists()
    assert main([*argv, "--component", "transformer"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'dst'}\n"
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "dst")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "Traceback" not in message


def test_a_model_whose_tokenizer_transformers_5_saved(tmp_path):
    """tokenizer.json in place of spiece.model; where both are there, spiece.model."""
    layout = save_layout(tmp_path / "hf", "cogvideox-2b")
    folder = layout / "tokenizer"
    T5Tokenizer.from_pretrained(folder).save_pretrained(folder)
    convert(layout, tmp_path / "both", whole=True)
    (folder / "spiece.model").unlink()
    convert(layout, tmp_path / "json", whole=True)
    both, json_alone = (Pipeline.from_pretrained(tmp_path / name) for name in ("both", "json"))
    for pipe, file in ((both, "spiece.model"), (json_alone, "tokenizer.json")):
        assert list(pipe.manifest.tokenizer_sha256) == [f"tokenizer/{file}"]
    prompts = ["a small red circle moves to the left", "on the white square"]
    assert (both.tokenizer(prompts) == json_alone.tokenizer(prompts)).all()
    assert both.fingerprints()["tokenizer"] != json_alone.fingerprints()["tokenizer"]
    verify(tmp_path / "json")


# --- one component into a finished checkpoint


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A native checkpoint that runs, with a noise schedule of its own; a test takes a copy."""
    folder = tmp_path_factory.mktemp("finished")
    layout = save_layout(folder / "hf", "cogvideox-5b")
    make_scheduler("dpm", 2.0).save_pretrained(layout / "scheduler")
    convert(layout, folder / "native", whole=True)
    return folder / "native"


@pytest.fixture
def native(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "native")


def fine_tune(folder: Path, **changes) -> Path:
    """Another transformer of the checkpoint's architecture, as `save_pretrained` alone writes it."""
    make_transformer("cogvideox-5b", seed=1, **changes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", ["layout", "folder", "without config", "file"])
def test_a_transformer_alone_goes_into_a_finished_checkpoint(form, native, tmp_path):
    """The checkpoint still runs, and what the source lacks is as it was."""
    before, components = read_manifest(native), None
    src = fine_tune(tmp_path / "checkpoint-500" / "transformer", sample_height=8)
    if form == "layout":
        src = src.parent
    elif form != "folder":
        (src / "config.json").unlink()
        src, components = (src if form == "without config" else next(src.iterdir())), ["transformer"]
        with pytest.raises(ConversionError, match="does not say what it is; name it with --component, one of text_"):
            convert(src, native)
    convert(src, native, components=components)
    after = read_manifest(native)
    assert after.configs["scheduler"] == before.configs["scheduler"]
    kept = before.configs["transformer"].sample_height
    assert after.configs["transformer"].sample_height == (8 if components is None else kept)
    assert {**after.weights, "transformer": None} == {**before.weights, "transformer": None}
    expected = convert_component("transformer", make_transformer("cogvideox-5b", seed=1), tmp_path / "expected")
    new, old = (load_transformer(path) for path in (native, expected))
    assert all((np.asarray(parameters(new)[name]) == np.asarray(x)).all() for name, x in parameters(old).items())
    verify(native)
    Pipeline.from_pretrained(native)


@pytest.mark.parametrize("changes", [{"num_layers": 3}, {"in_channels": 32}, {"patch_size_t": 2}])
def test_a_transformer_of_another_architecture_is_refused_before_anything_is_written(changes, native, tmp_path):
    src = fine_tune(tmp_path / "src", **changes)
    stated = {path: path.read_bytes() for path in native.rglob("*") if path.is_file()}
    with pytest.raises(ConversionError, match=r"this is no part of the checkpoint in .*its transformer has .*, not "):
        convert(src, native)
    assert stated == {path: path.read_bytes() for path in native.rglob("*") if path.is_file()}


def test_a_transformer_alone_is_not_another_component(native, tmp_path):
    src = fine_tune(tmp_path / "src")
    with pytest.raises(ConversionError, match="src holds transformer alone; expected the vae of a cogvideox model"):
        convert(src, native, components=["vae"])
    (src / "config.json").write_text('{"_class_name": "WanTransformer3DModel"}')
    with pytest.raises(ConversionError, match="holds a WanTransformer3DModel, which is no component"):
        convert(src, native)


def test_a_whole_model_still_replaces_one_of_another_architecture(native, tmp_path):
    convert(save_layout(tmp_path / "hf", "cogvideox-2b"), native)
    assert not read_manifest(native).configs["transformer"].rotary
    assert read_manifest(native).configs["scheduler"].kind == "ddim"
    Pipeline.from_pretrained(native)
