"""Checks of attention, each backend against float32 and float64 on some queries and heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from cogvideox_flax.attention import BACKENDS_WITH_LSE, attend, cudnn, triton
from tests.support.gpu_errors import EXACT_BAR, RMS_BAR, compiled, error, fault, sample_indices, why_no_memory

HEAD_SCALES = (1.0, 2.0, 4.0)
"""Scales of the queries, head by head in turn: from attention that averages all keys to attention that takes a few."""

FLOAT64_SAMPLE = 8, 3
"""Queries and heads of the reference that are also computed in float64."""

ALL_HEADS_QUERIES = 16
"""Queries that are compared in every head."""

NEEDED_GIB = 8.0
"""At the released sizes, about."""

GRADIENT_BAR = 0.02
"""Largest root mean square error of a 16-bit gradient."""


@dataclass(frozen=True)
class Attention:
    """Attention over `tokens` queries and keys.

    kv_len: real keys of each batch element; keys past it have large values that must not be attended.
    part: the keys in two halves, merged by their log_sum_exp. beside: another backend, for a comparison of all outputs.
    interpret: on a machine without a GPU. queries: how many are compared with the reference, in `sampled_heads`.
    """

    name: str
    batch: int
    tokens: int
    heads: int
    dim: int = 64
    dtype: str = "bfloat16"
    backend: str = "auto"
    beside: str | None = None
    kv_len: tuple[int, ...] | None = None
    part: bool = False
    interpret: bool = False
    queries: int = 512

    def __str__(self) -> str:
        return f"{self.name}, {self.backend}"

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.kv_len or (self.tokens,) * self.batch

    @property
    def sampled_heads(self) -> np.ndarray:
        """Heads that are compared on many queries: the first three have all of `HEAD_SCALES`."""
        found = np.unique([0, 1, 2, self.heads // 2, self.heads - 1])
        return found[found < self.heads]

    def why_not(self) -> str | None:
        """Why it cannot be tried here."""
        q: Any = shapes(self)[0]
        if self.backend == "cudnn":
            return cudnn.why_not(q)
        return triton.why_not(q) if self.backend == "triton" and not self.interpret else None


def cases(*, small: bool = False, interpret: bool = False) -> Iterator[Attention]:
    """At the released sizes, what matters most first; small: to try the checks, interpret: without a GPU."""
    five, one_five = (1100, 1300) if small else (17_776, 45_106)
    heads, few = (4, 3) if small else (48, 30)
    first = Attention("5b", 2, five, heads, queries=64 if small else 512)
    long = replace(first, name="1.5-5B", batch=1, tokens=one_five)
    lengths = replace(first, name="5b, lengths", kv_len=(five, five // 2 + 3))
    half = replace(first, name="2b, float16", heads=few, dtype="float16")
    exact = replace(first, name="float32", batch=1, heads=min(heads, 6), dtype="float32")
    wide = replace(first, name="heads of 128", batch=1, heads=heads // 2, dim=128)
    parts = replace(first, name="5b, two parts", batch=1, part=True)
    kernel: dict[str, Any] = {"backend": "triton", "interpret": interpret}
    yield first
    yield replace(first, beside="auto", **kernel)
    yield long
    for case in (lengths, half, wide, long):
        yield replace(case, beside="auto", **kernel)
    yield replace(parts, **kernel)
    yield from (lengths, half, wide)
    yield replace(exact, beside="xla", **kernel)
    yield replace(exact, backend="xla")
    yield replace(first, backend="cudnn")
    yield replace(first, backend="xla", beside="auto")


def inputs(case: Attention) -> tuple[Array, Array, Array]:
    """q, k and v, B S N K; to be jitted. Their values depend on the shape alone."""
    shape = case.batch, case.tokens, case.heads, case.dim
    q, k, v = (jax.random.normal(key, shape, case.dtype) for key in jax.random.split(jax.random.key(0), 3))
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
    one = jax.ShapeDtypeStruct((case.batch, case.tokens, case.heads, case.dim), jnp.dtype(case.dtype))
    return one, one, one, jax.ShapeDtypeStruct((case.batch,), jnp.int32)


def definition(
    q: Float[Array, "Q K"], k: Float[Array, "S K"], v: Float[Array, "S K"], seen: Bool[Array, " S"], dtype: Any
) -> tuple[Float32[Array, "Q K"], Float32[Array, "Q K"]]:
    """Attention of one head to the keys that are seen, in float32; and the same with the probabilities, relative to the
    largest, and the result rounded to this dtype: what any kernel rounds."""
    exact = jax.lax.Precision.HIGHEST
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    scores = jnp.matmul(q, k.T, precision=exact) / math.sqrt(q.shape[-1])
    scores = jnp.where(seen, scores, -jnp.inf)
    p = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = p.sum(-1, keepdims=True)
    rounded = p.astype(dtype).astype(jnp.float32)
    outs = [jnp.matmul(x, v, precision=exact) / total for x in (p, rounded)]
    return outs[0], outs[1].astype(dtype).astype(jnp.float32)


def reference(
    case: Attention, q: Float[Array, "B Q n K"], k: Float[Array, "B S n K"], v: Float[Array, "B S n K"]
) -> tuple[Float32[Array, "B Q n K"], Float32[Array, "B Q n K"]]:
    """`definition`, head by head."""

    def one_head(head: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        *qkv, length = head
        return definition(*qkv, jnp.arange(case.tokens) < length, case.dtype)

    def heads_first(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(-1, x.shape[1], case.dim)

    heads = q.shape[2]
    outs = jax.lax.map(one_head, (*map(heads_first, (q, k, v)), jnp.asarray(case.lengths).repeat(heads)))
    a, b = (x.reshape(case.batch, heads, -1, case.dim).swapaxes(1, 2) for x in outs)
    return a, b


def in_float64(case: Attention, q: Any, k: Any, v: Any) -> np.ndarray:
    """`reference` in float64, on the CPU."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    seen = np.arange(case.tokens) < np.asarray(case.lengths)[:, None]
    scores = np.einsum("bqnk,bsnk->bnqs", q, k) / math.sqrt(case.dim)
    scores = np.where(seen[:, None, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnqs,bsnk->bqnk", p / p.sum(-1, keepdims=True), v)


def check(case: Attention) -> dict[str, Any]:
    """Errors and seconds; "fault" says what is wrong, "skip" why it cannot be tried here."""
    if why := case.why_not() or why_no_memory(NEEDED_GIB):
        return {"skip": why}
    q, k, v = jax.jit(partial(inputs, case))()
    lengths = jnp.asarray(case.lengths, jnp.int32)
    out, text, times = compiled(program(case), q, k, v, lengths)
    found: dict[str, Any] = {"backend": backend_of(text, case.interpret and case.backend == "triton")} | times
    faults = [] if bool(jnp.isfinite(out).all()) else ["not all outputs are finite"]
    samples = {
        "some heads": (case.sampled_heads, sample_indices(case.tokens, case.queries, 2)),
        "all heads": (np.arange(case.heads), sample_indices(case.tokens, ALL_HEADS_QUERIES, 4)),
    }
    for name, (heads, queries) in samples.items():
        seen, exact, rounded, given = _sampled(case, (q, k, v, out), jnp.asarray(heads), jnp.asarray(queries))
        if name == "some heads":
            _check_reference(case, exact, given)
        errors, rounding = (error(x, exact, (0, 1, 3)) for x in (seen, rounded))
        found |= {f"error of {name}": errors, f"rounding of {name}": rounding}
        if why := fault(errors, None if case.dtype == "float32" else rounding):
            faults.append(f"{name}: {why}")
    if case.beside:
        other = jax.jit(program(replace(case, backend=case.beside, interpret=False)))(q, k, v, lengths)
        rms = float(jax.jit(_rms_apart)(out, other))
        bar = 2 * (EXACT_BAR if case.dtype == "float32" else RMS_BAR * found["rounding of some heads"]["rms"])
        found[f"rms to {case.beside}"] = rms
        if not rms <= bar:
            faults.append(f"all outputs: rms {rms:.1e} off those of {case.beside!r}, beyond {bar:.1e}")
    return found | {"fault": "; ".join(faults)}


@partial(jax.jit, static_argnums=0)
def _sampled(
    case: Attention, arrays: tuple[Array, Array, Array, Array], heads: Array, queries: Array
) -> tuple[Array, Array, Array, tuple[Array, Array, Array]]:
    """For these heads and queries: the result, the reference, the rounded reference; and q, k and v of the first heads
    for `in_float64`. arrays: q, k, v and the result."""
    q, k, v, out = (x[:, :, heads] for x in arrays)
    q, few = q[:, queries], slice(FLOAT64_SAMPLE[1])
    exact, rounded = reference(case, q, k, v)
    return out[:, queries], exact, rounded, (q[:, :, few], k[:, :, few], v[:, :, few])


def _check_reference(case: Attention, exact: Array, given: tuple[Array, Array, Array]) -> None:
    """The float32 reference against float64.

    Raises:
        ArithmeticError: it is off, and so proves nothing.
    """
    q, k, v = given
    rows = sample_indices(q.shape[1], FLOAT64_SAMPLE[0], 3)
    off = error(np.asarray(exact)[:, rows, : FLOAT64_SAMPLE[1]], in_float64(case, np.asarray(q)[:, rows], k, v))["max"]
    if not off <= EXACT_BAR:
        raise ArithmeticError(f"the float32 reference is {off:.1e} off float64: it proves nothing")


def _rms_apart(a: Float[Array, "B S N K"], b: Float[Array, "B S N K"]) -> Array:
    """Root mean square difference of all outputs, in standard deviations of their head."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.sqrt(jnp.square((a - b) / b.std((0, 1, 3), keepdims=True)).mean())


def backend_of(text: str, interpreted: bool) -> str:
    """The backend that a compiled program runs; interpreted: the Triton kernel, on a machine without a GPU."""
    if "__cudnn$fmha" in text:
        return "cudnn"
    return "triton" if interpreted or "xla.gpu.triton" in text else "xla"


def gradients(case: Attention, f: Callable[..., Array]) -> Callable[..., tuple[Array, Array, Array]]:
    """The gradients of f(q, k, v, lengths), weighted by random numbers, in q, k and v; to be jitted."""

    def loss(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        weight = jax.random.normal(jax.random.key(1), q.shape, jnp.float32)
        return (weight * f(q, k, v, lengths).astype(jnp.float32)).sum()

    return jax.grad(loss, (0, 1, 2))


def check_gradients(case: Attention) -> dict[str, Any]:
    """The gradients in q, k and v, as in training, against those of the definition in float32."""
    q, k, v = jax.jit(partial(inputs, case))()
    lengths = jnp.asarray(case.lengths, jnp.int32)
    got, text, times = compiled(gradients(case, program(case)), q, k, v, lengths)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    exact = jax.jit(gradients(case, lambda q, k, v, lengths: reference(case, q, k, v)[0]))(*wide, lengths)
    errors = {name: error(a, b, (0, 1, 3))["rms"] for name, a, b in zip("qkv", got, exact, strict=True)}
    faults = [f"d{name}: rms {rms:.1e}" for name, rms in errors.items() if not rms <= GRADIENT_BAR]
    return {
        "backend": backend_of(text, case.interpret and case.backend == "triton"),
        **times,
        "error rms": errors,
        "fault": "; ".join(faults),
    }


def gradient_case(*, small: bool = False) -> Attention:
    return Attention("gradients", 1, 600 if small else 4096, 4)
