"""Models by hub id, against a small hub on this machine that speaks what huggingface_hub asks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

from cogvideox_flax.checkpoint import read_manifest, verify
from cogvideox_flax.lora import FILE_NAME
from tests.support import processes
from tests.support.reference import make_transformer, save_layout

ROOT = Path(__file__).resolve().parents[2]
MODEL = "some-owner/Tiny.Model-2b"
NEEDED = {
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/spiece.model",
    "tokenizer/tokenizer_config.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
}
CONFIGS = {name for name in NEEDED if name.endswith(".json")}


class Hub(ThreadingHTTPServer):
    """Repositories (id -> revision -> folder), and what was asked for."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, Path]] = {}
        self.gated: set[str] = set()
        self.status: dict[str, int] = {}  # id -> answer every request with this
        self.cut: set[str] = set()  # files whose next transfer breaks off half way
        self.stall: set[str] = set()  # files whose transfer stops half way until the client is gone
        self.asked: list[tuple[str, str, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, method: str = "GET") -> list[str]:
        """The files of which the contents (or with HEAD the facts) were asked for."""
        paths = [path for kind, path, _ in self.asked if kind == method]
        return [found[1] for path in paths if (found := re.fullmatch(r"/[^/]+/[^/]+/resolve/[^/]+/(.+)", path))]


def commit_of(folder: Path) -> str:
    return hashlib.sha1(str(folder).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path, {k.lower(): v for k, v in self.headers.items()}))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if not (api or file):
            return self.refuse(404, "RepoNotFound")
        name = (api or file)[1]
        if name in self.server.status:
            return self.refuse(self.server.status[name])
        if name not in self.server.repos:
            return self.refuse(401, "RepoNotFound")  # as the hub answers to strangers
        revisions = self.server.repos[name]
        revision = api[3] if api else file[2]
        folders = {commit_of(folder): folder for folder in revisions.values()} | revisions
        if revision not in folders:
            return self.refuse(404, "RevisionNotFound")
        folder = folders[revision]
        if file:
            return self.send_file(folder, file[3], gated=name in self.server.gated)
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        if api[2] == "revision":
            return self.send_json({"id": name, "sha": commit_of(folder), "siblings": [{"rfilename": n} for n in names]})
        facts = [{"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": "0" * 40} for n in names]
        return self.send_json(facts)

    def refuse(self, status: int, code: str = ""):
        self.send_response(status)
        self.send_header("Content-Length", "0")
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
        self.end_headers()

    def send_json(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_file(self, folder: Path, name: str, gated: bool):
        if gated:
            return self.refuse(403, "GatedRepo")
        if not (folder / name).is_file():
            return self.refuse(404, "EntryNotFound")
        data = (folder / name).read_bytes()
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit_of(folder))
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        for plan in (self.server.cut, self.server.stall):
            if name in plan:
                self.wfile.write(data[start : (start + len(data)) // 2])
                self.wfile.flush()
                while name in self.server.stall:
                    time.sleep(0.05)
                self.server.cut.discard(name)
                self.close_connection = True
                return
        self.wfile.write(data[start:])


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two commits of a model, with files in them that nobody needs."""
    folder = tmp_path_factory.mktemp("hub")
    layout = save_layout(folder / "one", "cogvideox-2b")
    (layout / "tokenizer" / "tokenizer_config.json").write_text('{"model_max_length": 226}')
    for name in ("README.md", ".gitattributes", "transformer/diffusion_pytorch_model.bin", "vae/old.ckpt"):
        (layout / name).write_text("not needed")
    shutil.copytree(layout, folder / "two")
    make_transformer("cogvideox-2b", seed=1).save_pretrained(folder / "two" / "transformer")
    return folder


@pytest.fixture
def server(sources) -> Iterator[Hub]:
    hub = Hub()
    hub.repos[MODEL] = {"main": sources / "one", "dev": sources / "two"}
    hub.repos["other/model"] = {"main": sources / "one" / "vae"}
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield hub
    hub.stall.clear()
    hub.shutdown()
    hub.server_close()


@pytest.fixture
def environment(server, tmp_path):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "hf_secret",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "COGVIDEOX_HOME": str(tmp_path / "home"),
    }


CLIENT = """
import json, sys
from cogvideox_flax import hub
from cogvideox_flax.errors import InputError
from cogvideox_flax.lora import find_adapter
answers = []
for name, where, *more in json.loads(sys.argv[1]):
    try:
        if name == "find_adapter":
            answers.append(str(find_adapter(where)))
            continue
        answer = getattr(hub, name)(where, *more)
        answers.append(str(answer) if name == "find" else answer.to_json())
    except InputError as e:
        answers.append("error: " + str(e))
print(json.dumps(answers))
"""


PROCESSES = """
import json, os, runpy, sys, traceback
from pathlib import Path
import av, jax, flax.nnx, optax, PIL.Image  # take long
import httpx, httpx2, filelock, tqdm.auto  # what huggingface_hub imports, which itself reads the environment
from cogvideox_flax.conversion.convert import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]))  # traces the modules
assert "huggingface_hub" not in sys.modules
sys.path[0] = os.getcwd()  # it was "", wherever a copy goes
for line in sys.stdin:
    how = json.loads(line)
    child = os.fork()
    if child == 0:
        os.environ.clear()
        os.environ.update(how["environment"])
        os.chdir(how["folder"])
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(how[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        code, sys.argv = 0, how["argv"]
        try:
            if sys.argv[0] == "-c":
                exec(sys.argv.pop(1), {})
            else:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as e:
            code = e.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def forks(sources, tmp_path_factory):
    """A process that runs each command in a copy of itself, with everything imported but huggingface_hub."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    folders = sources / "one", tmp_path_factory.mktemp("traced") / "native"
    with processes.running([sys.executable, "-c", PROCESSES, *folders], **pipes, cwd=ROOT) as process:
        yield process


@pytest.fixture
def run(forks, environment, tmp_path):
    """Runs a module as `python -m`, in `tmp_path`; or code, after "-c"."""

    def run(*argv, **changes):
        how = {"environment": environment | changes, "argv": list(map(str, argv)), "folder": str(tmp_path)}
        how |= {name: str(tmp_path / f"std{name}") for name in ("out", "err")}
        print(json.dumps(how), file=forks.stdin, flush=True)
        code = int(forks.stdout.readline())
        out, err = (Path(how[name]).read_text() for name in ("out", "err"))
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return run


@pytest.fixture
def client(run):
    """Asks `hub` in a process of its own, since huggingface_hub reads the environment when it is imported."""

    def client(*calls, **changes):
        done = run("-c", CLIENT, json.dumps(calls), **changes)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return client


def test_download_once_convert_once_then_offline(server, client, sources, tmp_path):
    (facts) = client(("peek", MODEL, None))
    assert facts[0]["transformer"]["layers"] == 2
    assert set(server.files()) == CONFIGS
    server.asked.clear()

    (native,) = client(("find", MODEL, None))
    assert set(server.files()) == NEEDED - CONFIGS
    assert len(server.files()) == len(NEEDED - CONFIGS)
    assert {headers.get("authorization") for _, _, headers in server.asked} == {"Bearer hf_secret"}
    native = Path(native)
    assert native.parent == tmp_path / "home"
    verify(native)
    assert (native / "tokenizer" / "spiece.model").is_file()
    commit = commit_of(sources / "one")
    for record in read_manifest(native).weights.values():
        assert record["source"]["hub_id"] == MODEL
        assert record["source"]["revision"] == commit

    server.asked.clear()
    again = client(("find", MODEL, None), ("peek", MODEL, None), HF_HUB_OFFLINE="1")
    assert again == [str(native), facts[0]]
    assert server.asked == []


def test_the_earlier_owner_of_a_repository_is_the_same_model(server, client, sources, tmp_path):
    """THUDM's are zai-org's: downloaded once, converted once, under either name and from either's cache."""
    old, new = "THUDM/Tiny", "zai-org/Tiny"
    server.repos |= {old: server.repos[MODEL], new: server.repos[MODEL]}
    (native,) = client(("find", old, None))
    assert Path(native).name.startswith("zai-org--Tiny-")
    assert read_manifest(native).weights["vae"]["source"]["hub_id"] == new
    server.asked.clear()
    assert client(("find", new, None), ("find", old, None), HF_HUB_OFFLINE="1") == [native, native]
    # what was downloaded and converted before under the other name
    caches = tmp_path / "hf" / "hub", tmp_path / "home"
    for cache, before, after in (
        (caches[0], "models--zai-org--", "models--THUDM--"),
        (caches[1], "zai-org--", "THUDM--"),
    ):
        for path in cache.glob(f"{before}Tiny*"):
            path.rename(path.with_name(path.name.replace(before, after)))
    moved = native.replace("zai-org--", "THUDM--")
    assert client(("find", new, None), ("find", old, None), HF_HUB_OFFLINE="1") == [moved, moved]
    assert server.asked == []


def test_a_server_that_is_down_does_not_matter_once_cached(server, client):
    (native,) = client(("find", MODEL, None))
    server.shutdown()
    server.server_close()
    assert client(("find", MODEL, None)) == [native]


def test_the_converted_form_outlives_the_download(server, client, tmp_path):
    (native,) = client(("find", MODEL, "main"))
    shutil.rmtree(tmp_path / "hf")
    server.asked.clear()
    assert client(("find", MODEL, "main")) == [native]
    assert set(server.files()) == CONFIGS
    # but a damaged one needs the weights again
    (Path(native) / "vae" / "model.safetensors").write_bytes(b"")
    assert client(("find", MODEL, "main")) == [native]
    assert set(server.files()) == NEEDED
    verify(native)


def test_revisions(server, client, sources):
    commits = [commit_of(sources / name) for name in ("one", "two")]
    calls = [("find", MODEL, revision) for revision in ("main", "dev", *commits)]
    main, dev, *by_commit = client(*calls)
    assert main != dev
    assert by_commit == [main, dev]
    for native, commit in ((main, commits[0]), (dev, commits[1])):
        assert read_manifest(native).weights["transformer"]["source"]["revision"] == commit
    one, two = (read_manifest(native).weights for native in (main, dev))
    assert one["transformer"]["sha256"] != two["transformer"]["sha256"]
    assert one["vae"]["sha256"] == two["vae"]["sha256"]


def test_a_transformer_of_a_repository_in_place_of_the_models(server, client, sources, tmp_path):
    """Of a model, or alone in its own repository: only its files are downloaded, and it is converted once."""
    server.repos["tuned/alone"] = {"main": sources / "two" / "transformer"}
    server.repos["tuned/model"] = {"main": sources / "two"}
    (base,) = client(("find", MODEL, "main"))
    (expected,) = client(("find", MODEL, "dev"))
    wanted = read_manifest(expected).weights["transformer"]["sha256"]
    for name, file in (("tuned/alone", "diffusion_pytorch_model.safetensors"), ("tuned/model", None)):
        server.asked.clear()
        (native,) = client(("find", MODEL, "main", name))
        downloaded = [path for path in server.files() if path.endswith("safetensors")]
        assert downloaded == [file or "transformer/diffusion_pytorch_model.safetensors"]
        weights = read_manifest(native).weights
        assert weights["transformer"]["sha256"] == wanted
        assert weights["transformer"]["source"]["hub_id"] == name
        assert weights["vae"] == read_manifest(base).weights["vae"]
        verify(native)
        assert client(("find", MODEL, "main", name), HF_HUB_OFFLINE="1") == [native]
    (error,) = client(("peek", MODEL, None, "other/model"))
    assert "holds vae alone; expected the transformer of a cogvideox model" in error


def test_refusals_say_what_to_do(server, client):
    server.repos["asks/first"] = server.repos[MODEL]
    server.gated.add("asks/first")
    server.status |= {"for/others": 403, "wrong/token": 401, "broken/hub": 500}
    names = ["nobody/nothing", "asks/first", "for/others", "wrong/token", "broken/hub", "other/model", "a/b--c..d"]
    errors = client(*(("find", name, None) for name in names), ("peek", MODEL, "v9"))
    expected = [
        r"no model 'nobody/nothing', or none that this token may read .* does not exist here.*zai-org/CogVideoX-2b",
        r"asks/first asks for its terms to be accepted: .* HF_TOKEN or run `hf auth login`",
        r"refuses for/others with this token \(403\)",
        r"wrong/token",
        r"downloading broken/hub failed .*500.*Run the same command again",
        r"other/model is not a model: expected a native checkpoint",
        r"'a/b--c\.\.d' is not a hub id",
        r"some-owner/Tiny.Model-2b has no revision 'v9'; expected a branch, a tag or a commit",
    ]
    for error, pattern in zip(errors, expected, strict=True):
        assert re.match("error: .*" + pattern, error), (error, pattern)
    assert not any(name.endswith("safetensors") for name in server.files())


def test_an_adapter_of_the_hub(server, client, tmp_path):
    """Only its file, and PEFT's config beside it, is downloaded, once; of several, one has to be named."""
    folders = {name: tmp_path / "adapters" / name for name in ("usual", "only", "several", "none")}
    for name, files in (
        ("usual", [FILE_NAME, "other.safetensors", "big.bin"]),
        ("only", ["weights/style.safetensors", "weights/adapter_config.json", "README.md"]),
        ("several", ["a.safetensors", "b/c.safetensors"]),
        ("none", ["README.md"]),
    ):
        for file in files:
            path = folders[name] / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name}/{file}")
        server.repos[f"owner/{name}"] = {"main": folders[name]}
    names = ["owner/usual", "owner/only", "owner/several/b/c.safetensors"]
    found = client(*(("find_adapter", name, None) for name in names))
    contents = ["usual/" + FILE_NAME, "only/weights/style.safetensors", "several/b/c.safetensors"]
    assert [Path(path).read_text() for path in found] == contents
    files = [content.split("/", 1)[1] for content in contents]
    assert sorted(server.files()) == sorted([*files, "weights/adapter_config.json"])
    assert client(*(("find_adapter", name, None) for name in names[:1]), HF_HUB_OFFLINE="1") == found[:1]
    wrong = ["owner/several", "owner/none", "owner/usual/x.safetensors", "owner/nothing"]
    several, none, other, nothing = client(*(("find_adapter", name, None) for name in wrong))
    assert several == (
        "error: owner/several has 2 .safetensors files; it has a.safetensors, b/c.safetensors, to be named as "
        "owner/several/a.safetensors"
    )
    assert none == "error: owner/none has 0 .safetensors files"
    assert "owner/usual has no x.safetensors; it has other.safetensors, pytorch_lora_weights.safetensors" in other
    assert "the hub has no model 'owner/nothing'" in nothing
    server.asked.clear()
    local = ["missing.safetensors", "folder/missing.safetensors", f"{tmp_path}/adapters/none/a/b.safetensors"]
    assert client(*(("find_adapter", name, None) for name in local)) == local
    assert server.asked == []


def test_nothing_cached_and_nobody_there(server, client, tmp_path):
    message = r"error: .* is not complete in the hub's cache, and the hub cannot be reached"
    calls = [("peek", MODEL, None), ("find", MODEL, None)]
    offline = client(*calls, HF_HUB_OFFLINE="1")
    assert all(re.match(message + ".*Unset HF_HUB_OFFLINE", error) for error in offline)
    down = client(*calls, HF_ENDPOINT="http://127.0.0.1:9")
    assert all(re.match(message, error) for error in down)
    # configs alone do not make a model
    client(("peek", MODEL, None))
    (error,) = client(("find", MODEL, None), HF_HUB_OFFLINE="1")
    assert re.match(message, error)
    assert not list((tmp_path / "home").glob("*/config.json"))


def test_a_broken_connection_is_taken_up_where_it_broke(server, run, sources):
    name = "transformer/diffusion_pytorch_model.safetensors"
    data = bytes(range(256)) * 100_000  # more than the client's pieces of 10 MiB
    (sources / "big" / "transformer").mkdir(parents=True)
    (sources / "big" / name).write_bytes(data)
    server.repos["big/file"] = {"main": sources / "big"}
    server.cut.add(name)
    code = (
        "from cogvideox_flax.conversion.download import download; "
        "print(download('big/file', None, ('*/*',), progress=False).folder)"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / name).read_bytes() == data
    ranges = [headers.get("range") for kind, path, headers in server.asked if kind == "GET" and path.endswith(name)]
    assert ranges == [None, f"bytes={10 * 2**20}-"]


def test_a_killed_download_keeps_the_files_that_were_complete(server, environment, client, tmp_path):
    name = "transformer/diffusion_pytorch_model.safetensors"
    server.stall.add(name)
    command = [sys.executable, "-c", CLIENT, json.dumps([("find", MODEL, None)])]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    snapshots = tmp_path / "hf" / "hub"
    with processes.running(command, **quiet, env=environment):  # and killed
        patience = time.monotonic() + 60
        while {str(p.relative_to(p.parents[1])) for p in snapshots.glob("*/snapshots/*/*/*")} < NEEDED - {
            name,
            "model_index.json",
        }:
            assert time.monotonic() < patience
            time.sleep(0.1)
    server.stall.clear()
    assert not (tmp_path / "home").exists() or not list((tmp_path / "home").glob("*/config.json"))
    server.asked.clear()
    (native,) = client(("find", MODEL, None))
    assert server.files() == [name]
    verify(native)


def test_conversion_of_one_component(server, run, tmp_path):
    done = run("conversion", MODEL, "dst", "--component", "vae", "--revision", "dev")
    assert (done.returncode, done.stdout) == (0, "dst\n")
    assert {name for name in server.files() if "safetensors" in name} == {"vae/diffusion_pytorch_model.safetensors"}
    assert set(read_manifest(tmp_path / "dst").weights) == {"vae"}
    done = run("conversion", "nobody/nothing", "dst2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the hub has no model 'nobody/nothing'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "dst2").exists()


def test_a_release_is_named_as_the_doctor_names_it(server, run, client, tmp_path):
    """In every command; a folder of that name comes first."""
    server.repos["zai-org/CogVideoX-2b"] = server.repos[MODEL]
    native, facts = client(("find", "cogvideox-2b", None), ("peek", "CogVideoX-2B", None))
    assert read_manifest(Path(native)).weights["vae"]["source"]["hub_id"] == "zai-org/CogVideoX-2b"
    assert facts["transformer"]["layers"] == 2
    options = ("--model", "cogvideox-2b", "--dtype", "float32", "--quiet")
    for command in (
        ("encode", "a circle", "--dir", "run", *options),
        ("quantize", "cogvideox-2b", "small", "--component", "transformer"),
    ):
        done = run("cogvideox_flax", *command, HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stderr
    assert read_manifest(tmp_path / "small").quantized("transformer") == "int8"
    settings = json.loads((tmp_path / "run" / "generation_config.json").read_text())
    assert settings["model_id"] == "zai-org/CogVideoX-2b"
    (tmp_path / "cogvideox-2b").mkdir()
    done = run("cogvideox_flax", "info", "cogvideox-2b")
    assert done.returncode == 2 and "cogvideox-2b is not a model" in done.stderr


def test_a_run_remembers_its_revision(server, run, sources, tmp_path):
    options = ("--model", MODEL, "--revision", "dev", "--dtype", "float32", "--quiet")
    done = run("cogvideox_flax", "encode", "a circle", "--dir", "run", *options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "run/stage1_embeddings.safetensors\n", "")
    size = ("--num-frames", 9, "--height", 32, "--width", 48, "--steps", 1)
    done = run("cogvideox_flax", "denoise", "--dir", "run", *size)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "run" / "generation_config.json").read_text())
    assert (config["model_id"], config["revision"]) == (MODEL, "dev")
    (native,) = (tmp_path / "home").glob("*/config.json")  # main was never made
    assert json.loads(native.read_text())["weights"]["vae"]["source"]["revision"] == commit_of(sources / "two")


@pytest.mark.parametrize(
    "command", ["train", "encode", *(pytest.param(name, marks=pytest.mark.further) for name in ("plan", "info"))]
)
def test_every_command_that_opens_a_model_takes_its_revision(server, run, tmp_path, command):
    (tmp_path / "clips").mkdir()
    (tmp_path / "run.toml").write_text('clips = "clips"\nout = "out"\n[loop]\nsteps = 1\n')
    more = {"train": ["--config", "run.toml", "--check"], "encode": ["a", "--dir", "run"]}.get(command, [])
    named = ["--model", MODEL] if command != "info" else [MODEL]
    done = run("cogvideox_flax", command, *more, *named, "--revision", "v9")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{MODEL} has no revision 'v9'; expected a branch, a tag or a commit" in done.stderr


def test_bad_options_download_no_weights(server, run, tmp_path):
    done = run("cogvideox_flax", "generate", "a", "--model", MODEL, "--num-frames", 10)
    assert done.returncode == 2
    assert "Nearest: 9 and 17" in done.stderr
    assert set(server.files()) == CONFIGS
    assert not list((tmp_path / "home").glob("*/config.json"))
