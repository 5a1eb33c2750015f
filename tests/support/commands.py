"""Fixtures for tests of the shell commands."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from cogvideox_flax import hub
from cogvideox_flax.cli import main
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.generate import journey
from cogvideox_flax.generate.open_model import OpenModel
from cogvideox_flax.generate.request import STAGES
from tests.support import processes
from tests.support.reference import save_layout

PROMPT = "a small red circle moves to the left"
SIZE = ["--num-frames", 9, "--height", 32, "--width", 48]
QUICK = [*SIZE, "--steps", 2, "--dtype", "float32"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where converted checkpoints are kept."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("COGVIDEOX_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def layout(tmp_path_factory, home):
    return save_layout(tmp_path_factory.mktemp("a mödel") / "2b", "cogvideox-2b")


@pytest.fixture(scope="module")
def layout_5b(tmp_path_factory, home):
    return save_layout(tmp_path_factory.mktemp("models") / "5b", "cogvideox-5b")


@pytest.fixture(scope="module")
def native(layout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("native") / "2b"
    convert(layout, folder)
    return folder


@pytest.fixture
def run(capsys):
    """Runs one command; returns its exit code, stdout and stderr."""

    def run(*argv):
        capsys.readouterr()
        try:
            code = main([str(arg) for arg in argv])
        except SystemExit as e:  # argparse
            code = e.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


@pytest.fixture
def paths(run):
    """Runs one command that must succeed; returns the paths that it prints."""

    def paths(*argv):
        code, out, err = run(*argv)
        assert code == 0, err
        return [Path(line) for line in out.splitlines()]

    return paths


@pytest.fixture
def work(monkeypatch):
    """Records which stages are really computed."""
    done = []

    def recorded(name, real):
        def record(*args, **kwargs):
            done.append(name)
            return (yield from real(*args, **kwargs))

        return record

    for name in STAGES:
        monkeypatch.setattr(journey, name, recorded(name, getattr(journey, name)))
    return done


@pytest.fixture
def cheap_decoder(monkeypatch):
    """In place of the VAE, for tests of what is around it: each latent frame's first channel, in grey."""

    def decode(model, latents, **_):
        yield from ()
        frames = np.repeat(np.asarray(latents)[..., :1], 4, 1)[:, 3 * (latents.shape[1] % 2) :]
        return np.clip(60 * np.repeat(frames.repeat(8, 2).repeat(8, 3), 3, -1) + 128, 0, 255).astype(np.uint8)

    monkeypatch.setattr(journey, "decode", decode)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and directory below a folder, with size and time of change."""
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in folder.rglob("*") if p.name != ".lock"}


@pytest.fixture
def refused(run, tmp_path, monkeypatch):
    """Runs one command that must be refused, cheaply, with one message, leaving everything as it was."""

    def refused(*argv, converts=False):
        with monkeypatch.context() as patch:
            patch.setenv("COGVIDEOX_HOME", str(tmp_path / "refused home"))

            def begun(*args, **kwargs):
                raise AssertionError("heavy work was begun")

            patch.setattr(OpenModel, "component", begun)
            if not converts:
                patch.setattr(hub, "convert", begun)
            before = tree(tmp_path)
            code, out, err = run(*argv)
            after = {path: facts for path, facts in tree(tmp_path).items() if "refused home" not in path}
        assert code == 2, err
        assert out == ""
        assert after == before
        assert not list(tmp_path.glob("refused home/*/config.json"))
        assert err.count("error: ") == 1
        return err

    return refused


def generate(model, out, *more, prompts=(PROMPT,)):
    """The command line of a quick run."""
    return ["generate", *prompts, "--model", model, "--out", out, *QUICK, *more]


def python(*argv, inherit=True, **kwargs):
    """Runs a real process; inherit: with this one's environment."""
    env = {**(os.environ if inherit else {}), "PYTHONPATH": str(ROOT), **kwargs.pop("env", {})}
    return processes.run([sys.executable, *argv], env=env, **kwargs)


@pytest.fixture(scope="module")
def staged(native, tmp_path_factory):
    """A directory in which the three stages were run one after the other."""
    folder = tmp_path_factory.mktemp("staged")
    quick = ["--steps", "2", *map(str, SIZE)]
    assert main(["encode", PROMPT, "--model", str(native), "--dtype", "float32", "--dir", str(folder), "--quiet"]) == 0
    assert main(["denoise", "--dir", str(folder), "--quiet", *quick]) == 0
    assert main(["decode", "--dir", str(folder), "--quiet"]) == 0
    return folder


@pytest.fixture
def copied(staged, tmp_path):
    return shutil.copytree(staged, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
