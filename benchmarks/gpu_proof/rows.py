"""The rows, the most important first: each with its function, its sizes, its expected seconds and memory.

Seconds are estimates for an H100 and 16 cores, not measurements: they decide only which rows start near the end of the
budget. Memory sizes come from programs compiled without a GPU (`gpu_aot`) and from the reference's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

KERNELS, CONVOLUTIONS = "benchmarks.gpu_proof.attention", "benchmarks.gpu_proof.convolution"
MODELS, MACHINE = "benchmarks.gpu_proof.models", "benchmarks.gpu_proof.machine"
PEERS, PEER_MODELS = "benchmarks.gpu_proof.peers", "benchmarks.gpu_proof.peer_models"

TORCH, DIFFUSERS = ("torch",), ("torch", "diffusers", "transformers")


@dataclass(frozen=True)
class Row:
    """One thing to try.

    name, side: of the table; rows of one name are compared. group: rows of one group share a process.
    function: "module:name", called with `report`, `folder` and the options.
    expected_s: estimated seconds. limit_s: seconds after which it is killed. needs_gib: minimum GPU memory.
    required: whether its side's other rows need it to pass. always: run even if its result is known.
    """

    name: str
    side: str
    group: str
    function: str
    options: dict[str, Any] = field(default_factory=dict)
    expected_s: float = 6
    limit_s: float = 60
    needs_gib: float = 0
    packages: tuple[str, ...] = ()
    required: bool = False
    always: bool = False

    @property
    def key(self) -> str:
        return f"{self.name} | {self.side}"

    @property
    def process(self) -> str:
        """A key of `worker.IMPORTS`."""
        return "diffusers" if self.packages else "ours"

    @property
    def side_key(self) -> str:
        """The library that must find a GPU for it."""
        return "torch" if self.packages else "jax"

    @property
    def is_model(self) -> bool:
        """Whether it runs a model: alone in its process, or after a reset of the memory's peak."""
        return self.function in (f"{MODELS}:run", f"{PEER_MODELS}:run")

    def about(self) -> dict[str, Any]:
        """For the record."""
        return {"row": self.name, "side": self.side, "group": self.group, "options": self.options}


@dataclass(frozen=True)
class Sizes:
    """Of all rows.

    five, one_five: height, width, latent frames and tokens of the denoising steps. chunk: latent frames that are
    decoded. frames: of a later chunk's convolutions. interpret: Pallas kernels without a GPU.
    """

    five: tuple[int, int, int, int]
    one_five: tuple[int, int, int, int]
    two: tuple[int, int]
    heads: int
    channels: tuple[int, int, int]
    chunk: int = 3
    frames: int = 8
    product: int = 8192
    gradient_tokens: int = 4096
    small: bool = False
    interpret: bool = False
    repeat: int = 5


RELEASED = Sizes((480, 720, 13, 17_776), (768, 1360, 21, 45_106), (17_776, 30), 48, (128, 256, 512))
SMALL = Sizes(
    (64, 96, 3, 1100),
    (48, 80, 3, 1300),
    (1100, 3),
    4,
    (32, 48, 64),
    frames=3,
    product=512,
    gradient_tokens=600,
    small=True,
    interpret=True,
    repeat=1,
)
"""To try the code where there is no GPU."""
ON_A_GPU = replace(SMALL, interpret=False)
"""For tests: small, and the kernels themselves."""


def rows(sizes: Sizes) -> list[Row]:
    """All of them."""
    one = sizes.one_five
    return [
        Row("what JAX sees", "ours", "kernels", f"{MACHINE}:jax_sees", {"dry_run": sizes.small}, 5, 120, required=True),
        Row("matrix product", "ours", "kernels", f"{MODELS}:products", {"size": sizes.product}, 3),
        *(row for row in kernel_rows(sizes) if row.group == "kernels"),
        *_names(sizes),
        *_step(sizes, "5b", "cogvideox-5b", sizes.five, gib=13.3, seconds=40),
        *_decode(sizes, "480p", "cogvideox-5b", sizes.five, gib=5, seconds=40),
        Row(
            "what PyTorch sees",
            "torch",
            "torch",
            f"{PEERS}:sees",
            {"dry_run": sizes.small},
            3,
            120,
            packages=TORCH,
            required=True,
        ),
        Row("matrix product", "torch", "torch", f"{PEERS}:products", {"size": sizes.product}, 2, packages=TORCH),
        *_peer_kernels(sizes),
        *_peer_step(sizes, "5b", "cogvideox-5b", sizes.five, "torch", ("", "compiled"), gib=6, seconds=14),
        *_peer_decode(sizes, "480p", "cogvideox-5b", sizes.five, "torch", seconds=16),
        *_exact(sizes, "transformer"),
        *_step(sizes, "1.5-5B", "cogvideox1.5-5b", one, gib=17.7, seconds=60),
        *_peer_step(sizes, "1.5-5B", "cogvideox1.5-5b", one, "torch 1.5", ("compiled",), gib=14, seconds=18),
        *(row for row in kernel_rows(sizes) if row.group != "kernels"),
        *_exact(sizes, "decode"),
        *_in_float32(sizes),
        *_decode(sizes, "768p", "cogvideox1.5-5b", one, gib=14.5, seconds=45),
        *_peer_decode(sizes, "768p", "cogvideox1.5-5b", one, "torch 768p", seconds=30),
        *_text(sizes),
        *_peer_step(sizes, "1.5-5B", "cogvideox1.5-5b", one, "torch 1.5 plain", ("",), gib=14, seconds=18),
        *_compiled_decode(sizes),
        *_whole_decode(sizes),
    ]


def kernel_rows(sizes: Sizes) -> list[Row]:
    """This library's attention and convolutions: group "kernels" comes first, "more kernels" later."""
    return [*_attention(sizes), *_convolutions(sizes)]


def _attention(sizes: Sizes) -> Iterator[Row]:
    first, more = "kernels", "more kernels"
    shapes: dict[str, dict[str, Any]] = {
        "attention 5b": {"batch": 2, "tokens": sizes.five[3], "heads": sizes.heads},
        "attention 1.5-5B": {"batch": 1, "tokens": sizes.one_five[3], "heads": sizes.heads},
        "attention 2b float16": {"batch": 2, "tokens": sizes.two[0], "heads": sizes.two[1], "dtype": "float16"},
        "attention float32": {"batch": 1, "tokens": sizes.five[3], "heads": min(sizes.heads, 6), "dtype": "float32"},
    }
    five = shapes["attention 5b"]
    keys = sizes.five[3]
    shapes["attention 5b, lengths"] = five | {"kv_len": [keys, keys // 2 + 3]}
    shapes["attention 5b, two parts"] = five | {"batch": 1, "part": True}
    shapes["attention, heads of 128"] = five | {"batch": 1, "heads": max(sizes.heads // 2, 1), "dim": 128}
    for name, backend, group, seconds in (
        ("attention 5b", "auto", first, 10),
        ("attention 5b", "triton", first, 6),
        ("attention 1.5-5B", "auto", first, 6),
        ("attention 5b, lengths", "auto", more, 5),
        ("attention 5b, lengths", "triton", more, 4),
        ("attention 5b, two parts", "triton", more, 5),
        ("attention 1.5-5B", "triton", more, 4),
        ("attention 2b float16", "auto", more, 4),
        ("attention 2b float16", "triton", more, 4),
        ("attention float32", "triton", more, 4),
        ("attention float32", "xla", more, 5),
        ("attention 5b", "cudnn", more, 4),
        ("attention 5b", "xla", more, 7),
        ("attention, heads of 128", "auto", more, 4),
        ("attention, heads of 128", "triton", more, 4),
    ):
        interpret = sizes.interpret and backend == "triton"
        options = shapes[name] | {"name": name, "backend": backend, "interpret": interpret, "repeat": sizes.repeat}
        if sizes.small:
            options["queries"] = 64
        yield Row(name, f"ours {backend}", group, f"{KERNELS}:run", options, seconds, 60, 8)
    options = {"name": "attention, gradients", "batch": 1, "tokens": sizes.gradient_tokens, "heads": 4}
    yield Row("attention, gradients", "ours auto", more, f"{KERNELS}:gradient", options | {"repeat": sizes.repeat}, 12)


def _convolution(sizes: Sizes, of: int, inputs: int, outputs: int, big: bool = False, **options: Any) -> dict[str, Any]:
    """A case at 1 / `of` of the picture; inputs, outputs: indices of the widths."""
    height, width = (n // of for n in (sizes.one_five if big else sizes.five)[:2])
    dtype, taps = options.get("dtype", "bfloat16"), options.get("taps", 3)
    channels, out_channels = sizes.channels[inputs], sizes.channels[outputs]
    name = f"convolution {height}x{width}, {channels} to {out_channels}, {dtype}" + (", spatial" if taps == 1 else "")
    shape = {
        "frames": sizes.frames,
        "height": height,
        "width": width,
        "channels": channels,
        "out_channels": out_channels,
    }
    return {"name": name, **shape, "repeat": sizes.repeat} | options


def _convolutions(sizes: Sizes) -> Iterator[Row]:
    first, more = "kernels", "more kernels"
    for group, case, gib in (
        (first, _convolution(sizes, 1, 0, 0), 6),
        (first, _convolution(sizes, 2, 1, 1), 4),
        (first, _convolution(sizes, 1, 0, 0, big=True), 12),
        (more, _convolution(sizes, 1, 1, 0), 8),
        (more, _convolution(sizes, 1, 1, 0, big=True), 16),  # the decoder's largest: more than 2^31 values
        (more, _convolution(sizes, 4, 2, 1, frames=sizes.frames // 2), 4),
        (more, _convolution(sizes, 1, 1, 1, taps=1), 8),
        (more, _convolution(sizes, 1, 0, 0, dtype="float32"), 12),
        (more, _convolution(sizes, 1, 0, 0, dtype="float16"), 6),
    ):
        yield Row(case["name"], "ours", group, f"{CONVOLUTIONS}:run", case, 5, 60, gib)
    case = _convolution(sizes, 2, 1, 1) | {"name": "convolution, gradients"}
    yield Row(case["name"], "ours", more, f"{CONVOLUTIONS}:gradient", case, 10, 60, 8)
    name = "cuDNN's own 3-D convolution, bfloat16"
    case = _convolution(sizes, 1, 0, 0, big=True) | {"name": name, "form": "native 3-D convolution", "repeat": 2}
    yield Row(name, "not used", "own convolution", f"{CONVOLUTIONS}:run", case, 12, 60, 20)


def _peer_kernels(sizes: Sizes) -> Iterator[Row]:
    for row in kernel_rows(sizes):
        if row.group == "kernels" and row.side in ("ours", "ours auto"):
            function = "attention" if row.function.startswith(KERNELS) else "convolution"
            options = {name: x for name, x in row.options.items() if name not in ("backend", "interpret")}
            yield Row(row.name, "torch", "torch", f"{PEERS}:{function}", options, 4, 60, row.needs_gib, TORCH)


def _names(sizes: Sizes) -> Iterator[Row]:
    pairs = [["transformer", "cogvideox-5b"], ["transformer", "cogvideox1.5-5b"], ["text_encoder", "cogvideox-5b"]]
    pairs += [["vae", "cogvideox-5b"], ["vae", "cogvideox1.5-5b"]]
    options = {"components": pairs, "small": sizes.small}
    yield Row(
        "the reference's tensors",
        "diffusers",
        "names",
        f"{PEER_MODELS}:tensors",
        options,
        4,
        90,
        0,
        DIFFUSERS,
        always=True,
    )


def _case(sizes: Sizes, part: str, release: str, size: tuple[int, int, int, int], **options: Any) -> dict[str, Any]:
    height, width, frames = size[:3]
    case = {"part": part, "release": release, "height": height, "width": width, "latent_frames": frames}
    return case | {"small": sizes.small, "repeat": min(sizes.repeat, 3)} | options


def _row(
    name: str, side: str, group: str, options: dict[str, Any], *, expected_s: float, limit_s: float, needs_gib: float
) -> Row:
    """A row of a model; its output is named after the row and the side."""
    module, packages = (MODELS, ()) if side.startswith("ours") else (PEER_MODELS, DIFFUSERS)
    options = options | {"name": f"{name} {side}".replace(" ", "-")}
    return Row(name, side, group, f"{module}:run", options, expected_s, limit_s, needs_gib, packages)


def _step(sizes: Sizes, name: str, release: str, size: Any, *, gib: float, seconds: float) -> Iterator[Row]:
    options = _case(sizes, "transformer", release, size)
    # two layers are tried where not all fit
    yield _row(f"{name} step", "ours", f"{name} step", options, expected_s=seconds, limit_s=180, needs_gib=gib / 2)


def _peer_step(
    sizes: Sizes, name: str, release: str, size: Any, group: str, kinds: tuple[str, ...], *, gib: float, seconds: float
) -> Iterator[Row]:
    for kind in kinds:
        options = _case(sizes, "transformer", release, size, needs_gib=gib) | _compiled(sizes, bool(kind))
        if sizes.small:
            options["needs_gib"] = 0
        side = f"diffusers {kind}".strip()
        expected = seconds + (20 if kind else 0) + (25 if name != "5b" else 0)
        yield _row(f"{name} step", side, group, options, expected_s=expected, limit_s=180, needs_gib=gib)


def _compiled(sizes: Sizes, compiled: bool = True) -> dict[str, Any]:
    """Options of a row of the reference with or without `torch.compile`; at small sizes, without code generation."""
    return {"compiled": compiled} | ({"compile_backend": "eager"} if sizes.small else {})


def _decode(sizes: Sizes, name: str, release: str, size: Any, *, gib: float, seconds: float) -> Iterator[Row]:
    options = _case(sizes, "decode", release, (*size[:2], sizes.chunk, 0))
    row = f"{name} first chunk decoded"
    yield _row(row, "ours", f"{name} decode", options, expected_s=seconds, limit_s=180, needs_gib=gib)


def _peer_decode(sizes: Sizes, name: str, release: str, size: Any, group: str, *, seconds: float) -> Iterator[Row]:
    options = _case(sizes, "decode", release, (*size[:2], sizes.chunk, 0))
    row = f"{name} first chunk decoded"
    yield _row(row, "diffusers", group, options, expected_s=seconds, limit_s=120, needs_gib=12)


def _compiled_decode(sizes: Sizes) -> Iterator[Row]:
    options = _case(sizes, "decode", "cogvideox-5b", (*sizes.five[:2], sizes.chunk, 0)) | _compiled(sizes)
    row = "480p first chunk decoded"
    yield _row(row, "diffusers compiled", "torch compiled decode", options, expected_s=90, limit_s=240, needs_gib=12)


def _text(sizes: Sizes) -> Iterator[Row]:
    options = _case(sizes, "text_encoder", "cogvideox-5b", sizes.five)
    yield _row("text encoder", "ours", "text encoder", options, expected_s=25, limit_s=120, needs_gib=9.5)
    yield _row("text encoder", "diffusers", "torch text", options, expected_s=12, limit_s=120, needs_gib=10)


def _exact(sizes: Sizes, part: str) -> Iterator[Row]:
    """Both sides in float32, few layers and frames at the released widths: the difference must be rounding."""
    height, width = sizes.five[:2]
    if part == "decode" and not sizes.small:
        height, width = height // 2, width // 2 - 4
    options = _case(sizes, part, "cogvideox-5b", (height, width, 3, 0), layers=2, dtype="float32", repeat=1)
    name = f"{part}, float32" if part == "decode" else f"{part}, 2 layers of float32"
    yield _row(name, "ours", f"exact {part}", options, expected_s=30, limit_s=120, needs_gib=6)
    yield _row(name, "diffusers", f"exact torch {part}", options, expected_s=8, limit_s=90, needs_gib=6)


def _in_float32(sizes: Sizes) -> Iterator[Row]:
    """The reference in float32 on weights and inputs rounded to bfloat16, from which both sides' bfloat16 errors are
    measured."""
    exact = {"dtype": "float32", "repeat": 1, "rounded_to": "bfloat16"}
    group, side = "torch float32", "diffusers float32"
    step = _case(sizes, "transformer", "cogvideox-5b", sizes.five, **exact)
    yield _row("5b step", side, group, step, expected_s=45, limit_s=180, needs_gib=34)
    chunk = _case(sizes, "decode", "cogvideox-5b", (*sizes.five[:2], sizes.chunk, 0), **exact)
    yield _row("480p first chunk decoded", side, group, chunk, expected_s=12, limit_s=90, needs_gib=36)


def _whole_decode(sizes: Sizes) -> Iterator[Row]:
    options = _case(sizes, "decode", "cogvideox-5b", sizes.five, repeat=2)
    yield _row("480p all frames decoded", "ours", "480p whole", options, expected_s=90, limit_s=240, needs_gib=9)
