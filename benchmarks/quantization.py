"""8-bit weights at the released widths: error against float32, bytes on disk, and time.

    python -m benchmarks.quantization                        # CogVideoX-5b's widths with 4 layers: minutes on two cores
    python -m benchmarks.quantization --layers 2 --height 480 --width 720

Weights and inputs are random. Errors are of the component's output, root mean square in units of its standard
deviation; bfloat16 without quantization is listed for comparison, since a run has that error anyway. Seconds are of the
second run, on the first device.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import Report, make_parser, timed

COMPONENTS = ("text_encoder", "transformer")

FORMS = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    *((kind, computed) for kind in ("int8", "float8") for computed in ("float32", "bfloat16")),
)
"""(stored form, compute dtype); the first is the reference of the others."""


def main() -> int:
    """Write weights, quantize them, run each form, print a table."""
    parser = make_parser("benchmarks.quantization", __doc__)
    parser.add_argument("--components", nargs="+", choices=COMPONENTS, default=list(COMPONENTS))
    parser.add_argument("--release", choices=("cogvideox-2b", "cogvideox-5b"), default="cogvideox-5b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--height", type=int, default=240)
    parser.add_argument("--width", type=int, default=368)
    args = parser.parse_args()
    columns = ("component", "stored as", "computed in", "MiB on disk", "RMS error", "seconds")
    report = Report(args.json, columns, release=args.release, height=args.height, width=args.width)
    for component in args.components:
        with tempfile.TemporaryDirectory(prefix="quantization-") as folder:
            for row in measure(component, args, Path(folder)):
                numbers = f"{row['bytes'] / 2**20:.0f}", f"{row['error']:.1e}", f"{row['seconds']:.2f}"
                report.add(row, (component, row["stored"], row["computed"], *numbers))
    return 0


def measure(component: str, args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """A row per form of one component."""
    import jax

    from cogvideox_flax.checkpoint import WEIGHTS_FILE, load_component
    from cogvideox_flax.runtime.compile import compiler_options

    forms = write(component, args.release, args.layers, folder)
    call, given = inputs(component, args.height, args.width)
    reference: Any = None
    for stored, computed in FORMS:
        module = load_component(component, forms[stored], dtype=computed)
        run = jax.jit(call, compiler_options=compiler_options(computed))
        _evaluate(run, module, given)
        result, seconds = timed(partial(_evaluate, run, module, given))
        result = np.asarray(result).astype(np.float64)
        reference = result if reference is None else reference
        yield {
            "component": component,
            "stored": stored,
            "computed": computed,
            "layers": args.layers,
            "bytes": (forms[stored] / component / WEIGHTS_FILE).stat().st_size,
            "seconds": seconds,
            "error": float(np.sqrt(np.square(result - reference).mean()) / reference.std()),
        }


def _evaluate(run: Any, module: Any, given: tuple[np.ndarray, ...]) -> Any:
    return run(module, *given).block_until_ready()


def write(component: str, release: str, layers: int, folder: Path) -> dict[str, Path]:
    """The same random weights in each form: name -> native checkpoint."""
    from cogvideox_flax.checkpoint.quantize import quantize_checkpoint
    from cogvideox_flax.conversion.convert import convert
    from tests.support.released_layout import build, randomise

    module = randomise(build(component, release, small=False, num_layers=layers))
    module.save_pretrained(folder / "hf" / component)
    del module
    forms = {stored: folder / stored for stored, _ in FORMS}
    for dtype in ("float32", "bfloat16"):
        convert(folder / "hf", forms[dtype], components=[component], dtype=dtype)
    for kind in ("int8", "float8"):
        quantize_checkpoint(forms["float32"], forms[kind], [component], kind)
    return forms


def inputs(component: str, height: int, width: int) -> tuple[Callable[..., Any], tuple[np.ndarray, ...]]:
    """A function of the module and what it is called with: 226 tokens, or 9 frames with their context."""
    random = np.random.default_rng(0)
    if component == "text_encoder":
        return lambda m, ids: m(ids), (random.integers(2, 60, (1, 226)).astype(np.int32),)
    latents = random.normal(size=(1, 3, height // 8, width // 8, 16)).astype(np.float32)
    context = random.normal(size=(1, 226, 4096)).astype(np.float32)
    return lambda m, x, c: m(x, c, 500), (latents, context)


if __name__ == "__main__":
    sys.exit(main())
