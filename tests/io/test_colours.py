"""HDR and wide gamut clips as SDR: values that BT.2100, BT.2408 and BT.2087 publish, through whole files."""

from __future__ import annotations

import logging
import struct
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo

from cogvideox_flax.io.colours import hlg_scene, pq_codes, pq_light
from cogvideox_flax.io.images import read_image
from cogvideox_flax.io.video import open_video, read_video
from cogvideox_flax.training.clips import load_clip
from tests.support.media import encode

PQ, HLG, BT709 = 16, 18, 1
LUMA = np.array([0.2627, 0.6780, 0.0593])  # BT.2020
RED, GREEN, BLUE = [0.6274, 0.0691, 0.0164], [0.3293, 0.9195, 0.0880], [0.0433, 0.0114, 0.8956]
"""Those of BT.709 in linear BT.2020 (BT.2087, clause 2, M2)."""


def write(path, codes, transfer, primaries=9, codec="ffv1"):
    """Two frames of patches, 16 pixels each: R'G'B' of BT.2020 in 10 bits of limited range, with their tags."""
    codes = np.asarray(codes, float).reshape(-1, 3)
    luma = codes @ LUMA
    blue, red = (codes[:, 2] - luma) / 1.8814, (codes[:, 0] - luma) / 1.4746
    planes = [np.rint(876 * luma + 64), np.rint(896 * blue + 512), np.rint(896 * red + 512)]
    with av.open(str(path), "w") as output:
        stream: Any = output.add_stream(codec, rate=8, options={"x265-params": "lossless=1:bframes=0:log-level=error"})
        stream.width, stream.height, stream.pix_fmt = 16 * len(codes), 32, "yuv420p10le"
        context = stream.codec_context
        context.color_trc, context.color_primaries, context.colorspace, context.color_range = transfer, primaries, 9, 1
        for i in range(2):
            frame = av.VideoFrame(stream.width, stream.height, stream.pix_fmt)
            for plane, values in zip(frame.planes, planes, strict=True):
                rows = np.zeros((plane.height, plane.line_size // 2), np.uint16)
                rows[:, : plane.width] = np.repeat(values, plane.width // len(codes))
                plane.update(rows.tobytes())
            frame.pts, frame.time_base = i, Fraction(1, 8)
            frame.color_trc, frame.color_primaries, frame.colorspace, frame.color_range = transfer, primaries, 9, 1
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return path


def patches(path):
    """The middle of each, as integers."""
    frames, _ = read_video(path)
    assert (frames[0] == frames[1]).all()
    return frames[0, 16, 8::16].astype(int)


def grey(*codes):
    return np.repeat(codes, 3).reshape(-1, 3)


def shown(nits):
    """The level of 8 bits that a display of SDR (BT.1886) with a white of 203 cd/m² shows with this light."""
    return round(255 * (nits / 203) ** (1 / 2.4))


def test_published_points_of_the_transfer_functions():
    """BT.2408, table 1: grey of 18 % and the reference white in PQ and HLG; BT.2100: the peaks."""
    np.testing.assert_allclose(pq_light(np.array([0.38, 0.58, 0.7518, 1])), [26, 203, 1000, 10000], rtol=0.02)
    np.testing.assert_allclose(1000 * hlg_scene(np.array([0.38, 0.75, 1])) ** 1.2, [26, 203, 1000], rtol=0.02)
    np.testing.assert_allclose(pq_codes(np.array([0, 100, 203, 1000])), [0, 0.508, 0.581, 0.752], atol=5e-4)


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4"])
@pytest.mark.parametrize(("transfer", "codes"), [(PQ, (0, 0.38, 0.486, 0.581, 0.65, 0.752)), (HLG, None)])
def test_greys_of_hdr_have_the_light_of_sdr_up_to_a_knee_and_highlights_stay_apart(tmp_path, name, transfer, codes):
    codes = codes or (0, 0.38, 0.589, 0.75, 0.861, 1)  # the same light, 0, 26, 80, 203, 400 and 1000 cd/m²
    codec = "libx265" if name == "a.mp4" else "ffv1"
    found = patches(write(tmp_path / name, grey(*codes), transfer, codec=codec))
    assert np.ptp(found, axis=1).max() <= 1
    black, dark, middle, white, bright, peak = found[:, 1]
    assert (black, peak) == (0, 255)
    assert abs(dark - shown(26)) <= 1
    assert abs(middle - shown(80)) <= 1
    assert 226 < white < 234 < bright < 255


@pytest.mark.parametrize("transfer", [PQ, HLG, 14])
def test_wide_gamut_colours_are_those_of_bt709(tmp_path, transfer):
    """Its primaries at a quarter of the reference white, below the knee; 14: SDR."""
    light = 0.25 * np.array([RED, GREEN, BLUE])
    if transfer == PQ:
        codes = pq_codes(203 * light)
    elif transfer == HLG:  # the inverse OOTF and the OETF of BT.2100, table 5
        nits = 203 * light
        scene = nits / 1000 * ((nits @ LUMA) / 1000)[:, None] ** (1 / 1.2 - 1)
        codes = np.where(
            scene <= 1 / 12,
            np.sqrt(3 * scene),
            0.17883277 * np.log(np.maximum(12 * scene - 0.28466892, 1e-9)) + 0.55991073,
        )
    else:
        codes = light ** (1 / 2.4)
    found = patches(write(tmp_path / "a.mkv", codes, transfer))
    level = shown(203 / 4)
    assert np.abs(np.diag(found) - level).max() <= 2
    linear = (found / 255) ** 2.4
    assert (linear - np.diag(np.diag(linear))).max() < 0.002  # of 0.25; codes of 10 bits are rounded


def test_colours_beyond_bt709_and_beyond_the_peak_are_clipped_and_keep_their_hue(tmp_path):
    found = patches(write(tmp_path / "a.mkv", [[0.5, 0, 0], [0, 0.5, 0], [0, 0, 0.5], [0.9, 0.9, 0.9]], PQ))
    assert (found[:3].argmax(1) == [0, 1, 2]).all()
    assert (found[:3].min(1) == 0).all()
    assert (found[3] == 255).all()


@pytest.mark.parametrize("transfer", [PQ, HLG, 14])
def test_every_reader_converts_and_one_line_says_so(tmp_path, caplog, transfer):
    caplog.set_level(logging.INFO, "cogvideox_flax")
    path = write(tmp_path / "a.mkv", grey(0.4, 0.5), transfer)
    frames, _ = read_video(path)
    np.testing.assert_array_equal(load_clip(path, 2, 32, 32, 8), frames)
    kind = {PQ: "HDR (PQ)", HLG: "HDR (HLG)", 14: "in the colours of BT.2020"}[transfer]
    assert caplog.messages == [f"{path} is {kind}: converted to BT.709, SDR with its white at 203 nits"]


@pytest.mark.parametrize("name", ["a.png", "a.avif"])
def test_hdr_stills_are_read_as_hdr_clips_are(tmp_path, caplog, name):
    caplog.set_level(logging.INFO, "cogvideox_flax")
    codes = np.array([0, 0.38, 0.486, 0.581, 0.65, 0.752])
    pixels = np.repeat(np.rint(255 * codes).astype(np.uint8), 3).reshape(1, -1, 3).repeat(16, 0).repeat(16, 1)
    path = tmp_path / name
    cicp = PngInfo()
    cicp.add(b"cICP", bytes([9, PQ, 0, 1]))
    if name == "a.png":
        Image.fromarray(pixels).save(path, pnginfo=cicp)
    else:
        Image.fromarray(pixels).save(path, quality=100)
        data = path.read_bytes()
        assert data.count(b"colrnclx") == 1
        place = data.index(b"colrnclx") + 8
        path.write_bytes(data[:place] + struct.pack(">HH", 9, PQ) + data[place + 4 :])
    clip = patches(write(tmp_path / "a.mkv", grey(*np.rint(255 * codes) / 255), PQ))
    caplog.clear()
    found = read_image(path)[8, 8::16].astype(int)
    assert np.abs(found - clip).max() <= 2
    assert caplog.messages == [f"{path} is HDR (PQ): converted to BT.709, SDR with its white at 203 nits"]
    with Image.open(path) as image:
        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
        image.save(tmp_path / f"profile-{name}", icc_profile=profile)
    assert (read_image(tmp_path / f"profile-{name}")[8, 8::16] == pixels[8, 8::16]).all()  # SDR


def test_transparent_parts_of_a_wide_gamut_clip_lie_on_the_ground(tmp_path):
    layer = "color=c=white:s=64x48:r=8:d=0.5,format=rgba,drawbox=c=red@0:replace=1:t=fill:w=32,"
    layer += "setparams=color_primaries=bt2020"
    encode(tmp_path / "a.mov", layer, "prores_ks", {"profile": "4444"}, "yuva444p10le")
    with av.open(str(tmp_path / "a.mov")) as container:
        assert next(container.decode(video=0)).color_primaries == 9
    (frame,) = dict(open_video(tmp_path / "a.mov", "black").frames([1])).values()
    assert frame[:, :30].max() <= 3 and frame[:, 34:].min() >= 252


def test_a_clip_tagged_bt709_is_not_converted(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cogvideox_flax")
    found = patches(write(tmp_path / "a.mkv", grey(0.25, 0.5, 1), BT709, BT709))
    assert np.abs(found - 255 * grey(0.25, 0.5, 1)).max() <= 1
    assert not caplog.messages
