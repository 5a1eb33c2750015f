"""Compiled programs on disk: only what the code in memory makes, only from a private folder."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from cogvideox_flax import version
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.pipeline import CogVideoXPipeline
from cogvideox_flax.io.paths import NotPrivateError
from cogvideox_flax.runtime.compile_cache import SUFFIX, CompileCache, program_name
from tests.support import processes

ROOT = Path(__file__).resolve().parents[2]


def compiled(shift: float = 1.0):
    return jax.jit(lambda x: {"sum": (x + shift, None), "list": [x]}).lower(jnp.float32(1)).compile()


def never():
    raise AssertionError("compiled")


@pytest.fixture
def cache(tmp_path):
    return CompileCache(tmp_path / "programs")


def kept(cache: CompileCache, what: str = "program", **options) -> Path:
    """Keeps a program; returns its file."""
    before = set(cache.folder.iterdir())
    cache.get(what, (jnp.float32(1),), None, lambda: compiled(**options))
    (path,) = set(cache.folder.iterdir()) - before
    return path


def load(cache: CompileCache, what: str = "program", make=never):
    return cache.get(what, (jnp.float32(1),), None, make)


def test_a_program_comes_back_with_the_structure_of_its_results(cache):
    path = kept(cache)
    assert path.suffix == SUFFIX and path.stat().st_mode & 0o777 == 0o600
    result = load(cache)(jnp.float32(1))
    assert float(result["sum"][0]) == 2 and result["sum"][1] is None and float(result["list"][0]) == 1


# --- the code in memory ---

GENERATE = """
import sys
from pathlib import Path
from cogvideox_flax.runtime.compile_cache import CompileCache, program_name
import jax, jax.numpy as jnp
module = Path(sys.argv[1]) / "cogvideox_flax" / "nn" / "rope.py"
cache = CompileCache(Path(sys.argv[2]))
for edited in (False, True):
    if edited:
        module.write_text(module.read_text() + "\\n# an upgrade")
    x = jnp.float32(1)
    cache.get(str(edited), (x,), None, lambda: jax.jit(jnp.sin).lower(x).compile())
    print(program_name("p", (x,), None), len(list(cache.folder.iterdir())))
"""


def test_a_program_of_old_code_is_not_kept_under_the_new_codes_name(tmp_path):
    """The source changes between import and compilation, as in an upgrade during a download."""
    package = shutil.copytree(
        ROOT / "cogvideox_flax", tmp_path / "copy" / "cogvideox_flax", ignore=shutil.ignore_patterns("__pycache__")
    )

    def run() -> list[list[str]]:
        command = [sys.executable, "-c", GENERATE, str(package.parent), str(tmp_path / "programs")]
        env = {**os.environ, "PYTHONPATH": str(package.parent)}
        done = processes.run(command, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("have changed since this process started") == 1
        return [line.split() for line in done.stdout.splitlines()]

    (old, _), after_the_edit = run()
    assert after_the_edit == ["None", "1"]  # nothing was kept since
    (new, _), _ = run()  # a process of the new code
    assert old != new and "None" not in (old, new)


def test_versions_are_those_in_memory(monkeypatch):
    args = (jnp.float32(1),)
    before = program_name("p", args, None)
    monkeypatch.setattr(jax, "__version__", "99")
    assert program_name("p", args, None) != before
    monkeypatch.setattr(version, "_IMPORTED", {})
    assert program_name("p", args, None) is None


def test_flags_in_a_file_count_by_what_they_say(tmp_path, monkeypatch):
    flags = tmp_path / "flags"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", str(flags))
    names = set()
    for text in ("--one=1", "--one=2"):
        flags.write_text(text)
        names.add(program_name("p", (jnp.float32(1),), None))
    assert len(names) == 2


# --- other people's files ---


@pytest.mark.parametrize("how", ["others", "link", "file", "owner", "above"])
def test_a_folder_that_others_could_change_is_refused(tmp_path, how):
    if how == "owner" and os.geteuid() != 0:
        pytest.skip("only root gives folders away")
    folder = tmp_path / "shared" / "programs"
    folder.mkdir(parents=True)
    if how == "others":
        folder.chmod(0o777)
    elif how == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif how == "file":
        folder.rmdir()
        folder.touch()
    elif how == "owner":
        os.chown(folder, 12345, -1)
    else:
        folder.parent.chmod(0o777)  # without the sticky bit, anybody may put another folder there
    with pytest.raises(NotPrivateError, match="programs"):
        CompileCache(folder)
    if how == "above":
        folder.parent.chmod(0o1777)
        CompileCache(folder)


def test_the_pipeline_says_so(tmp_path):
    folder = tmp_path / "programs"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(InputError, match=r"other users can write to .*name a folder of your own"):
        CogVideoXPipeline.from_pretrained(None, "float32").keep_programs(folder)


def test_a_cut_or_empty_program_is_made_again(cache):
    path = kept(cache)
    for end in (0, 10, 60, -1):
        path.write_bytes(path.read_bytes()[:end])
        with pytest.raises(AssertionError, match="compiled"):
            load(cache)
        load(cache, make=compiled)
