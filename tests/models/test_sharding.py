"""The same numbers on every mesh of eight devices, whatever divides, and only the traffic that was meant."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from cogvideox_flax import CogVideoXPipeline, sharding
from cogvideox_flax.attention import TileSizes, attend, xla
from cogvideox_flax.checkpoint import load_transformer, parameters
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.run import decode_programs
from cogvideox_flax.plan.collectives import collectives
from cogvideox_flax.plan.hlo import Program
from cogvideox_flax.sharding.sequence_parallel import ulysses_group
from tests.support import processes
from tests.support.reference import convert_component, make_text_encoder, make_transformer, save_layout

MESHES = [(2, 4, 1), (2, 2, 2, True)]
MORE_MESHES = [(1, 1, 8), (8, 1, 1), (1, 8, 1), (2, 1, 4), (2, 2, 2), (2, 4, 1, True)]
SPLASH = {"backend": "splash", "interpret": True}
SMALL = TileSizes(128, 128, 128, 128)
PROMPTS = ["a red circle", "a blue square", "a small circle moves to the left", "white"]


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """A checkpoint of eight heads, so that all meshes can take it."""
    folder = tmp_path_factory.mktemp("sharding")
    layout = save_layout(
        folder / "hf",
        "cogvideox1.5-5b",
        transformer=make_transformer("cogvideox1.5-5b", num_attention_heads=8),
        text_encoder=make_text_encoder(num_heads=8),
    )
    convert(layout, folder / "native")
    return folder / "native"


def generate(native, mesh):
    pipe = CogVideoXPipeline.from_pretrained(native, "float32", mesh)
    size = {"num_frames": 9, "height": 32, "width": 112, "num_inference_steps": 2}
    return pipe(PROMPTS, **size, output_type="float", scheduler="dpm", seed=3, progress=False).frames


@pytest.fixture(scope="module")
def alone(native):
    return generate(native, None)


@pytest.mark.parametrize(
    "mesh", [*MESHES, *(pytest.param(mesh, marks=pytest.mark.further) for mesh in MORE_MESHES)], ids=str
)
def test_same_video_on_every_mesh(native, alone, mesh):
    assert np.ptp(alone) > 0.5
    np.testing.assert_allclose(generate(native, sharding.make_mesh(*mesh)), alone, atol=1e-4)


@pytest.mark.further  # the command's way of doing it is in test_hosts
def test_two_hosts_share_a_run(native, alone, tmp_path):
    """Two processes of four devices each, joined by jax.distributed: both have the whole video, the same as ever."""
    script = Path(__file__).parents[1] / "support" / "one_of_two_hosts.py"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(script.parents[2])}
    files = [tmp_path / f"{n}.npy" for n in range(2)]
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(
                processes.running([sys.executable, script, n, port, native, file], env=env, stderr=subprocess.PIPE)
            )
            for n, file in enumerate(files)
        ]
        said = [host.communicate(timeout=240)[1].decode() for host in hosts]
    for host, text, file in zip(hosts, said, files, strict=True):
        assert host.returncode == 0, text[-3000:]
        np.testing.assert_allclose(np.load(file), alone, atol=1e-4)


@pytest.mark.parametrize("release", ["cogvideox-2b", "cogvideox-5b", "cogvideox1.5-5b"])
@pytest.mark.parametrize("mesh", [(1, 4, 1), (2, 2, 2), pytest.param((1, 8, 1), marks=pytest.mark.further)], ids=str)
def test_tokens_and_heads_that_do_not_divide(release, mesh, tmp_path):
    """Six heads over four or eight devices, 10 + 105 or 10 + 210 tokens; each release's kind of positions."""
    reference = make_transformer(release, num_attention_heads=6)
    native = convert_component("transformer", reference, tmp_path)
    random = np.random.default_rng(0)
    latents = random.normal(size=(2, 6, 10, 14, 16)).astype(np.float32)
    context = random.normal(size=(2, 10, 40)).astype(np.float32)

    def run(model):
        return jax.jit(lambda m, x, c: m(x, c, jnp.array([999, 321])))(model, latents, context)

    on = sharding.make_mesh(*mesh)
    with jax.set_mesh(on):
        spread = run(load_transformer(native, mesh=on))
    np.testing.assert_allclose(spread, run(load_transformer(native)), atol=1e-4)


@pytest.mark.parametrize(
    ("release", "mesh", "ring"),
    [
        ("cogvideox-2b", (1, 2, 1), False),
        ("cogvideox-2b", (1, 4, 1), True),
        ("cogvideox-2b", (1, 1, 2), False),
        ("cogvideox1.5-5b", (1, 4, 1), True),
    ],
    ids=str,
)
def test_long_attention_in_a_transformer(release, mesh, ring, tmp_path):
    """Six heads, 10 + 600 tokens: more than are attended to at once."""
    assert (ulysses_group(6, mesh[1]) < mesh[1]) == ring
    native = convert_component("transformer", make_transformer(release, num_attention_heads=6), tmp_path)
    random = np.random.default_rng(0)
    frames = 6 if release == "cogvideox-2b" else 12
    latents = random.normal(size=(1, frames, 20, 20, 16)).astype(np.float32)
    context = random.normal(size=(1, 10, 40)).astype(np.float32)
    call = jax.jit(lambda m, x, c: m(x, c, jnp.array([999])))
    alone = call(load_transformer(native), latents, context)
    on = sharding.make_mesh(*mesh)
    with jax.set_mesh(on):
        model = load_transformer(native, mesh=on)
        np.testing.assert_allclose(call(model, latents, context), alone, atol=1e-4)


def test_heads_are_exchanged_by_as_many_as_they_divide_over():
    of_releases = [(heads, parts, ulysses_group(heads, parts)) for heads in (30, 48) for parts in (2, 4, 8, 16)]
    assert all(group == parts for _, parts, group in of_releases)  # 30 heads become 32
    assert [ulysses_group(heads, 8) for heads in (1, 2, 3, 4, 6, 7, 12, 15)] == [1, 2, 1, 4, 2, 1, 4, 8]


@pytest.mark.parametrize("heads", [6, 3, 15])  # in a ring of two groups, of single devices, filled up to 16
@pytest.mark.parametrize("kv_len", [None, 30, [37, 20]])
def test_attention_by_exchange(kv_len, heads):
    """Keys that are not real are never read, wherever the exchange puts them."""
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(2, 37, heads, 16)), jnp.float32) for _ in range(3))
    real = jnp.arange(37) < jnp.broadcast_to(jnp.asarray(37 if kv_len is None else kv_len), 2)[:, None]
    k, v = (jnp.where(real[:, :, None, None], x, 1e30) for x in (k, v))
    lengths = jnp.array(kv_len) if isinstance(kv_len, list) else kv_len
    call = jax.jit(lambda q, k, v: attend(q, k, v, kv_len=lengths))
    with jax.set_mesh(sharding.make_mesh(2, 4, 1)):
        spread = call(q, k, v)
    assert jnp.isfinite(spread).all()
    np.testing.assert_allclose(spread, call(q, k, v), atol=2e-5)


@pytest.mark.parametrize("kv_len", [2300, 2304])
def test_keys_of_all_heads_are_not_cut(kv_len):
    """Each device attends its four heads one after the other, and gives the keys of all."""
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(1, 2400, 8, 16)), jnp.float32) for _ in range(3))
    seen = []

    def run(q, k, v, lengths, first_head):
        seen.append((first_head, k.shape[1:3], v.shape[1:3]))
        return xla.attend(q, k[:, : v.shape[1], first_head : first_head + v.shape[2]], v, lengths)

    with jax.set_mesh(sharding.make_mesh(1, 2, 1)):
        call = jax.jit(lambda *qkv: sharding.sequence_parallel_attention(run, *qkv, kv_len, q_len=kv_len))
        found = call(q, k, v)
    expected = attend(q, k[:, :kv_len], v[:, :kv_len])
    np.testing.assert_allclose(found[:, :kv_len], expected[:, :kv_len], atol=2e-5)
    assert seen == [(i, (2560, 4), (2304, 1)) for i in range(4)]


@pytest.mark.parametrize(("tokens", "kv_len"), [(300, 200), (300, 300), (40, 37)])
def test_keys_in_tiles_are_masked(tokens, kv_len):
    """One device: keys past the last whole tile are cut off, those within it masked."""
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(2, tokens, 2, 16)), jnp.float32) for _ in range(3))
    k, v = (x.at[:, kv_len:].set(1e30) for x in (k, v))
    seen = []

    def run(q, k, v, lengths):
        seen.append((k.shape[1], lengths))
        return xla.attend(q, k, v, lengths)

    found = sharding.sequence_parallel_attention(run, q, k, v, kv_len, in_tiles=True)
    np.testing.assert_allclose(found, attend(q, k[:, :kv_len], v[:, :kv_len]), atol=2e-5)
    ((keys, lengths),) = seen
    assert keys == min(tokens, -(-kv_len // 128) * 128) and (lengths is None) == (keys == kv_len)


@pytest.mark.parametrize("heads", [6, 4])  # in a ring of two groups, one for each device
def test_padding_queries_are_left_out(heads):
    """Real ones get the same result, the others a finite one."""
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(2, 1100, heads, 16)), jnp.float32) for _ in range(3))
    call = jax.jit(lambda q, k, v: attend(q, k, v, q_len=700, kv_len=700))
    with jax.set_mesh(sharding.make_mesh(2, 4, 1)):
        spread = call(q, k, v)
        attended = call.lower(q, k, v).compile().cost_analysis()["flops"]
        all_attended = jax.jit(lambda q, k, v: attend(q, k, v, kv_len=700)).lower(q, k, v).compile()
    assert jnp.isfinite(spread).all()
    np.testing.assert_allclose(spread[:, :700], call(q, k, v)[:, :700], atol=2e-5)
    if heads == 4:
        assert attended < 0.75 * all_attended.cost_analysis()["flops"]


@pytest.mark.parametrize("options", [{"backend": "xla"}, SPLASH, SPLASH | {"tile_sizes": SMALL}])
def test_a_ring_of_kernels(options):
    """Large scores, one and several blocks of keys, groups that hold no real key at all, nonsense behind the last."""
    random = np.random.default_rng(1)
    q, k, v = (jnp.asarray(random.normal(size=(2, 1300, 2, 64)), jnp.float32) for _ in range(3))
    lengths = jnp.array([1290, 150])
    scaled = 12 * q.at[0].divide(12)  # the scores of the second clip are not bounded
    k, v = (jnp.where(jnp.arange(1300)[None, :, None, None] < lengths[:, None, None, None], x, 1e30) for x in (k, v))
    call = jax.jit(lambda q, k, v: attend(q, k, v, kv_len=lengths, **options))
    with jax.set_mesh(sharding.make_mesh(1, 8, 1)):
        text = call.lower(scaled, k, v).compile().as_text()
        spread = call(scaled, k, v)
    assert "all-to-all" in text and "collective-permute" in text
    for clip, length in enumerate(lengths.tolist()):
        q, *kv = scaled[clip][None], k[clip, :length][None], v[clip, :length][None]
        np.testing.assert_allclose(spread[clip][None], attend(q, *kv, backend="xla"), atol=3e-5)


@pytest.mark.parametrize("options", [{"backend": "xla"}, SPLASH], ids=["xla", "splash"])
@pytest.mark.parametrize("kv_len", [1024, 300])
@pytest.mark.parametrize("power", [1, 57, *(pytest.param(n, marks=pytest.mark.further) for n in (14, 47))])
def test_a_ring_at_large_scores(options, kv_len, power):
    """All groups hold as many of each key, so their parts weigh the same; products are exact in float32."""
    random = np.random.default_rng(0)
    q, some = (np.round(4 * random.normal(size=(1, n, 2, 64))) * 2.0**power for n in (1024, 64))
    q, k = jnp.asarray(q, jnp.float32), jnp.asarray(np.tile(some, (1, 16, 1, 1)), jnp.float32)
    v = jnp.asarray(random.normal(size=q.shape), jnp.float32)
    scores = np.einsum("qnk,snk->qns", *(np.asarray(x[0], np.float64) for x in (q, k[:, :kv_len]))) / 8
    p = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("qns,snk->qnk", p / p.sum(-1, keepdims=True), v[0, :kv_len])
    best, second = np.moveaxis(np.sort(scores[..., :64], -1)[..., :-3:-1], -1, 0)
    clear = (best - second > 0.01 * scores.std(-1)) | (power < 10)
    with jax.set_mesh(sharding.make_mesh(1, 8, 1)):
        found = np.asarray(jax.jit(lambda q, k, v: attend(q, k, v, kv_len=kv_len, **options))(q, k, v))
    assert np.isfinite(found).all() and clear.mean() > 0.9
    assert (found <= v.max(1) + 1e-5).all() and (found >= v.min(1) - 1e-5).all()
    if kv_len == 1024:  # else parts hold more and fewer of a key, which is lost beside a score above 2^24
        # float32 knows the largest scores of power 1, some 2^9, to 2^-15
        np.testing.assert_allclose(found[0][clear], expected[clear], atol=1e-5 if power > 1 else 1e-4)


def test_a_ring_where_all_scores_are_far_below_zero():
    v = jax.random.normal(jax.random.key(0), (1, 1024, 2, 64))
    q, k = jnp.full(v.shape, -(2.0**59)), jnp.full(v.shape, 2.0**59)
    with jax.set_mesh(sharding.make_mesh(1, 8, 1)):
        found = jax.jit(lambda q, k, v: attend(q, k, v, kv_len=512))(q, k, v)
    np.testing.assert_allclose(found, jnp.broadcast_to(v[:, :512].mean(1, keepdims=True), v.shape), atol=1e-6)


@pytest.mark.parametrize("options", [{}, SPLASH], ids=["xla", "splash"])
@pytest.mark.parametrize("heads", [6, 4])
def test_gradients_pass_the_exchange(heads, options):
    random = np.random.default_rng(0)
    args = [jnp.asarray(random.normal(size=(2, 21, heads, 8)), jnp.float32) for _ in range(3)]
    grad = jax.jit(jax.grad(lambda *args: jnp.square(attend(*args, **options)).sum(), argnums=(0, 1, 2)))
    expected = jax.grad(lambda *args: jnp.square(attend(*args)).sum(), argnums=(0, 1, 2))(*args)
    with jax.set_mesh(sharding.make_mesh(2, 4, 1)):
        for ours, theirs in zip(grad(*args), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_sequence_parallel_layers_only_exchange(native):
    """Four all-to-alls a layer; else only tokens before they are embedded and after they are projected out move."""
    mesh = sharding.make_mesh(1, 8, 1)
    model = load_transformer(native, mesh=mesh)
    latents, context = jnp.zeros((2, 4, 8, 14, 16)), jnp.zeros((2, 10, 40))
    with jax.set_mesh(mesh):
        call = jax.jit(lambda m, x, c: m(x, c, 999))
        text = call.lower(model, latents, context).compile().as_text()
    found = collectives(Program(text))
    assert found["all-to-all"].count == 4 * model.config.layers
    narrow = 4 * 2 * 128 * 2 * 2 * 2 * 16  # float32, batch, tokens padded to 8 * 16, patches of 2x2x2x16
    assert all(kind == "all-to-all" or t.tensor_bytes <= narrow for kind, t in found.items()), found


def test_fsdp_weights_are_gathered_layer_by_layer(native):
    mesh = sharding.make_mesh(2, 2, 2, fsdp=True)
    model = load_transformer(native, mesh=mesh)
    large = 0
    for name, value in parameters(model).items():
        shares = value.size / value.addressable_shards[0].data.size
        if name.endswith("kernel") and name.startswith("blocks."):
            assert shares == (4 if ".norm" in name else 8), name  # modulation is not split over tp
            large += value.size
        else:
            assert shares <= 2, name
    assert large > 0.8 * sum(value.size for value in parameters(model).values())
    latents, context = jnp.zeros((2, 4, 8, 14, 16)), jnp.zeros((2, 10, 40))
    with jax.set_mesh(mesh):
        call = jax.jit(lambda m, x, c: m(x, c, 999))
        text = call.lower(model, latents, context).compile().as_text()
    gathered = collectives(Program(text))["all-gather"]
    # float32, each device's part of them over tp: no layer's twice, none that is not needed
    wanted = 4 * sum(v.size // (1 if ".norm" in n else 2) for n, v in parameters(model).items() if v.ndim == 3)
    assert wanted <= gathered.tensor_bytes <= 1.2 * wanted


@dataclass(frozen=True)
class Chip:
    """A chip of a TPU, as JAX's meshes know it."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"
    process_index: int = 0
    core_on_chip: int = 0


CHIPS = [Chip(8 * s + 4 * y + x, s, (x, y, 0)) for s in range(2) for y in range(2) for x in range(4)]
"""Two slices of 2x4."""


def test_a_mesh_over_slices():
    for mesh in ((4, 2, 2), (2, 8, 1, True)):
        on = sharding.make_mesh(*mesh, devices=CHIPS)
        dp, sp, tp, *_ = mesh
        assert list(on.shape.items())[:4] == [("slice", 2), ("dp", dp // 2), ("sp", sp), ("tp", tp)]
        assert [[chip.slice_index for chip in part.flat] for part in on.devices] == [[0] * 8, [1] * 8]
        places = [[chip.coords for chip in part.flat] for part in on.devices]
        assert places[0] == places[1]
        assert sharding.devices_of("batch", on) == dp
        assert sharding.named(on, ("batch", "tokens"), (4, 8), "x").spec == PartitionSpec(("slice", "dp"), "sp")
        assert (sharding.tables.FSDP in on.axis_names) == (len(mesh) == 4)
    assert sharding.make_mesh(2, 4, 1, devices=CHIPS).axis_names == sharding.AXES  # inside the first slice
    assert sharding.slice_count(jax.devices()) == 1


@pytest.mark.parametrize(
    ("mesh", "expected"), [((1, 16, 1), "16,1,1; 8,2,1; 4,4,1; 2,8,1"), ((1, 8, 2), "8,1,2; 4,2,2")]
)
def test_tokens_and_heads_stay_inside_a_slice(mesh, expected):
    with pytest.raises(
        InputError, match=rf"does not fit 2 slices with 8, 8 of its devices: .*; expected one of {expected}"
    ):
        sharding.make_mesh(*mesh, devices=CHIPS)
    with pytest.raises(InputError, match=r"2 slices with 8, 4 of its devices"):
        sharding.make_mesh(4, 3, 1, devices=CHIPS)


@pytest.mark.parametrize("text", ["2,4", "2,4,1,whole", "2,4,fsdp", "2,4,1,1", "fsdp", "2,4,1 fsdp"])
def test_meshes_are_read_or_refused(text):
    assert sharding.parse_mesh("2,4,1") == (2, 4, 1) and sharding.parse_mesh(" 2, 4,1, fsdp ") == (2, 4, 1, True)
    assert [sharding.describe_mesh(m) for m in ((2, 4, 1), (2, 4, 1, True))] == ["2,4,1", "2,4,1,fsdp"]
    with pytest.raises(InputError, match="2,1,4, or DP,SP,TP,fsdp; got"):
        sharding.parse_mesh(text)


@pytest.mark.parametrize(
    ("mesh", "shape", "expected"),
    [
        ((1, 8, 1), (1, 13, 60, 90, 16), {4, 2, 1}),  # 8 divides neither side
        ((8, 1, 1), (1, 13, 60, 90, 16), {4, 2, 1}),
        ((1, 8, 1), (1, 13, 96, 170, 16), (1, 8, 1)),  # 8 divides the rows
        ((1, 4, 2), (1, 13, 60, 90, 16), (1, 4, 2)),
        ((2, 4, 1), (2, 13, 60, 90, 16), (2, 4, 1)),  # clips over dp, rows over sp
        ((1, 8, 1), (8, 3, 60, 90, 16), (8, 1, 1)),
        ((1, 8, 1, True), (1, 13, 60, 90, 16), (1, 8, 1, 1)),  # its weights are split over these axes
    ],
    ids=str,
)
def test_images_divide_over_all_devices_where_they_can(mesh, shape, expected):
    mesh = sharding.make_mesh(*mesh)
    found = sharding.image_mesh(mesh, shape)
    sizes = found.devices.shape
    assert (set(sizes) if isinstance(expected, set) else sizes) == expected
    assert list(found.devices.flat) == list(mesh.devices.flat)
    layout = sharding.spatial_layout(found, shape)
    if expected == {4, 2, 1}:
        names = [name for each in layout for name in ((each,) if isinstance(each, str) else each or ())]
        assert math.prod(found.shape[name] for name in names) == 8


@pytest.mark.further
def test_a_decode_that_only_other_axes_divide():
    """12 rows and 6 columns, whole and in chunks, on one axis of 8 devices."""
    latents = np.random.default_rng(0).normal(size=(1, 5, 12, 6, 16)).astype(np.float32)
    alone, spread = (
        CogVideoXPipeline.from_pretrained(dtype="float32", mesh=mesh) for mesh in (None, sharding.make_mesh(1, 8, 1))
    )
    expected = alone.decode(latents, output_type="float", progress=False)
    found = spread.decode(latents, output_type="float", progress=False)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    (chunks,) = spread.decode(latents, output_type="float", in_chunks=True, progress=False)
    np.testing.assert_allclose(np.stack(list(chunks)), expected[0], atol=1e-4)
    (program, args, _), *_ = decode_programs(
        spread.manifest, "float32", latents.shape, spread.mesh, True, False, in_chunks=False
    )
    mesh = program.mesh_for(spread.mesh, *args)
    assert sorted(mesh.devices.shape) == [1, 2, 4]
    with jax.set_mesh(mesh):
        text = jax.jit(program).lower(*args).compile().as_text()
    assert "collective-permute" in collectives(Program(text)), "halos are exchanged, not images repeated"
