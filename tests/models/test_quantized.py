"""Weights of 8 bits: the arithmetic, the error, the checkpoint, and what they cannot be used for."""

from __future__ import annotations

import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cogvideox_flax import cli, sharding
from cogvideox_flax.checkpoint import load_text_encoder, load_transformer, parameters, read_manifest, verify
from cogvideox_flax.checkpoint.quantize import quantize_checkpoint
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import InputError
from cogvideox_flax.lora import add_lora
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.nn import quantized as q
from cogvideox_flax.nn.layers import Linear, TransposedLinear
from tests.support import xla_options
from tests.support.reference import save_layout


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8")
    convert(save_layout(folder / "hf", "cogvideox-5b"), folder / "native")
    return folder / "native"


@pytest.fixture(scope="module")
def quantized(native):
    quantize_checkpoint(native, native.with_name("int8"))
    return native.with_name("int8")


def test_rounding_is_to_the_nearest_of_255_levels():
    x = random(5, 300).at[2].set(0)
    rounded, scale = q.round_to("int8", x, axis=-1)
    assert rounded.dtype == jnp.int8 and scale.shape == (5, 1)
    assert jnp.abs(rounded).max(1).tolist() == [127, 127, 0, 127, 127]
    assert (jnp.abs(rounded * scale - x) <= scale / 2 * 1.0001).all()


def test_rounding_to_float8_is_relative_and_never_overflows():
    x = jnp.concatenate([random(5, 300), 1e4 * random(5, 3, seed=1)], 1).at[2].set(0)
    rounded, scale = q.round_to("float8", x, axis=-1)
    assert rounded.dtype == jnp.float8_e4m3fn and scale.shape == (5, 1)
    found = rounded.astype(jnp.float32)
    assert jnp.abs(found).max(1).tolist() == [448, 448, 0, 448, 448]
    # four bits of precision, down to the smallest normal number; below, steps of 2^-9
    assert (jnp.abs(found * scale - x) <= jnp.maximum(jnp.abs(x) / 16, scale * 2**-10) * 1.0001).all()


def test_products_of_integers_are_exact():
    random_ = np.random.default_rng(0)
    x, kernel = (jnp.asarray(random_.integers(-127, 128, shape), jnp.int8) for shape in ((7, 12288), (12288, 40)))
    exact = np.asarray(x, np.int64) @ np.asarray(kernel, np.int64)
    product = jax.jit(q._product).lower(x, kernel)
    assert re.search(r"dot_general.*xi8>.*xi8>.*-> tensor<7x40xi32>", product.as_text())  # not by way of floats
    np.testing.assert_array_equal(product.compile()(x, kernel), exact)


def test_all_products_of_float8_agree():
    x, kernel = (random(*shape).astype(jnp.float8_e4m3fn) for shape in ((7, 256), (256, 40)))
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    for dtype in (jnp.float32, jnp.bfloat16):
        np.testing.assert_allclose(q._wide_product(x, kernel, dtype), exact, atol=1e-4)
    np.testing.assert_allclose(q._narrow_product(x, kernel), exact, atol=1e-4)


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.02), ("float8", 0.06)])
@pytest.mark.parametrize("sort", [Linear, TransposedLinear])
def test_a_quantized_map_is_the_map_within_its_rounding(kind, most, sort):
    linear = jax.vmap(lambda key: sort(64, 48, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    if sort is Linear:
        linear.bias[...] = random(3, 48, seed=2)
    small = q._quantized(linear, kind)
    weights = small.kernel if sort is Linear else small.weight
    assert weights.dtype == q.KINDS[kind].dtype and small.scale.shape == (3, 48)
    with pytest.raises(InputError, match=f"{kind} already"):
        q._quantized(small, kind)
    x = random(5, 64, seed=1)

    def apply(module):
        return jax.lax.scan(lambda _, m: (None, m(x, out_dtype=jnp.float32)), None, module)[1]

    exact, found = apply(linear), apply(small)
    error = jnp.sqrt(jnp.square(found - exact).mean()) / exact.std()
    assert 0 < error < most


def test_checkpoint(native, quantized):
    verify(quantized)
    manifest = read_manifest(quantized)
    assert [manifest.quantized(c) for c in ("transformer", "text_encoder", "vae")] == ["int8", "int8", None]
    stored = parameters(load_transformer(quantized, dtype="bfloat16"))
    assert stored["blocks.mlp.up.kernel"].dtype == jnp.int8 and stored["blocks.mlp.up.scale"].dtype == jnp.float32
    assert stored["blocks.attn.norm_q.scale"].dtype == jnp.bfloat16
    assert not [name for name, x in stored.items() if x.dtype == jnp.int8 and not name.startswith("blocks.")]
    again = q.quantize(load_transformer(native), CogVideoX.components["transformer"].linear_maps)
    for name, x in parameters(again).items():
        np.testing.assert_array_equal(x, parameters(load_transformer(quantized))[name])


def test_float8_is_stored_and_runs(native, tmp_path):
    assert cli.main(["quantize", str(native), str(tmp_path / "f8"), "--kind", "float8"]) == 0
    verify(tmp_path / "f8")
    assert read_manifest(tmp_path / "f8").quantized("transformer") == "float8"
    latents, context = random(2, 3, 8, 12, 16), random(2, 10, 40, seed=1)
    exact, found = (load_transformer(path, "float32")(latents, context, 500) for path in (native, tmp_path / "f8"))
    assert 0 < jnp.sqrt(jnp.square(found - exact).mean()) / exact.std() < 0.1


def test_error_of_the_modules(native, quantized):
    ids = jnp.arange(20).reshape(2, 10)
    exact, found = (load_text_encoder(path)(ids) for path in (native, quantized))
    assert 0 < jnp.sqrt(jnp.square(found - exact).mean()) / exact.std() < 0.03
    latents, context = random(2, 3, 8, 12, 16), random(2, 10, 40, seed=1)
    exact, found = (load_transformer(path)(latents, context, 500) for path in (native, quantized))
    assert 0 < jnp.sqrt(jnp.square(found - exact).mean()) / exact.std() < 0.05


@pytest.mark.parametrize("load", [load_text_encoder, load_transformer])
def test_on_a_mesh_it_computes_the_same(native, quantized, load):
    """A sum in another order may round to another integer here and there; what is wrong moves all."""
    text = load is load_text_encoder
    args = (jnp.arange(20).reshape(2, 10),) if text else (random(2, 3, 8, 12, 16), random(2, 10, 40, seed=1), 500)

    def run(model, mesh=None):
        graph, state = nnx.split(load(model, "float32", mesh))
        with nullcontext() if mesh is None else jax.set_mesh(mesh):
            # otherwise more values fall on another integer
            call = jax.jit(lambda state: nnx.merge(graph, state)(*args), compiler_options=xla_options.AS_USERS)
            return np.asarray(call(state))

    def apart(x, y):
        return np.sqrt(np.square(x - y).mean())

    alone = run(quantized)
    assert apart(run(quantized, sharding.make_mesh(2, 1, 2)), alone) < 0.1 * apart(alone, run(native))


def test_the_command_and_its_refusals(native, quantized, tmp_path, capsys):
    assert cli.main(["quantize", str(native), str(tmp_path / "t"), "--component", "transformer"]) == 0
    assert read_manifest(tmp_path / "t").quantized("text_encoder") is None
    assert cli.main(["info", str(tmp_path / "t")]) == 0
    assert "int8" in capsys.readouterr().out
    for args, message in (
        ([native, native], "into itself"),
        ([quantized, tmp_path / "x"], "is int8 already"),
        ([tmp_path, tmp_path / "x"], "expected a native checkpoint"),
    ):
        assert cli.main(["quantize", *map(str, args)]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(InputError, match="no quantized form of 'vae'"):
        quantize_checkpoint(native, tmp_path / "x", ["vae"])
    with pytest.raises(InputError, match="no kind 'int4'; known are int8, float8"):
        quantize_checkpoint(native, tmp_path / "x", kind="int4")


def test_adapters_are_not_trained_where_rows_are_quantized(quantized):
    with pytest.raises(InputError, match="where weights are int8, which has no gradient"):
        add_lora(CogVideoX, load_transformer(quantized), 4, rngs=nnx.Rngs(0))
