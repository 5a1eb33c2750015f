"""Images and masks as people see them, in every container: transparency, rotation, 16 bits, several in a file."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.media import MASK, Media, describe_fit, resolve_media
from tests.support.media import smooth

EIGHT_FPS = SimpleNamespace(check_inputs=lambda _: None, defaults=SimpleNamespace(fps=8.0))
"""Of a model, what images and clips are checked with."""


def checked(name: str, value: object) -> Media:
    """An image, clip or mask that a request gives."""
    given = {"video": np.zeros((1, 16, 32, 3), np.uint8)} | {name: value}
    return resolve_media(EIGHT_FPS, given, 1)[name][0]


def seen(name: str, value: object) -> np.ndarray:
    """Its first frame."""
    media = checked(name, value)
    return media.read(1, media.height, media.width, "crop")[0]


def in_every_container(image: Image.Image, folder: Path, **options: object) -> dict[str, object]:
    """An image as a file, a folder of PNGs, a PIL image that is not decoded yet, and one that is."""
    (folder / "frames").mkdir()
    for name in ("a.png", "a.webp", "frames/0.png"):
        image.save(folder / name, lossless=True, exact=True, **options)
    decoded = Image.open(folder / "a.png")
    decoded.load()
    files = {name: folder / name for name in ("a.png", "a.webp", "frames")}
    return files | {"lazy": Image.open(folder / "a.png"), "decoded": decoded}


def fields_of(container: str) -> tuple[str, ...]:
    """The fields that take it."""
    return {"frames": ("video", MASK), "a.gif": ("video", MASK)}.get(container, ("image", MASK))


@pytest.mark.parametrize("hidden", [0, 130, 255])
def test_transparent_parts_are_white_in_images_and_black_in_masks(tmp_path, hidden):
    """A white square on a transparent layer; `hidden` is the grey that is stored below it."""
    pixels = np.full((16, 32, 4), [hidden] * 3 + [0], np.uint8)
    pixels[4:12, 8:16] = 255
    image = Image.fromarray(pixels)
    indexed = Image.fromarray(pixels[..., 3] // 255).convert("P")
    indexed.putpalette([hidden] * 3 + [255] * 3)
    indexed.info["transparency"] = 0
    indexed.save(tmp_path / "a.gif")
    containers = in_every_container(image, tmp_path) | {"a.gif": tmp_path / "a.gif", "indexed": indexed}
    for container, value in containers.items():
        field, _ = fields_of(container)
        assert (seen(field, value) == 255).all(), container
        np.testing.assert_array_equal(seen(MASK, value), pixels[..., 3:].repeat(3, -1), container)


def test_a_mask_that_is_half_transparent_is_a_grey_one(tmp_path):
    for container, value in in_every_container(Image.new("RGBA", (32, 16), (255, 255, 255, 200)), tmp_path).items():
        assert (seen(MASK, value) == 200).all(), container


def test_a_mask_that_is_white_nowhere_is_said():
    """Such as a black shape on a transparent layer."""
    layer = Image.new("RGBA", (32, 16))
    layer.paste("black", (8, 4, 16, 12))
    said = describe_fit(MASK, checked(MASK, layer), 1, 16, 32, "crop")
    assert said == "an array: the mask is white nowhere, so nothing is made anew; paint white what shall be"
    layer.paste("white", (8, 4, 16, 12))
    assert describe_fit(MASK, checked(MASK, layer), 1, 16, 32, "crop") is None


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_rotation_of_a_file_is_done_in_every_container(tmp_path, orientation):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 16, 3)).astype(np.uint8)
    if orientation < 5:
        pixels = pixels.reshape(16, 32, 3)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    flipped = pixels[:, ::-1] if orientation in (2, 4, 5, 7) else pixels
    turns = {1: 0, 2: 0, 3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}[orientation]
    expected = np.rot90(flipped, turns)
    for container, value in in_every_container(Image.fromarray(pixels), tmp_path, exif=exif).items():
        for field in fields_of(container):
            np.testing.assert_array_equal(seen(field, value), expected, f"{container} as {field}")


def test_the_first_of_a_multi_picture_jpeg_is_the_image(tmp_path):
    """As phones write them, with a preview or a depth map behind the image."""
    first, second = Image.fromarray(smooth(1, 16, 32)), Image.new("L", (16, 8))
    first.save(tmp_path / "one.jpg", quality=90)
    first.save(tmp_path / "two.jpg", "MPO", save_all=True, append_images=[second], quality=90)
    with Image.open(tmp_path / "two.jpg") as image:
        assert (image.format, image.n_frames) == ("MPO", 2)
    np.testing.assert_array_equal(seen("image", tmp_path / "two.jpg"), seen("image", tmp_path / "one.jpg"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.bmp", {}),
        ("a.tif", {}),
        ("a.TIFF", {"compression": "tiff_lzw"}),
        ("a.avif", {"quality": 100, "subsampling": "4:4:4"}),
    ],
)
def test_images_of_other_formats(tmp_path, name, options):
    pixels = smooth(1, 16, 32)
    Image.fromarray(pixels).save(tmp_path / name, **options)
    for field in ("image", MASK):
        difference = np.abs(seen(field, tmp_path / name).astype(int) - pixels)
        assert difference.max() <= (4 if name == "a.avif" else 0)  # lossy
    with pytest.raises(InputError, match=f"{name} is one image, and a clip was expected"):
        seen("video", tmp_path / name)


def test_what_is_no_image_is_told_what_is_read(tmp_path):
    (tmp_path / "a.psd").write_bytes(b"8BPS\0\1" + bytes(60))
    with pytest.raises(InputError, match=r"a\.psd: it is none of PNG, JPEG, WEBP, AVIF, BMP, TIFF; convert it to PNG"):
        seen("image", tmp_path / "a.psd")


def test_heic_takes_a_package(tmp_path, monkeypatch):
    """A stand-in for it, which reads a PNG behind the file's first bytes."""
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(12))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(InputError, match=r"a\.heic: it is HEIC, which takes pillow-heif: pip install pillow-heif; or"):
        seen("image", tmp_path / "a.heic")
    Image.init()
    registered = dict(Image.OPEN)
    monkeypatch.setattr(Image, "OPEN", registered)

    def register():
        registered["HEIF"] = (lambda file, _: Image.new("RGB", (32, 16), "red"), lambda head: head[8:12] == b"heic")

    monkeypatch.setitem(sys.modules, "pillow_heif", SimpleNamespace(register_heif_opener=register))
    assert (seen("image", tmp_path / "a.heic") == [255, 0, 0]).all()


def profile(red, green, blue, gamma=2.2) -> bytes:
    """An ICC profile: the primaries' XYZ, adapted to D50, and a gamma."""
    curve = b"curv" + struct.pack(">IIH", 0, 1, round(gamma * 256)) + bytes(2)
    texts = {b"desc": b"desc" + struct.pack(">II", 0, 2) + b"x\0" + bytes(90), b"cprt": b"text" + bytes(8)}
    places = {b"wtpt": (0.9642, 1, 0.8249), b"rXYZ": red, b"gXYZ": green, b"bXYZ": blue}
    tags = texts | {
        name: b"XYZ " + struct.pack(">I3i", 0, *(round(x * 65536) for x in xyz)) for name, xyz in places.items()
    }
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
    table, data, at = struct.pack(">I", len(tags)), b"", 128 + 4 + 12 * len(tags)
    for name, tag in tags.items():
        tag += bytes(-len(tag) % 4)
        table += name + struct.pack(">II", at + len(data), len(tag))
        data += tag
    head = struct.pack(">I4sI4s4s4s", at + len(data), b"lcms", 0x02400000, b"mntr", b"RGB ", b"XYZ ") + bytes(12)
    head += b"acsp" + bytes(28) + struct.pack(">3i", 63190, 65536, 54061)
    return head.ljust(128, b"\0") + table + data


P3 = profile((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))
"""The primaries of Display P3 as its profile states them."""


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.tif", "a.avif", "pil"])
def test_colour_profiles_are_applied(tmp_path, name):
    """Orange of Display P3, by the matrix to sRGB."""
    image = Image.new("RGB", (32, 16), (200, 120, 60))
    linear = (np.array([200, 120, 60]) / 255) ** 2.2
    linear = linear @ np.array([[1.2249, -0.2247, 0], [-0.0420, 1.0419, 0], [-0.0197, -0.0786, 1.0979]]).T
    expected = 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    if name == "pil":
        image.info["icc_profile"] = P3
        found = seen("image", image)
    else:
        image.save(tmp_path / name, icc_profile=P3, quality=100)
        found = seen("image", tmp_path / name)
    assert np.abs(found - expected).max() <= (2 if name in ("a.png", "a.tif", "pil") else 4)
    assert np.abs(expected - [200, 120, 60]).max() > 10


def test_a_profile_goes_with_transparency_and_a_grey_one_with_greys(tmp_path):
    layer = Image.new("RGBA", (32, 16), (200, 120, 60, 0))
    layer.paste((200, 120, 60, 255), (16, 0, 32, 16))
    layer.save(tmp_path / "a.png", icc_profile=P3)
    layer.convert("RGB").save(tmp_path / "b.png", icc_profile=P3)
    found, whole = seen("image", tmp_path / "a.png"), seen("image", tmp_path / "b.png")
    assert (found[:, :16] == 255).all() and (found[:, 16:] == whole[:, 16:]).all()


def test_images_in_srgb_stay_as_they_are_and_a_broken_profile_is_said(tmp_path, caplog):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 32, 3), np.uint8)
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    Image.fromarray(pixels).save(tmp_path / "a.png", icc_profile=srgb)
    np.testing.assert_array_equal(seen("image", tmp_path / "a.png"), pixels)
    assert not caplog.messages
    Image.fromarray(pixels).save(tmp_path / "a.png", icc_profile=b"no profile")
    np.testing.assert_array_equal(seen("image", tmp_path / "a.png"), pixels)
    assert "a colour profile that cannot be applied is left out" in caplog.text


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_a_pil_image_of_16_bits_is_read_as_its_file(mode):
    levels = np.linspace(0, 65535, 16 * 32).reshape(16, 32).astype(np.uint16)
    image = Image.fromarray(levels) if mode == "I;16" else Image.frombytes(mode, (32, 16), levels.byteswap().tobytes())
    assert image.mode == mode
    np.testing.assert_array_equal(seen("image", image), (levels >> 8)[..., None].repeat(3, -1))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_a_pil_image_without_a_white_level_is_refused(mode):
    for field in ("image", MASK):
        with pytest.raises(
            InputError, match=rf"cannot read the PIL image: its mode {mode} states no white level; give"
        ):
            seen(field, Image.new(mode, (32, 16), 200))


def test_a_pil_image_is_checked_like_its_file(tmp_path):
    Image.fromarray(smooth(7, 64, 96)).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:300])
    with pytest.raises(InputError, match=r"^cannot read the PIL image: .*truncated"):
        seen("image", Image.open(tmp_path / "cut.png"))
    with pytest.raises(InputError, match="the PIL image: a frame of 65536x1 has a side of"):
        seen("image", Image.new("I", (65536, 1)))
