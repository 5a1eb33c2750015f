"""Sequences of PNGs: what their texts may say, sizes, and damaged ones."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.images import read_image, to_rgb
from cogvideox_flax.io.video import open_video, read_metadata, read_video, save_video
from tests.support.media import count_frames, refusals_of_damaged


def write(path, **texts) -> None:
    path.parent.mkdir(exist_ok=True)
    info = PngInfo()
    for name, text in texts.items():
        info.add_text(name, text)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 12, 3)).astype(np.uint8)).save(path, pnginfo=info)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def header(width: int, height: int) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))


def bomb(width: int, height: int, *more: bytes) -> bytes:
    """A grey image of one value, compressed as far as zlib goes."""
    pack = zlib.compressobj(9)
    rows = pack.compress(bytes(width + 1))
    for _ in range(height - 1):
        rows += pack.compress(bytes(width + 1))
    rows += pack.flush()
    return b"\x89PNG\r\n\x1a\n" + b"".join(more or [header(width, height)]) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("text", ["abc", "", "nan", "inf", "-8", "1e400", "1e-300", "8 fps", "8,5", "\u00b2"])
def test_a_rate_must_be_a_positive_number(tmp_path, text):
    write(tmp_path / "c" / "0.png", fps=text)
    if not text:
        assert count_frames(tmp_path / "c") == (1, 0)
        return
    for read in (count_frames, read_video):
        with pytest.raises(InputError, match=r"c/0\.png states .* frames per second; expected"):
            read(tmp_path / "c")


def test_a_rate_of_0_is_none(tmp_path):
    write(tmp_path / "0.png", fps="0")
    assert count_frames(tmp_path / "0.png") == (1, 0)
    save_video(tmp_path / "c", np.zeros((2, 8, 8, 3), np.uint8), 0)
    assert "fps" not in Image.open(tmp_path / "c" / "0000.png").info


def test_large_images_are_refused_by_their_header(tmp_path):
    """400 million pixels in about 400 kB; PIL would decode 89 million with a warning, and raise at 179 million."""
    for width, height in ((20000, 20000), (10000, 10000)):
        (tmp_path / "0.png").write_bytes(bomb(width, height))
        for read in (count_frames, read_video, read_metadata):
            with pytest.raises(
                InputError, match=rf"0\.png: a frame of {width}x{height} has .* pixels; expected 1 to 33,5"
            ):
                read(tmp_path / "0.png")


def test_long_sides_are_refused_by_the_header(tmp_path):
    for size in ((65536, 1), (1, 300_000)):
        Image.new("1", size).save(tmp_path / "0.png")
        for read in (count_frames, read_video, read_image):
            with pytest.raises(InputError, match=r"0\.png: a frame of .* has a side of .*; expected at most 65,5"):
                read(tmp_path / "0.png")
    Image.new("1", (65535, 1)).save(tmp_path / "0.png")
    assert read_video(tmp_path / "0.png")[0].shape == (1, 1, 65535, 3)


def test_a_second_header_is_no_way_around_the_limit(tmp_path):
    (tmp_path / "0.png").write_bytes(bomb(8000, 8000, header(8, 8), header(8000, 8000)))
    with pytest.raises(InputError, match=r"0\.png: a frame of 8000x8000 has"):
        read_video(tmp_path / "0.png")


def test_only_the_wanted_frames_are_decoded(tmp_path):
    for i in range(5):
        write(tmp_path / f"{i}.png", fps="8")
    data = (tmp_path / "0.png").read_bytes()
    (tmp_path / "3.png").write_bytes(data[:60] + bytes(40) + data[100:])  # its header is whole
    assert count_frames(tmp_path) == (5, 8)
    assert list(dict(open_video(tmp_path).frames([0, 2, 4]))) == [0, 2, 4]
    with pytest.raises(InputError, match=r"cannot read .*3\.png"):
        read_video(tmp_path)


def test_sizes_are_compared_without_decoding(tmp_path):
    for i in range(2):
        Image.new("RGB", (8, 8 + i)).save(tmp_path / f"{i}.png")
    with pytest.raises(InputError, match="different sizes: 8x8, 8x9"):
        count_frames(tmp_path)


def test_16_bit_grey_keeps_its_upper_byte(tmp_path):
    grey = np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)
    Image.fromarray(grey).save(tmp_path / "0.png")
    np.testing.assert_array_equal(read_video(tmp_path)[0], (grey >> 8)[None, ..., None].repeat(3, -1))


def stored(depth: int, colour: int, row: bytes, width: int, clear: bytes) -> bytes:
    """A PNG of one row; `clear` is its transparent colour."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0)) + chunk(b"tRNS", clear)
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("depth", "row", "clear", "expected"),
    [
        (1, [0b01000000], 0, [255, 255]),
        (1, [0b01000000], 1, [0, 255]),
        (2, [0b00011011], 0, [255, 85, 170, 255]),
        (2, [0b00011011], 2, [0, 85, 255, 255]),
        (4, [0x0A, 0x3F], 10, [0, 255, 51, 255]),
        (8, [10, 20], 10, [255, 20]),
        (16, [0x12, 0x34, 0x12, 0x35, 0x80, 0xFF], 0x1234, [255, 0x12, 0x80]),
    ],
)
def test_a_transparent_grey_is_white_at_every_depth(tmp_path, depth, row, clear, expected):
    path = tmp_path / "0.png"
    path.write_bytes(stored(depth, 0, bytes(row), len(expected), struct.pack(">H", clear)))
    for found in (read_image(path), read_video(path)[0][0]):
        assert found.tolist() == [[[grey] * 3 for grey in expected]]
    with Image.open(path) as image:
        np.testing.assert_array_equal(to_rgb(image), found)


def test_a_transparent_colour(tmp_path):
    path = tmp_path / "0.png"
    path.write_bytes(stored(8, 2, bytes([1, 2, 3, 3, 2, 1]), 2, struct.pack(">HHH", 3, 2, 1)))
    assert read_image(path).tolist() == [[[1, 2, 3], [255, 255, 255]]]
    path.write_bytes(stored(16, 2, bytes(12), 2, bytes(6)))
    with pytest.raises(InputError, match=r"0\.png: 16-bit RGB with a transparent colour; save it in 8 bit"):
        read_image(path)


def test_an_animated_png_is_no_frame(tmp_path):
    first, second = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    first.save(tmp_path / "0.png", save_all=True, append_images=[second])
    for read in (read_image, read_video):
        with pytest.raises(InputError, match=r"0\.png is animated, 2 frames; give one of them as an image"):
            read(tmp_path / "0.png")


@pytest.mark.parametrize("kind", ["a GIF", "a directory", "too short", "no header"])
def test_what_is_not_a_png(tmp_path, kind):
    path = tmp_path / "c" / "0.png"
    path.parent.mkdir()
    if kind == "a directory":
        path.mkdir()
    elif kind == "a GIF":
        Image.new("P", (8, 8)).save(path, "GIF")
    else:
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + (b"" if kind == "too short" else bytes(40)))
    for read in (count_frames, read_metadata, read_video):
        with pytest.raises(InputError, match=r"cannot read .*0\.png"):
            read(tmp_path / "c")


def test_damaged_pngs_are_read_or_refused(tmp_path):
    path = tmp_path / "0.png"
    write(path, fps="8", comment='{"seed": 1}')
    assert refusals_of_damaged(path, path.read_bytes(), 200, head=120) > 200


@pytest.mark.parametrize(
    "data",
    [
        chunk(b"zTXt", b"comment\0\0" + zlib.compress(bytes(2**24))),
        chunk(b"zTXt", b"comment\0\1x"),
        chunk(b"iCCP", b"x\0\1"),
        chunk(b"tRNS", b""),
        chunk(b"pHYs", b"1"),
        chunk(b"acTL", b"1"),
        chunk(b"1234", b""),
        struct.pack(">I", 2**31 - 1) + b"tEXt",
    ],
)
def test_odd_chunks_are_read_or_refused(tmp_path, data):
    (tmp_path / "0.png").write_bytes(bomb(8, 8, header(8, 8), data))
    for read in (count_frames, read_metadata, read_video):
        try:
            read(tmp_path / "0.png")
        except InputError as e:
            assert "0.png" in str(e)
            assert "\n" not in str(e)


def test_images_that_are_no_continuation_stay(tmp_path):
    frames = np.zeros((10, 16, 16, 3), np.uint8)
    save_video(tmp_path / "%04d.png", np.zeros((13, 16, 16, 3), np.uint8), 8)
    others = {name: (tmp_path / name).write_bytes(b"mine") for name in ("5.png", "2024.png")}
    save_video(tmp_path / "%04d.png", frames, 8)
    written = {f"{i:04d}.png" for i in range(10)}
    assert {p.name for p in tmp_path.iterdir()} == written | set(others)
