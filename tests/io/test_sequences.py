"""Frames as other tools leave them: folders of images by name, lists of PIL images, addresses."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.media import MASK, resolve_media
from cogvideox_flax.generate.upscale import upscale
from cogvideox_flax.io.paths import expand_user
from cogvideox_flax.io.video import open_video, read_video, save_video
from cogvideox_flax.training.clips import clip_contents, find_clips
from tests.support.media import count_frames, smooth

EIGHT_FPS = SimpleNamespace(check_inputs=lambda _: None, defaults=SimpleNamespace(fps=8.0))


def greys(folder, names):
    """An image for each name, of grey 10, 20, ... in their order."""
    folder.mkdir()
    for i, name in enumerate(names):
        Image.new("RGB", (32, 16), (10 * (i + 1),) * 3).save(folder / name, quality=100)
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ["frame_0001.png", "frame_0002.png", "frame_0010.png"],
        ["img (1).png", "img (2).png", "img (10).png"],
        ["0001.PNG", "0002.PNG", "0003.PNG"],
        ["1.jpg", "2.JPG", "10.jpg"],
        ["00001.jpeg", "00002.jpeg"],
        ["shot1_9.webp", "shot1_10.webp", "shot2_1.webp"],
        ["out-8.bmp", "out-9.bmp"],
        ["f1.tif", "f2.tif"],
        ["f1.avif", "f2.avif"],
    ],
)
def test_a_folder_of_images_is_read_in_the_order_of_its_numbers(tmp_path, names):
    folder = greys(tmp_path / "c", names)
    (folder / "._frame_0003.png").write_bytes(b"of another system")
    (folder / "notes1.txt").write_text("")
    frames, fps = read_video(folder)
    assert fps == 0
    assert np.abs(frames[:, 0, 0, 0].astype(int) - 10 * np.arange(1, len(names) + 1)).max() <= 1
    (tmp_path / "c.txt").write_text("a caption")
    (clip,) = find_clips(tmp_path, 1, 8)
    assert len(clip_contents([clip])[0].files) == len(names)


def test_a_pattern_names_one_of_several_sequences(tmp_path):
    folder = greys(tmp_path / "c", ["a_1.jpg", "a_2.jpg", "b_1.jpg"])
    with pytest.raises(InputError, match=r"c holds images of several names: a_#\.jpg \(2\), b_#\.jpg \(1\); name one"):
        read_video(folder)
    assert count_frames(folder / "a_%d.jpg") == (2, 0)
    assert count_frames(folder / "b_%04d.jpg") == (1, 0)


def test_images_beside_our_own_do_not_count(tmp_path):
    save_video(tmp_path / "c", smooth(0, 3, 16, 32), 8)
    Image.new("RGB", (8, 8)).save(tmp_path / "c" / "thumb1.jpg")
    assert count_frames(tmp_path / "c") == (3, 8)


def test_a_folder_without_numbers_is_told_what_is_expected(tmp_path):
    greys(tmp_path / "c", ["cover.png"])
    with pytest.raises(InputError, match=r"there are no frames .*c; expected numbered images, such as 0001\.png"):
        read_video(tmp_path / "c")


@pytest.mark.parametrize("name", ["video", "control_video", MASK])
def test_a_list_of_pil_images_is_one_clip(name):
    frames = smooth(3, 4, 16, 32)
    images = [Image.fromarray(frame) for frame in frames]
    given = {"video": frames} | {name: images}
    for value, batch in ((images, 1), ([images], 1), ([images, images[::-1]], 2)):
        found = resolve_media(EIGHT_FPS, given | {name: value}, batch)[name]
        assert len(found) == len(value) if isinstance(value[0], list) else len(found) == 1
        np.testing.assert_array_equal(found[0].read(4, 16, 32, "crop"), frames)
    images[1] = images[1].resize((16, 16))
    with pytest.raises(InputError, match="the PIL images of a clip have different sizes: 16x16, 32x16"):
        resolve_media(EIGHT_FPS, given | {name: images}, 1)


def test_a_list_of_masks_is_one_for_each_prompt():
    masks = [Image.new("L", (32, 16), grey) for grey in (0, 255)]
    found = resolve_media(EIGHT_FPS, {"video": smooth(3, 4, 16, 32), MASK: masks}, 2)[MASK]
    assert [mask.read(1, 16, 32, "crop").max() for mask in found] == [0, 255]


@pytest.mark.parametrize("address", ["https://example.com/a.mp4", "HTTP://example.com/a.png", "s3://bucket/a.mp4"])
def test_an_address_is_refused_as_one(address):
    for read in (expand_user, open_video, read_video, lambda x: upscale(None, x)):
        with pytest.raises(InputError, match=r"a.* is an address; download it first, and give the file"):
            read(address)
    for name in ("image", "video", MASK):
        with pytest.raises(InputError, match="is an address; download it first"):
            resolve_media(EIGHT_FPS, {"video": smooth(3, 4, 16, 32)} | {name: address}, 1)
