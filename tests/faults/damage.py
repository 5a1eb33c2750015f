"""Damage to a file, as disks, copies and strangers do it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

WAYS = ("flip", "cut", "zeros", "empty", "garbage", "swap")


def damage(path: Path, others: list[Path], rng: random.Random) -> str:
    """Damage a file for certain; says how.

    Args:
        others: files that may take its place.
    """
    before = path.read_bytes()
    way = rng.choice(WAYS)
    data = bytearray(before)
    if way == "flip" and data:
        for _ in range(rng.choice((1, 1, 4, 16))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif way == "cut":
        data = data[: rng.randrange(len(data) or 1)]
    elif way == "zeros" and data:
        start = rng.randrange(len(data))
        length = min(rng.choice((1, 64, 4096)), len(data) - start)
        data[start : start + length] = bytes(length)
    elif way == "empty":
        data = bytearray()
    elif way == "garbage":
        data = bytearray(rng.randbytes(rng.choice((1, 100, 5000))))
    elif way == "swap" and others:
        shutil.copyfile(rng.choice(others), path)
        data = bytearray(path.read_bytes())
    if data == before:
        data = bytearray(before + b"\0")
        way = "grown"
    path.write_bytes(data)
    return way
