"""The comparison's own arithmetic; what it measures takes too long for a test."""

from __future__ import annotations

import pytest

from benchmarks.runner import cpu, machine
from benchmarks.vs_diffusers import __main__ as vs
from benchmarks.vs_diffusers.cases import RELEASED, Case, inputs
from benchmarks.vs_diffusers.report import slopes_of
from benchmarks.vs_diffusers.worker import Stopped, Worker


def case(part, release="cogvideox-5b", height=480, width=720, frames=13):
    return Case(part, release, height, width, frames, 2, "float32", "cpu", False)


def test_sizes_are_those_of_the_releases():
    first, second, third = (case("transformer", *size) for size in RELEASED)
    assert (first.frames, first.denoised_frames, first.tokens) == (49, 13, 17_776)
    assert (second.frames, second.denoised_frames, second.tokens) == (81, 22, 45_106)
    assert (third.frames, third.denoised_frames, third.tokens) == (121, 31, 1256 + 31 * 30 * 53)


def test_only_the_transformer_sees_the_frame_that_fills_up():
    small = {"release": "cogvideox1.5-5b", "height": 32, "width": 48, "frames": 3}
    assert inputs(case("transformer", **small))["latents"].shape == (1, 4, 4, 6, 16)
    assert inputs(case("decode", **small))["latents"].shape == (1, 3, 4, 6, 16)
    assert inputs(case("encode", **small))["video"].shape == (1, 9, 32, 48, 3)


def test_hunyuans_inputs_are_latents_with_their_condition_and_a_padded_prompt():
    found = inputs(case("transformer", RELEASED[2][0], height=64, width=96, frames=3))
    assert found["latents"].shape == (1, 3, 4, 6, 65) and found["text"].shape == (2, 1000, 3584)
    assert found["text_mask"].sum(1).tolist() == [200, 200] and not found["glyph_mask"].any()
    assert inputs(case("decode", RELEASED[2][0], height=64, width=96, frames=3))["latents"].shape == (1, 3, 4, 6, 32)


def test_slopes_are_of_several_sizes():
    rows = [
        {"part": "decode", "frames": n, "tokens": 0}
        | {
            f"{side}_{unit}": factor * n + 1
            for side, factor in (("ours", 2), ("diffusers", 3))
            for unit in ("s", "gib")
        }
        for n in (9, 17, 25)
    ]
    assert slopes_of("decode", rows)["ours s per frame"] == pytest.approx(2)
    assert slopes_of("decode", rows)["diffusers gib per frame"] == pytest.approx(3)
    assert slopes_of("decode", rows[:1]) == {} and slopes_of("encode", rows) == {}


@pytest.mark.parametrize(
    ("info", "found"),
    [
        ("processor\t: 0\nmodel name\t: A: B\nflags\t\t: fpu avx avx2 fma\n", {"cpu": "A: B", "vectors": "avx2"}),
        ("model name\t: C\nflags\t\t: avx2 avx512f\nmodel name\t: C\n", {"cpu": "C", "vectors": "avx512f"}),
        ("model name\t: D\nFeatures\t: fp asimd\n", {"cpu": "D", "vectors": "asimd"}),
    ],
)
def test_a_machine_says_how_wide_it_multiplies(info, found):
    assert cpu(info) == found
    assert cpu("")["vectors"] is None and cpu("")["cpu"]
    assert {"cpu", "vectors", "cores", "python", "jax"} <= set(machine(("jax",)))


def test_a_side_that_stops_says_when_and_how(tmp_path):
    worker = Worker("ours", tmp_path, case("decode"))  # a folder without weights: it ends at once
    for _ in range(2):  # also when it is asked again
        with pytest.raises(Stopped, match="ours stopped at 'load': exit status 1"):
            worker.start()
    assert vs.alone(worker) == {}


class Side:
    """A worker that needs no process: its runs take the seconds that it was given, or end it."""

    def __init__(self, side, folder, case):
        self.side, self.first = side, 0.0

    def loaded(self):
        pass

    def start(self):
        if self.side == "diffusers":
            raise Stopped(self.side, "diffusers stopped at 'first': killed, as when memory ends")
        self.first = 5.0

    def run(self):
        return 2.0

    def peak(self):
        return 1.5

    def kill(self):
        pass


def test_where_one_side_stops_the_other_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(vs, "Worker", Side)
    with pytest.raises(Stopped, match="killed") as stopped:
        vs.compare(case("decode"), tmp_path, 3)
    assert stopped.value.alone == {"ours_s": 2.0, "ours_gib": 1.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--latent-frames", "3", "4"], "must be odd"),
        (["--released", "--layers", "3"], "says sizes and layers itself"),
        (["--release", RELEASED[2][0], "--parts", "video", "decode"], "video: compared for CogVideoX alone"),
    ],
)
def test_refuses(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        vs.main(options)
    assert message in capsys.readouterr().err
