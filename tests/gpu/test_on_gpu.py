"""On an NVIDIA GPU: kernels and convolutions at the released sizes, small models of both families against PyTorch; with
8-bit weights, in fine-tuning, and the embedded model against a CPU. `python -m benchmarks.gpu` runs these and measures;
each runs in a process of its own."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from cogvideox_flax.nn.quantized import KINDS
from tests.support import gpu_attention, gpu_convolution, gpu_models, gpu_sparse
from tests.support.gpu_errors import error
from tests.support.gpu_process import Failed, Process

pytestmark = pytest.mark.gpu

BAR = 1e-4
"""Float32 of this library and of PyTorch."""

BF16_RATIO = 1.1
"""Largest ratio of this library's bfloat16 error to PyTorch's own, both from PyTorch's float32."""

EIGHT_BIT_RATIO = 0.1
"""Largest difference of 8-bit results on a GPU and a CPU, in units of the error that 8 bits make. Above 0, since an
activation halfway between two 8-bit numbers may be rounded either way."""

LOSS_BARS = {"float32": 2e-4, "bfloat16": 2e-2}
"""Largest relative difference of a training step's loss, or of its gradient's norm, on a GPU and a CPU."""

PIXEL_BAR = 2
"""Largest difference of a pixel, of 255, between a GPU's and a CPU's run of the embedded model."""


@pytest.fixture(scope="module")
def jax_on_gpu():
    """A process of JAX on the GPU."""
    with closing(Process("cuda,cpu")) as process:
        try:
            seen = process(gpu_models.seen_by_jax, limit_s=300)
        except Failed as e:
            pytest.skip(f"needs an NVIDIA GPU: {e}")
        if seen["fault"]:
            pytest.skip(seen["fault"])
        yield process


@pytest.fixture(scope="module")
def torch_on_gpu(jax_on_gpu):
    """A process of PyTorch, which has a cuDNN of its own."""
    pytest.importorskip("diffusers")
    with closing(Process("cuda,cpu")) as process:
        yield process


@pytest.fixture(scope="module")
def cpu(jax_on_gpu):
    """A process of JAX on the CPU."""
    with closing(Process("cpu")) as process:
        yield process


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, jax_on_gpu):
    pytest.importorskip("diffusers")
    folder = tmp_path_factory.mktemp("checkpoints")
    gpu_models.save(folder)
    return folder


def judge(found, record_property):
    for name, value in found.items():
        record_property(name, value)
    if "skip" in found:
        pytest.skip(found["skip"])
    assert not found["fault"], found


def test_what_the_libraries_see(jax_on_gpu, torch_on_gpu, record_property):
    seen = torch_on_gpu(gpu_models.cudnn_of_torch)
    judge(jax_on_gpu(gpu_models.seen_by_jax) | {"PyTorch": seen}, record_property)
    assert seen["cuda"], "PyTorch sees no GPU, so nothing is compared with it there"


def measured(process, case, record_property):
    found = process(gpu_attention.check, case)
    judge(found, record_property)
    if case.dtype != "float32" and case.backend in ("auto", "cudnn"):
        assert found["backend"] == "cudnn"
    elif case.backend != "auto":
        assert found["backend"] == case.backend


ATTENTION = list(gpu_attention.cases())


@pytest.mark.parametrize("case", ATTENTION[:3], ids=str)
def test_attention(case, jax_on_gpu, record_property):
    measured(jax_on_gpu, case, record_property)


@pytest.mark.parametrize("case", gpu_sparse.cases(), ids=str)
def test_sparse_attention(case, jax_on_gpu, record_property):
    found = jax_on_gpu(gpu_sparse.check, case)
    judge(found, record_property)
    assert found["backend"] == "triton"


@pytest.mark.parametrize("case", list(gpu_convolution.cases())[:4], ids=str)
def test_convolution(case, jax_on_gpu, record_property):
    judge(jax_on_gpu(gpu_convolution.check, case), record_property)


@pytest.mark.parametrize(("family", "part"), gpu_models.MODELS)
def test_models_are_the_reference(family, part, checkpoints, jax_on_gpu, torch_on_gpu, record_property):
    def both(dtype):
        given = checkpoints, family, part, dtype
        return jax_on_gpu(gpu_models.ours, *given), torch_on_gpu(gpu_models.theirs, *given)

    ours, exact = both("float32")
    found = error(ours, exact)
    record_property("error", found)
    assert found["max"] < BAR
    ours, theirs = (error(out, exact)["rms"] for out in both("bfloat16"))
    record_property("bfloat16 error, PyTorch's", (ours, theirs))
    assert ours <= BF16_RATIO * theirs


def test_the_embedded_model_makes_the_same_video_as_on_the_cpu(cpu, jax_on_gpu, record_property):
    ours, exact = (process(gpu_models.embedded, 10, limit_s=240) for process in (jax_on_gpu, cpu))
    apart = int(np.abs(ours.astype(int) - exact).max())
    record_property("largest difference of a pixel", apart)
    assert apart <= PIXEL_BAR and exact.std() > 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["cogvideox", "hunyuan"])
def test_8_bit_weights(family, kind, checkpoints, cpu, jax_on_gpu, record_property):
    given = checkpoints, family, "transformer", "float32"
    plain, exact = cpu(gpu_models.ours, *given), cpu(gpu_models.ours, *given, kind)
    rounding, found = error(exact, plain), error(jax_on_gpu(gpu_models.ours, *given, kind), exact)
    record_property("error of 8 bits", rounding)
    record_property("difference", found)
    assert found["rms"] <= EIGHT_BIT_RATIO * rounding["rms"]


@pytest.mark.parametrize(("method", "dtype"), [("lora", "float32"), ("full", "float32"), ("full", "bfloat16")])
def test_fine_tuning(method, dtype, cpu, jax_on_gpu, record_property, tmp_path):
    def run(process, name):
        return process(gpu_models.fine_tuned, tmp_path / name, method, dtype, limit_s=200)

    ours, exact = run(jax_on_gpu, "gpu"), run(cpu, "cpu")
    found = {name: np.abs(np.divide(ours[name], exact[name]) - 1).max() for name in exact}
    record_property("largest relative difference", found)
    assert all(off < LOSS_BARS[dtype] for off in found.values()), (ours, exact)


@pytest.mark.parametrize("check", [gpu_attention, gpu_convolution], ids=["attention", "convolution"])
def test_gradients(check, jax_on_gpu, record_property):
    judge(jax_on_gpu(check.check_gradients, check.gradient_case()), record_property)


@pytest.mark.parametrize("case", ATTENTION[3:], ids=str)
def test_more_attention(case, jax_on_gpu, record_property):
    measured(jax_on_gpu, case, record_property)


@pytest.mark.parametrize("case", list(gpu_convolution.cases())[4:], ids=str)
def test_more_convolutions(case, jax_on_gpu, record_property):
    judge(jax_on_gpu(gpu_convolution.check, case), record_property)


@pytest.mark.xfail(strict=False, reason="wrong before cuDNN 9.15; this library uses none")
def test_native_convolution(jax_on_gpu, record_property):
    judge(jax_on_gpu(gpu_convolution.check, gpu_convolution.native_case()), record_property)
