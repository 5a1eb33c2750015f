"""Rows of attention by this library: each backend against a float32 reference on some queries and heads."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from benchmarks.gpu_proof.cases import HEAD_SCALES, Attention, attention_of
from benchmarks.gpu_proof.errors import EXACT_BAR, RMS_BAR, NotTried, error, sample_indices, save, verdict
from benchmarks.gpu_proof.values import Values, in_jax
from cogvideox_flax.attention import BACKENDS_WITH_LSE, attend, cudnn, nvidia

FLOAT64_SAMPLE = 8, 3
"""Queries and heads of the reference that are also computed in float64."""

ALL_HEADS_QUERIES = 16
"""Queries that are compared in every head."""

_OTHERS: dict[str, tuple[str, Array]] = {}
"""Case -> backend and result of an earlier row of this process, for a comparison of all outputs."""


def inputs(case: Attention) -> tuple[Array, Array, Array]:
    """q, k and v, B S N K; to be jitted. Their values depend on the shape alone."""
    q, k, v = (in_jax(values, case.shape, case.dtype) for values in case.values().values())
    scales = jnp.resize(jnp.asarray(HEAD_SCALES, q.dtype), (case.heads,))  # powers of two: exact
    q = q * scales[:, None]
    if case.kv_len is not None:
        past = jnp.arange(case.tokens)[None, :, None, None] >= jnp.asarray(case.kv_len)[:, None, None, None]
        k, v = jnp.where(past, jnp.asarray(30, k.dtype), k), jnp.where(past, jnp.asarray(1e4, v.dtype), v)
    return q, k, v


def program(case: Attention) -> Callable[..., Array]:
    """f(q, k, v, lengths) -> B S N K, to be jitted; lengths int32 [B] are used where the case has them."""
    options: dict[str, Any] = {"interpret": True} if case.interpret else {}

    def whole(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        kv_len = None if case.kv_len is None else lengths
        return attend(q, k, v, kv_len=kv_len, backend=case.backend, **options)

    def in_parts(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        with_lse, half = partial(BACKENDS_WITH_LSE[case.backend], **options), case.tokens // 2
        found = []
        for start, end in ((0, half), (half, case.tokens)):
            here = jnp.clip(lengths - start, 1, end - start)
            found.append(with_lse(q, k[:, start:end], v[:, start:end], here))
        (a, a_lse), (b, b_lse) = found
        share = jax.nn.sigmoid((a_lse - b_lse) * math.log(2))[..., None]
        return (share * a + (1 - share) * b).astype(q.dtype)

    return in_parts if case.part else whole


def shapes(case: Attention) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of the program's arguments."""
    one = jax.ShapeDtypeStruct(case.shape, case.dtype)
    return one, one, one, jax.ShapeDtypeStruct((case.batch,), jnp.int32)


def reference(
    case: Attention, q: Float[Array, "B Q n K"], k: Float[Array, "B S n K"], v: Float[Array, "B S n K"], queries: Array
) -> tuple[Float32[Array, "B Q n K"], Float32[Array, "B Q n K"]]:
    """Attention of these queries by its definition in float32, head by head; and the same with the probabilities,
    relative to the largest, and the result rounded to the case's dtype: what any kernel rounds."""
    lengths = jnp.asarray(case.kv_len or (case.tokens,) * case.batch)
    exact = jax.lax.Precision.HIGHEST

    def one_head(head: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        q, k, v, length = (x.astype(jnp.float32) for x in head)
        scores = jnp.matmul(q, k.T, precision=exact) / math.sqrt(case.dim)
        scores = jnp.where(jnp.arange(case.tokens) < length, scores, -jnp.inf)
        p = jnp.exp(scores - scores.max(-1, keepdims=True))
        total = p.sum(-1, keepdims=True)
        rounded = p.astype(case.dtype).astype(jnp.float32)
        outs = [jnp.matmul(x, v, precision=exact) / total for x in (p, rounded)]
        return outs[0], outs[1].astype(case.dtype).astype(jnp.float32)

    def heads_first(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(-1, x.shape[1], case.dim)

    heads = q.shape[2]
    outs = jax.lax.map(one_head, (*map(heads_first, (q, k, v)), lengths.repeat(heads)))
    a, b = (x.reshape(case.batch, heads, -1, case.dim).swapaxes(1, 2) for x in outs)
    return a, b


def in_float64(case: Attention, q: Any, k: Any, v: Any, queries: np.ndarray) -> np.ndarray:
    """`reference` in float64, on the CPU."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    lengths = np.asarray(case.kv_len or (case.tokens,) * case.batch)
    key = np.arange(case.tokens)
    seen = np.broadcast_to(key < lengths[:, None, None], (case.batch, len(queries), case.tokens))
    scores = np.einsum("bqnk,bsnk->bnqs", q, k) / math.sqrt(case.dim)
    scores = np.where(seen[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnqs,bsnk->bqnk", p / p.sum(-1, keepdims=True), v)


def run(report: Callable[..., None], *, folder: str | None = None, **options: Any) -> dict[str, Any]:
    """One row: errors, seconds and operations a second."""
    case = attention_of(options)
    if case.backend == "cudnn" and (why := cudnn.why_not(shapes(case)[0])):  # type: ignore[arg-type]
        raise NotTried(f"cuDNN: {why}")
    if case.backend == "triton" and not case.interpret and (why := nvidia.why_not(case.dim)):
        raise NotTried(why)
    q, k, v = jax.jit(partial(inputs, case))()
    lengths = jnp.asarray(case.kv_len or (case.tokens,) * case.batch, jnp.int32)
    start = time.perf_counter()
    compiled = jax.jit(program(case)).lower(*shapes(case)).compile()
    report(compile_s=time.perf_counter() - start, backend=backend_of(compiled.as_text() or "", case))
    out = jax.block_until_ready(compiled(q, k, v, lengths))
    report(first_s=time.perf_counter() - start)
    seconds = timed(lambda: compiled(q, k, v, lengths), case.repeat)
    report(seconds=seconds, flops_per_s=case.flops / seconds)
    return _checked(case, folder, (q, k, v), out)


def _checked(case: Attention, folder: str | None, given: tuple[Array, Array, Array], out: Array) -> dict[str, Any]:
    """The row's errors: many queries of some heads, a few of all heads, and all outputs against another row's."""
    heads, queries = case.sampled_heads, sample_indices(case.tokens, case.queries, 2)
    found, exact, rounded, (q, k, v) = _sampled(case, (*given, out), jnp.asarray(heads), jnp.asarray(queries))
    rows, few = sample_indices(len(queries), FLOAT64_SAMPLE[0], 3), FLOAT64_SAMPLE[1]
    proof = in_float64(case, np.asarray(q)[:, rows], k, v, queries[rows])
    proven = error(np.asarray(exact)[:, rows, :few], proof, (0, 1, 3))
    if proven["max"] > 1e-4:
        raise ArithmeticError(f"the float32 reference is {proven['max']:.1e} off float64: it proves nothing")
    save(folder, case.name, reference=exact, rounded=rounded, heads=heads, queries=queries)
    row = _verdict(case, found, exact, rounded)
    row |= {"reference_error": proven["max"], "finite": bool(jnp.isfinite(out).all())}
    heads, queries = np.arange(case.heads), sample_indices(case.tokens, ALL_HEADS_QUERIES, 4)
    every = _verdict(case, *_sampled(case, (*given, out), jnp.asarray(heads), jnp.asarray(queries))[:3])
    row |= {"all_heads_rms": every["error_rms"], "all_heads_max": every["error_max"]}
    if every["status"] == "wrong":
        row |= {"status": "wrong", "reason": "wrong in a head, on the queries that are compared in all heads"}
    if not row["finite"]:
        row |= {"status": "wrong", "reason": "not all outputs are finite"}
    other, before = _OTHERS.get(case.name, (None, None))
    if before is not None:
        rms, largest = map(float, jax.jit(_apart)(out, before))
        row |= {f"rms_to_{other}": rms, f"max_to_{other}": largest}
        bar = 2 * (RMS_BAR * row["rounding_rms"] if "rounding_rms" in row else EXACT_BAR)
        if not rms <= bar:
            why = f"all outputs: rms {rms:.1e} off those of '{other}', beyond {bar:.1e}; one of the two is wrong"
            row |= {"status": "wrong", "reason": why}
    elif row["status"] == "ok" and not case.part:
        _OTHERS.clear()  # one at a time: they are large
        _OTHERS[case.name] = case.backend, out
    return row


@partial(jax.jit, static_argnums=0)
def _sampled(
    case: Attention, arrays: tuple[Array, Array, Array, Array], heads: Array, queries: Array
) -> tuple[Array, Array, Array, tuple[Array, Array, Array]]:
    """For these heads and queries: the result, the reference, the rounded reference; and q, k and v of the first heads
    for `in_float64`. arrays: q, k, v and the result."""
    q, k, v, out = (x[:, :, heads] for x in arrays)
    q, few = q[:, queries], slice(FLOAT64_SAMPLE[1])
    exact, rounded = reference(case, q, k, v, queries)
    return out[:, queries], exact, rounded, (q[:, :, few], k[:, :, few], v[:, :, few])


def _verdict(case: Attention, found: Array, exact: Array, rounded: Array) -> dict[str, Any]:
    axes = (0, 1, 3)
    return verdict(error(found, exact, axes), None if case.dtype == "float32" else error(rounded, exact, axes))


def _apart(a: Float[Array, "B S N K"], b: Float[Array, "B S N K"]) -> tuple[Array, Array]:
    """Root mean square and largest difference of all outputs, in standard deviations of their head."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    off = jnp.abs(a - b) / b.std((0, 1, 3), keepdims=True)
    return jnp.sqrt(jnp.square(off).mean()), off.max()


def backend_of(text: str, case: Attention) -> str:
    """The backend that a compiled program runs."""
    if "__cudnn$fmha" in text:
        return "cudnn"
    if "xla.gpu.triton" in text or case.interpret:
        return "triton"
    return "xla"


def timed(call: Callable[[], Any], repeat: int) -> float:
    """Seconds, the median of several runs."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def gradient_program(case: Attention, f: Callable[..., Array]) -> Callable[..., tuple[Array, Array, Array]]:
    """The gradients of f(q, k, v, lengths), weighted by random numbers, in q, k and v; to be jitted."""

    def loss(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        weight = in_jax(Values("weight"), q.shape, jnp.float32)
        return (weight * f(q, k, v, lengths).astype(jnp.float32)).sum()

    return jax.grad(loss, (0, 1, 2))


def gradient(report: Callable[..., None], *, folder: str | None = None, **options: Any) -> dict[str, Any]:
    """A row: the gradients in q, k and v, as in training, against those of the definition in float32."""
    case = attention_of(options)
    q, k, v = jax.jit(partial(inputs, case))()
    lengths = jnp.full(case.batch, case.tokens, jnp.int32)

    def plain(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        return reference(case, q, k, v, jnp.arange(case.tokens))[0]

    start = time.perf_counter()
    compiled = jax.jit(gradient_program(case, program(case))).lower(q, k, v, lengths).compile()
    report(compile_s=time.perf_counter() - start, backend=backend_of(compiled.as_text() or "", case))
    found = jax.block_until_ready(compiled(q, k, v, lengths))
    report(first_s=time.perf_counter() - start)
    report(seconds=timed(lambda: compiled(q, k, v, lengths), case.repeat))
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    exact = jax.jit(gradient_program(case, plain))(*wide, lengths)
    errors = {name: error(a, b, (0, 1, 3)) for name, a, b in zip("qkv", found, exact, strict=True)}
    worst = max(errors.values(), key=lambda e: e["rms"])
    right = all(e["rms"] <= 0.02 for e in errors.values())
    return {
        "error_rms": worst["rms"],
        "error_max": worst["max"],
        "status": "ok" if right else "wrong",
        **{f"error_rms_d{name}": e["rms"] for name, e in errors.items()},
    }
