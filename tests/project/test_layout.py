"""The rooms and which way imports point, read from the source."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support import processes

ROOT = Path(__file__).resolve().parents[2]

FLOORS = (
    {"errors", "version"},
    {"io"},
    {"config", "tokenizer"},
    {"sharding", "schedulers"},
    {"nn", "attention"},
    {"models"},
    {"checkpoint", "runtime"},
    {"conversion"},
    {"hub"},
    {"lora"},
    {"generate"},
    {"plan"},
    {"training"},
    {"serve"},
    {"cli"},
    {"__main__"},
)
"""The rooms of cogvideox_flax from the ground up: a room imports from its own floor or below."""

FORBIDDEN_AT_RUN_TIME = {"torch", "diffusers", "transformers"}


@cache
def syntax(path: Path) -> list[ast.AST]:
    """All nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere, functions included."""
    found = set()
    for node in syntax(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


def files(package: str) -> list[Path]:
    """The files of a package; cogvideox_flax/conversion is a link, which is not followed."""
    return sorted((ROOT / package).rglob("*.py"))


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "cogvideox_flax" and len(parts) > 1 else None


def floor(name: str) -> int:
    matches = [i for i, names in enumerate(FLOORS) if name in names]
    assert matches, f"cogvideox_flax/{name} has no place in FLOORS"
    return matches[0]


@pytest.mark.parametrize(
    "path", [*files("cogvideox_flax"), *files("conversion")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_imports_point_down(path):
    parts = path.relative_to(ROOT).parts
    own = "__main__" if path.name == "__main__.py" else parts[parts[0] == "cogvideox_flax"].removesuffix(".py")
    if own == "__init__":
        return  # the public names, imported on first use
    for module in imports(path):
        other = room(module)
        if other is not None and other not in ("__init__", own):
            names = {name for names in FLOORS for name in names}
            assert other in names, f"{module} has no place in FLOORS"
            assert floor(other) <= floor(own), f"{own} imports {other}, which stands above it"


FAMILIES = {"cogvideox", "hunyuan_video15"}


def test_a_family_is_imported_by_its_own_folder_alone():
    known = [f"cogvideox_flax.models.{family}" for family in FAMILIES]
    for path in files("cogvideox_flax"):
        parts = path.relative_to(ROOT / "cogvideox_flax").parts
        named = {m for m in imports(path) if any(m == name or m.startswith(f"{name}.") for name in known)}
        if parts[:2] in {("models", family) for family in FAMILIES}:
            continue
        assert not named, f"{path} imports {named}"
    for path in files("conversion"):
        tables = {f"cogvideox_flax.conversion.{family}" for family in FAMILIES}
        own = path.relative_to(ROOT / "conversion").parts[0] in FAMILIES
        named = {m for m in imports(path) if any(m.startswith(name) for name in (*known, *tables))}
        assert own or not named, f"{path} imports {named}"


def test_a_run_imports_its_own_family_alone():
    code = """
import sys
from cogvideox_flax import Pipeline
Pipeline.from_pretrained()("a red circle", num_inference_steps=1, progress=False)
imported = [name for name in sys.modules if name.startswith("cogvideox_flax.") and "hunyuan_video15" in name]
assert not imported, imported
"""
    run = processes.run([sys.executable, "-c", code], cwd=ROOT)
    assert run.returncode == 0, run.stderr


def test_conversion_needs_only_configs_models_and_checkpoint():
    allowed = {"conversion", "config", "models", "checkpoint", "errors", "io"}
    for path in files("conversion"):
        rooms = {room(m) for m in imports(path)} - {None}
        rooms -= {"cli"} if path.name == "__main__.py" else set()
        assert rooms <= allowed, f"{path.name} imports {rooms - allowed}"


def test_who_imports_conversion():
    """What opens a source checkpoint, the command, and adapters: their maps have a source checkpoint's names."""
    for path in files("cogvideox_flax"):
        if "conversion" in {room(m) for m in imports(path)}:
            assert path.name in ("hub.py", "convert.py") or path.parent.name == "lora", path


def test_no_module_has_two_names():
    """conversion/ is imported as cogvideox_flax.conversion: the other name may be a module of the user's."""
    for package in ("cogvideox_flax", "conversion", "benchmarks", "weights", "tests"):
        for path in files(package):
            assert "conversion" not in {m.split(".")[0] for m in imports(path)}, path


def test_no_torch_at_run_time():
    for package in ("cogvideox_flax", "conversion"):
        for path in files(package):
            assert not {m.split(".")[0] for m in imports(path)} & FORBIDDEN_AT_RUN_TIME, path


def test_jit_is_at_home_in_the_runtime_and_kernels():
    homes = {"compile.py"}
    for path in files("cogvideox_flax"):
        if path.name not in homes and not {"training", "attention", "plan"} & set(path.relative_to(ROOT).parts):
            text = path.read_text()
            assert "jax.jit(" not in text and "@jax.jit" not in text and "nnx.jit" not in text, path


def test_models_name_logical_axes_and_never_a_mesh():
    for path in files("cogvideox_flax/models"):
        text = path.read_text()
        assert not any(name.startswith("jax.sharding") for name in imports(path)), path
        assert not re.search(r"[\"'](dp|sp|tp)[\"']|mesh", text, re.IGNORECASE), path


def test_every_wait_for_a_process_or_thread_has_a_limit():
    """In tests and benchmarks: `run`, `communicate`, `wait` and `join` are told one."""
    for path in [*files("tests"), *files("benchmarks")]:
        for node in syntax(path):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            given = {keyword.arg for keyword in node.keywords}
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            if node.func.attr in ("communicate", "wait", "join"):
                assert node.args or "timeout" in given, f"{where} may wait forever"
            if ast.unparse(node.func) in ("subprocess.run", "subprocess.check_output"):
                assert "timeout" in given, f"{where} may wait forever"


def test_the_command_line_and_the_server_answer_without_jax():
    code = """
import sys
from cogvideox_flax import cli
from cogvideox_flax.cli import serve
import cogvideox_flax.serve.api
serve.serve = lambda args: None  # what it imports is imported by now
assert cli.main(["serve"]) == 0
found = {"jax", "flax", "numpy", "PIL", "jaxtyping", "huggingface_hub"} & set(sys.modules)
assert not found, found
"""
    run = processes.run([sys.executable, "-c", code], cwd=ROOT)
    assert run.returncode == 0, run.stderr


def test_import_is_quick_and_starts_no_device():
    code = """
import time, jax, flax.nnx
start = time.process_time()
import cogvideox_flax
from cogvideox_flax import CogVideoXPipeline
import cogvideox_flax.cli
seconds = time.process_time() - start
from jax._src import xla_bridge
assert not xla_bridge._backends, 'a device was started'
import sys
assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)
print(seconds)
"""
    run = processes.run([sys.executable, "-c", code], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 2
