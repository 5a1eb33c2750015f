"""Looking into a run, and refusing one before it starts that would not fit."""

from __future__ import annotations

import dataclasses
import gc
import logging
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from cogvideox_flax import CogVideoXPipeline, GenerationRequest, checkpoint, cli, sharding
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import open_model
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.cogvideox.transformer import Transformer
from cogvideox_flax.models.registry import RELEASES
from cogvideox_flax.models.t5 import TextEncoder
from cogvideox_flax.nn import cpu
from cogvideox_flax.nn.layers import Linear, in_columns
from cogvideox_flax.nn.platforms import compiling_for
from cogvideox_flax.runtime import compile as compiling
from cogvideox_flax.runtime import compile_cache, devices
from cogvideox_flax.runtime.compile import CompiledProgram, Program, compiler_options
from cogvideox_flax.runtime.devices import bytes_per_device
from cogvideox_flax.runtime.profiling import ProfilingOptions
from cogvideox_flax.runtime.terminal import reliable_interrupts
from cogvideox_flax.schedulers import DDIMScheduler
from tests.support import xla_options
from tests.support.reference import save_layout

XLA_OPTIONS = xla_options.AS_USERS
"""As users compile: without them, forms of one program differ in more than the last bit."""

SMALL = {"num_frames": 1, "height": 32, "width": 48, "num_inference_steps": 3, "progress": False}


@pytest.fixture(scope="module", autouse=True)
def without_the_cache_of_jax():
    """What comes from there cannot be written down again."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    jax.clear_caches()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    folder = tmp_path_factory.mktemp("execution")
    convert(save_layout(folder / "hf", "cogvideox-5b"), folder / "native")
    return folder / "native"


@pytest.fixture
def pipe(native):
    return CogVideoXPipeline.from_pretrained(native, dtype="float32")


@pytest.mark.further
def test_operation_by_operation_gives_the_same(pipe, monkeypatch):
    one_step = SMALL | {"num_inference_steps": 1}
    expected = pipe("red", **one_step, output_type="float").frames
    pipe.profiling = ProfilingOptions(jit=False)
    seen = []
    plan = pipe.resolve(GenerationRequest("red", **{name: SMALL[name] for name in ("num_frames", "height", "width")}))
    program = pipe._compiled.get(plan.encode(pipe.manifest.model.text[0]))
    kind, function = type(program.program), type(program.program).__call__
    monkeypatch.setattr(kind, "__call__", lambda *args: seen.append(args[2]) or function(*args))
    np.testing.assert_allclose(pipe("red", **one_step, output_type="float").frames, expected, atol=1e-4)
    assert not any(isinstance(ids, jax.core.Tracer) for ids in seen) and len(seen) == 2


@pytest.mark.further
def test_operation_by_operation_on_a_mesh(native, pipe):
    spread = CogVideoXPipeline.from_pretrained(native, "float32", sharding.make_mesh(1, 2, 1))
    spread.profiling = ProfilingOptions(jit=False)
    expected, found = (
        each("red", **SMALL | {"num_inference_steps": 1}, output_type="float").frames for each in (pipe, spread)
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_arrays_of_several_devices_are_counted_once():
    place = NamedSharding(sharding.make_mesh(2, 2, 2), PartitionSpec())
    x = jax.device_put(np.zeros(2**22, np.float32), place)
    first = devices.describe_memory()
    assert x.addressable_shards[0].data.nbytes == 2**24 and devices.describe_memory() == first


def test_memory_is_said_after_each_stage(pipe, capsys):
    pipe.profiling = ProfilingOptions(memory=True)
    pipe("red", **SMALL)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("after the ")]
    assert [line.split(":")[0] for line in lines] == [
        "after the text encoder",
        "after the denoising",
        "after the VAE decoder",
    ]
    held = [float(line.split("GiB")[0].split()[-1]) for line in lines]
    assert 0 < held[0] <= held[-1]


def test_only_the_named_steps_are_profiled(pipe, tmp_path, monkeypatch):
    marks = []
    annotation = jax.profiler.StepTraceAnnotation
    monkeypatch.setattr(
        jax.profiler, "StepTraceAnnotation", lambda name, step_num: marks.append(step_num) or annotation(name)
    )
    pipe.profiling = ProfilingOptions(profile=tmp_path / "trace", profile_steps=(1, 2))
    pipe("red", **SMALL)
    assert marks == [1, 2]
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


def test_a_trace_is_written_however_the_steps_end(pipe, tmp_path):
    for n in range(2):  # a second trace could not start if the first were still open
        pipe.profiling = ProfilingOptions(profile=tmp_path / str(n), profile_steps=(0, 2))
        pipe("red", **SMALL, callback=lambda step, *_: step == 0)
        assert list((tmp_path / str(n)).rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("steps", "options", "message"),
    [((3, 3), {}, "the run has 3, counted from 0"), ((0, 1), {"compiled_loop": True}, "leave compiled_loop")],
)
def test_steps_that_cannot_be_profiled_are_refused(pipe, tmp_path, steps, options, message):
    pipe.profiling = ProfilingOptions(profile=tmp_path, profile_steps=steps)
    with pytest.raises(InputError, match=message):
        pipe("red", **SMALL, **options)
    with pytest.raises(InputError, match="got 2 and 1"):
        ProfilingOptions(profile_steps=(2, 1))


def test_what_does_not_fit_is_refused_before_anything_is_loaded(pipe, monkeypatch):
    assert devices.memory_limit(None) is None  # a CPU does not say
    request = GenerationRequest("red", num_frames=1, height=32, width=48)
    monkeypatch.setattr(open_model, "memory_limit", lambda mesh: 10_000)
    with pytest.raises(InputError, match=r"text encoder needs .* GiB on each device, which has"):
        pipe("red", **SMALL)
    assert not pipe._loaded
    # what stays loaded counts: the text encoder's weights are too much for the next stage
    assert bytes_per_device({"a": jnp.zeros((3, 5)), "b": jnp.zeros(2, jnp.int8)}) == 62
    monkeypatch.setattr(open_model, "memory_limit", lambda mesh: 40 * 2**20)
    pipe.check_memory(request)
    monkeypatch.setattr(open_model, "bytes_per_device", lambda tree: 40 * 2**20)
    with pytest.raises(InputError, match=r"denoising step needs .* beside 0\.04 GiB of other weights"):
        pipe.check_memory(request)


@pytest.mark.parametrize("staged", [False, True])
def test_what_was_compiled_to_know_is_what_runs(native, tmp_path, monkeypatch, caplog, staged):
    monkeypatch.setattr(open_model, "memory_limit", lambda mesh: 2**40)
    monkeypatch.setattr(compiling, "_PROGRAMS", {})  # as in a new process
    monkeypatch.setenv("COGVIDEOX_HOME", str(tmp_path / "home"))  # where no program is kept yet
    with caplog.at_level("INFO", logger="cogvideox_flax"):
        if staged:
            command = ["generate", "red", "--model", str(native), "--dtype", "bfloat16", "--steps", "2", "--quiet"]
            sizes = ["--num-frames", "1", "--height", "32", "--width", "48", "--out", str(tmp_path / "v.mp4")]
            monkeypatch.setattr(logging.getLogger("cogvideox_flax"), "setLevel", lambda level: None)
            assert cli.main([*command, *sizes]) == 0
        else:
            CogVideoXPipeline.from_pretrained(native, dtype="bfloat16")("red", **SMALL)
    compiled = [r.message.split(" in ")[0] for r in caplog.records if r.message.startswith("compiled the")]
    parts = ("text encoder", "denoising step", "VAE decoder", "initial noise")
    assert compiled == [f"compiled the {part}" for part in parts]


@pytest.mark.parametrize("loop", [False, True])
def test_unstacked_layers_share_the_memory_of_the_stack_and_give_the_same(pipe, loop, monkeypatch):
    expected = pipe("red", **SMALL, output_type="latent").frames
    monkeypatch.setattr(cpu, "MIN_LAYER_BYTES", 0)
    for model in (pipe.text_encoder, pipe.transformer):
        unstacked = cpu.unstack_layers(model, 10)
        assert isinstance(unstacked.blocks, nnx.List) and len(unstacked.blocks) == model.config.layers
        for whole, *rows in zip(*map(jax.tree.leaves, (model.blocks, *unstacked.blocks)), strict=True):
            for i, row in enumerate(rows):
                np.testing.assert_array_equal(row, whole[i])
                place = i * row.nbytes
                if place % 64 == 0:  # XLA:CPU takes no other places
                    assert row.unsafe_buffer_pointer() == whole.unsafe_buffer_pointer() + place
    taken = []

    def watched(module, tokens):
        result = cpu.unstack_layers(module, tokens)
        if result is not module:
            taken.append(type(module))
        return result

    monkeypatch.setattr(compiling, "unstack_layers", watched)
    again = CogVideoXPipeline.from_pretrained(pipe.native_dir, "float32")
    found = again("red", **SMALL, compiled_loop=loop, output_type="latent").frames
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert set(taken) == {TextEncoder, Transformer}
    assert SMALL["num_inference_steps"] > 1 and taken.count(Transformer) == 1  # not in each step


def test_layers_are_unstacked_only_where_that_helps(pipe, monkeypatch):
    assert cpu.unstack_layers(pipe.text_encoder, 10) is pipe.text_encoder  # small
    monkeypatch.setattr(cpu, "MIN_LAYER_BYTES", 0)

    def plan(frames):
        return pipe.resolve(GenerationRequest("red", num_frames=frames, height=448, width=448))

    for mesh in (None, sharding.make_mesh(1, 2, 1)):
        program = CompiledProgram(plan(1).encode(pipe.manifest.model.text[0]), mesh=mesh)
        assert isinstance(program.model_argument(pipe.text_encoder).blocks, nnx.List) == (mesh is None)
    for frames, few in ((1, True), (9, False)):  # 28x28 patches in each latent frame
        transformer = CompiledProgram(plan(frames).denoise).model_argument(pipe.transformer)
        assert isinstance(transformer.blocks, nnx.List) == few


@pytest.mark.parametrize(
    ("extensions", "rows", "platform", "product"),
    [
        ("avx2", 512, "cpu", "f32"),
        ("avx2", 226, "cpu", "bf16"),
        ("avx2", 512, "tpu", "bf16"),
        ("avx2 avx512_bf16", 512, "cpu", "bf16"),
        ("avx2 amx_bf16", 512, "cpu", "bf16"),
        ("processor", 512, "cpu", "bf16"),
    ],
)
def test_bfloat16_is_multiplied_in_float32_where_that_is_faster(extensions, rows, platform, product, monkeypatch):
    monkeypatch.setattr(cpu, "instruction_set", lambda: frozenset(extensions.split()))
    layer = jax.tree.map(lambda w: w.astype(jnp.bfloat16), Linear(40, 24, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(0), (2, rows // 2, 40), jnp.bfloat16)
    with compiling_for(platform):
        call = jax.jit(lambda layer, x: layer(x))
        text = call.lower(layer, x).as_text()
        y = call(layer, x)
    assert f"(tensor<2x{rows // 2}x40x{product}>, tensor<40x24x{product}>)" in text
    assert y.dtype == jnp.bfloat16
    weights = (np.asarray(w[...], np.float64) for w in (layer.kernel, layer.bias))
    expected = np.asarray(x, np.float64) @ next(weights) + next(weights)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-8, atol=1e-6)  # one rounding


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_result_in_columns_is_the_map(platform, bias):
    layer = Linear(40, 24, bias=bias, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 30, 40))
    with compiling_for(platform):
        y = jax.jit(in_columns)(layer, x)
    weights = [np.asarray(w[...], np.float64) for w in (layer.kernel, layer.bias) if w is not None]
    expected = sum(weights[1:], np.asarray(x, np.float64) @ weights[0])
    np.testing.assert_allclose(y, expected, atol=1e-5)


class EncodeIds(Program):
    name = "text encoder"

    def __call__(self, encoder, ids):
        return encoder(ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_weights_are_not_copied_out_of_their_stack(dtype):
    config = dataclasses.replace(RELEASES["cogvideox-5b"].configs["text_encoder"], layers=2)
    encoder = checkpoint.cast(CogVideoX.components["text_encoder"].abstract(config), dtype)
    program = CompiledProgram(EncodeIds(tokens=226), compiler_options(dtype))
    compiled = program.prepare(encoder, jax.ShapeDtypeStruct((1, 226), jnp.int32))
    least = 4 * config.width * config.mlp_width  # the largest kernel in float32
    # bfloat16 is multiplied in float32 here, one kernel at a time
    assert compiled.memory_analysis().temp_size_in_bytes < (0.5 if dtype == "float32" else 1.5) * least


class InterruptedAtItsEnd:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def interrupted_garbage_collection():
    def callback(phase, info):
        gc.callbacks.remove(callback)
        signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(callback)
    gc.collect()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("dropping", [InterruptedAtItsEnd, interrupted_garbage_collection])
def test_ctrl_c_is_not_lost_where_python_drops_exceptions(dropping):
    hook = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), reliable_interrupts():
        dropping()
        time.sleep(20)
    assert sys.unraisablehook is hook


LATENTS = SMALL | {"output_type": "latent"}
"""For what is no different for the decoder, which takes longest to compile."""


def result(native, folder, **settings):
    """What a pipeline makes that keeps its programs in a folder, as of a new process: latents, or frames."""
    compiling._PROGRAMS.clear()
    pipe = CogVideoXPipeline.from_pretrained(native, dtype="float32")
    pipe.keep_programs(folder)
    return pipe("red", **LATENTS | settings).frames


def never(*args):
    raise AssertionError("compiled")


@pytest.mark.parametrize("at_once", [False, True], ids=["stages", "one program"])
def test_a_second_start_compiles_nothing(native, tmp_path, monkeypatch, at_once):
    settings = {"scheduler": "dpm", "one_program": at_once, "output_type": "uint8"}
    first = result(native, tmp_path, **settings)
    assert len(list(tmp_path.iterdir())) == (2 if at_once else 4)
    monkeypatch.setattr(CompiledProgram, "_compile", never)
    assert np.array_equal(result(native, tmp_path, **settings), first)
    for changed in (
        {"scheduler": "ddim"},
        {"height": 48},
        {"num_inference_steps": 4} if at_once else {"num_frames": 9},
    ):
        with pytest.raises(AssertionError, match="compiled"):
            result(native, tmp_path, **settings | changed)
    monkeypatch.setattr(compile_cache, "code_fingerprint", lambda: "another version")
    with pytest.raises(AssertionError, match="compiled"):
        result(native, tmp_path, **settings)


def test_a_kept_program_that_is_damaged_is_compiled_anew(native, tmp_path, monkeypatch):
    first = result(native, tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert np.array_equal(result(native, tmp_path), first)
    monkeypatch.setattr(CompiledProgram, "_compile", never)
    assert np.array_equal(result(native, tmp_path), first)


def test_what_is_known_by_its_address_alone_is_not_kept(native, tmp_path):
    class OwnScheduler(DDIMScheduler):
        """One of the user's own, whose code may change from run to run."""

    pipe = CogVideoXPipeline.from_pretrained(native, dtype="float32")
    pipe.keep_programs(tmp_path)
    pipe("red", **LATENTS, scheduler=OwnScheduler(pipe.scheduler.config))
    assert len(list(tmp_path.iterdir())) == 2  # the text encoder and the noise


def test_kept_programs_stay_below_their_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "LIMIT", 30_000)
    kept, x = compile_cache.CompileCache(tmp_path), jnp.float32(1)
    for n in range(6):
        kept.get(str(n), (x,), None, jax.jit(lambda x, n=n: jnp.sin(x) + n).lower(x).compile)
    left = list(tmp_path.iterdir())
    assert 1 <= len(left) < 6 and sum(path.stat().st_size for path in left) <= 30_000
    assert float(kept.get("5", (x,), None, never)(x)) == pytest.approx(np.sin(1) + 5)
    with pytest.raises(AssertionError, match="compiled"):
        kept.get("0", (x,), None, never)  # the first goes first


def test_what_comes_from_the_cache_of_jax_is_not_kept_as_it_is(native, tmp_path, monkeypatch):
    """XLA:CPU writes such a program down without its functions, which is seen only when it runs."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    jax.clear_caches()  # what another test compiled is not written down
    try:
        first = CogVideoXPipeline.from_pretrained(native, dtype="float32")("red", **LATENTS).frames
        assert len(list((tmp_path / "jax").iterdir())) >= 3
        jax.clear_caches()
        for _ in range(2):
            assert np.array_equal(result(native, tmp_path / "kept"), first)
            monkeypatch.setattr(CompiledProgram, "_compile", never)
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
        compilation_cache.reset_cache()


def test_a_program_kept_for_a_mesh_runs_there(native, tmp_path, monkeypatch):
    def run():
        pipe = CogVideoXPipeline.from_pretrained(native, "float32", sharding.make_mesh(1, 2, 1))
        pipe.keep_programs(tmp_path)
        return pipe("red", **LATENTS).frames

    first = run()
    monkeypatch.setattr(CompiledProgram, "_compile", never)
    assert np.array_equal(run(), first)
