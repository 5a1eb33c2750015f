"""Frames and their metadata through every format and back; refusals before any work is done."""

from __future__ import annotations

import sys
from pathlib import Path

import av
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from av.video.reformatter import ColorRange
from diffusers.video_processor import VideoProcessor
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from cogvideox_flax.errors import InputError
from cogvideox_flax.io import images, limits, video
from cogvideox_flax.io.video import (
    check_output_path,
    read_metadata,
    read_video,
    save_contact_sheet,
    save_video,
    to_uint8,
)
from tests.support.media import add_sound, sound_of
from tests.support.reference import SHARED

METADATA = {
    "prompt": 'a "cat" isn\'t = ; # \\ $HOME `x`\nnext line\ttab 猫 😀 100% \x00 ' + "long " * 2000,
    "seed": 7,
    "release": "cogvideox-5b",
    "settings": {"guidance_scale": 6.0, "use_dynamic_cfg": True, "latents": None, "sizes": [1, 2]},
}
HOSTILE_NAME = "-a clip: 50% 'ü'"


def clip(frames: int = 17, height: int = 48, width: int = 80) -> np.ndarray:
    """Smooth coloured waves that move."""
    t, y, x = np.mgrid[:frames, :height, :width]
    rgb = np.sin((x + 3 * t) / 25), np.cos((y - 2 * t) / 20), np.sin((x + y + 5 * t) / 20)
    return np.round(127.5 + 110 * np.stack(rgb, -1)).astype(np.uint8)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(np.square(a.astype(float) - b).mean(), 1e-9)))


@pytest.mark.parametrize("fps", [8, 16, 29.97])
@pytest.mark.parametrize(
    ("suffix", "decibels"), [(".mp4", 40), (".MP4", 40), (".gif", 26), ("", 100), ("-%04d.png", 100), ("/%d.png", 100)]
)
def test_round_trip(tmp_path, suffix, decibels, fps):
    path, frames = tmp_path / "new" / (HOSTILE_NAME + suffix), clip()
    check_output_path(path)
    assert not path.parent.exists()
    save_video(path, frames, fps, METADATA)
    read, read_fps = read_video(path)
    assert read.dtype == np.uint8
    assert read.shape == frames.shape
    assert psnr(read, frames) > decibels
    # a gif counts time in hundredths of a second
    assert abs(len(frames) / read_fps - len(frames) / fps) < (0.00501 if suffix == ".gif" else 1e-9)
    assert read_metadata(path) == METADATA
    left = [p.name for p in tmp_path.rglob(".*")]
    assert not left


@pytest.mark.parametrize("suffix", [".mp4", ".gif", "", "-%04d.png"])
@pytest.mark.parametrize(
    "text",
    [
        "long " * 200_000,
        "猫" * 333_000,
        "😀" * 250_000,
        "\n" * 250_000,
        '\\";#=\n[comment]\ncomment=x\r\t' * 40_000,
        "\\" * 500_001,
        "#;=",
        "\udcff not a character",
        "\\",
    ],
    ids=["words", "three bytes", "four bytes", "lines", "special", "backslashes", "signs", "surrogate", "backslash"],
)
def test_metadata_of_any_length(tmp_path, suffix, text):
    path = tmp_path / f"a{suffix}"
    save_video(path, clip(2), 8, {"prompt": text, "seed": 1})
    assert read_metadata(path) == {"prompt": text, "seed": 1}
    assert read_video(path)[0].shape == (2, 48, 80, 3)


@pytest.mark.parametrize("suffix", [".mp4", ".gif", ""])
def test_metadata_beyond_the_limit_does_not_cost_the_frames(tmp_path, suffix, caplog, monkeypatch):
    monkeypatch.setattr(limits, "MAX_METADATA_BYTES", 1000)
    save_video(tmp_path / f"a{suffix}", clip(2), 8, {"prompt": "x" * 1000})
    assert "is saved without its metadata: 1,014 bytes, too many" in caplog.text
    assert read_metadata(tmp_path / f"a{suffix}") == {}
    assert read_video(tmp_path / f"a{suffix}")[0].shape == (2, 48, 80, 3)


@pytest.mark.parametrize("comment", ["[" * 100_000, '{"a": ' * 100_000, "1" * 10_000, "null", "NaN", "\\\n{}"])
def test_comments_of_other_programs_are_no_metadata(tmp_path, comment):
    frame = Image.fromarray(clip(1)[0])
    info = PngInfo()
    info.add_text("comment", comment)
    frame.save(tmp_path / "0.png", pnginfo=info)
    frame.save(tmp_path / "0.gif", comment=comment.encode())
    assert read_metadata(tmp_path / "0.png") == read_metadata(tmp_path / "0.gif") == {}


@pytest.mark.parametrize("name", ["-y.mp4", "a%04d%d.mp4", "concat:a|b.mp4", "http:x.mp4", "pipe:1.mp4", "a'b\\c;.mp4"])
def test_names_that_mean_something_to_ffmpeg(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    save_video(name, clip(3), 8, {"seed": 1})
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert read_video(name)[0].shape == (3, 48, 80, 3)
    assert read_metadata(name) == {"seed": 1}


@pytest.mark.parametrize(("name", "codec"), [("a.mp4", "h264"), ("a.webm", "vp9")])
def test_a_video_states_its_colours(tmp_path, name, codec):
    """Primaries, transfer, matrix and range, in the file and in its frames."""
    save_video(tmp_path / name, clip(3), 8)
    with av.open(str(tmp_path / name)) as container:
        context = container.streams.video[0].codec_context
        assert (context.name, context.pix_fmt) == (codec, "yuv420p")
        for tagged in (context, next(container.decode(video=0))):
            tags = tagged.color_primaries, tagged.color_trc, tagged.colorspace, tagged.color_range
            assert tags == (1, 1, 1, ColorRange.MPEG)  # BT.709


def test_mp4_plays_everywhere_and_keeps_colours(tmp_path):
    flat = np.empty((3, 32, 32, 3), np.uint8)
    flat[:] = (200, 60, 30)
    save_video(tmp_path / "a.mp4", flat, 8)
    assert abs(read_video(tmp_path / "a.mp4")[0].astype(int) - flat).max() <= 3
    raw = (tmp_path / "a.mp4").read_bytes()
    assert raw.index(b"moov") < raw.index(b"mdat")  # a browser can start before it has the whole file


@pytest.mark.parametrize(("suffix", "codec"), [(".mp4", "aac"), (".webm", "libopus")])
@pytest.mark.parametrize("offset", [0, 0.5])
def test_sound_is_copied_as_far_as_the_frames_last(tmp_path, suffix, codec, offset):
    """From the first frame on, and the frames are those of a video without sound."""
    frames = clip(16)
    save_video(tmp_path / f"silent{suffix}", frames, 8)
    source = add_sound(tmp_path / f"silent{suffix}", tmp_path / f"loud{suffix}", 6, codec, offset)
    save_video(tmp_path / f"a{suffix}", frames, 8, {"seed": 1}, sound=source)
    name, end, packets = sound_of(tmp_path / f"a{suffix}")
    assert codec.endswith(name) and abs(end - 2) < 0.03
    whole = sound_of(source)[2]
    first = whole.index(packets[1]) - 1  # the first of Opus packets is cut in place
    assert packets[1:] == whole[first + 1 : first + len(packets)]
    assert abs(first * (1024 if codec == "aac" else 960) / 48000 - offset) < 0.05
    assert read_metadata(tmp_path / f"a{suffix}") == {"seed": 1}
    np.testing.assert_array_equal(read_video(tmp_path / f"a{suffix}")[0], read_video(tmp_path / f"silent{suffix}")[0])


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a.webm", "the sound of {} is left out: 'webm' format does not support 'aac'"),
        ("a.gif", "a.gif holds no sound: that of {} is left out"),
        ("frames", "frames holds no sound: that of {} is left out"),
    ],
)
def test_sound_that_the_format_does_not_take_is_left_out_with_a_line(tmp_path, caplog, name, line):
    save_video(tmp_path / "silent.mp4", clip(4), 8)
    source = add_sound(tmp_path / "silent.mp4", tmp_path / "loud.mp4", 1)
    save_video(tmp_path / name, clip(4), 8, sound=source)
    assert line.format(source) in caplog.text and len(caplog.messages) == 1
    assert len(read_video(tmp_path / name)[0]) == 4
    caplog.clear()
    save_video(tmp_path / "b.gif", clip(4), 8, sound=tmp_path / "silent.mp4")
    assert not caplog.messages


@pytest.mark.parametrize("suffix", [".mp4", ".webm"])
def test_the_same_frames_are_encoded_the_same(tmp_path, suffix):
    """Whatever was in the memory before."""
    path, made = tmp_path / f"a{suffix}", np.random.default_rng(0)
    for frames in (made.integers(0, 256, (9, 64, 96, 3), np.uint8), clip(9, 64, 96), clip(9, 32, 48)):
        videos = set()
        for _ in range(12 if suffix == ".mp4" else 3):
            before = [np.frombuffer(made.bytes(n), np.uint8) for n in made.integers(1, 200_000, 20)]
            del before[::2]
            save_video(path, frames, 8)
            videos.add(read_video(path)[0].tobytes())
        assert len(videos) == 1


def test_odd_sizes_and_a_single_frame(tmp_path):
    frames = clip(1, 33, 47)
    save_video(tmp_path / "a.mp4", frames, 8)
    read, _ = read_video(tmp_path / "a.mp4")
    assert read.shape == (1, 34, 48, 3)
    assert psnr(read[:, :33, :47], frames) > 35
    np.testing.assert_allclose(read[:, 33].astype(float), read[:, 32], atol=12)  # the repeated line, not a black one
    for name in ("a.gif", "frames"):
        save_video(tmp_path / name, frames, 8)
        assert read_video(tmp_path / name)[0].shape == frames.shape


def test_gif_timing_does_not_drift(tmp_path):
    save_video(tmp_path / "a.gif", clip(49), 16)
    with Image.open(tmp_path / "a.gif") as image:
        assert image.info["loop"] == 0
    frames, fps = read_video(tmp_path / "a.gif")
    assert len(frames) == 49
    assert fps == pytest.approx(16, rel=0.002)  # 6 hundredths a frame would be 16.7, 7 would be 14.3


def test_directory_is_replaced_whole(tmp_path):
    save_video(tmp_path / "frames", clip(9), 8, {"seed": 1})
    save_video(tmp_path / "frames", clip(5), 8, {"seed": 2})
    assert sorted(p.name for p in (tmp_path / "frames").iterdir()) == [f"{i:04d}.png" for i in range(5)]
    assert read_metadata(tmp_path / "frames") == {"seed": 2}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    save_video(tmp_path / "a.mp4", clip(), 8, {"seed": 1})
    before = (tmp_path / "a.mp4").read_bytes()
    with pytest.raises(InputError, match=r"writing .*a\.mp4 failed: ffmpeg: "):
        save_video(tmp_path / "a.mp4", clip(), -1)
    monkeypatch.setattr(images, "write_image", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_video(tmp_path / "frames", clip(), 8)
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]
    assert (tmp_path / "a.mp4").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.mov", r"suffix '\.mov'; known are \.mp4, \.webm"),
        ("v1.5", r"suffix '\.5'"),
        ("a.png", "names one image; known are"),
        ("%d-%d.png", "names one image"),
        ("dir.mp4", "is a directory; give the name of a file"),
        ("file", "is a file; a path without a suffix is a directory"),
        ("file/a.mp4", "cannot write .*file: Not a directory"),
        ("full", r"holds other files \(notes\.txt\)"),
    ],
)
def test_output_path_is_checked_first(tmp_path, name, message):
    (tmp_path / "dir.mp4").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    with pytest.raises(InputError, match=message):
        check_output_path(tmp_path / name)
    with pytest.raises(InputError, match=message):
        save_video(tmp_path / name, clip(), 8)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is a directory where nobody can write")
def test_unwritable_directory():
    with pytest.raises(InputError, match=r"cannot write /proc/new/a\.mp4: /proc: .*; choose another place"):
        check_output_path("/proc/new/a.mp4")


def test_a_missing_library_is_reported_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"PyAV, which writes \.mp4, is not installed: .*; or save as \.gif or as a dir"
    ):
        check_output_path(tmp_path / "a.mp4")
    check_output_path(tmp_path / "a.gif")


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.gif"])
def test_files_that_earlier_versions_wrote_through_the_ffmpeg_program(name):
    path = Path(__file__).with_name("earlier_videos") / name
    assert read_metadata(path) == {"prompt": "a = b; #c\\ \n猫", "seed": 7}
    frames, fps = read_video(path)
    assert frames[:, 0, 0].tolist() == [[0] * 3, [100] * 3, [200] * 3] and fps == 8


@pytest.mark.parametrize(
    "frames", [np.zeros((2, 4, 4, 3)), np.zeros((1, 2, 4, 4, 3), np.uint8), np.zeros((0, 4, 4, 3), np.uint8)]
)
def test_bad_frames(tmp_path, frames):
    for save in (
        lambda: save_video(tmp_path / "a.mp4", frames, 8),
        lambda: save_contact_sheet(tmp_path / "a.png", frames),
    ):
        with pytest.raises(InputError, match=r"frames must be uint8 \[F, H, W, 3\]"):
            save()


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.png"])
@pytest.mark.parametrize("content", [None, b"", b"garbage " * 100])
def test_unreadable_files(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    for read in (read_video, read_metadata):
        with pytest.raises(InputError, match=str(tmp_path)) as error:
            read(tmp_path / name)
        assert "\n" not in str(error.value)


def test_files_from_elsewhere_have_no_metadata(tmp_path):
    Image.fromarray(clip(1)[0]).save(tmp_path / "0.png")
    Image.fromarray(clip(1)[0]).save(tmp_path / "0.gif", comment=b"made by hand")
    assert read_metadata(tmp_path / "0.png") == read_metadata(tmp_path / "0.gif") == {}
    frames, fps = read_video(tmp_path / "%d.png")
    assert (frames.shape, fps) == ((1, 48, 80, 3), 0)


def test_frames_of_different_sizes(tmp_path):
    for i in range(2):
        Image.fromarray(clip(1, 32 + i)[0]).save(tmp_path / f"{i}.png")
    with pytest.raises(InputError, match="different sizes"):
        read_video(tmp_path)


def test_frames_are_read_by_number(tmp_path):
    frames = clip(12)
    for i, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / f"f{i}.png")
    np.testing.assert_array_equal(read_video(tmp_path / "f%d.png")[0], frames)


def test_real_video():
    path = SHARED / "data" / "media" / "hiker_240x368_49f.mp4"
    if not path.is_file():
        pytest.skip(f"the real video is not at {path}")
    frames, fps = read_video(path)
    assert frames.shape == (49, 240, 368, 3)
    assert fps > 0
    assert read_metadata(path) == {}


def test_contact_sheet(tmp_path):
    frames = clip(7, 10, 20)
    save_contact_sheet(tmp_path / "new" / "a.png", frames, columns=3)
    sheet = np.asarray(Image.open(tmp_path / "new" / "a.png"))
    assert sheet.shape == (3 * 12 - 2, 3 * 22 - 2, 3)
    for i, frame in enumerate(frames):
        top, left = 12 * (i // 3), 22 * (i % 3)
        np.testing.assert_array_equal(sheet[top : top + 10, left : left + 20], frame)
    assert (sheet[24:, 22:] == 255).all()
    save_contact_sheet(tmp_path / "b.png", clip(49, 10, 20))
    assert Image.open(tmp_path / "b.png").size == (7 * 22 - 2, 7 * 12 - 2)
    with pytest.raises(InputError, match=r"a contact sheet is a \.png"):
        save_contact_sheet(tmp_path / "a.jpg", frames)


def test_to_uint8_equals_reference():
    values = np.concatenate([np.linspace(-1.2, 1.2, 9001), (np.arange(256) + 0.5) / 127.5 - 1]).astype(np.float32)
    values = np.resize(values, (1, 3, 2, 40, 41))  # B C F H W
    images = VideoProcessor(vae_scale_factor=8).postprocess_video(torch.from_numpy(values), output_type="pil")[0]
    expected = np.stack([np.asarray(image) for image in images])
    ours = to_uint8(jnp.asarray(values[0].transpose(1, 2, 3, 0)))
    assert ours.dtype == jnp.uint8
    np.testing.assert_array_equal(ours, expected)
