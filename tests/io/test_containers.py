"""MP4, MOV, MKV, WebM and AVI: any frames of them, what is refused, and what a file may cost."""

from __future__ import annotations

import _thread
import gc
import logging
import random
import re
import shutil
import struct
import threading
import time
from fractions import Fraction

import av
import numpy as np
import psutil
import pytest
from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.io import limits
from cogvideox_flax.io.containers import Container, x264_params
from cogvideox_flax.io.source import FrameStream
from cogvideox_flax.io.video import open_video, read_metadata, read_video, save_video
from tests.support.media import EXACT, add_sound, copy, count_frames, encode, pattern, refusals_of_damaged, whole
from tests.support.reference import SHARED


def h264(**options):
    return "libx264", {"preset": "veryfast"} | x264_params() | options


def x265(parameters):
    return "libx265", {"preset": "veryfast", "x265-params": parameters}


KINDS = {
    "several_keyframes_and_b_frames.mp4": (pattern(), *h264(g=24, bf=3)),
    "ntsc_rate.mov": (pattern(rate="30000/1001"), *h264(g=48)),
    "b_frames.mkv": (pattern(), *h264(g=24, bf=3)),
    "open_gop.mp4": (pattern(), "libx264", {"preset": "veryfast", "x264-params": "open-gop=1:keyint=30:bframes=5"}),
    "no_keyframe_but_the_first.mp4": (pattern(), "libx264", {"preset": "veryfast", "intra-refresh": 1, "g": 60}),
    "hevc_open_gop.mp4": (pattern(), *x265("keyint=24:open-gop=1:bframes=4:log-level=error")),
    "ten_bits.mp4": (pattern(), *x265("keyint=24:log-level=error"), "yuv420p10le"),
    "vp8_hidden_frames.webm": (pattern(), "libvpx", {"auto-alt-ref": 1, "lag-in-frames": 16, "g": 48}),
    "vp9.webm": (pattern(), "libvpx-vp9", {"cpu-used": 8, "g": 48}),
    "b_frames.avi": (pattern(), "mpeg4", {"bf": 2, "g": 24}),
    "h264_b_frames.avi": (pattern(), *h264(g=24, bf=3)),
    "fragments.mp4": (pattern(), *h264(g=24), "yuv420p", {"movflags": "frag_keyframe+empty_moov"}),
    "late_start.mkv": (pattern(), *h264(g=24), "yuv420p", {"output_ts_offset": "100"}),
    "b_frames.ts": (pattern(), *h264(g=24, bf=3)),
    "mpeg2.ts": (pattern(), "mpeg2video", {"bf": 2, "g": 12, "q": 3}),
    "mpeg2.mpg": (pattern(), "mpeg2video", {"bf": 2, "g": 12, "q": 3}),
    "mpeg1.mpg": (pattern(), "mpeg1video", {"bf": 2, "g": 12, "q": 3}),
    "stream.m2v": (pattern(), "mpeg2video", {"bf": 2, "g": 12, "q": 3}, "yuv420p", None, "mpeg2video"),
    "flv1.flv": (pattern(), "flv", {"g": 24}),
    "h264.flv": (pattern(), *h264(g=24, bf=3)),
    "wmv2.wmv": (pattern(), "wmv2", {"g": 24}),
    "vp8.ogv": (pattern(), "libvpx", {"auto-alt-ref": 0, "g": 48}, "yuv420p", None, "ogg"),
    "interlaced.mp4": (f"{pattern(height=24, rate=48)},weave", *h264(flags="+ildct+ilme", g=24)),
}


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """A video of each kind, made when it is asked for."""
    folder = tmp_path_factory.mktemp("media")

    def make(name):
        path = folder / name
        if not path.exists():
            encode(path, *KINDS[name])
        return path

    return make


def assert_any_frames_equal_the_whole(path, expected):
    frames, fps = read_video(path)
    np.testing.assert_array_equal(frames, expected)
    count = len(expected)
    assert count_frames(path) == (count, fps)
    video = open_video(path)
    draws = random.Random(0)
    picks = [[0], [count - 1], [count // 2, count // 2 + 1], list(range(count // 2, count, 3)), [1, count - 2]]
    picks += [sorted(draws.sample(range(count), 4)) for _ in range(3)] + [[i] for i in range(5, count, 29)]
    for indices in picks:
        found = dict(video.frames(indices))
        assert list(found) == indices
        for i, frame in found.items():
            assert frame.dtype == np.uint8
            assert (frame == expected[i]).all(), (i, indices)


@pytest.mark.parametrize("name", KINDS)
def test_any_frames_are_those_of_a_whole_decode(media, name):
    assert_any_frames_equal_the_whole(media(name), whole(media(name)))


@pytest.mark.parametrize(
    ("codec", "options", "pix_fmt"),
    [("qtrle", {}, "argb"), ("prores_ks", {"profile": "4444"}, "yuva444p10le"), ("png", {}, "rgba")],
)
@pytest.mark.parametrize("hidden", ["black", "white"])
def test_transparent_parts_lie_on_the_ground(tmp_path, codec, options, pix_fmt, hidden):
    """A white square on a transparent layer, as programs for titles and masks export it."""
    layer = f"format=rgba,drawbox=c={hidden}@0:replace=1:t=fill,drawbox=c=white:replace=1:t=fill:x=16:y=8:w=16:h=16"
    path = tmp_path / "a.mov"
    encode(path, f"color=c=white:s=64x48:r=8:d=0.5,{layer}", codec, options, pix_fmt)
    square = np.zeros((48, 64, 3), np.uint8)
    square[8:24, 16:32] = 255
    for ground, expected in (("white", np.full_like(square, 255)), ("black", square)):
        found = np.stack(list(dict(open_video(path, ground).frames(range(4))).values()))
        assert np.abs(found.astype(int) - expected).max() <= 3  # ProRes is lossy
    np.testing.assert_array_equal(read_video(path)[0][0], dict(open_video(path).frames([0]))[0])


@pytest.mark.parametrize("name", ["hiker_240x368_49f.mp4", "horse_480x720_49f.mp4"])
def test_any_frames_of_a_real_video(name):
    path = SHARED / "data" / "media" / name
    if not path.is_file():
        pytest.skip(f"the real video is not at {path}")
    assert_any_frames_equal_the_whole(path, whole(path))


def test_decoding_begins_near_the_first_wanted_frame(tmp_path, caplog):
    """The time for two frames does not grow with what is before them."""
    encode(tmp_path / "a.mp4", pattern(160, 120, 24, 120), *h264(g=48))
    caplog.set_level(logging.INFO, "cogvideox_flax")
    video = open_video(tmp_path / "a.mp4")
    assert video.info.num_frames == 2880

    def seconds(index):
        began = time.monotonic()
        assert len(dict(video.frames([index, index + 1]))) == 2
        return time.monotonic() - began

    seconds(100)
    early, late = (min(seconds(index) for _ in range(3)) for index in (100, 2800))
    assert late < 3 * early + 0.1
    assert not caplog.messages


def test_an_mp4_that_takes_every_frame_for_a_keyframe(tmp_path, caplog):
    """Decoding cannot begin where it says, so it begins at the start."""
    path = tmp_path / "a.mp4"
    encode(path, pattern(), *h264(g=250, bf=0))
    expected = whole(path)
    path.write_bytes(path.read_bytes().replace(b"stss", b"free"))
    caplog.set_level(logging.INFO, "cogvideox_flax")
    assert_any_frames_equal_the_whole(path, expected)
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert re.search(r"a\.mp4: decoded from its beginning, as from frame 72 on: .* 0 of 2 frames can be", caplog.text)


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("flip", [None, "hflip", "vflip"])
def test_a_rotated_video_is_read_upright(tmp_path, degrees, flip):
    """Counter-clockwise, then mirrored."""
    plain, path = tmp_path / "plain.mp4", tmp_path / "a.mp4"
    encode(plain, pattern(), *h264(g=24))
    encode(path, pattern(), *h264(g=24), turn=(degrees, flip == "hflip", flip == "vflip"))
    filters = [*[("transpose", "cclock")] * (degrees // 90), *([(flip, None)] if flip else [])]
    expected = whole(plain, *filters)
    assert open_video(path).info.height == (64 if degrees % 180 else 48)
    assert_any_frames_equal_the_whole(path, expected)


@pytest.mark.parametrize(
    ("name", "codec", "aspect", "degrees", "shown"),
    [
        ("pal_wide.mp4", "libx264", "64/45", 0, (48, 91)),  # 64 * 64 / 45
        ("ntsc.mkv", "libx264", "8/9", 0, (54, 64)),  # enlarged, never reduced: as mpv and Chromium do
        ("turned.mp4", "libx264", "2", 90, (128, 48)),
        ("wide.mov", "mpeg4", "3/2", 0, (48, 96)),
        ("square.mp4", "libx264", "1", 0, (48, 64)),
    ],
)
def test_pixels_that_are_not_square_are_shown_in_their_aspect_ratio(tmp_path, name, codec, aspect, degrees, shown):
    """A circle is a circle, before the file's rotation."""
    layer = (
        f"color=c=black:s=64x48:r=8:d=0.5,geq=lum='if(lt(hypot((X-31.5)*{aspect},(Y-23.5)),16),255,0)':cb=128:cr=128"
    )
    path = tmp_path / name
    encode(
        path,
        layer,
        codec,
        {"qscale": 2} if codec == "mpeg4" else {},
        "yuv420p",
        turn=(degrees, False, False),
        sample_aspect_ratio=Fraction(aspect),
    )
    video = open_video(path)
    assert (video.info.height, video.info.width) == shown
    (frame,) = dict(video.frames([2])).values()
    assert frame.shape == (*shown, 3)
    rows, columns = np.nonzero(frame[..., 0] > 128)
    assert abs(np.ptp(rows) - np.ptp(columns)) <= 2
    scaled = ("scale", f"{shown[1]}:{shown[0]}:{EXACT}")
    expected = whole(path, *[("transpose", "cclock")] * (degrees // 90), scaled)
    assert np.abs(frame.astype(int) - expected[2]).max() <= 2


def test_dv_is_read_in_its_aspect_ratio(tmp_path):
    encode(tmp_path / "a.dv", pattern(720, 576, 25, 0.4), "dvvideo", sample_aspect_ratio=Fraction(16, 15))
    frames, fps = read_video(tmp_path / "a.dv")
    assert (frames.shape, fps) == ((10, 576, 768, 3), 25)
    scaled = whole(tmp_path / "a.dv", ("scale", f"768:576:{EXACT}")).astype(int)  # in two steps, to size and to RGB
    assert np.abs(frames - scaled).mean() < 1 < np.abs(frames - np.roll(scaled, 1, 2)).mean()
    assert_any_frames_equal_the_whole(tmp_path / "a.dv", frames)


def test_an_aspect_ratio_that_makes_a_frame_too_large_is_refused(tmp_path):
    encode(tmp_path / "a.mp4", pattern(2048, seconds=0.5), "libx264", sample_aspect_ratio=Fraction(40))
    with pytest.raises(InputError, match=r"a\.mp4: a frame of 81920x48 has a side of 81,920 pixels"):
        count_frames(tmp_path / "a.mp4")


def test_sound_that_begins_earlier_adds_no_frames(media, tmp_path):
    source = media("several_keyframes_and_b_frames.mp4")
    path = add_sound(source, tmp_path / "a.mp4", 7, offset=0.52)
    with av.open(str(path)) as container:
        assert container.streams.video[0].start_time > 0
    assert_any_frames_equal_the_whole(path, whole(source))


def test_frames_before_a_trim_are_decoded_and_not_shown(media, tmp_path):
    """An edit list leaves out the frames between the keyframe and the cut."""
    source, path = media("several_keyframes_and_b_frames.mp4"), tmp_path / "a.mp4"
    with av.open(str(source)) as video, av.open(str(path), "w") as output:
        stream = output.add_stream_from_template(video.streams.video[0])
        for packet in video.demux(video=0):
            if packet.size:
                packet.pts -= round(Fraction(13, 24) / packet.time_base)
                packet.dts -= round(Fraction(13, 24) / packet.time_base)
                packet.stream = stream
                output.mux(packet)
    assert_any_frames_equal_the_whole(path, whole(source)[13:])


def test_a_size_that_changes_on_the_way_is_scaled_to_the_first(tmp_path):
    for name, size in (("a", "64x48"), ("b", "128x96")):
        encode(tmp_path / f"{name}.h264", f"{pattern(seconds=4)},scale={size}", *h264(g=24, bf=0))
    both = (tmp_path / "a.h264").read_bytes() + (tmp_path / "b.h264").read_bytes()
    (tmp_path / "both.h264").write_bytes(both)
    copy(tmp_path / "both.h264", tmp_path / "both.mp4", rate=24)
    frames, fps = read_video(tmp_path / "both.mp4")
    assert (frames.shape, fps) == ((192, 48, 64, 3), 24)

    def difference(shift):
        return np.abs(frames[96 + shift :].astype(int) - frames[: 96 - shift]).mean()

    assert difference(0) < 5 < difference(10)  # the same images again; measured: 4.25 and 5.62
    assert_any_frames_equal_the_whole(tmp_path / "both.mp4", frames)


# --- times ---


def grey(path, times, unit=Fraction(1, 1000)):
    """A lossless video of frame i with the value 4 i, shown from times[i] seconds on."""
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264rgb", rate=30, options={"qp": "0", "g": "4", "bf": "2"})
        stream.width = stream.height = 16
        stream.pix_fmt = "rgb24"
        stream.codec_context.time_base = unit
        for i, seconds in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 4 * i, np.uint8), format="rgb24")
            frame.pts, frame.time_base = round(seconds / unit), unit
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return path


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_of_a_variable_rate_each_frame_is_there_as_long_as_it_is_shown(tmp_path, name):
    """The first 12 frames at 30 per second, then one every 0.3 s, then at 30 per second again."""
    steps = [1 / 30] * 12 + [0.3] * 12 + [1 / 30] * 11
    times = np.concatenate([[0], np.cumsum(steps)])
    path = grey(tmp_path / name, times.tolist())
    frames, fps = read_video(path)
    shown = frames[:, 0, 0, 0] // 4
    slots = np.floor(times * fps + 0.5)
    assert len(frames) == slots[-1] + 1
    expected = np.searchsorted(slots, np.arange(len(frames)), side="right") - 1
    assert (shown == expected).all()
    for start in (10, len(frames) // 2, len(frames) - 5):  # in the middle of long frames too
        found = dict(open_video(path).frames([start, start + 2]))
        assert [frame[0, 0, 0] // 4 for frame in found.values()] == [expected[start], expected[start + 2]]


def test_a_frame_that_is_shown_for_long_is_found_behind_its_beginning(tmp_path):
    times = [0, 1 / 30, 2 / 30, 40, 40 + 1 / 30, 90, 90 + 1 / 30]
    path = grey(tmp_path / "a.mp4", times)
    video = open_video(path)
    fps = video.info.fps
    for seconds, expected in ((39, 2), (41, 4), (89, 4), (90, 5)):
        (frame,) = dict(video.frames([round(seconds * fps)])).values()
        assert frame[0, 0, 0] // 4 == expected


def test_too_many_frames(media, tmp_path, monkeypatch):
    path = grey(tmp_path / "a.mp4", [*(i / 30 for i in range(40)), 1e5], Fraction(1, 30))
    with pytest.raises(InputError, match=r"a\.mp4 holds [\d,]+,\d\d\d,\d\d\d frames; at most 1,000,000 are read"):
        count_frames(path)  # the last of 41 comes a day after the others
    monkeypatch.setattr(limits, "MAX_FRAMES", 100)
    with pytest.raises(InputError, match=r"holds 144 frames; at most 100 are read"):
        count_frames(media("b_frames.mkv"))


# --- contents ---


def test_contents_decide_and_not_the_name(media, tmp_path):
    frames = read_video(media("vp9.webm"))[0]
    shutil.copy(media("vp9.webm"), tmp_path / "a.mp4")
    shutil.copy(media("vp9.webm"), tmp_path / "a.gif")
    for name in ("a.mp4", "a.gif"):
        np.testing.assert_array_equal(read_video(tmp_path / name)[0], frames)
    save_video(tmp_path / "b.gif", frames[:50:10], 8, {"seed": 1})
    (tmp_path / "b.gif").rename(tmp_path / "b.mp4")
    assert read_video(tmp_path / "b.mp4")[0].shape == (5, *frames.shape[1:])
    assert read_metadata(tmp_path / "b.mp4") == {"seed": 1}


@pytest.mark.parametrize("name", ["p.mp4", "p.mkv", "p.webm", "p.gif", "p.m3u8"])
@pytest.mark.parametrize(
    "text",
    [
        "ffconcat version 1.0\nfile '{}'\n",
        "file '{}'\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:6\n#EXTINF:6,\n{}\n#EXT-X-ENDLIST\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=-\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
        "<?xml version='1.0'?><MPD><Period><BaseURL>{}</BaseURL></Period></MPD>",
        "",
    ],
)
def test_a_playlist_is_no_video(media, tmp_path, name, text):
    secret = shutil.copy(media("several_keyframes_and_b_frames.mp4"), tmp_path / "secret.mp4")
    (tmp_path / name).write_text(text.format(secret.name))
    for read in (read_video, count_frames, read_metadata):
        with pytest.raises(InputError, match=r"its contents are none of MP4, MOV, MKV, WebM, AVI, .* or animated WebP"):
            read(tmp_path / name)


def test_no_demuxer_opens_another_file(media, tmp_path):
    """Even one that would, and that a file's contents never choose."""
    shutil.copy(media("several_keyframes_and_b_frames.mp4"), tmp_path / "secret.mp4")
    path = tmp_path / "p.m3u8"
    path.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:6\n#EXTINF:6,\nsecret.mp4\n#EXT-X-ENDLIST\n")
    with av.open(str(path)) as container:  # FFmpeg can
        assert container.streams.video
    for demuxer in ("hls", "concat"):
        with pytest.raises(InputError, match=r"cannot read .*p\.m3u8"):
            Container(path, demuxer).info  # noqa: B018


def test_images_named_as_videos_are_refused(tmp_path):
    for name in ("jpeg", "png"):
        Image.new("RGB", (64, 48)).save(tmp_path / f"{name}.mp4", format=name)
    (tmp_path / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\n")
    for name, message in (
        ("jpeg.mp4", "its contents are none of"),
        ("png.mp4", "it is a PNG"),
        ("eps.png", "it is none of PNG, JPEG, WEBP, AVIF, BMP, TIFF; convert it to PNG"),
    ):
        with pytest.raises(InputError, match=message):
            read_video(tmp_path / name)


def external_reference(source: bytes, target: str) -> bytes:
    """A MOV whose frames are said to be in another file, as QuickTime allows."""

    def alias() -> bytes:
        path = f"Mac/{target}".encode()
        record = b"\0" * 10 + b"\3" + b"Mac".ljust(27, b"\0") + b"\0" * 12
        record += bytes([len(target)]) + target.encode().ljust(63, b"\0") + b"\0" * 16 + struct.pack(">HH", 1, 1)
        record += b"\0" * 16 + struct.pack(">HH", 2, len(path)) + path + b"\0" * (len(path) % 2)
        record = (record + struct.pack(">HH", 0xFFFF, 0)).ljust(160, b"\0")
        return struct.pack(">I4sI", 12 + len(record), b"alis", 0) + record

    def boxes(data: bytes) -> bytes:
        out, at = b"", 0
        while at < len(data):
            size, kind = struct.unpack(">I4s", data[at : at + 8])
            body = data[at + 8 : at + size]
            if kind in (b"moov", b"trak", b"mdia", b"minf", b"dinf"):
                body = boxes(body)
            if kind == b"dref" and (b"url " in body or b"alis" in body):
                body = struct.pack(">II", 0, 1) + alias()
            if kind == b"mdat":
                body = bytes(len(body))
            out += struct.pack(">I4s", 8 + len(body), kind) + body
            at += size
        return out

    return boxes(source)


def test_a_mov_cannot_take_its_frames_from_another_file(tmp_path):
    encode(tmp_path / "secret.mov", pattern(seconds=1), *h264())
    (tmp_path / "a.mov").write_bytes(external_reference((tmp_path / "secret.mov").read_bytes(), "secret.mov"))
    with av.open(str(tmp_path / "a.mov"), options={"enable_drefs": "1"}) as container:  # FFmpeg can
        assert sum(packet.size > 0 for packet in container.demux(video=0)) == 24
    with pytest.raises(InputError, match=r"a\.mov"):
        read_video(tmp_path / "a.mov")


# --- costs ---


def test_large_frames_are_refused_by_their_header(media, monkeypatch):
    monkeypatch.setattr(limits, "MAX_PIXELS", 64 * 48 - 1)
    for name, message in (
        ("several_keyframes_and_b_frames.mp4", "a frame of 64x48 has 3,072 pixels; expected 1 to 3,071"),
        ("vp9.webm", "holds no frame of at most 3,071 pixels"),  # its decoder refuses it
    ):
        with pytest.raises(InputError, match=rf"{name}.* {message}"):
            count_frames(media(name))


def test_large_frames_behind_a_small_header_are_refused(media, tmp_path, monkeypatch):
    data = media("several_keyframes_and_b_frames.mp4").read_bytes()
    size = struct.pack(">HH", 64, 48)
    at = data.index(b"avc1", data.index(b"stsd")) + 28
    assert data[at : at + 4] == size
    (tmp_path / "a.mp4").write_bytes(data[:at] + struct.pack(">HH", 16, 16) + data[at + 4 :])
    monkeypatch.setattr(limits, "MAX_PIXELS", 64 * 48 - 1)
    with pytest.raises(InputError, match=r"a\.mp4.*64x48"):
        read_video(tmp_path / "a.mp4")


def test_a_whole_video_that_is_too_large_is_read_in_part(media, monkeypatch):
    path = media("several_keyframes_and_b_frames.mp4")
    monkeypatch.setattr(limits, "MAX_DECODED_BYTES", 2**20)
    with pytest.raises(InputError, match=r"144 frames of 64x48 are 0\.0 GiB once decoded; at most 0\.0009765"):
        read_video(path)
    assert len(dict(open_video(path).frames(range(100)))) == 100


def test_a_video_that_takes_too_long_is_given_up(media, monkeypatch):
    video = open_video(media("several_keyframes_and_b_frames.mp4"))
    assert video.info.num_frames == 144
    monkeypatch.setattr(limits, "MAX_DECODE_SECONDS", 0)
    with pytest.raises(InputError, match=r"b_frames\.mp4: its frames take longer than 0 seconds to decode"):
        dict(video.frames([0]))


def open_files():
    return [file.path for file in psutil.Process().open_files()]


def test_a_reader_that_is_closed_early_closes_its_file(media):
    path = media("several_keyframes_and_b_frames.mp4")
    frames = open_video(path).frames(range(144))
    next(frames)
    assert str(path) in open_files()
    frames.close()
    assert str(path) not in open_files()


def test_no_frames_of_a_video(media):
    assert not list(open_video(media("vp9.webm")).frames([]))


# --- damage ---


@pytest.mark.parametrize("name", ["b_frames.mkv", "several_keyframes_and_b_frames.mp4", "vp9.webm", "b_frames.avi"])
def test_damaged_files_are_read_or_refused(media, tmp_path, name):
    assert refusals_of_damaged(tmp_path / name, media(name).read_bytes(), 12, head=2000) > 0


def test_damage_in_the_middle_is_reported(media, tmp_path, caplog):
    data = bytearray(media("several_keyframes_and_b_frames.mp4").read_bytes())
    at = data.index(b"mdat") + (len(data) - data.index(b"mdat")) // 2
    data[at : at + 2000] = bytes(2000)
    (tmp_path / "a.mp4").write_bytes(data)
    assert read_video(tmp_path / "a.mp4")[0].shape == (144, 48, 64, 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a.mp4 is damaged, its frames may be too: " in caplog.text


def test_frames_that_cannot_be_decoded_are_an_error(media, tmp_path):
    data = bytearray(media("several_keyframes_and_b_frames.mp4").read_bytes())
    at = data.index(b"mdat") + 4 + (len(data) - data.index(b"mdat")) // 2
    end = data.index(b"moov") if data.index(b"moov") > at else len(data)
    data[at:end] = bytes(end - at)
    (tmp_path / "a.mp4").write_bytes(data)
    with pytest.raises(InputError, match=r"cannot read .*a\.mp4: \d+ of 144 frames can be decoded"):
        read_video(tmp_path / "a.mp4")


@pytest.mark.parametrize(("name", "muxer"), [("a.mp4", {"movflags": "+faststart"}), ("a.mkv", {}), ("a.avi", {})])
def test_a_file_that_is_cut_off_is_read_up_to_there(tmp_path, name, muxer):
    path = tmp_path / name
    encode(path, pattern(), *h264(g=24, bf=0), muxer=muxer)
    frames = read_video(path)[0]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for i, frame in open_video(path).frames(range(30)):
        assert (frame == frames[i]).all()
    try:
        cut = read_video(path)[0]  # of the packets that are there
    except InputError as e:
        assert re.search(r"cannot read .*: \d+ of 144 frames can be decoded", str(e))
    else:
        assert 30 < len(cut) < 144


# --- Ctrl-C ---


@pytest.fixture
def interrupted():
    """Ctrl-C after a moment."""
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    yield
    timer.join(60)


def test_ctrl_c_ends_reading(media, interrupted):
    path = media("several_keyframes_and_b_frames.mp4")
    with pytest.raises(KeyboardInterrupt):
        while True:
            read_video(path)
    gc.collect()  # the traceback may hold a file that was being opened
    assert str(path) not in open_files()


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".gif"])
def test_ctrl_c_ends_writing_and_leaves_nothing(tmp_path, interrupted, suffix):
    def frames():
        while True:
            yield np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), np.uint8)

    with pytest.raises(KeyboardInterrupt):
        save_video(tmp_path / f"a{suffix}", FrameStream((10**6, 64, 64, 3), frames), 8)
    assert not list(tmp_path.iterdir())
    assert str(tmp_path) not in "".join(open_files())
