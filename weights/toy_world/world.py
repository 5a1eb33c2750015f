"""A procedural world: short clips of simple shapes in motion, each with a prompt that describes it.

The embedded model is trained and evaluated on it. A clip is a pure function of (seed, index). Combinations of
colour, shape, size and motion for which `held_out` is true never occur in the training split, although every pair of
values does, so that scores on them measure compositional generalisation.

Lengths are in units of a 64-pixel frame and scale with the frame; y points down, as in an image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from jaxtyping import Float, UInt8

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 35, 35),
    "green": (30, 175, 55),
    "blue": (40, 75, 230),
    "yellow": (245, 225, 40),
    "purple": (150, 45, 190),
    "orange": (250, 140, 25),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "black": (12, 12, 12),
    "gray": (125, 125, 125),
    "white": (242, 242, 242),
}
SHAPES = ("circle", "square", "triangle")
SIZES: dict[str, float] = {"small": 8.0, "large": 11.0}
"""Radius of the circle. A square is as wide as the circle; a triangle has its area."""
AREAS: dict[str, float] = {"circle": math.pi, "square": 4.0, "triangle": math.pi}
"""Of each shape, in squares of the radius. A square of the circle's area would look too similar: its latents are four
times nearer to the circle's than a triangle's are, and a small model does not separate them."""
MOTIONS: dict[str, tuple[int, int]] = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1), "still": (0, 0)}
"""Direction as (x, y)."""
SPEEDS: dict[str, float] = {"slowly": 1.0, "quickly": 2.0}
"""Pixels per frame."""

UNIT = 64.0
FRAMES = 17
GRID = 4.0
"""Centres start at multiples of this. Every fourth frame, where a latent frame ends, they are on the grid again."""
MARGIN = 1.0
"""Minimum distance between an object and the edge of the frame."""
GAP = 3.0
"""Minimum distance between the bounding boxes of two objects, over the whole clip."""

TWO_OBJECTS = 0.15
"""Share of clips with two objects."""

_CIRCUMRADIUS = math.sqrt(AREAS["triangle"] * 4 / math.sqrt(27))  # equilateral
_HALF_SIDE = math.sqrt(AREAS["square"]) / 2

Split = Literal["train", "held_out", "any"]


@dataclass(frozen=True)
class Thing:
    """One object as described in a prompt. A still thing has speed None."""

    colour: str
    shape: str
    size: str
    motion: str
    speed: str | None


@dataclass(frozen=True)
class Scene:
    """One or two things before a background."""

    things: tuple[Thing, ...]
    background: str


@dataclass(frozen=True)
class Track:
    """The motion of a thing: centre = start + t * velocity at frame t, and its radius (see SIZES)."""

    radius: float
    start: tuple[float, float]
    velocity: tuple[float, float]


Tracks = tuple[Track, ...]


@dataclass(frozen=True)
class Clip:
    """A video with the prompt that describes it, and the scene behind both."""

    video: UInt8[np.ndarray, "F H W 3"]
    prompt: str
    scene: Scene


def held_out(thing: Thing) -> bool:
    """Whether training must never show this combination of colour, shape, size and motion: one in six."""
    place = (
        list(COLOURS).index(thing.colour)
        + 2 * SHAPES.index(thing.shape)
        + 3 * list(SIZES).index(thing.size)
        + list(MOTIONS).index(thing.motion)
    )
    return place % len(COLOURS) == 0


def combinations() -> list[tuple[str, str, str, str]]:
    """Every (colour, shape, size, motion)."""
    return list(product(COLOURS, SHAPES, SIZES, MOTIONS))


def sample_thing(rng: np.random.Generator, split: Split = "train") -> Thing:
    """A thing at random, of the split."""
    while True:
        motion = str(rng.choice(list(MOTIONS)))
        thing = Thing(
            colour=str(rng.choice(list(COLOURS))),
            shape=str(rng.choice(SHAPES)),
            size=str(rng.choice(list(SIZES))),
            motion=motion,
            speed=None if motion == "still" else str(rng.choice(list(SPEEDS))),
        )
        if split == "any" or held_out(thing) == (split == "held_out"):
            return thing


def sample_scene(rng: np.random.Generator, split: Split = "train", two_objects: float = TWO_OBJECTS) -> Scene:
    """One thing, or two of different colours. In the held-out split the first thing of a scene is held out.

    two_objects: the share of scenes with two.
    """
    things = [sample_thing(rng, split)]
    if rng.random() < two_objects:
        second = things[0]
        while second.colour == things[0].colour:
            second = sample_thing(rng, "train" if split == "held_out" else split)
        things.append(second)
    return Scene(tuple(things), str(rng.choice(list(BACKGROUNDS))))


def place(scene: Scene, rng: np.random.Generator, frames: int = FRAMES, tries: int = 500) -> Tracks | None:
    """Tracks that keep every thing inside the frame and separate from the others; None if `tries` attempts fail."""
    for _ in range(tries):
        tracks = tuple(_track(thing, rng, frames) for thing in scene.things)
        if len(tracks) == 1 or _keeps_gap(scene.things, tracks, frames):
            return tracks
    return None


def render(scene: Scene, tracks: Tracks, frames: int = FRAMES, size: int = 64) -> UInt8[np.ndarray, "F H W 3"]:
    """The clip, `size` pixels square, with anti-aliased edges; later things lie in front."""
    scale = size / UNIT
    centres = (np.arange(size) + 0.5) / scale
    x, y = np.meshgrid(centres, centres)
    time = np.arange(frames)[:, None, None]
    video = np.broadcast_to(np.array(BACKGROUNDS[scene.background], np.float32), (frames, size, size, 3))
    for thing, track in zip(scene.things, tracks, strict=True):
        dx = x - (track.start[0] + time * track.velocity[0])
        dy = y - (track.start[1] + time * track.velocity[1])
        inside = np.clip(0.5 - signed_distance(thing.shape, dx, dy, track.radius) * scale, 0, 1)[..., None]
        video = video + inside.astype(np.float32) * (np.array(COLOURS[thing.colour], np.float32) - video)
    return np.rint(video).astype(np.uint8)


def corners(tracks: Tracks, frames: int = FRAMES, cell: int = 8, size: int = 64) -> Float[np.ndarray, "T h w"]:
    """The share of each latent pixel that is inside a thing's square but outside its circle.

    Computed from both outlines for every thing, so that it does not depend on the shape. frames: 4 n + 1, so
    T = n + 1; h = w = size / cell.
    """
    scale = size / UNIT
    centres = (np.arange(size) + 0.5) / scale
    covered = np.zeros((frames, size, size), bool)
    for track in tracks:
        dx, dy = (
            centres - start - np.arange(frames)[:, None] * velocity
            for start, velocity in zip(track.start, track.velocity, strict=True)
        )
        square, circle = (
            signed_distance(shape, dx[:, None], dy[:, :, None], track.radius) for shape in ("square", "circle")
        )
        covered |= (square < 0) & (circle > 0)
    cells = covered.reshape(frames, size // cell, cell, size // cell, cell).mean((2, 4))
    return np.concatenate([cells[:1], cells[1:].reshape(-1, 4, *cells.shape[1:]).mean(1)])


def sample_tracks(
    rng: np.random.Generator, split: Split = "train", frames: int = FRAMES, two_objects: float = TWO_OBJECTS
) -> tuple[Scene, Tracks]:
    """A scene of the split and its tracks; scenes that do not fit into the frame are rejected."""
    while True:
        scene = sample_scene(rng, split, two_objects)
        tracks = place(scene, rng, frames)
        if tracks is not None:
            return scene, tracks


def sample_clip(
    seed: int,
    index: int,
    split: Split = "train",
    frames: int = FRAMES,
    size: int = 64,
    two_objects: float = TWO_OBJECTS,
) -> Clip:
    """Clip number `index` of the infinite sequence with this seed, split and share of clips with two objects."""
    rng = np.random.default_rng([seed, index])
    scene, tracks = sample_tracks(rng, split, frames, two_objects)
    return Clip(render(scene, tracks, frames, size), describe(scene, rng), scene)


def tracks_of_clip(
    seed: int, index: int, split: Split = "train", frames: int = FRAMES, two_objects: float = TWO_OBJECTS
) -> tuple[Scene, Tracks]:
    """The scene and the tracks of `sample_clip`, without rendering."""
    return sample_tracks(np.random.default_rng([seed, index]), split, frames, two_objects)


def crowded_clip(seed: int, index: int, frames: int = FRAMES, size: int = 64) -> UInt8[np.ndarray, "F H W 3"]:
    """Four to seven things in any combination, which may overlap: more for an autoencoder to learn per pixel."""
    rng = np.random.default_rng([seed, index])
    things = tuple(sample_thing(rng, "any") for _ in range(rng.integers(4, 8)))
    scene = Scene(things, str(rng.choice(list(BACKGROUNDS))))
    return render(scene, tuple(_track(thing, rng, frames) for thing in things), frames, size)


def describe(scene: Scene, rng: np.random.Generator, brief: float = 0.0) -> str:
    """A prompt for the scene. Wording and word order vary; every statement is true.

    Colour, shape and motion are stated; size, speed and background may be omitted.

    brief: the share of prompts that may omit all but the shapes, as people do: "a red circle".
    """
    short = brief > 0 and rng.random() < brief
    text = " and ".join(_describe_thing(thing, rng, short) for thing in scene.things)
    if rng.random() < (0.3 if short else 0.7):
        ground = f"{_choose(rng, 'on', 'against')} a {scene.background} background"
        text = f"{ground} {text}" if rng.random() < 0.25 else f"{text} {ground}"
    return text


def _describe_thing(thing: Thing, rng: np.random.Generator, short: bool = False) -> str:
    words = [] if short and rng.random() < 0.1 else [thing.colour]
    if rng.random() < (0.4 if short else 0.9):
        size = {"small": _choose(rng, "small", "small", "little"), "large": _choose(rng, "large", "large", "big")}[
            thing.size
        ]
        words = [*words, size] if rng.random() < 0.2 else [size, *words]
    noun = {"circle": _choose(rng, "circle", "circle", "ball"), "square": "square", "triangle": "triangle"}[thing.shape]
    subject = " ".join([*words, noun])
    if not (short and rng.random() < 0.2):
        subject = f"{'an' if subject[0] in 'aeiou' else 'a'} {subject}"
    if short and rng.random() < 0.6:
        return subject
    if thing.motion == "still":
        return f"{subject} {_choose(rng, 'stays still', 'staying still', 'does not move')}"
    verb = _choose(rng, "moves", "moving", "goes", "going", "slides", "sliding")
    where = {
        "right": _choose(rng, "to the right", "to the right", "right"),
        "left": _choose(rng, "to the left", "to the left", "left"),
        "up": _choose(rng, "up", "upwards"),
        "down": _choose(rng, "down", "downwards"),
    }[thing.motion]
    if rng.random() < 0.4:
        return f"{subject} {verb} {where}"
    if rng.random() < 0.5:
        return f"{subject} {thing.speed} {verb} {where}"
    adverb = {"slowly": "slowly", "quickly": _choose(rng, "quickly", "fast")}[str(thing.speed)]
    return f"{subject} {verb} {where} {adverb}"


def _choose(rng: np.random.Generator, *choices: str) -> str:
    return choices[int(rng.integers(len(choices)))]


def signed_distance(shape: str, dx: np.ndarray, dy: np.ndarray, radius: float | np.ndarray) -> np.ndarray:
    """Signed distance to the outline, negative inside; exact along the sides, which is enough for anti-aliasing.

    dx, dy: from the shape's centre, in the radius's unit; arrays that broadcast.
    """
    if shape == "circle":
        return np.hypot(dx, dy) - radius
    if shape == "square":
        return np.maximum(abs(dx), abs(dy)) - _HALF_SIDE * radius
    # upright triangle: half its circumradius from the centroid to the base and to the slanted sides
    slanted = np.sqrt(0.75) * abs(dx) - 0.5 * dy
    return np.maximum(dy, slanted) - 0.5 * _CIRCUMRADIUS * radius


def _extent(shape: str, radius: float) -> tuple[float, float, float, float]:
    """How far a shape reaches from its centre: left, up, right, down."""
    if shape == "triangle":
        r = _CIRCUMRADIUS * radius
        side = r * np.sqrt(0.75)
        return side, r, side, 0.5 * r
    r = radius if shape == "circle" else _HALF_SIDE * radius
    return r, r, r, r


def _track(thing: Thing, rng: np.random.Generator, frames: int) -> Track:
    """A track inside the frame, uniform over the points of the grid where it fits."""
    radius = SIZES[thing.size]
    speed = SPEEDS[thing.speed] if thing.speed else 0.0
    velocity = tuple(speed * d for d in MOTIONS[thing.motion])
    travel = [(frames - 1) * v for v in velocity]
    left, up, right, down = _extent(thing.shape, radius)
    start = [
        _on_grid(rng, MARGIN + before - min(way, 0), UNIT - MARGIN - after - max(way, 0))
        for before, after, way in ((left, right, travel[0]), (up, down, travel[1]))
    ]
    return Track(radius, (start[0], start[1]), (velocity[0], velocity[1]))


def stays_inside(thing: Thing, start: tuple[float, float], frames: int = FRAMES) -> bool:
    """Whether a thing that starts there, and moves as it says, stays inside the frame."""
    speed = SPEEDS[thing.speed] if thing.speed else 0.0
    end = [at + (frames - 1) * speed * d for at, d in zip(start, MOTIONS[thing.motion], strict=True)]
    left, up, right, down = _extent(thing.shape, SIZES[thing.size])
    return all(
        MARGIN + before <= min(a, b) and max(a, b) <= UNIT - MARGIN - after
        for a, b, before, after in zip(start, end, (left, up), (right, down), strict=True)
    )


def _on_grid(rng: np.random.Generator, low: float, high: float) -> float:
    """A multiple of GRID between low and high."""
    return GRID * float(rng.integers(math.ceil(low / GRID), math.floor(high / GRID) + 1))


def _keeps_gap(things: tuple[Thing, ...], tracks: Tracks, frames: int) -> bool:
    """Whether the bounding boxes of two things keep their distance in every frame."""
    time = np.arange(frames)[:, None]
    boxes = []
    for thing, track in zip(things, tracks, strict=True):
        centre = np.array(track.start) + time * np.array(track.velocity)
        left, up, right, down = _extent(thing.shape, track.radius)
        boxes.append((centre - np.array([left, up]), centre + np.array([right, down])))
    (lo1, hi1), (lo2, hi2) = boxes
    gap = np.maximum(lo2 - hi1, lo1 - hi2).max(1)  # along the axis with the larger distance
    return bool((gap > GAP).all())
