"""Programs for NVIDIA GPUs: what the compiler says of them where it is installed; no GPU is needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cogvideox_flax import cli
from cogvideox_flax.errors import InputError
from cogvideox_flax.plan import GPUS, gpu
from cogvideox_flax.plan.flops import Flops

COMPILE = """
import jax, jax.numpy as jnp
from functools import partial
from cogvideox_flax.attention import attend
from cogvideox_flax.nn.conv.causal_conv import conv3d
from cogvideox_flax.plan.chips import GPUS
from cogvideox_flax.plan.gpu import compiling_without_gpu, device
from tests.support import gpu_sparse
def check(one):
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
with compiling_without_gpu():
    for name, one in GPUS.items():
        check(one)
        print(name, "compiles")
"""


@pytest.mark.skipif(gpu.installed(), reason="the compiler for NVIDIA GPUs is installed")
def test_without_the_compiler_it_says_what_to_install():
    with (
        pytest.raises(InputError, match=r'a plan for GPUs needs their compiler: pip install "\.\[cuda\]"'),
        gpu.compiling_without_gpu(),
    ):
        pass


@pytest.mark.skipif(not gpu.installed(), reason="needs the compiler for NVIDIA GPUs: pip install -e '.[cuda]'")
def test_kernels_and_convolutions_compile_for_gpus_that_are_not_here():
    """In a process of its own, which is told that there is a GPU."""
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{name} compiles" for name in GPUS]


PLAN = ["plan", "--topology", "rtx4090", "--stages", "encode", "denoise", "--steps", "10", "--json", "--quiet"]


@pytest.mark.skipif(gpu.installed(), reason="the compiler for NVIDIA GPUs is installed")
def test_a_plan_without_the_compiler_says_what_to_install(capsys):
    assert cli.main(PLAN) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and 'needs their compiler: pip install ".[cuda]"' in err


@pytest.mark.skipif(not gpu.installed(), reason="needs the compiler for NVIDIA GPUs: pip install -e '.[cuda]'")
def test_a_plan():
    command = [sys.executable, "-m", "cogvideox_flax", *PLAN]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["topology"], found["mesh"], found["chips"], found["fits"]) == ("rtx4090", [1, 1, 1], 1, True)
    encode, denoise = found["stages"]
    assert (denoise["name"], denoise["runs"], denoise["collectives"]) == ("denoise", 10, {})
    for row in (encode, denoise):
        assert row["flops"] > 0 and row["estimated_s"] > 0 and row["hbm_gib_per_chip"] >= row["argument_gib"] > 0


def test_a_plan_is_of_one_gpu(capsys):
    assert cli.main([*PLAN, "--mesh", "1,2,1"]) == 2
    assert "is of one GPU; expected --mesh 1,1,1, or none" in capsys.readouterr().err
    assert cli.main(["plan", "--topology", "h1000"]) == 2
    assert f"and the GPUs {', '.join(GPUS)}" in capsys.readouterr().err
    parser = cli.arguments.make_parser().commands["plan"]
    assert all(name in parser.format_help() for name in GPUS)


def test_the_memory_that_jax_takes(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert gpu.usable_memory(GPUS["rtx4090"]) == 18 << 30
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert gpu.usable_memory(GPUS["h100"]) == 72 << 30
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "much")
    with pytest.raises(InputError, match="expected a share of the memory"):
        gpu.usable_memory(GPUS["h100"])


@pytest.mark.parametrize(
    ("seconds", "flops", "moved", "head_dim"),
    [
        (0.135, Flops(32.25e12, 31.06e12), 46.45e9, 64),
        (0.640, Flops(81.88e12, 200.0e12), 114.7e9, 64),
        (0.370, Flops(41.22e12, 167.5e12), 92.85e9, 128),
        (0.83, Flops(1.304e12, 0, 308.1e12), 1220e9, 64),
        (0.81, Flops(0.621e12, 0, 337.6e12), 843.1e9, 128),
    ],
    ids=["5b step", "1.5-5B step", "HunyuanVideo-1.5 step", "5b decoding", "HunyuanVideo-1.5 decoding"],
)
def test_the_modelled_time_is_that_of_an_h200(seconds, flops, moved, head_dim):
    """By the table in docs/benchmarks.md; work and bytes are the compiler's, of the same programs."""
    assert sum(gpu.modelled_seconds(flops, moved, head_dim, "bfloat16", GPUS["h200"])) == pytest.approx(
        seconds, rel=0.06
    )


def test_bytes_of_all_but_products():
    """Of both branches of a conditional, and of neither a product, nor cuDNN's and cuBLAS' calls."""
    text = """
%product (a: bf16[64,64]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  ROOT %dot = bf16[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%yes (b: bf16[64,64]) -> bf16[64,64] {
  %b = bf16[64,64]{1,0} parameter(0)
  ROOT %copied = bf16[64,64]{1,0} copy(%b)
}

%no (c: bf16[64,64]) -> bf16[64,64] {
  %c = bf16[64,64]{1,0} parameter(0)
  ROOT %negated = bf16[64,64]{1,0} negate(%c)
}

ENTRY %main (p: pred[], x: bf16[64,64]) -> bf16[64,64] {
  %p = pred[] parameter(0)
  %x = bf16[64,64]{1,0} parameter(1)
  %gemm = bf16[64,64]{1,0} fusion(%x), kind=kCustom, calls=%product
  %called = bf16[64,64]{1,0} custom-call(%gemm, %gemm), custom_call_target="__cublas$gemm"
  %attended = bf16[64,64]{1,0} custom-call(%called), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %either = bf16[64,64]{1,0} conditional(%p, %attended, %attended), true_computation=%yes, false_computation=%no
}
"""
    quarter = text.replace("=%no\n", '=%no, metadata={op_name="a/runs_in_0.25/cond"}\n')
    assert gpu.moved_bytes(quarter, {}) == 2 * 64 * 64 * 2
    assert gpu.moved_bytes(text, {}) == 2 * 2 * 64 * 64 * 2
