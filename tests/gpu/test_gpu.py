"""Programs for NVIDIA GPUs: what the compiler says of them where it is installed; no GPU is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import gpu_target

COMPILE = """
import jax, jax.numpy as jnp
from functools import partial
from benchmarks.gpu_target import GPUS, device, prepare
prepare()
from cogvideox_flax.attention import attend
from cogvideox_flax.nn.conv.causal_conv import conv3d
from tests.support import gpu_sparse
for name, one in GPUS.items():
    where = jax.sharding.SingleDeviceSharding(device(one))
    def of(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    def text(f, *args):
        return jax.jit(f).lower(*args).compile().as_text()
    for dtype in (jnp.bfloat16, jnp.float32):
        for dim in (48, 64, 128):
            q = of(2, 1030, 4, dim, dtype=dtype)
            assert "triton" in text(partial(attend, backend="triton"), q, q, q)
    for case in gpu_sparse.cases():
        given = [of(*x.shape, dtype=x.dtype) for x in jax.eval_shape(partial(gpu_sparse.inputs, case))]
        assert "triton" in text(partial(gpu_sparse.program, case), *given, of(2, dtype=jnp.int32))
    q = of(2, 1030, 4, 64)
    assert "__cudnn$fmha" in text(attend, q, q, q)
    y = text(conv3d, of(1, 5, 6, 10, 128), of(3, 3, 3, 128, 256), of(256))
    assert any("= (bf16[1,6,10,256]{3,2,1,0}" in line for line in y.splitlines() if "__cudnn$conv" in line), y
    def loss(x, kernel):
        return conv3d(x, kernel, jnp.zeros(256)).astype(jnp.float32).sum()
    y = text(jax.grad(loss, (0, 1)), of(1, 5, 6, 10, 128), of(3, 3, 3, 128, 256))
    assert y.count('custom_call_target="__cudnn$convBackwardFilter"') == 3 and "window={size=3x3x3" not in y, y
    print(name, "compiles")
"""


@pytest.mark.skipif(gpu_target.installed(), reason="the compiler for NVIDIA GPUs is installed")
def test_without_the_compiler_it_says_what_to_install():
    with pytest.raises(SystemExit, match=r"pip install '\.\[cuda\]'"):
        gpu_target.prepare()


@pytest.mark.skipif(not gpu_target.installed(), reason="needs the compiler for NVIDIA GPUs: pip install -e '.[cuda]'")
def test_kernels_and_convolutions_compile_for_gpus_that_are_not_here():
    """In a process of its own, which is told that there is a GPU."""
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{name} compiles" for name in gpu_target.GPUS]
