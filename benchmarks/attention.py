"""The attention kernel of a v6e chip by its static schedule: no TPU needed, nothing measured.

    python -m benchmarks.attention [--tokens 17776 39826 45106] [--heads 12] [--head-dim 64] [--json FILE]
    python -m benchmarks.attention --search       # tries tile sizes and writes the kernel's table
    python -m benchmarks.attention --gradient     # the kernel of the gradient

Each kernel is compiled ahead of time by libtpu. The number of bundles that run, one per cycle at 1.75 GHz, gives the
time of one layer's attention on one chip, without memory stalls. Two modes of a head are reported: `bounded`, where
the norms of queries and keys rule out overflow, and `shifted`, where a score is subtracted from each query's scores.
JAX's own splash attention, masked by segment ids, is reported beside them.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import tpu
from benchmarks.runner import Report, make_parser

TOKENS = (17776, 39826, 45106)
"""1.0 releases at 480x720x49; 1.5-5B at 720x1280x81 and at 768x1360x81."""

MXU_ROWS = 256
"""Of the matrix unit. K Q^T takes a cycle per 1024 scores for each 256 rows begun, V^T P the share of its rows."""


@dataclass(frozen=True)
class Forecast:
    """Milliseconds of one layer on one chip, and the seconds that it took to compile."""

    tokens: int
    tile_sizes: dict[str, int]
    bounded_ms: float
    shifted_ms: float
    floor_ms: float
    compile_s: float


def main() -> int:
    parser = make_parser("benchmarks.attention", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--heads", type=int, default=12, help="of one chip")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--search", action="store_true", help="try tile sizes and write the winners to the table")
    parser.add_argument("--gradient", action="store_true", help="the kernel of the gradient alone")
    parser.add_argument("--without-stock", action="store_true", help="leave JAX's own kernel out")
    args = parser.parse_args()
    start = time.perf_counter()
    with tpu.dumped() as dump:
        shape = partial(Shape, heads=args.heads, dim=args.head_dim)
        if args.search:
            search(dump, [shape(n) for n in args.tokens])
        print(f"{args.heads} heads of {args.head_dim}, bfloat16, one v6e chip, modelled from the static schedule\n")
        if args.gradient:
            for tokens in args.tokens:
                ms, least = gradient_ms(dump, shape(tokens)), gradient_floor_ms(shape(tokens))
                print(f"{tokens} tokens: the gradient takes {ms:.2f} ms, the matrix unit's least {least:.2f} ms")
            return 0
        columns = ("tokens", "q, chunk, slice", "bounded ms", "shifted ms", "matrix unit's least ms", "jax splash ms")
        about = {"topology": tpu.TOPOLOGY, "heads": args.heads, "head_dim": args.head_dim}
        report = Report(args.json, columns, tpu.PACKAGES, **about)
        for tokens in args.tokens:
            row = asdict(forecast(dump, shape(tokens)))
            row["stock_ms"] = None if args.without_stock else stock_ms(dump, shape(tokens))
            sizes = ", ".join(str(row["tile_sizes"][k]) for k in ("q", "chunk", "slice"))
            times = [f"{row[name]:.2f}" for name in ("bounded_ms", "shifted_ms", "floor_ms")]
            report.add(row, (tokens, sizes, *times, "" if args.without_stock else f"{row['stock_ms']:.1f}"))
    print(f"\n{time.perf_counter() - start:.0f} s in all")
    return 0


@dataclass(frozen=True)
class Shape:
    """Attention of one chip: tokens, heads times batch, head size."""

    tokens: int
    heads: int
    dim: int

    @property
    def arguments(self) -> list[tuple[int, ...]]:
        """The shapes of q, k and v."""
        return [(1, self.tokens, self.heads, self.dim)] * 3


def forecast(dump: Path, shape: Shape, sizes: Any = None) -> Forecast:
    """The kernel's time with these tile sizes, or with those of its table."""
    import jax.numpy as jnp

    from cogvideox_flax.attention import splash
    from cogvideox_flax.attention.tile_sizes import choose_tile_sizes

    sizes = sizes or choose_tile_sizes(shape.tokens, shape.tokens, shape.dim, jnp.bfloat16)
    schedules, seconds = tpu.compile_kernels(
        dump, splash.NAME, partial(splash.attend, tile_sizes=sizes), *shape.arguments
    )
    bounded = shifted = 0.0
    for schedule, (queries, width) in zip(_by_size(schedules), splash.query_parts(shape.tokens, sizes.q), strict=True):
        for_bounded, for_shifted = cycles(schedule, shape.tokens, sizes)
        grid = shape.heads * math.ceil(queries / width)
        bounded, shifted = bounded + grid * for_bounded, shifted + grid * for_shifted
    least = math.ceil(shape.dim / MXU_ROWS) + shape.dim / MXU_ROWS
    floor = least * shape.heads * shape.tokens**2 / 1024
    ms = 1e3 / tpu.CLOCK
    return Forecast(shape.tokens, asdict(sizes), ms * bounded, ms * shifted, ms * floor, seconds)


def _by_size(schedules: list[tpu.KernelSchedule]) -> list[tpu.KernelSchedule]:
    """The widest block of queries first, as the parts are."""
    return sorted(schedules, key=lambda s: -max(s.loops))


def cycles(schedule: tpu.KernelSchedule, tokens: int, sizes: Any) -> tuple[int, int]:
    """Cycles of one block of queries against all keys: bounded, and shifted where no chunk is computed again."""
    names = ["chunk", "slice", "piece"] if sizes.slice < sizes.chunk else ["chunk", "piece"]
    again = [name + suffix for name in names[:-1] for suffix in ("", " again")] + ["piece"]
    if len(schedule.loops) != len(names) + len(again):
        raise SystemExit(f"the schedule at {tokens} tokens has {len(schedule.loops)} loops, not one for each part")
    free = dict(zip(names, schedule.loops, strict=False))
    shifted = dict(zip(again, schedule.loops[len(names) :], strict=True))
    total = []
    for kind in (free, shifted):
        spent = schedule.step * math.ceil(tokens / sizes.kv)
        for start in range(0, tokens, sizes.kv):
            left = min(sizes.kv, tokens - start)
            for name, size in (("chunk", sizes.chunk), ("slice", sizes.slice), ("piece", 128)):
                if name in kind:
                    count = math.ceil(left / size) if name == "piece" else left // size
                    spent, left = spent + count * kind[name], left - count * size
        total.append(spent)
    return total[0], total[1]


def stock_ms(dump: Path, shape: Shape) -> float:
    """JAX's own kernel, correctly masked."""
    from benchmarks import stock_attention as stock

    schedules, _ = tpu.compile_kernels(dump, "splash", stock.attend, *shape.arguments)
    (schedule,) = schedules
    steps = math.ceil(shape.tokens / stock.Q_BLOCK) * math.ceil(shape.tokens / stock.KV_BLOCK)
    inner = sum(schedule.loops) * (stock.KV_BLOCK // stock.COMPUTE)
    return 1e3 * shape.heads * steps * (schedule.step + inner) / tpu.CLOCK


def gradient_ms(dump: Path, shape: Shape) -> float:
    """The kernel of the gradient."""
    import jax
    import jax.numpy as jnp

    from cogvideox_flax.attention import splash, splash_backward

    gradient = lambda *args: jax.vjp(splash.attend, *args)[1](args[0])  # noqa: E731
    schedules, _ = tpu.compile_kernels(dump, splash_backward.NAME, gradient, *shape.arguments)
    # calls are equally long; loops before the last two copy keys and values that XLA has left in fast memory
    step, (whole, half) = schedules[0].step, schedules[0].loops[-2:]
    blocks = splash_backward.Blocks.choose(shape.tokens, shape.tokens, shape.dim, jnp.bfloat16)
    full, rest = divmod(shape.tokens, blocks.kv)
    inner = full * whole + (0 if rest == 0 else half if rest <= blocks.kv / 2 else whole)
    spent = step * math.ceil(shape.tokens / blocks.kv) + inner * (blocks.queries // blocks.q)
    return 1e3 * shape.heads * blocks.calls * spent / tpu.CLOCK


def gradient_floor_ms(shape: Shape) -> float:
    """Two products as K Q^T, three as V^T P; see MXU_ROWS."""
    least = 2 * math.ceil(shape.dim / MXU_ROWS) + 3 * shape.dim / MXU_ROWS
    return 1e3 * least * shape.heads * shape.tokens**2 / 1024 / tpu.CLOCK


def search(dump: Path, shapes: list[Shape]) -> None:
    """Try tile sizes at each length, first around 8 slices a chunk, then other chunks for the best; write the table."""
    import jax.numpy as jnp

    from cogvideox_flax.attention import tile_sizes
    from cogvideox_flax.errors import InputError

    searched = {(s.tokens, s.dim) for s in shapes}
    rows = [row for row in tile_sizes.table() if (row["tokens"], row["head_dim"]) not in searched]
    for shape in shapes:

        def attempt(q: int, chunk: int, piece: int, shape: Shape = shape) -> tuple[float, Any]:
            sizes = tile_sizes.fit_key_block(q, chunk, piece, shape.tokens, shape.dim, jnp.bfloat16)
            try:
                found = forecast(dump, shape, sizes)
            except InputError as e:
                print(f"  {e}", file=sys.stderr)
                return math.inf, None
            print(f"  {shape.tokens}: {sizes} {found.bounded_ms:.2f} / {found.shifted_ms:.2f} ms", file=sys.stderr)
            return found.bounded_ms, {"q": q, "chunk": chunk, "slice": piece}

        tried = [attempt(q, 8 * piece, piece) for q, piece in ((1408, 512), (1536, 512), (1664, 512), (3072, 256))]
        best = min(tried, key=lambda pair: pair[0])[1]
        tried += [attempt(best["q"], n * best["slice"], best["slice"]) for n in (5, 6, 7, 9, 10, 11, 14, 18)]
        winner = min(tried, key=lambda pair: pair[0])
        rows.append({"tokens": shape.tokens, "head_dim": shape.dim, **winner[1]})
    rows.sort(key=lambda row: (row["head_dim"], row["tokens"]))
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    Path(tile_sizes.__file__).with_name("tile_sizes.json").write_text(f'{{\n  "rows": [\n{lines}\n  ]\n}}\n')
    tile_sizes.table.cache_clear()


if __name__ == "__main__":
    sys.exit(main())
