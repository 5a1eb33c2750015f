"""The procedural world: deterministic, truthful prompts, combinations that training never shows."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from weights.toy_world import world
from weights.toy_world.judge.claims import read_prompt
from weights.toy_world.world import Scene, Thing


def scenes(n, split="train"):
    for i in range(n):
        rng = np.random.default_rng([7, i])
        yield world.sample_scene(rng, split), rng


def test_a_clip_is_a_function_of_seed_and_index():
    first, again, other = (world.sample_clip(*where) for where in ((3, 5), (3, 5), (3, 6)))
    assert np.array_equal(first.video, again.video) and first.prompt == again.prompt
    assert not np.array_equal(first.video, other.video)
    assert first.video.shape == (world.FRAMES, 64, 64, 3) and first.video.dtype == np.uint8


def test_training_never_shows_a_held_out_combination():
    seen = [thing for scene, _ in scenes(3000) for thing in scene.things]
    assert not any(map(world.held_out, seen))
    firsts = [scene.things[0] for scene, _ in scenes(500, "held_out")]
    assert all(map(world.held_out, firsts))


def test_held_out_is_a_sixth_and_leaves_every_pair_of_values_in_training():
    every = world.combinations()
    out = [c for c in every if world.held_out(Thing(*c, None))]
    assert len(out) * 6 == len(every)
    trained = set(every) - set(out)
    for i, j in combinations(range(4), 2):
        assert {(c[i], c[j]) for c in trained} == {(c[i], c[j]) for c in every}


@pytest.mark.parametrize("split", ["train", "held_out", "any"])
def test_prompts_are_true(split):
    for scene, rng in scenes(300, split):
        prompt = world.describe(scene, rng)
        claims = read_prompt(prompt)
        assert len(claims.things) == len(scene.things), prompt
        assert claims.background in (None, scene.background), prompt
        for claim, thing in zip(claims.things, scene.things, strict=True):
            assert (claim.colour, claim.shape, claim.motion) == (thing.colour, thing.shape, thing.motion), prompt
            assert claim.size in (None, thing.size) and claim.speed in (None, thing.speed), prompt


def test_brief_prompts_leave_out_anything_but_shapes():
    """As people write them, and still true of what they state."""
    prompts = []
    for scene, rng in scenes(600):
        prompt = world.describe(scene, rng, brief=1.0)
        prompts.append(prompt)
        if all(thing.colour in prompt for thing in scene.things):
            for claim, thing in zip(read_prompt(prompt).things, scene.things, strict=True):
                assert claim.shape == thing.shape and claim.motion in (None, thing.motion), prompt
                assert claim.size in (None, thing.size) and claim.speed in (None, thing.speed), prompt
    lengths = [len(prompt.split()) for prompt in prompts]
    assert min(lengths) <= 2 and np.mean(np.array(lengths) <= 3) > 0.15
    assert "a red circle" in prompts or "a red ball" in prompts
    assert not any(prompt.endswith(("a", "an")) or "  " in prompt for prompt in prompts)


def test_wording_varies():
    scene = Scene((Thing("red", "circle", "small", "right", "slowly"),), "black")
    prompts = {world.describe(scene, np.random.default_rng(i)) for i in range(200)}
    assert len(prompts) > 100
    words = {word for prompt in prompts for word in prompt.split()}
    assert {"circle", "ball", "small", "little", "moves", "sliding", "slowly", "against", "on"} <= words


def test_things_stay_inside_the_frame_and_apart():
    pairs = 0
    for scene, rng in scenes(400):
        tracks = world.place(scene, rng)
        if tracks is None:
            continue
        for thing, track in zip(scene.things, tracks, strict=True):
            alone = Scene((thing,), "black")
            video = world.render(alone, (track,)).astype(int)
            light = abs(video - world.BACKGROUNDS["black"]).sum(-1)
            edge = max(light[:, [0, -1]].max(), light[:, :, [0, -1]].max())
            assert edge < 0.5 * light.max()  # no more than the smoothing of a corner
            assert light.sum((1, 2)).min() > 0.97 * light.sum((1, 2)).max()  # the same area in every frame
        if len(tracks) == 2:
            pairs += 1
            a, b = (world.render(Scene((t,), "black"), (k,)) for t, k in zip(scene.things, tracks, strict=True))
            assert not ((a.max(-1) > 40) & (b.max(-1) > 40)).any()
    assert pairs > 20


def test_areas_are_as_said():
    for size, radius in world.SIZES.items():
        for shape in world.SHAPES:
            scene = Scene((Thing("white", shape, size, "still", None),), "black")
            colours = dict(world.COLOURS, white=(255, 255, 255))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(world, "COLOURS", colours)
                patch.setattr(world, "BACKGROUNDS", {"black": (0, 0, 0)})
                track = world.Track(radius, (32.0, 32.0), (0.0, 0.0))
                area = world.render(scene, (track,), frames=1)[0, ..., 0].sum() / 255
                assert area == pytest.approx(world.AREAS[shape] * radius**2, rel=0.03), (shape, size)
                assert (
                    world.render(scene, (track,), frames=1)[0, 32, :, 0] > 127
                ).sum() == 2 * radius or shape == "triangle"


def test_every_fourth_frame_is_on_the_grid():
    moved = set()
    for thing in (Thing("red", *rest, "quickly") for rest in product(world.SHAPES, world.SIZES, world.MOTIONS)):
        thing = replace(thing, speed=None) if thing.motion == "still" else thing
        tracks = [world.place(Scene((thing,), "black"), np.random.default_rng(i)) for i in range(20)]
        for (track,) in (found for found in tracks if found is not None):
            for frame in range(0, world.FRAMES, 4):
                where = np.array(track.start) + frame * np.array(track.velocity)
                assert not (where % world.GRID).any(), thing
            moved.add((thing.shape, thing.size, thing.motion))
    assert len(moved) == len(world.SHAPES) * len(world.SIZES) * len(world.MOTIONS)  # each fits the frame somewhere


def test_corners_are_where_a_square_is_more_than_its_circle():
    """Of every cell of 8x8 pixels and four frames, as drawn."""
    thing = Thing("red", "square", "small", "right", "quickly")
    tracks = (world.Track(8.0, (20.0, 28.0), (2.0, 0.0)),)
    square, circle = (
        world.render(Scene((replace(thing, shape=shape),), "black"), tracks)[..., 0].astype(float)
        for shape in ("square", "circle")
    )
    drawn = (square - circle) / np.ptp(square)
    cells = drawn.reshape(-1, 8, 8, 8, 8).mean((2, 4))
    expected = np.stack([cells[0], *(cells[i : i + 4].mean(0) for i in range(1, len(cells), 4))])
    np.testing.assert_allclose(world.corners(tracks), expected, atol=0.03)  # its edges are not smooth
    assert expected.max() > 0.15


def test_scales_with_the_frame():
    scene, rng = next(scenes(1))
    tracks = world.place(scene, rng)
    small, large = (world.render(scene, tracks, size=size).astype(float) for size in (64, 128))
    halved = large.reshape(world.FRAMES, 64, 2, 64, 2, 3).mean((2, 4))
    assert abs(halved - small).mean() < 1


def test_crowded_clips_are_crowded():
    clips = [world.crowded_clip(1, i) for i in range(20)]
    covered = [(clip[0] != clip[0, 0, 0]).any(-1).mean() for clip in clips]
    sparse = [(clip[0] != clip[0, 0, 0]).any(-1).mean() for clip in (world.sample_clip(1, i).video for i in range(20))]
    assert np.mean(covered) > 2.5 * np.mean(sparse)
    assert np.array_equal(clips[3], world.crowded_clip(1, 3))
