"""The installed package: what is in it, and that it lives beside whatever a user's folder holds."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import processes

ROOT = Path(__file__).resolve().parents[2]

MODELS = ("embedded", "embedded_image_to_video")
COMPONENTS = ("text_encoder", "transformer", "vae")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built from a copy of the sources without the network."""
    pytest.importorskip("setuptools", "77", reason="setuptools 77, which builds the wheel, is not installed")
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in ("cogvideox_flax", "conversion", *(f"weights/{folder.name}" for folder in ROOT.glob("weights/emb*"))):
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, sources / name)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    built = processes.run([sys.executable, "-c", code, out], cwd=sources)
    assert built.returncode == 0, built.stderr
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder where an installer puts the contents of the wheel."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as contents:
        contents.extractall(folder)
    return folder


def test_the_wheel_holds_one_package_with_its_tables_and_models(wheel):
    with zipfile.ZipFile(wheel) as contents:
        names = set(contents.namelist())
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"cogvideox_flax"}
    package = ROOT / "cogvideox_flax"
    code = [f"cogvideox_flax/{path.relative_to(package)}" for path in package.rglob("*.py")]
    code += [f"cogvideox_flax/{path.relative_to(ROOT)}" for path in (ROOT / "conversion").rglob("*.py")]
    files = [f"{model}/{part}/model.safetensors" for model in MODELS for part in COMPONENTS]
    files += [f"{model}/{name}" for model in MODELS for name in ("config.json", "tokenizer/spiece.model")]
    files += ["embedded_four_steps/pytorch_lora_weights.safetensors"]
    assert {*code, *(f"cogvideox_flax/weights/{name}" for name in files)} <= names


SCRIPT = """
import importlib, pkgutil, sys
import cogvideox_flax
from cogvideox_flax import hub
from cogvideox_flax.lora import find_adapter

for module in pkgutil.walk_packages(cogvideox_flax.__path__, "cogvideox_flax."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert hub.find(None).is_relative_to(sys.argv[1]), hub.find(None)
find_adapter("embedded-four-steps")
assert len(cogvideox_flax.Pipeline.from_pretrained().tokenizer(["a red circle"])) == 1
assert not {"conversion", "weights"} & set(sys.modules)
"""


@pytest.mark.parametrize("where", ["checkout", "installed"])
def test_a_script_may_lie_beside_names_of_the_checkout(where, installed, tmp_path):
    library = ROOT if where == "checkout" else installed
    for name in ("conversion.py", "weights/__init__.py", "weights/embedded/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('a file of the user was run')\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(library)}
    done = processes.run([sys.executable, "script.py", library], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
