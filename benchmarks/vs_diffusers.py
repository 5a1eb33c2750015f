"""This library beside diffusers on the same machine: same weights, inputs, precision and threads, in the same minutes.

    python -m benchmarks.vs_diffusers                                  # all parts at 240x368, some minutes on two cores
    python -m benchmarks.vs_diffusers --parts decode --height 480 --width 720 --latent-frames 3 5
    python -m benchmarks.vs_diffusers --released --device gpu --dtype bfloat16 --torch-compile

Each side runs in a process of its own, which loads the part, compiles or warms up, and then waits; timed runs
alternate between the two, so that whatever else the machine does hits both. Reported are medians, the time to the first
result, the peak of the process' memory (on a GPU: of the device's), and how far the outputs are apart, so that nobody
wins by computing something else. "matmul share" is what our side computes a second, as a share of what one large
matrix product of the same dtype does there. Weights are random, in the released widths, with fewer layers or all; speed
does not depend on their values. Several --latent-frames give slopes: seconds and GiB per thousand tokens, or per frame.
A side that stops, out of memory say, ends its row only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from cogvideox_flax.config import RELEASES

PARTS = ("text_encoder", "transformer", "encode", "decode", "video")
SIDES = ("ours", "diffusers")
STEPS = 4
"""Of the whole video."""
RELEASED = (("cogvideox-5b", 480, 720, 13), ("cogvideox1.5-5b", 768, 1360, 21))
"""Release, height, width and latent frames that it was made for."""
COMPONENT = {"encode": "vae", "decode": "vae"}
HEAD = (
    "| release | part | frames | tokens | ours s | diffusers s | ratio | first s | GiB | ratio | difference "
    "| matmul share |"
)


class Stopped(Exception):
    """A side ended before it was done."""


@dataclass(frozen=True)
class Case:
    """One part at one size."""

    part: str
    release: str
    height: int
    width: int
    latent_frames: int
    layers: int | None
    dtype: str
    device: str
    torch_compile: bool

    @property
    def frames(self) -> int:
        return 4 * (self.latent_frames - 1) + 1

    @property
    def denoised_frames(self) -> int:
        """Latent frames that the transformer sees: 1.5 releases take them in twos."""
        return self.latent_frames + -self.latent_frames % self._frames_per_token

    @property
    def tokens(self) -> int:
        """Of the transformer."""
        frames = self.denoised_frames // self._frames_per_token
        return 226 + frames * (self.height // 16) * (self.width // 16)

    @property
    def _frames_per_token(self) -> int:
        return RELEASES[self.release].transformer.patch_size_t or 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vs_diffusers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all; with --released all but the video")
    parser.add_argument(
        "--released", action="store_true", help="all layers, at the size it was made for: for GPUs of 80 GB"
    )
    names = [name for name, *_ in RELEASED]
    parser.add_argument("--release", choices=names, help=f"default: {names[0]}; with --released all of them")
    parser.add_argument("--height", type=int, help="default: 240")
    parser.add_argument("--width", type=int, help="default: 368")
    parser.add_argument("--latent-frames", type=int, nargs="+", help="odd; default: 3, which is 9 frames")
    parser.add_argument("--layers", type=int, help="of the text encoder and the transformer; default: 2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--torch-compile", action="store_true", help="the other side's transformer")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each side")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(*args.worker)
        return 0

    own = [args.height, args.width, args.latent_frames, args.layers]
    if args.released and any(value is not None for value in own):
        parser.error("--released says sizes and layers itself; leave out --height, --width, --latent-frames, --layers")
    frames = args.latent_frames or [3]
    if any(n % 2 == 0 or n < 1 for n in frames):
        parser.error(f"--latent-frames must be odd, as 4 frames make one and the first makes one alone; got {frames}")
    release = args.release or RELEASED[0][0]
    sizes = [(release, args.height or 240, args.width or 368, n) for n in frames]
    if args.released:
        sizes = [size for size in RELEASED if args.release in (None, size[0])]
    parts = args.parts or [part for part in PARTS if not (args.released and part == "video")]
    how = None if args.released else args.layers or 2, args.dtype, args.device, args.torch_compile
    cases = [Case(part, *size, *how) for size in sizes for part in parts if part != "text_encoder" or size == sizes[0]]
    return measure(sorted(cases, key=lambda case: (names.index(case.release), parts.index(case.part))), args)


def measure(cases: list[Case], args: argparse.Namespace) -> int:
    """All cases, each release with weights of its own; what is known is in the JSON after each."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # here we only count; the device is the workers'
    rows: list[dict[str, Any]] = []
    record: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "versions": {name: version(name) for name in ("jax", "flax", "torch", "diffusers", "transformers")},
        "repeat": args.repeat,
        "rows": rows,
        "stopped": [],
    }

    def keep() -> None:
        if args.json:
            args.json.write_text(json.dumps(record, indent=2) + "\n")

    print(HEAD + "\n" + "|---" * (HEAD.count("|") - 1) + "|", flush=True)
    for release, found in groupby(cases, key=lambda case: case.release):
        group = list(found)
        with tempfile.TemporaryDirectory(prefix="vs-diffusers-") as folder:
            write_weights(Path(folder), release, [case.part for case in group], group[0].layers, group[0].dtype)
            for case in group:
                try:
                    rows.append(compare(case, Path(folder), args.repeat))
                    print(line(rows[-1]), flush=True)
                except Stopped as e:
                    record["stopped"].append(asdict(case) | {"why": str(e)})
                    print(f"| {release} | {case.part} | {case.frames} | {e} |", flush=True)
                keep()
    slopes = record["slopes"] = {} if args.released else slopes_of_parts(rows)
    for part, slope in slopes.items():
        print(f"{part}: " + ", ".join(f"{name} {value:.4g}" for name, value in slope.items()))
    record["machine"]["device"] = rows[-1]["device_name"] if rows else None
    print(f"\n{os.cpu_count()} cores, {record['machine']['device']}, ", end="")
    print(", ".join(f"{name} {version}" for name, version in record["versions"].items()))
    keep()
    if args.plot:
        plot(rows, args.plot)
    return 0


def write_weights(folder: Path, release: str, parts: list[str], layers: int | None, dtype: str) -> None:
    """The components that the parts need, in the released layout and converted."""
    from benchmarks.released_layout import save_rest, write_component
    from conversion.convert import convert

    wanted = {"text_encoder", "transformer", "vae"} if "video" in parts else {COMPONENT.get(p, p) for p in parts}
    changes = {} if layers is None else {"num_layers": layers}
    for component in sorted(wanted):
        write_component(folder / "hf", component, release, dtype, **({} if component == "vae" else changes))
    if "video" in parts:
        save_rest(folder / "hf", release)
        convert(folder / "hf", folder / "native")
    else:
        convert(folder / "hf", folder / "native", components=sorted(wanted))


def compare(case: Case, folder: Path, repeat: int) -> dict[str, Any]:
    """Both sides on one case."""
    (folder / "case.json").write_text(json.dumps(asdict(case)))
    workers = {side: _Worker(side, folder) for side in SIDES}
    try:
        for worker in workers.values():
            worker.start()
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(repeat):
            for side, worker in workers.items():
                times[side].append(worker.run())
        peaks = {side: worker.peak() for side, worker in workers.items()}
        workers["diffusers"].kill()
        rate, name = workers["ours"].matmul_rate(), workers["ours"].device()
    finally:
        for worker in workers.values():
            worker.kill()
    ours, theirs = (np.load(folder / f"{side}.npy").astype(np.float64) for side in SIDES)
    row: dict[str, Any] = asdict(case) | {"frames": case.frames, "tokens": case.tokens}
    for side in SIDES:
        row |= {
            f"{side}_s": statistics.median(times[side]),
            f"{side}_times": times[side],
            f"{side}_first_s": workers[side].first,
            f"{side}_gib": peaks[side],
        }
    row["device_name"] = name
    row["flops"], row["matmul_flops_per_s"] = flops_of(case, folder), rate
    row["matmul_share"] = row["flops"] / row["ours_s"] / rate
    row["time_ratio"] = row["ours_s"] / row["diffusers_s"]
    row["memory_ratio"] = row["ours_gib"] / row["diffusers_gib"]
    if ours.shape != theirs.shape or not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise Stopped(f"outputs of {ours.shape} and {theirs.shape}, or not finite: they are not of the same thing")
    row["difference"] = float(np.abs(ours - theirs).max() / theirs.std())
    row["rms_difference"] = float(np.sqrt(np.square(ours - theirs).mean()) / theirs.std())
    return row


class _Worker:
    """One side, as a process that runs once per line it is sent."""

    def __init__(self, side: str, folder: Path):
        env = dict(os.environ, TOKENIZERS_PARALLELISM="false", XLA_PYTHON_CLIENT_PREALLOCATE="false")
        self.first, self._side = 0.0, side
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.vs_diffusers", "--worker", side, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def _ask(self, word: str) -> str:
        assert self._process.stdin and self._process.stdout
        try:
            print(word, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self._process.wait()
            why = "killed, as when memory ends" if code == -9 else f"exit status {code}, see its message above"
            raise Stopped(f"{self._side} stopped at {word!r}: {why}")
        return answer

    def start(self) -> None:
        """Load, and run once: seconds to the first result, loading not included."""
        self.first = float(self._ask("first"))

    def run(self) -> float:
        return float(self._ask("run"))

    def peak(self) -> float:
        """GiB that it held at most until now."""
        return float(self._ask("peak"))

    def matmul_rate(self) -> float:
        """Floating-point operations a second of a large matrix product; of our side only."""
        return float(self._ask("rate"))

    def device(self) -> str:
        """Its name; of our side only."""
        return self._ask("device")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def work(side: str, folder: str) -> None:
    """The loop of a worker; what it prints is for its parent."""
    where = Path(folder)
    case = Case(**json.loads((where / "case.json").read_text()))
    call = None
    for request in sys.stdin:
        word = request.strip()
        if word == "peak":
            print(_peak_gib(side, case), flush=True)
            continue
        if word == "rate":
            print(_matmul_rate(case), flush=True)
            continue
        if word == "device":
            print(_device_name(), flush=True)
            continue
        if call is None:
            call = (_ours if side == "ours" else _diffusers)(case, where)
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        if word == "first":
            np.save(where / f"{side}.npy", np.asarray(result, np.float32))
        print(seconds, flush=True)


INPUTS = {
    "text_encoder": ("ids",),
    "transformer": ("latents", "context"),
    "encode": ("video",),
    "decode": ("latents",),
    "video": ("ids", "latents"),
}


def inputs(case: Case) -> dict[str, np.ndarray]:
    """What the part needs, the same for both sides, channels last; the transformer gets both halves of guidance."""
    h, w = case.height // 8, case.width // 8
    t = case.latent_frames if case.part == "decode" else case.denoised_frames

    def make(name: str) -> np.ndarray:
        random = np.random.default_rng(0)
        if name == "ids":
            return random.integers(2, 60, (1, 226)).astype(np.int32)
        if name == "latents":
            return random.normal(size=(1, t, h, w, 16)).astype(np.float32)
        if name == "context":
            return random.normal(size=(2, 226, 4096)).astype(np.float32)
        return random.uniform(-1, 1, (1, case.frames, case.height, case.width, 3)).astype(np.float32)

    return {name: make(name) for name in INPUTS[case.part]}


def _ours(case: Case, folder: Path) -> Any:
    """A function that computes the part with this library and waits for the result."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu" if case.device == "cpu" else "cuda")
    import jax
    import jax.numpy as jnp

    from cogvideox_flax import CogVideoXPipeline
    from cogvideox_flax.checkpoint import LOADERS
    from cogvideox_flax.execution import compiler_options, fetch

    given = {name: jnp.asarray(x, case.dtype if x.dtype == np.float32 else x.dtype) for name, x in inputs(case).items()}
    native = folder / "native"
    if case.part == "video":
        pipe = CogVideoXPipeline.from_pretrained(native, case.dtype)
        jax.block_until_ready((pipe.text_encoder, pipe.transformer, pipe.vae))  # loading is not timed
        size = pipe.size(case.frames, case.height, case.width)
        encode = jax.jit(lambda m, ids: m(ids), compiler_options=compiler_options(case.dtype))

        def video() -> np.ndarray:
            context = encode(pipe.text_encoder, given["ids"])
            negative = encode(pipe.text_encoder, jnp.ones_like(given["ids"]))
            steps: dict[str, Any] = {"num_inference_steps": STEPS, "guidance_scale": 6.0, "latents": given["latents"]}
            x, _ = pipe.denoise(context, negative, size, scheduler="ddim", progress=False, **steps)
            return fetch(pipe.decode_latents(x[:, size.extra_latents :], output_type="float", progress=False))

        return video
    component = COMPONENT.get(case.part, case.part)
    module = jax.block_until_ready(LOADERS[component](native, dtype=case.dtype))
    call = jax.jit(FUNCTIONS[case.part], compiler_options=compiler_options(case.dtype))
    return lambda: fetch(call(module, *given.values()))


def _both_halves(module: Any, x: Any, context: Any) -> Any:
    """The transformer, with and without the prompt."""
    return module(x.repeat(2, 0), context, 999)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "text_encoder": lambda module, ids: module(ids),
    "transformer": _both_halves,
    "encode": lambda module, video: module.encode(video)[0],
    "decode": lambda module, z: module.decode(z),
}
"""Part -> what our side computes."""


def flops_of(case: Case, folder: Path) -> int:
    """Of our side's products, counted without running it."""
    import jax

    from cogvideox_flax.checkpoint import read_manifest
    from cogvideox_flax.plan.flops import count_flops

    manifest = read_manifest(folder / "native")
    given = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs(case).items()}
    if case.part != "video":
        module = manifest.abstract(COMPONENT.get(case.part, case.part))
        return count_flops(FUNCTIONS[case.part], module, *given.values()).total
    encoder, transformer, vae = (manifest.abstract(name) for name in ("text_encoder", "transformer", "vae"))
    x, ids = given["latents"], given["ids"]
    context = jax.eval_shape(FUNCTIONS["text_encoder"], encoder, ids)
    both = jax.ShapeDtypeStruct((2, *context.shape[1:]), context.dtype)
    z = jax.ShapeDtypeStruct((1, case.latent_frames, *x.shape[2:]), x.dtype)
    return (
        2 * count_flops(FUNCTIONS["text_encoder"], encoder, ids).total
        + STEPS * count_flops(_both_halves, transformer, x, both).total
        + count_flops(FUNCTIONS["decode"], vae, z).total
    )


def _matmul_rate(case: Case) -> float:
    """Of a square product of the case's dtype, the median of five."""
    import jax
    import jax.numpy as jnp

    from cogvideox_flax.layers import precision

    n = 8192 if case.device == "gpu" else 2048
    x = jax.random.normal(jax.random.key(0), (n, n)).astype(case.dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, precision=precision(x.dtype)))
    product(x).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        product(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / statistics.median(times)


def _device_name() -> str:
    import jax

    return jax.devices()[0].device_kind


def _diffusers(case: Case, folder: Path) -> Any:
    """The same with diffusers and transformers, its result in our layout."""
    import torch
    from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline, CogVideoXTransformer3DModel
    from transformers import T5EncoderModel

    from benchmarks.released_layout import make_scheduler

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.backends.cudnn.allow_tf32 = False  # nor do we multiply float32 in less
    torch.backends.cudnn.benchmark = True  # as XLA does, it looks for the fastest convolutions
    device, dtype = ("cuda" if case.device == "gpu" else "cpu"), getattr(torch, case.dtype)
    classes: dict[str, Any] = {
        "text_encoder": T5EncoderModel,
        "transformer": CogVideoXTransformer3DModel,
        "vae": AutoencoderKLCogVideoX,
    }

    def load(component: str) -> Any:
        module = classes[component].from_pretrained(folder / "hf" / component, torch_dtype=dtype).to(device).eval()
        return torch.compile(module) if case.torch_compile and component == "transformer" else module

    def put(x: np.ndarray) -> Any:
        return torch.tensor(x).to(device, dtype if x.dtype == np.float32 else torch.long)

    def channels_second(x: np.ndarray) -> Any:
        return put(x).permute(0, 4, 1, 2, 3).contiguous()

    def take(x: Any) -> np.ndarray:
        return x.cpu().float().numpy()

    given = inputs(case)
    latents: Any = put(given["latents"]).permute(0, 1, 4, 2, 3).contiguous() if "latents" in given else None
    if case.part == "video":
        scheduler = make_scheduler("ddim", 1.0)
        pipe: Any = CogVideoXPipeline(None, *(load(c) for c in ("text_encoder", "vae", "transformer")), scheduler)
        pipe.set_progress_bar_config(disable=True)

        def video() -> np.ndarray:
            context, negative = (pipe.text_encoder(put(ids))[0] for ids in (given["ids"], np.ones_like(given["ids"])))
            return pipe(
                prompt_embeds=context,
                negative_prompt_embeds=negative,
                latents=latents,
                num_inference_steps=STEPS,
                guidance_scale=6.0,
                height=case.height,
                width=case.width,
                num_frames=case.frames,
                output_type="np",
            ).frames

        return _without_gradients(video)
    module = load(COMPONENT.get(case.part, case.part))
    if case.part == "text_encoder":
        ids = put(given["ids"])
        return _without_gradients(lambda: take(module(ids)[0]))
    if case.part == "encode":
        video = channels_second(given["video"])
        return _without_gradients(lambda: take(module.encode(video).latent_dist.mean.permute(0, 2, 3, 4, 1)))
    if case.part == "decode":
        z = channels_second(given["latents"])
        return _without_gradients(lambda: take(module.decode(z).sample.permute(0, 2, 3, 4, 1)))
    shape = type("Config", (), {"transformer": module, "vae_scale_factor_spatial": 8})()
    rotary = CogVideoXPipeline._prepare_rotary_positional_embeddings(
        shape, case.height, case.width, case.denoised_frames, torch.device(device)
    )
    both, context, t = latents.repeat(2, 1, 1, 1, 1), put(given["context"]), torch.tensor([999, 999], device=device)

    def step() -> np.ndarray:
        out = module(both, context, t, image_rotary_emb=rotary, return_dict=False)[0]
        return take(out.permute(0, 1, 3, 4, 2))

    return _without_gradients(step)


def _without_gradients(f: Any) -> Any:
    import torch

    def call() -> Any:
        with torch.no_grad():
            return f()

    return call


def _peak_gib(side: str, case: Case) -> float:
    """Of the process, or on a GPU of the device's memory."""
    if case.device == "cpu":  # what `resource` says starts with the peak of the parent
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        return int(found[1]) / 2**20
    if side == "ours":
        import jax

        return (jax.devices()[0].memory_stats() or {})["peak_bytes_in_use"] / 2**30
    import torch

    return torch.cuda.max_memory_allocated() / 2**30


def slopes_of_parts(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Part -> its slopes, of those that were measured at several sizes."""
    return {part: slope for part in PARTS if (slope := slopes_of(part, rows))}


def slopes_of(part: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds and GiB per thousand tokens (transformer) or per frame, by least squares; nothing for one size."""
    mine = [row for row in rows if row["part"] == part]
    if len(mine) < 2:
        return {}
    x = [row["tokens"] / 1000 if part == "transformer" else row["frames"] for row in mine]
    per = "1000 tokens" if part == "transformer" else "frame"
    return {
        f"{side} {unit} per {per}": float(np.polyfit(x, [row[f"{side}_{unit}"] for row in mine], 1)[0])
        for unit in ("s", "gib")
        for side in SIDES
    }


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    tokens = row["tokens"] if row["part"] in ("transformer", "video") else 226 if row["part"] == "text_encoder" else ""
    frames = "" if row["part"] == "text_encoder" else row["frames"]
    cells = [
        row["release"],
        row["part"],
        frames,
        tokens,
        f"{row['ours_s']:.2f}",
        f"{row['diffusers_s']:.2f}",
        f"{row['time_ratio']:.2f}",
        f"{row['ours_first_s']:.1f}, {row['diffusers_first_s']:.1f}",
        f"{row['ours_gib']:.2f}, {row['diffusers_gib']:.2f}",
        f"{row['memory_ratio']:.2f}",
        f"{row['difference']:.1e}",
        f"{row['matmul_share']:.2f}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds and GiB of both sides, part by part."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = [f"{row['part']}\n{row['frames']} frames" for row in rows]
    x = np.arange(len(rows))
    figure, axes = plt.subplots(1, 2, figsize=(4 + 1.4 * len(rows), 4))
    for axis, unit, title in zip(axes, ("s", "gib"), ("seconds", "GiB at most"), strict=True):
        for i, side in enumerate(SIDES):
            axis.bar(x + 0.4 * i - 0.2, [row[f"{side}_{unit}"] for row in rows], 0.38, label=side)
        axis.set_xticks(x, labels, fontsize=8)
        axis.set_title(title)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
