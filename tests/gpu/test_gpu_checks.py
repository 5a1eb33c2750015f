"""The checks of `test_on_gpu`, in small on the CPU, their faults, and their programs lowered for a GPU."""

from __future__ import annotations

import os
import re
import time
from contextlib import closing
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.vs_diffusers import ours
from benchmarks.vs_diffusers.cases import COMPONENT, RELEASED, Case
from cogvideox_flax import checkpoint
from cogvideox_flax.attention import cudnn, nvidia, triton
from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.models.registry import get_release
from cogvideox_flax.nn.platforms import compiling_for
from cogvideox_flax.nn.quantized import KINDS
from cogvideox_flax.plan import gpu
from cogvideox_flax.plan.flops import count_flops
from tests.support import gpu_attention, gpu_convolution, gpu_models, gpu_process, gpu_sparse
from tests.support.gpu_attention import HEAD_SCALES, Attention
from tests.support.gpu_errors import error, fault, sample_indices
from tests.support.gpu_process import Failed, Process
from tests.support.reference import relative_error

ATTENTION = [case for case in gpu_attention.cases(small=True, interpret=True) if case.name != "1.5-5B"]
ATTENTION = [case for case in ATTENTION if case.backend != "cudnn"]
LITTLE = Attention("little", 1, 400, 4, queries=16)

# --- the checks in small


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.further] * (i % 4 > 0)) for i, case in enumerate(ATTENTION)], ids=str
)
def test_attention(case):
    found = gpu_attention.check(case)
    assert not found["fault"] and found["error of some heads"]["rms"] < 0.02
    assert found["backend"] == ("triton" if case.backend == "triton" else "xla")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_convolution(dtype):
    case = next(case for case in gpu_convolution.cases(small=True) if case.dtype == dtype)
    assert not gpu_convolution.check(case)["fault"]


def test_a_native_and_a_spatial_convolution():
    (spatial,) = (case for case in gpu_convolution.cases(small=True) if case.taps == 1)
    for case in (spatial, gpu_convolution.native_case(small=True)):
        assert not gpu_convolution.check(case)["fault"]


@pytest.mark.parametrize("check", [gpu_attention, gpu_convolution], ids=["attention", "convolution"])
def test_gradients(check, monkeypatch):
    case = check.gradient_case(small=True)
    assert not check.check_gradients(case)["fault"]
    known = check.gradients
    if check is gpu_attention:
        monkeypatch.setattr(check, "program", lambda case: lambda q, k, v, n: 1.1 * (q + v))
    else:
        monkeypatch.setattr(check, "gradients", lambda x, k, b, dy: [1.1 * g for g in known(x, k, b, dy)])
    assert check.check_gradients(case)["fault"]


@pytest.mark.parametrize("case", gpu_sparse.cases(small=True, interpret=True), ids=str)
def test_sparse_attention(case):
    found = gpu_sparse.check(case)
    assert not found["fault"] and found["error"]["rms"] < 0.01 and 0.4 < found["share of tiles"] < 0.8


def test_kernels_are_not_tried_without_a_gpu():
    for backend in ("cudnn", "triton"):
        assert "needs an NVIDIA GPU" in gpu_attention.check(replace(LITTLE, backend=backend))["skip"]


@pytest.mark.parametrize(("family", "part"), [("cogvideox", "transformer"), ("hunyuan", "text_encoder_2")])
def test_models(family, part, tmp_path_factory, small_checkpoints):
    given = small_checkpoints, family, part
    exact = gpu_models.theirs(*given, "float32")
    assert relative_error(gpu_models.ours(*given, "float32"), exact) < 1e-4
    assert relative_error(gpu_models.ours(*given, "bfloat16"), exact) > 1e-4


def test_8_bit_weights(small_checkpoints):
    given = small_checkpoints, "cogvideox", "transformer", "float32"
    exact = gpu_models.ours(*given)
    for kind in KINDS:
        assert 1e-3 < error(gpu_models.ours(*given, kind), exact)["rms"] < 0.03


@pytest.mark.further
def test_fine_tuning(tmp_path):
    found = gpu_models.fine_tuned(tmp_path, "lora", "float32")
    assert found.keys() == {"loss", "gradient_norm"} and all(len(values) == 4 for values in found.values())


@pytest.fixture(scope="module")
def small_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    gpu_models.save(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("family", "part"), gpu_models.MODELS)
def test_every_model(family, part, small_checkpoints):
    given = small_checkpoints, family, part, "float32"
    assert relative_error(gpu_models.ours(*given), gpu_models.theirs(*given)) < 1e-4


# --- what a check finds

HEAD = slice(None), slice(None)


@pytest.mark.parametrize(
    ("heads", "at", "factor"),
    [
        pytest.param(4, (*HEAD, 0), 1.01, id="a head by a hundredth"),
        pytest.param(4, (0, 17, 0, 3), np.nan, id="one NaN"),
        pytest.param(4, (*HEAD, 1), 0, id="a head of zeros"),
        pytest.param(8, (*HEAD, 5), 0, id="a head of zeros that is not among the sampled heads"),
    ],
)
def test_a_kernel_that_is_off_is_found(heads, at, factor, monkeypatch):
    case = replace(LITTLE, heads=heads, queries=64)
    known = gpu_attention.program(case)
    monkeypatch.setattr(gpu_attention, "program", lambda case: lambda *args: known(*args).at[at].multiply(factor))
    assert gpu_attention.check(case)["fault"]


def test_tiles_that_are_not_attended_are_found(monkeypatch):
    (case, _), known = gpu_sparse.cases(small=True), gpu_sparse.program
    fewer = replace(case, sparse=replace(case.sparse, window=(1, 1, 1)))
    monkeypatch.setattr(gpu_sparse, "program", lambda case, *args: known(fewer, *args))
    assert gpu_sparse.check(case)["fault"]


def test_an_output_that_no_sample_sees_is_found_beside_another_backend(monkeypatch):
    case = replace(LITTLE, beside="xla")
    assert not gpu_attention.check(case)["fault"]
    seen = {*sample_indices(400, 16, 2), *sample_indices(400, gpu_attention.ALL_HEADS_QUERIES, 4)}
    unseen = jnp.asarray([n for n in range(400) if n not in seen])[:200]
    known = gpu_attention.program

    def program(case):
        f = known(case)
        return f if case.backend == "xla" else lambda *args: f(*args).at[:, unseen, 1].set(0)

    monkeypatch.setattr(gpu_attention, "program", program)
    found = gpu_attention.check(case)
    assert "off those of 'xla'" in found["fault"] and found["error of some heads"]["rms"] < 0.02


@pytest.mark.parametrize("heads", [4, 6, 24, 30, 48])
def test_sampled_heads_have_all_scales(heads):
    """From attention that averages all keys to attention that takes a few."""
    sampled = Attention("a", 1, 9, heads).sampled_heads
    assert {HEAD_SCALES[i % len(HEAD_SCALES)] for i in sampled} == set(HEAD_SCALES)
    assert {0, 1, 2, heads - 1} <= set(sampled) and len(sampled) <= 5


def test_a_convolution_that_is_off_is_found(monkeypatch):
    case = next(gpu_convolution.cases(small=True))
    known = gpu_convolution.conv3d
    monkeypatch.setattr(gpu_convolution, "program", lambda case: lambda x, k, b: known(x[..., ::-1], k, b))
    assert gpu_convolution.check(case)["fault"]


def test_errors_are_in_standard_deviations_and_nan_is_never_small():
    reference = np.asarray([[1.0, -1.0], [100.0, -100.0]])
    found = reference + np.asarray([[0.1, 0.0], [0.0, 10.0]])
    assert error(found, reference, (1,)) == {"rms": pytest.approx(0.1 / 2**0.5), "max": pytest.approx(0.1)}
    assert fault({"rms": float("nan"), "max": 0.0}, {"rms": 1.0, "max": 1.0})
    assert fault({"rms": 1e-6, "max": 1e-5}, None) is None and fault({"rms": 1e-6, "max": 2e-4}, None)
    with pytest.raises(ValueError, match="is not one of"):
        error(np.zeros(3), np.zeros((3, 1)))
    assert {0, 500, 999} <= set(sample_indices(1000, 10, 0)) and len(sample_indices(1000, 10, 0)) == 10
    assert [len(sample_indices(100, count, 0)) for count in (0, 1, 2, 3, 4, 200)] == [0, 1, 2, 3, 4, 100]


# --- the process


def platform():
    return jax.default_backend(), os.environ["JAX_PLATFORMS"], os.environ.get("XLA_FLAGS")


def out_of_memory():
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")


def test_a_process_outlives_what_its_checks_do(monkeypatch):
    monkeypatch.setattr(gpu_process, "END_S", 5.0)
    with closing(Process("cpu")) as process:
        assert process(platform) == ("cpu", "cpu", None)
        with pytest.raises(Failed, match=r"^out of memory: RuntimeError: RESOURCE"):
            process(out_of_memory)
        with pytest.raises(Failed, match="ended with status -6"):
            process(os.abort)
        with pytest.raises(Failed, match=r"within 1 s did not end"):
            process(time.sleep, 60, limit_s=1)
        assert process(os.getpid) != os.getpid()


# --- the programs at their released sizes, lowered for a GPU that is not there


@pytest.fixture
def on_a_gpu(monkeypatch):
    for module, name, answer in gpu.answers():
        monkeypatch.setattr(module, name, answer)


def lowered(f, *shapes):
    with compiling_for("cuda"):
        return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("case", list(gpu_attention.cases()), ids=str)
def test_attention_lowers_for_a_gpu(case, on_a_gpu):
    assert case.why_not() is None
    text = lowered(gpu_attention.program(case), *gpu_attention.shapes(case))
    assert ("__cudnn$fmha" in text) == (case.backend in ("auto", "cudnn"))
    assert (triton.NAME in text) == (case.backend == "triton")


@pytest.mark.parametrize("case", gpu_sparse.cases(), ids=str)
def test_sparse_attention_lowers_for_a_gpu(case, on_a_gpu):
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = lowered(partial(gpu_sparse.program, case), *jax.eval_shape(partial(gpu_sparse.inputs, case)), lengths)
    assert triton.SPARSE_NAME in text


@pytest.mark.parametrize("case", [*gpu_convolution.cases(), gpu_convolution.native_case()], ids=str)
def test_convolutions_lower_for_a_gpu(case, on_a_gpu):
    text = lowered(gpu_convolution.program(case), *gpu_convolution.shapes(case))
    assert ranks(text) == ({5} if case.native else {4})


def ranks(text):
    return {operand.count("x") for operand in re.findall(r"stablehlo\.convolution.*?: \(tensor<(\w+)>", text)}


def test_gradients_lower_for_a_gpu(on_a_gpu):
    case = gpu_attention.gradient_case()
    text = lowered(gpu_attention.gradients(case, gpu_attention.program(case)), *gpu_attention.shapes(case))
    assert "__cudnn$fmha" in text
    conv = gpu_convolution.gradient_case()
    dy = jax.ShapeDtypeStruct(conv.output_shape, jnp.dtype(conv.dtype))
    assert ranks(lowered(gpu_convolution.gradients, *gpu_convolution.shapes(conv), dy)) == {4}


def part_of(part, size):
    """(f, abstract module, abstract inputs) of a comparison's case on a GPU."""
    case = Case(part, *size, None, "bfloat16", "gpu", False)
    component = COMPONENT.get(part, part)
    module = checkpoint.cast(Manifest.of_release(get_release(case.release)).abstract(component), case.dtype)
    return ours.FUNCTIONS[part], module, jax.eval_shape(lambda: tuple(ours.arguments(case).values()))


@pytest.mark.parametrize("size", RELEASED, ids=[size[0] for size in RELEASED])
def test_models_lower_for_a_gpu(size, on_a_gpu):
    f, module, given = part_of("transformer", size)
    assert module.config.layers == (54 if "hunyuan" in size[0] else 42)
    assert "__cudnn$fmha" in lowered(f, module, *given)
    f, module, given = part_of("decode", (*size[:3], 3))
    assert ranks(lowered(f, module, *given)) == {4}


def test_operations_of_a_step_are_counted_on_a_gpu_too(on_a_gpu):
    """Also after its program is made, whose trace JAX keeps: cuDNN's attention counts as its products."""
    f, module, given = part_of("transformer", RELEASED[0])
    assert "__cudnn$fmha" in lowered(f, module, *given)
    attention_flops = 42 * 2 * 4 * 17_776**2 * 3072
    assert count_flops(f, module, *given).kernels == attention_flops
    assert count_flops(f, module, *given).total > 2 * attention_flops
    q = jax.ShapeDtypeStruct((2, 1500, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 1700, 4, 64), jnp.bfloat16)
    both = jax.grad(lambda q, k: cudnn.attend(q, k, k).astype(jnp.float32).sum(), (0, 1))
    assert count_flops(both, q, k).kernels == (2 + 5) * 2 * 2 * 4 * 1500 * 1700 * 64


@pytest.mark.parametrize(
    ("number", "version"), [(91501, (9, 15, 1)), (91002, (9, 10, 2)), (8907, (8, 9, 7)), (None, None)]
)
def test_which_cudnn_there_is(number, version, monkeypatch):
    class Versions:
        @staticmethod
        def cudnn_get_version():
            if number is None:
                raise RuntimeError("no cuDNN")
            return number

    monkeypatch.setattr("jax._src.lib.cuda_versions", Versions)
    assert nvidia.cudnn_version() == version
    monkeypatch.setattr("jax._src.lib.cuda_versions", None)
    assert nvidia.cudnn_version() is None
