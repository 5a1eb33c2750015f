"""Forecasts: work counted exactly, traffic read from real programs, stages compiled for chips that are not here."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import tpu_aot
from cogvideox_flax import cli, sharding
from cogvideox_flax.attention import attend, splash
from cogvideox_flax.checkpoint import Manifest, read_manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.request import STAGES, GenerationRequest
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.hub import EMBEDDED
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.registry import RELEASES
from cogvideox_flax.nn.scopes import runs_in, share_of
from cogvideox_flax.plan import best_mesh, forecast, meshes, suitable_layouts
from cogvideox_flax.plan.chips import CHIPS, topology_devices
from cogvideox_flax.plan.collectives import Traffic, collectives, groups_of, started_by
from cogvideox_flax.plan.flops import Flops, count_flops
from cogvideox_flax.plan.forecasting import analyse
from cogvideox_flax.plan.hlo import Program, sizes
from cogvideox_flax.plan.timing import ATTENTION_RATES, BACKWARD_RATES, parts, waits
from cogvideox_flax.plan.wire import Links, busiest, exchange, ring
from cogvideox_flax.sharding import MeshShape
from cogvideox_flax.training.forecast import StepForecast, unmodelled


def zeros(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# --- work


def test_products_and_convolutions_are_counted():
    assert count_flops(jnp.matmul, zeros(5, 3, 4), zeros(5, 4, 7)) == Flops(2 * 5 * 3 * 4 * 7)
    conv = lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))  # noqa: E731
    assert count_flops(conv, zeros(2, 8, 9, 4), zeros(3, 3, 4, 6)).total == 2 * 2 * 8 * 9 * 6 * 3 * 3 * 4


def test_loops_count_as_often_as_they_run():
    def f(x, ws):
        return jax.lax.scan(lambda x, w: (jax.lax.scan(lambda x, _: (x @ w, None), x, length=3)[0], None), x, ws)[0]

    assert count_flops(f, zeros(4, 4), zeros(5, 4, 4)) == Flops(15 * 2 * 4**3)
    with pytest.raises(ValueError, match="length is not known"):
        count_flops(lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: x @ x, x), zeros(4, 4), jnp.int32(3))


def test_attention_counts_what_it_must_do_and_no_padding():
    shape = zeros(2, 1500, 3, 64)
    assert count_flops(attend, shape, shape, shape) == Flops(kernels=4 * 2 * 3 * 1500 * 1500 * 64)
    gradient = lambda q: splash.attend(q, q, q).sum()  # noqa: E731
    assert count_flops(jax.grad(gradient), shape).kernels > 0


def test_a_denoising_step_is_the_textbook_count():
    """12 d^2 weights a layer, 2 operations each a token, and 4 d of attention a pair of tokens."""
    config = dataclasses.replace(RELEASES["cogvideox1.5-5b"].configs["transformer"], layers=3)
    latents, context = zeros(2, 22, 96, 170, 16), zeros(2, 226, 4096)
    tokens, d = 11 * 48 * 85 + 226, 3072
    found = count_flops(
        lambda m, x, c: m(x, c, 3), CogVideoX.components["transformer"].abstract(config), latents, context
    )
    assert tokens == 45_106 and found.kernels == 2 * 3 * 4 * d * tokens**2
    linear = 2 * 3 * 24 * d**2 * tokens
    assert linear < found.rest < 1.03 * linear


# --- traffic


def traffic_of(f, mesh, *specs):
    args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, p)) for s, p in specs]
    return collectives(Program(jax.jit(f).lower(*args).compile().as_text()))


def test_traffic_of_known_programs():
    mesh = sharding.make_mesh(1, 2, 4)
    P = PartitionSpec

    def summed(x, ws):
        def layer(x, w):
            y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P()))
            return y, None

        return jax.lax.scan(layer, x, ws)[0]

    found = traffic_of(summed, mesh, ((8, 64), P(None, "tp")), ((6, 64, 64), P(None, "tp", None)))
    reduced = found["all-reduce"]
    assert reduced.count == 6 and reduced.tensor_bytes == 6 * 8 * 64 * 4
    assert reduced.wire_bytes == pytest.approx(2 * 3 / 4 * reduced.tensor_bytes)

    exchange = jax.shard_map(
        lambda x: jax.lax.all_to_all(x, "tp", 1, 0, tiled=True), mesh=mesh, in_specs=P("tp"), out_specs=P(None, "tp")
    )
    found = traffic_of(exchange, mesh, ((16, 32), P("tp")))
    assert found["all-to-all"] == Traffic(1, 16 * 32 * 4 // 4, 16 * 32 * 4 // 4 * 3 // 4)
    gathered = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P()))  # noqa: E731
    found = traffic_of(gathered, mesh, ((16, 32), P("sp")))
    assert found == {"all-gather": Traffic(1, 16 * 32 * 4, 16 * 32 * 4 // 2)}


def test_no_traffic_on_one_device():
    assert collectives(Program(jax.jit(jnp.sin).lower(zeros(3)).compile().as_text())) == {}
    with pytest.raises(ValueError, match="no HLO"):
        Program("nonsense")


# --- time


def test_types_are_read():
    assert sizes("bf16[3,5]{1,0:T(8,128)(2,1)}") == [30] and sizes("(s32[], f32[2,2]{1,0}, pred[7])") == [4, 16, 7]
    assert sizes("(f32[4]{0:T(128)S(1)}, f32[2]{0})", hbm_only=True) == [8]


def test_time_of_products_grows_with_their_number(run):
    (mesh,) = [sharding.make_mesh(devices=topology_devices("v6e:2x4"))]
    place = NamedSharding(mesh, PartitionSpec())

    def seconds(layers):
        args = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=place) for s in ((2048, 2048), (layers, 2048, 2048))]
        f = lambda x, ws: jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]  # noqa: E731
        with jax.set_mesh(mesh):
            program = Program(jax.jit(f).lower(*args).compile().as_text())
            return sum(part.seconds for part in parts(program, CHIPS["v6e"]))

    few, many = seconds(5), seconds(15)
    ideal = 10 * 2 * 2048**3 / CHIPS["v6e"].flops
    assert ideal < many - few < 3 * ideal


def test_a_slice_of_a_concatenation_reads_the_slice():
    """Rows at an end of a concatenation: a fusion computes no others."""
    program = Program(
        """
%fused (a: f32[100,8], b: f32[100,8]) -> f32[1,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %b = f32[100,8]{1,0} parameter(1)
  %both = f32[200,8]{1,0} concatenate(%a, %b), dimensions={0}
  ROOT %last = f32[1,8]{1,0} slice(%both), slice={[199:200], [0:8]}
}

ENTRY %main (x: f32[100,8], y: f32[100,8]) -> f32[1,8] {
  %x = f32[100,8]{1,0} parameter(0)
  %y = f32[100,8]{1,0} parameter(1)
  ROOT %fusion = f32[1,8]{1,0} fusion(%x, %y), kind=kLoop, calls=%fused
}
"""
    )
    (read,) = (program.read_bytes(ops, op) for ops, op, _ in program.run() if op.kind == "fusion")
    assert read == 2 * 8 * 4  # of each part at most as much as the result


def test_a_conversion_reads_what_it_converts():
    program = Program(
        """
%fused (a: f32[100,8]) -> bf16[100,8] {
  %a = f32[100,8]{1,0} parameter(0)
  ROOT %narrow = bf16[100,8]{1,0} convert(%a)
}

ENTRY %main (x: f32[100,8]) -> bf16[100,8] {
  %x = f32[100,8]{1,0} parameter(0)
  ROOT %fusion = bf16[100,8]{1,0} fusion(%x), kind=kLoop, calls=%fused
}
"""
    )
    (read,) = (program.read_bytes(ops, op) for ops, op, _ in program.run() if op.kind == "fusion")
    assert read == 100 * 8 * 4


def test_an_update_in_place_moves_the_update():
    def f(buffer, row, i):
        return jax.lax.dynamic_update_slice_in_dim(buffer, jnp.sin(row), i, 0)

    args = zeros(4096, 128), zeros(1, 128), jax.ShapeDtypeStruct((), jnp.int32)
    program = Program(jax.jit(f, donate_argnums=0).lower(*args).compile().as_text())
    moved = [
        program.written_bytes(ops, op) + program.read_bytes(ops, op)
        for ops, op, _ in program.run()
        if op.kind not in ("parameter", "constant")
    ]
    assert 512 <= sum(moved) < 4096 * 8 < 4096 * 512


# --- stages


def run_of(manifest, dtype="bfloat16", prompts=1, **options):
    """A run as the planner takes it."""
    return resolve(GenerationRequest([""] * prompts, **options), manifest, dtype)


@pytest.fixture(scope="module")
def run():
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed: pip install 'jax[tpu]'")
    return run_of(read_manifest(EMBEDDED), "float32", num_inference_steps=10)


def test_stages_of_the_embedded_model(run):
    one = {stage.name: stage for stage in forecast(run, "v6e:1x1", (1, 1, 1), ["encode", "denoise"])}
    assert list(one) == ["encode", "denoise"] and one["denoise"].runs == 10
    weights = sum(leaf.size for leaf in jax.tree.leaves(run.manifest.abstract("transformer"))) * 4
    for stage in one.values():
        assert stage.fits and not stage.collectives and stage.flops > 0 and stage.estimated_s > 0
        assert stage.hbm_gib_per_chip >= stage.argument_gib + stage.temp_gib > 0
    assert weights / 2**30 <= one["denoise"].argument_gib < 1.2 * weights / 2**30 + 0.01

    split = {stage.name: stage for stage in forecast(run, "v6e:2x4", (2, 2, 2), ["denoise"])}["denoise"]
    assert split.flops == one["denoise"].flops and split.collective_bytes > 0
    assert split.argument_gib < one["denoise"].argument_gib


@pytest.mark.further
def test_the_whole_run_does_what_its_stages_do(run):
    def work(name):
        ((program, args, runs),) = run.abstract(name)
        return runs * count_flops(program, *args).total

    text, transformer = (run.manifest.configs[name] for name in ("text_encoder", "transformer"))
    position_bias = 2 * text.position_buckets * text.heads * transformer.text_length**2
    # guidance encodes two prompts: one after the other, or, in the whole run, at once with one position bias
    assert work("run") + position_bias == sum(map(work, STAGES)) > 0


@pytest.mark.slow  # the decoder takes minutes to compile
def test_decoder_and_whole_run_compile(run):
    for stage in forecast(run, "v6e:1x1", (1, 1, 1), ["decode", "run"]):
        assert stage.fits and stage.flops > 0 and not stage.collectives


def test_what_does_not_fit_is_said(run, monkeypatch):
    monkeypatch.setitem(CHIPS, "v6e", dataclasses.replace(CHIPS["v6e"], hbm=2**20))
    (stage,) = forecast(run, "v6e:1x1", (1, 1, 1), ["encode"])
    assert not stage.fits
    tried: list[tuple[int, int, int]] = []
    with pytest.raises(InputError, match=r"needs .* GiB on each of 1 devices"):
        best_mesh(run, "v6e:1x1", lambda mesh, found: tried.append(mesh))
    assert not tried


def test_meshes_are_all_factorings():
    assert len(meshes(8)) == 10 and all(a * b * c == 8 for a, b, c in meshes(8))
    assert meshes(8, slices=4) == [(4, 1, 2), (4, 2, 1), (8, 1, 1)]


def layout_of(release, frames, height, width, devices, guidance_scale=6.0):
    options = {"num_frames": frames, "height": height, "width": width, "guidance_scale": guidance_scale}
    return suitable_layouts(run_of(Manifest.of_release(RELEASES[release]), **options), devices, CHIPS["v6e"])[0]


def test_the_mesh_of_a_run_is_chosen_without_compiling():
    big = layout_of("cogvideox1.5-5b", 81, 768, 1360, 8)
    assert big.mesh == (2, 4, 1)
    # kernels, other operations and wire of the compiled forecast come to 1.1 s
    assert big.seconds == pytest.approx(1.1, rel=0.1) and 10 * 2**30 < big.nbytes < 15 * 2**30
    assert layout_of("cogvideox1.5-5b", 81, 768, 1360, 1).mesh == (1, 1, 1)
    assert layout_of("cogvideox-2b", 49, 480, 720, 4, guidance_scale=1).mesh == (1, 4, 1)
    with pytest.raises(InputError, match=r"needs .* GiB on each of 1 devices"):
        manifest = Manifest.of_release(RELEASES["cogvideox1.5-5b"])
        suitable_layouts(run_of(manifest), 1, CHIPS["v5e"])
    assert layout_of("cogvideox-2b", 9, 480, 720, 7).mesh == (1, 7, 1)  # which nothing else divides over


def test_the_best_mesh_alone_is_compiled_and_the_next_where_it_does_not_fit(run, monkeypatch):
    big = run_of(Manifest.of_release(RELEASES["cogvideox1.5-5b"]))
    (stage,) = forecast(run, "v6e:1x1", (1, 1, 1), ["encode"])
    fits = iter([False, True])
    compiled = []

    def compile_it(run, topology, mesh, stages):
        compiled.append((mesh, stages))
        return [dataclasses.replace(stage, fits=next(fits))]

    monkeypatch.setattr("cogvideox_flax.plan.forecasting.forecast", compile_it)
    ranked = [layout.mesh for layout in suitable_layouts(big, 8, CHIPS["v6e"])]
    assert ranked[0] == (2, 4, 1) and len(ranked) > 4 and ranked[-1][3:] == (True,)
    tried: list[tuple[MeshShape, bool]] = []
    assert best_mesh(big, "v6e:2x4", lambda mesh, found: tried.append((mesh, found is None)))[0] == ranked[1]
    assert tried == [(mesh, begins) for mesh in ranked[:2] for begins in (True, False)] and compiled == [
        (mesh, ["denoise"]) for mesh in ranked[:2]
    ]


@pytest.mark.parametrize(
    ("topology", "mesh", "message"),
    [
        ("v6e:2x4", (3, 1, 1), "does not divide"),
        ("v6e:2x4", (4, 4, 1), "needs 16 devices; there are 8"),
        ("v9z:2x4", (1, 1, 1), "unknown chip 'v9z'"),
        ("v6e:3x9x1", (1, 1, 1), "no topology"),
        ("0xv6e:2x2", (1, 1, 1), "unknown chip '0xv6e'"),
        ("2xv6e:2x2", (1, 8, 1), "does not fit 2 slices"),
        (f"v6e:{'9' * 5000}x1", (1, 1, 1), "no topology"),
    ],
)
def test_what_cannot_be_is_refused_before_compiling(run, topology, mesh, message):
    with pytest.raises(InputError, match=message):
        next(forecast(run, topology, mesh))


def test_command(run, capsys):
    command = ["plan", "--topology", "v6e:1x1", "--mesh", "1,1,1", "--stages", "encode", "--quiet"]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["stages"]
    assert {"hbm_gib_per_chip", "argument_gib", "temp_gib", "flops", "collective_bytes", "compile_s", "fits"} <= set(
        row
    )
    assert row["name"] == "encode" and found["fits"] is True
    assert cli.main(command) == 0
    assert "encode x2" in capsys.readouterr().out
    assert cli.main(["plan", "--release", "cogvideox-5b", "--mesh", "1,1,1", "--height", "481", "--quiet"]) == 2
    assert "height is 481" in capsys.readouterr().err


def test_gradients_are_summed_inside_slices_and_then_between_them(run):
    """Weights of 4 MiB, on two slices of four chips: a chip sends a quarter of the sum of its slice, and gets one."""
    chip, nbytes = CHIPS["v6e"], 4 * 1024 * 1024
    mesh, P = sharding.make_mesh(8, 1, 1, devices=topology_devices("2xv6e:2x2")), PartitionSpec
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=sharding.named(mesh, ("batch", None), (64, 1024), "x"))
    step = jax.jit(jax.grad(lambda w, x: jnp.square(jnp.tanh(x @ w)).mean()), out_shardings=w.sharding)
    how = {"on": mesh, "chip": chip, "runs": 1, "flops": 0, "compile_s": 0.0}
    found = analyse("step", step.lower(w, x).compile(), **how)
    assert found.collectives["all-reduce between slices"] == Traffic(1, nbytes // 4, nbytes // 4)
    assert found.collectives["reduce-scatter"].tensor_bytes == found.collectives["all-gather"].tensor_bytes == nbytes
    inside = 2 * 3 / 4 * nbytes / chip.link
    assert found.wire_s + found.hidden_s == pytest.approx(inside + nbytes / 4 / chip.network)


@pytest.mark.further
def test_weights_are_gathered_inside_slices(run, capsys):
    command = ["plan", "--train", "--topology", "2xv6e:2x2", "--mesh", "8,1,1,fsdp", "--method", "full", "--batch", "8"]
    assert cli.main([*command, "--num-frames", "9", "--json", "--quiet"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["stages"]
    weights = sum(leaf.size for leaf in jax.tree.leaves(run.manifest.abstract("transformer"))) * 4
    between = {kind: traffic for kind, traffic in row["collectives"].items() if kind.endswith("between slices")}
    assert list(between) == ["all-reduce between slices"]
    assert weights / 4 < between["all-reduce between slices"]["tensor_bytes"] < 1.5 * weights / 4


def test_a_training_step(run, capsys):
    """Two clips on two chips of four: on each the work of one, whose weights' gradients are summed."""
    command = ["plan", "--train", "--topology", "v6e:2x2", "--mesh", "2,1,1", "--rank", "4", "--batch", "2", "--quiet"]
    assert cli.main([*command, "--num-frames", "9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["stages"]
    assert row["name"] == "train" and row["clips"] == 2 and row["runs"] == 1 and found["fits"] is row["fits"] is True
    assert row["argument_gib"] + row["temp_gib"] <= row["hbm_gib_per_chip"] < 1 and row["flops"] > 0 < row["compile_s"]
    assert row["mfu"] == pytest.approx(row["flops"] / (2 * CHIPS["v6e"].flops * row["estimated_s"]))
    assert found["estimated_s"] == row["estimated_s"] > 0 and "all-reduce" in row["collectives"]
    assert found["size"]["num_frames"] == 9 and found["mesh"] == [2, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "8"], "--rank is of training; add --train"),
        (["--train", "--steps", "8"], "--num-inference-steps: not of training; name the stages of a video too"),
        (["--train", "--mesh", "1,2,4"], "attention heads of the transformer of shape (30,): 30 does not divide"),
        (["--train", "--mesh", "2,4,1"], "the clips of a micro-batch of shape (1,): 1 does not divide"),
        (["--train", "--topology", "h100", "--mesh", "1,2,1"], "a plan for h100 is of one GPU"),
    ],
)
def test_training_that_cannot_be_is_refused_before_compiling(run, capsys, monkeypatch, options, message):
    monkeypatch.setattr("cogvideox_flax.training.forecast.compile_for", lambda *_: pytest.fail("it was compiled"))
    assert cli.main(["plan", "--release", "cogvideox-2b", "--quiet", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_without_a_mesh_training_has_the_first_that_fits(run, capsys, monkeypatch):
    """Clips beside each other as far as they go, then tokens, then weights are split."""
    tried = []

    def of_mesh(job, loss_of, target):
        tried.append((job.config.mesh, job.config.loop.accumulate))
        fits = job.config.mesh == "2,4,1,fsdp"
        values = vars(unmodelled(40.0, 0.0, 0.0, 0.0)) | {"fits": fits, "clips": 4, "mfu": 0.0}
        return job, StepForecast(**values), None

    monkeypatch.setattr("cogvideox_flax.cli.train.first_fit", of_mesh)
    assert cli.main(["plan", "--train", "--release", "cogvideox-5b", "--batch", "4", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["mesh"] == [2, 4, 1, True]
    assert tried == [
        ("4,2,1", 1), ("2,4,1", 2), ("1,8,1", 4), ("4,2,1,fsdp", 1), ("2,4,1,fsdp", 2)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 10**12, "9" * 5000])
def test_a_count_of_prompts_beyond_all_machines(capsys, count):
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--release", "cogvideox-2b", "--prompts", str(count)])
    assert ended.value.code == 2 and "expected a whole number from 1 to 10000" in capsys.readouterr().err


@pytest.mark.parametrize("mesh", [["--mesh", "1,1,1"], []])
def test_float16_is_refused_before_compiling(mesh, capsys, monkeypatch):
    monkeypatch.setattr("cogvideox_flax.plan.forecasting._on_tpu", lambda *_: pytest.fail("something was compiled"))
    command = ["plan", "--dtype", "float16", "--release", "cogvideox-2b", "--topology", "v6e:1x1", *mesh]
    assert cli.main(command) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: float16 is not served on TPUs")


def test_a_release_is_known_before_there_is_a_checkpoint():
    manifest = Manifest.of_release(RELEASES["cogvideox-2b"])
    assert manifest.release is RELEASES["cogvideox-2b"] and not manifest.weights


# --- bytes over links ---


def test_an_exchange_in_a_square_takes_half_the_time_of_one_in_a_row():
    row, square = [(0, i) for i in range(4)], [(0, 0), (0, 1), (1, 1), (1, 0)]
    assert busiest(exchange(row, 8.0)) == 8  # the middle link: two chips on either side, a quarter for each
    assert busiest(exchange(square, 8.0)) == 4
    assert busiest(exchange(square[:1], 8.0)) == 0


def test_a_ring_closes_over_the_other_direction_of_its_links():
    assert busiest(ring([(0, i) for i in range(4)], 8.0)) == 6
    assert busiest(ring([(0, 0)], 8.0)) == 0


def test_messages_that_share_a_link_add_up():
    assert busiest([((0, 0), (0, 2), 3.0), ((0, 1), (0, 2), 4.0)]) == 7
    assert busiest([((0, 0), (0, 1), 3.0), ((0, 1), (0, 0), 4.0)]) == 4
    assert busiest([((0, 0), (1, 1), 1.0)]) == 1
    assert busiest([]) == 0


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['dp'=2,'sp'=2,'tp'=2] {'dp','tp'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("dimensions={0}", [[0]]),
    ],
)
def test_who_takes_part(text, groups):
    assert groups_of(text) == groups


def test_links_of_a_compiled_program():
    mesh, P = sharding.make_mesh(1, 2, 4), PartitionSpec
    exchange = jax.shard_map(
        lambda x: jax.lax.all_to_all(x, "tp", 1, 0, tiled=True), mesh=mesh, in_specs=P("tp"), out_specs=P(None, "tp")
    )
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("tp")))
    program = Program(jax.jit(exchange).lower(x).compile().as_text())
    share = 16 * 32 * 4 // 4
    rows = [(i // 4, i % 4) for i in range(8)]
    squares = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    for places, want in ((rows, share), (squares, share / 2)):
        assert sum(times * Links(places).busiest_bytes(op) for _, op, times in program.run()) == want


def test_a_collective_stands_under_what_the_schedule_runs_beside_it():
    """Two exchanges in each of five rounds: one beside a copy, which takes 2 ms, and one that the program waits for."""
    program = Program(
        """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %x = f32[100,1640000]{1,0} iota(), iota_dimension=0
  %start = ((f32[8]), f32[8]) all-to-all-start(%x), replica_groups={{0,1}}
  %y = f32[5,82000]{1,0} copy(%x)
  %done = f32[8] all-to-all-done(%start)
  %z = f32[8] all-to-all(%done), replica_groups={{0,1}}
  ROOT %out = (s32[], f32[8]) tuple(%p, %z)
}

ENTRY %main (q: (s32[], f32[8])) -> (s32[], f32[8]) {
  %q = (s32[], f32[8]) parameter(0)
  ROOT %loop = (s32[], f32[8]) while(%q), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""
    )
    chip = dataclasses.replace(CHIPS["v6e"], bandwidth=(4 * 100 * 1_640_000 + 4 * 5 * 82_000) / 2e-3)
    seconds = lambda op: 3e-3 if op.kind in ("all-to-all-start", "all-to-all") else 0.0  # noqa: E731
    waited, hidden = waits(program, chip, seconds)
    assert waited == pytest.approx(5 * (1e-3 + 3e-3)) and hidden == pytest.approx(5 * 2e-3)
    assert sum(part.seconds for part in parts(program, chip)) == pytest.approx(5 * 2e-3)


@pytest.mark.parametrize(("start", "rounds"), [("constant(0)", 5), ("constant(1)", 4), ("parameter(1)", 5)])
def test_a_loop_runs_from_what_it_is_called_with(start, rounds):
    """XLA may run the first iteration before the loop."""
    program = Program(
        f"""
%condition (c: (f32[8], s32[])) -> pred[] {{
  %bound = s32[] constant(5)
  %c = (f32[8], s32[]) parameter(0)
  %counter = s32[] get-tuple-element(%c), index=1
  ROOT %less = pred[] compare(%counter, %bound), direction=LT
}}

%body (b: (f32[8], s32[])) -> (f32[8], s32[]) {{
  ROOT %b = (f32[8], s32[]) parameter(0)
}}

ENTRY %main (x: f32[8], y: s32[]) -> (f32[8], s32[]) {{
  %x = f32[8] parameter(0)
  %first = s32[] {start}
  %copy = s32[] copy(%first)
  %arguments = (f32[8], s32[]) tuple(%x, %copy)
  ROOT %loop = (f32[8], s32[]) while(%arguments), condition=%condition, body=%body
}}
"""
    )
    assert {op.name: times for _, op, times in program.run()}["b"] == rounds


FUSED = """
%all-reduce-scatter (a: f32[8,16]) -> f32[2,16] {
  %a = f32[8,16]{1,0} parameter(0)
  %sum = f32[8,16]{1,0} all-reduce(%a), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %own = f32[2,16]{1,0} dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={2,16}
}

%begin (w: f32[2,16]) -> (f32[2,16], f32[8,16]) {
  %w = f32[2,16]{1,0} parameter(0)
  %g = f32[8,16]{1,0} all-gather(%w), channel_id=2, replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="0"}
  ROOT %c = (f32[2,16], f32[8,16]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%beside (w2: f32[2,16], g2: f32[8,16], x2: f32[32,32]) -> (f32[32,32], f32[2,16], f32[8,16]) {
  %w2 = f32[2,16]{1,0} parameter(0)
  %g2 = f32[8,16]{1,0} parameter(1)
  %x2 = f32[32,32]{1,0} parameter(2)
  %y2 = f32[32,32]{1,0} convolution(%x2, %x2), dim_labels=bf_io->bf
  %s2 = f32[8,16]{1,0} all-gather(%w2), channel_id=2, replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="0"}
  ROOT %t2 = (f32[32,32], f32[2,16], f32[8,16]) tuple(%y2, %w2, %s2)
}

%end (w3: f32[2,16], g3: f32[8,16]) -> f32[8,16] {
  %w3 = f32[2,16]{1,0} parameter(0)
  %g3 = f32[8,16]{1,0} parameter(1)
  %s3 = f32[8,16]{1,0} all-gather(%w3), channel_id=2, replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="0"}
  ROOT %c3 = f32[8,16]{1,0} custom-call(%w3, %g3, %s3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: f32[8,16], v: f32[2,16], y: f32[32,32]) -> (f32[2,16], f32[8,16]) {
  %x = f32[8,16]{1,0} parameter(0)
  %v = f32[2,16]{1,0} parameter(1)
  %y = f32[32,32]{1,0} parameter(2)
  %scattered = f32[2,16]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter
  %f1 = (f32[2,16], f32[8,16]) fusion(%v), kind=kCustom, calls=%begin
  %i1 = f32[2,16]{1,0} get-tuple-element(%f1), index=0
  %i2 = f32[8,16]{1,0} get-tuple-element(%f1), index=1
  %f2 = (f32[32,32], f32[2,16], f32[8,16]) fusion(%i1, %i2, %y), kind=kOutput, calls=%beside, \
backend_config={"estimated_cycles":"1750000"}
  %i3 = f32[2,16]{1,0} get-tuple-element(%f2), index=1
  %i4 = f32[8,16]{1,0} get-tuple-element(%f2), index=2
  %f3 = f32[8,16]{1,0} fusion(%i3, %i4), kind=kCustom, calls=%end
  ROOT %out = (f32[2,16], f32[8,16]) tuple(%scattered, %f3)
}
"""
"""As libtpu writes them: a reduce-scatter; and a gather that begins, goes on beside a product of 1 ms, and ends."""


def test_collectives_inside_fusions():
    program, chip = Program(FUSED), CHIPS["v6e"]
    whole = 8 * 16 * 4
    assert collectives(program) == {
        "reduce-scatter": Traffic(1, whole, whole * 3 // 4),
        "all-gather": Traffic(1, whole, whole * 3 // 4),
    }
    links = Links([(i, 0) for i in range(4)])
    sent = [sum(map(links.busiest_bytes, started_by(program, op))) for _, op, _ in program.run()]
    assert sum(sent) == 2 * whole * 3 / 4 and sum(nbytes > 0 for nbytes in sent) == 2
    waited, hidden = waits(program, chip, lambda op: 3e-3 if started_by(program, op) else 0.0)
    assert waited == pytest.approx(3e-3 + 2e-3, rel=1e-3) and hidden == pytest.approx(1e-3, rel=1e-3)
    assert sum(part.seconds for part in parts(program, chip)) == pytest.approx(1e-3, rel=1e-3)


def test_rates_are_of_the_kind_of_chip():
    """A head fills twice the share of a matrix unit of half the size; convolutions alike."""
    lines = """
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %k = bf16[4,64,128]{{2,1,0}} custom-call(%x), custom_call_target="tpu_custom_call", \
metadata={{op_name="{name}"}}, backend_config={{"flops":"918000000000","bytes_accessed":"1"}}
}}
"""
    for name, rates in (("cogvideox_splash", ATTENTION_RATES), ("cogvideox_splash_backward", BACKWARD_RATES)):
        program = Program(lines.format(name=name))
        wide, narrow = (sum(part.seconds for part in parts(program, CHIPS[kind])) for kind in ("v6e", "v5p"))
        assert wide == pytest.approx(1e-3 / rates[64]) and narrow == pytest.approx(2e-3 / rates[128])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("jit(train_step)/jvp()/while/body/closed_call/cogvideox_splash/pallas_call custom-call", "attention, forward"),
        ("jit(train_step)/transpose(jvp())/while/body/checkpoint/cogvideox_splash_backward/x", "attention, backward"),
        ("jit(s)/transpose(jvp())/while/rematted_computation/cogvideox_splash/x", "attention, recomputed"),
        ("jit(s)/transpose(jvp())/while/body/checkpoint/adapter/dot_general fusion", "adapters, backward"),
        ("jit(s)/jvp()/while/body/closed_call/adapter/dot_general fusion", "adapters, forward"),
        ("jit(s)/transpose(jvp())/rematted_computation/dot_general fusion", "products, recomputed"),
        ("jit(s)/transpose(jvp())/while/body/checkpoint/reduce_sum fusion", "other, backward"),
        ("jit(train_step)/mul fusion f32[3072]", "optimizer"),
        ("copy-done bf16[1,17792,1920]", "copies without a name"),
    ],
)
def test_kinds_of_operations_of_a_training_step(name, kind):
    assert tpu_aot.kind_of(name) == kind


def test_a_choice_that_says_how_often_it_is_made():
    """In its jaxpr and in HLO: a product in a quarter of four rounds."""

    def f(x, n):
        def body(x, i):
            with runs_in(0.25):
                return jax.lax.cond(i < n, lambda x: x @ x, lambda x: x, x), None

        return jax.lax.scan(body, x, jnp.arange(4))[0]

    args = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    assert count_flops(f, *args).total == 2 * 64**3
    hlo = Program(jax.jit(f).lower(*args).compile().as_text())
    counts = [
        times for _, op, times in hlo.run() if "/dot_general" in op.text and op.kind in ("dot", "fusion", "custom-call")
    ]
    assert sum(counts) == 1
    assert share_of("a/runs_in_0.25/cond/branch_1_fun/add") is None and share_of("decode/runs_in_0.25") == 0.25
