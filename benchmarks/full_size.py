"""The released shapes on this machine: write, convert, load, one text encoding, one denoising step, one VAE chunk.

    python -m benchmarks.full_size                        # 2b, all components
    python -m benchmarks.full_size --release cogvideox-5b --component transformer --dtype bfloat16 --num-frames 9

Each part runs in its own process, whose peak memory the operating system reports. Weights are random: speed and memory
do not depend on their values.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.runner import Report, make_parser

RESULTS = Path(__file__).parent / "results"
STORED = {"text_encoder": "bfloat16", "transformer": "float16", "vae": "float32"}
"""The stored dtypes of the random checkpoint: those of the released 2b (a 5B transformer is stored in bfloat16)."""
HUNYUAN = ("hunyuanvideo1.5-480p-t2v", "hunyuanvideo1.5-480p-i2v")
ENCODERS = ("text_encoder_2", "image_encoder")
"""Of HunyuanVideo-1.5, whose parts are all stored in bfloat16."""
LIMIT_S = 6 * 3600.0
"""Seconds after which a part is killed."""


def child(name: str, *args: str) -> dict[str, Any]:
    """Run one part in a new process; returns its JSON result with seconds and peak memory."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.full_size", "--child", name, *args], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    watchdog = threading.Timer(LIMIT_S, process.kill)
    watchdog.start()
    out = process.stdout.read()
    watchdog.cancel()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{name} {' '.join(args)} failed with status {os.waitstatus_to_exitcode(status)}")
    return {
        **json.loads(out.splitlines()[-1]),
        "process_s": round(time.perf_counter() - start, 2),
        "peak_host_gib": round(usage.ru_maxrss / 2**20, 2),
    }


def run_write(folder: str, component: str, release: str, dtype: str) -> dict[str, Any]:
    from tests.support import hunyuan_layout
    from tests.support.released_layout import write_component

    if release in HUNYUAN:
        return {"bytes": hunyuan_layout.write_component(Path(folder), component, dtype)}
    return {"bytes": write_component(Path(folder), component, release, dtype)}


def run_convert(src: str, dst: str, component: str) -> dict[str, Any]:
    from cogvideox_flax.conversion.convert import convert
    from cogvideox_flax.conversion.source import Source

    with Source(Path(src) / component) as source:
        largest = max(source.info(name).nbytes for name in source.where)
    start = time.perf_counter()
    convert(src, dst, components=[component])
    size = (Path(dst) / component / "model.safetensors").stat().st_size
    return {"seconds": time.perf_counter() - start, "bytes": size, "largest_tensor_gib": largest / 2**30}


def run_load(native: str, component: str, dtype: str) -> dict[str, Any]:
    import jax

    from cogvideox_flax.checkpoint import load_component

    start = time.perf_counter()
    module = jax.block_until_ready(load_component(component, native, dtype=dtype))
    return {"seconds": time.perf_counter() - start, "bytes": sum(x.nbytes for x in jax.tree.leaves(module))}


def run_use(native: str, component: str, dtype: str, num_frames: str, guided: str) -> dict[str, Any]:
    """Load a component, compile and run it once; an output that is not finite is an error."""
    import jax
    import jax.numpy as jnp

    from cogvideox_flax.checkpoint import load_component, read_manifest
    from cogvideox_flax.models.hunyuan_video15.releases import FAMILY, IMAGE_FAMILY
    from cogvideox_flax.runtime.compile import compiler_options

    module = load_component(component, native, dtype=dtype)
    key = jax.random.key(0)
    batch = 1 + int(guided)
    args: tuple[Any, ...]
    call: Callable[..., Any] = lambda m, *args: m(*args)  # noqa: E731
    if read_manifest(native).family in (FAMILY, IMAGE_FAMILY):
        args, call = _hunyuan_inputs(module, component, batch, int(num_frames))
    elif component == "text_encoder":
        args = (jnp.ones((batch, 226), jnp.int32),)
    elif component == "transformer":
        frames = (int(num_frames) - 1) // 4 + 1
        frames += -frames % (module.config.patch_size_t or 1)
        latents = jax.random.normal(key, (batch, frames, 60, 90, module.config.in_channels))
        args = (latents, jax.random.normal(key, (batch, 226, 4096)), jnp.int32(999))
    else:
        args, call = (jax.random.normal(key, (1, 3, 60, 90, 16)),), lambda m, z: m.decode(z)
    start = time.perf_counter()
    compiled = jax.jit(call, compiler_options=compiler_options(dtype)).lower(module, *args).compile()
    compile_s = time.perf_counter() - start
    memory = compiled.memory_analysis()
    start = time.perf_counter()
    out = jax.block_until_ready(compiled(module, *args))
    seconds = time.perf_counter() - start
    if not bool(jnp.isfinite(out).all()):
        raise SystemExit(f"{component}: the output is not finite")
    return {
        "compile_s": compile_s,
        "seconds": seconds,
        "temp_gib": memory.temp_size_in_bytes / 2**30 if memory else None,
        "in": [list(x.shape) for x in jax.tree.leaves(args)],
        "out": list(out.shape),
    }


def _hunyuan_inputs(module: Any, component: str, batch: int, num_frames: int) -> tuple[tuple[Any, ...], Any]:
    """Arguments at 480x848, and the call."""
    import jax
    import jax.numpy as jnp

    from benchmarks.vs_diffusers.cases import hunyuan_prompt
    from cogvideox_flax.models.registry import RELEASES

    key, frames = jax.random.key(0), (num_frames - 1) // 4 + 1
    if component == "vae":
        return (jax.random.normal(key, (1, frames, 30, 53, 32)),), lambda m, z: m.decode(z)
    if component == "image_encoder":
        return (jax.random.normal(key, (batch, 384, 384, 3)),), lambda m, x: m(x)
    if component != "transformer":
        return (jnp.ones((batch, 256 if component.endswith("2") else 1108), jnp.int32),), lambda m, ids: m(ids)
    prompt = {name: jnp.asarray(x) for name, x in hunyuan_prompt(RELEASES[HUNYUAN[0]].configs, batch).items()}
    latents = jax.random.normal(key, (batch, frames, 30, 53, module.config.in_channels))
    return (latents, jnp.float32(999), prompt), lambda m, x, t, prompt: m(x, t, **prompt)


CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {
    "write": run_write,
    "convert": run_convert,
    "load": run_load,
    "use": run_use,
}


def main() -> None:
    """Parse, run the parts, print a table, write JSON."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(CHILDREN[sys.argv[2]](*sys.argv[3:])))
        return
    parser = make_parser("benchmarks.full_size", __doc__)
    parser.add_argument(
        "--release", choices=("cogvideox-2b", "cogvideox-5b", "cogvideox1.5-5b", *HUNYUAN), default="cogvideox-2b"
    )
    parser.add_argument("--component", nargs="+", choices=[*STORED, *ENCODERS], default=list(STORED))
    parser.add_argument("--dtype", default="float32", help="to compute in")
    parser.add_argument("--num-frames", type=int, default=49, help="of the denoising step, at 480x720")
    parser.add_argument("--no-guidance", action="store_true", help="one sample instead of two")
    parser.add_argument("--work", type=Path, default=Path("full_size_work"), help="checkpoints go here; up to 60 GB")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    args = parser.parse_args()

    src, dst = args.work / f"{args.release}-hf", args.work / f"{args.release}-native"
    rows: dict[str, dict[str, Any]] = {}
    out = args.json or RESULTS / f"full_size-{args.release}.json"
    report = Report(out, COLUMNS, release=args.release)
    for component in args.component:
        shutil.rmtree(src / component, ignore_errors=True)
        of_5b = component == "transformer" and args.release != "cogvideox-2b"
        stored = "bfloat16" if of_5b or args.release in HUNYUAN else STORED[component]
        guided = "0" if args.no_guidance else "1"
        row = rows[component] = {"component": component, "stored": stored, "computed": args.dtype}
        for name, arguments in (
            ("write", (str(src), component, args.release, stored)),
            ("convert", (str(src), str(dst), component)),
            ("load", (str(dst), component, args.dtype)),
            ("use", (str(dst), component, args.dtype, str(args.num_frames), guided)),
        ):
            print(f"{component}: {name} ...", file=sys.stderr, flush=True)
            row[name] = child(name, *arguments)
            print(f"  {row[name]}", file=sys.stderr, flush=True)
            if name == "convert" and not args.keep:
                shutil.rmtree(src / component)
        limit = 2 + row["convert"]["largest_tensor_gib"]
        row["conversion_within_limit"] = row["convert"]["peak_host_gib"] <= limit
        report.add(row, cells(row))
    if not args.keep:
        shutil.rmtree(src, ignore_errors=True)
        shutil.rmtree(dst)
        with contextlib.suppress(OSError):  # it has other files of the user
            args.work.rmdir()
    print(f"written to {out}", file=sys.stderr)
    if beyond := [name for name, row in rows.items() if not row["conversion_within_limit"]]:
        raise SystemExit(f"the conversion of {', '.join(beyond)} took more than 2 GiB plus the largest tensor")


COLUMNS = (
    *("component", "stored", "GiB on disk", "convert s", "convert peak GiB (limit)", "load s", "load peak GiB"),
    *("compile s", "run s", "run peak GiB", "run"),
)


def cells(row: dict[str, Any]) -> list[str]:
    """Of one row of the table."""
    convert, load, use = row["convert"], row["load"], row["use"]
    return [
        row["component"],
        row["stored"],
        f"{convert['bytes'] / 2**30:.2f}",
        f"{convert['seconds']:.1f}",
        f"{convert['peak_host_gib']:.2f} ({2 + convert['largest_tensor_gib']:.2f})",
        f"{load['seconds']:.1f}",
        f"{load['peak_host_gib']:.2f}",
        f"{use['compile_s']:.1f}",
        f"{use['seconds']:.1f}",
        f"{use['peak_host_gib']:.2f}",
        f"{row['computed']} {use['in'][0]} -> {use['out']}",
    ]


if __name__ == "__main__":
    main()
