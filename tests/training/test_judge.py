"""The judge of generated clips: right on true and on damaged clips, and not to be fooled."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from benchmarks.fidelity import psnr, ssim
from cogvideox_flax.errors import InputError
from weights.toy_world.judge.claims import Claims, ThingClaims, read_prompt
from weights.toy_world.judge.score import ATTRIBUTES, OVERLAPS, compare, drawn, rates, score, wilson
from weights.toy_world.judge.seeing import SeenThing, see
from weights.toy_world.world import (
    BACKGROUNDS,
    COLOURS,
    FRAMES,
    MOTIONS,
    SHAPES,
    Scene,
    Thing,
    Track,
    describe,
    render,
    sample_clip,
)

SEED = 20_000_001
FLIPS = {"right": "left", "left": "right", "up": "down", "down": "up", "still": "still"}


@pytest.fixture(scope="module")
def clips():
    return [sample_clip(SEED, i, ("train", "held_out")[i % 2]) for i in range(200)]


@pytest.fixture(scope="module")
def seen(clips):
    return [see(clip.video) for clip in clips]


def blurred(video, sigma):
    offsets = np.arange(-5, 6)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    weights /= weights.sum()
    for axis in (1, 2):
        padded = np.pad(video, [(5, 5) if a == axis else (0, 0) for a in range(4)], mode="edge")
        size = video.shape[axis]
        video = sum(w * padded.take(range(i, i + size), axis) for i, w in enumerate(weights))
    return video


def damaged(video, rng):
    noisy = blurred(video.astype(np.float32), 1.2) + rng.normal(0, 8, video.shape) + rng.uniform(-15, 15)
    return np.rint(noisy.clip(0, 255)).astype(np.uint8)


def film(*things, background="gray", radii=(), starts=((32.0, 32.0),), size=64):
    """A clip of things whose tracks are given: (colour, shape, velocity)."""
    named = tuple(Thing(colour, shape, "small", "still", None) for colour, shape, _ in things)
    tracks = tuple(
        Track(radius, start, velocity)
        for (_, _, velocity), start, radius in zip(things, starts, radii or (6.6,) * len(things), strict=True)
    )
    return render(Scene(named, background), tracks, size=size)


def facts(scene):
    """The scene as it would be seen without fault."""
    things = sorted((SeenThing(**vars(thing)) for thing in scene.things), key=lambda t: list(COLOURS).index(t.colour))
    return scene.background, tuple(things)


def at_least(found, percent):
    assert set(found) == set(ATTRIBUTES) - set(OVERLAPS)
    wrong = {name: rate for name, rate in found.items() if rate.percent < percent}
    assert not wrong


def test_true_clips_are_right_in_every_attribute(clips, seen):
    at_least(rates(compare(s, read_prompt(c.prompt)) for s, c in zip(seen, clips, strict=True)), 99)


def test_everything_is_seen_not_only_what_prompts_claim(clips, seen):
    agree = [(s.background, s.things) == facts(c.scene) for s, c in zip(seen, clips, strict=True)]
    assert np.mean(agree) >= 0.99


@pytest.mark.further
def test_damaged_clips_are_still_right(clips):
    rng = np.random.default_rng(0)
    at_least(rates(score(damaged(c.video, rng), c.prompt) for c in clips[:120]), 97)


def test_any_frame_size(clips):
    big = [np.repeat(np.repeat(c.video, 2, 1), 2, 2) for c in clips[:6]]
    assert all(score(video, c.prompt)["all"] for video, c in zip(big, clips, strict=False))


def test_time_reversed_is_the_opposite_direction(clips, seen):
    for clip, before in zip(clips[:30], seen, strict=False):
        after = see(clip.video[::-1])
        assert after.things == tuple(replace(t, motion=FLIPS[t.motion]) for t in before.things)


@pytest.mark.parametrize(("axis", "swapped"), [(1, ("up", "down")), (2, ("left", "right"))])
def test_mirrored(clips, seen, axis, swapped):
    for clip, before in zip(clips[:30], seen, strict=False):
        after = see(np.flip(clip.video, axis))
        flips = {way: FLIPS[way] if way in swapped else way for way in MOTIONS}
        assert after.things == tuple(replace(t, motion=flips[t.motion]) for t in before.things)


@pytest.mark.parametrize("level", [0, 12, 125, 242, 255])
def test_blank_holds_nothing(level):
    video = np.full((FRAMES, 64, 64, 3), level, np.uint8)
    found = score(video, "a small red circle stays still on a gray background")
    assert see(video).things == ()
    assert not any(found[name] for name in ("colour", "shape", "size", "direction", "count", "all"))
    assert found["background"] == (level == 125)


def test_noise_holds_nothing():
    video = np.random.default_rng(0).integers(0, 256, (FRAMES, 64, 64, 3)).astype(np.uint8)
    assert not any(score(video, "a large red circle moves up")[name] for name in ("colour", "shape", "size", "all"))


def test_frames_out_of_order_have_no_direction(clips):
    order = np.random.default_rng(1).permutation(FRAMES)
    moving = [c for c in clips if len(c.scene.things) == 1 and c.scene.things[0].motion != "still"][:20]
    for clip in moving:
        found = score(clip.video[order], clip.prompt)
        assert not found["direction"] and found["colour"] and found["shape"]


def test_jitter_is_no_motion():
    rng = np.random.default_rng(2)
    for sigma in (2.0, 4.0):
        for _ in range(10):
            still = film(("red", "circle", (0.0, 0.0)))
            moves = np.rint(rng.normal(0, sigma, (FRAMES, 2))).astype(int).clip(-20, 20)
            video = np.stack([np.roll(f, m, (0, 1)) for f, m in zip(still, moves, strict=True)])
            (thing,) = see(video).things
            assert thing.motion is None and thing.colour == "red"


def test_diagonal_is_no_direction():
    (thing,) = see(film(("red", "circle", (1.0, 1.0)), starts=((16.0, 16.0),))).things
    assert thing == SeenThing("red", "circle", "small", None, None)


def test_another_colour_is_seen(clips):
    for clip in clips[:40]:
        shown = np.roll(clip.video, 1, -1)  # red becomes green, and so on
        assert not score(shown, clip.prompt)["colour"]


@pytest.mark.parametrize("shape", SHAPES)
def test_half_the_area_is_another_size(shape):
    large = film(("blue", shape, (0.0, 0.0)), radii=(11.0,))
    half = film(("blue", shape, (0.0, 0.0)), radii=(11.0 / 2**0.5,))
    smaller = film(("blue", shape, (0.0, 0.0)), radii=(6.6 / 2**0.5,))
    assert [see(v).things[0].size for v in (large, half, smaller)] == ["large", "small", None]


@pytest.mark.parametrize("copy", ["red", "blue"])
def test_one_object_too_many(copy):
    still = (0.0, 0.0)
    video = film(("red", "circle", still), (copy, "circle", still), starts=((16.0, 32.0), (48.0, 32.0)))
    found = score(video, "a small red circle stays still")
    assert found == {"colour": True, "shape": True, "size": True, "direction": True, "count": False, "all": False}


def test_one_object_too_few():
    video = film(("red", "circle", (0.0, 0.0)))
    found = score(video, "a red circle stays still and a blue circle stays still")
    assert not any(found.values())


def test_a_colourless_blob_counts():
    video = film(("red", "circle", (0.0, 0.0)), background="black", starts=((16.0, 32.0),))
    assert score(video, "a red circle stays still")["all"]
    video[:, 20:32, 40:52] = 200
    assert not score(video, "a red circle stays still")["count"]


def test_a_faint_ghost_and_a_smear_do_not_count():
    video = film(("red", "circle", (0.0, 0.0)), background="black", starts=((16.0, 32.0),)).astype(np.float32)
    ghost = np.roll(video, 30, 2)
    video += 0.25 * (ghost - ghost[:, :1, :1])
    video[:, 50:60, 10:50] += 30
    assert score(video.astype(np.uint8), "a small red circle stays still")["all"]


def test_a_change_of_colour_or_shape_fails():
    red, blue = (film((colour, "circle", (0.0, 0.0))) for colour in ("red", "blue"))
    half = FRAMES // 2
    for prompt in ("a red circle stays still", "a blue circle stays still"):
        found = score(np.concatenate([red[:half], blue[half:]]), prompt)
        assert not found["colour"] and not found["count"] and not found["all"]
    square = film(("red", "square", (0.0, 0.0)))
    assert see(np.concatenate([red[:half], square[half:]])).things[0].shape is None


def test_seen_in_a_few_frames_only_fails():
    video = film(("red", "circle", (0.0, 0.0)))
    video[:6] = BACKGROUNDS["gray"]
    found = score(video, "a small red circle stays still on a gray background")
    assert [name for name, right in found.items() if right] == ["background", "count"]


# --- outlines, frame by frame


def outlined(video, prompt):
    return compare(see(video, outlines=True), read_prompt(prompt))


@pytest.mark.further
def test_true_clips_are_clean(clips):
    for clip in clips[:16]:
        found = outlined(clip.video, clip.prompt)
        assert found["clear"] and found["clean"], clip.prompt


@pytest.mark.further
def test_blurred_noisy_clips_are_clear(clips):
    rng = np.random.default_rng(0)
    assert all(outlined(damaged(clip.video, rng), clip.prompt)["clear"] for clip in clips[:16])


def shaped(distance, radius=11.0):
    """A still red thing on gray, given the signed distance to its outline at (x, y) from the middle of the frame."""
    x, y = np.meshgrid(np.arange(64) - 31.5, np.arange(64) - 31.5)
    inside = np.clip(0.5 - distance(x, y, radius), 0, 1)[..., None]
    gray, red = np.array(BACKGROUNDS["gray"]), np.array(COLOURS["red"])
    return np.broadcast_to(np.rint(gray + inside * (red - gray)).astype(np.uint8), (FRAMES, 64, 64, 3))


def rounded_square(share):
    """The corners of a square cut to quarter circles, whose radius is this share of half its side."""

    def distance(x, y, radius):
        dx, dy = (np.maximum(abs(v) - radius * (1 - share), 0) for v in (x, y))
        return np.hypot(dx, dy) - radius * share

    return distance


def teardrop(length):
    """A circle with a tip at the top, `length` radii from its middle: the outer tangents of the circle meet there."""

    def distance(x, y, radius):
        sine = 1 / length
        side = abs(x) * np.sqrt(1 - sine**2) - y * sine - radius
        return np.where(y < -radius * sine, np.maximum(side, -y - length * radius), np.hypot(x, y) - radius)

    return distance


SQUARE, CIRCLE = "a large red square stays still", "a large red circle stays still"


@pytest.mark.parametrize(
    ("distance", "prompt", "clear", "clean"),
    [
        (rounded_square(0.1), SQUARE, True, True),
        (rounded_square(0.7), SQUARE, False, False),
        (rounded_square(0.7), CIRCLE, True, True),
        (teardrop(1.05), CIRCLE, True, True),
        (teardrop(1.6), CIRCLE, True, False),
        (teardrop(2.0), CIRCLE, False, False),
    ],
    ids=["nearly square", "round corners", "more circle than square", "nearly a circle", "egg", "teardrop"],
)
def test_damaged_shapes(distance, prompt, clear, clean):
    found = outlined(shaped(distance), prompt)
    assert (found["clear"], found["clean"]) == (clear, clean)


def test_what_is_blurred_out_of_shape_is_not_clear():
    for shape in ("square", "triangle"):
        video = blurred(film(("red", shape, (0.0, 0.0)), radii=(8.0,)).astype(np.float32), 5.0)
        assert not outlined(np.rint(video).astype(np.uint8), f"a red {shape} stays still")["clear"]


def test_one_bad_frame_is_seen():
    """A vote over the clip does not see it."""
    circle, square = film(("red", "circle", (0.0, 0.0))), film(("red", "square", (0.0, 0.0)))
    video = np.concatenate([circle[:5], square[:1], circle[6:]])
    prompt = "a red circle stays still"
    frames = drawn(see(video, outlines=True), read_prompt(prompt))
    assert frames["clear"] == frames["clean"] == [i != 5 for i in range(FRAMES)]
    found = outlined(video, prompt)
    assert found["shape"] and not found["clear"] and not found["clean"]


def test_two_things_are_clear_when_both_are(clips):
    clip = next(c for c in clips if len(c.scene.things) == 2)
    claims = read_prompt(clip.prompt)
    names = {thing.shape for thing in clip.scene.things}
    other = next(shape for shape in SHAPES if shape not in names)
    wrong = replace(claims, things=(claims.things[0], replace(claims.things[1], shape=other)))
    seen = see(clip.video, outlines=True)
    assert compare(seen, claims)["clear"] and not compare(seen, wrong)["clear"]


def test_what_is_not_there_is_not_clear():
    found = outlined(film(("red", "circle", (0.0, 0.0))), "a blue circle stays still and a red circle stays still")
    assert not found["clear"] and not found["clean"]


def test_no_known_shape():
    video = film(("red", "square", (0.0, 0.0)), ("red", "square", (0.0, 0.0)), starts=((28.0, 32.0), (38.0, 32.0)))
    (bar,) = see(video).things  # two squares side by side, run together
    assert bar.shape is None and bar.colour == "red"


def test_other_clips_prompts_are_right_by_chance_only(clips, seen):
    found = rates(compare(s, read_prompt(c.prompt)) for s, c in zip(seen, [*clips[7:], *clips[:7]], strict=True))
    for name, low, high in (
        *(("colour", 8, 28), ("shape", 20, 45), ("size", 30, 60)),
        *(("direction", 8, 30), ("background", 20, 47), ("all", 0, 3)),
    ):
        assert low <= found[name].percent <= high, (name, found[name])


def test_a_prompt_says_what_the_scene_holds(clips):
    for clip in clips:
        claims = read_prompt(clip.prompt)
        assert claims.background in (None, clip.scene.background)
        assert len(claims.things) == len(clip.scene.things)
        for claim, thing in zip(claims.things, clip.scene.things, strict=True):
            assert (claim.colour, claim.shape, claim.motion) == (thing.colour, thing.shape, thing.motion)
            assert claim.size in (None, thing.size) and claim.speed in (None, thing.speed)


def test_a_prompt_leaves_out_what_the_words_leave_out():
    scene = Scene((Thing("red", "circle", "small", "up", "slowly"),), "gray")
    prompts = {describe(scene, np.random.default_rng(i)) for i in range(200)}
    said = {prompt: read_prompt(prompt) for prompt in prompts}
    for prompt, claims in said.items():
        assert (claims.things[0].size is not None) == ("small" in prompt or "little" in prompt)
        assert (claims.things[0].speed is not None) == ("slowly" in prompt)
        assert (claims.background is not None) == ("gray" in prompt)
    assert len(set(said.values())) == 8


@pytest.mark.parametrize(
    ("prompt", "claims"),
    [
        ("Red ball", Claims((ThingClaims("red", "circle"),))),
        ("a BIG green square is not moving", Claims((ThingClaims("green", "square", "large", "still"),))),
        (
            "red circle moves to the right, small blue square slides upwards fast against a Grey background.",
            Claims(
                (
                    ThingClaims("red", "circle", None, "right"),
                    ThingClaims("blue", "square", "small", "up", "quickly"),
                ),
                "gray",
            ),
        ),
        (
            "on a white background a slowly rising... no, a slowly sliding up orange triangle",
            Claims((ThingClaims("orange", "triangle", None, "up", "slowly"),), "white"),
        ),
    ],
)
def test_prompts_by_hand(prompt, claims):
    assert read_prompt(prompt) == claims


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "names no shape"),
        ("a red cat", "names no shape"),
        ("a circle moves up", "gives the circle no known colour"),
        ("a red green square", "says two things about the colour of one object: green, red"),
        ("a red ball on a pink background", "must name one background of"),
        ("a red ball up down", "says two things about the motion of one object: down, up"),
    ],
)
def test_prompts_that_cannot_be_judged(prompt, message):
    with pytest.raises(InputError, match=message):
        read_prompt(prompt)


def test_unclaimed_attributes_are_absent():
    video = film(("red", "circle", (0.0, 0.0)))
    assert score(video, "red circle") == {"colour": True, "shape": True, "count": True, "all": True}


def test_bad_frames_are_refused():
    for frames in (np.zeros((17, 64, 48, 3), np.uint8), np.zeros((17, 64, 64, 3), np.float32)):
        with pytest.raises(InputError, match=r"must be uint8 .* and square"):
            see(frames)


def test_wilson_interval():
    rate = wilson(8, 10)  # 49.0 to 94.3 in published tables
    assert (rate.percent, round(rate.low, 1), round(rate.high, 1)) == (80, 49.0, 94.3)
    assert wilson(0, 5).low == pytest.approx(0, abs=1e-9) and wilson(5, 5).high == pytest.approx(100)
    assert round(wilson(5, 5).low, 1) == round(100 - wilson(0, 5).high, 1) == 56.6


def test_psnr_and_ssim(clips):
    video = clips[0].video
    assert psnr(video, video) == inf and ssim(video, video) == pytest.approx(1)
    gray, lighter = np.full((2, 16, 16, 3), 100, np.uint8), np.full((2, 16, 16, 3), 110, np.uint8)
    assert psnr(gray, lighter) == pytest.approx(28.1308, abs=1e-3)  # 20 log10(255 / 10)
    assert ssim(gray, lighter) == pytest.approx((2 * 100 * 110 + 6.5025) / (100**2 + 110**2 + 6.5025))
    one, other = np.random.default_rng(0).integers(0, 256, (2, 1, 11, 11, 1)).astype(np.uint8)  # a single window
    weights = np.exp(-((np.indices((11, 11)) - 5) ** 2).sum(0) / 4.5).ravel()
    (mx, my), ((vx, cov), (_, vy)) = (
        np.average([one.ravel(), other.ravel()], 1, weights),
        np.cov([one.ravel(), other.ravel()], aweights=weights, ddof=0),
    )
    c1, c2 = 2.55**2, 7.65**2
    expected = (2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    assert ssim(one, other) == pytest.approx(expected)
    noisy = damaged(video, np.random.default_rng(0))
    assert psnr(video, noisy) < 30 and ssim(video, noisy) < 0.8
