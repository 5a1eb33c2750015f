"""The T5 encoder against transformers, through the converter."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file, save_file
from transformers import T5EncoderModel
from transformers.models.t5.modeling_t5 import T5Attention

from cogvideox_flax.checkpoint import load_text_encoder
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.conversion.mapping import weight_moves
from cogvideox_flax.errors import ConversionError
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.t5 import GatedMLP, TextEncoder, TextEncoderConfig, position_buckets
from cogvideox_flax.tokenizer import Tokenizer
from tests.support.reference import SHARED, convert_component, make_text_encoder, relative_error, rms_error

FLOAT32_BAR = 1e-4  # of the output's standard deviation
RELEASED_WIDTHS = {"vocab_size": 512, "d_model": 4096, "d_kv": 64, "num_heads": 64, "d_ff": 10240}


def some_ids(shape: tuple[int, int], vocab_size: int, seed: int = 0) -> np.ndarray:
    """Random ids; the second half of the last prompt is padding."""
    ids = np.random.default_rng(seed).integers(3, vocab_size, shape).astype(np.int32)
    ids[-1, shape[1] // 2 :] = 0
    return ids


def run_reference(model: T5EncoderModel, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(ids).long()).last_hidden_state.float().numpy()


def run(native: Path, ids: np.ndarray, dtype: str) -> np.ndarray:
    """Ours, as it is used: loaded from a native checkpoint and compiled."""
    encoder = load_text_encoder(native, dtype=dtype)
    features = jax.jit(lambda encoder, ids: encoder(ids))(encoder, ids)
    assert features.dtype == jnp.dtype(dtype)
    return np.asarray(features, np.float32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[T5EncoderModel, Path]:
    """The reference, its folder in the released layout, and the same weights converted (below `native`)."""
    folder = tmp_path_factory.mktemp("tiny")
    model = make_text_encoder(num_layers=4)
    convert_component("text_encoder", model, folder)
    return model, folder


@pytest.mark.parametrize("shape", [(2, 226), (3, 17), (1, 1), (1, 300)])
def test_float32_equals_reference(tiny, shape):
    model, folder = tiny
    ids = some_ids(shape, model.config.vocab_size)
    assert relative_error(run(folder / "native", ids, "float32"), run_reference(model, ids)) < FLOAT32_BAR


@pytest.mark.parametrize(
    "changes",
    [
        {"relative_attention_num_buckets": 16, "relative_attention_max_distance": 50},
        {"d_kv": 24, "num_heads": 2, "num_layers": 1},  # heads x head_dim is not the width
        {"layer_norm_epsilon": 0.3},
    ],
)
def test_other_configs_equal_reference(changes, tmp_path):
    model = make_text_encoder(vocab_size=50, seed=1, **changes)
    ids = some_ids((2, 80), 50)
    native = convert_component("text_encoder", model, tmp_path)
    assert relative_error(run(native, ids, "float32"), run_reference(model, ids)) < FLOAT32_BAR


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_worse_than_the_reference(tiny, dtype):
    model, folder = tiny
    ids = some_ids((4, 226), model.config.vocab_size, seed=1)
    exact = run_reference(model, ids)
    half = T5EncoderModel.from_pretrained(folder / "hf" / "text_encoder", dtype=getattr(torch, dtype)).eval()
    wo = half.encoder.block[0].layer[1].DenseReluDense.wo.weight
    assert (wo.dtype == torch.float32) == (dtype == "float16")  # the reference's own rule for float16
    ours, theirs = rms_error(run(folder / "native", ids, dtype), exact), rms_error(run_reference(half, ids), exact)
    assert ours <= theirs, f"ours {ours:.2e}, torch {theirs:.2e}"


def test_float16_survives_activations_whose_product_overflows():
    mlp = GatedMLP(8, 8, rngs=nnx.Rngs(0))
    mlp = jax.tree.map(lambda w: 100 * w, mlp)
    x = jnp.linspace(1, 9, 8)[None, None]
    exact = mlp(x)
    assert jnp.abs(jax.nn.gelu(mlp.gate(x)) * mlp.up(x)).max() > jnp.finfo(jnp.float16).max
    half = jax.tree.map(lambda w: w.astype(jnp.float16), mlp)(x.astype(jnp.float16))
    assert half.dtype == jnp.float32
    assert relative_error(half, exact) < 1e-2


@pytest.fixture
def large_files(tmp_path):
    """A directory that does not outlive the test."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def widths_agree(folder: Path, layers: int, length: int, dtypes: tuple[str, ...]) -> None:
    model = make_text_encoder(num_layers=layers, **RELEASED_WIDTHS)
    ids = some_ids((1, length), RELEASED_WIDTHS["vocab_size"])
    exact = run_reference(model, ids)
    native = convert_component("text_encoder", model, folder)
    for dtype in dtypes:
        gc.collect()
        ours = run(native, ids, dtype)
        if dtype == "float32":
            assert relative_error(ours, exact) < FLOAT32_BAR
            continue
        half = T5EncoderModel.from_pretrained(folder / "hf" / "text_encoder", dtype=getattr(torch, dtype)).eval()
        theirs = run_reference(half, ids)
        assert rms_error(ours, exact) <= rms_error(theirs, exact)


@pytest.mark.slow
def test_released_widths(large_files):
    widths_agree(large_files, layers=1, length=40, dtypes=("float32",))


@pytest.mark.slow
def test_released_widths_full_length_all_dtypes(large_files):
    widths_agree(large_files, layers=2, length=226, dtypes=("float32", "bfloat16", "float16"))


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 50), (8, 20), (32, 1000)])
def test_position_buckets_equal_reference(num_buckets, max_distance):
    length = 600
    offset = torch.arange(length)[None] - torch.arange(length)[:, None]
    theirs = T5Attention._relative_position_bucket(offset, True, num_buckets, max_distance)
    ours = position_buckets(length, num_buckets, max_distance)
    assert ours.dtype == np.int32
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_pads_are_attended(tiny):
    _, folder = tiny
    encoder = load_text_encoder(folder / "native", dtype="float32")
    ids = np.array([[5, 6, 1, 0, 0, 0]], np.int32)
    assert relative_error(encoder(ids)[:, :3], encoder(ids[:, :3])) > 0.1


@pytest.mark.parametrize("names", [("shared",), ("encoder.embed_tokens",), ("shared", "encoder.embed_tokens")])
def test_embedding_under_either_name_and_other_halves_left_aside(tiny, names, tmp_path):
    model, folder = tiny
    shutil.copytree(folder / "hf", tmp_path / "hf")
    path = tmp_path / "hf" / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors.pop("shared.weight")
    assert "encoder.embed_tokens.weight" not in tensors
    tensors |= {f"{name}.weight": embedding.clone() for name in names}
    tensors |= {"decoder.block.0.layer.0.SelfAttention.q.weight": torch.ones(2, 2), "lm_head.weight": torch.ones(2, 2)}
    save_file(tensors, path)
    convert(tmp_path / "hf", tmp_path / "native")
    ids = some_ids((1, 9), model.config.vocab_size)
    np.testing.assert_array_equal(run(tmp_path / "native", ids, "float32"), run(folder / "native", ids, "float32"))


def test_every_fault_of_a_checkpoint_is_reported(tiny, tmp_path):
    _, folder = tiny
    shutil.copytree(folder / "hf", tmp_path / "hf")
    path = tmp_path / "hf" / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    del tensors["shared.weight"], tensors["encoder.block.2.layer.1.DenseReluDense.wo.weight"]
    tensors["encoder.block.4.layer_norm.weight"] = torch.ones(40)
    tensors["encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"] = torch.ones(32, 4)
    save_file(tensors, path)
    with pytest.raises(ConversionError) as error:
        convert(tmp_path / "hf", tmp_path / "native")
    message = str(error.value)
    assert "4 faults" in message
    assert "missing  embedding (shared.weight)" in message
    assert "missing  blocks.mlp.down.weight layer 2 (encoder.block.2.layer.1.DenseReluDense.wo.weight)" in message
    assert "unused   encoder.block.4.layer_norm.weight" in message
    assert "unused   encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight" in message


def test_released_tensor_list_fits():
    keys = SHARED / "spec" / "keys" / "t5_xxl_encoder.txt"
    if not keys.is_file():
        pytest.skip(f"the list of released tensors is not at {keys}")
    lines = [line.split("\t") for line in keys.read_text().splitlines() if line]
    tensors = {name: tuple(int(n) for n in shape.strip("()").split(",") if n) for name, shape in lines}
    fitted = weight_moves(CogVideoX, "text_encoder", TextEncoderConfig(), tensors)
    assert sum(int(np.prod(shape)) for shape in fitted.shapes.values()) == 4_762_310_656
    assert set(tensors) - set(fitted.moves) == {"encoder.embed_tokens.weight"}


def test_real_prompts_equal_reference(tiny):
    prompts, spiece = SHARED / "data" / "prompts", SHARED / "data" / "tokenizer" / "spiece.model"
    if not (prompts.is_dir() and spiece.is_file()):
        pytest.skip(f"the real prompts and tokenizer are not at {SHARED / 'data'}")
    lines = (prompts / "cogvideo.txt").read_text().splitlines()
    ids = Tokenizer(spiece)([*lines, ""])
    model, folder = tiny
    assert relative_error(run(folder / "native", ids, "float32"), run_reference(model, ids)) < FLOAT32_BAR


def test_all_layers_run_in_one_scan():
    encoder = jax.eval_shape(lambda: TextEncoder(TextEncoderConfig(), rngs=nnx.Rngs(0)))
    jaxpr = jax.make_jaxpr(lambda encoder, ids: encoder(ids))(encoder, jax.ShapeDtypeStruct((1, 226), jnp.int32))
    (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    assert scan.params["length"] == 24
