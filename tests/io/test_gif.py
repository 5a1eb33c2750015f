"""GIFs: frames one by one, their times and comment, and damaged ones."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.io import limits
from cogvideox_flax.io.clips import Resampled
from cogvideox_flax.io.gif import Gif
from cogvideox_flax.io.video import open_video, read_metadata, read_video, save_video
from tests.support.media import count_frames, refusals_of_damaged


def clip(count: int = 12) -> np.ndarray:
    image = np.random.default_rng(0).integers(0, 256, (24, 40, 3)).astype(np.uint8)
    return np.stack([np.roll(image, 3 * i, 1) for i in range(count)])


def by_pil(path) -> np.ndarray:
    """Every frame in the plainest way, on white."""
    with Image.open(path) as image:
        frames = []
        for i in range(image.n_frames):
            image.seek(i)
            frame = Image.new("RGB", image.size, "white")
            frame.paste(image.convert("RGB"), mask=image.convert("RGBA").getchannel("A"))
            frames.append(np.asarray(frame))
    return np.stack(frames)


def with_holes(path) -> None:
    """Small frames over others, transparent, with each way to clear what was there."""
    frames = [Image.fromarray(frame).quantize(16) for frame in clip(4)]
    patches = [frame.crop((5, 5, 20, 15)) for frame in frames]
    frames[0].save(
        path,
        save_all=True,
        append_images=[patches[1], frames[2], patches[3]],
        duration=50,
        disposal=[1, 2, 3, 1],
        transparency=3,
    )


@pytest.mark.parametrize("make", [lambda path: save_video(path, clip(), 8), with_holes])
def test_any_frames_are_those_of_a_whole_decode(tmp_path, make):
    path = tmp_path / "a.gif"
    make(path)
    expected = by_pil(path)
    assert make is not with_holes or (expected == 255).all(-1).any()
    np.testing.assert_array_equal(read_video(path)[0], expected)
    count = len(expected)
    for indices in ([0], [count - 1], [1, 3], [2]):
        found = dict(open_video(path).frames(indices))
        assert list(found) == indices
        assert all((frame == expected[i]).all() for i, frame in found.items())


def test_frames_are_counted_and_described_without_decoding_all(tmp_path, monkeypatch):
    save_video(tmp_path / "a.gif", clip(), 8, {"seed": 3})
    expected = len(by_pil(tmp_path / "a.gif"))
    monkeypatch.setattr(Gif, "_decode", None)
    assert count_frames(tmp_path / "a.gif") == (expected, 8)
    assert read_metadata(tmp_path / "a.gif") == {"seed": 3}


STILL, PAIRS, UNEVEN = [0] * 9, [0, 0, 1, 1, 2, 2], [0, 0, 1, 2, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("fps", [0.5, 8, 12, 16, 24, 29.97, 60, 100])
@pytest.mark.parametrize("shown", [STILL, PAIRS, UNEVEN, [*UNEVEN, *range(30, 130), 130, 130]], ids=len)
def test_equal_frames_come_back_as_often_as_they_were_written(tmp_path, shown, fps):
    """Equal frames are one image in the file."""
    path = tmp_path / "a.gif"
    save_video(path, colours(shown), fps)
    assert count_frames(path) == (len(shown), fps)
    assert (read_video(path)[0] == colours(shown)).all()
    clip = Resampled.at(open_video(path), fps)
    assert clip.ratio == 1 and clip.count == len(shown)


def test_frames_faster_than_the_times_of_the_format(tmp_path):
    """Hundredths of a second."""
    save_video(tmp_path / "a.gif", colours(range(30)), 200)
    frames, fps = read_video(tmp_path / "a.gif")
    assert fps == 200 and (frames == colours(range(30))).all()


def colours(numbers) -> np.ndarray:
    """Frames of one colour each; GIFs keep them exactly."""
    return np.repeat(np.asarray(numbers, np.uint8), 16 * 16 * 3).reshape(-1, 16, 16, 3)


@pytest.mark.parametrize(
    ("durations", "count", "fps", "at_8"),
    [
        ([100, 100, 400, 100], 7, 10, [0, 1, 2, 2, 2, 3]),  # at 0, 0.1, 0.2 and 0.6 s
        ([40, 40, 50, 80, 40, 130], 9, 9 / 0.38, [0, 3, 5]),  # 24 per second, of which some were merged
        ([120, 120, 120, 120], 4, 100 / 12, [0, 1, 2, 3]),
        ([170, 310, 90, 430], 100, 100, [0, 0, 1, 1, 2, 3, 3, 3]),  # 0.17, 0.48 and 0.57 s: no common rate
        ([500, 0, 500], 11, 10, [0, 0, 0, 0, 1, 2, 2, 2, 2]),  # players show 0 as 0.1 s
        ([0, 0, 0], 3, 10, [0, 1]),  # no times at all
        ([10, 10, 20, 20], 12, 50, [0, 1]),  # browsers show 0.01 s as 0.1 s, and 0.02 s as it is
    ],
)
def test_each_frame_of_other_programs_is_at_its_own_time(tmp_path, durations, count, fps, at_8):
    path = tmp_path / "a.gif"
    first, *rest = map(Image.fromarray, colours(range(len(durations))))
    first.save(path, save_all=True, append_images=rest, duration=durations)
    assert count_frames(path) == (count, pytest.approx(fps))
    clip = Resampled.at(open_video(path), 8)
    assert clip.count == len(at_8)
    assert clip.read(range(clip.count), 16, 16)[:, 0, 0, 0].tolist() == at_8


@pytest.mark.parametrize("stated", [b"8.0", b"800", b"nan", b"-1", b"x", b"0.01"])
def test_a_stated_rate_that_is_not_that_of_the_times_is_not_taken(tmp_path, stated):
    path = tmp_path / "a.gif"
    save_video(path, colours(UNEVEN), 10)
    data = path.read_bytes()
    assert data.count(b"COGVIDEOFPS\x0410.0\0") == 1
    path.write_bytes(data.replace(b"\x0410.0", bytes([len(stated)]) + stated))
    if stated == b"800":  # ten milliseconds each
        assert count_frames(path) == (720, 800)
    else:
        assert count_frames(path) == (9, 10)
        assert (read_video(path)[0] == colours(UNEVEN)).all()


def test_a_comment_before_the_frames_is_read_too(tmp_path):
    first, *rest = map(Image.fromarray, clip())
    first.save(tmp_path / "a.gif", save_all=True, append_images=rest, comment=b'{"seed": 4}')
    assert read_metadata(tmp_path / "a.gif") == {"seed": 4}


def blocks(width, height, *frames, end=b";") -> bytes:
    """A GIF with frames of one colour at (left, top, width, height)."""
    data = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes([255, 0, 0, 0, 255, 0])
    for place in frames:
        data += b"!\xf9\4\0\0\0\0\0"
        # a clear code and then as many codes as there are pixels, 3 bits each: pixels of at most 5 in a row
        codes, bits = [4, *[c for _ in range(place[2] * place[3]) for c in (0, 4)][:-1], 5], 0
        for i, code in enumerate(codes):
            bits |= code << 3 * i
        lzw = bits.to_bytes(-(-3 * len(codes) // 8), "little")
        data += b"," + struct.pack("<HHHHB", *place, 0) + b"\2"
        for i in range(0, len(lzw), 255):
            data += bytes([len(lzw[i : i + 255])]) + lzw[i : i + 255]
        data += b"\0"
    return data + end


def test_blocks_that_other_programs_write(tmp_path):
    path = tmp_path / "a.gif"
    path.write_bytes(blocks(4, 4, (0, 0, 4, 4), (1, 1, 2, 2), end=b""))  # no end
    assert read_video(path)[0].shape == (2, 4, 4, 3)
    path.write_bytes(blocks(0, 0, (0, 0, 4, 3)))  # no size but the first frame's
    with pytest.raises(InputError, match=r"cannot read .*a\.gif: Invalid data"):
        read_video(path)
    path.write_bytes(blocks(4, 4, (0, 0, 4, 4), (2, 2, 4, 4)))
    assert read_video(path)[0].shape == (2, 4, 4, 3)  # what reaches beyond is not shown


def test_large_gifs_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    path = tmp_path / "a.gif"
    path.write_bytes(blocks(20000, 20000, (0, 0, 1, 1)))
    for read in (count_frames, read_video):
        with pytest.raises(InputError, match=r"a\.gif holds no frame of at most 33,554,432 pixels"):
            read(path)
    save_video(path, clip(), 8)
    monkeypatch.setattr(limits, "MAX_FRAMES", 5)
    with pytest.raises(InputError, match=r"a\.gif holds 12 frames; at most 5 are read"):
        count_frames(path)
    monkeypatch.setattr(limits, "MAX_FRAMES", 100)
    monkeypatch.setattr(limits, "MAX_DECODE_SECONDS", 0)
    with pytest.raises(InputError, match=r"a\.gif: its frames take longer than 0 seconds"):
        dict(open_video(path).frames([5]))


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf")])
def test_a_rate_that_no_gif_can_have(tmp_path, fps):
    with pytest.raises(InputError, match=r"a \.gif holds frames .* at a positive rate; got 40x24"):
        save_video(tmp_path / "a.gif", clip(), fps)


def test_an_image_that_is_shown_for_longer_than_the_format_can_say(tmp_path):
    with pytest.raises(InputError, match=r"a \.gif shows an image for at most 655\.35 seconds, .* Save them as \.mp4"):
        save_video(tmp_path / "a.gif", colours([0] * 70), 0.1)
    assert not list(tmp_path.iterdir())


def test_damaged_gifs_are_read_or_refused(tmp_path):
    path = tmp_path / "a.gif"
    save_video(path, clip(6), 8, {"seed": 1})
    assert refusals_of_damaged(path, path.read_bytes(), 150, head=900) > 30


def webp(path, durations, **options):
    first, *rest = map(Image.fromarray, colours(range(0, 10 * len(durations), 10)))
    first.save(path, save_all=True, append_images=rest, duration=durations, lossless=True, **options)
    return path


@pytest.mark.parametrize(
    ("durations", "count", "fps", "at_8"),
    [
        ([100, 100, 400, 100], 7, 10, [0, 10, 20, 20, 20, 30]),
        ([125, 125, 125], 3, 8, [0, 10, 20]),
        ([33, 33, 34, 33], 4, 30.08, [0]),
        ([0, 0, 0], 3, 10, [0, 10]),  # browsers show 0 as 0.1 s
    ],
)
def test_an_animated_webp_is_read_as_a_clip(tmp_path, durations, count, fps, at_8):
    path = webp(tmp_path / "a.webp", durations)
    assert count_frames(path) == (count, pytest.approx(fps, abs=0.01))
    clip = Resampled.at(open_video(path), 8)
    assert clip.read(range(clip.count), 16, 16)[:, 0, 0, 0].tolist() == at_8
    video = open_video(path)
    for indices in ([0], [count - 1], [0, count - 1]):
        found = dict(video.frames(indices))
        assert list(found) == indices
        assert all((found[i] == read_video(path)[0][i]).all() for i in indices)


def test_a_webp_is_written_and_read(tmp_path):
    save_video(tmp_path / "a.webp", clip(), 8, {"seed": 3})
    frames, fps = read_video(tmp_path / "a.webp")
    assert fps == 8 and read_metadata(tmp_path / "a.webp") == {"seed": 3}
    np.testing.assert_array_equal(frames, by_pil(tmp_path / "a.webp"))


def test_transparent_parts_of_a_webp_lie_on_the_ground(tmp_path):
    layers = [Image.new("RGBA", (16, 16), (200, 0, 0, alpha)) for alpha in (0, 255)]
    layers[0].save(tmp_path / "a.webp", save_all=True, append_images=layers[1:], lossless=True, duration=100)
    for ground, level in (("white", 255), ("black", 0)):
        hidden, seen = dict(open_video(tmp_path / "a.webp", ground).frames([0, 1])).values()
        assert (hidden == level).all() and (seen == [200, 0, 0]).all()


def test_damaged_webps_are_read_or_refused(tmp_path):
    path = webp(tmp_path / "a.webp", [100] * 6)
    assert refusals_of_damaged(path, path.read_bytes(), trials=60, head=120) > 20
