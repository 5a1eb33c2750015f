"""One clip as the model sees it: which frames, how they are cut, and what loading one costs."""

from __future__ import annotations

import numpy as np
import pytest
from media import cost_of_loading, ffmpeg, pattern
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from reference import SHARED

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.video import read_video, save_video
from cogvideox_flax.training.clips import find_clips, load_clip


def from_the_whole(path, num_frames, height, width, fps):
    """The same clip from a whole decode."""
    frames, own_fps = read_video(path)
    ratio = own_fps / fps if own_fps else 1.0
    there = int(np.ceil((len(frames) - 0.5) / ratio))
    start = (there - num_frames) // 2
    chosen = np.floor(np.arange(start, start + num_frames) * ratio + 0.5).astype(int)
    own_height, own_width = frames.shape[1:3]
    scale = max(height / own_height, width / own_width)
    left, top = (own_width - width / scale) / 2, (own_height - height / scale) / 2
    box = (left, top, left + width / scale, top + height / scale)
    resample = Image.Resampling.LANCZOS
    return np.stack([np.asarray(Image.fromarray(frames[i]).resize((width, height), resample, box=box)) for i in chosen])


@pytest.mark.parametrize(
    ("name", "rate"),
    [*(("a.mp4", rate) for rate in (5, 8, 12, 24, 60)), ("a.mkv", "30000/1001"), ("a.mov", 24), ("a.webm", 30)],
)
def test_a_clip_is_that_of_a_whole_decode(tmp_path, name, rate):
    path = tmp_path / name
    codec = ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-bf", 3]
    if name == "a.webm":
        codec = ["-c:v", "libvpx", "-deadline", "realtime", "-cpu-used", 8]
    ffmpeg(*pattern(90, 50, rate, 12), *codec, "-g", 24, path)
    for num_frames, size in ((9, (32, 48)), (49, (16, 16))):
        np.testing.assert_array_equal(load_clip(path, num_frames, *size, 8), from_the_whole(path, num_frames, *size, 8))


@pytest.mark.parametrize("name", ["hiker_240x368_49f.mp4", "horse_480x720_49f.mp4"])
def test_a_real_clip_is_that_of_a_whole_decode(name):
    path = SHARED / "data" / "media" / name
    if not path.is_file():
        pytest.skip(f"the real video is not at {path}")
    np.testing.assert_array_equal(load_clip(path, 9, 48, 64, 4), from_the_whole(path, 9, 48, 64, 4))


@pytest.mark.parametrize("own", [(32, 47), (33, 47), (47, 31), (13, 20), (1, 1), (1, 90), (90, 1), (32, 48)])
def test_pictures_of_any_size_are_cut(tmp_path, own):
    """In floats, the box of 47x32 in 48x32 begins at -4e-15."""
    save_video(tmp_path / "c", np.full((1, *own, 3), 200, np.uint8), 8)
    clip = load_clip(tmp_path / "c", 1, 32, 48, 8)
    assert clip.shape == (1, 32, 48, 3)
    assert (clip == 200).all()


def test_a_rate_that_floats_approximate_never_asks_for_a_frame_behind_the_last(tmp_path):
    for own in (100 * n / d for n in range(1, 12) for d in range(1, 12)):
        save_video(tmp_path / "c", np.zeros((3, 8, 8, 3), np.uint8), own)
        try:
            load_clip(tmp_path / "c", 1, 8, 8, 8)
        except InputError as e:
            assert "are needed" in str(e)


# --- costs ---


@pytest.fixture(scope="module")
def minute(tmp_path_factory):
    """60 s of 1280x720 in 77 kB."""
    path = tmp_path_factory.mktemp("media") / "a.mp4"
    source = ["-f", "lavfi", "-i", "color=c=teal:s=1280x720:r=24:d=60"]
    ffmpeg(*source, "-c:v", "libx264", "-preset", "veryfast", "-pix_fmt", "yuv420p", path)
    assert path.stat().st_size < 100_000
    return path


def test_a_clip_of_a_long_video_takes_little_memory_and_time(minute, tmp_path):
    """Decoded whole it is 3.7 GiB. Measured: 10 MiB and 75 MiB in 1.5 s."""
    cost = cost_of_loading(minute, tmp_path)
    assert cost["shape"] == [9, 32, 48, 3]
    assert cost["python"] < 64
    assert 0 < cost["ffmpeg"] < 200
    assert cost["seconds"] < 20


@pytest.mark.parametrize("name", ["a.gif", "a"])
def test_a_clip_of_many_pictures_takes_little_memory(tmp_path, name):
    """120 frames of 800x600 are 165 MiB."""
    picture = np.zeros((600, 800, 3), np.uint8)
    picture[:, :400] = 200
    save_video(tmp_path / name, np.broadcast_to(picture, (120, *picture.shape)).copy() * moving(), 8)
    cost = cost_of_loading(tmp_path / name, tmp_path)
    assert cost["shape"] == [9, 32, 48, 3]
    assert cost["python"] < 64


def moving():
    """A factor for each frame, so that a GIF does not join them."""
    return (np.arange(120) % 2).astype(np.uint8).reshape(-1, 1, 1, 1)


# --- refusals ---


def test_hostile_files_of_a_folder_are_faults_of_one_line_each(tmp_path):
    secret = tmp_path / "secret.mp4"
    save_video(secret, np.zeros((9, 16, 16, 3), np.uint8), 8)
    folder = tmp_path / "clips"
    folder.mkdir()
    (folder / "concat.mp4").write_text(f"ffconcat version 1.0\nfile '{secret}'\n")
    texts = PngInfo()
    texts.add_text("fps", "abc")
    for name, size in (("rate", (8, 8)), ("large", (20000, 20000))):
        (folder / name).mkdir()
        Image.new("1", size).save(folder / name / "0000.png", pnginfo=texts)
    for name in ("concat", "rate", "large"):
        (folder / f"{name}.txt").write_text("something")
    with pytest.raises(InputError) as caught:
        find_clips(folder, 9, 8)
    first, *faults = str(caught.value).splitlines()
    assert "(3 faults)" in first
    for fault, part in zip(
        faults, ("its contents are none of", "20000x20000 has 400,000,000 pixels", "'abc'"), strict=True
    ):
        assert part in fault
