"""Folders of clips: finding and checking them, and loading one in the model's size and frame rate."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from cogvideox_flax.errors import InputError
from cogvideox_flax.io import limits
from cogvideox_flax.io.clips import fit_frame
from cogvideox_flax.io.video import read_video, save_video
from cogvideox_flax.training.clips import Clip, clip_contents, find_clips, load_clip
from tests.support.media import CAPTION, cost_of_loading, count_frames, encode, make_clips, pattern
from tests.support.reference import SHARED


def load_from_whole_decode(path, num_frames, height, width, fps):
    """The same clip from a whole decode, cropped by diffusers."""
    frames, own_fps = read_video(path)
    ratio = own_fps / fps if own_fps else 1.0
    there = int(np.ceil((len(frames) - 0.5) / ratio))
    start = (there - num_frames) // 2
    chosen = np.floor(np.arange(start, start + num_frames) * ratio + 0.5).astype(int)
    crop = {"height": height, "width": width, "resize_mode": "crop"}
    return np.stack([np.asarray(VaeImageProcessor().resize(Image.fromarray(frames[i]), **crop)) for i in chosen])


@pytest.mark.parametrize(
    ("name", "rate"),
    [*(("a.mp4", rate) for rate in (5, 8, 12, 24, 60)), ("a.mkv", "30000/1001"), ("a.mov", 24), ("a.webm", 30)],
)
def test_load_clip_equals_decoding_the_whole_video(tmp_path, name, rate):
    path = tmp_path / name
    codec, options = "libx264", {"bf": 3}
    if name == "a.webm":
        codec, options = "libvpx", {"deadline": "realtime", "cpu-used": 8}
    encode(path, pattern(90, 50, rate, 12), codec, options | {"g": 24})
    for num_frames, size in ((9, (32, 48)), (49, (16, 16))):
        expected = load_from_whole_decode(path, num_frames, *size, 8)
        np.testing.assert_array_equal(load_clip(path, num_frames, *size, 8), expected)


@pytest.mark.parametrize("name", ["hiker_240x368_49f.mp4", "horse_480x720_49f.mp4"])
def test_load_clip_equals_decoding_a_whole_real_video(name):
    path = SHARED / "data" / "media" / name
    if not path.is_file():
        pytest.skip(f"the real video is not at {path}")
    np.testing.assert_array_equal(load_clip(path, 9, 48, 64, 4), load_from_whole_decode(path, 9, 48, 64, 4))


@pytest.mark.parametrize("own", [(32, 47), (33, 47), (47, 31), (13, 20), (1, 1), (1, 90), (90, 1), (32, 48)])
def test_frames_of_any_size_are_cropped(tmp_path, own):
    save_video(tmp_path / "c", np.full((1, *own, 3), 200, np.uint8), 8)
    clip = load_clip(tmp_path / "c", 1, 32, 48, 8)
    assert clip.shape == (1, 32, 48, 3)
    assert (clip == 200).all()


@pytest.mark.parametrize("own", [(1, 3000), (3000, 1), (7, 2000), (2000, 7), (30, 1500), (1500, 31), (16, 193)])
def test_thin_frames_are_those_of_diffusers(own):
    """Up to the rounding of PIL's coordinates, and of its two passes in whichever order."""
    small = np.random.default_rng(0).integers(0, 256, (max(own[0] // 8, 1), max(own[1] // 8, 1), 3)).astype(np.uint8)
    frame = Image.fromarray(small).resize(own[::-1], Image.Resampling.BICUBIC)
    expected = np.asarray(VaeImageProcessor().resize(frame, height=32, width=48, resize_mode="crop"))
    found = fit_frame(np.asarray(frame), 32, 48)
    assert np.abs(found.astype(int) - expected).max() <= 2
    assert expected.std() > 10


def test_an_inexact_frame_rate_never_selects_a_frame_past_the_end(tmp_path):
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
    encode(path, "color=c=teal:s=1280x720:r=24:d=60", "libx264", {"preset": "veryfast"})
    assert path.stat().st_size < 100_000
    return path


@pytest.mark.further
def test_a_clip_of_a_long_video_takes_little_memory_and_time(minute):
    """Decoded whole it is 3.7 GiB. Measured: 60 MiB in 1.1 s."""
    cost = cost_of_loading(minute)
    assert cost["shape"] == [9, 32, 48, 3]
    assert cost["memory"] < 128
    assert cost["seconds"] < 20


@pytest.mark.further
@pytest.mark.parametrize("name", ["a.gif", "a"])
def test_a_clip_of_many_images_takes_little_memory(tmp_path, name):
    """120 frames of 800x600 are 165 MiB."""
    image = np.zeros((600, 800, 3), np.uint8)
    image[:, :400] = 200
    save_video(tmp_path / name, np.broadcast_to(image, (120, *image.shape)).copy() * moving(), 8)
    cost = cost_of_loading(tmp_path / name)
    assert cost["shape"] == [9, 32, 48, 3]
    assert cost["memory"] < 64


@pytest.mark.parametrize("own", [(1, limits.MAX_SIDE), (limits.MAX_SIDE, 1)])
def test_a_clip_of_thin_frames_takes_little_memory(tmp_path, own):
    """Resized whole, one of its frames has 67 or 151 million pixels."""
    save_video(tmp_path / "c", np.full((9, *own, 3), 200, np.uint8), 8)
    cost = cost_of_loading(tmp_path / "c")
    assert cost["shape"] == [9, 32, 48, 3]
    assert cost["memory"] < 64


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


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return make_clips(tmp_path_factory.mktemp("data") / "clips")


def test_clips_are_found_with_their_captions(clips):
    found = find_clips(clips, 9, 8)
    assert [(clip.name, clip.caption) for clip in found] == [
        ("a.mp4", CAPTION),
        ("b.gif", "a large blue square"),
        ("c", "a white circle"),
    ]


def test_captions_may_be_in_one_file(clips, tmp_path):
    folder = shutil.copytree(clips, tmp_path / "clips")
    lines = [{"file": "b.gif", "caption": "second"}, {"file": "./c", "caption": "third"}]
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert [(clip.name, clip.caption) for clip in find_clips(folder, 9, 8)] == [("b.gif", "second"), ("c", "third")]


CLIP = "testsrc=size=32x32:rate=8:duration=2"


def test_clips_of_every_kind_that_is_read_are_found(tmp_path):
    kinds = {"a.avi": "avi", "b.m4v": "mp4", "c.MOV": "mov", "d.webm": "webm", "sub/e.mkv": "matroska", "g.dat": "mp4"}
    for name, container in kinds.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        encode(path, CLIP, "libvpx-vp9" if container == "webm" else "mpeg4", container=container)
        path.with_suffix(".txt").write_text(f"caption of {path.stem}")
    (tmp_path / "sub" / "._e.mp4").write_bytes(b"what macOS leaves beside a file")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "f.mp4").write_bytes(b"")
    (tmp_path / "sub" / "again").symlink_to(tmp_path)  # no end
    found = [(clip.name, clip.caption) for clip in find_clips(tmp_path, 9, 8)]
    assert found == [(name, f"caption of {Path(name).stem}") for name in sorted(kinds)]
    (tmp_path / "b.m4v").rename(tmp_path / "b.mpg")
    (tmp_path / "b.mpg").write_bytes(b"none that is read")
    with pytest.raises(InputError, match=r"b\.mpg: cannot read .* its contents are none of"):
        find_clips(tmp_path, 9, 8)


def test_captions_without_a_clip_are_named(clips, tmp_path, caplog):
    folder = shutil.copytree(clips, tmp_path / "clips")
    (folder / "more").mkdir()
    for name in ("gone", "README", "more/also"):
        (folder / f"{name}.txt").write_text("something")
    (folder / "README.md").write_text("not a clip")
    assert len(find_clips(folder, 9, 8)) == 3
    (warning,) = caplog.messages
    assert warning == f"{folder} holds captions without a clip: README.txt, gone.txt, more/also.txt"


LINES = ['{"file": "b.gif", "caption": "two\u2028lines"}', '{"file": "a.mp4", "caption": "x, \\"y\\""}']


@pytest.mark.parametrize(
    "files",
    [
        {"captions.jsonl": "\n\n".join(LINES) + "\n"},
        {"metadata.jsonl": "\r\n".join(LINES).replace("file", "file_name").replace("caption", "text")},
        {"metadata.csv": 'file_name,width,text\r\nb.gif,48,two\u2028lines\r\n./a.mp4,90,"x, ""y"""\r\n'},
        {"metadata.csv": '\ufeffvideo,prompt\nb.gif,two\u2028lines\na.mp4,"x, ""y"""\n'},
        {"videos.txt": "b.gif\na.mp4\n\n", "prompts.txt": 'two\u2028lines\nx, "y"\n'},
    ],
    ids=["captions.jsonl", "metadata.jsonl", "metadata.csv", "metadata.csv of other names", "videos.txt"],
)
def test_tables_of_captions_as_other_tools_write_them(clips, tmp_path, caplog, files):
    folder = shutil.copytree(clips, tmp_path / "clips", ignore=shutil.ignore_patterns("*.txt"))
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    found = [(clip.name, clip.caption) for clip in find_clips(folder, 9, 8)]
    assert found == [("a.mp4", 'x, "y"'), ("b.gif", "two\u2028lines")]
    (warning,) = caplog.messages
    assert f"{folder} holds clips without a caption in" in warning and warning.endswith(", which are left out: c")


@pytest.mark.parametrize("layout", ["beside", "folders", "metadata.json", "metadata.jsonl"])
def test_control_clips_as_people_have_them(clips, tmp_path, caplog, layout):
    """Beside their clips, in a folder of their own, and in the tables of VideoX-Fun and musubi-tuner."""
    folder = shutil.copytree(clips, tmp_path / "clips")
    names = {"a.mp4": "a.control.mkv", "b.gif": "b.control.gif", "c": "c.control"}
    if layout == "folders":
        names = {"a.mp4": "control/a.mkv", "b.gif": "control/b.gif", "c": "control/c"}
        for part in ("videos", "labels", "control"):
            (folder / part).mkdir()
        for path in [path for path in folder.iterdir() if path.name[0] in "abc" and path.name != "control"]:
            path.rename(folder / ("labels" if path.suffix == ".txt" else "videos") / path.name)
    videos = folder / "videos" if layout == "folders" else folder
    for name, control in names.items():
        copy = shutil.copytree if (videos / name).is_dir() else shutil.copyfile
        copy(videos / name, folder / control)
    if layout.startswith("metadata"):
        for path in folder.glob("*.txt"):
            path.unlink()
        keys = ("file_path", "text", "control_file_path")
        if layout == "metadata.jsonl":
            keys = ("video_path", "caption", "control_path")
        rows = [dict(zip(keys, (name, "x", control), strict=True)) for name, control in names.items()]
        text = json.dumps(rows) if layout == "metadata.json" else "\n".join(map(json.dumps, rows))
        (folder / layout).write_text(text)
    found = find_clips(folder, 9, 8, control=True)
    assert [str(clip.control.relative_to(folder)) for clip in found] == list(names.values())
    assert [[path.name for path in each.files[:1]] for each in clip_contents(found)] == [
        ["a.mp4"],
        ["b.gif"],
        ["0000.png"],
    ]
    assert [len(each.files) for each in clip_contents(found)] == [2, 2, 18]
    assert not caplog.messages
    assert Clip.from_json(json.loads(json.dumps(found[0].to_json()))) == found[0]


def test_faults_of_control_clips(clips, tmp_path):
    folder = shutil.copytree(clips, tmp_path / "clips")
    save_video(folder / "a.control.gif", np.zeros((9, 40, 90, 3), np.uint8), 8)
    for name in ("b.control.mp4", "b.control.gif"):
        save_video(folder / name, np.zeros((10, 32, 48, 3), np.uint8), 8)
    with pytest.raises(InputError) as caught:
        find_clips(folder, 9, 8, control=True)
    for part in (
        "a.mp4: its control clip a.control.gif has 9 frames at 8 per second; expected at least 10, as many as the clip",
        "b.gif: several control clips, b.control.gif, b.control.mp4",
        "c: no control clip c.control.mp4",
    ):
        assert part in str(caught.value)
    (folder / "b.control.gif").unlink()
    for name in ("a.control.gif", "c.control.gif"):
        save_video(folder / name, np.zeros((10, 40, 60, 3), np.uint8), 8)
    with pytest.raises(InputError, match=r"its control clip a\.control\.gif is 60x40, the clip 90x40"):
        find_clips(folder, 9, 8, control=True)
    for name, text, fault in (
        (
            "captions.jsonl",
            '{"file": "a.mp4", "caption": "x"}',
            'line 1: expected {"file": ..., "caption": ..., "control"',
        ),
        ("metadata.json", '[{"file": "a.mp4", "caption": "x", "control": "a.control.gif"}, 3]', "entry 2: expected"),
    ):
        (folder / name).write_text(text)
        with pytest.raises(InputError, match=re.escape(fault)):
            find_clips(folder, 9, 8, control=True)
        (folder / name).unlink()


def test_the_control_clip_is_cut_where_its_clip_is(tmp_path):
    """From its beginning, also where it is longer."""
    frames = np.repeat(np.arange(20, dtype=np.uint8), 16 * 16 * 3).reshape(20, 16, 16, 3)
    save_video(tmp_path / "c", frames, 8)
    assert load_clip(tmp_path / "c", 9, 16, 16, 8, count=13)[:, 0, 0, 0].tolist() == list(range(2, 11))
    with pytest.raises(InputError, match="20 frames at 8 per second; 21 are needed"):
        load_clip(tmp_path / "c", 9, 16, 16, 8, count=21)


def test_captions_may_be_in_a_folder_of_their_own(clips, tmp_path):
    shutil.copytree(clips, tmp_path / "videos", ignore=shutil.ignore_patterns("*.txt"))
    shutil.copytree(clips, tmp_path / "labels", ignore=shutil.ignore_patterns("*.mp4", "*.gif", "c"))
    found = [(clip.name, clip.caption) for clip in find_clips(tmp_path, 9, 8)]
    assert found == [("videos/a.mp4", CAPTION), ("videos/b.gif", "a large blue square"), ("videos/c", "a white circle")]
    (tmp_path / "labels" / "c.txt").unlink()
    with pytest.raises(InputError, match=r"videos/c: no caption labels/c\.txt"):
        find_clips(tmp_path, 9, 8)


def test_lists_of_videos_and_prompts_must_be_equally_long(clips, tmp_path):
    folder = shutil.copytree(clips, tmp_path / "clips")
    (folder / "videos.txt").write_text("a.mp4\nb.gif\n")
    (folder / "prompts.txt").write_text("one\n")
    with pytest.raises(InputError, match=r"videos\.txt has 2 lines and prompts\.txt 1; expected a line per clip"):
        find_clips(folder, 9, 8)


@pytest.mark.parametrize(("count", "fps"), [(9, 8), (30, 30), (81, 16), (1, 8)])
@pytest.mark.parametrize("name", ["v.mp4", "v.gif", "v"])
def test_frames_are_counted_as_they_would_be_read(tmp_path, name, count, fps):
    # every frame is another one: a gif joins equal neighbours
    save_video(
        tmp_path / name,
        np.arange(count, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(16, 1).repeat(16, 2).repeat(3, 3),
        fps,
    )
    frames, own = read_video(tmp_path / name)
    assert count_frames(tmp_path / name) == (len(frames), own)
    assert len(frames) == count


def numbered(count):
    """Frames that say which they are: frame i has the value 5 i."""
    return np.full((count, 16, 16, 3), 1, np.uint8) * (5 * np.arange(count, dtype=np.uint8)).reshape(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("own_fps", "expected"),
    [
        (8, [7, 8, 9, 10, 11]),
        (16, [4, 6, 8, 10, 12]),
        (24, [3, 6, 9, 12, 15]),
        (12, [6, 8, 9, 11, 12]),  # 7.5 and 10.5 round up
        (4, [9, 9, 10, 10, 11]),  # a frame for every two
        (0, [7, 8, 9, 10, 11]),  # a sequence that does not say its rate
    ],
)
def test_the_middle_of_a_clip_is_resampled_to_the_nearest_frame(tmp_path, own_fps, expected):
    save_video(tmp_path / "c", numbered(20), own_fps)
    clip = load_clip(tmp_path / "c", 5, 16, 16, 8)
    assert (clip[:, 0, 0, 0] // 5).tolist() == expected


def test_clips_cover_and_are_cropped_around_the_centre(tmp_path):
    wide = np.zeros((1, 20, 60, 3), np.uint8)
    wide[:, :, 20:40] = [200, 100, 0]  # the middle third, square
    save_video(tmp_path / "wide", wide, 8)
    clip = load_clip(tmp_path / "wide", 1, 40, 40, 8)
    assert clip.shape == (1, 40, 40, 3)
    assert (clip[0, :, 8:-8] == [200, 100, 0]).all()
    assert clip[0, :, :, 0].min() > 90  # the black beside it only rings into the border
    tall = wide.transpose(0, 2, 1, 3)
    save_video(tmp_path / "tall", tall, 8)
    assert (load_clip(tmp_path / "tall", 1, 40, 40, 8) == clip.transpose(0, 2, 1, 3)).all()


def test_all_faults_of_a_folder_in_one_message(clips, tmp_path):
    folder = shutil.copytree(clips, tmp_path / "clips")
    (folder / "a.txt").unlink()
    (folder / "b.txt").write_text(" \n")
    (folder / "d.mp4").write_bytes(b"not a video")
    (folder / "d.txt").write_text("something")
    save_video(folder / "e.mp4", numbered(9), 16)
    (folder / "e.txt").write_text("something")
    (folder / "notes.md").write_text("not a clip")
    with pytest.raises(InputError) as caught:
        find_clips(folder, 9, 8)
    message = str(caught.value)
    assert "(4 faults)" in message
    for part in ("a.mp4: no caption a.txt", "b.txt is empty", "d.mp4: cannot read", "e.mp4: too short, 5 frames"):
        assert part in message
    assert "notes" not in message


def test_all_faults_of_a_caption_file_in_one_message(clips, tmp_path):
    folder = shutil.copytree(clips, tmp_path / "clips")
    lines = [
        '{"file": "../clips/a.mp4", "caption": "x"}',
        json.dumps({"file": str(clips / "a.mp4"), "caption": "x"}),
        '{"file": "c/../../a.mp4", "caption": "x"}',
        '{"file": "a.mp4"}',
        "not json",
        '{"file": "b.gif", "caption": ""}',
        '{"file": "gone.mp4", "caption": "x"}',
        '{"file": "c", "caption": "x"}',
        '{"file": "c/", "caption": "y"}',
        '{"file": 3, "caption": "y"}',
    ]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError) as caught:
        find_clips(folder, 9, 8)
    message = str(caught.value)
    assert message.count("leaves the folder") == 3
    assert message.count('expected {"file"') == 2
    for part in ("(9 faults)", "b.gif: its caption", "there is no video", "line 9: c/ has a caption", "must be text"):
        assert part in message
