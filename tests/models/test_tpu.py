"""Programs for TPUs, compiled here for chips that are not: errors, layouts and memory are the real compiler's."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import stock_attention, tpu
from benchmarks.tpu import compile_on_chip
from cogvideox_flax import sharding
from cogvideox_flax.attention import SparseTiles, TileSizes, attend, attend_jointly, splash, splash_backward
from cogvideox_flax.attention.tile_sizes import choose_tile_sizes
from cogvideox_flax.checkpoint import parameters
from cogvideox_flax.lora import LoRALinear, with_parameters
from cogvideox_flax.models.cogvideox.sharding import TRANSFORMER as ROWS
from cogvideox_flax.models.cogvideox.transformer import Attention
from cogvideox_flax.models.registry import RELEASES
from cogvideox_flax.nn.adaln import modulated_norm
from cogvideox_flax.nn.conv import tpu_kernel
from cogvideox_flax.nn.conv.causal_conv import conv3d
from cogvideox_flax.nn.layers import MLP, LayerNorm, Linear, RMSNorm
from cogvideox_flax.nn.qk_norm import qk_norm
from cogvideox_flax.nn.remat import recomputed
from cogvideox_flax.nn.stack import stack
from cogvideox_flax.plan.chips import CHIPS, topology_devices
from cogvideox_flax.plan.hlo import Program
from cogvideox_flax.plan.timing import waits
from cogvideox_flax.plan.wire import Links
from cogvideox_flax.runtime.compile import compiler_options, compiling_on
from cogvideox_flax.training.config import LoopConfig
from cogvideox_flax.training.step import abstract_state, init_state, jit_step, train_step
from tests.support import processes

pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed: pip install 'jax[tpu]'")

SMALL = TileSizes(q=256, kv=1024, chunk=512, slice=256)


@pytest.mark.parametrize("topology", ["v6e:2x4", "v5e:2x4", "v5p:2x2x1"])
def test_kernel_compiles(topology):
    shape = (2, 2500, 3, 64)

    def f(q, k, v):
        return attend(q, k, v, kv_len=jnp.array([2500, 1234]), backend="splash", tile_sizes=SMALL)

    assert "tpu_custom_call" in compile_on_chip(topology, f, shape, shape, shape).as_text()


@pytest.mark.parametrize(("dim", "dtype"), [(48, jnp.bfloat16), (128, jnp.bfloat16), (64, jnp.float32)])
def test_kernel_compiles_for_other_heads_and_dtypes(dim, dtype):
    shape = (1, 1500, 2, dim)
    f = lambda q, k, v: attend(q, k, v, backend="splash", tile_sizes=SMALL)  # noqa: E731
    compile_on_chip("v6e:2x4", f, shape, shape, shape, dtype=dtype)


@pytest.mark.parametrize(
    ("topology", "tokens", "dim", "dtype"),
    [
        ("v6e:2x4", 45_184, 64, jnp.bfloat16),
        pytest.param("v5p:2x2x1", 51_200, 128, jnp.bfloat16, marks=pytest.mark.further),
        pytest.param("v6e:2x4", 45_184, 64, jnp.float32, marks=pytest.mark.further),
        pytest.param("v5e:2x4", 17_776, 64, jnp.bfloat16, marks=pytest.mark.further),
    ],
)
def test_the_kernel_of_the_gradient_compiles(topology, tokens, dim, dtype):
    """In as few calls as fast memory allows, and with memory for a few copies of the tokens."""
    shape = (1, tokens, 2, dim)
    kernel = partial(attend, backend="splash", tile_sizes=SMALL)
    f = jax.grad(lambda *args: kernel(*args).astype(jnp.float32).sum(), (0, 1, 2))
    compiled = compile_on_chip(topology, f, shape, shape, shape, dtype=dtype)
    calls = splash_backward.Blocks.choose(tokens, tokens, dim, dtype).calls
    kernels = [op for op in compiled.as_text().splitlines() if "tpu_custom_call" in op]
    assert sum(splash_backward.NAME in op for op in kernels) == calls
    assert compiled.memory_analysis().temp_size_in_bytes < 20 * math.prod(shape) * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize("remat", ["attention", pytest.param("offload", marks=pytest.mark.further)])
def test_a_recomputed_layer_does_not_attend_again_if_attention_is_kept(remat):
    shape, scales = (1, 1500, 2, 64), (3,)
    kernel = partial(attend, backend="splash", tile_sizes=SMALL)
    layer = recomputed(lambda x, scale: (kernel(scale * x, x, x), None), remat)
    f = jax.grad(lambda x, scales: jax.lax.scan(layer, x, scales)[0].astype(jnp.float32).sum())
    text = compile_on_chip("v6e:2x4", f, shape, scales).as_text()
    assert text.count("tpu_custom_call") == 2 and splash_backward.NAME in text


def test_gradients_of_adapters_are_summed_over_a_mesh_in_float32():
    """In a step in bfloat16, where each device has some of the clips."""
    mesh, width = tpu.topology_mesh("v6e:2x4", (8, 1, 1)), 256
    config = LoopConfig(steps=2, dtype="bfloat16", ema_decay=0.0)

    def loss(params, frozen, x, key):
        maps = with_parameters(frozen, params["transformer"])
        x, _ = jax.lax.scan(lambda x, layer: (layer(x), None), x, maps)
        return jnp.square(x.astype(jnp.float32)).mean(), {}

    def make():
        base = stack(2, lambda rngs: Linear(width, width, rngs=rngs), nnx.Rngs(0))
        return LoRALinear(base, jnp.zeros((2, width, 8)), jnp.zeros((2, 8, width)), 8.0)

    def on(spec, tree, dtype=None):
        place = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=place), tree)

    model = jax.eval_shape(make)
    params = {"transformer": {half: parameters(model)[half] for half in "ab"}}
    state = on(PartitionSpec(), jax.eval_shape(partial(init_state, config=config, mesh=None), params))
    x = on(PartitionSpec(None, "dp"), jax.ShapeDtypeStruct((1, 8, 512, width), jnp.bfloat16))
    with compiling_on(mesh):
        step = jax.jit(partial(train_step, loss=loss, config=config))
        text = step.lower(state, on(PartitionSpec(), model, jnp.bfloat16), x).compile().as_text()
    sums = re.findall(r"= (.*) all-reduce(?:-start)?\(", text)
    assert any(f"f32[{width},8]" in types or f"f32[1,{width},8]" in types for types in sums), sums
    assert "bf16[" not in "".join(sums)


@pytest.mark.further
@pytest.mark.parametrize(("topology", "dp", "sp"), [("v6e:2x4", 4, 2), ("v6e:8x8", 16, 4), ("v6e:8x8", 64, 1)])
def test_gradients_of_gathered_weights_are_summed_in_float32_and_split(topology, dp, sp):
    """Where weights are split over dp and sp, also those of a product whose rows are split over both. Over a grid of
    chips libtpu makes whole sums, in float32 too."""
    width, settings = 2048, LoopConfig(steps=2, dtype="bfloat16", ema_decay=0.0)
    mesh = sharding.make_mesh(dp, sp, 1, True, devices=topology_devices(topology))

    def loss(params, _, x, key):
        def layer(x, block):
            block, x = sharding.layer_weights(ROWS, block), sharding.split_tokens(x)
            return x + block["mlp"](x.astype(jnp.bfloat16)), None

        x, _ = jax.lax.scan(recomputed(layer, "full"), x, params["transformer"]["blocks"])
        return jnp.square(x).mean(), {}

    blocks = jax.eval_shape(lambda: stack(2, lambda rngs: MLP(width, width, rngs=rngs), nnx.Rngs(0)))
    params = {"transformer": {"blocks": {"mlp": blocks}}}
    state = abstract_state(params, settings, mesh, {"transformer": ROWS})
    place = NamedSharding(mesh, PartitionSpec(None, "dp"))
    x = jax.ShapeDtypeStruct((1, dp, 1024 * sp, width), jnp.float32, sharding=place)
    with compiling_on(mesh):
        text = jit_step(loss, settings, state, "tpu").lower(state, None, x).compile().as_text()
    scattered = re.findall(r"%all-reduce-scatter\S* \(input\S*: (\w+\[[\d,]+\])", text)
    assert scattered.count(f"f32[{width},{width}]") == (2 if sp > 1 else 0)
    summed = "".join(re.findall(r"= (.*) all-reduce(?:-start)?\(", text))
    assert summed.count(f"f32[{width},{width}]") == 2 and f"f32[{width}]" in summed
    assert f"bf16[{width}" not in summed + "".join(scattered)


def test_automatic_choice_is_the_kernel_on_a_tpu_and_holds_no_scores():
    tokens = 2000
    shape = (1, tokens, 2, 64)
    compiled = compile_on_chip("v6e:2x4", attend, shape, shape, shape)
    assert "tpu_custom_call" in compiled.as_text()
    padded = 4 * 2 * tokens * 128 * 2  # q, k, v and the result, lanes filled up
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * padded
    short = (1, 300, 2, 64)
    assert "tpu_custom_call" not in compile_on_chip("v6e:2x4", attend, short, short, short).as_text()


def test_float16_is_left_to_xla():
    shape = (1, 1500, 2, 64)
    assert "tpu_custom_call" not in compile_on_chip("v6e:2x4", attend, shape, shape, shape, dtype=jnp.float16).as_text()
    shapes = (1, 4, 11, 37, 128), (3, 3, 3, 128, 128), (128,), (1, 2, 11, 37, 128)
    compiled = compile_on_chip("v6e:2x4", lambda *args: conv3d(*args), *shapes, dtype=jnp.float16)
    assert "tpu_custom_call" not in compiled.as_text()


def compile_attention(mesh, attend, batch, tokens, length, heads=48):
    """The text of CogVideoX's attention, compiled with the options of a pipeline."""
    config = replace(RELEASES["cogvideox1.5-5b"].configs["transformer"], heads=heads)
    model = nnx.eval_shape(lambda: Attention(config, rngs=nnx.Rngs(0)))
    model = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), model)
    split = NamedSharding(mesh, PartitionSpec("dp", "sp"))
    x = jax.ShapeDtypeStruct((batch, tokens, config.width), jnp.bfloat16, sharding=split)
    rotary = jax.ShapeDtypeStruct((tokens, config.head_dim // 2), jnp.float32)

    def f(model, x, cos, sin):
        return model(x, (cos, sin), length, attend)

    with compiling_on(mesh):
        call = jax.jit(f, compiler_options=compiler_options("bfloat16", platform="tpu"))
        return call.lower(model, x, rotary, rotary).compile().as_text()


@pytest.mark.further
def test_products_run_beside_the_exchanges_that_they_do_not_need():
    mesh, chip = tpu.topology_mesh("v6e:2x4", (2, 4, 1)), CHIPS["v6e"]
    add = lambda q, k, v, _, first_head=0: q + k[:, :, first_head : first_head + v.shape[2]] + v  # noqa: E731
    add_attended = lambda *qkv, **_: sharding.sequence_parallel_attention(add, *qkv, None)  # noqa: E731
    program = Program(compile_attention(mesh, add_attended, 2, 8192, 8192))
    links = Links([device.coords for device in mesh.devices.flat])
    waited, hidden = waits(program, chip, lambda op: links.busiest_bytes(op) / chip.link)
    assert hidden > 0.2 * (waited + hidden) > 0


def test_nothing_is_padded_or_copied_before_the_kernel_but_keys():
    """The kernel wants tokens of keys along the sublanes."""
    kernel = partial(attend, backend="splash", tile_sizes=SMALL)
    text = compile_attention(tpu.topology_mesh("v6e:2x4"), kernel, batch=2, tokens=2048, length=2000, heads=4)
    copied = re.findall(r"= bf16\[[\d,]*2048[\d,]*\]\S* (?:copy|pad|transpose)\(", text[text.index("ENTRY") :])
    assert len(copied) == 1


@pytest.mark.further
def test_a_ring_overlaps_its_kernel_with_the_traffic():
    """Four heads over eight chips: two groups, each chip's keys on their way while it computes with those it has."""
    mesh = tpu.topology_mesh("v6e:2x4", (1, 8, 1))
    shape = jax.ShapeDtypeStruct(
        (1, 16384, 4, 64), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(None, "sp"))
    )
    with compiling_on(mesh):
        text = jax.jit(attend).lower(shape, shape, shape).compile().as_text()
    begin, end = (text.index(f" collective-permute-{word}(") for word in ("start", "done"))
    assert begin < text.index("tpu_custom_call", begin) < end


@pytest.mark.parametrize(
    ("topology", "grid", "text"),
    [
        ("v6e:2x4", (3, 16, 24), 256),
        pytest.param("v6e:2x4", (9, 30, 53), 1985, marks=pytest.mark.further),
        pytest.param("v6e:2x4", (31, 45, 80), 1985, marks=pytest.mark.further),
        pytest.param("v5e:2x4", (9, 30, 53), 1985, marks=pytest.mark.further),
        pytest.param("v5p:2x2x1", (9, 30, 53), 1985, marks=pytest.mark.further),
    ],
)
def test_sparse_attention_compiles(topology, grid, text):
    """A small clip's with a short text, and HunyuanVideo-1.5's at 480p and 720p."""
    shapes = [(1, math.prod(grid), 4, 128)] * 3 + [(1, text, 4, 128)] * 3

    def f(q, k, v, *joint):
        length = jnp.full(1, 200, jnp.int32)
        return attend_jointly(q, k, v, joint, joint_len=length, tiles=(SparseTiles(selected=32), grid))

    assert splash.SPARSE_NAME in compile_on_chip(topology, f, *shapes).as_text()


@pytest.mark.further
def test_stock_kernel_compiles():
    shape = (1, 2500, 2, 64)
    compile_on_chip("v6e:2x4", stock_attention.attend, shape, shape, shape)


@pytest.mark.parametrize("tokens", [17776, 39826, 45106, 180_000])
def test_table_fits_the_chip(tokens):
    choose_tile_sizes(tokens, tokens, 64, jnp.bfloat16).check(tokens, 64, jnp.bfloat16)


@pytest.mark.slow
def test_forecast_of_the_kernel(tmp_path):
    """The benchmark reads a schedule: never below the matrix unit's least, never absurd."""
    out = tmp_path / "attention.json"
    command = [sys.executable, "-m", "benchmarks.attention", "--tokens", "45106", "--json", str(out)]
    done = processes.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=1800)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["floor_ms"] == pytest.approx(1e3 * 12 * 1.25 * 45106**2 / 1024 / 1.75e9)
    assert row["floor_ms"] < row["bounded_ms"] < row["shifted_ms"] < 3 * row["floor_ms"]
    assert math.isfinite(row["compile_s"]) and "| 45106 |" in done.stdout


def further(*topologies):
    return [pytest.param(topology, marks=pytest.mark.further) for topology in topologies]


@pytest.mark.parametrize("topology", ["v6e:1x1", *further("v5e:1x1", "v5p:2x2x1")])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_adaln_compiles(topology, dtype):
    def f(x, wide, scale, narrow_scale):
        is_text = (jnp.arange(x.shape[1]) < 226)[:, None]
        joint = modulated_norm(x, scale, scale, is_text, eps=1e-5, dtype=jnp.dtype(dtype))
        return joint, modulated_norm(wide, narrow_scale, narrow_scale, eps=1e-6, dtype=jnp.dtype(dtype))

    shapes = (2, 5000, 3072), (1, 4500, 2048), (2, 2, 3072), (1, 1, 2048)
    assert kernels(topology, gradient(f, 2), *shapes, dtype=jnp.float32) == 4  # of which two are forward
    assert kernels(topology, gradient(f, 4), *shapes, dtype=jnp.float32) == 6
    assert kernels(topology, f, *[(1, 500, 3072), (1, 500, 2048), *shapes[2:]], dtype=jnp.float32) == 0


def both_qk_norms(x, wide, scale, wide_scale):
    tables = [(jnp.ones((1000, half)), jnp.ones((1000, half))) for half in (32, 64)]
    norm, wide_norm = LayerNorm(64, eps=1e-6), RMSNorm(128, eps=1e-6)
    norm.scale, wide_norm.scale = nnx.Param(scale), nnx.Param(wide_scale)
    return qk_norm(x, norm, tables[0]), qk_norm(wide, wide_norm, tables[1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("topology", ["v6e:2x4", *further("v5e:2x4", "v5p:2x2x1")])
def test_qk_norm_compiles(topology, dtype):
    """At the widths of both families."""
    assert kernels(topology, both_qk_norms, (2, 1000, 3072), (1, 1000, 2048), (64,), (128,), dtype=dtype) == 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("topology", "widths"),
    [("v6e:2x4", (256, 256))]
    + [pytest.param(name, (3072, 2048), marks=pytest.mark.further) for name in ("v6e:2x4", "v5e:2x4", "v5p:2x2x1")],
)
def test_the_gradient_of_qk_norm_compiles(topology, widths, dtype):
    shapes = *((2, 1000, width) for width in widths), (64,), (128,)
    assert kernels(topology, gradient(both_qk_norms, 2), *shapes, dtype=dtype) == 4  # of which two are forward
    assert kernels(topology, gradient(both_qk_norms, 4), *shapes, dtype=dtype) == 6


def kernels(topology, f, *shapes, dtype):
    """How many a compiled program has."""
    return compile_on_chip(topology, f, *shapes, dtype=dtype).as_text().count("tpu_custom_call")


def gradient(f, count):
    """Of the first arguments, from what f returns in place of its gradient."""

    def of_first(*args):
        returned, back = jax.vjp(lambda *first: f(*first, *args[count:]), *args[:count])
        return back(tuple(y.at[0, 0].set(1) for y in returned))

    return of_first


@pytest.mark.parametrize("topology", ["v6e:2x4", "v5e:2x4", "v5p:2x2x1"])
@pytest.mark.parametrize("channels", [(16, 128), (128, 3), (256, 256)], ids=str)
def test_convolution_compiles(topology, channels):
    """Rows that only eleven divides, columns that fill no tile; latents in, colours out."""
    shapes = (1, 4, 11, 37, channels[0]), (3, 3, 3, *channels), (channels[1],), (1, 2, 11, 37, channels[1])

    def f(x, kernel, bias, residual):
        return conv3d(x, kernel, bias, residual)

    text = compile_on_chip(topology, f, *shapes).as_text()
    assert tpu_kernel.NAME in text and " convolution(" not in text


@pytest.mark.parametrize(("mesh", "batch"), [((1, 8, 1), 1), ((8, 1, 1), 8)])
def test_a_convolution_of_whole_images_compiles_on_a_mesh(mesh, batch):
    """Eleven rows and 37 columns divide over no device; each computes all of them, or videos of its own."""
    mesh = tpu.topology_mesh("v6e:2x4", mesh)
    shapes = (batch, 4, 11, 37, 128), (3, 3, 3, 128, 128), (128,)

    def f(x, kernel, bias):
        with sharding.spatial_split(x) as x:
            return conv3d(x, kernel, bias)

    place = NamedSharding(mesh, PartitionSpec())
    with compiling_on(mesh):
        args = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes)
        assert tpu_kernel.NAME in jax.jit(f).lower(*args).compile().as_text()


@pytest.mark.parametrize(
    ("dtype", "out_channels"), [(jnp.bfloat16, 256), pytest.param(jnp.float32, 512, marks=pytest.mark.further)]
)
def test_wide_convolutions_fit_the_smaller_memory(dtype, out_channels):
    shapes = (1, 4, 12, 340, 512), (3, 3, 3, 512, out_channels), (out_channels,), (1, 2, 12, 340, out_channels)
    compile_on_chip("v5p:2x2x1", lambda *args: conv3d(*args), *shapes, dtype=dtype)


@pytest.mark.further
def test_forecast_of_a_convolution():
    """By the static schedule, at 256 channels: within the matrix unit's rate, and close to it."""
    code = """
from benchmarks import convolution, tpu
with tpu.dumped() as dump:
    print(convolution.kernel(dump, convolution.Case(4, 24, 340, 256, 256))["share"])
"""
    done = processes.run([sys.executable, "-c", code], env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    assert 0.8 < float(done.stdout) < 1
