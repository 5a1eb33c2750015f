"""Commands with the embedded models, compiled quickly: they compile for longer than they run."""

from __future__ import annotations

import pytest
from PIL import Image

from cogvideox_flax import hub
from cogvideox_flax.cli import main
from cogvideox_flax.io.video import read_video
from weights.toy_world.judge import image_to_video as judge_image_to_video

IMAGE_TO_VIDEO = hub.EMBEDDED.with_name("embedded_image_to_video")


@pytest.mark.skipif(not IMAGE_TO_VIDEO.is_dir(), reason=f"no embedded checkpoint at {IMAGE_TO_VIDEO}")
def test_an_image_without_a_model_takes_the_embedded_one(tmp_path, monkeypatch, capsys):
    """As on a fresh machine: no model is named; stages on disk remember which it was."""
    monkeypatch.chdir(tmp_path)
    Image.fromarray(judge_image_to_video.make_items(1, "same")[0].image).save("first.png")
    options = ["--image", "first.png", "--steps", "2", "--dtype", "float32"]
    assert main(["generate", "a red circle moves up", *options]) == 0
    assert read_video("video.mp4")[0].shape == (17, 64, 64, 3)
    assert main(["encode", "a red circle moves up", "--image", "first.png", "--dir", "run"]) == 0
    assert main(["denoise", "--dir", "run", "--steps", "2"]) == 0
    assert '"embedded-image-to-video"' in (tmp_path / "run" / "generation_config.json").read_text()
